# SPDX-License-Identifier: Apache-2.0
"""What the bench reports: the summary against the best peer, all results, what was left out, and the Pareto plots."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from matroots.bench._contestants import TARGETS
from matroots.bench._run import Bench, Row, Skip
from matroots.bench._settings import Settings, power_label
from matroots.studies._plots import PALETTE, grid, legend, name_axes, span
from matroots.studies._report import Plot, Record, Report, Table, fixed, median, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKERS = ("o", "^", "s", "D", "v", "P", "X")
Key = tuple[str, str, int, float]


@dataclass(frozen=True)
class Comparison:
    """The fastest of the others, and of ours, that reach an error in a cell, and "auto" asked for that error."""

    key: Key
    target: float
    peer: Row | None
    best: Row | None
    auto: Row | None

    @property
    def ratio(self) -> float:
        """Time of "auto" over that of the best peer; NaN where one of them does not reach the error."""
        if self.auto is None or self.peer is None or not self.auto.reaches(self.target):
            return math.nan
        return self.auto.ms / self.peer.ms


def report(bench: Bench, notes: Sequence[str], *, figures: bool) -> Report:
    """Return the report on what has been measured so far."""
    compared = comparisons(bench.rows)
    return Report(
        name="bench",
        title="Accuracy against time",
        summary=_summary(bench, compared),
        tables=[
            _comparison_table(compared),
            _result_table(bench.rows),
            _skip_table(bench.skips),
            _who_table(bench),
        ],
        plots=_plots(bench.rows) if figures and bench.rows else [],
        data={
            "bench": [asdict(row) for row in bench.rows],
            "bench-summary": [_record(one) for one in compared],
            "bench-skips": [_skip_record(skip) for skip in bench.skips],
        },
        notes=[*notes, *_remarks(bench.settings)],
    )


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no other point beats: none is smaller in one coordinate and no larger in the other.

    >>> frontier([(3.0, 1.0), (1.0, 5.0), (2.0, 5.0), (2.0, 2.0), (4.0, 4.0)])
    [(1.0, 5.0), (2.0, 2.0), (3.0, 1.0)]
    """
    best: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not best or y < best[-1][1]:
            best.append((x, y))
    return best


def comparisons(rows: Sequence[Row]) -> list[Comparison]:
    """Return who is the fastest at each target in each cell."""
    cells: dict[Key, list[Row]] = {}
    for row in rows:
        cells.setdefault((row.dtype, row.p, row.n, row.condition), []).append(row)
    found = []
    for (key, here), (name, target) in itertools.product(cells.items(), TARGETS.items()):
        able = [row for row in here if row.reaches(target)]
        peer = min((row for row in able if row.kind != "ours"), key=lambda row: row.ms, default=None)
        best = min((row for row in able if row.kind == "ours"), key=lambda row: row.ms, default=None)
        auto = next((row for row in here if row.method == name), None)
        found.append(Comparison(key, target, peer, best, auto))
    return found


def _summary(bench: Bench, compared: Sequence[Comparison]) -> str:
    ratios = [one.ratio for one in compared if not math.isnan(one.ratio)]
    text = f"{len(bench.rows)} results; {len(bench.skips)} combinations were left out, all of them listed."
    if ratios:
        faster = sum(ratio < 1 for ratio in ratios)
        text += (
            f' "auto", asked for an error, is faster than the fastest peer that reaches that error in {faster}'
            f" of {len(ratios)} cases; the median of the ratios of their times is {median(ratios):.2f}."
        )
    return text


def _remarks(settings: Settings) -> list[str]:
    device = f"{settings.device.type}, {settings.threads} thread(s)"
    return [
        f"Batches fill {settings.megabytes:g} MiB. Times are of a whole batch ({device}): the median, and quartiles in the CSV, of runs"
        " in turn with all others, as many as the budget allows. (1x): of one call only. (k of b): of k members, multiplied up.",
        "ratio: time of auto over that of the best peer, where both reach the error (! where auto does not).",
        "unit: one torch.bmm(out=) of the batch in the same dtype, timed in the same rounds.",
        f"Errors are relative, in the 2-norm, against the root known in fp64, of the first {settings.members} members at most; in"
        " float64 that is known to about 1e-16 times the condition number. failed: members of the whole batch without a root.",
        "Times are without certificates. certificate: the time of one matroots.certify of the batch.",
        "Peers are other people's routines and transcriptions of published formulas; the best of them is the fastest that has no"
        " failed member and no measured error above the target.",
    ]


def _comparison_table(compared: Sequence[Comparison]) -> Table:
    columns = ["dtype", "p", "n", "cond.", "error", "best peer", "has", "ms", "best of ours", "has", "ms"]
    columns += ["auto has", "ms", "ratio"]
    lines = []
    for one in compared:
        dtype, p, n, condition = one.key
        line = [dtype, p, str(n), power_label(condition), f"{one.target:g}"]
        line += [
            _name(one.peer),
            _error(one.peer),
            _ms(one.peer),
            _name(one.best),
            _error(one.best),
            _ms(one.best),
        ]
        missed = one.auto is not None and not one.auto.reaches(one.target)
        line += [f"{_error(one.auto)}{'!' if missed else ''}", _ms(one.auto)]
        lines.append([*line, fixed(one.ratio, 2)])
    return Table("auto against the best peer of that accuracy", columns, lines)


def _result_table(rows: Sequence[Row]) -> Table:
    columns = ["dtype", "p", "n", "condition", "method", "error, max", "median", "failed", "ms", "unit"]
    columns += ["certificate ms", "products"]
    lines = []
    for row in rows:
        mark = f" ({row.run_on} of {row.batch})" if row.run_on < row.batch else ""
        mark += " (1x)" if row.repeats == 0 else ""
        line = [row.dtype, row.p, str(row.n), power_label(row.condition), row.method]
        line += [number(row.error_max), number(row.error_median), f"{row.failed} of {row.run_on}"]
        line += [fixed(row.ms, 2) + mark, fixed(row.units, 1), fixed(row.certificate_ms, 2)]
        lines.append([*line, "-" if row.products is None else str(row.products)])
    return Table("All results", columns, lines, on_terminal=False)


def _skip_table(skips: Sequence[Skip]) -> Table:
    groups: dict[tuple[str, str], list[str]] = {}
    for skip in skips:
        groups.setdefault((skip.method, skip.reason), []).append(str(skip.cell))
    lines = [[method, reason, "; ".join(cells)] for (method, reason), cells in groups.items()]
    return Table("Left out", ["who", "why", "where"], lines, on_terminal=False)


def _who_table(bench: Bench) -> Table:
    lines = [[one.name, one.kind, one.how] for one in bench.contestants]
    return Table("Who took part", ["name", "kind", "what was called"], lines, on_terminal=False)


def _record(one: Comparison) -> Record:
    dtype, p, n, condition = one.key
    record: dict[str, object] = {"dtype": dtype, "p": p, "n": n, "condition": condition, "target": one.target}
    for role, row in (("peer", one.peer), ("ours", one.best), ("auto", one.auto)):
        record |= {
            role: row.method if row else "",
            f"{role}_ms": row.ms if row else math.nan,
            f"{role}_error": row.error_max if row else math.nan,
        }
    return record | {"ratio": one.ratio}


def _skip_record(skip: Skip) -> Record:
    dtype, n, p, condition = skip.cell.dtype, skip.cell.n, skip.cell.p, skip.cell.condition
    where = {"dtype": str(dtype).removeprefix("torch."), "p": f"{p:g}", "n": n, "condition": condition}
    return {**where, "method": skip.method, "reason": skip.reason}


def _name(row: Row | None) -> str:
    return "none" if row is None else row.method


def _error(row: Row | None) -> str:
    return "-" if row is None else number(row.error_max)


def _ms(row: Row | None) -> str:
    return "-" if row is None else fixed(row.ms, 2)


def _plots(rows: Sequence[Row]) -> list[Plot]:
    pairs = list(dict.fromkeys((row.dtype, row.p) for row in rows))
    names = {name: index for index, name in enumerate(dict.fromkeys(row.method for row in rows))}
    return [
        _plot([row for row in rows if (row.dtype, row.p) == pair], f"bench-{pair[0]}-p{pair[1]}", names)
        for pair in pairs
    ]


def _plot(rows: Sequence[Row], name: str, names: dict[str, int]) -> Plot:
    """Draw one figure: a row of panels per size, a column per condition number."""
    sizes, conditions = (
        sorted({row.n for row in rows}),
        sorted({row.condition for row in rows}),
    )
    figure, panels = grid(
        len(sizes), len(conditions), f"Error against time: {rows[0].dtype}, p = {rows[0].p}"
    )
    for (i, n), (j, condition) in itertools.product(enumerate(sizes), enumerate(conditions)):
        here = [row for row in rows if (row.n, row.condition) == (n, condition) and row.error_max > 0]
        _panel(panels[i][j], here, names)
        name_axes(
            panels[i][j],
            "time / one bmm",
            "largest relative error",
            f"n = {n}, condition {power_label(condition)}",
        )
    legend(figure, max(3, round(figure.get_figwidth() / 2)))
    caption = (
        "Each point is a way to compute the root of the same batch; left and low is better. Filled: this package. Hollow: other"
        " people's routines and published formulas. No point lies to the left of and below the black line; the grey one is the"
        " frontier of the others alone. Ways that failed on a member are left out."
    )
    return Plot(name, caption, figure)


def _panel(axes: Axes, rows: Sequence[Row], names: dict[str, int]) -> None:
    good = [row for row in rows if row.failed == 0 and math.isfinite(row.units)]
    everyone = [(row.units, row.error_max) for row in good]
    others = [(row.units, row.error_max) for row in good if row.kind != "ours"]
    for points, colour, label in (
        (others, "0.6", "frontier of the others"),
        (everyone, "0.0", "frontier"),
    ):
        best = frontier(points)
        axes.step([x for x, _ in best], [y for _, y in best], where="post", color=colour, lw=1, label=label)
    for row in good:
        index = names[row.method]
        colour = PALETTE[index % len(PALETTE)]
        axes.plot(
            row.units,
            row.error_max,
            linestyle="",
            marker="*" if row.method.startswith("auto") else _MARKERS[index // len(PALETTE) % len(_MARKERS)],
            markersize=8 if row.method.startswith("auto") else 5,
            color=colour,
            markerfacecolor=colour if row.kind == "ours" else "none",
            label=row.method,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(*span(x for x, _ in everyone))
    axes.set_ylim(*span(y for _, y in everyone))
