# SPDX-License-Identifier: Apache-2.0
"""The table that drives the tests: one row per solver. A new solver is tested everywhere by adding a row."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

import torch

import matroots
from matroots import EVD, Chebyshev, CoupledNewton, Frobenius, MultiPower, NewtonDB, Power, Rational

FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
INTEGERS = tuple(range(1, 17))
REALS = (1.5, Fraction(8, 3), math.pi, 2.5)


@cache
def shortest_chain(power: int) -> int:
    """Length of a shortest addition chain, by breadth-first search over all chains (not only star chains)."""
    level: set[tuple[int, ...]] = {(1,)}
    length = 0
    while not any(power in chain for chain in level):
        level = {(*c, a + b) for c in level for a in c for b in c if c[-1] < a + b <= power}
        length += 1
    return length


def newton_products(p: int, steps: int) -> int:
    """Coupled Newton: a step costs X Q and the l(p) + 1 of Q^p M; the first X and the last M are free."""
    return sum((j > 1) + (shortest_chain(p) + 1) * (j < steps) for j in range(1, steps + 1))


def denman_beavers_products(p: int, steps: int) -> int:
    """Products of p's square roots: a step costs Z Y, Y E and E Z; the first Z Y and E Z are free.

    In its last step each square root computes the one side that is wanted: Y of all but the last, whose Z is.
    """
    stages = int(math.log2(p))
    early = sum(2 * (j > 1) + 1 for j in range(1, steps + 1)) - (steps > 1)
    last = sum(2 * (j > 1) + (j < steps) for j in range(1, steps + 1))
    return (stages - 1) * early + last


def series_products(degree: int) -> int:
    """Chebyshev: k - 1 baby steps, and a giant step for each further k terms, for the best odd k up to 31."""
    return min(k - 1 + math.ceil(degree / k) - 1 for k in range(1, 32, 2))


@dataclass(frozen=True)
class Row:
    """A solver, what it takes, and up to which condition number it must converge by itself."""

    name: str
    method: Any
    orders: tuple[Any, ...]  # the p among INTEGERS and REALS that it takes; every other one is a ValueError
    converges_to: dict[torch.dtype, float]
    iterative: bool = False  # has steps, a residual and a history; stops at a precision limit
    scaled: bool = True  # uses a scaling
    fixed: Callable[[int], Any] | None = None  # an instance whose work is fixed by one number
    products: Callable[[int, int], int] | None = (
        None  # products that this instance spends, from p and the number
    )
    steps_keyword: bool = True  # takes max_steps
    tol_keyword: bool = True  # bounds a residual of its own
    half_products: bool = True  # takes matmul_dtype
    floored: bool = False  # is right above a floor, and flags what lies below
    by_inverse: bool = False  # computes A^{1/p} as A X^{p-1}

    def __str__(self) -> str:
        return self.name


POWERS_OF_TWO = (2, 4, 8, 16)
ANYTHING = {FP64: 1e10, FP32: 1e4}
ROWS = (
    Row(
        "evd",
        "evd",
        INTEGERS + REALS,
        ANYTHING,
        scaled=False,
        steps_keyword=False,
        tol_keyword=False,
        half_products=False,
    ),
    Row(
        "auto",
        "auto",
        INTEGERS + REALS,
        ANYTHING,
        scaled=False,
        steps_keyword=False,
        tol_keyword=False,
        half_products=False,
    ),
    Row(
        "cn",
        "cn",
        INTEGERS,
        ANYTHING,
        iterative=True,
        fixed=CoupledNewton,
        products=newton_products,
        by_inverse=True,
    ),
    Row(
        "ndb",
        "ndb",
        POWERS_OF_TWO,
        ANYTHING,
        iterative=True,
        fixed=NewtonDB,
        products=denman_beavers_products,
    ),
    # its floor is 4 u, and the root of what lies below is undershot
    Row(
        "minimax",
        "minimax",
        INTEGERS,
        ANYTHING,
        steps_keyword=False,
        floored=True,
        by_inverse=True,
    ),
    Row(
        "rational",
        "rational",
        INTEGERS + REALS,
        ANYTHING,
        fixed=lambda poles: Rational(poles=poles, floor=1e-2),
        products=lambda p, poles: 0,  # factors of shifted matrices, and no product of whole ones
        half_products=False,
        floored=True,
    ),
    # degree 1000 reaches fp64 accuracy for floors down to about 1/1000, of which a rung of 1/4 and a loose bound take some
    # degree 8000 reaches fp64 accuracy for floors down to 4^-8, fp32 down to 4^-10, of which a rung of 1/4 and a loose bound take some
    Row(
        "chebyshev",
        "chebyshev",
        INTEGERS + REALS,
        {FP64: 1e4, FP32: 1e5},
        fixed=lambda degree: Chebyshev(degree=degree, floor=1e-2),
        products=lambda p, degree: series_products(degree),
        floored=True,
    ),
)
SCALINGS = ("frobenius", "power", "multi_power", Frobenius(order=2), Power(steps=3), MultiPower(vectors=4))

ITERATIVE = tuple(row for row in ROWS if row.iterative)
FIXED = tuple(row for row in ROWS if row.fixed is not None)
SCALED = tuple(row for row in ROWS if row.scaled)
DTYPES = (FP64, FP32)
HALF = (BF16, FP16)

PAIRS = tuple((row, scaling) for row in SCALED for scaling in SCALINGS) + tuple(
    (row, None) for row in ROWS if not row.scaled
)
"""Every method with every scaling that it uses."""


def name(value: object) -> str | None:
    """Name a parameter of a test."""
    if isinstance(value, Row | str):
        return str(value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, EVD | Frobenius | Power | MultiPower):
        return repr(value)
    return None


def cases(rows: tuple[Row, ...] = ROWS, orders: tuple[Any, ...] = (2, 4)) -> list[tuple[Row, Any]]:
    """Every row with every order among ``orders`` that it takes."""
    return [(row, p) for row in rows for p in orders if p in row.orders]


def methods() -> list[str]:
    """Return the names that the library knows, to check that no solver lacks a row."""
    return [*matroots.solvers.SOLVERS, "auto"]
