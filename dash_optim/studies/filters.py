# SPDX-License-Identifier: Apache-2.0
"""Accuracy or filter? What the inverse root of a factor should be for training, and whether it matters how exactly it is computed.

A root computed by too few Newton steps is a filter on the spectrum that is not ``x^{-1/p}``. If it trains better than the exact root, the question is whether the error is the
reason or the filter's shape. The same iteration with float64 factors applies the same filter without rounding errors: if the loss stays, it is the shape. Then other shapes can be
had exactly: a smaller p, less damping or more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from dash_optim.studies._arms import (
    Arm,
    Groups,
    Settings,
    chance,
    cross_table,
    draw_means,
    losses,
    rows,
    run_arms,
    shown_difference,
)
from matroots.studies._plots import PALETTE, grid, name_axes
from matroots.studies._report import Plot, Report, Table

Options = dict[str, Any]
_DOUBLE: Final[Options] = {"factor_dtype": "float64"}
SOLVERS: Final[dict[str, Options]] = {
    "evd, fp64": {"method": {"type": "evd", "compute_dtype": "float64"}},
    "evd, fp32": {"method": "evd"},
    "minimax": {"method": "minimax"},
    "cn, converged": {"method": "cn"},
    "ndb, 10+10 steps": {"method": {"type": "ndb", "steps": 10}},
    "ndb, 10+10 steps, fp64": {"method": {"type": "ndb", "steps": 10}, **_DOUBLE},
    "cn, 10 steps": {"method": {"type": "cn", "steps": 10}},
    "chebyshev, degree 60": {"method": {"type": "chebyshev", "degree": 60}},
}
"""Ways to a fourth root; the first is the reference. "ndb, 10+10 steps" is how arXiv:2602.02016 runs it, by two square roots of ten steps. Until
it converges it cannot be run in float32 at a damping of 1e-6: some factors never do, and take 100 steps each time."""

KEY_SOLVERS: Final = ("evd, fp64", "evd, fp32", "ndb, 10+10 steps", "ndb, 10+10 steps, fp64")
"""Those that the question is about: run with another damping and with roots in every step as well."""

DAMPINGS: Final[dict[float, Options]] = {0.0: _DOUBLE, 1e-8: _DOUBLE, 1e-6: {}, 1e-4: {}, 1e-2: {}}
"""With what each wants beside it: below 1e-6 float32 has lost the small eigenvalues."""
EXPONENTS: Final = (4, 3, "8/3", 2, "3/2", 1)
GRAFTINGS: Final = ("adam", "rmsprop", "adagrad", "sgd", "none")


def run(settings: Settings) -> Report:
    """Run all arms and report."""
    quick, layout = settings.quick, _Layout()
    for name, options in _few(SOLVERS, 2, quick).items():
        layout.add("solver", name, "1e-06", {"p": 4, "rel_damping": 1e-6, **options})
        if name in KEY_SOLVERS:
            layout.add("solver", name, "0.0001", {"p": 4, "rel_damping": 1e-4, **options})
            layout.add(
                "solver",
                name,
                "1e-06, every step",
                {"p": 4, "rel_damping": 1e-6, "update_freq": 1, **options},
            )
    for p in _few(dict.fromkeys(EXPONENTS), 2, quick):
        for damping, options in _few(DAMPINGS, 2, quick).items():
            layout.add("exponent", f"{p}", f"{damping:g}", {"p": p, "rel_damping": damping, **options})
        layout.add(
            "exponent, every step",
            f"{p}",
            "1e-06, every step",
            {"p": p, "rel_damping": 1e-6, "update_freq": 1},
        )
    for grafting in _few(dict.fromkeys(GRAFTINGS), 2, quick):
        for p in _few(dict.fromkeys((4, 2, 1)), 1, quick):
            layout.add("grafting", f"{p}", grafting, {"p": p, "rel_damping": 1e-6, "grafting": grafting})
    return _report(run_arms("filters", layout.arms.values(), settings), layout, settings)


class _Layout:
    """The arms, and the place of each in the tables; arms with the same options are run once."""

    def __init__(self) -> None:
        self.arms: dict[str, Arm] = {}
        self.cells: dict[str, dict[tuple[str, str], str]] = {}

    def add(self, table: str, row: str, column: str, options: Options) -> None:
        """Put an arm into a table."""
        label = ", ".join(f"{key}={_shown(value)}" for key, value in options.items())
        rate = {"lr": 3e-3} if options.get("grafting") == "none" else {}
        self.arms[label] = Arm(label, {"optimizer": {"type": "dash", **options, **rate}})
        self.cells.setdefault(table, {})[row, column] = label


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "-".join(_shown(part) for part in value.values())
    return f"{value:g}" if isinstance(value, float) else str(value)


def _few(values: Mapping[Any, Any], count: int, quick: bool) -> dict[Any, Any]:
    return dict(list(values.items())[:count]) if quick else dict(values)


def _report(groups: Groups, layout: _Layout, settings: Settings) -> Report:
    cells = layout.cells
    model = next(iter(groups.values()))[0]
    title = f"Accuracy or filter? {model.parameters / 1e6:.2g}M parameters, {model.steps} steps, {len(settings.seeds)} seeds"
    tables = [
        _solvers(groups, cells),
        cross_table(
            "Roots exact to 2 %: loss by exponent p and relative damping",
            "p",
            groups,
            {**cells["exponent"], **cells["exponent, every step"]},
        ),
        cross_table("Loss by exponent p and grafting", "p", groups, cells["grafting"]),
    ]
    best = min(
        cells["exponent"].values(),
        key=lambda label: float(np.mean(losses(groups[label]))),
    )
    summary = f"The lowest loss of all exact filters is that of {best}: {np.mean(losses(groups[best])):.3f}."
    caption = "Mean loss on held-out text against the exponent, one line for each relative damping (roots exact to 2 %, Adam grafting). Bars: standard deviation over seeds."
    return Report(
        name="filters",
        title=title,
        summary=summary,
        tables=tables,
        plots=[Plot("filters", caption, _figure(groups, cells["exponent"], title))],
        data={"filters": rows(groups)},
        notes=[
            chance(settings.seeds),
            "Without grafting the learning rate is 3e-3, with it 1e-2. Relative dampings below 1e-6 go with float64 factors.",
        ],
    )


def _solvers(groups: Groups, cells: Mapping[str, Mapping[tuple[str, str], str]]) -> Table:
    """Return the losses of the ways to a fourth root, with the difference to the exact one."""
    found = cells["solver"]
    columns = list(dict.fromkeys(column for _, column in found))
    names = list(dict.fromkeys(row for row, _ in found))
    table = []
    for name in names:
        line = [name]
        for column in columns:
            if (name, column) not in found:
                line.append("")
                continue
            outcomes, reference = groups[found[name, column]], groups[found[names[0], column]]
            mean = float(np.mean(losses(outcomes)))
            shown = shown_difference(outcomes, reference)
            line.append("diverged" if np.isinf(mean) else f"{mean:.3f} ({shown})")
        table.append(line)
    return Table(
        f"Fourth roots, by solver and relative damping: loss, and its difference to {names[0]} (± standard error, paired by seed)",
        ("solver", *columns),
        table,
    )


def _figure(groups: Groups, cells: Mapping[tuple[str, str], str], title: str) -> Any:
    figure, ((axes,),) = grid(1, 1, title)
    dampings = list(dict.fromkeys(column for _, column in cells))
    for colour, damping in zip(np.resize(PALETTE, len(dampings)), dampings, strict=True):
        points = [
            (_number(row), losses(groups[label]))
            for (row, column), label in cells.items()
            if column == damping
        ]
        draw_means(axes, points, str(colour), f"relative damping {damping}")
    name_axes(axes, "p (exponent -1/p on each side)", "held-out loss, nats per token")
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    return figure


def _number(text: str) -> float:
    top, _, bottom = text.partition("/")
    return float(top) / float(bottom or 1)
