# SPDX-License-Identifier: Apache-2.0
"""Faults that users of such software have reported, each as its whole kind: other methods, scalings, orders, dtypes, shapes."""

from __future__ import annotations

import contextlib
import math
import pickle
import threading
import warnings
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from matrices import (
    ROUNDOFF,
    error,
    geometric,
    inverse_root,
    orthogonal,
    power,
    spd,
    symmetric,
    tolerance,
    with_spectrum,
)
from table import (
    BF16,
    DTYPES,
    FIXED,
    FP16,
    FP32,
    FP64,
    HALF,
    INTEGERS,
    ITERATIVE,
    PAIRS,
    REALS,
    ROWS,
    SCALED,
    SCALINGS,
    Row,
    cases,
    name,
)
from torch.utils._python_dispatch import TorchDispatchMode

import matroots
from matroots import (
    EVD,
    Chebyshev,
    CoupledNewton,
    Frobenius,
    InvRoot,
    MultiPower,
    NewtonDB,
    Power,
    RootError,
    RootWarning,
    Status,
    _prepare,
    _products,
    _solve,
)
from matroots.scaling import bounds

requires_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="requires cuda")
each_pair = pytest.mark.parametrize(("row", "scaling"), PAIRS, ids=name)
each_row = pytest.mark.parametrize("row", ROWS, ids=name)
each_case = pytest.mark.parametrize(("row", "p"), cases(orders=(2, 4)), ids=name)
square_and_fourth = pytest.mark.parametrize("p", [2, 4])
OK = Status.CONVERGED


def gap(A: torch.Tensor, X: torch.Tensor, p: int) -> torch.Tensor:
    """``||A X^p - I||_F`` in fp64, for each member."""
    A, X = A.double(), X.double()
    return torch.linalg.matrix_norm(A @ torch.linalg.matrix_power(X, p) - torch.eye(A.shape[-1], dtype=FP64))


def same(first: InvRoot, second: InvRoot) -> bool:
    """Whether two results are identical in every field, NaN counting as equal to NaN."""
    return all(
        a is b is None or torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
        for a, b in zip(first, second, strict=True)
    )


# ------------------------------------------------------------------------------------------------ A01-A04: wrong answers


@pytest.mark.parametrize("p", [*INTEGERS, *REALS, 2.0, Fraction(4), Fraction(7, 2)], ids=str)
@each_row
def test_a01_every_order_is_right_or_refused(row, p):
    Q, values = orthogonal(6, seed=1), torch.tensor([1.0, 2.0, 3.0, 5.0, 8.0, 13.0], dtype=FP64)
    A = with_spectrum(values, seed=1)
    takes = p in row.orders or (p == Fraction(7, 2) and 1.5 in row.orders)
    if not takes:
        with pytest.raises(ValueError, match=rf'^p: method "{row.name}"'):
            matroots.inv_root(A, p, method=row.method)
        return
    X = matroots.inv_root(A, p, method=row.method)
    assert error(X, (Q * values ** (-1 / float(p))) @ Q.mT) <= 1e-13
    assert error(matroots.inv_root(A.float(), p, method=row.method), X) <= 2e-6
    if isinstance(p, int):
        assert gap(A, X, p) <= 1e-12


@each_pair
@square_and_fourth
def test_a02_a_fourth_root_is_no_square_root(row, scaling, p):
    for A, Q in (
        (torch.diag(torch.tensor([2.0, 0.5], dtype=FP64)), torch.eye(2, dtype=FP64)),
        (with_spectrum([2.0, 0.5], seed=2), orthogonal(2, seed=2)),
    ):
        D = Q.mT @ matroots.inv_root(A, p, method=row.method, scaling=scaling) @ Q
        expected = {2: (0.70710678, 1.41421356), 4: (0.84089642, 1.18920712)}[p]
        assert D.diagonal().tolist() == pytest.approx(expected, abs=1e-8)
        assert D[0, 1].abs() <= 1e-13


@each_pair
def test_a03_two_fourth_roots_make_a_polar_factor(row, scaling):
    """L = G G^T and R = G^T G: L^{-1/4} G R^{-1/4} and L^{-1/2} G are U V^T, all of whose singular values are 1."""
    for G in (torch.tensor([[3.0, 1.0], [0.0, 2.0]], dtype=FP64), orthogonal(6, 3) @ spd(6, 4.0, 4)):
        U, _, Vh = np.linalg.svd(G.numpy())
        polar = torch.from_numpy(U @ Vh)

        def root(A: torch.Tensor, p: int) -> torch.Tensor:
            return matroots.inv_root(A, p, method=row.method, scaling=scaling)

        assert error(root(G @ G.mT, 4) @ G @ root(G.mT @ G, 4), polar) <= 1e-12
        assert error(root(G @ G.mT, 2) @ G, polar) <= 1e-12


@pytest.mark.parametrize("kind", ["residual", "reference"])
@each_case
def test_a04_the_certificate_bounds_the_error_where_the_residual_does_not(row, p, kind):
    """1000 fp32 matrices, cond 1e6. The solver's residual is below the true error, the certificate never is."""
    draws = 250  # for each of two orders, two kinds and five methods
    A = torch.stack([spd(16, 1e6, seed=s, dtype=FP32) for s in range(draws)])
    result = matroots.inv_root_ex(A, p, method=row.method)
    usable = result.status < Status.DIVERGED
    values, Q = torch.linalg.eigh(A.double())  # accurate to n u cond = 2e-9, far below the errors here
    true = error(result.root, (Q * values.unsqueeze(-2) ** (-1 / p)) @ Q.mT)
    certificate = matroots.certify(A, result.root, p, kind=kind)
    assert bool((certificate.relative_error >= true * (1 - 1e-4))[usable].all())
    assert bool(certificate.valid[usable].float().mean() > (0.9 if p == 4 or kind == "reference" else 0.0))
    if row.iterative:
        assert bool((result.residual < true)[usable].float().mean() > 0.5)


@each_case
def test_a04_beyond_the_precision_nothing_is_silent(row, p):
    """cond 1e10 in fp32: rounding makes A indefinite. Either the shift that was needed is reported, or a failure."""
    A = torch.stack([spd(16, 1e10, seed=s, dtype=FP32) for s in range(20)])
    result = matroots.inv_root_ex(A, p, method=row.method)
    smallest = torch.linalg.eigvalsh(A.double())[:, 0]
    usable = result.status < Status.DIVERGED
    assert bool((result.damping + smallest > 0)[usable].all())
    assert bool(torch.isfinite(result.root[usable]).all())
    assert bool(result.root[~usable].isnan().all())


# ------------------------------------------------------------------------------------------------ A05-A07: the scale


@dataclass(frozen=True)
class Misjudged:
    """A scaling that returns ``factor`` times the largest eigenvalue."""

    factor: float
    matmuls: int = 0

    def estimate(self, A: torch.Tensor, generator: Any = None) -> torch.Tensor:
        return torch.linalg.eigvalsh(A.double())[..., -1] * self.factor


@pytest.mark.parametrize(
    "factor", [0.0, 1e-6, 0.11, 0.18, 0.21, 0.30, 0.33, 0.45, 0.9, 0.95, 0.99, 0.998, 1.0, 3.0, 1e6]
)
@pytest.mark.parametrize(("row", "p"), cases(SCALED, (1, 2, 3, 4, 8)), ids=name)
def test_a05_a06_a_scale_that_is_wrong_does_no_harm(row, p, factor):
    """Too small: Newton's iterations would take a wrong branch, Chebyshev's series leave its interval."""
    for A in (with_spectrum([1.0, 0.3, 0.1], seed=5), torch.diag(torch.tensor([1.0, 0.3, 0.1], dtype=FP64))):
        result = matroots.inv_root_ex(A, p, method=row.method, scaling=Misjudged(factor))
        assert torch.linalg.eigvalsh(result.root).min() > 0
        assert result.status == OK
        assert error(result.root, inverse_root(A, p)) <= tolerance(FP64, 10.0)


@pytest.mark.parametrize(("row", "p"), cases(SCALED, (2, 4)), ids=name)
def test_a05_a_spike_that_power_iteration_misses(row, p):
    """One eigenvalue 1 among 63 of 0.3, two power steps, no safety factor: many starts come out far too low."""
    A = with_spectrum([1.0] + [0.3] * 63, seed=6)
    scaling = Power(steps=2, safety=1.0)
    low = 0
    for seed in range(12):
        low += int(scaling.estimate(A.unsqueeze(0), torch.Generator().manual_seed(seed)) < 0.5)
        X = matroots.inv_root(
            A, p, method=row.method, scaling=scaling, generator=torch.Generator().manual_seed(seed)
        )
        assert error(X, inverse_root(A, p)) <= tolerance(FP64, 4.0)
    assert low > 0, "the case is void: every start found the spike"


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize(
    ("p", "values"), [(4, (-1.0, 1.351, 1.778)), (2, (-1.0, 1.8257418583505538, 3.1622776601683795))]
)
def test_a05_the_certificate_sees_a_wrong_sign(p, values, seed):
    """X^p A = I holds exactly, but X is not positive definite."""
    X = torch.diag(torch.tensor(values, dtype=FP64)) if seed is None else with_spectrum(values, seed)
    A = torch.diag(torch.tensor([v**-p for v in values], dtype=FP64))
    A = A if seed is None else with_spectrum([v**-p for v in values], seed)
    assert gap(A, X, p) <= 1e-13
    certificate = matroots.certify(A, X, p)
    assert not certificate.valid
    assert not certificate.positive_definite
    assert certificate.relative_error == math.inf
    assert matroots.certify(A, inverse_root(A, p), p).valid


@pytest.mark.parametrize("degree", [20, 60, 100])
@pytest.mark.parametrize("seed", [None, 8])
def test_a06_below_its_interval_chebyshev_is_not_converged(degree, seed):
    """At 1e-10 a fourth root is 316; a series of low degree gets to 10 or 22, and must say so."""
    values = [1.0, 0.5, 1e-10]
    A = torch.diag(torch.tensor(values, dtype=FP64)) if seed is None else with_spectrum(values, seed)
    for floor in (1e-10, 1e-3):
        result = matroots.inv_root_ex(A, 4, method=Chebyshev(degree=degree, floor=floor), certify=True)
        assert result.status in (Status.MAX_STEPS, Status.STAGNATED)
        assert error(result.root, inverse_root(A, 4)) > 0.5, "the case is void"
        assert result.certificate.relative_error >= error(result.root, inverse_root(A, 4))
        assert torch.linalg.eigvalsh(result.root)[-1] < 316, "an undershoot, not an amplification"


@each_pair
@square_and_fourth
def test_a06_a_rank_one_matrix_with_damping_in_bfloat16(row, scaling, p):
    """||A||_F = lambda_max: whatever rounds the norm down leaves the top eigenvalue above it."""
    v = torch.from_numpy(np.random.default_rng(9).standard_normal(32))
    for dtype in (BF16, FP32, FP64):
        A = torch.outer(v, v).to(dtype)
        A = (A + A.mT) / 2
        eps = 0.05 * float(v @ v)
        result = matroots.inv_root_ex(A, p, method=row.method, scaling=scaling, damping=eps)
        assert result.status == OK
        assert error(result.root, inverse_root(A, p, damping=eps)) <= tolerance(dtype, 21.0, 32)


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@each_pair
def test_a07_scale_equivariance(row, scaling, p):
    if p not in row.orders:
        p = 8
    for dtype, exponents in ((FP64, (-300, -12, -6, 6, 12, 300)), (FP32, (-20, -12, -6, 6, 12, 20))):
        A = spd(8, 10.0, seed=10, dtype=dtype)
        X = matroots.inv_root(A, p, method=row.method, scaling=scaling).double()
        for k in exponents:
            scaled = (A.double() * 10.0**k).to(dtype)
            Y = matroots.inv_root(scaled, p, method=row.method, scaling=scaling)
            expected = X * 10.0 ** (-k / p)
            if expected.abs().max() > torch.finfo(dtype).max / 10:
                continue
            # 10 ulp cond, and the rounding of 10^(-k/p) in the test
            assert error(Y, expected) <= 20 * 10 * ROUNDOFF[dtype] + abs(k) * 4e-16, f"1e{k}, {dtype}"


@each_case
def test_a07_powers_of_two_are_exact(row, p):
    """Multiplying by 2^(p k) multiplies the root by 2^-k, without any rounding."""
    for dtype in DTYPES:
        A = spd(8, 30.0, seed=11, dtype=dtype)
        X = matroots.inv_root(A, p, method=row.method)
        for k in (-20, -3, 1, 7, 20):
            assert torch.equal(matroots.inv_root(A * 2.0 ** (p * k), p, method=row.method), X * 2.0**-k)


# ------------------------------------------------------------------------------------------------ A09-A15: rank, damping


@each_pair
@square_and_fourth
def test_a09_an_all_zero_block(row, scaling, p):
    for dtype in (*DTYPES, BF16):
        A = torch.stack([spd(8, seed=1), torch.zeros(8, 8, dtype=FP64), spd(8, seed=2)]).to(dtype)
        eps = 1e-8
        result = matroots.inv_root_ex(A, p, method=row.method, scaling=scaling, damping=eps)
        assert result.status.tolist() == [OK] * 3
        assert error(result.root[1], eps ** (-1 / p) * torch.eye(8, dtype=FP64)) <= tolerance(dtype, 1.0, 8)
        result = matroots.inv_root_ex(A, p, method=row.method, scaling=scaling)
        assert result.status.tolist() == [OK, Status.SINGULAR, OK]
        assert bool(result.root[1].isnan().all())
        for i in (0, 2):
            alone = matroots.inv_root(A[i], p, method=row.method, scaling=scaling)
            assert error(result.root[i], alone.double()) <= 20 * 10 * ROUNDOFF[dtype]
            assert error(result.root[i], inverse_root(A[i], p)) <= tolerance(dtype, 11.0, 8)


def test_a09_zero_in_pseudo_inverse_mode():
    A = torch.stack([spd(8), torch.zeros(8, 8, dtype=FP64)])
    result = matroots.inv_root_ex(A, 4, method=EVD(spectrum="pinv"))
    assert result.status.tolist() == [OK, OK]
    assert torch.equal(result.root[1], torch.zeros(8, 8, dtype=FP64))


@each_case
def test_a09_the_root_of_zero_is_zero(row, p):
    A = torch.stack([spd(6, seed=3), torch.zeros(6, 6, dtype=FP64)])
    S = matroots.root(A, p, method=row.method)
    assert torch.equal(S[1], torch.zeros(6, 6, dtype=FP64))
    assert error(S[0], power(A[0], 1 / p)) <= 1e-13


def test_a10_a_rank_one_factor_of_a_large_layer():
    g = torch.Generator().manual_seed(0)
    t = torch.randn(784, generator=g) * torch.logspace(-6, 0, 784)
    A = torch.outer(t, t)
    eps = 1e-2 * float(t @ t)
    t = t.double()
    truth = eps ** (-1 / 4) * torch.eye(784, dtype=FP64)
    size = t @ t
    truth += ((size + eps) ** (-1 / 4) - eps ** (-1 / 4)) * torch.outer(t, t) / size
    result = matroots.inv_root_ex(A, 4, method="evd", damping=eps)
    assert result.root.dtype == FP32
    assert result.status == OK
    assert error(result.root, truth) <= 10 * 101 * ROUNDOFF[FP32]
    result = matroots.inv_root_ex(A, 4, method="evd")
    assert bool(torch.isfinite(result.root).all()) == (result.status == OK)
    assert result.status != OK or result.damping > 0


@pytest.mark.parametrize("failure", [torch.linalg.LinAlgError, RuntimeError])
@pytest.mark.parametrize("dtype", [*DTYPES, BF16], ids=name)
def test_a10_a_failed_decomposition_is_tried_again(monkeypatch, failure, dtype):
    """Fails once (the batch): each member alone; fails in fp32: fp64; fails for one member: that one is flagged."""
    A = torch.stack([spd(8, seed=s, dtype=dtype) for s in range(3)])
    eigh = torch.linalg.eigh
    calls: list[torch.dtype] = []

    def once(M: torch.Tensor) -> Any:
        calls.append(M.dtype)
        if len(calls) == 1:
            raise failure("linalg.eigh: failed to converge")
        return eigh(M)

    def never_in_single(M: torch.Tensor) -> Any:
        if M.dtype == FP32 or len(calls) < 4:
            calls.append(M.dtype)
            raise failure("linalg.eigh: failed to converge")
        return eigh(M)

    def never_for_the_second(M: torch.Tensor) -> Any:
        if (
            M.ndim == 3
            or (M.double() - A[1].double() * M[0, 0].double() / A[1, 0, 0].double()).abs().max() < 1e-3
        ):
            raise failure("linalg.eigh: failed to converge")
        return eigh(M)

    for broken in (once, never_in_single):
        calls.clear()
        monkeypatch.setattr(torch.linalg, "eigh", broken)
        result = matroots.inv_root_ex(A, 2, method="evd")
        assert result.status.tolist() == [OK] * 3
        assert result.root.dtype == dtype
        # the last rungs add a shift of n u max |a_ij|, which is reported and is no error
        assert error(result.root, inverse_root(A, 2, damping=result.damping.numpy())).max() <= tolerance(
            dtype, 11.0, 8
        )
    monkeypatch.setattr(torch.linalg, "eigh", never_for_the_second)
    result = matroots.inv_root_ex(A, 2, method="evd")
    assert result.status.tolist() == [OK, Status.DIVERGED, OK]
    assert bool(result.root[1].isnan().all())
    assert error(result.root[::2], inverse_root(A[::2], 2)).max() <= tolerance(dtype, 11.0, 8)


def test_a10_lack_of_memory_is_not_tried_again(monkeypatch):
    def broken(M: torch.Tensor) -> Any:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(torch.linalg, "eigh", broken)
    with pytest.raises(torch.OutOfMemoryError):
        matroots.inv_root_ex(spd(4), 2, method="evd")


@pytest.mark.parametrize("dense", [False, True], ids=["diagonal", "dense block"])
@each_case
def test_a11_a_factor_with_few_rows_in_use(row, p, dense):
    """An embedding table's factor: 7 of 512 rows. On the others the root is eps^(-1/p), and nothing off the diagonal."""
    n, eps = 512, 1e-8
    rows = torch.tensor([3, 17, 64, 65, 200, 301, 511])
    values = torch.tensor([0.1, 0.2, 0.35, 0.5, 0.6, 0.8, 0.9], dtype=FP64)
    # eps is below u ||A|| in fp32, which an eigendecomposition of a matrix that is not diagonal cannot resolve
    dtype = FP64 if dense and row.name in ("evd", "auto") else FP32
    block = (with_spectrum(values, seed=12) if dense else torch.diag(values)).to(dtype)
    A = torch.zeros(n, n, dtype=dtype)
    A[rows.unsqueeze(1), rows] = block
    if row.floored:  # eps is below the floor, or would take a degree in the thousands: flagged
        limit = {"max_steps": 20} if row.steps_keyword else {}
        result = matroots.inv_root_ex(A, p, method=row.method, damping=eps, **limit)
        assert result.status == Status.MAX_STEPS
        return
    result = matroots.inv_root_ex(A, p, method=row.method, damping=eps)
    assert result.status < Status.DIVERGED
    truth = eps ** (-1 / p) * torch.eye(n, dtype=FP64)
    truth[rows.unsqueeze(1), rows] = inverse_root(block, p, damping=eps)
    # each of the two blocks has cond 10 or 1: nothing of the 1e8 between them needs to be lost
    assert error(result.root, truth) <= 1e-4
    assert result.root[~torch.isin(torch.arange(n), rows)][:, rows].abs().max() <= 1e-4 * eps ** (-1 / p)


@pytest.mark.parametrize("p", [2, 4])
def test_a12_evd_amplifies_by_no_more_than_the_damping_allows(p):
    """fp32 eigenvalues of a rank-2 matrix scatter around zero by more than eps: none may be taken as below eps."""
    for seed in range(5):
        B = torch.randn(16, 2, generator=torch.Generator().manual_seed(seed))
        eps = 1e-6
        assert torch.linalg.eigvalsh(B @ B.mT).amin() < 0
        X = matroots.inv_root(B @ B.mT, p, method="evd", damping=eps)
        assert torch.linalg.eigvalsh(X.double()).amax() <= eps ** (-1 / p) * (1 + 1e-5)


@each_pair
@square_and_fourth
def test_a12_eigenvalues_that_rounding_made_negative(row, scaling, p):
    for seed in range(3):
        B = torch.from_numpy(np.random.default_rng(seed).standard_normal((8, 2))).float()
        A = B @ B.mT
        A = A / torch.linalg.matrix_norm(A, 2)
        A = (A + A.mT) / 2
        smallest = torch.linalg.eigvalsh(A.double())[0]
        for eps in (0.0, 1e-12, 1e-6):
            result = matroots.inv_root_ex(A, p, method=row.method, scaling=scaling, damping=eps)
            assert result.damping >= eps
            if result.status >= Status.DIVERGED:
                assert bool(result.root.isnan().all())
                continue
            assert symmetric(result.root)
            assert bool(torch.isfinite(result.root).all())
            values = torch.linalg.eigvalsh(result.root.double())
            assert values[0] > 0
            # at most what the shifted matrix has; half of that shift may be lost to the rounding of A + eps I
            allowed = smallest + result.damping - 8 * ROUNDOFF[FP32]
            if allowed > 0:
                assert values[-1] <= allowed ** (-1 / p) * 1.5


@each_row
def test_a12_below_rounding_is_indefinite(row):
    """One eigenvalue at -1e-3 is no rounding; with damping above it the matrix is definite."""
    A = with_spectrum([1.0, 0.5, 0.2, -1e-3], seed=13)
    for keywords in ({}, {"damping": 5e-4}):
        result = matroots.inv_root_ex(A, 2, method=row.method, **keywords)
        assert result.status == Status.INDEFINITE
        assert bool(result.root.isnan().all())
    assert matroots.inv_root_ex(A, 2, method=row.method, damping=0.1).status == OK


@each_pair
@square_and_fourth
def test_a13_the_dtype_is_kept(row, scaling, p):
    Q = orthogonal(5, seed=14)
    for dtype in (FP64, FP32, BF16, FP16):
        for A in (2 * torch.eye(5, dtype=dtype), ((Q * 2) @ Q.mT + torch.ones(5, 5, dtype=FP64)).to(dtype)):
            A = (A + A.mT) / 2
            X = matroots.inv_root(A, p, method=row.method, scaling=scaling)
            assert X.dtype == dtype
            assert error(X, inverse_root(A, p)) <= tolerance(dtype, 3.5, 5)


@each_row
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_a13_other_dtypes_are_refused(row, dtype):
    A = (2 * torch.eye(3)).to(dtype)
    for call in (matroots.inv_root, matroots.inv_root_ex, matroots.root, matroots.root_pair):
        with pytest.raises(
            TypeError,
            match=r"^A: expected float16, bfloat16, float32, float64, complex64 or complex128, got ",
        ):
            call(A, 2, method=row.method)
    with pytest.raises(TypeError, match=r"^A: "):
        matroots.lambda_bound(A)
    with pytest.raises(TypeError, match=r"^X: "):
        matroots.certify(torch.eye(3), A, 2)


@pytest.mark.parametrize("seed", [None, 15])
@each_pair
def test_a14_damping_limits_what_is_amplified(row, scaling, seed):
    values = torch.tensor([1.0, 1e-3, 1e-18], dtype=FP64)
    A, Q = torch.diag(values), torch.eye(3, dtype=FP64)
    if seed is not None:
        A, Q = with_spectrum(values, seed), orthogonal(3, seed)
    result = matroots.inv_root_ex(A, 4, method=row.method, scaling=scaling, damping=1e-10)
    if row.name == "chebyshev":
        assert result.status == Status.MAX_STEPS
        return
    assert result.status == OK
    D = (Q.mT @ result.root @ Q).diagonal()
    # cond 1e10: 10 cond u
    assert D.tolist() == pytest.approx([1.0, 5.6234132, 316.22777], rel=1e-5)


@pytest.mark.parametrize("seed", [None, 16])
@pytest.mark.parametrize("rtol", [None, 1e-6])
def test_a14_the_pseudo_inverse_drops_what_is_rounding(seed, rtol):
    values = torch.tensor([1.0, 1e-3, 1e-18], dtype=FP64)
    A, Q = torch.diag(values), torch.eye(3, dtype=FP64)
    if seed is not None:
        A, Q = with_spectrum(values, seed), orthogonal(3, seed)
    result = matroots.inv_root_ex(A, 4, method=EVD(spectrum="pinv", rtol=rtol))
    D = Q.mT @ result.root @ Q
    assert result.status == OK
    assert D.diagonal().tolist() == pytest.approx([1.0, 5.62341325, 0.0], abs=1e-8)
    assert math.isnan(result.damping), "a truncation is no shift"


@each_pair
@pytest.mark.parametrize("seed", [None, 17])
def test_a15_damping_is_added_once(row, scaling, seed):
    """(1e-6 + 1e-6)^(-1/2) = 707.1; 577 if added twice, 1000 if never."""
    values = torch.tensor([1e-6, 1.0], dtype=FP64)
    A, Q = torch.diag(values), torch.eye(2, dtype=FP64)
    if seed is not None:
        A, Q = with_spectrum(values, seed), orthogonal(2, seed)
    bound = matroots.lambda_bound(A).item()
    for keywords in (
        {"damping": 1e-6},
        {"damping": torch.tensor(1e-6, dtype=FP64)},
        {"rel_damping": 1e-6 / bound},
        {"damping": 4e-7, "rel_damping": 6e-7 / bound},
    ):
        result = matroots.inv_root_ex(A, 2, method=row.method, scaling=scaling, **keywords)
        assert result.damping.item() == pytest.approx(1e-6, rel=1e-12)
        assert result.bound.item() == bound
        if row.name == "chebyshev":
            assert result.status == Status.MAX_STEPS
            continue
        assert result.status == OK
        assert (Q.mT @ result.root @ Q)[0, 0].item() == pytest.approx(707.10678, rel=1e-6)


@each_case
def test_a15_damping_of_each_member(row, p):
    A = torch.stack([spd(6, seed=s) for s in range(6)]).reshape(2, 3, 6, 6)
    eps = torch.tensor([[0.1, 0.2, 0.3], [1.0, 2.0, 3.0]], dtype=FP64)
    result = matroots.inv_root_ex(A, p, method=row.method, damping=eps)
    assert torch.allclose(result.damping, eps, rtol=1e-14, atol=0)
    assert error(result.root, inverse_root(A, p, eps.flatten().numpy())).max() <= 1e-13
    result = matroots.inv_root_ex(A, p, method=row.method, damping=eps[:, :1], rel_damping=0.5)
    total = eps[:, :1] + 0.5 * matroots.lambda_bound(A)
    assert torch.allclose(result.damping, total, rtol=1e-14, atol=0)
    assert error(result.root, inverse_root(A, p, total.flatten().numpy())).max() <= 1e-13


@each_case
def test_a15_damping_that_half_precision_would_lose(row, p):
    """1e-3 vanishes next to 1 in bf16: it must be added in fp32."""
    A = with_spectrum([1.0, 1.0, 0.5], seed=18, dtype=BF16)
    smallest = torch.linalg.eigvalsh(A.double())[0]
    for eps in (2e-4, 1e-3, 5.0):
        result = matroots.inv_root_ex(A, p, method=row.method, damping=eps, certify=True)
        assert smallest > 0.4
        assert result.damping.item() == pytest.approx(eps, rel=1e-6)
        exact = matroots.inv_root(A.float(), p, method=row.method, damping=eps)
        assert error(exact, inverse_root(A, p, eps)) <= 5e-6
        assert torch.equal(result.root, exact.bfloat16())


# ------------------------------------------------------------------------------------------------ A18-A23: batches


@pytest.mark.parametrize("batch", [(4,), (3,), (2, 3), (1,), (1, 1), (2, 1, 2), ()], ids=str)
@each_case
def test_a18_batch_shapes(row, p, batch):
    n = 4
    members = [spd(n, 3.0 + i, seed=i) for i in range(math.prod(batch))]
    A = torch.stack(members).reshape(*batch, n, n)
    result = matroots.inv_root_ex(A, p, method=row.method)
    assert result.root.shape == A.shape
    for field in result[1:-1]:
        assert field.shape[: len(batch)] == batch
    loop = torch.stack([inverse_root(member, p) for member in members]).reshape(A.shape)
    assert error(result.root, loop).max() <= 1e-13
    S, X = matroots.root_pair(A, p, method=row.method)
    assert S.shape == X.shape == A.shape
    assert error(X, loop).max() <= 1e-13
    assert matroots.lambda_bound(A).shape == batch
    assert matroots.certify(A, X, p).valid.shape == batch


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@each_case
def test_a19_batch_mates_change_nothing(row, p, dtype):
    """cond 2 among cond 1e6: the same steps, status and products as alone, wherever it stands, and the same root."""
    easy = spd(8, 2.0, seed=0, dtype=dtype)
    hard = [spd(8, 1e6, seed=s, dtype=dtype) for s in range(1, 64)]
    alone = matroots.inv_root_ex(easy, p, method=row.method)
    assert error(alone.root, inverse_root(easy, p)) <= tolerance(dtype, 2.0, 8)
    for size, place in ((2, 0), (2, 1), (64, 0), (64, 40), (64, 63)):
        members = hard[: size - 1]
        members.insert(place, easy)
        result = matroots.inv_root_ex(torch.stack(members), p, method=row.method)
        for field in ("status", "steps", "matmuls"):
            assert getattr(result, field)[place] == getattr(alone, field), field
        assert error(result.root[place], alone.root.double()) <= 8 * 2 * ROUNDOFF[dtype]
        assert result.residual[place].item() == pytest.approx(
            alone.residual.item(), abs=1e-14, rel=0.5, nan_ok=True
        )


@each_case
def test_a19_a_thousand_members(row, p):
    A = torch.stack([spd(4, 2.0 + i % 7, seed=i) for i in range(1024)]).float()
    X = matroots.inv_root(A, p, method=row.method)
    values, Q = torch.linalg.eigh(A.double())
    assert error(X, (Q * values.unsqueeze(-2) ** (-1 / p)) @ Q.mT).max() <= tolerance(FP32, 8.0, 4)
    order = torch.randperm(1024, generator=torch.Generator().manual_seed(0))
    assert error(matroots.inv_root(A[order], p, method=row.method), X[order].double()).max() <= 1e-6


@pytest.mark.parametrize("dtype", [FP64, FP32, BF16, FP16], ids=name)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@each_case
def test_a20_a_member_that_is_not_finite(row, p, bad, dtype):
    A = torch.stack([spd(6, seed=s, dtype=dtype) for s in range(4)])
    clean = matroots.inv_root(A, p, method=row.method)
    A[2, 0, 0] = bad
    A[1, 3, 5] = bad
    result = matroots.inv_root_ex(A, p, method=row.method)
    assert result.status.tolist() == [OK, Status.NONFINITE_INPUT, Status.NONFINITE_INPUT, OK]
    assert bool(result.root[1:3].isnan().all())
    assert error(result.root[::3], clean[::3].double()).max() <= 20 * 10 * ROUNDOFF[dtype]
    with pytest.raises(RootError, match=r"members \[1\], \[2\] of batch \(4,\) \(NONFINITE_INPUT"):
        matroots.inv_root(A, p, method=row.method)
    with pytest.raises(RootError, match="NONFINITE_INPUT"):
        matroots.root(A, p, method=row.method)
    assert matroots.lambda_bound(A).isnan().tolist() == [False, True, True, False]
    assert matroots.certify(A, result.root, p).valid.tolist() == [True, False, False, True]


@each_row
@pytest.mark.parametrize("entries", ["all", "diagonal", "one"])
def test_a20_nothing_but_nan(row, entries):
    A = spd(5)
    if entries == "all":
        A = torch.full_like(A, math.nan)
    elif entries == "diagonal":
        A.diagonal().fill_(math.nan)
    else:
        A[4, 0] = math.nan
    result = matroots.inv_root_ex(A, 2, method=row.method)
    assert result.status == Status.NONFINITE_INPUT
    for field in ("root", "residual", "scale", "bound", "damping"):
        assert bool(getattr(result, field).isnan().all()), field


@each_case
def test_a20_damping_that_is_nan_is_one_members_affair(row, p):
    A = torch.stack([spd(5, seed=s) for s in range(2)])
    result = matroots.inv_root_ex(A, p, method=row.method, damping=torch.tensor([math.nan, 0.1]))
    assert result.status[1] == OK
    assert result.status[0] >= Status.DIVERGED
    assert bool(result.root[0].isnan().all())


@each_pair
@square_and_fourth
def test_a22_strides(row, scaling, p):
    buffer = torch.zeros(6, 7, 14, dtype=FP64)
    for i in range(6):
        buffer[i, :, ::2] = spd(7, seed=i)
    views = {
        "transposed": torch.stack([spd(7, seed=i) for i in range(3)]).mT,
        "every other": torch.stack([spd(7, seed=i) for i in range(6)])[::2],
        "expanded": spd(7).expand(5, 7, 7),
        "expanded twice": spd(7).expand(2, 5, 7, 7),
        "flipped": torch.stack([spd(7, seed=i) for i in range(3)]).flip(-1).flip(-2),
        "columns": buffer[..., ::2],
        "moved": torch.stack([spd(7, seed=i) for i in range(3)], dim=-1).movedim(-1, 0),
        "offset": torch.stack([spd(7, seed=i) for i in range(4)])[1:],
    }
    for kind, A in views.items():
        before = A.clone()
        X = matroots.inv_root(A, p, method=row.method, scaling=scaling)
        truth = inverse_root(before.contiguous(), p)
        assert error(X, truth).max() <= 1e-13, kind
        assert torch.equal(A, before), f"{kind}: the input was written to"
    assert buffer[..., 1::2].abs().max() == 0


@pytest.mark.parametrize("shape", [(0, 8, 8), (3, 0, 0), (0, 0, 0), (0, 0), (2, 0, 8, 8)], ids=str)
@each_pair
def test_a23_nothing_to_do(row, scaling, shape):
    for dtype in (FP64, FP32, BF16):
        A = torch.empty(shape, dtype=dtype)
        result = matroots.inv_root_ex(A, 2, method=row.method, scaling=scaling, certify=True, damping=0.1)
        assert result.root.shape == shape
        assert result.root.dtype == dtype
        assert result.status.shape == shape[:-2]
        assert bool((result.status == OK).all())
        assert result.status.dtype == torch.int32
        assert result.certificate.valid.shape == shape[:-2]
        assert matroots.inv_root(A, 2, method=row.method, scaling=scaling).shape == shape
        assert [r.shape for r in matroots.root_pair(A, 2, method=row.method)] == [shape, shape]
        assert str(result).startswith("InvRoot")


@each_pair
@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_a23_one_by_one(row, scaling, p):
    if p in row.orders:
        for dtype in DTYPES:
            A = torch.tensor([[[81.0]], [[1e-9]], [[16.0]]], dtype=dtype)
            X = matroots.inv_root(A, p, method=row.method, scaling=scaling)
            # one eigenvalue: cond 1
            assert torch.allclose(X.double(), A.double() ** (-1 / p), rtol=40 * ROUNDOFF[dtype], atol=0)


# ------------------------------------------------------------------------------------------------ A25-A28: devices, dtypes


@pytest.mark.parametrize("n", [31, 32, 33])
@each_case
def test_a25_across_the_sizes_where_batched_eigh_changes_algorithm(row, p, n):
    A = torch.stack([spd(n, seed=s) for s in range(2)])
    assert error(matroots.inv_root(A, p, method=row.method), inverse_root(A, p)).max() <= tolerance(
        FP64, 10.0
    )


@requires_cuda
@pytest.mark.parametrize("n", [31, 32, 33])
@each_case
def test_a25_on_cuda(row, p, n):
    A = torch.stack([spd(n, seed=s) for s in range(2)])
    X = matroots.inv_root(A.cuda(), p, method=row.method)
    assert X.is_cuda
    assert error(X.cpu(), inverse_root(A, p)).max() <= tolerance(FP64, 10.0)


class Looks(TorchDispatchMode):
    """Counts how often a value is handed to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("scaling", SCALINGS, ids=name)
@pytest.mark.parametrize(("row", "p"), cases(FIXED, (2, 4)), ids=name)
def test_a26_fixed_work_looks_at_no_value(row, p, scaling, monkeypatch):
    """Where looking is not free, as it is on a CPU, nothing is looked at: every branch is taken blindly."""
    for module in (_prepare, _solve, _products, bounds):
        monkeypatch.setattr(module, "may_hold", lambda mask: True)
    A = torch.stack([spd(6, seed=s, dtype=FP32) for s in range(4)])
    for work in (2, 9):
        with Looks() as looks:
            matroots.inv_root_ex(A, p, method=row.fixed(work), scaling=scaling)
        assert looks.count == 0


@requires_cuda
@pytest.mark.parametrize("scaling", SCALINGS, ids=name)
@pytest.mark.parametrize(("row", "p"), cases(FIXED, (2, 4)), ids=name)
def test_a26_on_cuda(row, p, scaling):
    A = torch.stack([spd(6, seed=s, dtype=FP32) for s in range(4)]).cuda()
    matroots.inv_root_ex(A, p, method=row.fixed(5), scaling=scaling)
    torch.cuda.set_sync_debug_mode("error")
    try:
        matroots.inv_root_ex(A, p, method=row.fixed(5), scaling=scaling)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", HALF, ids=name)
@pytest.mark.parametrize("condition", [20.0, 1e2])
@each_case
def test_a27_half_precision_input_inside_and_outside_autocast(row, p, condition, dtype):
    A = torch.stack([spd(12, condition, seed=s, dtype=dtype) for s in range(3)])
    result = matroots.inv_root_ex(A, p, method=row.method, rel_damping=0.02)
    assert bool((result.status == OK).all())
    assert error(result.root, inverse_root(A, p, result.damping.numpy())).max() <= tolerance(dtype, 100.0, 12)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = matroots.inv_root_ex(A, p, method=row.method, rel_damping=0.02)
        single = matroots.inv_root(A.float(), p, method=row.method, rel_damping=0.02)
        assert torch.is_autocast_enabled("cpu")
    assert same(inside, result)
    assert single.dtype == FP32
    assert torch.equal(single, matroots.inv_root(A.float(), p, method=row.method, rel_damping=0.02))


@pytest.mark.parametrize("dtype", HALF, ids=name)
@pytest.mark.parametrize("condition", [10.0, 1e4])
@pytest.mark.parametrize(("row", "p"), cases(tuple(r for r in ROWS if r.half_products), (2, 4)), ids=name)
def test_a27_half_precision_products_have_true_certificates(row, p, condition, dtype):
    """Rounded operands leave an error of about cond u; what is returned is never NaN, and certified truly."""
    A = torch.stack([spd(32, condition, seed=s, dtype=FP32) for s in range(4)])
    result = matroots.inv_root_ex(A, p, method=row.method, matmul_dtype=dtype, certify=True)
    true = error(result.root, inverse_root(A, p, result.damping.numpy()))
    assert bool((result.status < Status.DIVERGED).all())
    assert bool((result.certificate.relative_error >= true).all())
    assert (result.damping > 0).tolist() == [condition == 1e4] * 4
    if condition == 10.0:
        assert true.max() <= 10 * condition * ROUNDOFF[dtype]
        assert true.max() > 10 * ROUNDOFF[FP32], "the products were not rounded"


@pytest.mark.parametrize(("row", "p"), cases(tuple(r for r in ROWS if r.half_products), (2, 4)), ids=name)
def test_a27_a_wishart_matrix_in_half_precision(row, p):
    G = torch.from_numpy(np.random.default_rng(3).standard_normal((256, 256))).float()
    A = G @ G.mT / 256 + 1e-6 * torch.eye(256)
    A = (A + A.mT) / 2
    result = matroots.inv_root_ex(A, p, method=row.method, matmul_dtype=torch.bfloat16, certify=True)
    true = error(result.root, inverse_root_of(A + result.damping * torch.eye(256, dtype=FP64), p))
    assert result.status < Status.DIVERGED
    assert result.certificate.relative_error >= true
    assert result.status != OK or true <= 0.2


def inverse_root_of(A: torch.Tensor, p: int) -> torch.Tensor:
    """The root by fp64 eigendecomposition, for large matrices."""
    values, Q = torch.linalg.eigh(A.double())
    return (Q * values ** (-1 / p)) @ Q.mT


@pytest.fixture
def precision_flags():
    """Puts torch's global precision flags back after a test that changes them."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def flags() -> tuple[str, str]:
    return torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
@each_row
def test_a28_the_answer_does_not_depend_on_the_callers_flag(row, precision, precision_flags):
    A = spd(64, 100.0, seed=1, dtype=FP32)
    expected = matroots.inv_root_ex(A, 2, method=row.method)
    torch.set_float32_matmul_precision(precision)
    before = flags()
    inside = matroots.inv_root_ex(A, 2, method=row.method)
    assert same(inside, expected)
    assert flags() == before
    assert torch.get_float32_matmul_precision() == precision
    with pytest.raises(RootError):
        matroots.inv_root(-A, 2, method=row.method)
    with pytest.raises(ValueError, match=r"^p: "):
        matroots.inv_root(A, 0.5, method=row.method)
    assert flags() == before


@pytest.mark.parametrize("precision", ["highest", "medium"])
def test_a28_the_flag_is_restored_when_a_solver_raises(monkeypatch, precision, precision_flags):
    torch.set_float32_matmul_precision(precision)
    before = flags()
    seen: list[tuple[str, str]] = []

    def broken(*args: Any, **keywords: Any) -> Any:
        seen.append(flags())
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "bmm", broken)
    for method in ("evd", "cn", "ndb"):
        with pytest.raises(KeyboardInterrupt):
            matroots.inv_root(spd(4, dtype=FP32), 2, method=method)
        assert flags() == before
    assert set(seen) == {("ieee", "ieee")}


def test_a28_the_flag_is_restored_after_solves_in_threads(precision_flags):
    torch.set_float32_matmul_precision("medium")
    before = flags()
    A = torch.stack([spd(16, 50.0, seed=s, dtype=FP32) for s in range(4)])
    expected = matroots.inv_root(A, 4, method="cn")
    roots: list[torch.Tensor] = []

    def solve() -> None:
        for _ in range(5):
            roots.append(matroots.inv_root(A, 4, method="cn"))

    threads = [threading.Thread(target=solve) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(roots) == 20
    assert all(torch.equal(root, expected) for root in roots)
    assert flags() == before


# ------------------------------------------------------------------------------------------------ A29-A33: what torch adds


@each_row
def test_a29_hermitian_input(row):
    A = torch.tensor([[1, 0, 0], [0, 1, -1j], [0, 1j, 2]], dtype=torch.complex128)
    X = matroots.inv_root(A, 2, method=row.method)
    assert X.dtype == A.dtype
    assert torch.equal(X, X.mH)
    assert (X @ X @ A - torch.eye(3)).abs().max() < 1e-13
    assert X[1, 2].imag > 0.1
    certificate = matroots.certify(A, X, 2)
    assert certificate.valid
    assert certificate.relative_error < 1e-12
    assert not matroots.certify(A, X.real, 2).relative_error < 0.1


@each_row
@pytest.mark.parametrize("call", ["inv_root", "inv_root_ex", "root", "root_pair"])
def test_a30_gradient_at_repeated_eigenvalues(row, call):
    """Of the trace of ``A^{-1/2}`` at I, ``-I/2``; of that of ``A^{1/2}``, ``I/2``."""
    A = torch.eye(3, dtype=FP64, requires_grad=True)
    out = getattr(matroots, call)(A, 2, method=row.method)
    X = out if isinstance(out, torch.Tensor) else out[call == "root_pair"]
    X.trace().backward()
    assert A.grad is not None
    sign = 1 if call == "root" else -1
    assert (A.grad - sign * torch.eye(3, dtype=FP64) / 2).abs().max() < 1e-14
    with torch.no_grad():
        quiet = getattr(matroots, call)(A, 2, method=row.method)
    for tensor in quiet if call in ("root_pair", "inv_root_ex") else [quiet]:
        assert tensor is None or not tensor.requires_grad
    detached = getattr(matroots, call)(A.detach(), 2, method=row.method)
    first = detached[0] if isinstance(detached, tuple) else detached
    assert not first.requires_grad


@each_row
def test_a31_meta_tensors(row):
    A = torch.empty(2, 3, 3, device="meta")
    for X in (matroots.inv_root(A, 2, method=row.method), *matroots.root_pair(A, 2, method=row.method)):
        assert (X.shape, X.dtype, X.device.type) == ((2, 3, 3), A.dtype, "meta")
    with pytest.raises(NotImplementedError, match=r"^A: the length of the history depends on values"):
        matroots.inv_root_ex(A, 2, method=row.method)
    with pytest.raises(ValueError, match=r"^A: .*meta"):
        matroots.certify(A, A, 2)


@each_row
def test_a31_vmap(row):
    A = torch.stack([spd(5, seed=s) for s in range(3)])
    X = torch.func.vmap(lambda M: matroots.inv_root(M, 2, method=row.method))(A)
    assert error(X, inverse_root(A, 2)).max() <= 1e-13
    with pytest.raises(NotImplementedError, match=r"^A: .*vmap"):
        torch.func.vmap(matroots.lambda_bound)(A)


@pytest.mark.filterwarnings("ignore:::torch")  # the compiler's, about its own business
@pytest.mark.parametrize("fullgraph", [False, True])
@each_row
def test_a31_compiled(row, fullgraph):
    A = torch.stack([spd(5, seed=s) for s in range(3)])
    torch.compiler.reset()
    compiled = torch.compile(
        lambda M: matroots.inv_root(M, 2, method=row.method) * 2, backend="eager", fullgraph=fullgraph
    )
    assert error(compiled(A) / 2, inverse_root(A, 2)).max() <= 1e-13


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=name)
def test_a32_the_fallback_keeps_dtype_and_device(monkeypatch, dtype):
    A = torch.stack([spd(6, seed=s, dtype=dtype) for s in range(2)])
    eigh = torch.linalg.eigh

    def only_double(M: torch.Tensor) -> Any:
        if M.dtype != FP64:
            raise torch.linalg.LinAlgError("failed")
        return eigh(M)

    monkeypatch.setattr(torch.linalg, "eigh", only_double)
    result = matroots.inv_root_ex(A, 2, method="evd")
    assert result.root.dtype == dtype
    assert result.root.device == A.device
    assert result.residual.dtype == result.scale.dtype == result.damping.dtype == FP64
    assert result.status.dtype == torch.int32
    assert error(result.root, inverse_root(A, 2)).max() <= tolerance(dtype, 11.0, 6)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="requires two cuda devices")
@each_row
def test_a32_on_a_device_that_is_not_current(row):
    A = spd(6).to("cuda:1")
    with torch.cuda.device(0):
        assert matroots.inv_root(A, 2, method=row.method).device == A.device


@pytest.mark.parametrize("shape", [(33000, 33000), (2, 32767, 32767)], ids=str)
@pytest.mark.parametrize("method", ["evd", "auto", EVD(spectrum="pinv")], ids=str)
def test_a33_too_large_for_lapack_is_said_at_once(shape, method):
    A = torch.ones(()).expand(shape)  # no memory: a tensor of this size would be 4 GB
    for call in (matroots.inv_root_ex, matroots.inv_root, matroots.root):
        with pytest.raises(ValueError, match=r"^A: .*32766.*got n = 3"):
            call(A, 2, method=method)


# ------------------------------------------------------------------------------------------------ A34-A38: rank, diagnostics


def test_a34_a_singular_matrix_with_a_root():
    """Ones in the four corners: eigenvalue 2 on (1, 0, 0, 1)/sqrt(2), whose inverse square root is 1/sqrt(2)."""
    A = torch.zeros(4, 4, dtype=FP64)
    A[0, 0] = A[0, 3] = A[3, 0] = A[3, 3] = 1.0
    X = matroots.inv_root(A, 2, method=EVD(spectrum="pinv"))
    assert error(X, A * 0.35355339059327373) <= 1e-14
    assert error(matroots.root(A, 2, method="evd"), A / math.sqrt(2)) <= 1e-7  # (n u)^(1/2)


@each_case
def test_a34_a_singular_matrix_is_never_silently_inverted(row, p):
    A = torch.zeros(4, 4, dtype=FP64)
    A[0, 0] = A[0, 3] = A[3, 0] = A[3, 3] = 1.0
    assert matroots.inv_root_ex(A, p, method=row.method).status.item() in (Status.SINGULAR, Status.INDEFINITE)


@pytest.mark.parametrize("rank", [1, 3, 5])
@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_a34_pseudo_inverse_roots_of_any_rank(rank, p):
    values = torch.cat([torch.linspace(1, 2, rank, dtype=FP64), torch.zeros(6 - rank, dtype=FP64)])
    Q = orthogonal(6, seed=19)
    kept = torch.where(values > 0, values, 1.0) ** (-1 / p) * (values > 0)
    for dtype in DTYPES:
        A = with_spectrum(values, seed=19, dtype=dtype)
        result = matroots.inv_root_ex(A, p, method=EVD(spectrum="pinv"))
        assert result.status == OK
        # the projector on the range moves by about u/gap = u, its root likewise
        assert error(result.root, (Q * kept) @ Q.mT) <= 50 * ROUNDOFF[dtype]


@pytest.mark.parametrize("condition", [3.0, 50.0])
@pytest.mark.parametrize(("row", "p"), cases(ITERATIVE, (2, 3, 4, 8)), ids=name)
def test_a35_the_residual_is_that_of_the_root_returned(row, p, condition):
    """In fp64 at small cond rounding plays no part: the residual reported bounds the one measured, within a factor."""
    A = spd(8, condition, seed=20)
    for keywords in ({"tol": 1e-1}, {"tol": 1e-3}, {"tol": 1e-6}, {"max_steps": 3}, {"max_steps": 5}):
        result = matroots.inv_root_ex(A, p, method=row.method, **keywords)
        measured = gap(A, result.root, p).item()
        assert measured <= result.residual.item() * (1 + 1e-6) + 1e-12
        # the bound is sharp for one large eigenvalue of the residual; it adds the square roots' residuals up
        if result.residual < 0.5:
            assert result.residual.item() <= 20 * measured + 1e-12
        history = result.history[~result.history.isnan()]
        assert len(history) == result.steps
        if p == 2 or row.name == "cn":
            assert history[-1] == result.residual
    for steps in (2, 4, 6):
        result = matroots.inv_root_ex(A, p, method=row.fixed(steps))
        assert gap(A, result.root, p) <= result.residual * (1 + 1e-6) + 1e-12


@pytest.mark.parametrize(
    ("row", "p"), cases(tuple(r for r in ROWS if r.name == "chebyshev"), (1, 2, 3, 4)), ids=name
)
@pytest.mark.parametrize("degree", [2, 5, 10, 40])
def test_a35_the_residual_of_a_series_bounds_the_one_measured(row, p, degree):
    A = torch.stack([spd(12, condition, seed=21) for condition in (2.0, 20.0)])
    for method in (Chebyshev(degree=degree), Chebyshev(degree=degree, floor=1e-2)):
        result = matroots.inv_root_ex(A, p, method=method)
        assert bool((gap(A, result.root, p) <= result.residual * (1 + 1e-6) + 1e-12).all())


@pytest.mark.parametrize(("row", "p"), cases(ITERATIVE, (2, 4)), ids=name)
def test_a35_three_ways_to_stop_are_three_statuses(row, p):
    assert matroots.inv_root_ex(spd(8), p, method=row.method, tol=1e-3).status == Status.CONVERGED
    assert (
        matroots.inv_root_ex(spd(8, 1e4), p, method=row.method, tol=1e-3, max_steps=2).status
        == Status.MAX_STEPS
    )
    stuck = matroots.inv_root_ex(spd(8, 1e5, dtype=FP32), p, method=row.method, tol=1e-12)
    assert stuck.status == Status.STAGNATED
    # it stops where it is as good as it gets
    best = matroots.inv_root_ex(spd(8, 1e5, dtype=FP32), p, method=row.method)
    truth = inverse_root(spd(8, 1e5, dtype=FP32), p)
    assert error(stuck.root, truth) <= 4 * error(best.root, truth) + 1e-5


POWER_CASES = {
    "start may miss the top": with_spectrum([2.0, 1.0], 22),
    "diagonal": torch.diag(torch.tensor([1.0, 2.0], dtype=FP64)),
    "multiple of I": torch.eye(3, dtype=FP64),
    "double top": with_spectrum([2.0, 2.0, 1.0, 0.1], 23),
    "top of both signs": with_spectrum([2.0, -2.0, 1.0], 24),
    "negative": -torch.eye(4, dtype=FP64),
    "negative, rotated": with_spectrum([-1.0, -2.0, -0.1], 25),
    "zero": torch.zeros(4, 4, dtype=FP64),
    "graded": spd(20, 1e8),
}


@pytest.mark.parametrize(
    "scaling", [Power(safety=1.0), Power(1, 1.0), MultiPower(safety=1.0), MultiPower(3, 4, 1.0)], ids=str
)
@pytest.mark.parametrize("A", POWER_CASES.values(), ids=POWER_CASES.keys())
def test_a36_a_rayleigh_quotient_is_never_too_large(A, scaling):
    top = torch.linalg.eigvalsh(A)[-1].clamp_min(0.0)
    for seed in (None, 0, 1, 2):
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        estimate = scaling.estimate(A.unsqueeze(0), generator)
        assert estimate.shape == (1,)
        assert 0 <= estimate.item() <= top.item() * (1 + 1e-13)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("A", POWER_CASES.values(), ids=POWER_CASES.keys())
def test_a36_bounds_are_bounds(A, dtype):
    A = A.to(dtype)
    top = torch.linalg.eigvalsh(A.double()).abs().max().item()
    for order in (1, 2):
        assert Frobenius(order).estimate(A.unsqueeze(0)).item() >= top
    bound = matroots.lambda_bound(A).item()
    assert bound >= top
    u = 4 * A.shape[-1] * ROUNDOFF[dtype]
    row_sum = A.double().abs().sum(-1).max().item()
    assert bound <= min(torch.linalg.matrix_norm(A.double()).item(), row_sum) * (1 + u)


@pytest.mark.parametrize(("row", "scaling"), [(r, s) for r in SCALED for s in SCALINGS], ids=name)
def test_a36_randomness_comes_from_the_generator_alone(row, scaling):
    A = torch.stack([spd(9, 100.0, seed=s) for s in range(3)])
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = matroots.inv_root_ex(A, 2, method=row.method, scaling=scaling)
    torch.manual_seed(2)
    other_state = torch.get_rng_state()
    assert same(first, matroots.inv_root_ex(A, 2, method=row.method, scaling=scaling))
    assert torch.equal(torch.get_rng_state(), other_state)
    assert not torch.equal(state, other_state)
    seeded = [
        matroots.inv_root_ex(
            A, 2, method=row.method, scaling=scaling, generator=torch.Generator().manual_seed(5)
        )
        for _ in range(2)
    ]
    assert same(*seeded)


@each_pair
@square_and_fourth
def test_a36_negative_definite_input_is_indefinite(row, scaling, p):
    for A in (-torch.eye(4, dtype=FP64), -spd(5), with_spectrum([2.0, -2.0, 1.0], 26)):
        result = matroots.inv_root_ex(A, p, method=row.method, scaling=scaling)
        assert result.status == Status.INDEFINITE
        assert bool(result.root.isnan().all())


@each_pair
@square_and_fourth
def test_a37_singular_input(row, scaling, p):
    """An exactly singular matrix has a root, and no inverse root; the row that is zero says so in every method."""
    block = spd(3, seed=27)
    A = torch.zeros(5, 5, dtype=FP64)
    rows = torch.tensor([0, 2, 3])
    A[rows.unsqueeze(1), rows] = block
    for M in (torch.diag(torch.tensor([1.0, 0.0], dtype=FP64)), A):
        result = matroots.inv_root_ex(M, p, method=row.method, scaling=scaling)
        assert result.status == Status.SINGULAR
        assert bool(result.root.isnan().all())
        with pytest.raises(RootError, match="SINGULAR"):
            matroots.inv_root(M, p, method=row.method, scaling=scaling)
        with pytest.raises(RootError, match="SINGULAR"):
            matroots.root_pair(M, p, method=row.method, scaling=scaling)
    S = matroots.root(A, p, method=row.method, scaling=scaling)
    truth = torch.zeros(5, 5, dtype=FP64)
    truth[rows.unsqueeze(1), rows] = power(block, 1 / p)
    assert error(S, truth) <= 1e-13
    assert torch.equal(
        matroots.root(torch.diag(torch.tensor([1.0, 0.0])), 2, method=row.method, scaling=scaling).round(
            decimals=5
        ),
        torch.diag(torch.tensor([1.0, 0.0])),
    )


@each_case
def test_a37_singular_up_to_rounding(row, p):
    """Rank 3 of 5, rotated: what is returned as usable comes with the shift that made it so."""
    A = with_spectrum([1.0, 0.5, 0.2, 0.0, 0.0], seed=28)
    result = matroots.inv_root_ex(A, p, method=row.method)
    smallest = torch.linalg.eigvalsh(A)[0]
    if result.status == OK:
        assert result.damping + smallest > -4 * ROUNDOFF[FP64]  # the rounding of eigvalsh itself
        assert result.damping <= 2 * 5 * ROUNDOFF[FP64] * result.bound
    if row.iterative or row.floored:
        return
    S = matroots.root(A, p, method=row.method)
    # an eigenvalue of size n u becomes (n u)^(1/p)
    assert torch.dist(S, with_spectrum([v ** (1 / p) for v in (1.0, 0.5, 0.2, 0.0, 0.0)], seed=28)) <= 4 * (
        20 * ROUNDOFF[FP64]
    ) ** (1 / p)


@each_pair
def test_a38_rotated_matrices_and_both_orientations(row, scaling):
    """X A X = I needs the right side of every product; L of G is R of its transpose, for tall and wide G."""
    A = with_spectrum(geometric(6, 50.0), seed=29)
    X = matroots.inv_root(A, 2, method=row.method, scaling=scaling)
    assert torch.dist(X @ A @ X, torch.eye(6, dtype=FP64)) <= 1e-12
    rng = np.random.default_rng(30)
    for shape in ((6, 4), (4, 6), (5, 5)):
        G = torch.from_numpy(rng.standard_normal(shape))

        def shampoo(G: torch.Tensor) -> torch.Tensor:
            L = matroots.inv_root(G @ G.mT, 4, method=row.method, scaling=scaling, damping=0.1)
            R = matroots.inv_root(G.mT @ G, 4, method=row.method, scaling=scaling, damping=0.1)
            return L @ G @ R

        U, s, Vh = np.linalg.svd(G.numpy(), full_matrices=False)
        truth = torch.from_numpy(U * (s / np.sqrt(s**2 + 0.1)) @ Vh)
        assert error(shampoo(G), truth) <= 1e-11
        assert error(shampoo(G.mT).mT, truth) <= 1e-11


# ------------------------------------------------------------------------------------------------ what every call keeps to


@pytest.mark.parametrize("certify", [False, True])
@pytest.mark.parametrize("seed", [None, 3])
@each_pair
def test_max_batch_changes_nothing(row, scaling, seed, certify):
    A = torch.stack([spd(6, condition, seed=i) for i, condition in enumerate((2.0, 1e3, 30.0, 1e5, 7.0))])
    A[2, 0, 0] = math.nan

    def solve(max_batch: int | None) -> InvRoot:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return matroots.inv_root_ex(
            A,
            2,
            method=row.method,
            scaling=scaling,
            max_batch=max_batch,
            generator=generator,
            certify=certify,
        )

    whole = solve(None)
    for size in (1, 2, 3, 5, 100):
        part = solve(size)
        # members that share an approximant are summed in one product, whose rounding may depend on how many there are
        rounding = 1e-14 if row.name == "rational" else 0.0
        assert torch.allclose(whole.root, part.root, rtol=rounding, atol=rounding, equal_nan=True)
        root = torch.zeros_like(A)
        assert same(
            whole._replace(root=root, certificate=None), part._replace(root=root, certificate=None)
        ), size
        if certify and rounding == 0.0:
            assert all(
                torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
                for a, b in zip(whole.certificate, part.certificate, strict=True)
            )


@pytest.mark.parametrize("dtype", [FP64, FP32, BF16, FP16], ids=name)
@pytest.mark.parametrize("p", [1, 2, 3, 4, 2.5])
@each_row
def test_roots_are_symmetric_exactly(row, p, dtype):
    if p in row.orders:
        A = torch.stack([spd(9, 60.0, seed=s, dtype=dtype) for s in range(3)])
        for X in (
            matroots.inv_root_ex(A, p, method=row.method, rel_damping=1e-2).root,
            *matroots.root_pair(A, p, method=row.method, rel_damping=1e-2),
        ):
            assert symmetric(X)
            assert bool(torch.isfinite(X).all())


@each_case
def test_the_symmetric_part_is_taken_of_both_triangles(row, p):
    """A and its transpose have the same symmetric part, so the same root, bit by bit: neither triangle is preferred."""
    noise = torch.randn(7, 7, dtype=FP64, generator=torch.Generator().manual_seed(1)) * 1e-16
    A = spd(7, 10.0, seed=5) + noise
    assert not torch.equal(A, A.mT)
    X = matroots.inv_root(A, p, method=row.method)
    assert torch.equal(X, matroots.inv_root(A.mT, p, method=row.method))
    assert torch.equal(X, matroots.inv_root((A + A.mT) / 2, p, method=row.method))


@each_case
def test_antisymmetric_parts(row, p):
    """Rounding is averaged out; more than that is refused by every method alike, never read as one triangle."""
    A = spd(6, seed=31)
    K = torch.from_numpy(np.random.default_rng(32).standard_normal((6, 6)))
    K = (K - K.mT) / torch.linalg.matrix_norm(K - K.mT) * torch.linalg.matrix_norm(A)
    for dtype, small in ((FP64, 1e-16), (FP32, 1e-7)):
        X = matroots.inv_root(A.to(dtype) + small * K.to(dtype), p, method=row.method)
        assert symmetric(X)
        assert error(X, inverse_root(A.to(dtype), p)) <= tolerance(dtype, 10.0, 6)
    for size in (1e-3, 0.1, 1.0):
        result = matroots.inv_root_ex(A + size * K, p, method=row.method)
        assert result.status == Status.INDEFINITE
    triangle = matroots.inv_root_ex(A.triu(), p, method=row.method)
    assert triangle.status == Status.INDEFINITE


@pytest.mark.parametrize("dtype", [FP64, FP32, BF16], ids=name)
@each_pair
def test_the_input_is_not_written_to(row, scaling, dtype):
    A = torch.stack(
        [spd(6, seed=1), torch.zeros(6, 6, dtype=FP64), with_spectrum([1.0, 1.0, 1.0, 0.0, 0.0, 0.0], 3)]
    )
    A = A.to(dtype)
    A[1, 0, 0] = math.nan
    before = A.clone()
    eps = torch.tensor([0.1, 0.2, 0.3], dtype=FP64)
    for damping in (0.0, 0.1, eps):
        matroots.inv_root_ex(A, 2, method=row.method, scaling=scaling, damping=damping, certify=True)
        assert torch.equal(A.nan_to_num(7.0), before.nan_to_num(7.0))
    assert eps.tolist() == [0.1, 0.2, 0.3]
    with warnings.catch_warnings(), contextlib.suppress(RootError):
        warnings.simplefilter("ignore", RootWarning)
        matroots.root(A[::2], 2, method=row.method, scaling=scaling)  # one of them is singular
    assert torch.equal(A.nan_to_num(7.0), before.nan_to_num(7.0))
    one = spd(6, dtype=dtype)
    kept, expanded = one.clone(), one.expand(4, 6, 6)
    result = matroots.inv_root_ex(expanded, 2, method=row.method, scaling=scaling, damping=0.1)
    assert torch.equal(one, kept)
    result.root.zero_()
    assert torch.equal(one, kept), "the result shares memory with the input"


@each_case
def test_the_result_does_not_share_memory_with_the_input(row, p):
    for A in (torch.eye(4, dtype=FP64), spd(1), spd(4)):
        kept = A.clone()
        for X in (matroots.inv_root(A, p, method=row.method), *matroots.root_pair(A, p, method=row.method)):
            X.fill_(5.0)
        assert torch.equal(A, kept)


BAD = [
    ({"p": 0}, ValueError, "p"),
    ({"p": -2}, ValueError, "p"),
    ({"p": 0.5}, ValueError, "p"),
    ({"p": math.nan}, ValueError, "p"),
    ({"p": math.inf}, ValueError, "p"),
    ({"p": "2"}, TypeError, "p"),
    ({"p": None}, TypeError, "p"),
    ({"p": True}, TypeError, "p"),
    ({"p": 2j}, TypeError, "p"),
    ({"A": torch.eye(3)[:2]}, ValueError, "A"),
    ({"A": torch.ones(3)}, ValueError, "A"),
    ({"A": torch.ones(())}, ValueError, "A"),
    ({"A": [[1.0]]}, TypeError, "A"),
    ({"A": np.eye(2)}, TypeError, "A"),
    ({"A": None}, TypeError, "A"),
    ({"A": torch.eye(3).to_sparse()}, TypeError, "A"),
    ({"method": "newton"}, ValueError, "method"),
    ({"method": ""}, ValueError, "method"),
    ({"method": None}, TypeError, "method"),
    ({"method": NewtonDB}, TypeError, "method"),
    ({"method": 3}, TypeError, "method"),
    ({"method": Frobenius()}, TypeError, "method"),
    ({"scaling": "trace"}, ValueError, "scaling"),
    ({"scaling": Frobenius}, TypeError, "scaling"),
    ({"scaling": 2.0}, TypeError, "scaling"),
    ({"scaling": NewtonDB()}, TypeError, "scaling"),
    ({"damping": -1e-3}, ValueError, "damping"),
    ({"damping": math.nan}, ValueError, "damping"),
    ({"damping": math.inf}, ValueError, "damping"),
    ({"damping": "1"}, TypeError, "damping"),
    ({"damping": None}, TypeError, "damping"),
    ({"damping": True}, TypeError, "damping"),
    ({"damping": torch.tensor([1.0, -1.0])}, ValueError, "damping"),
    ({"damping": torch.tensor([1.0, 1.0, 1.0])}, ValueError, "damping"),
    ({"damping": torch.tensor([1.0, math.inf])}, ValueError, "damping"),
    ({"damping": torch.tensor([1, 1])}, TypeError, "damping"),
    ({"damping": torch.ones(2, 2, 1)}, ValueError, "damping"),
    ({"rel_damping": -1e-3}, ValueError, "rel_damping"),
    ({"rel_damping": math.nan}, ValueError, "rel_damping"),
    ({"rel_damping": None}, TypeError, "rel_damping"),
    ({"rel_damping": torch.tensor(1.0)}, TypeError, "rel_damping"),
    ({"tol": 0.0}, ValueError, "tol"),
    ({"tol": -1.0}, ValueError, "tol"),
    ({"tol": math.nan}, ValueError, "tol"),
    ({"tol": "small"}, TypeError, "tol"),
    ({"tol": 1e-3, "method": CoupledNewton(steps=3)}, ValueError, "tol"),
    ({"tol": 1e-3, "method": NewtonDB(steps=3)}, ValueError, "tol"),
    ({"tol": 1e-3, "method": Chebyshev(degree=3)}, ValueError, "tol"),
    ({"max_steps": 0}, ValueError, "max_steps"),
    ({"max_steps": -3}, ValueError, "max_steps"),
    ({"max_steps": 2.5}, TypeError, "max_steps"),
    ({"max_steps": True}, TypeError, "max_steps"),
    ({"max_steps": 5, "method": "evd"}, ValueError, "max_steps"),
    ({"max_steps": 5, "method": "auto"}, ValueError, "max_steps"),
    ({"max_steps": 5, "method": CoupledNewton(steps=3)}, ValueError, "max_steps"),
    ({"max_steps": 5, "method": NewtonDB(steps=3)}, ValueError, "max_steps"),
    ({"max_steps": 5, "method": Chebyshev(degree=3)}, ValueError, "max_steps"),
    ({"matmul_dtype": torch.float32}, ValueError, "matmul_dtype"),
    ({"matmul_dtype": torch.float64}, ValueError, "matmul_dtype"),
    ({"matmul_dtype": "fp8"}, ValueError, "matmul_dtype"),
    ({"matmul_dtype": 16}, ValueError, "matmul_dtype"),
    ({"matmul_dtype": "bf16x2", "method": "evd"}, ValueError, "matmul_dtype"),
    ({"matmul_dtype": torch.bfloat16, "method": "evd"}, ValueError, "matmul_dtype"),
    ({"matmul_dtype": torch.bfloat16, "method": "auto"}, ValueError, "matmul_dtype"),
    ({"max_batch": 0}, ValueError, "max_batch"),
    ({"max_batch": 1.0}, TypeError, "max_batch"),
    ({"generator": 0}, TypeError, "generator"),
    ({"generator": "cpu"}, TypeError, "generator"),
]


@pytest.mark.parametrize(
    ("bad", "kind", "argument"), BAD, ids=lambda v: repr(v)[:40] if isinstance(v, dict) else ""
)
@pytest.mark.parametrize("call", [matroots.inv_root, matroots.inv_root_ex, matroots.root, matroots.root_pair])
def test_bad_arguments_are_named(bad, kind, argument, call):
    keywords = {"A": torch.stack([torch.eye(3)] * 2), "p": 2, "method": "cn", **bad}
    with pytest.raises(kind, match=f"^{argument}: ") as caught:
        call(keywords.pop("A"), keywords.pop("p"), **keywords)
    assert type(caught.value) is kind


OPTIONS = [
    (CoupledNewton, {"steps": 0}, ValueError),
    (CoupledNewton, {"steps": 2.0}, TypeError),
    (NewtonDB, {"steps": -1}, ValueError),
    (NewtonDB, {"steps": "3"}, TypeError),
    (Chebyshev, {"degree": 0}, ValueError),
    (Chebyshev, {"floor": 0.0}, ValueError),
    (Chebyshev, {"floor": 1.0}, ValueError),
    (Chebyshev, {"floor": math.nan}, ValueError),
    (EVD, {"compute_dtype": torch.bfloat16}, ValueError),
    (EVD, {"spectrum": "truncate"}, ValueError),
    (EVD, {"rtol": 1e-3}, ValueError),
    (EVD, {"rtol": -1e-3, "spectrum": "pinv"}, ValueError),
    (Frobenius, {"order": 3}, ValueError),
    (Power, {"steps": 0}, ValueError),
    (Power, {"safety": 0.5}, ValueError),
    (Power, {"safety": math.nan}, ValueError),
    (Power, {"dtype": torch.float64}, ValueError),
    (MultiPower, {"vectors": 0}, ValueError),
    (MultiPower, {"vectors": 33}, ValueError),
    (MultiPower, {"safety": math.inf}, ValueError),
]


@pytest.mark.parametrize(("cls", "options", "kind"), OPTIONS, ids=str)
def test_bad_options_are_named(cls, options, kind):
    with pytest.raises(kind, match=f"^{next(iter(options))}: "):
        cls(**options)


def test_unknown_keywords_are_refused():
    for call in (matroots.inv_root, matroots.inv_root_ex, matroots.root, matroots.root_pair):
        with pytest.raises(TypeError, match="epsilon"):
            call(torch.eye(2), 2, epsilon=1e-3)


def test_root_error_names_the_failed_members():
    A = torch.stack([spd(4, seed=s) for s in range(6)]).reshape(2, 3, 4, 4)
    A[1, 0, 0, 0] = math.nan
    A[0, 2] = -A[0, 2]
    A[1, 2] = 0.0
    for row in ROWS:
        with pytest.raises(RootError) as caught:
            matroots.inv_root(A, 2, method=row.method)
        failure = caught.value
        assert isinstance(failure, torch.linalg.LinAlgError)
        expected = [[0, 0, Status.INDEFINITE], [Status.NONFINITE_INPUT, 0, Status.SINGULAR]]
        assert failure.status.tolist() == expected
        for part in ("[1, 0]", "[0, 2]", "[1, 2]", "NONFINITE_INPUT", "INDEFINITE", "SINGULAR"):
            assert part in str(failure)
        for status in (Status.INDEFINITE, Status.NONFINITE_INPUT, Status.SINGULAR):
            assert status.advice in str(failure)
        copy = pickle.loads(pickle.dumps(failure))
        assert type(copy) is RootError
        assert str(copy) == str(failure)
        assert torch.equal(copy.status, failure.status)


def test_root_error_of_many_members_stays_short():
    A = -torch.eye(3).expand(500, 3, 3)
    with pytest.raises(RootError, match=r"\[7\] and 492 more of batch \(500,\)") as caught:
        matroots.inv_root(A, 2, method="ndb")
    assert len(str(caught.value)) < 500
    assert caught.value.status.shape == (500,)
    with pytest.raises(RootError, match=r"^no usable root for the matrix"):
        matroots.inv_root(A[0], 2, method="ndb")


@pytest.mark.parametrize(("row", "p"), cases(tuple(r for r in ROWS if r.steps_keyword), (2, 4)), ids=name)
def test_a_warning_is_given_once(row, p):
    A = torch.stack([spd(5, 10.0**k) for k in range(4)])
    with pytest.warns(RootWarning, match=r"\[3\].*MAX_STEPS") as caught:
        X = matroots.inv_root(A, p, method=row.method, max_steps=2)
    assert len(caught) == 1
    assert caught[0].filename == __file__, "it should point at the caller"
    assert bool(torch.isfinite(X).all())
    assert "condition number" in str(caught[0].message)
    assert not issubclass(RootWarning, RuntimeWarning)
    result = matroots.inv_root_ex(A, p, method=row.method, max_steps=2)  # quiet: warnings are errors here
    assert result.status[3] == Status.MAX_STEPS


@pytest.mark.parametrize("call", [matroots.root, matroots.root_pair])
def test_a_warning_points_at_the_caller_of_other_roots_too(call):
    with pytest.warns(RootWarning, match="MAX_STEPS") as caught:
        call(spd(5, 1e4), 2, method="cn", max_steps=2)
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_a_stagnated_member_warns():
    with pytest.warns(RootWarning, match="STAGNATED"):
        matroots.inv_root(spd(8, 1e5, dtype=FP32), 2, method="cn", tol=1e-12)


def test_statuses_are_distinct_and_advise():
    assert [status.value for status in Status] == list(range(7))
    assert len({status.advice for status in Status}) == 7
    assert [status.failed for status in Status] == [False] * 3 + [True] * 4
    assert all(len(status.advice) > 20 for status in Status)


def test_the_table_of_a_result():
    A = torch.stack([spd(4, 1.5), spd(4, 1e8), torch.zeros(4, 4, dtype=FP64), -spd(4), spd(4) * math.nan])
    result = matroots.inv_root_ex(A, 2, method="cn", max_steps=6, certify=True)
    text = str(result)
    expected = [
        Status.CONVERGED,
        Status.MAX_STEPS,
        Status.SINGULAR,
        Status.INDEFINITE,
        Status.NONFINITE_INPUT,
    ]
    assert result.status.tolist() == expected
    lines = text.splitlines()
    assert "batch (5,), 4 x 4, float64" in lines[0]
    for i, status in enumerate(expected):
        assert f"[{i}]  {status.name}" in lines[2 + i]
        if status != OK:
            assert any(line.startswith(status.name) and status.advice in line for line in lines)
    assert f" {result.matmuls[0].item()} " in lines[2]
    assert f" {result.steps[0].item()} " in lines[2]
    assert f"{result.certificate.relative_error[0].item():.1e}" in lines[2]
    assert Status.CONVERGED.advice not in text
    assert isinstance(result, tuple)
    assert "tensor(" in repr(result)


def test_the_table_of_a_large_batch_shows_the_failures():
    A = spd(3).expand(200, 3, 3).clone()
    A[150] = -A[150]
    text = str(matroots.inv_root_ex(A, 2, method="evd"))
    assert "[150]  INDEFINITE" in text
    assert "168 more" in text
    assert "the matrix" not in text
    assert len(text.splitlines()) < 40


def test_result_fields_have_the_documented_dtypes():
    A = torch.stack([spd(4, dtype=FP32) for _ in range(3)])
    for row in ROWS:
        result = matroots.inv_root_ex(A, 2, method=row.method)
        assert result._fields == InvRoot._fields
        assert result.status.dtype == torch.int32
        assert result.steps.dtype == result.matmuls.dtype == torch.int64
        for field in ("residual", "history", "scale", "bound", "damping"):
            assert getattr(result, field).dtype == FP64, field
        assert result.history.ndim == 2
        assert result.certificate is None
        assert bool((result.bound >= torch.linalg.eigvalsh(A.double())[:, -1]).all())


@each_case
def test_scale_is_reported_in_the_units_of_the_input(row, p):
    for c in (1e-10, 1.0, 1e10):
        A = c * spd(8, seed=33)
        result = matroots.inv_root_ex(A, p, method=row.method, scaling="multi_power")
        top = torch.linalg.eigvalsh(A)[-1].item()
        assert result.scale.item() == pytest.approx(top, rel=0.15 if row.scaled else 1e-12)
        assert result.bound.item() == pytest.approx(c * matroots.lambda_bound(A / c).item(), rel=1e-14)


# ------------------------------------------------------------------------------------------------ range


@each_case
def test_fp16_overflow_is_flagged(row, p):
    """The root of 1e-7 I (subnormal in fp16) is 3162 for p = 2: it fits; eps = 1e-12 gives 1e6, which does not."""
    A = torch.full((3, 3), 6e-8, dtype=FP16) + torch.diag(torch.full((3,), 1.2e-7, dtype=FP16))
    A = (A + A.mT) / 2
    result = matroots.inv_root_ex(A, p, method=row.method)
    assert result.status == OK
    assert error(result.root, inverse_root(A, p)) <= tolerance(FP16, 4.0, 3)
    tiny = torch.zeros(3, 3, dtype=FP16)
    result = matroots.inv_root_ex(tiny, p, method=row.method, damping=1e-12 ** (p / 2))
    assert result.status == Status.SINGULAR
    assert bool(result.root.isnan().all())


@each_case
def test_large_fp16_input_does_not_overflow_inside(row, p):
    A = (with_spectrum(geometric(8, 4.0), 34) * 60000.0).to(FP16)
    result = matroots.inv_root_ex(A, p, method=row.method)
    assert result.status == OK
    assert error(result.root, inverse_root(A, p)) <= tolerance(FP16, 4.0, 8)


EXTREME = [
    (FP32, 1e-20),
    (FP32, 1e20),
    (FP32, 3e38),
    (FP32, 1e-37),
    (FP64, 1e-300),
    (FP64, 1e300),
    (FP64, 1e-307),
]


@pytest.mark.parametrize(("dtype", "c"), EXTREME, ids=str)
@pytest.mark.parametrize(("row", "scaling"), PAIRS, ids=name)
@square_and_fourth
def test_extreme_scales(row, scaling, p, dtype, c):
    """Norms of such matrices over- or underflow; the entries do not."""
    spectrum = np.linspace(0.2, 1.0, 7)
    A = (with_spectrum(spectrum, 35) * c).to(dtype)
    result = matroots.inv_root_ex(A, p, method=row.method, scaling=scaling)
    truth = c ** (-1 / p) * inverse_root(A.double() / c, p)
    assert result.status == OK
    assert error(result.root, truth) <= tolerance(dtype, 5.0)
    S = matroots.root(A, p, method=row.method, scaling=scaling)
    assert error(S, c ** (1 / p) * power(A.double() / c, 1 / p)) <= tolerance(dtype, 5.0)
    damped = matroots.inv_root_ex(A, p, method=row.method, scaling=scaling, rel_damping=1e-2)
    assert damped.damping.item() == pytest.approx(1e-2 * damped.bound.item(), rel=1e-12)
    assert torch.isfinite(damped.root).all()
    assert (
        error(damped.root, c ** (-1 / p) * inverse_root(A.double() / c, p, damped.damping.item() / c)) <= 1e-5
    )


@each_case
def test_an_inverse_that_overflows_is_flagged(row, p):
    A = spd(4, 2.0, dtype=FP64) * 1e-320
    result = matroots.inv_root_ex(A, 1 if 1 in row.orders else p, method=row.method)
    assert bool(torch.isfinite(result.root).all()) == (result.status < Status.DIVERGED)
    assert result.status == (Status.SINGULAR if 1 in row.orders else OK)


@each_case
def test_rank_deficient_factors_with_damping(row, p):
    """G G^T of a tall G: half of the spectrum is exactly zero, which is the normal case in training."""
    G = torch.from_numpy(np.random.default_rng(36).standard_normal((3, 10, 5)))
    for dtype in DTYPES:
        A = (G @ G.mT).to(dtype)
        A = (A + A.mT) / 2
        result = matroots.inv_root_ex(A, p, method=row.method, rel_damping=1e-2)
        assert bool((result.status == OK).all())
        truth = inverse_root(A, p, result.damping.numpy())
        assert error(result.root, truth).max() <= tolerance(dtype, 101.0)


@each_row
def test_rows_of_zeros_do_not_spoil_the_rest(row):
    """A zero row has no inverse root, but a root; the rest of it is that of the rest of the matrix."""
    block = spd(4, 30.0, seed=37)
    A = torch.zeros(2, 6, 6, dtype=FP64)
    A[0, :4, :4] = block
    A[1, 2:, 2:] = block
    truth = torch.zeros_like(A)
    truth[0, :4, :4] = truth[1, 2:, 2:] = power(block, 1 / 2)
    S = matroots.root(A, 2, method=row.method)
    assert error(S, truth).max() <= 1e-13
    assert bool((S[0, 4:] == 0).all())
    result = matroots.inv_root_ex(A, 2, method=row.method, damping=0.01)
    assert error(result.root, inverse_root(A, 2, 0.01)).max() <= 1e-12


def test_every_solver_is_immutable_and_comparable():
    for row in FIXED:
        solver = row.fixed(3)
        assert solver == row.fixed(3)
        assert hash(solver) == hash(row.fixed(3))
        with pytest.raises(AttributeError):
            solver.steps = 4
        assert pickle.loads(pickle.dumps(solver)) == solver


def test_memory_is_given_back():
    """No result keeps the workspace of its solve alive: its storage is as large as itself."""
    A = torch.stack([spd(16, seed=s) for s in range(4)])
    for row in ROWS:
        for size in (None, 2):
            X = matroots.inv_root(A, 4, method=row.method, max_batch=size)
            assert X.untyped_storage().nbytes() == A.nbytes


def test_rows_are_used():
    assert all(isinstance(row, Row) for row in ROWS)
    assert {row.name for row in SCALED} < {row.name for row in ROWS}
