# SPDX-License-Identifier: Apache-2.0
"""Record real Shampoo preconditioner factors from a small language model.

The accuracy study runs on the file this script writes. It trains a byte-level
decoder-only language model on the English text that ships with Python and keeps, for
a selection of weight matrices with gradient ``G`` of shape ``(rows, cols)``, the two
exponential moving averages that Shampoo preconditions with::

    L <- b L + (1 - b) G G^T      (rows, rows), the "left" factor
    R <- b R + (1 - b) G^T G      (cols, cols), the "right" factor

Run it as::

    python -m matroots.studies.record_factors --out shampoo_factors.npz

Every array in the file is one symmetric fp32 matrix ``(n, n)`` under a key such as
``step300/layer0.mlp.up/left``. The training text belongs to the Python release, so the
same seed gives the same bits only under the same Python, torch and CPU type.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

from matroots._files import replacement
from matroots._threads import torch_threads
from matroots.studies._report import require_extras, track

__all__ = ["EARLY_STEP", "Recording", "main", "record_factors", "save_factors"]

VOCABULARY: Final = 256
CONTEXT: Final = 128
WIDTH: Final = 128
HEADS: Final = 2
HEAD_WIDTH: Final = WIDTH // HEADS
HIDDEN: Final = 320
LAYERS: Final = 4

BATCH: Final = 16
PEAK_RATE: Final = 3e-3
FINAL_RATE_FRACTION: Final = 0.1
WARMUP_STEPS: Final = 20
MAX_GRADIENT_NORM: Final = 1.0
EMA_DECAY: Final = 0.95
BLOCK: Final = 256

EARLY_STEP: Final = 2
"""The first snapshot: after two gradients most factors are singular to fp32 precision."""

LEFT: Final = ("left",)
RIGHT: Final = ("right",)
BOTH: Final = ("left", "right")

# Not every side of every matrix: the file has to stay small enough to ship in a wheel,
# and a 256 x 256 factor costs sixteen times as much as a 64 x 64 one.
RECORDED: Final[Mapping[str, tuple[str, ...]]] = {
    "embed": BOTH,
    "layer0.attn.q": BOTH,
    "layer0.attn.k": BOTH,
    "layer0.attn.v": LEFT,
    "layer0.mlp.up": BOTH,
    "layer1.attn.k": LEFT,
    "layer1.attn.v": LEFT,
    "layer1.mlp.gate": LEFT,
    "layer2.attn.k": LEFT,
    "layer2.attn.v": LEFT,
    "layer2.attn.o": BOTH,
    "layer3.attn.k": LEFT,
    "layer3.attn.v": BOTH,
    "layer3.mlp.down": BOTH,
    "head": BOTH,
}


class Attention(nn.Module):
    """Causal attention whose query heads share one key head and one value head.

    Sharing makes the key and value weights ``(HEAD_WIDTH, WIDTH)``, which is where the
    factors of size 64 come from.
    """

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k = nn.Linear(WIDTH, HEAD_WIDTH, bias=False)
        self.v = nn.Linear(WIDTH, HEAD_WIDTH, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, time, WIDTH)`` to the same shape."""
        batch, time, _ = x.shape
        q = self.q(x).view(batch, time, HEADS, HEAD_WIDTH).transpose(1, 2)
        k = self.k(x).unsqueeze(1).expand(-1, HEADS, -1, -1)
        v = self.v(x).unsqueeze(1).expand(-1, HEADS, -1, -1)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o(mixed.transpose(1, 2).reshape(batch, time, WIDTH))
        return out


class SwiGLU(nn.Module):
    """Gated feed-forward block; ``HIDDEN`` exceeds ``BLOCK``, so its factors are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, time, WIDTH)`` to the same shape."""
        out: Tensor = self.down(silu(self.gate(x)) * self.up(x))
        return out


class Layer(nn.Module):
    """Pre-norm residual layer: attention, then the feed-forward block."""

    def __init__(self) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(WIDTH)
        self.attn = Attention()
        self.mlp_norm = nn.RMSNorm(WIDTH)
        self.mlp = SwiGLU()

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, time, WIDTH)`` to the same shape."""
        x = x + self.attn(self.attn_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class ByteModel(nn.Module):
    """Decoder-only language model over bytes, with a head not tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        for index in range(LAYERS):
            self.add_module(f"layer{index}", Layer())
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for weight in self.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map int64 tokens ``(batch, time)`` to logits ``(batch, time, VOCABULARY)``."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x: Tensor = self.embed(tokens) + self.position(positions)
        for index in range(LAYERS):
            x = self.get_submodule(f"layer{index}")(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build_model(seed: int) -> ByteModel:
    """Return a model with initial weights drawn from ``seed``, global state untouched."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ByteModel()


class FactorAverage:
    """The two Shampoo averages of one weight matrix, kept in fp32 as an optimizer would.

    A matrix with more than ``BLOCK`` rows or columns is preconditioned block by block;
    this follows its first block.
    """

    def __init__(self, weight: nn.Parameter) -> None:
        self._weight = weight
        rows, cols = (min(size, BLOCK) for size in weight.shape)
        self._steps = 0
        self._averages = {"left": torch.zeros(rows, rows), "right": torch.zeros(cols, cols)}

    def update(self) -> None:
        """Fold in the gradient that the weight holds now."""
        if self._weight.grad is None:
            raise RuntimeError("weight has no gradient: call backward before update")
        grad = self._weight.grad[:BLOCK, :BLOCK].float()
        self._averages["left"].lerp_(grad @ grad.T, 1 - EMA_DECAY)
        self._averages["right"].lerp_(grad.T @ grad, 1 - EMA_DECAY)
        self._steps += 1

    def corrected(self, side: str) -> Tensor:
        """Return the bias-corrected, exactly symmetric factor ``(n, n)`` of a side."""
        factor = self._averages[side] / (1 - EMA_DECAY**self._steps)
        # A matrix product does not round (i, j) and (j, i) alike on every backend.
        return (factor + factor.T) / 2


@dataclass(frozen=True)
class Recording:
    """What one training run leaves behind.

    Attributes:
        factors: Key ``step<N>/<weight>/<side>`` to an fp32 matrix ``(n, n)``.
        losses: Training loss of every step, in nats per byte.
    """

    factors: dict[str, Tensor]
    losses: list[float]


def training_bytes() -> Tensor:
    """Return Python's help topics as one uint8 vector of UTF-8 bytes ``(length,)``."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[key] for key in sorted(topics)).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def sample_batch(text: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw random windows of the text.

    Args:
        text: uint8 vector ``(length,)``.
        generator: Source of the window positions.

    Returns:
        Inputs and next-byte targets, both int64 ``(BATCH, CONTEXT)``.
    """
    starts = torch.randint(text.numel() - CONTEXT, (BATCH, 1), generator=generator)
    windows = text[starts + torch.arange(CONTEXT + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def learning_rate(step: int, steps: int) -> float:
    """Return the rate at a step counted from 1: linear warm-up, then a cosine."""
    if step <= WARMUP_STEPS:
        return PEAK_RATE * step / WARMUP_STEPS
    done = (step - WARMUP_STEPS) / (steps - WARMUP_STEPS)
    cosine = (1 + math.cos(math.pi * done)) / 2
    return PEAK_RATE * (FINAL_RATE_FRACTION + (1 - FINAL_RATE_FRACTION) * cosine)


def record_factors(steps: int = 300, seed: int = 0) -> Recording:
    """Train the model and record its factors at ``EARLY_STEP`` and at the last step.

    Args:
        steps: Number of training steps, more than ``EARLY_STEP``.
        seed: Seed of the initial weights and of the order of the data.

    Returns:
        The factors of both snapshots and the loss of every step.

    Raises:
        ValueError: If ``steps`` is too small to reach the second snapshot.
    """
    if steps <= EARLY_STEP:
        raise ValueError(f"steps must be more than {EARLY_STEP}, got {steps}")
    model = build_model(seed)
    averages = {n: FactorAverage(model.get_parameter(f"{n}.weight")) for n in RECORDED}
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    generator = torch.Generator().manual_seed(seed)
    text = training_bytes()
    recording = Recording(factors={}, losses=[])
    with torch_threads(1):
        for step in track(range(1, steps + 1), "training"):
            loss = _backward(model, *sample_batch(text, generator))
            recording.losses.append(loss)
            for average in averages.values():
                average.update()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps)
            optimizer.step()
            if step in (EARLY_STEP, steps):
                recording.factors.update(_snapshot(step, averages))
    return recording


def save_factors(factors: Mapping[str, Tensor], out: Path) -> None:
    """Write factors to a compressed npz file that is either whole or absent.

    Args:
        factors: Keys to fp32 matrices ``(n, n)``.
        out: The file to write; an existing one is replaced.

    Raises:
        ValueError: If ``factors`` holds a matrix with a NaN or an infinity.
    """
    for key, factor in factors.items():
        if not torch.isfinite(factor).all():
            raise ValueError(f"factors[{key!r}] is not finite: the training diverged")
    arrays = {key: factor.numpy() for key, factor in factors.items()}
    # numpy declares a boolean keyword among its parameters, so unpacking arrays into
    # its own signature does not type-check.
    savez: Callable[..., None] = np.savez_compressed
    with replacement(out) as stream:
        savez(stream, **arrays)


def main(arguments: Sequence[str] | None = None) -> None:
    """Record the factors and write them to the file given on the command line."""
    parser = argparse.ArgumentParser(description="Record Shampoo factors of a small model.")
    parser.add_argument("--out", type=Path, required=True, help="npz file to write")
    parser.add_argument("--steps", type=int, default=300, help="training steps")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and data")
    options = parser.parse_args(arguments)
    require_extras()
    out: Path = options.out
    if out.suffix != ".npz":
        parser.error(f"argument --out: must end in .npz, got {out}")
    if not out.parent.is_dir():
        parser.error(f"argument --out: no such folder: {out.parent}")
    if options.steps <= EARLY_STEP:
        parser.error(f"argument --steps: must be more than {EARLY_STEP}, got {options.steps}")
    recording = record_factors(options.steps, options.seed)
    save_factors(recording.factors, out)
    print(f"{out}: {out.stat().st_size} bytes, {len(recording.factors)} matrices")


def _backward(model: ByteModel, inputs: Tensor, targets: Tensor) -> float:
    loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    model.zero_grad()
    torch.autograd.backward(loss)
    # Clipped before recording, because that is the gradient an optimizer is given.
    nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
    return loss.item()


def _snapshot(step: int, averages: Mapping[str, FactorAverage]) -> dict[str, Tensor]:
    return {
        f"step{step}/{name}/{side}": averages[name].corrected(side)
        for name, sides in RECORDED.items()
        for side in sides
    }


if __name__ == "__main__":
    main()
