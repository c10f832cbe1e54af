# SPDX-License-Identifier: Apache-2.0
"""The language model: against a NumPy version of the formulas, and identities of its parts."""

import math

import numpy as np
import pytest
import torch

from dash_optim.training.model import PRESETS, Architecture, Llama, rotate, rotations

TINY = Architecture(width=16, layers=2, heads=4, hidden=24, context=12, vocab=11)


def plain_forward(model, tokens):
    """Logits (time, vocab) of one sequence in float64: complex rotations, softmax written out, loops over heads and positions."""
    W = {name: weight.detach().double().numpy() for name, weight in model.named_parameters()}
    shape, d = model.shape, model.shape.width // model.shape.heads
    kv_heads = shape.kv_heads or shape.heads

    def norm(x, g):
        # nn.RMSNorm's eps is that of the weight's dtype
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + np.finfo(np.float32).eps) * g

    def turned(x, position):
        z = x[: d // 2] + 1j * x[d // 2 :]
        z = z * np.exp(1j * position * shape.rope_base ** (-2 * np.arange(d // 2) / d))
        return np.concatenate([z.real, z.imag])

    x = W["embed.weight"][tokens]
    for i in range(shape.layers):
        at = f"layers.{i}."
        y = norm(x, W[at + "attention_norm.weight"])
        q, k, v = (y @ W[f"{at}attention.{part}.weight"].T for part in "qkv")
        mixed = np.zeros_like(q)
        for head in range(shape.heads):
            mine = slice(head * d, (head + 1) * d)
            other = head * kv_heads // shape.heads
            theirs = slice(other * d, (other + 1) * d)
            for t in range(len(tokens)):
                scores = np.array(
                    [turned(q[t, mine], t) @ turned(k[s, theirs], s) / math.sqrt(d) for s in range(t + 1)]
                )
                weights = np.exp(scores - scores.max())
                mixed[t, mine] = weights / weights.sum() @ v[: t + 1, theirs]
        x = x + mixed @ W[at + "attention.o.weight"].T
        y = norm(x, W[at + "mlp_norm.weight"])
        gate, up = y @ W[at + "mlp.gate.weight"].T, y @ W[at + "mlp.up.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ W[at + "mlp.down.weight"].T
    head = W["embed.weight"] if shape.tied else W["lm_head.weight"]
    return norm(x, W["norm.weight"]) @ head.T


@pytest.mark.parametrize(
    "changes", [{}, {"kv_heads": 2}, {"kv_heads": 1, "tied": True}, {"rope_base": 100.0}]
)
def test_forward_is_the_formulas(changes):
    model = Llama(Architecture(**{**TINY.__dict__, **changes}), seed=3)
    with torch.no_grad():
        for weight in model.parameters():  # larger than at the start, so that every part matters
            weight.mul_(8.0 if weight.ndim == 2 else 1.3)
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 10, 7, 9, 0]])
    expected = np.stack([plain_forward(model, row.numpy()) for row in tokens])
    np.testing.assert_allclose(model(tokens).detach().numpy(), expected, rtol=2e-4, atol=2e-5)
    windows = torch.cat([tokens, torch.tensor([[2], [3]])], 1)
    logs = expected - np.log(np.exp(expected).sum(-1, keepdims=True))
    picked = np.take_along_axis(logs, windows[:, 1:, None].numpy(), -1)
    assert model.loss(windows).item() == pytest.approx(-picked.mean(), rel=1e-4)


def test_no_token_sees_those_after_it():
    model = Llama(TINY, seed=0)
    tokens = torch.randint(11, (1, 12), generator=torch.Generator().manual_seed(0))
    other = tokens.clone()
    other[0, 7] = (other[0, 7] + 1) % 11
    before, after = model(tokens), model(other)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=1e-6)
    assert (before[:, 7:] - after[:, 7:]).abs().amax(-1).min() > 1e-6


def test_rotations_keep_lengths_and_depend_on_distances_only():
    rotation = rotations(32, 8, 10_000.0)
    q, k = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    turned_q, turned_k = (rotate(x.expand(1, 1, 32, 8), rotation)[0, 0] for x in (q, k))
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm().expand(32))
    products = turned_q @ turned_k.T
    for distance in (0, 3, 17):
        along = products.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=1e-4, atol=1e-5)
    assert (products[0, 1] - products[0, 9]).abs() > 1e-3


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_parameters_that_they_say(name):
    with torch.device("meta"):
        model = Llama(PRESETS[name])
    count = sum(weight.numel() for weight in model.parameters())
    assert count == PRESETS[name].parameters
    said = float(name.rstrip("m"))
    assert count / 1e6 == pytest.approx(said, rel=0.15)


def test_weights_start_as_is_usual_and_leave_the_generator_alone():
    shape = Architecture(width=128, layers=4, heads=4, hidden=352, context=8)
    before = torch.get_rng_state()
    model, again, other = Llama(shape, seed=5), Llama(shape, seed=5), Llama(shape, seed=6)
    assert torch.equal(before, torch.get_rng_state())
    for (name, weight), same, different in zip(
        model.named_parameters(), again.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(weight, same)
        if weight.ndim == 1:
            assert (weight == 1).all()
            continue
        assert not torch.equal(weight, different)
        std = 0.02 / math.sqrt(8) if name.endswith(("o.weight", "down.weight")) else 0.02
        assert weight.std().item() == pytest.approx(std, rel=0.03)
    assert model.loss(torch.randint(256, (4, 9))).item() == pytest.approx(math.log(256), abs=0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 0}, "model.width: expected an integer >= 1, got 0"),
        ({"heads": 5}, "model.heads: expected width / heads to be an even integer"),
        ({"heads": 16}, "model.heads: expected width / heads to be an even integer"),
        ({"kv_heads": 3}, "model.kv_heads: expected a divisor of the 4 heads, got 3"),
        ({"rope_base": 0.0}, "model.rope_base"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Architecture(**{**TINY.__dict__, **changes})
