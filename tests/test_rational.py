# SPDX-License-Identifier: Apache-2.0
"""Best rational approximants against mpmath, batched inverse factors against numpy, and what the solver claims of its roots."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import ROUNDOFF, error, inverse_root, power, spd, symmetric, with_spectrum
from table import BF16, FP16, FP32, FP64, name
from torch.utils._python_dispatch import TorchDispatchMode

import matroots
from matroots import Rational, Status, _prepare, _products, _solve
from matroots._cholesky import (
    _cuts,
    add_gram,
    inverse_factor,
    lower_times,
    times_lower,
    times_transposed_lower,
)
from matroots.scaling import bounds
from matroots.solvers import rational
from matroots.solvers.rational import approximant, best_rational, evaluate, most_poles, pole_gain

U64 = 2.0**-53
POWERS = [2, 4, 3, 1.5, 1.001, 64]


# ----------------------------------------------------------------------------------------------------- approximants


def errors(r, a, points):
    """``x^a r(x) - 1`` at ``x = exp(y)``, in 40 digits."""
    with mpmath.workdps(40):
        c, a = mpmath.mpf(r.constant), mpmath.mpf(a)
        terms = [(mpmath.mpf(w), mpmath.mpf(s)) for w, s in zip(r.weights, r.shifts, strict=True)]
        values = []
        for y in points:
            x = mpmath.exp(mpmath.mpf(float(y)))
            values.append(float(x**a * (c + sum(w / (x + s) for w, s in terms)) - 1))
        return np.array(values)


@pytest.mark.parametrize(("a", "floor"), [(1 / 4.302106658569063, 2.0**-5), (0.7041635177472855, 2.0**-36)])
def test_points_that_meet_end_the_search(a, floor):
    """With as many poles as leave only rounding, extrema that float64 cannot part made the equations singular."""
    assert approximant(a, floor, 0.0, 80).error < 4 * U64


def alternations(values, least):
    """How often the sign changes between values of at least this size, and once more."""
    signs = np.sign(values[np.abs(values) >= least])
    return 1 + int((signs[1:] != signs[:-1]).sum())


@pytest.mark.parametrize("floor", [0.25, 1e-2, 1e-4, 1e-8, 1e-15])
@pytest.mark.parametrize("p", POWERS)
def test_the_error_oscillates_equally(p, floor):
    """2 N + 2 alternations of one size: by de la Vallee Poussin's theorem nothing is better by more than their ratio."""
    poles = max(1, min(12, math.floor(math.log(1e10) / pole_gain(floor))))
    r = best_rational(1 / p, floor, poles)
    values = errors(r, 1 / p, np.linspace(math.log(floor), 0.0, 160 * poles))
    assert np.abs(values).max() == pytest.approx(r.error, rel=0.02)
    assert alternations(values, 0.9 * r.error) == 2 * poles + 2
    assert min(r.constant, *r.weights, *r.shifts) > 0


@pytest.mark.parametrize("floor", [0.25, 1e-4, 1e-15])
@pytest.mark.parametrize("p", [2, 4, 1.001])
def test_the_error_is_what_it_says_down_to_rounding(p, floor):
    """With the poles that fp64 takes; the coefficients themselves are rounded, which leaves a few u."""
    for target in (1e-6 / p, 1e-11, 2 * U64):
        r = approximant(1 / p, floor, target, 80)
        values = errors(r, 1 / p, np.linspace(math.log(floor), 0.0, 20 * len(r.shifts)))
        assert np.abs(values).max() <= 1.02 * r.error + 4 * U64
        assert r.error <= target


@pytest.mark.parametrize("poles", [1, 2, 5, 9])
@pytest.mark.parametrize("floor", [0.25, 1e-3, 1e-10])
def test_the_square_root_is_zolotarevs(floor, poles):
    """Closed form by elliptic functions, in mpmath: shifts, weights (residues of a product), constant and error."""
    r = best_rational(0.5, floor, poles)
    with mpmath.workdps(40):
        m = 1 - mpmath.mpf(floor)
        quarter = mpmath.ellipk(m)
        at = [k * quarter / (2 * poles + 1) for k in range(1, 2 * poles + 1)]
        points = [
            mpmath.mpf(floor) * (mpmath.ellipfun("sn", u, m=m) / mpmath.ellipfun("cn", u, m=m)) ** 2
            for u in at
        ]
        shifts, zeros = points[0::2], points[1::2]

        def ratio(x):
            return mpmath.fprod((x + z) / (x + s) for z, s in zip(zeros, shifts, strict=True))

        one, other = ratio(1), mpmath.sqrt(floor) * ratio(mpmath.mpf(floor))
        constant = 2 / (one + other)  # the ends are alternation points of opposite sign
        residues = [
            constant * mpmath.fprod(z - s for z in zeros) / mpmath.fprod(t - s for t in shifts if t is not s)
            for s in shifts
        ]
        level = abs(constant * one - 1)
        rel = 1e-6 if level > 1e-9 else 1e-3  # unknowns are as ill-conditioned as the error is small
        assert r.error == pytest.approx(float(level), rel=2e-2)
        assert r.constant == pytest.approx(float(constant), rel=rel)
        assert r.shifts == pytest.approx([float(s) for s in shifts], rel=rel)
        assert r.weights == pytest.approx([float(w) for w in residues], rel=rel)


@pytest.mark.parametrize("floor", [0.25, 1e-2, 1e-8])
@pytest.mark.parametrize("p", POWERS)
def test_below_the_floor_is_undershot_and_never_amplified(p, floor):
    for target in (0.3, 1e-3, 1e-8):
        r = approximant(1 / p, floor, target, 80)
        y = math.log(floor) - np.linspace(0.0, 40.0, 400)
        values = errors(r, 1 / p, y) + 1
        assert values.max() <= 1 - 0.9 * r.error  # at the floor itself the error is -E
        assert (np.diff(values) <= 0).all()  # monotone: the smaller the eigenvalue, the more it is damped


@pytest.mark.parametrize("floor", [0.25, 1e-3, 1e-8, 1e-12])
@pytest.mark.parametrize("a", [0.5, 0.25, 0.75, 1 / 64, 0.999])
def test_each_pole_gains_what_elliptic_functions_predict(a, floor):
    first = 4 if floor > 1e-4 else 8
    sizes = [best_rational(a, floor, poles).error for poles in (first, first + 2)]
    with mpmath.workdps(30):
        gain = 2 * mpmath.pi * mpmath.ellipk(floor) / mpmath.ellipk(1 - mpmath.mpf(floor))
    assert pole_gain(floor) == pytest.approx(float(gain), rel=1e-12)
    assert math.log(sizes[0] / sizes[1]) / 2 == pytest.approx(float(gain), rel=0.03)
    if floor <= 1e-3:  # the shorter formula
        assert 2 * math.pi**2 / (math.log(1 / floor) + 3) == pytest.approx(float(gain), rel=0.06)


@pytest.mark.parametrize("seed", range(4))
def test_the_fewest_poles_are_taken(seed):
    draw = np.random.default_rng(seed)
    for _ in range(40):
        a = draw.choice([0.5, 0.25, 0.75, 0.999, 1e-3, draw.uniform(0.01, 0.99)])
        floor = 10.0 ** draw.uniform(-15, -0.4)
        target = 10.0 ** draw.uniform(-8, -0.5) * math.sin(math.pi * a)
        r = approximant(float(a), floor, float(target), 80)
        assert r.error <= target
        if len(r.shifts) > 1:
            assert best_rational(float(a), floor, len(r.shifts) - 1).error > target


def test_a_limit_is_kept_and_a_target_of_zero_takes_it():
    assert len(approximant(0.25, 1e-6, 0.0, 7).shifts) == 7
    limited = approximant(0.25, 1e-6, 1e-12, 5)
    assert len(limited.shifts) == 5
    assert limited.error > 1e-12


def test_no_more_poles_than_rounding_has_room_for():
    for a in (0.25, 0.5, 0.999):
        for floor in (0.5, 1e-3, 1e-15):
            r = approximant(a, floor, 0.0, 10**6)
            assert len(r.shifts) == most_poles(a, floor) <= 90
            assert r.error < U64
            values = errors(r, a, np.linspace(math.log(floor), 0.0, 200))
            assert np.abs(values).max() <= 6 * U64


def test_orders_one_have_no_error():
    assert approximant(1.0, 1e-4, 1e-8, 60) == rational.Approximant(0.0, (1.0,), (0.0,), 0.0)
    assert approximant(0.0, 1e-4, 1e-8, 60) == rational.Approximant(1.0, (), (), 0.0)


@pytest.mark.parametrize("gap", [1e-3, 1e-6, 1e-9, 2.0**-52])
@pytest.mark.parametrize("floor", [0.5, 1e-4, 4.5e-16])
def test_powers_next_to_zero_and_one(gap, floor):
    """Nearly all of r is one pole, or the constant: raised ZeroDivisionError before the start knew."""
    for a in (gap, 1 - gap):
        for poles in (1, 2, 5):
            r = best_rational(a, floor, poles)
            values = errors(r, a, np.linspace(math.log(floor), 0.0, 200))
            assert np.abs(values).max() <= 1.02 * r.error + 4 * U64
            assert r.error <= 10 * rational.expected_error(a, floor, poles)


@pytest.mark.parametrize("floor", [0.6, 0.999, 1 - 1e-9, 1 - U64])
def test_a_floor_next_to_one_is_no_obstacle(floor):
    for poles in (0, 1, 3):
        r = approximant(0.25, floor, 0.0 if poles else 1e-15, poles or 60)
        assert np.abs(errors(r, 0.25, [math.log(floor), 0.0])).max() <= r.error + 4 * U64


def test_designs_are_cached_and_deterministic():
    best_rational.cache_clear()
    first = best_rational(0.25, 1e-5, 9)
    assert best_rational(0.25, 1e-5, 9) is first
    best_rational.cache_clear()
    assert best_rational(0.25, 1e-5, 9) == first


# -------------------------------------------------------------------------------------------------- inverse factors


def lower_residual(A, R):
    """``||R A R^T - I||_F`` in fp64, of what must be lower triangular."""
    A, R = A.double(), R.double()
    return torch.linalg.matrix_norm(R @ A @ R.mT - torch.eye(A.shape[-1], dtype=FP64)).max()


@pytest.mark.parametrize("dtype", [FP64, FP32], ids=name)
@pytest.mark.parametrize("sizes", [range(1, 36), range(36, 71), [127, 128, 129, 200], [300, 513]], ids=str)
def test_inverse_factors_of_every_size(sizes, dtype):
    for n in sizes:
        A = torch.stack([spd(n, 100.0, seed, dtype) for seed in range(2)])
        before = A.clone()
        R, definite = inverse_factor(A)
        assert definite.tolist() == [True, True]
        assert torch.equal(A, before)
        assert torch.equal(R, R.tril())
        assert lower_residual(A, R) <= 20 * n * 100 * ROUNDOFF[dtype]
        exact = np.linalg.inv(np.linalg.cholesky(A[0].double().numpy()))
        assert np.abs(R[0].double().numpy() - exact).max() <= 1e3 * ROUNDOFF[dtype] * np.abs(exact).max()


@pytest.mark.parametrize("n", [7, 40, 150, 300])
def test_inverse_factors_of_strided_input(n):
    A = torch.stack([spd(n, 50.0, seed) for seed in range(3)])
    expected, _ = inverse_factor(A)
    wide = torch.full((3, 2 * n, n + 3), math.nan, dtype=FP64)
    wide[:, ::2, 1 : n + 1] = A
    for view in (A.permute(1, 2, 0).contiguous().permute(2, 0, 1), A.mT, wide[:, ::2, 1 : n + 1]):
        R, definite = inverse_factor(view)
        assert bool(definite.all())
        torch.testing.assert_close(R, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("n", [5, 20, 100, 260])
@pytest.mark.parametrize("place", [0, 0.5, 1.0])
def test_a_member_without_a_factor_leaves_its_neighbours_alone(n, place):
    good = torch.stack([spd(n, 100.0, seed) for seed in range(3)])
    k = min(n - 1, int(place * n))
    negative, lost = good[1].clone(), good[1].clone()
    negative[k, k] = -1.0
    lost[k, k] = math.nan
    for bad in (negative, lost, torch.zeros_like(negative), torch.full_like(negative, math.inf)):
        A = torch.stack([good[0], bad, good[2]])
        R, definite = inverse_factor(A)
        if bool(bad.isfinite().all()) or bool(bad.isnan().any()):
            assert definite.tolist() == [True, False, True]
        expected, _ = inverse_factor(good)
        torch.testing.assert_close(R[::2], expected[::2], rtol=1e-12, atol=1e-12)


def test_what_lies_above_the_diagonal_is_not_read():
    """A Schur complement holds anything there; neither the leaves nor the blocks may look."""
    A = spd(300, 100.0)[None]
    expected, _ = inverse_factor(A)
    scribbled = A + 7.0 * torch.ones_like(A).triu(300 // 2)  # no diagonal block of a half reaches as far
    torch.testing.assert_close(inverse_factor(scribbled)[0], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("n", [1, 17, 127, 128, 130, 200, 300])
def test_products_with_triangles(n):
    generator = torch.Generator().manual_seed(n)
    R = torch.randn(2, n, n, dtype=FP64, generator=generator).tril()
    B = torch.randn(2, 33, n, dtype=FP64, generator=generator)
    torch.testing.assert_close(times_transposed_lower(B, R), B @ R.mT, rtol=1e-12, atol=1e-11)
    torch.testing.assert_close(times_lower(B, R), B @ R, rtol=1e-12, atol=1e-11)
    torch.testing.assert_close(lower_times(R, B.mT.contiguous()), R @ B.mT, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("n", [1, 2, 17, 127, 129, 200])
@pytest.mark.parametrize("poles", [0, 1, 3])
def test_gram_matrices_are_added(n, poles):
    generator = torch.Generator().manual_seed(n)
    R = torch.randn(2, poles, n, n, dtype=FP64, generator=generator).tril()
    X = spd(n)[None].repeat(2, 1, 1)
    expected = X + (R.mT @ R).sum(1)
    torch.testing.assert_close(add_gram(X, R), expected, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("n", [1, 2, 31, 127, 128, 129, 191, 513])
def test_panels_cover_the_rows_once(n):
    for least in (1, 2):
        cuts = _cuts(n, least)
        rows = [row for lo, hi in cuts for row in range(lo, hi)]
        assert rows == list(range(n))


@pytest.mark.parametrize("n", [48, 300])
@pytest.mark.parametrize("shift", [1e-2, 1e-4, 1e-6])
def test_factors_of_kernel_matrices_lose_no_more_than_the_condition(n, shift):
    """The hardest kind known: inverting diagonal blocks of a factor is not backward stable, LAPACK's substitution is."""
    x = torch.linspace(0, 1, n, dtype=FP64)
    for A in (torch.from_numpy(scipy.linalg.hilbert(n)), torch.exp(-2 * (x[:, None] - x) ** 2) / n):
        single = (A + shift * torch.eye(n, dtype=FP64)).float()
        R, definite = inverse_factor(single[None])
        values = torch.linalg.eigvalsh(single.double())
        assert bool(definite.all())
        X = (R[0].mT @ R[0]).double()
        wrong = error(X[None], torch.linalg.inv(single.double())[None]).item()
        assert wrong <= 6 * ROUNDOFF[FP32] * (values[-1] / values[0]).item()


# ----------------------------------------------------------------------------------------------------------- roots


@pytest.mark.parametrize("p", [1, 1 + 1e-9, 1.001, 1.5, 2, 3, math.pi, 4, 64, 1000, 2**20])
@pytest.mark.parametrize("dtype", [FP64, FP32], ids=name)
def test_roots_of_any_order(p, dtype):
    A = torch.stack([spd(20, condition, 3, dtype) for condition in (1.0, 30.0, 1e4)])
    S, X = matroots.root_pair(A, p, method="rational")
    u = ROUNDOFF[dtype]
    wrong = error(X, inverse_root(A, p))
    assert bool((wrong <= torch.tensor([1.0, 30.0, 1e4]) * 2 * u + 20 * u).all())
    assert error(S, power(A, 1 / np.longdouble(p))).max() <= 100 * u
    assert symmetric(X)
    assert symmetric(S)


@pytest.mark.parametrize("n", [1, 2, 40])
def test_members_are_solved_as_if_alone(n):
    conditions = [1.0, 10.0, 1e2, 1e3, 1e4, 1e5, 1e6]
    A = torch.stack([spd(n, c if n > 1 else 1.0, k, FP32) for k, c in enumerate(conditions)])
    together = matroots.inv_root_ex(A, 4, method="rational")
    for k in range(len(A)):
        alone = matroots.inv_root_ex(A[k], 4, method="rational")
        assert alone.status == together.status[k]
        assert alone.steps == together.steps[k]
        torch.testing.assert_close(alone.root, together.root[k], rtol=1e-3, atol=1e-5 * conditions[k] ** 0.25)


def test_fixed_floors_and_dampings_are_kept():
    A = spd(30, 1e4)
    for keywords, covered in (
        ({"method": Rational(floor=1e-5)}, True),
        ({"method": Rational(floor=1e-3)}, False),
        ({"method": "rational", "rel_damping": 1e-3}, True),
        ({"method": "rational", "rel_damping": 1e-3, "damping": 1e-2}, True),
        ({"method": "rational", "damping": 1e-2}, True),
        ({"method": "rational", "damping": torch.tensor(1e-2)}, True),
    ):
        result = matroots.inv_root_ex(A, 4, **keywords)
        truth = inverse_root(A, 4, result.damping.item())
        assert result.status == (Status.CONVERGED if covered else Status.MAX_STEPS)
        assert (error(result.root, truth) < 1e-11) == covered
        assert (result.residual < 1e-10) == covered


@pytest.mark.parametrize("p", [2, 4])
def test_an_error_that_is_asked_for_is_what_comes(p):
    A = spd(40, 1e4)
    spent = []
    for wanted in (0.5, 1e-2, 1e-5, 1e-9, 1e-300):
        result = matroots.inv_root_ex(A, p, method=Rational(error=wanted))
        assert result.status == Status.CONVERGED
        assert error(result.root, inverse_root(A, p)) <= wanted + 1e-12
        spent.append(int(result.steps))
    assert spent == sorted(set(spent))


def test_poles_that_are_asked_for_are_taken():
    A = spd(24, 1e3)
    wrong = []
    for poles in (1, 2, 4, 8):
        result = matroots.inv_root_ex(A, 4, method=Rational(poles=poles, floor=1e-4))
        assert result.steps == poles
        assert result.status == Status.MAX_STEPS
        wrong.append(error(result.root, inverse_root(A, 4)).item())
        assert wrong[-1] <= best_rational(0.25, 1e-4, poles).error
    assert wrong == sorted(wrong, reverse=True)
    plenty = matroots.inv_root_ex(A, 4, method=Rational(poles=10**6, floor=1e-4))
    assert plenty.status == Status.CONVERGED
    assert plenty.steps < 30


@pytest.mark.parametrize("tol", [1e-1, 1e-3, 1e-8])
def test_tol_and_max_steps(tol):
    A = spd(24, 1e3)
    result = matroots.inv_root_ex(A, 4, method="rational", tol=tol)
    gap = torch.eye(24, dtype=FP64) - A @ torch.linalg.matrix_power(result.root, 4)
    assert result.status == Status.CONVERGED
    assert torch.linalg.matrix_norm(gap) <= result.residual + 1e-11
    assert result.residual <= tol
    short = matroots.inv_root_ex(A, 4, method="rational", tol=tol, max_steps=2)
    assert short.status == Status.MAX_STEPS
    assert short.residual > tol
    fine = matroots.inv_root_ex(A.float(), 4, method="rational", tol=1e-12)
    assert fine.status == Status.STAGNATED


@pytest.mark.parametrize("n", [8, 64])
@pytest.mark.parametrize("condition", [1e6, 3e6, 1e7, 3e7, 1e8, 1e9, 1e11])
def test_next_to_singular_nothing_is_nan_and_nothing_wrong_is_converged(condition, n):
    """Where rounding is as large as the smallest eigenvalue, the trace of the inverse is no proof."""
    for seed in range(4):
        A = spd(n, condition, seed, FP32)
        for method in ("rational", Rational(floor=1e-7), Rational(floor=1e-4)):
            result = matroots.inv_root_ex(A, 4, method=method)
            assert result.status < Status.DIVERGED
            assert torch.linalg.eigvalsh(result.root.double())[0] > 0
            smallest = torch.linalg.eigvalsh(A.double())[0].item() + result.damping.item()
            if result.status == Status.CONVERGED:
                assert error(result.root, inverse_root(A, 4, result.damping.item())) < 0.05
            if method == "rational" and 1e-5 > smallest > 1e-6:
                assert result.status == Status.CONVERGED


def test_members_that_lose_a_factor_get_a_higher_floor(monkeypatch):
    """Whatever takes the factor: the others are not touched, and no root is NaN."""
    A = torch.stack([spd(12, 100.0, seed) for seed in range(4)])
    expected = matroots.inv_root_ex(A, 2, method="rational")
    sizes = []

    def fragile(r, A, sign):
        X, definite = evaluate(r, A, sign)
        sizes.append(len(A))
        if len(sizes) <= 3:  # the member that is at hand, and it alone again, twice
            definite[min(1, len(A) - 1)] = False
        return X, definite

    monkeypatch.setattr(rational, "evaluate", fragile)
    result = matroots.inv_root_ex(A, 2, method="rational")
    assert sizes == [4, 1, 1, 1]
    assert result.status.tolist() == [0, Status.MAX_STEPS, 0, 0]
    assert error(result.root[1], inverse_root(A[1], 2)) < 1e-10
    torch.testing.assert_close(result.root[[0, 2, 3]], expected.root[[0, 2, 3]])
    assert result.residual[1] >= 12**0.5


@pytest.mark.parametrize("condition", [1e8, 1e12, 1e14])
def test_double_precision_converges_as_far_as_others_do(condition):
    A = spd(24, condition)
    result = matroots.inv_root_ex(A, 4, method="rational")
    assert result.status == matroots.inv_root_ex(A, 4, method="minimax").status == Status.CONVERGED
    assert error(result.root, inverse_root(A, 4)) <= 4 * condition * U64


class Looks(TorchDispatchMode):
    """Counts what hands a value to the host."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        operation = func._overloadpacket.__name__
        if operation in ("_local_scalar_dense", "nonzero", "_unique2", "equal", "masked_select"):
            self.calls.append(operation)
        return func(*args, **(kwargs or {}))


def test_a_known_floor_needs_no_look_at_the_device(monkeypatch):
    for module in (_prepare, _solve, _products, bounds):
        monkeypatch.setattr(module, "may_hold", lambda mask: True)
    A = torch.stack([spd(20, 1e3, seed, FP32) for seed in range(3)])
    for keywords in (
        {"method": Rational(floor=1e-4)},
        {"method": Rational(floor=1e-4, error=1e-2)},
        {"method": Rational(floor=1e-4), "damping": 1e-3},
        {"method": "rational", "rel_damping": 1e-4},
        {"method": Rational(poles=3), "rel_damping": 1e-4, "max_batch": 2},
    ):
        with Looks() as looks:
            matroots.inv_root_ex(A, 4, **keywords)
        assert looks.calls == []


@pytest.mark.parametrize("n", [64, 300])
def test_a_loose_trace_does_not_hide_a_floor(n):
    """Half of the eigenvalues at the lower end: the trace of the inverse is n/2 times too large, a factor shows it."""
    A = with_spectrum([1.0] * (n // 2) + [1e-4] * (n - n // 2), dtype=FP32)
    result = matroots.inv_root_ex(A, 4, method="rational")
    assert result.status == Status.CONVERGED
    assert result.steps <= 17
    assert error(result.root, inverse_root(A, 4)) <= 3e-4


@pytest.mark.parametrize("scaling", ["frobenius", "power", "multi_power"])
def test_any_scaling_will_do(scaling):
    A = torch.stack([spd(48, 1e4, seed, FP32) for seed in range(3)])
    result = matroots.inv_root_ex(A, 4, method="rational", scaling=scaling)
    assert bool((result.status == Status.CONVERGED).all())
    assert error(result.root, inverse_root(A, 4)).max() <= 5e-5


@pytest.mark.parametrize("c", [1e-37, 1e-20, 1e20, 1e37])
def test_scale_does_not_matter(c):
    A = spd(16, 1e3, dtype=FP32)
    result = matroots.inv_root_ex(c * A, 2, method="rational")
    assert result.status == Status.CONVERGED
    assert error(result.root, inverse_root((c * A).double(), 2)) <= 1e-5


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=name)
def test_half_precision_input(dtype):
    A = spd(16, 20.0, dtype=dtype)
    X = matroots.inv_root(A, 2, method="rational")
    assert X.dtype == dtype
    assert error(X, inverse_root(A, 2)) <= 8 * ROUNDOFF[dtype]


def test_singular_members_and_damping():
    low_rank = with_spectrum([1.0, 0.5, 0.25] + [0.0] * 13, dtype=FP32)
    zero_row = torch.diag(torch.tensor([1.0, 0.0] + [2.0] * 14))
    A = torch.stack([low_rank, zero_row, torch.zeros(16, 16), torch.full((16, 16), math.nan), torch.eye(16)])
    bare = matroots.inv_root_ex(A, 4, method="rational").status.tolist()
    assert bare[1:] == [Status.SINGULAR, Status.SINGULAR, Status.NONFINITE_INPUT, Status.CONVERGED]
    assert bare[0] in (Status.CONVERGED, Status.MAX_STEPS)  # shifted by its own rounding
    damped = matroots.inv_root_ex(A, 4, method="rational", damping=1e-3)
    assert damped.status.tolist() == [0, 0, 0, Status.NONFINITE_INPUT, 0]
    good = [0, 1, 2, 4]
    assert error(damped.root[good], inverse_root(A[good], 4, 1e-3)).max() <= 1e-4
    assert matroots.inv_root_ex(A[:0], 4, method="rational").status.shape == (0,)


@pytest.mark.parametrize("p", [2, 4, 2.5])
def test_certificates_hold(p):
    A = torch.stack([spd(24, condition, 7, FP32) for condition in (10.0, 1e3, 1e5)])
    for method in ("rational", Rational(error=1e-2), Rational(poles=2, floor=1e-3)):
        result = matroots.inv_root_ex(A, p, method=method, certify=True)
        assert bool(result.certificate.valid.all())
        assert bool((result.certificate.relative_error >= error(result.root, inverse_root(A, p))).all())


@pytest.mark.parametrize(
    ("make", "exception", "argument"),
    [
        (lambda: Rational(poles=0), ValueError, "poles"),
        (lambda: Rational(poles=2.0), TypeError, "poles"),
        (lambda: Rational(floor=1.0), ValueError, "floor"),
        (lambda: Rational(floor="a"), TypeError, "floor"),
        (lambda: Rational(error=0.0), ValueError, "error"),
        (lambda: Rational(error=0.1, poles=3), ValueError, "error"),
    ],
)
def test_options_are_checked(make, exception, argument):
    with pytest.raises(exception, match=f"^{argument}: "):
        make()


@pytest.mark.parametrize(
    ("solver", "keywords", "argument"),
    [
        (Rational(poles=3), {"tol": 1e-3}, "tol"),
        (Rational(poles=3), {"max_steps": 3}, "max_steps"),
        (Rational(error=1e-3), {"tol": 1e-3}, "tol"),
        (Rational(), {"matmul_dtype": "fp16x2"}, "matmul_dtype"),
    ],
)
def test_keywords_that_contradict_an_option_are_refused(solver, keywords, argument):
    with pytest.raises(ValueError, match=f"^{argument}: "):
        matroots.inv_root(torch.eye(3), 2, method=solver, **keywords)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    n=st.integers(1, 24),
    decades=st.floats(0.0, 6.0),
    clusters=st.integers(1, 5),
    p=st.sampled_from([1, 1.5, 2, 3, 4, 7.25, 64]),
    floor=st.sampled_from([None, 1e-2, 1e-4]),
    wanted=st.sampled_from([None, 0.1, 1e-4]),
    seed=st.integers(0, 1000),
)
def test_the_error_is_bounded_by_design_and_condition(n, decades, clusters, p, floor, wanted, seed):
    """``E + c cond u`` where the floor covers the spectrum; below it an eigenvalue is undershot, and nothing else changes."""
    draw = np.random.default_rng(seed)
    centres = 10.0 ** -draw.uniform(0.0, decades, clusters)
    spectrum = draw.choice(centres, n) * (1 + 1e-9 * draw.standard_normal(n))
    A = with_spectrum(spectrum / spectrum.max(), seed)
    result = matroots.inv_root_ex(A, p, method=Rational(floor=floor, error=wanted))
    wrong = error(result.root, inverse_root(A, p)).item()
    condition = spectrum.max() / spectrum.min()
    assert result.status in (Status.CONVERGED, Status.MAX_STEPS)
    if result.status == Status.CONVERGED:
        assert wrong <= (wanted or 0.0) + 10 * n**0.5 * condition * U64 + 40 * U64
    else:
        assert floor is not None
        assert (
            spectrum.min() / spectrum.max() <= floor * n**0.5 * 1.01
        )  # the scale is at most sqrt(n) too large
        assert wrong < 1.0
    truth = torch.linalg.eigvalsh(inverse_root(A, p))
    assert torch.linalg.eigvalsh(result.root)[-1] <= truth[-1] * (1 + (wanted or 0.0) + 1e-8)
