# SPDX-License-Identifier: Apache-2.0
"""What DASH keeps and computes, item by item, from shapes alone.

State is counted by formula, which tests hold against the state of real optimizers, so that the 405B parameters of a model take seconds and no memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dash_optim.balance import Item, items_of, members_of
from dash_optim.blocks import BlockClass, Geometry, view_shape
from dash_optim.checks import route
from dash_optim.cost import block_cost
from dash_optim.options import recipe_of
from dash_optim.stacks import RECORD, element_names
from matroots._products import wide

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Each:
    """What one block has, or one element that AdamW updates.

    Attributes:
        step, refresh, often: operations of the products of a step, of all roots, and of roots in a step on average.
        state: bytes by what they are for, named as :func:`dash_optim.diagnostics.state_bytes` does.
        traffic: bytes that a step without roots must move: gradient and parameter read, parameter written, averages and factors read and written, roots read.
        size: bytes of it in the parameter.
    """

    step: float
    refresh: float
    often: float
    state: Mapping[str, int]
    traffic: int
    size: int


@dataclass(frozen=True)
class Workload:
    """What a cluster has to do.

    Attributes:
        items: what can be owned.
        members, geometries: of the parameters that items belong to.
        kinds: what each kind of item has.
        kind: of each item, its index in ``kinds``.
        copies: how much of it: 1 block, or elements.
        everywhere: bytes of state that every rank has: the step of each parameter.
        partly, wholly: preconditioned parameters with a side above ``max_factor_dim``, which has no factor, and those with no shorter one, which AdamW updates.
    """

    items: tuple[Item, ...]
    members: tuple[tuple[dict[str, Any], Tensor], ...]
    geometries: tuple[Geometry, ...]
    kinds: tuple[Each, ...]
    kind: NDArray[np.int64]
    copies: Array
    everywhere: int
    partly: int
    wholly: int

    def each(self, name: str) -> Array:
        """Return a number of every item: "step", "refresh", "often", "traffic", "size" or "state", all bytes of it."""
        table = [sum(one.state.values()) if name == "state" else getattr(one, name) for one in self.kinds]
        found: Array = np.array(table, dtype=np.float64)[self.kind] * self.copies
        return found

    @property
    def blocks(self) -> NDArray[np.bool_]:
        """Which items are blocks."""
        return np.array([item.blocks is not None for item in self.items], dtype=np.bool_)

    @property
    def state(self) -> dict[str, int]:
        """Bytes of the whole state by what they are for, as one process has it."""
        found: Counter[str] = Counter({"step": self.everywhere})
        copies = np.bincount(self.kind, weights=self.copies, minlength=len(self.kinds))
        for one, n in zip(self.kinds, copies.tolist(), strict=True):
            found.update({name: int(n) * size for name, size in one.state.items()})
        return {name: size for name, size in found.items() if size}


def workload(groups: Sequence[dict[str, Any]], device: torch.device | None = None) -> Workload:
    """Return what the optimizer of these groups has to do.

    Args:
        groups: normalised, as ``DASH.param_groups``; parameters on the meta device are enough.
        device: where it would be, which decides what method "auto" costs; by default where the parameters are.
    """
    members = members_of(groups)
    geometries = [route(group, param) for group, param in members]
    devices = [device or param.device for _, param in members]
    items = items_of(groups, geometries, devices)
    numbers: dict[tuple[int, int | None], int] = {}
    kind = np.array([numbers.setdefault((i.param, i.blocks), len(numbers)) for i in items], dtype=np.int64)
    kinds = [
        _of_adamw(members[i][1])
        if number is None
        else _of_block(*members[i], geometries[i].classes[number], devices[i])
        for i, number in numbers
    ]
    sides = [_sides_without_factor(*member) for member in members]
    return Workload(
        items=tuple(items),
        members=tuple(members),
        geometries=tuple(geometries),
        kinds=tuple(kinds),
        kind=kind,
        copies=np.array(
            [1 if item.blocks is not None else item.elements for item in items], dtype=np.float64
        ),
        everywhere=torch.float32.itemsize * len(members),
        partly=sum(0 < without < total for without, total in sides),
        wholly=sum(0 < without == total for without, total in sides),
    )


def _of_block(group: dict[str, Any], param: Tensor, blocks: BlockClass, device: torch.device) -> Each:
    """Return what a block has."""
    recipe = recipe_of(group)
    dtype, elements = recipe.dtype_for(param), math.prod(blocks.shape)
    cost = block_cost(recipe, recipe.exponent(len(blocks.factored)), blocks, dtype, device)
    factors = dtype.itemsize * sum(blocks.shape[dim] ** 2 for dim in blocks.factored)
    averages = {name.partition("_")[0]: dtype.itemsize * elements for name in element_names(recipe)}
    record = len(blocks.factored) * len(RECORD) * wide(device).itemsize
    size = elements * param.dtype.itemsize
    return Each(
        step=cost.step,
        refresh=cost.expected,
        often=cost.expected / recipe.update_freq,
        state={**averages, "factor": factors, "root": factors, "record": record},
        traffic=3 * size + 2 * sum(averages.values()) + 3 * factors,
        size=size,
    )


def _of_adamw(param: Tensor) -> Each:
    """Return what an element has that AdamW updates; its averages are those of :func:`dash_optim.adamw.init_state`."""
    averages = 2 * (torch.float64 if param.dtype == torch.float64 else torch.float32).itemsize
    size = param.dtype.itemsize
    return Each(0.0, 0.0, 0.0, {"exp": averages}, 3 * size + 2 * averages, size)


def _sides_without_factor(group: dict[str, Any], param: Tensor) -> tuple[int, int]:
    """Return how many sides of a parameter that is to be preconditioned are too long for a factor, and how many it has."""
    if group["algorithm"] == "adamw" or (param.ndim == 1 and group["one_d"] == "adamw"):
        return 0, 0
    view = view_shape(tuple(param.shape), group["nd"])
    return sum(size > group["max_factor_dim"] for size in view), len(view)
