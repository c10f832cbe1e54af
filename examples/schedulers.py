# SPDX-License-Identifier: Apache-2.0
"""DASH with torch's schedulers of the learning rate: ``python examples/schedulers.py``."""

from collections.abc import Callable
from typing import Final

from task import STEPS, batch, evaluate, make_model
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from dash_optim import DASH, param_groups

RATE, WARMUP = 1e-2, 5


def warmup_then_cosine(opt: DASH) -> LRScheduler:
    """Return a schedule that rises from a tenth for five steps, and falls to zero."""
    rising = LinearLR(opt, start_factor=0.1, total_iters=WARMUP)
    return SequentialLR(opt, [rising, CosineAnnealingLR(opt, STEPS - WARMUP)], milestones=[WARMUP])


SCHEDULES: Final[dict[str, Callable[[DASH], LRScheduler]]] = {
    "OneCycleLR": lambda opt: OneCycleLR(opt, max_lr=RATE, total_steps=STEPS),  # moves betas[0] too
    "CosineAnnealingLR": lambda opt: CosineAnnealingLR(opt, STEPS),
    "SequentialLR": warmup_then_cosine,
    "ReduceLROnPlateau": lambda opt: ReduceLROnPlateau(opt, factor=0.5, patience=1),
}


def train(schedule: str) -> tuple[float, list[float]]:
    """Train; return the loss and the rate of each step."""
    model = make_model()
    opt = DASH(param_groups(model, weight_decay=0.1, verbose=False), lr=RATE, block_size=32)
    scheduler = SCHEDULES[schedule](opt)
    rates = []
    for step in range(STEPS):
        x, y = batch(step)
        opt.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        rates.append(opt.param_groups[0]["lr"])
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step(loss.item())
        else:
            scheduler.step()
    return evaluate(model), rates


def main() -> None:
    """Train with each of the schedules."""
    for schedule in SCHEDULES:
        loss, rates = train(schedule)
        print(f"{schedule}: rates {rates[0]:.2g} to {max(rates):.2g} to {rates[-1]:.2g}, loss {loss:.9g}")


if __name__ == "__main__":
    main()
