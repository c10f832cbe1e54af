# SPDX-License-Identifier: Apache-2.0
"""Matrices whose roots are known: log-spaced spectra from 1 down to 1/condition in random orthogonal bases."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_BLOCK, _BLOCKS = 4, 12  # vectors of a block, and blocks, of the Krylov spaces for norms


@dataclass(frozen=True)
class Truth:
    """Eigendecompositions in fp64 of the first members of a batch: ``eigenvalues (m, n)`` and ``Q (m, n, n)``."""

    eigenvalues: Tensor
    Q: Tensor

    @property
    def definite(self) -> bool:
        """Whether all of them are positive definite."""
        return bool((self.eigenvalues > 0).all())

    def inverse_root(self, p: float) -> Tensor:
        """Return ``A^{-1/p}`` in fp64, ``(m, n, n)``."""
        return (self.Q * self.eigenvalues.pow(-1 / p).unsqueeze(-2)) @ self.Q.mT


def batch_size(n: int, dtype: torch.dtype, megabytes: float) -> int:
    """Return how many ``n x n`` matrices fill so many MiB, at least one."""
    return max(1, int(megabytes * 2**20 / (n * n * dtype.itemsize)))


def orthogonal(count: int, n: int, seed: int) -> Tensor:
    """Return random orthogonal matrices (Haar measure), fp64 ``(count, n, n)`` on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    G = torch.randn(count, n, n, generator=generator, dtype=torch.float64)
    Q, R = torch.linalg.qr(G)
    signed: Tensor = Q * R.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    return signed


def matrices(Q: Tensor, condition: float, dtype: torch.dtype, measured: int) -> tuple[Tensor, Truth]:
    """Return ``Q D Q^T`` rounded to ``dtype``, and the truth about its first members.

    In fp64 the truth is known by construction, up to ``u condition / p`` or so. Rounding to fp32 changes the root of an ill-conditioned
    matrix by far more than the methods' errors, so there the truth is the fp64 decomposition of the matrix as it is handed over.
    """
    n = Q.shape[-1]
    eigenvalues = torch.logspace(
        0, -torch.log10(torch.tensor(condition)).item(), n, dtype=torch.float64, device=Q.device
    )
    A = (Q * eigenvalues) @ Q.mT
    A = ((A + A.mT) / 2).to(dtype)
    first = slice(0, measured)
    if dtype == torch.float64:
        return A, Truth(eigenvalues.expand(len(Q[first]), n), Q[first])
    values, vectors = torch.linalg.eigh(A[first].double())
    return A, Truth(values, vectors)


def relative_errors(X: Tensor, R: Tensor) -> Tensor:
    """Return ``||X - R||_2 / ||R||_2`` of each member, fp64 ``(m,)``; NaN where X is not finite. X need not be symmetric."""
    finite = torch.isfinite(X).flatten(1).all(-1)
    gap = torch.where(finite[:, None, None], X.double() - R, 0.0)
    return torch.where(finite, spectral_norm(gap) / spectral_norm(R), torch.nan)


def spectral_norm(E: Tensor) -> Tensor:
    """Return the 2-norm of each member of fp64 ``(m, n, n)``: exact for n <= 48, else from below, within half a percent.

    Block Krylov iteration (Musco and Musco, NIPS 2015): the norm of E on the span of ``V, G V, G^2 V, ...`` with ``G = E^T E`` and
    a few random vectors V. It converges whatever the gaps of the spectrum, at the cost of some products with n x 4 matrices; all
    eigenvalues of one large E would take longer than most of the solves whose error it is.
    """
    size = E.abs().amax((-2, -1), keepdim=True)
    E = E / size.masked_fill(size == 0, 1.0)
    image = E @ _krylov_basis(E) if E.shape[-1] > _BLOCK * _BLOCKS else E
    squared = torch.linalg.eigvalsh(image.mT @ image)[..., -1]
    norm: Tensor = squared.clamp_min(0.0).sqrt() * size[..., 0, 0]
    return norm


def _krylov_basis(E: Tensor) -> Tensor:
    """Return orthonormal bases of the block Krylov spaces of ``E^T E``, ``(m, n, 48)``."""
    generator = torch.Generator(E.device).manual_seed(0)
    V = torch.randn(E.shape[-1], _BLOCK, generator=generator, dtype=E.dtype, device=E.device)
    basis: Tensor = torch.linalg.qr(V.expand(len(E), -1, -1)).Q
    for _ in range(_BLOCKS - 1):
        V = E.mT @ (E @ basis[..., -_BLOCK:])
        for _ in range(2):  # once leaves what rounding makes of vectors that nearly lie in the span
            V = torch.linalg.qr(V - basis @ (basis.mT @ V)).Q
        basis = torch.cat([basis, V], dim=-1)
    return basis
