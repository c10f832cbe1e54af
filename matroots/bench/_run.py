# SPDX-License-Identifier: Apache-2.0
"""The measurement: in each cell every contestant's error, then everyone's time in turn, in units of one ``torch.bmm``."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from matroots import InvRoot, Status, certify
from matroots._products import full_precision
from matroots.bench._contestants import Contestant
from matroots.bench._matrices import Truth, matrices, orthogonal, relative_errors
from matroots.bench._settings import Cell, Settings
from matroots.bench._timing import Run, Spread, Timer, interleave, plan, spread
from matroots.studies._report import median, worst
from matroots.studies._settings import dtype_label, p_label

UNIT, CERTIFICATE = (
    "one torch.bmm",
    "one certificate",
)  # run among the contestants, none of which is called so
_WARM_AGAIN = 1.0  # seconds: a first call loads libraries and plans; a second one, where it is affordable, tells the time
_FEWEST_UNITS = 5
_WORKSPACE = 24  # times the batch: fp64 copies, eigenvectors, and a few iterates


@dataclass(frozen=True)
class Row:
    """One contestant in one cell. Errors are relative, in the 2-norm, over ``measured`` members; times are of the whole batch.

    ``units`` are those of ``bmm_ms``. ``ms_low`` and ``ms_high`` are quartiles of so many ``repeats``; 0 repeats: the first call only.
    ``run_on`` members were really run; if fewer than ``batch``, times are multiplied up. ``failed`` counts those without a
    root. Where nothing is known of the error, no time is given.
    """

    dtype: str
    p: str
    n: int
    condition: float
    batch: int
    method: str
    kind: str
    error_max: float
    error_median: float
    measured: int
    failed: int
    ms: float
    ms_low: float
    ms_high: float
    units: float
    repeats: int
    run_on: int
    bmm_ms: float
    certificate_ms: float
    products: int | None

    def reaches(self, error: float) -> bool:
        """Whether every member has a root, and none that was measured is further off than that."""
        return self.failed == 0 and self.error_max <= error


@dataclass(frozen=True)
class Skip:
    """A contestant (or "everyone") that was not timed in a cell, and why."""

    cell: Cell
    method: str
    reason: str


@dataclass(frozen=True)
class Entry:
    """A contestant that has returned something: the run to time, seconds of the first one, and what came out."""

    contestant: Contestant
    run: Run
    first: float
    errors: Tensor
    failed: int
    run_on: int
    products: int | None


@dataclass
class Pace:
    """How long a member has taken, for a guess of how long one of another size will: ``n^3`` times as long."""

    known: dict[tuple[str, torch.dtype, float], tuple[int, float]] = field(default_factory=dict)

    def note(self, name: str, cell: Cell, per_member: float) -> None:
        """Keep the seconds that a member took."""
        self.known[name, cell.dtype, cell.p] = cell.n, per_member

    def guess(self, name: str, cell: Cell) -> float:
        """Return the seconds that a member will take, 0 where nothing is known."""
        n, per_member = self.known.get((name, cell.dtype, cell.p), (cell.n, 0.0))
        return per_member * (cell.n / n) ** 3


@dataclass
class Bench:
    """The bench while it runs: who takes part, the clock, and what has been measured and left out so far."""

    settings: Settings
    contestants: Sequence[Contestant]
    clock: Timer
    rows: list[Row] = field(default_factory=list)
    skips: list[Skip] = field(default_factory=list)
    pace: Pace = field(default_factory=Pace)
    _given: tuple[Cell, Tensor, Truth] | None = None

    def run(self, cells: Iterable[Cell]) -> Iterator[Cell]:
        """Measure cell after cell; yield each when it is done."""
        devices = [self.settings.device] if self.settings.device.type == "cuda" else []
        started = time.monotonic()
        for cell in cells:
            reason = _shortage(cell, self.settings)
            if time.monotonic() - started > self.settings.limit:
                reason = f"time: the limit of {self.settings.limit:g} s was reached"
            if not reason:
                with full_precision(self.settings.device), torch.random.fork_rng(devices):
                    torch.manual_seed(self.settings.seed)
                    reason = self._measure(cell)
            if reason:
                self.skips.append(Skip(cell, "everyone", reason))
            yield cell

    def _input(self, cell: Cell) -> tuple[Tensor, Truth]:
        """Return the batch and the truth about it; those of the cell before, if only p is another."""
        key = cell._replace(p=0)
        if self._given is None or self._given[0] != key:
            self._given = None  # frees the memory before the next batch is made
            Q = orthogonal(self.settings.batch(cell), cell.n, self.settings.seed).to(self.settings.device)
            self._given = key, *matrices(Q, cell.condition, cell.dtype, self.settings.members)
        return self._given[1:]

    def _measure(self, cell: Cell) -> str:
        """Add everyone's row of a cell; return why there can be none, or ""."""
        A, truth = self._input(cell)
        if not truth.definite:
            return "rounded to this dtype, some matrices are no longer positive definite"
        B, product = A / 2, torch.empty_like(A)
        runs: dict[str, Run] = {UNIT: lambda: torch.bmm(A, B, out=product)}
        first = {UNIT: self._warm(runs[UNIT])}
        entries = self._enter_all(cell, A, truth.inverse_root(cell.p), first[UNIT] / len(A))
        runs |= {entry.contestant.name: entry.run for entry in entries}
        first |= {entry.contestant.name: entry.first for entry in entries}
        if certificate := self._certificate(cell, A, entries):
            runs[CERTIFICATE], first[CERTIFICATE] = certificate, self._warm(certificate)
        counts = plan(first, self.settings.budget)
        counts[UNIT] = max(_FEWEST_UNITS, *counts.values())  # all others are measured in it
        times = interleave(runs, counts, self.clock, self.settings.seed)
        spreads = {name: spread(times[name], first[name]) for name in runs}
        run_on = {entry.contestant.name: entry.run_on for entry in entries}
        for name, found in spreads.items():
            self.pace.note(name, cell, found.median / run_on.get(name, len(A)))
        self.rows += [_row(cell, len(A), entry, spreads) for entry in entries]
        return ""

    def _enter_all(self, cell: Cell, A: Tensor, R: Tensor, unit: float) -> list[Entry]:
        """Let everyone try who can; R is the truth about the first members, ``unit`` the seconds of one product of a member."""
        entries = []
        for one in self.contestants:
            if cell.dtype not in one.dtypes:
                continue
            members = min(len(A), one.members or len(A))
            expected = members * (self.pace.guess(one.name, cell) or one.units * unit)
            entry: Entry | str = self._too_long(expected)
            if A.device.type not in one.devices:
                entry = f"does not run on {A.device.type}"
            entry = entry or self._enter(one, cell, A[:members], R[:members])
            if isinstance(entry, Entry):
                entries.append(entry)
            else:
                self.skips.append(Skip(cell, one.name, entry))
        return entries

    def _enter(self, one: Contestant, cell: Cell, A: Tensor, R: Tensor) -> Entry | str:
        """Call a contestant for the first time; return what came out, or what it says against it."""

        def call() -> Tensor | InvRoot:
            return one.call(A, cell.p, cell.condition)

        results: list[Tensor | InvRoot] = []
        try:
            first = self._warm(lambda: results.append(call()))
            result = results[-1]
            X = result if isinstance(result, Tensor) else result.root
            if X.shape != A.shape:
                return f"returned a tensor {tuple(X.shape)}, expected {tuple(A.shape)}"
            lost = ~torch.isfinite(X).flatten(1).all(-1)
            errors = relative_errors(X[: len(R)], R)
        except Exception as error:  # whatever a routine does wrong is a result, not the end of the bench
            return f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"
        products = None
        if not isinstance(result, Tensor):
            lost |= result.status >= int(Status.DIVERGED)
            products = int(result.matmuls.max())
        return Entry(one, call, first, errors.cpu(), int(lost.sum()), len(A), products)

    def _certificate(self, cell: Cell, A: Tensor, entries: Sequence[Entry]) -> Run | None:
        """Return the certification of one of this package's roots: its cost hardly depends on whose root it is."""
        ours = [one for one in entries if one.contestant.kind == "ours" and one.failed == 0]
        if not ours:
            return None
        if reason := self._too_long(len(A) * self.pace.guess(CERTIFICATE, cell)):
            self.skips.append(Skip(cell, CERTIFICATE, reason))
            return None
        result = ours[0].contestant.call(A, cell.p, cell.condition)
        X = result if isinstance(result, Tensor) else result.root
        return lambda: certify(A, X, cell.p)

    def _too_long(self, expected: float) -> str:
        if expected <= self.settings.budget:
            return ""
        budget = self.settings.budget
        return f"time: one call is expected to take {expected:.1f} s, a cell has a budget of {budget:g} s"

    def _warm(self, run: Run) -> float:
        """Return the seconds of a first run, or of the second where the first is short."""
        first = self.clock(run)
        return first if first > _WARM_AGAIN else self.clock(run)


def available_memory(device: torch.device) -> float:
    """Return the free bytes of a device; infinite where the system does not tell."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    described = Path("/proc/meminfo")  # Linux
    if described.is_file():
        for line in described.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024.0 * int(line.split()[1])
    return math.inf


def _shortage(cell: Cell, settings: Settings) -> str:
    needed = _WORKSPACE * settings.batch(cell) * cell.n**2 * cell.dtype.itemsize
    available = available_memory(settings.device)
    if needed <= available:
        return ""
    return f"memory: needs about {needed / 2**30:.1f} GiB, {available / 2**30:.1f} GiB are free"


def _row(cell: Cell, batch: int, entry: Entry, spreads: dict[str, Spread]) -> Row:
    errors = entry.errors[torch.isfinite(entry.errors)].tolist()
    # no time without an error beside it
    ms = 1e3 * batch / entry.run_on if errors else math.nan
    times, unit = spreads[entry.contestant.name], 1e3 * spreads[UNIT].median
    certificate = 1e3 * spreads[CERTIFICATE].median if CERTIFICATE in spreads else math.nan
    return Row(
        dtype=dtype_label(cell.dtype),
        p=p_label(cell.p),
        n=cell.n,
        condition=cell.condition,
        batch=batch,
        method=entry.contestant.name,
        kind=entry.contestant.kind,
        error_max=worst(errors),
        error_median=median(errors),
        measured=len(errors),
        failed=entry.failed,
        ms=ms * times.median,
        ms_low=ms * times.low,
        ms_high=ms * times.high,
        units=ms * times.median / unit,
        repeats=times.repeats,
        run_on=entry.run_on,
        bmm_ms=unit,
        certificate_ms=certificate if entry.contestant.kind == "ours" else math.nan,
        products=entry.products,
    )
