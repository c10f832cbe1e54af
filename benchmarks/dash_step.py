# SPDX-License-Identifier: Apache-2.0
"""Time of an optimizer step on a 6.7M-parameter language model, its root refreshed every step: DASH beside AdamW and the preconditioned peers.

Width 256, 4 layers, SwiGLU of 1792, bytes of the English text that ships with Python; the gradients are recorded from real training
with AdamW, then the same ones are given to every optimizer, whose ``step`` alone is timed. Optimizers take turns within a round, so
that a slow moment of the machine strikes all. Run it as ``python benchmarks/dash_step.py`` with the extra ``bench`` installed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from language_model import ByteModel, batches, text_split
from torch import Tensor, nn

from dash_optim import DASH

WIDTH, LAYERS, HEADS, HIDDEN, CONTEXT, BATCH = 256, 4, 4, 1792, 64, 8


def build_model() -> ByteModel:
    """Return the model: 6.7M parameters in 408 blocks of 128 x 128."""
    return ByteModel(WIDTH, LAYERS, HEADS, HIDDEN, CONTEXT, seed=0)


def record_gradients(model: ByteModel, steps: int) -> list[list[Tensor]]:
    """Train with AdamW and return the gradients of every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    recorded = []
    for windows, _ in zip(batches(text_split()[0], BATCH, CONTEXT, seed=0), range(steps), strict=False):
        optimizer.zero_grad()
        model.loss(windows).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        recorded.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        optimizer.step()
    return recorded


def contestants(block: int, refresh_every: int) -> dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]]:
    """Return the optimizers by name."""
    dash = partial(DASH, lr=1e-3, block_size=block, rel_damping=1e-6, update_freq=refresh_every)
    found: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
        "AdamW (torch, fused)": partial(torch.optim.AdamW, lr=1e-3, fused=True),
        "AdamW (torch)": partial(torch.optim.AdamW, lr=1e-3),
        "DASH p=4": partial(dash, p=4),
        "DASH p=2": partial(dash, p=2),
        "DASH p=4 evd fp32": partial(dash, p=4, method="evd"),
        "DASH p=4 ndb 10+10": partial(dash, p=4, method={"type": "ndb", "steps": 10}),
        "DASH p=4 minimax": partial(dash, p=4, method="minimax", tol=1e-2),
        "DASH p=4, no refresh": partial(
            dash, p=4, update_freq=10**9, refresh="interval", refresh_young=False
        ),
        "DASH p=2, refresh every 10": partial(
            dash, p=2, update_freq=10, refresh="interval", refresh_young=False
        ),
        "DASH p=2, staggered over 10": partial(
            dash, p=2, update_freq=10, refresh="staggered", refresh_young=False
        ),
        "DASH p=2, certified to 10": partial(
            dash, p=2, refresh="certified", refresh_tol=10, rel_damping=1e-4
        ),
        "DASH p=4, certified to 3": partial(dash, p=4, refresh="certified", refresh_tol=3, rel_damping=1e-4),
    }
    try:
        from pytorch_optimizer import SOAP, ScalableShampoo
    except ImportError:
        print("peers: pip install 'matroots[bench]' to have them in the table")
        return found
    found["ScalableShampoo (pytorch-optimizer)"] = partial(
        ScalableShampoo,
        lr=1e-3,
        block_size=block,
        start_preconditioning_step=1,
        statistics_compute_steps=1,
        preconditioning_compute_steps=refresh_every,
        skip_preconditioning_rank_lt=2,
    )
    soap = partial(SOAP, lr=1e-3, precondition_frequency=refresh_every)
    found["SOAP (pytorch-optimizer)"] = soap
    # it has no blocks: the sides of 1792 take nearly all of its time, and may be left without a factor
    found["SOAP (pytorch-optimizer), sides up to 1024"] = partial(soap, max_precondition_dim=1024)
    return found


def four_products(block: int) -> Callable[[], None]:
    """Return the floor: the batched products of a step without refresh, for all blocks of the model, into memory that is there already."""
    count = sum(p.numel() for p in build_model().parameters() if p.ndim == 2) // block**2
    G, factors = torch.randn(count, block, block), torch.zeros(2, count, block, block)
    first, second = torch.zeros(2, count, block, block)

    def run() -> None:
        factors[0].baddbmm_(G, G.mT, beta=0.95, alpha=0.05)
        factors[1].baddbmm_(G.mT, G, beta=0.95, alpha=0.05)
        torch.bmm(factors[0], G, out=first)
        torch.bmm(first, factors[1], out=second)

    return run


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="*", help="contestants whose name contains one of these")
    arguments = parser.parse_args()
    gradients = record_gradients(build_model(), arguments.rounds + 2)
    chosen = {
        name: make
        for name, make in contestants(arguments.block, 1).items()
        if not arguments.only or any(part in name for part in arguments.only)
    }
    runs = {}
    for name, make in chosen.items():
        model = build_model()
        params = list(model.parameters())
        runs[name] = (model, params, make(params))
    times: dict[str, list[float]] = {name: [] for name in ("four products", *runs)}
    floor = four_products(arguments.block)
    floor()
    for round_number, step_gradients in enumerate(gradients):
        started = time.perf_counter()
        floor()
        if round_number >= 2:
            times["four products"].append(time.perf_counter() - started)
        for name, (_, params, optimizer) in runs.items():
            for param, gradient in zip(params, step_gradients, strict=True):
                param.grad = gradient.clone()
            started = time.perf_counter()
            optimizer.step()
            if round_number >= 2:
                times[name].append(time.perf_counter() - started)
    report(times, {name: optimizer for name, (_, _, optimizer) in runs.items()})


def report(times: dict[str, list[float]], optimizers: dict[str, torch.optim.Optimizer]) -> None:
    """Print medians and ratios, and the certified errors of the roots that DASH has in the end."""
    # the peers that precondition every side: what leaves the largest without a factor does another, smaller job
    peers = [
        statistics.median(t)
        for name, t in times.items()
        if "pytorch-optimizer" in name and "sides up to" not in name
    ]
    fastest = min(peers, default=float("nan"))
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    print("| optimizer | ms a step, median | mean | over fastest peer | certified error, largest |")
    print("|---|---|---|---|---|")
    for name, taken in times.items():
        median = statistics.median(taken)
        optimizer = optimizers.get(name)
        error = "-"
        mean = statistics.mean(taken)
        if (
            isinstance(optimizer, DASH)
            and "no refresh" not in name
            and "every" not in name
            and "over" not in name
        ):
            diagnostics = optimizer.diagnostics(certify=True)
            error = f"{max(f.certified_error for b in diagnostics.blocks for f in b.factors):.1e}"
        print(f"| {name} | {1e3 * median:.1f} | {1e3 * mean:.1f} | {median / fastest:.2f} | {error} |")


if __name__ == "__main__":
    main()
