# SPDX-License-Identifier: Apache-2.0
"""Compressibility: outliers in weights and activations after training, and what rounding the weights to int8 and int4 costs.

A weight matrix is rounded to nearest in each row, with the scale ``max |w| / (2^{bits-1} - 1)`` of the row (symmetric, no calibration). Kurtosis is that of the
entries, ``E[x^4] / E[x^2]^2``: 3 for a normal distribution. Activations are the inputs of all linear layers on held-out text.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from dash_optim.studies._arms import Arm, Settings, chance, loss_cells, rows, run_arms, slug
from dash_optim.training.loop import load_model
from dash_optim.training.model import Llama
from dash_optim.training.outcome import Outcome
from matroots.studies._plots import PALETTE, grid, name_axes
from matroots.studies._report import Plot, Report, Table, fixed

OPTIMIZERS: Final[dict[str, dict[str, Any]]] = {
    "adamw": {"type": "adamw"},
    "dash": {"type": "dash"},
    "dash, p=4": {"type": "dash", "p": 4},
    "muon": {"type": "muon"},
}
BITS: Final = (8, 6, 4, 3)
WINDOWS: Final = 64


def run(settings: Settings) -> Report:
    """Train, round, measure and report; weight decay is 0.1 for all, as models that are to be compressed have."""
    chosen = list(OPTIMIZERS.items())[: 2 if settings.quick else None]
    arms = [Arm(name, {"optimizer": {"weight_decay": 0.1, **options}}) for name, options in chosen]
    groups = run_arms("compress", arms, settings)
    measured = {name: [measure(settings, name, seed) for seed in settings.seeds] for name in groups}
    model = next(iter(groups.values()))[0]
    title = f"Compressibility: {model.parameters / 1e6:.2g}M parameters, {model.steps} steps, {len(settings.seeds)} seeds"
    return Report(
        name="compress",
        title=title,
        summary=_summary(measured),
        tables=[_losses(groups), _rounded(measured), _outliers(measured)],
        plots=[
            Plot(
                "compress",
                "Loss that rounding the weights of all linear layers costs, against the bits kept; mean over seeds, bars from lowest to highest.",
                _figure(measured, title),
            )
        ],
        data={
            "compress": rows(groups),
            "compress_measures": [
                {"arm": name, "seed": seed, **values}
                for name, each in measured.items()
                for seed, values in zip(settings.seeds, each, strict=True)
            ],
        },
        notes=[chance(settings.seeds)],
    )


def measure(settings: Settings, name: str, seed: int) -> dict[str, float]:
    """Return the loss of a trained model with its weights rounded, and the outliers of weights and activations."""
    _, corpus, model = load_model(settings.out / "compress" / slug(name) / f"seed{seed}")
    windows = corpus.validation(context=model.shape.context, most=WINDOWS)
    whole = _loss(model, windows)
    found = {"loss": whole}
    for bits in BITS:
        rounded = copy.deepcopy(model)
        for layer in _linear(rounded):
            layer.weight.data = round_to_nearest(layer.weight.data, bits)
        found[f"int{bits}"] = _loss(rounded, windows) - whole
    weights = [outliers(layer.weight.data) for layer in _linear(model)]
    with recorded_inputs(model) as inputs:
        _loss(model, windows[:16])
    activations = [outliers(torch.cat(each)) for each in inputs.values()]
    for kind, each in (("weight", weights), ("activation", activations)):
        for measure_name, values in zip(("kurtosis", "max_over_rms"), zip(*each, strict=True), strict=True):
            found[f"{kind}_{measure_name}"] = float(np.median(values))
            found[f"{kind}_{measure_name}_largest"] = float(np.max(values))
    return found


def round_to_nearest(W: Tensor, bits: int) -> Tensor:
    """Return ``(rows, columns)`` with each entry rounded to one of ``2^bits - 1`` equally spaced values of its row, 0 among them."""
    most = 2 ** (bits - 1) - 1
    scale = W.abs().amax(-1, keepdim=True) / most
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (W / scale).round() * scale


def outliers(x: Tensor) -> tuple[float, float]:
    """Return kurtosis ``E[x^4] / E[x^2]^2`` and ``max |x| / rms(x)`` of all entries."""
    x = x.double().flatten()
    square = x.square().mean()
    return float(x.pow(4).mean() / square.square()), float(x.abs().max() / square.sqrt())


@contextmanager
def recorded_inputs(model: Llama) -> Iterator[dict[int, list[Tensor]]]:
    """Record what goes into each linear layer while the body runs."""
    found: dict[int, list[Tensor]] = {}

    def record(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        found.setdefault(id(module), []).append(arguments[0].detach().flatten(0, 1))

    hooks = [layer.register_forward_pre_hook(record) for layer in _linear(model)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _linear(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


@torch.no_grad()
def _loss(model: Llama, windows: Tensor) -> float:
    return sum(model.loss(part).item() * len(part) for part in windows.split(16)) / len(windows)


def _losses(groups: dict[str, list[Outcome]]) -> Table:
    reference = groups["adamw"]
    table = [(name, *loss_cells(outcomes, reference)) for name, outcomes in groups.items()]
    return Table(
        "Loss after training", ("optimizer", "held-out loss by seed", "mean", "minus AdamW's"), table
    )


def _rounded(measured: dict[str, list[dict[str, float]]]) -> Table:
    table = [
        (name, *(fixed(float(np.mean([values[f"int{bits}"] for values in each])), 4) for bits in BITS))
        for name, each in measured.items()
    ]
    return Table(
        "What rounding the weights costs, nats per token",
        ("optimizer", *(f"int{bits}" for bits in BITS)),
        table,
    )


def _outliers(measured: dict[str, list[dict[str, float]]]) -> Table:
    names = [
        f"{kind}_{name}{end}"
        for kind in ("weight", "activation")
        for name in ("kurtosis", "max_over_rms")
        for end in ("", "_largest")
    ]
    table = [
        (name, *(fixed(float(np.mean([values[key] for values in each])), 2) for key in names))
        for name, each in measured.items()
    ]
    columns = ("optimizer", *(name.replace("_", " ") for name in names))
    return Table("Outliers: median over layers, and the largest", columns, table)


def _summary(measured: dict[str, list[dict[str, float]]]) -> str:
    def mean(name: str, key: str) -> float:
        return float(np.mean([values[key] for values in measured[name]]))

    parts = [f"{name}: {mean(name, 'int8'):+.4f} / {mean(name, 'int4'):+.3f}" for name in measured]
    return f"Rounding all weights to int8 / int4 costs, in nats per token: {'; '.join(parts)}."


def _figure(measured: dict[str, list[dict[str, float]]], title: str) -> Any:
    figure, ((axes,),) = grid(1, 1, title)
    for colour, (name, each) in zip(np.resize(PALETTE, len(measured)), measured.items(), strict=True):
        costs = np.array([[values[f"int{bits}"] for bits in BITS] for values in each])
        mean = costs.mean(0)
        axes.errorbar(
            BITS,
            mean,
            yerr=[mean - costs.min(0), costs.max(0) - mean],
            color=str(colour),
            label=name,
            marker="o",
            markersize=4,
        )
    axes.set_yscale("symlog", linthresh=1e-3)  # at 8 bits it may be a gain
    name_axes(axes, "bits of a weight", "loss that it costs, nats per token")
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    return figure
