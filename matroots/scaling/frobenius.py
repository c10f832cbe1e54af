# SPDX-License-Identifier: Apache-2.0
"""Frobenius scaling: no estimate at all, a proven bound; up to ``sqrt(n)`` too large."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from matroots._arguments import check_count
from matroots._products import frobenius
from matroots.scaling.bounds import inflation, square_bound


@dataclass(frozen=True)
class Frobenius:
    """Scale by ``||A||_F`` (order 1), or by ``||A^2||_F^{1/2}`` (order 2: one product, at most ``n^{1/4}`` too large).

    A scale that is too large pushes the spectrum towards zero, where Newton's iteration gains only a constant
    factor a step: that is why the DASH paper (arXiv:2602.02016) replaces it by power iteration.
    """

    order: int = 1

    def __post_init__(self) -> None:
        check_count("order", self.order, optional=False)
        if self.order > 2:
            raise ValueError(f"order: expected 1 or 2, got {self.order!r}")

    @property
    def matmuls(self) -> int:
        """Products of ``n x n`` matrices that one estimate costs."""
        return self.order - 1

    def estimate(self, A: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return the scale of each member of symmetric ``(b, n, n)``; float64 ``(b,)``."""
        return square_bound(A) if self.order == 2 else frobenius(A) * inflation(A)
