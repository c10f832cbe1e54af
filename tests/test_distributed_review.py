"""What a search for weak places has found: schedules and mistakes that the other tests do not have."""

from __future__ import annotations

import copy

import pytest
import torch
from distributed_jobs import alone, farthest, model_of, optimizer_of, train, whole, wrapped
from ranks import on_ranks
from torch import Tensor, nn

from dash_optim import DASH

WAYS = pytest.mark.parametrize("way", ["ddp", "fsdp"])


def _made(way: str, world: int, **options: object) -> tuple[nn.Sequential, nn.Module, DASH]:
    model = model_of()
    outer = wrapped(model, way, world)
    return model, outer, optimizer_of(model, way, **options)


def _scheduled_after_loading(rank: int, world: int, way: str) -> dict[str, Tensor]:
    model, outer, opt = _made(way, world)
    train(outer, opt, range(3), rank, world)
    opt.load_state_dict(copy.deepcopy(opt.full_state_dict() or {}))
    for group in opt.param_groups:
        group["lr"] = 0.3
    train(outer, opt, range(3, 5), rank, world)
    return whole(model)


@WAYS
def test_decay_follows_the_learning_rate_after_loading(way: str) -> None:
    """``load_state_dict`` replaces the groups; the decay went on with the learning rate of the old ones."""
    model, opt = alone(3)
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    for group in opt.param_groups:
        group["lr"] = 0.3
    train(model, opt, range(3, 5))
    for found in on_ranks(2, _scheduled_after_loading, way):
        assert farthest(found, whole(model)) < 1e-10
