# SPDX-License-Identifier: Apache-2.0
"""What a search for weak places has found: schedules and mistakes that the other tests do not have."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed_jobs import alone, backward, farthest, model_of, optimizer_of, same, train, whole, wrapped
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dash_optim import DASH, PeerError

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


def _momentum_later(rank: int, world: int, way: str) -> tuple[list[bool], dict[str, Tensor]]:
    """Begin to keep a momentum after two steps; look at the state before it is first used, and load it where nobody knows of it yet."""
    model, outer, opt = _made(way, world)
    train(outer, opt, range(2), rank, world)
    for group in opt.param_groups:
        group["momentum"] = 0.5
    opt.state_dict()
    opt.full_state_dict()
    train(outer, opt, range(2, 4), rank, world)
    state = copy.deepcopy(opt.full_state_dict())
    _, _, other = _made(way, world)
    other.load_state_dict(state or {})
    train(outer, opt, range(4, 6), rank, world)
    return [same(other.full_state_dict(), state)], whole(model)


@WAYS
def test_momentum_that_begins_later_is_kept_and_loaded(way: str) -> None:
    """``state_dict`` was a KeyError until the next step, and ``load_state_dict`` dropped what the options of before did not ask for."""
    model, opt = alone(2)
    for group in opt.param_groups:
        group["momentum"] = 0.5
    train(model, opt, range(2, 6))
    for loaded, found in on_ranks(2, _momentum_later, way):
        assert loaded == [True]
        assert farthest(found, whole(model)) < 1e-10


def _momentum_of_before(rank: int, world: int) -> float:
    """Load the state of a run without momentum into an optimizer with one: the checkpoint's options win, as ever."""
    model, outer, opt = _made("ddp", world)
    train(outer, opt, range(2), rank, world)
    state = copy.deepcopy(opt.full_state_dict())
    other = optimizer_of(model, "ddp", momentum=0.9)
    other.load_state_dict(state or {})
    assert same(other.full_state_dict(), state)
    return float(other.param_groups[0]["momentum"])


def test_a_state_without_momentum_can_be_loaded() -> None:
    assert on_ranks(2, _momentum_of_before) == [0.0, 0.0]


def _differing(rank: int, world: int, what: str) -> None:
    """Give ranks other options or groups, a NaN to both, and take a step."""
    params = [nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))]
    options: dict[str, Any] = {
        "nonfinite": {"nonfinite": "raise" if rank else "skip"},
        "wire": {"communication_dtype": torch.bfloat16 if rank else None},
        "groups": {},
    }[what]
    apart = what == "groups" and rank
    groups = [{"params": [param]} for param in params] if apart else [{"params": params}]
    opt = DASH(groups, block_size=4, process_group=dist.group.WORLD, **options)
    for param in params:
        param.grad = torch.full_like(param, torch.nan if what == "nonfinite" else 1.0)
    opt.step()


@pytest.mark.parametrize("what", ["nonfinite", "wire", "groups"])
def test_ranks_that_would_wait_for_different_things_are_told_so(what: str) -> None:
    """Each of them hung until the time-out, or the process was ended by gloo."""
    for kind, message, seconds in on_ranks(2, _differing, what, expect=Exception):
        assert kind == "ValueError"
        assert message.startswith("params: ranks 0 and 1 do not agree")
        assert seconds < 10


def _placed_otherwise(rank: int, world: int, only_one: bool) -> None:
    mesh = init_device_mesh("cpu", (world,))
    param = nn.Parameter(distribute_tensor(torch.ones(8, 6), mesh, [Shard(0)]))
    opt = DASH([("w", param)], block_size=4)
    if rank == 1 or not only_one:
        param.grad = DTensor.from_local(torch.ones(8, 6), mesh, [Replicate()])
    opt.step()


@pytest.mark.parametrize("on_all", [True, False])
def test_gradients_that_are_placed_otherwise_are_refused(on_all: bool) -> None:
    """The first rows of a whole gradient were taken for those of every rank."""
    answers = on_ranks(2, _placed_otherwise, not on_all, expect=(TypeError, PeerError))
    assert [kind for kind, _, _ in answers] == ["TypeError" if on_all else "PeerError", "TypeError"]
    assert all("gradient of parameter 'w'" in message for _, message, _ in answers)


def _own_meshes(rank: int, world: int) -> list[bool]:
    """Give each layer a mesh of its own, over the same ranks."""
    model = model_of()
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    opt = optimizer_of(model, "hsdp")
    train(model, opt, range(2), rank, world)
    return [farthest(whole(model), whole(alone(2)[0])) < 1e-10]


def test_meshes_of_the_same_ranks_are_one_group() -> None:
    """Parameters of the second layer were "sharded over other ranks"."""
    assert on_ranks(4, _own_meshes) == [[True]] * 4


def _looked_at(rank: int, world: int) -> list[str]:
    """Look at the state before there is one, and start a second parameter late: a rank owns no part of one of them."""
    params = [nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))]
    opt = DASH(params, block_size=4, process_group=dist.group.WORLD)
    for step in range(3):
        for param in params[: 1 + step]:
            assert not opt.state[param] or step
            param.grad = torch.ones(4, 4)
        opt.step()
    return [str(float(opt.state[param]["step"])) for param in params]


def test_state_may_be_looked_at_by_ranks_that_own_none_of_it() -> None:
    """``opt.state[param]`` makes an entry, and the step then was a KeyError on a rank without blocks."""
    assert on_ranks(2, _looked_at) == [["3.0", "2.0"]] * 2


def _bad_input(rank: int, world: int, what: str) -> None:
    param = nn.Parameter(torch.ones(4, 4))
    given: dict[str, Any] = {"process_group": dist.group.WORLD}
    if what == "process_group":
        given = {"process_group": init_device_mesh("cpu", (world,))}
    if what == "communication_dtype":
        given["communication_dtype"] = torch.float8_e4m3fn
    opt = DASH([param], **given)
    param.grad = torch.ones(4, 4)
    opt.step()
    opt.full_state_dict(to=world)


@pytest.mark.parametrize("what", ["process_group", "communication_dtype", "to"])
def test_bad_input_is_named(what: str) -> None:
    """A mesh failed in its first step, float8 as "another rank has probably ended", and of a rank that is not there nobody had the state."""
    for kind, message, _ in on_ranks(2, _bad_input, what, expect=Exception):
        assert kind in ("TypeError", "ValueError")
        assert message.startswith(f"{what}: expected ")


def _nothing(rank: int, world: int, what: str) -> float:
    """Share groups without parameters, all of them or on one rank, or a parameter without elements."""
    param = nn.Parameter(torch.ones(4, 4))
    empty = {"all": [], "one": [param] if rank else [], "elements": [nn.Parameter(torch.ones(0, 4)), param]}
    opt = DASH([{"params": empty[what]}, {"params": []}], process_group=dist.group.WORLD, block_size=4)
    for one in opt.param_groups[0]["params"]:
        one.grad = torch.ones_like(one)
    opt.step()
    opt.summary()
    opt.diagnostics(certify=True)
    state = opt.full_state_dict()
    assert state is not None
    assert bool(state["state"]) == (what == "elements")
    return sum(float(own["step"]) for own in state["state"].values())


def test_groups_without_parameters() -> None:
    """There was an IndexError, on one rank only where the others have parameters."""
    assert on_ranks(2, _nothing, "all") == [0, 0]
    for kind, message, _ in on_ranks(2, _nothing, "one", expect=Exception):
        assert kind == "ValueError"
        assert "do not agree" in message


def test_a_parameter_without_elements_counts_its_steps() -> None:
    """One process left its count at 0; ranks counted."""
    param = nn.Parameter(torch.ones(0, 4))
    param.grad = torch.ones(0, 4)
    opt = DASH([param], block_size=4)
    opt.step()
    assert float(opt.state[param]["step"]) == 1
    assert on_ranks(2, _nothing, "elements") == [2, 2]


def _saved_meanwhile(rank: int, world: int, way: str, path: Path) -> bool:
    """Train on while the state of three steps is written."""
    _, outer, opt = _made(way, world)
    train(outer, opt, range(3), rank, world)
    before = copy.deepcopy(opt.full_state_dict())
    own_group = dist.new_group()  # the writers' collectives must not meet those of the training
    state = {"optim": get_optimizer_state_dict(outer, opt)}
    writing = dcp.async_save(state, checkpoint_id=path, process_group=own_group)
    train(outer, opt, range(3, 6), rank, world)
    writing.result()
    dist.barrier()
    wanted = {"optim": get_optimizer_state_dict(outer, opt)}
    dcp.load(wanted, checkpoint_id=path)
    set_optimizer_state_dict(outer, opt, wanted["optim"])
    return same((opt.full_state_dict() or {})["state"], (before or {})["state"])


@WAYS
def test_a_state_is_saved_while_training_goes_on(way: str, tmp_path: Path) -> None:
    """``async_save`` could not copy pieces."""
    assert on_ranks(2, _saved_meanwhile, way, tmp_path) == [True, True]


def _asked_alone(rank: int, world: int) -> list[bool]:
    """Let rank 0 alone ask for everything that is no collective, before steps, between them, and after a group has been added."""
    model, outer, opt = _made("ddp", world)
    extra = nn.Parameter(torch.ones(6, 6, dtype=torch.float64))
    for step in range(3):
        if rank == 0:
            opt.summary()
            opt.diagnostics(certify=True)
            opt.state_dict()
        dist.barrier()  # which would meet whatever those have begun
        train(outer, opt, range(step, step + 1), rank, world)
        if step == 1:
            opt.add_param_group({"params": [("extra", extra)], "name": "extra"})
    return [farthest(whole(model), whole(alone(3)[0])) < 1e-10]


def test_one_rank_may_ask_alone() -> None:
    """After ``add_param_group`` the first of these waited for all other ranks."""
    assert on_ranks(2, _asked_alone) == [[True], [True]]


def _loaded_by_one(rank: int, world: int, then: str) -> None:
    """Load a checkpoint on rank 0 alone, as for a DistributedDataParallel that would spread the parameters."""
    _, outer, opt = _made("ddp", world)
    if rank == 0:
        opt.load_state_dict(alone(3)[1].state_dict())
    if then == "train":
        train(outer, opt, range(1), rank, world)
    else:
        opt.full_state_dict()


@pytest.mark.parametrize("then", ["train", "gather"])
def test_a_checkpoint_that_one_rank_has_loaded_is_refused(then: str) -> None:
    """The other ranks began their blocks anew without a word, and ``full_state_dict`` hung."""
    for kind, message, _ in on_ranks(2, _loaded_by_one, then, expect=Exception):
        assert kind == "ValueError"
        assert message.startswith("state: ranks have taken different numbers of steps")


def _scheduled(model: nn.Module, opt: DASH, rank: int = 0, world: int = 1) -> None:
    """Train with a learning rate that is a tensor: scheduled, then zero, then with another root."""
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step))
    for step in range(9):
        if step == 5:
            for group in opt.param_groups:
                group["lr"].fill_(0.0)
        if step == 6:
            for group in opt.param_groups:
                group["lr"].fill_(0.02)
                group.update(p=4, update_freq=2)
        train(model, opt, range(step, step + 1), rank, world)
        if step < 5:
            schedule.step()


def _by_tensor(rank: int, world: int, way: str) -> dict[str, Tensor]:
    model, outer, opt = _made(way, world, lr=torch.tensor(0.01))
    _scheduled(outer, opt, rank, world)
    return whole(model)


@WAYS
def test_a_learning_rate_that_is_a_tensor(way: str) -> None:
    """``1 - lr weight_decay`` was rounded to float32 with it."""
    model = model_of()
    _scheduled(model, optimizer_of(model, "alone", lr=torch.tensor(0.01)))
    for found in on_ranks(2, _by_tensor, way):
        assert farthest(found, whole(model)) < 1e-10


def _wide_gradient(rank: int, world: int) -> Tensor:
    """Give a bfloat16 parameter a float32 gradient, on rank 0 only."""
    param = nn.Parameter(torch.ones(8, 4, dtype=torch.bfloat16))
    param.grad_dtype = torch.float32
    opt = DASH([param], block_size=4, lr=0.1, process_group=dist.group.WORLD)
    if rank == 0:
        param.grad = torch.full((8, 4), 1.001)
    opt.step()
    return param.detach()


def test_a_gradient_of_another_dtype_reaches_a_rank_that_has_none() -> None:
    """Gloo ended the process: one rank sent four bytes an element, the other waited for two."""
    first, second = on_ranks(2, _wide_gradient)
    assert torch.equal(first, second)
    assert bool((first < 1).all())


def _one_copy(rank: int, world: int) -> float:
    """Put a NaN into the rows of one of two copies; return how far the copies are from one another."""
    model, outer, opt = _made("hsdp", world)
    train(outer, opt, range(2), rank, world)
    backward(outer, 2, rank, world)
    gradient = model[4].weight.grad
    assert isinstance(gradient, DTensor)
    if rank == 0:
        gradient.to_local()[0, 0] = torch.nan
    opt.step()
    said: list[Any] = [None] * world
    param = model[4].weight
    assert isinstance(param, DTensor)
    dist.all_gather_object(said, param.to_local().detach().clone())
    return float((said[rank] - said[(rank + 2) % 4]).abs().max())


def test_copies_do_not_drift_apart() -> None:
    assert on_ranks(4, _one_copy) == [0.0] * 4


def _sharded_later(rank: int, world: int) -> list[float]:
    """Add a sharded parameter to an optimizer that has been on its own."""
    mesh = init_device_mesh("cpu", (world,))
    param = nn.Parameter(torch.ones(4, 4))
    opt = DASH([param], block_size=4)
    for step in range(3):
        if step == 2:
            later = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
            opt.add_param_group({"params": [later]})
            later.grad = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        param.grad = torch.ones(4, 4)
        opt.step()
    state = opt.full_state_dict()
    assert state is not None
    return [float(own["step"]) for own in state["state"].values()]


def test_state_outlives_the_first_sharded_parameter() -> None:
    """What there was before it was dropped."""
    assert on_ranks(2, _sharded_later) == [[3.0, 1.0]] * 2


def _half_done(rank: int, world: int) -> None:
    _, outer, opt = _made("ddp", world)
    train(outer, opt, range(2), rank, world)
    if rank == 1:
        opt._known().inner.update = _no_memory  # type: ignore[method-assign]
    train(outer, opt, range(2, 3), rank, world)


def _no_memory(*args: Any) -> None:
    raise RuntimeError("out of memory")


def test_after_half_a_step_nobody_is_left_to_save_it() -> None:
    """Rank 0 had taken the step of its blocks, and a checkpoint of that would have been of no step at all."""
    (kind, message, _), other = on_ranks(2, _half_done, expect=Exception)
    assert kind == "PeerError"
    assert message.startswith(
        "rank 1 has failed: RuntimeError: out of memory. Parameters are as before the step"
    )
    assert other[1] == "out of memory"


def _nearly_the_mean(rank: int, world: int) -> bool:
    """Leave out rank 2's gradient, and round rank 1's otherwise; whether it is still what it was."""
    param = nn.Parameter(torch.ones(4, 4))
    opt = DASH([param], block_size=4, process_group=dist.group.WORLD)
    gradient = torch.full((4, 4), 1 + 1e-5 * rank)
    if rank < 2:
        param.grad = gradient.clone()
    opt.step()
    return param.grad is None if rank == 2 else torch.equal(param.grad, gradient)  # type: ignore[arg-type]


def test_gradients_are_left_alone() -> None:
    """That of rank 1 was overwritten by that of rank 0, which rank 2 needs."""
    assert on_ranks(3, _nearly_the_mean) == [True] * 3


def _outside(rank: int, world: int) -> float:
    """Share among two of three ranks."""
    param = nn.Parameter(torch.ones(4, 4))
    opt = DASH([param], block_size=4, process_group=dist.new_group([0, 1]))
    param.grad = torch.ones(4, 4)
    opt.step()
    opt.param_groups[0]["lr"] += 1e-12 * rank
    with (
        pytest.raises(ValueError, match=r"0\.001 on one rank and 0\.001000000001")
        if rank < 2
        else nullcontext()
    ):
        opt.step()
    return float(param[0, 0])


def test_a_rank_outside_of_the_group_does_everything_itself() -> None:
    """And options that differ by little are shown so that they do."""
    found = on_ranks(3, _outside)
    assert found[0] == found[1]
    assert found[0] < 1
    assert found[2] < found[0]


def _failing_in_a_node(rank: int, world: int) -> None:
    """Share within pairs of ranks, and let rank 3 fail."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    param = nn.Parameter(torch.ones(4, 4))
    opt = DASH([param], block_size=4, process_group=groups[rank // 2])
    param.grad = torch.ones(4, 4).to_sparse() if rank == 3 else torch.ones(4, 4)
    opt.step()


def test_ranks_are_named_by_their_number_among_all() -> None:
    """Rank 3 was called 1, its number within its group."""
    answers = on_ranks(4, _failing_in_a_node, expect=(TypeError, PeerError))
    assert answers[:2] == [None, None]
    assert answers[2][1].startswith("rank 3 has failed: TypeError: gradient of")
    assert answers[3][0] == "TypeError"
