# SPDX-License-Identifier: Apache-2.0
"""Several ranks do what one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_jobs import (
    alone,
    backward,
    farthest,
    gathered,
    model_of,
    optimizer_of,
    train,
    whole,
    wrapped,
)
from ranks import on_ranks
from torch import Tensor

OPTION_SETS: dict[str, dict[str, Any]] = {
    "default": {},
    "p=4, staggered, momentum": {"p": 4, "refresh": "staggered", "momentum": 0.5, "nesterov": True},
    "by layer, no bias correction": {"grafting_scope": "layer", "bias_correction": False},
    "adagrad, sums of factors": {"grafting": "adagrad", "beta_factors": 1.0, "betas": (0.0, 0.99)},
    "certified": {"refresh": "certified", "refresh_tol": 0.3, "rel_damping": 1e-3, "p": 2},
    "vectors and all": {"one_d": "dash", "nd": "tensor", "start_step": 2, "block_size": 5},
    "one block a parameter": {"block_size": float("inf"), "stacking": "layer"},
    "all by AdamW": {"algorithm": "adamw"},
}


def _job(
    rank: int, world: int, way: str, dtype: torch.dtype, steps: int, options: dict[str, Any]
) -> tuple[dict[str, Tensor], float]:
    model = model_of(dtype)
    outer = wrapped(model, way, world)
    opt = optimizer_of(model, way, **options)
    train(outer, opt, range(steps), rank, world)
    found = whole(model)
    apart = 0.0
    for value in found.values():
        seen = [torch.empty_like(value) for _ in range(world)]
        dist.all_gather(seen, value)
        apart += sum(float(not torch.equal(other, value)) for other in seen)
    return found, apart


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_thirty_steps_are_those_of_one_process(world: int, way: str) -> None:
    expected = whole(alone(30)[0])
    for found, apart in on_ranks(world, _job, way, torch.float64, 30, {}):
        assert farthest(found, expected) < 1e-10
        assert apart == 0


def _recorded(rank: int, world: int, way: str, dtype: torch.dtype, options: dict[str, Any]) -> Any:
    """Return the mean gradients of all steps, and the parameters at the end."""
    model = model_of(dtype)
    outer = wrapped(model, way, world)
    opt = optimizer_of(model, way, **options)
    gradients = []
    for step in range(30):
        backward(outer, step, rank, world)
        gradients.append([gathered(param.grad) for param in model.parameters()])
        opt.step()
    return gradients, whole(model)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("dtype", "wire", "limit"),
    [("float32", None, 1e-6), ("bfloat16", None, 0.02), ("float32", "bfloat16", 1e-3)],
)
def test_in_lower_precision_they_are_those_of_one_process_on_the_mean_gradient(
    world: int, way: str, dtype: str, wire: str | None, limit: float
) -> None:
    # a model amplifies what rounding does to the mean by thousands in thirty steps: the same mean goes to both
    kind, options = (
        getattr(torch, dtype),
        {} if wire is None else {"communication_dtype": getattr(torch, wire)},
    )
    for gradients, found in on_ranks(world, _recorded, way, kind, options):
        model = model_of(kind)
        opt = optimizer_of(model, "alone")
        for of_step in gradients:
            for param, gradient in zip(model.parameters(), of_step, strict=True):
                param.grad = gradient
            opt.step()
        assert farthest(found, whole(model)) <= limit


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", list(OPTION_SETS)[1:])
def test_every_option_means_the_same(way: str, name: str) -> None:
    expected = whole(alone(8, **OPTION_SETS[name])[0])
    for found, apart in on_ranks(3, _job, way, torch.float64, 8, OPTION_SETS[name]):
        assert farthest(found, expected) < 1e-10
        assert apart == 0
