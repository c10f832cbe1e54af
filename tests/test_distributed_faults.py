# SPDX-License-Identifier: Apache-2.0
"""Ranks that differ, fail or die: nobody waits for ever, and everybody knows what happened."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed_jobs import (
    OPTIONS,
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
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dash_optim import DASH, NonfiniteGradientError, PeerError

WAYS = pytest.mark.parametrize("way", ["ddp", "fsdp"])
SOON = 10.0  # seconds


def _made(way: str, world: int, **options: Any) -> tuple[nn.Sequential, nn.Module, DASH]:
    model = model_of()
    outer = wrapped(model, way, world)
    return model, outer, optimizer_of(model, way, **options)


def _without_gradients(rank: int, world: int, way: str) -> tuple[dict[str, Tensor], list[float]]:
    model, outer, opt = _made(way, world)
    for step in range(4):
        backward(outer, step, rank, world)
        if rank == 1 and step == 2:
            opt.zero_grad()
        opt.step()
    found = whole(model)
    seen = [torch.zeros(sum(v.numel() for v in found.values()), dtype=torch.float64) for _ in range(world)]
    dist.all_gather(seen, torch.cat([v.flatten() for v in found.values()]))
    assert all(torch.equal(one, seen[0]) for one in seen)
    return found, [float(own["step"]) for own in opt.state_dict()["state"].values()]


@WAYS
def test_a_rank_without_gradients_takes_part(way: str) -> None:
    """CASES B03."""
    answers = on_ranks(2, _without_gradients, way)
    assert all(steps == [4.0] * len(steps) for _, steps in answers)
    assert farthest(answers[0][0], answers[1][0]) == 0
    if way == "ddp":  # every rank had the mean: that of rank 0 is used
        assert farthest(answers[0][0], whole(alone(4)[0])) < 1e-10


def _some_without(rank: int, world: int, way: str) -> dict[str, Tensor]:
    """Leave a parameter without gradient on all ranks for two steps, and one for ever."""
    model, outer, opt = _made(way, world)
    for step in range(5):
        backward(outer, step, rank, world)
        if step < 2:
            model[4].weight.grad = None
        model[6].bias.grad = None
        opt.step()
    return whole(model)


@WAYS
def test_parameters_without_gradients_are_left_alone(way: str) -> None:
    """CASES B02 on several ranks."""
    model = model_of()
    opt = optimizer_of(model, "alone")
    for step in range(5):
        backward(model, step)
        if step < 2:
            model[4].weight.grad = None
        model[6].bias.grad = None
        opt.step()
    for found in on_ranks(3, _some_without, way):
        assert farthest(found, whole(model)) < 1e-10


def _decay(rank: int, world: int, way: str) -> dict[str, Tensor]:
    model, _, opt = _made(way, world)
    for _ in range(5):
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        opt.step()
    return whole(model)


@WAYS
def test_decay_is_the_same_on_all_ranks(way: str) -> None:
    """CASES B12: with gradients of zero ``p = p0 (1 - lr wd)^5``, vectors as they were."""
    start = whole(model_of())
    first, second = on_ranks(2, _decay, way)
    assert farthest(first, second) == 0
    for name, value in first.items():
        factor = (1 - OPTIONS["lr"] * 0.1) ** 5 if value.ndim > 1 else 1.0
        assert torch.allclose(value, start[name] * factor, rtol=1e-14, atol=0)


def _nonfinite(rank: int, world: int, way: str, what: str) -> Any:
    model, outer, opt = _made(way, world, nonfinite=what)
    for step in range(4):
        backward(outer, 10 if step == 2 and what == "skip" else step, rank, world)
        if step == 2:
            gradient = model[4].weight.grad
            local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            if rank == 1:
                local[0, 0] = torch.inf
        opt.step()
    return whole(model), opt.diagnostics().skipped_steps


@WAYS
def test_what_one_rank_sees_is_skipped_by_all(way: str) -> None:
    model = model_of()
    opt = optimizer_of(model, "alone")
    for step in (0, 1, 3):
        backward(model, step)
        opt.step()
    for found, skipped in on_ranks(2, _nonfinite, way, "skip"):
        assert skipped == 1
        assert farthest(found, whole(model)) < 1e-10


@WAYS
def test_what_one_rank_sees_is_raised_by_all(way: str) -> None:
    answers = on_ranks(2, _nonfinite, way, "raise", expect=(NonfiniteGradientError, PeerError))
    assert [kind for kind, _, _ in answers] == ["PeerError", "NonfiniteGradientError"]
    assert "rank 1" in answers[0][1]
    assert "4.weight" in answers[0][1]


def _not_averaged(rank: int, world: int) -> None:
    """Forget DistributedDataParallel."""
    model = model_of()
    opt = optimizer_of(model, "ddp")
    train(model, opt, range(1), rank, world)


def test_gradients_that_nobody_averaged_are_refused() -> None:
    """CASES B26: what a rank would do with its own gradient is not the step of the mean."""
    for kind, message, _ in on_ranks(2, _not_averaged, expect=ValueError):
        assert kind == "ValueError"
        assert "Average gradients" in message


def _other_options(rank: int, world: int, name: str) -> None:
    _, outer, opt = _made("ddp", world)
    opt.param_groups[1][name] = 0.01 * (1 + rank)
    train(outer, opt, range(1), rank, world)


@pytest.mark.parametrize("name", ["lr", "weight_decay"])
def test_options_that_differ_are_refused(name: str) -> None:
    for kind, message, _ in on_ranks(2, _other_options, name, expect=ValueError):
        assert kind == "ValueError"
        assert message.startswith(f"{name}: group 1 has 0.01 on one rank and 0.02")


def _other_blocks(rank: int, world: int) -> None:
    _, outer, opt = _made("ddp", world, block_size=8 + rank)
    train(outer, opt, range(1), rank, world)


def test_other_blocks_on_other_ranks_are_refused() -> None:
    for kind, message, _ in on_ranks(2, _other_blocks, expect=ValueError):
        assert kind == "ValueError"
        assert "do not agree" in message


def _failing(rank: int, world: int, way: str, how: str) -> None:
    """Let the last rank fail in its third step."""
    model, outer, opt = _made(way, world, failure_budget=0)
    train(outer, opt, range(2), rank, world)
    backward(outer, 2, rank, world)
    if rank == world - 1 and how == "roots":
        for own in opt._shared().inner.state.values():
            for key, value in own.items():
                if "factor" in key:
                    value.fill_(torch.nan)
    if rank == world - 1 and how == "memory":
        opt._shared().inner.update = _no_memory  # type: ignore[method-assign]
    if rank == world - 1 and how == "sparse":
        model[0].weight.grad = torch.ones(11, 12, dtype=torch.float64).to_sparse()
    if rank == world - 1 and how in OPTION:
        opt.param_groups[0]["lr"] = OPTION[how]
    shared = opt._shared()
    if rank == world - 1 and how == "bringing":
        shared.exchange.bring = _no_memory  # type: ignore[method-assign]
    if rank == world - 1 and how == "sending":
        shared.exchange.send = _no_memory  # type: ignore[method-assign]
    if rank == world - 1 and how == "moving":
        shared._apply = _no_memory  # type: ignore[method-assign]
    try:
        opt.step()
        if how == "moving":  # the others have taken that step
            opt.step()
    finally:
        if how == "roots":  # after the step
            assert all(bool(value.isfinite().all()) for value in whole(model).values())


def _no_memory(*args: Any) -> None:
    raise RuntimeError("out of memory")


OPTION = {"word": "fast", "two": torch.ones(2), "none": None, "nan": float("nan")}
FAILING = [
    ("roots", "PreconditionerError", "parameter '"),
    ("memory", "RuntimeError", "out of memory"),
    ("sparse", "TypeError", "'0.weight'"),
    *((how, "ValueError", "lr: expected a finite number in group 0") for how in OPTION),
    *((how, "RuntimeError", "out of memory") for how in ("bringing", "sending", "moving")),
]


@WAYS
@pytest.mark.parametrize(("how", "own", "said"), FAILING)
def test_a_rank_that_fails_ends_all(way: str, how: str, own: str, said: str) -> None:
    if (way, how) == ("fsdp", "sparse"):
        pytest.skip("fully_shard has no sparse gradients")
    answers = on_ranks(3, _failing, way, how, expect=Exception)
    assert [kind for kind, _, _ in answers] == ["PeerError", "PeerError", own]
    for _, message, seconds in answers[:2]:
        assert message.startswith("rank 2 has failed")
        assert said in message
        assert seconds < SOON


def _killed(rank: int, world: int, way: str, seed: int, path: Path) -> Any:
    """Save after every second step; rank 1 dies at a random moment."""
    model, outer, opt = _made(way, world)
    draw = random.Random(seed)
    step, moment = draw.randrange(3, 8), draw.random() * 0.02
    for i in range(10):
        if rank == 1 and i == step:
            threading.Timer(moment, os.kill, (os.getpid(), signal.SIGKILL)).start()
        train(outer, opt, range(i, i + 1), rank, world)
        if i % 2:
            parts = {"model": get_model_state_dict(outer), "optim": get_optimizer_state_dict(outer, opt)}
            dcp.save(parts, checkpoint_id=path / f"step{i + 1}")
            (path / f"done{i + 1}.{rank}").touch()
    return whole(model)


def _continued(rank: int, world: int, way: str, path: Path, step: int) -> dict[str, Tensor]:
    model, outer, opt = _made(way, world)
    wanted = {"model": get_model_state_dict(outer), "optim": get_optimizer_state_dict(outer, opt)}
    dcp.load(wanted, checkpoint_id=path / f"step{step}")
    set_model_state_dict(outer, wanted["model"])
    set_optimizer_state_dict(outer, opt, wanted["optim"])
    train(outer, opt, range(step, 10), rank, world)
    return whole(model)


def _undisturbed(rank: int, world: int, way: str) -> dict[str, Tensor]:
    model, outer, opt = _made(way, world)
    train(outer, opt, range(10), rank, world)
    return whole(model)


@WAYS
def test_a_rank_that_dies_ends_all_and_nothing_is_lost(way: str, tmp_path: Path) -> None:
    expected = on_ranks(2, _undisturbed, way)[0]
    started = time.monotonic()
    answers = on_ranks(2, _killed, way, 1, tmp_path, expect=(PeerError, RuntimeError), dying=1)
    assert time.monotonic() - started < SOON + 10
    assert answers[0] is None or isinstance(answers[0], dict | tuple)
    saved = [
        step for step in (2, 4, 6, 8, 10) if all((tmp_path / f"done{step}.{r}").exists() for r in (0, 1))
    ]
    assert saved
    for found in on_ranks(2, _continued, way, tmp_path, saved[-1]):
        assert farthest(found, expected) == 0


@pytest.mark.slow
def test_no_random_death_hangs(tmp_path: Path) -> None:
    """Two hundred deaths, in gradients, roots, collectives and saves."""
    for seed in range(200):
        folder = tmp_path / str(seed)
        folder.mkdir()
        way, world = ("ddp", "fsdp")[seed % 2], 2 + seed % 3
        on_ranks(world, _killed, way, seed, folder, expect=Exception, dying=1, timeout=90)


def _hooked(rank: int, world: int, hook: str) -> Any:
    model = model_of(torch.float32)
    outer = wrapped(model, "ddp", world)
    opt = optimizer_of(model, "ddp")
    if hook == "fp16":  # that of bfloat16 wants an accelerator
        outer.register_comm_hook(None, default_hooks.fp16_compress_hook)
    else:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        outer.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    replay = model_of(torch.float32)
    own = optimizer_of(replay, "alone")
    for step in range(6):
        backward(outer, step, rank, world)
        for param, other in zip(model.parameters(), replay.parameters(), strict=True):
            other.grad = gathered(param.grad)
        opt.step()
        own.step()
    return whole(model), whole(replay)


@pytest.mark.parametrize("hook", ["fp16", "PowerSGD"])
def test_communication_hooks(hook: str) -> None:
    answers = on_ranks(2, _hooked, hook)
    assert farthest(answers[0][0], answers[1][0]) == 0
    for found, expected in answers:
        assert farthest(found, expected) < 1e-6


def _accumulated(rank: int, world: int) -> dict[str, Tensor]:
    """Split every batch in two, the first without synchronisation."""
    from distributed_jobs import batches

    model, outer, opt = _made("ddp", world)
    for step in range(4):
        opt.zero_grad()
        x, y = (part.chunk(world)[rank] for part in batches(step))
        with outer.no_sync():
            (nn.functional.cross_entropy(outer(x[::2]), y[::2]) / 2).backward()
        (nn.functional.cross_entropy(outer(x[1::2]), y[1::2]) / 2).backward()
        opt.step()
    return whole(model)


def test_accumulation_changes_nothing() -> None:
    """CASES B28."""
    expected = whole(alone(4)[0])
    for found in on_ranks(2, _accumulated):
        assert farthest(found, expected) < 1e-10


def _clipped(rank: int, world: int) -> dict[str, Tensor]:
    model, outer, opt = _made("fsdp", world)
    for step in range(4):
        backward(outer, step, rank, world)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        opt.step()
    return whole(model)


def test_clipping_of_sharded_gradients() -> None:
    model = model_of()
    opt = optimizer_of(model, "alone")
    for step in range(4):
        backward(model, step)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        opt.step()
    for found in on_ranks(3, _clipped):
        assert farthest(found, whole(model)) < 1e-10


def _placed(rank: int, world: int, which: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2) if which == "both" else (world,))
    placements = {"columns": [Shard(1)], "both": [Shard(0), Shard(0)]}[which]
    DASH([nn.Parameter(distribute_tensor(torch.ones(8, 8), mesh, placements))])


@pytest.mark.parametrize(("which", "world"), [("columns", 2), ("both", 4)])
def test_other_placements_are_refused(which: str, world: int) -> None:
    for kind, message, _ in on_ranks(world, _placed, which, expect=ValueError):
        assert kind == "ValueError"
        assert "Shard(0)" in message


def _mixed(rank: int, world: int) -> dict[str, Tensor]:
    """CASES B24: parameters that are sharded beside some that are not."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (world,))
    first, second = torch.randn(12, 8, dtype=torch.float64), torch.randn(8, 5, dtype=torch.float64)
    params = [nn.Parameter(distribute_tensor(first, mesh, [Shard(0)])), nn.Parameter(second.clone())]
    copied = nn.Parameter(distribute_tensor(second, mesh, [Replicate()]))
    opt = DASH(params, lr=1e-2, block_size=4, momentum=0.9)
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        for param, shape in zip(params, (first.shape, second.shape), strict=True):
            gradient = torch.randn(shape, dtype=torch.float64, generator=generator)
            param.grad = distribute_tensor(gradient, mesh, [Shard(0)]) if param is params[0] else gradient
        opt.step()
    with pytest.raises(ValueError, match=r"Shard\(0\)"):
        DASH([copied])
    return {str(i): gathered(param) for i, param in enumerate(params)}


@pytest.mark.parametrize("world", [1, 3])
def test_sharded_parameters_beside_whole_ones(world: int) -> None:
    torch.manual_seed(0)
    params = [
        nn.Parameter(torch.randn(12, 8, dtype=torch.float64)),
        nn.Parameter(torch.randn(8, 5, dtype=torch.float64)),
    ]
    opt = DASH(params, lr=1e-2, block_size=4, momentum=0.9)
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        for param in params:
            param.grad = torch.randn(param.shape, dtype=torch.float64, generator=generator)
        opt.step()
    for found in on_ranks(world, _mixed):
        assert farthest(found, {str(i): param.detach() for i, param in enumerate(params)}) < 1e-10


def _hybrid(rank: int, world: int) -> tuple[dict[str, Tensor], float]:
    """Share within pairs of ranks only."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = model_of()
    outer = wrapped(model, "ddp", world)
    opt = optimizer_of(model, "ddp", process_group=groups[rank // 2])
    train(outer, opt, range(5), rank, world)
    return whole(model), float(opt._shared().ranks)


def test_sharing_within_a_node() -> None:
    expected = whole(alone(5)[0])
    for found, ranks in on_ranks(4, _hybrid):
        assert ranks == 2
        assert farthest(found, expected) < 1e-10
