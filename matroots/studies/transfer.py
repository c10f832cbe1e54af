# SPDX-License-Identifier: Apache-2.0
"""Transfer: the function that a method really applies to the spectrum.

A root that is exact multiplies every eigenvalue's direction by ``lambda^{-1/p}``. An iteration that is stopped early multiplies it by
something else, ``x``; shown is ``x lambda^{1/p}``, which should be 1. Above 1 a direction is amplified, below 1 it is damped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from matroots import Chebyshev, CoupledNewton, MultiPower, NewtonDB, Status, inv_root_ex
from matroots.scaling import Scaling
from matroots.solvers import Solver
from matroots.studies._plots import METHOD_COLOURS, METHOD_WIDTHS, PALETTE, grid, legend, name_axes
from matroots.studies._report import Plot, Record, Report, Table, fixed, number, track
from matroots.studies._settings import Settings, cases, dtype_label, p_label

METHODS = ("cn", "ndb", "chebyshev")
DEGREE = 60
_SIZE, _SMALLEST = 192, 1e-8
_LOWEST_SHOWN = 2.0**-6


@dataclass(frozen=True)
class Filter:
    """A solver with a fixed amount of work, or without a limit, and how its curve is drawn."""

    label: str
    solver: Solver
    scaling: Scaling
    colour: str
    width: float
    style: str


@dataclass(frozen=True)
class Curve:
    """What a filter did to the known spectrum; ``values`` are NaN where there is no root."""

    filter: Filter
    p: float
    dtype: torch.dtype
    eigenvalues: Tensor
    values: Tensor
    status: Status
    steps: int
    scale: float

    @property
    def peak(self) -> float:
        """The largest amplification."""
        return float(self.values.max())

    @property
    def peak_at(self) -> float:
        """The eigenvalue that is amplified most."""
        return math.nan if self.status.failed else float(self.eigenvalues[self.values.argmax()])


def run(settings: Settings) -> Report:
    """Apply each method to a matrix with a known spectrum and basis, and read off what became of each eigenvalue."""
    chosen, notes = cases(settings, "transfer", METHODS)
    pairs = list(dict.fromkeys((case.p, case.method) for case in chosen))
    eigenvalues, Q = known_spectrum(settings.seed)
    work = [
        (p, filter_, dtype)
        for dtype in settings.dtypes
        for p, method in pairs
        for filter_ in filters(method, settings.steps)
    ]
    curves = [_apply(*item, eigenvalues, Q) for item in track(work, "transfer")]
    notes += [
        f"{curve.filter.label}, p = {p_label(curve.p)}, {dtype_label(curve.dtype)} has no root: {curve.status.advice}."
        for curve in curves
        if curve.status.failed
    ]
    return Report(
        name="transfer",
        title="Transfer: what a method does to the spectrum",
        summary=_summary(curves, settings),
        tables=[_table(curves)],
        plots=[_plot(curves, settings)],
        data={"transfer": [record for curve in curves for record in _records(curve)]},
        notes=[*notes, "--input, --rel-damping and --scalings have no part in this study."],
    )


def known_spectrum(seed: int) -> tuple[Tensor, Tensor]:
    """Return log-spaced eigenvalues from 1e-8 to 1, float64 ``(n,)``, and a random orthogonal basis ``(n, n)``."""
    eigenvalues = torch.logspace(math.log10(_SMALLEST), 0, _SIZE, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    Q, R = torch.linalg.qr(torch.randn(_SIZE, _SIZE, dtype=torch.float64, generator=generator))
    return eigenvalues, Q * R.diagonal().sign()


def filters(method: str, steps: int) -> list[Filter]:
    """Return the variants of a method: fixed steps under this package's scale and under DASH's, and without a limit.

    For "chebyshev" they are two lower ends of the interval: one that the degree can serve, and one that it cannot.
    """
    look = METHOD_COLOURS[method], METHOD_WIDTHS[method]
    if method == "chebyshev":
        return [
            Filter(
                f"chebyshev, degree {DEGREE}, floor {floor:g}",
                Chebyshev(DEGREE, floor),
                MultiPower(),
                *look,
                style,
            )
            for floor, style in ((1e-3, "-"), (1e-4, "--"))
        ]
    fixed_steps: Solver = CoupledNewton(steps=steps) if method == "cn" else NewtonDB(steps=steps)
    free: Solver = CoupledNewton() if method == "cn" else NewtonDB()
    each = f"{method}, {steps} {'steps' if method == 'cn' else 'steps a root'}"
    other = PALETTE[3] if method == "cn" else PALETTE[5]
    return [
        Filter(each, fixed_steps, MultiPower(), *look, "-"),
        # DASH divides by twice its estimate of the largest eigenvalue
        Filter(f"{each}, scale 2 λ₁", fixed_steps, MultiPower(safety=2.0), *look, "--"),
        Filter(f"{method}, converged", free, MultiPower(), other, METHOD_WIDTHS[method], ":"),
    ]


def _apply(p: float, filter_: Filter, dtype: torch.dtype, eigenvalues: Tensor, Q: Tensor) -> Curve:
    A = (Q * eigenvalues) @ Q.mT
    A = ((A + A.mT) / 2).to(dtype)
    result = inv_root_ex(A, p, method=filter_.solver, scaling=filter_.scaling)
    x = torch.einsum("ij,ik,kj->j", Q, result.root.double(), Q)
    return Curve(
        filter=filter_,
        p=p,
        dtype=dtype,
        eigenvalues=eigenvalues,
        values=x * eigenvalues ** (1 / p),
        status=Status(int(result.status)),
        steps=int(result.steps),
        scale=float(result.scale),
    )


def _records(curve: Curve) -> list[Record]:
    return [
        {
            "p": p_label(curve.p),
            "dtype": dtype_label(curve.dtype),
            "filter": curve.filter.label,
            "status": curve.status.name,
            "steps": curve.steps,
            "scale": curve.scale,
            "eigenvalue": eigenvalue,
            "transfer": value,
        }
        for eigenvalue, value in zip(curve.eigenvalues.tolist(), curve.values.tolist(), strict=True)
    ]


def _summary(curves: Sequence[Curve], settings: Settings) -> str:
    return (
        f"A {_SIZE} x {_SIZE} matrix with {_SIZE} log-spaced eigenvalues from {_SMALLEST:g} to 1 in a random orthogonal basis, through"
        f" each method: {settings.steps} steps (of each square root for ndb), and as many as it takes. The ideal value is 1"
        " everywhere."
    )


def _table(curves: Sequence[Curve]) -> Table:
    lines = []
    for curve in curves:
        kept = curve.eigenvalues[curve.values >= 0.5]
        lines.append(
            [
                *(p_label(curve.p), dtype_label(curve.dtype), curve.filter.label, str(curve.steps)),
                *(fixed(curve.scale, 2), fixed(curve.peak, 3), number(curve.peak_at)),
                *(fixed(float(curve.values[0]), 3), number(float(kept.min())) if len(kept) else "-"),
            ]
        )
    columns = [
        "p",
        "dtype",
        "filter",
        "steps",
        "scale/λ₁",
        "peak",
        "peak at",
        f"at {_SMALLEST:g}",
        ">= 0.5 from",
    ]
    return Table("Amplification of the eigenvalues, λ₁ = 1", columns, lines)


def _plot(curves: Sequence[Curve], settings: Settings) -> Plot:
    dtypes, orders = (list(dict.fromkeys(getattr(curve, key) for curve in curves)) for key in ("dtype", "p"))
    figure, panels = grid(len(dtypes), len(orders), "Transfer function of the inverse root")
    for i, dtype in enumerate(dtypes):
        for j, p in enumerate(orders):
            axes = panels[i][j]
            axes.axhline(1.0, color="0.4", linewidth=0.8)
            for curve in curves:
                if (curve.dtype, curve.p) == (dtype, p) and not curve.status.failed:
                    values = curve.values.clamp_min(_LOWEST_SHOWN / 4)
                    (line,) = axes.plot(curve.eigenvalues.tolist(), values.tolist(), label=curve.filter.label)
                    line.set(
                        color=curve.filter.colour, linestyle=curve.filter.style, linewidth=curve.filter.width
                    )
            axes.set_xscale("log")
            axes.set_yscale("log", base=2)
            axes.set_ylim(_LOWEST_SHOWN, 2.6)
            axes.yaxis.set_major_formatter(
                lambda value, _: f"{value:g}" if value >= 1 else f"1/{1 / value:g}"
            )
            name_axes(axes, "λ / λ₁", "x λ^(1/p)", f"p = {p_label(p)}, {dtype_label(dtype)}")
    legend(figure, 2)
    caption = (
        "Above 1: directions that are amplified. Below: directions that are damped. Two square roots of ten steps each (ndb,"
        " p = 4) amplify eigenvalues in the middle of the spectrum up to twofold, because the second undoes a damping that"
        " it takes for small eigenvalues; coupled Newton can only damp. For p = 2 cn and ndb apply the same function. In float32 the eigenvalues below about 1e-7 of the"
        " input itself are rounding."
    )
    return Plot("transfer", caption, figure)
