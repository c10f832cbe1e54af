# SPDX-License-Identifier: Apache-2.0
"""``python -m dash_optim study``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dash_optim.studies import better, blocks, compress, filters, grafting, staleness
from dash_optim.studies._arms import Settings
from dash_optim.training import _arguments
from dash_optim.training.launch import refuse_ranks
from dash_optim.training.settings import read_job
from matroots import _command
from matroots._command import InputError, unique
from matroots.studies._report import Report

STUDIES: dict[str, Callable[[Settings], Report]] = {
    "better": better.run,
    "filters": filters.run,
    "staleness": staleness.run,
    "blocks": blocks.run,
    "grafting": grafting.run,
    "compress": compress.run,
}


def main(argv: Sequence[str]) -> int:
    """Run the command with the arguments that follow its name; return its exit code, see :func:`dash_optim.training._arguments.guarded`."""
    return _arguments.guarded(lambda: _main(argv), _arguments.KEPT)


def _main(argv: Sequence[str]) -> None:
    refuse_ranks("study")
    parser = _arguments.parser(
        "study",
        f"Train many small models and answer a question about the optimizer. Studies: {', '.join(STUDIES)}; without a name all of them.",
        "dash-study",
    )
    parser.add_argument(
        "--seeds",
        type=_command.seed,
        nargs="+",
        help="of weights and data (default: 0 1 2; 0 with --quick)",
    )
    parser.add_argument(
        "--workers", type=_command.count, default=1, help="runs at a time, with one thread each"
    )
    parser.add_argument("--quick", action="store_true", help="a toy model and twelve steps: does it run?")
    options = parser.parse_intermixed_args(argv)
    for text in options.settings:
        if text not in STUDIES and "=" not in text and not text.endswith((".yaml", ".yml")):
            raise InputError(
                f"expected a study ({', '.join(STUDIES)}), section.key=value or a YAML file, got {text!r}"
            )
    names = unique([text for text in options.settings if text in STUDIES]) or tuple(STUDIES)
    options.settings = [text for text in options.settings if text not in STUDIES]
    options.seeds = unique(options.seeds or ((0,) if options.quick else (0, 1, 2)))
    base = _arguments.mapping_of(options)
    job = read_job(base)
    if "seed" in (base.get("training") or {}):
        raise InputError("training.seed: studies take several, by --seeds")
    settings = Settings(options.out, base, options.seeds, options.workers, options.quick)
    for name in names:
        _arguments.deliver(STUDIES[name](settings), options, argv, job)
