# SPDX-License-Identifier: Apache-2.0
"""A byte-level language model and the text to train it on: what the benchmarks of the optimizer share."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

from matroots.studies.record_factors import training_bytes


class Layer(nn.Module):
    """Attention and a gated feed-forward block, both residual."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, time, width)`` to the same shape."""
        batch, time, _ = x.shape
        y = self.first(x)
        q, k, v = (f(y).view(batch, time, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        attended = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.o(attended)
        y = self.second(x)
        out: Tensor = x + self.down(silu(self.gate(y)) * self.up(y))
        return out


class ByteModel(nn.Module):
    """Decoder-only model over bytes with learned positions and a head of its own."""

    def __init__(self, width: int, layers: int, heads: int, hidden: int, context: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.layers = nn.Sequential(*(Layer(width, heads, hidden) for _ in range(layers)))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 256, bias=False)
        for weight in self.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens ``(batch, time)`` to logits."""
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.layers(x)))
        return logits

    def loss(self, windows: Tensor) -> Tensor:
        """Return the mean loss of predicting each byte of windows ``(batch, time + 1)`` from those before it, in nats."""
        return cross_entropy(self(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def text_split() -> tuple[Tensor, Tensor]:
    """Return the bytes to train on and, the last tenth, those to validate on."""
    text = training_bytes().long()
    cut = len(text) * 9 // 10
    return text[:cut], text[cut:]


def batches(text: Tensor, batch: int, context: int, seed: int) -> Iterator[Tensor]:
    """Yield random windows ``(batch, context + 1)``."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - context - 1, (batch, 1), generator=generator)
        yield text[starts + torch.arange(context + 1)]
