# SPDX-License-Identifier: Apache-2.0
"""What an optimizer can say about itself: the state of every block, and which way each parameter takes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dash_optim.blocks import Geometry
from dash_optim.names import label
from dash_optim.stacks import FIELD, Sides, Stack
from dash_optim.stale import fraction_of
from dash_optim.update import correction
from matroots import Status, certify, lambda_bound
from matroots._bounded import norm_from_below
from matroots._products import symmetric_part

_TOLERATED = (0.8, 1.2)
_ROWS_SHOWN = 40


@dataclass(frozen=True)
class FactorReport:
    """One factor of a block.

    Attributes:
        dim: dimension of the view that it belongs to.
        size: n of ``(n, n)``.
        status: how the last solve ended.
        certified_error: bound on the relative error (2-norm) of the root in use against the factor as it is now; NaN where none was computed, inf where none
            could be proven.
        condition: estimate of the condition number of the damped factor that the root belongs to; NaN before the first refresh.
        staleness: steps since the root was computed; NaN if never.
        refreshes, skipped, failures: roots computed, refreshes that a certificate made unnecessary, and solves that failed, in all.
    """

    dim: int
    size: int
    status: Status
    certified_error: float
    condition: float
    staleness: float
    refreshes: int
    skipped: int
    failures: int


@dataclass(frozen=True)
class BlockReport:
    """One block of a parameter; ``grafting`` is ``||D|| / ||U||`` in the last step, NaN where nothing was grafted."""

    parameter: str
    block: int
    shape: tuple[int, ...]
    grafting: float
    factors: list[FactorReport]

    @property
    def relative_grafting(self) -> float:
        """``grafting`` over the square root of the longest side: near 1 for fresh roots with p = 4, whatever the block (docs/troubleshooting.md).

        Adam's first step has the norm ``sqrt(m n)``, and ``L^{-1/4} G R^{-1/4}`` of one gradient of rank r the norm ``sqrt(r)``, at any scale of G.
        """
        return self.grafting / math.sqrt(max(self.shape))


@dataclass(frozen=True)
class Diagnostics:
    """What :meth:`DASH.diagnostics` returns; prints as a table."""

    blocks: list[BlockReport] = field(default_factory=list)
    skipped_steps: int = 0

    @property
    def outside(self) -> int:
        """How many grafting coefficients lie outside 0.8 to 1.2."""
        low, high = _TOLERATED
        return sum(block.grafting < low or block.grafting > high for block in self.blocks)

    def scalars(self, *, by_parameter: bool = False) -> dict[str, float]:
        """Return a few numbers about all blocks, to be logged wherever numbers are logged.

        Args:
            by_parameter: also ``grafting/NAME``, the median grafting coefficient of the blocks of each parameter.
        """
        factors = [factor for block in self.blocks for factor in block.factors]
        grafting = [block.grafting for block in self.blocks if block.grafting == block.grafting]
        relative = [block.relative_grafting for block in self.blocks if block.grafting == block.grafting]
        errors = [f.certified_error for f in factors if f.certified_error == f.certified_error]
        ages = [f.staleness for f in factors if f.staleness == f.staleness]
        numbers = {
            "blocks": len(self.blocks),
            "refreshes": sum(f.refreshes for f in factors),
            "skipped_refreshes": sum(f.skipped for f in factors),
            "failures": sum(f.failures for f in factors),
            "not_converged": sum(f.status != Status.CONVERGED for f in factors),
            "largest_certified_error": max(errors, default=float("nan")),
            "largest_condition": max((f.condition for f in factors), default=float("nan")),
            "largest_staleness": max(ages, default=float("nan")),
            "grafting_outside": self.outside,
            "grafting_median": _median(grafting),
            "grafting_relative_median": _median(relative),
            "skipped_steps": self.skipped_steps,
        }
        found = {f"dash/{name}": float(value) for name, value in numbers.items()}
        return found | (self._grafting_by_parameter() if by_parameter else {})

    def _grafting_by_parameter(self) -> dict[str, float]:
        """Return the median coefficient of each parameter's blocks; NaN where nothing was grafted."""
        coefficients: dict[str, list[float]] = {}
        for block in self.blocks:
            coefficients.setdefault(block.parameter, []).append(block.grafting)
        return {f"grafting/{name}": statistics.median(values) for name, values in coefficients.items()}

    def __str__(self) -> str:
        """Return one line for each factor, as far as they fit, and a summary."""
        lines = [
            f"{'parameter':<32} {'block':>5} {'dim':>3} {'n':>5}  {'status':<10} {'error':>8} {'condition':>9} {'age':>4} {'done':>5}"
            f" {'skipped':>7} {'failed':>6} {'s':>7}"
        ]
        rows = [(block, factor) for block in self.blocks for factor in block.factors]
        lines += [
            f"{b.parameter[-32:]:<32} {b.block:>5} {f.dim:>3} {f.size:>5}  {f.status.name[:10]:<10} {f.certified_error:>8.1e}"
            f" {f.condition:>9.1e} {f.staleness:>4.0f} {f.refreshes:>5} {f.skipped:>7} {f.failures:>6} {b.grafting:>7.3f}"
            for b, f in rows[:_ROWS_SHOWN]
        ]
        if len(rows) > _ROWS_SHOWN:
            lines.append(f"... {len(rows) - _ROWS_SHOWN} more")
        relative = _median([b.relative_grafting for b in self.blocks if b.grafting == b.grafting])
        lines.append(
            f"{len(self.blocks)} blocks, {self.outside} grafting coefficients s outside {_TOLERATED[0]}-{_TOLERATED[1]}, median of s /"
            f" sqrt(longest side) {relative:.3f}, {self.skipped_steps} steps skipped for NaN or infinity"
        )
        return "\n".join(lines)


def _median(values: Sequence[float]) -> float:
    """Return the upper median; NaN of nothing."""
    return sorted(values)[len(values) // 2] if values else math.nan


def diagnose(
    stacks: Sequence[Stack], state: Mapping[Tensor, dict[str, Any]], skipped_steps: float, *, certify: bool
) -> Diagnostics:
    """Collect the reports of all blocks."""
    reports = []
    for stack in stacks:
        sides = [(side, _factor_columns(stack, side, state, certify)) for side in stack.sides]
        ratio = [float("nan")] * stack.blocks if stack.ratio is None else stack.ratio.tolist()
        for member in stack.members:
            name = label(member.group, member.param)
            for number, block in zip(
                member.blocks.numbers.tolist(), range(member.start, member.stop), strict=True
            ):
                factors = [report for side, columns in sides for report in _reports(side, columns, block)]
                reports.append(BlockReport(name, number, stack.shape, ratio[block], factors))
    return Diagnostics(reports, int(skipped_steps))


def _factor_columns(
    stack: Stack, sides: Sides, state: Mapping[Tensor, dict[str, Any]], wanted: bool
) -> dict[str, list[list[float]]]:
    """Return, for each factor of a stack, the record and what is computed from it."""
    record = sides.record
    steps = torch.stack([state[member.param]["step"] for member in stack.members]).to(record.dtype)
    steps = steps[stack.member_of]
    columns = {name: record[..., i] for name, i in FIELD.items()}
    fresh = columns["refreshed_at"] > 0
    columns["staleness"] = (steps - columns["refreshed_at"]).masked_fill(~fresh, torch.nan)
    columns["condition"] = _condition(stack, sides).masked_fill(~fresh, torch.nan)
    if wanted:
        columns["error"] = _certified_error(stack, sides, steps).masked_fill(~fresh, torch.nan)
    elif stack.recipe.refresh == "certified":
        a = fraction_of(stack.p).numerator
        columns["error"] = torch.maximum(1 - columns["alpha"] ** (1 / a), columns["beta"] ** (1 / a) - 1)
    else:
        columns["error"] = torch.full_like(columns["alpha"], torch.nan)
    return {name: column.tolist() for name, column in columns.items()}


def _condition(stack: Stack, sides: Sides) -> Tensor:
    """Return ``(bound + eps) ||X||^p``, with ``||X||`` from below: an estimate of the damped factor's condition number."""
    F, X, record = (part.flatten(0, 1) for part in (sides.factors, sides.roots, sides.record))
    largest = lambda_bound(F) / record[:, FIELD["correction"]] + record[:, FIELD["damping"]]
    norm = norm_from_below(X.double()).to(largest)
    return (largest * norm ** float(stack.p)).reshape(sides.record.shape[:2])


def _certified_error(stack: Stack, sides: Sides, steps: Tensor) -> Tensor:
    """Certify the roots in use against the factors as they are now.

    Their symmetric part: matrix products are symmetric to rounding only, which in float64 would be asymmetry.
    """
    F, X = sides.factors.flatten(0, 1), sides.roots.flatten(0, 1)
    c = correction(stack.recipe.beta_factors if stack.recipe.bias_correction else 1.0, steps)
    c = c.repeat(len(sides.dims)).clamp_min(torch.finfo(c.dtype).tiny)
    scaled = X.double() * (c ** (-1 / float(stack.p))).double().reshape(-1, 1, 1)
    found = certify(
        symmetric_part(F.double()),
        scaled,
        stack.p,
        damping=stack.recipe.damping * c,
        rel_damping=stack.recipe.rel_damping,
        max_batch=64,
    )
    return found.relative_error.to(c).reshape(sides.record.shape[:2])


def _reports(sides: Sides, columns: dict[str, list[list[float]]], block: int) -> list[FactorReport]:
    """Return the reports of the factors of one size of one block."""
    return [
        FactorReport(
            dim=dim,
            size=sides.size,
            status=Status(int(columns["status"][j][block])),
            certified_error=columns["error"][j][block],
            condition=columns["condition"][j][block],
            staleness=columns["staleness"][j][block],
            refreshes=int(columns["refreshes"][j][block]),
            skipped=int(columns["skipped"][j][block]),
            failures=int(columns["failed"][j][block]),
        )
        for j, dim in enumerate(sides.dims)
    ]


def summarise(
    groups: Sequence[dict[str, Any]],
    stacks: Sequence[Stack],
    state: Mapping[Tensor, dict[str, Any]],
    route: Callable[[dict[str, Any], Tensor], Geometry],
) -> str:
    """Return the way of each parameter, the stacks, and the memory of the state."""
    lines = [f"{'parameter':<40} {'shape':<18} {'way':<8} blocks"]
    totals = {"dash": 0, "adamw": 0, "nothing": 0}
    for group in groups:
        for param in dict.fromkeys(group["params"]):
            seen = route(group, param)
            way = "dash" if seen.classes else "adamw" if param.numel() else "nothing"
            totals[way] += param.numel()
            blocks = " + ".join(
                f"{b.count} of {b.name}" + _unfactored(b.factored, seen) for b in seen.classes
            )
            lines.append(f"{label(group, param)[-40:]:<40} {tuple(param.shape)!s:<18} {way:<8} {blocks}")
    lines.append(", ".join(f"{count:,} elements by {way}" for way, count in totals.items() if count))
    for stack in stacks:
        factors = ", ".join(f"{stack.blocks * len(side.dims)} factors of {side.size}" for side in stack.sides)
        shape = "x".join(map(str, stack.shape))
        lines.append(
            f"stack: {stack.blocks} blocks of {shape} from {len(stack.members)} parameters, {factors}, p = {float(stack.p):g}, {stack.recipe.solver_for(stack.p, stack.device)},"
            f" {stack.dtype}".replace("torch.", "")
        )
    kinds = state_bytes(state)
    memory = ", ".join(f"{kind} {size / 2**20:.1f} MB" for kind, size in kinds.items() if size >= 2**16)
    lines.append(f"state: {sum(kinds.values()) / 2**20:.1f} MB" + (f" ({memory})" if memory else ""))
    return "\n".join(lines)


def state_bytes(state: Mapping[Tensor, dict[str, Any]]) -> dict[str, int]:
    """Return the bytes of a state by what they are for: the name of the tensor up to its first underscore, such as "factor"."""
    kinds: dict[str, int] = {}
    for own in state.values():
        for key, value in own.items():
            if isinstance(value, Tensor):
                kind = key.rpartition(".")[2].partition("_")[0]
                kinds[kind] = kinds.get(kind, 0) + value.numel() * value.element_size()
    return kinds


def _unfactored(factored: tuple[int, ...], seen: Geometry) -> str:
    """Return a remark on the dimensions that are too long for a factor."""
    without = [dim for dim in range(len(seen.view)) if dim not in factored]
    return f" (no factor for dimension {', '.join(map(str, without))})" if without else ""
