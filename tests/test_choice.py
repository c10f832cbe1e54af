"""What "auto" promises, what it chooses by, and solves in several threads."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from matrices import error, inverse_root, orthogonal, spd, with_spectrum
from table import BF16, FP32, FP64

import matroots
from matroots import EVD, Rational, Status, _auto, _solve, _threads, _tune
from matroots._auto import PRECISE, choose, condition
from matroots._tune import Costs, costs


def spectrum(kind: str, n: int, kappa: float) -> torch.Tensor:
    if kind == "log":
        return torch.logspace(-math.log10(kappa), 0, n, dtype=FP64)
    if kind == "uniform":
        return torch.linspace(1 / kappa, 1, n, dtype=FP64)
    values = torch.ones(n, dtype=FP64)
    values[: 1 if kind == "one small" else n // 2] = 1 / kappa
    return values


def drawn(seed: int) -> tuple[torch.Tensor, float, float, float]:
    """A matrix of random size, spectrum, scale and dtype, and p, tol and rel_damping."""
    g = torch.Generator().manual_seed(seed)

    def pick(*values: Any) -> Any:
        return values[int(torch.randint(len(values), (1,), generator=g))]

    n, kappa = pick(1, 2, 3, 8, 33, 64, 130), 10 ** (9 * torch.rand(1, generator=g).item())
    Q = orthogonal(n, seed)
    A = (Q * spectrum(pick("log", "uniform", "one small", "clusters"), n, kappa)) @ Q.mT
    A = ((A + A.mT) / 2 * pick(1e-10, 1.0, 1e10)).to(pick(FP32, FP32, FP64, BF16))
    return A, pick(1, 2, 3, 4, 8, 1.5, 2.5), 10.0 ** -pick(1, 2, 3, 4, 5, 6), pick(0.0, 1e-6, 1e-3)


def holds(seeds: range) -> None:
    converged = 0
    for seed in seeds:
        A, p, tol, rel_damping = drawn(seed)
        result = matroots.inv_root_ex(A, p, tol=tol, rel_damping=rel_damping)
        if result.status != Status.CONVERGED:
            continue
        converged += 1
        damped = A.double() + result.damping * torch.eye(len(A), dtype=FP64)
        values, Q = torch.linalg.eigh(damped)
        truth = (Q * values ** (-1 / p)) @ Q.mT
        unknown = 4e-16 * len(A) * float(values[-1] / values[0])  # of the truth itself
        assert error(result.root, truth) <= tol + unknown, (seed, p, tol)
    assert converged > len(seeds) / 2


def test_auto_meets_its_tolerance_or_says_so():
    holds(range(100))


@pytest.mark.slow
def test_auto_meets_its_tolerance_or_says_so_in_every_draw():
    holds(range(100, 600))


def test_members_that_need_it_are_solved_again():
    A = torch.stack(
        [spd(8, 10.0, dtype=FP32), spd(8, 1e6, dtype=FP32), spd(8, 1e3, dtype=FP32), spd(8, dtype=FP32)]
    )
    A[2, 0, 0], A[3] = math.nan, -A[3]
    result = matroots.inv_root_ex(A, 4, tol=1e-4)
    assert result.status.tolist() == [
        Status.CONVERGED,
        Status.CONVERGED,
        Status.NONFINITE_INPUT,
        Status.INDEFINITE,
    ]
    assert error(result.root[:2], inverse_root(A[:2], 4)).max() <= 1e-4
    assert torch.equal(matroots.inv_root_ex(A[1], 4, tol=1e-4).root, result.root[1])


def test_a_prediction_needs_no_rational_exponent_and_a_proof_does():
    A = spd(6, 30.0)
    assert matroots.inv_root_ex(A, math.pi, tol=1e-3).status == Status.CONVERGED
    with pytest.raises(ValueError, match=r"^p: "):
        matroots.inv_root_ex(A, math.pi, tol=1e-3, certify=True)
    with pytest.raises(ValueError, match=r"^tol: "):
        matroots.root(A, 2, tol=1e-3)


@pytest.mark.parametrize(
    ("table", "tol", "solver"),
    [
        (Costs(1.0, 9.0, 9.0, 9.0), 1e-1, EVD(compute_dtype=FP32)),
        (Costs(1.0, 2.0, 9.0, 9.0), 1e-4, PRECISE.solver),  # float32 is the cheapest, and is not able
        (Costs(9.0, 9.0, 0.1, 0.1), 1e-3, Rational),
        (Costs(9.0, 9.0, 0.1, 0.1), 1e-7, PRECISE.solver),
    ],
)
def test_the_cheapest_that_is_able_is_chosen(monkeypatch, table, tol, solver):
    monkeypatch.setattr(_auto, "costs", lambda n, device: table)
    found = choose(256, 4.0, tol, 0.0, torch.empty(0)).solver
    assert isinstance(found, solver) if isinstance(solver, type) else found == solver
    assert not isinstance(choose(256, 1.0, tol, 0.0, torch.empty(0)).solver, Rational)


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
@pytest.mark.parametrize("kappa", [1.0, 1e3, 1e5])
def test_the_condition_number_is_estimated_to_a_factor_of_two(scale, kappa):
    A = (scale * spd(40, kappa)).unsqueeze(0)
    found = condition(A, matroots.inv_root_ex(A, 4), 4.0).item()
    assert 0.8 * kappa <= found <= 2 * kappa


def test_tune_is_kept_and_used(tmp_path, monkeypatch):
    monkeypatch.setenv("MATROOTS_CACHE", str(tmp_path / "new"))
    monkeypatch.setattr(_tune, "_loaded", {})
    fixed, lines = costs(6, "cpu"), []
    table = matroots.tune(sizes=(4, 8), say=lines.append)
    assert [path.name for path in (tmp_path / "new").iterdir()] == [_tune.cache_file().name]
    assert str(_tune.cache_file()) in lines[-1]
    assert costs(4, "cpu") == costs(2, "cpu") == table[4] != fixed
    assert costs(500, "cpu") == table[8]
    assert costs(6, "cpu").evd32 == pytest.approx(
        table[4].evd32 ** (1 - math.log2(1.5)) * table[8].evd32 ** math.log2(1.5)
    )
    _tune.cache_file().write_text("{ half a file")
    _tune._loaded.clear()
    assert costs(6, "cpu") == fixed
    for sizes in ((), (1, 8)):
        with pytest.raises(ValueError, match=r"^sizes: "):
            matroots.tune(sizes=sizes)


@pytest.fixture
def two_threads(monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(_threads, "_WORTH_A_THREAD", 1)
    used: list[int] = []
    mapped = _threads.mapped
    monkeypatch.setattr(
        _solve, "mapped", lambda f, items, threads: used.append(threads) or mapped(f, items, threads)
    )
    yield used
    torch.set_num_threads(before)


@pytest.mark.parametrize("method", ["evd", "cn", "ndb", "minimax", "rational", "chebyshev"])
def test_threads_change_no_answer(two_threads, method):
    A = torch.stack([with_spectrum(spectrum("log", 20, 50.0), s, FP32) for s in range(8)])
    shared = matroots.inv_root_ex(A, 4, method=method)
    assert two_threads == [2]
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    alone = matroots.inv_root_ex(A, 4, method=method)
    assert two_threads == [2]
    assert torch.allclose(shared.root, alone.root, rtol=1e-5, atol=1e-6)
    assert torch.equal(shared.status, alone.status)
    assert not shared.root.requires_grad


def test_threads_are_restored_after_an_exception(two_threads, monkeypatch):
    def fail(*arguments: object) -> None:
        raise MemoryError("no memory for a chunk")

    monkeypatch.setattr(_solve, "_solve_chunk", fail)
    with pytest.raises(MemoryError, match="no memory"):
        matroots.inv_root_ex(torch.eye(8).expand(8, 8, 8), 2, method="evd")
    assert two_threads == [2]
    assert torch.get_num_threads() == 2


def test_a_generator_and_a_mode_stay_in_their_thread(two_threads):
    A = torch.eye(8).expand(8, 8, 8)
    matroots.inv_root_ex(A, 2, method="ndb", generator=torch.Generator())
    with torch.device("cpu"):
        matroots.inv_root_ex(A, 2, method="ndb")
    assert two_threads == []


def test_unbalanced_chunks_are_solved_one_by_one():
    assert not _threads.balanced(3, 2, 2)
    assert _threads.balanced(4, 2, 2)
    assert _threads.balanced(64, 1, 2)
