# SPDX-License-Identifier: Apache-2.0
"""What an optimizer would keep and compute at each block size, before any of it is allocated.

The state is the one that `DASH` itself makes, on torch's meta device: shapes without memory. Operations are those of products, ``2 a b c`` for
``(a, b)`` times ``(b, c)``, counted on the same stacks; what is done element by element, AdamW included, is not counted.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from dash_optim.cost import POLE as POLE
from dash_optim.cost import block_cost
from dash_optim.dash import DASH
from dash_optim.diagnostics import state_bytes
from dash_optim.names import label
from dash_optim.shadows import Groups, Model, twins_of
from dash_optim.stacks import Stack
from matroots._arguments import check_number

BLOCK_SIZES: Final = (64, 128, 256, 512, 1024, 2048, math.inf)


@dataclass(frozen=True)
class LayerPlan:
    """The parameters of one name, but for numbers in it, and one shape, at one block size.

    Attributes:
        kind: the name with numbers replaced by ``*``; empty where there are no names.
        shape: of each of them.
        count: how many there are.
        blocks: that they are cut into, in all; 0 for AdamW.
        state_bytes, step_operations, refresh_operations: as in `PlanRow`.
    """

    kind: str
    shape: tuple[int, ...]
    count: int
    blocks: int
    state_bytes: int
    step_operations: float
    refresh_operations: float


@dataclass(frozen=True)
class PlanRow:
    """One block size.

    Attributes:
        block_size: largest side of a block; ``inf`` for whole matrices.
        blocks: how many there are.
        state_bytes: of the whole state.
        fullest_bytes: of the state on the device that has most.
        kinds: bytes by what they are for: "factor", "root", "exp", "graft", "momentum", "record", "step".
        step_operations: of the products in a step that computes no root.
        refresh_operations: of computing all roots once; NaN where the method decides from the matrices.
        mean_operations: of a step on average in the long run, each group's roots every ``update_freq`` steps; the first ``4 update_freq`` steps compute more
            with ``refresh_young``. NaN for ``refresh="certified"``.
        fits: whether the fullest device's state fits ``memory``; None where no memory was named.
        layers: the same by layer.
    """

    block_size: float
    blocks: int
    state_bytes: int
    fullest_bytes: int
    kinds: Mapping[str, int]
    step_operations: float
    refresh_operations: float
    mean_operations: float
    fits: bool | None
    layers: tuple[LayerPlan, ...]


@dataclass(frozen=True)
class Plan:
    """What :func:`plan_block_size` returns; prints as a table."""

    rows: tuple[PlanRow, ...]
    memory: float | None

    @property
    def largest(self) -> PlanRow | None:
        """The row of the largest block size that fits; None where none does, or no memory was named."""
        fitting = [row for row in self.rows if row.fits]
        return max(fitting, key=lambda row: row.block_size, default=None)

    def __str__(self) -> str:
        """Return one line for each block size, then state and refresh of each layer that is preconditioned."""
        lines = [
            f"{'block_size':>10} {'blocks':>8} {'state':>11} {'factors':>11} {'roots':>11} {'step':>8} {'refresh':>8} {'mean':>8}"
        ]
        for row in self.rows:
            mark = "" if row.fits is None else "  fits" if row.fits else "  too large"
            mark += ", the largest" if row is self.largest else ""
            held = [
                in_bytes(n) for n in (row.state_bytes, row.kinds.get("factor", 0), row.kinds.get("root", 0))
            ]
            work = [
                in_operations(n) for n in (row.step_operations, row.refresh_operations, row.mean_operations)
            ]
            lines.append(
                f"{_block(row.block_size):>10} {row.blocks:>8} {held[0]:>11} {held[1]:>11} {held[2]:>11}"
                f" {work[0]:>8} {work[1]:>8} {work[2]:>8}{mark}"
            )
        return "\n".join([*lines, *self._by_layer("state"), *self._by_layer("refresh")])

    def _by_layer(self, what: str) -> Iterator[str]:
        """Yield a table: for each preconditioned layer its number at each block size."""
        layers = list(zip(*(row.layers for row in self.rows), strict=True))
        heads = "".join(f" {_block(row.block_size):>10}" for row in self.rows)
        yield f"{what + ' by layer':<56}{heads}"
        for same in layers:
            if not any(layer.blocks for layer in same):
                continue
            first = same[0]
            name = f"{first.count} of {'x'.join(map(str, first.shape))} {first.kind}"
            numbers = (
                in_bytes(layer.state_bytes) if what == "state" else in_operations(layer.refresh_operations)
                for layer in same
            )
            yield f"{name:<56.56}" + "".join(f" {number:>10}" for number in numbers)


def plan_block_size(
    model: Model,
    *,
    memory: float | None = None,
    block_sizes: Iterable[float] = BLOCK_SIZES,
    **options: Any,
) -> Plan:
    """Return the bytes of state and the operations of :class:`DASH` at several block sizes, without allocating any of it.

    Args:
        model: a module, whose parameters go where :func:`param_groups` says; or a mapping of names to shapes; or anything that `DASH` takes:
            parameters, ``(name, parameter)`` pairs or groups, on any device, "meta" included. A group that names its own ``block_size``
            keeps it.
        memory: bytes that each device has for the optimizer's state. Parameters, gradients and workspace (docs/block_size.md) come on top.
        block_sizes: the candidates.
        options: of :class:`DASH`, but ``block_size``.

    Raises:
        TypeError: for an option that `DASH` does not have, ``block_size``, or a model that is none of these.
        ValueError: for a value that an option cannot have, a model without parameters, or no candidates.

    >>> plan = plan_block_size({"up": (512, 128), "down": (128, 512)}, memory=4 * 2**20, block_sizes=(64, 128, 512))
    >>> [(row.block_size, row.state_bytes, row.fits) for row in plan.rows]
    [(64, 3150856, True), (128, 3147016, True), (512, 5505352, False)]
    >>> plan.largest.block_size
    128
    """
    if "block_size" in options:
        raise TypeError("block_size: is what is planned; give candidates as block_sizes")
    if memory is not None:
        memory = check_number("memory", memory, positive=True)
    if not isinstance(block_sizes, Iterable):
        raise TypeError(f"block_sizes: expected several candidates, got {block_sizes!r}")
    sizes = list(dict.fromkeys(block_sizes))
    if not sizes:
        raise ValueError("block_sizes: expected at least one candidate, got none")
    groups, devices = twins_of(model)
    return Plan(tuple(_row(groups, devices, size, options, memory) for size in sizes), memory)


def _row(
    groups: Groups,
    devices: Mapping[Tensor, torch.device],
    size: float,
    options: Mapping[str, Any],
    memory: float | None,
) -> PlanRow:
    """Make the optimizer's state on the meta device, and count."""
    opt = DASH(
        [{**group, "params": list(group["params"])} for group in groups], **{**options, "block_size": size}
    )
    work, mean = _work(opt.build_state(), devices)
    layers, fullest = defaultdict(list), dict.fromkeys(devices.values(), 0)
    for group in opt.param_groups:
        for param in dict.fromkeys(group["params"]):
            held = sum(state_bytes({param: opt.state[param]}).values())
            fullest[devices[param]] += held
            layers[_kind(group, param), tuple(param.shape)].append((held, *work[param]))
    most = max(fullest.values())
    planned = tuple(
        LayerPlan(kind, shape, len(rows), int(blocks), int(held), step, refresh)
        for (kind, shape), rows in layers.items()
        for held, blocks, step, refresh in [map(sum, zip(*rows, strict=True))]
    )
    return PlanRow(
        block_size=size,
        blocks=sum(layer.blocks for layer in planned),
        state_bytes=sum(fullest.values()),
        fullest_bytes=most,
        kinds=state_bytes(opt.state),
        step_operations=sum(layer.step_operations for layer in planned),
        refresh_operations=sum(layer.refresh_operations for layer in planned),
        mean_operations=mean,
        fits=None if memory is None else most <= memory,
        layers=planned,
    )


def _work(
    stacks: Sequence[Stack], devices: Mapping[Tensor, torch.device]
) -> tuple[dict[Tensor, tuple[float, float, float]], float]:
    """Return (blocks, operations of a step, of a refresh) of each parameter, and the operations of a step on average, in the long run."""
    found: dict[Tensor, tuple[float, float, float]] = defaultdict(lambda: (0, 0.0, 0.0))
    mean = 0.0
    for stack in stacks:
        recipe, device = stack.recipe, devices[stack.members[0].param]
        cost = block_cost(recipe, stack.p, stack.members[0].blocks, stack.dtype, device)
        often = math.nan if recipe.refresh == "certified" else 1 / recipe.update_freq
        mean += stack.blocks * (cost.step + cost.refresh * often)
        for member in stack.members:
            blocks, a, b = found[member.param]
            count = member.blocks.count
            found[member.param] = blocks + count, a + count * cost.step, b + count * cost.refresh
    return found, mean


def _kind(group: dict[str, Any], param: Tensor) -> str:
    """Return a parameter's name with its numbers replaced, nothing if it has none."""
    if not group.get("param_names"):
        return ""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", label(group, param))


def _block(size: float) -> str:
    return "whole" if math.isinf(size) else str(int(size))


def in_bytes(count: float) -> str:
    """Return bytes in the unit that suits them."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count / 2**10:.1f} KiB"


def in_operations(operations: float) -> str:
    """Return a number of operations with the prefix that suits it, "?" where it is not known."""
    if math.isnan(operations):
        return "?"
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if operations >= scale:
            return f"{operations / scale:.1f} {prefix}"
    return f"{operations / 1e3:.1f} k"
