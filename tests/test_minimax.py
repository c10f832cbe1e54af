# SPDX-License-Identifier: Apache-2.0
"""The minimax schedules against linear programming, exhaustive search and what Newton's iterations cost."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
import torch
from matrices import error, geometric, inverse_root, power, spd, with_spectrum
from scipy.optimize import linprog
from table import BF16, FP16, FP32, FP64, name

import matroots
from matroots import Minimax, Status
from matroots._formats import parse_format
from matroots._products import Product, Spare
from matroots.solvers._remez import _equioscillating, minimax_step
from matroots.solvers._steps import COSTS, Step, evaluate, two_factors
from matroots.solvers.minimax import cheapest_schedule, transformed


def in_powers(step: Step) -> np.ndarray:
    """Coefficients of q in powers of m, lowest first."""
    return np.polynomial.Chebyshev(step.series, step.domain).convert(kind=np.polynomial.Polynomial).coef


@pytest.mark.parametrize("degree", COSTS)
@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("low", "high"), [(0.03, 1.0), (0.3, 1.6), (0.9, 1.1)])
def test_a_step_is_the_best_polynomial(p, degree, low, high):
    """The minimum of max |1 - s q(s^p)| over a fine grid, as a linear program."""
    step, left = minimax_step(p, low, high, degree)
    s = np.unique(np.concatenate([np.geomspace(low, high, 1500), np.linspace(low, high, 1500)]))
    assert np.abs(1 - s * step(s**p)).max() == pytest.approx(left, rel=1e-4, abs=1e-14)
    t = (2 * s**p - low**p - high**p) / (high**p - low**p)
    powers = s[:, None] * np.polynomial.chebyshev.chebvander(t, degree)
    ones = np.ones((len(s), 1))
    best = linprog(
        np.append(np.zeros(degree + 1), 1.0),
        A_ub=np.block([[powers, -ones], [-powers, -ones]]),
        b_ub=np.concatenate([np.ones(len(s)), -np.ones(len(s))]),
        bounds=[(None, None)] * (degree + 1) + [(0, None)],
    )
    assert left == pytest.approx(best.fun, rel=1e-3, abs=1e-7)  # the program's own tolerance is 1e-7


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_degree_one_has_a_closed_form(p):
    low, high = 0.1, 1.0
    m_to_p = (high ** (p + 1) - low ** (p + 1)) / ((p + 1) * (high - low))
    a = 2 / (m_to_p ** (1 / p) * p / (p + 1) + low * (1 - low**p / ((p + 1) * m_to_p)))
    assert in_powers(minimax_step(p, low, high, 1)[0]) == pytest.approx(
        (a, -a / ((p + 1) * m_to_p)), rel=1e-12
    )


@pytest.mark.parametrize("degree", COSTS)
@pytest.mark.parametrize("width", [1e-2, 1e-3, 1e-4, 1e-7, 1e-12, 0.0])
def test_a_narrow_interval_is_not_lost_in_rounding(degree, width):
    """Between the leading term of Taylor's error, (1/p)(1/p + 1).../k! r^k, and 2^-degree of it, which is the best polynomial's."""
    step, left = minimax_step(4, 1 - width, 1 + width, degree)
    coefficient = np.prod([(0.25 + k) / (k + 1) for k in range(degree + 1)])
    leading = coefficient * (4 * width) ** (degree + 1)
    assert 0.9 * leading / 2**degree <= left <= 1.3 * leading
    s = np.linspace(1 - width, 1 + width, 101)
    assert np.abs(1 - s * step(s**4)).max() <= left * (1 + 1e-4) + 2e-15


@pytest.mark.parametrize("degree", COSTS)
def test_a_polynomial_of_a_matrix_takes_few_products_and_keeps_the_digits(degree):
    """Counted, and against the polynomial of the eigenvalues."""
    step, _ = minimax_step(4, 0.15, 1.0, degree)
    values = torch.linspace(0.15, 1, 40, dtype=FP64) ** 4
    spent = []

    class Counted(Product):
        def __call__(self, *args, **keywords):
            spent.append(1)
            return super().__call__(*args, **keywords)

    Q = evaluate(step, torch.diag(values).unsqueeze(0), Counted(), Spare())[0]
    assert len(spent) == COSTS[degree]
    exact = torch.from_numpy(step(values.numpy()))
    assert (Q.diagonal() - exact).abs().max() <= 1e-14 * exact.max()
    M = with_spectrum(values, dtype=FP32).unsqueeze(0)
    assert (
        error(evaluate(step, M, Product(), Spare())[0], with_spectrum(exact)) < 2e-6
    )  # in powers of M: 4e-5


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8, 64, 1000])
def test_degree_eight_has_a_scheme_in_small_real_numbers(p):
    for ratio in np.geomspace(1e-16, 0.9, 30):
        step, _ = minimax_step(p, ratio ** (1 / p), 1.0, 8)
        coefficients = two_factors(step.series)
        assert coefficients is not None
        assert max(abs(c) for c in coefficients) < 100


CONDITIONS = (1e2, 1e3, 1e4, 1e6, 1e8)
# products to a relative error in exact arithmetic, at these condition numbers: with steps of degree 1 to 3, and of any degree
TABLE = {
    (2, 1e-3): ([9, 12, 15, 21, 28], [7, 9, 12, 18, 23]),
    (2, 1e-6): ([11, 14, 18, 24, 30], [9, 12, 14, 19, 25]),
    (4, 1e-3): ([10, 12, 16, 22, 28], [7, 9, 13, 17, 23]),
    (4, 1e-6): ([12, 16, 18, 25, 31], [9, 13, 15, 21, 24]),
}


@pytest.mark.parametrize(("p", "target"), TABLE)
def test_products_to_an_error(p, target):
    for degrees, known in zip(((1, 2, 3), (1, 2, 4, 8)), TABLE[p, target], strict=True):
        spent = [cheapest_schedule(p, 1 / kappa, target, degrees=degrees).products for kappa in CONDITIONS]
        assert spent == known


# p: products of a solve that assumes nothing, in fp32 and in fp64
PLAIN = {1: (23, 51), 2: (21, 48), 3: (23, 52), 4: (23, 51), 6: (25, 57), 8: (25, 57)}


@pytest.mark.parametrize("p", PLAIN)
def test_products_and_search_of_a_solve_without_a_known_floor(p):
    """The first call spends as little on the search as on a product of large matrices."""
    for dtype, known in zip((FP32, FP64), PLAIN[p], strict=True):
        u = torch.finfo(dtype).eps / 2
        cheapest_schedule.cache_clear()
        _equioscillating.cache_clear()
        start = time.process_time()
        schedule = Minimax().schedule(p, 4 * u, 2 * u / p, u)
        assert time.process_time() - start < 0.5  # 0.05 on an idle machine
        assert schedule.products == known


@pytest.mark.parametrize("p", [2, 3, 4])
def test_no_sequence_of_degrees_is_cheaper(p):
    floor, target = 1e-3, 1e-3
    chain = {2: 1, 3: 2, 4: 2}[p]
    best = 99
    for length in range(1, 6):
        for degrees in itertools.product((1, 2, 4, 8), repeat=length):
            low, high = floor ** (1 / p), 1.0
            for degree in degrees:
                left = minimax_step(p, low, high, degree)[1]
                low, high = 1 - left, 1 + left
            if left <= target:
                cost = sum(COSTS[degree] for degree in degrees)
                best = min(best, cost + (length - 1) * (chain + 2))
    assert cheapest_schedule(p, floor, target).products == best


@pytest.mark.parametrize("cushion", [0.0, 1e-3, 0.03])
@pytest.mark.parametrize("p", [1, 2, 4, 7])
def test_the_error_of_a_schedule_holds_on_its_interval_and_below_it_is_undershot(p, cushion):
    floor = 1e-5
    schedule = cheapest_schedule(p, floor, 1e-4, cushion)
    eigenvalues = np.geomspace(1e-12, 1.0, 20001)
    s = eigenvalues ** (1 / p)
    for step in schedule.steps:
        s = s * step(s**p)
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


@pytest.mark.parametrize("dtype", [FP64, FP32], ids=name)
@pytest.mark.parametrize("p", [1, 2, 4])
def test_members_with_very_different_floors_are_solved_as_if_alone(p, dtype):
    """Where no floor is given each member has its own: what it costs, and its answer, do not depend on the others."""
    A = torch.stack([spd(32, condition, dtype=dtype) for condition in (1.0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6)])
    R = inverse_root(A, p)
    together = matroots.inv_root_ex(A, p, method="minimax")
    assert bool((together.status == Status.CONVERGED).all())
    assert bool((together.matmuls.diff() >= 0).all())
    assert together.matmuls[0] < together.matmuls[-1]
    for i, member in enumerate(A):
        alone = matroots.inv_root_ex(member, p, method="minimax")
        assert alone.matmuls == together.matmuls[i]
        u = torch.finfo(dtype).eps
        assert error(together.root[i], R[i]) <= 1.5 * error(alone.root, R[i]) + 4 * u


@pytest.mark.parametrize("dtype", [FP64, FP32], ids=name)
@pytest.mark.parametrize("p", [1, 2, 4])
def test_a_shared_floor_far_below_the_spectrum_costs_products_and_no_accuracy(p, dtype):
    """``rel_damping`` and ``floor=`` fix one schedule for the batch, without looking at it."""
    A = torch.stack([spd(32, condition, dtype=dtype) for condition in (1.0, 1e2, 1e4, 1e6)])
    R = inverse_root(A, p)
    own = matroots.inv_root_ex(A, p, method="minimax")
    shared = matroots.inv_root_ex(A, p, method=Minimax(floor=1e-7))
    assert len(shared.matmuls.unique()) == 1
    assert bool((error(shared.root, R) <= 2 * error(own.root, R) + 20 * torch.finfo(dtype).eps).all())


@pytest.mark.parametrize(
    ("dtype", "operands", "u"),
    [(FP64, None, 2**-53), (FP32, None, 2**-24), (FP32, "fp16x2", 2**-22), (FP32, "bf16x2", 2**-16)],
    ids=name,
)
@pytest.mark.parametrize("cushion", [None, 0.0])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_in_finite_precision_nothing_is_amplified(p, cushion, dtype, operands, u):
    """Spectra on both sides of the floor: ``x lambda^{1/p}`` is 1 above it and less below, up to rounding.

    Rounding A or M alone changes the smallest eigenvalue of all, 1e-4, by ``u/1e-4`` of it.
    """
    floor, smallest, n = 1e-2, 1e-4, 40
    for seed in range(3):
        draw = np.random.default_rng(seed)
        above = np.exp(draw.uniform(np.log(floor), 0, n // 2 - 1))
        below = np.exp(draw.uniform(np.log(smallest), np.log(floor), n // 2 - 1))
        A = with_spectrum(np.concatenate([[1.0], above, below, [smallest]]), seed, dtype)
        solver = Minimax(floor=floor, cushion=cushion)
        X = matroots.inv_root_ex(A, p, method=solver, matmul_dtype=operands).root.double()
        half = power(A, 0.5 / p)
        applied = torch.linalg.eigvalsh(half @ X @ half)
        rounding = 10 * u / smallest
        assert applied.max() <= 1 + 4 * torch.finfo(dtype).eps + rounding
        assert applied.min() > 0
        # on the span of what lies above the floor the root is right
        assert (applied > 1 - 1e-3 - rounding).sum() >= n // 2


@pytest.mark.parametrize(
    ("dtype", "operands", "u"),
    [(FP64, None, 2**-53), (FP32, None, 2**-24), (FP32, "fp16x2", 2**-22), (FP32, "bf16x2", 2**-16)],
    ids=name,
)
@pytest.mark.parametrize("n", [16, 128])
@pytest.mark.parametrize(("p", "cushion"), [(1, None), (2, None), (4, None), (8, None), (8, 0.0)])
def test_rounding_keeps_the_spectrum_within_the_margin(p, cushion, n, dtype, operands, u):
    """The spectrum of every M that is met does not exceed the interval that its step is designed for."""
    condition = 1e-2 / u
    A, multiply = spd(n, condition, dtype=dtype).unsqueeze(0), Product(parse_format(operands))
    for floor in (0.5 / condition, 4 * u):
        schedule = Minimax(cushion=cushion).schedule(p, floor, 2 * u / p, u)
        M = A.clone()
        for step in schedule.steps:
            top = torch.linalg.eigvalsh((M[0] + M[0].mT).double() / 2)[-1]
            assert top <= step.domain[1] * (1 + 1e-15)
            M = transformed(M, evaluate(step, M, multiply, Spare()), p, multiply, Spare())


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
