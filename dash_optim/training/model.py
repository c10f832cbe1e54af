# SPDX-License-Identifier: Apache-2.0
"""A decoder-only language model in the style of Llama: RMSNorm, rotary positions, SwiGLU, on torch's own attention.

Touvron et al., arXiv:2302.13971; rotary positions: Su et al., arXiv:2104.09864; SwiGLU: Shazeer, arXiv:2002.05202.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, scaled_dot_product_attention, silu


@dataclass(frozen=True)
class Architecture:
    """The sizes of a model.

    Attributes:
        width: of the residual stream.
        layers: how many.
        heads: of attention; ``width / heads`` is even, rotary positions turn pairs.
        hidden: width of the feed-forward block.
        context: the most tokens that the model sees at once.
        vocab: how many tokens there are.
        kv_heads: heads of keys and values (grouped-query attention); None: as many as ``heads``.
        tied: whether the head is the embedding.
        rope_base: of the wavelengths of the rotary positions.
    """

    width: int
    layers: int
    heads: int
    hidden: int
    context: int
    vocab: int = 256
    kv_heads: int | None = None
    tied: bool = False
    rope_base: float = 10_000.0

    def __post_init__(self) -> None:
        for name in ("width", "layers", "heads", "hidden", "context", "vocab"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name}: expected an integer >= 1, got {getattr(self, name)}")
        if self.width % (2 * self.heads):
            raise ValueError(
                f"model.heads: expected width / heads to be an even integer, got {self.width} / {self.heads}"
            )
        if self.kv_heads is not None and (self.kv_heads < 1 or self.heads % self.kv_heads):
            raise ValueError(
                f"model.kv_heads: expected a divisor of the {self.heads} heads, got {self.kv_heads}"
            )
        if not self.rope_base > 0:
            raise ValueError(f"model.rope_base: expected a number > 0, got {self.rope_base}")

    @property
    def parameters(self) -> int:
        """How many numbers the model has."""
        kv = self.width // self.heads * (self.kv_heads or self.heads)
        layer = (
            2 * self.width * self.width + 2 * self.width * kv + 3 * self.width * self.hidden + 2 * self.width
        )
        return self.layers * layer + self.width + self.vocab * self.width * (1 if self.tied else 2)


PRESETS: Final[dict[str, Architecture]] = {
    "0.5m": Architecture(width=96, layers=4, heads=4, hidden=256, context=128),
    "0.9m": Architecture(width=128, layers=4, heads=4, hidden=352, context=128),
    "3m": Architecture(width=192, layers=6, heads=6, hidden=512, context=128),
    "7m": Architecture(width=256, layers=8, heads=8, hidden=704, context=256),
    "30m": Architecture(width=512, layers=8, heads=8, hidden=1408, context=512, vocab=8192),
    "124m": Architecture(width=768, layers=12, heads=12, hidden=2048, context=512, vocab=32_000),
    "360m": Architecture(width=1024, layers=24, heads=16, hidden=2816, context=1024, vocab=32_000),
    "953m": Architecture(width=2048, layers=16, heads=16, hidden=5632, context=1024, vocab=32_000),
}
"""Models by name; the name says how many parameters they have. The largest is the one that arXiv:2602.02016 trains."""


class Attention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self, shape: Architecture) -> None:
        super().__init__()
        self.head_width = shape.width // shape.heads
        kv_width = self.head_width * (shape.kv_heads or shape.heads)
        self.q = nn.Linear(shape.width, shape.width, bias=False)
        self.k = nn.Linear(shape.width, kv_width, bias=False)
        self.v = nn.Linear(shape.width, kv_width, bias=False)
        self.o = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Map ``(batch, time, width)`` to the same shape; ``rotation`` is that of :func:`rotations`."""
        q, k, v = (
            f(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        q, k = rotate(q, rotation), rotate(k, rotation)
        grouped = q.shape[1] != k.shape[1]
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return out


class SwiGLU(nn.Module):
    """The gated feed-forward block ``W_down (silu(W_gate x) * W_up x)``."""

    def __init__(self, shape: Architecture) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, time, width)`` to the same shape."""
        out: Tensor = self.down(silu(self.gate(x)) * self.up(x))
        return out


class Layer(nn.Module):
    """Attention, then feed-forward, both on a normalised input and added to it."""

    def __init__(self, shape: Architecture) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width)
        self.attention = Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.width)
        self.mlp = SwiGLU(shape)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Map ``(batch, time, width)`` to the same shape."""
        x = x + self.attention(self.attention_norm(x), rotation)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Llama(nn.Module):
    """The model; weights are drawn from ``N(0, 0.02^2)``, those that write into the residual stream from ``N(0, 0.02^2 / (2 layers))`` (GPT-2).

    Args:
        shape: its sizes.
        seed: of the weights, which are the same on every device; the global generator is left as it was.
    """

    def __init__(self, shape: Architecture, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        with torch.random.fork_rng(devices=[]):  # torch's modules draw weights of their own first
            self.embed = nn.Embedding(shape.vocab, shape.width)
            self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
            self.norm = nn.RMSNorm(shape.width)
            self.lm_head = None if shape.tied else nn.Linear(shape.width, shape.vocab, bias=False)
        cos, sin = rotations(shape.context, shape.width // shape.heads, shape.rope_base)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.cos: Tensor
        self.sin: Tensor
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            if weight.ndim == 2 and not weight.is_meta:
                writes = name.endswith(("attention.o.weight", "mlp.down.weight"))
                std = 0.02 / math.sqrt(2 * shape.layers) if writes else 0.02
                nn.init.normal_(weight, std=std, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens, int64 ``(batch, time)`` with ``time <= context``, to logits ``(batch, time, vocab)``."""
        time = tokens.shape[1]
        rotation = self.cos[:time], self.sin[:time]
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, rotation)
        x = self.norm(x)
        logits: Tensor = linear(x, self.embed.weight) if self.lm_head is None else self.lm_head(x)
        return logits

    def loss(self, windows: Tensor) -> Tensor:
        """Return the mean loss, in nats, of predicting each token of windows ``(batch, time + 1)`` from those before it."""
        logits = self(windows[:, :-1]).float()
        return cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def rotations(context: int, head_width: int, base: float) -> tuple[Tensor, Tensor]:
    """Return cosine and sine, each ``(context, head_width / 2)``, of ``position * base^{-2 i / head_width}``."""
    frequencies = base ** -(torch.arange(0, head_width, 2, dtype=torch.float64) / head_width)
    angles = torch.outer(torch.arange(context, dtype=torch.float64), frequencies)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the pairs ``(x_i, x_{i + head_width / 2})`` of ``(batch, heads, time, head_width)`` by the angles of their positions."""
    cos, sin = (part.to(x.dtype) for part in rotation)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
