# SPDX-License-Identifier: Apache-2.0
"""What every solver is given and what it gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from matroots._exponent import Exponent
from matroots._products import Product, unit_roundoff

Want = Literal["inverse", "root", "pair"]
"""``A^{-1/p}``, ``A^{1/p}``, or both."""


@dataclass(frozen=True)
class Problem:
    """A batch that is ready to be solved.

    Attributes:
        A: ``(b, n, n)``, float32 or float64, exactly symmetric, damped, divided by its scale. The solver may
            overwrite it. Positive definite where the solver asks for it (:attr:`Solver.needs_definite`).
        p: the exponent, already accepted by the solver's ``check``.
        want: which of the two roots.
        damping: ``(b,)``, the eps that is on A's diagonal.
        rel_damping: a number known on the host that ``damping`` over the bound on A is not below.
        noise: eigenvalues above ``-noise``, shape ``(b,)``, may be negative by rounding alone.
        zero_rows: ``(b, n)`` bool, rows and columns of the undamped input that are exactly zero.
        tol: bound asked for on the residual; None for the precision's limit.
        max_steps: limit on steps, None for the solver's own.
        lowest: eigenvalues below this are not worth designing for: ``4 u``; half of what a format lifts them to.
        covered: ``(b,)`` bool, A is proven to lie above the solver's :meth:`Solver.designed_floor`.
        multiply: the product of two batches.
        judged: an estimate of the error from rounding is wanted, where the solver has one.
    """

    A: Tensor
    p: Exponent
    want: Want
    damping: Tensor
    rel_damping: float
    noise: Tensor
    zero_rows: Tensor
    tol: float | None
    max_steps: int | None
    lowest: float
    covered: Tensor
    multiply: Product
    judged: bool = False

    @property
    def unit_roundoff(self) -> float:
        """Unit roundoff of the products' operands."""
        operands = self.multiply.format
        return unit_roundoff(self.A.dtype) if operands is None else operands.unit_roundoff

    @property
    def resolution(self) -> float:
        """Unit roundoff of the products that carry the small eigenvalues: what lies below a few of it is lost."""
        operands = self.multiply.format
        return unit_roundoff(self.A.dtype) if operands is None else operands.carrier.unit_roundoff

    @property
    def precision_limit(self) -> float:
        """``2 sqrt(n) u``: what rounding alone leaves of a Frobenius residual."""
        return float(2.0 * self.A.shape[-1] ** 0.5 * self.unit_roundoff)


@dataclass(frozen=True)
class Solution:
    """Roots of ``Problem.A``, and per member (shape ``(b,)``) how they were found.

    ``inverse`` and ``root`` are None unless wanted. ``scale`` is the largest eigenvalue of ``Problem.A`` where the
    solver knows it, else 1; ``shift`` what it added to the spectrum (NaN for a change that is no shift); ``rounding`` an
    estimate of the relative error of the inverse root that comes from rounding.
    """

    inverse: Tensor | None
    root: Tensor | None
    status: Tensor
    steps: Tensor
    residual: Tensor
    history: Tensor
    matmuls: Tensor
    scale: Tensor | None = None
    shift: Tensor | None = None
    rounding: Tensor | None = None


class Solver(Protocol):
    """A frozen dataclass of options and one pure function."""

    @property
    def needs_definite(self) -> bool:
        """Whether the input must be proven positive definite, and scaled, before ``solve``."""
        ...

    @property
    def damped_input(self) -> bool:
        """Whether ``Problem.A`` shall have the damping on its diagonal already."""
        ...

    @property
    def own_scaling(self) -> str:
        """Name of the scaling that is used unless the caller names one."""
        ...

    @property
    def buffers(self) -> int:
        """How many tensors of the size of the input a solve goes through: what is to fit into a cache."""
        ...

    def check(self, p: Exponent, tol: float | None, max_steps: int | None) -> None:
        """Raise ``ValueError`` for a p that the method cannot take or a keyword that contradicts an option."""
        ...

    def headroom(self, p: Exponent) -> float:
        """How far above the scale the spectrum may reach before the iteration leaves its branch (1: not at all)."""
        ...

    def designed_floor(self, rel_damping: float, lowest: float) -> float:
        """Lower end, relative to the scale, of the spectrum that the work is designed for; 0: none is fixed beforehand.

        ``lowest`` is :attr:`Problem.lowest`.
        """
        ...

    def solve(self, problem: Problem) -> Solution:
        """Compute the roots of ``problem.A``."""
        ...


class OfDefinite:
    """What the solvers have in common that work on a matrix proven to be positive definite, and scaled."""

    @property
    def needs_definite(self) -> bool:
        """The method is defined for positive definite input only."""
        return True

    @property
    def damped_input(self) -> bool:
        """The damping is on the diagonal from the start."""
        return True

    @property
    def own_scaling(self) -> str:
        """Multi-power iteration: an iteration pays for every factor of two that the scale is too large."""
        return "multi_power"

    @property
    def buffers(self) -> int:
        """Iterates, and the products that replace them."""
        return 6

    def designed_floor(self, rel_damping: float, lowest: float) -> float:
        """Nothing is designed for a floor, but below ``lowest`` rounding can turn the sign of an eigenvalue: roots are looked at there."""
        return lowest


def refuse_fixed(option: str, value: object, tol: float | None, max_steps: int | None, solver: str) -> None:
    """Raise ``ValueError`` when ``tol`` or ``max_steps`` is given next to an option that fixes the work."""
    for keyword, given in (("tol", tol), ("max_steps", max_steps)):
        if given is not None and value is not None:
            raise ValueError(
                f"{keyword}: contradicts {solver}({option}={value}), which fixes the work; drop one"
            )
