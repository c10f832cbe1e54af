"""``python -m dash_optim sweep``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch

from dash_optim.training import _arguments
from dash_optim.training.runs import run_all
from dash_optim.training.sweep import by_point, grid_of, sweep_report
from matroots._command import unique
from matroots.studies._report import circumstances, say, show, write

RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)


def main(argv: Sequence[str]) -> int:
    """Run the command with the arguments that follow its name; return its exit code, see :func:`dash_optim.training._arguments.guarded`."""
    return _arguments.guarded(lambda: _main(argv), "what was finished is kept; the same command goes on")


def _main(argv: Sequence[str]) -> None:
    parser = _arguments.parser(
        "sweep",
        "Train with a grid of learning rates (and values of one more option) and seeds, and compare each optimizer at its own best.",
        "dash-sweep",
    )
    _arguments.add_many(parser, ("adamw", "dash"))
    parser.add_argument("--lrs", type=_rate, nargs="+", default=RATES, help="default: %(default)s")
    parser.add_argument(
        "--vary", type=_varied, metavar="OPTION=A,B,...", help="an option of the optimizer, e.g. p=2,4"
    )
    options = parser.parse_args(argv)
    named = _arguments.contestants(options.optimizers, _arguments.mapping_of(options))
    jobs = grid_of(list(named.values()), unique(options.lrs), unique(options.seeds), options.vary)
    outcomes = run_all(jobs, options.out, workers=options.workers, quiet=True)
    model = next(iter(outcomes.values()))
    report = sweep_report(
        by_point(jobs, outcomes), f"Learning rates on a model of {model.parameters / 1e6:.2g}M parameters"
    )
    origin = circumstances(_arguments.command_line("sweep", argv), options.seeds[0], torch.get_num_threads())
    paths = write(report, options.out, origin)
    show(report)
    say(f"Wrote {len(paths)} files, see {paths[-1]}")


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a finite number > 0, got {text!r}")
    return value


def _varied(text: str) -> tuple[str, list[Any]]:
    import yaml

    name, sign, values = text.partition("=")
    if not sign or not name or not values:
        raise argparse.ArgumentTypeError(f"expected OPTION=A,B,... such as p=2,4, got {text!r}")
    return name, [yaml.safe_load(value) for value in values.split(",")]
