# SPDX-License-Identifier: Apache-2.0
"""Accuracy: the true error of every method on real matrices, beside the error that the certificate proves.

Errors are relative, in the 2-norm, against :func:`matroots.studies._reference.reference` of the matrix that the method was
given: already rounded to its dtype, and damped.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

from matroots import InvRoot, Status, certify, inv_root_ex
from matroots.studies._inputs import Group, by_size
from matroots.studies._plots import METHOD_COLOURS, grid, legend, name_axes, scatter, span
from matroots.studies._reference import Reference, reference
from matroots.studies._report import Plot, Report, Table, fixed, median, number, track, worst
from matroots.studies._settings import NO_SCALING, Case, Settings, cases, dtype_label, p_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_REPEAT_BELOW = 0.3  # seconds: longer calls are timed once, their start-up no longer matters
_REPEATS = 3


@dataclass(frozen=True)
class Row:
    """One matrix, solved in one way."""

    matrix: str
    n: int
    condition: float
    p: str
    dtype: str
    method: str
    scaling: str
    status: str
    damping: float
    true_error: float
    certificate: float
    valid: bool
    ratio: float
    residual: float
    steps: int
    matmuls: int
    ms: float

    @property
    def failed(self) -> bool:
        """Whether there is no root."""
        return Status[self.status].failed


def run(settings: Settings) -> Report:
    """Solve every matrix in every way that the settings name, and compare with the reference."""
    chosen, notes = cases(settings, "accuracy")
    chosen = [case for case in chosen if case.method != "chebyshev" or case.scaling == settings.scalings[0]]
    inv_root_ex(torch.eye(8).expand(2, 8, 8), 2)  # loads the libraries, so that no timing pays for it
    work = [
        (group, case)
        for dtype in settings.dtypes
        for group in by_size(settings.matrices, dtype)
        for case in chosen
    ]
    references: dict[tuple[object, ...], Reference] = {}
    rows: list[Row] = []
    for group, case in track(work, "accuracy"):
        rows += _solve(group, case, settings, references)
    first_scaling = settings.scalings[0]
    shown = [row for row in rows if row.scaling in (NO_SCALING, first_scaling)]
    return Report(
        name="accuracy",
        title="Accuracy: true errors and certificates",
        summary=_summary(rows, settings),
        tables=[
            _table("All sizes", rows, by_n=False),
            _table("By size", rows, by_n=True, on_terminal=False),
            _status_table(rows),
        ],
        plots=_plots(shown, first_scaling),
        data={"accuracy": [asdict(row) for row in rows]},
        notes=[*notes, *_remarks(settings)],
    )


def _solve(
    group: Group, case: Case, settings: Settings, references: dict[tuple[object, ...], Reference]
) -> list[Row]:
    def call() -> InvRoot:
        return inv_root_ex(
            group.A,
            case.p,
            method=case.method,
            scaling=case.scaling_argument,
            rel_damping=settings.rel_damping,
        )

    result, seconds = _timed(call)
    eps = result.damping
    key = (group.n, group.A.dtype, case.p, *map(str, eps.tolist()))
    if key not in references:
        references[key] = reference(group.A, eps, case.p)
    return _rows(group, case, result, references[key], 1e3 * seconds / len(group.names))


def _rows(group: Group, case: Case, result: InvRoot, exact: Reference, ms: float) -> list[Row]:
    certificate = certify(group.A, result.root, case.p, damping=result.damping)
    errors = exact.relative_error(result.root)
    return [
        Row(
            matrix=group.names[i],
            n=group.n,
            condition=float(exact.condition[i]),
            p=p_label(case.p),
            dtype=dtype_label(group.A.dtype),
            method=case.method,
            scaling=case.scaling,
            status=Status(int(result.status[i])).name,
            damping=float(result.damping[i]),
            true_error=float(errors[i]),
            certificate=float(certificate.relative_error[i]),
            valid=bool(certificate.valid[i]),
            ratio=float(certificate.relative_error[i] / errors[i]) if certificate.valid[i] else float("nan"),
            residual=float(result.residual[i]),
            steps=int(result.steps[i]),
            matmuls=int(result.matmuls[i]),
            ms=ms,
        )
        for i in range(group.A.shape[0])
    ]


def _timed(call: Callable[[], InvRoot]) -> tuple[InvRoot, float]:
    """Return the result and the least of a few times after a warm-up, or the first time where that is long."""
    start = time.perf_counter()
    result = call()
    times = [time.perf_counter() - start]
    if times[0] <= _REPEAT_BELOW:
        times.clear()
        for _ in range(_REPEATS):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    return result, min(times)


def _summary(rows: Sequence[Row], settings: Settings) -> str:
    proven = [row for row in rows if row.valid]
    broken = sum(row.certificate < row.true_error for row in proven)
    excess = (
        f"; they exceed it by a median factor of {median(row.ratio for row in proven):.1f}" if proven else ""
    )
    return (
        f"{len(settings.matrices)} matrices from {settings.source}, damped by {settings.rel_damping:g} times the bound on"
        f" their largest eigenvalue; {len(rows)} roots. {len(proven)} certificates are valid, {broken} of them below the true"
        f" error (expected: 0){excess}."
    )


def _remarks(settings: Settings) -> list[str]:
    remarks = [
        "ms is wall time of inv_root_ex on the batch of all matrices of one size, divided by their number: the least of"
        f" {_REPEATS} calls after a warm-up, or of one call where a call takes more than {_REPEAT_BELOW} s, with {settings.threads}"
        " thread(s). Certificates are not part of it.",
        "Errors are relative, in the 2-norm. Medians leave out roots that failed.",
        f"chebyshev, whose degree of up to 8000 takes most of the time, is run under {settings.scalings[0]} scaling only.",
    ]
    if torch.float64 in settings.dtypes:
        remarks.append(
            "The reference of float64 input is refined in extended precision, as float64 itself is under test."
        )
    return remarks


def _table(title: str, rows: Sequence[Row], *, by_n: bool, on_terminal: bool = True) -> Table:
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        size = str(row.n) if by_n else "all"
        groups.setdefault((row.p, row.dtype, size, row.method, row.scaling), []).append(row)
    columns = ["p", "dtype", "n", "method", "scaling", "roots", "failed"]
    columns += ["error", "worst", "certified", "worst", "ratio", "steps", "prod.", "ms"]
    lines = []
    for key in sorted(groups, key=lambda k: (k[0], k[1], len(k[2]), k[2])):
        good = [row for row in groups[key] if not row.failed]
        errors, bounds = [row.true_error for row in good], [row.certificate for row in good]
        cells = [str(len(groups[key])), str(len(groups[key]) - len(good))]
        cells += [
            number(median(errors)),
            number(worst(errors)),
            number(median(bounds)),
            number(worst(bounds)),
        ]
        cells += [fixed(median(row.ratio for row in good)), fixed(median(row.steps for row in good), 0)]
        cells += [fixed(median(row.matmuls for row in good), 0), fixed(median(row.ms for row in good), 2)]
        lines.append([*key, *cells])
    keep = [i for i in range(len(columns)) if by_n or i != 2]
    return Table(title, [columns[i] for i in keep], [[line[i] for i in keep] for line in lines], on_terminal)


def _status_table(rows: Sequence[Row]) -> Table:
    counts = {
        key: Counter(row.status for row in rows if (row.p, row.dtype, row.method) == key)
        for key in dict.fromkeys((row.p, row.dtype, row.method) for row in rows)
    }
    seen = [status.name for status in Status if any(status.name in count for count in counts.values())]
    lines = [[*key, *(str(count[name]) for name in seen)] for key, count in counts.items()]
    return Table("Statuses, all scalings", ["p", "dtype", "method", *seen], lines)


def _plots(rows: Sequence[Row], scaling: str) -> list[Plot]:
    good = [row for row in rows if not row.failed]
    return [
        _plot(
            "accuracy-condition",
            f"True error against condition number ({scaling} scaling)",
            "Each point is one matrix. An error that grows in proportion to the condition number has slope 1.",
            good,
            lambda row: (row.condition, row.true_error),
            ("condition number of A + εI", "true relative error, 2-norm"),
        ),
        _plot(
            "accuracy-certificate",
            f"Certified against true error ({scaling} scaling)",
            "Each point is one matrix. A certificate is a proven bound, so all points must lie on or above the diagonal;"
            " the distance from it is the price of the proof. Roots whose certificate is not valid are left out.",
            [row for row in good if row.valid],
            lambda row: (row.true_error, row.certificate),
            ("true relative error, 2-norm", "certified relative error"),
            diagonal=True,
        ),
        _plot(
            "accuracy-time",
            f"Time against error, one row of points per size ({scaling} scaling)",
            "Each point is one matrix, at the time per matrix of its batch: one row of points per size. Left and low is"
            " better.",
            good,
            lambda row: (row.true_error, row.ms),
            ("true relative error, 2-norm", "wall time per matrix, ms"),
        ),
    ]


def _plot(
    name: str,
    title: str,
    caption: str,
    rows: Sequence[Row],
    point: Callable[[Row], tuple[float, float]],
    labels: tuple[str, str],
    diagonal: bool = False,
) -> Plot:
    """Scatter the rows: one panel per p and dtype, one colour and marker per method."""
    orders, dtypes = (list(dict.fromkeys(getattr(row, key) for row in rows)) for key in ("p", "dtype"))
    figure, panels = grid(max(1, len(orders)), max(1, len(dtypes)), title)
    for i, p in enumerate(orders):
        for j, dtype in enumerate(dtypes):
            axes = panels[i][j]
            here = [row for row in rows if (row.p, row.dtype) == (p, dtype)]
            _scatter(axes, here, point)
            if diagonal:
                ends = span(point(row)[0] for row in here)
                axes.plot(ends, ends, color="0.4", linewidth=1, label="certificate = true error")
            name_axes(axes, *labels, f"p = {p}, {dtype}")
    legend(figure, 5)
    return Plot(name, caption, figure)


def _scatter(axes: Axes, rows: Sequence[Row], point: Callable[[Row], tuple[float, float]]) -> None:
    points = {method: [point(r) for r in rows if r.method == method] for method in METHOD_COLOURS}
    for method, pairs in points.items():
        if pairs:
            scatter(axes, [x for x, _ in pairs], [y for _, y in pairs], method, method, alpha=0.7)
    axes.set_xscale("log")
    axes.set_yscale("log")
    everything = [pair for pairs in points.values() for pair in pairs]
    axes.set_xlim(*span(x for x, _ in everything))
    axes.set_ylim(*span(y for _, y in everything))
