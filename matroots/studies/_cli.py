# SPDX-License-Identifier: Apache-2.0
"""The command line of the studies: ``python -m matroots study``."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from matroots._command import Parser, count, exponent, guarded, nonnegative, seed, unique
from matroots._threads import torch_threads
from matroots.studies import accuracy, convergence, scaling, transfer
from matroots.studies._inputs import check_range, default_matrices, load_matrices
from matroots.studies._report import check_folder, circumstances, require_extras, say, show, write
from matroots.studies._settings import DTYPES, METHODS, SCALING_NAMES, Settings, cases

STUDIES = {
    "accuracy": (accuracy.run, METHODS),
    "convergence": (convergence.run, convergence.METHODS),
    "transfer": (transfer.run, transfer.METHODS),
    "scaling": (scaling.run, scaling.METHODS),
}
DEFAULT_SOURCE = "the recorded Shampoo factors"


def main(argv: Sequence[str]) -> int:
    """Run the command with the arguments that follow its name; return its exit code, see :func:`guarded`."""
    return guarded(lambda: _main(argv), "the studies that were finished before are kept")


def _main(argv: Sequence[str]) -> None:
    options = _parser().parse_args(argv)
    require_extras()
    settings = _settings(options)
    names = [options.study] if options.study else list(STUDIES)
    check_folder(settings.out)
    for name in names:  # before any work: nothing is written if one of them has nothing to run
        cases(settings, name, STUDIES[name][1])
    _run(names, settings, shlex.join(["python", "-m", "matroots", "study", *argv]))


def _run(names: Sequence[str], settings: Settings, command: str) -> None:
    settings = settings.reduced()
    for name in names:
        with torch_threads(settings.threads):
            report = STUDIES[name][0](settings)
        paths = write(report, settings.out, circumstances(command, settings.seed, settings.threads))
        show(report)
        say(f"Wrote {len(paths)} files, see {paths[-1]}")


def _settings(options: argparse.Namespace) -> Settings:
    path: Path | None = options.input
    matrices = default_matrices() if path is None else load_matrices(path)
    for name in options.dtypes:
        check_range(matrices, DTYPES[name])
    return Settings(
        matrices=matrices,
        source=DEFAULT_SOURCE if path is None else path.name,
        out=options.out,
        p=unique(options.p),
        methods=unique(options.methods),
        scalings=unique(options.scalings),
        dtypes=tuple(DTYPES[name] for name in unique(options.dtypes)),
        rel_damping=options.rel_damping,
        steps=options.steps,
        seed=options.seed,
        threads=options.threads,
        quick=options.quick,
    )


def _parser() -> argparse.ArgumentParser:
    study = Parser(
        prog="matroots study",
        description="Measure the methods on matrices from a file, or on Shampoo factors recorded from a small language"
        " model, and write CSV, Markdown and plots to a folder. Without the name of a study all four are run.",
        epilog=f"methods: {', '.join(METHODS)}. scalings: {', '.join(SCALING_NAMES)}. dtypes: {', '.join(DTYPES)}.",
    )
    _add_choices(study)
    _add_numbers(study)
    return study


def _add_choices(study: argparse.ArgumentParser) -> None:
    study.add_argument("study", nargs="?", choices=list(STUDIES), help="which study (default: all)")
    study.add_argument(
        "--input",
        type=Path,
        metavar="FILE",
        help=".npy, .npz or .pt file of symmetric matrices (n, n) or stacks of them",
    )
    study.add_argument(
        "--out", type=Path, default=Path("matroots-study"), metavar="FOLDER", help="default: %(default)s"
    )
    study.add_argument(
        "--p", type=exponent, nargs="+", default=[2, 4], help="orders of the root (default: 2 4)"
    )
    study.add_argument(
        "--methods", choices=METHODS, nargs="+", default=METHODS, metavar="METHOD", help="default: all"
    )
    study.add_argument(
        "--scalings",
        choices=SCALING_NAMES,
        nargs="+",
        default=SCALING_NAMES,
        metavar="SCALING",
        help="default: all",
    )


def _add_numbers(study: argparse.ArgumentParser) -> None:
    study.add_argument(
        "--dtypes",
        choices=list(DTYPES),
        nargs="+",
        default=["float32", "float64"],
        metavar="DTYPE",
        help="the input is rounded to each (default: float32 float64)",
    )
    study.add_argument(
        "--rel-damping",
        type=nonnegative,
        default=1e-6,
        metavar="EPS",
        help="damping relative to the bound on the largest eigenvalue (default: %(default)g; some of the recorded factors"
        " are singular, and at 1e-8 some iterations break down in float32)",
    )
    study.add_argument(
        "--steps", type=count, default=10, help="steps in the transfer study (default: %(default)s)"
    )
    study.add_argument(
        "--seed", type=seed, default=0, help="of random vectors and bases (default: %(default)s)"
    )
    study.add_argument(
        "--threads",
        type=count,
        default=1,
        help="of torch (default: %(default)s, so that times can be compared)",
    )
    study.add_argument(
        "--quick", action="store_true", help="a few small matrices only: seconds instead of minutes"
    )
