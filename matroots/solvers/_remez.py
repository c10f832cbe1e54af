# SPDX-License-Identifier: Apache-2.0
"""The best polynomial of its degree for one step of a coupled iteration, by Remez exchange in a Chebyshev basis."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.polynomial import Chebyshev, Polynomial, chebyshev

from matroots.solvers._steps import Step

_RESOLVED = 1e-12  # an error below it drowns in fp64; the Taylor polynomial, whose error is bounded on paper, is within 2^degree
_PRECISION = 1e-9  # to which the points of alternation are found: the error is stationary there, and right to its square


def minimax_step(p: int, low: float, high: float, degree: int) -> tuple[Step, float]:
    """Return q of this degree that minimises ``E = max |1 - s q(s^p)|`` on [low, high], and E.

    On a narrow interval it is the Taylor polynomial of ``m^{-1/p}`` at 1, and E is a bound.
    """
    away = max(1.0 - low, high - 1.0)
    if away < 0.5 / p:  # Taylor's series converges
        bound = _taylor_remainder(p, away, degree)
        if bound < _RESOLVED:
            return _taylor(p, degree), bound
    # s -> s/high turns q into high q(high^p m): there is one parameter, low/high
    series, error = _equioscillating(p, low / high, degree)
    return Step(tuple(c / high for c in series), (low**p, high**p)), error


@lru_cache(maxsize=4096)
def _equioscillating(p: int, low: float, degree: int) -> tuple[tuple[float, ...], float]:
    """Return the best q's coefficients in ``T_k(t(s^p))``, and its error, on [low, 1].

    ``{s, s^{p+1}, s^{2p+1}, ...}`` is a Chebyshev system on positive intervals: the best error alternates at degree + 2 points,
    both ends among them, the others zeros of a polynomial in ``s^p``. Exchanging all of them converges quadratically.
    """
    domain = (low**p, 1.0)
    m = Chebyshev.identity(domain)
    signs = (-1.0) ** np.arange(degree + 2)
    t = -np.cos(np.pi * np.arange(degree + 2) / (degree + 1))  # for p = 1 these are the points
    points = np.concatenate([[low], ((1 + low**p + (1 - low**p) * t[1:]) / 2) ** (1 / p)])
    for _ in range(50):
        t = (2 * points**p - domain[0] - 1) / (1 - domain[0])
        system = np.column_stack([chebyshev.chebvander(t, degree) * points[:, None], signs])
        q = Chebyshev(np.linalg.solve(system, np.ones(degree + 2))[:-1], domain)
        stationary = (q + p * m * q.deriv()).roots()
        inner = np.sort(stationary.real[np.abs(stationary.imag) < 1e-9])
        inner = np.clip(inner, 0.0, None) ** (1 / p)
        inner = inner[(inner > low) & (inner < 1)]
        if len(inner) != degree:
            break
        moved = np.concatenate([[low], inner, [1.0]])
        settled = bool(np.abs(moved - points).max() < _PRECISION * (1 - low))
        points = moved
        if settled:
            break
    return tuple(q.coef.tolist()), float(np.abs(1 - points * q(points**p)).max())


def _taylor_remainder(p: int, away: float, degree: int) -> float:
    """Return a bound on ``|1 - s q(s^p)|`` for ``|1 - s| <= away`` and the Taylor polynomial q: ``c_{d+1} |r|^{d+1} / (1 - |r|)``.

    With ``m = 1 - r`` the series has positive, decreasing coefficients ``c_k = (1/p)(1/p + 1)...(1/p + k - 1)/k!``.
    """
    r = math.expm1(p * math.log1p(away))
    if r >= 1:
        return math.inf
    return _binomial(p, degree + 1)[-1] * r ** (degree + 1) / (1 - r) * (1 + away)


def _binomial(p: int, degree: int) -> list[float]:
    """Return the coefficients of ``(1 - r)^{-1/p}``."""
    c = [1.0]
    for k in range(degree):
        c.append(c[-1] * (1 / p + k) / (k + 1))
    return c


@lru_cache(maxsize=256)
def _taylor(p: int, degree: int) -> Step:
    """Return the Taylor polynomial of ``m^{-1/p}`` at 1, in ``T_k(m - 1)``: the interval itself may have no width in fp64."""
    in_t = Polynomial([(-1.0) ** k * c for k, c in enumerate(_binomial(p, degree))])
    return Step(tuple(chebyshev.poly2cheb(in_t.coef).tolist()), (0.0, 2.0))
