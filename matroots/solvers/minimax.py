"""Composite minimax iteration for any integer p: each step is the best polynomial for the interval that it meets.

``M_0 = A, X_0 = I``; a step picks a polynomial q, then ``X <- X q(M)`` and ``M <- q(M)^p M``. On an eigenvalue, with
``s = m^{1/p}``, it is ``s <- s q(s^p)``. If s lies in ``[l, u]``, q is the polynomial of its degree that minimises
``E = max |1 - s q(s^p)|``; the next interval is ``[1 - E, 1 + E]``. (Newton's step is the Taylor polynomial at s = 1 instead: from
far below 1 it gains a constant factor only.) An eigenvalue below the floor that was designed for is undershot, as by
damping, and never amplified, so the schedule can be fixed beforehand: no test and no synchronisation in the loop.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from matroots._arguments import check_number
from matroots._exponent import Exponent, addition_chain, as_integer
from matroots._products import Product, add_to_diagonal, frobenius
from matroots._result import Status
from matroots.solvers._problem import OfDefinite, Problem, Solution
from matroots.solvers.coupled_newton import raise_to, root_from_inverse

MAX_DEGREE = 3
_NARROW = (
    1e-3  # of an interval: below it the exchange loses its digits, and one Taylor step reaches any precision
)
Step = tuple[float, ...]
"""Coefficients of one step's q, lowest first."""


@dataclass(frozen=True)
class Schedule:
    """The steps for one (p, floor, target): what they cost and what they leave.

    ``error`` bounds ``|1 - x lambda^{1/p}|`` on the designed interval after the last step and ``widest - 1`` after the one before
    it, in exact arithmetic; ``products`` counts ``n x n`` products of a solve for the inverse root.
    """

    steps: tuple[Step, ...]
    error: float
    widest: float
    products: int


@lru_cache(maxsize=512)
def cheapest_schedule(p: int, floor: float, target: float, cushion: float = 0.0) -> Schedule:
    """Return the sequence of degrees 1 to 3 with the fewest products that brings the error from floor to target.

    A step is designed for ``[max(l, cushion^{1/p} u), u]``; what lies below is pulled up by a factor all the same. A narrower interval after fewer products is better whatever follows, so a search
    in the order of products spent, which follows up a sequence only if its interval is the narrowest so far, is exhaustive.
    """
    power_cost = len(addition_chain(p)) + 1
    order = itertools.count()
    heap: list[tuple[int, int, float, float, tuple[Step, ...]]] = [
        (0, next(order), floor ** (1 / p), 1.0, ())
    ]
    best: Schedule | None = None
    narrowest = 0.0
    spread = cushion ** (1 / p)
    while heap and (best is None or heap[0][0] < best.products):
        cost, _, low, high, steps = heapq.heappop(heap)
        if low / high <= narrowest:
            continue
        narrowest = low / high
        for degree in range(1, MAX_DEGREE + 1):
            step, error = minimax_step(p, max(low, spread * high), high, degree)
            lowest = 1.0 - error
            if low < spread * high:
                lowest = low * sum(c * low ** (p * k) for k, c in enumerate(step))
            left = max(error, 1.0 - lowest)
            spent = cost + degree - 1 + (1 if steps else 0)
            if left > target:
                heapq.heappush(heap, (spent + power_cost, next(order), lowest, 1.0 + error, (*steps, step)))
            elif best is None or (spent, left) < (best.products, best.error):
                best = Schedule((*steps, step), left, high, spent)
    if best is None:
        raise ValueError(f"floor, tol: no schedule of products reaches {target} from {floor} for p = {p}")
    return best


@lru_cache(maxsize=4096)
def minimax_step(p: int, low: float, high: float, degree: int) -> tuple[Step, float]:
    """Return q of this degree that minimises ``E = max |1 - s q(s^p)|`` on [low, high], and E; by Remez exchange.

    ``{s, s^{p+1}, s^{2p+1}, ...}`` is a Chebyshev system on positive intervals: the best error alternates at degree + 2 points,
    both ends among them, the others zeros of a polynomial in ``s^p``. Exchanging all of them converges quadratically. On
    a narrow interval, where the system is singular to rounding, the Taylor polynomial is as good within a factor of ``2^degree``.
    """
    if high - low < _NARROW:
        return _binomial_step(p, max(1.0 - low, high - 1.0), degree)
    exponents = np.arange(degree + 1) * p + 1.0
    signs = (-1.0) ** np.arange(degree + 2)
    points = low * (high / low) ** ((1 - np.cos(np.pi * np.arange(degree + 2) / (degree + 1))) / 2)
    for _ in range(50):
        system = np.column_stack([points[:, None] ** exponents, signs])
        c = np.linalg.solve(system, np.ones(degree + 2))[:-1]
        stationary = np.roots((c * exponents)[::-1])
        inner = np.sort(stationary.real[np.abs(stationary.imag) < 1e-9 * np.abs(stationary)])
        inner = np.clip(inner, 0.0, None) ** (1 / p)
        inner = inner[(inner > low) & (inner < high)]
        if len(inner) != degree:
            break
        moved = np.concatenate([[low], inner, [high]])
        settled = bool(np.abs(moved / points - 1).max() < 1e-12)
        points = moved
        if settled:
            break
    error = float(np.abs(1 - points[:, None] ** exponents @ c).max())
    return tuple(c.tolist()), error


def _binomial_step(p: int, error: float, degree: int) -> tuple[Step, float]:
    """Return the Taylor polynomial of ``m^{-1/p}`` at 1 and a bound on ``|1 - s q(s^p)|`` for ``|1 - s| <= error``.

    With ``m = 1 - r`` the series has positive coefficients ``c_k = (1/p)(1/p + 1)...(1/p + k - 1)/k!``, and the remainder is
    at most ``c_{d+1} |r|^{d+1} / (1 - |r|)``.
    """
    c = [1.0]
    for k in range(degree + 1):
        c.append(c[-1] * (1 / p + k) / (k + 1))
    r = math.expm1(p * math.log1p(error))
    in_m = np.polynomial.Polynomial(c[: degree + 1])(np.polynomial.Polynomial([1.0, -1.0]))
    return tuple(in_m.coef.tolist()), c[degree + 1] * r ** (degree + 1) / (1 - r) * (1 + error)


@dataclass(frozen=True)
class Minimax(OfDefinite):
    """Composite minimax polynomials, ``method="minimax"``: any integer p, the schedule with the fewest products.

    Args:
        floor: lower end of the interval that is designed for, relative to the scale, in (0, 1). None: half the damping
            relative to the bound where ``rel_damping`` gives one, else ``4 u``. What lies below is undershot and reported.
        cushion: in [0, 1/4]; no step is designed for eigenvalues of M further apart than that. 0 gives the fewest products
            in exact arithmetic and loses accuracy where the floor is far below the spectrum: a step that pulls up what is
            tiny maps what is large to something tiny, whose digits then drown in the rounding of M. 0.03 costs three or four
            products more and is as accurate as coupled Newton.
    """

    floor: float | None = None
    cushion: float = 0.03

    def __post_init__(self) -> None:
        if self.floor is not None and not 0 < check_number("floor", self.floor) < 1:
            raise ValueError(f"floor: expected a number in (0, 1) or None, got {self.floor!r}")
        if check_number("cushion", self.cushion) > 0.25:
            raise ValueError(f"cushion: expected a number in [0, 1/4], got {self.cushion!r}")

    def check(self, p: Exponent, tol: float | None, max_steps: int | None) -> None:
        """Raise ``ValueError`` unless p is an integer, and for ``max_steps``: the schedule is fixed by floor and tol."""
        if as_integer(p) is None:
            raise ValueError(
                f'p: method "minimax" takes an integer >= 1, got {p}; "evd" and "chebyshev" take any real p >= 1'
            )
        if max_steps is not None:
            raise ValueError(
                f'max_steps: method "minimax" fixes its steps by floor and tol, got {max_steps}; drop it'
            )

    def headroom(self, p: Exponent) -> float:
        """None: the polynomials are best on their interval and on nothing above it."""
        return 1.0

    def designed_floor(self, rel_damping: float, lowest: float) -> float:
        """The given floor, or what is known without looking at the device, at least ``lowest``."""
        # half of what is known: the proof that the spectrum lies above needs room for rounding
        known = 0.5 * rel_damping / (1.0 + rel_damping)
        return max(known if self.floor is None else self.floor, lowest)

    def solve(self, problem: Problem) -> Solution:
        """Run the schedule for the floor: ``A^{-1/p}``, and from it, where wanted, ``A^{1/p} = A X^{p-1}``."""
        p, n = as_integer(problem.p) or 1, problem.A.shape[-1]
        floor = self.designed_floor(problem.rel_damping, problem.lowest)
        schedule = cheapest_schedule(p, floor, _target(problem, p), self.cushion)
        covered = problem.covered
        original = None if problem.want == "inverse" else problem.A.clone()
        X, rho = run(problem.A, p, schedule.steps, problem.multiply)
        residual = torch.full_like(rho, n**0.5 * math.expm1(p * math.log1p(schedule.error)))
        residual = torch.where(covered, residual, n**0.5) + problem.precision_limit
        tol = 4.0 * problem.precision_limit if problem.tol is None else problem.tol
        status = torch.where(residual <= tol, int(Status.CONVERGED), int(Status.STAGNATED))
        status = torch.where(covered, status, int(Status.MAX_STEPS))
        # inside the designed interval and below it, no eigenvalue of I - M exceeds what the step before last leaves
        lost = ~(rho <= 2.0 * n**0.5 * schedule.widest**p)
        extra, root = 0, None
        if original is not None:
            root, extra = root_from_inverse(original, X, p, problem.multiply)
        each = torch.ones_like(status, dtype=torch.int64)
        return Solution(
            inverse=None if problem.want == "root" else X,
            root=root,
            status=status.masked_fill(lost, int(Status.DIVERGED)).to(torch.int32),
            steps=each * len(schedule.steps),
            residual=residual,
            history=residual.new_empty(len(status), 0),
            matmuls=each * (schedule.products + extra),
        )


def _target(problem: Problem, p: int) -> float:
    """Return the error ``|1 - x lambda^{1/p}|`` to design for."""
    limit = problem.precision_limit
    room = limit if problem.tol is None else max(problem.tol - limit, problem.tol / 2)
    return math.expm1(math.log1p(room / problem.A.shape[-1] ** 0.5) / p)


def run(A: Tensor, p: int, steps: tuple[Step, ...], multiply: Product) -> tuple[Tensor, Tensor]:
    """Apply the steps to ``M_0 = A``; return X and ``||I - M||_F`` before the last step. A is overwritten."""
    M, X = A, None
    spare = torch.empty_like(A)
    for step in steps[:-1]:
        Q = evaluate(step, M, multiply)
        # not mirrored: errors E_ij of X grow by q_i or q_j in a whole product, in a mirrored one by their mean, and where the
        # q of two eigenvalues are large in turn (a floor far below the spectrum) the means multiply to more
        X = Q.clone() if X is None else multiply(X, Q, torch.empty_like(Q))
        power = raise_to(Q, p, multiply)[-1]
        M, spare = multiply.carrier.symmetrised(power, M, spare), M
    rho = frobenius(add_to_diagonal(M.clone(), -1.0))
    Q = evaluate(steps[-1], M, multiply)
    return (Q if X is None else multiply.symmetric(X, Q, torch.empty_like(Q))), rho


def evaluate(step: Step, M: Tensor, multiply: Product) -> Tensor:
    """Return ``q(M)``: ``degree - 1`` products."""
    if len(step) == 2:
        return add_to_diagonal(M * step[1], step[0])
    square = multiply.symmetric(M, M, torch.empty_like(M))
    if len(step) == 3:
        return add_to_diagonal(square.mul_(step[2]).add_(M, alpha=step[1]), step[0])
    upper = add_to_diagonal(M * step[3], step[2])
    cubic = multiply.symmetric(upper, square, torch.empty_like(M))
    return add_to_diagonal(cubic.add_(M, alpha=step[1]), step[0])
