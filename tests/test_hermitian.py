# SPDX-License-Identifier: Apache-2.0
"""Complex Hermitian matrices, against numpy's own eigendecomposition, for every method."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from table import ROWS
from torch import Tensor

import matroots
from matroots._hermitian import complex_form, real_form


def hermitian(
    n: int, condition: float, seed: int = 0, dtype: torch.dtype = torch.complex128
) -> tuple[Tensor, np.ndarray, np.ndarray]:
    """A random matrix, its eigenvalues and eigenvectors."""
    draw = np.random.default_rng(seed)
    Q, _ = np.linalg.qr(draw.standard_normal((n, n)) + 1j * draw.standard_normal((n, n)))
    values = np.geomspace(1.0, 1.0 / condition, n)
    A = torch.from_numpy((Q * values) @ Q.conj().T)
    return ((A + A.mH) / 2).to(dtype), values, Q


def distance(X: Tensor, exact: np.ndarray) -> float:
    """Relative, in the 2-norm."""
    return float(np.linalg.norm(X.resolve_conj().numpy() - exact, 2) / np.linalg.norm(exact, 2))


@pytest.mark.parametrize(("dtype", "limit"), [(torch.complex128, 1e-12), (torch.complex64, 2e-4)])
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_roots_of_hermitian_matrices(row, dtype, limit):
    A, values, Q = hermitian(7, 100.0, dtype=dtype)
    for p in [p for p in (1, 2, 3, 4, 2.5) if p in row.orders][:3]:
        exact = (Q * values ** (-1 / float(p))) @ Q.conj().T
        result = matroots.inv_root_ex(A, p, method=row.method, certify=True)
        assert result.root.dtype == dtype
        assert torch.equal(result.root, result.root.mH)
        assert distance(result.root, exact) < limit
        assert result.certificate is not None
        assert bool(result.certificate.valid)
        if dtype == torch.complex128:
            assert distance(result.root, exact) <= result.certificate.relative_error + 1e-14
        S, X = matroots.root_pair(A, p, method=row.method)
        assert distance(S, (Q * values ** (1 / float(p))) @ Q.conj().T) < limit
        assert distance(X, exact) < limit


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_the_certificate_is_of_what_is_returned(n):
    """Not of the real root that it is the mean of two copies of."""
    A = torch.stack([hermitian(n, 30.0, seed=s, dtype=torch.complex64)[0] for s in range(60)])
    result = matroots.inv_root_ex(A, 2, method="ndb", certify=True)
    values, Q = np.linalg.eigh(A.numpy().astype(np.complex128))
    exact = (Q * values[:, None, :] ** -0.5) @ Q.conj().swapaxes(1, 2)
    size = np.linalg.norm(exact, 2, axis=(1, 2))
    errors = np.linalg.norm(result.root.numpy() - exact, 2, axis=(1, 2)) / size
    assert result.certificate is not None
    assert (errors <= result.certificate.relative_error.numpy() + 1e-14).all()


def test_batches_damping_and_status():
    A = torch.stack([hermitian(4, 10.0, seed=s)[0] for s in range(3)])
    A[1] = -A[1]
    result = matroots.inv_root_ex(A, 2)
    assert result.status.tolist() == [0, 5, 0]
    assert bool(result.root[1].isnan().all())
    with pytest.raises(matroots.RootError, match=r"members \[1\]"):
        matroots.inv_root(A, 2)
    _, values, Q = hermitian(4, 10.0)
    eps = 0.1 + 1e-2 * matroots.lambda_bound(A[0]).item()
    X = matroots.inv_root(A[0], 2, damping=0.1, rel_damping=1e-2)
    assert distance(X, (Q * (values + eps) ** -0.5) @ Q.conj().T) < 1e-12
    assert values.max() <= matroots.lambda_bound(A[0]).item()


def test_what_is_not_hermitian_is_indefinite():
    A, _, _ = hermitian(4, 10.0)
    for spoilt in (A + 0.1j * torch.eye(4), A.conj().mT + torch.ones(4, 4).triu(1), A.mT * 1j):
        assert matroots.inv_root_ex(spoilt, 2).status == 5
    assert matroots.inv_root_ex(A.mT, 2).status == 0  # its conjugate


def test_conjugate_views_strides_and_real_values():
    A, _, _ = hermitian(5, 10.0)
    X = matroots.inv_root(A, 2)
    assert torch.allclose(matroots.inv_root(A.conj(), 2), X.conj(), rtol=1e-13)
    assert torch.allclose(matroots.inv_root(A.mT.contiguous().mT, 2), X, rtol=1e-13)
    real = (A.real + 5 * torch.eye(5)).to(torch.complex128)
    assert torch.equal(matroots.inv_root(real, 2).imag, torch.zeros(5, 5, dtype=torch.float64))
    assert torch.allclose(matroots.inv_root(real, 2).real, matroots.inv_root(real.real, 2), rtol=1e-12)


def test_both_forms():
    A, _, _ = hermitian(5, 10.0)
    R = real_form(A)
    assert torch.equal(R, R.mT)
    assert torch.equal(complex_form(R), A)
    B = hermitian(5, 10.0, seed=1)[0]
    assert torch.allclose(real_form(A) @ real_form(B), real_form(A @ B))


@pytest.mark.parametrize("shape", [(0, 3, 3), (2, 0, 0), (1, 1)])
def test_small_and_empty(shape):
    A = torch.full(shape, 4.0, dtype=torch.complex64)
    assert torch.equal(matroots.inv_root(A, 2), torch.full(shape, 0.5, dtype=torch.complex64))


def test_a_certificate_of_mixed_dtypes():
    """A real X for a complex A, and the other way round."""
    A, _, _ = hermitian(3, 10.0)
    assert not matroots.certify(A, torch.eye(3, dtype=torch.float64), 2).relative_error < 0.1
    eye = torch.eye(3, dtype=torch.float64)
    for left, right in ((eye, eye + 0j), (eye + 0j, eye), (eye + 0j, (eye + 0j).to(torch.complex64))):
        assert matroots.certify(left, right, 4).relative_error < 1e-12
