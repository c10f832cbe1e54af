# SPDX-License-Identifier: Apache-2.0
"""Scaling: how far each scale is from the largest eigenvalue, and how many steps that costs.

Too small a scale puts eigenvalues outside the region where an iteration converges to the right root, so every estimate is
guarded by a proven bound; too large a scale costs steps. Shown are the estimate as it comes from the scaling (its safety
factor included), and the scale that a solver really used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from matroots import Chebyshev, Frobenius, InvRoot, MultiPower, Power, Status, inv_root_ex, lambda_bound
from matroots.scaling import Scaling
from matroots.solvers import Solver
from matroots.studies._inputs import Group, by_size
from matroots.studies._plots import METHOD_COLOURS, PALETTE, grid, legend, name_axes, scatter
from matroots.studies._reference import damped
from matroots.studies._report import Plot, Report, Table, fixed, median, track, worst
from matroots.studies._settings import Case, Settings, cases, p_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes

METHODS = ("cn", "ndb", "chebyshev")
TOLERANCE = 1e-4
_SEEDS = 3
_TICKS = (0.4, 0.5, 0.6, 0.8, 1.0, 1.2, 1.6, 2.0, 3.0)
_WIDE_TICKS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
VARIANTS: dict[str, dict[str, Scaling]] = {
    "frobenius": {"frobenius": Frobenius(), "frobenius order=2": Frobenius(order=2)},
    "power": {
        "power steps=5": Power(steps=5),
        "power steps=20": Power(),
        "power steps=20 bf16": Power(dtype=torch.bfloat16),
    },
    "multi_power": {
        "multi_power 4 x 5": MultiPower(vectors=4, steps=5),
        "multi_power 16 x 5": MultiPower(steps=5),
        "multi_power 16 x 10": MultiPower(),
        "multi_power 16 x 10 bf16": MultiPower(dtype=torch.bfloat16),
        "multi_power 32 x 20": MultiPower(vectors=32, steps=20),
    },
}


@dataclass(frozen=True)
class Row:
    """One matrix, one scaling, one seed, one method. Ratios are to the largest eigenvalue of the damped matrix."""

    matrix: str
    n: int
    variant: str
    seed: int
    p: str
    method: str
    estimate_ratio: float
    scale_ratio: float
    status: str
    steps: int


def run(settings: Settings) -> Report:
    """Estimate the largest eigenvalue of every matrix in every way, and solve with the result."""
    chosen, notes = cases(settings, "scaling", METHODS)
    one_each = list({(case.p, case.method): case for case in chosen}.values())
    names = [name for name in VARIANTS if name in settings.scalings]
    variants = {label: scaling for name in names for label, scaling in VARIANTS[name].items()}
    groups = by_size(settings.matrices, settings.dtypes[0])
    spectra = {group.n: _damped(group.A, settings.rel_damping) for group in groups}
    work = [(group, label) for group in groups for label in variants]
    rows: list[Row] = []
    for group, label in track(work, "scaling"):
        rows += _estimate(group, label, variants[label], one_each, settings, *spectra[group.n])
    return Report(
        name="scaling",
        title="Scaling: estimates of the largest eigenvalue",
        summary=_summary(settings),
        tables=[_ratio_table(rows), _step_table(rows)],
        plots=[_ratio_plot(rows), _step_plot(rows)],
        data={"scaling": [dict(vars(row)) for row in rows]},
        notes=[*notes, *_remarks()],
    )


def _estimate(
    group: Group,
    label: str,
    scaling: Scaling,
    chosen: Sequence[Case],
    settings: Settings,
    A: Tensor,
    top: Tensor,
) -> list[Row]:
    """Return the rows of one scaling; A is the damped batch, ``top`` its largest eigenvalues."""
    is_random = not isinstance(scaling, Frobenius)
    unit = A.abs().amax((-2, -1)).double().clamp_min(torch.finfo(torch.float64).tiny)
    rows = []
    for seed in range(settings.seed, settings.seed + (_SEEDS if is_random else 1)):
        estimate = unit * scaling.estimate(A / unit.to(A.dtype).reshape(-1, 1, 1), _generator(seed))
        for case in chosen:
            result = _solve(group.A, case, scaling, seed, settings.rel_damping)
            rows += _rows(group, label, seed, case, (estimate / top, result.scale / top), result)
    return rows


def _damped(A: Tensor, rel_damping: float) -> tuple[Tensor, Tensor]:
    """Return ``A + eps I`` in the dtype that A is solved in, and its largest eigenvalue."""
    wide = damped(A, rel_damping * lambda_bound(A))
    return wide.to(torch.promote_types(A.dtype, torch.float32)), torch.linalg.eigvalsh(wide)[:, -1]


def _solve(A: Tensor, case: Case, scaling: Scaling, seed: int, rel_damping: float) -> InvRoot:
    # only the scale of chebyshev is of interest here, so it gets the least work that there is
    solver: str | Solver = Chebyshev(degree=1, floor=0.5) if case.method == "chebyshev" else case.method
    return inv_root_ex(
        A,
        case.p,
        method=solver,
        scaling=scaling,
        rel_damping=rel_damping,
        tol=None if case.method == "chebyshev" else TOLERANCE,
        generator=_generator(seed),
    )


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _rows(
    group: Group, label: str, seed: int, case: Case, ratios: tuple[Tensor, Tensor], result: InvRoot
) -> list[Row]:
    statuses = [Status(code) for code in result.status.tolist()]
    return [
        Row(
            matrix=name,
            n=group.n,
            variant=label,
            seed=seed,
            p=p_label(case.p),
            method=case.method,
            estimate_ratio=float(ratios[0][i]),
            scale_ratio=math.nan if statuses[i].failed else float(ratios[1][i]),
            status=statuses[i].name,
            steps=int(result.steps[i]),
        )
        for i, name in enumerate(group.names)
    ]


def _summary(settings: Settings) -> str:
    return (
        f"{len(settings.matrices)} matrices from {settings.source}, damped by {settings.rel_damping:g} times the bound on their"
        f" largest eigenvalue; {_SEEDS} seeds for scalings with random start vectors. Ratios are to the largest eigenvalue λ₁;"
        f" steps are to a residual of {TOLERANCE:g}."
    )


def _remarks() -> list[str]:
    return [
        "multi_power k x s: k start vectors, s steps. An estimate below λ₁ is harmless to cn and ndb, whose guard keeps the"
        " scale above half and two fifths of a proven bound; for chebyshev it is replaced by a proven bound.",
        "Matrices are taken in the first of --dtypes only.",
    ]


def _ratio_table(rows: Sequence[Row]) -> Table:
    methods = list(dict.fromkeys(row.method for row in rows))
    lines = []
    for variant in dict.fromkeys(row.variant for row in rows):
        here = [row for row in rows if row.variant == variant]
        estimates = [row.estimate_ratio for row in here]
        unique = {(row.matrix, row.seed): row.estimate_ratio for row in here}
        below = sum(ratio < 1.0 for ratio in unique.values())
        cells = [
            fixed(-worst(-ratio for ratio in estimates), 3),
            fixed(median(estimates), 3),
            fixed(worst(estimates), 3),
        ]
        for method in methods:
            used = [row.scale_ratio for row in here if row.method == method]
            cells.append(
                f"{fixed(-worst(-r for r in used), 2)} {fixed(median(used), 2)} {fixed(worst(used), 2)}"
            )
        lines.append([variant, *cells, f"{below} of {len(unique)}"])
    columns = [
        "scaling",
        "least",
        "median",
        "largest",
        *(f"scale, {method}" for method in methods),
        "below λ₁",
    ]
    return Table("Estimate/λ₁, and scale/λ₁ as used (least, median, largest)", columns, lines)


def _step_table(rows: Sequence[Row]) -> Table:
    stepping = [row for row in rows if row.method != "chebyshev" and row.status == Status.CONVERGED.name]
    keys = list(dict.fromkeys((row.p, row.method) for row in stepping))
    lines = []
    for variant in dict.fromkeys(row.variant for row in rows):
        cells = []
        for key in keys:
            steps = [row.steps for row in stepping if (row.variant, row.p, row.method) == (variant, *key)]
            cells.append(f"{sum(steps) / len(steps):.2f} ({max(steps)})" if steps else "-")
        lines.append([variant, *cells])
    return Table("Mean steps (most)", ["scaling", *(f"{method}, p = {p}" for p, method in keys)], lines)


def _ratio_plot(rows: Sequence[Row]) -> Plot:
    variants = list(dict.fromkeys(row.variant for row in rows))
    methods = list(dict.fromkeys(row.method for row in rows))
    figure, panels = grid(1, 1 + len(methods), "Scale over largest eigenvalue λ₁")
    figure.set_size_inches(2.6 * (1 + len(methods)) + 1.8, 0.36 * len(variants) + 1.9)
    # p is irrelevant here: dictionaries keep one point per matrix and seed
    estimates = {(row.variant, row.matrix, row.seed): row.estimate_ratio for row in rows}
    columns = [("estimate", estimates, PALETTE[3])]
    for method in methods:
        used = {(row.variant, row.matrix, row.seed): row.scale_ratio for row in rows if row.method == method}
        columns.append((f"scale used by {method}", used, METHOD_COLOURS[method]))
    everything = [ratio for _, ratios, _ in columns for ratio in ratios.values() if ratio > 0]
    limits = min([0.8, *everything]) / 1.08, max([1.25, *everything]) * 1.08
    for index, (axes, (title, ratios, colour)) in enumerate(zip(panels[0], columns, strict=True)):
        _strips(axes, variants, [(key[0], ratio) for key, ratio in ratios.items()], colour)
        _ratio_axis(axes, limits)
        _variant_axis(axes, variants, named=index == 0)
        name_axes(axes, "ratio to λ₁", "", title)
    caption = (
        "One point per matrix and seed, the bar is the median. Left: as estimated, the safety factor of the power"
        " iterations (1.1) included; points below 1 are underestimates. Right: after the guard, which also lowers an"
        " estimate to a proven bound where that is smaller."
    )
    return Plot("scaling-ratio", caption, figure)


def _step_plot(rows: Sequence[Row]) -> Plot:
    stepping = [row for row in rows if row.method != "chebyshev" and row.status == Status.CONVERGED.name]
    orders = list(dict.fromkeys(row.p for row in stepping)) or ["-"]
    variants = list(dict.fromkeys(row.variant for row in rows))
    figure, panels = grid(1, len(orders), f"What each scale costs, to a residual of {TOLERANCE:g}")
    figure.set_size_inches(3.6 * len(orders) + 2.2, 0.36 * len(variants) + 2.1)
    most = 0.0
    for index, (axes, p) in enumerate(zip(panels[0], orders, strict=True)):
        for method in dict.fromkeys(row.method for row in stepping):
            here = [row for row in stepping if (row.p, row.method) == (p, method)]
            known = [variant for variant in variants if any(row.variant == variant for row in here)]
            counts = [[row.steps for row in here if row.variant == variant] for variant in known]
            means = [sum(count) / len(count) for count in counts]
            extra = [mean - min(means) for mean in means]
            most = max([most, *extra])
            scatter(axes, extra, [variants.index(variant) for variant in known], method, method)
        _variant_axis(axes, variants, named=index == 0)
        name_axes(axes, "mean steps beyond the cheapest", "", f"p = {p}")
    for axes in panels[0]:
        axes.set_xlim(-0.05, max(1.0, 1.1 * most))
    legend(figure, 3)
    caption = (
        "Mean over matrices and seeds, all square roots together, less the least mean of the same method."
    )
    return Plot("scaling-steps", caption, figure)


def _strips(axes: Axes, variants: Sequence[str], points: Sequence[tuple[str, float]], colour: str) -> None:
    """Draw a horizontal strip of points per variant, spread a little so that they can be told apart."""
    for height, variant in enumerate(variants):
        ratios = [ratio for name, ratio in points if name == variant and ratio > 0]
        spread = [height + 0.5 * ((7 * k % 11) / 10 - 0.5) for k in range(len(ratios))]
        axes.plot(ratios, spread, linestyle="", marker=".", markersize=3, color=colour, alpha=0.5)
        axes.plot([median(ratios)] * 2, [height - 0.4, height + 0.4], color="black", linewidth=1.5)


def _ratio_axis(axes: Axes, limits: tuple[float, float]) -> None:
    """Make x a log axis with round numbers on it, few enough to be read, and mark the exact scale."""
    choice = _TICKS if limits[1] < 4 * limits[0] else _WIDE_TICKS
    ticks = [tick for tick in choice if limits[0] <= tick <= limits[1]]
    axes.set_xscale("log")
    axes.minorticks_off()
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xlim(*limits)
    axes.axvline(1.0, color="0.4", linewidth=0.8)


def _variant_axis(axes: Axes, variants: Sequence[str], *, named: bool) -> None:
    axes.set_yticks(range(len(variants)), variants if named else [""] * len(variants), fontsize=8)
    axes.set_ylim(len(variants) - 0.5, -0.5)
