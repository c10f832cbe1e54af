# SPDX-License-Identifier: Apache-2.0
"""What rounding leaves of the relative error of an inverse root: a model for each method, and the condition number it needs.

Rounding moves the smallest eigenvalue by ``c u`` times the largest, c a little above ``sqrt(n)`` where many eigenvalues are as small (the norm of a
random matrix), and with it the norm of ``A^{-1/p}`` by ``c u kappa / p`` to first order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from matroots._products import wide
from matroots.scaling.multi_power import power_steps, start_vectors

NORM_SAFETY = 1.05  # on an estimate of the largest eigenvalue, which is approached from within
ROOT_SAFETY = 1.02  # on that of the inverse root, whose p-th power counts
_VECTORS = 8
_STEPS = 12


def rounding(moved: Tensor, n: int, p: float, u: float) -> Tensor:
    """Return the relative error for smallest eigenvalues that rounding moves by the part ``moved`` of what is found of them.

    As so much less may be there: ``moved / (1 - moved) / p``. And ``(4 + sqrt(n)) u`` for the product.
    """
    return (4.0 + math.sqrt(n)) * u + torch.where(moved < 1.0, moved / (1.0 - moved) / p, torch.inf)


def decomposition_rounding(condition: Tensor, n: int, p: float, u: float) -> Tensor:
    """Return it for an eigendecomposition, ``c = 2 sqrt(n) + 2``: 1.4 times the largest of 300 random draws."""
    return rounding((2.0 * math.sqrt(n) + 2.0) * u * condition, n, p, u)


def sum_rounding(condition: Tensor, n: int, p: float, u: float) -> Tensor:
    """Return it for a sum of inverses, ``c = (sqrt(n) + 1) / 2``: 1.7 times or more what the worst six of 300 random draws needed."""
    return rounding(0.5 * (math.sqrt(n) + 1.0) * u * condition, n, p, u)


def condition_number(A: Tensor, X: Tensor, p: float) -> Tensor:
    """Estimate ``lambda_max(A) lambda_max(X)^p`` of ``X = A^{-1/p}``, a few per cent too large; NaN where X is not finite.

    A, X: ``(b, n, n)`` of moderate size. Float64 ``(b,)``, by a dozen products with a block of vectors, ``O(n^2)``.
    """
    root = p * (largest_eigenvalue(X).log() + math.log(ROOT_SAFETY))
    return NORM_SAFETY * largest_eigenvalue(A) * root.exp()


def condition_safety(p: float) -> float:
    """Return how far :func:`condition_number` puts itself above what it sees."""
    return NORM_SAFETY * math.exp(min(p * math.log(ROOT_SAFETY), 50.0))


def largest_eigenvalue(A: Tensor) -> Tensor:
    """Return the largest Ritz value of positive definite ``(b, n, n)`` after power steps with a few vectors, from below.

    The best of the span of all vectors, not the best of the vectors: what is missing is then that of the eighth gap.
    """
    W = power_steps(A, start_vectors(min(_VECTORS, A.shape[-1]), A), _STEPS)
    usable = W.isfinite().all(-1).all(-1)
    Q = torch.linalg.qr(torch.where(usable.reshape(-1, 1, 1), W, 1.0).mT).Q
    H = torch.bmm(torch.bmm(Q.mT, A), Q).nan_to_num(1.0, 1.0, 1.0)
    largest: Tensor = torch.linalg.eigvalsh(H)[:, -1]
    return largest.to(wide(A.device)).masked_fill(~usable, torch.nan)
