# SPDX-License-Identifier: Apache-2.0
"""The Frechet distance of two normal distributions (of Inception features: FID)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from matroots._arguments import broadcast_damping, check_matrices, check_values
from matroots._autograd import plain
from matroots._bounded import Bounded, U, gamma, spectrum
from matroots._call import root
from matroots._prepare import asymmetry_tolerance, rounding_tolerance
from matroots._products import frobenius, full_precision, symmetric_part, unit_roundoff, wide
from matroots._result import RootError, Status, member_name


class FrechetDistance(NamedTuple):
    """Result of :func:`frechet_distance_ex`: the squared distance and a bound on its error, float64 ``(*)``; the bound is inf where nothing is proven."""

    distance: Tensor
    error: Tensor


def frechet_distance(
    mean: Tensor,
    covariance: Tensor,
    other_mean: Tensor,
    other_covariance: Tensor,
    *,
    damping: float | Tensor = 0.0,
) -> Tensor:
    """Return ``|m_1 - m_2|^2 + tr(C_1 + C_2 - 2 (C_1^{1/2} C_2 C_1^{1/2})^{1/2})``, the squared 2-Wasserstein distance; differentiable.

    Computed in float64, by eigendecomposition. Where a covariance is singular the distance is right and its derivative infinite in some directions; the gradient
    is then finite but meaningless there, and a damping is advised.

    Args:
        mean: ``(*, n)``, of the first.
        covariance: ``(*, n, n)``, symmetric positive semidefinite.
        other_mean: of the second, like the first.
        other_covariance: likewise.
        damping: added to the diagonals of both covariances.

    Returns:
        float64 ``(*)``; of equal distributions 0 up to rounding, of either sign.

    Raises:
        RootError: for a covariance that is not positive semidefinite up to rounding.
        TypeError, ValueError: for arguments that do not fit.

    >>> m, C = torch.zeros(2), torch.eye(2)
    >>> round(frechet_distance(m, C, m + 1, 4 * C).item(), 12)
    4.0
    """
    C, D, gap = _checked(mean, covariance, other_mean, other_covariance, damping)
    (C_small, c), (D_small, d) = _normalised(C), _normalised(D)
    T = root(_between(C_small, D_small)[1], 2, method="evd")
    traces = (C + D).diagonal(dim1=-2, dim2=-1).sum(-1)
    return (gap**2).sum(-1) + traces - 2 * T.diagonal(dim1=-2, dim2=-1).sum(-1) * torch.exp2(c + d)


def frechet_distance_ex(
    mean: Tensor,
    covariance: Tensor,
    other_mean: Tensor,
    other_covariance: Tensor,
    *,
    damping: float | Tensor = 0.0,
) -> FrechetDistance:
    """Return what :func:`frechet_distance` does with a proven bound on its error, for the float64 values of the arguments; arguments and errors are the same.

    >>> m, C = torch.zeros(2), torch.eye(2)
    >>> distance, error = frechet_distance_ex(m, C, m + 1, 4 * C)
    >>> bool(abs(distance - 4) <= error) and bool(error < 1e-6)
    True
    """
    named = {
        "mean": mean,
        "covariance": covariance,
        "other_mean": other_mean,
        "other_covariance": other_covariance,
    }
    for name, t in {**named, "damping": damping}.items():
        if isinstance(t, Tensor):
            check_values(t, name)
    found = frechet_distance(mean, covariance, other_mean, other_covariance, damping=damping)
    C, D, gap = (t.detach() for t in _checked(mean, covariance, other_mean, other_covariance, damping))
    n, batch = C.shape[-1], found.shape
    (C_small, c), (D_small, d) = (_normalised(M.expand(*batch, n, n)) for M in (C, D))
    flat = [M.reshape(batch.numel(), n, n) for M in (C_small, D_small)]
    error = 2 * _trace_error(*flat).reshape(batch) * torch.exp2(c + d)
    size = (gap**2).sum(-1) + 2 * (C + D).diagonal(dim1=-2, dim2=-1).abs().sum(-1)
    total = error + 4 * (n + 4) * U * size
    return FrechetDistance(found, torch.where(total.isfinite(), total, torch.inf))


def _checked(
    mean: Tensor, covariance: Tensor, other_mean: Tensor, other_covariance: Tensor, damping: float | Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return both covariances with their damping, and the difference of the means, in float64."""
    named = {"covariance": covariance, "other_covariance": other_covariance}
    for name, t in named.items():
        check_matrices(t, name)
    n, real = covariance.shape[-1], wide(covariance.device)
    for name, t, shape in (
        ("other_covariance", other_covariance, (n, n)),
        ("mean", mean, (n,)),
        ("other_mean", other_mean, (n,)),
    ):
        if not isinstance(t, Tensor) or t.is_complex() or t.shape[-len(shape) :] != shape:
            got = f"{tuple(t.shape)} {t.dtype}" if isinstance(t, Tensor) else type(t).__name__
            wanted = ", ".join(map(str, ("*", *shape)))
            raise ValueError(f"{name}: expected a real tensor ({wanted}), like covariance, got {got}")
    eye = torch.eye(n, dtype=real, device=covariance.device)
    try:
        batch = torch.broadcast_shapes(
            covariance.shape[:-2], other_covariance.shape[:-2], mean.shape[:-1], other_mean.shape[:-1]
        )
    except RuntimeError as error:
        raise ValueError(
            f"other_covariance, mean, other_mean: expected batch shapes that broadcast with that of covariance, got {tuple(covariance.shape[:-2])},"
            f" {tuple(other_covariance.shape[:-2])}, {tuple(mean.shape[:-1])}, {tuple(other_mean.shape[:-1])}"
        ) from error
    eps = broadcast_damping(damping, covariance.expand(*batch, n, n))[..., None, None] * eye
    C, D = (_symmetrised(M, name).to(real) + eps for name, M in named.items())
    return C, D, mean.to(real) - other_mean.to(real)


def _symmetrised(M: Tensor, name: str) -> Tensor:
    """Return the symmetric part; raise `RootError` unless M is symmetric and positive semidefinite up to the rounding of its dtype."""
    S = ((M + M.mT) / 2).to(torch.promote_types(M.dtype, torch.float32))
    if M.numel() == 0 or torch.compiler.is_compiling():
        return S
    values, size = S.detach().to(wide(M.device)), M.detach().to(wide(M.device))
    norm = torch.linalg.matrix_norm(values)
    skew = torch.linalg.matrix_norm(size - values) > asymmetry_tolerance(M) * norm
    lost = plain(skew | (_lowest(values) < -rounding_tolerance(M, unit_roundoff(M.dtype)) * norm))
    if bool(lost.any()):
        members = [member_name(i, tuple(lost.shape)) for i in lost.flatten().nonzero().flatten().tolist()[:8]]
        who = f"members {', '.join(members)} of batch {tuple(lost.shape)}" if lost.ndim else "the matrix"
        status = torch.where(lost, int(Status.INDEFINITE), int(Status.CONVERGED)).to(torch.int32)
        raise RootError(f"{name}: no usable root for {who} (INDEFINITE: {Status.INDEFINITE.advice})", status)
    return S


def _lowest(M: Tensor) -> Tensor:
    """Return the smallest eigenvalue, 1 for a matrix that is not finite."""
    finite = M.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    found: Tensor = torch.linalg.eigvalsh(
        torch.where(finite, M, torch.eye(M.shape[-1], dtype=M.dtype, device=M.device))
    )
    return found[..., 0]


def _normalised(M: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``4^{-e} M`` with its largest entry near 1, and e: nothing that is formed of it over- or underflows."""
    if M.numel() == 0:
        return M, M.new_zeros(M.shape[:-2])
    largest = M.detach().abs().amax((-2, -1))
    usable = (largest > 0) & largest.isfinite()
    e = torch.ceil(torch.frexp(torch.where(usable, largest, 1.0)).exponent / 2).to(M.dtype)
    half = torch.exp2(-e)[..., None, None]
    return M * half * half, e


def _lifted(M: Tensor, allowed: Tensor) -> Tensor:
    """Add to the diagonal what rounding has taken, up to ``allowed``; a matrix that is further below zero is left to be refused."""
    if M.numel() == 0:
        return M
    lowest = _lowest(M.detach())
    shift = torch.where((lowest < 0) & (-lowest <= allowed), -lowest * (1 + 2.0**-30), 0.0)
    return M + shift[..., None, None] * torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)


def _between(C: Tensor, D: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``S = C^{1/2}`` and ``S D S``, symmetric; what rounding has left below zero in either is lifted."""
    n = C.shape[-1]
    c, d = (torch.linalg.matrix_norm(M.detach()) for M in (C, D))
    S = root(_lifted(C, min(n * 2.0**-9, 2.0**-4) * c), 2, method="evd")  # has been judged by its own dtype
    with torch.autocast(S.device.type, enabled=False):
        M = S @ D @ S
    return S, _lifted((M + M.mT) / 2, min(n * 2.0**-9, 2.0**-4) * c * d)


def _trace_error(C: Tensor, D: Tensor) -> Tensor:
    """Bound the error of ``tr T``, ``T ~ (S D S)^{1/2}``, ``S ~ C^{1/2}``, for ``(b, n, n)`` positive semidefinite.

    The eigenvalues of ``D^{1/2} C D^{1/2}`` are those of ``S D S``, and those of ``T^2``, up to ``r = ||D|| ||S^2 - C|| + ||T^2 - S D S||`` (Weyl), and
    ``|sqrt(a) - t| <= min(sqrt(r), r / t)`` for each. A negative eigenvalue of T, by rounding, is in the trace with the wrong sign.
    """
    if C.numel() == 0:
        return frobenius(C)
    S, M = _between(C, D)
    T = root(M, 2, method="evd")
    with full_precision(C.device):
        exact = torch.zeros_like(frobenius(C))
        BS, BD, BT = (Bounded(symmetric_part(F), U * frobenius(F)) for F in (S, D, T))
        first, second, third = BS @ BS, BS @ BD @ BS, BT @ BT
        r = frobenius(D) * _distance(first, Bounded(C, exact)) + _distance(third, second)
        values, slop = spectrum(BT.value), 4 * T.shape[-1] * U * frobenius(T) + BT.error
        t = (values - slop.unsqueeze(-1)).clamp_min(0.0)
        each = torch.fmin(r.sqrt().unsqueeze(-1), r.unsqueeze(-1) / t)  # 0/0 where both are 0
        wrong = 2 * (slop.unsqueeze(-1) - values).clamp_min(0.0)
        return ((each + wrong).sum(-1) + T.shape[-1] * slop) * (1 + 64 * U)


def _distance(F: Bounded, G: Bounded) -> Tensor:
    """Bound the Frobenius norm of what separates the exact matrices."""
    gap = F.value - G.value
    return (
        frobenius(gap) * (1 + gamma(gap.shape[-1] ** 2))
        + F.error
        + G.error
        + U * (frobenius(F.value) + frobenius(G.value))
    )
