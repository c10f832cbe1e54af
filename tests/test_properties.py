# SPDX-License-Identifier: Apache-2.0
"""Properties that hold for every matrix: drawn are size, batch shape, spectrum, order, dtype and method."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matrices import ROUNDOFF, error, inverse_root, orthogonal, power, symmetric, tolerance, with_spectrum
from table import DTYPES, FP32, FP64, ITERATIVE, ROWS, SCALED, SCALINGS, Row, name

import matroots
from matroots import Status

bounded = settings(
    derandomize=True,
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow],
    database=None,
)
each_row = pytest.mark.parametrize("row", ROWS, ids=name)
each_scaled_row = pytest.mark.parametrize("row", SCALED, ids=name)
each_iterative_row = pytest.mark.parametrize("row", ITERATIVE, ids=name)
WIDEST = 2.0  # decades in a drawn spectrum: every method converges up to cond 100


@st.composite
def batches(draw: Any, dtypes: Any = DTYPES, decades: float = WIDEST) -> torch.Tensor:
    """A batch (*, n, n) of SPD matrices whose eigenvalues have drawn logarithms."""
    n = draw(st.sampled_from([3, 5, 2, 8, 1, 4, 6, 7, 9]))  # 1 no more often than the others
    batch = draw(st.sampled_from([(2,), (), (1,), (4,), (2, 2), (1, 3)]))
    dtype = draw(st.sampled_from(dtypes))
    logarithms = st.lists(st.floats(-decades, 0.0), min_size=n, max_size=n)
    built = [
        with_spectrum(10.0 ** torch.tensor(draw(logarithms), dtype=FP64), draw(st.integers(0, 10**6)), dtype)
        for _ in range(math.prod(batch))
    ]
    return torch.stack(built).reshape(*batch, n, n)


def keywords_of(draw: Any, row: Row) -> dict[str, Any]:
    """The keywords of a call by this row's method, with a drawn scaling."""
    return (
        {"method": row.method, "scaling": draw(st.sampled_from(SCALINGS))}
        if row.scaled
        else {"method": row.method}
    )


@st.composite
def tasks(draw: Any, row: Row, integer: bool = False) -> tuple[Any, dict[str, Any]]:
    """An order that the row takes, and the keywords of a call."""
    orders = [p for p in row.orders if p <= 8 and (isinstance(p, int) or not integer)]
    return draw(st.sampled_from(orders)), keywords_of(draw, row)


def allowed(A: torch.Tensor) -> float:
    """The error that a drawn matrix (cond at most 10^WIDEST) may leave."""
    return tolerance(A.dtype, 10.0**WIDEST, A.shape[-1])


@each_row
@bounded
@given(batches(), st.data())
def test_the_root_is_right(row, A, data):
    p, keywords = data.draw(tasks(row))
    result = matroots.inv_root_ex(A, p, **keywords)
    assert bool((result.status == Status.CONVERGED).all())
    assert symmetric(result.root)
    assert error(result.root, inverse_root(A, p)).max() <= allowed(A)
    assert bool((torch.linalg.eigvalsh(result.root.double()) > 0).all())


@each_row
@bounded
@given(batches(dtypes=[FP64]), st.data())
def test_x_to_the_p_times_a_is_the_identity(row, A, data):
    p, keywords = data.draw(tasks(row, integer=True))
    X = matroots.inv_root(A, p, **keywords)
    identity = torch.eye(A.shape[-1], dtype=FP64)
    gap = torch.linalg.matrix_power(X, p) @ A - identity
    # an error e of X (cond u) becomes p e, times cond where it does not commute with A
    assert torch.linalg.matrix_norm(gap).max() <= 10 * p * 10.0 ** (2 * WIDEST) * ROUNDOFF[FP64]


@each_row
@bounded
@given(batches(dtypes=[FP64]), st.data())
def test_the_root_to_the_p_is_a(row, A, data):
    p, keywords = data.draw(tasks(row, integer=True))
    S = matroots.root(A, p, **keywords)
    assert error(torch.linalg.matrix_power(S, p), A).max() <= 2 * p * allowed(A)


@each_row
@bounded
@given(batches(), st.data())
def test_root_and_inverse_root_agree(row, A, data):
    p, keywords = data.draw(tasks(row))
    S, X = matroots.root_pair(A, p, **keywords)
    R = matroots.root(A, p, **keywords)
    product = S.double() @ X.double()
    identity = torch.eye(A.shape[-1], dtype=FP64).expand(A.shape)
    # the relative error of each, times the condition number of S
    assert error(product, identity).max() <= 2 * allowed(A) * 10.0 ** (WIDEST / float(p))
    assert error(R, power(A, 1 / float(p))).max() <= 2 * allowed(A)
    assert error(S, R.double()).max() <= 2 * allowed(A)
    assert error(X, matroots.inv_root(A, p, **keywords).double()).max() <= 2 * allowed(A)


@each_row
@bounded
@given(batches(), st.data(), st.floats(-20, 20))
def test_scale_equivariance(row, A, data, decades):
    p, keywords = data.draw(tasks(row))
    scaled = (A.double() * 10.0**decades).to(A.dtype)
    X = matroots.inv_root(A, p, **keywords).double()
    Y = matroots.inv_root(scaled, p, **keywords)
    assert error(Y, X * 10.0 ** (-decades / float(p))).max() <= 2 * allowed(A)


@each_row
@bounded
@given(batches(), st.data(), st.integers(-60, 60))
def test_powers_of_two_scale_exactly(row, A, data, exponent):
    p, keywords = data.draw(tasks(row, integer=True))
    k = exponent // p
    X = matroots.inv_root(A, p, **keywords)
    assert torch.equal(matroots.inv_root(A * 2.0 ** (p * k), p, **keywords) * 2.0**k, X)


@each_row
@bounded
@given(batches(), st.data(), st.integers(0, 10**6))
def test_orthogonal_conjugation(row, A, data, seed):
    """The root of Q A Q^T is Q A^{-1/p} Q^T."""
    p, keywords = data.draw(tasks(row))
    Q = orthogonal(A.shape[-1], seed)
    rotated = Q @ A.double() @ Q.mT
    rotated = ((rotated + rotated.mT) / 2).to(A.dtype)
    X = matroots.inv_root(A, p, **keywords).double()
    assert error(matroots.inv_root(rotated, p, **keywords), Q @ X @ Q.mT).max() <= 2 * allowed(A)


@each_row
@bounded
@given(batches(), st.data(), st.integers(0, 10**6))
def test_permuted_coordinates(row, A, data, seed):
    p, keywords = data.draw(tasks(row))
    order = torch.randperm(A.shape[-1], generator=torch.Generator().manual_seed(seed))
    X = matroots.inv_root(A, p, **keywords)[..., order, :][..., order]
    Y = matroots.inv_root(A[..., order, :][..., order], p, **keywords)
    assert error(Y, X.double()).max() <= 2 * allowed(A)


@each_row
@bounded
@given(batches(), st.data())
def test_a_batch_is_a_loop(row, A, data):
    p, keywords = data.draw(tasks(row))
    whole = matroots.inv_root_ex(A, p, **keywords)
    n = A.shape[-1]
    for i, member in enumerate(A.reshape(-1, n, n)):
        alone = matroots.inv_root_ex(member, p, **keywords)
        assert error(whole.root.reshape(-1, n, n)[i], alone.root.double()) <= allowed(A)
        assert whole.status.flatten()[i] == alone.status
        if row.iterative:
            # a residual that touches the tolerance may be a rounding to either side of it: one step more or less
            assert abs(int(whole.steps.flatten()[i] - alone.steps)) <= 1 + int(p).bit_length()
        assert whole.bound.flatten()[i].item() == pytest.approx(alone.bound.item(), rel=1e-6)


@each_row
@bounded
@given(batches(decades=5.0), st.data(), st.integers(0, 10**6))
def test_permuted_batch(row, A, data, seed):
    p, keywords = data.draw(tasks(row))
    flat = A.reshape(-1, *A.shape[-2:])
    order = torch.randperm(len(flat), generator=torch.Generator().manual_seed(seed))
    whole = matroots.inv_root_ex(flat, p, **keywords)
    shuffled = matroots.inv_root_ex(flat[order], p, **keywords)
    assert torch.equal(shuffled.status, whole.status[order])
    assert torch.equal(shuffled.bound, whole.bound[order])
    usable = shuffled.status < Status.DIVERGED
    wrong = error(shuffled.root[usable], whole.root[order][usable].double())
    assert bool((wrong <= 10 * 1e5 * ROUNDOFF[A.dtype]).all())


@each_row
@bounded
@given(batches(), st.data(), st.floats(1e-3, 10.0), st.booleans())
def test_damping_means_the_same_for_every_method(row, A, data, eps, relative):
    p, keywords = data.draw(tasks(row))
    result = matroots.inv_root_ex(A, p, **{"rel_damping" if relative else "damping": eps}, **keywords)
    total = eps * matroots.lambda_bound(A) if relative else torch.full(A.shape[:-2], eps, dtype=FP64)
    assert torch.allclose(result.damping, total, rtol=1e-12, atol=0)
    truth = inverse_root(A, p, total.flatten().numpy())
    # the damped matrix is rounded once more than A
    assert error(result.root, truth).max() <= 2 * allowed(A)


@pytest.mark.parametrize("row", [row for row in ROWS if 2.5 in row.orders], ids=name)
@bounded
@given(batches(), st.floats(1.0, 12.0))
def test_any_real_order(row, A, p):
    assert error(matroots.inv_root(A, p, method=row.method), inverse_root(A, p)).max() <= allowed(A)


@each_iterative_row
@bounded
@given(
    batches(decades=4.0),
    st.sampled_from([2, 3, 1, 4, 5, 8]),
    st.sampled_from(SCALINGS),
)
def test_residuals_do_not_rise_until_the_precision_limit(row, A, p, scaling):
    """On an eigenvalue m in (0, 1) of M a step gives m (1 + (1 - m)/p)^p, which is larger and still below 1.

    Above 1 (the scale is an estimate) a step brings it below. So the residual falls until rounding takes over: one square
    root of several starts again, which the history of p = 2 does not.
    """
    if row.name == "ndb":
        p = 2
    if p not in row.orders:
        return
    result = matroots.inv_root_ex(A, p, method=row.method, scaling=scaling)
    n = A.shape[-1]
    # M drifts by its rounding, u at each step in each entry, amplified by at most the condition number of X
    limit = 20 * math.sqrt(n) * ROUNDOFF[A.dtype] * 10.0 ** (4.0 / p)
    for history, steps in zip(
        result.history.reshape(-1, result.history.shape[-1]), result.steps.flatten(), strict=True
    ):
        values = history[~history.isnan()]
        assert len(values) == steps
        rises = values[1:] > torch.maximum(values[:-1], torch.tensor(limit, dtype=FP64)) * (1 + 1e-6)
        assert not bool(rises.any()), values


@each_scaled_row
@bounded
@given(batches(dtypes=[FP32]), st.data(), st.integers(0, 2**31))
def test_any_start_vectors_give_the_root(row, A, data, seed):
    p, keywords = data.draw(tasks(row))
    generator = torch.Generator().manual_seed(seed)
    X = matroots.inv_root(A, p, generator=generator, **keywords)
    assert error(X, inverse_root(A, p)).max() <= allowed(A)


@bounded
@given(batches(), st.floats(-30, 30))
def test_the_bound_is_a_bound(A, decades):
    scaled = (A.double() * 10.0**decades).to(A.dtype)
    top = torch.linalg.eigvalsh(scaled.double())[..., -1]
    bound = matroots.lambda_bound(scaled)
    assert bool((bound >= top * (1 - 1e-14)).all())
    assert bool((bound <= top * math.sqrt(A.shape[-1]) * (1 + 1e-5)).all())


@each_row
@bounded
@given(batches(), st.data())
def test_certificates_hold(row, A, data):
    p, keywords = data.draw(tasks(row))
    if isinstance(p, float) and p not in (1.5, 2.5):  # not a rational of small numerator
        p = 2.5
    result = matroots.inv_root_ex(A, p, certify=True, **keywords)
    assert bool(
        (result.certificate.relative_error >= error(result.root, inverse_root(A, p)) * (1 - 1e-6)).all()
    )
    assert bool(result.certificate.valid.all())
