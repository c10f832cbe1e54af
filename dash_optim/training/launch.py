# SPDX-License-Identifier: Apache-2.0
"""How several ranks come to be: torchrun starts a process for each, and says in their environment which of how many each is.

They end together too. A rank that fails says why, in one line, and ends; the others notice that it has gone, or are told by torchrun, and end in silence.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from dash_optim.training.ranks import LostError, Ranks, Several, first_sentence
from dash_optim.training.settings import Training
from dash_optim.training.stop import Stopped, ignore_signals
from matroots._command import INTERRUPTED, InputError, MissingExtraError

VARIABLES: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_PATIENCE: Final = 1.0  # seconds in which a rank that has failed says so
_PATIENCE_TO_MEET: Final = 600.0  # seconds that ranks may be apart when they start


@dataclass
class Launch:
    """What torchrun has told a process.

    Attributes:
        rank: the number of this one.
        count: how many there are.
        local: the number of this one on its machine.
        store: where all can leave words for each other.
        round: how the ranks call what they do together there; until they have met, which time it is that torchrun starts them.
    """

    rank: int
    count: int
    local: int
    store: Store = field(repr=False)
    round: str

    def place(self, training: Training) -> torch.device:
        """Return the device of this rank; raise :class:`InputError` where each cannot have one of its own."""
        device = training.place()
        if device.type == "cpu":
            return device
        if device.type != "cuda" or device.index is not None:
            raise InputError(
                f"training.device: expected 'cpu', or 'cuda' (each rank takes the one of its LOCAL_RANK), with several ranks, got {str(device)!r}"
            )
        there = torch.cuda.device_count()
        if self.local >= there:
            raise InputError(
                f"training.device: expected a CUDA device for each rank, there are {there} here; start at most so many, or give training.device=cpu"
            )
        device = torch.device("cuda", self.local)
        torch.cuda.set_device(device)
        return device

    def meet(self, own: str) -> str:
        """Wait until all ranks have come this far, and return what the first had to say; raise :class:`LostError` if one has failed before.

        torchrun may start ranks again with the store of those before them, in which any key may be theirs. So the first rank gives this round a name that was
        never there, and the others believe it when it has answered what only they can have asked.
        """
        end = time.monotonic() + _PATIENCE_TO_MEET
        asked = uuid.uuid4().hex
        if self.rank == 0:
            name = f"{asked}/{own}"
            self.store.set("round", name)
            questions = [f"{name}/question/{rank}" for rank in range(1, self.count)]
            while questions and not self.store.check(questions):
                self._wait(end)
            for question in questions:
                self.store.set(f"{question}/answer", self.store.get(question).decode())
        else:
            while True:
                name = self.store.get("round").decode() if self.store.check(["round"]) else "none"
                question = f"{name}/question/{self.rank}"
                self.store.set(question, asked)
                answer = f"{question}/answer"
                if self.store.check([answer]) and self.store.get(answer).decode() == asked:
                    break
                self._wait(end)
        self.round = name
        return name.partition("/")[2]

    def _wait(self, end: float) -> None:
        if self.store.check([self._spoken]) or time.monotonic() > end:
            raise LostError("another rank has failed, or has not come")
        time.sleep(0.02)

    @property
    def _spoken(self) -> str:
        """What tells that a rank has said why it ends."""
        return f"{self.round}/spoken"

    def speaks(self, error: BaseException) -> bool:
        """Return whether this rank is to say what went wrong: the first that knows. That others are lost is said only where nobody knows more."""
        end = time.monotonic() + (_PATIENCE if isinstance(error, LostError) else 0.0)
        try:
            while time.monotonic() < end and not self.store.check([self._spoken]):
                time.sleep(0.02)
            return int(self.store.add(self._spoken, 1)) == 1
        except RuntimeError:  # it has gone with who kept it
            return True


def is_launched() -> bool:
    """Return whether torchrun, or whatever sets the same variables, has started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launched() -> Launch | None:
    """Return what this process has been told, None where nothing has; raise :class:`InputError` where it makes no sense."""
    if not is_launched():
        return None
    for name in VARIABLES:
        value = os.environ.get(name, "")
        if not value or (name != "MASTER_ADDR" and not value.isdecimal()):
            raise InputError(
                f"{name}: expected what torchrun sets beside RANK and WORLD_SIZE, {'got ' + repr(value) if value else 'which is not there'}"
            )
    rank, count, local = (int(os.environ[name]) for name in VARIABLES[:3])
    try:
        store, *_ = next(rendezvous("env://", rank, count, timeout=timedelta(seconds=_PATIENCE_TO_MEET)))
    except (RuntimeError, ValueError) as error:
        raise InputError(f"rank {rank}: cannot reach the other ranks: {first_sentence(error)}") from error
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Launch(rank, count, local, PrefixStore("dash_optim", store), f"start {again}")


def refuse_ranks(command: str) -> None:
    """Raise :class:`InputError` if several ranks do what one process has to."""
    if is_launched():
        raise InputError(
            f"{command}: trains many models, each in one process; start it without torchrun, which is for train"
        )


@contextmanager
def joined(launch: Launch | None, training: Training) -> Iterator[Ranks]:
    """Bring the ranks together while the body runs: over gloo on CPUs, NCCL on CUDA.

    Raises:
        InputError: where a rank has no device, or not the kind that the first has.
        LostError: where another rank has failed, or cannot be reached.
    """
    if launch is None:
        yield Ranks()
        return
    device = launch.place(training)
    try:
        ranks = _join(launch, device)
    except LostError:
        raise
    except RuntimeError as error:
        raise LostError(f"cannot reach the other ranks: {first_sentence(error)}") from error
    try:
        yield ranks
    except Stopped:
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()  # after an error the others may be in the middle of something: that this process ends is what they notice


def _join(launch: Launch, device: torch.device) -> Several:
    first = launch.meet(device.type)
    if device.type != first:
        raise InputError(
            f"training.device: expected the same kind for all ranks, got {device.type} here and {first} on rank 0"
        )
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore(f"{launch.round}/group", launch.store),
        rank=launch.rank,
        world_size=launch.count,
        device_id=device if device.type == "cuda" else None,
    )
    return Several(device)


@contextmanager
def one_speaks(launch: Launch | None) -> Iterator[None]:
    """Let one rank say why all end: in the others whatever the body raises becomes a silent ``SystemExit``."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if launch is None:
            raise
        ignore_signals()  # torchrun ends all when one has ended, and this one is to say why
        if not launch.speaks(error):
            raise SystemExit(INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1) from None
        said = f"rank {launch.rank}: {error}"
        if isinstance(error, MissingExtraError):
            raise MissingExtraError(said) from error
        if isinstance(error, (InputError, LostError)):
            raise InputError(said) from error
        raise
