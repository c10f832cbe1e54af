# SPDX-License-Identifier: Apache-2.0
"""Each trouble of docs/troubleshooting.md is provoked, seen in the number that the page names, and cured by the change that it advises."""

from __future__ import annotations

import copy
import math
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import dash_optim.refresh
from dash_optim import (
    DASH,
    Diagnostics,
    NonfiniteGradientError,
    PreconditionerError,
    param_groups,
    plan_block_size,
)
from matroots import EVD, NewtonDB

mse = nn.functional.mse_loss


def network(seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    """A small regression whose inputs differ in size by a factor of 100, as features of real networks do."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(256, 32, generator=draw) * torch.logspace(0, -2, 32)
    W = torch.randn(32, 16, generator=draw) * torch.logspace(0, 1.5, 32)[:, None] * 0.3
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 16)), x, torch.tanh(x @ W)


@cache
def trained(
    steps: int = 60, lr: float = 1e-2, seed: int = 0, warmup: int = 0, **options: Any
) -> tuple[float, Diagnostics]:
    """Train with a falling rate, after so many steps of warm-up; return the loss of all data, and the diagnostics."""
    model, x, y = network(seed)
    opt = DASH(model.named_parameters(), lr=lr, **{"block_size": 32, "update_freq": 1, **options})
    draw = torch.Generator().manual_seed(seed + 1)
    for step in range(steps):
        batch = torch.randint(0, 256, (64,), generator=draw)
        opt.param_groups[0]["lr"] = lr * (1 - step / steps) * min(1, (step + 1) / max(warmup, 1))
        opt.zero_grad()
        mse(model(x[batch]), y[batch]).backward()
        opt.step()
    with torch.no_grad():
        return mse(model(x), y).item(), opt.diagnostics()


def held(opt: DASH) -> int:
    return sum(
        v.numel() * v.element_size()
        for own in opt.state.values()
        for v in own.values()
        if isinstance(v, Tensor)
    )


def stepped(params: Any, steps: int = 1, **options: Any) -> DASH:
    """Take steps on random gradients."""
    opt = DASH(params, **options)
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        for group in opt.param_groups:
            for param in group["params"]:
                param.grad = torch.randn(param.shape, generator=draw).to(param.dtype)
        opt.step()
    return opt


def matrix(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


# 1 the loss becomes NaN, or diverges


@pytest.mark.parametrize(
    ("wrong", "cure"),
    [
        ({"lr": 10.0}, {"lr": 1e-2}),
        ({"grafting": None, "p": 2}, {"p": 2}),
        ({"grafting": "sgd", "lr": 10.0}, {"grafting": "sgd", "lr": 1e-1}),
        ({"momentum": 0.99, "lr": 3e-2}, {"momentum": 0.99, "lr": 3e-4}),
    ],
    ids=str,
)
def test_a_loss_that_diverges_is_finite_with_the_advised_length(
    wrong: dict[str, Any], cure: dict[str, Any]
) -> None:
    start = trained(steps=0)[0]
    bad, good = trained(**wrong)[0], trained(**cure)[0]
    assert not bad < 5 * start
    assert good < start


def test_one_bad_batch_costs_a_step_and_raise_names_its_gradient() -> None:
    model, x, y = network()
    other = copy.deepcopy(model)
    x = x.clone()
    x[3, 3] = math.nan

    def run(model: nn.Module, rows: list[slice], **options: Any) -> DASH:
        opt = DASH(model.named_parameters(), lr=1e-2, block_size=32, **options)
        for row in rows:
            opt.zero_grad()
            mse(model(x[row]), y[row]).backward()
            opt.step()
        return opt

    good = [slice(32 * k, 32 * (k + 1)) for k in range(1, 8)]
    opt = run(model, [slice(0, 32), *good])
    assert opt.diagnostics().skipped_steps == 1
    assert mse(model(x[32:]), y[32:]).item() < mse(other(x[32:]), y[32:]).item()
    with pytest.raises(NonfiniteGradientError, match=r"parameter '0\.weight'"):
        run(other, [slice(0, 32)], nonfinite="raise")


def test_where_every_step_is_skipped_the_weights_were_lost_before() -> None:
    model, x, y = network()
    with torch.no_grad():
        model[0].bias[0] = math.nan  # type: ignore[index,operator,union-attr]
    opt = DASH(model.named_parameters(), block_size=32)
    for _ in range(5):
        opt.zero_grad()
        mse(model(x), y).backward()
        opt.step()
    assert opt.diagnostics().skipped_steps == 5
    assert [name for name, p in model.named_parameters() if not p.isfinite().all()] == ["0.bias"]


# 2 out of memory


def bytes_of(params: Any, **options: Any) -> int:
    return held(stepped(params, **options))


def test_state_shrinks_as_advised() -> None:
    """Each number derived from the shapes: thin matrices, embeddings, long vectors, averages that may be left out."""
    thin = [matrix(1024, 16)]
    whole, cut = bytes_of(thin, block_size=1024), bytes_of(thin, block_size=16)
    assert whole > 2 * 4 * 1024**2
    assert cut == 4 * (2 + 4) * 1024 * 16 + 64 * 2 * 80 + 4

    square = [matrix(64, 64)]
    usual = bytes_of(square)
    assert bytes_of(square, block_size=16) > usual  # no factor is smaller in all, and more are recorded
    assert usual - bytes_of(square, betas=(0.0, 0.95)) == 4 * 64**2
    assert usual - bytes_of(square, grafting="sgd") == 4 * 64**2
    assert bytes_of(square, factor_dtype="float64") - usual == 4 * 6 * 64**2

    model = nn.Sequential(nn.Embedding(600, 32), nn.Linear(32, 32, bias=False))
    grouped = bytes_of(param_groups(model, verbose=False))
    assert bytes_of(model.parameters()) - grouped > 2 * 4 * 600**2
    assert bytes_of([matrix(600)], one_d="dash") > 2 * 4 * 600**2 > 100 * bytes_of([matrix(600)])
    assert bytes_of(model.parameters(), max_factor_dim=100) < bytes_of(model.parameters()) / 4


def test_the_workspace_of_a_step_is_bounded_by_max_batch() -> None:
    def workspace(**options: Any) -> int:
        opt = stepped([matrix(64, 64)], block_size=8, **options)
        return sum(b.numel() * b.element_size() for s in opt.build_state() for b in s.scratch.values())

    assert workspace(max_batch=8) == 2 * 8 * 8 * 8 * 4
    assert workspace() == 8 * workspace(max_batch=8)


def test_what_runs_out_of_memory_can_be_planned_first() -> None:
    plan = plan_block_size([matrix(1024, 16)], memory=2**20, grafting="sgd")
    assert plan.largest is not None
    assert bytes_of([matrix(1024, 16)], grafting="sgd", block_size=plan.largest.block_size) <= 2**20


# 3 slow convergence, and what s says


@pytest.mark.parametrize("rank", [1, 4, 24])
@pytest.mark.parametrize("grafting", ["adam", "rmsprop"])
@pytest.mark.parametrize("p", [4, 2])
def test_s_of_a_first_step_is_the_root_of_elements_over_rank(rank: int, grafting: str, p: int) -> None:
    """Adam's first step has entries of size 1, ``L^{-1/4} G R^{-1/4}`` of one gradient singular values 1: s is never near 1 for p = 4.

    With p = 2 they are those of the pseudoinverse, ``1/sigma``.
    """
    param = nn.Parameter(
        torch.zeros(24, 40).double()
    )  # p = 2 would amplify the rounding of a float32 gradient
    draw = torch.Generator().manual_seed(0)
    param.grad = (
        torch.randn(24, rank, generator=draw).double() @ torch.randn(rank, 40, generator=draw).double()
    )
    sigma = torch.linalg.svdvals(param.grad)[:rank]
    options: dict[str, Any] = {
        "rel_damping": 1e-9,
        "tol": 1e-3,
        "factor_dtype": "float64",
        "betas": (0.0, 0.95),
        "p": p,
    }
    opt = DASH([param], block_size=64, grafting=grafting, **options)
    opt.step()
    (block,) = opt.diagnostics().blocks
    length = math.sqrt(rank) if p == 4 else (1 / sigma).norm().item()
    expected = math.sqrt(24 * 40) / length * (1 if grafting == "adam" else 0.05**-0.5)
    assert block.grafting == pytest.approx(expected, rel=0.02)
    assert block.relative_grafting == pytest.approx(expected / math.sqrt(40), rel=0.02)
    assert opt.diagnostics().scalars()["dash/grafting_relative_median"] == block.relative_grafting
    assert f"{block.relative_grafting:.3f}" in str(opt.diagnostics())


@pytest.mark.parametrize(("p", "power"), [(None, 0), (4, 0), (2, 1), (3, 1 / 3)])
def test_s_scales_with_the_gradient_unless_p_is_four(p: int | None, power: float) -> None:
    """``U`` scales as ``c^{1 - 4/p}``, D not at all: a number of s means something for p = 4 only."""
    found = []
    for c in (1.0, 100.0):
        param = matrix(16, 16)
        param.grad = c * torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
        opt = DASH([param], p=p)
        opt.step()
        found.append(opt.diagnostics().blocks[0].grafting)
    assert found[1] / found[0] == pytest.approx(100.0**power, rel=0.02)


def test_s_inside_the_range_is_a_sign_of_stale_roots_not_of_health() -> None:
    """p = 4: with fresh roots s is near sqrt(32); with those of the first gradient only it happens to lie near 1."""
    options: dict[str, Any] = {"p": 4, "update_freq": 50}
    stale = trained(steps=10, refresh_young=False, **options)[1]
    young, fresh = trained(steps=10, **options)[1], trained(steps=10, p=4)[1]
    assert all(0.5 < block.grafting < 1.5 for block in stale.blocks)
    assert fresh.outside == young.outside == len(fresh.blocks)
    assert max(block.relative_grafting for block in stale.blocks) < 0.3
    later = trained(steps=60, p=4)[1]
    for block in (*fresh.blocks, *young.blocks, *later.blocks):
        assert 0.7 < block.relative_grafting < 3


STALE: dict[str, Any] = {"update_freq": 50, "refresh_young": False}
LONG: dict[str, Any] = {"steps": 120, "lr": 2e-2}


@pytest.mark.parametrize(
    ("slow", "cure"),
    [
        ({"lr": 1e-3}, {"lr": 1e-2}),
        ({"grafting": "sgd"}, {}),
        (STALE, {}),
        (STALE, {"update_freq": 50}),
        (STALE, {**STALE, "start_step": 20}),
        (STALE, {"refresh": "certified", "refresh_tol": 3.0, "rel_damping": 1e-4}),
        ({}, {"start_step": 20}),
        ({"warmup": 24}, {}),
        ({"p": 4, "rel_damping": 1.0}, {"p": 4}),
        ({**LONG, "rel_damping": 1.0}, LONG),
        ({**LONG, "rel_damping": 1.0}, {**LONG, "rel_damping": 1e-4}),
    ],
    ids=str,
)
def test_slow_convergence_is_cured_as_advised(slow: dict[str, Any], cure: dict[str, Any]) -> None:
    assert trained(**cure)[0] < 0.9 * trained(**slow)[0]


def test_p_of_two_starts_slower_and_ends_lower() -> None:
    """At the same rates; three seeds differ by less than that."""
    early = [trained(p=p)[0] for p in (2, 4)]
    late = [trained(**LONG, p=p)[0] for p in (2, 4)]
    assert early[0] > 1.3 * early[1]
    assert late[0] < 0.9 * late[1]


# 4 the optimizer is too slow


class Calls(TorchDispatchMode):
    """Counts what torch is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func.name().partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def roots_by_step(monkeypatch: pytest.MonkeyPatch, steps: int, **options: Any) -> tuple[list[int], float]:
    """Return how many roots each step computes, and the products of one root."""
    solve, roots, products = dash_optim.refresh.inv_root_ex, [], 0.0

    def counted(A: Tensor, *args: Any, **keywords: Any) -> Any:
        nonlocal products
        result = solve(A, *args, **keywords)
        roots[-1] += len(A)
        products = float(result.matmuls[0])
        return result

    with monkeypatch.context() as patch:
        patch.setattr(dash_optim.refresh, "inv_root_ex", counted)
        param = matrix(32, 32)
        opt = DASH([param], **{"block_size": 16, **options})
        draw = torch.Generator().manual_seed(0)
        for _ in range(steps):
            param.grad = torch.randn(32, 32, generator=draw)
            roots.append(0)
            opt.step()
    return roots, products


def test_roots_and_products_are_saved_as_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_accelerators(p: int) -> dict[str, Any]:
        """Return what the default is where there are accelerators: 2 % in each eigenvalue of a factor of 16, by minimax polynomials."""
        return {"method": "minimax", "scaling": "frobenius", "p": p, "tol": 4 * (1.02**p - 1)}

    every, products = roots_by_step(monkeypatch, 12, update_freq=1, **of_accelerators(2))
    assert every == [8] * 12
    assert roots_by_step(monkeypatch, 2, update_freq=1)[1] == 0  # Cholesky factors
    calendar: dict[str, Any] = {"update_freq": 4, "refresh_young": False}
    assert roots_by_step(monkeypatch, 12, **calendar, refresh="interval")[0] == [8, 0, 0, 0] * 3
    assert roots_by_step(monkeypatch, 12, **calendar)[0] == [8] + [2] * 11
    # young factors: every step until the 8th gradient, every second until the 16th, as far as a calendar of four goes
    young = roots_by_step(monkeypatch, 24, update_freq=4, refresh="interval")[0]
    assert young == [8] * 7 + [0, 8] * 4 + [0, 8, 0, 0, 0, 8, 0, 0, 0]
    young = roots_by_step(monkeypatch, 20, update_freq=4)[0]
    assert young == [8] * 7 + [4] * 8 + [2] * 5
    options = {"refresh": "certified", "refresh_tol": 3.0, "rel_damping": 1e-4}
    assert sum(roots_by_step(monkeypatch, 12, **options)[0]) < sum(every) / 2
    newton = NewtonDB(steps=10)
    fourth = roots_by_step(monkeypatch, 1, **of_accelerators(4))[1]
    assert (products, roots_by_step(monkeypatch, 1, method=newton)[1]) == (18, 27)
    assert (fourth, roots_by_step(monkeypatch, 1, p=4, method=newton)[1]) == (17, 54)
    assert roots_by_step(monkeypatch, 1, rel_damping=1e-4, **of_accelerators(2))[1] < products


def test_smaller_blocks_take_fewer_operations_and_stacks_fewer_calls() -> None:
    large, small = plan_block_size({"w": (512, 512)}, block_sizes=(256, 128)).rows
    assert small.refresh_operations == large.refresh_operations / 2
    assert small.step_operations == large.step_operations / 2
    calls = {}
    for stacking in ("device", "layer", "none"):
        opt = stepped([matrix(32, 32) for _ in range(3)], block_size=16, stacking=stacking)
        with Calls() as counted:
            opt.step()
        calls[stacking] = counted.seen["aten::bmm"]
    assert calls["device"] < calls["layer"] < calls["none"]


# 5 roots fail


def failing(**options: Any) -> tuple[Diagnostics, str]:
    """Train a net with an input and a unit that are always zero, whose factors are therefore singular."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.ReLU(), nn.Linear(16, 4, bias=False))
    x, y = torch.randn(8, 16), torch.randn(8, 4)
    x[:, 5] = 0.0
    with torch.no_grad():
        model[0].weight[3] = 0.0  # type: ignore[index,operator,union-attr]
    opt = DASH(model.named_parameters(), lr=1e-2, update_freq=1, **options)
    message = ""
    try:
        for _ in range(6):
            opt.zero_grad()
            mse(model(x), y).backward()
            opt.step()
    except PreconditionerError as error:
        message = str(error)
    return opt.diagnostics(certify=True), message


def test_singular_factors_want_damping_and_nothing_else() -> None:
    """The message used to advise float64 and eigendecompositions, which fail as often."""
    found, message = failing(rel_damping=0.0)
    failures = found.scalars()["dash/failures"]
    assert failures == 12
    assert "SINGULAR" in message
    assert "try rel_damping=1e-06, now 0 (1e-4 for p = 2)" in message
    assert "float64" not in message
    for useless in ({"method": "evd"}, {"factor_dtype": torch.float64}, {"method": "cn"}):
        assert failing(rel_damping=0.0, **useless)[0].scalars()["dash/failures"] == failures
    for cure in ({"rel_damping": 1e-6}, {"rel_damping": 0.0, "method": EVD(spectrum="pinv")}):
        found, message = failing(**cure)
        assert found.scalars()["dash/failures"] == 0
        assert not message


def largest_error(**options: Any) -> float:
    return failing(**options)[0].scalars()["dash/largest_certified_error"]


def test_roots_that_converge_and_are_wrong_show_in_the_certificate() -> None:
    """float32 cannot hold what lies below 1e-7 of the largest eigenvalue: more damping, or float64."""
    found, _ = failing(rel_damping=1e-9, method="cn")
    assert found.scalars()["dash/failures"] == found.scalars()["dash/not_converged"] == 0
    assert largest_error(rel_damping=1e-9, method="cn") == math.inf
    assert largest_error(rel_damping=1e-9, method="cn", factor_dtype=torch.float64) < 1e-3
    assert largest_error(rel_damping=1e-6, method="cn") < 1e-1


def test_roots_that_run_out_of_steps_are_counted_and_cured_by_more() -> None:
    short = failing(method=NewtonDB(steps=4))[0].scalars()
    assert (short["dash/not_converged"], short["dash/failures"]) == (4, 0)
    assert short["dash/largest_certified_error"] > 0.5
    for cure in ({"method": NewtonDB(steps=20)}, {}):
        found = failing(**cure)[0].scalars()
        assert found["dash/largest_certified_error"] < 0.1
    assert found["dash/not_converged"] == 0


# 6 half precision


def scaled_training(scale: bool, p: int) -> tuple[Diagnostics, float]:
    """Train in float16 under autocast with gradients that are too small for it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    opt = DASH(model.named_parameters(), lr=1e-2, block_size=16, p=p)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, enabled=scale)  # type: ignore[attr-defined]
    x, y = torch.randn(32, 16), torch.randn(32, 4)
    first = loss = math.nan
    for _ in range(20):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x)
        small = mse(out.float(), y) * 1e-6
        scaler.scale(small).backward()
        scaler.step(opt)
        scaler.update()
        loss = small.item()
        first = loss if math.isnan(first) else first
    return opt.diagnostics(), loss / first


@pytest.mark.parametrize(("p", "least", "less"), [(4, 1.0, 0.8), (2, 0.0, 0.85)])
def test_gradients_that_vanish_in_float16_show_as_s_of_zero_and_come_back_with_a_scale(
    p: int, least: float, less: float
) -> None:
    """With p = 2 s is small as the gradients are, but not zero, and the beginning slower."""
    found, left = scaled_training(scale=False, p=p)
    assert found.blocks[0].grafting == 0.0
    assert found.blocks[0].factors[0].condition == 0.0
    found, better = scaled_training(scale=True, p=p)
    assert min(block.grafting for block in found.blocks) > least
    assert min(factor.condition for block in found.blocks for factor in block.factors) > 1
    assert better < less * left


@pytest.mark.parametrize("unscaled", [True, False])
def test_who_skipped_a_step_shows_in_the_scale_or_in_skipped_steps(unscaled: bool) -> None:
    """The scaler does not call step() on an overflow; without it DASH skips, whose count grows."""
    param = matrix(4, 4)
    opt = DASH([param])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)  # type: ignore[attr-defined]
    scaler.scale((param * torch.full((4, 4), math.inf)).sum()).backward()
    if unscaled:
        scaler.step(opt)
        scaler.update()
    else:
        opt.step()
    assert opt.diagnostics().skipped_steps == (0 if unscaled else 1)
    assert scaler.get_scale() == (2.0**15 if unscaled else 2.0**16)
    assert not param.any()


def bfloat16_progress(dtype: torch.dtype, lr: float) -> float:
    torch.manual_seed(0)
    layer = nn.Linear(16, 16, bias=False).to(dtype)
    with torch.no_grad():
        layer.weight.mul_(4)
    opt = DASH(layer.parameters(), lr=lr)
    x, y = torch.randn(64, 16), torch.randn(64, 16)
    losses = []
    for _ in range(50):
        opt.zero_grad()
        loss = mse(layer(x.to(dtype)).float(), y)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return 1 - losses[-1] / losses[0]


def test_small_steps_are_lost_in_bfloat16_weights_not_in_float32_ones() -> None:
    assert bfloat16_progress(torch.bfloat16, 1e-4) < bfloat16_progress(torch.float32, 1e-4) / 5
    assert bfloat16_progress(torch.bfloat16, 1e-2) == pytest.approx(
        bfloat16_progress(torch.float32, 1e-2), rel=0.1
    )


# 7 checkpoints that do not load


@pytest.mark.parametrize(
    ("saved", "options", "match", "cure"),
    [
        ({"block_size": 8}, {"block_size": 16}, r"construct it with block_size=8", {"block_size": 8}),
        ({"p": 4}, {}, r"construct it with p=4", {"p": 4}),
        ({"p": None}, {}, r"construct it with p=None", {"p": None}),
        ({"grafting": "sgd"}, {}, r"construct it with grafting='sgd'", {"grafting": "sgd"}),
    ],
)
def test_a_checkpoint_of_other_options_loads_with_those_that_the_error_names(
    saved: dict[str, Any], options: dict[str, Any], match: str, cure: dict[str, Any]
) -> None:
    old = stepped([matrix(16, 16)], steps=3, **saved)
    param = matrix(16, 16)
    with pytest.raises(ValueError, match=match):
        DASH([param], **options).load_state_dict(old.state_dict())
    new = DASH([param], **cure)
    new.load_state_dict(old.state_dict())
    assert held(new) == held(old)
    assert new.diagnostics() != Diagnostics()


def test_checkpoints_of_other_groups_or_optimizers_are_told_apart() -> None:
    a, b = matrix(4, 4), matrix(4, 4)
    old = stepped([{"params": [a]}, {"params": [b]}])
    with pytest.raises(ValueError, match="expected 1 parameter groups, got 2"):
        DASH([a, b]).load_state_dict(old.state_dict())
    DASH([{"params": [a]}, {"params": [b]}]).load_state_dict(old.state_dict())
    with pytest.raises(ValueError, match="not a checkpoint of DASH"):
        DASH([a]).load_state_dict(torch.optim.AdamW([a]).state_dict())
    swapped = DASH([matrix(4, 4), matrix(8, 4)])
    swapped.load_state_dict(stepped([matrix(8, 4), matrix(4, 4)]).state_dict())
    with pytest.raises(ValueError, match="its shape and its group's options give"):
        swapped.summary()


# 8 parameters that are not preconditioned


def way(params: Any, name: str, **options: Any) -> str:
    """Return the third column of a parameter's line in the summary."""
    (line,) = [line for line in DASH(params, **options).summary().splitlines() if line.startswith(name + " ")]
    return line.partition(")")[2].split()[0]


def test_the_summary_shows_who_is_left_out_and_the_advice_brings_it_in() -> None:
    model = nn.Sequential()
    model.add_module("body", nn.Linear(8, 8, bias=False))
    model.add_module("fc", nn.Linear(8, 3))
    assert way(param_groups(model, verbose=False), "fc.weight") == "adamw"
    asked = param_groups(model, verbose=False, overrides={"heads": {"algorithm": "dash"}})
    assert way(asked, "fc.weight") == "dash"
    assert way(model.named_parameters(), "fc.bias") == "adamw"
    assert way(model.named_parameters(), "fc.bias", one_d="dash") == "dash"
    long = [("long", matrix(300, 200))]
    assert way(long, "long", max_factor_dim=100) == "adamw"
    assert way(long, "long", max_factor_dim=math.inf) == "dash"
    with pytest.warns(UserWarning, match="flattened"):
        assert way([("flat", matrix(2**16))], "flat") == "adamw"


def test_a_parameter_without_a_gradient_has_no_blocks_yet() -> None:
    used, unused = matrix(4, 4), matrix(4, 4)
    used.grad = torch.ones(4, 4)
    opt = DASH([("used", used), ("unused", unused)])
    opt.step()
    assert [block.parameter for block in opt.diagnostics().blocks] == ["used"]
    assert unused not in opt.state
    unused.grad = torch.ones(4, 4)
    opt.step()
    assert [block.parameter for block in opt.diagnostics().blocks] == ["used", "unused"]
