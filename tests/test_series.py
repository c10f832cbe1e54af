# SPDX-License-Identifier: Apache-2.0
"""Baby steps and giant steps of a Chebyshev series against sums of its terms, Clenshaw's recurrence and mpmath."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from matrices import error, inverse_root, mp_power, power, spd, with_spectrum
from numpy.polynomial import chebyshev
from table import BF16, FP16, FP32, FP64, name, series_products

import matroots
from matroots import Chebyshev, Status
from matroots._formats import parse_format
from matroots._products import Product
from matroots.solvers._giant_steps import baby_steps, evaluate, products, regrouped
from matroots.solvers.chebyshev import relative_error, series

DEGREES = (*range(1, 21), 29, 30, 31, 35, 49, 60, 63, 97, 120, 121)  # primes, squares, multiples of k


def clenshaw(A: torch.Tensor, c: tuple[float, ...], floor: float, multiply: Product) -> torch.Tensor:
    """The recurrence of full degree, ``len(c) - 2`` products: what the scheme is compared with."""
    eye = torch.eye(A.shape[-1], dtype=A.dtype)
    T = A * (2 / (1 - floor)) - (1 + floor) / (1 - floor) * eye
    after, current = torch.zeros_like(T), c[-1] * eye.expand_as(T)
    for k in range(len(c) - 2, -1, -1):
        product = T * c[-1] if k == len(c) - 2 else multiply(T, current.contiguous(), torch.empty_like(T))
        after, current = current, (2.0 if k > 0 else 1.0) * product - after + c[k] * eye
    return current


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("n", [1, 5])
def test_any_series_of_any_degree_is_the_sum_of_its_terms(degree, n):
    """Coefficients without any decay, on spectra that reach both ends."""
    c = tuple(np.random.default_rng(degree).standard_normal(degree + 1))
    floor, x = 0.1, np.linspace(0.1, 1.0, n)
    expected = with_spectrum(chebyshev.chebval((2 * x - 1.1) / 0.9, c), seed=n)
    X = evaluate(with_spectrum(x, seed=n).unsqueeze(0), c, floor, Product())[0]
    assert (X - expected).abs().max() <= 1e-14 * degree**2


@pytest.mark.parametrize("k", [1, 2, 3, 4, 7, 30, 40])
def test_regrouping_keeps_the_polynomial_whatever_the_baby_steps(k):
    c = tuple(np.random.default_rng(k).standard_normal(31))
    total = np.zeros(1)
    for j, row in enumerate(regrouped(c, k)):
        total = chebyshev.chebadd(total, chebyshev.chebmul(row, np.eye(j * k + 1)[-1]))
    np.testing.assert_allclose(chebyshev.chebtrim(total, 1e-13), c, atol=1e-13)


@pytest.mark.parametrize("p", [1, 2, 8 / 3, 16])
@pytest.mark.parametrize("floor", [0.1, 1e-2, 1e-4])
def test_regrouped_coefficients_do_not_grow(p, floor):
    """c alternates and decreases: each new one is an alternating sum that begins with twice the old one."""
    c = series(p, -1, floor)[:1001]
    k = baby_steps(len(c) - 1)
    b = np.abs(regrouped(c, k)[:, :k]).ravel()[: len(c)]
    noise = 1e-15 * sum(map(abs, c))  # of the transform: it neither alternates nor decreases
    assert (b <= 2 * np.abs(c[: len(b)]) * (1 + 1e-9) + noise).all()


def test_products_are_within_one_of_the_fewest():
    for degree in range(1, 901):
        fewest = min(k + -(-degree // k) - 2 for k in range(1, degree + 1))
        assert fewest <= products(degree) == series_products(degree) <= fewest + 1
    assert products(60) == 14


WORK = ((30.0, 20), (1e2, 60), (1e3, 120), (1e3, 250), (1e4, 500), (1e4, 1000))
COMPARED = [
    (t, *work) for t in (FP64, FP32, BF16, FP16) for work in WORK if work[0] * 2 * torch.finfo(t).eps <= 1
]


@pytest.mark.parametrize("p", [2, 4, 8 / 3])
@pytest.mark.parametrize(("dtype", "condition", "degree"), COMPARED, ids=name)
def test_as_accurate_as_clenshaw_on_the_same_series(dtype, condition, degree, p):
    """The median over five matrices, within a factor; in fp64 next to what the reference itself is wrong by."""
    work, operands = (dtype, None) if dtype in (FP64, FP32) else (FP32, dtype)
    floor = 1 / condition  # never below 4 u
    c = series(p, -1, floor)[: degree + 1]
    ratios = []
    for seed in range(5):
        A = spd(32, condition, seed, work)
        values, Q = torch.linalg.eigh(A.double())
        t = ((2 * values - 1 - floor) / (1 - floor)).numpy()
        exact = (Q * torch.from_numpy(chebyshev.chebval(t, c))) @ Q.mT
        wrong = [
            error(method(A.unsqueeze(0), c, floor, Product(parse_format(operands)))[0], exact).item()
            for method in (evaluate, clenshaw)
        ]
        ratios.append(wrong[0] / (wrong[1] + 2.0**-53 * condition))
    assert sorted(ratios)[2] <= 1.8


def test_both_ends_of_the_spectrum_keep_apart():
    """Half of the eigenvalues at each end, where an even T_k would let roundings grow to a residual of u / f^2."""
    for condition, degree in ((1e3, 237), (1e4, 751)):
        A = with_spectrum([1.0] * 32 + [1.1 / condition] * 32, dtype=FP32)
        c = series(2, -1, 1 / condition)[: degree + 1]
        X = evaluate(A.unsqueeze(0), c, 1 / condition, Product())[0].double()
        X = (X + X.mT) / 2  # as the library returns it
        residual = torch.linalg.matrix_norm(torch.eye(64) - A.double() @ X @ X)
        assert residual <= 8.0 * 2.0**-24 * 40 * condition


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8 / 3, 1.5])
def test_every_root_in_fp64_against_mpmath(p):
    """Floors of 1/2 to 1/256: what a Chebyshev series reaches in fp64."""
    for condition in (1.5, 20.0, 100.0):
        A = spd(6, condition, seed=3)
        inverse, root = (mp_power(A, sign / p) for sign in (-1, 1))
        pair = matroots.root_pair(A, p, method="chebyshev")
        for X in (matroots.inv_root(A, p, method="chebyshev"), pair[1]):
            assert error(X, inverse) <= 1e-13
        for X in (matroots.root(A, p, method="chebyshev"), pair[0]):
            assert error(X, root) <= 1e-13


@pytest.mark.parametrize("p", [1, 2, 4, 8 / 3])
@pytest.mark.parametrize(("dtype", "condition"), [(FP32, 1e5), (FP64, 1e4), (FP64, 3e4)])
def test_condition_numbers_that_a_thousand_terms_could_not_reach(p, dtype, condition):
    A = spd(32, condition, dtype=dtype)
    result = matroots.inv_root_ex(A, p, method="chebyshev")
    assert result.status == Status.CONVERGED
    assert 1000 < result.steps <= 8000
    assert result.matmuls <= 300
    unit = torch.finfo(dtype).eps / 2
    assert error(result.root, inverse_root(A, p)) <= 4 * unit * condition


@pytest.mark.parametrize("degree", [8, 60, 250])
def test_a_spectrum_partly_below_the_floor_is_undershot(degree):
    A = with_spectrum([1.0, 0.3, 0.02, 1e-4, 1e-8])
    result = matroots.inv_root_ex(A, 2, method=Chebyshev(degree=degree, floor=0.01))
    assert result.status == Status.MAX_STEPS
    values = torch.linalg.eigvalsh(result.root)
    assert values[0] > 0.5
    assert values[-1] < 1e4
    above = power(A, 0.5) @ result.root
    if degree >= 60:  # what lies above the floor is right
        assert torch.linalg.eigvalsh((above + above.mT) / 2)[2:].tolist() == pytest.approx(
            [1.0] * 3, abs=1e-4
        )


@pytest.mark.parametrize("kind", [0.0, 1.0])
@pytest.mark.parametrize("degree", [2, 3, 40, 300])
def test_the_error_of_the_series_on_its_grid_is_that_of_direct_sums(degree, kind):
    floor, sign = 1e-3, -1 if kind else 1
    x = np.union1d(np.geomspace(floor, 1, 3000), np.linspace(floor, 1, 3000)).clip(floor, 1)
    value = chebyshev.chebval((2 * x - 1 - floor) / (1 - floor), series(4, sign, floor)[: degree + 1])
    direct = np.abs(value * x ** (-sign / 4) - 1).max()
    assert direct * (1 - 1e-3) - 1e-13 <= relative_error(4, sign, floor, degree) <= 1.01 * direct + 1e-12
