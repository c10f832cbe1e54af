# SPDX-License-Identifier: Apache-2.0
"""Optimizers beside one another: the same model, data and seeds, loss against steps and against seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from dash_optim.training.outcome import PARTS, Outcome, perplexity
from matroots.studies._plots import PALETTE, grid, name_axes
from matroots.studies._report import Plot, Report, Table, fixed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NONE_LEFT: Final = "Of every optimizer some run was given up: there is no loss to compare."
Groups = Mapping[str, Sequence[Outcome]]
"""The outcomes of each contestant, one for each seed."""


def comparison(groups: Groups, title: str) -> Report:
    """Return the report of a comparison: a figure, a table of losses and one of times."""
    best = min(groups, key=lambda name: mean_loss(groups[name]))
    lowest = mean_loss(groups[best])
    summary = (
        f"The lowest loss on the held-out text is that of {best}: {lowest:.3f} nats per token (perplexity {perplexity(lowest):.2f})."
        if np.isfinite(lowest)
        else NONE_LEFT
    )
    caption = (
        "Loss on held-out text against steps and against seconds of training (forward, backward, optimizer; validation and checkpoints not counted)."
        " Lines are means over seeds, bands reach from the lowest to the highest."
    )
    return Report(
        name="comparison",
        title=title,
        summary=summary,
        tables=[_losses(groups), _times(groups)],
        plots=[Plot("comparison", caption, loss_curves(groups, title))],
        data={"comparison": [row for name, outcomes in groups.items() for row in _rows(name, outcomes)]},
        notes=_notes(groups),
    )


def mean_loss(outcomes: Sequence[Outcome]) -> float:
    """Return the mean final loss; infinite if a run diverged."""
    return float(np.mean([np.inf if outcome.diverged else outcome.loss for outcome in outcomes]))


def loss_curves(groups: Groups, title: str) -> Figure:
    """Draw the curves of all contestants against steps and seconds."""
    figure, ((left, right),) = grid(1, 2, title)
    for colour, (name, outcomes) in zip(np.resize(PALETTE, len(groups)), groups.items(), strict=True):
        draw_curve(left, outcomes, 0, str(colour), name)
        draw_curve(right, outcomes, 1, str(colour), name)
    name_axes(left, "steps", "held-out loss, nats per token")
    name_axes(right, "seconds of training", "")
    for axes in (left, right):
        axes.set_yscale("log")
        plain_log_ticks(axes)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
    return figure


def draw_curve(axes: Axes, outcomes: Sequence[Outcome], column: int, colour: str, label: str) -> None:
    """Draw the mean over seeds, and the band between lowest and highest where there are several; ``column`` is 0 for steps, 1 for seconds.

    Of runs that were given up there is no whole curve: they count only where there are no others. Runs that were looked at in different steps are drawn where all were.
    """
    whole = [outcome for outcome in outcomes if not outcome.diverged] or outcomes
    curves = [{step: (step, seconds, loss) for step, seconds, loss in outcome.curve} for outcome in whole]
    common = sorted(set.intersection(*map(set, curves))) if curves else []
    if not common:
        return
    stacked = np.array([[curve[step] for step in common] for curve in curves])
    x, losses = stacked[:, :, column].mean(0), stacked[:, :, 2]
    axes.plot(
        x, losses.mean(0), color=colour, label=label, linewidth=1.4, marker="o" if len(common) == 1 else None
    )
    if len(curves) > 1:
        axes.fill_between(x, losses.min(0), losses.max(0), color=colour, alpha=0.2, linewidth=0)


def plain_log_ticks(axes: Axes) -> None:
    """Label a logarithmic y axis that covers less than a decade, and an x axis that covers one or two, with plain numbers."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, ScalarFormatter, StrMethodFormatter

    axes.yaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_locator(NullLocator())
    if axes.get_xscale() == "log":
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.xaxis.set_minor_locator(NullLocator())


def _losses(groups: Groups) -> Table:
    rows = []
    for name, outcomes in groups.items():
        losses = [outcome.loss for outcome in outcomes]
        each = " / ".join("diverged" if o.diverged else f"{o.loss:.3f}" for o in outcomes)
        mean = mean_loss(outcomes)
        roots = [outcome.roots for outcome in outcomes if outcome.roots is not None]
        rows.append(
            (
                name,
                str(outcomes[0].steps),
                each,
                fixed(mean, 3),
                fixed(perplexity(mean), 2),
                fixed(float(np.std(losses, ddof=1)), 3) if len(losses) > 1 else "-",
                fixed(float(np.mean(roots)), 3) if roots else "-",
            )
        )
    columns = (
        "optimizer",
        "steps",
        "held-out loss by seed",
        "mean",
        "perplexity",
        "std",
        "roots a factor and step",
    )
    return Table("Loss after training, nats per token", columns, rows)


def _times(groups: Groups) -> Table:
    rows = []
    for name, outcomes in groups.items():
        ms = {part: float(np.mean([outcome.ms[part] for outcome in outcomes])) for part in PARTS}
        rows.append(
            (
                name,
                *(fixed(ms[part]) for part in PARTS),
                fixed(float(np.mean([outcome.seconds for outcome in outcomes]))),
                f"{np.mean([outcome.tokens_per_second for outcome in outcomes]):,.0f}",
                fixed(outcomes[0].optimizer_bytes / 2**20),
            )
        )
    columns = ("optimizer", *(f"{part} ms" for part in PARTS), "seconds in all", "tokens/s", "state MiB")
    return Table("Time of a step (mean), and memory of the optimizer's state", columns, rows)


def _rows(name: str, outcomes: Sequence[Outcome]) -> list[dict[str, object]]:
    return [
        {"optimizer": name, "seed": outcome.seed, "step": step, "seconds": seconds, "loss": loss}
        for outcome in outcomes
        for step, seconds, loss in outcome.curve
    ]


def _notes(groups: Groups) -> list[str]:
    return [
        f"{name}, seed {outcome.seed}: given up at step {outcome.step}: {outcome.reason}."
        for name, outcomes in groups.items()
        for outcome in outcomes
        if outcome.diverged
    ]
