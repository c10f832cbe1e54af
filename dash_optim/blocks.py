# SPDX-License-Identifier: Apache-2.0
"""Geometry: how a parameter is seen as a matrix or tensor, and cut into blocks.

Every dimension of the view is cut into pieces of ``block_size`` and a rest; a block is a product of pieces. The blocks of one
parameter that have the same shape are a regular grid (`BlockClass`): at most ``2^k`` grids for an order-k view, and a strided view of
the parameter shows all blocks of a grid at once, without a copy. Together the grids hold every element exactly once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch
from torch import Tensor

Order = Literal["matrix", "tensor"]
"""Whether a tensor of three and more dimensions is seen as a matrix, (first, all others), or keeps a factor for each."""


@dataclass(frozen=True)
class BlockClass:
    """The blocks of one shape in one parameter.

    Attributes:
        shape: of a block, one size for each dimension of the view.
        grid: how many blocks lie along each dimension; they are numbered in row-major order.
        offset: where the grid starts in each dimension, in elements.
        first: the same in pieces.
        whole: how many pieces of any size lie along each dimension.
        factored: the dimensions that have a factor.
        chosen: the numbers of the blocks, where they are some that have been taken out of a parameter's grid.
    """

    shape: tuple[int, ...]
    grid: tuple[int, ...]
    offset: tuple[int, ...]
    first: tuple[int, ...]
    whole: tuple[int, ...]
    factored: tuple[int, ...]
    chosen: tuple[int, ...] | None = None

    @property
    def count(self) -> int:
        """The number of blocks."""
        return math.prod(self.grid)

    @property
    def numbers(self) -> Tensor:
        """The number of each block among all blocks of the parameter in row-major order, ``(count,)``."""
        if self.chosen is not None:
            return torch.tensor(self.chosen, device="cpu")
        everywhere = torch.arange(math.prod(self.whole), device="cpu").reshape(self.whole)
        for dim, (first, extent) in enumerate(zip(self.first, self.grid, strict=True)):
            everywhere = everywhere.narrow(dim, first, extent)
        return everywhere.flatten()

    @property
    def name(self) -> str:
        """The shape of a block as it stands in the keys of the state, e.g. ``128x64``."""
        return "x".join(map(str, self.shape))


@dataclass(frozen=True)
class Geometry:
    """A parameter's view and its grids of blocks; without grids there is nothing to precondition."""

    view: tuple[int, ...]
    classes: tuple[BlockClass, ...]

    @property
    def factors(self) -> int:
        """How many dimensions of the view have a factor."""
        return len(self.classes[0].factored) if self.classes else 0

    @property
    def blocks(self) -> int:
        """The number of blocks of all shapes."""
        return sum(blocks.count for blocks in self.classes)


def geometry(
    shape: tuple[int, ...], block_size: float, max_factor_dim: float, order: Order = "matrix"
) -> Geometry:
    """Return the view of a parameter and its blocks.

    Dimensions of size 1 are dropped. A dimension above ``max_factor_dim`` has no factor, but is cut like the others.
    """
    view = view_shape(shape, order)
    factored = tuple(i for i, size in enumerate(view) if size <= max_factor_dim)
    if not factored or 0 in view:
        return Geometry(view, ())
    pieces = [_pieces(size, block_size) for size in view]
    whole = tuple(sum(count for _, count, _, _ in kinds) for kinds in pieces)
    classes = []
    for choice in product(*pieces):
        sizes, counts, offsets, first = zip(*choice, strict=True)
        classes.append(BlockClass(sizes, counts, offsets, first, whole, factored))
    return Geometry(view, tuple(classes))


def view_shape(shape: tuple[int, ...], order: Order) -> tuple[int, ...]:
    """Return the shape without its ones, as a matrix if it has more than two dimensions and ``order`` says so."""
    sizes = tuple(size for size in shape if size != 1)
    if order == "matrix" and len(sizes) > 2:
        return sizes[0], math.prod(sizes[1:])
    return sizes


def _pieces(size: int, block_size: float) -> list[tuple[int, int, int, int]]:
    """Return (size, how many, offset, index of the first) of the full pieces of a dimension and of its rest."""
    if size <= block_size:
        return [(size, 1, 0, 0)]
    piece = int(block_size)
    full, rest = divmod(size, piece)
    return [(piece, full, 0, 0)] + ([(rest, 1, full * piece, full)] if rest else [])


@dataclass(frozen=True)
class Piece:
    """Consecutive blocks of a grid that form a rectangle of it: ``corner`` is its first block, ``extent`` its sides."""

    corner: tuple[int, ...]
    extent: tuple[int, ...]

    @property
    def count(self) -> int:
        """The number of blocks."""
        return math.prod(self.extent)


def pieces_of(grid: tuple[int, ...], most: int) -> Iterator[Piece]:
    """Cut a grid into rectangles of at most ``most`` blocks, each consecutive in row-major order."""
    inner = math.prod(grid[1:])
    if len(grid) > 1 and inner > most:
        for row in range(grid[0]):
            for piece in pieces_of(grid[1:], most):
                yield Piece((row, *piece.corner), (1, *piece.extent))
        return
    rows = max(1, most // inner)
    for row in range(0, grid[0], rows):
        yield Piece((row, *(0 for _ in grid[1:])), (min(rows, grid[0] - row), *grid[1:]))


def matrix_view(t: Tensor, view: tuple[int, ...]) -> tuple[Tensor, bool]:
    """Return ``t`` in the shape ``view``, and whether that is a view of it (a copy where the strides allow none)."""
    try:
        return t.view(view), True
    except RuntimeError:
        return t.reshape(view), False


def block_view(t: Tensor, blocks: BlockClass, piece: Piece) -> Tensor:
    """Return the blocks of a piece as a view ``(*extent, *shape)`` of ``t``, which has the shape of the parameter's view."""
    strides = t.stride()
    start = sum(
        (offset + corner * size) * stride
        for offset, corner, size, stride in zip(
            blocks.offset, piece.corner, blocks.shape, strides, strict=True
        )
    )
    steps = [size * stride for size, stride in zip(blocks.shape, strides, strict=True)]
    return torch.as_strided(t, (*piece.extent, *blocks.shape), (*steps, *strides), t.storage_offset() + start)
