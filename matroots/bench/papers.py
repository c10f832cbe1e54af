# SPDX-License-Identifier: Apache-2.0
"""Straight transcriptions of published iterations, as baselines: the papers' formulas, scales and numbers of steps.

They are written to be as fast as the formulas allow (first products with the identity are skipped, the last step
computes only what is returned), and do none of this package's checks.
"""

from __future__ import annotations

import torch
from torch import Tensor

_VECTORS, _POWER_STEPS = 16, 10  # DASH's multi-power iteration


def newton_denman_beavers(A: Tensor, p: float, steps: int = 10) -> Tensor:
    """Return ``A^{-1/2}`` or ``A^{-1/4}`` of ``(b, n, n)`` by as many steps per square root, as DASH does (arXiv:2602.02016).

    ``Y_0 = A/s, Z_0 = I, E = (3 I - Z Y)/2, Y <- Y E, Z <- E Z`` with ``s = 2 lambda_max``, lambda_max from power iterations;
    the fourth root is the inverse square root of the square root.

    Raises:
        ValueError: for another p.
    """
    if p not in (2, 4):
        raise ValueError(f"p: the transcription takes 2 or 4, got {p}")
    scale = 2.0 * largest_eigenvalue(A)
    Y = A / scale
    if p == 4:
        Y = _square_root(Y, steps, inverse=False)
    return _square_root(Y, steps, inverse=True) / scale ** (1 / p)


def _square_root(Y: Tensor, steps: int, *, inverse: bool) -> Tensor:
    """Return Z (inverse) or Y after the last step."""
    identity = torch.eye(Y.shape[-1], dtype=Y.dtype, device=Y.device).expand_as(Y)
    Z = E = 1.5 * identity - 0.5 * Y
    if steps == 1:
        return Z if inverse else torch.bmm(Y, E)
    Y = torch.bmm(Y, E)
    for step in range(2, steps + 1):
        E = torch.baddbmm(identity, Z, Y, beta=1.5, alpha=-0.5)
        last = step == steps
        if not (last and inverse):
            Y = torch.bmm(Y, E)
        if not last or inverse:
            Z = torch.bmm(E, Z)
    return Z if inverse else Y


def largest_eigenvalue(A: Tensor) -> Tensor:
    """Return the largest Rayleigh quotient of a few power iterations run at once, ``(b, 1, 1)``: an estimate from below."""
    generator = torch.Generator(A.device).manual_seed(0)
    start = torch.randn(A.shape[-1], _VECTORS, generator=generator, dtype=A.dtype, device=A.device)
    V = start.expand(A.shape[0], -1, -1)
    for _ in range(_POWER_STEPS):
        V = torch.nn.functional.normalize(V, dim=1)
        V = torch.bmm(A, V)
    V = torch.nn.functional.normalize(V, dim=1)
    quotients = (V * torch.bmm(A, V)).sum(1, keepdim=True)
    largest: Tensor = quotients.amax(2, keepdim=True)
    return largest


def coupled_newton(A: Tensor, p: float, steps: int, tolerance: float = 1e-6) -> Tensor:
    """Return ``A^{-1/p}`` of ``(b, n, n)`` by coupled Newton from the Frobenius norm (Guo and Higham, SIMAX 28, 2006).

    ``M_0 = z A, X_0 = z^{1/p} I`` with ``z = (p + 1)/(2 ||A||_F)``; then ``Q = ((p + 1) I - M)/p, X <- X Q, M <- Q^p M`` until
    ``max |M - I| <= tolerance`` in all members, or for so many steps.

    Raises:
        ValueError: unless p is an integer.
    """
    if p != int(p):
        raise ValueError(f"p: the transcription takes integers, got {p}")
    p = int(p)
    identity = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    z: Tensor = (p + 1) / (2.0 * torch.linalg.matrix_norm(A, keepdim=True))
    M, X = z * A, z ** (1 / p) * identity
    for step in range(1, steps + 1):
        Q = ((p + 1) * identity - M) / p
        X = z ** (1 / p) * Q if step == 1 else torch.bmm(X, Q)
        if step == steps:
            break
        M = torch.bmm(torch.linalg.matrix_power(Q, p), M)
        if bool((M - identity).abs().amax() <= tolerance):
            break
    return X
