# SPDX-License-Identifier: Apache-2.0
"""The root that errors are measured against, more accurate than anything that is measured."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Long = npt.NDArray[np.longdouble]
_CLOSE = 1e-6  # relative gap below which a divided difference loses more digits than the derivative at the midpoint


@dataclass(frozen=True)
class Reference:
    """``(A + eps I)^{-1/p}`` of each member of ``(b, n, n)``, as an unevaluated sum ``head + tail`` of two float64 tensors.

    ``eigenvalues`` are those of ``A + eps I``, float64 ``(b, n)``, ascending; members where they are not all positive
    have a NaN root.
    """

    head: Tensor
    tail: Tensor
    eigenvalues: Tensor

    @property
    def condition(self) -> Tensor:
        """Condition number of each damped matrix; inf where it is not positive definite."""
        return condition(self.eigenvalues)

    def relative_error(self, X: Tensor) -> Tensor:
        """Return ``||X - R||_2 / ||R||_2`` of each member, float64 ``(b,)``; NaN where X or R has one."""
        gap = (X.double() - self.head) - self.tail
        return _norm(gap) / _norm(self.head)


def reference(A: Tensor, eps: Tensor, p: float) -> Reference:
    """Compute ``(A + eps I)^{-1/p}`` of symmetric ``(b, n, n)`` by an fp64 eigendecomposition, refined for fp64 input.

    For fp32 and half input the fp64 decomposition is exact enough, as its error is ``2^-29`` of theirs. For fp64 input it
    is one of the methods under test, so it is followed by one correction in extended precision: with orthonormal Q,
    ``Q^T A Q = D + F`` and a tiny F, ``f(D + F) = f(D) + f[d_i, d_j] F_ij + O(F^2)`` (Daleckii and Krein; Higham, Functions of
    Matrices, theorem 3.11). Where ``long double`` is no wider than ``double`` the correction gains nothing.
    """
    matrices = damped(A, eps)
    usable = torch.isfinite(matrices).flatten(1).all(-1)
    matrices[~usable] = torch.eye(A.shape[-1], dtype=torch.float64)
    eigenvalues, Q = torch.linalg.eigh(matrices)
    eigenvalues[~usable] = torch.nan
    positive = eigenvalues[:, 0] > 0
    head = (Q * eigenvalues.clamp_min(0.0).pow(-1 / p).unsqueeze(-2)) @ Q.mT
    tail = torch.zeros_like(head)
    if A.dtype == torch.float64:
        for i in positive.nonzero().flatten().tolist():
            root = _refined(A[i], float(eps[i]), Q[i], p)
            head[i] = torch.from_numpy(root.astype(np.float64))
            tail[i] = torch.from_numpy((root - head[i].numpy()).astype(np.float64))
    head[~positive] = torch.nan
    return Reference(head, tail, eigenvalues)


def damped(A: Tensor, eps: Tensor) -> Tensor:
    """Return ``A + eps I`` in float64, a new tensor; a NaN in eps (a member that was refused) counts as 0."""
    matrices = A.to(torch.float64, copy=True)
    matrices.diagonal(dim1=-2, dim2=-1).add_(eps.nan_to_num(0.0).unsqueeze(-1))
    return matrices


def condition(eigenvalues: Tensor) -> Tensor:
    """Return the condition number from ascending eigenvalues ``(*, n)``; inf where they are not all positive."""
    smallest, largest = eigenvalues[..., 0], eigenvalues[..., -1]
    return torch.where(smallest > 0, largest / smallest, torch.inf)


def _refined(A: Tensor, eps: float, Q: Tensor, p: float) -> Long:
    """Return ``(A + eps I)^{-1/p}`` from nearly exact eigenvectors Q, in extended precision."""
    long_A: Long = A.numpy().astype(np.longdouble)
    long_A.flat[:: A.shape[-1] + 1] += np.longdouble(eps)
    V: Long = Q.numpy().astype(np.longdouble)
    # one Newton-Schulz step makes V orthonormal to extended precision
    V = V @ (np.eye(len(V), dtype=np.longdouble) * 1.5 - (V.T @ V) / 2)
    product = V.T @ (long_A @ V)
    T: Long = np.asarray((product + product.T) / 2, dtype=np.longdouble)
    core = _divided_differences(np.diag(T), p) * (T - np.diag(np.diag(T)))
    core += np.diag(np.diag(T) ** np.longdouble(-1 / np.longdouble(p)))
    root = V @ core @ V.T
    return np.asarray((root + root.T) / 2, dtype=np.longdouble)


def _divided_differences(d: Long, p: float) -> Long:
    """Return ``(f(d_i) - f(d_j))/(d_i - d_j)`` of ``f(d) = d^{-1/p}``; the derivative at the midpoint where they are close."""
    power = -1 / np.longdouble(p)
    f = d**power
    gap = d[:, None] - d[None, :]
    middle = (d[:, None] + d[None, :]) / 2
    close = np.abs(gap) <= _CLOSE * middle
    quotient = (f[:, None] - f[None, :]) / np.where(close, np.longdouble(1), gap)
    return np.asarray(np.where(close, power * middle ** (power - 1), quotient), dtype=np.longdouble)


def _norm(S: Tensor) -> Tensor:
    """Return the spectral norm of symmetric ``(b, n, n)``; NaN for members that are not finite."""
    finite = torch.isfinite(S).flatten(1).all(-1)
    safe = torch.where(finite.reshape(-1, 1, 1), (S + S.mT) / 2, 0.0)
    return torch.where(finite, torch.linalg.eigvalsh(safe).abs().amax(-1), torch.nan)
