# SPDX-License-Identifier: Apache-2.0
"""Batched Cholesky factors and their inverses by recursion, so that nearly all of the work is products of batches.

LAPACK factors one small matrix after the other and leaves most of a CPU, or of an accelerator, idle. Here a matrix is halved
until LAPACK is at its best, and everything above is `bmm`. With ``A = [[A11, .], [A21, A22]]`` and ``R = L^{-1}``,
``A = L L^T``: ``L21 = A21 R11^T``, ``R22`` is that of ``A22 - L21 L21^T``, ``R21 = -R22 L21 R11``. (The same recursion for
``A^{-1}`` itself, without the factor, loses twice the digits: its Schur complement meets ``A11^{-1}`` squared.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from matroots._products import frobenius

_LEAF = 16  # rows that are LAPACK's share: measured on CPU, 8 to 32 are within a tenth of each other,
_LARGE_LEAF, _LARGE = 32, 256  # and 32 is the best where the matrices are large and so few
_PANELS = 4  # a triangle of blocks in place of the square costs (1 + 1/4)/2
_WORTH_PANELS = 128  # rows of a block from which the fewer operations outweigh the more calls


def inverse_factor(A: Tensor, leaf: int | None = None) -> tuple[Tensor, Tensor]:
    """Return ``R = L^{-1}``, lower triangular, of ``A = L L^T`` for ``(b, n, n)``, and where A has a factor, ``(b,)`` bool.

    ``R A R^T = I`` and ``R^T R = A^{-1}``; a member without a factor holds anything. About ``2/3 n^3`` operations.
    """
    n = A.shape[-1]
    R = A.new_zeros(A.shape)
    definite = _fill(R, A, ((_LEAF if n < _LARGE else _LARGE_LEAF) if leaf is None else leaf))
    return R, definite


def _fill(R: Tensor, A: Tensor, leaf: int) -> Tensor:
    """Write the inverse factor of A into R, which holds zeros, and return where there is one."""
    n = A.shape[-1]
    if n <= leaf:
        inverse, definite = _lapack(A)
        R.copy_(inverse)
        return definite
    h = _halved(n, leaf)
    R11, R22 = R[:, :h, :h], R[:, h:, h:]
    definite = _fill(R11, A[:, :h, :h], leaf)
    L21 = times_transposed_lower(A[:, h:, :h], R11)
    rest = _fill(R22, _minus_gram(A[:, h:, h:], L21), leaf)
    R[:, h:, :h] = lower_times(R22, times_lower(L21, R11)).neg_()
    return definite & rest


def _halved(n: int, leaf: int) -> int:
    """Return about half of n > leaf, a multiple of the leaf: so every leaf lies within one panel."""
    return max(1, n // (2 * leaf)) * leaf


def _lapack(A: Tensor) -> tuple[Tensor, Tensor]:
    """The recursion's end. The upper factor of a row-major matrix, and a solve from the right, are LAPACK's fastest."""
    U, info = torch.linalg.cholesky_ex(A, upper=True)
    identity = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device).expand_as(A)
    inverse = torch.linalg.solve_triangular(U, identity, upper=True, left=False)
    return inverse.mT, info == 0


def _cuts(n: int, least: int = 1) -> list[tuple[int, int]]:
    """Return where n rows are cut into panels: ``least`` where more would not pay."""
    if n >= _WORTH_PANELS:
        edges = [n * k // (_PANELS * _LARGE_LEAF) * _LARGE_LEAF for k in range(_PANELS)]
    else:
        edges = [n * k // least for k in range(min(n, least))]
    return list(zip(edges, [*edges[1:], n], strict=True))


def times_transposed_lower(B: Tensor, R: Tensor) -> Tensor:
    """Return ``B R^T`` for lower triangular R."""
    cuts = _cuts(R.shape[-1])
    if len(cuts) == 1:
        return torch.bmm(B, R.mT)
    return torch.cat([torch.bmm(B[..., :hi], R[:, lo:hi, :hi].mT) for lo, hi in cuts], -1)


def times_lower(B: Tensor, R: Tensor) -> Tensor:
    """Return ``B R`` for lower triangular R."""
    cuts = _cuts(R.shape[-1])
    if len(cuts) == 1:
        return torch.bmm(B, R)
    return torch.cat([torch.bmm(B[..., lo:], R[:, lo:, lo:hi]) for lo, hi in cuts], -1)


def lower_times(R: Tensor, B: Tensor) -> Tensor:
    """Return ``R B`` for lower triangular R."""
    cuts = _cuts(R.shape[-1])
    if len(cuts) == 1:
        return torch.bmm(R, B)
    return torch.cat([torch.bmm(R[:, lo:hi, :hi], B[:, :hi]) for lo, hi in cuts], -2)


def _minus_gram(A: Tensor, L: Tensor) -> Tensor:
    """Return ``A - L L^T``; above the blocks on its diagonal it holds anything, which no one reads."""
    cuts = _cuts(A.shape[-1])
    if len(cuts) == 1:
        return torch.baddbmm(A, L, L.mT, alpha=-1.0)
    S = torch.empty_like(A, memory_format=torch.contiguous_format)
    for lo, hi in cuts:
        S[:, lo:, lo:hi] = torch.baddbmm(A[:, lo:, lo:hi], L[:, lo:], L[:, lo:hi].mT, alpha=-1.0)
    return S


def add_gram(X: Tensor, R: Tensor) -> Tensor:
    """Add ``sum_k R_k^T R_k`` to X in place, for lower triangular R ``(b, k, n, n)`` and X ``(b, n, n)``.

    Row panel by row panel of the lower triangle, without the rows of R that are zero there; then mirrored.
    """
    for lo, hi in _cuts(X.shape[-1], 2):
        rows = R[:, :, lo:]
        left, right = rows[..., lo:hi].flatten(1, 2), rows[..., :hi].flatten(1, 2)
        X[:, lo:hi, :hi] += torch.bmm(left.mT, right)
        X[:, :lo, lo:hi] = X[:, lo:hi, :lo].mT
    return X


def smallest_eigenvalue_bound(A: Tensor) -> Tensor:
    """Return ``0.8 / ||A^{-1}||_F``, a lower bound on the smallest eigenvalue with room for rounding; 0 without a factor.

    The norm is at most ``sqrt(n)`` times ``1/lambda_min``, in practice a few times. Rounding moves the smallest eigenvalue
    by a u or two times the largest, in the worst of kernel matrices: below ``4 u`` this is an estimate and no bound.
    """
    R, definite = inverse_factor(A)
    norm = frobenius(add_gram(torch.zeros_like(A), R.unsqueeze(1)))
    return torch.where(definite & norm.isfinite(), 0.8 / norm, 0.0)
