# SPDX-License-Identifier: Apache-2.0
"""The optimizer on several ranks: each owns some blocks, is brought their gradients, and sends back their steps.

`Sharing` gives each block one owner (:mod:`dash_optim.balance`). The owner's blocks are an optimizer of their own, a plain `DASH` over *proxies*: tensors of zeros that after
its step hold what the parameters are to be moved by. Of parameters that every rank has whole (DistributedDataParallel) no gradients travel: every rank has the mean. Of
parameters that are sharded on dimension 0 (``fully_shard``) owners are brought the rows of their blocks. Steps go to whoever holds a part of the block.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from dash_optim import distributed_state
from dash_optim.balance import assign, items_of
from dash_optim.dash import PeerError
from dash_optim.distributed_agreement import (
    Notes,
    Owner,
    check_begun,
    check_norms,
    check_options,
    notes_of,
    sum_of,
)
from dash_optim.distributed_exchange import Exchange, Flight, failure, leaving_word, reaching
from dash_optim.distributed_layout import Cell, Holding, Layout, Part, chunk_rows, parts_of
from dash_optim.distributed_state import Taken
from dash_optim.gradients import NonfiniteGradientError, describe_nonfinite, with_gradient
from dash_optim.names import label, parameter_name
from dash_optim.proxies import Proxies

if TYPE_CHECKING:
    from dash_optim.dash import DASH

_FINE, _AFTER_STEP, _BROKEN = 0.0, 1.0, 2.0
_HALF_DONE = ". Parameters are as before the step, averages and factors are not: do not save them, go on from the last checkpoint"


def sharing_group(
    groups: Iterable[dict[str, Any]], given: dist.ProcessGroup | None
) -> dist.ProcessGroup | None:
    """Return the ranks that share the work: those named, or those that parameters are sharded over; None for a process on its own.

    Raises:
        TypeError: for something else than a group of ranks.
        ValueError: for parameters that are sharded over different ranks, or in another way than on dimension 0.
    """
    if given == dist.GroupMember.NON_GROUP_MEMBER:  # type: ignore[comparison-overlap]
        given = None  # what new_group returns to a process that is not in it, a number
    if given is not None and not isinstance(given, dist.ProcessGroup):
        raise TypeError(f"process_group: expected a torch.distributed.ProcessGroup or None, got {given!r}")
    found: dist.ProcessGroup | None = None
    for group in groups:
        for param in group["params"]:
            if not isinstance(param, DTensor):
                continue
            own = param.device_mesh.get_group(_sharded_dim(group, param))
            if found is not None and _members(own) != _members(found):
                raise ValueError(
                    f"{parameter_name(group, param)}: is sharded over other ranks than the parameters before it; DASH shares its work over one group"
                )
            found = own
    if found is not None and given is not None and _members(given) != _members(found):
        raise ValueError("process_group: parameters are sharded over other ranks; leave it out")
    if found is not None:
        return found
    return given if given is not None and dist.get_world_size(given) > 1 else None


def _members(group: dist.ProcessGroup) -> list[int]:
    """Return the ranks of a group: meshes of the same ranks may have groups of their own."""
    return dist.get_process_group_ranks(group)


def copy_groups(groups: Iterable[dict[str, Any]]) -> list[dist.ProcessGroup]:
    """Return the groups of ranks that hold copies of this rank's rows (HSDP): they compute the same, and have to decide the same."""
    for group in groups:
        for param in group["params"]:
            if isinstance(param, DTensor):
                mesh, sharded = param.device_mesh, _sharded_dim(group, param)
                return [mesh.get_group(i) for i in range(mesh.ndim) if i != sharded and mesh.size(i) > 1]
    return []


def _sharded_dim(group: dict[str, Any], param: DTensor) -> int:
    """Return the dimension of the mesh that dimension 0 of a parameter is sharded over."""
    sharded = [(i, place) for i, place in enumerate(param.placements) if not isinstance(place, Replicate)]
    # a strided shard, of fully_shard over tensor parallelism, is a kind of Shard for some releases of torch
    if len(sharded) != 1 or type(sharded[0][1]) is not Shard or sharded[0][1].dim != 0:
        raise ValueError(
            f"{parameter_name(group, param)}: expected Shard(0) over one dimension of the mesh, as fully_shard leaves parameters, and copies over the others; got"
            f" {param.placements}. Blocks of tensor-parallel parameters are on several ranks: give those to another optimizer"
        )
    return sharded[0][0]


class Sharing:
    """The work of one optimizer, shared over a group of ranks; see the module.

    Args:
        optimizer: whose parameters these are.
        group: the ranks.
        wire: dtype in which steps travel; None: that of the parameter.
    """

    def __init__(self, optimizer: DASH, group: dist.ProcessGroup, wire: torch.dtype | None) -> None:
        self.optimizer, self.group = optimizer, group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.copies = copy_groups(optimizer.param_groups)
        self.owners: list[Owner] = [
            (g, param) for g in optimizer.param_groups for param in dict.fromkeys(g["params"])
        ]
        devices = sorted({str(_local(param).device) for _, param in self.owners})
        if len(devices) > 1:
            raise ValueError(f"params: expected all on one device of each rank, got {devices}")
        self.device = torch.device(devices[0] if devices else "cpu")
        self.layout = self._laid_out()
        wires = [_wire(param, wire) for _, param in self.owners]
        dtypes = [param.dtype for _, param in self.owners]
        self.exchange = Exchange(self.layout, group, dtypes, wires, self.device)
        self.parts = self.layout.parts[self.rank]
        self.proxies = [
            torch.zeros(part.shape, dtype=_working(self.owners[part.param][1]), device=self.device)
            for part in self.parts
        ]
        shapes = {proxy: part.geometry for proxy, part in zip(self.proxies, self.parts, strict=True)}
        layers = {proxy: part.param for proxy, part in zip(self.proxies, self.parts, strict=True)}
        self.inner = Proxies(self._groups(), optimizer.defaults, shapes, self._phases(), layers)
        self.steps = [0] * len(self.owners)
        self.greeted = False

    def _laid_out(self) -> Layout:
        """Give every block an owner, and rows that AdamW updates as well; where somebody alone holds them, to them."""
        holdings = tuple(self._holding(group, param) for group, param in self.owners)
        geometries = [holding.geometry for holding in holdings]
        items = [
            item
            for item in items_of(self.optimizer.param_groups, geometries)
            if item.blocks is not None or holdings[item.param].rows is None
        ]
        self.assignment = assign(items, self.ranks)
        parts = parts_of(items, self.assignment, geometries, [holding.shape for holding in holdings])
        for i, holding in enumerate(holdings):
            if holding.rows is None or geometries[i].classes:
                continue
            for own, (first, stop) in zip(parts, holding.rows, strict=True):
                part = Part(i, None, (first, stop), (stop - first, *holding.shape[1:]))
                if part.elements:
                    own.append(part)
        return Layout(holdings, tuple(tuple(own) for own in parts))

    def _holding(self, group: dict[str, Any], param: Tensor) -> Holding:
        shape = tuple(param.shape)
        rows = None
        if isinstance(param, DTensor):
            rows = tuple(chunk_rows(shape[0], self.ranks))
            first, stop = rows[self.rank]
            if param.to_local().shape != (stop - first, *shape[1:]):
                raise ValueError(
                    f"{parameter_name(group, param)}: expected rows {first} to {stop} on rank {self.rank}, as torch.chunk cuts dimension 0, got {tuple(param.to_local().shape)}"
                )
        return Holding(shape, self.optimizer.geometry_of(group, param), rows)

    def _groups(self) -> list[dict[str, Any]]:
        """Return groups of this rank's proxies, one for each of the optimizer's; weight decay is for the holders of parameters."""
        groups = []
        for outer in self.optimizer.param_groups:
            mine = [
                (proxy, label(outer, self.owners[part.param][1]))
                for part, proxy in zip(self.parts, self.proxies, strict=True)
                if self.owners[part.param][0] is outer
            ]
            named = {"params": [proxy for proxy, _ in mine], "param_names": [name for _, name in mine]}
            groups.append({**outer, **named, "weight_decay": 0.0})
        return groups

    def _phases(self) -> dict[Tensor, int]:
        """Return how many blocks the optimizer's parameters before that of a proxy have."""
        before = [0]
        for holding in self.layout.holdings:
            before.append(before[-1] + holding.geometry.blocks)
        return {proxy: before[part.param] for proxy, part in zip(self.proxies, self.parts, strict=True)}

    def step(self) -> bool:
        """Take a step with those parameters that have a gradient on any rank; return whether it was taken.

        Raises:
            NonfiniteGradientError: before anything changes, with ``nonfinite="raise"``, on ranks with such a gradient.
            ValueError: on all ranks, where gradients or options differ that should not; nothing has changed.
            PeerError: when another rank has failed or has ended.
        """
        self.follow_options()
        if not self.greeted:
            self._greet()
        gradients, present = self._agree()
        if present is None:
            return False
        with leaving_word("bringing gradients to their owners"):
            self._bring(gradients, present)
        flights: list[Flight] = []
        error: Exception | None = None
        for preconditioned in (False, True):  # what AdamW has done travels while roots are computed
            try:
                if error is None:
                    self._update(present, preconditioned)
            except Exception as problem:  # whatever it is: the others wait for this rank
                error = problem
            with leaving_word("sending steps"):
                flights += self.exchange.send(self.proxies, present, preconditioned)
        self.steps = [count + there for count, there in zip(self.steps, present, strict=True)]
        self._finish(flights, present, error)
        return True

    def shown_state(self) -> dict[Tensor, dict[str, Any]]:
        """Return :func:`dash_optim.distributed_state.shown_state`."""
        return distributed_state.shown_state(self)

    def gathered_state(self, to: int | None) -> dict[Tensor, dict[str, Any]]:
        """Return :func:`dash_optim.distributed_state.gathered_state`; every rank has to call this."""
        check_begun(self._largest(sum_of(self.steps), "gathering the state"))
        return distributed_state.gathered_state(self, to)

    def taken_from(self, state: Mapping[Tensor, dict[str, Any]]) -> Taken:
        """Return :func:`dash_optim.distributed_state.taken_from`."""
        return distributed_state.taken_from(self, state)

    def adopt(self, taken: Taken) -> None:
        """Go on from a state that :meth:`taken_from` has returned."""
        state, self.steps = taken
        self.inner.replace_state(state)

    def summary(self) -> str:
        """Return :func:`dash_optim.distributed_state.summary`."""
        return distributed_state.summary(self)

    def follow_options(self) -> None:
        """Give the proxies the options that their parameters have now; load_state_dict puts other groups in the place of the old ones."""
        kept = ("params", "param_names", "weight_decay")
        # a group that has just been added, the last, is for the next `Sharing`
        for outer, inner in zip(self.optimizer.param_groups, self.inner.param_groups, strict=False):
            inner.update({name: value for name, value in outer.items() if name not in kept})
        group_of = {param: group for group in self.optimizer.param_groups for param in group["params"]}
        # one that has been replaced is for the next as well
        self.owners = [(group_of.get(param, group), param) for group, param in self.owners]

    def _bring(self, gradients: Sequence[Tensor | None], present: Sequence[bool]) -> None:
        """Give the proxies the gradients of their parts."""
        seen = [
            None if gradient is None else holding.seen(gradient)[0]
            for gradient, holding in zip(gradients, self.layout.holdings, strict=True)
        ]
        self.exchange.bring(seen, self._proxy_gradients(present), present)

    def _proxy_gradients(self, present: Sequence[bool]) -> list[Tensor]:
        """Return memory for the gradient of each part, which the proxies of this step have as theirs."""
        found = []
        for proxy, part in zip(self.proxies, self.parts, strict=True):
            if present[part.param] and proxy.grad is None:
                proxy.grad = torch.zeros_like(proxy)
            found.append(proxy if proxy.grad is None else proxy.grad)
        return found

    def _update(self, present: Sequence[bool], preconditioned: bool) -> None:
        """Let the inner optimizer step with one kind of parts: proxies then hold by what to move."""
        chosen = {
            proxy: None
            for proxy, part in zip(self.proxies, self.parts, strict=True)
            if present[part.param] and (part.blocks is not None) == preconditioned
        }
        for proxy in chosen:
            proxy.zero_()
        if chosen:
            self.inner.update(
                [(group, [p for p in group["params"] if p in chosen]) for group in self.inner.param_groups]
            )

    def _finish(self, flights: Sequence[Flight], present: Sequence[bool], error: Exception | None) -> None:
        """Move the parameters once all ranks have got that far; if one has failed, all do."""
        own = _FINE if error is None else _AFTER_STEP if getattr(error, "after_step", False) else _BROKEN
        worst = self._largest([own], "sending steps")[0]
        for flight in flights:
            flight.wait()
        if worst < _BROKEN:
            with leaving_word("moving parameters"):
                self._apply(flights, present)
        if worst > _FINE:
            self._fail(error, _HALF_DONE if worst == _BROKEN else "")

    def _apply(self, flights: Sequence[Flight], present: Sequence[bool]) -> None:
        """Decay this rank's rows of the parameters and add what has arrived."""
        seen = {
            i: (local, *self.layout.holdings[i].seen(local))
            for i, (_, param) in enumerate(self.owners)
            if present[i]
            for local in [_local(param)]
        }
        for cell, piece in self._arrived(flights, present):
            group, _ = self.owners[cell.param]
            move(seen[cell.param][1][cell.held], piece, group["lr"], group["weight_decay"])
        for local, view, in_place in seen.values():
            if not in_place:
                local.copy_(view.view(local.shape))

    def _arrived(self, flights: Sequence[Flight], present: Sequence[bool]) -> Iterator[tuple[Cell, Tensor]]:
        for flight in flights:
            yield from zip(flight.cells, flight.pieces, strict=True)
        for preconditioned in (False, True):
            yield from self.exchange.own(self.proxies, present, preconditioned)

    # agreement

    def _greet(self) -> None:
        """Make sure that all ranks have found the same owners, and send and wait alike: from here on each takes the others' for granted."""
        known = (
            [(holding.shape, holding.rows) for holding in self.layout.holdings],
            self.assignment.owners,
            (self.exchange.dtypes, self.exchange.wires),
            [len(group["params"]) for group in self.optimizer.param_groups],
            self.optimizer.defaults["nonfinite"],
        )
        own = len(self.owners), zlib.crc32(repr(known).encode())
        said: list[tuple[int, int] | None] = [None] * self.ranks
        with reaching("comparing parameters"):
            dist.all_gather_object(said, own, group=self.group)
        other = next((rank for rank, one in enumerate(said) if one != said[0]), None)
        if other is not None:
            raise ValueError(
                f"params: ranks {self._number(0)} and {self._number(other)} do not agree on who owns which block, or on what travels ({said[0]} and {said[other]}: parameters, and a sum of all). Give all of them"
                " the same parameters in the same order and groups and the same options, nonfinite and communication_dtype among them, on the same release of torch"
            )
        self.greeted = True

    def _agree(self) -> tuple[list[Tensor | None], list[bool] | None]:
        """Return this rank's gradients, and which parameters have one on any rank; None in its place if the step is to be left out."""
        error: Exception | None = None
        gradients: list[Tensor | None] = []
        own = Notes.of_failure(len(self.owners), len(self.optimizer.param_groups))
        try:
            for group in self.optimizer.param_groups:
                with_gradient(group)
            gradients = [local_gradient(group, param) for group, param in self.owners]
            own = notes_of(
                self.owners,
                gradients,
                [holding.rows is None for holding in self.layout.holdings],
                self.optimizer.param_groups,
                self.steps,
                self.rank,
                self.ranks,
            )
        except Exception as problem:  # whatever it is: the others wait for this rank
            error = problem
        near = own.unpacked(self._largest_of(own.packed(), self.group, "agreeing on a step"))
        all_ = near.unpacked(self._largest_of_copies(near.packed(), "agreeing on a step"))
        if all_.failed:
            self._fail(error)
        check_options(all_)
        check_begun(all_.begun)
        if all_.nonfinite:
            if self.optimizer.defaults["nonfinite"] == "raise":
                self._fail(self._describe_nonfinite(gradients) if own.nonfinite else None)
            return gradients, None
        check_norms(all_, self.owners)
        present = [holder > 0 for holder in all_.holder]
        self._fill(gradients, present, near)
        return gradients, present

    def _fill(self, gradients: list[Tensor | None], present: Sequence[bool], near: Notes) -> None:
        """Give a gradient to ranks that lack one which others have: that of the first rank that has it, or zeros for rows that it alone has."""
        for i, (there, holder, lacking) in enumerate(zip(present, near.holder, near.lacking, strict=True)):
            if not (there and lacking):
                continue
            own, local = gradients[i], _local(self.owners[i][1])
            # a gradient may have another dtype (``grad_dtype``), of which a rank without it knows nothing
            filled = (
                torch.zeros_like(local, memory_format=torch.contiguous_format)
                if own is None
                else own.to(local.dtype, copy=True)  # `grad` is left alone
            )
            if self.layout.holdings[i].rows is None and holder:
                filled = filled.contiguous()
                source = dist.get_global_rank(self.group, self.ranks - int(holder))
                with reaching("sending a gradient to ranks that have none"):
                    dist.broadcast(filled, source, group=self.group)
            gradients[i] = filled

    def _describe_nonfinite(self, gradients: Sequence[Tensor | None]) -> NonfiniteGradientError:
        """Say which of this rank's rows of a gradient are not finite."""
        shown = ((*owner, gradient) for owner, gradient in zip(self.owners, gradients, strict=True))
        return NonfiniteGradientError(describe_nonfinite(shown, self.optimizer.state))

    def _largest(self, values: Sequence[float], doing: str) -> list[float]:
        """Return the largest of each number over all ranks, those of copies among them."""
        return self._largest_of_copies(self._largest_of(values, self.group, doing), doing)

    def _largest_of_copies(self, values: list[float], doing: str) -> list[float]:
        for group in self.copies:
            values = self._largest_of(values, group, doing)
        return values

    def _largest_of(self, values: Sequence[float], group: dist.ProcessGroup, doing: str) -> list[float]:
        sent = torch.tensor(values, dtype=torch.float64, device="cpu").to(self.device)
        with reaching(doing):
            dist.all_reduce(sent, dist.ReduceOp.MAX, group=group)
        found: list[float] = sent.tolist()
        return found

    def _fail(self, error: Exception | None, advice: str = "") -> None:
        """Raise this rank's error, or say which other rank has one, and what to do; all ranks know that somebody has."""
        said = None if error is None else failure(error)
        for group in (self.group, *self.copies):
            heard: list[str | None] = [None] * dist.get_world_size(group)
            with reaching("ending after an error"):
                dist.all_gather_object(heard, said, group=group)
            said = next((text for text in heard if text), None)
        if error is not None:
            raise error
        raise PeerError(f"{said}{advice}")

    def _number(self, rank: int) -> int:
        """Return the number among all ranks of one of the group, which logs and launchers know it by."""
        return dist.get_global_rank(self.group, rank)


def move(target: Tensor, step: Tensor, lr: float | Tensor, weight_decay: float) -> None:
    """Decay a rectangle of a parameter and add a step, in place; rounded to the parameter's dtype once."""
    working = target if target.dtype in (torch.float32, torch.float64) else target.float()
    if weight_decay:
        if isinstance(lr, Tensor):  # 1 - lr weight_decay is as exact as the parameter
            lr = lr.reshape(()).to(working.device, working.dtype)
        working.mul_(1 - lr * weight_decay)
    working.add_(step)
    if working is not target:
        target.copy_(working)


def local_gradient(group: dict[str, Any], param: Tensor) -> Tensor | None:
    """Return this rank's rows of a gradient, None where there is none; raise TypeError where they are not the rows of the parameter."""
    grad = param.grad
    if isinstance(param, DTensor) and grad is not None:
        placed = grad.placements if isinstance(grad, DTensor) else None
        if placed != param.placements:
            raise TypeError(
                f"gradient of {parameter_name(group, param)}: expected a DTensor that is placed as the parameter is, {param.placements}, got"
                f" {'a plain tensor' if placed is None else placed}; redistribute it"
            )
    return None if grad is None else _local(grad)


def _local(t: Tensor) -> Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


def _working(param: Tensor) -> torch.dtype:
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def _wire(param: Tensor, asked: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which a parameter's steps travel: float16 has no room for small ones, bfloat16 has."""
    if asked is not None:
        return asked
    return torch.bfloat16 if param.dtype == torch.float16 else param.dtype
