# SPDX-License-Identifier: Apache-2.0
"""Is it better? DASH beside AdamW, Muon, SOAP and ScalableShampoo, each at its own best learning rate.

Every optimizer is swept over learning rates, in runs of all steps and in runs *scheduled* for 0.4 times as many: the question is after how many steps, and seconds, DASH reaches the loss that
AdamW ends with. Sweeps are of the first seed; those that the answer hangs on, AdamW's long runs and DASH's short ones, of all. Then the best of each is run with every seed, one at a time, so that seconds can be
compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, Final

import numpy as np

from dash_optim.studies._arms import Arm, Groups, Settings, chance, loss_cells, losses, rows, run_arms
from dash_optim.training.compare import loss_curves
from dash_optim.training.outcome import PARTS, Outcome
from dash_optim.training.sweep import best_rates, sweep_figure
from matroots.studies._report import Plot, Report, Table, fixed

RATES: Final[dict[str, tuple[float, ...]]] = {
    "dash": (5e-3, 1e-2, 2e-2, 3e-2, 5e-2),
    "adamw": (1e-3, 2e-3, 3e-3, 5e-3, 8e-3),
    "muon": (5e-3, 1e-2, 2e-2, 3e-2, 5e-2),
    "soap": (3e-3, 5e-3, 1e-2, 2e-2, 3e-2),
    "shampoo": (3e-2, 1e-1, 3e-1, 5e-1, 1.0),
}
WARMUPS: Final = {"adamw": 0.5, "soap": 1 / 3}
"""The share of all steps that is warm-up, where another than the job's own ended lower after 300 steps of the 0.9m preset: of none, a tenth, a third and (AdamW) a half."""
Points = Mapping[tuple[str, float], Sequence[Outcome]]
"""The outcomes of each optimizer, by name, at each rate."""
PEERS: Final = ("soap", "shampoo")
SHORT: Final = 0.4
OPTIONS: Final[dict[str, dict[str, Any]]] = {
    # what DASH refreshes every ten steps they refresh every ten as well; whole matrices in place of blocks of 128 gain ScalableShampoo nothing
    "soap": {"precondition_frequency": 10},
    "shampoo": {
        "preconditioning_compute_steps": 10,
        "statistics_compute_steps": 1,
        "start_preconditioning_step": 1,
        "block_size": 128,
        "skip_preconditioning_rank_lt": 2,
    },
}


def run(settings: Settings) -> Report:
    """Run the sweeps and the timed runs, and report."""
    kinds = [kind for kind in RATES if kind not in PEERS or find_spec("pytorch_optimizer")]
    steps = settings.job(Arm(""), settings.seeds[0]).training.steps
    settings = settings.without_steps()
    short = max(1, round(SHORT * steps))
    decisive = (("adamw", steps), ("dash", short))
    points = {
        (f"{kind}, {count} steps", rate): outcomes
        for count in (steps, short)
        for kind in kinds
        for rate, outcomes in _sweep(kind, count, settings, every=(kind, count) in decisive).items()
    }
    best = best_rates(points)
    timed = _timed(best, settings)
    return _report(timed, points, best, steps, short, settings)


def _rates(kind: str, settings: Settings) -> tuple[float, ...]:
    return RATES[kind][1:4:2] if settings.quick else RATES[kind]


def _arm(label: str, kind: str, rate: float, steps: int) -> Arm:
    options = {"type": kind, **OPTIONS.get(kind, {}), "lr": rate}
    sections: dict[str, dict[str, Any]] = {
        "optimizer": options,
        "training": {"steps": steps},
        "logging": {"validate_every": 10},
    }
    return Arm(label, sections | ({"schedule": {"warmup": WARMUPS[kind]}} if kind in WARMUPS else {}))


def _sweep(kind: str, steps: int, settings: Settings, every: bool) -> dict[float, list[Outcome]]:
    """Return the outcomes at each rate, of every seed or of the first."""
    rates = _rates(kind, settings)
    arms = [_arm(f"{kind}-{steps}-{rate:g}", kind, rate, steps) for rate in rates]
    seeds = settings.seeds if every else settings.seeds[:1]
    groups = run_arms("better/sweep", arms, replace(settings, seeds=seeds))
    return dict(zip(rates, groups.values(), strict=True))


def _timed(best: Mapping[str, float], settings: Settings) -> Groups:
    """Run the best of each again, alone: the machine's slow moments strike whom they will, so seeds take turns."""
    found: Groups = {name: [] for name in best}
    for seed in settings.seeds:
        one = replace(settings, seeds=(seed,), workers=1)
        arms = [_arm(name, name.partition(",")[0], rate, int(name.split()[1])) for name, rate in best.items()]
        for name, outcomes in run_arms("better/timed", arms, one).items():
            found[name] += outcomes
    return found


def reached(outcome: Outcome, target: float) -> tuple[float, float]:
    """Return after how many steps and seconds a run was first at or below a loss, between two looks by interpolation; NaN if never."""
    before: tuple[float, float, float] | None = None
    for point in outcome.curve:
        if point[2] <= target:
            if before is None or not math.isfinite(before[2]):
                return float(point[0]), point[1]
            share = (before[2] - target) / (before[2] - point[2])
            return (
                before[0] + share * (point[0] - before[0]),
                before[1] + share * (point[1] - before[1]),
            )
        before = point
    return math.nan, math.nan


def loss_after(outcome: Outcome, seconds: float) -> float:
    """Return the loss of a run after a time, between two looks by interpolation; its last if it took less, infinity if it diverged."""
    if outcome.diverged or not outcome.curve:
        return math.inf
    _, at, loss = zip(*outcome.curve, strict=True)
    return float(np.interp(seconds, at, loss))


def _report(
    timed: Groups,
    points: Points,
    best: Mapping[str, float],
    steps: int,
    short: int,
    settings: Settings,
) -> Report:
    adamw, dash = f"adamw, {steps} steps", f"dash, {short} steps"
    target = float(np.mean(losses(timed[adamw])))
    seconds = float(np.mean([outcome.seconds for outcome in timed[adamw]]))
    table = [
        (
            name,
            f"{best[name]:g}",
            *loss_cells(outcomes, timed[adamw]),
            *_share(outcomes, target, steps, seconds),
            fixed(float(np.mean([loss_after(outcome, seconds) for outcome in outcomes])), 3),
        )
        for name, outcomes in timed.items()
    ]
    drawn = {name: outcomes for name, outcomes in timed.items() if name == dash or _is_of(name, steps)}
    title = f"Is it better? {timed[adamw][0].parameters / 1e6:.2g}M parameters, {steps} steps, {len(settings.seeds)} seeds"
    return Report(
        name="better",
        title=title,
        summary=_summary(timed, dash, target, steps, seconds),
        tables=[
            Table(
                f"Each at its best rate; steps and seconds to AdamW's final loss ({target:.3f}), as shares of AdamW's {steps} steps and {seconds:.0f} s",
                (
                    "optimizer",
                    "rate",
                    "held-out loss by seed",
                    "mean",
                    "minus AdamW's",
                    "steps to it",
                    "seconds to it",
                    "seconds of the run",
                    f"loss after {seconds:.0f} s",
                ),
                table,
            ),
            _times(timed),
        ],
        plots=[
            Plot(
                "better",
                "Loss on held-out text, each optimizer at its best rate; mean over seeds, bands from lowest to highest. Runs one at a time.",
                loss_curves(drawn, title),
            ),
            *(_rates_plot(count, points, best) for count in (steps, short)),
        ],
        data={"better": rows(timed), "better_sweep": _sweep_rows(points)},
        notes=[
            chance(settings.seeds),
            "Refreshes of SOAP and ScalableShampoo as often as DASH's, every ten steps; everything else as it comes, betas and weight decay as in docs/training.md, but for"
            " a warm-up of half of the steps for AdamW and a third for SOAP, which are better for them."
            if find_spec("pytorch_optimizer")
            else "SOAP and ScalableShampoo are left out: they are pytorch-optimizer's, of the extra 'bench', which is not installed.",
        ],
    )


def _is_of(name: str, steps: int) -> bool:
    return name.endswith(f", {steps} steps")


def _rates_plot(steps: int, points: Points, best: Mapping[str, float]) -> Plot:
    here = {point: outcomes for point, outcomes in points.items() if _is_of(point[0], steps)}
    figure = sweep_figure(
        here,
        {name: rate for name, rate in best.items() if _is_of(name, steps)},
        f"Learning rates of runs of {steps} steps",
    )
    caption = f"Mean final loss against the peak learning rate, runs of {steps} steps; bars from lowest to highest where there are several seeds."
    return Plot(f"better_rates_{steps}", caption, figure)


def _share(outcomes: Sequence[Outcome], target: float, steps: int, seconds: float) -> tuple[str, str, str]:
    at = np.array([reached(outcome, target) for outcome in outcomes])
    mean_steps, mean_seconds = at.mean(0)
    whole = float(np.mean([outcome.seconds for outcome in outcomes]))
    return fixed(mean_steps / steps, 2), fixed(mean_seconds / seconds, 2), fixed(whole / seconds, 2)


def _summary(timed: Groups, dash: str, target: float, steps: int, seconds: float) -> str:
    loss = float(np.mean(losses(timed[dash])))
    count = timed[dash][0].steps
    took = float(np.mean([outcome.seconds for outcome in timed[dash]]))
    verdict = "below" if loss <= target else "above"
    order = sorted(timed, key=lambda name: float(np.mean(losses(timed[name]))))
    return (
        f"A DASH run scheduled for {count} steps ({count / steps:.2f} of AdamW's, {took / seconds:.2f} of its seconds) ends at {loss:.3f}, {verdict} AdamW's"
        f" {target:.3f} after {steps}. By final loss: {', '.join(order)}."
    )


def _times(timed: Groups) -> Table:
    table = [
        (
            name,
            *(fixed(float(np.mean([outcome.ms[part] for outcome in outcomes]))) for part in PARTS),
            fixed(outcomes[0].optimizer_bytes / 2**20),
        )
        for name, outcomes in timed.items()
    ]
    return Table(
        "Mean time of a step and memory of the state",
        ("optimizer", *(f"{part} ms" for part in PARTS), "state MiB"),
        table,
    )


def _sweep_rows(points: Points) -> list[dict[str, object]]:
    return [
        {
            "optimizer": name,
            "rate": rate,
            "seed": outcome.seed,
            "loss": outcome.loss,
            "diverged": outcome.diverged,
        }
        for (name, rate), outcomes in points.items()
        for outcome in outcomes
    ]
