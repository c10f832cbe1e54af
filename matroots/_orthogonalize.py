# SPDX-License-Identifier: Apache-2.0
"""The nearest matrix with orthonormal columns: Loewdin's symmetric orthogonalisation, the unitary polar factor."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from matroots._arguments import REAL_DTYPES, check_rows
from matroots._call import inv_root, inv_root_ex
from matroots._hermitian import COMPLEX_DTYPES
from matroots._options import Keywords
from matroots._products import unit_roundoff, wide
from matroots._result import InvRoot

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Orthogonal(NamedTuple):
    """Result of :func:`orthogonalize_ex`.

    Attributes:
        output: ``(*, m, n)``, the dtype of A.
        error: float64 ``(*)``, a bound on ``||U^H U - I||_2`` (``U U^H`` for m < n), the rounding of U and of the Gram matrix included; inf where nothing is
            proven, NaN without ``certify``.
        root: the :class:`InvRoot` of the Gram matrix of A over its largest entry.
    """

    output: Tensor
    error: Tensor
    root: InvRoot


def orthogonalize(A: Tensor, **keywords: Unpack[Keywords]) -> Tensor:
    """Return ``U = A (A^H A)^{-1/2}``: of all matrices with orthonormal columns the nearest to A, in every unitarily invariant norm; differentiable.

    The factor U of the polar decomposition ``A = U H``. For m < n rows are orthonormal, ``U = (A A^H)^{-1/2} A``. The Gram matrix is formed and its root
    computed in float64, since its condition number is the square of A's; A has to have full rank, with a condition number below about 1e7.

    Args:
        A: ``(*, m, n)``, real or complex floating point.
        keywords: those of :func:`inv_root`; the matrix that they speak of is the Gram matrix of A over its largest entry.

    Returns:
        ``(*, m, n)``, the dtype of A.

    Raises:
        RootError: if a Gram matrix has no usable inverse root, as for A = 0.
        TypeError, ValueError: for arguments that do not fit.

    >>> A = torch.tensor([[3.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
    >>> orthogonalize(A)
    tensor([[1., 0.],
            [0., 1.],
            [0., 0.]])
    """
    tall, G = _gram(A, keywords)
    return _product(tall, inv_root(G, 2, **keywords), A)


def orthogonalize_ex(A: Tensor, *, certify: bool = False, **keywords: Unpack[Keywords]) -> Orthogonal:
    """Return what :func:`orthogonalize` does with a bound on how far from orthonormal it is; report on each member of a batch and never raise for a bad one.

    >>> A = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    >>> bool(orthogonalize_ex(A, certify=True).error < 1e-5)
    True
    """
    tall, G = _gram(A, keywords)
    result = inv_root_ex(G, 2, certify=certify, **keywords)
    U = _product(tall, result.root, A)
    if result.certificate is None:
        return Orthogonal(U, torch.full_like(result.bound, torch.nan), result)
    return Orthogonal(U, _departure(tall.detach(), result, unit_roundoff(A.dtype)), result)


def _gram(A: Tensor, keywords: Keywords) -> tuple[Tensor, Tensor]:
    """Return A over its largest entry, tall and in float64, and its Gram matrix. Without an absolute damping that does not change U, nor its derivatives."""
    check_rows(A, "A", (*REAL_DTYPES, *COMPLEX_DTYPES))
    tall = A if A.shape[-2] >= A.shape[-1] else A.mH
    real = wide(A.device)
    tall = tall.to(torch.promote_types(A.dtype, real))
    damping = keywords.get("damping", 0.0)
    matters = isinstance(damping, Tensor) or damping != 0
    largest = (tall if matters else tall.detach()).abs().amax((-2, -1), keepdim=True)
    with torch.autocast(A.device.type, enabled=False):
        tall = tall / torch.where(largest > 0, largest, 1.0)
        return tall, tall.mH @ tall


def _product(tall: Tensor, X: Tensor, A: Tensor) -> Tensor:
    with torch.autocast(A.device.type, enabled=False):
        U = tall @ X
    return (U if A.shape[-2] >= A.shape[-1] else U.mH.resolve_conj()).to(A.dtype)


def _departure(tall: Tensor, result: InvRoot, u: float) -> Tensor:
    """Bound ``||U^H U - I||``.

    With G the exact Gram matrix of A and G' the computed one, ``X G X - I = (X G' X - I) + X (G - G') X``, whose first part is the certificate's eta (a damping in it is
    subtracted), and ``||G - G'|| <= gamma_m ||A||_F^2``. Rounding ``A X`` and then U to its dtype adds
    relative errors of at most gamma_n and u in the Frobenius norm to each of the two factors.
    """
    assert result.certificate is not None
    m, n = tall.shape[-2:]
    wide_u = unit_roundoff(wide(tall.device))
    size = torch.linalg.vector_norm(tall, dim=(-2, -1))
    X = torch.linalg.matrix_norm(result.root.detach().nan_to_num(0.0))
    exact = result.certificate.eta + X**2 * (8 * (m + n + 2) * wide_u * size**2 + result.damping)
    rounded = (8 * (n + 2) * wide_u * size * X + u * (1 + exact).sqrt() * n**0.5) * (1 + 8 * n * u)
    total = (exact + 2 * (1 + exact).sqrt() * rounded + rounded**2) * (1 + 64 * wide_u)
    return torch.where(result.certificate.valid & total.isfinite(), total, torch.inf)
