# SPDX-License-Identifier: Apache-2.0
"""Accuracy per cost of half-precision products: the formats that `matmul_dtype` takes, and mixtures of them.

Run as `python benchmarks/half_precision.py [--size N] [--draws N] [--condition C]`. The cost is in products of halves: a split product is
3 or 6, TF32 is 2 and float32 16, as the peak rates of a GPU with tensor cores have it. Spectra are log-uniform between 1 and
1/condition, both included. Errors are relative, in the spectral norm, to `(A + eps I)^{-1/p}` by fp64, eps the damping that was reported.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch import Tensor

import matroots
from matroots import Minimax, _solve
from matroots._formats import FORMATS, Format
from matroots._products import Add, Product

FP32_COST, WIDTH = 16, 14
Column = tuple[str | Minimax, int]
Solved = tuple[matroots.InvRoot, list[int]]
Plan = Callable[[int, int, bool], str | None]
"""Format of a product from its number, how many there are, and whether it carries the small eigenvalues on."""


@dataclass(frozen=True)
class Planned(Product):
    """A product whose format is planned call by call, and that notes its cost."""

    plan: Plan = lambda i, count, carries: None
    count: int = 0
    costs: list[int] = field(default_factory=list)
    carries: bool = False

    @property
    def carrier(self) -> Product:
        """The same, for the product that carries the small eigenvalues on."""
        return Planned(self.format, self.plan, self.count, self.costs, True)

    def write(self, A: Tensor, B: Tensor, out: Tensor, alpha: float, beta: float, add: Add) -> Tensor:
        """Multiply as planned."""
        name = self.plan(len(self.costs), self.count, self.carries)
        self.costs.append(FP32_COST if name is None else 2 if name == "tf32" else whole(name).products)
        return Product(None if name is None else whole(name)).write(A, B, out, alpha, beta, add)


def whole(name: str) -> Format:
    """Return a format of the library without its finer carrier."""
    known = FORMATS[name]
    return Format(known.name, known.dtype, known.bits, known.parts)


def late(first: str, then: str | None, last: float) -> Plan:
    """Plan ``then`` for the last products (a number, or a share of all below 1), ``first`` for those before."""

    def plan(i: int, count: int, carries: bool) -> str | None:
        return then if i >= count - (last * count if last < 1 else last) else first

    return plan


def carried(carrier: str, rest: str) -> Plan:
    """Plan ``carrier`` for the products that carry the small eigenvalues on, ``rest`` for the others."""
    return lambda i, count, carries: carrier if carries else rest


SCHEDULES: tuple[tuple[str, str | None, Plan], ...] = (  # what is printed, the matmul_dtype, the plan
    ("fp32", None, lambda *_: None),
    ("fp16", "fp16", lambda *_: "fp16"),
    ("bf16", "bf16", lambda *_: "bf16"),
    ("tf32", "tf32", lambda *_: "tf32"),
    ("fp16x2", "fp16x2", lambda *_: "fp16x2"),
    ("bf16x3", "bf16x3", lambda *_: "bf16x3"),
    ("bf16x2 (carrier bf16x3)", "bf16x2", carried("bf16x3", "bf16x2")),
    ("bf16x2 throughout", "bf16x2", lambda *_: "bf16x2"),
    ("fp16, carrier fp16x2", "fp16x2", carried("fp16x2", "fp16")),
    ("bf16, carrier bf16x2", "fp16x2", carried("bf16x2", "bf16")),
    ("fp16x2, last 2 fp16", "fp16x2", late("fp16x2", "fp16", 2)),
    ("fp16x2, last half fp16", "fp16x2", late("fp16x2", "fp16", 0.5)),
    ("fp16, last half fp16x2", "fp16", late("fp16", "fp16x2", 0.5)),
    ("fp16, last 4 fp32", "fp16", late("fp16", None, 4)),
)


def main() -> None:
    """Parse the options and print a table: a line per schedule, a column per method and order."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--condition", type=float, default=1e4)
    options = parser.parse_args()
    A = matrices(options.draws, options.size, options.condition)
    floored = matroots.Minimax(floor=0.5 / options.condition)
    columns: list[Column] = [(method, p) for method in ("ndb", "cn", "minimax", floored) for p in (2, 4)]
    print(f"{options.draws} draws, n = {options.size}, condition {options.condition:g}: cost and worst error")
    names = "".join(f"{m if isinstance(m, str) else 'floored'} p={p}".rjust(WIDTH) for m, p in columns)
    print(f"{'schedule':<26}{names}   damping")
    for name, matmul_dtype, plan in SCHEDULES:
        print(name.ljust(26) + line([solved(A, p, m, matmul_dtype, plan) for m, p in columns], A, columns))
    plain = [solved(A, p, m, "fp16", lambda *_: "fp16") for m, p in columns]
    steps = [polished(A, p, *one) for (_, p), one in zip(columns, plain, strict=True)]
    print("fp16, then a fp32 step".ljust(26) + line(steps, A, columns))


def matrices(draws: int, n: int, condition: float) -> Tensor:
    """Return random SPD matrices with log-uniform spectra, float32."""
    generator = torch.Generator().manual_seed(0)
    Q = torch.linalg.qr(torch.randn(draws, n, n, generator=generator, dtype=torch.float64)).Q
    log = torch.rand(draws, n, generator=generator, dtype=torch.float64)
    log[:, 0], log[:, -1] = 0.0, 1.0
    A = (Q * condition ** -log[:, None]) @ Q.mT
    return ((A + A.mT) / 2).float()


def solved(A: Tensor, p: int, method: str | Minimax, matmul_dtype: str | None, plan: Plan) -> Solved:
    """Solve as planned, twice: the first time to count the products, which the plan may depend on."""
    count = 0
    for _ in range(2):
        costs: list[int] = []
        with mock.patch.object(
            _solve, "Product", lambda format, c=costs, n=count: Planned(format, plan, n, c)
        ):
            result = matroots.inv_root_ex(A, p, method=method, matmul_dtype=matmul_dtype, max_batch=len(A))
        count = len(costs)
    return result, costs


def polished(A: Tensor, p: int, result: matroots.InvRoot, costs: list[int]) -> Solved:
    """Take one Newton step ``X + X (I - A X^p)/p`` in float32."""
    X, eye = result.root, torch.eye(A.shape[-1])
    damped = A + result.damping.float().reshape(-1, 1, 1) * eye
    X = X + X @ (eye - damped @ torch.linalg.matrix_power(X, p)) / p
    products = {2: 3, 4: 4}[p]
    return result._replace(root=(X + X.mT) / 2), [*costs, *[FP32_COST] * products]


def line(solutions: list[Solved], A: Tensor, columns: list[Column]) -> str:
    """Return cost and worst error of each solution, and the largest damping."""
    entries = (
        f"{sum(costs)} {errors(A, result.root, p, result.damping).max():.0e}".rjust(WIDTH)
        for (result, costs), (_, p) in zip(solutions, columns, strict=True)
    )
    return "".join(entries) + f"{max(float(result.damping.max()) for result, _ in solutions):10.0e}"


def errors(A: Tensor, X: Tensor, p: int, damping: Tensor) -> Tensor:
    """Return the relative errors of X against ``(A + damping I)^{-1/p}``; infinite where X is NaN."""
    eigenvalues, Q = torch.linalg.eigh(A.double())
    R = (Q * (eigenvalues + damping[:, None]).pow(-1 / p)[:, None]) @ Q.mT
    lost = ~torch.isfinite(X).all(-1).all(-1)
    gap = (X.double() - R).masked_fill(lost[:, None, None], 0.0)
    error = torch.linalg.matrix_norm(gap, 2) / torch.linalg.matrix_norm(R, 2)
    return error.masked_fill(lost, torch.inf)


if __name__ == "__main__":
    main()
