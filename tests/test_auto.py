# SPDX-License-Identifier: Apache-2.0
"""Method "auto": its promise on random draws, what it chooses by, and the measured costs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from matrices import error, inverse_root, orthogonal, spd
from table import BF16, FP32, FP64
from torch import Tensor

import matroots
from matroots import EVD, Rational, Status, _auto, _tune
from matroots._auto import PRECISE, choose
from matroots._rounding import condition_number
from matroots._tune import Costs, costs

LIKE = torch.eye(1)  # fp32 on CPU
FREE, DEAR = 1e-3, 1e9
CHEAPEST = {
    "evd32": Costs(evd32=FREE, evd64=DEAR, pole=DEAR, fixed=DEAR),
    "evd64": Costs(evd32=DEAR, evd64=FREE, pole=DEAR, fixed=DEAR),
    "rational": Costs(evd32=DEAR, evd64=DEAR, pole=FREE, fixed=FREE),
}


def spectrum(kind: str, n: int, condition: float) -> Tensor:
    """n eigenvalues in [1/condition, 1]."""
    if kind == "logarithmic":
        return torch.logspace(-math.log10(condition), 0, n, dtype=FP64)
    if kind == "uniform":
        return torch.linspace(1 / condition, 1, n, dtype=FP64)
    values = torch.ones(n, dtype=FP64)
    values[: 1 if kind == "one small" else n // 2] = 1 / condition
    return values


def broken_promises(draws: int, seed: int) -> tuple[list[str], int]:
    """Draws whose member claims CONVERGED and misses tol, and how many claim it."""
    rng = np.random.default_rng(seed)
    broken, converged = [], 0
    for i in range(draws):
        n, condition = int(rng.integers(1, 201)), 10 ** rng.uniform(0, 9)
        p, tol = float(rng.choice([1, 2, 3, 4, 8, 1.5, 2.5])), 10.0 ** -int(rng.integers(1, 7))
        dtype, rel_damping = (FP32, FP64, BF16)[rng.integers(3)], float(rng.choice([0, 1e-6, 1e-3]))
        kind = str(rng.choice(["logarithmic", "uniform", "one small", "two clusters"]))
        Q = orthogonal(n, seed=1000 * seed + i)
        A = (Q * spectrum(kind, n, condition)) @ Q.mT * 10 ** rng.uniform(-10, 10)
        A = ((A + A.mT) / 2).to(dtype)
        result = matroots.inv_root_ex(A, p, method="auto", tol=tol, rel_damping=rel_damping)
        if result.status != Status.CONVERGED:
            continue
        converged += 1
        values, Q = torch.linalg.eigh(A.double() + result.damping * torch.eye(n, dtype=FP64))
        truth = (Q * values ** (-1 / p)) @ Q.mT
        noise = 4e-16 * n * float(values[-1] / values[0])  # of the reference
        wrong = float(error(result.root, truth))
        if not wrong <= tol + noise:
            broken.append(f"{i}: {n=} {p=} {condition=:.1e} {tol=} {dtype} {kind} {rel_damping=} {wrong:.1e}")
    return broken, converged


def test_tol_is_kept_wherever_it_is_claimed():
    broken, converged = broken_promises(100, seed=0)
    assert not broken
    assert converged > 50


@pytest.mark.slow
def test_tol_is_kept_wherever_it_is_claimed_in_many_draws():
    broken, converged = broken_promises(500, seed=1)
    assert not broken
    assert converged > 250


@pytest.mark.parametrize("cheapest", CHEAPEST)
def test_the_cheapest_able_method_is_chosen(monkeypatch, cheapest):
    monkeypatch.setattr(_auto, "costs", lambda n, device: CHEAPEST[cheapest])
    choice = choose(16, 2.0, 1e-2, 0.0, LIKE)
    assert isinstance(choice.solver, Rational if cheapest == "rational" else EVD)
    assert choice.dtype == (FP64 if cheapest == "evd64" else FP32)
    assert (choice == PRECISE) == (cheapest == "evd64")


@pytest.mark.parametrize("cheapest", CHEAPEST)
@pytest.mark.parametrize("p", [1.0, 2.0, 2.5, 8.0])
@pytest.mark.parametrize("rel_damping", [0.0, 1e-6, 1e-3])
def test_a_method_that_is_predicted_to_miss_is_never_chosen(monkeypatch, cheapest, p, rel_damping):
    monkeypatch.setattr(_auto, "costs", lambda n, device: CHEAPEST[cheapest])
    expected = 1e3 if rel_damping == 1e-3 else _auto.TYPICAL_CONDITION
    for tol in (10.0**-k for k in range(10)):
        choice = choose(64, p, tol, rel_damping, LIKE)
        assert choice.error(64, p, expected) <= tol
        assert not (p == 1 and isinstance(choice.solver, Rational))
    assert choose(64, p, 1e-7, rel_damping, LIKE) == PRECISE
    assert choose(64, p, 1e-30, rel_damping, LIKE) == PRECISE, "nothing is able: the most precise"


def test_without_tol_no_rounding_of_the_method_shows():
    assert choose(16, 2.0, None, 0.0, LIKE) == PRECISE
    assert choose(16, 2.0, None, 1e-3, LIKE.to(BF16)) == PRECISE
    assert choose(16, 2.0, None, 0.0, LIKE.to(FP64)).dtype == FP64


@pytest.mark.parametrize("cheapest", ["evd32", "rational"])
def test_a_second_solve_serves_the_hard_member_alone(monkeypatch, cheapest):
    monkeypatch.setattr(_auto, "costs", lambda n, device: CHEAPEST[cheapest])
    members = [spd(8, 10.0, seed=1), spd(8, 1e7, seed=2), spd(8, 10.0, seed=3)]
    A = torch.stack(members).to(FP32)
    solved: list[tuple[object, int]] = []
    solve = _auto._solve

    def counted(choice, A, options, want):
        solved.append((choice, len(A)))
        return solve(choice, A, options, want)

    monkeypatch.setattr(_auto, "_solve", counted)
    # at 1e-4 float32 is not even tried: at the typical condition number it is predicted to miss
    result = matroots.inv_root_ex(A, 2, method="auto", tol=3e-3)
    assert [(choice == PRECISE, b) for choice, b in solved] == [(False, 3), (True, 1)]
    assert result.status.tolist() == [Status.CONVERGED] * 3
    assert bool((error(result.root, inverse_root(A, 2)) <= 3e-3).all())
    for i in range(3):
        alone = matroots.inv_root_ex(A[i], 2, method="auto", tol=3e-3)
        for whole, single in zip(result[:-1], alone[:-1], strict=True):
            assert torch.equal(whole[i].nan_to_num(7.0), single.nan_to_num(7.0))


@pytest.mark.parametrize("p", [2, 4])
def test_a_batch_of_easy_and_hard_members_meets_tol(p):
    A = torch.stack([spd(8, 10.0, seed=1), spd(8, 1e7, seed=2), spd(8, 10.0, seed=3)]).to(FP32)
    result = matroots.inv_root_ex(A, p, method="auto", tol=1e-4)
    assert result.status.tolist() == [Status.CONVERGED] * 3
    truth = inverse_root(A, p, result.damping.reshape(-1, 1).numpy()[:, 0])
    assert bool((error(result.root, truth) <= 1e-4).all())
    for i in (0, 2):
        alone = matroots.inv_root_ex(A[i], p, method="auto", tol=1e-4)
        assert torch.equal(result.root[i], alone.root)


@pytest.mark.parametrize("cheapest", CHEAPEST)
def test_members_without_a_root_keep_their_status(monkeypatch, cheapest):
    monkeypatch.setattr(_auto, "costs", lambda n, device: CHEAPEST[cheapest])
    indefinite, nan = torch.diag(torch.tensor([1.0, -0.5, 1.0, 1.0])), torch.full((4, 4), math.nan)
    A = torch.stack([torch.eye(4) * 2, indefinite, nan, torch.zeros(4, 4), spd(4, 100.0, dtype=FP32)])
    result = matroots.inv_root_ex(A, 2, method="auto", tol=1e-2)
    reference = matroots.inv_root_ex(A, 2, method=EVD(compute_dtype=FP64))
    assert result.status.tolist() == reference.status.tolist()
    assert result.status.tolist()[1:4] == [Status.INDEFINITE, Status.NONFINITE_INPUT, Status.SINGULAR]
    assert bool((error(result.root[[0, 4]], inverse_root(A[[0, 4]], 2)) <= 1e-2).all())
    assert bool(result.root[1:4].isnan().all())


@pytest.mark.parametrize("scale", [1e-5, 1.0, 1e5])
@pytest.mark.parametrize("p", [1, 2, 2.5, 4])
def test_the_condition_number_is_estimated_to_a_third(scale, p):
    for seed in range(8):
        G = torch.randn(3, 24, 40, generator=torch.Generator().manual_seed(seed), dtype=FP64)
        A = (G @ G.mT + 10.0 ** -(seed % 4) * torch.eye(24)) * scale
        result = matroots.inv_root_ex(A, p, method=EVD())
        ratio = condition_number(A, result.root, float(p)) / torch.linalg.cond(A)
        assert bool((ratio >= 1.0).all())
        assert bool((ratio <= 1.33).all())


def test_tol_of_an_irrational_order_is_predicted_and_not_certified():
    A = spd(8, 100.0, dtype=FP32)
    result = matroots.inv_root_ex(A, math.pi, method="auto", tol=1e-3)
    assert result.status == Status.CONVERGED
    assert error(result.root, inverse_root(A, math.pi)) <= 1e-3
    with pytest.raises(ValueError, match="p"):
        matroots.inv_root_ex(A, math.pi, method="auto", tol=1e-3, certify=True)


def test_keywords_that_auto_has_no_use_for_are_refused():
    A = torch.eye(3)
    with pytest.raises(ValueError, match="max_steps"):
        matroots.inv_root_ex(A, 2, method="auto", max_steps=5)
    for call in (matroots.root, matroots.root_pair):
        with pytest.raises(ValueError, match="tol"):
            call(A, 2, method="auto", tol=1e-2)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty folder for measured costs, and none in memory."""
    monkeypatch.setenv("MATROOTS_CACHE", str(tmp_path / "costs"))
    monkeypatch.setattr(_tune, "_loaded", {})
    monkeypatch.setattr(_tune, "_ELEMENTS", 2**10)  # of a measured batch
    return tmp_path / "costs"


def write(text: str) -> Path:
    path = _tune.cache_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_tune_keeps_a_file_that_costs_uses(cache):
    before, lines = costs(4, "cpu"), []
    table = matroots.tune(sizes=(4, 8), say=lines.append)
    assert [path.name for path in cache.iterdir()] == [_tune.cache_file().name]
    assert len(lines) == 4
    assert str(_tune.cache_file()) in lines[-1]
    assert (costs(4, "cpu"), costs(8, "cpu")) == (table[4], table[8])
    assert costs(4, "cpu") != before
    assert (costs(1, "cpu"), costs(100, "cpu")) == (table[4], table[8])
    assert costs(4, "cuda") == _tune._DEFAULTS["cuda"][32], "not measured"
    _tune._loaded.clear()  # as in another process
    assert costs(8, "cpu") == table[8]
    assert set(matroots.tune(sizes=(5,), say=lines.append)) == {5}
    assert costs(8, "cpu") == costs(5, "cpu"), "the last measurement of a device replaces the one before"


def test_costs_between_two_sizes_are_geometric(cache):
    low, high = Costs(1.0, 2.0, 3.0, 4.0), Costs(16.0, 2.0, 12.0, 1.0)
    stored = {"cpu": {n: vars(c) for n, c in ((4, low), (16, high))}}
    write(json.dumps(stored))
    middle = costs(8, "cpu")
    for name in ("evd32", "evd64", "pole", "fixed"):
        ends = getattr(low, name), getattr(high, name)
        assert getattr(middle, name) == pytest.approx(math.sqrt(ends[0] * ends[1]), rel=1e-12)
        for n in range(4, 17):
            assert min(ends) * (1 - 1e-12) <= getattr(costs(n, "cpu"), name) <= max(ends) * (1 + 1e-12)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"cpu": 1}',
        '{"cpu": {}}',
        '{"cpu": {"x": {}}}',
        '{"cpu": {"4": {"evd32": 1}}}',
        '{"cpu": {"4": {"evd32": -1, "evd64": 1, "pole": 1, "fixed": 1}}}',
        '{"cpu": {"4": {"evd32": "1", "evd64": 1, "pole": 1, "fixed": 1}}}',
        '{"cpu": {"4": {"evd32": NaN, "evd64": 1, "pole": 1, "fixed": 1}}}',
    ],
)
def test_a_corrupt_file_is_ignored(cache, text):
    fixed = _tune._DEFAULTS["cpu"][64]
    path = write(text)
    assert costs(64, "cpu") == fixed
    matroots.tune(sizes=(4,), say=lambda line: None)
    assert list(json.loads(path.read_text())) == ["cpu"], "and written anew"


def test_a_file_that_is_not_text_is_ignored(cache):
    write("").write_bytes(b"\xff\xfe\x00")
    assert costs(64, "cpu") == _tune._DEFAULTS["cpu"][64]


@pytest.mark.parametrize("sizes", [(), (1,), (4, 0)])
def test_sizes_that_cannot_be_measured_are_refused(cache, sizes):
    with pytest.raises(ValueError, match="sizes"):
        matroots.tune(sizes=sizes, say=lambda line: None)
    assert not cache.exists()


def test_a_folder_that_cannot_be_written_is_an_error(cache):
    cache.write_text("a file where the folder would be")  # holds for root as well, whom no permission stops
    with pytest.raises(OSError, match="costs"):
        matroots.tune(sizes=(4,), say=lambda line: None)
    assert costs(32, "cpu") == _tune._DEFAULTS["cpu"][32]


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
def test_tune_names_a_device_that_is_not_there():
    lines: list[str] = []
    with pytest.raises(ValueError, match=r"^device: 'cuda' cannot be used here"):
        matroots.tune("cuda", sizes=(4,), say=lines.append)
    assert lines == []
