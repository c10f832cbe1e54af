# SPDX-License-Identifier: Apache-2.0
"""Grafting: whose length an update has, how far that is from Shampoo's own, layer by layer, and what training does without it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Final

import numpy as np

from dash_optim.studies._arms import Arm, Groups, Settings, chance, loss_cells, rows, run_arms, slug
from dash_optim.training.metrics import read
from matroots.studies._plots import PALETTE, grid, name_axes
from matroots.studies._report import Plot, Report, Table

# the length of a step is that of the grafted method's, or U's own: each has a scale of its own, and U another for each p
RATES: Final = {
    "adam": (1e-2,),
    "rmsprop": (1e-2,),
    "adagrad": (1e-2, 3e-2, 1e-1),
    "sgd": (0.03, 0.1, 0.3, 1.0),
}
UNGRAFTED: Final = {2: (1e-5, 3e-5, 1e-4, 3e-4), 4: (1e-2, 3e-2, 1e-1, 3e-1)}
BESIDE: Final = 2.5e-3  # AdamW's rate for embeddings, head and norms, the same in all arms: what is compared are the matrices
EXPONENTS: Final = (2, 4)
TOLERATED: Final = (0.8, 1.2)
Curves = dict[str, tuple[list[float], list[float]]]


def run(settings: Settings) -> Report:
    """Run all arms and report."""
    arms = [
        Arm(
            f"p={p}, {kind}, rate {rate:g}",
            {
                "optimizer": {"type": "dash", "p": p, "grafting": kind, "lr": rate, "adamw_lr": BESIDE},
                "logging": {"diagnostics": True, "validate_every": 4 if settings.quick else 10},
            },
        )
        for p in EXPONENTS
        for kind, rates in _rates(p, settings.quick).items()
        for rate in rates
    ]
    groups = run_arms("grafting", arms, settings)
    curves = {p: _coefficients(settings, f"p={p}, adam, rate {RATES['adam'][0]:g}") for p in EXPONENTS}
    model = next(iter(groups.values()))[0]
    title = f"Grafting: {model.parameters / 1e6:.2g}M parameters, {model.steps} steps"
    reference = groups[arms[0].label]
    table = [(label, *loss_cells(outcomes, reference)) for label, outcomes in groups.items()]
    return Report(
        name="grafting",
        title=f"{title}, {len(settings.seeds)} seeds",
        summary=_summary(groups, curves),
        tables=[
            Table(
                "Loss by grafting (± standard error, paired by seed)",
                ("arm", "held-out loss by seed", "mean", "minus the first"),
                table,
            ),
            _shares(curves),
        ],
        plots=[
            Plot(
                "grafting",
                "Median grafting coefficient s = ||D|| / ||U|| over the blocks of each kind of layer, mean over layers, Adam grafting, first seed; the band is 0.8 to 1.2.",
                _figure(curves, f"{title}, seed {settings.seeds[0]}"),
            )
        ],
        data={
            "grafting": rows(groups),
            "grafting_coefficients": [
                {"p": p, "layer": layer, "step": step, "s": value}
                for p, by_layer in curves.items()
                for layer, (steps, values) in by_layer.items()
                for step, value in zip(steps, values, strict=True)
            ],
        },
        notes=[chance(settings.seeds)],
    )


def _rates(p: int, quick: bool) -> dict[str, tuple[float, ...]]:
    """Return the learning rates to try with each grafting."""
    ungrafted = UNGRAFTED[p]
    if quick:
        return {"adam": RATES["adam"], "none": ungrafted[:1]}
    return {**RATES, "none": ungrafted}


def _coefficients(settings: Settings, label: str) -> Curves:
    """Return steps and mean coefficient for each kind of layer, of the first seed."""
    found: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in read(settings.out / "grafting" / slug(label) / f"seed{settings.seeds[0]}"):
        for key, value in record.items():
            if key.startswith("grafting/"):
                kind = ".".join(
                    part for part in key.removeprefix("grafting/").split(".") if not part.isdigit()
                )
                found[kind.removesuffix(".weight")][record["step"]].append(value)
    return {
        kind: (list(by_step), [float(np.mean(values)) for values in by_step.values()])
        for kind, by_step in found.items()
    }


def _summary(groups: Groups, curves: dict[int, Curves]) -> str:
    parts = []
    for p, by_layer in curves.items():
        last = [values[-1] for _, values in by_layer.values()]
        inside = sum(TOLERATED[0] <= value <= TOLERATED[1] for value in last)
        parts.append(
            f"With p = {p} s ends between {min(last):.2g} and {max(last):.2g}, inside 0.8 to 1.2 for {inside} of {len(last)} kinds of layer."
        )
    return " ".join(parts)


def _shares(curves: dict[int, Curves]) -> Table:
    table = [
        (f"p={p}, {layer}", *(f"{values[int(share * (len(values) - 1))]:.3g}" for share in (0, 0.25, 0.5, 1)))
        for p, by_layer in curves.items()
        for layer, (_, values) in by_layer.items()
    ]
    return Table(
        "s by kind of layer, in the course of training", ("p, layer", "first", "25 %", "50 %", "last"), table
    )


def _figure(curves: dict[int, Curves], title: str) -> Any:
    figure, (panels,) = grid(1, len(curves), title)
    for axes, (p, by_layer) in zip(panels, curves.items(), strict=True):
        for colour, (layer, (steps, values)) in zip(
            np.resize(PALETTE, len(by_layer)), by_layer.items(), strict=True
        ):
            axes.plot(
                steps, values, color=str(colour), label=layer if p == EXPONENTS[0] else None, linewidth=1.2
            )
        axes.axhspan(*TOLERATED, color="0.9")
        axes.set_yscale("log")
        name_axes(axes, "steps", "s" if p == EXPONENTS[0] else "", f"p = {p}")
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    return figure
