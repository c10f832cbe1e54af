# SPDX-License-Identifier: Apache-2.0
"""Whitening, orthogonalisation and the Frechet distance, against numpy, scipy, closed forms, and scikit-learn where it is installed."""

from __future__ import annotations

from typing import Any

import mpmath
import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import orthogonal, spd
from table import FP32, FP64
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import jacfwd, jacrev, vmap

import matroots


def data(m: int, n: int, seed: int = 0, dtype: torch.dtype = FP64) -> Tensor:
    """Rows with a mean and correlations, and variances from 1 to 1e-2."""
    G = torch.Generator().manual_seed(seed)
    x = torch.randn(m, n, dtype=FP64, generator=G) * torch.logspace(0, -1, n, dtype=FP64)
    return (x @ orthogonal(n, seed) + torch.arange(n)).to(dtype)


# ----------------------------------------------------------------------------------------------------------------- whiten


@pytest.mark.parametrize("kind", ["zca", "pca"])
@pytest.mark.parametrize("correction", [0, 1])
def test_the_covariance_is_the_identity(kind, correction):
    y = matroots.whiten(data(200, 5), kind, correction=correction)
    assert y.mean(0).abs().max() < 1e-13
    assert (torch.cov(y.mT, correction=correction) - torch.eye(5)).abs().max() < 1e-12


def test_zca_is_what_scipy_makes_of_it():
    x = data(60, 4).numpy()
    W = np.linalg.inv(scipy.linalg.sqrtm(np.cov(x.T)))
    found = matroots.whiten_ex(torch.from_numpy(x), certify=True)
    assert np.abs(found.matrix.numpy() - W).max() < 1e-11
    assert np.abs(found.output.numpy() - (x - x.mean(0)) @ W).max() < 1e-11
    assert found.mean.shape == (1, 4)
    assert found.root.certificate is not None
    assert found.root.certificate.relative_error < 1e-11


def test_pca_is_what_the_singular_values_make_of_it():
    x = data(60, 4).numpy()
    centred = x - x.mean(0)
    left, _, right = np.linalg.svd(centred, full_matrices=False)
    signs = np.sign(right[np.arange(4), np.abs(right).argmax(1)])
    found = matroots.whiten(torch.from_numpy(x), "pca").numpy()
    assert np.abs(found - left * signs * np.sqrt(59)).max() < 1e-11


def test_pca_is_what_scikit_learn_makes_of_it():
    decomposition = pytest.importorskip("sklearn.decomposition", reason="scikit-learn is not installed")
    x = data(60, 4).numpy()
    theirs = decomposition.PCA(whiten=True, svd_solver="full").fit_transform(x)
    ours = matroots.whiten(torch.from_numpy(x), "pca").numpy()
    assert np.abs(np.abs(ours) - np.abs(theirs)).max() < 1e-10  # signs are a convention


def test_data_that_were_not_there():
    train, test = data(300, 4), data(10, 4, seed=1)
    found = matroots.whiten_ex(train)
    assert torch.equal((train - found.mean) @ found.matrix, found.output)
    assert ((test - found.mean) @ found.matrix).shape == (10, 4)


@pytest.mark.parametrize("kind", ["zca", "pca"])
def test_gradients_of_whitening(kind):
    x = data(8, 3).requires_grad_()
    for function in (
        lambda x: matroots.whiten(x, kind),
        lambda x: matroots.whiten(x, kind, rel_damping=1e-2),
    ):
        assert gradcheck(function, x, check_forward_ad=True)
        assert gradgradcheck(function, x)


def test_equal_variances_leave_finite_gradients():
    """What does not depend on the choice of eigenvectors has the gradient that it has by "zca"; torch's own eigenvectors give NaN."""
    x = torch.tensor([[1.0, 0, 0], [-1, 0, 0], [0, 1, 0], [0, -1, 0], [0, 0, 1], [0, 0, -1]], dtype=FP64)
    gradients = []
    for kind in ("zca", "pca"):
        leaf = x.clone().requires_grad_()
        y = matroots.whiten(leaf, kind)
        weights = torch.randn(6, 6, dtype=FP64, generator=torch.Generator().manual_seed(0))
        ((y @ y.mT) * weights).sum().backward()
        assert leaf.grad is not None
        gradients.append(leaf.grad)
    assert gradients[0].norm() > 1
    assert torch.allclose(*gradients, rtol=1e-10, atol=1e-10)


def test_batches_and_transforms_of_whitening():
    x = torch.stack([data(20, 3, seed=s) for s in range(4)]).reshape(2, 2, 20, 3)
    for kind in ("zca", "pca"):
        whole = matroots.whiten(x, kind)
        assert torch.allclose(whole[1, 0], matroots.whiten(x[1, 0], kind), rtol=1e-12, atol=1e-13)
        assert torch.allclose(
            vmap(lambda t, kind=kind: matroots.whiten(t, kind))(x[0]), whole[0], rtol=1e-12, atol=1e-13
        )
        backward, forward = (
            j(lambda t, kind=kind: matroots.whiten(t, kind))(x[0, 0, :6]) for j in (jacrev, jacfwd)
        )
        assert torch.allclose(backward, forward, rtol=1e-9, atol=1e-10)


def test_a_bad_batch_of_data_is_reported_not_raised():
    x = torch.stack([data(20, 3), torch.full((20, 3), torch.nan, dtype=FP64)])
    for kind in ("zca", "pca"):
        found = matroots.whiten_ex(x, kind, certify=True)
        assert found.root.status.tolist() == [0, 4]
        assert bool(found.output[0].isfinite().all())
        assert bool(found.output[1].isnan().all())
        with pytest.raises(matroots.RootError, match=r"members \[1\]"):
            matroots.whiten(x, kind)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, FP32])
def test_dtypes_of_whitening(dtype):
    x = data(300, 3, dtype=dtype)
    y = matroots.whiten(x)
    assert y.dtype == dtype
    exact = matroots.whiten(x.double())
    assert (y.double() - exact).abs().max() < 16 * torch.finfo(dtype).eps
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(matroots.whiten(x), y)


@pytest.mark.parametrize(
    ("x", "keywords", "error", "said"),
    [
        ([[1.0]], {}, TypeError, "^x: expected a torch.Tensor, got list"),
        (torch.ones(5, 2, dtype=torch.int64), {}, TypeError, "^x: expected float16.*got int64"),
        (torch.ones(5), {}, ValueError, r"^x: expected \(\*, m, n\)"),
        (torch.ones(5, 0), {}, ValueError, r"^x: expected \(\*, m, n\) with m, n >= 1"),
        (
            torch.rand(3, 3),
            {},
            ValueError,
            "^x: 3 observations of 3 features have a singular covariance.*rel_damping",
        ),
        (torch.rand(9, 3), {"kind": "chol"}, ValueError, "^kind: expected one of"),
        (torch.rand(9, 3), {"correction": True}, ValueError, "^correction: expected an integer"),
        (torch.rand(9, 3), {"correction": 9}, ValueError, "^correction: expected an integer from 0 to 8"),
        (torch.rand(9, 3), {"damp": 1}, TypeError, "damp"),
        (torch.ones(9, 3), {}, matroots.RootError, "SINGULAR"),
    ],
)
def test_what_whiten_refuses(x: Any, keywords: Any, error: Any, said: str):
    with pytest.raises(error, match=said):
        matroots.whiten(x, **keywords)


def test_fewer_observations_than_features_with_a_damping():
    y = matroots.whiten(data(4, 6), rel_damping=1e-3)
    assert bool(y.isfinite().all())


# ---------------------------------------------------------------------------------------------------------- orthogonalize


@pytest.mark.parametrize("shape", [(7, 3), (3, 7), (4, 4), (5, 1), (1, 5), (1, 1)])
@pytest.mark.parametrize("dtype", [FP64, torch.complex128])
def test_the_polar_factor(shape, dtype):
    A = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(3))
    U = matroots.orthogonalize(A)
    assert np.abs(U.numpy() - scipy.linalg.polar(A.numpy())[0]).max() < 1e-12
    small = U.mH @ U if shape[0] >= shape[1] else U @ U.mH
    assert (small - torch.eye(min(shape))).abs().max() < 1e-12


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    m=st.integers(1, 12),
    n=st.integers(1, 12),
    seed=st.integers(0, 99),
    log_condition=st.floats(0, 5),
    single=st.booleans(),
)
def test_the_bound_on_orthogonality_holds(m, n, seed, log_condition, single):
    k = min(m, n)
    left, right = orthogonal(m, seed)[:, :k], orthogonal(n, seed + 1)[:, :k]
    A = (left * torch.logspace(0, -log_condition, k, dtype=FP64)) @ right.mT * float(10.0 ** (seed % 40 - 20))
    A = A.float() if single else A
    found = matroots.orthogonalize_ex(A, certify=True)
    U = found.output.numpy().astype(np.longdouble)
    small = U.T @ U if m >= n else U @ U.T
    departure = np.linalg.norm((small - np.eye(k)).astype(float), 2)
    assert departure <= found.error.item()
    assert found.error.item() <= (1e-3 if log_condition < 4.5 else np.inf)


def test_a_rank_deficient_matrix_is_not_certified():
    A = torch.ones(4, 2)
    found = matroots.orthogonalize_ex(A, certify=True)
    assert not found.error < 0.5
    with pytest.raises(matroots.RootError, match="SINGULAR"):
        matroots.orthogonalize(torch.zeros(4, 2))


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_scale_does_not_matter(scale):
    A = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    U = matroots.orthogonalize(A * scale)
    assert U.dtype == FP32
    assert torch.allclose(U, matroots.orthogonalize(A), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(5, 3), (2, 4), (3, 3)])
def test_gradients_of_orthogonalize(shape):
    for dtype in (FP64, torch.complex128):
        A = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(1)).requires_grad_()
        for keywords in ({}, {"damping": 0.1}, {"rel_damping": 0.1}):
            assert gradcheck(lambda A, k=keywords: matroots.orthogonalize(A, **k), A)
            assert gradgradcheck(lambda A, k=keywords: matroots.orthogonalize(A, **k), A)
    assert not matroots.orthogonalize_ex(A, certify=True).error.requires_grad


def test_the_gradient_at_an_orthogonal_matrix():
    """All singular values agree: ``dU`` is the part of dA that is tangent to the orthogonal matrices, ``(dA - U dA^T U)/2``."""
    U = orthogonal(4, 2).requires_grad_()
    G = torch.randn(4, 4, dtype=FP64, generator=torch.Generator().manual_seed(1))
    (found,) = torch.autograd.grad(matroots.orthogonalize(U), U, G)
    Q = U.detach()
    assert torch.allclose(found, (G - Q @ G.mT @ Q) / 2, rtol=1e-12, atol=1e-13)


def test_batches_of_orthogonalize():
    A = torch.randn(2, 3, 5, 2, dtype=FP64, generator=torch.Generator().manual_seed(0))
    U = matroots.orthogonalize(A, method="ndb")
    assert torch.allclose(U[1, 2], matroots.orthogonalize(A[1, 2]), rtol=1e-11, atol=1e-12)
    assert torch.allclose(vmap(matroots.orthogonalize)(A[0]), U[0], rtol=1e-11, atol=1e-12)
    with pytest.raises(ValueError, match=r"^A: expected \(\*, m, n\)"):
        matroots.orthogonalize(torch.ones(3))


# ------------------------------------------------------------------------------------------------------- frechet_distance


def by_scipy(m: Tensor, C: Tensor, k: Tensor, D: Tensor) -> float:
    shared = scipy.linalg.sqrtm(C.numpy() @ D.numpy())
    return float(((m - k) ** 2).sum() + np.trace(C.numpy()) + np.trace(D.numpy()) - 2 * np.trace(shared).real)


def test_the_distance_is_what_scipy_makes_of_it():
    m, k = torch.zeros(5, dtype=FP64), torch.ones(5, dtype=FP64)
    C, D = spd(5, 100.0), 3 * spd(5, 10.0, seed=1)
    assert matroots.frechet_distance(m, C, k, D).item() == pytest.approx(by_scipy(m, C, k, D), rel=1e-12)
    assert matroots.frechet_distance(m, C, m, C).item() == pytest.approx(0.0, abs=1e-13)


def exact_distance(C: Tensor, D: Tensor) -> mpmath.mpf:
    """In fifty digits."""
    with mpmath.workdps(50):
        values, Q = mpmath.eigsy(mpmath.matrix(C.tolist()))
        S = Q * mpmath.diag([mpmath.sqrt(max(v, 0)) for v in values]) * Q.T
        shared = mpmath.eigsy(S * mpmath.matrix(D.tolist()) * S, eigvals_only=True)
        traces = sum((mpmath.mpf(v) for v in (*C.diagonal().tolist(), *D.diagonal().tolist())), mpmath.mpf(0))
        return traces - 2 * sum(mpmath.sqrt(max(v, 0)) for v in shared)


@pytest.mark.parametrize("seed", range(40))
def test_the_bound_on_the_distance_holds(seed):
    """Covariances of integers are what they are exactly, and may be singular."""
    draw = torch.Generator().manual_seed(seed)
    n = 1 + seed % 4
    x, y = (torch.randint(-3, 4, (1 + k, n), generator=draw).double() for k in (seed // 4 % 3, seed % 3))
    C, D = x.mT @ x, (y.mT @ y) * 2.0 ** ((7 * seed) % 40 - 20)
    mean = torch.zeros(n, dtype=FP64)
    distance, error = matroots.frechet_distance_ex(mean, C, mean, D)
    assert abs(mpmath.mpf(distance.item()) - exact_distance(C, D)) <= mpmath.mpf(error.item())
    assert error.item() <= 1e-5 * (C.trace() + D.trace()) + 1e-300


def test_the_distance_of_what_does_not_overlap():
    """``tr C + tr D`` for covariances in orthogonal directions; nearly so too."""
    for overlap in (0.0, 1e-10, 1e-6, 1e-3):
        Q = orthogonal(6, 4)
        left, right = Q[:, :3], Q[:, 3:] * np.sqrt(1 - overlap**2) + Q[:, :3] * overlap
        mean = torch.zeros(6, dtype=FP64)
        distance, error = matroots.frechet_distance_ex(mean, left @ left.mT, mean, right @ right.mT)
        assert abs(distance.item() - (6 - 2 * 3 * overlap)) <= error.item() + 1e-14
        assert error.item() < 1e-4


def test_the_distance_of_few_samples_in_float32():
    """Singular covariances whose smallest eigenvalues are rounding, of either sign."""
    x, y = torch.randn(2, 10, 20, generator=torch.Generator().manual_seed(0))
    found = matroots.frechet_distance(x.mean(0), torch.cov(x.mT), y.mean(0), torch.cov(y.mT))
    x, y = x.double(), y.double()
    exact = matroots.frechet_distance(x.mean(0), torch.cov(x.mT), y.mean(0), torch.cov(y.mT))
    assert found.item() == pytest.approx(exact.item(), rel=1e-4)


@pytest.mark.parametrize("scale", [1e-300, 1e-165, 1e150, 1e300])
def test_the_distance_at_any_scale(scale):
    eye, mean = torch.eye(3, dtype=FP64) * scale, torch.zeros(3, dtype=FP64)
    distance, error = matroots.frechet_distance_ex(mean, eye, mean, 4 * eye)
    assert abs(distance.item() / scale - 3) <= error.item() / scale < 1e-9


def test_the_bound_is_tight_enough_to_be_of_use():
    mean = torch.zeros(64, dtype=FP64)
    distance, error = matroots.frechet_distance_ex(mean, spd(64, 1e3), mean + 1, spd(64, 1e2, seed=1))
    assert error < 1e-9 * distance


def test_gradients_of_the_distance():
    draw = torch.Generator().manual_seed(0)
    m, k = (torch.randn(3, dtype=FP64, generator=draw).requires_grad_() for _ in range(2))
    C, D = spd(3, 10.0).requires_grad_(), spd(3, 20.0, seed=1).requires_grad_()

    def function(m: Tensor, C: Tensor, k: Tensor, D: Tensor) -> Tensor:
        return matroots.frechet_distance(m, (C + C.mT) / 2, k, (D + D.mT) / 2)

    assert gradcheck(function, (m, C, k, D))
    assert gradgradcheck(function, (m, C, k, D))


def test_the_distance_of_batches_and_what_is_refused():
    m, C = torch.zeros(2, 3), torch.eye(3).repeat(2, 1, 1)
    distance, error = matroots.frechet_distance_ex(m, C, m + 1, 4 * C)
    assert distance.shape == error.shape == (2,)
    assert distance.dtype == FP64
    assert (distance - 6).abs().max() <= error.max()
    assert torch.allclose(vmap(matroots.frechet_distance)(m, C, m + 1, 4 * C), distance, rtol=1e-13)
    with pytest.raises(ValueError, match=r"^other_covariance: expected a real tensor \(\*, 3, 3\)"):
        matroots.frechet_distance(m, C, m, torch.eye(2))
    with pytest.raises(ValueError, match=r"^mean: expected a real tensor \(\*, 3\)"):
        matroots.frechet_distance(torch.zeros(2), C, m, C)
    with pytest.raises(ValueError, match=r"^covariance: expected \(\*, n, n\)"):
        matroots.frechet_distance(m, m, m, C)
    with pytest.raises(matroots.RootError, match=r"^covariance: .*members \[0\], \[1\] of batch.*INDEFINITE"):
        matroots.frechet_distance(m, -C, m, C)
    with pytest.raises(matroots.RootError, match=r"^other_covariance: .*INDEFINITE"):
        matroots.frechet_distance(m, C, m, -C)
    with pytest.raises(matroots.RootError, match=r"^other_covariance: .*INDEFINITE"):
        matroots.frechet_distance(m, C, m, C + torch.ones(3, 3).triu(1))
    with pytest.raises(ValueError, match="expected batch shapes that broadcast"):
        matroots.frechet_distance(m, C, torch.zeros(4, 3), C)
    with pytest.raises(NotImplementedError, match=r"^damping: "):
        vmap(lambda e: matroots.frechet_distance_ex(m, C, m, C, damping=e))(torch.ones(2))
    assert matroots.frechet_distance_ex(m * torch.nan, C, m, C).error.tolist() == [np.inf, np.inf]
    empty = torch.zeros(0)
    assert matroots.frechet_distance_ex(empty, torch.zeros(0, 0), empty, torch.zeros(0, 0)).distance == 0
    with pytest.raises(ValueError, match=r"^damping: "):
        matroots.frechet_distance(m, C, m, C, damping=-1.0)
