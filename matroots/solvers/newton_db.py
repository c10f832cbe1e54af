# SPDX-License-Identifier: Apache-2.0
"""Newton-Denman-Beavers iteration for p = 2, 4, 8, ..., in product form.

Higham, Functions of Matrices (2008), section 6.3, and DASH, arXiv:2602.02016.

``Y_0 = A, Z_0 = I``; then, with ``E = (3 I - Z Y)/2``, ``Y <- Y E`` tends to ``A^{1/2}`` and ``Z <- E Z`` to ``A^{-1/2}`` for spectra in
(0, 3). The order of the factors matters: ``Z E`` in place of ``E Z`` diverges. The root of order ``2^k`` is k square roots in
a row, each of the Y before it; only the last one needs Z.

Of the three products of a step ``Y E`` and ``E Z`` are mirrored (`Product.symmetric`), both or neither: with one of them the other's antisymmetric
part, however small, grows. ``Z Y`` is never: Y and Z commute up to their own errors only, E is symmetric up to those errors, and its antisymmetric
part is what keeps the two consistent. Mirroring or averaging it diverges from a condition number of about 1e3 in float32 (a test shows it).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from matroots._arguments import check_count
from matroots._exponent import Exponent, as_integer
from matroots._products import Product, add_to_diagonal, frobenius
from matroots._result import Status
from matroots.solvers._coupled import Outcome, Roots, iterate, select
from matroots.solvers._problem import OfDefinite, Problem, Solution, Want, refuse_fixed


@dataclass(frozen=True)
class NewtonDB(OfDefinite):
    """Newton-Denman-Beavers, ``method="ndb"``: p = 2, 4, 8, ..., at most ``3 s - 3`` products per square root of s steps.

    Args:
        steps: take exactly this many steps in each square root, without a convergence test or a
            synchronisation; None iterates until each member has converged (``max_steps`` bounds each square root).
    """

    steps: int | None = None

    def __post_init__(self) -> None:
        check_count("steps", self.steps)

    def check(self, p: Exponent, tol: float | None, max_steps: int | None) -> None:
        """Raise ``ValueError`` unless p is a power of two, or when a keyword contradicts ``steps``."""
        power = as_integer(p)
        if power is None or power < 2 or power & (power - 1):
            raise ValueError(
                f'p: method "ndb" takes 2, 4, 8, ..., got {p}; "cn" takes any integer, "evd", "rational" and "chebyshev" any'
                " real p >= 1"
            )
        refuse_fixed("steps", self.steps, tol, max_steps, "NewtonDB")

    def headroom(self, p: Exponent) -> float:
        """Of the 3 that theory allows, as much as leaves room for rounding and a quick return below 1."""
        return 2.5

    def solve(self, problem: Problem) -> Solution:
        """Take square roots of Y until the order is p; the last one returns what is wanted."""
        stages = ((as_integer(problem.p) or 2) - 1).bit_length()
        tol = None if problem.tol is None else problem.tol / 2**stages
        A, outcomes = problem.A, []
        for stage in range(stages):
            want: Want = problem.want if stage == stages - 1 else "root"
            outcome = iterate(SquareRootIterates(A, want, problem.multiply), problem, self.steps, 2, tol)
            outcomes.append(outcome)
            A = outcome.roots[0]
        return _combined(outcomes, problem, self.steps is not None)


def _combined(outcomes: list[Outcome], problem: Problem, fixed: bool) -> Solution:
    """Put the square roots' diagnostics together: the worst status, all steps and products, one residual."""
    status = torch.stack([outcome.status for outcome in outcomes]).amax(0)
    residual = chained_residual([outcome.residual for outcome in outcomes], problem.want)
    if problem.tol is None:
        status = torch.where(
            (status == int(Status.CONVERGED)) & ~torch.isfinite(residual), int(Status.STAGNATED), status
        )
    roots, steps = outcomes[-1].roots, torch.stack([outcome.steps for outcome in outcomes]).sum(0)
    return Solution(
        inverse=None if problem.want == "root" else roots[-1],
        root=None if problem.want == "inverse" else roots[0],
        status=status.to(torch.int32),
        steps=steps,
        residual=residual,
        history=_joined_history(outcomes, steps, fixed),
        matmuls=torch.stack([outcome.matmuls for outcome in outcomes]).sum(0),
    )


def chained_residual(residuals: list[Tensor], want: Want) -> Tensor:
    """Bound ``||I - A X^p||_F`` from the residuals of the square roots in a row.

    Write ``1 - r`` for ``y^q/a`` of the roots so far and ``1 - r_2`` for that of the next. The next Y has ``(1 - r)(1 - r_2)^q``,
    the next Z has ``z^{2q} a = (1 - r_2)^q/(1 - r)``. For p = 4 this is ``(r_1 + 2 r_2 + r_2^2)/(1 - r_1)``.
    """
    total, power = residuals[0], 2
    for stage, rho in enumerate(residuals[1:], start=2):
        grown = torch.expm1(power * torch.log1p(rho))
        if stage < len(residuals) or want == "root":
            total = total + grown + total * grown
        else:
            total = torch.where(total < 1, (total + grown) / (1 - total), torch.inf)
        power *= 2
    return total


def _joined_history(outcomes: list[Outcome], steps: Tensor, fixed: bool) -> Tensor:
    """Return the histories of the square roots one after the other, each member's packed to the left."""
    joined = torch.cat([outcome.history for outcome in outcomes], dim=-1)
    if fixed:
        return joined
    order = torch.argsort(torch.isnan(joined).to(torch.uint8), dim=-1, stable=True)
    return joined.gather(-1, order)[:, : int(steps.max())]


class SquareRootIterates:
    """Y and Z of one square root, with the buffers that their products are written to."""

    def __init__(self, A: Tensor, want: Want, multiply: Product) -> None:
        self.want, self.multiply = want, multiply
        self.Y, self.E = A, torch.empty_like(A)
        self.Z: Tensor | None = None  # the identity, before the first step
        self._old_Y = torch.empty_like(A)
        self._old_Z: Tensor | None = None
        self.spent = 0
        self.last_cost = 0

    def residual(self) -> Tensor:
        """``||I - Z Y||_F``, on the way to ``E = (I - Z Y)/2 + I``."""
        if self.Z is None:
            torch.mul(self.Y, -0.5, out=self.E)
        else:
            self.multiply(self.Z, self.Y, self.E, alpha=-0.5)
            self.spent += 1
        rho = 2.0 * frobenius(add_to_diagonal(self.E, 0.5))
        add_to_diagonal(self.E, 1.0)
        self.last_cost = int(self.want != "inverse") + int(self.want != "root" and self.Z is not None)
        return rho

    def advance(self) -> None:
        """``Y <- Y E``, ``Z <- E Z`` (the first one free)."""
        self._times_E(self.Y, self.E, self._old_Y)
        self._old_Y, self.Y = self.Y, self._old_Y
        self.spent += 1
        if self.Z is None:
            self.Z, self.E = self.E, torch.empty_like(self.E)
            return
        new_Z = torch.empty_like(self.E) if self._old_Z is None else self._old_Z
        self.multiply.symmetric(self.E, self.Z, new_Z)
        self._old_Z, self.Z = self.Z, new_Z
        self.spent += 1

    def last(self, members: Tensor | None) -> Roots:
        """``Y E`` and ``E Z``, whichever is wanted."""
        E = select(self.E, members)
        roots: Roots = ()
        if self.want != "inverse":
            roots += (self._times_E(select(self.Y, members), E, torch.empty_like(E)),)
        if self.want != "root":
            Z = None if self.Z is None else select(self.Z, members)
            roots += (E.clone() if Z is None else self.multiply.symmetric(E, Z, torch.empty_like(E)),)
        return roots

    def current(self, members: Tensor | None) -> Roots:
        """Y and Z as they are."""
        return self._wanted(self.Y, self.Z, members)

    def previous(self, members: Tensor | None) -> Roots:
        """Y and Z one step before."""
        return self._wanted(self._old_Y, self._old_Z, members)

    def keep(self, members: Tensor) -> None:
        """Drop all other members."""
        self.Y, self.E = self.Y[members], self.E[members]
        self.Z = None if self.Z is None else self.Z[members]
        self._old_Y, self._old_Z = torch.empty_like(self.Y), None

    def _times_E(self, Y: Tensor, E: Tensor, out: Tensor) -> Tensor:
        """``Y E``, in the format that carries small eigenvalues on; where E is less accurate than that, of the whole product."""
        carrier = self.multiply.carrier
        return carrier.symmetric(Y, E, out) if carrier is self.multiply else carrier.symmetrised(Y, E, out)

    def _wanted(self, Y: Tensor, Z: Tensor | None, members: Tensor | None) -> Roots:
        Y = select(Y, members)
        Z = add_to_diagonal(torch.zeros_like(Y), 1.0) if Z is None else select(Z, members)
        return {"inverse": (Z,), "root": (Y,), "pair": (Y, Z)}[self.want]
