# SPDX-License-Identifier: Apache-2.0
"""Small training jobs for tests, run in this process or in a fork of it that may be killed: a new interpreter takes seconds to import torch."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dash_optim.__main__ import main
from dash_optim.training.checkpoint import latest
from dash_optim.training.metrics import read
from dash_optim.training.settings import Job, read_job

WORDS = (
    "the",
    "root",
    "of",
    "a",
    "matrix",
    "is",
    "not",
    "what",
    "it",
    "was",
    "step",
    "by",
    "we",
    "go",
    "on",
    ".\n",
)
TINY: dict[str, Any] = {
    "model": {"preset": "0.5m", "width": 16, "layers": 1, "heads": 2, "hidden": 24, "context": 16},
    "optimizer": {"type": "dash", "block_size": 16, "update_freq": 4},
    "training": {"steps": 12, "batch": 4, "device": "cpu"},
    "logging": {"validate_every": 5, "validation_windows": 8, "checkpoint_every": 5},
}


def text(path: Path, words: int = 4000, seed: int = 0) -> Path:
    """Write words in a random order."""
    path.write_text(" ".join(random.Random(seed).choices(WORDS, k=words)))
    return path


def tiny(data: Path, **sections: dict[str, Any]) -> Job:
    """Return the small job on a text, with other values in some sections."""
    names = dict.fromkeys([*TINY, *sections])
    merged = {name: {**TINY.get(name, {}), **sections.get(name, {})} for name in names}
    if sections.get("optimizer", {}).get("type", "dash") != "dash":
        merged["optimizer"] = sections["optimizer"]
    return read_job({**merged, "data": {"paths": [str(data)], **sections.get("data", {})}})


def words(command: str, *more: str, data: Path, out: Path) -> list[str]:
    """Return the command line of the small job."""
    settings = [
        f"{section}.{key}={value}"
        for section, values in TINY.items()
        for key, value in values.items()
        if section != "optimizer" or command == "train"
    ]
    return [command, *settings, *more, "--data", str(data), "--out", str(out)]


class Child:
    """A fork of this process that does some work and ends with the exit code that it returns."""

    def __init__(self, work: Callable[[], int | None], log: Path) -> None:
        self.log, self.ended = log, False
        self.pid = os.fork()
        if self.pid == 0:
            code = 99
            try:
                stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(stream, 1)
                os.dup2(stream, 2)
                sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
                torch.set_num_threads(1)
                code = work() or 0
            except SystemExit as error:
                code = int(error.code or 0)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self, seconds: float = 60) -> int:
        """Return the exit code, negative for a signal, or fail after so many seconds."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.ended = True
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.002)
        self.end()
        raise AssertionError(f"still running after {seconds} s: {self.log.read_text()}")

    def end(self) -> None:
        """Kill it, unless it has been waited for."""
        if not self.ended:
            self.signal(signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.ended = True

    def alive(self) -> bool:
        """Whether it has not ended; may be asked before :meth:`wait`."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def command(argv: list[str], log: Path, before: Callable[[], object] = lambda: None) -> Child:
    """Start a command line in a fork, after something that is to happen there first."""

    def work() -> int:
        before()
        return main(argv)

    return Child(work, log)


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Wait for something."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.001)


def lines(folder: Path) -> int:
    """Return how many records a run has written."""
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def flat(value: Any, where: str = "") -> dict[str, Any]:
    """Return the leaves of nested dicts and lists, tensors as their bytes."""
    if isinstance(value, torch.Tensor):
        return {where: (value.dtype, tuple(value.shape), value.contiguous().numpy().tobytes())}
    if isinstance(value, (dict, list, tuple)):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return {key: leaf for name, part in pairs for key, leaf in flat(part, f"{where}/{name}").items()}
    return {where: repr(value)}


def computed(folder: Path) -> dict[str, Any]:
    """Return all that a run has computed: weights and the optimizers' state to the bit, and the metrics that are no times."""
    found = latest(folder)
    assert found is not None
    step, state = found
    records = [
        {name: value for name, value in record.items() if not is_time(name)} for record in read(folder)
    ]
    losses = [(at, loss) for at, _, loss in state["curve"]]
    kept = {name: state[name] for name in ("model", "optimizers", "random")}
    return {"step": step, "records": repr(records), "curve": repr(losses), **flat(kept)}


def is_time(name: str) -> bool:
    return name.endswith("_ms") or name in ("seconds", "tokens_per_second")
