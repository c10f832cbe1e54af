# SPDX-License-Identifier: Apache-2.0
"""Matrices with bounds on their rounding errors: what makes a computed bound a proven one. All in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from matroots._exponent import addition_chain
from matroots._prepare import rescaled, with_identity
from matroots._products import frobenius, unit_roundoff
from matroots._result import LinAlgError
from matroots.scaling.multi_power import rayleigh, start_vectors

U = unit_roundoff(torch.float64)


@dataclass(frozen=True)
class Bounded:
    """A computed batch of matrices and, per member, a bound on its distance (Frobenius) from the exact one."""

    value: Tensor
    error: Tensor

    def __matmul__(self, other: Bounded) -> Bounded:
        """Multiply; ``|fl(FG) - FG| <= gamma_n |F| |G|`` in whatever order the sums are taken (Higham 2002, 3.5)."""
        size, other_size = frobenius(self.value), frobenius(other.value)
        n = self.value.shape[-1]
        rounding = gamma(n) * size * other_size
        inherited = self.error * other_size + (size + self.error) * other.error
        return Bounded(torch.bmm(self.value, other.value), (inherited + rounding) * (1 + 8 * U))

    @property
    def mT(self) -> Bounded:
        """The transpose."""
        return Bounded(self.value.mT, self.error)


def gamma(n: int) -> float:
    """Return ``n u / (1 - n u)``, the growth of rounding over a sum of n products."""
    return n * U / (1 - n * U)


def power(F: Bounded, exponent: int) -> Bounded:
    """Return ``F^exponent`` along a shortest addition chain."""
    powers = [F]
    for i, j in addition_chain(exponent):
        powers.append(powers[i] @ powers[j])
    return powers[-1]


def spectrum(S: Tensor) -> Tensor:
    """Return the eigenvalues of symmetric ``(b, n, n)``, ascending; NaN for a member that is not finite or fails."""
    broken = ~torch.isfinite(S.abs().amax((-2, -1)))
    safe = with_identity(S.clone(), broken)
    try:
        eigenvalues = torch.linalg.eigvalsh(safe)
    except LinAlgError:
        eigenvalues = torch.stack([_spectrum_or_nan(member) for member in safe])
    return torch.where(broken.unsqueeze(-1), torch.nan, eigenvalues)


def _spectrum_or_nan(S: Tensor) -> Tensor:
    try:
        eigenvalues: Tensor = torch.linalg.eigvalsh(S)
    except LinAlgError:
        eigenvalues = torch.full_like(S[0], torch.nan)
    return eigenvalues


def norm_from_below(X: Tensor) -> Tensor:
    """Return a Rayleigh quotient of symmetric X, less its own rounding: at most ``||X||_2``, ``(b,)``."""
    exponent = torch.frexp(X.abs().amax((-2, -1))).exponent.to(X.dtype)
    quotient = rescaled(rayleigh(rescaled(X, -exponent), start_vectors(8, X), steps=12), exponent)
    return (quotient - 8 * X.shape[-1] * U * frobenius(X)).clamp_min(0.0)
