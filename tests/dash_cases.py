# SPDX-License-Identifier: Apache-2.0
"""Problems for the optimizer, and the ways to run one: the NumPy reference, the optimizer under test, one of torch's."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from fractions import Fraction
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from dash_reference import Graft, Reference

import dash_optim

Shapes = Iterable[tuple[int, ...]]
Groups = list[dict[str, Any]]
Gradients = list[list[np.ndarray | None]]
Run = Callable[..., list[list[np.ndarray]]]
Levels = tuple[tuple[dict[str, Any], ...], ...]

SHAPES = {
    "rests": [(11, 13), (8, 13), (11, 8), (3, 5), (8, 8)],
    "thin": [(16, 1), (1, 7), (5,), (2, 3, 2), (), (1,), (0, 4), (13,)],
    "tensors": [(4, 2, 3, 3), (6, 4, 5), (1, 3, 1, 4)],
    "deep": [(4, 2, 3, 3, 3), (2, 2, 2, 2), (3, 1)],
}
ALL_SHAPES = [shape for shapes in SHAPES.values() for shape in shapes]


def one(name: str, *values: Any) -> tuple[dict[str, Any], ...]:
    """The values that one option takes, each as a dictionary of keywords."""
    return tuple({name: value} for value in values)


GRAFTINGS = one(
    "grafting",
    None,
    "sgd",
    "adagrad",
    "rmsprop",
    "adam",
    Graft("rmsprop", 0.7, 1e-3),
    Graft("adam", 0.7, 0.1),
)
MOMENTA: tuple[dict[str, Any], ...] = ({}, {"momentum": 0.9}, {"momentum": 0.8, "nesterov": True})
STACKINGS = ("device", "layer", "none")

LEVELS: Levels = (
    one("shapes", *SHAPES),
    one("gradients", "dense", "missing", "late", "sparse"),
    one("stacking", *STACKINGS),
    one("block_size", 1, 4, 8, math.inf),
    one("p", None, 2, 4.0, Fraction(3), "8/3"),
    GRAFTINGS,
    one("grafting_scope", "block", "layer"),
    MOMENTA,
    one("bias_correction", True, False),
    one("betas", (0.9, 0.95), (0.0, 0.8)),
    ({}, {"beta3": 0.0}, {"betas": (0.9, 0.95), "beta3": 0.9}, {"betas": (0.8, 0.95), "beta3": 0.6}),
    one("beta_factors", 0.95, 0.6, 1.0),
    one("update_freq", 1, 3, 10),
    one("refresh_young", True, False),
    one("refresh", "interval", "staggered"),
    one("start_step", 0, 3),
    ({}, {"damping": 0.01, "rel_damping": 0.0}, {"damping": 0.1, "rel_damping": 0.01}),
    ({}, {"weight_decay": 0.1}, {"lr": 0.05, "weight_decay": 0.5}),
    one("maximize", False, True),
    one("nd", "matrix", "tensor"),
    one("one_d", "adamw", "dash"),
    one("max_factor_dim", 8192, 10),
    ({}, {"eps": 0.1}),
)


def pairwise(levels: Levels, candidates: int = 30) -> list[dict[str, Any]]:
    """Rows of one level for each option in which every two levels of two options meet; chosen greedily."""
    draw = random.Random(0)
    cells = [(i, a) for i, level in enumerate(levels) for a in range(len(level))]
    left = {pair for pair in combinations(cells, 2) if pair[0][0] != pair[1][0]}
    rows = []
    while left:
        fixed = dict(min(left))
        drawn = [
            [fixed.get(i, draw.randrange(len(level))) for i, level in enumerate(levels)]
            for _ in range(candidates)
        ]
        best = max(drawn, key=lambda row: len(left.intersection(combinations(enumerate(row), 2))))
        left.difference_update(combinations(enumerate(best), 2))
        rows.append({k: v for level, a in zip(levels, best, strict=True) for k, v in level[a].items()})
    return rows


PAIRS = pairwise(LEVELS)


def problem(
    shapes: Shapes, kind: str = "dense", steps: int = 50, seed: int = 0
) -> tuple[list[np.ndarray], Gradients]:
    """Parameters to start from, and a gradient or None for each of them at every step."""
    draw = np.random.default_rng(seed)
    starts = [np.asarray(draw.standard_normal(shape)) for shape in shapes]
    drifts = [np.asarray(draw.standard_normal(W.shape)) for W in starts]
    steps_ = range(1, steps + 1)
    return starts, [[_gradient(draw, drift, kind, i, t) for i, drift in enumerate(drifts)] for t in steps_]


def _gradient(draw: np.random.Generator, drift: np.ndarray, kind: str, i: int, t: int) -> np.ndarray | None:
    """The gradient of parameter i at step t: drift and noise, of a size that changes from step to step."""
    G = np.asarray((drift + draw.standard_normal(drift.shape)) * 10 ** draw.uniform(-0.5, 0.5))
    if kind == "missing" and ((i + t) % 3 == 0 or (i == 1 and t <= 4)):
        return None
    if kind == "late" and t <= 2:
        return np.zeros_like(G)
    if kind == "sparse" and G.ndim > 0:  # rows without a gradient, as of an embedding
        G[(np.arange(len(G)) + t // 4) % 3 == 0] = 0.0
    return G


def case(row: dict[str, Any], **more: Any) -> tuple[dict[str, Any], Gradients]:
    """One row of the table: a group of parameters with its options, and the gradients."""
    options = {k: v for k, v in row.items() if k not in ("shapes", "gradients")}
    shapes = SHAPES[row["shapes"]]
    if row["block_size"] == 1:  # a block for each entry
        shapes = [shape for shape in shapes if math.prod(shape) <= 20]
    starts, gradients = problem(shapes, row["gradients"], **more)
    return {"params": starts, "lr": 0.01, **options}, gradients


def by_reference(groups: Groups, gradients: Gradients, **defaults: Any) -> list[list[np.ndarray]]:
    """All parameters after each step of the reference."""
    reference = Reference(groups, **{k: v for k, v in defaults.items() if k not in ("method", "stacking")})
    return [reference.step(each) for each in gradients]


def by_dash(groups: Groups, gradients: Gradients, **defaults: Any) -> list[list[np.ndarray]]:
    """All parameters after each step of the optimizer under test, with factors and roots in fp64."""
    parameters = [torch_parameters(group["params"]) for group in groups]
    groups = [{**translated(group), "params": p} for group, p in zip(groups, parameters, strict=True)]
    options = {"method": "evd", "factor_dtype": torch.float64, **translated(defaults)}
    return torch_steps(dash_optim.DASH(groups, **options), [p for own in parameters for p in own], gradients)


def translated(options: dict[str, Any]) -> dict[str, Any]:
    """The same options with the library's own grafting objects."""
    grafting = dash_optim.grafting
    graft = options.get("grafting")
    if not isinstance(graft, Graft):
        return options
    if graft.name == "adagrad":
        return {**options, "grafting": grafting.AdaGrad(eps=graft.eps)}
    kind = {"rmsprop": grafting.RMSProp, "adam": grafting.Adam}[graft.name]
    return {**options, "grafting": kind(beta2=graft.beta2, eps=graft.eps)}


def torch_parameters(values: Iterable[np.ndarray]) -> list[torch.nn.Parameter]:
    """Copies of arrays, to train."""
    return [torch.nn.Parameter(torch.tensor(W)) for W in values]


def torch_steps(
    optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], gradients: Gradients
) -> list[list[np.ndarray]]:
    """All parameters after each step of an optimizer with torch's interface."""
    values = []
    for each in gradients:
        for parameter, G in zip(parameters, each, strict=True):
            parameter.grad = None if G is None else torch.tensor(G)
        optimizer.step()
        values.append([parameter.detach().numpy().copy() for parameter in parameters])
    return values


# an identity holds for the reference and for the optimizer
both = pytest.mark.parametrize("run", [by_reference, by_dash], ids=["reference", "dash"])


def trajectory(run: Run, W: np.ndarray, gradients: Iterable[np.ndarray | None], **options: Any) -> np.ndarray:
    """One parameter after each step."""
    return np.array([values[0] for values in run([{"params": [W]}], [[G] for G in gradients], **options)])


def updates(run: Run, gradients: Iterable[np.ndarray], **options: Any) -> np.ndarray:
    """What each step subtracts from one parameter, at lr 1 unless said."""
    gradients = list(gradients)
    zero = np.zeros_like(gradients[0])
    return -np.diff(trajectory(run, zero, gradients, **{"lr": 1.0, **options}), axis=0, prepend=zero[None])
