# SPDX-License-Identifier: Apache-2.0
"""The keywords of a call: checked against the input and the method, names resolved to instances."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypedDict

import torch
from torch import Tensor

from matroots._arguments import absolute_damping, check_count, check_number
from matroots._exponent import Exponent, parse_exponent
from matroots._formats import Format, parse_format
from matroots._products import unit_roundoff
from matroots.scaling import SCALINGS, Scaling
from matroots.solvers import EVD, SOLVERS, Rational, Solver


class Keywords(TypedDict, total=False):
    """The keywords that all calls share; see :func:`inv_root_ex`."""

    method: str | Solver
    scaling: str | Scaling | None
    damping: float | Tensor
    rel_damping: float
    tol: float | None
    max_steps: int | None
    matmul_dtype: torch.dtype | str | None
    max_batch: int | None
    generator: torch.Generator | None
    assume_positive: bool


@dataclass(frozen=True)
class Options:
    """The keywords of a call, checked and resolved."""

    p: Exponent
    solver: Solver
    scaling: Scaling
    damping: Tensor
    rel_damping: float
    solver_tol: float | None
    certified_tol: float | None  # what method "auto" holds the certified error to
    max_steps: int | None
    operands: Format | None  # what the operands of products are rounded to
    max_batch: int | None
    generator: torch.Generator | None
    compute_dtype: torch.dtype
    assume_positive: bool

    @property
    def lowest(self) -> float:
        """Eigenvalues below this, relative to the scale, are not worth designing for."""
        if self.operands is None:
            return 4.0 * unit_roundoff(self.compute_dtype)
        return self.operands.least_eigenvalue(float(self.p)) / 2


def resolve_options(
    A: Tensor,
    p: float | Fraction,
    *,
    method: str | Solver = "auto",
    scaling: str | Scaling | None = None,
    damping: float | Tensor = 0.0,
    rel_damping: float = 0.0,
    tol: float | None = None,
    max_steps: int | None = None,
    matmul_dtype: torch.dtype | str | None = None,
    max_batch: int | None = None,
    generator: torch.Generator | None = None,
    assume_positive: bool = False,
) -> Options:
    """Check every keyword against A and the method, and resolve names to instances."""
    exponent = parse_exponent(p)
    solver = _resolve("method", method, {**SOLVERS, "auto": EVD}, "solve")
    if method == "auto" and max_steps is not None:
        raise ValueError('max_steps: method "auto" chooses its own work; name a method, or drop max_steps')
    tol = None if tol is None else check_number("tol", tol, positive=True)
    check_count("max_steps", max_steps)
    check_count("max_batch", max_batch)
    solver_tol, certified_tol = (None, tol) if method == "auto" else (tol, None)
    solver.check(exponent, solver_tol, max_steps)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator: expected torch.Generator or None, got {type(generator).__name__}")
    return Options(
        p=exponent,
        solver=solver,
        scaling=_resolve("scaling", solver.own_scaling if scaling is None else scaling, SCALINGS, "estimate"),
        damping=absolute_damping(damping, A),
        rel_damping=check_number("rel_damping", rel_damping),
        solver_tol=solver_tol,
        certified_tol=certified_tol,
        max_steps=max_steps,
        max_batch=max_batch,
        generator=generator,
        operands=_operands(matmul_dtype, solver),
        compute_dtype=_compute_dtype(A.dtype, solver, matmul_dtype),
        assume_positive=_check_flag("assume_positive", assume_positive),
    )


def _check_flag(name: str, value: object) -> bool:
    """Return a flag, or raise ``TypeError`` for anything that is none."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {value!r}")
    return value


def _resolve(name: str, value: Any, table: Mapping[str, Any], function: str) -> Any:
    """Return the instance that a name stands for, or ``value`` itself when it is an instance."""
    if isinstance(value, str):
        if value not in table:
            raise ValueError(f"{name}: expected one of {sorted(table)} or an instance, got {value!r}")
        return table[value]()
    if isinstance(value, type) or not hasattr(value, function):
        raise TypeError(f"{name}: expected one of {sorted(table)} or an instance, got {value!r}")
    return value


def _compute_dtype(dtype: torch.dtype, solver: Solver, matmul_dtype: object) -> torch.dtype:
    if isinstance(solver, EVD) and solver.compute_dtype is not None:
        return solver.compute_dtype
    return torch.float64 if dtype == torch.float64 and matmul_dtype is None else torch.float32


def _operands(matmul_dtype: object, solver: Solver) -> Format | None:
    operands = parse_format(matmul_dtype)
    if operands is not None and isinstance(solver, EVD | Rational):
        raise ValueError(
            f'matmul_dtype: method "{"evd" if isinstance(solver, EVD) else "rational"}" has no products to round, got {matmul_dtype!r}; use "cn", "ndb", "minimax" or "chebyshev"'
        )
    return operands
