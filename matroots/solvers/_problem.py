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
        multiply: the product of two batches.
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
    multiply: Product

    @property
    def floor(self) -> Tensor:
        """A proven lower bound on the smallest eigenvalue of A, ``(b,)``, where it is positive."""
        return (self.damping - self.noise).clamp_min(0.0)

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
    def lowest(self) -> float:
        """Eigenvalues below this are not worth designing for: ``4 u``; half of what a format lifts them to."""
        operands = self.multiply.format
        return 4.0 * self.resolution if operands is None else operands.least_eigenvalue(float(self.p)) / 2

    @property
    def precision_limit(self) -> float:
        """``2 sqrt(n) u``: what rounding alone leaves of a Frobenius residual."""
        return float(2.0 * self.A.shape[-1] ** 0.5 * self.unit_roundoff)


@dataclass(frozen=True)
class Solution:
    """Roots of ``Problem.A``, and per member (shape ``(b,)``) how they were found.

    ``inverse`` and ``root`` are None unless wanted. ``scale`` is the largest eigenvalue of ``Problem.A`` where the
    solver knows it, else 1; ``shift`` what it added to the spectrum (NaN for a change that is no shift).
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

    def check(self, p: Exponent, tol: float | None, max_steps: int | None) -> None:
        """Raise ``ValueError`` for a p that the method cannot take or a keyword that contradicts an option."""
        ...

    def headroom(self, p: Exponent) -> float:
        """How far above the scale the spectrum may reach before the iteration leaves its branch (1: not at all)."""
        ...

    def solve(self, problem: Problem) -> Solution:
        """Compute the roots of ``problem.A``."""
        ...


def refuse_fixed(option: str, value: object, tol: float | None, max_steps: int | None, solver: str) -> None:
    """Raise ``ValueError`` when ``tol`` or ``max_steps`` is given next to an option that fixes the work."""
    for keyword, given in (("tol", tol), ("max_steps", max_steps)):
        if given is not None and value is not None:
            raise ValueError(
                f"{keyword}: contradicts {solver}({option}={value}), which fixes the work; drop one"
            )
