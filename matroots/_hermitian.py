# SPDX-License-Identifier: Apache-2.0
"""Complex Hermitian matrices as real symmetric ones of twice the size.

``H = S + i K`` with symmetric S and antisymmetric K acts on real and imaginary parts as ``[[S, -K], [K, S]]``: symmetric, with H's eigenvalues, each twice, and
functions of the one are functions of the other. So every method, bound and derivative of the real case holds, at twice the work that complex products would take.
"""

from __future__ import annotations

import torch
from torch import Tensor

COMPLEX_DTYPES = (torch.complex64, torch.complex128)


def real_form(H: Tensor) -> Tensor:
    """Return ``[[Re H, -Im H], [Im H, Re H]]``, ``(*, 2n, 2n)``; symmetric if, and as far as, H is Hermitian."""
    S, K = H.real, H.imag
    return torch.cat([torch.cat([S, -K], -1), torch.cat([K, S], -1)], -2)


def complex_form(R: Tensor) -> Tensor:
    """Return the H of a real form, the mean of its two copies; Hermitian exactly if R is symmetric exactly."""
    n = R.shape[-1] // 2
    top, below = R[..., :n, :], R[..., n:, :]
    return torch.complex((top[..., :n] + below[..., n:]) / 2, (below[..., :n] - top[..., n:]) / 2)
