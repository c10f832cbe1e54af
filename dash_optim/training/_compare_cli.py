"""``python -m dash_optim compare``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from dash_optim.training import _arguments
from dash_optim.training.compare import comparison
from dash_optim.training.loop import Outcome
from dash_optim.training.runs import folder_name, run_all
from dash_optim.training.settings import Job
from matroots._command import unique
from matroots.studies._report import circumstances, say, show, write

DEFAULTS = ("adamw", "dash", "{type: dash, training.steps: 120}")


def main(argv: Sequence[str]) -> int:
    """Run the command with the arguments that follow its name; return its exit code, see :func:`dash_optim.training._arguments.guarded`."""
    return _arguments.guarded(lambda: _main(argv), "what was finished is kept; the same command goes on")


def _main(argv: Sequence[str]) -> None:
    parser = _arguments.parser(
        "compare",
        "Train the same model on the same data with several optimizers, and compare.",
        "dash-compare",
    )
    _arguments.add_many(parser, DEFAULTS)
    options = parser.parse_args(argv)
    named = _arguments.contestants(options.optimizers, _arguments.mapping_of(options))
    jobs: dict[str, Job] = {}
    owner: dict[str, str] = {}
    for name, job in named.items():
        for seed in unique(options.seeds):
            one = job.with_values(training={"seed": seed})
            folder = folder_name(one) + (f"-steps{one.training.steps}" if "steps=" in name else "")
            jobs[folder], owner[folder] = one, name
    outcomes = run_all(jobs, options.out, workers=options.workers)
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for folder, outcome in outcomes.items():
        groups[owner[folder]].append(outcome)
    model = next(iter(outcomes.values()))
    report = comparison(groups, f"Optimizers on a model of {model.parameters / 1e6:.2g}M parameters")
    origin = circumstances(
        _arguments.command_line("compare", argv), options.seeds[0], torch.get_num_threads()
    )
    paths = write(report, options.out, origin)
    show(report)
    say(f"Wrote {len(paths)} files, see {paths[-1]}")
