# SPDX-License-Identifier: Apache-2.0
"""Composite minimax steps in other forms: what they cost and how accurate they are, for docs/minimax.md.

"M": ``X <- X Q, M <- Q^a M Q^b``, as the library does. "YZ": the two-sided form for square roots, ``E = q(Z Y), Y <- Y E, Z <- E Z``.
A fourth root is taken at once, or as the square root of a square root. Every form is told half of the smallest eigenvalue.

    python benchmarks/minimax_forms.py
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from matroots import Minimax
from matroots._formats import parse_format
from matroots._products import Product, Spare, unit_roundoff
from matroots.solvers._steps import Step, evaluate
from matroots.solvers.coupled_newton import root_from_inverse
from matroots.solvers.minimax import run

N, SEEDS, CONDITIONS = 96, 5, (1e2, 1e4, 1e6)


class Counted(Product):
    """A product that counts itself, and its carrier with it."""

    spent = 0

    @property
    def carrier(self) -> Product:
        """The carrier, counted as well."""
        return Counted(super().carrier.format)

    def __call__(self, A: Tensor, B: Tensor, out: Tensor, alpha: float = 1.0) -> Tensor:
        """Multiply and count."""
        Counted.spent += 1
        return super().__call__(A, B, out, alpha)


def steps(p: int, floor: float, multiply: Product) -> tuple[Step, ...]:
    """Return the cheapest schedule to the precision of the products."""
    u = unit_roundoff(torch.float32) if multiply.format is None else multiply.format.unit_roundoff
    return Minimax().schedule(p, floor, 2 * u / p, u).steps


def two_sided(A: Tensor, schedule: tuple[Step, ...], multiply: Product, want: str) -> Tensor:
    """Return ``A^{1/2}`` or ``A^{-1/2}``."""
    Y, Z = A, None
    for number, step in enumerate(schedule, start=1):
        M = Y if Z is None else multiply(Z, Y, torch.empty_like(A))
        E = evaluate(step, M, multiply, Spare())
        last = number == len(schedule)
        if not last or want == "root":
            Y = multiply.carrier(Y, E, torch.empty_like(A))
        if not last or want == "inverse":
            Z = E if Z is None else multiply(E, Z, torch.empty_like(A))
    return Y if want == "root" or Z is None else Z


def solve(form: str, A: Tensor, floor: float, multiply: Product) -> Tensor:
    """Return the inverse root of the order that the form is for."""
    if form in ("p=2 M", "p=4 M"):
        p = int(form[2])
        return run(A.clone(), p, steps(p, floor, multiply), multiply)[0]
    first, second = (steps(2, f, multiply) for f in (floor, floor**0.5))
    if form == "p=2 YZ":
        return two_sided(A, first, multiply, "inverse")
    if form == "p=4 YZ, YZ":
        return two_sided(two_sided(A, first, multiply, "root"), second, multiply, "inverse")
    X, _ = run(A.clone(), 2, first, multiply)
    half, _ = root_from_inverse(A, X, 2, multiply)
    return run((half + half.mT) / 2, 2, second, multiply)[0]


def measured(form: str, name: str, condition: float) -> str:
    """Return the median relative error in the 2-norm, and the products."""
    multiply = Counted(None if name == "fp32" else parse_format(name))
    values = torch.from_numpy(np.geomspace(1, 1 / condition, N))
    errors = []
    for seed in range(SEEDS):
        V = torch.linalg.qr(
            torch.randn(N, N, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        )[0]
        A = ((V * values) @ V.mT).float()
        A = (A + A.mT) / 2
        L, U = torch.linalg.eigh(A.double())
        truth = (U * L ** (-1 / int(form[2]))) @ U.mT
        Counted.spent = 0
        X = solve(form, A.unsqueeze(0), 0.5 / condition, multiply)[0].double()
        X = (X + X.mT) / 2
        errors.append(float(torch.linalg.matrix_norm(X - truth, 2) / torch.linalg.matrix_norm(truth, 2)))
    return f"{np.median(errors):.1e} ({Counted.spent})"


def main() -> None:
    """Print a table in Markdown."""
    print("| | " + " | ".join(f"condition {c:.0e}" for c in CONDITIONS) + " |")
    print("|---|" + "---|" * len(CONDITIONS))
    for name in ("fp32", "fp16x2", "bf16x2"):
        for form in ("p=2 M", "p=2 YZ", "p=4 M", "p=4 M, M", "p=4 YZ, YZ"):
            row = [measured(form, name, condition) for condition in CONDITIONS]
            print(f"| {name}, {form} | " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
