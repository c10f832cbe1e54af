# SPDX-License-Identifier: Apache-2.0
"""The optimizer against its reference in plain NumPy, every parameter after every step; the reference against torch."""

from __future__ import annotations

import inspect
from dataclasses import asdict
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
import torch
from dash_cases import (
    ALL_SHAPES,
    GRAFTINGS,
    LEVELS,
    MOMENTA,
    PAIRS,
    SHAPES,
    STACKINGS,
    Gradients,
    Groups,
    both,
    by_dash,
    by_reference,
    case,
    problem,
    torch_parameters,
    torch_steps,
)
from dash_reference import Graft, Options, Reference, Shampoo

import dash_optim

NEVER = 10**6  # a start_step that no test reaches


def assert_agreement(groups: Groups, gradients: Gradients, tolerance: float = 1e-9, **defaults: Any) -> None:
    """Relative to the furthest that a parameter gets from where it starts."""
    expected, found = by_reference(groups, gradients, **defaults), by_dash(groups, gradients, **defaults)
    for i, start in enumerate(W for group in groups for W in group["params"]):
        W, V = (np.array([values[i] for values in run]) for run in (expected, found))
        assert W.shape == V.shape
        moved = np.abs(W - start).max(initial=0.0)
        apart = np.abs(W - V).reshape(len(W), -1).max(axis=1, initial=0.0)
        wrong = np.flatnonzero(~(apart <= tolerance * moved))
        where = (
            f"parameter {i} {start.shape}, steps {wrong[:5] + 1}: {apart.max():.1e} apart, moved {moved:.1e}"
        )
        assert wrong.size == 0, f"{where}; {[{**defaults, **group, 'params': ...} for group in groups]}"


def test_the_table_holds_every_pair_of_options():
    for one, other in combinations(LEVELS, 2):
        for a, b in product([level for level in one if level], [level for level in other if level]):
            assert any({**a, **b}.items() <= row.items() for row in PAIRS), (a, b)


@pytest.mark.parametrize("i", range(len(PAIRS)))
def test_fifty_steps_for_every_pair_of_options(i):
    group, gradients = case(PAIRS[i], seed=i)
    assert_agreement([group], gradients, stacking=group.pop("stacking"))


@pytest.mark.parametrize("i", range(2 * len(SHAPES)))
def test_a_group_for_every_grafting_and_momentum(i):
    """The full product, all in one optimizer: a group takes its own options, and blocks of all groups may be stacked."""
    shapes, bias_correction = list(product(SHAPES.values(), [True, False]))[i]
    groups, gradients = [], [[] for _ in range(6)]
    for seed, (grafting, momentum) in enumerate(product(GRAFTINGS, MOMENTA)):
        starts, own = problem(shapes, "missing", steps=6, seed=seed)
        groups.append({"params": starts, **grafting, **momentum})
        gradients = [a + b for a, b in zip(gradients, own, strict=True)]
    options = {"lr": 0.01, "block_size": 8, "update_freq": 2, "refresh_young": False, "start_step": 1}
    assert_agreement(groups, gradients, bias_correction=bias_correction, stacking=STACKINGS[i % 3], **options)


@pytest.mark.parametrize("i", range(9))
def test_groups_that_differ_in_every_option(i):
    """Roots of other exponents, dampings and turns side by side; staggered blocks are numbered over all groups."""
    groups, gradients = [], [[] for _ in range(14)]
    for seed, row in enumerate(PAIRS[i::9]):
        group, own = case(row, seed=seed, steps=14)
        del group["stacking"]
        groups.append({**group, "algorithm": "adamw"} if seed == 3 else group)
        gradients = [a + b for a, b in zip(gradients, own, strict=True)]
    assert_agreement(groups, gradients, stacking=STACKINGS[i % 3])


@pytest.mark.parametrize("stacking", STACKINGS)
@pytest.mark.parametrize("block_size", [1, 4, 8, np.inf])
def test_all_shapes_at_once(block_size, stacking):
    starts, gradients = problem(ALL_SHAPES, "missing", steps=4 if block_size == 1 else 12)
    options = {"lr": 0.01, "one_d": "dash", "nd": "tensor"}
    calendar = {"refresh": "staggered", "update_freq": 3, "refresh_young": False}
    sizes = {"block_size": block_size, "stacking": stacking}
    assert_agreement([{"params": starts}], gradients, **sizes, **calendar, **options)


@pytest.mark.parametrize("stacking", STACKINGS)
@pytest.mark.parametrize("refresh", ["interval", "staggered"])
@pytest.mark.parametrize(("update_freq", "start_step"), [(10, 0), (10, 5), (3, 0)])
def test_young_factors_of_any_age(update_freq, start_step, refresh, stacking):
    """Until they are old; some parameters lack gradients now and then, so that factors of one stack differ in what they have seen."""
    starts, gradients = problem([(5, 9), (6, 4), (6, 4)], "missing", steps=66)
    seen = [sum(each[i] is not None for each in gradients) for i in range(3)]
    assert min(seen) > 4 * update_freq
    options = {"lr": 0.01, "block_size": 4, "start_step": start_step, "stacking": stacking}
    assert_agreement([{"params": starts}], gradients, refresh=refresh, update_freq=update_freq, **options)


def test_defaults_are_those_of_the_reference():
    starts, gradients = problem(ALL_SHAPES, steps=15)
    assert_agreement([{"params": starts}], gradients)
    keywords = inspect.signature(dash_optim.DASH).parameters
    expected = {
        k: v for k, v in asdict(Options()).items() if k != "grafting"
    }  # by name or object: the run shows it
    assert {name: keywords[name].default for name in expected} == expected


@pytest.mark.parametrize("kind", ["dense", "late"])
@pytest.mark.parametrize("method", ["ndb", "cn", "minimax", "rational"])
def test_other_solvers_give_the_same_steps(method, kind):
    """With ``rel_damping`` 1e-6 no condition number exceeds 1e6: a root is right to about 1e6 u = 1e-10 and times n."""
    starts, gradients = problem(SHAPES["rests"] + [(4, 2, 3, 3), (16, 1)], kind, steps=8)
    options = {"lr": 0.01, "block_size": 8, "update_freq": 3, "refresh_young": False, "momentum": 0.9}
    assert_agreement([{"params": starts}], gradients, tolerance=1e-8, method=method, **options)


@pytest.mark.parametrize("grafting", [None, "adam"])
def test_other_solvers_take_exponents_of_their_own(grafting):
    starts, gradients = problem(SHAPES["tensors"], steps=8)
    for method, p in (("cn", 3), ("minimax", 3.0), ("rational", "8/3"), ("ndb", 2)):
        options = {
            "lr": 0.01,
            "nd": "tensor",
            "p": p,
            "grafting": grafting,
            "update_freq": 3,
            "refresh_young": False,
        }
        assert_agreement([{"params": starts}], gradients, tolerance=1e-8, method=method, **options)


TORCH = {
    "AdamW": (
        {"algorithm": "adamw"},
        lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.85, 0.99), weight_decay=0.0),
    ),
    "AdamW with options": (
        {
            "algorithm": "adamw",
            "betas": (0.0, 0.8),
            "eps": 1e-2,
            "weight_decay": 0.5,
            "maximize": True,
            "bias_correction": False,
        },
        lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.0, 0.8), eps=1e-2, weight_decay=0.5, maximize=True),
    ),
    "AdamW, no dimension small enough": (
        {"max_factor_dim": 1, "eps": 1e-2, "momentum": 0.9},
        lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.85, 0.99), eps=1e-2, weight_decay=0.0),
    ),
    "Adam": (
        {"start_step": NEVER},
        lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.85, 0.99), weight_decay=0.0),
    ),
    "Adam with options": (
        {"start_step": NEVER, "grafting": Graft("adam", 0.8, 1e-2), "weight_decay": 0.5, "maximize": True},
        lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.85, 0.8), eps=1e-2, weight_decay=0.5, maximize=True),
    ),
    "RMSprop": (
        {"start_step": NEVER, "grafting": Graft("rmsprop", 0.8, 1e-2), "betas": (0.0, 0.9), "momentum": 0.9},
        lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.8, eps=1e-2, momentum=0.9),
    ),
    "Adagrad": (
        {"start_step": NEVER, "grafting": Graft("adagrad", eps=1e-2), "betas": (0.0, 0.9)},
        lambda p: torch.optim.Adagrad(p, lr=0.01, eps=1e-2),
    ),
    "SGD": (
        {"start_step": NEVER, "grafting": "sgd", "betas": (0.0, 0.9), "momentum": 0.9, "nesterov": True},
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    ),
    "SGD without grafting": (
        {"start_step": NEVER, "grafting": "none", "betas": (0.0, 0.9), "momentum": 0.9},
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    ),
}


@both
@pytest.mark.parametrize("name", TORCH)
def test_steps_without_a_preconditioner_are_those_of_torch(name, run):
    options, optimizer = TORCH[name]
    starts, gradients = problem([(5, 6), (4, 1, 3, 2), (7,), (1, 7)], "missing", steps=20)
    parameters = torch_parameters(starts)
    expected = torch_steps(optimizer(parameters), parameters, gradients)
    found = run([{"params": starts}], gradients, **{"lr": 0.01, "block_size": 4, "one_d": "dash", **options})
    for t, values in enumerate(expected):
        for W, V in zip(values, found[t], strict=True):
            np.testing.assert_allclose(V, W, rtol=1e-12, atol=1e-14)


@both
def test_vectors_and_scalars_take_adamw_by_default(run):
    starts, gradients = problem([(7,), (1,), (), (1, 1), (0,)], steps=20)
    parameters = torch_parameters(starts)
    optimizer = torch.optim.AdamW(parameters, lr=0.01, betas=(0.85, 0.99), weight_decay=0.1)
    expected = torch_steps(optimizer, parameters, gradients)
    found = run([{"params": starts}], gradients, lr=0.01, weight_decay=0.1, start_step=3, grafting=None)
    for t, values in enumerate(expected):
        for W, V in zip(values, found[t], strict=True):
            np.testing.assert_allclose(V, W, rtol=1e-12, atol=1e-14)


def test_the_reference_cuts_and_numbers_its_blocks_as_written():
    rules = Reference([{"params": [np.ones((5, 1, 3)), np.ones(4), np.ones((2, 2))]}], block_size=2).rules
    assert [rule.first for rule in rules if isinstance(rule, Shampoo)] == [0, 6]
    corners = [tuple((side.start, side.stop) for side in block) for block in rules[0].blocks]
    assert corners == [
        ((0, 2), (0, 2)), ((0, 2), (2, 3)), ((2, 4), (0, 2)), ((2, 4), (2, 3)), ((4, 5), (0, 2)), ((4, 5), (2, 3)),
    ]  # fmt: skip
