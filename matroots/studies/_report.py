# SPDX-License-Identifier: Apache-2.0
"""What a study leaves behind: tables on the terminal, and a folder with CSV, Markdown and PNG files."""

from __future__ import annotations

import csv
import io
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from matroots import __version__
from matroots._command import InputError, MissingExtraError
from matroots._files import replacement

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Item = TypeVar("Item")
Record = Mapping[str, object]
DPI = 150


@dataclass(frozen=True)
class Table:
    """A table of formatted cells; ``on_terminal`` is False for the ones that are too long to be read there."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    on_terminal: bool = True


@dataclass(frozen=True)
class Plot:
    """A figure, the name of its file (without suffix) and the sentences that explain it."""

    name: str
    caption: str
    figure: Figure


@dataclass(frozen=True)
class Report:
    """The outcome of one study: ``data`` maps the name of a CSV file (without suffix) to its rows."""

    name: str
    title: str
    summary: str
    tables: Sequence[Table]
    plots: Sequence[Plot]
    data: Mapping[str, Sequence[Record]]
    notes: Sequence[str] = field(default_factory=list)


def require_extras(who: str = "studies need", extra: str = "study", also: Sequence[str] = ()) -> None:
    """Raise :class:`MissingExtraError`, which says what to install, unless matplotlib, rich and the modules named by ``also`` can be imported."""
    for name in ("matplotlib.figure", "rich.console", *also):
        try:
            import_module(name)
        except ImportError as error:
            raise MissingExtraError(
                f"{who} {name.split('.')[0]}, which cannot be imported: install the extra with"
                f' pip install "matroots[{extra}]"'
            ) from error


def track(items: Sequence[Item], description: str) -> Iterable[Item]:
    """Yield the items behind a progress bar on stderr; without one where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import track as rich_track

    console = Console(stderr=True)
    return rich_track(items, description, console=console, disable=not console.is_terminal, transient=True)


def show(report: Report) -> None:
    """Print the summary, the short tables and the notes of a report to stdout."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table as RichTable

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=120)
    console.rule(escape(report.title), style="dim")
    console.print(report.summary, markup=False)
    for table in report.tables:
        if not table.on_terminal:
            continue
        rich_table = RichTable(
            title=escape(table.title),
            title_justify="left",
            title_style="bold",
            box=SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )
        for index, column in enumerate(table.columns):
            is_text = index == 0 or not any(_is_number(row[index]) for row in table.rows)
            rich_table.add_column(escape(column), justify="left" if is_text else "right")
        for row in table.rows:
            rich_table.add_row(*map(escape, row))
        console.print(rich_table)
    for note in report.notes:
        console.print(f"Note: {note}", markup=False, style="dim")


def say(message: str) -> None:
    """Print one line to stdout, unwrapped."""
    from rich.console import Console

    Console(highlight=False, soft_wrap=True).print(message, markup=False)


def check_folder(folder: Path) -> None:
    """Raise :class:`InputError` unless ``folder`` is a folder that can be written to, or one that can be made."""
    if folder.is_symlink() and not folder.exists():
        raise InputError(f"--out: expected a folder, got {str(folder)!r}, a link to nothing")
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise InputError(f"--out: expected a folder, got {str(folder)!r}, where {str(existing)!r} is a file")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise InputError(f"--out: cannot write to {str(existing)!r}")


def write(report: Report, folder: Path, origin: Mapping[str, str]) -> list[Path]:
    """Write the CSV, PNG and Markdown files of a report, each whole or not at all; return their paths."""
    contents: dict[str, bytes] = {}
    for name, records in report.data.items():
        contents[f"{name}.csv"] = _csv(records)
    for plot in report.plots:
        contents[f"{plot.name}.png"] = _png(plot.figure)
    contents[f"{report.name}.md"] = _markdown(report, origin).encode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            with replacement(folder / name) as stream:
                stream.write(content)
    except OSError as error:
        raise InputError(f"--out: cannot write to {str(folder)!r}: {error.strerror}") from error
    return [folder / name for name in contents]


def number(value: float, digits: int = 1) -> str:
    """Format an error, or any number of unknown size, for a table."""
    return "-" if np.isnan(value) else "inf" if np.isinf(value) else f"{value:.{digits}e}"


def fixed(value: float, digits: int = 1) -> str:
    """Format a number of moderate size for a table; a large one as :func:`number` does."""
    return "-" if np.isnan(value) else number(value) if abs(value) >= 1e4 else f"{value:.{digits}f}"


def median(values: Iterable[float]) -> float:
    """Return the median of the values that are no NaN (infinite ones count), NaN if there is none."""
    known = [value for value in values if not np.isnan(value)]
    return float(np.median(known)) if known else float("nan")


def worst(values: Iterable[float]) -> float:
    """Return the largest of the values that are no NaN, NaN if there is none."""
    return max((value for value in values if not np.isnan(value)), default=float("nan"))


def _is_number(text: str) -> bool:
    return text[:1].isdigit()


def _csv(records: Sequence[Record]) -> bytes:
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, fieldnames=list(records[0]) if records else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return stream.getvalue().encode()


def _png(figure: Figure) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=DPI)
    return stream.getvalue()


def _markdown(report: Report, origin: Mapping[str, str]) -> str:
    lines = [f"# {report.title}", "", report.summary, ""]
    for plot in report.plots:
        lines += [f"![{plot.name}]({plot.name}.png)", "", plot.caption, ""]
    for table in report.tables:
        lines += [f"## {table.title}", "", _markdown_row(table.columns)]
        lines += [_markdown_row(["---"] * len(table.columns)), *map(_markdown_row, table.rows), ""]
    if report.notes:
        lines += ["## Notes", "", *[f"- {note}" for note in report.notes], ""]
    lines += ["## How it was made", ""]
    lines += [f"- {name}: {value}" for name, value in origin.items()]
    lines += [f"- data: {', '.join(f'[{name}.csv]({name}.csv)' for name in report.data)}"]
    return "\n".join(lines) + "\n"


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def circumstances(command: str, seed: int, threads: int) -> dict[str, str]:
    """Return what a reader needs to repeat the study: command, seed, date, versions and machine."""
    return {
        "command": f"`{command}`",
        "seed": str(seed),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": f"matroots {__version__}, Python {platform.python_version()}, torch {torch.__version__},"
        f" numpy {np.__version__}",
        "machine": f"{_cpu_name()}, {threads} thread(s), {platform.system()}",
    }


def _cpu_name() -> str:
    described = Path("/proc/cpuinfo")  # Linux; elsewhere the platform module knows
    if described.is_file():
        for line in described.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
