# SPDX-License-Identifier: Apache-2.0
"""The loop of the coupled iterations, driven by scripted residuals: who stops when, with which iterate and which count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from matroots import Status
from matroots.solvers import _coupled

INF = float("inf")
LIMIT = 1e-6


class Scripted:
    """Iterates whose residuals are given in advance; a root is tagged ``100 member + step`` of the step that made it."""

    last_cost = 1

    def __init__(self, residuals: list[list[float]]) -> None:
        self.members = torch.arange(len(residuals))
        self.residuals = residuals
        self.step = 0
        self.spent = 0

    def _tagged(self, members: Tensor | None, step: int) -> tuple[Tensor, ...]:
        chosen = self.members if members is None else self.members[members]
        return ((100 * chosen + step).double().reshape(-1, 1, 1),)

    def residual(self) -> Tensor:
        values = [
            self.residuals[m][min(self.step, len(self.residuals[m]) - 1)] for m in self.members.tolist()
        ]
        return torch.tensor(values, dtype=torch.float64)

    def advance(self) -> None:
        self.step += 1
        self.spent += 3

    def last(self, members: Tensor | None) -> tuple[Tensor, ...]:
        return self._tagged(members, self.step + 1)

    def current(self, members: Tensor | None) -> tuple[Tensor, ...]:
        return self._tagged(members, self.step)

    def previous(self, members: Tensor | None) -> tuple[Tensor, ...]:
        return self._tagged(members, self.step - 1)

    def keep(self, members: Tensor) -> None:
        self.members = self.members[members]


def run(residuals: list[list[float]], max_steps: int = 9, tol: float | None = None) -> Any:
    b = len(residuals)
    problem = SimpleNamespace(A=torch.empty(b, 1, 1), max_steps=max_steps, precision_limit=LIMIT)
    return _coupled.iterate(Scripted(residuals), problem, None, 2, tol)  # type-checked callers pass a Problem


CASES = [
    # residuals before each step                  status             steps  residual (None: carried through the last step)
    ([4.0, 0.5, 0.1, 0.001, 0.0], Status.CONVERGED, 4, None),
    ([1e-9], Status.CONVERGED, 1, None),
    ([4.0, 2.0, 0.4, 0.1, 0.3], Status.STAGNATED, 3, 0.1),  # rose: the iterate before is the better one
    ([4.0, 2.0, 0.4, 0.1, 0.08], Status.STAGNATED, 4, 0.08),  # no longer halves: what there is
    ([4.0, 3.0, 2.5, 9.0], Status.DIVERGED, 2, 2.5),  # rose before it ever came below 1
    ([4.0, 0.4, float("nan")], Status.STAGNATED, 1, 0.4),  # a NaN after good iterates
    ([float("nan")], Status.DIVERGED, 0, INF),
    ([4.0, 3.9, 3.8, 3.7], Status.MAX_STEPS, 9, None),
]


@pytest.mark.parametrize(("residuals", "status", "steps", "residual"), CASES)
def test_alone(residuals: list[float], status: Status, steps: int, residual: float | None) -> None:
    outcome = run([residuals])
    assert outcome.status.tolist() == [status]
    assert outcome.steps.tolist() == [steps]
    if status != Status.DIVERGED:
        assert outcome.roots[0].item() == steps  # the iterate that is returned is the one that was measured
    if residual is not None:
        assert outcome.residual.item() == residual
    else:
        rho = residuals[min(steps, len(residuals)) - 1]
        carried = 0.75 * rho**2 + 0.25 * rho**3 if rho < 1 else rho
        assert outcome.residual.item() == pytest.approx(carried + LIMIT, rel=1e-12)


def test_together_as_alone() -> None:
    """Whatever the others do, and in whatever order they leave, each member ends as it does alone."""
    together = run([residuals for residuals, *_ in CASES])
    for i, (residuals, *_) in enumerate(CASES):
        alone = run([residuals])
        for name in ("status", "steps", "residual", "matmuls"):
            torch.testing.assert_close(
                getattr(together, name)[i], getattr(alone, name)[0], rtol=0, atol=0, equal_nan=True
            )
        if alone.status[0] != Status.DIVERGED:
            assert together.roots[0][i].item() == 100 * i + alone.steps.item()
        history = together.history[i][~together.history[i].isnan()]
        assert torch.equal(history, alone.history[0][: len(history)])
        assert len(history) == alone.history[0].isfinite().sum()


def test_products_are_counted_up_to_the_step_that_is_returned() -> None:
    outcome = run([[4.0, 0.5, 0.1, 0.001], [4.0, 2.0, 0.4, 0.1, 0.3]])
    assert outcome.matmuls.tolist() == [3 * 3 + 1, 4 * 3]


def test_carried_bounds_what_a_newton_step_does_to_commuting_residuals() -> None:
    """Against the scalar map m -> m ((p + 1 - m)/p)^p on eigenvalues drawn in the branch."""
    generator = torch.Generator().manual_seed(0)
    for p in (1, 2, 3, 4, 8):
        r = (2 * torch.rand(2000, 5, generator=generator, dtype=torch.float64) - 1) * torch.logspace(
            -8, -0.01, 2000, dtype=torch.float64
        ).unsqueeze(-1)
        m = 1 - r
        after = 1 - m * ((p + 1 - m) / p) ** p
        rho = torch.linalg.vector_norm(r, dim=-1)
        bound = _coupled.carried(rho, p)
        assert bool((torch.linalg.vector_norm(after, dim=-1) <= bound * (1 + 1e-12) + 1e-14).all())
        assert bool((bound <= rho).all())


def test_tol_is_what_the_returned_residual_meets() -> None:
    outcome = run([[4.0, 0.5, 0.1, 0.001]], tol=0.2)
    assert outcome.steps.tolist() == [3]
    assert outcome.residual.item() <= 0.2
