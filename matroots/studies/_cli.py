"""The command line of the studies: ``python -m matroots study``."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import NoReturn, TypeVar

import torch

from matroots.studies import accuracy, convergence, scaling, transfer
from matroots.studies._inputs import InputError, check_range, default_matrices, load_matrices
from matroots.studies._report import (
    MissingExtraError,
    check_folder,
    circumstances,
    require_extras,
    say,
    show,
    write,
)
from matroots.studies._settings import DTYPES, METHODS, SCALING_NAMES, Settings, cases

STUDIES = {
    "accuracy": (accuracy.run, METHODS),
    "convergence": (convergence.run, convergence.METHODS),
    "transfer": (transfer.run, transfer.METHODS),
    "scaling": (scaling.run, scaling.METHODS),
}
Item = TypeVar("Item")
INTERRUPTED = 130  # what a shell reports for a process that Ctrl-C ended
DEFAULT_SOURCE = "the recorded Shampoo factors"


class _Parser(argparse.ArgumentParser):
    """Reports a wrong argument as the rest of the command does: in one line, by an exception."""

    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code: 0, 2 for an argument that cannot be used, 130 if interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        options = _parser().parse_args(arguments)
        require_extras()
        settings = _settings(options)
        names = [options.study] if options.study else list(STUDIES)
        check_folder(settings.out)
        for name in names:  # before any work: nothing is written if one of them has nothing to run
            cases(settings, name, STUDIES[name][1])
        _run(names, settings, shlex.join(["python", "-m", "matroots", *arguments]))
    except (InputError, MissingExtraError) as error:
        sys.stderr.write(f"matroots: error: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("matroots: interrupted; the studies that were finished before are kept\n")
        return INTERRUPTED
    return 0


def _run(names: Sequence[str], settings: Settings, command: str) -> None:
    settings = settings.reduced()
    for name in names:
        with _threads(settings.threads):
            report = STUDIES[name][0](settings)
        paths = write(report, settings.out, circumstances(command, settings.seed, settings.threads))
        show(report)
        say(f"Wrote {len(paths)} files, see {paths[-1]}")


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _settings(options: argparse.Namespace) -> Settings:
    path: Path | None = options.input
    matrices = default_matrices() if path is None else load_matrices(path)
    for name in options.dtypes:
        check_range(matrices, DTYPES[name])
    return Settings(
        matrices=matrices,
        source=DEFAULT_SOURCE if path is None else path.name,
        out=options.out,
        p=_unique(options.p),
        methods=_unique(options.methods),
        scalings=_unique(options.scalings),
        dtypes=tuple(DTYPES[name] for name in _unique(options.dtypes)),
        rel_damping=options.rel_damping,
        steps=options.steps,
        seed=options.seed,
        threads=options.threads,
        quick=options.quick,
    )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="matroots", description="Inverse p-th roots of SPD matrices with proven error bounds."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    study = commands.add_parser(
        "study",
        help="measure accuracy, convergence, transfer functions and scalings",
        description="Measure the methods on matrices from a file, or on Shampoo factors recorded from a small language"
        " model, and write CSV, Markdown and plots to a folder. Without the name of a study all four are run.",
        epilog=f"methods: {', '.join(METHODS)}. scalings: {', '.join(SCALING_NAMES)}. dtypes: {', '.join(DTYPES)}.",
    )
    _add_choices(study)
    _add_numbers(study)
    return parser


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
        "--p", type=_exponent, nargs="+", default=[2, 4], help="orders of the root (default: 2 4)"
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
        type=_damping,
        default=1e-6,
        metavar="EPS",
        help="damping relative to the bound on the largest eigenvalue (default: %(default)g; some of the recorded factors"
        " are singular, and at 1e-8 some iterations break down in float32)",
    )
    study.add_argument(
        "--steps", type=_count, default=10, help="steps in the transfer study (default: %(default)s)"
    )
    study.add_argument(
        "--seed", type=_seed, default=0, help="of random vectors and bases (default: %(default)s)"
    )
    study.add_argument(
        "--threads",
        type=_count,
        default=1,
        help="of torch (default: %(default)s, so that times can be compared)",
    )
    study.add_argument(
        "--quick", action="store_true", help="a few small matrices only: seconds instead of minutes"
    )


def _exponent(text: str) -> float:
    try:
        p = Fraction(text)
    except (ValueError, ZeroDivisionError):
        p = Fraction(0)
    if not 1 <= p <= 64 or p.limit_denominator(64) != p or p.numerator > 64:
        raise argparse.ArgumentTypeError(
            f"expected a number >= 1 such as 4, 2.5 or 8/3 (a/b with a, b <= 64), got {text!r}"
        )
    return int(p) if p.denominator == 1 else float(p)


def _damping(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a finite number >= 0, got {text!r}")
    return value


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1000:
        raise argparse.ArgumentTypeError(f"expected an integer from 1 to 1000, got {text!r}")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**63 - 1000:
        raise argparse.ArgumentTypeError(f"expected an integer >= 0, got {text!r}")
    return int(text)


def _unique(values: Sequence[Item]) -> tuple[Item, ...]:
    return tuple(dict.fromkeys(values))
