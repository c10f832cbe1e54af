# SPDX-License-Identifier: Apache-2.0
"""The state of several ranks can be saved, and any number of ranks can go on from it."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed_jobs import alone, farthest, model_of, optimizer_of, same, train, whole, wrapped
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from dash_optim import DASH
from dash_optim.distributed_checkpoint import Pieces, pieces_of, rows_of

Answer = tuple[dict[str, Any], dict[str, Tensor]]


def _saved(rank: int, world: int, way: str, path: Path) -> Answer:
    """Take five steps, save, and take five more; return the state when it was saved, and the parameters at the end."""
    model = model_of()
    outer = wrapped(model, way, world)
    opt = optimizer_of(model, way)
    train(outer, opt, range(5), rank, world)
    dcp.save(
        {"model": get_model_state_dict(outer), "optim": get_optimizer_state_dict(outer, opt)},
        checkpoint_id=path,
    )
    state = copy.deepcopy(opt.full_state_dict())
    assert state is not None
    train(outer, opt, range(5, 10), rank, world)
    return state, whole(model)


def _resumed(rank: int, world: int, way: str, path: Path, used: bool) -> Answer:
    """Load and take five steps, with an optimizer that is new or has been used."""
    model = model_of()
    outer = wrapped(model, way, world)
    opt = optimizer_of(model, way)
    if used:
        train(outer, opt, range(20, 23), rank, world)
    wanted = {"model": get_model_state_dict(outer), "optim": get_optimizer_state_dict(outer, opt)}
    dcp.load(wanted, checkpoint_id=path)
    set_model_state_dict(outer, wanted["model"])
    set_optimizer_state_dict(outer, opt, wanted["optim"])
    state = copy.deepcopy(opt.full_state_dict())
    assert state is not None
    train(outer, opt, range(5, 10), rank, world)
    return state, whole(model)


@pytest.mark.parametrize(
    ("saver", "loader"),
    [
        (("ddp", 2), ("ddp", 2)),
        (("fsdp", 3), ("fsdp", 3)),
        (("ddp", 2), ("ddp", 3)),
        (("ddp", 3), ("fsdp", 2)),
        (("fsdp", 4), ("ddp", 2)),
        (("fsdp", 2), ("fsdp", 4)),
        (("alone", 1), ("ddp", 4)),
        (("alone", 1), ("fsdp", 3)),
        (("ddp", 4), ("alone", 1)),
        (("fsdp", 3), ("alone", 1)),
        (("hsdp", 4), ("ddp", 3)),
    ],
    ids=str,
)
def test_any_ranks_go_on_from_the_state_of_any_others(
    saver: tuple[str, int], loader: tuple[str, int], tmp_path: Path
) -> None:
    states = on_ranks(saver[1], _saved, saver[0], tmp_path)
    used = saver != loader
    found = on_ranks(loader[1], _resumed, loader[0], tmp_path, used)
    for state, params in found:
        assert same(_without_options(state), _without_options(states[0][0]))
        difference = farthest(params, states[0][1])
        assert difference == 0 if saver == loader else difference < 1e-10


def _without_options(state: dict[str, Any]) -> dict[str, Any]:
    return {"state": state["state"]}


def _full(rank: int, world: int, way: str) -> Any:
    model = model_of()
    outer = wrapped(model, way, world)
    opt = optimizer_of(model, way)
    train(outer, opt, range(5), rank, world)
    file, only = io.BytesIO(), opt.full_state_dict(to=1)
    assert (only is not None) == (rank == 1)
    torch.save(opt.full_state_dict(), file)
    with pytest.raises(TypeError, match="full_state_dict"):
        torch.save(opt.state_dict(), io.BytesIO())
    with pytest.raises(TypeError, match="copy"):
        copy.deepcopy(opt)
    train(outer, opt, range(5, 10), rank, world)
    return file.getvalue(), whole(model)


def _consolidated(rank: int, world: int, way: str) -> Any:
    model = model_of()
    outer = wrapped(model, way, world)
    opt = optimizer_of(model, way)
    train(outer, opt, range(3), rank, world)
    opt.consolidate_state_dict(to=0)
    only = opt.state_dict() if rank == 0 else None
    kinds = {type(value) for own in opt.state_dict()["state"].values() for value in own.values()}
    opt.consolidate_state_dict()
    train(outer, opt, range(3, 4), rank, world)
    after = {type(value) for own in opt.state_dict()["state"].values() for value in own.values()}
    return only, Pieces in kinds, Pieces in after


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_one_rank_can_be_asked_alone_once_all_have_been_told(way: str) -> None:
    """What ZeroRedundancyOptimizer is asked by Lightning; a step makes it void."""
    first, second = on_ranks(2, _consolidated, way)
    _, opt = alone(3)
    assert second[0] is None
    assert [first[1:], second[1:]] == [(True, True)] * 2
    expected = opt.state_dict()
    assert [list(own) for own in first[0]["state"].values()] == [
        list(own) for own in expected["state"].values()
    ]
    for found, own in zip(first[0]["state"].values(), expected["state"].values(), strict=True):
        for key, value in own.items():
            close = (
                torch.allclose(found[key], value, rtol=1e-6, equal_nan=True)
                if isinstance(value, Tensor)
                else found[key] == value
            )
            assert close, key


def _from_full(rank: int, world: int, way: str, state: dict[str, Any], params: dict[str, Tensor]) -> Any:
    """Load a whole state with the optimizer's own method, and take five steps."""
    model = model_of()
    model.load_state_dict(params)
    outer = wrapped(model, way, world)
    opt = optimizer_of(model, way)
    opt.load_state_dict(state)
    again = opt.full_state_dict()
    train(outer, opt, range(5, 10), rank, world)
    return again, whole(model)


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_a_whole_state_is_that_of_one_process_both_ways(way: str) -> None:
    """``torch.save`` of what `full_state_dict` returns, and ``load_state_dict`` of what one process has saved."""
    model, opt = alone(5)
    state, params = copy.deepcopy(opt.state_dict()), whole(model)
    train(model, opt, range(5, 10))
    expected = whole(model)
    for file, found in on_ranks(2, _full, way):
        assert farthest(found, expected) < 1e-10
        loaded = torch.load(io.BytesIO(file), weights_only=True)
        fresh = model_of()
        fresh.load_state_dict(params)
        other = optimizer_of(fresh, "alone")
        other.load_state_dict(loaded)
        train(fresh, other, range(5, 10))
        assert farthest(whole(fresh), expected) < 1e-10
    for again, found in on_ranks(3, _from_full, way, state, params):
        assert same(again["state"], state["state"])
        assert farthest(found, expected) < 1e-10


def _with_options(rank: int, world: int, way: str, state: dict[str, Any], params: dict[str, Tensor]) -> Any:
    """Set a whole state by torch's helper, which broadcasts or takes it as it is."""
    model = model_of()
    model.load_state_dict(params)
    outer = wrapped(model, way, world)
    opt = optimizer_of(model, way)
    set_optimizer_state_dict(outer, opt, state, options=StateDictOptions(full_state_dict=True))
    return opt.full_state_dict()


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_torchs_helper_sets_a_whole_state(way: str) -> None:
    model, opt = alone(5)
    state = get_optimizer_state_dict(model, opt)
    for again in on_ranks(2, _with_options, way, state, whole(model)):
        assert same(again["state"], opt.state_dict()["state"])


def _of_another(rank: int, world: int) -> None:
    """Load what rank 0 alone has seen, as if it were everything."""
    model = model_of()
    outer = wrapped(model, "ddp", world)
    opt = optimizer_of(model, "ddp")
    train(outer, opt, range(3), rank, world)
    own = opt.state_dict()
    partial = {"state": own["state"], "param_groups": own["param_groups"]}
    before = copy.deepcopy(opt.full_state_dict())
    other = optimizer_of(model, "alone")
    with pytest.raises(ValueError, match=r"lacks|one rank"):
        other.load_state_dict(partial)
    assert not other.state
    assert same(opt.full_state_dict(), before)


def test_the_pieces_of_one_rank_are_refused_by_a_process_on_its_own() -> None:
    on_ranks(2, _of_another)


def _extra_layer(rank: int, world: int) -> tuple[Any, Any]:
    """Add a group after three steps; what was there keeps its state."""
    model, more = model_of(), nn.Linear(9, 7).double()
    outer = wrapped(model, "ddp", world)
    opt = optimizer_of(model, "ddp")
    train(outer, opt, range(3), rank, world)
    before = copy.deepcopy(opt.full_state_dict())
    opt.add_param_group({"params": [(f"more.{n}", p) for n, p in more.named_parameters()], "name": "more"})
    opt.zero_grad()
    for param in more.parameters():
        param.grad = torch.ones_like(param)
    opt.step()
    return before, opt.full_state_dict()


def test_a_group_can_be_added_after_steps() -> None:
    for before, after in on_ranks(2, _extra_layer):
        assert all(same(after["state"][i], own) for i, own in before["state"].items())
        assert len(after["state"]) == len(before["state"]) + 2


def test_pieces_know_where_they_are() -> None:
    full = torch.arange(24.0).reshape(6, 2, 2)
    pieces = pieces_of(full.to("meta"), [0, 1, 4], full[[0, 1, 4]])
    assert [(start, len(piece)) for start, piece in pieces.shards] == [(0, 2), (4, 1)]
    assert pieces.shape == full.shape
    assert torch.equal(rows_of(pieces, [1, 4]), full[[1, 4]])  # type: ignore[arg-type]
    assert rows_of(pieces, [1, 2]) is None
    assert torch.equal(rows_of(full, [5]), full[[5]])  # type: ignore[arg-type]
    half = pieces.to(torch.float16)
    assert isinstance(half, Pieces)
    assert half.dtype == torch.float16
    assert all(piece.dtype == torch.float16 for _, piece in half.shards)
    with pytest.raises(NotImplementedError, match="full_state_dict"):
        pieces + 1


def test_pieces_of_a_scalar() -> None:
    whole_one = torch.empty((), device="meta")
    assert pieces_of(whole_one, [], torch.empty(0)).shards == []
    piece = pieces_of(whole_one, [0], torch.tensor([3.0]))
    assert torch.equal(rows_of(piece, [0]), torch.tensor([3.0]))  # type: ignore[arg-type]


def test_a_process_group_of_one_is_a_process_on_its_own() -> None:
    (found,) = on_ranks(1, _is_plain)
    assert found


def _is_plain(rank: int, world: int) -> bool:
    opt = DASH([nn.Parameter(torch.ones(4, 4))], process_group=dist.group.WORLD)
    opt.param_groups[0]["params"][0].grad = torch.ones(4, 4)
    opt.step()
    return all(
        type(value) is Tensor for value in opt.state_dict()["state"][0].values() if isinstance(value, Tensor)
    )
