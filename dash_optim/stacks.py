# SPDX-License-Identifier: Apache-2.0
"""Stacks: the blocks of one shape, of all parameters of a device, as tensors with one more dimension.

A `Stack` owns the averages, factors and roots of its blocks; what stands in ``optimizer.state`` are views into them, one for each
parameter, so that checkpoints are keyed by parameter whatever is stacked with what. Factors of one size are one tensor: both factors
of square blocks are ``(2, blocks, n, n)``, and their roots are computed as one batch of ``2 blocks`` matrices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Any, Final

import torch
from torch import Tensor

from dash_optim.blocks import BlockClass, Geometry, Piece, pieces_of
from dash_optim.options import Recipe
from matroots._exponent import Exponent
from matroots._products import wide

RECORD: Final = (
    "refreshed_at",
    "status",
    "failures",
    "refreshes",
    "skipped",
    "failed",
    "damping",
    "alpha",
    "beta",
    "correction",
)
"""What is kept for each factor, in this order: the step of its last refresh (0: never); the status of the last solve, and how many have failed
in a row; roots computed, refreshes skipped (refresh="certified"), and solves failed, in all; and of the root in use: the eps on its factor, ``alpha I <= (X^{p/2} (F + eps I) X^{p/2})^b <= beta I``, p = a/b,
as last certified (NaN: never), and the ``1 - b^t`` that the factor was divided by."""

FIELD: Final = {name: i for i, name in enumerate(RECORD)}

# of one buffer of a chunk of blocks: on CPUs a step goes through about eight of them, which the cache shall hold
_CHUNK_BYTES = 7 * 2**20
_ROOTS_BYTES = 16 * 2**20  # of the roots that one call computes: it cuts them into chunks of its own
_DEVICE_CHUNK_BYTES = 256 * 2**20


@dataclass(frozen=True, eq=False)
class Member:
    """A parameter's blocks within a stack, its ``index``-th: they are ``start`` to ``stop`` of it."""

    index: int
    param: Tensor
    group: dict[str, Any]
    view: tuple[int, ...]
    blocks: BlockClass
    start: int
    phase: int  # how many blocks the optimizer's parameters before this one have, for staggered refreshes
    layer: object  # what has the same is grafted together, if by layer

    @property
    def stop(self) -> int:
        """One past the last block."""
        return self.start + self.blocks.count


@dataclass(frozen=True)
class Sides:
    """The factors of one size: ``(s, b, n, n)`` for s dimensions of each block; factor j of block i has the number ``j b + i``."""

    size: int
    dims: tuple[int, ...]
    factors: Tensor
    roots: Tensor
    record: Tensor  # (s, b, len(RECORD))

    def numbers(self, blocks: Tensor) -> Tensor:
        """Return the numbers of all factors of some blocks."""
        first = torch.arange(len(self.dims), device=blocks.device) * self.factors.shape[1]
        return (first.unsqueeze(-1) + blocks).flatten()


@dataclass(frozen=True)
class Chunk:
    """Blocks ``start`` to ``stop`` of a stack, which are updated together, and the pieces of parameters they lie in."""

    start: int
    stop: int
    pieces: tuple[tuple[Member, Piece, slice], ...]  # the slice is relative to ``start``
    preconditioned: bool

    @property
    def span(self) -> slice:
        """The blocks, as an index into the stack."""
        return slice(self.start, self.stop)


@dataclass
class Stack:
    """Blocks of one shape and recipe. Element-wise state is ``(b, *shape)``, None where the recipe keeps none."""

    shape: tuple[int, ...]
    factored: tuple[int, ...]
    p: Exponent
    recipe: Recipe
    dtype: torch.dtype
    members: list[Member]
    elements: dict[str, Tensor] = field(default_factory=dict)
    sides: list[Sides] = field(default_factory=list)
    ratio: Tensor | None = None  # ||D|| / ||U|| of each block in the last step
    # most failures in a row, on the CPU; from accelerators it arrives when it arrives
    worst: Tensor | None = None
    plans: dict[tuple[int, ...], list[Chunk]] = field(default_factory=dict)
    # in the state: of whom, its key, its memory
    views: list[tuple[Tensor, str, int]] = field(default_factory=list)
    scratch: dict[str, Tensor] = field(default_factory=dict)

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return self.members[-1].stop

    @property
    def device(self) -> torch.device:
        """Where the blocks are."""
        return self.members[0].param.device

    @cached_property
    def member_of(self) -> Tensor:
        """The index of each block's member, ``(b,)``."""
        counts = torch.tensor([member.blocks.count for member in self.members], device="cpu")
        return torch.repeat_interleave(counts).to(self.device)

    @cached_property
    def phase_of(self) -> Tensor:
        """The number of each block among all blocks of the optimizer, ``(b,)``, on the CPU."""
        return torch.cat([member.phase + member.blocks.numbers for member in self.members])

    @cached_property
    def side_of(self) -> dict[int, tuple[Sides, int]]:
        """For each dimension that has a factor, where it is."""
        return {dim: (sides, j) for sides in self.sides for j, dim in enumerate(sides.dims)}

    def is_shown(self, state: Mapping[Tensor, dict[str, Any]]) -> bool:
        """Whether the state of the parameters still consists of the views that were put there."""
        for param, key, place in self.views:
            part = state.get(param, {}).get(key)
            if part is None or part.data_ptr() != place:
                return False
        return True

    def buffer(self, name: str, chunk: Chunk) -> Tensor:
        """Return memory for a chunk's blocks, ``(b, *shape)``, the same in every step: fresh memory is neither mapped nor in the cache."""
        count = chunk.stop - chunk.start
        held = self.scratch.get(name)
        if held is None or len(held) < count:
            held = torch.empty((count, *self.shape), dtype=self.dtype, device=self.device)
            self.scratch[name] = held
        return held[:count]

    def most(self, size: int, limit: int = _CHUNK_BYTES) -> int:
        """Return how many blocks or matrices of ``size`` elements are worked on at once: on CPUs as many as ``limit`` bytes hold."""
        if self.recipe.stacking == "none":
            return 1
        if self.recipe.max_batch is not None:
            return self.recipe.max_batch
        limit = limit if self.device.type == "cpu" else _DEVICE_CHUNK_BYTES
        return max(1, limit // (size * self.dtype.itemsize))

    def most_roots(self, n: int) -> int:
        """Return how many roots ``(n, n)`` are computed at once."""
        return self.most(n**2, _ROOTS_BYTES)

    def chunks(self, phases: Sequence[int]) -> list[Chunk]:
        """Return the chunks for members that are absent (0), not yet preconditioned (1) or preconditioned (2) in this step."""
        key = tuple(phases)
        if key not in self.plans:
            if len(self.plans) > 64:  # parameters that come and go in many combinations
                self.plans.clear()
            self.plans[key] = list(self._plan(key))
        return self.plans[key]

    def _plan(self, phases: tuple[int, ...]) -> Iterator[Chunk]:
        """Join consecutive pieces of members in the same phase, up to `most` blocks."""
        largest = max([torch.Size(self.shape).numel(), *(sides.size**2 for sides in self.sides)])
        most = self.most(largest)
        pieces: list[tuple[Member, Piece, slice]] = []
        start = stop = phase = 0
        for member, its_phase in zip(self.members, phases, strict=True):
            position = member.start
            for piece in pieces_of(member.blocks.grid, most) if its_phase else ():
                joins = position == stop and its_phase == phase and stop - start + piece.count <= most
                if pieces and not joins:
                    yield Chunk(start, stop, tuple(pieces), phase == 2)
                    pieces = []
                if not pieces:
                    start, phase = position, its_phase
                stop = position + piece.count
                pieces.append((member, piece, slice(position - start, stop - start)))
                position = stop
        if pieces:
            yield Chunk(start, stop, tuple(pieces), phase == 2)


def element_names(recipe: Recipe) -> list[str]:
    """Return which element-wise tensors a recipe keeps."""
    names = ["exp_avg"] if recipe.betas[0] > 0 else []
    if recipe.grafting is not None and recipe.grafting.keeps:
        names.append("graft_avg_sq")
    if recipe.momentum > 0:
        names.append("momentum")
    return names


@dataclass(frozen=True)
class Parameter:
    """A parameter that is preconditioned, with what its stacks need to know."""

    param: Tensor
    group: dict[str, Any]
    recipe: Recipe
    geometry: Geometry
    phase: int
    layer: object


def build_stacks(parameters: Iterable[Parameter], state: dict[Tensor, dict[str, Any]]) -> list[Stack]:
    """Stack the blocks of parameters, take over the state they have, and put views into the stacks in its place.

    Stacks are made one at a time, so that no more than one exists twice.
    """
    kinds: dict[tuple[Any, ...], list[tuple[Parameter, BlockClass]]] = {}
    for parameter in parameters:
        together = parameter.recipe.stacking == "device"
        owner = None if together else id(parameter.param)
        for blocks in parameter.geometry.classes:
            dtype = parameter.recipe.dtype_for(parameter.param)
            key = (parameter.param.device, dtype, owner, parameter.recipe, blocks.shape, blocks.factored)
            kinds.setdefault(key, []).append((parameter, blocks))
    return [_stack(kind, state) for kind in kinds.values()]


def _stack(kind: list[tuple[Parameter, BlockClass]], state: dict[Tensor, dict[str, Any]]) -> Stack:
    """Make one stack, filled from the state."""
    members = []
    start = 0
    for i, (parameter, blocks) in enumerate(kind):
        view = parameter.geometry.view
        members.append(
            Member(i, parameter.param, parameter.group, view, blocks, start, parameter.phase, parameter.layer)
        )
        start = members[-1].stop
    first, blocks = kind[0]
    recipe, dtype = first.recipe, first.recipe.dtype_for(first.param)
    p = recipe.exponent(len(blocks.factored))
    stack = Stack(blocks.shape, blocks.factored, p, recipe, dtype, members)
    make = _Maker(stack, state)
    for name in element_names(recipe):
        stack.elements[name] = make(name, blocks.shape, dtype)
    for size in dict.fromkeys(blocks.shape[dim] for dim in blocks.factored):
        dims = tuple(dim for dim in blocks.factored if blocks.shape[dim] == size)
        factors = make("factor", (size, size), dtype, dims)
        roots = make("root", (size, size), dtype, dims, identity=True)
        record = make("record", (len(RECORD),), wide(stack.device), dims, fill=_FRESH)
        stack.sides.append(Sides(size, dims, factors, roots, record))
    return stack


_FRESH: Final = tuple(float("nan") if name in ("damping", "alpha", "beta") else 0.0 for name in RECORD)


@dataclass(frozen=True)
class _Maker:
    """Makes the tensors of a stack."""

    stack: Stack
    state: dict[Tensor, dict[str, Any]]

    def __call__(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        dims: tuple[int, ...] = (),
        *,
        identity: bool = False,
        fill: tuple[float, ...] | None = None,
    ) -> Tensor:
        """Return a tensor that holds what the state has under this name, and put its views there.

        It is ``(len(dims), blocks, *shape)``, or ``(blocks, *shape)`` for what belongs to no dimension.
        """
        stack = self.stack
        whole = torch.zeros((max(len(dims), 1), stack.blocks, *shape), dtype=dtype, device=stack.device)
        if identity:
            whole.diagonal(dim1=-2, dim2=-1).fill_(1.0)
        if fill is not None:
            whole[:] = torch.tensor(fill, dtype=dtype, device=stack.device)
        names = [f"{name}_{dim}" for dim in dims] or [name]
        for member, (part, key) in product(stack.members, zip(whole, names, strict=True)):
            own, key = self.state[member.param], f"{member.blocks.name}.{key}"
            mine = part[member.start : member.stop]
            if key in own:
                mine.copy_(own[key])
            own[key] = mine
            stack.views.append((member.param, key, mine.data_ptr()))
        return whole if dims else whole[0]
