"""How many roots a certified refresh saves at equal loss: a training run under several tolerances, beside refreshing every step and every ten.

A byte-level model of 0.9M parameters on the English text that ships with Python, 300 steps at a peak rate of 0.01 (30 of warm-up, cosine to a
tenth), gradients clipped at 1, Adam grafting, blocks of 128. Prints a row as each run ends, and means over seeds at the end.
Run it as ``python benchmarks/certified_refresh.py --p 2 4 --seeds 0 1 2``.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from typing import Any

import torch
from language_model import ByteModel, batches, text_split
from torch import nn

from dash_optim import DASH, param_groups

CONTEXT, BATCH, PEAK, WARMUP = 128, 16, 0.01, 30


def train(options: dict[str, Any], seed: int, steps: int) -> tuple[float, float, float]:
    """Return the final validation loss, roots computed per factor and step, and optimizer seconds per step."""
    model = ByteModel(128, 4, 4, 352, CONTEXT, seed)
    groups = param_groups(
        model, verbose=False, overrides={"embeddings": {"algorithm": "dash"}, "heads": {"algorithm": "dash"}}
    )
    optimizer = DASH(groups, lr=PEAK, block_size=128, **options)
    text, held_out = text_split()
    spent = 0.0
    for step, windows in zip(range(1, steps + 1), batches(text, BATCH, CONTEXT, seed), strict=False):
        rate = PEAK * min(
            step / WARMUP, 0.1 + 0.45 * (1 + math.cos(math.pi * max(step - WARMUP, 0) / (steps - WARMUP)))
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        model.loss(windows).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        started = time.perf_counter()
        optimizer.step()
        spent += time.perf_counter() - started
    with torch.no_grad():
        windows = held_out[: len(held_out) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
        loss = statistics.mean(model.loss(part).item() for part in windows.split(64))
    factors = [factor for block in optimizer.diagnostics().blocks for factor in block.factors]
    roots = sum(factor.refreshes for factor in factors) / (len(factors) * steps)
    return loss, roots, spent / steps


def main() -> None:
    """Run everything that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--p", nargs="*", type=float, default=[2.0, 4.0])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--tols", nargs="*", type=float, default=[0.1, 0.3, 1.0, 3.0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rel-damping", type=float, default=1e-4)
    arguments = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {
        "every step": {"update_freq": 1},
        "every 10": {"update_freq": 10},
        "staggered over 10": {"update_freq": 10, "refresh": "staggered"},
    }
    for tol in arguments.tols:
        rows[f"certified, refresh_tol {tol:g}"] = {"refresh": "certified", "refresh_tol": tol}
    print("| p | refresh | loss by seed | mean loss | roots a factor and step | optimizer ms a step |")
    print("|---|---|---|---|---|---|")
    for p in arguments.p:
        for name, options in rows.items():
            runs = [
                train({"p": p, "rel_damping": arguments.rel_damping, **options}, seed, arguments.steps)
                for seed in arguments.seeds
            ]
            losses, roots, seconds = zip(*runs, strict=True)
            print(
                f"| {p:g} | {name} | {' / '.join(f'{loss:.3f}' for loss in losses)} | {statistics.mean(losses):.3f} |"
                f" {statistics.mean(roots):.3f} | {1e3 * statistics.mean(seconds):.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
