# SPDX-License-Identifier: Apache-2.0
"""What every optimizer of torch.optim does: checkpoints, hooks, schedulers, groups; and what this one promises of its roots and its cost."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import math
import pickle
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau
from torch.optim.swa_utils import SWALR, AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode

import dash_optim
import dash_optim.refresh
from dash_optim import DASH, PreconditionerError, from_config, grafting, param_groups
from matroots import NewtonDB, Status, inv_root_ex, lambda_bound

OPTIONS: dict[str, Any] = {
    "p": 4,
    "block_size": 4,
    "update_freq": 3,
    "refresh_young": False,  # so that checkpoints fall between refreshes
    "momentum": 0.9,
    "lr": 0.05,
    "weight_decay": 0.01,
}
SHAPES = ((8, 6), (4, 9), (5,), (3, 2, 2), ())


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).to(dtype)


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(normal(*shape, seed=i, dtype=dtype)) for i, shape in enumerate(shapes)]


def train(opt: Optimizer, params: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        for i, param in enumerate(params):
            param.grad = normal(*param.shape, seed=1000 * (step + 1) + i, dtype=param.dtype)
        opt.step()


def same(first: Any, second: Any) -> bool:
    """Equality of everything in nested containers, NaN equal to NaN, dtypes and devices included."""
    if isinstance(first, Tensor):
        return (
            isinstance(second, Tensor)
            and first.dtype == second.dtype
            and first.device == second.device
            and torch.equal(first.nan_to_num(7.0), second.nan_to_num(7.0))
        )
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


def through_a_file(state: Any, **keywords: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True, **keywords)


class Net(nn.Module):
    """A model with a parameter of each kind, two of which share a tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.Embedding(9, 8)
        self.hidden = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.unused = nn.Linear(3, 3)
        self.lm_head = nn.Linear(8, 9, bias=False)
        self.lm_head.weight = self.emb.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lm_head(self.norm(torch.tanh(self.hidden(self.emb(x)))))
        return out


def epoch(model: nn.Module, opt: Optimizer, steps: int, start: int = 0) -> list[float]:
    losses = []
    for step in range(start, start + steps):
        x = torch.from_numpy(np.random.default_rng(step).integers(0, 9, 16))
        loss = nn.functional.cross_entropy(model(x), (x + 1) % 9)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


# signatures


@pytest.mark.parametrize(
    "name", [n for n, v in vars(DASH).items() if callable(v) and hasattr(Optimizer, n) and n != "__init__"]
)
def test_signatures_are_those_of_torch(name: str) -> None:
    ours = inspect.signature(getattr(DASH, name)).parameters
    theirs = inspect.signature(getattr(Optimizer, name)).parameters
    assert [(n, p.kind, p.default) for n, p in ours.items()] == [
        (n, p.kind, p.default) for n, p in theirs.items()
    ]


def test_keywords_and_positions_are_both_taken() -> None:
    params = parameters(*SHAPES)
    opt = DASH(params=params, lr=0.1)
    opt.step(closure=None)
    opt.step(None)
    opt.load_state_dict(state_dict=opt.state_dict())
    opt.zero_grad(set_to_none=False)
    opt.zero_grad(True)
    extra = parameters((2, 2))
    opt.add_param_group(param_group={"params": extra})
    assert opt.param_groups[1]["params"] == extra
    assert "block_size: 1024" in repr(opt)


# checkpoints


@pytest.mark.parametrize("refresh", ["interval", "staggered", "certified"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "extra",
    [{}, {"method": NewtonDB(steps=12), "grafting": grafting.Adam(beta2=0.5), "one_d": "dash", "nd": "tensor"},
     {"p": "8/3", "grafting": None, "factor_dtype": torch.float64, "lr": torch.tensor(0.05), "block_size": math.inf}],
    ids=["plain", "instances", "more"],
)  # fmt: skip
def test_a_checkpoint_holds_plain_values_and_continues_bit_by_bit(
    refresh: str, dtype: torch.dtype, extra: dict[str, Any]
) -> None:
    options = {**OPTIONS, "refresh": refresh, "matmul_dtype": None, **extra}
    if options.get("method") is not None:
        options["p"] = 4
    if extra and dtype == torch.float32:
        options["stacking"] = "layer"
    params = parameters(*SHAPES, dtype=dtype)
    opt = DASH(params, **options)
    train(opt, params, range(5))
    state = through_a_file(
        {"opt": opt.state_dict(), "params": [p.detach() for p in params]}, map_location="cpu"
    )
    others = [nn.Parameter(p) for p in state["params"]]
    other = DASH(others, **options)
    other.load_state_dict(state["opt"])
    assert same(opt.state_dict(), other.state_dict())
    for run, mine in ((opt, params), (other, others)):
        train(run, mine, range(5, 9))
    assert same(list(params), list(others))
    assert same(opt.state_dict(), other.state_dict())


def test_state_of_low_precision_parameters_stays_wide() -> None:
    params = parameters(*SHAPES, dtype=torch.bfloat16)
    opt = DASH(params, **OPTIONS)
    train(opt, params, range(4))
    others = copy.deepcopy(params)
    other = DASH(others, **OPTIONS)
    other.load_state_dict(opt.state_dict())
    for a, b in zip(params, others, strict=True):
        assert same(opt.state[a], other.state[b])
        floats = [v.dtype for v in other.state[b].values() if isinstance(v, Tensor)]
        assert torch.bfloat16 not in floats


def test_a_loaded_checkpoint_is_a_copy() -> None:
    params = parameters(*SHAPES)
    opt = DASH(params, **OPTIONS)
    train(opt, params, range(4))
    others = copy.deepcopy(params)
    other = DASH(others, **OPTIONS)
    other.load_state_dict(opt.state_dict())
    held = copy.deepcopy(opt.state_dict())
    train(other, others, range(4, 8))
    assert same(held, opt.state_dict())


def test_a_new_process_continues(tmp_path: Path) -> None:
    """What a new process saves that has resumed from a file is what this one has after the same steps, bit by bit."""
    script = """
import sys, torch
from dash_optim import DASH
torch.set_num_threads(1)
found = torch.load(sys.argv[1], weights_only=True)
params = [torch.nn.Parameter(p) for p in found["params"]]
opt = DASH(params, p=4, block_size=4, update_freq=3, refresh_young=False, momentum=0.9, lr=0.05, weight_decay=0.01)
opt.load_state_dict(found["opt"])
for grads in found["grads"]:
    for param, grad in zip(params, grads):
        param.grad = grad
    opt.step()
torch.save({"params": [p.detach() for p in params], "opt": opt.state_dict()}, sys.argv[1])
"""
    params = parameters(*SHAPES, dtype=torch.bfloat16)
    opt = DASH(params, **OPTIONS)
    train(opt, params, range(5))
    grads = [[normal(*p.shape, seed=10 * s, dtype=p.dtype) for p in params] for s in range(4)]
    path = tmp_path / "state.pt"
    torch.save({"params": [p.detach() for p in params], "opt": opt.state_dict(), "grads": grads}, path)
    root = Path(dash_optim.__file__).parents[1]
    subprocess.run([sys.executable, "-c", script, str(path)], check=True, timeout=300, cwd=root)
    for row in grads:
        for param, grad in zip(params, row, strict=True):
            param.grad = grad
        opt.step()
    found = torch.load(path, weights_only=True)
    assert same(found, {"params": [p.detach() for p in params], "opt": opt.state_dict()})


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("when", [0, 4])
def test_copies_continue_bit_by_bit(how: str, when: int) -> None:
    params = parameters(*SHAPES)
    opt = DASH([(f"p{i}", p) for i, p in enumerate(params)], **OPTIONS)
    train(opt, params, range(when))
    other = copy.deepcopy(opt) if how == "deepcopy" else pickle.loads(pickle.dumps(opt))
    others = other.param_groups[0]["params"]
    train(opt, params, range(when, 8))
    train(other, others, range(when, 8))
    assert same(params, others)
    assert same(opt.state_dict(), other.state_dict())
    other.add_param_group({"params": [("late", nn.Parameter(torch.ones(4, 4)))]})
    other.summary()
    other.diagnostics()


def test_an_empty_state_is_a_checkpoint() -> None:
    params = parameters(*SHAPES)
    opt = DASH(params, **OPTIONS)
    before = through_a_file(opt.state_dict())
    train(opt, params, range(3))
    opt.load_state_dict(before)
    assert len(opt.state) == 0
    others = parameters(*SHAPES)
    with torch.no_grad():
        for a, b in zip(others, params, strict=True):
            a.copy_(b)
    train(opt, params, range(3, 6))
    train(DASH(others, **OPTIONS), others, range(3, 6))
    assert same(params, others)


def test_checkpoints_of_other_groups_are_refused() -> None:
    params = parameters(*SHAPES)
    opt = DASH(params, **OPTIONS)
    with pytest.raises(ValueError, match="expected 1 parameter groups, got 2"):
        opt.load_state_dict(DASH([{"params": params[:1]}, {"params": params[1:]}], **OPTIONS).state_dict())
    with pytest.raises(ValueError, match="group 0 has 4 parameters, the optimizer's has 5"):
        opt.load_state_dict(DASH(params[1:], **OPTIONS).state_dict())


def test_a_checkpoint_of_another_model_is_refused_by_the_next_step() -> None:
    params, others = parameters((8, 6), (5,)), parameters((9, 6), (5,))
    opt, other = DASH(params, **OPTIONS), DASH(others, **OPTIONS)
    train(opt, params, range(2))
    other.load_state_dict(opt.state_dict())
    held = [p.detach().clone() for p in others]
    with pytest.raises(ValueError, match=r"parameter 0 of shape \(9, 6\)"):
        train(other, others, range(1))
    assert same([p.detach() for p in others], held)


# torch.distributed.checkpoint, in one process


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("groups", ["one", "routed"])
def test_distributed_checkpoints_round_trip(flatten: bool, used: bool, groups: str, tmp_path: Path) -> None:
    def make() -> tuple[Net, DASH]:
        model = Net()
        model.unused.requires_grad_(False)
        chosen = param_groups(model, verbose=False) if groups == "routed" else model.parameters()
        return model, DASH(chosen, **OPTIONS)

    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model, opt = make()
    epoch(model, opt, 4)
    saved = {"model": model.state_dict(), "opt": get_optimizer_state_dict(model, opt, options=options)}
    with quiet():
        dcp.save(saved, checkpoint_id=tmp_path / "at", no_dist=True)
    other_model, other = make()
    if used:
        epoch(other_model, other, 2, start=50)
    target = {
        "model": other_model.state_dict(),
        "opt": get_optimizer_state_dict(other_model, other, options=options),
    }
    with quiet():
        dcp.load(target, checkpoint_id=tmp_path / "at", no_dist=True)
    other_model.load_state_dict(target["model"])
    set_optimizer_state_dict(other_model, other, target["opt"], options=options)
    assert same(opt.state_dict()["state"], other.state_dict()["state"])
    assert epoch(model, opt, 4, start=4) == epoch(other_model, other, 4, start=4)
    assert same(model.state_dict(), other_model.state_dict())


@contextlib.contextmanager
def quiet() -> Any:
    """Without the warnings that torch's own checkpoint code gives rise to."""
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="torch")
        yield


# hooks


def test_hooks_of_a_step_see_it_before_and_after() -> None:
    params = parameters(*SHAPES)
    opt = DASH(params, **OPTIONS)
    seen: list[Any] = []
    opt.register_step_pre_hook(lambda o, args, kwargs: seen.append(("pre", params[0].detach().clone())))
    opt.register_step_post_hook(lambda o, args, kwargs: seen.append(("post", params[0].detach().clone())))
    before = params[0].detach().clone()
    train(opt, params, range(1))
    assert [name for name, _ in seen] == ["pre", "post"]
    assert torch.equal(seen[0][1], before)
    assert torch.equal(seen[1][1], params[0])


def test_hooks_of_checkpoints_may_rewrite_them() -> None:
    params = parameters(*SHAPES, dtype=torch.bfloat16)
    opt = DASH(params, **OPTIONS)
    train(opt, params, range(2))
    order: list[str] = []
    opt.register_state_dict_pre_hook(lambda o: order.append("pre"))
    opt.register_state_dict_post_hook(lambda o, state: {**state, "note": 3})
    state = opt.state_dict()
    assert order == ["pre"]
    assert state["note"] == 3
    others = copy.deepcopy(params)
    other = DASH(others, **OPTIONS)

    def rewrite(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        halved = copy.deepcopy({k: v for k, v in state.items() if k != "note"})
        halved["state"][0]["4x4.exp_avg"] *= 0.5
        return halved

    def after(optimizer: Optimizer) -> None:
        assert optimizer.state[others[0]]["4x4.exp_avg"].dtype == torch.float32
        optimizer.state[others[0]]["4x4.momentum"].zero_()

    other.register_load_state_dict_pre_hook(rewrite)
    other.register_load_state_dict_post_hook(after)
    other.load_state_dict(state)
    ours, theirs = opt.state[params[0]], other.state[others[0]]
    assert torch.equal(theirs["4x4.exp_avg"], ours["4x4.exp_avg"] * 0.5)
    assert not bool(theirs["4x4.momentum"].any())
    train(other, others, range(1))
    assert len(other._optimizer_load_state_dict_pre_hooks) == 1
    assert len(other._optimizer_load_state_dict_post_hooks) == 1


def test_a_failed_load_leaves_no_hook_behind() -> None:
    opt = DASH(parameters(*SHAPES))
    for _ in range(2):
        with pytest.raises(ValueError, match="block_size"):
            opt.load_state_dict(DASH(parameters(*SHAPES), block_size=2).state_dict())
    assert not opt._optimizer_load_state_dict_pre_hooks
    assert not opt._optimizer_load_state_dict_post_hooks


# groups, names, ties


@pytest.mark.parametrize("stacking", ["device", "layer", "none"])
@pytest.mark.parametrize("shape", [(8, 6), (5,), (3, 3)])
def test_a_group_added_late_leaves_old_state_alone_and_starts_fresh(
    stacking: str, shape: tuple[int, ...]
) -> None:
    params, late = parameters((8, 6), (4, 9), (5,)), parameters(shape)
    options = {**OPTIONS, "refresh": "interval"}  # whose turn it is depends on what stands before
    opt = DASH(params, stacking=stacking, **options)
    train(opt, params, range(2))
    held = {p: copy.deepcopy(opt.state[p]) for p in params}
    opt.add_param_group({"params": late, "lr": 0.5, "block_size": 2})
    assert all(same(opt.state[p], held[p]) for p in params)
    alone = copy.deepcopy(late)
    solo = DASH(alone, stacking=stacking, **{**options, "lr": 0.5, "block_size": 2})
    apart = copy.deepcopy(params)
    other = DASH(apart, stacking=stacking, **options)
    other.load_state_dict({**opt.state_dict(), "param_groups": opt.state_dict()["param_groups"][:1]})
    for run, mine in ((opt, [*params, *late]), (other, apart)):
        train(run, mine, range(2, 5))
    for step in range(2, 5):
        alone[0].grad = normal(*shape, seed=1000 * (step + 1) + 3, dtype=torch.float32)
        solo.step()
    assert all(
        torch.allclose(a, b, rtol=0, atol=1e-6)
        for a, b in zip([*params, *late], [*apart, *alone], strict=True)
    )


def test_a_group_that_is_refused_is_not_added() -> None:
    params = parameters((8, 6), (5,))
    opt = DASH(params[:1])
    for bad, error in (
        ({"params": params[1:], "block_size": 0}, ValueError),
        ({"params": params[1:], "nonfinite": "raise"}, ValueError),
        ({"params": params[:1]}, ValueError),
        ({"params": [torch.zeros(2, dtype=torch.int64)]}, TypeError),
    ):
        with pytest.raises(error):
            opt.add_param_group(bad)
        assert len(opt.param_groups) == 1
    train(opt, params[:1], range(2))


def test_names_are_kept_and_used() -> None:
    model = Net()
    opt = DASH(model.named_parameters(), **OPTIONS)
    epoch(model, opt, 2)
    assert "hidden.weight" in opt.summary()
    assert any(block.parameter == "hidden.weight" for block in opt.diagnostics().blocks)
    state = through_a_file(opt.state_dict())
    assert state["param_groups"][0]["param_names"] == [name for name, _ in model.named_parameters()]
    DASH(Net().parameters(), **OPTIONS).load_state_dict(state)


def test_tied_parameters_have_one_state_and_one_update() -> None:
    model, other = Net(), Net()
    opt = DASH(model.parameters(), **OPTIONS)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        doubled = DASH([*other.parameters(), other.lm_head.weight], **OPTIONS)
    assert epoch(model, opt, 4) == epoch(other, doubled, 4)
    assert len(doubled.state) == len(opt.state)
    resumed = copy.deepcopy(doubled)
    resumed.load_state_dict(through_a_file(doubled.state_dict()))
    assert same(resumed.state_dict()["state"], doubled.state_dict()["state"])
    with pytest.raises(ValueError, match="more than one parameter group"):
        DASH([{"params": [model.emb.weight]}, {"params": [model.lm_head.weight]}])
    groups = param_groups(model, verbose=False)
    kinds = {g["name"]: {n for n, _ in g["params"]} for g in groups}
    assert kinds["embeddings"] == {"emb.weight"}
    assert "heads" not in kinds
    assert kinds["matrices"] == {"hidden.weight", "unused.weight"}


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_reaches_every_path(set_to_none: bool) -> None:
    params = parameters(*SHAPES)
    opt = DASH([{"params": params[:2]}, {"params": params[2:], "algorithm": "adamw"}])
    train(opt, params, range(2))
    opt.zero_grad(set_to_none=set_to_none)
    assert all(p.grad is None if set_to_none else not bool(p.grad.any()) for p in params)  # type: ignore[union-attr]


# schedulers


def test_schedulers_are_followed() -> None:
    params, others = parameters(*SHAPES), parameters(*SHAPES)
    opt, other = DASH(params, **OPTIONS), DASH(others, **OPTIONS)
    scheduler = LambdaLR(opt, lambda epoch: 0.5**epoch)
    for step in range(4):
        assert opt.param_groups[0]["lr"] == 0.05 * 0.5**step
        train(opt, params, range(step, step + 1))
        scheduler.step()
        other.param_groups[0]["lr"] = 0.05 * 0.5**step
        train(other, others, range(step, step + 1))
    assert same(params, others)


@pytest.mark.parametrize("tensor", [False, True])
def test_one_cycle_moves_rate_and_beta(tensor: bool) -> None:
    params = parameters(*SHAPES)
    opt = DASH(params, **{**OPTIONS, "lr": torch.tensor(0.05) if tensor else 0.05})
    scheduler = OneCycleLR(opt, max_lr=0.1, total_steps=8)
    seen = []
    for step in range(7):
        train(opt, params, range(step, step + 1))
        seen.append((float(opt.param_groups[0]["lr"]), opt.param_groups[0]["betas"][0]))
        scheduler.step()
    assert len({rate for rate, _ in seen}) > 5
    assert len({beta for _, beta in seen}) > 5
    assert all(b == 0.99 for b in [opt.param_groups[0]["betas"][1]])
    assert len(opt._stacks or []) == len({s.shape for s in opt._stacks or []})  # never rebuilt apart
    # the averages are those of the betas that were in force
    m = torch.zeros(8, 6, dtype=torch.float64)
    for step, (_, beta) in enumerate(seen):
        m = beta * m + (1 - beta) * normal(8, 6, seed=1000 * (step + 1), dtype=torch.float32).double()
    mine = opt.state[params[0]]["4x4.exp_avg"].double()
    assert torch.allclose(mine[0], m[:4, :4], atol=1e-5)
    through_a_file(opt.state_dict())
    through_a_file(scheduler.state_dict())


def test_plateaus_lower_the_rate() -> None:
    params = parameters(*SHAPES)
    opt = DASH(params, **OPTIONS)
    scheduler = ReduceLROnPlateau(opt, factor=0.1, patience=0)
    for _ in range(3):
        train(opt, params, range(1))
        scheduler.step(1.0)
    assert opt.param_groups[0]["lr"] == pytest.approx(0.05 * 0.01)


# loops that programs write


def test_closures_are_evaluated_with_gradients_and_their_loss_returned() -> None:
    model, other = Net(), Net()
    opt, plain = DASH(model.parameters(), **OPTIONS), DASH(other.parameters(), **OPTIONS)
    x = torch.arange(9)

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x), (x + 1) % 9)
        loss.backward()
        return loss

    for _ in range(3):
        loss = opt.step(closure)  # type: ignore[arg-type]
        plain.zero_grad()
        expected = nn.functional.cross_entropy(other(x), (x + 1) % 9)
        expected.backward()
        plain.step()
        assert isinstance(loss, Tensor)
        assert loss.item() == expected.item()
    assert same(model.state_dict(), other.state_dict())
    assert plain.step() is None


def test_scaled_losses_and_skipped_steps_of_a_grad_scaler() -> None:
    """An overflow in a scaled gradient is the scaler's to skip; nothing counts as a step."""
    model, other = Net(), Net()
    opt, plain = DASH(model.parameters(), **OPTIONS), DASH(other.parameters(), **OPTIONS)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=10**6)  # type: ignore[attr-defined]
    for step in range(5):
        x = torch.from_numpy(np.random.default_rng(step).integers(0, 9, 16))
        opt.zero_grad()
        scaler.scale(nn.functional.cross_entropy(model(x), (x + 1) % 9)).backward()
        if step == 2:
            assert model.hidden.weight.grad is not None
            model.hidden.weight.grad[0, 0] = math.inf
        else:
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            plain.zero_grad()
            nn.functional.cross_entropy(other(x), (x + 1) % 9).backward()
            nn.utils.clip_grad_norm_(other.parameters(), 1.0)
            plain.step()
        scaler.step(opt)
        scaler.update()
    assert float(opt.state[model.hidden.weight]["step"]) == 4
    assert opt.diagnostics().skipped_steps == 0
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def test_averaged_models_and_their_schedule() -> None:
    model = Net()
    opt = DASH(model.parameters(), **OPTIONS)
    averaged = AveragedModel(model)
    scheduler = SWALR(opt, swa_lr=0.01, anneal_epochs=2)
    total = torch.zeros(8, 8)
    for step in range(4):
        epoch(model, opt, 1, start=step)
        averaged.update_parameters(model)
        scheduler.step()
        total += model.hidden.weight.detach() / 4
    assert torch.allclose(averaged.module.hidden.weight, total, atol=1e-6)
    through_a_file(opt.state_dict())


# configuration


def test_yaml_reaches_every_option(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "optimizer:\n  type: dash\n  lr: 3e-4\n  betas: [0.8, 0.9]\n  block_size: inf\n  update_freq: 1\n  p: 8/3\n"
        "  method: {type: ndb, steps: 10}\n  scaling: power\n  matmul_dtype: fp16\n  grafting: {type: adam, eps: 1e-6}\n"
        "  max_factor_dim: 100\n  factor_dtype: float32\n  weight_decay: 1\n  nesterov: true\n  momentum: 0.5\n  stacking: layer\n"
    )
    path.write_text(path.read_text().replace("p: 8/3", "p: 2").replace("block_size: inf", "block_size: .inf"))
    opt = from_config(parameters(*SHAPES), path)
    group = opt.param_groups[0]
    assert (group["lr"], group["betas"], group["block_size"], group["p"]) == (3e-4, (0.8, 0.9), math.inf, 2)
    assert group["method"] == {"type": "ndb", "steps": 10}
    assert (group["scaling"], group["matmul_dtype"], group["grafting"]) == ("power", "fp16", {"type": "adam", "eps": 1e-6})  # fmt: skip
    assert (group["factor_dtype"], group["weight_decay"], group["nesterov"]) == (torch.float32, 1.0, True)
    assert from_config(parameters((2, 2)), {"p": "8/3"}).param_groups[0]["p"] == "8/3"
    assert from_config(parameters((2, 2)), {"block_size": "inf"}).param_groups[0]["block_size"] == math.inf


def test_every_option_of_the_signature_can_be_configured() -> None:
    signature = inspect.signature(DASH).parameters
    options = {n: p.default for n, p in signature.items() if n not in ("params", "self")}
    assert isinstance(from_config(parameters(*SHAPES), options), DASH)


@pytest.mark.parametrize(
    "bad", [{"type": "lion"}, {"update_frq": 1}, {"block_size": "many"}, "nowhere.yaml", 3, {"params": 1}]
)
def test_configurations_that_cannot_be_are_refused(bad: Any) -> None:
    with pytest.raises((TypeError, ValueError, FileNotFoundError)):
        from_config(parameters(*SHAPES), bad)


def test_routes_can_be_overridden_and_cover_each_parameter_once(capsys: pytest.CaptureFixture[str]) -> None:
    model = Net()
    groups = param_groups(model, weight_decay=0.1, overrides={"embeddings": {"algorithm": "dash", "lr": 0.5}})
    assert "emb.weight" in capsys.readouterr().out
    opt = DASH(groups, **OPTIONS)
    listed = [p for g in opt.param_groups for p in g["params"]]
    assert {id(p) for p in listed} == {id(p) for p in model.parameters()}
    assert len(listed) == len(list(model.parameters()))
    by_name = {g["name"]: g for g in opt.param_groups}
    assert (by_name["embeddings"]["algorithm"], by_name["embeddings"]["lr"]) == ("dash", 0.5)
    assert by_name["vectors"]["weight_decay"] == 0.0
    assert by_name["matrices"]["weight_decay"] == 0.1
    with pytest.raises(ValueError, match="'embedding'"):
        param_groups(model, overrides={"embedding": {}})


# what a step costs


class Reads(TorchDispatchMode):
    """Counts how often a number is brought from a tensor to Python, and operations."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        waits = (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.nonzero.default,
            torch.ops.aten.equal.default,
            torch.ops.aten.is_nonzero.default,
        )
        self.reads += func in waits
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("refresh", ["interval", "staggered"])
def test_reads_and_operations_do_not_grow_with_blocks_or_parameters(
    refresh: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dash_optim.dash

    monkeypatch.setattr(dash_optim.dash, "_looking_is_free", lambda found: False)
    counts: dict[tuple[int, int], list[Any]] = {}
    for many, blocks in ((1, 1), (8, 1), (1, 16), (8, 16)):
        params = parameters(*[(4, 4 * blocks)] * many)
        options = {
            "block_size": 4,
            "refresh": refresh,
            "update_freq": 2,
            "refresh_young": False,
            "start_step": 1,
        }
        opt = DASH(params, max_batch=10**6, **options)
        counts[many, blocks] = []
        for step in range(5):
            for i, param in enumerate(params):
                param.grad = normal(*param.shape, seed=100 * step + i, dtype=torch.float32)
            with Reads() as reads:
                opt.step()
            counts[many, blocks].append((reads.reads, reads.operations))
    reads = {key: [r for r, _ in found] for key, found in counts.items()}
    operations = {key: max(o for _, o in found[1:]) for key, found in counts.items()}
    if refresh == "interval":
        assert all(found[2::2] == reads[1, 1][2::2] for found in reads.values())
        assert reads[8, 16][0] == 0
        assert reads[8, 16][2] == 1  # how many roots have failed, which a refresh has brought to the host
    assert all(max(found) <= max(reads[1, 1]) + 2 for found in reads.values())
    assert operations[1, 16] <= operations[1, 1] + 40
    # of each parameter the gradient is looked at and read, and the parameter written: no more
    assert operations[8, 1] <= operations[1, 1] + 7 * 30
    assert operations[8, 16] <= operations[8, 1] + 8 * 8 + 40


# certified refresh


def damped(opt: DASH, W: Tensor, key: str) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return, for each factor of a parameter: A in float64, the root in use, and the record."""
    group, own = opt.param_groups[0], opt.state[W]
    F, X, record = (
        torch.stack([own[f"{key}.{kind}_{dim}"] for dim in (0, 1)], dim=1)
        for kind in ("factor", "root", "record")
    )
    b, t = group["beta_factors"], float(own["step"])
    c = 1 - b**t if b < 1 and group["bias_correction"] else 1.0
    found = []
    for block in range(F.shape[0]):
        for side in range(F.shape[1]):
            eps = group["damping"] + group["rel_damping"] * float(lambda_bound(F[block, side])) / c
            A = F[block, side].double() / c + eps * torch.eye(F.shape[-1], dtype=torch.float64)
            found.append(((A + A.mT) / 2, X[block, side].double(), record[block, side]))
    return found


def power(A: Tensor, exponent: float) -> Tensor:
    values, Q = torch.linalg.eigh(A)
    return (Q * (values.clamp_min(0) ** exponent).unsqueeze(-2)) @ Q.mT


def noisy_gradient(rng: np.random.Generator, step: int, shape: tuple[int, int], kind: int) -> Tensor:
    """A drifting low-rank signal and noise; of kind 1 and 2 they change by orders of magnitude, or are zero, now and then."""
    rows, cols = shape
    signal = np.outer(np.sin(0.1 * step + np.arange(rows)), np.cos(0.07 * step + np.arange(cols)))
    noise = rng.standard_normal(shape) * (0.3 if kind == 0 else 10 ** rng.uniform(-3, 0))
    spectrum = np.geomspace(1, 1e-2, rows)[:, None]
    scale = 10.0 if kind == 1 and step % 13 == 12 else 0.0 if kind == 2 and step % 5 == 3 else 1.0
    return torch.from_numpy(scale * spectrum * (signal + noise))


CERTIFIED = [
    {"p": 4, "rel_damping": 1e-4},
    {"p": 2, "rel_damping": 1e-4},
    {"p": "8/3", "rel_damping": 1e-4},
    {"p": "8/3", "rel_damping": 1e-2, "refresh_tol": 0.9},
    {"p": 4, "rel_damping": 0.0, "damping": 1e-4},
    {"p": 2, "rel_damping": 1e-3, "damping": 1e-3},
    {"p": 4, "rel_damping": 1e-6, "refresh_tol": 0.2},
    {"p": 2, "rel_damping": 1e-6},
    {"p": 4, "rel_damping": 1e-3, "beta_factors": 1.0},
    {"p": 2, "rel_damping": 1e-3, "beta_factors": 0.5},
    {"p": 4, "rel_damping": 1e-3, "bias_correction": False},
    {"p": 4, "rel_damping": 0.0, "damping": 0.0},
    {"p": 4, "rel_damping": 1e-4, "method": "ndb"},
    {"p": 4, "rel_damping": 1e-4, "method": "evd"},
]
SAVED = {4: 0.5, 2: 0.05, "8/3": 0.05}
"""Least share of the roots that need not be computed, at the default tolerance and with a damping of 1e-4 or more."""


@pytest.mark.parametrize(
    ("options", "dtype"),
    [*((o, torch.float32) for o in CERTIFIED), *((o, torch.float64) for o in CERTIFIED[:6])],
    ids=str,
)
def test_the_recorded_bound_holds_at_every_step(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """``alpha^{1/a} R <= X <= beta^{1/a} R`` for the root in use and R of the factor as it is, in float64, and so its error in the 2-norm.

    Six runs at once, of three kinds of gradients; one parameter has none in some steps, and some steps are left out.
    """
    options = {"refresh_tol": 0.5, **options}
    p = Fraction(options["p"])
    a = p.numerator if p.numerator % 2 == 0 else 2 * p.numerator
    params = parameters(*[(6, 6)] * 6)
    opt = DASH(params, block_size=6, refresh="certified", factor_dtype=dtype, lr=0.01, **options)
    rngs = [np.random.default_rng(i) for i in range(6)]
    for step in range(30):
        for i, W in enumerate(params):
            W.grad = noisy_gradient(rngs[i], step, (6, 6), i % 3).float()
        if step % 4 == 1:
            params[1].grad = None
        if step % 11 == 7:
            assert params[0].grad is not None
            params[0].grad[0, 0] = math.nan
        opt.step()
        found = [triple for W in params for triple in damped(opt, W, "6x6")]
        A, X, record = (torch.stack(part) for part in zip(*found, strict=True))
        low, high = record[:, 7] ** (1 / a), record[:, 8] ** (1 / a)
        R, half = power(A, -1 / float(p)), power(A, 1 / (2 * float(p)))
        gap = torch.linalg.matrix_norm(X - R, 2) / torch.linalg.matrix_norm(R, 2)
        bound = torch.maximum(1 - low, high - 1)
        known = torch.isfinite(bound)
        slack = 2e-5 if dtype == torch.float32 else 1e-9
        assert bool((gap <= bound + slack)[known].all()), step
        S = torch.linalg.eigvalsh(half @ X @ half)  # eigenvalues of R^{-1} X
        loose = 2e-3 if dtype == torch.float32 else 1e-7
        assert bool((S[:, 0] >= low - loose)[known].all()), step
        assert bool((S[:, -1] <= high + loose)[known].all()), step
        assert bool(known.any()) or options.get("damping", 0.0) == options["rel_damping"] == 0.0
        if step > 0:  # within the tolerance, or just computed
            fresh = record[:, 0] == torch.tensor([float(opt.state[W]["step"]) for W in params for _ in "LR"])
            assert bool((fresh | (bound <= options["refresh_tol"])).all())
    reports = [f for block in opt.diagnostics().blocks for f in block.factors]
    saved = sum(f.skipped for f in reports) / sum(f.skipped + f.refreshes for f in reports)
    if (
        options["rel_damping"] >= 1e-4
        and options["refresh_tol"] == 0.5
        and options.get("beta_factors", 1) > 0.9
    ):
        assert saved > SAVED[options["p"]]
    if options["rel_damping"] == options.get("damping", 0.0) == 0.0:
        assert saved == 0  # without damping nothing is known of an old root


def test_bounds_age_while_solves_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is recorded while new roots fail holds for the old one; nothing may be (NaN)."""
    fail = {"now": False}

    def solve(F: Tensor, *args: Any, **keywords: Any) -> Any:
        result = inv_root_ex(F, *args, **keywords)
        if fail["now"]:
            result.root.fill_(math.nan)
            result.status.fill_(int(Status.INDEFINITE))
        return result

    monkeypatch.setattr(dash_optim.refresh, "inv_root_ex", solve)
    (W,) = parameters((6, 6), dtype=torch.float64)
    opt = DASH(
        [W], p=4, refresh="certified", refresh_tol=0.05, method="evd", rel_damping=1e-2, failure_budget=99
    )
    rng = np.random.default_rng(0)
    for step in range(20):
        fail["now"] = 5 <= step < 15
        W.grad = noisy_gradient(rng, step, (6, 6), 0) * (0.1 if step > 4 else 1.0)
        opt.step()
        for A, X, record in damped(opt, W, "6x6"):
            half = power(A, 1 / 8)
            S = torch.linalg.eigvalsh(half @ X @ half)
            if bool(record[7].isnan()):
                assert fail["now"]
                continue
            assert float(S[0]) >= float(record[7]) ** 0.25 - 1e-6, step
            assert float(S[-1]) <= float(record[8]) ** 0.25 + 1e-6, step
        if fail["now"]:
            errors = [f.certified_error for f in opt.diagnostics().blocks[0].factors]
            assert not any(error <= 0.05 for error in errors)


@pytest.mark.parametrize(("k", "rel_damping"), [(8192, 1e-6), (65536, 1e-5)])
@pytest.mark.parametrize("b", [0.95, 0.7])
def test_rounding_of_long_sums_is_part_of_the_bound(k: int, rel_damping: float, b: float) -> None:
    """Thousands of products of one sign: what float32 loses in their sum is more than the damping that protects the root.

    Against the eps that the solve really used: it adds some where rounding has made a factor indefinite.
    """
    W = nn.Parameter(torch.zeros(8, k))
    opt = DASH([W], block_size=k, max_factor_dim=8, refresh="certified", refresh_tol=0.9, p=4, beta_factors=b, rel_damping=rel_damping, method="evd", failure_budget=99)  # fmt: skip
    torch.manual_seed(0)
    for _ in range(10):
        W.grad = torch.full((8, k), 0.1) * (1 + 1e-3 * torch.randn(8, 1))
        opt.step()
        own = opt.state[W]
        F, X = (own[f"8x{k}.{kind}_0"][0].double() for kind in ("factor", "root"))
        record = own[f"8x{k}.record_0"][0]
        if not float(record[7]) > 0:
            continue
        half = power((F + F.mT) / 2 / record[9] + record[6] * torch.eye(8).double(), 1 / 8)
        assert float(torch.linalg.eigvalsh(half @ X @ half)[0]) >= float(record[7]) ** 0.25 - 2e-3


def test_certified_errors_of_diagnostics_bound_the_truth() -> None:
    for refresh in ("interval", "staggered", "certified"):
        (W,) = parameters((12, 6))
        calendar: dict[str, Any] = {"refresh": refresh, "update_freq": 4, "refresh_young": False}
        opt = DASH([W], block_size=6, p=4, rel_damping=1e-3, **calendar)
        rng = np.random.default_rng(1)
        for step in range(7):
            W.grad = noisy_gradient(rng, step, (12, 6), 0).float()
            opt.step()
        reports = opt.diagnostics(certify=True)
        claimed = [f.certified_error for block in reports.blocks for f in block.factors]
        true = []
        for A, X, _ in damped(opt, W, "6x6"):
            R = power(A, -0.25)
            true.append(float(torch.linalg.matrix_norm(X - R, 2) / torch.linalg.matrix_norm(R, 2)))
        assert all(t <= c + 1e-6 for t, c in zip(true, claimed, strict=True))
        assert max(true) > 1e-3 or refresh == "certified"
        assert isinstance(str(reports), str)
        assert reports.scalars()["dash/blocks"] == 2


def test_factors_that_are_symmetric_to_rounding_only_are_certified() -> None:
    """On some processors no product ``G G^T`` is symmetric bit for bit."""
    (W,) = parameters((12, 6))
    opt = DASH([W], block_size=6, p=4, rel_damping=1e-3, update_freq=1)
    train(opt, [W], range(5))
    for dim in (0, 1):
        opt.state[W][f"6x6.factor_{dim}"][:, 0, 1] *= 1 + 2.0**-22
    claimed = [f.certified_error for block in opt.diagnostics(certify=True).blocks for f in block.factors]
    for error, (A, X, _) in zip(claimed, damped(opt, W, "6x6"), strict=True):
        R = power(A, -0.25)
        assert float(torch.linalg.matrix_norm(X - R, 2) / torch.linalg.matrix_norm(R, 2)) <= error + 1e-6
        assert error < 0.05


def test_a_schedule_can_be_certified_later() -> None:
    """Roots that "interval" computed carry no bound: they are computed anew."""
    (W,) = parameters((6, 6))
    opt = DASH([W], update_freq=3, rel_damping=1e-2)
    train(opt, [W], range(4))
    opt.param_groups[0]["refresh"] = "certified"
    train(opt, [W], range(4, 5))
    record = torch.stack([opt.state[W][f"6x6.record_{dim}"] for dim in (0, 1)])
    assert bool((record[..., 0] == 5).all())
    assert bool(torch.isfinite(record[..., 7:9]).all())
    opt.param_groups[0]["refresh"] = "interval"
    train(opt, [W], range(5, 9))
    assert issubclass(PreconditionerError, RuntimeError)
