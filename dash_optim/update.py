# SPDX-License-Identifier: Apache-2.0
"""The mathematics of a step, as functions on stacked blocks: factors, preconditioned direction, grafting.

Shampoo (Gupta, Koren, Singer, ICML 2018) for blocks ``G`` of shape ``(d_1, ..., d_k)``, with ``G_(i)`` the unfolding along dimension i:
``F_i <- b F_i + (1 - b) G_(i) G_(i)^T`` and ``U = M x_1 F_1^{-1/p} x_2 ... x_k F_k^{-1/p}``; for matrices ``U = L^{-1/p} M R^{-1/p}``.
A first dimension counts the blocks. ``taken`` is 1.0, or a tensor that is 0 where a device has found that the step must be left out: then G is 0 as well,
and nothing changes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dash_optim.grafting import Scalar


def accumulate_factor(F: Tensor, G: Tensor, dim: int, decay: float, taken: Scalar) -> None:
    """Write ``decay F + (1 - decay) G_(i) G_(i)^T`` into F, ``(b, n, n)``, in one pass; for decay 1 ``F + G_(i) G_(i)^T``."""
    unfolded = unfold(G, dim)
    weight = 1.0 if decay == 1 else 1 - decay
    if isinstance(
        taken, Tensor
    ):  # the weights of a product are numbers, so a device's decision costs a pass of its own
        F.mul_((1 - (1 - decay) * taken).to(F.dtype))
        decay = 1.0
    F.baddbmm_(unfolded, unfolded.mT, beta=decay, alpha=weight)


def unfold(G: Tensor, dim: int) -> Tensor:
    """Return the unfolding ``(b, d_i, rest)`` of ``(b, d_1, ..., d_k)``: a view for matrices and vectors."""
    if G.ndim == 2:
        return G.unsqueeze(-1)
    if G.ndim == 3:
        return G if dim == 0 else G.mT
    unfolded: Tensor = G.movedim(dim + 1, 1).flatten(2)
    return unfolded


def mode_product(X: Tensor, M: Tensor, dim: int, out: Tensor | None = None) -> Tensor:
    """Multiply ``(b, d_1, ..., d_k)`` along dimension ``dim`` by symmetric X, ``(b, d_i, d_i)``; for matrices into ``out``, if given."""
    if M.ndim == 2:
        return torch.bmm(X, M.unsqueeze(-1)).squeeze(-1)
    if M.ndim == 3:
        return torch.bmm(X, M, out=out) if dim == 0 else torch.bmm(M, X, out=out)
    moved = M.movedim(dim + 1, 1)
    product: Tensor = torch.bmm(X, moved.flatten(2)).unflatten(2, moved.shape[2:])
    return product.movedim(1, dim + 1)


def norm(U: Tensor) -> Tensor:
    """Return the Frobenius norm of each block, ``(b,)``."""
    length: Tensor = torch.linalg.vector_norm(U, dim=tuple(range(1, U.ndim)))
    return length


def graft_ratio(D_norm: Tensor, U_norm: Tensor) -> Tensor:
    """Return ``||D|| / ||U||``, and 0 where U is zero: then there is no direction, and D is zero with it."""
    return torch.where(U_norm > 0, D_norm / U_norm, 0.0)


def per_block(values: Tensor, like: Tensor) -> Tensor:
    """Return values ``(b,)`` in the dtype of ``like``, ``(b, ...)``, shaped so that they broadcast to it."""
    return values.to(like.dtype).reshape(-1, *(1,) * (like.ndim - 1))


def correction(decay: float, t: Tensor) -> Tensor:
    """Return ``1 - decay^t``, what an average that started at zero after t steps has to be divided by; 1 for plain sums."""
    return 1 - decay**t if decay < 1 else torch.ones_like(t)
