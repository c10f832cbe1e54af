"""Many jobs: one after another, or several at a time in processes of their own; those that are finished already are not run again."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path

from dash_optim.training.loop import Outcome, train
from dash_optim.training.settings import Job
from matroots.studies._report import track

Jobs = Mapping[str, Job]
"""Jobs by the name of their folder."""


def folder_name(job: Job, *, seed: bool = True) -> str:
    """Return a name for the folder of a job, from its optimizer and seed."""
    name = re.sub(r"[^A-Za-z0-9.=+-]+", "-", job.name).strip("-")
    return f"{name}-seed{job.training.seed}" if seed else name


def run_all(jobs: Jobs, out: Path, *, workers: int = 1, quiet: bool = False) -> dict[str, Outcome]:
    """Run all jobs, each in its folder below ``out``, and return their outcomes in the same order.

    With more than one worker each computes with one thread, unless its job says otherwise: that is the fastest way through many small runs, but their
    times should not be compared. ``quiet`` shows one bar for all instead of one for each.

    Raises:
        InputError: as :func:`train`.
        KeyboardInterrupt: all runs that were under way have left checkpoints, and the same call goes on.
    """
    if workers == 1:
        listed = track(list(jobs), f"{len(jobs)} runs") if quiet else list(jobs)
        return {name: train(jobs[name], out / name, quiet=quiet) for name in listed}
    found: dict[str, Outcome] = {}
    spawn = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    with ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        waiting = {pool.submit(_train_alone, job, out / name): name for name, job in jobs.items()}
        try:
            for _ in track(list(waiting), f"{len(waiting)} runs, {workers} at a time"):
                done = next(iter(wait(waiting, return_when=FIRST_COMPLETED).done))
                found[waiting.pop(done)] = done.result()
        except BaseException:
            _cancel(waiting)
            raise
    return {name: found[name] for name in jobs}


def _train_alone(job: Job, folder: Path) -> Outcome:
    one = job if job.training.threads is not None else job.with_values(training={"threads": 1})
    return train(one, folder, quiet=True)


def _cancel(waiting: Mapping[Future[Outcome], str]) -> None:
    for future in waiting:
        future.cancel()
