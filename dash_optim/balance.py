# SPDX-License-Identifier: Apache-2.0
"""Which rank of a distributed optimizer owns what: items of known cost, spread so that the busiest rank has as little as possible to do.

An item is what one rank owns whole: a block with its factors, roots and averages, or a slice of a parameter that AdamW updates. Everything here is a pure function of
shapes and options, so every rank finds the same owners without asking another.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dash_optim.blocks import Geometry
from dash_optim.cost import ADAMW, block_cost
from dash_optim.options import recipe_of

SLICE: Final = 2**18
"""Elements of a slice that AdamW updates, at most: a megabyte in float32, long enough to be worth a transfer, and at `ADAMW` operations an element a hundredth of a
block of 1024."""
_CLOSE = 1e-3  # to the best that may be possible: nearer is not worth the search
_PARTNERS = 16  # ranks with least to do that the busiest looks at, those of equal load once
_EXCHANGES = 4  # a rank, at most


@dataclass(frozen=True, slots=True)
class Item:
    """What one rank owns whole.

    Attributes:
        param: index of the parameter in the order of the groups, each parameter once.
        blocks: index of the block's class in ``geometry.classes``; None for a slice of what AdamW updates.
        start: number of the block within its class's row-major grid; first element of a slice of the flat parameter, which begins with a row.
        stop: one past: ``start + 1`` for a block.
        cost: operations of a step on average, a whole number, so that sums are exact whatever their order.
        elements: of the parameter.
        unit: items with the same unit have the same owner; -1 for an item on its own.
    """

    param: int
    blocks: int | None
    start: int
    stop: int
    cost: float
    elements: int
    unit: int = -1


@dataclass(frozen=True)
class Assignment:
    """Who owns which item.

    Attributes:
        owners: the rank of each item.
        ranks: how many there are.
        loads: cost of each rank's items.
        elements: of each rank's items.
        bound: no assignment has a smaller largest load: the greater of the mean load and the largest item (of a unit: all its items).
        attainable: a sharper bound: ``k + 1`` of the ``k ranks + 1`` largest items must share a rank, for every k.
    """

    owners: tuple[int, ...]
    ranks: int
    loads: tuple[float, ...]
    elements: tuple[int, ...]
    bound: float
    attainable: float

    @property
    def imbalance(self) -> float:
        """The largest load over `bound`; 1 is perfect, and where there is nothing to do."""
        return max(self.loads) / self.bound if self.bound else 1.0


def items_of(
    groups: Sequence[dict[str, Any]],
    geometries: Sequence[Geometry],
    devices: Sequence[torch.device] | None = None,
) -> list[Item]:
    """Return what there is to own, parameter by parameter; every element of every parameter is in exactly one item.

    Costs follow ``update_freq`` and the solver's own count of products, which for methods that stop by themselves is that of a small solve on this process's CPU: find owners
    once, before schedulers change options, and where ranks have different CPUs take those of one rank.

    Args:
        groups: normalised, as ``DASH.param_groups``; parameters may be on any device, "meta" included.
        geometries: of each parameter, in the order of the groups, each parameter once (:func:`dash_optim.checks.route`).
        devices: where each parameter really is, which decides what method "auto" costs; by default where its tensor is.

    Raises:
        ValueError: for geometries or devices that are not one for each parameter.
    """
    members = members_of(groups)
    devices = [param.device for _, param in members] if devices is None else devices
    for name, given in (("geometries", geometries), ("devices", devices)):
        if len(given) != len(members):
            raise ValueError(f"{name}: expected one for each of {len(members)} parameters, got {len(given)}")
    found: list[Item] = []
    for index, ((group, param), seen, device) in enumerate(zip(members, geometries, devices, strict=True)):
        if seen.classes:
            found.extend(_blocks(index, group, param, seen, device))
        else:
            found.extend(_slices(index, tuple(param.shape)))
    return found


def members_of(groups: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], Tensor]]:
    """Return each parameter once, in the order of the groups, with its group."""
    found: dict[Tensor, dict[str, Any]] = {}
    for group in groups:
        for param in group["params"]:
            found.setdefault(param, group)
    return [(group, param) for param, group in found.items()]


def _blocks(
    index: int, group: dict[str, Any], param: Tensor, seen: Geometry, device: torch.device
) -> Iterator[Item]:
    """Yield the blocks of a parameter; grafted by layer they need each other's lengths, and stay together."""
    recipe = recipe_of(group)
    unit = index if recipe.grafting is not None and recipe.grafting_scope == "layer" else -1
    dtype, p = recipe.dtype_for(param), recipe.exponent(seen.factors)
    for number, blocks in enumerate(seen.classes):
        cost = float(round(block_cost(recipe, p, blocks, dtype, device).mean))
        elements = math.prod(blocks.shape)
        for i in range(blocks.count):
            yield Item(index, number, i, i + 1, cost, elements, unit)


def _slices(index: int, shape: tuple[int, ...]) -> Iterator[Item]:
    """Yield the slices of a parameter that AdamW updates: whole rows of dimension 0, so that they are rectangles of its state as well."""
    elements = math.prod(shape)
    row = elements // shape[0] if elements and shape else 1
    most = row * max(1, SLICE // row)
    for start in range(0, elements, most):
        stop = min(start + most, elements)
        yield Item(index, None, start, stop, ADAMW * (stop - start), stop - start)


def assign(items: Sequence[Item], ranks: int) -> Assignment:
    """Return an owner for each item: the longest first, each to the rank that has least to do so far (LPT), then exchanges while they relieve the busiest rank.

    The largest load is at most ``4/3 - 1/(3 ranks)`` times the least possible (Graham, SIAM J. Appl. Math. 17, 1969). Ranks with equally much to do are filled by
    elements, then by number. Of items of equal cost and size each rank owns consecutive ones, which makes transfers longer and fewer. The same items give the
    same owners in every process.

    Raises:
        TypeError: for a number of ranks that is no integer.
        ValueError: for less than one rank.
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int):
        raise TypeError(f"ranks: expected an integer, got {type(ranks).__name__}")
    if ranks < 1:
        raise ValueError(f"ranks: expected an integer >= 1, got {ranks}")
    unit_of, costs, sizes = _units(items)
    order = np.lexsort((np.arange(len(costs)), -sizes, -costs))
    kinds = _kinds(costs[order], sizes[order])
    attainable = _pigeonhole(costs[order], ranks)
    held = _longest_first(costs[order], sizes[order], kinds, ranks)
    _exchange(held, costs[order][np.flatnonzero(np.diff(kinds, prepend=-1))], attainable * (1 + _CLOSE))
    owner_of = np.empty(len(costs), dtype=np.int64)
    owner_of[order] = _owners(held, kinds)
    elements = np.zeros(ranks, dtype=np.int64)
    np.add.at(elements, owner_of, sizes)
    return Assignment(
        owners=tuple(owner_of[unit_of].tolist()),
        ranks=ranks,
        loads=tuple(np.bincount(owner_of, weights=costs, minlength=ranks).tolist()),
        elements=tuple(elements.tolist()),
        bound=max(float(costs.sum()) / ranks, float(costs.max(initial=0.0))),
        attainable=attainable,
    )


def _units(
    items: Sequence[Item],
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
    """Return the unit of each item, numbered in the order of their first items, and the cost and elements of each unit."""
    numbers: dict[int, int] = {}
    unit_of = np.empty(len(items), dtype=np.int64)
    count = 0
    for i, item in enumerate(items):
        number = count if item.unit < 0 else numbers.setdefault(item.unit, count)
        unit_of[i] = number
        count += number == count
    costs, sizes = np.zeros(count), np.zeros(count, dtype=np.int64)
    np.add.at(costs, unit_of, np.array([item.cost for item in items], dtype=np.float64))
    np.add.at(sizes, unit_of, np.array([item.elements for item in items], dtype=np.int64))
    return unit_of, costs, sizes


def _kinds(costs: NDArray[np.float64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number the runs of equal cost and size."""
    new = (np.diff(costs, prepend=costs[:1]) != 0) | (np.diff(sizes, prepend=sizes[:1]) != 0)
    return np.cumsum(new)


def _longest_first(
    costs: NDArray[np.float64], sizes: NDArray[np.int64], kinds: NDArray[np.int64], ranks: int
) -> list[Counter[int]]:
    """Return how many units of each kind each rank gets: in this order, each to the rank with the least (load, elements, number)."""
    held: list[Counter[int]] = [Counter() for _ in range(ranks)]
    heap = [(0.0, 0, rank) for rank in range(ranks)]
    for cost, size, kind in zip(costs.tolist(), sizes.tolist(), kinds.tolist(), strict=True):
        load, elements, rank = heap[0]
        held[rank][kind] += 1
        heapq.heapreplace(heap, (load + cost, elements + size, rank))
    return held


def _exchange(held: list[Counter[int]], costs: NDArray[np.float64], enough: float) -> None:
    """Relieve the busiest rank, in place, until its load is ``enough`` or no exchange of two units, or move of one, makes it less.

    LPT never sees that three small items fill a rank better than two and a large one. Each exchange lowers the load that was the largest, and raises none to it.
    """
    loads = np.array([sum(costs[kind] * n for kind, n in sorted(own.items())) for own in held])
    for _ in range(_EXCHANGES * len(held)):
        busiest = int(loads.argmax())
        if loads[busiest] <= enough:
            return
        found = min(
            (
                exchange
                for partner in np.unique(loads, return_index=True)[1][:_PARTNERS].tolist()
                if (exchange := _best(held, costs, loads, busiest, partner)) is not None
            ),
            default=None,
        )
        if found is None:
            return
        _, partner, given, taken = found
        for kind, source, target in ((given, busiest, partner), (taken, partner, busiest)):
            if kind >= 0:
                held[source] -= Counter({kind: 1})
                held[target][kind] += 1
                loads[source] -= costs[kind]
                loads[target] += costs[kind]


def _best(
    held: list[Counter[int]],
    costs: NDArray[np.float64],
    loads: NDArray[np.float64],
    busiest: int,
    partner: int,
) -> tuple[float, int, int, int] | None:
    """Return the larger load of both after their best exchange, the partner, the kind it is given and the kind it gives (-1: nothing); None if none helps."""
    gap = float(loads[busiest] - loads[partner])
    theirs = [-1, *sorted(held[partner], reverse=True)]  # the cheapest first
    prices = [0.0, *(float(costs[kind]) for kind in theirs[1:])]
    best = None
    for kind in sorted(held[busiest]):
        cost = float(costs[kind])
        near = bisect.bisect_left(prices, cost - gap / 2)
        for i in range(max(near - 1, 0), min(near + 1, len(prices))):
            moved = cost - prices[i]
            larger = float(loads[busiest]) - min(moved, gap - moved)
            if 0 < moved < gap and larger < loads[busiest] and (best is None or larger < best[0]):
                best = larger, partner, kind, theirs[i]
    return best


def _owners(held: list[Counter[int]], kinds: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the owner of each unit: of each kind the first rank has the first ones."""
    counts = sorted((kind, rank, n) for rank, own in enumerate(held) for kind, n in own.items())
    return np.repeat(
        np.array([rank for _, rank, _ in counts], dtype=np.int64),
        np.array([n for _, _, n in counts], dtype=np.int64),
    )


def _pigeonhole(costs: NDArray[np.float64], ranks: int) -> float:
    """Return the greatest of the mean load and, for every k, the least that k + 1 of the first ``k ranks + 1`` units cost; costs are descending."""
    sums = np.concatenate([[0.0], np.cumsum(costs)])
    k = np.arange(-(-len(costs) // ranks))
    shared = sums[k * ranks + 1] - sums[k * ranks - k]
    return float(max(sums[-1] / ranks, shared.max(initial=0.0)))
