# SPDX-License-Identifier: Apache-2.0
"""What does staleness cost? Roots on a calendar, staggered, and where a certificate asks for them: loss, roots computed, time."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from dash_optim.studies._arms import (
    Arm,
    Groups,
    Settings,
    chance,
    draw_means,
    loss_cells,
    losses,
    rows,
    run_arms,
)
from matroots.studies._plots import PALETTE, grid, name_axes
from matroots.studies._report import Plot, Report, Table, fixed

SCHEDULES: Final[dict[str, dict[str, Any]]] = {
    "every step": {"update_freq": 1},
    "every 3": {"update_freq": 3, "refresh": "interval"},
    "every 10": {"update_freq": 10, "refresh": "interval"},
    "every 30": {"update_freq": 30, "refresh": "interval"},
    "staggered over 10": {"update_freq": 10, "refresh": "staggered"},
    "staggered over 30": {"update_freq": 30, "refresh": "staggered"},
    "certified to 1": {"refresh": "certified", "refresh_tol": 1.0},
    "certified to 3": {"refresh": "certified", "refresh_tol": 3.0},
    "certified to 10": {"refresh": "certified", "refresh_tol": 10.0},
    "certified to 30": {"refresh": "certified", "refresh_tol": 30.0},
}
EXPONENTS: Final = (2, 4)


def run(settings: Settings) -> Report:
    """Run all schedules and report."""
    chosen = list(SCHEDULES.items())[:: 4 if settings.quick else 1]
    arms = {
        f"p={p}, {name}": Arm(
            f"p={p}, {name}", {"optimizer": {"type": "dash", "p": p, "rel_damping": 1e-4, **options}}
        )
        for p in EXPONENTS
        for name, options in chosen
    }
    groups = run_arms("staleness", arms.values(), settings)
    model = next(iter(groups.values()))[0]
    title = f"What does staleness cost? {model.parameters / 1e6:.2g}M parameters, {model.steps} steps, {len(settings.seeds)} seeds"
    table = [
        (
            label,
            *loss_cells(outcomes, groups[f"{label.partition(',')[0]}, {chosen[0][0]}"]),
            fixed(_roots(groups, label), 3),
            fixed(float(np.mean([outcome.ms["optimizer"] for outcome in outcomes]))),
        )
        for label, outcomes in groups.items()
    ]
    columns = (
        "p, refresh",
        "held-out loss by seed",
        "mean",
        "minus every step",
        "roots a factor and step",
        "optimizer ms",
    )
    caption = "Loss against the share of roots that are computed: intervals, staggered and certified refreshes. Bars: standard deviation over seeds."
    return Report(
        name="staleness",
        title=title,
        summary="What computing roots less often saves in time, and what it costs in loss.",
        tables=[Table("Loss, roots and time by refresh (± standard error, paired by seed)", columns, table)],
        plots=[Plot("staleness", caption, _figure(groups, title))],
        data={"staleness": rows(groups)},
        notes=[chance(settings.seeds), "rel_damping 1e-4: certificates in float32 want that much."],
    )


def _roots(groups: Groups, label: str) -> float:
    return float(np.mean([outcome.roots or np.nan for outcome in groups[label]]))


def _figure(groups: Groups, title: str) -> Any:
    figure, (panels,) = grid(1, len(EXPONENTS), title)
    for axes, p in zip(panels, EXPONENTS, strict=True):
        for colour, kind in zip(PALETTE, ("every", "staggered", "certified"), strict=False):
            labels = [label for label in groups if label.startswith(f"p={p}, {kind}")]
            points = [(_roots(groups, label), losses(groups[label])) for label in labels]
            draw_means(axes, points, colour, kind if p == EXPONENTS[0] else None)
        axes.set_xscale("log")
        name_axes(
            axes,
            "roots computed, per factor and step",
            "held-out loss" if p == EXPONENTS[0] else "",
            f"p = {p}",
        )
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    return figure
