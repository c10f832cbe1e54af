# SPDX-License-Identifier: Apache-2.0
"""``python -m dash_optim compare``."""

from __future__ import annotations

from collections.abc import Sequence

from dash_optim.training import _arguments
from dash_optim.training.compare import comparison
from dash_optim.training.launch import refuse_ranks
from dash_optim.training.runs import by_seed, run_groups
from matroots._command import unique

# the last with the rate that is best for so few steps
DEFAULTS = ("adamw", "dash", "{type: dash, lr: 2e-2, training.steps: 120}")


def main(argv: Sequence[str]) -> int:
    """Run the command with the arguments that follow its name; return its exit code, see :func:`dash_optim.training._arguments.guarded`."""
    return _arguments.guarded(lambda: _main(argv), _arguments.KEPT)


def _main(argv: Sequence[str]) -> None:
    refuse_ranks("compare")
    parser = _arguments.parser(
        "compare",
        "Train the same model on the same data with several optimizers, and compare.",
        "dash-compare",
    )
    _arguments.add_many(parser, DEFAULTS)
    options = parser.parse_intermixed_args(argv)
    named = _arguments.contestants(options.optimizers, _arguments.mapping_of(options))
    groups = run_groups(
        {label: by_seed(label, job, unique(options.seeds)) for label, job in named.items()},
        options.out,
        workers=options.workers,
    )
    report = comparison(groups, f"Optimizers on a model of {_arguments.size_of(groups)} parameters")
    _arguments.deliver(report, options, argv, next(iter(named.values())))
