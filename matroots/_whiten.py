# SPDX-License-Identifier: Apache-2.0
"""Whitening: data whose covariance is the identity."""

from __future__ import annotations

from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from matroots._arguments import check_rows
from matroots._call import inv_root, inv_root_ex
from matroots._options import Keywords
from matroots._products import unit_roundoff
from matroots._result import InvRoot

if TYPE_CHECKING:
    from typing_extensions import Unpack

Kind = Literal["zca", "pca"]


class Whitening(NamedTuple):
    """Result of :func:`whiten_ex`.

    Attributes:
        output: ``(x - mean) @ matrix``, like x.
        mean: ``(*, 1, n)``.
        matrix: ``(*, n, n)``: ``C^{-1/2}`` for "zca", ``C^{-1/2} Q`` for "pca", C the covariance, Q its eigenvectors, those of large eigenvalues first.
        root: the :class:`InvRoot` of C, with a certificate if asked for. Q is orthogonal, so that the error certified for ``C^{-1/2}`` is that of either.
    """

    output: Tensor
    mean: Tensor
    matrix: Tensor
    root: InvRoot


def whiten(x: Tensor, kind: Kind = "zca", *, correction: int = 1, **keywords: Unpack[Keywords]) -> Tensor:
    """Return x, its mean removed, in coordinates in which its covariance is the identity; differentiable.

    Args:
        x: ``(*, m, n)``: m observations of n features; more observations than features, unless there is a damping.
        kind: "zca" stays as close to x as possible, ``(x - mean) C^{-1/2}``; "pca" gives uncorrelated coordinates in the order of their variance,
            ``(x - mean) C^{-1/2} Q``, each with its largest weight positive. Where eigenvalues of C agree Q is one of many, and the gradient is that of
            functions which do not depend on which.
        correction: the covariance is ``sum (x - mean) (x - mean)^T / (m - correction)``, as in ``torch.cov``.
        keywords: those of :func:`inv_root`, such as ``rel_damping=1e-6``.

    Returns:
        ``(*, m, n)``, the dtype of x.

    Raises:
        RootError: if a covariance has no usable inverse root.
        TypeError, ValueError: for arguments that do not fit.

    >>> x = torch.randn(100, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) @ torch.diag(torch.tensor([1.0, 5.0, 0.1]).double())
    >>> torch.dist(torch.cov(whiten(x).mT), torch.eye(3)).item() < 1e-12
    True
    """
    centred, _, C = _covariance(x, kind, correction, keywords)
    W = inv_root(C, 2, **keywords)
    with torch.autocast(x.device.type, enabled=False):
        return (centred @ _rotated(W, C, kind)).to(x.dtype)


def whiten_ex(
    x: Tensor, kind: Kind = "zca", *, correction: int = 1, certify: bool = False, **keywords: Unpack[Keywords]
) -> Whitening:
    """Return what :func:`whiten` does, with what is needed to whiten other data; report on each member of a batch and never raise for a bad one.

    >>> train, test = torch.randn(2, 100, 3, generator=torch.Generator().manual_seed(0))
    >>> w = whiten_ex(train, "pca", certify=True)
    >>> bool(w.root.certificate.relative_error < 1e-4)
    True
    >>> ((test - w.mean) @ w.matrix).shape
    torch.Size([100, 3])
    """
    centred, mean, C = _covariance(x, kind, correction, keywords)
    result = inv_root_ex(C, 2, certify=certify, **keywords)
    with torch.autocast(x.device.type, enabled=False):
        W = _rotated(result.root, C, kind)
        return Whitening((centred @ W).to(x.dtype), mean.to(x.dtype), W.to(x.dtype), result)


def _covariance(x: Tensor, kind: Kind, correction: int, keywords: Keywords) -> tuple[Tensor, Tensor, Tensor]:
    """Return x without its mean, the mean and the covariance, at least in float32."""
    check_rows(x, "x")
    if kind not in get_args(Kind):
        raise ValueError(f"kind: expected one of {get_args(Kind)}, got {kind!r}")
    m, n = x.shape[-2:]
    if isinstance(correction, bool) or not isinstance(correction, Integral) or not 0 <= correction < m:
        raise ValueError(
            f"correction: expected an integer from 0 to {m - 1}, one less than observations, got {correction!r}"
        )
    if m <= n and not any(
        isinstance(eps := keywords.get(name, 0.0), Tensor) or eps for name in ("damping", "rel_damping")
    ):
        raise ValueError(
            f"x: {m} observations of {n} features have a singular covariance; give more than {n} of them, or a damping such as rel_damping=1e-6"
        )
    with torch.autocast(x.device.type, enabled=False):
        wide_enough = x.to(torch.promote_types(x.dtype, torch.float32))
        mean = wide_enough.mean(-2, keepdim=True)
        centred = wide_enough - mean
        return centred, mean, centred.mT @ centred / (m - int(correction))


def _rotated(W: Tensor, C: Tensor, kind: Kind) -> Tensor:
    """Return W, for "pca" times the eigenvectors of C, those of the largest eigenvalues first."""
    if kind == "zca":
        return W
    usable = C.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    eye = torch.eye(C.shape[-1], dtype=C.dtype, device=C.device)
    apply: Any = _Eigenbasis.apply
    Q: Tensor = apply(torch.where(usable, C, eye))[1]
    return W @ Q.flip(-1)


class _Eigenbasis(torch.autograd.Function):
    """Eigenvalues and eigenvectors of symmetric matrices, the largest weight of each positive.

    ``dQ = Q (F o Q^T dC Q)``, ``F_ij = 1 / (l_j - l_i)``; between eigenvalues that agree to rounding, whose eigenvectors are free, torch has NaN and infinities: here nothing turns.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(C: Tensor) -> tuple[Tensor, Tensor]:
        values, Q = torch.linalg.eigh(C)
        heaviest = Q.gather(-2, Q.abs().argmax(-2, keepdim=True))
        return values, Q * torch.where(heaviest < 0, -1.0, 1.0).to(Q.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*output)
        ctx.save_for_forward(*output)

    @staticmethod
    def backward(ctx: Any, by_values: Tensor, by_Q: Tensor) -> Tensor:
        values, Q = ctx.saved_tensors
        inner = _inverse_gaps(values) * (Q.mT @ by_Q) + torch.diag_embed(by_values)
        G: Tensor = Q @ inner @ Q.mT
        return (G + G.mT) / 2

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> tuple[Tensor, Tensor]:
        values, Q = ctx.saved_tensors
        inner = Q.mT @ ((tangent + tangent.mT) / 2) @ Q
        return inner.diagonal(dim1=-2, dim2=-1), Q @ (_inverse_gaps(values) * inner)


def _inverse_gaps(values: Tensor) -> Tensor:
    """Return ``1 / (l_j - l_i)``, and 0 where they agree to ``n u`` times the largest."""
    gaps = values.unsqueeze(-2) - values.unsqueeze(-1)
    n = values.shape[-1]
    rounding = n * unit_roundoff(values.dtype) * values.abs().amax(-1, keepdim=True).unsqueeze(-1)
    apart = gaps.abs() > rounding
    return torch.where(apart, 1 / torch.where(apart, gaps, 1.0), 0.0)
