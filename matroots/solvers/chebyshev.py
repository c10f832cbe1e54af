# SPDX-License-Identifier: Apache-2.0
"""Chebyshev series of ``x^{-1/p}`` on ``[floor, 1]`` (DASH, arXiv:2602.02016), evaluated by baby steps and giant steps.

``x^{-1/p} ~ sum_k c_k T_k(t)`` with ``t(x) = (2 x - 1 - f)/(1 - f)`` takes about ``2 sqrt(d)`` products for degree d. Outside the
interval T_k explodes, so the scale must be a proven bound; an eigenvalue below the floor is only undershot, and is reported.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from matroots._arguments import check_count, check_fraction
from matroots._exponent import Exponent
from matroots._products import exceeds, frobenius, wide
from matroots._result import Status
from matroots.solvers._giant_steps import evaluate, products
from matroots.solvers._problem import OfDefinite, Problem, Solution, refuse_fixed

Coefficients = npt.NDArray[np.float64]
DEFAULT_MAX_DEGREE = 8000
_LOOSEST = 0.5  # relative error up to which a polynomial of too low a degree still resembles the function
_RUNG = 4.0  # floors are tried at powers of 1/4: the degree is then at most twice what the exact floor needs


@dataclass(frozen=True)
class Chebyshev(OfDefinite):
    """Truncated Chebyshev series, ``method="chebyshev"``: any real p >= 1, about ``2 sqrt(degree)`` products (14 for 60).

    Args:
        degree: of the polynomial, less where the terms are lost in rounding; None takes the smallest that reaches ``tol``, at most ``max_steps`` (8000).
        floor: lower end of the interval relative to the scale, in (0, 1); None finds, for each member, a proven one
            among the powers of 1/4. With degree and floor given nothing synchronises.
    """

    degree: int | None = None
    floor: float | None = None

    def __post_init__(self) -> None:
        check_count("degree", self.degree)
        check_fraction("floor", self.floor)

    def check(self, p: Exponent, tol: float | None, max_steps: int | None) -> None:
        """Raise ``ValueError`` when a keyword contradicts ``degree``; every p is taken."""
        refuse_fixed("degree", self.degree, tol, max_steps, "Chebyshev")

    def headroom(self, p: Exponent) -> float:
        """None: the polynomial explodes above its interval."""
        return 1.0

    @property
    def buffers(self) -> int:
        """Half of the baby steps of a high degree: 256 x 64 x 64 in float32 is slower with 6, 24 or 48."""
        return 12

    def solve(self, problem: Problem) -> Solution:
        """Evaluate one polynomial per floor: members whose floors agree share it."""
        A, p, n = problem.A, float(problem.p), problem.A.shape[-1]
        signs = {"inverse": (-1,), "root": (1,), "pair": (-1, 1)}[problem.want]
        roots = {sign: torch.empty_like(A) for sign in signs}
        error, rounding = torch.zeros(2, A.shape[0], dtype=wide(A.device), device=A.device)
        degrees, matmuls = torch.zeros(2, A.shape[0], dtype=torch.int64, device=A.device)
        missed, exploded = torch.zeros(2, A.shape[0], dtype=torch.bool, device=A.device)
        floors, covered = self._floors(problem)
        for proven, members in floors:
            for sign, root in roots.items():
                degree, floor, enough = self._polynomial(problem, p, sign, proven)
                c = series(p, sign, floor)[: degree + 1]
                X = evaluate(A[members], c, floor, problem.multiply.carrier)
                exploded[members] |= ~(frobenius(X) <= 2 * n**0.5 * _largest_value(c, floor))
                error[members] = error[members].clamp_min(relative_error(p, sign, floor, degree))
                rounding[members] = rounding[members].clamp_min(_rounding(problem, p, floor, degree))
                degrees[members] += degree
                matmuls[members] += products(degree)
                missed[members] |= not enough
                covered[members] &= floor <= proven
                root[members] = X
        # the same relative error in every eigenvalue at worst: sqrt(n) in the Frobenius norm
        residual = n**0.5 * (torch.expm1(p * torch.log1p(error)) + rounding) + problem.precision_limit
        status = torch.where(covered & ~missed, int(Status.CONVERGED), int(Status.MAX_STEPS))
        if problem.tol is not None:
            status = torch.where((status == 0) & (residual > problem.tol), int(Status.STAGNATED), status)
        return Solution(
            inverse=roots.get(-1),
            root=roots.get(1),
            status=status.masked_fill(exploded, int(Status.DIVERGED)).to(torch.int32),
            steps=degrees,
            residual=torch.where(covered, residual, residual.clamp_min(n**0.5)),
            history=residual.new_empty(A.shape[0], 0),
            matmuls=matmuls,
        )

    def _polynomial(self, problem: Problem, p: float, sign: int, floor: float) -> tuple[int, float, bool]:
        """Return the degree, the floor it is used with, and whether its error is as small as was aimed at.

        Terms that the precision of the products swallows are dropped from a degree that was given: they gain nothing
        and grow fastest outside the interval. A degree too low for the floor oscillates through zero near 1: then the
        floor is raised; what lies below is undershot, as by damping, and reported.
        """
        target = _target(problem, p, sign, floor)
        limit = DEFAULT_MAX_DEGREE if problem.max_steps is None else problem.max_steps
        if self.degree is None:
            degree = smallest_degree(p, sign, floor, target, limit)
        else:
            swallowed = problem.resolution / 8 * max(1.0, math.pow(floor, sign / p))
            degree = smallest_degree(p, sign, floor, swallowed, self.degree)
        enough = tail(p, sign, floor, degree) <= target
        while floor * _RUNG < 1 and relative_error(p, sign, floor, degree) > _LOOSEST:
            floor *= _RUNG
        return degree, floor, enough

    def _floors(self, problem: Problem) -> tuple[list[tuple[float, Tensor | slice]], Tensor]:
        """Return (floor, members) for each floor in use, and whether each member's spectrum lies above its floor.

        No floor is below 4 u or more: rounding the operands of a product alone moves eigenvalues of that size.
        """
        A, lowest = problem.A, self._lowest(problem)
        if self.floor is not None:
            floor = max(self.floor, lowest)
            return [(floor, slice(None))], exceeds(A, torch.full_like(problem.damping, floor))
        deepest = math.floor(-math.log(lowest, _RUNG))
        rung = first_rung(A, deepest)
        covered = rung <= deepest
        rung = rung.clamp(max=deepest)
        return [(_RUNG**-k, torch.nonzero(rung == k).flatten()) for k in torch.unique(rung).tolist()], covered

    def _lowest(self, problem: Problem) -> float:
        """Return the lowest floor: ``4 u``, and in a format no lower than lets the root's smallest eigenvalue, 1, survive.

        The recurrence rounds values of the size of the largest, ``floor^{-1/p}``, as often as the degree says.
        """
        floor, p = 4.0 * problem.resolution, float(problem.p)
        if problem.multiply.format is None:
            return floor
        while floor * _RUNG < 1:
            degree, _, _ = self._polynomial(problem, p, -1, floor)
            if degree * problem.lowest * floor ** (-1 / p) <= 1:
                break
            floor *= _RUNG
        return floor


def _target(problem: Problem, p: float, sign: int, floor: float) -> float:
    """Return the absolute error of the series that is aimed at.

    Without a tolerance, ``u`` times the largest value that the function takes; with one, what keeps
    ``sqrt(n) ((1 + e)^p - 1)`` below it, e relative to the smallest value.
    """
    if problem.tol is None:
        return problem.resolution * max(1.0, math.pow(floor, sign / p))
    room = max(problem.tol - problem.precision_limit, problem.tol / 2)
    relative = math.expm1(math.log1p(room / problem.A.shape[-1] ** 0.5) / p)
    return relative * min(1.0, math.pow(floor, sign / p))


def _rounding(problem: Problem, p: float, floor: float, degree: int) -> float:
    """Return what rounding leaves of ``||I - A X^p||_2``: ``u (2 sqrt(d) / f + 4 p)``.

    ``u / f`` is what one rounding of A does; those of d terms in the pairs of one eigenvector at the floor and one far above
    it add up like a random walk (measured, see docs/chebyshev.md); next to f = 1 the rounding of X itself, p-fold, is left.
    """
    return problem.resolution * (2.0 * math.sqrt(degree) / floor + 4.0 * p)


def first_rung(A: Tensor, deepest: int) -> Tensor:
    """Return the smallest k >= 1 with ``A > 4^-k I`` for each member, by bisection; ``deepest + 1`` where there is none."""
    low = torch.zeros(A.shape[0], dtype=torch.int64, device=A.device)  # fails, or untried at 1
    high = torch.full_like(low, deepest + 1)
    for _ in range((deepest + 1).bit_length()):
        middle = (low + high) // 2
        holds = exceeds(A, torch.pow(torch.tensor(_RUNG, dtype=wide(A.device), device=A.device), -middle))
        untried = high - low > 1
        high = torch.where(untried & holds, middle, high)
        low = torch.where(untried & ~holds, middle, low)
    return high


@lru_cache(maxsize=64)
def _largest_value(c: tuple[float, ...], floor: float) -> float:
    """Return a bound on the polynomial on [0, 1]: ``|T_k| <= 1`` on [floor, 1], and below it rises towards 0."""
    at_zero = np.polynomial.chebyshev.chebval(-(1.0 + floor) / (1.0 - floor), c)
    return max(sum(map(abs, c)), abs(float(at_zero)))


_MAX_POINTS = 8192
_U = np.finfo(np.float64).eps / 2


@lru_cache(maxsize=256)
def series(p: float, sign: int, floor: float) -> tuple[float, ...]:
    """Return the Chebyshev coefficients of ``x^{sign/p}`` on [floor, 1], in float64, by interpolation (DCT-II).

    They fall like ``((1 + sqrt(f))/(1 - sqrt(f)))^-k`` (Trefethen, Approximation Theory, theorem 8.2): twice as many points
    as bring them down to ``u/64`` are used, at most 8192. Those that stand out of the transform's rounding fix the factor
    of that geometric envelope, and the rest, which are noise, are cut down to it.
    """
    from scipy.fft import dct  # here: it takes longer to load than all of this package

    decay = 2.0 * math.atanh(math.sqrt(floor))
    needed = 2.0 * math.log(64.0 / _U) / decay
    points = int(min(max(32.0, needed), _MAX_POINTS))
    angles = (np.arange(points) + 0.5) * (np.pi / points)
    # x - floor = (1 - floor) cos^2(angle/2), free of cancellation at the lower end
    x = floor + (1.0 - floor) * np.cos(angles / 2) ** 2
    values = x ** (sign / p)
    coefficients: Coefficients = dct(values, type=2) / points
    coefficients[0] /= 2
    growth = np.exp(decay * np.arange(points))
    sizes = np.abs(coefficients)
    envelope = (sizes * growth)[sizes > 1e3 * _U * values.max()].max() / growth
    coefficients = np.clip(coefficients, -envelope, envelope)
    return tuple(coefficients.tolist())


def tail(p: float, sign: int, floor: float, degree: int) -> float:
    """Return ``sum_{k > degree} |c_k|``, a bound on the error of the truncated series."""
    return float(_tails(p, sign, floor)[degree])


@lru_cache(maxsize=256)
def _tails(p: float, sign: int, floor: float) -> Coefficients:
    """Return ``sum_{k > d} |c_k|`` for each d, with the geometric remainder of a series that 8192 terms do not exhaust."""
    sizes: Coefficients = np.abs(series(p, sign, floor))
    tails: Coefficients = np.append(np.cumsum(sizes[::-1])[::-1][1:], 0.0)
    if len(sizes) == _MAX_POINTS:
        tails += sizes[-2:].max() / -math.expm1(-2.0 * math.atanh(math.sqrt(floor)))
    return tails


def smallest_degree(p: float, sign: int, floor: float, target: float, limit: int) -> int:
    """Return the smallest degree in 1..limit whose tail is at most ``target``; all there is, up to ``limit``, if none is."""
    tails = _tails(p, sign, floor)
    needed = int(np.argmax(tails <= target)) if tails[-1] <= target else len(tails) - 1
    return max(1, min(needed, limit))


@lru_cache(maxsize=256)
def relative_error(p: float, sign: int, floor: float, degree: int) -> float:
    """Return the largest relative error of the truncated series on a grid dense at both ends of [floor, 1]."""
    from scipy.fft import dct

    c = np.array(series(p, sign, floor)[: degree + 1])
    ends = np.geomspace(floor, 1.0, 2000).clip(floor, 1.0)
    at_ends = np.polynomial.chebyshev.chebval((2.0 * ends - 1.0 - floor) / (1.0 - floor), c)
    # four times as many points as the degree, t = cos(angle), by one transform
    padded = np.zeros(4 * len(c))
    padded[: len(c)] = c / 2
    padded[0] = c[0]
    inside = floor + (1.0 - floor) * np.cos(np.linspace(0.0, np.pi / 2, len(padded))) ** 2
    value = np.concatenate([at_ends, dct(padded, type=1)])
    x = np.concatenate([ends, inside.clip(floor, 1.0)])
    return float(np.abs(value * x ** (-sign / p) - 1.0).max())
