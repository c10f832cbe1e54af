# SPDX-License-Identifier: Apache-2.0
"""How many roots a certified refresh saves at equal loss: a training run under several tolerances, beside refreshing every step and every ten.

A byte-level model on the English text that ships with Python, 0.9M parameters or (``--model large``) the 6.7M of ``dash_step.py``, 300 steps at a
peak rate of 0.01 (30 of warm-up, cosine to a tenth), gradients clipped at 1, Adam grafting, blocks of 128. Prints a row when all seeds of it have run.
With pytorch-optimizer (the extra ``bench``) there is a last column: the mean step over that of its ScalableShampoo, which refreshes every step and
gets the gradients of five steps spread over the same run, in a copy of the model.
Run it as ``python benchmarks/certified_refresh.py --p 2 4 --seeds 0 1 2``.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import time
from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import Any

import dash_step
import torch
from language_model import ByteModel, batches, text_split
from torch import nn

from dash_optim import DASH, param_groups

PEAK, WARMUP = 0.01, 30


@dataclass(frozen=True)
class Setup:
    """A model and what it sees in a step."""

    width: int
    hidden: int
    context: int
    batch: int

    def model(self, seed: int) -> ByteModel:
        """Return the model as it starts: four layers with four heads."""
        return ByteModel(self.width, 4, 4, self.hidden, self.context, seed)


SETUPS = {
    "small": Setup(width=128, hidden=352, context=128, batch=16),
    "large": Setup(dash_step.WIDTH, dash_step.HIDDEN, dash_step.CONTEXT, dash_step.BATCH),
}


@dataclass(frozen=True)
class Run:
    """What came of a run: validation loss, roots computed per factor and step, seconds per step of the optimizer and of the peer."""

    loss: float
    roots: float
    seconds: float
    peer: float


def make_peer(model: ByteModel) -> torch.optim.Optimizer | None:
    """Return ScalableShampoo on a copy of the model, None if it is not installed."""
    if find_spec("pytorch_optimizer") is None:
        return None
    make = dash_step.contestants(128, 1)["ScalableShampoo (pytorch-optimizer)"]
    return make(list(copy.deepcopy(model).parameters()))


def peer_step(peer: torch.optim.Optimizer, model: ByteModel) -> float:
    """Return the seconds of a step of the peer with the gradients of the model."""
    (group,) = peer.param_groups
    for own, param in zip(group["params"], model.parameters(), strict=True):
        own.grad = None if param.grad is None else param.grad.clone()
    started = time.perf_counter()
    peer.step()
    return time.perf_counter() - started


def train(setup: Setup, options: dict[str, Any], seed: int, steps: int) -> Run:
    """Train and validate."""
    model = setup.model(seed)
    groups = param_groups(
        model, verbose=False, overrides={"embeddings": {"algorithm": "dash"}, "heads": {"algorithm": "dash"}}
    )
    optimizer = DASH(groups, lr=PEAK, block_size=128, **options)
    text, held_out = text_split()
    peer = make_peer(model)
    spent, peer_spent = 0.0, []
    for step, windows in zip(
        range(1, steps + 1), batches(text, setup.batch, setup.context, seed), strict=False
    ):
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
        if peer is not None and step % max(1, steps // 6) == 0:
            peer_spent.append(peer_step(peer, model))
    with torch.no_grad():
        length = setup.context + 1
        windows = held_out[: len(held_out) // length * length].view(-1, length)
        loss = statistics.mean(model.loss(part).item() for part in windows.split(64))
    factors = [factor for block in optimizer.diagnostics().blocks for factor in block.factors]
    roots = sum(factor.refreshes for factor in factors) / (len(factors) * steps)
    # the first builds what it keeps
    return Run(loss, roots, spent / steps, statistics.mean(peer_spent[1:]) if peer_spent[1:] else math.nan)


def main() -> None:
    """Run everything that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--p", nargs="*", type=float, default=[2.0, 4.0])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--tols", nargs="*", type=float, default=[0.1, 0.3, 1.0, 3.0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rel-damping", type=float, default=1e-4)
    parser.add_argument("--model", choices=SETUPS, default="small")
    parser.add_argument("--only", nargs="*", help="rows whose name contains one of these")
    arguments = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {
        "every step": {"update_freq": 1},
        "every 10": {"update_freq": 10, "refresh": "interval"},
        "staggered over 10": {"update_freq": 10, "refresh": "staggered"},
        "every 10, refresh_young=False": {"update_freq": 10, "refresh": "interval", "refresh_young": False},
        "staggered over 10, refresh_young=False": {
            "update_freq": 10,
            "refresh": "staggered",
            "refresh_young": False,
        },
    }
    for tol in arguments.tols:
        rows[f"certified, refresh_tol {tol:g}"] = {"refresh": "certified", "refresh_tol": tol}
    print(
        "| p | refresh | loss by seed | mean loss | roots a factor and step | optimizer ms a step | over the peer |"
    )
    print("|---|---|---|---|---|---|---|")
    for p in arguments.p:
        for name, options in rows.items():
            if arguments.only and not any(part in name for part in arguments.only):
                continue
            options = {"p": p, "rel_damping": arguments.rel_damping, **options}
            runs = [
                train(SETUPS[arguments.model], options, seed, arguments.steps) for seed in arguments.seeds
            ]
            mean = {
                field.name: statistics.mean(getattr(run, field.name) for run in runs) for field in fields(Run)
            }
            print(
                f"| {p:g} | {name} | {' / '.join(f'{run.loss:.3f}' for run in runs)} | {mean['loss']:.3f} | {mean['roots']:.3f} |"
                f" {1e3 * mean['seconds']:.1f} | {mean['seconds'] / mean['peer']:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
