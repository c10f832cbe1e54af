"""The minimax schedules against linear programming, exhaustive search and what Newton's iterations cost."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from matrices import error, geometric, inverse_root, spd, with_spectrum
from scipy.optimize import linprog
from table import BF16, FP16, FP32, FP64, name

import matroots
from matroots import Minimax, Status
from matroots.solvers.minimax import cheapest_schedule, minimax_step


@pytest.mark.parametrize("degree", [1, 2, 3])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("low", "high"), [(0.03, 1.0), (0.3, 1.6), (0.9, 1.1)])
def test_a_step_is_the_best_polynomial(p, degree, low, high):
    """The minimum of max |1 - s q(s^p)| over a fine grid, as a linear program."""
    step, left = minimax_step(p, low, high, degree)
    s = np.unique(np.concatenate([np.geomspace(low, high, 1500), np.linspace(low, high, 1500)]))
    powers = s[:, None] ** (np.arange(degree + 1) * p + 1)
    assert np.abs(1 - powers @ step).max() == pytest.approx(left, rel=1e-9)
    ones = np.ones((len(s), 1))
    best = linprog(
        np.append(np.zeros(degree + 1), 1.0),
        A_ub=np.block([[powers, -ones], [-powers, -ones]]),
        b_ub=np.concatenate([np.ones(len(s)), -np.ones(len(s))]),
        bounds=[(None, None)] * (degree + 1) + [(0, None)],
    )
    assert left == pytest.approx(best.fun, rel=1e-3, abs=1e-9)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_degree_one_has_a_closed_form(p):
    low, high = 0.1, 1.0
    m_to_p = (high ** (p + 1) - low ** (p + 1)) / ((p + 1) * (high - low))
    a = 2 / (m_to_p ** (1 / p) * p / (p + 1) + low * (1 - low**p / ((p + 1) * m_to_p)))
    assert minimax_step(p, low, high, 1)[0] == pytest.approx((a, -a / ((p + 1) * m_to_p)), rel=1e-12)


@pytest.mark.parametrize("degree", [1, 2, 3])
@pytest.mark.parametrize("width", [1e-4, 1e-7, 1e-12])
def test_a_narrow_interval_is_not_lost_in_rounding(degree, width):
    """Against the bound's own leading term, evaluated in 50 digits elsewhere: (1/p)(1/p + 1).../k! r^k."""
    step, left = minimax_step(4, 1 - width, 1 + width, degree)
    assert sum(step) == pytest.approx(1.0, abs=1e-15)
    coefficient = np.prod([(0.25 + k) / (k + 1) for k in range(degree + 1)])
    assert left == pytest.approx(coefficient * (4 * width) ** (degree + 1), rel=1e-2)


# kappa 1e2, 1e3, 1e4, 1e6, 1e8: products to a relative error in exact arithmetic
TABLE = {
    (2, 1e-3): [9, 12, 15, 21, 28],
    (2, 1e-6): [11, 14, 18, 24, 30],
    (4, 1e-3): [10, 12, 16, 22, 28],
    (4, 1e-6): [12, 16, 18, 25, 31],
}


@pytest.mark.parametrize(("p", "target"), TABLE)
def test_products_to_an_error(p, target):
    spent = [cheapest_schedule(p, 1 / kappa, target).products for kappa in (1e2, 1e3, 1e4, 1e6, 1e8)]
    assert all(ours <= known for ours, known in zip(spent, TABLE[p, target], strict=True))


@pytest.mark.parametrize("p", [2, 3, 4])
def test_no_sequence_of_degrees_is_cheaper(p):
    floor, target = 1e-3, 1e-3
    chain = {2: 1, 3: 2, 4: 2}[p]
    best = 99
    for length in range(1, 6):
        for degrees in itertools.product((1, 2, 3), repeat=length):
            low, high = floor ** (1 / p), 1.0
            for degree in degrees:
                left = minimax_step(p, low, high, degree)[1]
                low, high = 1 - left, 1 + left
            if left <= target:
                best = min(best, sum(degrees) - length + (length - 1) * (chain + 2))
    assert cheapest_schedule(p, floor, target).products == best


@pytest.mark.parametrize("cushion", [0.0, 0.03])
@pytest.mark.parametrize("p", [1, 2, 4, 7])
def test_the_error_of_a_schedule_holds_on_its_interval_and_below_it_is_undershot(p, cushion):
    floor = 1e-5
    schedule = cheapest_schedule(p, floor, 1e-4, cushion)
    eigenvalues = np.geomspace(1e-12, 1.0, 20001)
    s = eigenvalues ** (1 / p)
    for step in schedule.steps:
        s = s * np.polynomial.Polynomial(step)(s**p)
    inside = eigenvalues >= floor
    assert np.abs(1 - s[inside]).max() <= schedule.error * (1 + 1e-9)
    assert s[~inside].max() <= 1 + schedule.error
    assert s[~inside].min() > 0
    assert np.all(np.diff(s[~inside]) > 0)


@pytest.mark.parametrize("dtype", [FP64, FP32], ids=name)
@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("condition", [1e2, 1e4, 1e6])
def test_as_accurate_as_coupled_newton_for_fewer_products(condition, p, dtype):
    A = torch.stack([spd(64, condition, seed, dtype) for seed in range(5)])
    R = inverse_root(A, p)
    newton = matroots.inv_root_ex(A, p, method="cn")
    for solver in (Minimax(), Minimax(floor=0.5 / condition)):
        result = matroots.inv_root_ex(A, p, method=solver)
        assert bool((result.status == Status.CONVERGED).all())
        assert (
            error(result.root, R).median()
            <= 1.5 * error(newton.root, R).median() + 10 * torch.finfo(dtype).eps
        )
    assert bool((result.matmuls <= 0.75 * newton.matmuls).all())


def test_design_floor_from_the_damping():
    """A relative damping bounds the condition number: the schedule is the shorter for it, and covers the spectrum."""
    A = with_spectrum([1.0, 0.5, 0.25, 1e-9, 1e-9, 0.0], dtype=FP64)
    plain, damped = (matroots.inv_root_ex(A, 4, method="minimax", rel_damping=d) for d in (1e-12, 1e-4))
    assert damped.status == Status.CONVERGED
    assert damped.matmuls < plain.matmuls
    assert error(damped.root, inverse_root(A, 4, damped.damping.item())) < 1e-11


def test_below_the_floor_is_flagged_and_never_amplified():
    for p in (1, 2, 4):
        A = with_spectrum(geometric(24, 1e8))
        result = matroots.inv_root_ex(A, p, method=Minimax(floor=1e-3))
        assert result.status == Status.MAX_STEPS
        R = inverse_root(A, p)
        applied = torch.linalg.eigvalsh(torch.linalg.solve(R, result.root))
        assert applied.max() <= 1 + 1e-9
        assert applied.min() > 0


def test_members_with_very_different_floors_share_a_schedule():
    A = torch.stack([spd(16, condition, dtype=FP64) for condition in (1.0, 1e3, 1e6, 1e9)])
    together = matroots.inv_root_ex(A, 4, method="minimax")
    assert bool((together.status == Status.CONVERGED).all())
    for i in range(4):
        assert error(together.root[i], inverse_root(A[i], 4)) <= 1e-15 * 10 * 10.0 ** (3 * i) + 1e-13


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=name)
@pytest.mark.parametrize("condition", [1e1, 1e2, 1e4, 1e6])
def test_half_products_are_damped_or_flagged(condition, dtype):
    for seed in range(5):
        A = spd(48, condition, seed, FP32)
        result = matroots.inv_root_ex(A, 2, method="minimax", matmul_dtype=dtype)
        if result.status < Status.DIVERGED:
            assert error(result.root, inverse_root(A, 2)) <= 1.0
            assert torch.linalg.eigvalsh(result.root.double()).min() > 0


@pytest.mark.parametrize(
    ("make", "exception", "argument"),
    [
        (lambda: Minimax(floor=0.0), ValueError, "floor"),
        (lambda: Minimax(floor="a"), TypeError, "floor"),
        (lambda: Minimax(cushion=0.5), ValueError, "cushion"),
        (lambda: Minimax(cushion=-1), ValueError, "cushion"),
        (lambda: matroots.inv_root(torch.eye(2), 2.5, method="minimax"), ValueError, "p"),
        (lambda: matroots.inv_root(torch.eye(2), 2, method="minimax", max_steps=3), ValueError, "max_steps"),
    ],
)
def test_options_are_checked(make, exception, argument):
    with pytest.raises(exception, match=f"^{argument}: "):
        make()
