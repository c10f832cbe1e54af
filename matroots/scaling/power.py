# SPDX-License-Identifier: Apache-2.0
"""Power iteration with one start vector."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from matroots.scaling.multi_power import check_options, rayleigh, start_vectors


@dataclass(frozen=True)
class Power:
    """Scale by ``safety`` times the Rayleigh quotient of one start vector after ``steps`` products.

    Args:
        steps: power steps, each one product of A with a vector.
        safety: factor (at least 1) on an estimate that is never too large.
        dtype: ``torch.float16`` or ``torch.bfloat16`` rounds the operands of the products to it; None does not.
    """

    steps: int = 20
    safety: float = 1.1
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_options(self.steps, 1, self.safety, self.dtype)

    @property
    def matmuls(self) -> int:
        """Products of ``n x n`` matrices that one estimate costs."""
        return 0

    def estimate(self, A: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return the scale of each member of symmetric ``(b, n, n)``; float64 ``(b,)``."""
        return rayleigh(A, start_vectors(1, A, generator), self.steps, self.dtype) * self.safety
