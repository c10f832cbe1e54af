# SPDX-License-Identifier: Apache-2.0
"""The numbers of a run, a line of JSON for each record: a kill loses at most the line that is being written.

Floats come back bit for bit (``repr``). JSON has no NaN and no infinities: they are the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``
in the file, and floats again when it is read.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from matroots._command import InputError, MissingExtraError
from matroots._files import make_folder, replacement, sweep

JSONL: Final = "metrics.jsonl"
CSV: Final = "metrics.csv"
TENSORBOARD: Final = "tensorboard"
_SPECIAL: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

Row = dict[str, Any]


class MetricsWriter:
    """Writes each record as a line of ``metrics.jsonl``; with :meth:`flush` and :meth:`close` also ``metrics.csv``, and TensorBoard's files.

    A record maps names to numbers, strings or None, and records may have different names. ``step``, an int, says which step a record is of; one
    without it belongs to the step of the record before it. To be used by the process that holds the folder (:func:`checkpoint.exclusive`).
    """

    def __init__(self, folder: Path, *, resume_step: int | None = None, tensorboard: bool = False) -> None:
        """Start the file, or go on with it.

        Args:
            folder: made if it is not there.
            resume_step: the step of the checkpoint that the run goes on from: records of later steps, which come from a run that was killed
                after it, are dropped, and so is a half-written last line. -1 drops all. None for a new run.
            tensorboard: write into ``folder/tensorboard`` too.

        Raises:
            FileExistsError: if there are records and ``resume_step`` is None.
            MissingExtraError: if TensorBoard is wanted and not installed.
            InputError: (a ``ValueError``) if the file has a line, other than the last, that is no record; it is left as it is.
        """
        if resume_step is not None and (isinstance(resume_step, bool) or not isinstance(resume_step, int)):
            raise TypeError(f"resume_step: expected an int or None, got {type(resume_step).__name__}")
        board = summary_writer() if tensorboard else None
        path = folder / JSONL
        there = path.stat().st_size if path.exists() else 0
        if resume_step is None and there:
            raise FileExistsError(
                f"{path}: expected no records of another run, got {there} bytes: resume that run, or use another folder"
            )
        make_folder(folder)
        sweep(folder, "metrics.*")
        rows = _until(resume_step, read(folder)) if resume_step is not None and there else []
        with replacement(path) as stream:
            stream.write(b"".join(map(_line, rows)))
        if resume_step is not None:  # the table has no later steps either
            with replacement(folder / CSV) as stream:
                stream.write(_csv(rows))
        self._folder, self._step = folder, resume_step
        self._board = board and board(
            str(folder / TENSORBOARD), purge_step=None if resume_step is None else resume_step + 1
        )
        self._stream = path.open("ab", buffering=0)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record; it survives a kill of the process from here on, and the machine's from :meth:`flush` on.

        Raises:
            OSError: if the disk is full or the like; the file is as it was before.
            TypeError: for a name that is no string, or a value that is no number (of Python), string or None.
            ValueError: for a string that stands for a number in the file (``"NaN"``), or if the writer is closed.
        """
        if self._stream.closed:
            raise ValueError("record: this MetricsWriter is closed")
        line = _line(record)
        end = os.fstat(self._stream.fileno()).st_size
        try:
            while line:
                line = line[self._stream.write(line) :]
        except BaseException as error:
            self._stream.truncate(end)  # or the next record would stand in the same line
            if isinstance(error, OSError):
                error.filename = str(self._folder / JSONL)
            raise
        self._step = record.get("step", self._step)
        if self._board:
            _show(self._board, record, self._step)

    def flush(self) -> None:
        """Make the records durable (before a checkpoint, so that none of its steps are missing), and write ``metrics.csv``."""
        os.fsync(self._stream.fileno())
        with replacement(self._folder / CSV) as stream:
            stream.write(_csv(read(self._folder)))
        if self._board:
            self._board.flush()

    def close(self) -> None:
        """Flush and close; a second time it does nothing."""
        if self._stream.closed:
            return
        try:
            self.flush()
        finally:
            self._stream.close()
            if self._board:
                self._board.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read(folder: Path) -> list[Row]:
    """Return the records of a run, in the order in which they were written; a half-written last line is left out.

    Raises:
        FileNotFoundError: if there is no ``metrics.jsonl``.
        InputError: (a ``ValueError``) for a line, other than such a last one, that is no record; it is named.
    """
    path = folder / JSONL
    *lines, last = path.read_bytes().split(b"\n")
    rows = [_row(line, f"{path}: line {number}") for number, line in enumerate(lines, 1)]
    try:
        return [*rows, _row(last, "")]  # whole but for the end of the line
    except ValueError:
        return rows


def _row(line: bytes, where: str) -> Row:
    """Return the record of a line; raise :class:`InputError` if it holds none."""
    try:
        row = json.loads(line, parse_constant=_no_constant)
        _check(row)
    except (TypeError, ValueError) as error:
        raise InputError(f"{where}: expected a record, got {line[:80]!r} ({error})") from None
    found: Row = decoded(row)
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _line(record: Mapping[str, Any]) -> bytes:
    """Return the line of a record, ASCII; raise ``TypeError`` or ``ValueError`` for what does not belong in one."""
    _check(record)
    for name, value in record.items():
        if value in _SPECIAL:
            raise ValueError(f"record[{name!r}]: {value!r} stands for a number in the file: give the float")
    return json.dumps(encoded(record), allow_nan=False).encode() + b"\n"


def _check(record: Any) -> None:
    """Raise ``TypeError`` unless it is a flat mapping of names to values, with an int for ``step``."""
    if not isinstance(record, Mapping):
        raise TypeError(f"record: expected a mapping, got {type(record).__name__}")
    for name, value in record.items():
        if not isinstance(name, str):
            raise TypeError(f"record: expected names that are strings, got {name!r}")
        if value is not None and not isinstance(value, (int, float, str)):
            raise TypeError(
                f"record[{name!r}]: expected a number of Python, a string or None, got {type(value).__name__}"
            )
    step = record.get("step", 0)
    if isinstance(step, bool) or not isinstance(step, int):
        raise TypeError(f"record['step']: expected an int, got {step!r}")


def encoded(value: Any) -> Any:
    """Return a value, or lists and mappings of them, as JSON takes it: NaN and infinities as strings."""
    if isinstance(value, Mapping):
        return {name: encoded(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [encoded(part) for part in value]
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def decoded(value: Any) -> Any:
    """Return what :func:`encoded` was given, with lists for tuples."""
    if isinstance(value, dict):
        return {name: decoded(part) for name, part in value.items()}
    if isinstance(value, list):
        return [decoded(part) for part in value]
    return _SPECIAL.get(value, value) if isinstance(value, str) else value


def _until(step: int, rows: Iterable[Row]) -> list[Row]:
    """Return the records that are not of a later step."""
    kept, current = [], -1
    for row in rows:
        current = row.get("step", current)
        if current <= step:
            kept.append(row)
    return kept


def _csv(rows: list[Row]) -> bytes:
    """Return a table with all names as columns, in the order in which they appear; empty where a record has no value."""
    stream = io.StringIO(newline="")
    columns = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.writer(stream, lineterminator="\n")
    if columns:
        writer.writerow(map(_cell, columns))
    writer.writerows([_cell(row.get(name)) for name in columns] for row in rows)
    return stream.getvalue().encode(errors="backslashreplace")


def _cell(value: Any) -> Any:
    """Return what the csv module writes as one cell: it leaves a carriage return without quotes, and readers end the line there."""
    return value.replace("\r\n", "\n").replace("\r", "\n") if isinstance(value, str) else encoded(value)


def summary_writer() -> Any:
    """Return TensorBoard's class; raise :class:`MissingExtraError` if it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingExtraError(
            f"tensorboard: it cannot be imported ({error}): install it with pip install tensorboard"
        ) from error
    return SummaryWriter


def _show(board: Any, record: Mapping[str, Any], step: int | None) -> None:
    """Send a record to TensorBoard: numbers as curves, strings as text."""
    for name, value in record.items():
        if isinstance(value, str):
            board.add_text(name, value, step)
        elif value is not None and name != "step":
            board.add_scalar(name, value, step)
