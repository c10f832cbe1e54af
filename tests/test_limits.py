"""At the edges of what the arithmetic allows: nothing may explode, mislead or leave a trace."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from matrices import error, geometric, inverse_root, spd, with_spectrum
from table import BF16, FP16, FP32, FP64, ROWS, name

import matroots
from matroots import EVD, Chebyshev, Frobenius, MultiPower, Power, Status


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=name)
@pytest.mark.parametrize(
    "solver",
    [Chebyshev(), Chebyshev(floor=5e-5), Chebyshev(degree=500, floor=1e-5), Chebyshev(degree=60)],
    ids=repr,
)
@pytest.mark.parametrize("condition", [1e1, 1e4, 1e7])
def test_half_products_never_blow_a_series_up(solver, condition, dtype):
    """Rounding to half moves eigenvalues out of the interval, where a series of high degree explodes."""
    for seed in range(3):
        A = spd(64, condition, seed, FP32)
        result = matroots.inv_root_ex(A, 2, method=solver, matmul_dtype=dtype)
        R = inverse_root(A, 2)
        if result.status < Status.DIVERGED:
            assert error(result.root, R) <= 1.1  # damped at worst, never larger than the root by a factor
            measured = torch.linalg.matrix_norm(
                torch.eye(64) - A.double() @ result.root.double() @ result.root.double()
            )
            # one rounding to half leaves u cond in A X^2; the rest is what is reported
            u = torch.finfo(dtype).eps / 2
            assert measured <= result.residual + 64**0.5 * u * condition
        if result.status == Status.CONVERGED:
            assert error(result.root, R) <= 0.5


@pytest.mark.parametrize(
    ("condition", "solver", "max_steps"),
    [(1e12, Chebyshev(floor=5e-13), 10000), (1e8, Chebyshev(degree=9000), None), (1e8, Chebyshev(), 9000)],
)
def test_a_series_longer_than_its_coefficients_has_not_converged(condition, solver, max_steps):
    A = spd(16, condition)
    result = matroots.inv_root_ex(A, 2, method=solver, max_steps=max_steps)
    assert result.status == Status.MAX_STEPS
    assert error(result.root, inverse_root(A, 2)) > 1e-4


def test_a_given_degree_is_trimmed_to_what_the_precision_can_hold():
    A = spd(16, 5.0, dtype=FP32)
    result = matroots.inv_root_ex(A, 2, method=Chebyshev(degree=500, floor=0.1))
    assert result.status == Status.CONVERGED
    assert result.steps < 60
    assert result.matmuls == result.steps - 1
    assert error(result.root, inverse_root(A, 2)) < 1e-5


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=name)
@pytest.mark.parametrize("n", [64, 128, 512])
@pytest.mark.parametrize("make", [MultiPower, Power])
def test_scaling_in_half_precision_does_not_overflow(make, n, dtype):
    A = 1.98 * torch.ones(n, n) + 0.01 * torch.eye(n)
    result = matroots.inv_root_ex(A, 2, method="ndb", scaling=make(dtype=dtype))
    assert result.status == Status.CONVERGED
    assert abs(result.scale / (1.98 * n + 0.01) / 1.1 - 1) < 0.1


class Lost:
    """A scaling whose estimate is NaN."""

    matmuls = 0

    def estimate(self, A, generator=None):
        return torch.full(A.shape[:1], torch.nan, dtype=FP64)


def test_an_estimate_that_is_nan_is_replaced_by_the_bound():
    A = spd(8)
    for row in ROWS:
        if row.scaled:
            result = matroots.inv_root_ex(A, 2, method=row.method, scaling=Lost())
            assert result.status == Status.CONVERGED
            assert result.scale == pytest.approx(matroots.lambda_bound(A).item(), rel=1e-12)


@pytest.mark.parametrize("fraction", [0.5, 0.9])
def test_damping_is_added_to_eigenvalues_that_are_negative_within_rounding(fraction):
    """A + eps I, and not what A would be without its rounding, is what every method takes the root of."""
    eps = 1e-6
    spectrum = geometric(64, 1e3)
    spectrum[-1] = -fraction * eps
    A = with_spectrum(spectrum, dtype=FP32)
    R = inverse_root(A, 2, eps)
    for method, limit in ((EVD(compute_dtype=FP64), 1e-4), ("cn", 0.1), ("ndb", 0.1)):
        result = matroots.inv_root_ex(A, 2, method=method, damping=eps)
        assert result.status == Status.CONVERGED
        assert result.damping == pytest.approx(eps)
        assert error(result.root, R) < limit


@pytest.mark.parametrize("dtype", [FP64, FP32], ids=name)
@pytest.mark.parametrize("row", ROWS, ids=name)
def test_a_negative_eigenvalue_of_half_the_tolerance_is_shifted(row, dtype):
    u = torch.finfo(dtype).eps / 2
    solved = 0
    for seed in range(10):
        spectrum = geometric(32, 1e2)
        spectrum[-1] = -0.5 * 32 * u
        A = with_spectrum(spectrum, seed, dtype)
        result = matroots.inv_root_ex(A, 2, method=row.method)
        assert result.status != Status.INDEFINITE
        smallest = torch.linalg.eigvalsh(A.double())[0]
        assert result.damping + smallest > 0
        assert result.damping <= 2.3 * 32 * u * result.bound
        solved += int(result.status < Status.DIVERGED)
    assert solved == 10


def test_flags_that_were_inherited_stay_inherited():
    backends = torch.backends
    before = backends.fp32_precision
    backends.cuda.matmul.fp32_precision = "none"  # whatever a test before has left
    try:
        backends.fp32_precision = "tf32"
        matroots.inv_root(torch.eye(3) * 2, 2, method="ndb")
        assert backends.cuda.matmul.fp32_precision == "tf32"
        backends.fp32_precision = "ieee"
        assert backends.cuda.matmul.fp32_precision == "ieee"
    finally:
        backends.fp32_precision = before


def test_a_differentiable_damping_raises_on_backward_too():
    eps = torch.tensor(0.1, requires_grad=True)
    for X in (
        matroots.inv_root(torch.eye(3), 2, damping=eps),
        matroots.root(torch.eye(3), 2, damping=eps),
        *matroots.root_pair(torch.eye(3), 2, damping=eps),
    ):
        with pytest.raises(NotImplementedError, match="not differentiable"):
            X.sum().backward()


def test_diverged_members_keep_their_history():
    A = spd(64, 1e5, dtype=FP32)
    batch = torch.stack([A, torch.full_like(A, torch.nan)])
    result = matroots.inv_root_ex(batch, 2, method="ndb", matmul_dtype=BF16)
    assert result.status.tolist() == [Status.DIVERGED, Status.NONFINITE_INPUT]
    assert result.steps[0] > 5
    assert bool(result.history[0, : result.steps[0]].isfinite().all())
    assert bool(result.root.isnan().all())
    assert bool(result.residual.isnan().all())
    assert bool(result.history[1].isnan().all())
    assert result.steps[1] == 0


def test_what_was_not_solved_has_no_scale_and_no_shift():
    A = torch.stack([torch.diag(torch.tensor([1.0, -0.5])), torch.zeros(2, 2), torch.eye(2)])
    for row in ROWS:
        result = matroots.inv_root_ex(A, 2, method=row.method)
        assert result.status.tolist() == [Status.INDEFINITE, Status.SINGULAR, Status.CONVERGED]
        assert bool((result.damping[:2] == 0).all())
        if row.scaled:
            assert result.scale.isnan().tolist() == [True, True, False]


def test_the_bound_is_lambda_bound_whatever_the_products_are_computed_in():
    A = 809.0 * spd(9)
    for dtype in (None, FP16, BF16):
        result = matroots.inv_root_ex(A, 2, method="ndb", matmul_dtype=dtype, rel_damping=1e-3)
        assert result.bound == matroots.lambda_bound(A)
        assert result.damping == pytest.approx(1e-3 * matroots.lambda_bound(A).item(), rel=1e-14)


@pytest.mark.parametrize("p", [10**400, 1e300, 2.0**30])
def test_an_absurd_order_is_a_value_error(p):
    with pytest.raises(ValueError, match=r"^p: "):
        matroots.inv_root(torch.eye(2), p)


def test_integers_of_numpy_are_integers():
    A = spd(5)
    X = matroots.inv_root(A, np.int64(2), method="ndb")
    assert torch.equal(
        X, matroots.inv_root(A, 2, method="ndb", max_steps=np.int64(60), max_batch=np.int32(1))
    )
    scaled = matroots.inv_root(A, 2, method="ndb", scaling=MultiPower(steps=np.int64(3), vectors=np.int64(4)))
    assert error(scaled, inverse_root(A, 2)) < 1e-13


@pytest.mark.parametrize(
    ("make", "exception", "argument"),
    [
        (lambda: MultiPower(steps=True), TypeError, "steps"),
        (lambda: MultiPower(safety="a"), TypeError, "safety"),
        (lambda: MultiPower(safety=0.9), ValueError, "safety"),
        (lambda: Frobenius(order=True), TypeError, "order"),
        (lambda: Frobenius(order=2.0), TypeError, "order"),
        (lambda: Frobenius(order=3), ValueError, "order"),
        (lambda: Chebyshev(floor="a"), TypeError, "floor"),
        (lambda: Chebyshev(floor=1.0), ValueError, "floor"),
        (lambda: EVD(spectrum="pinv", rtol="a"), TypeError, "rtol"),
        (lambda: EVD(rtol=0.1), ValueError, "rtol"),
    ],
)
def test_options_are_checked_when_a_solver_is_made(make, exception, argument):
    with pytest.raises(exception, match=f"^{argument}: "):
        make()


def test_what_cannot_be_certified_is_refused_before_the_work():
    with pytest.raises(ValueError, match=r"^p: a certificate needs"):
        matroots.inv_root_ex(torch.full((2, 2), torch.nan), 128, method="cn", certify=True)


def test_start_vectors_do_not_depend_on_the_default_dtype():
    A = spd(12, dtype=FP32)
    expected = matroots.inv_root_ex(A, 2, method="ndb").scale
    try:
        torch.set_default_dtype(FP64)
        assert torch.equal(matroots.inv_root_ex(A, 2, method="ndb").scale, expected)
    finally:
        torch.set_default_dtype(FP32)
