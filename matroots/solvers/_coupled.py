# SPDX-License-Identifier: Apache-2.0
"""The loop that coupled iterations share: when each member stops, and which iterate it gets.

A coupled iteration carries a matrix M that tends to I while X tends to the root. Its residual ``||I - M_j||_F`` is known
before step j + 1, so the last step need not compute M again: its residual is bounded in closed form (`carried`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from matroots._products import wide
from matroots._result import Status
from matroots.solvers._problem import Problem

DEFAULT_MAX_STEPS = 60
_GO_ON = -1
_TAKE_LAST = (
    int(Status.CONVERGED),
    int(Status.MAX_STEPS),
)  # plain integers: what tolist() gives, and what compilers take
_TAKE_BEST = (int(Status.STAGNATED), int(Status.DIVERGED))
_RISING = 1.05  # a residual that grows by more than rounding noise has left the region where the iteration contracts
Roots = tuple[Tensor, ...]


class Iterates(Protocol):
    """State of a coupled iteration over the members that are still active."""

    spent: int
    last_cost: int

    def residual(self) -> Tensor:
        """Return ``||I - M||_F`` of the current iterates, float64 ``(active,)``, and prepare the next step."""
        ...

    def advance(self) -> None:
        """Take one step in full."""
        ...

    def last(self, members: Tensor | None) -> Roots:
        """Return what is wanted of the step that was prepared, for these members (None: all), and nothing else."""
        ...

    def current(self, members: Tensor | None) -> Roots:
        """Return what is wanted of the current iterates."""
        ...

    def previous(self, members: Tensor | None) -> Roots:
        """Return what is wanted of the iterates one step before."""
        ...

    def keep(self, members: Tensor) -> None:
        """Drop all other members."""
        ...


@dataclass(frozen=True)
class Outcome:
    """Roots of all members and, each with shape ``(b,)``, how the iteration ended."""

    roots: Roots
    status: Tensor
    steps: Tensor
    residual: Tensor
    history: Tensor
    matmuls: Tensor


def carried(residual: Tensor, degree: int) -> Tensor:
    """Bound ``||I - M'||_F`` after a Newton step by ``||I - M||_F`` before it.

    With ``q(m) = 1 + (1 - m)/p`` an eigenvalue ``m = 1 - r`` goes to ``1 - h(r)``, ``h(r) = 1 - (1 - r)(1 + r/p)^p``, and
    ``|h(r)| <= h(|r|)`` with ``h(r)/r`` increasing on [0, 1]. So ``||h(R)||_F <= rho h(m)/m`` with ``m = min(rho, 1)``,
    ``rho = ||R||_F``; above 1 a step never enlarges ``|r|`` inside the branch. For p = 2, ``h(r) = 3/4 r^2 + 1/4 r^3``.
    """
    m = residual.clamp(max=1.0)
    # 1 - (1 - m)(1 + m/p)^p without cancellation at small m
    h = -torch.expm1(torch.log1p(-m) + degree * torch.log1p(m / degree))
    return torch.where(m > 0, residual * h / m, residual)


def iterate(
    iterates: Iterates, problem: Problem, steps: int | None, degree: int, tol: float | None
) -> Outcome:
    """Run a Newton iteration for the power ``degree``: ``steps`` steps, or until each member stops (None)."""
    limit = problem.precision_limit

    def returned(rho: Tensor) -> Tensor:
        return carried(rho, degree) + limit

    if steps is not None:
        return _fixed(iterates, steps, 2 * limit, returned)
    max_steps = DEFAULT_MAX_STEPS if problem.max_steps is None else problem.max_steps
    members = torch.arange(problem.A.shape[0], device=problem.A.device)
    return _adaptive(iterates, members, max_steps, 2 * limit if tol is None else tol, returned)


def _fixed(iterates: Iterates, steps: int, tol: float, returned: Callable[[Tensor], Tensor]) -> Outcome:
    """Take ``steps`` steps with every member: no test and no synchronisation inside."""
    residuals = []
    for step in range(steps):
        residuals.append(iterates.residual())
        if step < steps - 1:
            iterates.advance()
    final = returned(residuals[-1])
    roots = iterates.last(None)
    status = torch.where(final <= tol, int(Status.CONVERGED), int(Status.MAX_STEPS))
    lost = ~torch.isfinite(final) | (residuals[-1] > _RISING * residuals[0].clamp_min(1.0))
    status = torch.where(lost, int(Status.DIVERGED), status).to(torch.int32)
    each = torch.ones_like(status, dtype=torch.int64)
    return Outcome(
        roots=roots,
        status=status,
        steps=each * steps,
        residual=final,
        history=torch.stack([*residuals[1:], final], dim=-1),
        matmuls=each * (iterates.spent + iterates.last_cost),
    )


def _adaptive(
    iterates: Iterates,
    active: Tensor,
    max_steps: int,
    tol: float,
    returned: Callable[[Tensor], Tensor],
) -> Outcome:
    """Step until each member has converged, stagnated or diverged; one synchronisation a step.

    Members that stop are written out and dropped from the batch, so no member pays for another.
    """
    ledger = _Ledger(active, max_steps)
    best = torch.full_like(active, torch.inf, dtype=wide(active.device))
    before = best
    for step in range(max_steps):
        rho = iterates.residual()
        ledger.record(active, rho, step)
        final = returned(rho)
        verdict, rose = _verdict(rho, best, final, tol, step == max_steps - 1)
        codes, went_back = verdict.tolist(), rose.tolist()
        last_step = [i for i, c in enumerate(codes) if c in _TAKE_LAST]
        stay = [i for i, c in enumerate(codes) if c in _TAKE_BEST and not went_back[i]]
        go_back = [i for i, c in enumerate(codes) if c in _TAKE_BEST and went_back[i]]
        for members, take, steps, residual, cost in (
            (last_step, iterates.last, step + 1, final, iterates.last_cost),
            (stay, iterates.current, step, rho, 0),
            (go_back, iterates.previous, max(step - 1, 0), before, 0),
        ):
            if members:
                chosen = None if len(members) == len(codes) else _index(members, active)
                roots = take(chosen)
                ledger.retire(active, chosen, roots, verdict, steps, residual, iterates.spent + cost)
        going = [i for i, c in enumerate(codes) if c == _GO_ON]
        if not going:
            break
        if len(going) < len(codes):
            chosen = _index(going, active)
            iterates.keep(chosen)
            active, best, rho = active[chosen], best[chosen], rho[chosen]
        best, before = torch.minimum(best, rho), rho
        iterates.advance()
    return ledger.outcome()


def select(A: Tensor, members: Tensor | None) -> Tensor:
    """Return these members of A (None: all of them, without a copy)."""
    return A if members is None else A[members]


def _index(members: list[int], like: Tensor) -> Tensor:
    return torch.tensor(members, dtype=torch.int64, device=like.device)


def _verdict(rho: Tensor, best: Tensor, final: Tensor, tol: float, last: bool) -> tuple[Tensor, Tensor]:
    """Return the status each member stops with (`_GO_ON`: it does not), and whether its residual rose.

    Inside the region of quadratic convergence (below 1/2) a step that does not even halve the residual has met
    the precision limit. A member whose residual rises before it has come below 1 has diverged.
    """
    rose = ~torch.isfinite(rho) | (rho > _RISING * best)
    stalled = (best < 0.5) & (rho > 0.5 * best)
    verdict = torch.full(rho.shape, int(Status.MAX_STEPS) if last else _GO_ON, device=rho.device)
    stopped = torch.where(torch.fmin(best, rho) < 1.0, int(Status.STAGNATED), int(Status.DIVERGED))
    verdict = torch.where(rose | stalled, stopped, verdict)
    return torch.where(final <= tol, int(Status.CONVERGED), verdict), rose


class _Ledger:
    """Collects what each member retires with."""

    def __init__(self, members: Tensor, max_steps: int) -> None:
        b, device = members.shape[0], members.device
        self.status = torch.zeros(b, dtype=torch.int32, device=device)
        self.steps = torch.zeros(b, dtype=torch.int64, device=device)
        self.matmuls = torch.zeros(b, dtype=torch.int64, device=device)
        self.residual = torch.full((b,), torch.nan, dtype=wide(device), device=device)
        self.history = torch.full((b, max_steps), torch.nan, dtype=wide(device), device=device)
        self.roots: Roots = ()
        self._longest = 0

    def record(self, active: Tensor, rho: Tensor, step: int) -> None:
        """Note the residual after ``step`` steps (0: of the input, which no step has produced)."""
        if step > 0:
            self.history[active, step - 1] = rho

    def retire(
        self,
        active: Tensor,
        chosen: Tensor | None,
        roots: Roots,
        verdict: Tensor,
        steps: int,
        residual: Tensor,
        matmuls: int,
    ) -> None:
        """Write out the ``chosen`` of the active members (None: all)."""
        if chosen is None and active.shape[0] == self.status.shape[0]:
            self.roots = roots
        else:
            if not self.roots:
                shape = (self.status.shape[0], *roots[0].shape[1:])
                self.roots = tuple(root.new_empty(shape) for root in roots)
            for whole, part in zip(self.roots, roots, strict=True):
                whole[active if chosen is None else active[chosen]] = part
        pick = slice(None) if chosen is None else chosen
        where = active[pick]
        self.status[where] = verdict[pick].to(torch.int32)
        self.steps[where] = steps
        self.matmuls[where] = matmuls
        self.residual[where] = residual[pick]
        self.history[where, steps:] = torch.nan
        if steps > 0:
            self.history[where, steps - 1] = residual[pick]
        self._longest = max(self._longest, steps)

    def outcome(self) -> Outcome:
        return Outcome(
            self.roots,
            self.status,
            self.steps,
            self.residual,
            self.history[:, : self._longest],
            self.matmuls,
        )
