# SPDX-License-Identifier: Apache-2.0
"""``python -m dash_optim sweep``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from dash_optim.config import parse_yaml
from dash_optim.training import _arguments
from dash_optim.training.launch import refuse_ranks
from dash_optim.training.runs import run_groups
from dash_optim.training.sweep import grid_of, sweep_report
from matroots._command import InputError, unique

RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)


def main(argv: Sequence[str]) -> int:
    """Run the command with the arguments that follow its name; return its exit code, see :func:`dash_optim.training._arguments.guarded`."""
    return _arguments.guarded(lambda: _main(argv), _arguments.KEPT)


def _main(argv: Sequence[str]) -> None:
    refuse_ranks("sweep")
    parser = _arguments.parser(
        "sweep",
        "Train with a grid of learning rates (and values of one more setting) and seeds, and compare each optimizer at its own best.",
        "dash-sweep",
    )
    _arguments.add_many(parser, ("adamw", "dash"))
    parser.add_argument("--lrs", type=_rate, nargs="+", default=RATES, help="default: %(default)s")
    parser.add_argument(
        "--vary", type=_varied, metavar="KEY=A,B,...", help="another setting and its values, e.g. p=2,4"
    )
    options = parser.parse_intermixed_args(argv)
    named = _arguments.contestants(options.optimizers, _arguments.mapping_of(options), options.vary)
    for job in named.values():
        if "lr" in job.optimizer:
            raise InputError(f"optimizer.lr: is what a sweep varies, by --lrs; got {job.optimizer['lr']!r}")
    points = run_groups(
        grid_of(named, unique(options.lrs), unique(options.seeds)),
        options.out,
        workers=options.workers,
        quiet=True,
    )
    report = sweep_report(points, f"Learning rates on a model of {_arguments.size_of(points)} parameters")
    _arguments.deliver(report, options, argv, next(iter(named.values())))


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a finite number > 0, got {text!r}")
    return value


def _varied(text: str) -> tuple[str, list[Any]]:
    name, _, values = text.partition("=")
    try:
        listed = parse_yaml(f"[{values}]")
    except ValueError:
        listed = None
    if not name or not listed:
        raise argparse.ArgumentTypeError(f"expected KEY=A,B,... such as p=2,4, got {text!r}")
    return name, listed
