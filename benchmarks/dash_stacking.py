# SPDX-License-Identifier: Apache-2.0
"""What stacking gains: a step with refresh of 256 blocks of 64 x 64 in one stack, layer by layer, and one by one.

Run it as ``python benchmarks/dash_stacking.py``. Roots by ten-step Newton-Denman-Beavers, refreshed every step; the three take turns.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from dash_optim import DASH


def main() -> None:
    """Time the three and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=16, help="parameters that the 256 blocks are in")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    rows = 64 * 256 // arguments.layers
    runs = {}
    for stacking in ("device", "layer", "none"):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(rows, 64)) for _ in range(arguments.layers)]
        options = {"type": "ndb", "steps": 10}
        runs[stacking] = (
            params,
            DASH(params, block_size=64, p=4, method=options, update_freq=1, stacking=stacking),
        )
    times: dict[str, list[float]] = {stacking: [] for stacking in runs}
    for _ in range(arguments.rounds + 1):
        for stacking, (params, optimizer) in runs.items():
            torch.manual_seed(1)
            for param in params:
                param.grad = torch.randn_like(param)
            started = time.perf_counter()
            optimizer.step()
            times[stacking].append(time.perf_counter() - started)
    slowest = statistics.median(times["none"][1:])
    for stacking, taken in times.items():
        median = statistics.median(taken[1:])
        print(
            f"{stacking:>7}: {1e3 * median:7.1f} ms a step, {slowest / median:.1f} times as fast as one by one"
        )


if __name__ == "__main__":
    main()
