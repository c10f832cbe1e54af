# SPDX-License-Identifier: Apache-2.0
"""Parameters that are sharded, moved or replaced after the optimizer was made, as accelerate does."""

from __future__ import annotations

from typing import Any

import pytest
from distributed_jobs import alone, farthest, model_of, optimizer_of, train, whole, wrapped
from ranks import on_ranks
from torch import Tensor

from dash_optim import DASH


def _replaced(rank: int, world: int, given: bool, before: int) -> tuple[str, dict[str, Tensor]]:
    """Make the optimizer, ask it for its state, take some steps, and only then shard the model."""
    model = model_of()
    outer = wrapped(model, "ddp", world) if before else model
    opt: DASH = optimizer_of(model, "ddp" if given else "alone")
    opt.load_state_dict(opt.state_dict())
    train(outer, opt, range(before), rank, world)
    names = {param: name for name, param in model.named_parameters()}
    groups = [[names[param] for param in group["params"]] for group in opt.param_groups]
    outer = wrapped(model, "fsdp", world)
    now: dict[str, Any] = dict(model.named_parameters())
    for group, chosen in zip(opt.param_groups, groups, strict=True):
        group["params"] = [now[name] for name in chosen]
    train(outer, opt, range(before, 6), rank, world)
    return opt.summary(), whole(model)


@pytest.mark.parametrize(("given", "before"), [(False, 0), (True, 0), (True, 3)])
def test_sharded_parameters_in_the_place_of_others(given: bool, before: int) -> None:
    expected = whole(alone(6)[0])
    for summary, found in on_ranks(2, _replaced, given, before):
        assert "imbalance" in summary
        assert farthest(found, expected) < 1e-10
