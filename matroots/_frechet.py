# SPDX-License-Identifier: Apache-2.0
"""Derivatives of ``f(B) = B^{s/p}``, s = 1 or -1, in the eigenbasis of the root itself.

With ``B = Q diag(l) Q^T`` the first derivative in a direction E is ``Q (D o Q^T E Q) Q^T``, ``D_ij = f[l_i, l_j]`` (Daleckii and Krein; Higham,
Functions of Matrices, 2008, theorem 3.11), the second in directions E and F has the elements ``sum_m (E_im F_mj + F_im E_mj) f[l_i, l_m, l_j]``. Divided
differences of eigenvalues that are close or equal are limits, and neither is computed as a quotient of differences here. Everything comes from the root
``X = f(B)``: its small eigenvalues, of the large ones of B for s = -1, weigh little, its large ones are as exact as the solver made them, and its condition
number is the p-th root of B's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from matroots._prepare import with_identity
from matroots._products import full_precision, symmetric_part, unit_roundoff, wide
from matroots.solvers.evd import eigh_with_ladder
from matroots.solvers.rational import approximant

_MOST_POLES = 80
_LOWEST = 1e-15  # of the eigenvalues of B relative to the largest: what float64 resolves


@dataclass(frozen=True)
class Power:
    """The function ``f(l) = l^{sign/p}``."""

    p: float
    sign: int

    def divided_differences(self, x: Tensor) -> Tensor:
        """Return ``f[l_i, l_j]``, ``(*, n, n)``, from ``x = f(l) > 0``, ``(*, n)`` float64.

        With ``x_i / x_j = e^{2 d}`` and g the geometric mean of the two: ``g^{1 - s p} sinh(d) / sinh(s p d)``, written so that nothing overflows or
        cancels; ``g^{1 - s p} s / p`` where they are equal.
        """
        p, log = self.p, x.log()
        d = (log.unsqueeze(-1) - log.unsqueeze(-2)).abs() / 2
        middle = (log.unsqueeze(-1) + log.unsqueeze(-2)) / 2
        ratio = torch.where(d > 0, torch.expm1(-2 * d) / torch.expm1(-2 * p * d), 1 / p)
        return self.sign * ratio * torch.exp((1 - self.sign * p) * middle - (p - 1) * d)

    def argument(self, x: Tensor) -> Tensor:
        """Return the l with ``f(l) = x``."""
        return x ** (self.sign * self.p)


def frechet(X: Tensor, E: Tensor, power: Power) -> Tensor:
    """Return the derivative of f at the B with ``f(B) = X``, in the direction of the symmetric part of E.

    Args:
        X: ``(*, n, n)`` a root, symmetric; NaN for a member that has none.
        E: ``(*, n, n)``, of a batch shape that broadcasts with that of X.
        power: f.

    Returns:
        Symmetric, of the broadcast shape, in X's dtype but float32 for halves. An eigenvalue of X below ``min(n u, sqrt(u))`` times the largest, u of X's dtype, is not
        known and taken as that, so that the derivative stays finite where B is singular. NaN for a member without a root, unless its E is zero.
    """
    with full_precision(X.device):
        x, Q, unusable = _decomposed(X, torch.promote_types(X.dtype, torch.float32))
        D = power.divided_differences(x)
        inner = Q.mT @ symmetric_part(E.to(Q.dtype)) @ Q
        return _flagged(symmetric_part(Q @ (D.to(Q.dtype) * inner) @ Q.mT), unusable, E)


def second_frechet(X: Tensor, E: Tensor, F: Tensor, power: Power) -> Tensor:
    """Return the second derivative in the directions of the symmetric parts of E and F; arguments as for :func:`frechet`.

    ``f[a, b, c]`` of the best rational approximation r of f (:mod:`matroots.solvers.rational`), a sum of ``w / (x + t)``: that of a term is
    ``w / ((a + t) (b + t) (c + t))``, all of one sign, so that nothing cancels. It agrees with f's to about twelve digits.
    One product for each of its 20 to 60 poles, in float64.
    """
    with full_precision(X.device):
        x, Q, unusable = _decomposed(X, wide(X.device))
        left, right = (Q.mT @ symmetric_part(direction.to(Q.dtype)) @ Q for direction in (E, F))
        spectrum = power.argument(x).unsqueeze(-1)
        scale = spectrum.amax(-2, keepdim=True) if spectrum.numel() else spectrum[..., :1, :]
        spectrum = (spectrum / scale).clamp_min(_LOWEST)
        weights, shifts = _poles(power, float(spectrum.amin()) if spectrum.numel() else 1.0)
        total = torch.zeros_like(left @ right)
        for w, t in zip(weights, shifts, strict=True):
            r = 1 / (spectrum + t)
            total += w * r * ((left * r.mT) @ right) * r.mT
        factor = scale ** (power.sign / power.p - 2)
        result = Q @ (total + total.mT) @ Q.mT * factor
        return _flagged(symmetric_part(result), unusable, E, F)


def _decomposed(X: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return eigenvalues (float64, positive), eigenvectors, and which members have no root, ``(*, 1, 1)``; they get those of the identity."""
    n, batch = X.shape[-1], X.shape[:-2]
    flat = X.to(dtype, copy=True).reshape(batch.numel(), n, n)
    unusable = ~flat.isfinite().all(-1).all(-1)
    x, Q, _, decomposed = eigh_with_ladder(with_identity(flat, unusable))
    x = x.to(wide(X.device))
    u = unit_roundoff(X.dtype)
    x = torch.maximum(x, min(n * u, u**0.5) * x[:, -1:])
    lost = unusable | ~decomposed | ~(x > 0).all(-1)
    x = torch.where(lost.unsqueeze(-1), 1.0, x)
    return x.reshape(*batch, n), Q.reshape(X.shape), lost.reshape(*batch, 1, 1)


def _flagged(result: Tensor, unusable: Tensor, *directions: Tensor) -> Tensor:
    """Return NaN for members without a root, but nothing for those that nobody asks about: a loss may have left them out."""
    asked = torch.ones_like(unusable)
    for E in directions:
        asked = asked & (E != 0).any(-1, keepdim=True).any(-2, keepdim=True)
    return torch.where(unusable, torch.where(asked, torch.nan, 0.0).to(result.dtype), result)


def _poles(power: Power, floor: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return w and t of an approximation of f to float64's rounding on [floor, 1]; of ``x r(x)``, ``x / (x + t) = 1 - t / (x + t)``, for s = 1."""
    below = 2.0 ** math.floor(math.log2(floor))  # few designs
    a = 1 / power.p if power.sign < 0 else 1 - 1 / power.p
    r = approximant(a, max(below, _LOWEST), 0.0, _MOST_POLES)
    if power.sign < 0:
        return r.weights, r.shifts
    return tuple(-w * t for w, t in zip(r.weights, r.shifts, strict=True)), r.shifts
