# SPDX-License-Identifier: Apache-2.0
"""What the bench is asked to do."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from matroots.bench._matrices import batch_size

DTYPES = {"float32": torch.float32, "float64": torch.float64}


class Cell(NamedTuple):
    """One batch and one root: what all contestants are given."""

    n: int
    dtype: torch.dtype
    condition: float
    p: float

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}, p = {self.p:g}, n = {self.n}, condition {power_label(self.condition)}"


def power_label(value: float) -> str:
    """Return a condition number as a user would write it.

    >>> power_label(1e6), power_label(250)
    ('1e6', '2.5e2')
    """
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


@dataclass(frozen=True)
class Settings:
    """The options of the command line, checked. ``budget`` and ``limit`` are seconds, of a cell and of everything."""

    out: Path
    n: tuple[int, ...]
    p: tuple[float, ...]
    dtypes: tuple[torch.dtype, ...]
    conditions: tuple[float, ...]
    methods: tuple[str, ...]
    peers: bool
    matmul_dtypes: tuple[torch.dtype, ...]
    device: torch.device
    threads: int
    megabytes: float
    budget: float
    limit: float
    members: int
    seed: int
    plain: bool

    def cells(self) -> Iterator[Cell]:
        """Yield the cells, small matrices first: how long something took tells how long it will take."""
        grid = itertools.product(sorted(self.n), self.dtypes, self.conditions, self.p)
        return (Cell(*values) for values in grid)

    def batch(self, cell: Cell) -> int:
        """Return the size of a cell's batch."""
        return batch_size(cell.n, cell.dtype, self.megabytes)
