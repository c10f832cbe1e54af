# SPDX-License-Identifier: Apache-2.0
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

import torch
from torch import Tensor

from matroots._arguments import check_fraction, check_number
from matroots._cholesky import smallest_eigenvalue_bound
from matroots._exponent import Exponent, addition_chain, as_integer
from matroots._products import Product, Spare, add_to_diagonal, frobenius
from matroots._result import Status
from matroots.solvers._problem import OfDefinite, Problem, Solution
from matroots.solvers._remez import minimax_step
from matroots.solvers._steps import COSTS, Step, evaluate, two_factors
from matroots.solvers.coupled_newton import root_from_inverse

DEGREES = (1, 2, 4, 8)  # 3 takes as many products as 4
# between the floors of members: costs six products at most, and does not split a batch into many
_RUNG = 2.0**-6
_LARGEST_MARGIN = 0.125  # of M, for half precision: a step of degree 4 makes 2e-4 of it


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
def cheapest_schedule(
    p: int,
    floor: float,
    target: float,
    cushion: float = 0.0,
    margin: float = 0.0,
    degrees: tuple[int, ...] = DEGREES,
) -> Schedule:
    """Return the sequence of these degrees with the fewest products that brings the error from floor to target.

    A step is designed for ``[max(l, cushion^{1/p} u), u]``; what lies below is pulled up by a factor all the same. The next interval
    is widened by ``margin`` at both ends. A narrower interval after no more products is better whatever follows, so a search in the
    order of products spent, which follows up a sequence only if its interval is the narrowest so far, is exhaustive.
    """
    power_cost = len(addition_chain(p)) + 1
    low, high = floor ** (1 / p), 1.0 + margin
    order = itertools.count()
    heap: list[tuple[int, float, int, float, tuple[Step, ...]]] = [(0, -low / high, next(order), high, ())]
    best: Schedule | None = None
    narrowest = 0.0
    while heap and (best is None or heap[0][0] < best.products):
        cost, ratio, _, high, steps = heapq.heappop(heap)
        if -ratio <= narrowest:
            continue
        narrowest = -ratio
        low = narrowest * high
        for degree in degrees:
            step, error, lowest = _cushioned(p, low, high, degree, cushion)
            left = max(error, 1.0 - lowest)
            spent = cost + COSTS[degree] + (1 if steps else 0)
            if left > target:
                new = 1.0 + error + margin
                ratio = lowest * (1.0 - margin) / new
                heapq.heappush(heap, (spent + power_cost, -ratio, next(order), new, (*steps, step)))
            elif best is None or (spent, left) < (best.products, best.error):
                best = Schedule((*steps, step), left, high, spent)
    if best is None:
        raise ValueError(f"floor, tol: no schedule of products reaches {target} from {floor} for p = {p}")
    return best


def _cushioned(p: int, low: float, high: float, degree: int, cushion: float) -> tuple[Step, float, float]:
    """Return the step for ``[max(low, cushion^{1/p} high), high]``, its error, and what it makes of ``low``.

    The error is infinite where degree 8 has no scheme in real numbers, which has not been seen.
    """
    designed = max(low, cushion ** (1 / p) * high)
    step, error = minimax_step(p, designed, high, degree)
    if degree == 8 and two_factors(step.series) is None:
        return step, math.inf, 0.0
    return step, error, 1.0 - error if designed == low else low * float(step(low**p))


@dataclass(frozen=True)
class Minimax(OfDefinite):
    """Composite minimax polynomials, ``method="minimax"``: any integer p, the schedule with the fewest products.

    Args:
        floor: lower end of the interval that is designed for, relative to the scale, in (0, 1). None: half the damping
            relative to the bound where ``rel_damping`` gives one; then, as with a number, nothing synchronises with the host. Else
            each member's own, from a Cholesky factor, at least ``4 u``. What lies below is undershot and reported.
        cushion: in [0, 1/4]; no step is designed for eigenvalues of M further apart than that. 0 gives the fewest products
            in exact arithmetic and loses accuracy where the floor is far below the spectrum: the more a step pulls up what
            is tiny, the more digits of what is large drown in the rounding of M. None: 1e-3, and 0.03 for p = 1, as accurate
            as coupled Newton for one or two products more.
    """

    floor: float | None = None
    cushion: float | None = None

    def __post_init__(self) -> None:
        check_fraction("floor", self.floor)
        if self.cushion is not None and check_number("cushion", self.cushion) > 0.25:
            raise ValueError(f"cushion: expected a number in [0, 1/4] or None, got {self.cushion!r}")

    def check(self, p: Exponent, tol: float | None, max_steps: int | None) -> None:
        """Raise ``ValueError`` unless p is an integer, and for ``max_steps``: the schedule is fixed by floor and tol."""
        if as_integer(p) is None:
            raise ValueError(
                f'p: method "minimax" takes an integer >= 1, got {p}; "evd", "rational" and "chebyshev" take any real p >= 1'
            )
        if max_steps is not None:
            raise ValueError(
                f'max_steps: method "minimax" fixes its steps by floor and tol, got {max_steps}; drop it'
            )

    def headroom(self, p: Exponent) -> float:
        """None: the polynomials are best on their interval and on nothing above it."""
        return 1.0

    @property
    def buffers(self) -> int:
        """M, X, what a polynomial of degree 8 is made of, and its powers."""
        return 9

    def designed_floor(self, rel_damping: float, lowest: float) -> float:
        """The given floor, or what is known without looking at the device, at least ``lowest``."""
        # half of what is known: the proof that the spectrum lies above needs room for rounding
        known = 0.5 * rel_damping / (1.0 + rel_damping)
        return max(known if self.floor is None else self.floor, lowest)

    def schedule(self, p: int, floor: float, target: float, u: float) -> Schedule:
        """Return the cheapest schedule, with room for the rounding of products that carry the small eigenvalues on.

        ``Q^a M Q^b`` moves what is large in M by about ``u (max q / min q)^{p/2}``, whatever n is: rounding errors of entries are as good
        as independent, and u times a random matrix has a norm of ``2 u`` times that of a row. On ``s^p`` in [c, 1] q varies by ``c^{-1/p}``.
        """
        cushion = self.cushion
        if cushion is None:
            cushion = 0.03 if p == 1 else 1e-3
        margin = min(8.0 * u / max(cushion, floor) ** 0.5, _LARGEST_MARGIN) / p
        return cheapest_schedule(p, floor, target, cushion, margin)

    def solve(self, problem: Problem) -> Solution:
        """Run a schedule for each floor: ``A^{-1/p}``, and from it, where wanted, ``A^{1/p} = A X^{p-1}``."""
        p = as_integer(problem.p) or 1
        original = None if problem.want == "inverse" else problem.A.clone()
        X = torch.empty_like(problem.A)
        rho, error, widest = problem.damping.new_zeros(3, X.shape[0])
        steps, matmuls = torch.zeros_like(rho, dtype=torch.int64).repeat(2, 1)
        for floor, members in self._floors(problem):
            schedule = self.schedule(p, floor, _target(problem, p), problem.resolution)
            X[members], rho[members] = run(problem.A[members], p, schedule.steps, problem.multiply)
            for field, value in (
                (error, schedule.error),
                (widest, schedule.widest),
                (steps, len(schedule.steps)),
                (matmuls, schedule.products),
            ):
                field[members] = value
        root = None
        if original is not None:
            root, extra = root_from_inverse(original, X, p, problem.multiply)
            matmuls = matmuls + extra
        residual, status = _judged(problem, p, rho, error, widest)
        return Solution(
            inverse=None if problem.want == "root" else X,
            root=root,
            status=status,
            steps=steps,
            residual=residual,
            history=residual.new_empty(len(status), 0),
            matmuls=matmuls,
        )

    def _floors(self, problem: Problem) -> list[tuple[float, Tensor | slice]]:
        """Return (floor, members) for each floor in use: one for all where it is known beforehand.

        Otherwise each member gets the floor of its own, on a ladder: the host waits for the device once. No floor is below the
        lowest, above which A is proven to lie already.
        """
        lowest = self.designed_floor(problem.rel_damping, problem.lowest)
        if self.floor is not None or problem.rel_damping > 0:
            return [(lowest, slice(None))]
        deepest = math.ceil(math.log(lowest, _RUNG))
        rung = torch.ceil(torch.log(smallest_eigenvalue_bound(problem.A)) / math.log(_RUNG))
        rung = rung.clamp(1, deepest)
        return [
            (max(_RUNG**k, lowest), torch.nonzero(rung == k).flatten()) for k in torch.unique(rung).tolist()
        ]


def _judged(problem: Problem, p: int, rho: Tensor, error: Tensor, widest: Tensor) -> tuple[Tensor, Tensor]:
    """Return the residual and the status of each member: of what was designed, where ``rho`` is no sign of the contrary."""
    n = problem.A.shape[-1]
    residual = n**0.5 * torch.expm1(p * torch.log1p(error))
    residual = torch.where(problem.covered, residual, n**0.5) + problem.precision_limit
    tol = 4.0 * problem.precision_limit if problem.tol is None else problem.tol
    status = torch.where(residual <= tol, int(Status.CONVERGED), int(Status.STAGNATED))
    status = torch.where(problem.covered, status, int(Status.MAX_STEPS))
    # inside the designed interval and below it, no eigenvalue of I - M exceeds what the step before last leaves
    lost = ~(rho <= 2.0 * n**0.5 * widest**p)
    return residual, status.masked_fill(lost, int(Status.DIVERGED)).to(torch.int32)


def _target(problem: Problem, p: int) -> float:
    """Return the error ``|1 - x lambda^{1/p}|`` to design for."""
    limit = problem.precision_limit
    room = limit if problem.tol is None else max(problem.tol - limit, problem.tol / 2)
    return math.expm1(math.log1p(room / problem.A.shape[-1] ** 0.5) / p)


def run(A: Tensor, p: int, steps: tuple[Step, ...], multiply: Product) -> tuple[Tensor, Tensor]:
    """Apply the steps to ``M_0 = A``; return X and ``||I - M||_F`` before the last step. A is overwritten."""
    M, X, spare = A, None, Spare()
    symmetric = multiply.symmetric if p > 1 else multiply  # a mirrored product in q(M) costs p = 1 a digit
    for step in steps[:-1]:
        Q = evaluate(step, M, symmetric, spare)
        M = transformed(M, Q, p, multiply, spare)
        if X is None:
            X = Q
            continue
        # not mirrored: errors E_ij of X grow by q_i or q_j in a whole product, in a mirrored one by their mean, and where the
        # q of two eigenvalues are large in turn (a floor far below the spectrum) the means multiply to more
        product = multiply(X, Q, spare.take(Q))
        spare.give(X, Q)
        X = product
    rho = frobenius(add_to_diagonal(spare.take(M).copy_(M), -1.0))
    Q = evaluate(steps[-1], M, symmetric, spare)
    return (Q if X is None else symmetric(X, Q, spare.take(Q))), rho


def transformed(M: Tensor, Q: Tensor, p: int, multiply: Product, spare: Spare) -> Tensor:
    """Return ``Q^p M`` as ``(Q^a M) Q^b``, ``a + b = p`` the last link of an addition chain; M is overwritten.

    It takes as many products as forming ``Q^p`` first, whose rounding is relative to the largest ``q^p``: at the large eigenvalues, where
    q is smallest, that loses twice the digits. ``Q^a M`` (and X Q) are far from symmetric beside their small eigenvalues: no products to mirror.
    """
    if p == 1:
        product = multiply.carrier(Q, M, spare.take(M))
        spare.give(M)
        return product
    *links, (a, b) = addition_chain(p)
    powers = [Q]
    for i, j in links:
        powers.append(multiply.symmetric(powers[i], powers[j], spare.take(Q)))
    half = multiply.carrier(powers[a], M, spare.take(M))
    product = multiply.carrier.symmetric(half, powers[b], M)
    spare.give(half, *powers[1:])
    return product
