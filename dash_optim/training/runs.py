# SPDX-License-Identifier: Apache-2.0
"""Many jobs: one after another, or several at a time in processes of their own; those that are finished already are not run again."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import cache
from itertools import islice
from multiprocessing.synchronize import Event
from pathlib import Path
from types import FrameType
from typing import Final, TypeVar

from dash_optim.training.data import Corpus
from dash_optim.training.loop import check, corpus_of, finished, train
from dash_optim.training.outcome import Outcome
from dash_optim.training.settings import Data, Job
from dash_optim.training.stop import handling
from matroots._command import InputError
from matroots.studies._report import track

Key = TypeVar("Key", bound=Hashable)
_LONGEST: Final = 80  # characters of a label in the name of a folder: file systems take 255 bytes


def folder_name(label: str, seed: int) -> str:
    """Return a name for the folder of a run; labels that differ have names that differ, whatever characters are in them."""
    name = re.sub(r"[^a-z0-9.=+-]+", "-", label).strip("-.")[:_LONGEST]
    if name != label:
        name += f"-{hashlib.sha256(label.encode()).hexdigest()[:8]}"
    return f"{name}-seed{seed}"


def by_seed(label: str, job: Job, seeds: Sequence[int]) -> dict[str, Job]:
    """Return a job with each seed, its own if there are none, by the name of its folder."""
    return {
        folder_name(label, seed): job.with_values(training={"seed": seed})
        for seed in seeds or [job.training.seed]
    }


def run_groups(
    groups: Mapping[Key, Mapping[str, Job]], out: Path, *, workers: int = 1, quiet: bool = False
) -> dict[Key, list[Outcome]]:
    """Run groups of jobs, each job in its folder below ``out``, and return their outcomes in the same order.

    Nothing is run before all jobs are known to be possible. A folder that is in several groups is run once. With more than one worker each computes
    with one thread, unless its job says otherwise: that is the fastest way through many small runs, but their times should not be compared.

    Args:
        groups: jobs by the name of their folder, by whatever the caller calls the group.
        out: made if it is not there.
        workers: runs at a time.
        quiet: one bar for all instead of one for each; without a terminal a line for each run.

    Raises:
        InputError: as :func:`train`.
        KeyboardInterrupt: all runs that were under way have left checkpoints, and the same call goes on.
    """
    jobs: dict[str, Job] = {}
    for members in groups.values():
        for name, job in members.items():
            if jobs.setdefault(name, job) != job:
                raise ValueError(f"groups: expected one job for each folder, got two for {name!r}")
    corpora = {data: corpus_of(data) for data in {job.data for job in jobs.values()}}
    found = {}
    for name, job in jobs.items():
        done = finished(job, out / name, corpora[job.data])
        if done is not None:
            found[name] = done
        else:
            check(job, corpora[job.data])
    left = {name: job for name, job in jobs.items() if name not in found}
    found |= _in_turn(left, out, corpora, quiet) if workers == 1 else _in_processes(left, out, workers)
    return {key: [found[name] for name in members] for key, members in groups.items()}


def _in_turn(
    jobs: Mapping[str, Job], out: Path, corpora: Mapping[Data, Corpus], quiet: bool
) -> dict[str, Outcome]:
    found = {}
    for name in track(list(jobs), f"{len(jobs)} runs") if quiet else jobs:
        found[name] = train(jobs[name], out / name, quiet=quiet, corpus=corpora[jobs[name].data])
        if quiet:
            _tell(name, found[name])
    return found


def _in_processes(jobs: Mapping[str, Job], out: Path, workers: int) -> dict[str, Outcome]:
    """Run jobs in processes, and give none to a process before it is free: what is waiting there cannot be called back."""
    found: dict[str, Outcome] = {}
    running: dict[Future[Outcome], str] = {}
    waiting: Iterator[str] = iter(jobs)
    spawn = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    stop = spawn.Event()
    with (
        handling(_Interrupt()),
        ProcessPoolExecutor(workers, mp_context=spawn, initializer=_begin, initargs=(stop,)) as pool,
    ):
        try:
            for _ in track(list(jobs), f"{len(jobs)} runs, {workers} at a time"):
                for name in islice(waiting, workers - len(running)):
                    with _ctrl_c_held_back():
                        running[pool.submit(_train_alone, jobs[name], out / name)] = name
                done = next(iter(wait(running, return_when=FIRST_COMPLETED).done))
                name = running.pop(done)
                found[name] = done.result()
                _tell(name, found[name])
        except BrokenProcessPool as error:
            raise InputError(
                "--workers: a process was killed, perhaps for lack of memory; the same command goes on, with fewer if need be"
            ) from error
        finally:
            stop.set()
    return found


class _Interrupt:
    """The first signal interrupts, and processes then end after their steps; a second does not wait for them."""

    def __init__(self) -> None:
        self._heard = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._heard:
            for process in multiprocessing.active_children():
                process.kill()  # runs survive that at any moment
            return
        self._heard = True
        raise KeyboardInterrupt


@contextmanager
def _ctrl_c_held_back() -> Iterator[None]:
    """Let Ctrl-C wait, and processes that are started meanwhile never hear it, not even while they import torch."""
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _tell(name: str, outcome: Outcome) -> None:
    """Say on stderr how a run ended, where there is no bar."""
    if not sys.stderr.isatty():
        said = f"given up, {outcome.reason}" if outcome.diverged else f"held out {outcome.loss:.3f}"
        sys.stderr.write(f"{name}: step {outcome.step} of {outcome.steps}: {said}\n")
        sys.stderr.flush()


_stop: Callable[[], bool] | None = None  # of a worker


def _begin(stop: Event) -> None:
    """Prepare a worker: its parent alone hears Ctrl-C, and it ends with its parent, however that ends."""
    global _stop
    _stop = stop.is_set
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where it is not held back
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)  # runs survive that at any moment


def _train_alone(job: Job, folder: Path) -> Outcome:
    one = job if job.training.threads is not None else job.with_values(training={"threads": 1})
    return train(one, folder, quiet=True, corpus=_corpus(job.data), stop=_stop)


_corpus = cache(corpus_of)  # of a worker: loaded once for all its runs
