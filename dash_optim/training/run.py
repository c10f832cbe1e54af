# SPDX-License-Identifier: Apache-2.0
"""One run: the model, the optimizers and whatever else changes while a job is done, and the steps that change it.

The batch of a step depends on the seed and the step alone. Several ranks (:mod:`.ranks`) each have a `Run` and do the same with it; what they measure is one number for all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from dash_optim.dash import PreconditionerError
from dash_optim.diagnostics import Diagnostics
from dash_optim.gradients import NonfiniteGradientError
from dash_optim.training.data import Corpus
from dash_optim.training.model import Llama
from dash_optim.training.optimizers import Optimizers
from dash_optim.training.outcome import PARTS, Outcome
from dash_optim.training.ranks import LostError, Ranks
from dash_optim.training.settings import Job, differences
from matroots._command import InputError

LAST_LOOK: Final = 4096
"""The most held-out windows that the last validation takes."""
PATIENCE: Final = 10
"""Steps in a row without a finite loss after which a run is given up."""


@dataclass
class Run:
    """A job on its way: everything that changes, and is kept in checkpoints."""

    job: Job
    corpus: Corpus
    device: torch.device
    ranks: Ranks = field(default_factory=Ranks)
    model: Llama = field(init=False)
    optimizers: Optimizers = field(init=False)
    step: int = 0
    seconds: float = 0.0
    bad: int = 0  # losses in a row that were not finite
    refused: str = ""  # by the optimizer, and why
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    spent: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    def __post_init__(self) -> None:
        """Raise :class:`InputError` for whatever of the job cannot be: before anything is written."""
        training, ranks = self.job.training, self.ranks
        shape = self.job.model.architecture(self.corpus.vocab)
        if shape.vocab < self.corpus.vocab:
            raise InputError(
                f"model.vocab: expected at least the data's {self.corpus.vocab}, got {shape.vocab}"
            )
        if training.batch % ranks.count:
            raise InputError(
                f"training.batch: expected a multiple of the number of ranks, {ranks.count}, got {training.batch}"
            )
        self.corpus.batch(1, batch=1, context=shape.context, seed=training.seed)
        # all of the last look: a token that cannot be is found now, not after the last step
        self.corpus.validation(context=shape.context, most=LAST_LOOK)
        self.model = Llama(shape, training.seed).to(self.device)
        self.optimizers = Optimizers(self.model, self.job.optimizer, ranks.group)
        self._loss = torch.compile(self.model.loss) if training.compile else self.model.loss
        self._trained = ranks.trained(self.model, self._loss)
        if ranks.count > 1 or (training.compile and self.device.type != "meta"):
            self._settle()

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds, on the first rank: that of a single process, whose state the optimizers gather there."""
        with self.ranks.reaching():
            optimizers = self.optimizers.state_dict()
        return {
            "job": self.job.plain(),
            "data": self.corpus.fingerprint,
            "model": self.model.state_dict(),
            "optimizers": optimizers,
            "random": torch.get_rng_state(),
            "seconds": self.seconds,
            "bad": self.bad,
            "refused": self.refused,
            "curve": self.curve,
            "spent": self.spent,
        }

    def load(self, step: int, state: dict[str, Any]) -> None:
        """Go on from a checkpoint; raise :class:`InputError` if it is that of another job or of other data."""
        refuse_other(state["job"], self.job)
        if state["data"] != self.corpus.fingerprint:
            raise other_data(self.corpus)
        self.model.load_state_dict(state["model"])
        self.optimizers.load_state_dict(state["optimizers"])
        torch.set_rng_state(state["random"].cpu())
        self.step, self.seconds, self.bad = step, state["seconds"], state["bad"]
        self.refused = state.get("refused", "")
        self.curve = [tuple(point) for point in state["curve"]]
        self.spent = state["spent"]

    def take_step(self) -> dict[str, float]:
        """Take the next step and return its metrics."""
        training = self.job.training
        self.step += 1
        schedule = self.job.schedule.suited(self.optimizers.warmup)
        rate = self.optimizers.set_rate(schedule.factor(self.step, training.steps))
        parts = self._batch(self.step)
        started = self._clock()
        spent = dict.fromkeys(PARTS, 0.0)
        self.optimizers.zero_grad()
        total = torch.zeros((), device=self.device)
        for part in parts[:-1]:
            with self.ranks.apart(self._trained):
                total += self._backward(part, spent)
        total += self._backward(parts[-1], spent)
        norm = self._clip()
        with timed(spent, "optimizer", self._clock):
            self._optimize()
        took = self._clock() - started
        self.seconds += took
        self.spent = {name: self.spent[name] + spent[name] for name in PARTS}
        value = self.ranks.total(total.item()) / self.ranks.count
        self.bad = 0 if math.isfinite(value) else self.bad + 1
        return {
            "step": self.step,
            "loss": value,
            "rate": rate,
            "gradient_norm": norm.item(),
            "seconds": self.seconds,
            "tokens_per_second": self._tokens / took,
            **{f"{name}_ms": 1e3 * value for name, value in spent.items()},
        }

    @property
    def given_up(self) -> str:
        """Why there is no sense in going on; empty if there is."""
        if self.refused:
            return self.refused
        if self.bad >= PATIENCE:
            return f"no finite loss in {PATIENCE} steps"
        if self.step == self.job.training.steps and not math.isfinite(self.curve[-1][2]):
            return "the last loss is not finite"
        return ""

    @torch.no_grad()
    def validate(self, most: int) -> float:
        """Return the mean loss on at most so many held-out windows, spread over all of the part; each rank takes its share, or all would wait for what one could do."""
        windows = self.corpus.validation(context=self.model.shape.context, most=most)
        own = self.ranks.share(windows).to(self.device)
        total = 0.0
        for part in own.split(self.job.training.batch // self.ranks.count) if len(own) else ():
            with self._autocast():
                total += self._loss(part).item() * len(part)
        return self.ranks.total(total) / len(windows)

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
        own = dash.diagnostics()
        blocks = [block for blocks in self.ranks.gathered(own.blocks) for block in blocks]
        return Diagnostics(blocks, own.skipped_steps).scalars(by_parameter=True)

    def outcome(self) -> Outcome:
        """Return what has come of it so far."""
        training = self.job.training
        reason = self.given_up
        at_end = self.step == training.steps and not reason
        return Outcome(
            name=self.job.name,
            seed=training.seed,
            parameters=sum(param.numel() for param in self.model.parameters()),
            step=self.step,
            steps=training.steps,
            loss=self.curve[-1][2] if at_end else math.nan,
            curve=self.curve,
            seconds=self.seconds,
            tokens_per_second=self.step * self._tokens / self.seconds if self.seconds else math.nan,
            ms={name: 1e3 * total / max(self.step, 1) for name, total in self.spent.items()},
            optimizer_bytes=max(self.ranks.gathered(self.optimizers.bytes)),
            roots=self._roots(),
            diverged=bool(reason),
            reason=reason,
            data=self.corpus.fingerprint,
        )

    def _roots(self) -> float | None:
        dash = self.optimizers.dash
        if dash is None or not self.step:
            return None
        factors = [factor for block in dash.diagnostics().blocks for factor in block.factors]
        refreshes = self.ranks.total(sum(factor.refreshes for factor in factors))
        count = self.ranks.total(len(factors))
        return refreshes / (count * self.step) if count else None

    def _settle(self) -> None:
        """Compute gradients that nobody uses, so that a model is compiled before the clock runs, and a run that goes on adds gradients as one that never stopped.

        DistributedDataParallel lays its buckets out anew after the first, and how a sum over three or more ranks is rounded depends on where its terms lie.
        """
        shape = self.job.training.batch // self.ranks.count, self.model.shape.context + 1
        self._backward(torch.zeros(shape, dtype=torch.int64, device=self.device), dict.fromkeys(PARTS, 0.0))
        self.optimizers.zero_grad()

    def _backward(self, windows: Tensor, spent: dict[str, float]) -> Tensor:
        """Add the gradient of this rank's part of a batch, and return its loss."""
        with timed(spent, "forward", self._clock), self._autocast(), self.ranks.reaching():
            loss = self._trained(windows) / self.job.training.accumulate
        with timed(spent, "backward", self._clock), self.ranks.reaching():
            loss.backward()
        return loss.detach()

    def _clip(self) -> Tensor:
        """Clip the gradients, and return their norm before."""
        limit = self.job.training.clip
        if limit:
            return nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        return nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])

    def _optimize(self) -> None:
        """Let the optimizers take their step; one that refuses to go on, on whatever rank, ends this run, not those after it."""
        try:
            self.optimizers.step()
            return
        except (PreconditionerError, NonfiniteGradientError) as error:
            said = self.ranks.gathered(" ".join(str(error).split()))
        except self.ranks.peer_errors as error:
            said = self.ranks.gathered("")
            if not any(said):
                raise LostError(" ".join(str(error).split())) from error
        self.refused = next(filter(None, said))

    @property
    def _tokens(self) -> int:
        """The tokens of a step of all ranks."""
        training = self.job.training
        return training.batch * training.accumulate * self.model.shape.context

    def _batch(self, step: int) -> list[Tensor]:
        """Return the batches of a step, of each this rank's share. Every rank draws all of them: a token that cannot be is found by all."""
        training = self.job.training
        windows = self.corpus.batch(
            step,
            batch=training.batch * training.accumulate,
            context=self.model.shape.context,
            seed=training.seed,
        )
        return [
            self.ranks.share(part).to(self.device, non_blocking=True)
            for part in windows.split(training.batch)
        ]

    def _autocast(self) -> torch.autocast:
        return torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.job.training.precision == "bfloat16"
        )

    def _clock(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()


def refuse_other(old: dict[str, Any], job: Job) -> None:
    """Raise :class:`InputError` if the settings of a run are those of another job."""
    changed = differences(old, job.plain())
    if changed:
        raise InputError(
            f"--out: this folder holds a run with other settings ({'; '.join(changed)}); give the same, or another folder"
        )


def other_data(corpus: Corpus) -> InputError:
    """Return the error for data that are not those of a run."""
    return InputError(f"data: {corpus.name} is not what the run was started on, or has changed")


@contextmanager
def timed(spent: dict[str, float], name: str, clock: Callable[[], float]) -> Iterator[None]:
    """Add the seconds that the body takes."""
    started = clock()
    yield
    spent[name] += clock() - started
