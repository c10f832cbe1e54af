# SPDX-License-Identifier: Apache-2.0
"""Proven upper bounds on the largest eigenvalue, and how they guard an estimate.

For symmetric A: ``lambda_max <= ||A||_2 <= min(||A||_F, ||A||_inf)``, and for any even power the same applied to
it, ``||A||_2 = ||A^2||_2^{1/2} <= ||A^2||_F^{1/2}``, which is at most ``n^{1/4}`` too large. The trace of a positive
semidefinite A is a bound too, but never below ``||A||_F``. Each is inflated by ``1 + 2 n u`` for the rounding of
its own computation (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from matroots._products import add_to_diagonal, frobenius, has_cholesky_factor, may_hold, wide


def inflation(A: Tensor) -> float:
    """Return ``1 + 2 n u``, u the unit roundoff of A's dtype."""
    return 1.0 + A.shape[-1] * torch.finfo(A.dtype).eps


def norm_bound(A: Tensor, row_sums: Tensor | None = None) -> Tensor:
    """Return ``min(||A||_F, ||A||_inf) (1 + 2 n u)`` of symmetric ``(b, n, n)``, O(n^2); shape ``(b,)``.

    ``row_sums``: those of the absolute values, ``(b, n)``, where they are at hand.
    """
    sums = A.abs().sum(-1) if row_sums is None else row_sums
    return torch.minimum(frobenius(A), sums.amax(-1).to(wide(A.device))) * inflation(A)


def square_bound(A: Tensor) -> Tensor:
    """Return ``||A^2||_F^{1/2} (1 + 2 n u)`` of symmetric ``(b, n, n)``: one product; shape ``(b,)``."""
    return frobenius(torch.bmm(A, A)).sqrt() * inflation(A)


def guarded(A: Tensor, estimate: Tensor, bound: Tensor, headroom: float) -> Tensor:
    """Return a scale s that the solver is safe with, whatever ``estimate`` is worth; shape ``(b,)``.

    A solver with ``headroom`` h converges to the right root while ``lambda_max / s < h``. The proven ``bound``
    gives that for every ``s >= bound / h``, at no cost. A solver without headroom (h = 1: chebyshev, which
    leaves its interval) needs a proof that the estimate itself is a bound: ``s I - A`` has a Cholesky
    factor. Where it has none the bound is used.
    """
    estimate = torch.where(estimate.isfinite(), estimate, bound)
    if headroom > 1.0:
        return torch.maximum(torch.minimum(estimate, bound), bound / headroom)
    if not may_hold(estimate < bound):
        return bound
    gap = add_to_diagonal(-A, estimate)
    proven = has_cholesky_factor(gap)
    return torch.where(proven, torch.minimum(estimate * inflation(A), bound), bound)
