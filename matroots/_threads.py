# SPDX-License-Identifier: Apache-2.0
"""Chunks of a batch solved by several threads at once, each of which computes with one.

LAPACK and small products keep one core busy: ``eigh`` of 64 x 64 matrices takes the same time with two threads as with one. Halves of a batch
in two threads take half of it. torch's own threads share out what is inside one operation; here whole chunks are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

_WORTH_A_THREAD = 2**24  # n^3 summed over its members: about a millisecond of an eigendecomposition
_BALANCE = 0.8  # share of the threads' time that must be busy: three chunks on two threads are slower than one by one
Item = TypeVar("Item")
Result = TypeVar("Result")


def workers(members: int, n: int) -> int:
    """Return how many threads the members of a batch on CPU are worth: 1 where torch's own threads serve better."""
    threads = min(torch.get_num_threads(), members, members * n**3 // _WORTH_A_THREAD)
    return threads if threads > 1 and not _watched() else 1


def balanced(members: int, size: int, threads: int) -> bool:
    """Return whether chunks of this size keep so many threads busy."""
    rounds = -(-members // (size * threads))
    return members >= _BALANCE * threads * size * rounds


def _watched() -> bool:
    """Return whether a torch mode (of a profiler of products, of a default device) is active: modes belong to one thread."""
    return torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack() > 0


def mapped(function: Callable[[Item], Result], items: Sequence[Item], threads: int) -> Iterator[Result]:
    """Return ``function`` of each item, in their order, computed by so many threads of one torch thread each."""
    with torch_threads(1), ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(function, item) for item in items]
        try:
            for future in futures:
                yield future.result()
        finally:
            for future in futures:
                future.cancel()


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch, and threads that are started inside, compute with ``count`` threads, and restore the number on any exit."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
