"""The training loop: one job in one folder, from wherever it was left.

A folder holds ``job.json`` (the settings), ``metrics.jsonl`` and ``metrics.csv``, checkpoints, and in the end ``result.json``. The batch of a step depends on the
seed and the step alone, so a run that was killed goes on from its last checkpoint as if nothing had happened: bit for bit on a CPU.
"""

from __future__ import annotations

import json
import math
import signal
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor, nn

from dash_optim.training._files import replacement
from dash_optim.training.checkpoint import exclusive, latest, save
from dash_optim.training.data import Corpus, load_corpus
from dash_optim.training.metrics import MetricsWriter
from dash_optim.training.model import Llama
from dash_optim.training.optimizers import Optimizers
from dash_optim.training.progress import Progress
from dash_optim.training.settings import Job, differences, read_job
from matroots._command import InputError
from matroots._threads import torch_threads

LAST_LOOK: Final = 4096
"""The most held-out windows that the last validation takes."""
PATIENCE: Final = 10
"""Steps in a row without a finite loss after which a run is given up."""
PARTS: Final = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class Outcome:
    """What came of a run.

    Attributes:
        name: the optimizer with its options.
        seed: of the run.
        parameters: of the model.
        step: the last that was taken; ``steps`` were to be.
        loss: on the held-out text after the last step, in nats per token; NaN if the run diverged or is not finished.
        curve: (step, seconds of training, validation loss) at each look.
        seconds: of training: forward, backward, clipping and optimizer, without validation and checkpoints.
        tokens_per_second: trained on.
        ms: means of forward, backward and optimizer in a step: a median would not see refreshes.
        optimizer_bytes: memory of the optimizer's state.
        roots: computed for each factor and step (DASH only).
        diverged: whether the loss stayed infinite or NaN.
    """

    name: str
    seed: int
    parameters: int
    step: int
    steps: int
    loss: float
    curve: list[tuple[int, float, float]]
    seconds: float
    tokens_per_second: float
    ms: dict[str, float]
    optimizer_bytes: int
    roots: float | None = None
    diverged: bool = False

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to do."""
        return self.diverged or self.step == self.steps

    @property
    def perplexity(self) -> float:
        """``exp(loss)``, per token."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def write(self, folder: Path) -> None:
        """Write ``result.json``."""
        _write_json(folder / "result.json", asdict(self))

    @staticmethod
    def read(folder: Path) -> Outcome | None:
        """Return what a run has left in a folder; None if it has left nothing."""
        path = folder / "result.json"
        if not path.exists():
            return None
        found = json.loads(path.read_text())
        found["curve"] = [tuple(point) for point in found["curve"]]
        return Outcome(**found)


@dataclass
class Run:
    """A job on its way: everything that changes, and is kept in checkpoints."""

    job: Job
    corpus: Corpus
    device: torch.device
    model: Llama = field(init=False)
    optimizers: Optimizers = field(init=False)
    step: int = 0
    seconds: float = 0.0
    bad: int = 0  # losses in a row that were not finite
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    spent: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    def __post_init__(self) -> None:
        shape = self.job.model.architecture(self.corpus.vocab)
        if shape.vocab < self.corpus.vocab:
            raise InputError(
                f"model.vocab: expected at least the data's {self.corpus.vocab}, got {shape.vocab}"
            )
        self.model = Llama(shape, self.job.training.seed).to(self.device)
        self.optimizers = Optimizers(self.model, self.job.optimizer)
        self._loss = torch.compile(self.model.loss) if self.job.training.compile else self.model.loss

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        return {
            "job": self.job.plain(),
            "data": self.corpus.fingerprint,
            "model": self.model.state_dict(),
            "optimizers": self.optimizers.state_dict(),
            "random": torch.get_rng_state(),
            "seconds": self.seconds,
            "bad": self.bad,
            "curve": self.curve,
            "spent": self.spent,
        }

    def load(self, step: int, state: dict[str, Any]) -> None:
        """Go on from a checkpoint; raise :class:`InputError` if it is that of another job or of other data."""
        _refuse_other(state["job"], self.job)
        if state["data"] != self.corpus.fingerprint:
            raise InputError(f"data: {self.corpus.name} is not what the run was started on, or has changed")
        self.model.load_state_dict(state["model"])
        self.optimizers.load_state_dict(state["optimizers"])
        torch.set_rng_state(state["random"].cpu())
        self.step, self.seconds, self.bad = step, state["seconds"], state["bad"]
        self.curve = [tuple(point) for point in state["curve"]]
        self.spent = state["spent"]

    def take_step(self) -> dict[str, float]:
        """Take the next step and return its metrics."""
        training = self.job.training
        self.step += 1
        rate = self.optimizers.set_rate(self.job.schedule.factor(self.step, training.steps))
        windows = self._batch(self.step, training.batch * training.accumulate)
        started = self._clock()
        spent = dict.fromkeys(PARTS, 0.0)
        self.optimizers.zero_grad()
        total = torch.zeros((), device=self.device)
        for part in windows.split(training.batch):
            with timed(spent, "forward", self._clock), self._autocast():
                loss = self._loss(part) / training.accumulate
            with timed(spent, "backward", self._clock):
                loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), training.clip or math.inf)
        with timed(spent, "optimizer", self._clock):
            self.optimizers.step()
        took = self._clock() - started
        self.seconds += took
        self.spent = {name: self.spent[name] + spent[name] for name in PARTS}
        value = total.item()
        self.bad = 0 if math.isfinite(value) else self.bad + 1
        return {
            "step": self.step,
            "loss": value,
            "rate": rate,
            "gradient_norm": norm.item(),
            "seconds": self.seconds,
            "tokens_per_second": windows[:, 1:].numel() / took,
            **{f"{name}_ms": 1e3 * value for name, value in spent.items()},
        }

    @torch.no_grad()
    def validate(self, most: int) -> float:
        """Return the mean loss on at most so many held-out windows, spread over all of the part."""
        windows = self.corpus.validation(context=self.model.shape.context, most=most).to(self.device)
        total = 0.0
        for part in windows.split(self.job.training.batch):
            with self._autocast():
                total += self._loss(part).item() * len(part)
        return total / len(windows)

    def look(self) -> dict[str, float]:
        """Validate, put the point on the curve, and return its metrics."""
        last = self.step == self.job.training.steps
        loss = self.validate(LAST_LOOK if last else self.job.logging.validation_windows)
        self.curve.append((self.step, self.seconds, loss))
        return {"validation_loss": loss, **(self._diagnostics() if self.job.logging.diagnostics else {})}

    def _diagnostics(self) -> dict[str, float]:
        """Return DASH's numbers, and the median grafting coefficient of each parameter's blocks."""
        dash = self.optimizers.dash
        if dash is None:
            return {}
        found = dash.diagnostics()
        by_parameter: dict[str, list[float]] = defaultdict(list)
        for block in found.blocks:
            by_parameter[block.parameter].append(block.grafting)
        medians = {f"grafting/{name}": statistics.median(values) for name, values in by_parameter.items()}
        return {**found.scalars(), **medians}

    def outcome(self) -> Outcome:
        """Return what has come of it so far."""
        training = self.job.training
        diverged = self.bad >= PATIENCE
        at_end = self.step == training.steps and not diverged
        tokens = self.step * training.batch * training.accumulate * self.model.shape.context
        return Outcome(
            name=self.job.name,
            seed=training.seed,
            parameters=sum(param.numel() for param in self.model.parameters()),
            step=self.step,
            steps=training.steps,
            loss=self.curve[-1][2] if at_end else math.nan,
            curve=self.curve,
            seconds=self.seconds,
            tokens_per_second=tokens / self.seconds if self.seconds else math.nan,
            ms={name: 1e3 * total / max(self.step, 1) for name, total in self.spent.items()},
            optimizer_bytes=self.optimizers.bytes,
            roots=self._roots(),
            diverged=diverged,
        )

    def _roots(self) -> float | None:
        dash = self.optimizers.dash
        if dash is None or not self.step:
            return None
        factors = [factor for block in dash.diagnostics().blocks for factor in block.factors]
        return sum(factor.refreshes for factor in factors) / (len(factors) * self.step) if factors else None

    def _batch(self, step: int, count: int) -> Tensor:
        training = self.job.training
        windows = self.corpus.batch(step, batch=count, context=self.model.shape.context, seed=training.seed)
        return windows.to(self.device, non_blocking=True)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.job.training.precision == "bfloat16"
        )

    def _clock(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()


def train(job: Job, folder: Path, *, quiet: bool = False, corpus: Corpus | None = None) -> Outcome:
    """Train, or go on training, and leave everything in ``folder``.

    Args:
        job: the settings.
        folder: of this run alone; made if it is not there. If it holds the same job, the run goes on from its last checkpoint, or is finished already.
        quiet: no progress on the terminal.
        corpus: the data, if they have been loaded already.

    Raises:
        InputError: for settings that cannot be used, or a folder with a run of other settings.
        KeyboardInterrupt: after Ctrl-C or a termination signal, when the checkpoint and the result so far have been written.
    """
    device = job.training.place()
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive(folder), torch_threads(job.training.threads or torch.get_num_threads()):
        _claim(job, folder)
        done = Outcome.read(folder)
        if done is not None and done.finished:
            return done
        with torch.random.fork_rng(devices=[]), Stop() as stop:
            torch.manual_seed(job.training.seed)
            run = Run(job, corpus or _corpus(job), device)
            found = latest(folder, map_location=device)
            if found is not None:
                run.load(*found)
            _loop(run, folder, stop, quiet)
            outcome = run.outcome()
            outcome.write(folder)
    if not outcome.finished:
        raise KeyboardInterrupt
    return outcome


def load_model(folder: Path) -> tuple[Job, Corpus, Llama]:
    """Return the job of a folder, its data, and the model as the newest checkpoint has it, on the CPU.

    Raises:
        InputError: if there is no run in the folder.
    """
    found = latest(folder)
    if found is None:
        raise InputError(f"{str(folder)!r}: expected the folder of a run, found no checkpoint")
    _, state = found
    job = read_job(state["job"])
    corpus = _corpus(job)
    model = Llama(job.model.architecture(corpus.vocab), job.training.seed)
    model.load_state_dict(state["model"])
    return job, corpus, model


def _corpus(job: Job) -> Corpus:
    return load_corpus(job.data.paths or None, held_out=job.data.held_out, vocab=job.data.vocab)


def _loop(run: Run, folder: Path, stop: Stop, quiet: bool) -> None:
    """Take the steps that are left, until the end, a signal, or a loss that stays infinite."""
    logging, steps = run.job.logging, run.job.training.steps
    saved = run.step
    with (
        MetricsWriter(folder, resume_step=run.step, tensorboard=logging.tensorboard) as metrics,
        Progress(run.job.name, run.step, steps, quiet=quiet) as progress,
    ):
        while run.step < steps and run.bad < PATIENCE and not stop.requested:
            record = run.take_step()
            last = run.step == steps
            if last or run.step % logging.validate_every == 0:
                record |= run.look()
            metrics.write(record)
            progress.show(record)
            if run.step % logging.checkpoint_every == 0 or last:
                metrics.flush()
                save(folder, run.step, run.state())
                saved = run.step
        if saved != run.step:
            metrics.flush()
            save(folder, run.step, run.state())


def _claim(job: Job, folder: Path) -> None:
    """Write the settings down, or refuse if those of another job are there."""
    path = folder / "job.json"
    if path.exists():
        _refuse_other(json.loads(path.read_text()), job)
    _write_json(path, job.plain())


def _refuse_other(old: dict[str, Any], job: Job) -> None:
    changed = differences(old, job.plain())
    if changed:
        raise InputError(
            f"--out: this folder holds a run with other settings ({'; '.join(changed)}); give the same, or another folder"
        )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with replacement(path) as stream:
        stream.write(json.dumps(content, indent=1).encode())


class Stop:
    """Turns Ctrl-C and a termination signal into a wish that the loop sees after its step; a second Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            self._before = {
                number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)
            }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


@contextmanager
def timed(spent: dict[str, float], name: str, clock: Any) -> Iterator[None]:
    """Add the seconds that the body takes."""
    started = clock()
    yield
    spent[name] += clock() - started
