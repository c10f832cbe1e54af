# SPDX-License-Identifier: Apache-2.0
"""A grid of learning rates by seeds, for several contestants, each judged at its own best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from dash_optim.training.compare import NONE_LEFT, mean_loss, plain_log_ticks
from dash_optim.training.outcome import Outcome
from dash_optim.training.runs import by_seed
from dash_optim.training.settings import Job
from matroots.studies._plots import PALETTE, grid, name_axes
from matroots.studies._report import Plot, Report, Table, fixed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Point = tuple[str, float]
"""A contestant, and its learning rate."""


def grid_of(
    named: Mapping[str, Job], rates: Sequence[float], seeds: Sequence[int]
) -> dict[Point, dict[str, Job]]:
    """Return the jobs of a sweep, one for each seed (its own if there are none), by the name of their folder, at each point.

    Args:
        named: a job for each contestant.
        rates: peak learning rates.
        seeds: of weights and data.
    """
    return {
        (name, rate): by_seed(f"{name}, lr={rate!r}", job.with_values(optimizer={"lr": rate}), seeds)
        for name, job in named.items()
        for rate in rates
    }


def best_rates(points: Mapping[Point, Sequence[Outcome]]) -> dict[str, float]:
    """Return the rate with the lowest mean loss over seeds, for each contestant."""
    found: dict[str, float] = {}
    for name, rate in points:
        if name not in found or mean_loss(points[name, rate]) < mean_loss(points[name, found[name]]):
            found[name] = rate
    return found


def sweep_report(points: Mapping[Point, Sequence[Outcome]], title: str) -> Report:
    """Return the report of a sweep: loss against rate for each contestant, and each at its best."""
    best = best_rates(points)
    winner = min(best, key=lambda name: mean_loss(points[name, best[name]]))
    lowest = mean_loss(points[winner, best[winner]])
    summary = (
        f"Each at its own best rate, {winner} has the lowest loss: {lowest:.3f}."
        if np.isfinite(lowest)
        else NONE_LEFT
    )
    rates = sorted({rate for _, rate in points})
    rows = [
        (
            name,
            *(_cell(points.get((name, rate)), rate == best[name]) for rate in rates),
            f"{best[name]:g}" if np.isfinite(mean_loss(points[name, best[name]])) else "-",
        )
        for name in best
    ]
    edges = [
        name
        for name, rate in best.items()
        if len(rates) > 1 and rate in (rates[0], rates[-1]) and np.isfinite(mean_loss(points[name, rate]))
    ]
    notes = [
        f"{name}: the best rate is at the edge of the grid; a better one may lie beyond." for name in edges
    ]
    caption = "Mean loss on held-out text after training, against the peak learning rate; bars from the lowest to the highest seed."
    return Report(
        name="sweep",
        title=title,
        summary=summary,
        tables=[
            Table(
                "Mean held-out loss by peak rate (best of each in *)",
                ("optimizer", *(f"{rate:g}" for rate in rates), "best"),
                rows,
            )
        ],
        plots=[Plot("sweep", caption, sweep_figure(points, best, title))],
        data={
            "sweep": [
                _row(name, rate, outcome) for (name, rate), found in points.items() for outcome in found
            ]
        },
        notes=notes,
    )


def sweep_figure(points: Mapping[Point, Sequence[Outcome]], best: Mapping[str, float], title: str) -> Figure:
    """Draw the mean loss of each contestant against the rate."""
    figure, ((axes,),) = grid(1, 1, title)
    for colour, name in zip(np.resize(PALETTE, len(best)), best, strict=True):
        rates = sorted(rate for other, rate in points if other == name)
        losses = [[np.nan if o.diverged else o.loss for o in points[name, rate]] for rate in rates]
        means = np.array([np.mean(each) for each in losses])
        spread = np.array(
            [[mean - min(each), max(each) - mean] for mean, each in zip(means, losses, strict=True)]
        )
        axes.errorbar(
            rates,
            means,
            yerr=np.abs(spread).T,
            color=str(colour),
            label=name,
            marker="o",
            markersize=4,
            linewidth=1.2,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    plain_log_ticks(axes)
    name_axes(axes, "peak learning rate", "held-out loss, nats per token")
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    return figure


def _cell(outcomes: Sequence[Outcome] | None, is_best: bool) -> str:
    if outcomes is None:
        return ""
    mean = mean_loss(outcomes)
    return "diverged" if np.isinf(mean) else fixed(mean, 3) + ("*" if is_best else "")


def _row(name: str, rate: float, outcome: Outcome) -> dict[str, object]:
    return {
        "optimizer": name,
        "rate": rate,
        "seed": outcome.seed,
        "loss": outcome.loss,
        "diverged": outcome.diverged,
        "seconds": outcome.seconds,
        "optimizer_ms": outcome.ms["optimizer"],
    }
