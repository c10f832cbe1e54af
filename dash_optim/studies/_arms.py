# SPDX-License-Identifier: Apache-2.0
"""What all studies share: arms (settings that are compared), their runs over seeds, and differences with their standard errors."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from scipy import stats

from dash_optim.training.outcome import Outcome
from dash_optim.training.runs import run_groups
from dash_optim.training.settings import Job, read_job
from matroots._command import InputError
from matroots.studies._report import Table, fixed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Groups = dict[str, list[Outcome]]
"""The outcomes of each arm, by its label, one for each seed."""

QUICK: Final[dict[str, dict[str, Any]]] = {
    "model": {"preset": "0.5m", "width": 32, "layers": 1, "heads": 2, "hidden": 64, "context": 32},
    "training": {"steps": 12, "batch": 4},
    "logging": {"validate_every": 4, "validation_windows": 8},
}
"""Settings of ``--quick``: everything is run, nothing is learnt."""


@dataclass(frozen=True)
class Arm:
    """Settings by section, and what tables call them."""

    label: str
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Settings:
    """What the command line says about a study.

    Attributes:
        out: folder of all studies.
        base: settings by section that hold for all arms.
        seeds: of weights and data.
        workers: runs at a time.
        quick: a model and a number of steps that take seconds.
    """

    out: Path
    base: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    seeds: Sequence[int] = (0, 1, 2)
    workers: int = 1
    quick: bool = False

    def __post_init__(self) -> None:
        """Take sections as :func:`read_job` does: an optimizer may be its type alone, and a section may be empty."""
        base = {
            name: {"type": part} if isinstance(part, str) else part or {} for name, part in self.base.items()
        }
        object.__setattr__(self, "base", base)

    def job(self, arm: Arm, seed: int) -> Job:
        """Return the job of an arm; raise :class:`InputError` for a setting that is the arm's and would be another."""
        for name, values in arm.sections.items():
            for key, value in values.items():
                asked = self.base.get(name, {}).get(key, value)
                if asked != value:
                    raise InputError(
                        f"{name}.{key}: is what this study sets, here to {value!r}; got {asked!r}"
                    )
        sections: dict[str, dict[str, Any]] = {}
        for part in (QUICK if self.quick else {}, self.base, arm.sections, {"training": {"seed": seed}}):
            for name, values in part.items():
                sections[name] = {**sections.get(name, {}), **values}
        return read_job(sections)

    def without_steps(self) -> Settings:
        """Return the same without ``training.steps``, for a study that sets them itself."""
        training = {key: value for key, value in self.base.get("training", {}).items() if key != "steps"}
        return replace(self, base={**self.base, "training": training})


def run_arms(study: str, arms: Iterable[Arm], settings: Settings) -> Groups:
    """Run every arm with every seed, in ``out/study/arm/seed``, and return the outcomes; finished runs are not run again."""
    groups = {
        arm.label: {f"{slug(arm.label)}/seed{seed}": settings.job(arm, seed) for seed in settings.seeds}
        for arm in arms
    }
    return run_groups(groups, settings.out / study, workers=settings.workers, quiet=True)


def slug(label: str) -> str:
    """Return a label as the name of a folder."""
    return re.sub(r"[^A-Za-z0-9.=+_-]+", "-", label).strip("-")


def losses(outcomes: Sequence[Outcome]) -> list[float]:
    """Return the final losses, infinite for runs that diverged."""
    return [math.inf if outcome.diverged else outcome.loss for outcome in outcomes]


def difference(outcomes: Sequence[Outcome], reference: Sequence[Outcome]) -> tuple[float, float]:
    """Return the mean difference of the losses and its standard error, paired by seed: weights and data are the same in both.

    Infinite, with an error of NaN, where a run diverged; the error is NaN for a single seed.
    """
    ours, theirs = np.array(losses(outcomes)), np.array(losses(reference))
    if not np.isfinite([ours, theirs]).all():
        return math.inf, math.nan
    deltas = ours - theirs
    error = float(deltas.std(ddof=1) / math.sqrt(len(deltas))) if len(deltas) > 1 else math.nan
    return float(deltas.mean()), error


def loss_cells(outcomes: Sequence[Outcome], reference: Sequence[Outcome] | None = None) -> tuple[str, ...]:
    """Return cells for a table: losses by seed, their mean, and the difference to a reference with its standard error."""
    each = losses(outcomes)
    mean = float(np.mean(each))
    cells: tuple[str, ...] = (
        " / ".join("diverged" if math.isinf(loss) else f"{loss:.3f}" for loss in each),
        "diverged" if math.isinf(mean) else fixed(mean, 3),
    )
    return cells if reference is None else (*cells, shown_difference(outcomes, reference))


def shown_difference(outcomes: Sequence[Outcome], reference: Sequence[Outcome]) -> str:
    """Return :func:`difference` as a cell."""
    delta, error = difference(outcomes, reference)
    return "-" if math.isinf(delta) else f"{delta:+.3f}" + ("" if math.isnan(error) else f" ± {error:.3f}")


def draw_means(
    axes: Axes, points: Iterable[tuple[float, Sequence[float]]], colour: str, label: str | None
) -> None:
    """Draw means of losses against what was varied, from left to right, with bars of one standard deviation over seeds."""
    x, each = zip(*sorted(points), strict=True)
    finite = [np.where(np.isinf(values), np.nan, values) for values in each]  # diverged: a gap
    axes.errorbar(
        x,
        [values.mean() for values in finite],
        yerr=[values.std(ddof=1) if len(values) > 1 else 0.0 for values in finite],
        marker="o",
        markersize=4,
        capsize=2,
        color=colour,
        label=label,
    )


def chance(seeds: Sequence[int]) -> str:
    """Return what belongs under a table of differences: how many of its standard errors may be chance, by Student's t for this few seeds."""
    if len(seeds) < 2:
        return "One seed: what differs may be chance."
    bound = float(stats.t.ppf(0.975, len(seeds) - 1))
    return (
        f"± is one standard error over {len(seeds)} seeds. A difference that was asked for beforehand is significant (5 %, two-sided t test)"
        f" from {bound:.1f} of them; the best of many arms, picked afterwards, needs more."
    )


LOSS_COLUMNS: Final = ("held-out loss by seed", "mean")


def rows(groups: Mapping[str, Sequence[Outcome]]) -> list[dict[str, object]]:
    """Return a line of data for each run."""
    return [
        {
            "arm": label,
            "seed": outcome.seed,
            "loss": outcome.loss,
            "diverged": outcome.diverged,
            "steps": outcome.step,
            "roots": outcome.roots,
            "seconds": outcome.seconds,
            **{f"{part}_ms": value for part, value in outcome.ms.items()},
            "state_bytes": outcome.optimizer_bytes,
        }
        for label, outcomes in groups.items()
        for outcome in outcomes
    ]


def cross_table(
    title: str,
    corner: str,
    groups: Mapping[str, Sequence[Outcome]],
    cells: Mapping[tuple[str, str], str],
) -> Table:
    """Return a table of mean losses (± standard deviation over seeds), given which arm belongs into which row and column."""
    lines = list(dict.fromkeys(row for row, _ in cells))
    columns = list(dict.fromkeys(column for _, column in cells))
    table = [
        (line, *(_mean_cell(groups.get(cells.get((line, column), ""))) for column in columns))
        for line in lines
    ]
    return Table(title, (corner, *columns), table)


def _mean_cell(outcomes: Sequence[Outcome] | None) -> str:
    if not outcomes:
        return ""
    each = losses(outcomes)
    if math.isinf(max(each)):
        return "diverged"
    spread = f" ± {np.std(each, ddof=1):.3f}" if len(each) > 1 else ""
    return f"{np.mean(each):.3f}{spread}"
