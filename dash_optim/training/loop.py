# SPDX-License-Identifier: Apache-2.0
"""The training loop: one job in one folder, from wherever it was left.

A folder holds ``job.json`` (the settings), ``metrics.jsonl`` and ``metrics.csv``, checkpoints, and when the run has ended or was stopped ``result.json``. The batch of a step depends on the
seed and the step alone, so a run that was killed goes on from its last checkpoint as if nothing had happened: bit for bit on a CPU.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, Final

import torch

from dash_optim.training import checkpoint
from dash_optim.training.checkpoint import exclusive, latest, save
from dash_optim.training.data import Corpus, load_corpus
from dash_optim.training.metrics import CSV, JSONL, TENSORBOARD, MetricsWriter, summary_writer
from dash_optim.training.model import Llama
from dash_optim.training.optimizers import try_options
from dash_optim.training.outcome import RESULT, Outcome, read_json, write_json
from dash_optim.training.progress import Progress
from dash_optim.training.ranks import Ranks
from dash_optim.training.run import Run, other_data, refuse_other
from dash_optim.training.settings import Data, Job, differences, read_job
from dash_optim.training.stop import Stop, Stopped
from matroots._command import InputError
from matroots._files import sweep
from matroots._threads import torch_threads

JOB: Final = "job.json"


def train(
    job: Job,
    folder: Path,
    *,
    fresh: bool = False,
    quiet: bool = False,
    corpus: Corpus | None = None,
    stop: Callable[[], bool] | None = None,
    ranks: Ranks | None = None,
) -> Outcome:
    """Train, or go on training, and leave everything in ``folder``.

    Args:
        job: the settings.
        folder: of this run alone; made if it is not there. If it holds the same job, the run goes on from its last checkpoint, or is finished already.
        fresh: throw away what a run has left in the folder, and start over.
        quiet: no progress on the terminal.
        corpus: the data, if they have been loaded already.
        stop: asked before each step; True ends the run as Ctrl-C does.
        ranks: those that do this job together and all call this; the first alone reads and writes the folder. None: this process does it.

    Raises:
        InputError: for settings that cannot be used, a folder with a run of other settings or other data, or ranks that have been given different ones.
        CheckpointError: if the folder is in use by another process or cannot be written to.
        Stopped: a ``KeyboardInterrupt``, after Ctrl-C or a termination signal on any rank, when the checkpoint and the result so far have been written; after a second
            signal a ``KeyboardInterrupt`` at once.
        LostError: if another rank has failed or has ended.
    """
    ranks = ranks or Ranks()
    device = ranks.place(job.training)
    corpus = corpus or corpus_of(job.data)
    _compare(job, corpus, ranks)
    done = None if fresh else ranks.from_first(lambda: finished(job, folder, corpus))
    if done is not None:
        return done
    if job.logging.tensorboard:
        summary_writer()
    stopping = Stop(stop)
    with torch_threads(job.training.threads or torch.get_num_threads()), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(job.training.seed)  # torch.manual_seed seeds accelerators too
        try_options(job.optimizer, device)
        run = Run(job, corpus, device, ranks)
        with ExitStack() as held, stopping.listening():
            found = ranks.from_first(lambda: _open(run, folder, fresh, held))
            if found is not None:
                run.load(*found)
            _loop(run, folder, stopping, quiet)
            outcome = run.outcome()
            if ranks.leads:
                outcome.write(folder)
            stopped = ranks.any(stopping.requested)  # and all is written
    if stopped or not outcome.finished:
        raise Stopped
    return outcome


def _compare(job: Job, corpus: Corpus, ranks: Ranks) -> None:
    """Raise :class:`InputError` where ranks have been given different settings or data: each machine has command lines and files of its own."""
    (first, data), *others = ranks.gathered((job.plain(), corpus.fingerprint))
    for rank, (settings, found) in enumerate(others, 1):
        where = "on rank 0", f"on rank {rank}"
        changed = differences(first, settings, free=("training.device", "training.threads"), where=where)
        if changed:
            raise InputError(f"expected the same settings on all ranks, got {'; '.join(changed)}")
        if found != data:
            raise InputError(
                f"data: expected the same on all ranks, those of rank {rank} are not those of rank 0"
            )


def _open(run: Run, folder: Path, fresh: bool, held: ExitStack) -> tuple[int, dict[str, Any]] | None:
    """Take the folder, and return the checkpoint to go on from, if there is one."""
    held.enter_context(exclusive(folder))
    _claim(run.job, folder, fresh)
    return latest(folder, map_location=run.device if run.ranks.group is None else "cpu")


def finished(job: Job, folder: Path, corpus: Corpus) -> Outcome | None:
    """Return the outcome of a job if its run has ended; raise :class:`InputError` if the folder holds another run, ended or not."""
    settings, done = read_json(folder / JOB), Outcome.read(folder)
    if settings is None:
        return None
    refuse_other(settings, job)
    if done is None or not done.finished:
        return None
    if done.data not in ("", corpus.fingerprint):
        raise other_data(corpus)
    return done


def check(job: Job, corpus: Corpus) -> None:
    """Raise :class:`InputError` or :class:`MissingExtraError` for what would be raised when a job is started."""
    try_options(job.optimizer, job.training.place())
    with torch.device("meta"):  # nothing is computed, no memory is taken
        Run(job, corpus, torch.device("meta"))


def load_model(folder: Path) -> tuple[Job, Corpus, Llama]:
    """Return the job of a folder, its data, and the model as the newest checkpoint has it, on the CPU.

    Raises:
        InputError: if there is no run in the folder, or if its data have changed.
    """
    found = latest(folder)
    if found is None:
        raise InputError(f"{str(folder)!r}: expected the folder of a run, found no checkpoint")
    _, state = found
    job = read_job(state["job"])
    corpus = corpus_of(job.data)
    if state["data"] != corpus.fingerprint:
        raise other_data(corpus)
    model = Llama(job.model.architecture(corpus.vocab), job.training.seed)
    model.load_state_dict(state["model"])
    return job, corpus, model


def corpus_of(data: Data) -> Corpus:
    """Load the data of a job, as :func:`load_corpus` does."""
    return load_corpus(data.paths or None, held_out=data.held_out, vocab=data.vocab)


def _loop(run: Run, folder: Path, stop: Stop, quiet: bool) -> None:
    """Take the steps that are left, until the end, a signal on any rank, or a loss that stays infinite."""
    logging, steps = run.job.logging, run.job.training.steps
    saved = run.step
    with (
        MetricsWriter(folder, resume_step=run.step, tensorboard=logging.tensorboard)
        if run.ranks.leads
        else nullcontext() as metrics,
        Progress(run.job.name, run.step, steps, quiet=quiet or not run.ranks.leads) as progress,
    ):
        while run.step < steps and not run.given_up and not run.ranks.any(stop.requested):
            record = run.take_step()
            last = run.step == steps
            if last or run.step % logging.validate_every == 0:
                record |= run.look()
            if metrics is not None:
                metrics.write(record)
            progress.show(record)
            if run.step % logging.checkpoint_every == 0 or last:
                _keep(run, folder, metrics)
                saved = run.step
        if saved != run.step:
            _keep(run, folder, metrics)


def _keep(run: Run, folder: Path, metrics: MetricsWriter | None) -> None:
    """Write a checkpoint, and first the metrics up to it. An optimizer whose state is no plain data has none: its run starts over."""
    if metrics is not None:
        metrics.flush()
    if run.optimizers.plain:
        state = run.state()
        if metrics is not None:
            save(folder, run.step, state)


def _claim(job: Job, folder: Path, fresh: bool) -> None:
    """Write the settings down, or refuse if another run, or something that is no run, is there."""
    sweep(folder, "*.json")
    found = read_json(folder / JOB)
    if fresh and found is not None:
        _clear(folder, found)
    elif found is not None:
        refuse_other(found, job)
    else:
        others = [name for name in (JSONL, CSV, RESULT) if (folder / name).exists()]
        if others:
            raise InputError(
                f"--out: {str(folder)!r} has {others[0]} but no {JOB}, so it is not a run's; use another folder"
            )
    (folder / RESULT).unlink(missing_ok=True)  # what it says is about to change
    write_json(folder / JOB, job.plain())


def _clear(folder: Path, settings: dict[str, Any]) -> None:
    """Remove what a run has left and nothing else; the settings, by which its folder is known, last."""
    if set(settings) != set(Job().plain()):
        raise InputError(f"--fresh: {str(folder / JOB)!r} was not written by a run; use another folder")
    checkpoint.clear(folder)
    shutil.rmtree(folder / TENSORBOARD, ignore_errors=True)
    for name in (RESULT, JSONL, CSV, JOB):
        (folder / name).unlink(missing_ok=True)
