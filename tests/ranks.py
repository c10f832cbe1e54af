# SPDX-License-Identifier: Apache-2.0
"""Runs a function on several ranks, in processes of its own, and never waits longer than it is told."""

from __future__ import annotations

import multiprocessing as mp
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

PRELOADED = [
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "dash_optim",
    "dash_optim.distributed",
]


class RankError(AssertionError):
    """A rank ended with an exception, which the message holds, was killed, or hung."""


def on_ranks(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    expect: type[BaseException] | tuple[type[BaseException], ...] = (),
    dying: int | None = None,
) -> list[Any]:
    """Return what ``function(rank, world, *args)`` returns on each rank, with a gloo group among them.

    An exception of a type that is expected is a result, as ``(type name, message, seconds)``; of the rank that is dying nothing is expected, its result is None.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_run, args=(rank, world, folder, function, args, expect), daemon=True)
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout
        try:
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
            hung = [rank for rank, process in enumerate(processes) if process.exitcode is None]
        finally:
            for process in processes:
                process.kill()
        found = [_result(Path(folder), rank) for rank in range(world)]
    failures = [
        f"rank {rank}: {value[1]}" for rank, value in enumerate(found) if value and value[0] == "error"
    ]
    missing = [rank for rank, value in enumerate(found) if value is None and rank != dying]
    if failures or missing or hung:
        raise RankError("\n".join([f"hung after {timeout} s: {hung}; nothing from: {missing}", *failures]))
    return [value[1] if value else None for value in found]


def _result(folder: Path, rank: int) -> tuple[str, Any] | None:
    with suppress(FileNotFoundError):
        found: tuple[str, Any] = pickle.loads((folder / f"result{rank}").read_bytes())
        return found
    return None


def _run(
    rank: int, world: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...], expect: Any
) -> None:
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=20),
    )
    start = time.monotonic()
    try:
        result = "value", function(rank, world, *args)
    except BaseException as error:
        if isinstance(error, expect):
            result = "value", (type(error).__name__, str(error), time.monotonic() - start)
        else:
            result = "error", traceback.format_exc()
    written = Path(folder) / f"writing{rank}"
    written.write_bytes(pickle.dumps(result))
    written.rename(Path(folder) / f"result{rank}")
