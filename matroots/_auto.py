"""Method "auto": the cheapest method that reaches the tolerance, and float64 eigendecomposition for members that it does not serve.

The error of every method is modelled as what it is designed for plus ``c u kappa / p``: rounding moves the smallest eigenvalue by a few u
times the largest. The first choice is made for a condition number that the damping bounds, or a typical one; each member's own
is then estimated from its root, which costs a few products with vectors, and members that need better are solved again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from matroots._options import Options
from matroots._prepare import rescaled
from matroots._products import full_precision, unit_roundoff, wide
from matroots._result import InvRoot, Status
from matroots._solve import solve
from matroots._tune import costs
from matroots.scaling.multi_power import rayleigh, start_vectors
from matroots.solvers import EVD, Rational
from matroots.solvers._problem import Want
from matroots.solvers.rational import approximant

TYPICAL_CONDITION = 1e4  # assumed where no relative damping bounds it
# rounding errors of the methods are these times u kappa / p, about twice the largest in a thousand random draws
_EVD_ROUNDING = 1.5  # times sqrt(n): LAPACK's, and of casting a float64 input to float32
_RATIONAL_ROUNDING = 0.4
_BOUND_SLACK = 10.0  # how far the proven bound that "rational" scales by may lie above the largest eigenvalue
_SAFETY = 1.25  # on an estimate of the largest eigenvalue, which power iteration approaches from within
_ROOT_SAFETY = 1.05  # on one of the norm of the root, whose p-th power counts
_POWER_STEPS = 12  # four leave a fifth of the norm unseen, which the p-th power multiplies


@dataclass(frozen=True)
class Choice:
    """A solver, the dtype it computes in, and the part of its relative error that does not come from rounding."""

    solver: EVD | Rational
    dtype: torch.dtype
    designed: float

    def error(self, n: int, p: float, condition: Tensor) -> Tensor:
        """Return the relative error that the model predicts for each condition number."""
        factor = _EVD_ROUNDING * math.sqrt(n) if isinstance(self.solver, EVD) else _RATIONAL_ROUNDING
        return self.designed + unit_roundoff(self.dtype) * (4.0 + factor * condition / p)


PRECISE = Choice(EVD(compute_dtype=torch.float64), torch.float64, 0.0)


def solve_auto(A: Tensor, options: Options, want: Want) -> tuple[InvRoot, Tensor]:
    """Solve by the method of least cost; again in float64 where that is predicted to miss the tolerance."""
    tol, n, p = options.certified_tol, A.shape[-1], float(options.p)
    first = choose(n, p, tol, options.rel_damping, A)
    result, other = _solve(first, A, options, want)
    if tol is None or A.numel() == 0:
        return result, other
    out = unit_roundoff(A.dtype)
    with full_precision(A.device):
        predicted = first.error(n, p, condition_bound(result, p)) + out
        if not bool((predicted <= tol).all()):
            predicted = first.error(n, p, condition(A, result, p)) + out
    uncovered = result.status == int(Status.MAX_STEPS)
    missed = (~(predicted <= tol) | uncovered) & (result.status != int(Status.NONFINITE_INPUT))
    if first != PRECISE and bool(missed.any()):
        again, _ = _solve(
            PRECISE, A[missed], replace(options, damping=options.damping[missed.flatten()]), want
        )
        result = _merged(result, again, missed)
        with full_precision(A.device):
            retried = PRECISE.error(n, p, condition(A[missed], again, p)) + out
        predicted = predicted.masked_scatter(missed, retried)
    late = (result.status < int(Status.DIVERGED)) & ~(predicted <= tol)
    met = (result.status < int(Status.DIVERGED)) & (predicted <= tol)
    status = result.status.masked_fill(late, int(Status.STAGNATED)).masked_fill(met, int(Status.CONVERGED))
    return result._replace(status=status), result.root


def choose(n: int, p: float, tol: float | None, rel_damping: float, like: Tensor) -> Choice:
    """Return the cheapest choice whose modelled error reaches ``tol`` for the condition number that is to be expected."""
    if tol is None:
        # on CPU an eigendecomposition in float64 costs little more than in float32, and is exact to float32's rounding
        precise = like.is_cpu and like.dtype != torch.float64
        return PRECISE if precise else Choice(EVD(), like.dtype, 0.0)
    bound = min(TYPICAL_CONDITION, 1.0 / rel_damping) if rel_damping > 0 else TYPICAL_CONDITION
    margin = math.log(_SAFETY) + min(
        p * math.log(_ROOT_SAFETY), 50.0
    )  # that `condition` will put on top of it
    expected = torch.tensor(bound * math.exp(margin), device="cpu")
    cost = costs(n, like.device.type)
    single = torch.float32
    candidates = [(cost.evd64, PRECISE), (cost.evd32, Choice(EVD(compute_dtype=single), single, 0.0))]
    rounding = float(Choice(Rational(), single, 0.0).error(n, p, expected))
    if p > 1 and rounding < 0.9 * tol < 0.9:
        designed = 0.9 * tol - rounding
        # one proof instead of a search; who lies below it is solved again
        floor = 1.0 / (_BOUND_SLACK * float(expected))
        poles = len(approximant(1.0 / p, floor, designed, 80).shifts)
        candidates.append(
            (cost.fixed + cost.pole * poles, Choice(Rational(error=designed, floor=floor), single, designed))
        )
    able = [(price, choice) for price, choice in candidates if float(choice.error(n, p, expected)) <= tol]
    return min(able, key=lambda pair: pair[0], default=(0.0, PRECISE))[1]


def condition_bound(result: InvRoot, p: float) -> Tensor:
    """Return ``scale trace(X)^p``, up to ``n^p`` times the condition number of each member: enough where float64 has digits to spare."""
    diagonal = result.root.detach().diagonal(dim1=-2, dim2=-1)
    norm = diagonal.to(wide(diagonal.device)).sum(-1)  # no less than the 2-norm of a definite matrix
    return torch.exp(result.scale.log() + p * norm.log())


def condition(A: Tensor, result: InvRoot, p: float) -> Tensor:
    """Estimate the condition number of each member: ``lambda_max`` from A, ``lambda_min = ||X||_2^{-p}`` from its inverse root.

    Twelve power steps with eight vectors, ``O(n^2)``; NaN where there is no root.
    """
    largest = torch.minimum(_log_norm(A) + math.log(_SAFETY), result.scale.log())
    # what is missing of ||X|| counts p times
    return torch.exp(largest + p * (_log_norm(result.root) + math.log(_ROOT_SAFETY)))


def _log_norm(A: Tensor) -> Tensor:
    """Return the logarithm of the 2-norm of symmetric positive definite ``(*, n, n)``, from below, float64 ``(*)``."""
    flat = A.detach().reshape(-1, *A.shape[-2:])
    dtype = torch.float64 if A.dtype == torch.float64 else torch.float32
    # the largest entry of a definite matrix is on its diagonal
    size = flat.diagonal(dim1=-2, dim2=-1).abs().amax(-1).to(wide(A.device))
    exponent = torch.frexp(size).exponent.to(size.dtype)
    if bool((exponent.abs() < 10).all()):  # nothing can overflow, and a copy is saved
        exponent = torch.zeros_like(exponent)
        scaled = flat.to(dtype)
    else:
        scaled = rescaled(flat.to(dtype), -exponent)
    norm = rayleigh(scaled, start_vectors(8, scaled), _POWER_STEPS)
    return (norm.log() + exponent * math.log(2.0)).reshape(A.shape[:-2])


def _solve(choice: Choice, A: Tensor, options: Options, want: Want) -> tuple[InvRoot, Tensor]:
    """Solve with the options of the choice."""
    return solve(A, replace(options, solver=choice.solver, compute_dtype=choice.dtype), want)


def _merged(result: InvRoot, again: InvRoot, members: Tensor) -> InvRoot:
    """Write the second solve of some members into the result."""
    fields = {}
    for name in ("root", "status", "steps", "residual", "scale", "bound", "damping", "matmuls"):
        field = getattr(result, name).clone()
        field[members] = getattr(again, name)
        fields[name] = field
    return result._replace(**fields)
