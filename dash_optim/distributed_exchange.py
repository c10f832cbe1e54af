# SPDX-License-Identifier: Apache-2.0
"""What travels between owners and holders: gradients one way, steps the other, each flat and by one collective.

Steps of parameters that every rank has whole are one message of each owner to all. Rows of sharded parameters go from each rank to each other
(``all_to_all_single``); what a rank has to do with itself is copied and does not travel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dash_optim.dash import PeerError
from dash_optim.distributed_layout import Cell, Layout

_WORD = "dash_optim/failed"


@contextmanager
def reaching(doing: str) -> Iterator[None]:
    """Say what was being done when another rank could not be reached, and what that rank left word of; nothing but collectives belongs into the body."""
    try:
        yield
    except RuntimeError as error:
        word, rank = _word_left(), dist.get_rank()
        why = (
            f"{word}; rank {rank} was {doing}"
            if word
            else (f"rank {rank}: another rank has probably ended or hangs; {doing} failed: {error}")
        )
        raise PeerError(f"{why}. Start all ranks again from the last checkpoint") from error


@contextmanager
def leaving_word(doing: str) -> Iterator[None]:
    """Let the others know why this rank does not come to a collective that they are waiting in: they look when its connections close."""
    try:
        yield
    except PeerError:
        raise
    except Exception as error:
        with suppress(RuntimeError):  # the store may have gone: this rank's own error is what matters
            _store().set(_WORD, f"{failure(error)}, while {doing}")
        raise


def _word_left() -> str | None:
    """Return what a rank has left word of; None where there is nothing, or where the store has ended with the process that kept it."""
    with suppress(RuntimeError):
        store = _store()
        if store.check([_WORD]):
            return bytes(store.get(_WORD)).decode()
    return None


def _store() -> Any:
    """Return what all processes can write to, whatever groups they are in."""
    world = dist.group.WORLD
    assert world is not None
    return world.get_group_store()


def failure(error: Exception) -> str:
    """Return what others are told of this rank's error."""
    return f"rank {dist.get_rank()} has failed: {type(error).__name__}: {error}"


Piece = tuple[Cell, Tensor]
"""A cell of a part, and what has arrived for it, or lies in the part."""


@dataclass
class Flight:
    """Something that is under way: what to wait for, and which cells it brings."""

    doing: str
    works: list[dist.Work]
    cells: list[Cell] = field(default_factory=list)
    pieces: list[Tensor] = field(default_factory=list)
    kept: Tensor | None = None  # memory that is being sent

    def wait(self) -> list[Tensor]:
        """Return what has arrived, one tensor for each cell."""
        with reaching(self.doing):
            for work in self.works:
                work.wait()
        return self.pieces


@dataclass
class Exchange:
    """The ways between the ranks of a group.

    Attributes:
        layout: who holds and who owns what.
        group: the ranks.
        dtypes: of each parameter, in which its gradient travels.
        wires: the dtype in which its steps travel.
        device: where all of it is.
    """

    layout: Layout
    group: dist.ProcessGroup
    dtypes: Sequence[torch.dtype]
    wires: Sequence[torch.dtype]
    device: torch.device
    rank: int = field(init=False)
    ranks: int = field(init=False)

    def __post_init__(self) -> None:
        """Ask the group who this is."""
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)

    def bring(
        self, gradients: Sequence[Tensor | None], into: Sequence[Tensor], chosen: Sequence[bool]
    ) -> None:
        """Copy the chosen parameters' gradients into the parts of this rank.

        Args:
            gradients: this rank's rows of each parameter's gradient, as :meth:`Holding.seen` shows them; None for those that are not chosen.
            into: a tensor for each part.
            chosen: which parameters.
        """
        layout, me = self.layout, self.rank
        for cell in layout.cells(me, me):
            gradient = gradients[cell.param]
            if chosen[cell.param] and gradient is not None:
                into[cell.part][cell.own].copy_(gradient[cell.held])
        sharded = [use and self._travels(i) for i, use in enumerate(chosen)]
        for dtype in dict.fromkeys(self.dtypes[i] for i, use in enumerate(sharded) if use):
            mine = [use and self.dtypes[i] == dtype for i, use in enumerate(sharded)]
            sent = [
                [gradients[cell.param][cell.held] for cell in self._others(owner, me, mine)]  # type: ignore[index]
                for owner in range(self.ranks)
            ]
            wanted = [
                [into[cell.part][cell.own] for cell in self._others(me, holder, mine)]
                for holder in range(self.ranks)
            ]
            for target, arrived in zip(
                chain.from_iterable(wanted),
                self._all_to_all(sent, wanted, dtype, "bringing gradients to their owners").wait(),
                strict=True,
            ):
                target.copy_(arrived)

    def send(self, steps: Sequence[Tensor], chosen: Sequence[bool], preconditioned: bool) -> list[Flight]:
        """Start to send the steps of the chosen parameters' parts of one kind to whoever holds them.

        Args:
            steps: a tensor for each part of this rank.
            chosen: which parameters.
            preconditioned: whether their blocks travel, or the rows that AdamW updates.
        """
        flights: list[Flight] = []
        for dtype in dict.fromkeys(self.wires[i] for i, use in enumerate(chosen) if use):
            mine = [use and self.wires[i] == dtype for i, use in enumerate(chosen)]
            flights += self._send_whole(steps, mine, preconditioned, dtype)
            sharded = [use and self._travels(i) for i, use in enumerate(mine)]
            if preconditioned and any(sharded):
                flights.append(self._send_rows(steps, sharded, dtype))
        return flights

    def own(self, steps: Sequence[Tensor], chosen: Sequence[bool], preconditioned: bool) -> Iterator[Piece]:
        """Yield what this rank owns and holds itself of the chosen sharded parameters."""
        for cell in self.layout.cells(self.rank, self.rank):
            part = self.layout.parts[self.rank][cell.part]
            sharded = self.layout.holdings[cell.param].rows is not None
            if chosen[cell.param] and sharded and (part.blocks is not None) == preconditioned:
                yield cell, steps[cell.part][cell.own]

    def _travels(self, param: int) -> bool:
        """Whether rows of a parameter go to other ranks: those that AdamW updates are updated where they are."""
        holding = self.layout.holdings[param]
        return holding.rows is not None and bool(holding.geometry.classes)

    def _others(self, owner: int, holder: int, chosen: Sequence[bool]) -> list[Cell]:
        """Return the cells of the chosen parameters that travel between two ranks, one of them this one; none with itself."""
        return (
            []
            if owner == holder
            else [cell for cell in self.layout.cells(owner, holder) if chosen[cell.param]]
        )

    def _send_rows(self, steps: Sequence[Tensor], chosen: Sequence[bool], dtype: torch.dtype) -> Flight:
        sent = [
            [steps[cell.part][cell.own] for cell in self._others(self.rank, to, chosen)]
            for to in range(self.ranks)
        ]
        expected = [self._others(owner, self.rank, chosen) for owner in range(self.ranks)]
        shapes = [[self._shape(owner, cell) for cell in cells] for owner, cells in enumerate(expected)]
        flight = self._all_to_all(sent, shapes, dtype, "sending steps")
        flight.cells = list(chain.from_iterable(expected))
        return flight

    def _shape(self, owner: int, cell: Cell) -> Tensor:
        """Return a tensor without memory, of the shape of a cell."""
        part = self.layout.parts[owner][cell.part]
        return torch.empty(1, device="meta").expand(part.shape)[cell.own]

    def _send_whole(
        self, steps: Sequence[Tensor], chosen: Sequence[bool], preconditioned: bool, dtype: torch.dtype
    ) -> list[Flight]:
        """Start to send whole parts to all; every rank knows what each of them sends."""
        parts = [
            [
                (i, part)
                for i, part in enumerate(each)
                if chosen[part.param]
                and self.layout.holdings[part.param].rows is None
                and (part.blocks is not None) == preconditioned
            ]
            for each in self.layout.parts
        ]
        sizes = [sum(part.elements for _, part in each) for each in parts]
        if not any(sizes):
            return []
        buffers = [torch.empty(size, dtype=dtype, device=self.device) for size in sizes]
        if sizes[self.rank]:
            torch.cat([steps[i].reshape(-1).to(dtype) for i, _ in parts[self.rank]], out=buffers[self.rank])
        flight = Flight("sending steps", self._spread(buffers))
        for owner, each in enumerate(parts):
            arrived = dict(
                zip(
                    [i for i, _ in each],
                    buffers[owner].split([part.elements for _, part in each]),
                    strict=True,
                )
            )
            for cell in self.layout.cells(owner, self.rank):
                if cell.part in arrived:
                    flight.cells.append(cell)
                    whole = arrived[cell.part].view(self.layout.parts[owner][cell.part].shape)
                    flight.pieces.append(whole[cell.own])
        return [flight]

    def _spread(self, buffers: list[Tensor]) -> list[dist.Work]:
        """Start to send each rank's buffer to all others; they are of different sizes, which NCCL gathers as they are and others broadcast."""
        with reaching("sending steps"):
            if dist.get_backend(self.group) == "nccl":
                return [dist.all_gather(buffers, buffers[self.rank], group=self.group, async_op=True)]
            return [
                dist.broadcast(
                    buffer, dist.get_global_rank(self.group, owner), group=self.group, async_op=True
                )
                for owner, buffer in enumerate(buffers)
                if buffer.numel()
            ]

    def _all_to_all(
        self, sent: list[list[Tensor]], shapes: list[list[Tensor]], dtype: torch.dtype, doing: str
    ) -> Flight:
        """Start to send lists of tensors to each rank, given the shapes of what arrives from each."""
        device = self.device
        flat = [t.reshape(-1).to(dtype) for t in chain.from_iterable(sent)]
        outgoing = torch.cat(flat) if flat else torch.empty(0, dtype=dtype, device=device)
        arriving = list(chain.from_iterable(shapes))
        incoming = torch.empty(sum(t.numel() for t in arriving), dtype=dtype, device=device)
        arriving_sizes, leaving_sizes = (
            [sum(t.numel() for t in each) for each in lists] for lists in (shapes, sent)
        )
        with reaching(doing):
            work = dist.all_to_all_single(
                incoming, outgoing, arriving_sizes, leaving_sizes, group=self.group, async_op=True
            )
        pieces = [
            piece.view(t.shape)
            for piece, t in zip(incoming.split([t.numel() for t in arriving]), arriving, strict=True)
        ]
        return Flight(doing, [work], pieces=pieces, kept=outgoing)
