# SPDX-License-Identifier: Apache-2.0
"""Convergence: how many Newton steps an eigenvalue needs, what the scaling adds, and how the residual falls.

On an eigenvalue x = lambda/scale a coupled Newton step is the scalar map ``m <- m ((p + 1 - m)/p)^p`` from ``m = x`` to 1;
each square root of NDB is the same map with p = 2, from x, then from ``x^{1/2}``, and so on. Far below 1 a step multiplies
m by ``(1 + 1/p)^p``, between 9/4 (p = 2) and e: that constant factor is why a scale that is too large costs steps, the
argument of the DASH paper (arXiv:2602.02016) against Frobenius scaling.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from matroots import InvRoot, MultiPower, Status, inv_root_ex
from matroots.studies._inputs import Group, by_size
from matroots.studies._plots import (
    METHOD_COLOURS,
    METHOD_WIDTHS,
    PALETTE,
    grid,
    integer_ticks,
    legend,
    name_axes,
    scatter,
)
from matroots.studies._reference import condition, damped
from matroots.studies._report import Plot, Record, Report, Table, fixed, median, number, track, worst
from matroots.studies._settings import Case, Settings, cases, dtype_label, p_label

METHODS = ("cn", "ndb")
TOLERANCE = 1e-4  # within reach of float32 at the default damping
_SMALLEST = 1e-10
_LINE_STYLES = ("-", "--", ":")


@dataclass(frozen=True)
class MapRow:
    """One eigenvalue: steps that the scalar map predicts, and that a run took."""

    p: str
    method: str
    eigenvalue: float
    predicted: int
    taken: int


@dataclass(frozen=True)
class BlockRow:
    """One matrix of the input under one scaling."""

    matrix: str
    n: int
    condition: float
    p: str
    method: str
    scaling: str
    status: str
    scale_ratio: float
    steps: int


@dataclass(frozen=True)
class HistoryRow:
    """The residual after one step."""

    matrix: str
    condition: float
    p: str
    method: str
    step: int
    residual: float


def run(settings: Settings) -> Report:
    """Predict the steps from the scalar map, and count them in runs on made-up and on real matrices."""
    chosen, notes = cases(settings, "convergence", METHODS)
    one_each = list({(case.p, case.method): case for case in chosen}.values())
    work = [(case, group) for case in chosen for group in by_size(settings.matrices, settings.dtypes[0])]
    blocks: list[BlockRow] = []
    for case, group in track(work, "convergence"):
        blocks += _solve_blocks(case, group, settings)
    mapped = [row for case in one_each for row in _compare_map(case, settings)]
    typical = _typical_matrices(blocks)
    histories = [
        row for case in one_each for item in typical.items() for row in _history(case, *item, settings)
    ]
    dtype = dtype_label(settings.dtypes[0])
    return Report(
        name="convergence",
        title="Convergence: steps of the Newton iterations",
        summary=_summary(mapped, blocks, settings),
        tables=[_map_table(mapped), _block_table(blocks)],
        plots=[_map_plot(mapped), _block_plot(blocks, settings), _history_plot(histories, typical)],
        data={
            "convergence-map": _records(mapped),
            "convergence-blocks": _records(blocks),
            "convergence-history": _records(histories),
        },
        notes=[*notes, f"Matrices of the input are solved in {dtype} only, the first of --dtypes."],
    )


def newton_steps(x: float, p: int, tol: float) -> int:
    """Return the steps that ``m <- m ((p + 1 - m)/p)^p`` needs from x in (0, 1] until ``|1 - m| <= tol``, at least one.

    >>> newton_steps(1.0, 2, 1e-4), newton_steps(1e-4, 2, 1e-4)
    (1, 15)
    """
    m, steps = x, 0
    while steps == 0 or abs(1.0 - m) > tol:
        m *= ((p + 1 - m) / p) ** p
        steps += 1
    return steps


def predicted_steps(method: str, x: float, p: int, tol: float) -> int:
    """Return the steps of a method on the eigenvalue x of a matrix that has been divided by its scale.

    "ndb" takes ``log2 p`` square roots in a row, each to ``tol/p``: the k-th starts from what the others have left.
    """
    if method == "cn":
        return newton_steps(x, p, tol)
    stages = (p - 1).bit_length()
    return sum(newton_steps(x ** (0.5**stage), 2, tol / p) for stage in range(stages))


def gain(method: str, p: int) -> float:
    """Return how much one step enlarges a small eigenvalue of A, counted over all square roots of "ndb"."""
    if method == "cn":
        return (1 + 1 / p) ** p
    # the k-th square root starts from x^(1/2^k), where a factor in x is worth a 2^k-th part of the steps
    stages = (p - 1).bit_length()
    return math.exp(math.log(9 / 4) / sum(0.5**stage for stage in range(stages)))


def _compare_map(case: Case, settings: Settings) -> list[MapRow]:
    """Run on 2 x 2 matrices with eigenvalues 1 and x, whose scale is 1 when nothing is added for safety."""
    x = torch.logspace(math.log10(_SMALLEST), 0, 13 if settings.quick else 61, dtype=torch.float64)
    angle = torch.rand(1, generator=torch.Generator().manual_seed(settings.seed), dtype=torch.float64)
    c, s = torch.cos(angle), torch.sin(angle)
    Q = torch.stack([torch.cat([c, -s]), torch.cat([s, c])])
    A = (Q * torch.stack([torch.ones_like(x), x], dim=-1).unsqueeze(-2)) @ Q.mT
    result = inv_root_ex(A, case.p, method=case.method, scaling=MultiPower(safety=1.0), tol=TOLERANCE)
    scaled = (x / result.scale).clamp(max=1.0).tolist()
    return [
        MapRow(
            p=p_label(case.p),
            method=case.method,
            eigenvalue=scaled[i],
            predicted=predicted_steps(case.method, scaled[i], int(case.p), TOLERANCE),
            taken=int(result.steps[i]),
        )
        for i in range(len(scaled))
    ]


def _solve_blocks(case: Case, group: Group, settings: Settings) -> list[BlockRow]:
    result = _solve(case, group.A, settings, TOLERANCE)
    eigenvalues = torch.linalg.eigvalsh(damped(group.A, result.damping))
    conditions, top = condition(eigenvalues), eigenvalues[:, -1]
    return [
        BlockRow(
            matrix=name,
            n=group.n,
            condition=float(conditions[i]),
            p=p_label(case.p),
            method=case.method,
            scaling=case.scaling,
            status=Status(int(result.status[i])).name,
            scale_ratio=float(result.scale[i] / top[i]),
            steps=int(result.steps[i]),
        )
        for i, name in enumerate(group.names)
    ]


def _solve(case: Case, A: torch.Tensor, settings: Settings, tol: float | None) -> InvRoot:
    return inv_root_ex(
        A,
        case.p,
        method=case.method,
        scaling=case.scaling_argument,
        rel_damping=settings.rel_damping,
        tol=tol,
    )


def _typical_matrices(blocks: Sequence[BlockRow]) -> dict[str, float]:
    """Return the matrices of least, median and greatest condition number, with it."""
    conditions = {row.matrix: row.condition for row in blocks if not Status[row.status].failed}
    ordered = sorted(conditions, key=conditions.__getitem__)
    picked = [ordered[i] for i in sorted({0, len(ordered) // 2, len(ordered) - 1})] if ordered else []
    return {name: conditions[name] for name in picked}


def _history(case: Case, name: str, kappa: float, settings: Settings) -> list[HistoryRow]:
    A = settings.matrices[name].to(settings.dtypes[0])
    result = _solve(case, A, settings, None)
    residuals = result.history[: int(result.steps)].tolist()
    return [
        HistoryRow(name, kappa, p_label(case.p), case.method, step, residual)
        for step, residual in enumerate(residuals, start=1)
    ]


def _summary(mapped: Sequence[MapRow], blocks: Sequence[BlockRow], settings: Settings) -> str:
    agree = sum(abs(row.predicted - row.taken) <= 1 for row in mapped)
    return (
        f"Steps to a residual of {TOLERANCE:g}. The scalar map predicts the steps of {agree} of {len(mapped)} runs on 2 x 2"
        f" matrices within one step. Below that: {len(blocks)} solves of {len(settings.matrices)} matrices from"
        f" {settings.source}, damped by {settings.rel_damping:g} times the bound on their largest eigenvalue."
    )


def _map_table(rows: Sequence[MapRow]) -> Table:
    decades = [1.0, 1e-2, 1e-4, 1e-6, 1e-8, 1e-10]
    lines = []
    for p, method in dict.fromkeys((row.p, row.method) for row in rows):
        here = [row for row in rows if (row.p, row.method) == (p, method)]
        nearest = [min(here, key=lambda row: abs(math.log(row.eigenvalue / decade))) for decade in decades]
        lines.append([p, method, *(f"{row.predicted} / {row.taken}" for row in nearest)])
    return Table(
        "Steps against lambda/scale: predicted / taken", ["p", "method", *(f"{x:g}" for x in decades)], lines
    )


def _block_table(rows: Sequence[BlockRow]) -> Table:
    lines = []
    for key in dict.fromkeys((row.p, row.method, row.scaling) for row in rows):
        here = [row for row in rows if (row.p, row.method, row.scaling) == key]
        good = [row for row in here if row.status == Status.CONVERGED.name]
        ratios, steps = [row.scale_ratio for row in good], [float(row.steps) for row in good]
        mean = sum(steps) / len(steps) if steps else math.nan
        cost = math.log(median(ratios)) / math.log(gain(key[1], int(key[0]))) if ratios else math.nan
        lines.append(
            [
                *(
                    *key,
                    str(len(here)),
                    str(len(here) - len(good)),
                    fixed(median(ratios), 2),
                    fixed(worst(ratios), 2),
                ),
                *(fixed(mean, 2), fixed(median(steps), 0), fixed(worst(steps), 0), fixed(cost, 2)),
            ]
        )
    columns = [
        "p",
        "method",
        "scaling",
        "matrices",
        "not conv.",
        "scale/λ₁",
        "worst",
        "mean steps",
        "median",
        "worst",
    ]
    return Table("Steps on the matrices of the input", [*columns, "steps due to scale"], lines)


def _map_plot(rows: Sequence[MapRow]) -> Plot:
    orders = list(dict.fromkeys(row.p for row in rows))
    figure, panels = grid(1, len(orders), f"Newton steps to a residual of {TOLERANCE:g}")
    for axes, p in zip(panels[0], orders, strict=True):
        for method in dict.fromkeys(row.method for row in rows if row.p == p):
            here = [row for row in rows if (row.p, row.method) == (p, method)]
            x, predicted = [row.eigenvalue for row in here], [row.predicted for row in here]
            (line,) = axes.step(x, predicted, where="mid", label=f"{method}, scalar map")
            line.set(color=METHOD_COLOURS[method], linewidth=1.0)
            size = 7 if method == "cn" else 3.5
            scatter(axes, x, [row.taken for row in here], method, f"{method}, run", size=size)
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        name_axes(axes, "eigenvalue / scale", "steps (all square roots together)", f"p = {p}")
    legend(figure, 4)
    caption = (
        "Lines: the scalar map. Markers: float64 runs on 2 x 2 matrices with eigenvalues 1 and x. The slope is the constant"
        " factor that a small eigenvalue gains per step; the quadratic finish is the same for all."
    )
    return Plot("convergence-map", caption, figure)


def _block_plot(rows: Sequence[BlockRow], settings: Settings) -> Plot:
    """Draw the share of matrices that have converged after so many steps."""
    keys = list(dict.fromkeys((row.p, row.method) for row in rows))
    orders, methods = (list(dict.fromkeys(part)) for part in zip(*keys, strict=True))
    figure, panels = grid(len(orders), len(methods), "Share of matrices converged, by scaling")
    for i, p in enumerate(orders):
        for j, method in enumerate(methods):
            axes = panels[i][j]
            for scaling, colour, style in zip(settings.scalings, PALETTE, _LINE_STYLES, strict=False):
                here = [row for row in rows if (row.p, row.method, row.scaling) == (p, method, scaling)]
                steps = sorted(row.steps for row in here if row.status == Status.CONVERGED.name)
                share = [(k + 1) / len(here) for k in range(len(steps))]
                axes.step(
                    [0, *steps], [0.0, *share], where="post", color=colour, linestyle=style, label=scaling
                )
            axes.set_ylim(0, 1.03)
            least = min((row.steps for row in rows if (row.p, row.method) == (p, method)), default=1)
            axes.set_xlim(left=max(0, least - 2))
            integer_ticks(axes)
            name_axes(axes, "steps", "share of matrices", f"p = {p}, {method}")
    legend(figure, 3)
    caption = (
        f"How many of the matrices have a residual of {TOLERANCE:g} after so many steps. A curve further left is a better"
        " scale. Where the spectrum is dominated by one direction the Frobenius norm is tight, and the curves coincide."
    )
    return Plot("convergence-scalings", caption, figure)


def _history_plot(rows: Sequence[HistoryRow], typical: dict[str, float]) -> Plot:
    orders = list(dict.fromkeys(row.p for row in rows)) or ["-"]
    figure, panels = grid(1, len(orders), "Residual after each step")
    for axes, p in zip(panels[0], orders, strict=True):
        for method in dict.fromkeys(row.method for row in rows if row.p == p):
            for name, style in zip(typical, _LINE_STYLES, strict=False):
                here = [row for row in rows if (row.p, row.method, row.matrix) == (p, method, name)]
                label = f"{method}, {name} (κ = {number(typical[name])})"
                steps, residuals = [row.step for row in here], [row.residual for row in here]
                axes.plot(
                    steps,
                    residuals,
                    style,
                    color=METHOD_COLOURS[method],
                    linewidth=METHOD_WIDTHS[method],
                    label=label,
                )
        axes.set_yscale("log")
        integer_ticks(axes)
        name_axes(axes, "step", "residual ‖I - M‖, Frobenius norm", f"p = {p}")
    legend(figure, 2)
    caption = (
        "The matrices with the least, the median and the greatest condition number, to the limit of the dtype. For p = 4 the"
        " two square roots of ndb stand one after the other: the residual starts again with the second."
    )
    return Plot("convergence-history", caption, figure)


def _records(rows: Sequence[MapRow | BlockRow | HistoryRow]) -> list[Record]:
    return [dict(vars(row)) for row in rows]
