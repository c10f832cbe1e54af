# SPDX-License-Identifier: Apache-2.0
"""Who holds and who owns what: the rows of each parameter that a rank has, and the blocks that it updates.

Every rank computes the same layout from shapes and options alone. A rank owns *parts*: some blocks of one shape of one parameter, or rows that AdamW updates.
Whatever travels between an owner and a holder is cut by :func:`cells`, in the same order on both sides.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from dash_optim.balance import Assignment, Item
from dash_optim.blocks import BlockClass, Geometry, matrix_view

Rows = tuple[int, int]
"""The first row of dimension 0, and one past the last."""

Index = tuple[slice | int, ...]


@dataclass(frozen=True)
class Part:
    """What one rank owns of one parameter.

    Attributes:
        param: its number.
        blocks: the blocks' shape and their grid in the parameter; None for rows that AdamW updates.
        places: the numbers of the blocks within that grid, ascending; (first row, one past the last) for AdamW.
        shape: of what is owned: ``(blocks, *block)``, or ``(rows, ...)``.
    """

    param: int
    blocks: BlockClass | None
    places: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def rows(self) -> Sequence[int]:
        """Which rows of the state of its parameter it has: numbers of blocks, or of rows that AdamW updates."""
        return self.places if self.blocks is not None else range(*self.places)

    def owns(self, key: str) -> bool:
        """Whether a tensor of the parameter's state is about this part: names of blocks' tensors begin with their shape."""
        shape, dot, _ = key.rpartition(".")
        return (
            shape == self.blocks.name if self.blocks is not None else not dot and key not in ("step", "calls")
        )

    @property
    def geometry(self) -> Geometry:
        """The part as a parameter of its own: its blocks one below the other."""
        if self.blocks is None:
            return Geometry(self.shape, ())
        size, dims = self.blocks.shape, len(self.blocks.shape)
        own = replace(
            self.blocks,
            grid=(len(self.places),) + (1,) * (dims - 1),
            offset=(0,) * dims,
            first=(0,) * dims,
            chosen=tuple(self.blocks.numbers[list(self.places)].tolist()),
        )
        return Geometry((len(self.places) * size[0], *size[1:]), (own,))


def cells(part: Part, rows: Rows) -> Iterator[tuple[Index, Index]]:
    """Yield what a holder of some rows of a parameter has of a part: an index into the part, and one into the holder's rows as :meth:`Holding.seen` shows them."""
    low, high = rows
    if part.blocks is None:
        start, stop = max(part.places[0], low), min(part.places[1], high)
        if start < stop:
            first = part.places[0]
            yield (slice(start - first, stop - first),), (slice(start - low, stop - low),)
        return
    size, offset = part.blocks.shape, part.blocks.offset
    for i, place in enumerate(part.places):
        corner = [
            int(start + step * side)
            for start, step, side in zip(offset, np.unravel_index(place, part.blocks.grid), size, strict=True)
        ]
        start, stop = max(corner[0], low), min(corner[0] + size[0], high)
        if start < stop:
            others = tuple(slice(at, at + side) for at, side in zip(corner[1:], size[1:], strict=True))
            yield (i, slice(start - corner[0], stop - corner[0])), (slice(start - low, stop - low), *others)


def chunk_rows(rows: int, ranks: int) -> list[Rows]:
    """Return the rows of each rank when dimension 0 is sharded as ``torch.chunk`` cuts it: the last ranks may have none."""
    most = -(-rows // ranks)
    return [(min(rows, r * most), min(rows, (r + 1) * most)) for r in range(ranks)]


def parts_of(
    items: Sequence[Item],
    assignment: Assignment,
    geometries: Sequence[Geometry],
    shapes: Sequence[tuple[int, ...]],
) -> list[list[Part]]:
    """Return the parts of each rank, in the order of parameters: blocks of one shape together, consecutive rows together."""
    blocks: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    rows: dict[tuple[int, int], list[Rows]] = defaultdict(list)
    for item, owner in zip(items, assignment.owners, strict=True):
        if item.blocks is None:
            row = math.prod(shapes[item.param][1:])
            rows[owner, item.param].append((item.start // row, item.stop // row))
        else:
            blocks[owner, item.param, item.blocks].append(item.start)
    found: list[list[tuple[tuple[int, int], Part]]] = [[] for _ in range(assignment.ranks)]
    for (owner, param, kind), places in blocks.items():
        shape = geometries[param].classes[kind]
        part = Part(param, shape, tuple(sorted(places)), (len(places), *shape.shape))
        found[owner].append(((param, kind), part))
    for (owner, param), runs in rows.items():
        for first, stop in _joined(sorted(runs)):
            part = Part(param, None, (first, stop), (stop - first, *shapes[param][1:]))
            found[owner].append(((param, first), part))
    return [[part for _, part in sorted(each, key=lambda pair: pair[0])] for each in found]


def _joined(runs: Sequence[Rows]) -> Iterator[Rows]:
    """Join runs of rows that follow one another."""
    first, stop = runs[0]
    for start, end in runs[1:]:
        if start != stop:
            yield first, stop
            first = start
        stop = end
    yield first, stop


@dataclass(frozen=True)
class Holding:
    """A parameter, and what each rank holds of it.

    Attributes:
        shape: of the whole parameter.
        geometry: of its blocks.
        rows: of dimension 0 that each rank has; None where all have everything.
    """

    shape: tuple[int, ...]
    geometry: Geometry
    rows: tuple[Rows, ...] | None

    def held(self, rank: int) -> Rows:
        """Return the rows of dimension 0 that a rank has; a scalar is one row."""
        return (0, self.shape[0] if self.shape else 1) if self.rows is None else self.rows[rank]

    def seen_rows(self, rank: int) -> Rows:
        """Return the same in rows of what :func:`cells` cuts: of the view, whose first dimension is another where the parameter's is 1."""
        rows = self.held(rank)
        if not self.geometry.classes or self.shape[0] > 1:
            return rows
        return (0, self.geometry.view[0]) if rows[0] < rows[1] else (0, 0)

    def seen(self, local: Tensor) -> tuple[Tensor, bool]:
        """Return a rank's rows as :func:`cells` indexes them, and whether that is a view of them."""
        if not self.shape:
            return local.reshape(1), True
        if not self.geometry.classes:
            return local, True
        rest = self.geometry.view[1:]
        count = math.prod(local.shape) // math.prod(rest)
        return matrix_view(local, (count, *rest))


@dataclass(frozen=True)
class Cell:
    """A rectangle that travels: of which part of its owner, where it lies there, and where in the rows of its holder."""

    part: int
    param: int
    own: Index
    held: Index


@dataclass(frozen=True)
class Layout:
    """All parameters, and the parts of each rank."""

    holdings: tuple[Holding, ...]
    parts: tuple[tuple[Part, ...], ...]
    known: dict[tuple[int, int], list[Cell]] = field(default_factory=dict, compare=False, repr=False)

    def cells(self, owner: int, holder: int) -> list[Cell]:
        """Return what a holder has of an owner's parts, in the order in which it travels."""
        if (owner, holder) not in self.known:
            self.known[owner, holder] = [
                Cell(i, part.param, own, held)
                for i, part in enumerate(self.parts[owner])
                for own, held in cells(part, self.holdings[part.param].seen_rows(holder))
            ]
        return self.known[owner, holder]
