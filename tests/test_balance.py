# SPDX-License-Identifier: Apache-2.0
"""Every element has one owner, loads add up, and the largest is within what theorems and exhaustive search say it can be."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dash_optim import DASH, balance, plan_block_size
from dash_optim.balance import SLICE, Item, assign, items_of, members_of
from dash_optim.blocks import Geometry
from dash_optim.checks import route
from dash_optim.cost import ADAMW, EIGENDECOMPOSITION, block_cost
from dash_optim.options import recipe_of

WHOLE = st.integers(1, 60).map(float)
SHAPE = st.lists(st.integers(0, 9), max_size=3).map(tuple)


def made(shapes: list[tuple[int, ...]], **options: Any) -> tuple[DASH, list[Geometry]]:
    opt = DASH([nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes], **options)
    return opt, [route(group, param) for group, param in members_of(opt.param_groups)]


def items(costs: list[float], units: list[int] | None = None) -> list[Item]:
    units = units or [-1] * len(costs)
    return [
        Item(0, 0, i, i + 1, cost, int(cost), unit)
        for i, (cost, unit) in enumerate(zip(costs, units, strict=True))
    ]


def optimum(costs: list[float], ranks: int) -> float:
    """The least possible largest load, by trying all assignments."""
    return min(
        max(sum(c for c, o in zip(costs, owners, strict=True) if o == rank) for rank in range(ranks))
        for owners in itertools.product(range(ranks), repeat=len(costs))
    )


@settings(deadline=None, max_examples=60)
@given(
    st.lists(SHAPE, min_size=1, max_size=4),
    st.integers(1, 5),
    st.sampled_from(["matrix", "tensor"]),
    st.sampled_from([3, 8192]),
)
def test_every_element_is_in_exactly_one_item(
    shapes: list[tuple[int, ...]], block_size: int, nd: str, most: int
) -> None:
    opt, geometries = made(shapes, block_size=block_size, nd=nd, max_factor_dim=most)
    seen = [np.zeros(geometry.view, dtype=int) for geometry in geometries]
    for item in items_of(opt.param_groups, geometries):
        if item.blocks is None:
            seen[item.param].reshape(-1)[item.start : item.stop] += 1
            assert item.elements == item.stop - item.start
            continue
        assert item.stop == item.start + 1
        blocks = geometries[item.param].classes[item.blocks]
        corner = np.unravel_index(item.start, blocks.grid)
        place = tuple(
            slice(o + i * n, o + (i + 1) * n)
            for o, i, n in zip(blocks.offset, corner, blocks.shape, strict=True)
        )
        seen[item.param][place] += 1
        assert seen[item.param][place].size == item.elements
    assert all((count == 1).all() for count in seen)


def test_slices_are_bounded_scalars_have_one_and_nothing_has_none() -> None:
    opt, geometries = made([(2 * SLICE + 5,), (), (0, 4)], algorithm="adamw")
    found = items_of(opt.param_groups, geometries)
    assert [(i.param, i.start, i.stop) for i in found] == [
        (0, 0, SLICE),
        (0, SLICE, 2 * SLICE),
        (0, 2 * SLICE, 2 * SLICE + 5),
        (1, 0, 1),
    ]
    assert sum(item.cost for item in found) == ADAMW * (2 * SLICE + 6)
    assert all(item.blocks is None for item in found)


def test_costs_are_those_of_a_plan() -> None:
    shapes = [(70, 40), (33, 7)]
    for options in ({}, {"p": 4, "update_freq": 3}, {"method": "evd"}):
        opt, geometries = made(shapes, block_size=16, **options)
        found = items_of(opt.param_groups, geometries, [torch.device("cpu")] * 2)
        names = {"a": shapes[0], "b": shapes[1]}
        params = [nn.Parameter(torch.zeros(shape)) for shape in names.values()]
        row = plan_block_size(params, block_sizes=[16], **options).rows[0]
        assert len(found) == row.blocks
        assert sum(i.cost for i in found) == pytest.approx(row.mean_operations, abs=len(found))
        assert all(i.cost == round(i.cost) for i in found)


def test_the_device_decides_what_roots_cost() -> None:
    opt, geometries = made([(64, 64)])
    on = {
        kind: items_of(opt.param_groups, geometries, [torch.device(kind)])[0].cost for kind in ("cpu", "cuda")
    }
    assert on["cpu"] != on["cuda"]  # rational approximation, minimax polynomials
    assert items_of(opt.param_groups, geometries)[0].cost == on["cuda"]  # meta is no CPU


def test_what_the_method_decides_later_counts_as_an_eigendecomposition() -> None:
    opt, geometries = made([(32, 16)], rel_damping=0.0, tol=1e-3, update_freq=4)
    recipe, (blocks,) = recipe_of(opt.param_groups[0]), geometries[0].classes
    cost = block_cost(recipe, recipe.exponent(2), blocks, torch.float32, torch.device("cpu"))
    assert math.isnan(cost.refresh)
    assert cost.step == 2 * 2 * (32 * 16 * 32 + 32 * 16 * 16)
    assert cost.mean == cost.step + (EIGENDECOMPOSITION + 1) * 2 * (32**3 + 16**3) / 4
    for refresh in ("interval", "certified"):
        opt, geometries = made([(32, 16)], rel_damping=1e-4, refresh=refresh)
        assert items_of(opt.param_groups, geometries)[0].cost > cost.step


def test_blocks_that_are_grafted_by_layer_stay_together() -> None:
    opt, geometries = made([(12, 8), (20, 8), (5,)], block_size=4, grafting_scope="layer")
    found = items_of(opt.param_groups, geometries)
    assert {(i.param, i.unit) for i in found} == {(0, 0), (1, 1), (2, -1)}
    plan = assign(found, 3)
    for param in (0, 1):
        assert len({o for i, o in zip(found, plan.owners, strict=True) if i.param == param}) == 1
    assert plan.bound == sum(i.cost for i in found if i.param == 1)
    opt, geometries = made([(12, 8)], block_size=4, grafting_scope="layer", grafting=None)
    assert {i.unit for i in items_of(opt.param_groups, geometries)} == {-1}  # no length to share


def test_a_parameter_of_two_groups_is_owned_once() -> None:
    a, b = (nn.Parameter(torch.empty(4, 4, device="meta")) for _ in range(2))
    opt = DASH([{"params": [a]}, {"params": [b], "algorithm": "adamw"}])
    opt.param_groups[1]["params"].append(a)  # what torch refuses to be given, and a tied model makes by hand
    geometries = [route(group, param) for group, param in members_of(opt.param_groups)]
    assert [(i.param, i.blocks) for i in items_of(opt.param_groups, geometries)] == [(0, 0), (1, None)]


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(WHOLE, st.integers(-1, 5)), max_size=60), st.integers(1, 9))
def test_every_item_has_one_owner_and_loads_add_up(drawn: list[tuple[float, int]], ranks: int) -> None:
    costs, units = [c for c, _ in drawn], [u for _, u in drawn]
    given_items = items(costs, units)
    plan = assign(given_items, ranks)
    assert len(plan.owners) == len(costs)
    assert plan.ranks == len(plan.loads) == len(plan.elements) == ranks
    loads, elements = Counter(), Counter()
    for item, owner in zip(given_items, plan.owners, strict=True):
        loads[owner] += item.cost
        elements[owner] += item.elements
    assert list(plan.loads) == [loads[rank] for rank in range(ranks)]
    assert list(plan.elements) == [elements[rank] for rank in range(ranks)]
    for unit in set(units) - {-1}:
        assert len({o for o, u in zip(plan.owners, units, strict=True) if u == unit}) == 1
    assert plan.bound <= plan.attainable * (1 + 1e-12) <= max(plan.loads, default=0) * (1 + 1e-12)
    assert plan.imbalance >= 1 - 1e-12
    assert assign(given_items, ranks) == plan


@settings(deadline=None, max_examples=60)
@given(st.lists(WHOLE, min_size=1, max_size=7), st.integers(1, 3))
def test_the_largest_load_is_within_grahams_bound_of_the_optimum(costs: list[float], ranks: int) -> None:
    best, plan = optimum(costs, ranks), assign(items(costs), ranks)
    assert plan.attainable <= best <= max(plan.loads) <= (4 / 3 - 1 / (3 * ranks)) * best + 1e-9


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 2**31))
def test_grahams_bound_holds_where_the_optimum_is_known(ranks: int, cuts: int, seed: int) -> None:
    """Each rank's share of 10,000 is cut into pieces, so that the optimum is 10,000."""
    rng = np.random.default_rng(seed)
    costs: list[float] = []
    for _ in range(ranks):
        edges = np.sort(rng.choice(np.arange(1, 10_000), cuts, replace=False))
        costs += np.diff([0, *edges, 10_000]).astype(float).tolist()
    plan = assign(items(rng.permutation(costs).tolist()), ranks)
    assert plan.attainable == plan.bound == 10_000
    assert max(plan.loads) <= (4 / 3 - 1 / (3 * ranks)) * 10_000


def test_exchanges_find_what_the_longest_first_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graham's worst case for three ranks, and blocks of 1024 with rests of 768: 4 and three rests make a rank as full as 6."""
    worst = [5.0, 5.0, 4.0, 4.0, 3.0, 3.0, 3.0]
    rests = [100.0] * (6 * 14 + 4 * 2) + [68.0] * 6
    assert max(assign(items(worst), 3).loads) == 9 == optimum(worst, 3)
    assert max(assign(items(rests), 16).loads) == 604
    monkeypatch.setattr(balance, "_exchange", lambda *_: None)
    assert max(assign(items(worst), 3).loads) == 11
    assert max(assign(items(rests), 16).loads) > 620


def test_the_attainable_bound_knows_that_items_are_whole() -> None:
    plan = assign(items([1.0] * 7), 3)
    assert (plan.bound, plan.attainable, max(plan.loads)) == (7 / 3, 3, 3)
    plan = assign(items([5.0, 4.0, 4.0, 1.0]), 2)
    assert (plan.bound, plan.attainable) == (7, 8)


def test_ranks_own_consecutive_items_of_a_kind() -> None:
    costs = [10.0, 3.0] * 12 + [10.0] * 7
    plan = assign(items(costs), 4)
    for cost in (10.0, 3.0):
        mine = [o for o, c in zip(plan.owners, costs, strict=True) if c == cost]
        assert mine == sorted(mine)


def test_elements_break_ties() -> None:
    """Two ranks have equally much to do; the slice goes to the one that keeps less."""
    sizes = [(100.0, 50), (100.0, 10), (1.0, 7)]
    found = [Item(i, None, 0, n, cost, n) for i, (cost, n) in enumerate(sizes)]
    plan = assign(found, 2)
    assert plan.owners[2] == plan.owners[1] != plan.owners[0]


def test_nothing_to_do_is_balanced() -> None:
    plan = assign([], 3)
    assert (plan.owners, plan.loads, plan.elements, plan.imbalance) == ((), (0.0,) * 3, (0,) * 3, 1.0)
    assert assign(items([4.0]), 3).imbalance == 1.0


def test_every_process_finds_the_same_owners() -> None:
    code = (
        "import random; from dash_optim.balance import Item, assign; r = random.Random(1);"
        "c = [float(r.choice([7, 30, 31, 90])) for _ in range(300)];"
        "u = [r.choice([-1, -1, 3, 1009, 77]) for _ in c];"
        "owners = assign([Item(0, 0, i, i + 1, x, int(x), n) for i, (x, n) in enumerate(zip(c, u))], 7).owners"
    )
    there = subprocess.run(
        [sys.executable, "-c", f"{code}; print(owners)"],
        env={**os.environ, "PYTHONHASHSEED": "2"},
        capture_output=True,
        text=True,
        check=True,
    )
    here: dict[str, Any] = {}
    exec(code, here)
    assert there.stdout.strip() == str(here["owners"])
    assert len(set(here["owners"])) == 7


def test_the_work_does_not_grow_with_items_times_ranks() -> None:
    """40,000 items on 4096 ranks are 160 million pairs, which would take minutes."""
    rng = np.random.default_rng(0)
    found = items(rng.choice([16.0, 9.0, 5.0, 1.0], 40_000).tolist())
    start = time.process_time()
    plan = assign(found, 4096)
    assert time.process_time() - start < 15
    assert plan.imbalance < 1.05


@pytest.mark.parametrize(
    ("error", "ranks"), [(ValueError, 0), (ValueError, -2), (TypeError, 2.0), (TypeError, True)]
)
def test_what_is_no_number_of_ranks_is_refused(error: type[Exception], ranks: Any) -> None:
    with pytest.raises(error, match="ranks: expected an integer"):
        assign(items([1.0]), ranks)


def test_geometries_and_devices_are_one_for_each_parameter() -> None:
    opt, geometries = made([(4, 4), (3,)])
    with pytest.raises(ValueError, match="geometries: expected one for each of 2 parameters, got 1"):
        items_of(opt.param_groups, geometries[:1])
    with pytest.raises(ValueError, match="devices: expected one for each of 2 parameters, got 3"):
        items_of(opt.param_groups, geometries, [torch.device("cpu")] * 3)
