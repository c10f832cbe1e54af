# SPDX-License-Identifier: Apache-2.0
"""Test matrices of known spectrum, and roots computed independently of the library."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import mpmath
import numpy as np
import torch
from torch import Tensor

ROUNDOFF = {
    dtype: torch.finfo(dtype).eps / 2
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
}


def orthogonal(n: int, seed: int = 0) -> Tensor:
    """A random orthogonal matrix, fp64."""
    G = np.random.default_rng(seed).standard_normal((n, n))
    Q, R = np.linalg.qr(G)
    return torch.from_numpy(Q * np.sign(np.diag(R)))


def with_spectrum(spectrum: Any, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return ``Q diag(spectrum) Q^T`` for a random orthogonal Q: formed in fp64, exactly symmetric, then rounded."""
    values = torch.as_tensor(spectrum, dtype=torch.float64)
    Q = orthogonal(len(values), seed)
    A = (Q * values) @ Q.mT
    return ((A + A.mT) / 2).to(dtype)


def geometric(n: int, condition: float) -> np.ndarray:
    """n eigenvalues from 1 down to 1/condition, evenly spaced in the logarithm."""
    return np.geomspace(1.0, 1.0 / condition, n)


def spd(n: int, condition: float = 10.0, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """A random SPD matrix of given condition number and norm 1."""
    return with_spectrum(geometric(n, condition), seed, dtype)


def power(A: Tensor, exponent: float, damping: Any = 0.0) -> Tensor:
    """Return ``(A + damping I)^exponent`` of the matrix as it stands (already rounded), to full fp64 accuracy.

    An fp64 eigendecomposition, with its basis made orthogonal and its residual corrected to first order (Daleckii and
    Krein) in numpy's longdouble: what is left is the square of the relative error that fp64 leaves in the smallest
    eigenvalue, ``(n u cond)^2``. Where longdouble is no more than double this is as accurate as fp64 LAPACK.
    """
    flat = A.detach().to(torch.float64).reshape(-1, *A.shape[-2:]).numpy()
    eps = np.broadcast_to(np.asarray(damping, dtype=np.longdouble), (len(flat),))
    roots = [_power(M, exponent, e) for M, e in zip(flat, eps, strict=True)]
    return torch.from_numpy(np.array(roots)).reshape(A.shape)


def _power(A: np.ndarray, exponent: float, damping: np.longdouble) -> np.ndarray:
    if len(A) == 0:
        return A
    s = np.longdouble(exponent)
    Q, S = _nearly_diagonal(A.tobytes(), len(A), damping)
    x = np.diag(S).copy()
    if not (x > 0).all():
        raise ValueError("the reference needs a positive definite matrix")
    r = (x[:, None] - x[None, :]) / x[None, :]
    with np.errstate(invalid="ignore", divide="ignore"):
        quotient = np.where(r == 0, s, np.expm1(s * np.log1p(r)) / r) * (x ** (s - 1))[None, :]
    correction = quotient * (S - np.diag(x))
    return (Q @ (np.diag(x**s) + (correction + correction.T) / 2) @ Q.T).astype(np.float64)


@lru_cache(maxsize=64)
def _nearly_diagonal(entries: bytes, n: int, damping: np.longdouble) -> tuple[np.ndarray, np.ndarray]:
    """Return Q and ``S = Q^T (A + damping I) Q`` in longdouble, from an fp64 eigendecomposition."""
    A = np.frombuffer(entries).reshape(n, n)
    eye = np.eye(n, dtype=np.longdouble)
    Q = np.linalg.eigh((A + A.T) / 2)[1].astype(np.longdouble)
    Q = Q @ (3 * eye - Q.T @ Q) / 2  # orthogonal to the square of fp64's rounding
    wide = A.astype(np.longdouble)
    return Q, Q.T @ ((wide + wide.T) / 2 + damping * eye) @ Q


def inverse_root(A: Tensor, p: float, damping: Any = 0.0) -> Tensor:
    """Return ``(A + damping I)^(-1/p)``; see :func:`power`."""
    return power(A, -1.0 / np.longdouble(float(p)), damping)


def mp_power(A: Tensor, exponent: float, digits: int = 50) -> Tensor:
    """Return ``A^exponent`` by mpmath with that many digits (slow: n <= 8)."""
    with mpmath.workdps(digits):
        eigenvalues, Q = mpmath.eigsy(mpmath.matrix(A.to(torch.float64).tolist()))
        n = A.shape[-1]
        D = mpmath.diag([mpmath.power(eigenvalues[i], exponent) for i in range(n)])
        X = Q * D * Q.T
        return torch.tensor([[float(X[i, j]) for j in range(n)] for i in range(n)], dtype=torch.float64)


def error(X: Tensor, truth: Tensor) -> Tensor:
    """Relative error in the spectral norm of each member, fp64; infinite where X is not finite."""
    size = truth.abs().amax((-2, -1), keepdim=True)  # norms of 1e300 would overflow
    gap = X.to(torch.float64) / size - truth / size
    lost = ~torch.isfinite(gap).all(-1).all(-1)
    gap = gap.masked_fill(lost[..., None, None], 0.0)
    wrong = torch.linalg.matrix_norm(gap, ord=2) / torch.linalg.matrix_norm(truth / size, ord=2)
    return wrong.masked_fill(lost, math.inf)


def tolerance(dtype: torch.dtype, condition: float, n: int = 16) -> float:
    """How wrong a root may be: 10 times what rounding A alone does to its smallest eigenvalue, and a little.

    Half-precision input is computed in fp32; rounding the result entry by entry adds ``sqrt(n) u``.
    """
    if dtype == torch.float64:
        return 10 * condition * ROUNDOFF[dtype] + 1e-13
    wide = 10 * condition * ROUNDOFF[torch.float32] + 5e-6
    return wide if dtype == torch.float32 else wide + math.sqrt(n) * ROUNDOFF[dtype]


def symmetric(X: Tensor) -> bool:
    """Whether X is symmetric, exactly (NaN counts as equal to NaN)."""
    return bool(torch.equal(X.nan_to_num(7.0), X.mT.nan_to_num(7.0)))
