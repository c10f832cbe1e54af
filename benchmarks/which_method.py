# SPDX-License-Identifier: Apache-2.0
"""Which method is the fastest that reaches an error? The table and the figure of docs/choosing.md, from the CSV of a bench.

``python -m matroots bench ... --out FOLDER``, then ``python benchmarks/which_method.py FOLDER/bench.csv --figure which_method.png``.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matroots.bench._run import Row
from matroots.bench._settings import power_label
from matroots.studies._plots import METHOD_COLOURS, METHOD_MARKERS, PALETTE, grid, legend, name_axes, span
from matroots.studies._report import DPI

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TARGETS = (1e-2, 1e-4)
WORDS = ("dtype", "p", "method", "kind")
COUNTS = ("n", "batch", "measured", "failed", "repeats", "run_on")
PEER, AUTO = "best of the others", "auto"
COLOURS = {**METHOD_COLOURS, AUTO: PALETTE[4], PEER: "0.6"}
MARKERS = {**METHOD_MARKERS, AUTO: "*", PEER: "x"}


def read(path: Path) -> list[Row]:
    """Return the rows of a ``bench.csv``."""
    with path.open(newline="") as file:
        return [_row(record) for record in csv.DictReader(file)]


def _row(record: dict[str, str]) -> Row:
    products = record.pop("products")
    words = {name: record.pop(name) for name in WORDS}
    counts = {name: int(record.pop(name)) for name in COUNTS}
    numbers = {name: float(value) for name, value in record.items()}
    return Row(**words, **counts, **numbers, products=int(products) if products else None)  # type: ignore[arg-type]


def family(row: Row) -> str:
    """Return who a row stands for: "auto", a method of ours with any of its options, or the others together."""
    return row.method.split("-")[0] if row.kind == "ours" else PEER


def fastest(rows: Iterable[Row], target: float) -> dict[str, Row]:
    """Return the fastest row of each family that reaches an error, the fastest family first."""
    found: dict[str, Row] = {}
    for row in sorted((row for row in rows if row.reaches(target)), key=lambda row: row.units):
        if family(row) != AUTO or row.method == f"auto-{power_label(target)}":
            found.setdefault(family(row), row)
    return found


def table(rows: Sequence[Row]) -> str:
    """Return a Markdown table: for each batch and error the fastest of ours, auto, and the fastest of the others."""
    lines = [
        "| p | n | condition | error | fastest method | next | auto | best of the others |",
        "|" + "---|" * 8,
    ]
    for (p, n, condition), target in itertools.product(cells(rows), TARGETS):
        found = fastest((row for row in rows if (row.p, row.n, row.condition) == (p, n, condition)), target)
        ours = [row for name, row in found.items() if name not in (AUTO, PEER)]
        shown = [*ours[:2], *[None] * (2 - len(ours[:2])), found.get(AUTO), found.get(PEER)]
        cell = [p, str(n), power_label(condition), power_label(target), *map(_described, shown)]
        lines.append(f"| {' | '.join(cell)} |")
    return "\n".join(lines)


def _described(row: Row | None) -> str:
    if row is None:
        return "none"
    name = "" if row.method.startswith(AUTO) else f"`{row.method}` "
    return f"{name}{row.units:.1f}"


def cells(rows: Sequence[Row]) -> list[tuple[str, int, float]]:
    """Return the batches of a bench, as (p, n, condition)."""
    return sorted({(row.p, row.n, row.condition) for row in rows})


def draw(rows: Sequence[Row], p: str, path: Path) -> None:
    """Draw what each family costs by condition number: a row of panels per size, a column per error."""
    rows = [row for row in rows if row.p == p]
    sizes = sorted({row.n for row in rows})
    title = f"Time of the fastest that reaches an error: p = {p}, {rows[0].dtype}"
    figure, panels = grid(len(sizes), len(TARGETS), title)
    for (i, n), (j, target) in itertools.product(enumerate(sizes), enumerate(TARGETS)):
        _panel(panels[i][j], [row for row in rows if row.n == n], target)
        name_axes(panels[i][j], "condition number", "time / one bmm", f"n = {n}, error {power_label(target)}")
    legend(figure, 4)
    figure.savefig(path, dpi=DPI)


def _panel(axes: Axes, rows: Sequence[Row], target: float) -> None:
    conditions = sorted({row.condition for row in rows})
    able = {c: fastest((row for row in rows if row.condition == c), target) for c in conditions}
    for name in dict.fromkeys(map(family, rows)):
        points = [(c, able[c][name].units) for c in conditions if name in able[c]]
        style = {"color": COLOURS[name], "marker": MARKERS[name], "markersize": 5, "lw": 1.2}
        axes.plot([c for c, _ in points], [units for _, units in points], label=name, **style)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(*span(row.units for found in able.values() for row in found.values()))


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table; with --figure draw the figure too."""
    parser = argparse.ArgumentParser(description="Which method is the fastest that reaches an error?")
    parser.add_argument("csv", type=Path, help="bench.csv, as python -m matroots bench leaves it")
    parser.add_argument("--p", default="4", help="of the figure (default: 4)")
    parser.add_argument("--figure", type=Path, metavar="PNG", help="draw it there")
    options = parser.parse_args(argv)
    if not options.csv.is_file():
        parser.error(f"csv: expected a file, got {str(options.csv)!r}")
    rows = read(options.csv)
    known = sorted({row.p for row in rows})
    if options.p not in known:
        parser.error(f"--p: expected one of {', '.join(known)}, which the file has, got {options.p!r}")
    sys.stdout.write(f"{table(rows)}\n")
    if options.figure is not None:
        draw(rows, options.p, options.figure)


if __name__ == "__main__":
    main()
