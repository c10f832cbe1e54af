# SPDX-License-Identifier: Apache-2.0
"""Solvers: one method, one file; each a frozen dataclass of options with one pure function."""

from __future__ import annotations

from matroots.solvers._problem import Problem, Solution, Solver
from matroots.solvers.chebyshev import Chebyshev
from matroots.solvers.coupled_newton import CoupledNewton
from matroots.solvers.evd import EVD
from matroots.solvers.minimax import Minimax
from matroots.solvers.newton_db import NewtonDB
from matroots.solvers.rational import Rational

__all__ = [
    "EVD",
    "SOLVERS",
    "Chebyshev",
    "CoupledNewton",
    "Minimax",
    "NewtonDB",
    "Problem",
    "Rational",
    "Solution",
    "Solver",
]

SOLVERS: dict[
    str,
    type[EVD] | type[CoupledNewton] | type[NewtonDB] | type[Chebyshev] | type[Minimax] | type[Rational],
] = {
    "evd": EVD,
    "cn": CoupledNewton,
    "ndb": NewtonDB,
    "chebyshev": Chebyshev,
    "minimax": Minimax,
    "rational": Rational,
}
