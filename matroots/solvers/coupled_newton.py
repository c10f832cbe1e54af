# SPDX-License-Identifier: Apache-2.0
"""Coupled Newton iteration for any integer p (Guo and Higham, SIAM J. Matrix Anal. Appl. 28, 2006).

``M_0 = A, X_0 = I``; then, with ``Q = ((p + 1) I - M)/p``, ``X <- X Q`` and ``M <- Q^p M``. X tends to ``A^{-1/p}`` and M to I
for spectra in ``(0, p + 1)``.

M, Q and X are functions of one matrix: every product is symmetric up to rounding and is computed as one triangle, but for ``Q^p M``, which
carries the small eigenvalues on and is symmetrised instead (`Product.symmetrised` says why).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from matroots._arguments import check_count
from matroots._exponent import Exponent, addition_chain, as_integer
from matroots._products import Product, add_to_diagonal, frobenius
from matroots.solvers._coupled import Roots, iterate, select
from matroots.solvers._problem import OfDefinite, Problem, Solution, refuse_fixed


@dataclass(frozen=True)
class CoupledNewton(OfDefinite):
    """Coupled Newton, ``method="cn"``: any integer p, ``l(p) + 2`` products a step (l: length of an addition chain).

    Args:
        steps: take exactly this many steps, without a convergence test or a synchronisation; None iterates until
            each member has converged.
    """

    steps: int | None = None

    def __post_init__(self) -> None:
        check_count("steps", self.steps)

    def check(self, p: Exponent, tol: float | None, max_steps: int | None) -> None:
        """Raise ``ValueError`` unless p is an integer, or when a keyword contradicts ``steps``."""
        if as_integer(p) is None:
            raise ValueError(
                f'p: method "cn" takes an integer >= 1, got {p}; "evd", "rational" and "chebyshev" take any real p >= 1'
            )
        refuse_fixed("steps", self.steps, tol, max_steps, "CoupledNewton")

    def headroom(self, p: Exponent) -> float:
        """Of the ``p + 1`` that theory allows, as much as keeps the residual from rising at the first step."""
        return 2.0 if p > 1 else 1.5

    def solve(self, problem: Problem) -> Solution:
        """Compute ``A^{-1/p}`` and from it, where wanted, ``A^{1/p} = A X^{p-1}``."""
        p = as_integer(problem.p) or 1
        original = problem.A if problem.want == "inverse" else problem.A.clone()
        iterates = NewtonIterates(problem.A, p, problem.multiply)
        outcome = iterate(iterates, problem, self.steps, p, problem.tol)
        (X,) = outcome.roots
        matmuls, root = outcome.matmuls, None
        if problem.want != "inverse":
            root, spent = root_from_inverse(original, X, p, problem.multiply)
            matmuls = matmuls + spent
        return Solution(
            inverse=None if problem.want == "root" else X,
            root=root,
            status=outcome.status,
            steps=outcome.steps,
            residual=outcome.residual,
            history=outcome.history,
            matmuls=matmuls,
        )


class NewtonIterates:
    """X and M of the coupled Newton iteration, with the buffers that its products are written to."""

    last_cost = 1

    def __init__(self, A: Tensor, p: int, multiply: Product) -> None:
        self.p, self.multiply = p, multiply
        self.M, self.Q = A, torch.empty_like(A)
        self.X: Tensor | None = None  # the identity, before the first step
        self._old_X: Tensor | None = None
        self._old_M = torch.empty_like(A)
        self.spent = 0

    def residual(self) -> Tensor:
        """``||I - M||_F``, on the way to ``Q = I + (I - M)/p``."""
        torch.mul(self.M, -1.0 / self.p, out=self.Q)
        rho = self.p * frobenius(add_to_diagonal(self.Q, 1.0 / self.p))
        add_to_diagonal(self.Q, 1.0)
        self.last_cost = 0 if self.X is None else 1
        return rho

    def advance(self) -> None:
        """``X <- X Q`` (the first one free), ``M <- Q^p M``."""
        if self.X is None:
            new_X = self.Q.clone()
        else:
            new_X = torch.empty_like(self.Q) if self._old_X is None else self._old_X
            self.multiply.symmetric(self.X, self.Q, new_X)
            self.spent += 1
        self._old_X, self.X = self.X, new_X
        powers = raise_to(self.Q, self.p, self.multiply)
        self.multiply.carrier.symmetrised(powers[-1], self.M, self._old_M)
        self.spent += len(powers)
        self._old_M, self.M = self.M, self._old_M

    def last(self, members: Tensor | None) -> Roots:
        """``X Q``, without M."""
        Q = select(self.Q, members)
        if self.X is None:
            return (Q.clone(),)
        return (self.multiply.symmetric(select(self.X, members), Q, torch.empty_like(Q)),)

    def current(self, members: Tensor | None) -> Roots:
        """X as it is."""
        return (self._materialised(self.X, members),)

    def previous(self, members: Tensor | None) -> Roots:
        """X one step before."""
        return (self._materialised(self._old_X, members),)

    def keep(self, members: Tensor) -> None:
        """Drop all other members."""
        self.M, self.Q = self.M[members], self.Q[members]
        self._old_M = torch.empty_like(self.M)
        self.X = None if self.X is None else self.X[members]
        self._old_X = None  # the next step is taken before anyone may go back

    def _materialised(self, X: Tensor | None, members: Tensor | None) -> Tensor:
        Q = select(self.Q, members)
        return add_to_diagonal(torch.zeros_like(Q), 1.0) if X is None else select(X, members)


def root_from_inverse(A: Tensor, X: Tensor, p: int, multiply: Product) -> tuple[Tensor, int]:
    """Return ``A X^{p-1}``, which is ``A^{1/p}`` for ``X = A^{-1/p}``, and the products it took."""
    if p == 1:
        return A, 0
    multiply = multiply.carrier  # what is small in A stays small, beside large powers of X
    powers = raise_to(X, p - 1, multiply)
    return multiply(A, powers[-1], torch.empty_like(X)), len(powers)


def raise_to(Q: Tensor, power: int, multiply: Product) -> list[Tensor]:
    """Return Q and the powers of it along a shortest addition chain, one product each; the last is ``Q^power``."""
    powers = [Q]
    for i, j in addition_chain(power):
        powers.append(multiply.symmetric(powers[i], powers[j], torch.empty_like(Q)))
    return powers
