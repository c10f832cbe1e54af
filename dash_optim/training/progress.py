# SPDX-License-Identifier: Apache-2.0
"""What a running job shows: a bar on a terminal, else a line at each look at the held-out text."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID


class Progress:
    """Shows the metrics of each step on stderr."""

    def __init__(self, name: str, step: int, steps: int, *, quiet: bool = False) -> None:
        self._name, self._start, self._steps, self._quiet = name, step, steps, quiet
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._validated = ""

    def __enter__(self) -> Progress:
        if self._quiet or not sys.stderr.isatty():
            return self
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar
        from rich.table import Column

        shrinking = Column(ratio=1, no_wrap=True)  # for what matters more on a narrow terminal
        self._bar = Bar(
            TextColumn("{task.description}", markup=False, table_column=shrinking),
            BarColumn(bar_width=10),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}", markup=False),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            expand=True,
        )
        self._task = self._bar.add_task(self._name, total=self._steps, completed=self._start, numbers="")
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, record: Mapping[str, float]) -> None:
        """Show the metrics of a step."""
        if self._quiet:
            return
        if "validation_loss" in record:
            self._validated = f", held out {record['validation_loss']:.3f}"
        numbers = f"loss {record['loss']:.3f}{self._validated}, {record['tokens_per_second']:,.0f} tokens/s"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=record["step"], numbers=numbers)
        elif "validation_loss" in record:
            sys.stderr.write(
                f"{self._name}: step {record['step']:.0f} of {self._steps}: {numbers},"
                f" optimizer {record['optimizer_ms']:.0f} ms\n"
            )
            sys.stderr.flush()
