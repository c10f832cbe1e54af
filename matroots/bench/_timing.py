# SPDX-License-Identifier: Apache-2.0
"""Times that can be compared: all contestants are run in turn, again and again, so that they see the same machine."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

Run = Callable[[], object]
Timer = Callable[[Run], float]
"""Seconds that one run takes."""
MOST_REPEATS = 50


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of seconds; ``repeats`` is 0 if there is the warm-up run only."""

    median: float
    low: float
    high: float
    repeats: int


def wall_clock(run: Run) -> float:
    """Return the wall time of a run."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def cuda_events(run: Run) -> float:
    """Return the time of a run on the current CUDA device, between two events; waits for the second."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def timer(device: torch.device) -> Timer:
    """Return the clock for a device."""
    return cuda_events if device.type == "cuda" else wall_clock


def plan(first: Mapping[str, float], budget: float, most: int = MOST_REPEATS) -> dict[str, int]:
    """Return how often to run each, from the seconds of a first run, within a budget of seconds.

    Up to half of the budget goes to one run of everyone, quick ones first. The rest is shared equally; what the quick ones
    leave of their shares, as they need not run more than ``most`` times, goes to the slow ones.

    >>> plan({"quick": 0.1, "slow": 3.0, "slower": 5.0}, budget=16.0, most=10)
    {'quick': 10, 'slow': 3, 'slower': 1}
    """
    counts = dict.fromkeys(sorted(first, key=first.__getitem__), 0)
    once = budget / 2
    for name in counts:
        counts[name] = int(first[name] <= once)
        once -= counts[name] * first[name]
    rest = budget / 2 + once
    for place, name in enumerate(counts):
        share = rest / (len(counts) - place)
        more = min(most - counts[name], int(share / max(first[name], 1e-9)))
        counts[name] += more
        rest -= more * first[name]
    return counts


def interleave(
    runs: Mapping[str, Run], counts: Mapping[str, int], clock: Timer, seed: int = 0
) -> dict[str, list[float]]:
    """Run everything in rounds, in a new random order each; one that runs less often than another sits rounds out evenly."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    rounds = max(counts.values(), default=0)
    order, shuffle = list(runs), random.Random(seed).shuffle
    for turn in range(rounds):
        shuffle(order)
        for name in order:
            if (turn + 1) * counts[name] // rounds > turn * counts[name] // rounds:
                times[name].append(clock(runs[name]))
    return times


def spread(times: list[float], first: float) -> Spread:
    """Return median and quartiles; the warm-up's time ``first`` where nothing else was affordable."""
    if not times:
        return Spread(first, first, first, 0)
    low, middle, high = np.percentile(times, [25, 50, 75]).tolist()
    return Spread(middle, low, high, len(times))
