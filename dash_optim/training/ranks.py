# SPDX-License-Identifier: Apache-2.0
"""The ranks of one job: what each of them does for itself, and what all decide together.

They train one model: DistributedDataParallel averages their gradients, DASH shares its work over them (``process_group``). The first alone reads and writes the job's folder. Whatever
decides about what comes next, a stop or a loss, is known to all before it is acted upon. `Ranks` is a process on its own, for which nothing of this is needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist  # which torch loads anyway; what takes long is loaded where there are ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dash_optim.training._packed import pack, unpack
from dash_optim.training.settings import Training

T = TypeVar("T")
Loss = Callable[[Tensor], Tensor]


class LostError(RuntimeError):
    """Another rank has failed, has ended, or cannot be reached."""


class Ranks:
    """A process on its own.

    Attributes:
        rank: the number of this one.
        count: how many there are.
        leads: whether this is the one that reads and writes files.
        group: over which an optimizer shares its work.
        peer_errors: what an optimizer raises where it failed on another rank.
    """

    rank: int = 0
    count: int = 1
    leads: bool = True
    group: dist.ProcessGroup | None = None
    peer_errors: tuple[type[Exception], ...] = ()

    def place(self, training: Training) -> torch.device:
        """Return the device of this rank."""
        return training.place()

    def share(self, windows: Tensor) -> Tensor:
        """Return this rank's windows of a batch that is all ranks'."""
        return windows

    def total(self, value: float) -> float:
        """Return the sum over all ranks."""
        return value

    def any(self, flag: bool) -> bool:
        """Return whether it is true on any rank."""
        return flag

    def gathered(self, value: T) -> list[T]:
        """Return the values of all ranks, small ones."""
        return [value]

    def from_first(self, work: Callable[[], T]) -> T:
        """Let the first rank alone do something, and return on all what it returned, with tensors on the CPU."""
        return work()

    def trained(self, model: nn.Module, loss: Loss) -> Loss:
        """Return the loss of a model as a function whose gradients are those of all ranks."""
        return loss

    def apart(self, loss: Loss) -> AbstractContextManager[object]:
        """Leave the gradients of this function where they are while the body runs: more are to be added to them."""
        return nullcontext()

    def reaching(self) -> AbstractContextManager[object]:
        """Raise :class:`LostError` where something in the body fails for want of another rank."""
        return nullcontext()


class Several(Ranks):
    """One of several ranks that are in a group already. Every rank has to call the same methods in the same order.

    Args:
        device: of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        from dash_optim.dash import PeerError

        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self.leads = self.rank == 0
        self.group, self.peer_errors = dist.group.WORLD, (PeerError,)
        self._device = device
        # numbers and objects travel on the CPU, and a rank that ends is noticed at once
        self._hosts = dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")

    def place(self, training: Training) -> torch.device:
        """Return the device of this rank."""
        return self._device

    def share(self, windows: Tensor) -> Tensor:
        """Return every ``count``-th window, from the one of this rank's number on: of some there may be one more than of others."""
        return windows[self.rank :: self.count]

    def total(self, value: float) -> float:
        """Return the sum over all ranks, the same on all to the last bit."""
        return self._reduced(value, dist.ReduceOp.SUM)

    def any(self, flag: bool) -> bool:
        """Return whether it is true on any rank."""
        return bool(self._reduced(float(flag), dist.ReduceOp.MAX))

    def gathered(self, value: T) -> list[T]:
        """Return the values of all ranks, small ones."""
        said: list[T] = [value] * self.count
        with self.reaching():
            dist.all_gather_object(said, value, group=self._hosts)
        return said

    def from_first(self, work: Callable[[], T]) -> T:
        """Let the first rank alone do something, and return on all what it returned; if it fails, all do."""
        value: T | None = None
        error: Exception | None = None
        if self.leads:
            try:
                value = work()
            except Exception as problem:  # whatever it is: the others wait
                error = problem
        failed = self.any(error is not None)
        if error is not None:
            raise error
        if failed:
            raise LostError("rank 0 has failed")
        with self.reaching():
            found: T = self._spread(value)
            return found

    def _spread(self, value: Any) -> Any:
        """Return the first rank's value; the memory of its tensors travels apart, and as it is."""
        content, storages = pack(value) if self.leads else (b"", [])
        said = [content]
        dist.broadcast_object_list(said, 0, group=self._hosts)
        if not self.leads:
            value, storages = unpack(said[0])
        for storage in storages:
            if storage.nbytes():
                dist.broadcast(torch.empty(0, dtype=torch.uint8).set_(storage), 0, group=self._hosts)
        return value

    def trained(self, model: nn.Module, loss: Loss) -> Loss:
        """Return the loss as a module whose gradients are averaged over all ranks."""
        with self.reaching():
            return DistributedDataParallel(_Loss(model, loss))

    def apart(self, loss: Loss) -> AbstractContextManager[object]:
        """Add gradients up on this rank alone while the body runs."""
        assert isinstance(loss, DistributedDataParallel)
        return loss.no_sync()

    @contextmanager
    def reaching(self) -> Iterator[None]:
        """Raise :class:`LostError` where something in the body fails for want of another rank."""
        try:
            yield
        except LostError:
            raise
        except RuntimeError as error:
            if not self._is_lost(error):
                raise
            raise LostError(
                f"another rank has ended or cannot be reached ({first_sentence(error)}); the same command goes on from the last checkpoint"
            ) from error

    def _is_lost(self, error: RuntimeError) -> bool:
        """Whether it is about other ranks: what backends raise in a backward pass has no type of its own."""
        named = any(word in str(error) for word in ("gloo", "Gloo", "NCCL", "Connection "))
        return named or isinstance(error, (dist.DistError, *self.peer_errors))

    def _reduced(self, value: float, how: dist.ReduceOp.RedOpType) -> float:
        sent = torch.tensor(value, dtype=torch.float64, device="cpu")
        with self.reaching():
            dist.all_reduce(sent, how, group=self._hosts)
        return sent.item()


class _Loss(nn.Module):
    """The loss of a model as a module with its parameters, which DistributedDataParallel takes; its buffers are constants, and would be sent in every step."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.weights, self.loss = nn.ParameterList(model.parameters()), loss

    def forward(self, windows: Tensor) -> Tensor:
        """Return the loss on windows."""
        return self.loss(windows)


def first_sentence(error: BaseException) -> str:
    """Return the first sentence of a message: backends add where they were, and wishes."""
    return re.split(r"\n|\. ", str(error).strip())[0].rstrip(".")
