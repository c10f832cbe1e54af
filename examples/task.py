# SPDX-License-Identifier: Apache-2.0
"""What the examples train: a small classifier on numbers that follow from a seed. Put your own model and data here."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

STEPS, BATCH = 20, 48


def make_model() -> nn.Sequential:
    """Return the model, initialised alike on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(20, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10)
    )


def dataset() -> TensorDataset:
    """Return all samples, in the order in which they are seen."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS * BATCH, 20, generator=generator)
    return TensorDataset(x, (x[:, :10] * x[:, 10:]).argmax(1))


def batch(step: int, rank: int = 0, ranks: int = 1) -> tuple[Tensor, Tensor]:
    """Return one rank's share of the batch of a step."""
    x, y = dataset()[step * BATCH + rank * BATCH // ranks : step * BATCH + (rank + 1) * BATCH // ranks]
    return x, y


@torch.no_grad()
def evaluate(model: nn.Module) -> float:
    """Return the loss over all samples; with ``fully_shard`` every rank has to ask."""
    device = next(model.parameters()).device
    x, y = dataset()[:]
    return float(nn.functional.cross_entropy(model(x.to(device)), y.to(device)))
