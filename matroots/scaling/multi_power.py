# SPDX-License-Identifier: Apache-2.0
"""Multi-power iteration: k start vectors iterated at once, the best Rayleigh quotient taken (DASH, arXiv:2602.02016).

A Rayleigh quotient never exceeds ``lambda_max``, so the estimate is multiplied by ``safety`` and guarded by a proven
bound (:func:`matroots.scaling.bounds.guarded`). One start vector is nearly orthogonal to the top eigenvector now and
then; k random ones all are with a probability that falls exponentially in k.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from matroots._arguments import check_count, check_number
from matroots._products import HALF_DTYPES, wide

MAX_VECTORS = 32
_RENORMALISE_EVERY = 4  # entries are at most 1: ||A||^4 <= n^4, which float32 bears


@dataclass(frozen=True)
class MultiPower:
    """Scale by ``safety`` times the best Rayleigh quotient of ``vectors`` starts after ``steps`` products.

    Args:
        steps: power steps, each one product of A with an ``n x vectors`` block.
        vectors: start vectors, 1 to 32.
        safety: factor (at least 1) on an estimate that is never too large.
        dtype: ``torch.float16`` or ``torch.bfloat16`` rounds the operands of the products to it; None does not.
    """

    steps: int = 10
    vectors: int = 16
    safety: float = 1.1
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_options(self.steps, self.vectors, self.safety, self.dtype)

    @property
    def matmuls(self) -> int:
        """Products of ``n x n`` matrices that one estimate costs."""
        return 0

    def estimate(self, A: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return the scale of each member of symmetric ``(b, n, n)``; float64 ``(b,)``."""
        V = start_vectors(self.vectors, A, generator)
        return rayleigh(A, V, self.steps, self.dtype) * self.safety


def check_options(steps: int, vectors: int, safety: float, dtype: torch.dtype | None) -> None:
    """Raise ``TypeError`` or ``ValueError`` for an option of a power iteration that is of no use."""
    check_count("steps", steps, optional=False)
    check_count("vectors", vectors, optional=False)
    if vectors > MAX_VECTORS:
        raise ValueError(f"vectors: expected an integer in 1..{MAX_VECTORS}, got {vectors!r}")
    if check_number("safety", safety) < 1.0:
        raise ValueError(f"safety: expected a finite number >= 1, got {safety!r}")
    if dtype is not None and dtype not in HALF_DTYPES:
        raise ValueError(f"dtype: expected torch.float16, torch.bfloat16 or None, got {dtype!r}")


def start_vectors(k: int, A: Tensor, generator: torch.Generator | None = None, seed: int = 0) -> Tensor:
    """Return k Gaussian start vectors as rows, ``(k, n)``: the same on every call unless ``generator`` is given.

    All members of all chunks of a batch share them, so that no answer depends on batch-mates.
    """
    if generator is None:
        generator = torch.Generator().manual_seed(seed)
    V = torch.randn(k, A.shape[-1], generator=generator, device=generator.device, dtype=torch.float32)
    return V.to(device=A.device, dtype=A.dtype)


def rayleigh(A: Tensor, V: Tensor, steps: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return the largest Rayleigh quotient of the rows of V after ``steps`` power steps; float64 ``(b,)``.

    ``A``: symmetric ``(b, n, n)`` with ``||A||_inf`` of order 1 (equilibrated). ``V``: ``(k, n)``. The quotient is
    ``v A v / v v``, at most ``lambda_max`` up to rounding, whatever the start; 0 where the vectors vanish.
    """
    low = A if dtype is None else A.to(dtype).to(A.dtype)
    W = power_steps(low, V, steps - 1, dtype)
    quotients = (torch.bmm(W, A) * W).sum(-1)
    return quotients.amax(-1).clamp_min(0.0).to(wide(A.device))


def power_steps(A: Tensor, V: Tensor, steps: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return the rows of V times ``A^steps``, normalised, ``(b, k, n)``; ``dtype`` rounds them before each product."""
    W = V.expand(A.shape[0], *V.shape).contiguous()
    for step in range(steps):
        if dtype is not None:
            W = _normalised(W).to(dtype).to(A.dtype)
        elif step % _RENORMALISE_EVERY == 0:
            W = _normalised(W)
        W = torch.bmm(W, A)
    return _normalised(W)


def _normalised(W: Tensor) -> Tensor:
    """Divide each row by its norm; rows that vanish stay."""
    sizes: Tensor = torch.linalg.vector_norm(W, dim=-1, keepdim=True)
    return W / sizes.clamp_min(torch.finfo(W.dtype).tiny)
