# SPDX-License-Identifier: Apache-2.0
"""Models, data and wrappers for the tests on several ranks, and the same training on one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dash_optim import DASH, param_groups

SAMPLES = 12
OPTIONS: dict[str, Any] = {"lr": 1e-2, "block_size": 8, "update_freq": 3, "rel_damping": 1e-6}


def model_of(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Return a model with an embedding, layers that no block size divides, vectors, and a scalar."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(11, 12),
        nn.Linear(12, 20),
        nn.Tanh(),
        nn.LayerNorm(20),
        nn.Linear(20, 13, bias=False),
        nn.Tanh(),
        nn.Linear(13, 9),
    )
    for param in model.parameters():
        param.data = (
            torch.empty(param.shape, dtype=torch.float64).uniform_(-0.3, 0.3, generator=generator).to(dtype)
        )
    return model


def wrapped(model: nn.Sequential, way: str, world: int) -> nn.Module:
    """Return the model as "ddp", "fsdp" or "hsdp" (two copies) have it, or itself."""
    if way == "ddp":
        return DistributedDataParallel(model)
    if way in ("fsdp", "hsdp"):
        mesh = (
            init_device_mesh("cpu", (world,))
            if way == "fsdp"
            else init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        )
        for layer in model:
            if list(layer.parameters()):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def optimizer_of(model: nn.Module, way: str, **options: Any) -> DASH:
    """Return DASH over a model's parameters, its work shared."""
    shared = {"process_group": dist.group.WORLD} if way == "ddp" else {}
    return DASH(param_groups(model, weight_decay=0.1, verbose=False), **{**OPTIONS, **shared, **options})


def batches(step: int) -> tuple[Tensor, Tensor]:
    """Return the batch of a step, the same for any number of ranks."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 11, (SAMPLES,), generator=generator), torch.randint(
        0, 9, (SAMPLES,), generator=generator
    )


def train(model: nn.Module, opt: torch.optim.Optimizer, steps: range, rank: int = 0, world: int = 1) -> None:
    """Take steps, each on this rank's share of the batch."""
    for step in steps:
        backward(model, step, rank, world)
        opt.step()


def backward(model: nn.Module, step: int, rank: int = 0, world: int = 1) -> None:
    """Put the gradient of a step's batch there."""
    model.zero_grad()
    x, y = (part.chunk(world)[rank] for part in batches(step))
    nn.functional.cross_entropy(model(x), y).backward()


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters by name, unsharded; every rank has to ask."""
    return {name: gathered(param) for name, param in model.named_parameters()}


def gathered(t: Tensor | None) -> Tensor:
    """Return a copy of a tensor, unsharded; every rank has to ask."""
    assert t is not None
    return (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()


def alone(steps: int, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[nn.Sequential, DASH]:
    """Return the model after so many steps in one process."""
    model = model_of(dtype)
    opt = optimizer_of(model, "alone", **options)
    train(model, opt, range(steps))
    return model, opt


def farthest(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the largest difference of two sets of parameters."""
    assert found.keys() == expected.keys()
    sizes = (float((found[name] - value).abs().max()) for name, value in expected.items() if value.numel())
    return max(sizes, default=0.0)


def same(first: Any, second: Any) -> bool:
    """Whether two states are the same bit for bit, NaN included."""
    if isinstance(first, Tensor):
        return first.dtype == second.dtype and torch.equal(first.nan_to_num(7e77), second.nan_to_num(7e77))
    if isinstance(first, Mapping):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


def tensors(state: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield all tensors of a state_dict."""
    for own in state["state"].values():
        yield from (value for value in own.values() if isinstance(value, Tensor))
