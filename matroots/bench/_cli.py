# SPDX-License-Identifier: Apache-2.0
"""The command line of the bench: ``python -m matroots bench``."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from matroots._command import InputError, Parser, count, exponent, guarded, positive, real, seed, unique
from matroots._products import HALF_DTYPES
from matroots._threads import torch_threads
from matroots.bench._contestants import METHODS, Contestant, others, ours
from matroots.bench._report import report
from matroots.bench._run import Bench
from matroots.bench._settings import DTYPES, Cell, Settings
from matroots.bench._timing import timer
from matroots.studies._report import check_folder, circumstances, require_extras, say, show, track, write
from matroots.studies._settings import dtype_label

FULL: dict[str, Any] = {
    "n": [32, 64, 128, 256, 512, 1024, 2048],
    "conditions": [1e2, 1e4, 1e6, 1e8],
    "megabytes": 64.0,
    "budget": 60.0,
    "threads": torch.get_num_threads(),
}
QUICK: dict[str, Any] = {"n": [32, 64], "conditions": [1e4], "megabytes": 0.125, "budget": 0.25, "threads": 1}
HALVES = {dtype_label(dtype): dtype for dtype in HALF_DTYPES}


def main(argv: Sequence[str]) -> int:
    """Run the command with the arguments that follow its name; return its exit code, see :func:`guarded`."""
    return guarded(lambda: _main(argv), "the cells that were finished before are kept")


def _main(argv: Sequence[str]) -> None:
    options = _parser().parse_args(argv)
    for name, value in (QUICK if options.quick else FULL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if not options.plain:
        require_extras("the bench needs", "bench")
    settings = _settings(options)
    check_folder(settings.out)
    contestants = ours(settings.methods, settings.matmul_dtypes)
    notes: list[str] = []
    if settings.peers:
        rivals, notes = others()
        contestants += rivals
    with torch_threads(settings.threads):
        _run(settings, contestants, notes, shlex.join(["python", "-m", "matroots", "bench", *argv]))


def _run(settings: Settings, contestants: Sequence[Contestant], notes: Sequence[str], command: str) -> None:
    origin = circumstances(command, settings.seed, settings.threads)
    if settings.device.type == "cuda":
        origin["device"] = f"{torch.cuda.get_device_name(settings.device)}, CUDA {torch.version.cuda}"
    bench, cells = Bench(settings, contestants, timer(settings.device)), list(settings.cells())
    for _ in bench.run(_tracked(cells, settings.plain)):  # what is interrupted leaves what was measured
        write(report(bench, notes, figures=False), settings.out, origin)
    final = report(bench, notes, figures=not settings.plain)
    paths = write(final, settings.out, origin)
    message = f"Wrote {len(paths)} files, see {paths[-1]}"
    if settings.plain:
        sys.stdout.write(f"{final.summary}\n{message}\n")
    else:
        show(final)
        say(message)


def _tracked(cells: Sequence[Cell], plain: bool) -> Iterable[Cell]:
    return cells if plain else track(cells, "bench")


def _settings(options: argparse.Namespace) -> Settings:
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError("--device: expected a device that is there, got 'cuda' where torch sees none")
    return Settings(
        out=options.out,
        n=unique(options.n),
        p=unique(options.p),
        dtypes=tuple(DTYPES[name] for name in unique(options.dtypes)),
        conditions=unique(options.conditions),
        methods=unique(options.methods),
        peers=options.peers,
        matmul_dtypes=tuple(HALVES[name] for name in unique(options.matmul_dtypes)),
        device=device,
        threads=options.threads,
        megabytes=options.megabytes,
        budget=options.budget,
        limit=options.limit,
        members=options.members,
        seed=options.seed,
        plain=options.plain,
    )


def _parser() -> argparse.ArgumentParser:
    bench = Parser(
        prog="matroots bench",
        description="Measure the errors and times of all methods, of other people's routines and of published formulas, on the"
        " same matrices in the same run, and write CSV, Markdown and a figure to a folder.",
        epilog=f"methods: {', '.join(method.name for method in METHODS)}.",
    )
    _add_grid(bench)
    _add_contestants(bench)
    _add_conduct(bench)
    return bench


def _add_grid(bench: argparse.ArgumentParser) -> None:
    def listed(values: Sequence[float]) -> str:
        return " ".join(f"{value:g}" for value in values)

    several: dict[str, Any] = {"nargs": "+"}
    bench.add_argument("--n", type=_size, help=f"sizes (default: {listed(FULL['n'])})", **several)
    bench.add_argument(
        "--p", type=exponent, default=[2, 4], help="orders of the root (default: 2 4)", **several
    )
    bench.add_argument(
        "--dtypes",
        choices=list(DTYPES),
        default=list(DTYPES),
        metavar="DTYPE",
        help=f"of the input (default: {' '.join(DTYPES)})",
        **several,
    )
    bench.add_argument(
        "--conditions",
        type=_condition,
        metavar="C",
        help=f"condition numbers (default: {listed(FULL['conditions'])})",
        **several,
    )
    bench.add_argument(
        "--megabytes", type=positive, metavar="MB", help=f"of a batch (default: {FULL['megabytes']:g})"
    )


def _add_contestants(bench: argparse.ArgumentParser) -> None:
    names = [method.name for method in METHODS]
    bench.add_argument(
        "--methods", choices=names, nargs="+", default=names, metavar="METHOD", help="of ours (default: all)"
    )
    bench.add_argument(
        "--matmul-dtypes",
        choices=list(HALVES),
        nargs="+",
        default=[],
        metavar="DTYPE",
        help=f"also with operands of products rounded to these, {' or '.join(HALVES)}, for float32 input",
    )
    bench.add_argument(
        "--peers",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="with other people's routines and published formulas, or without (default: with)",
    )


def _add_conduct(bench: argparse.ArgumentParser) -> None:
    default = "(default: %(default)s)"
    bench.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help=default)
    bench.add_argument("--threads", type=count, help="of torch (default: as torch chooses; --quick: 1)")
    bench.add_argument(
        "--budget",
        type=positive,
        metavar="SECONDS",
        help="for the repeated runs of a cell; what would take longer in one call is skipped and listed"
        f" (default: {FULL['budget']:g})",
    )
    bench.add_argument(
        "--limit",
        type=positive,
        default=math.inf,
        metavar="SECONDS",
        help="after which no further cell is started (default: none)",
    )
    bench.add_argument(
        "--members", type=count, default=64, help=f"of a batch whose errors are measured, at most {default}"
    )
    bench.add_argument("--seed", type=seed, default=0, help=f"of the matrices {default}")
    bench.add_argument("--out", type=Path, default=Path("matroots-bench"), metavar="FOLDER", help=default)
    bench.add_argument(
        "--plain", action="store_true", help="no figure, no tables on the terminal: needs no other package"
    )
    bench.add_argument("--quick", action="store_true", help="a few small matrices only: seconds")


def _size(text: str) -> int:
    if not text.isdecimal() or not 2 <= int(text) <= 8192:
        raise argparse.ArgumentTypeError(f"expected an integer from 2 to 8192, got {text!r}")
    return int(text)


def _condition(text: str) -> float:
    value = real(text)
    if not 1 < value <= 1e12:
        raise argparse.ArgumentTypeError(f"expected a number above 1 and up to 1e12, got {text!r}")
    return value
