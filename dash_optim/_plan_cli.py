# SPDX-License-Identifier: Apache-2.0
"""``python -m dash_optim plan``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Final

import numpy as np
import torch

from dash_optim._measure import measured
from dash_optim._shapes import PUBLISHED, optimizer_of
from dash_optim.cluster import ClusterRow, Machine, spread
from dash_optim.dash import DASH
from dash_optim.options import recipe_of
from dash_optim.planning import in_bytes, in_operations
from dash_optim.training import _arguments
from dash_optim.training.model import PRESETS
from dash_optim.training.settings import Job, read_job
from dash_optim.workload import Workload, workload
from matroots._command import InputError, MissingExtraError, Parser, positive, unique

_MOST_RANKS: Final = 2**17
_LARGEST: Final = 1024  # side of the matrices that are measured
_MEASURED: Final = 3  # of the constants, the first
_DTYPES: Final = ("float32", "bfloat16")
_CONSTANTS: Final = {
    "flops_per_s": "of batched products",
    "root_flops_per_s": "of roots",
    "bytes_per_s": "of memory",
    "link_bytes_per_s": "that a rank receives, and sends",
    "latency_s": "of a message, in seconds",
}


def main(argv: Sequence[str]) -> int:
    """Run the command with the arguments that follow its name; return its exit code, see :func:`dash_optim.training._arguments.guarded`."""
    return _arguments.guarded(lambda: _main(argv), "nothing was changed")


def _main(argv: Sequence[str]) -> None:
    options = _parser().parse_intermixed_args(argv)
    job = read_job(_settings([*options.config, *options.settings]))
    device = _device(job, measure=options.measure)
    opt = optimizer_of(job, options.shapes, getattr(torch, options.dtype))
    work = workload(opt.param_groups, device)
    machine = Machine(**{name: getattr(options, name) for name in _CONSTANTS})
    if options.measure:
        machine = _measured(machine, work, opt, device)
    rows = [spread(work, ranks, machine) for ranks in unique(options.world)]
    what = f"{options.shapes or job.model.preset}, {options.dtype}, {job.name}, roots as on {device.type}"
    tables = [head(work, what), counted(rows), estimated(rows, machine, measure=options.measure)]
    sys.stdout.write("\n\n".join("\n".join(lines) for lines in tables) + "\n")


def _parser() -> Parser:
    made = Parser(
        prog=f"{_arguments.WHO} plan",
        description="What DASH keeps, computes and sends on each of several ranks, from shapes alone: nothing is run or allocated. docs/planning.md explains the numbers.",
    )
    made.add_argument(
        "settings",
        nargs="*",
        metavar="FILE.yaml | KEY=VALUE",
        help="settings of a training job, of which model, optimizer and training.device count (block_size=512, max_factor_dim=inf)",
    )
    made.add_argument("--config", nargs=1, default=[], metavar="FILE.yaml", help="settings that come first")
    made.add_argument("--world", nargs="+", type=_ranks, required=True, metavar="N", help="numbers of ranks")
    made.add_argument(
        "--shapes",
        metavar="NAME",
        help=f"model: {', '.join([*PRESETS, *PUBLISHED])}, or a JSON or YAML file of names and shapes (default: the job's)",
    )
    made.add_argument("--dtype", choices=_DTYPES, default=_DTYPES[0], help="of parameters and gradients")
    made.add_argument("--measure", action="store_true", help="measure the first three constants here")
    for field in fields(Machine):
        made.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=positive,
            default=field.default,
            metavar="X",
            help=f"{_CONSTANTS[field.name]} (default: %(default)g)",
        )
    return made


def _ranks(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _MOST_RANKS:
        hint = "; settings come before --world" if "=" in text or text.endswith((".yaml", ".yml")) else ""
        raise argparse.ArgumentTypeError(f"expected an integer from 1 to {_MOST_RANKS}, got {text!r}{hint}")
    return int(text)


def _settings(texts: Sequence[str]) -> dict[str, Any]:
    """Return the settings as a mapping of sections; without any, YAML is not needed."""
    if texts:
        try:
            import yaml  # noqa: F401
        except ImportError as error:
            raise MissingExtraError(
                'settings need yaml, which cannot be imported: install the extra with pip install "matroots[config]"'
            ) from error
    return _arguments.merged_settings(texts)


def _device(job: Job, *, measure: bool) -> torch.device:
    """Return where the optimizer would be: on an accelerator unless the job says otherwise; here, if this machine is measured."""
    if measure:
        return job.training.place()
    try:
        return torch.device("cuda" if job.training.device == "auto" else job.training.device)
    except RuntimeError as error:
        raise InputError(
            f"training.device: expected a device such as cuda or cpu, got {job.training.device!r}"
        ) from error


def _measured(machine: Machine, work: Workload, opt: DASH, device: torch.device) -> Machine:
    """Measure with the solver and size of the largest factors; with the first group's where nothing is preconditioned."""
    found = [
        (blocks.shape[dim], len(blocks.factored), group)
        for (group, _), seen in zip(work.members, work.geometries, strict=True)
        for blocks in seen.classes
        for dim in blocks.factored
    ]
    side, factors, group = max(found, key=lambda one: one[0], default=(_LARGEST, 2, opt.param_groups[0]))
    recipe = recipe_of(group)
    return measured(machine, recipe, recipe.exponent(factors), min(side, _LARGEST), device)


def head(work: Workload, what: str) -> list[str]:
    """Return what a workload is, a line for each thing."""
    blocks, elements = work.blocks, np.array([item.elements for item in work.items], dtype=np.int64)
    mine, all_of = int(elements[blocks].sum()), int(elements.sum())
    state = work.state
    step, refresh, often = (
        in_operations(float(work.each(name).sum())) for name in ("step", "refresh", "often")
    )
    kinds = ", ".join(f"{name} {in_bytes(size)}" for name, size in state.items())
    lines = [
        what,
        f"parameters  {all_of:,} in {len(work.members)} tensors",
        f"blocks      {blocks.sum():,} of {mine:,} elements; AdamW {all_of - mine:,} elements in {(~blocks).sum():,} slices",
        f"state       {in_bytes(sum(state.values()))}: {kinds}",
        f"operations  {step} a step, {refresh} for all roots, {often} for roots in a step on average",
    ]
    if work.partly or work.wholly:
        none = f", and {work.wholly} of them no other, so that AdamW updates them" if work.wholly else ""
        lines.append(
            f"Note: {work.partly + work.wholly} parameters have sides above max_factor_dim, which get no factor{none}; max_factor_dim=inf gives all sides one"
        )
    return lines


def counted(rows: Sequence[ClusterRow]) -> list[str]:
    """Return the table of what is known from shapes."""
    cells = [
        [
            str(row.ranks),
            str(row.blocks),
            in_operations(row.operations),
            f"{row.imbalance:.4f}",
            f"{row.attainable:.4f}",
            in_bytes(row.state),
            in_bytes(row.state_mean),
            str(row.runs),
            in_bytes(row.gathered),
            in_bytes(row.moved),
        ]
        for row in rows
    ]
    return [
        "Counted, on the rank that has most:",
        *_table(
            [
                "ranks",
                "blocks",
                "operations",
                "imbalance",
                "attainable",
                "state",
                "mean",
                "runs",
                "gathered",
                "moved",
            ],
            cells,
        ),
    ]


def estimated(rows: Sequence[ClusterRow], machine: Machine, *, measure: bool) -> list[str]:
    """Return the table of what follows from the constants of a machine, and those."""
    cells = []
    for row in rows:
        compute = (row.plain_s, row.refresh_s, row.mean_s)
        times = [*compute, row.gather_s, row.mean_s + row.gather_s, row.move_s, row.mean_s + row.move_s]
        cells.append([str(row.ranks), *map(_time, times)])
    origin = ["measured here" if measure and i < _MEASURED else "assumed" for i in range(len(_CONSTANTS))]
    constants = [
        f"  {field.name} {getattr(machine, field.name):.3g} ({origin[i]})"
        for i, field in enumerate(fields(machine))
    ]
    return [
        "Estimated, on the slowest rank: computing without roots, with all of them, on average; then with replicated and with sharded parameters:",
        *_table(["ranks", "plain", "refresh", "mean", "gather", "replicated", "move", "sharded"], cells),
        "from",
        *constants,
    ]


def _table(heads: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    """Return aligned lines."""
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in (heads, *cells)
    ]


def _time(seconds: float) -> str:
    """Return seconds in the unit that suits them."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"
