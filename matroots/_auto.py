# SPDX-License-Identifier: Apache-2.0
"""Method "auto": the cheapest method that reaches the tolerance, and float64 eigendecomposition for members that it does not serve.

The error of every method is modelled as what it is designed for plus rounding (:mod:`matroots._rounding`). The first choice is made for a
condition number that the damping bounds, or a typical one; each member's own error is then estimated along with its root, and members that
need better are solved again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from matroots._options import Options
from matroots._products import unit_roundoff
from matroots._result import InvRoot, Status
from matroots._rounding import condition_safety, decomposition_rounding, sum_rounding
from matroots._solve import solve_judged
from matroots._tune import costs
from matroots.solvers import EVD, Rational
from matroots.solvers._problem import Want
from matroots.solvers.rational import approximant

TYPICAL_CONDITION = 1e4  # assumed where no relative damping bounds it
_BOUND_SLACK = 16.0  # how far the proven bound that "rational" scales by may lie above the largest eigenvalue


@dataclass(frozen=True)
class Choice:
    """A solver, the dtype it computes in, and the part of its relative error that does not come from rounding."""

    solver: EVD | Rational
    dtype: torch.dtype
    designed: float

    def error(self, n: int, p: float, condition: float) -> float:
        """Return the relative error that is expected for a condition number."""
        u, kappa = unit_roundoff(self.dtype), torch.tensor(condition, dtype=torch.float64, device="cpu")
        if isinstance(self.solver, EVD):
            return float(decomposition_rounding(kappa, n, p, u))
        return self.designed + float(sum_rounding(kappa * condition_safety(p), n, p, u))


PRECISE = Choice(EVD(compute_dtype=torch.float64), torch.float64, 0.0)


def solve_auto(A: Tensor, options: Options, want: Want) -> tuple[InvRoot, Tensor]:
    """Solve by the method of least cost; again in float64 where that is predicted to miss the tolerance."""
    tol, n, p = options.certified_tol, A.shape[-1], float(options.p)
    first = choose(n, p, tol, options.rel_damping, A)
    result, other, rounding = _solve(first, A, options, want)
    if tol is None or A.numel() == 0:
        return result, other
    allowed = tol - unit_roundoff(A.dtype)  # the result is rounded to its dtype
    met = (first.designed + rounding <= allowed) & (result.status != int(Status.MAX_STEPS))
    missed = ~met & (result.status != int(Status.NONFINITE_INPUT))
    if first != PRECISE and bool(missed.any()):
        again, _, rounding = _solve(
            PRECISE, A[missed], replace(options, damping=options.damping[missed.flatten()]), want
        )
        result = _merged(result, again, missed)
        met = met.masked_scatter(missed, rounding <= allowed)
    usable = result.status < int(Status.DIVERGED)
    status = result.status.masked_fill(usable, int(Status.STAGNATED))
    return result._replace(status=status.masked_fill(usable & met, int(Status.CONVERGED))), result.root


def choose(n: int, p: float, tol: float | None, rel_damping: float, like: Tensor) -> Choice:
    """Return the cheapest choice whose modelled error reaches ``tol`` for the condition number that is to be expected."""
    if tol is None:
        # on CPU an eigendecomposition in float64 costs little more than in float32, and is exact to float32's rounding
        precise = like.is_cpu and like.dtype != torch.float64
        return PRECISE if precise else Choice(EVD(), like.dtype, 0.0)
    bound = min(TYPICAL_CONDITION, 1.0 / rel_damping) if rel_damping > 0 else TYPICAL_CONDITION
    cost = costs(n, like.device.type)
    single = torch.float32
    candidates = [(cost.evd64, PRECISE), (cost.evd32, Choice(EVD(compute_dtype=single), single, 0.0))]
    rounding = Choice(Rational(), single, 0.0).error(n, p, bound)
    if p > 1 and rounding < 0.95 * tol < 0.95:
        designed = 0.95 * tol - rounding
        # one proof instead of a search; who lies below it is solved again
        floor = 1.0 / (_BOUND_SLACK * bound)
        r = approximant(1.0 / p, floor, designed, 80)
        rational = Choice(Rational(error=designed, floor=floor), single, r.error)
        candidates.append((cost.fixed + cost.pole * len(r.shifts), rational))
    able = [(price, choice) for price, choice in candidates if choice.error(n, p, bound) <= tol]
    return min(able, key=lambda pair: pair[0], default=(0.0, PRECISE))[1]


def _solve(choice: Choice, A: Tensor, options: Options, want: Want) -> tuple[InvRoot, Tensor, Tensor]:
    """Solve with the options of the choice; return the estimate of the error from rounding beside the result."""
    return solve_judged(A, replace(options, solver=choice.solver, compute_dtype=choice.dtype), want)


def _merged(result: InvRoot, again: InvRoot, members: Tensor) -> InvRoot:
    """Write the second solve of some members into the result."""
    fields = {}
    for name in ("root", "status", "steps", "residual", "scale", "bound", "damping", "matmuls"):
        field = getattr(result, name).clone()
        field[members] = getattr(again, name)
        fields[name] = field
    return result._replace(**fields)
