# SPDX-License-Identifier: Apache-2.0
"""Accuracy against scipy, mpmath and closed forms; the references are validated against each other first."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import scipy.linalg
import torch
from matrices import (
    ROUNDOFF,
    error,
    geometric,
    inverse_root,
    mp_power,
    orthogonal,
    power,
    spd,
    symmetric,
    tolerance,
    with_spectrum,
)
from table import DTYPES, FP32, FP64, HALF, PAIRS, ROWS, SCALINGS, cases, methods, name

import matroots
from matroots import EVD, Status

CONDITIONS = [10.0**k for k in range(11)]


def test_every_method_has_a_row():
    assert {row.name for row in ROWS} == set(methods())


# ------------------------------------------------------------------------------------------------ the references


@pytest.mark.parametrize("condition", [1.0, 1e4, 1e10])
@pytest.mark.parametrize("exponent", [-1.0, -1 / 2, -1 / 3, -1 / 8, 1 / 4])
def test_reference_agrees_with_mpmath(condition, exponent):
    """Second-order error of the reference: (n u cond)^2; rounding to fp64: a few u."""
    A = spd(6, condition, seed=3)
    assert error(power(A, exponent), mp_power(A, exponent)) <= 8 * ROUNDOFF[FP64] + (6e-16 * condition) ** 2


def test_reference_agrees_with_scipy():
    A = spd(12, 100.0, seed=4)
    ours = {-1 / 4: power(A, -1 / 4), -1 / 3: power(A, -1 / 3), 0.5: power(A, 0.5), -0.5: power(A, -0.5)}
    for exponent, X in ours.items():
        theirs = torch.from_numpy(scipy.linalg.fractional_matrix_power(A.numpy(), exponent))
        assert error(X, theirs) <= 1e-12
    assert error(ours[0.5], torch.from_numpy(scipy.linalg.sqrtm(A.numpy()).real)) <= 1e-12


def test_reference_handles_repeated_eigenvalues():
    """Two-fold and five-fold eigenvalues, which rounding splits at random: f(A) is Q f(D) Q^T to the rounding of A."""
    spectrum = torch.tensor([3.0, 3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5], dtype=FP64)
    Q = orthogonal(8, seed=5)
    A = with_spectrum(spectrum, seed=5)
    assert error(inverse_root(A, 3), (Q * spectrum ** (-1 / 3)) @ Q.mT) <= 1e-14


# ------------------------------------------------------------------------------------------------ scipy, closed forms


@pytest.mark.parametrize(
    ("row", "p"), cases(orders=(1, 2, 3, 4, 5, 6, 8, 1.5, Fraction(8, 3), math.pi)), ids=name
)
def test_against_fractional_matrix_power(row, p):
    A = torch.stack([spd(10, 50.0, seed=s) for s in range(3)])
    X = matroots.inv_root(A, p, method=row.method)
    for member, root in zip(A, X, strict=True):
        theirs = scipy.linalg.fractional_matrix_power(member.numpy(), -1 / float(p))
        assert error(root, torch.from_numpy(theirs)) <= 1e-12


@pytest.mark.parametrize(("row", "p"), cases(orders=(2, 4)), ids=name)
def test_against_sqrtm(row, p):
    A = spd(10, 50.0, seed=11)
    S = scipy.linalg.sqrtm(A.numpy()).real
    S = S if p == 2 else scipy.linalg.sqrtm(S).real
    S = torch.from_numpy(S)
    assert error(matroots.root(A, p, method=row.method), S) <= 1e-12
    assert error(matroots.inv_root(A, p, method=row.method), torch.linalg.inv(S)) <= 1e-12


@pytest.mark.parametrize(("row", "p"), cases(orders=(2, 3, 4)), ids=name)
def test_against_eigh(row, p):
    A = spd(24, 100.0, seed=12)
    values, Q = scipy.linalg.eigh(A.numpy())
    truth = torch.from_numpy(Q * values ** (-1 / p) @ Q.T)
    assert error(matroots.inv_root(A, p, method=row.method), truth) <= 1e-12


@pytest.mark.parametrize(("row", "p"), cases(orders=(1, 2, 3, 4, 7, 8)), ids=name)
def test_two_by_two_closed_form(row, p):
    """[[a, b], [b, a]] has eigenvectors (1, 1), (1, -1) and eigenvalues a + b, a - b."""
    high, low = 81.0 ** (-1 / p), 16.0 ** (-1 / p)
    A = torch.tensor([[48.5, 32.5], [32.5, 48.5]], dtype=FP64)
    truth = torch.tensor([[high + low, high - low], [high - low, high + low]], dtype=FP64) / 2
    assert error(matroots.inv_root(A, p, method=row.method), truth) <= 1e-13


@pytest.mark.parametrize(("row", "p"), cases(orders=(2, 3, 4)), ids=name)
def test_constant_plus_diagonal_closed_form(row, p):
    """c I + d J (J all ones, n x n) has eigenvalue c + n d on (1, ..., 1) and c on its complement."""
    n, c, d = 7, 0.3, 2.0
    J = torch.ones(n, n, dtype=FP64)
    truth = c ** (-1 / p) * (torch.eye(n, dtype=FP64) - J / n) + (c + n * d) ** (-1 / p) * J / n
    X = matroots.inv_root(c * torch.eye(n, dtype=FP64) + d * J, p, method=row.method)
    assert error(X, truth) <= 1e-13


@pytest.mark.parametrize(("row", "p"), cases(orders=(1, 2, 4)), ids=name)
def test_second_difference_closed_form(row, p):
    """The matrix tridiag(-1, 2, -1): eigenvalues 4 sin^2(k pi / (2 n + 2)), eigenvectors sines."""
    n = 9
    A = 2 * torch.eye(n, dtype=FP64) - torch.diag(torch.ones(n - 1, dtype=FP64), 1)
    A = A - torch.diag(torch.ones(n - 1, dtype=FP64), -1)
    k = torch.arange(1, n + 1, dtype=FP64)
    Q = torch.sin(torch.outer(k, k) * math.pi / (n + 1)) * math.sqrt(2 / (n + 1))
    values = 4 * torch.sin(k * math.pi / (2 * n + 2)) ** 2
    assert error(matroots.inv_root(A, p, method=row.method), (Q * values ** (-1 / p)) @ Q.mT) <= 1e-12


# ------------------------------------------------------------------------------------------------ fp64, fp32: cond u


@pytest.fixture(scope="module")
def graded():
    """n = 64, condition 1, 10, ..., 1e10 in fp64, and the truth for each p of these rounded matrices."""
    A = torch.stack([spd(64, condition, seed=i) for i, condition in enumerate(CONDITIONS)])
    return A, {p: inverse_root(A, p) for p in (1, 2, 3, 4, 6, 8)}


@pytest.mark.parametrize(("row", "p"), cases(orders=(1, 2, 3, 4, 6, 8)), ids=name)
def test_fp64_is_accurate_to_the_condition_number(graded, row, p):
    A, truth = graded
    result = matroots.inv_root_ex(A, p, method=row.method)
    errors = error(result.root, truth[p])
    for condition, status, wrong in zip(CONDITIONS, result.status.tolist(), errors.tolist(), strict=True):
        must_converge = condition <= row.converges_to[FP64]
        assert status == Status.CONVERGED or not must_converge, f"cond {condition:.0e}: {Status(status).name}"
        if status == Status.CONVERGED:
            assert wrong <= 10 * condition * ROUNDOFF[FP64] + 1e-13, (
                f"cond {condition:.0e}: error {wrong:.1e}"
            )


@pytest.mark.parametrize("spectrum", ["two clusters", "one small", "one large", "uniform"])
@pytest.mark.parametrize(("row", "p"), cases(orders=(2, 3, 4)), ids=name)
def test_fp64_is_accurate_for_other_spectra(row, p, spectrum):
    n, condition = 20, 1e4 if row.converges_to[FP64] >= 1e4 else 1e2
    values = {
        "two clusters": [1.0] * 10 + [1 / condition] * 10,
        "one small": [1.0] * 19 + [1 / condition],
        "one large": [1.0] + [1 / condition] * 19,
        "uniform": np.linspace(1 / condition, 1.0, n),
    }[spectrum]
    A = with_spectrum(values, seed=21)
    result = matroots.inv_root_ex(A, p, method=row.method)
    assert result.status == Status.CONVERGED
    assert error(result.root, inverse_root(A, p)) <= tolerance(FP64, condition)


@pytest.fixture(scope="module")
def graded32():
    """n = 64, fp32, condition 1, ..., 1e6, three seeds, and the truth for each p: the fp64 root of the rounded matrix.

    fp64 is wrong by at most about n u cond = 1e-8 here.
    """
    A = torch.stack([spd(64, 10.0**k, seed=100 * s + k, dtype=FP32) for s in range(3) for k in range(7)])
    condition = torch.tensor([10.0**k for _ in range(3) for k in range(7)], dtype=FP64)
    values, Q = torch.linalg.eigh(A.double())
    truth = {p: (Q * values.unsqueeze(-2) ** (-1 / p)) @ Q.mT for p in (1, 2, 3, 4, 6, 8)}
    return A, condition, truth


@pytest.mark.parametrize(("row", "p"), cases(orders=(1, 2, 3, 4, 6, 8)), ids=name)
def test_fp32_is_accurate_to_the_condition_number(graded32, row, p):
    """A converged iteration is held to 0.3 cond u; fp32 eigenvalues are known to n u only, so "evd" to 10 cond u."""
    A, condition, truth = graded32
    result = matroots.inv_root_ex(A, p, method=row.method)
    factor = 0.3 if row.iterative else 10.0
    allowed = factor * condition * ROUNDOFF[FP32] + 5e-6
    converged = result.status == Status.CONVERGED
    assert bool(converged[condition <= row.converges_to[FP32]].all()), result
    wrong = (error(result.root, truth[p]) / allowed)[converged]
    assert wrong.max() <= 1, f"{wrong.max():.2f} of what is allowed"


@pytest.mark.parametrize("row", [row for row in ROWS if row.iterative], ids=name)
@pytest.mark.parametrize("scaling", SCALINGS, ids=name)
def test_fp32_accuracy_does_not_depend_on_the_scaling(row, scaling):
    A = torch.stack([spd(48, 1e4, seed=s, dtype=FP32) for s in range(4)])
    result = matroots.inv_root_ex(A, 4, method=row.method, scaling=scaling)
    assert bool((result.status == Status.CONVERGED).all())
    assert error(result.root, inverse_root(A, 4)).max() <= 0.3 * 1e4 * ROUNDOFF[FP32] + 5e-6


# ------------------------------------------------------------------------------------------------ all dtypes, scalings


@pytest.mark.parametrize("dtype", [*DTYPES, *HALF], ids=name)
@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize(("row", "scaling"), PAIRS, ids=name)
def test_every_pair_in_every_dtype(row, scaling, p, dtype):
    A = torch.stack([spd(12, 20.0, seed=s, dtype=dtype) for s in range(2)])
    result = matroots.inv_root_ex(A, p, method=row.method, scaling=scaling)
    assert result.root.dtype == dtype
    assert symmetric(result.root)
    assert bool((result.status == Status.CONVERGED).all())
    assert error(result.root, inverse_root(A, p)).max() <= tolerance(dtype, 20.0)


@pytest.mark.parametrize(("row", "p"), cases(orders=(1, 2, 3, 4, 8)), ids=name)
def test_root_and_pair(row, p):
    A = torch.stack([spd(12, 50.0, seed=s) for s in range(2)])
    S, X = matroots.root_pair(A, p, method=row.method)
    assert error(S, power(A, 1 / p)).max() <= 1e-12
    assert error(X, inverse_root(A, p)).max() <= 1e-12
    assert error(matroots.root(A, p, method=row.method), power(A, 1 / p)).max() <= 1e-12


@pytest.mark.parametrize("tol", [1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize(("row", "p"), cases(tuple(r for r in ROWS if r.tol_keyword), (2, 3, 4)), ids=name)
def test_tol_bounds_the_residual(row, p, tol):
    """What is asked for is ||I - A X^p||_F <= tol, computed here from A and X."""
    A = torch.stack([spd(12, condition, seed=5) for condition in (2.0, 20.0, 80.0)])
    result = matroots.inv_root_ex(A, p, method=row.method, tol=tol)
    gap = torch.eye(12, dtype=FP64) - A @ torch.linalg.matrix_power(result.root, p)
    assert bool((result.status == Status.CONVERGED).all())
    assert torch.linalg.matrix_norm(gap).max() <= tol
    full = matroots.inv_root_ex(A, p, method=row.method)
    assert bool((result.matmuls + result.steps < full.matmuls + full.steps).any()), (
        "a looser tolerance must cost less"
    )


def test_auto_holds_tol_on_the_certified_error():
    """A second solve, in fp64, serves what fp32 cannot; what the rounding of the result alone exceeds is said to miss."""
    A = torch.stack([spd(12, 10.0, dtype=FP32), spd(12, 1e6, dtype=FP32)])
    result = matroots.inv_root_ex(A, 2, method="auto", tol=1e-4, certify=True)
    assert result.status.tolist() == [Status.CONVERGED, Status.CONVERGED]
    assert bool((result.certificate.relative_error <= 1e-4).all())
    assert bool((error(result.root, inverse_root(A, 2)) <= result.certificate.relative_error).all())
    finer = matroots.inv_root_ex(A, 2, method="auto", tol=1e-9, certify=True)
    assert finer.status.tolist() == [Status.STAGNATED, Status.STAGNATED]


@pytest.mark.parametrize("mode", ["damp", "shift", "abs", "clip", "pinv", "refuse"])
def test_evd_modes_agree_on_a_definite_matrix(mode):
    A = spd(10, 100.0, seed=31)
    result = matroots.inv_root_ex(A, 3, method=EVD(spectrum=mode))
    assert error(result.root, inverse_root(A, 3)) <= tolerance(FP64, 100.0)
    assert result.damping == 0


def test_evd_modes_on_an_indefinite_matrix():
    """Eigenvalues 2, 1, -0.5 with eps 0.1 and p = 1: each mode by the formula of its documentation."""
    values, eps = torch.tensor([2.0, 1.0, -0.5], dtype=FP64), 0.1
    Q = orthogonal(3, seed=32)
    A = with_spectrum(values, seed=32)
    expected = {
        "shift": values + 0.5 + eps,
        "abs": values.abs() + eps,
        "clip": values.clamp_min(eps),
    }
    for mode, treated in expected.items():
        result = matroots.inv_root_ex(A, 1, method=EVD(spectrum=mode), damping=eps)
        assert result.status == Status.CONVERGED
        assert error(result.root, (Q / treated) @ Q.mT) <= 1e-13, mode
    for mode in ("damp", "refuse"):
        result = matroots.inv_root_ex(A, 1, method=EVD(spectrum=mode), damping=eps)
        assert result.status == Status.INDEFINITE
        assert bool(result.root.isnan().all())
    shifted = matroots.inv_root_ex(A, 1, method=EVD(spectrum="shift"), damping=eps)
    assert shifted.damping.item() == pytest.approx(0.6, rel=1e-14)
    assert math.isnan(matroots.inv_root_ex(A, 1, method=EVD(spectrum="abs"), damping=eps).damping)


def test_evd_computes_in_the_dtype_asked_for():
    """fp64 inside removes the fp32 eigenvalue error: what is left is the rounding of the result."""
    A = spd(24, 1e5, seed=33, dtype=FP32)
    truth = inverse_root(A, 2)
    wide = matroots.inv_root_ex(A, 2, method=EVD(compute_dtype=FP64)).root
    assert wide.dtype == FP32
    assert error(wide, truth) <= 24**0.5 * ROUNDOFF[FP32]
    assert error(matroots.inv_root_ex(A, 2, method="evd").root, truth) > 24**0.5 * ROUNDOFF[FP32]


def test_matrices_have_the_spectrum_that_is_prescribed():
    A = spd(9, 1e3, seed=1)
    assert torch.allclose(
        torch.linalg.eigvalsh(A).flip(0), torch.from_numpy(geometric(9, 1e3)), rtol=0, atol=1e-14
    )
