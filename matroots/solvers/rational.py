# SPDX-License-Identifier: Apache-2.0
"""Best rational approximation of ``x^{-1/p}``, any real p >= 1: a sum of inverses of shifted matrices.

``x^{-a} ~ r(x) = c + sum_j w_j / (x + s_j)`` with positive c, w_j, s_j, so that ``A^{-1/p} ~ c I + sum_j w_j (A + s_j I)^{-1}``
is positive definite by construction and every term is a Cholesky factor (:mod:`matroots._cholesky`): half a product's operations a pole.
The error falls like ``exp(-2 pi^2 N / (log kappa + 3))`` in the number of poles N, for every p. For p = 2 the
best r is Zolotarev's, in closed form by elliptic functions (Hale, Higham, Trefethen, SIAM J. Numer. Anal. 46, 2008); for other p it
is found from there by Newton's method on the equations of equal oscillation. Below the floor that was designed for
r stays below ``x^{-1/p}``: what lies there is undershot, as by damping, and never amplified.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from matroots._arguments import check_count, check_fraction
from matroots._cholesky import add_gram, inverse_factor, smallest_eigenvalue_bound
from matroots._exponent import Exponent
from matroots._products import add_to_diagonal, exceeds, unit_roundoff, wide
from matroots._result import Status
from matroots._rounding import condition_number, sum_rounding
from matroots.solvers._problem import OfDefinite, Problem, Solution, refuse_fixed

Array = npt.NDArray[Any]  # of float64, or of Decimal
DEFAULT_MAX_POLES = 80  # float64 wants 72 for the lowest of its floors
_FLOAT_SUFFICES = 1e-9  # of the error that is expected: below, float64 loses the unknowns
_DIGITS = 38  # two words of libmpdec: a sixth faster than 40
_EXCHANGES = 20
_U = 2.0**-53
# proven floors are rounded down to powers of 1/2, in float64, whose designs take longest to find, of 1/16: few designs, a pole more
_RUNGS = {torch.float32: 2.0, torch.float64: 16.0}
_POLES_AT_ONCE = 8  # where they fit a cache: their sum is then one long product. Never by the batch, which must not change an answer
_STACK = 2**22  # bytes of shifted matrices that the inner caches hold; with more, members take turns
_LOWEST = 1e-15  # floor below which elliptic functions in float64 have nothing to say
_NARROWEST = 0.5  # a floor above it gains no pole, and its design drowns in rounding


@dataclass(frozen=True)
class Approximant:
    """``r(x) = constant + sum_j weights_j / (x + shifts_j)`` and its largest relative error on [floor, 1]."""

    constant: float
    weights: tuple[float, ...]
    shifts: tuple[float, ...]
    error: float


@lru_cache(maxsize=1024)
def approximant(a: float, floor: float, target: float, limit: int) -> Approximant:
    """Return the best approximation of ``x^{-a}``, a in [0, 1], with the fewest poles whose error is at most ``target``.

    With ``limit`` poles where even they do not reach it, or for a target of 0; with no more than rounding leaves something to do.
    """
    if a in (0.0, 1.0):
        return Approximant(1.0 - a, (1.0,) * int(a), (0.0,) * int(a), 0.0)
    floor = min(floor, _NARROWEST)
    limit = min(limit, most_poles(a, floor))
    poles = 1 if target > 0 else limit
    while (best := best_rational(a, floor, poles)).error > target and poles < limit:
        # each pole gains the same factor, the first few up to twice that: far from the target several are added at once
        ahead = math.log(best.error / target) / pole_gain(floor)
        poles = min(limit, poles + max(1, math.floor(ahead / 2 if poles < ahead else ahead - 0.1)))
    return best


def pole_gain(floor: float) -> float:
    """Return the logarithm of the factor by which one more pole shrinks the error, nearly the same for every power."""
    from scipy.special import ellipk, ellipkm1  # here: it takes longer to load than all of this package

    return float(2 * np.pi * ellipk(floor) / ellipkm1(floor))


def expected_error(a: float, floor: float, poles: int) -> float:
    """Return the error of so many poles, for ``x^{-a}``, to a factor of seven on floors of 1/2 and below."""
    return math.sin(math.pi * a) * math.exp(-pole_gain(floor) * poles)


def most_poles(a: float, floor: float) -> int:
    """Return how many poles bring the error below rounding in float64: more gain nothing, and no digits are left to find them."""
    return max(1, math.ceil(math.log(64.0 * expected_error(a, floor, 0) / _U) / pole_gain(floor)))


@lru_cache(maxsize=4096)
def best_rational(a: float, floor: float, poles: int) -> Approximant:
    """Return the r of this many poles that minimises ``E = max |1 - x^a r(x)|`` on [floor, 1], 0 < a < 1.

    The best error alternates at ``2 N + 2`` points; in ``y = log x``, with the logarithms of c, w and s as unknowns, the
    problem is so well scaled that Newton's method from Zolotarev's answer for a = 1/2 converges in a handful of steps. The
    unknowns are as ill-conditioned as the error is small: where float64 would lose them, they are decimals.
    """
    y, shifts = _zolotarev(floor, poles)
    signs = (-1.0) ** np.arange(len(y))
    unknowns = _start(a, shifts)
    precise = expected_error(a, floor, poles) < _FLOAT_SUFFICES
    best, least = unknowns, math.inf
    with localcontext(prec=_DIGITS):
        for _ in range(_EXCHANGES):
            unknowns, level = _equalise(a, _lifted(y, precise), _lifted(unknowns, precise), signs)
            y, worst = _exchange(a, y, unknowns, signs * np.sign(level))
            if worst < least:
                best, least = unknowns, worst
            if worst <= 1.05 * abs(level) or worst < 2.0 * _U or bool((np.diff(y) <= 0).any()):
                break  # points that have met: there are no digits left to part them
        constant, weights, values = _split(np.exp(best))
    return Approximant(float(constant), tuple(map(float, weights)), tuple(map(float, values)), least)


def _lifted(values: Array, precise: bool) -> Array:
    """Return the values as decimals where float64 does not suffice."""
    return np.array([Decimal(v) for v in values.tolist()]) if precise else values


def _split(unknowns: Array) -> tuple[Array, Array, Array]:
    """Return what belongs to the constant, the weights and the shifts."""
    poles = len(unknowns) // 2
    return unknowns[0], unknowns[1 : poles + 1], unknowns[poles + 1 :]


def _zolotarev(floor: float, poles: int) -> tuple[Array, Array]:
    """Return logarithms of the alternation points and shifts of the best approximation of ``x^{-1/2}`` on [floor, 1].

    With K the quarter period for ``m = 1 - floor``: ``s_j = floor (sn/cn)^2((2 j - 1) K / (2 N + 1))``, ``x_i = floor/dn^2(i K / (2 N + 1))``.
    """
    from scipy.special import ellipj, ellipkm1

    m = 1.0 - floor
    quarter = ellipkm1(floor)
    sn, cn, _, _ = ellipj((2 * np.arange(1, poles + 1) - 1) * quarter / (2 * poles + 1), m)
    dn = ellipj(np.arange(2 * poles + 2) * quarter / (2 * poles + 1), m)[2]
    y = math.log(floor) - 2 * np.log(dn.clip(math.sqrt(floor), 1.0))
    y[0], y[-1] = math.log(floor), 0.0
    return y, math.log(floor) + 2 * np.log(sn / cn)


def _terms(a: float, y: Array, unknowns: Array) -> tuple[Array, Array]:
    """Return ``x^a`` times each term of r at ``x = exp(y)``, (points, 1 + N), and ``s/(x + s)``, (points, N)."""
    constant, weights, shifts = _split(np.exp(unknowns))
    powers = np.exp(type(y[0])(a) * y)
    sums = np.exp(y)[:, None] + shifts
    return np.column_stack([powers * constant, powers[:, None] * weights / sums]), shifts / sums


def _start(a: float, shifts: Array) -> Array:
    """Return logarithms of c, w and s to start from: a quadrature of ``x^{-a} = sin(pi a)/pi int t^{-a}/(x + t) dt``.

    The trapezoidal rule in ``log t`` at the shifts; what lies below them is one pole, its shift the mean of t there, and what lies
    above is c. That is where nearly everything is for a close to 1 and to 0.
    """
    spacing = np.gradient(shifts) if len(shifts) > 1 else np.array([2.0])
    weights = np.log(math.sin(math.pi * a) / math.pi * spacing) + (1 - a) * shifts
    below, above = shifts[0] + spacing[0] / 2, shifts[-1] + spacing[-1] / 2
    weights[0] = math.log(math.sin(math.pi * a) / (math.pi * (1 - a))) + (1 - a) * below
    constant = math.log(math.sin(math.pi * a) / (math.pi * a)) - a * above
    first = below + math.log((1 - a) / (2 - a))
    return np.concatenate([[constant], weights, [first], shifts[1:]])


def _equalise(a: float, y: Array, unknowns: Array, signs: Array) -> tuple[Array, float]:
    """Return the unknowns whose error is ``+level, -level, ...`` at the points y, and the level; by damped Newton steps."""
    number = type(y[0])
    alternating = np.array([number(sign) for sign in signs])
    level = number(0)
    for _ in range(50):
        terms, fractions = _terms(a, y, unknowns)
        residual = terms.sum(1) - 1 - alternating * level
        jacobian = np.column_stack([terms, -terms[:, 1:] * fractions, -alternating])
        step = _linear_solve(jacobian, -residual)
        largest = float(np.abs(step[:-1]).max())
        damped = number(0.7 / max(largest, 0.7))
        unknowns, level = unknowns + damped * step[:-1], level + damped * step[-1]
        if largest < 1e-7:
            break
    return unknowns, float(level)


def _linear_solve(J: Array, right: Array) -> Array:
    """Solve ``J x = right``; decimals by elimination with partial pivoting."""
    if J.dtype != object:
        return np.linalg.solve(J, right)
    M = np.column_stack([J, right])
    n = len(M)
    for k in range(n):
        pivot = k + int(np.abs(M[k:, k]).argmax())
        M[[k, pivot]] = M[[pivot, k]]
        M[k + 1 :, k:] -= np.outer(M[k + 1 :, k] / M[k, k], M[k, k:])
    x = M[:, -1]
    for k in reversed(range(n)):
        x[k] = (x[k] - M[k, k + 1 : n] @ x[k + 1 :]) / M[k, k]
    return x


def _exchange(a: float, y: Array, unknowns: Array, signs: Array) -> tuple[Array, float]:
    """Return the extrema of the error near the points y, and the largest error on a dense grid."""
    edges = np.concatenate([y[:1], (y[:-1] + y[1:]) / 2, y[-1:]])
    grid = edges[:-1, None] + np.diff(edges)[:, None] * np.linspace(0.0, 1.0, 13)
    values = _terms(a, _lifted(grid.ravel(), unknowns.dtype == object), unknowns)[0].sum(1) - 1
    errors = values.astype(np.float64).reshape(grid.shape)
    highest = (errors * signs[:, None]).argmax(1)
    moved = grid[np.arange(len(y)), highest]
    inner = (highest > 0) & (highest < grid.shape[1] - 1)
    rows, columns = np.nonzero(inner)[0], highest[inner]
    left, middle, right = (errors[rows, columns + k] for k in (-1, 0, 1))
    bend = left - 2 * middle + right
    vertex = np.divide(0.5 * (left - right), bend, out=np.zeros_like(bend), where=bend != 0)
    moved[inner] += vertex.clip(-1.0, 1.0) * (grid[rows, 1] - grid[rows, 0])
    moved[0], moved[-1] = y[0], y[-1]
    return moved, float(np.abs(errors).max())


@dataclass(frozen=True)
class Rational(OfDefinite):
    """Best rational approximation, ``method="rational"``: any real p >= 1, half a product's operations a pole.

    Args:
        poles: take this many, or as many as reach rounding in float64 if those are fewer; None: the fewest whose error reaches ``tol``,
            at most ``max_steps`` (80).
        floor: lower end of the interval that is designed for, relative to the scale, in (0, 1). None: half the damping
            relative to the bound where ``rel_damping`` gives one; else one that is proven for each member by the norm of
            ``A^{-1}``, which synchronises. What lies below the floor is undershot and reported.
        error: relative error of r to design for, in (0, 1), at least ``2^-52``, in place of ``tol``, which bounds the residual.
    """

    poles: int | None = None
    floor: float | None = None
    error: float | None = None

    def __post_init__(self) -> None:
        check_count("poles", self.poles)
        check_fraction("error", self.error)
        if self.error is not None and self.poles is not None:
            raise ValueError(f"error: contradicts poles={self.poles}, which fixes the work; drop one")
        check_fraction("floor", self.floor)

    @property
    def own_scaling(self) -> str:
        """The proven bound: a scale that is too large costs a pole or two, less than an estimate would."""
        return "frobenius"

    def check(self, p: Exponent, tol: float | None, max_steps: int | None) -> None:
        """Raise ``ValueError`` when a keyword contradicts ``poles``; every p is taken."""
        refuse_fixed("poles", self.poles, tol, max_steps, "Rational")
        refuse_fixed("error", self.error, tol, None, "Rational")

    def headroom(self, p: Exponent) -> float:
        """None: r is best on its interval."""
        return 1.0

    @property
    def buffers(self) -> int:
        """The input, the sum, the inverse that gives the floor, and the parts that they are made of."""
        return 8

    def designed_floor(self, rel_damping: float, lowest: float) -> float:
        """The given floor or that of the damping, at least ``lowest``; 0 where each member has its own."""
        if self.floor is None and rel_damping == 0.0:
            return 0.0
        known = 0.5 * rel_damping / (1.0 + rel_damping)
        return max(known if self.floor is None else self.floor, lowest)

    def solve(self, problem: Problem) -> Solution:
        """Sum the inverses of one approximant per floor: members whose floors agree share it."""
        A, n, p = problem.A, problem.A.shape[-1], float(problem.p)
        limit = self.poles or problem.max_steps or DEFAULT_MAX_POLES
        wanted = _target(problem) if self.error is None else max(self.error, 2.0 * _U)
        target = 0.0 if self.poles else wanted
        signs = {"inverse": (-1,), "root": (1,), "pair": (-1, 1)}[problem.want]
        roots = {sign: torch.empty_like(A) for sign in signs}
        error = torch.zeros(A.shape[0], dtype=wide(A.device), device=A.device)
        poles = torch.zeros_like(error, dtype=torch.int64)
        definite = torch.ones_like(poles, dtype=torch.bool)
        floors, covered = self._floors(problem)
        raised = problem.lowest
        while floors:
            floor, members = floors.pop()
            designs = {
                s: approximant(1.0 / p if s < 0 else 1.0 - 1.0 / p, floor, target, limit) for s in signs
            }
            definite[members] = True
            for sign, r in designs.items():
                roots[sign][members], factored = evaluate(r, A[members], sign)
                definite[members] &= factored
            error[members] = max(r.error for r in designs.values())
            poles[members] = sum(len(r.shifts) for r in designs.values())
            if not floors and not self._fixed_floor(problem):
                floors, covered = _raised(raised, definite, covered)
                raised *= _RUNGS[A.dtype]
        residual = n**0.5 * torch.expm1(p * torch.log1p(error)) + problem.precision_limit
        reached = (error <= wanted) & covered
        status = torch.where(reached, int(Status.CONVERGED), int(Status.MAX_STEPS))
        if problem.tol is not None:
            missed = (residual > problem.tol) & reached
            status = torch.where(missed, int(Status.STAGNATED), status)
        return Solution(
            inverse=roots.get(-1),
            root=roots.get(1),
            status=status.masked_fill(~definite, int(Status.DIVERGED)).to(torch.int32),
            steps=poles,
            residual=torch.where(covered, residual, residual.clamp_min(n**0.5)),
            history=residual.new_empty(A.shape[0], 0),
            matmuls=torch.zeros_like(poles),
            rounding=sum_rounding(condition_number(A, roots[-1], p), n, p, unit_roundoff(A.dtype))
            if problem.judged and -1 in roots
            else None,
        )

    def _fixed_floor(self, problem: Problem) -> float:
        """Return the floor that all members share, 0 where each has its own."""
        return self.designed_floor(problem.rel_damping, problem.lowest)

    def _floors(self, problem: Problem) -> tuple[list[tuple[float, Tensor | slice]], Tensor]:
        """Return (floor, members) for each floor in use, and whether each member's spectrum lies above its floor.

        The norm of the inverse finds floors far below ``4 u``, and r is as good there as rounding lets it be. But it proves nothing there:
        rounding may have moved the smallest eigenvalue by as much. Covered are members that exceed ``4 u`` by one proof or the other.
        """
        if (fixed := self._fixed_floor(problem)) > 0:
            return [(fixed, slice(None))], problem.covered
        A, rung = problem.A, _RUNGS[problem.A.dtype]
        deepest = math.floor(-math.log(max(problem.unit_roundoff / 256, _LOWEST), rung))
        lowest = max(problem.lowest, rung**-deepest)
        proven = smallest_eigenvalue_bound(A)
        for k in (
            torch.nonzero(proven < lowest).flatten().split(64)
        ):  # the norm may be sqrt(n) times too large
            above = exceeds(A[k], torch.full_like(proven[k], lowest))
            proven[k] = torch.where(above, lowest, proven[k])
        step = torch.ceil(-torch.log(proven) / math.log(rung) - 1e-9).clamp(1, deepest).to(torch.int64)
        floors: list[tuple[float, Tensor | slice]] = [
            (rung**-k, torch.nonzero(step == k).flatten()) for k in torch.unique(step).tolist()
        ]
        return floors, proven >= lowest


def _raised(
    floor: float, definite: Tensor, covered: Tensor
) -> tuple[list[tuple[float, Tensor | slice]], Tensor]:
    """Return a higher floor for members that are so close to singular that rounding took a factor; they are not covered then."""
    broken = torch.nonzero(~definite).flatten()
    if len(broken) == 0 or floor >= 1.0:
        return [], covered
    return [(floor, broken)], covered & definite


def _target(problem: Problem) -> float:
    """Return the relative error to design for: ``sqrt(n) ((1 + E)^p - 1)`` is then the tolerance, or the precision's limit."""
    limit = problem.precision_limit
    room = limit if problem.tol is None else max(problem.tol - limit, problem.tol / 2)
    return max(math.expm1(math.log1p(room / problem.A.shape[-1] ** 0.5) / float(problem.p)), 2.0 * _U)


def evaluate(r: Approximant, A: Tensor, sign: int) -> tuple[Tensor, Tensor]:
    """Return ``r(A)`` (sign -1) or ``A r(A)`` (+1) for ``(b, n, n)``, and whether every shifted matrix had a factor.

    ``x / (x + s) = 1 - s/(x + s)``: the root needs no product with A.
    """
    n = A.shape[-1]
    at_once = max(1, min(_POLES_AT_ONCE, len(r.shifts)))  # no poles for the power 0
    held = max(1, _STACK // (at_once * n * n * A.element_size())) if A.is_cpu else len(A)
    parts = [_sum_of_inverses(r, part, sign) for part in A.split(held)]
    X, definite = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
    if sign < 0:
        return add_to_diagonal(X, r.constant), definite
    return add_to_diagonal(X.neg_().add_(A, alpha=r.constant), float(sum(r.weights))), definite


def _sum_of_inverses(r: Approximant, A: Tensor, sign: int) -> tuple[Tensor, Tensor]:
    """Return ``sum_j w_j (A + s_j I)^{-1}``, each term times ``s_j`` for sign +1, and whether every term had a factor."""
    b, n, _ = A.shape
    weights, shifts = (torch.tensor(v, dtype=A.dtype, device=A.device) for v in (r.weights, r.shifts))
    X = torch.zeros_like(A)
    definite = torch.ones(b, dtype=torch.bool, device=A.device)
    at_once = max(1, min(_POLES_AT_ONCE, 4 * 1024**2 // n**2))
    for s, w in zip(shifts.split(at_once), weights.split(at_once), strict=True):
        shifted = A.unsqueeze(1).repeat(1, len(s), 1, 1)
        shifted.diagonal(dim1=-2, dim2=-1).add_(s.reshape(1, -1, 1))
        R, factored = inverse_factor(shifted.flatten(0, 1))
        definite &= factored.reshape(b, -1).all(-1)
        scale = (w if sign < 0 else w * s).sqrt()
        add_gram(X, R.mul_(scale.repeat(b).reshape(-1, 1, 1)).unflatten(0, (b, -1)))
    return X, definite
