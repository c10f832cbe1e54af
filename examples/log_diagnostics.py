# SPDX-License-Identifier: Apache-2.0
"""What DASH says about itself, logged: ``python examples/log_diagnostics.py``, or ``--to wandb``."""

import argparse
from collections.abc import Callable
from pathlib import Path

from task import STEPS, batch, evaluate, make_model
from torch.nn.functional import cross_entropy

from dash_optim import DASH, param_groups

EVERY = 5


def train(log: Callable[[dict[str, float], int], None]) -> float:
    """Train, and log every few steps; return the loss."""
    model = make_model()
    opt = DASH(param_groups(model, weight_decay=0.1, verbose=False), lr=1e-2, block_size=32)
    for step in range(1, STEPS + 1):
        x, y = batch(step - 1)
        opt.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        if step % EVERY == 0:  # looks at the device; certify=True also takes products in float64
            found = opt.diagnostics(certify=True)
            log({"loss": loss.item(), **found.scalars(by_parameter=True)}, step)
    return evaluate(model)


def to_tensorboard(folder: Path) -> float:
    """Train with TensorBoard."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:

        def log(numbers: dict[str, float], step: int) -> None:
            for name, value in numbers.items():
                writer.add_scalar(name, value, step)

        return train(log)


def to_wandb(folder: Path) -> float:
    """Train with Weights & Biases; ``wandb sync`` uploads what an offline run has written."""
    import wandb

    folder.mkdir(parents=True, exist_ok=True)
    with wandb.init(project="dash", dir=folder, mode="offline") as run:
        return train(lambda numbers, step: run.log(numbers, step=step))


def main() -> None:
    """Train and log."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=Path, default="dash_log")
    parser.add_argument("--to", choices=("tensorboard", "wandb"), default="tensorboard")
    args = parser.parse_args()
    loss = (to_tensorboard if args.to == "tensorboard" else to_wandb)(args.folder)
    print(f"loss {loss:.9g}")


if __name__ == "__main__":
    main()
