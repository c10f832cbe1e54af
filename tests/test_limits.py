# SPDX-License-Identifier: Apache-2.0
"""At the edges of what the arithmetic allows: nothing may explode, mislead or leave a trace."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from matrices import error, geometric, inverse_root, spd, with_spectrum
from table import BF16, FP16, FP32, FP64, ROWS, name, series_products

import matroots
from matroots import EVD, Chebyshev, Frobenius, MultiPower, Power, Status
from matroots._formats import Format


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
    assert result.matmuls == series_products(int(result.steps))
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


def test_diverged_members_keep_their_history(monkeypatch):
    """Plain half precision without the damping that it needs does diverge."""
    monkeypatch.setattr(Format, "least_eigenvalue", lambda self, p: 0.0)
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


@pytest.mark.parametrize("eps", [0.0, 1e-3, 0.1, 1.0, 1e5])
@pytest.mark.parametrize("dtype", [FP64, FP32], ids=name)
def test_rank_is_judged_before_the_damping_is_added(dtype, eps):
    """A pseudo-inverse of A, whatever is added: a large eps must not blur which eigenvalues are zero."""
    pinv = EVD(spectrum="pinv")
    A = with_spectrum([3.0, 2.0, 1.0, 0.0, 0.0, 0.0], dtype=dtype)
    expected = with_spectrum([(v + eps) ** -0.5 for v in (3.0, 2.0, 1.0)] + [0.0] * 3)
    assert error(matroots.inv_root(A, 2, method=pinv, damping=eps), expected) < 1e-5
    assert not matroots.inv_root(torch.zeros(2, 2, dtype=dtype), 2, method=pinv, damping=eps).any()
    tiny = 1e-8 * torch.diag(torch.tensor([1.0, 2.0, 3.0], dtype=dtype))
    exact = torch.diag((tiny.diagonal().double() + eps) ** -0.5)
    assert error(matroots.inv_root(tiny, 2, method=pinv, damping=eps), exact) < 1e-6
    assert (
        matroots.inv_root_ex(with_spectrum([1.0, -1e-3]), 2, method=pinv, damping=eps).status
        == Status.INDEFINITE
    )


def test_every_treatment_of_the_spectrum_in_closed_form():
    """l - min(l_min, 0) + eps, |l| + eps, max(l, eps): eps is added in fp64, next to any size."""
    values, eps = torch.tensor([4.0, 1.0, -0.5], dtype=FP64), 0.25
    A = with_spectrum(values)
    for spectrum, treated, damping in (
        ("shift", values + 0.5 + eps, 0.75),
        ("abs", values.abs() + eps, float("nan")),
        ("clip", values.clamp_min(eps), float("nan")),
    ):
        result = matroots.inv_root_ex(A, 3, method=EVD(spectrum=spectrum), damping=eps)
        assert error(result.root, with_spectrum(treated ** (-1 / 3))) < 1e-13
        assert result.damping == pytest.approx(damping, nan_ok=True)
        assert (
            error(
                matroots.root(A, 3, method=EVD(spectrum=spectrum), damping=eps),
                with_spectrum(treated ** (1 / 3)),
            )
            < 1e-13
        )
    positive = matroots.inv_root_ex(spd(4), 3, method=EVD(spectrum="clip"), damping=1e-9)
    assert positive.damping == 0
    assert error(positive.root, inverse_root(spd(4), 3)) < 1e-12


def test_a_zero_row_that_is_shifted_is_not_empty():
    A = torch.diag(torch.tensor([0.0, -1.0, 2.0], dtype=FP64))
    S = matroots.root(A, 2, method=EVD(spectrum="shift"))
    torch.testing.assert_close(S, torch.diag(torch.tensor([1.0, 0.0, 3.0**0.5], dtype=FP64)))


@pytest.mark.parametrize("p", [1, 1.2, 2, 4])
@pytest.mark.parametrize("condition", [1e5, 1e6, 1e8])
def test_a_series_undershoots_below_its_floor_and_says_so(condition, p):
    for A in (torch.diag(torch.tensor([1.0, 1 / condition], dtype=FP64)), spd(24, condition)):
        result = matroots.inv_root_ex(A, p, method="chebyshev")
        assert result.status == Status.MAX_STEPS
        assert error(result.root, inverse_root(A, p)) < 1.0


@pytest.mark.parametrize(("p", "sign"), [(1, -1), (2, -1), (8 / 3, -1), (4, 1), (2, 1)])
@pytest.mark.parametrize("floor", [0.5, 0.1, 1e-2, 4.0**-5])
def test_a_series_is_no_longer_than_its_geometric_decay(floor, p, sign):
    """The coefficients fall like ((1 + sqrt f)/(1 - sqrt f))^-k: noise of the transform must not add to the degree."""
    from matroots.solvers.chebyshev import relative_error, smallest_degree, tail

    u = 2.0**-53
    target = u * max(1.0, floor ** (sign / p))
    degree = smallest_degree(p, sign, floor, target, 10000)
    decay = 2 * np.arctanh(np.sqrt(floor))
    assert degree <= (np.log(1 / u) + np.log(1 / decay + 1) + 3) / decay + 3
    assert tail(p, sign, floor, degree) <= target
    # evaluating a series of this length in fp64 costs a few u of its largest value
    assert relative_error(p, sign, floor, degree) <= 50 * u * max(1.0, floor ** (-1 / p))


@pytest.mark.parametrize("condition", [1e2, 1e3, 1e4])
@pytest.mark.parametrize("p", [1, 2, 4])
def test_the_residual_of_a_series_includes_its_rounding(p, condition):
    A = spd(32, condition, dtype=FP32)
    result = matroots.inv_root_ex(A, p, method="chebyshev")
    measured = torch.linalg.matrix_norm(
        torch.eye(32) - A.double() @ torch.linalg.matrix_power(result.root.double(), p)
    )
    assert measured <= result.residual
    held = matroots.inv_root_ex(A, p, method="chebyshev", tol=1e-4)
    assert held.status != Status.CONVERGED or held.residual <= 1e-4


@pytest.mark.parametrize(
    "solver", [Chebyshev(floor=1e-7), Chebyshev(degree=3), Chebyshev(degree=1, floor=1e-3)], ids=repr
)
def test_a_degree_too_low_for_its_floor_is_no_nonsense(solver):
    limit = {} if solver.degree else {"max_steps": 3}
    for A in (torch.eye(1), spd(8, 100.0, dtype=FP32)):
        result = matroots.inv_root_ex(A, 1, method=solver, **limit)
        assert result.status == Status.MAX_STEPS
        assert torch.linalg.eigvalsh(result.root).min() > 0
        assert error(result.root, inverse_root(A, 1)) < 1.0


def test_a_root_that_vanishes_in_half_precision_is_flagged():
    result = matroots.inv_root_ex(torch.eye(3, dtype=FP16), 2, damping=1e20)
    assert result.status == Status.SINGULAR
    assert matroots.inv_root_ex(torch.eye(3, dtype=BF16), 2, damping=1e20).status == Status.CONVERGED
    assert not matroots.root(torch.zeros(3, 3, dtype=FP16), 2).any()
    lopsided = torch.diag(torch.tensor([1.0, 2.0, 1e-3], dtype=FP16))
    with pytest.raises(matroots.RootError, match="SINGULAR"):
        matroots.inv_root(lopsided, 1, damping=1e20, method="cn", max_steps=1)


IN_FLOAT32 = [row for row in ROWS if row.name != "auto"]  # "auto" computes in float64 on a CPU


def test_the_bound_does_not_drown_in_the_damping():
    A = 1e-5 * torch.eye(3)
    for row in IN_FLOAT32:
        result = matroots.inv_root_ex(A, 2, method=row.method, damping=1e20, rel_damping=1.0)
        assert result.bound == matroots.lambda_bound(A)
        assert result.status == Status.CONVERGED
        assert error(result.root, torch.eye(3, dtype=FP64) * 1e-10) < 1e-6


def test_a_damping_that_is_lost_beside_a_is_no_damping_for_any_method():
    A = torch.diag(torch.tensor([1e30, 0.0]))
    for row in IN_FLOAT32:
        assert matroots.inv_root_ex(A, 2, method=row.method, damping=1e-20).status == Status.SINGULAR


def test_the_width_of_the_history_does_not_depend_on_chunks():
    A = torch.stack([spd(6, condition) for condition in (1.5, 1e5, 10.0, 1e3)])
    for p in (2, 4, 8):
        whole, chunked = (matroots.inv_root_ex(A, p, method="ndb", max_batch=b) for b in (None, 1))
        assert whole.history.shape == chunked.history.shape == (4, int(whole.steps.max()))


@pytest.mark.parametrize("fraction", [0.3, 0.7, 0.9, 0.97])
@pytest.mark.parametrize("row", [row for row in ROWS if row.floored], ids=name)
def test_damping_that_a_negative_eigenvalue_eats_up_is_no_proof_of_a_floor(row, fraction):
    """A + eps I >= (1 - fraction) eps, and not eps: what is undershot there must not be called converged."""
    eps = 1e-3
    spectrum = geometric(16, 10.0)
    spectrum[-1] = 0.0
    bound = matroots.lambda_bound(with_spectrum(spectrum)).item()
    spectrum[-1] = -fraction * eps * bound
    A = with_spectrum(spectrum)
    result = matroots.inv_root_ex(A, 2, method=row.method, rel_damping=eps)
    wrong = error(result.root, inverse_root(A, 2, result.damping.item()))
    assert result.status in (Status.CONVERGED, Status.MAX_STEPS)
    assert wrong < (1e-11 if result.status == Status.CONVERGED else 1.0)
