# SPDX-License-Identifier: Apache-2.0
"""Scalings: how the largest eigenvalue is estimated before an iteration starts. One scaling, one file."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from matroots.scaling.frobenius import Frobenius
from matroots.scaling.multi_power import MultiPower
from matroots.scaling.power import Power

__all__ = ["SCALINGS", "Frobenius", "MultiPower", "Power", "Scaling"]


class Scaling(Protocol):
    """An estimate of the largest eigenvalue; the caller guards it with a proven bound."""

    @property
    def matmuls(self) -> int:
        """Products of ``n x n`` matrices that one estimate costs."""
        ...

    def estimate(self, A: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return the scale of each member of symmetric ``(b, n, n)``; float64 ``(b,)``."""
        ...


SCALINGS: dict[str, type[Frobenius] | type[Power] | type[MultiPower]] = {
    "frobenius": Frobenius,
    "power": Power,
    "multi_power": MultiPower,
}
