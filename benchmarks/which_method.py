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

from matroots.bench._run import Row
from matroots.bench._settings import power_label
from matroots.studies._plots import METHOD_COLOURS, METHOD_MARKERS, grid, legend, name_axes, span
from matroots.studies._report import DPI

TARGETS = (1e-2, 1e-4)
WORDS = ("dtype", "p", "method", "kind")
COUNTS = ("n", "batch", "measured", "failed", "repeats", "run_on")
PEER, AUTO = "best of the others", "auto"


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
    lines = ["| p | n | condition | error | fastest method | next | auto | best of the others |", "|" + "---|" * 8]
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
    figure, panels = grid(len(sizes), len(TARGETS), f"Time of the fastest that reaches an error: p = {p}, {rows[0].dtype}")
    names = list(dict.fromkeys(map(family, rows)))
    for (i, n), (j, target) in itertools.product(enumerate(sizes), enumerate(TARGETS)):
        axes, heights = panels[i][j], []
        for name in names:
            here = {c: [r for r in rows if (r.n, r.condition) == (n, c)] for c in sorted({r.condition for r in rows})}
            points = [(c, found[name].units) for c, r in here.items() if name in (found := fastest(r, target))]
            colour = METHOD_COLOURS.get(name, "0.6" if name == PEER else "0.0")
            style = {"marker": METHOD_MARKERS.get(name, "*"), "color": colour, "markersize": 5, "label": name}
            axes.plot([c for c, _ in points], [t for _, t in points], lw=1.2, **style)
            heights += [t for _, t in points]
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_ylim(*span(heights))
        name_axes(axes, "condition number", "time / one bmm", f"n = {n}, error {power_label(target)}")
    legend(figure, 4)
    figure.savefig(path, dpi=DPI)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table; with --figure draw the figure too."""
    parser = argparse.ArgumentParser(description="Which method is the fastest that reaches an error?")
    parser.add_argument("csv", type=Path)
    parser.add_argument("--p", default="4", help="of the figure (default: 4)")
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args(argv)
    rows = read(options.csv)
    sys.stdout.write(f"{table(rows)}\n")
    if options.figure is not None:
        draw(rows, options.p, options.figure)


if __name__ == "__main__":
    main()
