# SPDX-License-Identifier: Apache-2.0
"""The state of an optimizer whose work is shared: as a checkpoint shows it, as it is taken from one, and what there is on each rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from dash_optim.checks import check_state
from dash_optim.distributed_agreement import Owner
from dash_optim.distributed_checkpoint import Pieces, pieces_of, rows_of
from dash_optim.distributed_exchange import reaching
from dash_optim.distributed_layout import Part
from dash_optim.names import parameter_name
from dash_optim.proxies import Proxies

if TYPE_CHECKING:
    from dash_optim.distributed import Sharing

Taken = tuple[dict[Tensor, dict[str, Any]], list[int]]
"""The state of each proxy, and the number of steps of each parameter."""


def whole_state(sharing: Sharing) -> dict[Tensor, dict[str, Any]]:
    """Return the state that one process alone would have, on the meta device: its names, shapes and dtypes.

    What is here of it is brought in line with the options first: they may have changed since the last step, so that there is more to keep.
    """
    sharing.follow_options()
    sharing.inner.built()
    twins = {param: torch.empty(param.shape, dtype=param.dtype, device="meta") for _, param in sharing.owners}
    by_group: dict[int, dict[str, Any]] = {}
    for group, param in sharing.owners:
        own = by_group.setdefault(id(group), {**group, "params": [], "param_names": []})
        own["params"].append(twins[param])
        own["param_names"].append("")
    groups = list(by_group.values())
    if not groups:
        return {}
    shapes = {
        twins[param]: sharing.layout.holdings[i].geometry for i, (_, param) in enumerate(sharing.owners)
    }
    alone = Proxies(
        groups, sharing.optimizer.defaults, shapes, dict.fromkeys(shapes, 0), dict.fromkeys(shapes, 0)
    )
    alone.build_state()
    return {param: dict(alone.state[twin]) for param, twin in twins.items()}


def shown_state(sharing: Sharing) -> dict[Tensor, dict[str, Any]]:
    """Return the state of every parameter that has seen a gradient, as views: what this rank owns of it is `Pieces`."""
    whole = whole_state(sharing)
    shown: dict[Tensor, dict[str, Any]] = {}
    for i, (_, param) in enumerate(sharing.owners):
        if not sharing.steps[i]:
            continue
        own: dict[str, Any] = {
            "step": torch.tensor(float(sharing.steps[i]), dtype=torch.float32, device=sharing.device)
        }
        for key, value in whole[param].items():
            if key == "calls":
                own[key] = sharing.steps[i]
            elif key != "step":
                own[key] = _pieces(sharing, i, key, value)
        shown[param] = own
    return shown


def _pieces(sharing: Sharing, param: int, key: str, whole: Tensor) -> Pieces:
    """Return this rank's pieces of one tensor of a parameter's state."""
    shards: list[tuple[int, Tensor]] = []
    for proxy, part in zip(sharing.proxies, sharing.parts, strict=True):
        if part.param == param and part.owns(key):
            own = sharing.inner.state[proxy][key]
            shards += pieces_of(whole, part.rows, own).shards
    return Pieces(whole.shape, whole.dtype, sharing.device, sorted(shards, key=lambda shard: shard[0]))


def taken_from(sharing: Sharing, state: Mapping[Tensor, dict[str, Any]]) -> Taken:
    """Return what this rank owns of a loaded state, whole or in pieces.

    Raises:
        ValueError: where a piece that this rank owns is not there.
    """
    found: dict[Tensor, dict[str, Any]] = {}
    for proxy, part in zip(sharing.proxies, sharing.parts, strict=True):
        group, param = sharing.owners[part.param]
        own = state.get(param, {})
        if "step" not in own:
            continue
        check_state(group, param, sharing.layout.holdings[part.param].geometry, own)
        found[proxy] = {
            "step": torch.as_tensor(own["step"]).detach().clone().to(sharing.device, torch.float32)
        }
        if part.blocks is not None:
            found[proxy]["calls"] = int(own["calls"])
        for key in filter(part.owns, own):  # as the options of the checkpoint have it: they are loaded later
            rows = rows_of(own[key], part.rows)
            if rows is None:
                raise ValueError(
                    f"state_dict: {key!r} of {parameter_name(group, param)} lacks what rank {sharing.rank} of {sharing.ranks} owns. It is what one rank of a run on several"
                    " had: load it with torch.distributed.checkpoint, or save DASH.full_state_dict()"
                )
            found[proxy][key] = rows.to(sharing.device)
    return found, [int(state.get(param, {}).get("step", 0)) for _, param in sharing.owners]


def gathered_state(sharing: Sharing, to: int | None) -> dict[Tensor, dict[str, Any]]:
    """Return the whole state as one process would have it, on the rank ``to`` or on all; every rank has to call this."""
    whole = whole_state(sharing)
    kept = to is None or to == sharing.rank
    found: dict[Tensor, dict[str, Any]] = {}
    for i, (_, param) in enumerate(sharing.owners):
        if sharing.steps[i] and kept:
            found[param] = {
                key: torch.empty_like(value, device=sharing.device)
                if isinstance(value, Tensor)
                else sharing.steps[i]
                for key, value in whole[param].items()
            }
            found[param]["step"].fill_(sharing.steps[i])
    for owner, parts in enumerate(sharing.layout.parts):
        source = dist.get_global_rank(sharing.group, owner)
        for j, part in enumerate(parts):
            param = sharing.owners[part.param][1]
            for key, value in whole[param].items():
                if not (sharing.steps[part.param] and part.owns(key)):
                    continue
                if owner == sharing.rank:
                    sent = sharing.inner.state[sharing.proxies[j]][key].contiguous()
                else:
                    sent = torch.empty(_shape_of(part, value), dtype=value.dtype, device=sharing.device)
                with reaching("gathering the state"):
                    dist.broadcast(sent, source, group=sharing.group)
                if kept:
                    target = found[param][key]
                    rows = target.reshape(1) if target.ndim == 0 else target
                    rows[list(part.rows)] = sent
    return found


def summary(sharing: Sharing) -> str:
    """Return what each rank owns."""
    given = sharing.assignment
    whole = whole_state(sharing)
    held = [_state_bytes(whole, parts, sharing.owners) for parts in sharing.layout.parts]
    lines = [f"{'rank':>6} {'blocks':>8} {'elements':>14} {'operations a step':>18} {'bytes of state':>15}"]
    for rank, parts in enumerate(sharing.layout.parts):
        blocks = sum(len(part.places) for part in parts if part.blocks is not None)
        elements = sum(part.elements for part in parts)
        here = "  here" if rank == sharing.rank else ""
        lines.append(
            f"{rank:>6} {blocks:>8} {elements:>14,} {given.loads[rank]:>18.3g} {held[rank]:>15,}{here}"
        )
    return "\n".join(
        [
            *lines,
            f"imbalance: {given.imbalance:.3f}, the largest of the operations over what they could be at best",
        ]
    )


def _shape_of(part: Part, whole: Tensor) -> tuple[int, ...]:
    """Return the shape of a part's rows of a tensor of the state."""
    return (len(part.rows), *whole.shape[1:])


def _state_bytes(
    whole: Mapping[Tensor, dict[str, Any]], parts: Sequence[Part], owners: Sequence[Owner]
) -> int:
    """Return the bytes of the state of some parts."""
    total = 0
    for part in parts:
        own = whole[owners[part.param][1]]
        rows = [
            math.prod((len(part.rows), *own[key].shape[1:])) * own[key].itemsize
            for key in filter(part.owns, own)
        ]
        total += sum(rows)
    return total
