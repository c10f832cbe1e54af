# SPDX-License-Identifier: Apache-2.0
"""Metrics: every number comes back, a kill costs at most one line, and a resumed run has each step once."""

from __future__ import annotations

import csv
import errno
import json
import math
import os
import resource
import signal
import struct
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dash_optim.training.metrics import MetricsWriter, read
from matroots._command import MissingExtraError

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
ROWS: list[dict[str, Any]] = [
    {"step": 0, "loss": 4.5, "lr": 0.1},
    {"note": 'warm-up, over\n"5" steps', "step": 1},
    {"step": 2, "loss": math.nan, "accuracy": math.inf, "gap": -math.inf},
    {"step": 3, "loss": None, "done": True, "tokens": 2**70},
]


def written(folder: Path, rows: list[dict[str, Any]] = ROWS, **options: Any) -> Path:
    with MetricsWriter(folder, **options) as metrics:
        for row in rows:
            metrics.write(row)
    return folder


def strict(text: bytes) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    return json.loads(text, parse_constant=refuse)


def test_files_as_others_read_them(tmp_path: Path) -> None:
    written(tmp_path / "a" / "b")
    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == ["metrics.csv", "metrics.jsonl"]
    lines = (tmp_path / "a" / "b" / "metrics.jsonl").read_bytes().splitlines()
    assert [strict(line) for line in lines] == [
        ROWS[0],
        ROWS[1],
        {"step": 2, "loss": "NaN", "accuracy": "Infinity", "gap": "-Infinity"},
        ROWS[3],
    ]
    with (tmp_path / "a" / "b" / "metrics.csv").open(newline="") as stream:
        table = list(csv.reader(stream))
    assert table == [
        ["step", "loss", "lr", "note", "accuracy", "gap", "done", "tokens"],
        ["0", "4.5", "0.1", "", "", "", "", ""],
        ["1", "", "", ROWS[1]["note"], "", "", "", ""],
        ["2", "NaN", "", "", "Infinity", "-Infinity", "", ""],
        ["3", "", "", "", "", "", "True", str(2**70)],
    ]


VALUES = (
    st.floats(allow_nan=False)
    | st.integers()
    | st.none()
    | st.booleans()
    | st.text().filter(lambda text: text not in ("NaN", "Infinity", "-Infinity"))
)
ROW = st.builds(lambda row: row | {"step": 7}, st.dictionaries(st.text(), VALUES))


@settings(max_examples=30, deadline=None)
@given(rows=st.lists(ROW, max_size=5))
def test_every_value_comes_back(rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = written(tmp_path_factory.mktemp("run"), rows)
    assert [list(row.items()) for row in read(folder)] == [list(row.items()) for row in rows]
    assert repr(read(folder)) == repr(rows)  # -0.0, True and 1, 1 and 1.0
    with (folder / "metrics.csv").open(newline="", encoding="utf-8") as stream:
        table = list(csv.reader(stream))
    assert len(table) == (1 + len(rows) if rows else 0)
    for row, cells in zip(rows, table[1:], strict=True):
        for name, cell in zip(dict.fromkeys(name for row in rows for name in row), cells, strict=True):
            if isinstance(row.get(name), float):
                assert struct.pack("d", float(cell)) == struct.pack("d", row[name])


def test_special_floats_and_strings_like_them(tmp_path: Path) -> None:
    row = read(written(tmp_path))[2]
    assert math.isnan(row["loss"])
    assert (row["accuracy"], row["gap"]) == (math.inf, -math.inf)
    with MetricsWriter(tmp_path, resume_step=9) as metrics:
        for text in ("NaN", "Infinity", "-Infinity"):
            with pytest.raises(ValueError, match=r"record\['loss'\]: '-?\w+' stands for a number"):
                metrics.write({"loss": text})
        metrics.write({"loss": "nan", "other": np.float64(0.1)})
    assert repr(read(tmp_path)[4:]) == "[{'loss': 'nan', 'other': 0.1}]"


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([1], "record: expected a mapping, got list"),
        ({1: 2}, "record: expected names that are strings, got 1"),
        ({"loss": torch.tensor(1.0)}, r"record\['loss'\]: expected a number .* got Tensor"),
        ({"loss": np.float32(1)}, r"record\['loss'\]: .* got float32"),
        ({"loss": {"a": 1}}, r"record\['loss'\]: .* got dict"),
        ({"loss": [1]}, r"record\['loss'\]: .* got list"),
        ({"step": 1.0}, r"record\['step'\]: expected an int, got 1.0"),
        ({"step": None}, r"record\['step'\]: expected an int, got None"),
        ({"step": True}, r"record\['step'\]: expected an int, got True"),
    ],
)
def test_bad_records_are_refused_whole(tmp_path: Path, record: Any, message: str) -> None:
    with MetricsWriter(tmp_path) as metrics:
        with pytest.raises(TypeError, match=message):
            metrics.write(record)
        metrics.write({"step": 1})
    assert read(tmp_path) == [{"step": 1}]


def test_an_old_run_is_not_overwritten(tmp_path: Path) -> None:
    written(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(
        FileExistsError, match=r"metrics\.jsonl: expected no records of another run, got \d+ bytes"
    ):
        MetricsWriter(tmp_path)
    with pytest.raises(TypeError, match="resume_step: expected an int or None, got float"):
        MetricsWriter(tmp_path, resume_step=1.0)  # type: ignore[arg-type]
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    (tmp_path / "metrics.jsonl").write_bytes(b"")
    assert read(written(tmp_path, ROWS[:2])) == ROWS[:2]


@pytest.mark.parametrize("resume_step", [-1, 0, 1, 2, 3, 99])
def test_resume_drops_what_came_after_the_checkpoint(tmp_path: Path, resume_step: int) -> None:
    rows: list[dict[str, Any]] = [{"note": "start"}, {"step": 0, "a": 1}, {"note": "of step 0"}]
    rows += [{"step": step, "b": 0.5} for step in (1, 2, 3)] + [{"note": "of step 3"}, {"step": 1, "late": 1}]
    belongs = [-1, 0, 0, 1, 2, 3, 3, 1]
    written(tmp_path, rows)
    expected = [row for row, step in zip(rows, belongs, strict=True) if step <= resume_step]
    metrics = MetricsWriter(tmp_path, resume_step=resume_step)
    assert read(tmp_path) == expected
    with (tmp_path / "metrics.csv").open(newline="") as stream:
        assert len(list(csv.DictReader(stream))) == len(expected)
    metrics.write({"step": resume_step + 1, "c": 1})
    metrics.close()
    assert read(tmp_path) == [*expected, {"step": resume_step + 1, "c": 1}]


def test_resume_without_a_file_starts_empty(tmp_path: Path) -> None:
    assert read(written(tmp_path / "new", ROWS[:1], resume_step=5)) == ROWS[:1]


def test_a_line_cut_anywhere_costs_that_line_only(tmp_path: Path) -> None:
    rows = [{"step": 1, "loss": 0.25}, {"step": 2, "loss": 12.5, "note": "é, \u2028"}]
    content = (written(tmp_path, rows) / "metrics.jsonl").read_bytes()
    first = content.index(b"\n") + 1
    for stop in range(first, len(content) + 1):
        (tmp_path / "metrics.jsonl").write_bytes(content[:stop])
        kept = rows if stop >= len(content) - 1 else rows[:1]  # the end of the line alone may be missing
        assert read(tmp_path) == kept
        written(tmp_path, [{"step": 3}], resume_step=2)
        assert read(tmp_path) == [*kept, {"step": 3}]
    (tmp_path / "metrics.jsonl").write_bytes(
        content + b"\0" * 40
    )  # what a file system may leave of a power cut
    assert read(tmp_path) == rows


@pytest.mark.parametrize(
    "line",
    [
        b'{"step": 1',
        b"",
        b"[1]",
        b"3",
        b'{"a": {}}',
        b'{"a": [1]}',
        b'{"a": NaN}',
        b'{"step": "1"}',
        b'{"a": "\xff"}',
    ],
)
def test_any_other_damage_is_an_error_that_changes_nothing(tmp_path: Path, line: bytes) -> None:
    content = b'{"step": 1}\n' + line + b'\n{"step": 2}\n'
    (tmp_path / "metrics.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=r"metrics\.jsonl: line 2: expected a record, got"):
        read(tmp_path)
    with pytest.raises(ValueError, match="line 2"):
        MetricsWriter(tmp_path, resume_step=5)
    assert (tmp_path / "metrics.jsonl").read_bytes() == content


def test_read_without_a_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl"):
        read(tmp_path)


def test_a_kill_loses_at_most_one_line(tmp_path: Path) -> None:
    total = 0
    read_end, write_end = os.pipe()
    for _ in range(5):
        pid = os.fork()
        if pid == 0:
            metrics = MetricsWriter(tmp_path, resume_step=total)
            os.write(write_end, b"x")
            for step in range(total + 1, 10**9):
                metrics.write({"step": step, "loss": step / 7})
        os.read(read_end, 1)
        time.sleep(0.03)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        rows = read(tmp_path)
        assert rows == [{"step": step, "loss": step / 7} for step in range(1, len(rows) + 1)]
        assert len(rows) > total
        total = len(rows) - 1  # as if the last checkpoint were one step older
    os.close(read_end)
    os.close(write_end)


def test_each_line_is_there_before_write_returns(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as metrics:
        for count, row in enumerate(ROWS, 1):
            metrics.write(row)
            assert repr(read(tmp_path)) == repr(ROWS[:count])
            assert not (tmp_path / "metrics.csv").exists()
        metrics.flush()
        assert (tmp_path / "metrics.csv").read_bytes().startswith(b"step,loss")


def test_flush_makes_the_lines_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[int, int]] = []
    real = os.fsync

    def noted(handle: int) -> None:
        found = os.fstat(handle)
        synced.append((found.st_ino, found.st_size))
        real(handle)

    with MetricsWriter(tmp_path) as metrics:
        metrics.write(ROWS[0])
        monkeypatch.setattr(os, "fsync", noted)
        metrics.flush()
        found = (tmp_path / "metrics.jsonl").stat()
        assert synced[0] == (found.st_ino, found.st_size)


def test_what_killed_runs_left_is_removed(tmp_path: Path) -> None:
    for name in (".metrics.jsonl.4000000.partial", ".metrics.csv.1.partial", ".notes.1.partial"):
        (tmp_path / name).write_bytes(b"half")
    written(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [".notes.1.partial", "metrics.csv", "metrics.jsonl"]


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))  # in the middle of a line
        metrics = MetricsWriter(tmp_path)
        row = {"step": 1, "text": "x" * 20}
        for _ in range(2):
            metrics.write(row)
        for _ in range(2):
            with pytest.raises(OSError, match=r"File too large: .*metrics\.jsonl") as raised:
                metrics.write(row)
            assert raised.value.errno == errno.EFBIG
        metrics.write({"a": 1})  # a short one still fits
        assert read(tmp_path) == [row, row, {"a": 1}]
        metrics.close()

    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert len(read(tmp_path)) == 3


def test_closing(tmp_path: Path) -> None:
    def interrupted() -> None:
        with MetricsWriter(tmp_path) as metrics:
            metrics.write({"step": 1})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (tmp_path / "metrics.csv").read_bytes() == b"step\n1\n"
    metrics = MetricsWriter(tmp_path, resume_step=1)
    metrics.close()
    metrics.close()
    with pytest.raises(ValueError, match="closed"):
        metrics.write({"step": 2})


class Board:
    """Stands for TensorBoard's SummaryWriter."""

    made: list[Board] = []  # noqa: RUF012

    def __init__(self, log_dir: str, *, purge_step: int | None) -> None:
        self.calls: list[tuple[Any, ...]] = [("made", log_dir, purge_step)]
        self.made.append(self)

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.calls.append((name, *arguments))


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> list[Board]:
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Board  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(Board, "made", [])
    return Board.made


def test_tensorboard(tmp_path: Path, board: list[Board]) -> None:
    rows = [{"step": 4, "loss": 0.5, "note": "hello", "nothing": None}, {"of step 4": 2}]
    written(tmp_path, rows, tensorboard=True)
    written(tmp_path, [{"late": 1}], tensorboard=True, resume_step=4)
    folder = str(tmp_path / "tensorboard")
    assert [made.calls for made in board] == [
        [
            ("made", folder, None),
            ("add_scalar", "loss", 0.5, 4),
            ("add_text", "note", "hello", 4),
            ("add_scalar", "of step 4", 2, 4),
            ("flush",),
            ("close",),
        ],
        [("made", folder, 5), ("add_scalar", "late", 1, 4), ("flush",), ("close",)],
    ]


def test_tensorboard_only_if_wanted(tmp_path: Path, board: list[Board]) -> None:
    written(tmp_path)
    assert board == []


def test_tensorboard_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtraError, match=r"tensorboard: .*pip install tensorboard$"):
        MetricsWriter(tmp_path / "run", tensorboard=True)
    assert not (tmp_path / "run").exists()
