# SPDX-License-Identifier: Apache-2.0
"""The arguments that the commands share: settings from a YAML file and from ``section.key=value``."""

from __future__ import annotations

import argparse
import shlex
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dash_optim.config import parse_yaml, read_yaml
from dash_optim.training.checkpoint import CheckpointError
from dash_optim.training.launch import Launch, launched, one_speaks
from dash_optim.training.outcome import Outcome
from dash_optim.training.settings import Job, assign, merge, override, read_job, section_of
from dash_optim.training.stop import handling
from matroots import _command
from matroots._command import InputError, Parser, unique
from matroots.studies._report import Report, check_folder, circumstances, require_extras, say, show, write

WHO = "dash_optim"
KEPT = "what was done is kept, up to the last checkpoint of each run; the same command goes on"
"""What an interrupt leaves behind."""


def parser(command: str, description: str, out: str) -> Parser:
    """Return a parser with the arguments of every job."""
    made = Parser(
        prog=f"{WHO} {command}",
        description=description,
        epilog="Settings: model.*, data.*, optimizer.*, schedule.*, training.*, logging.*; the section may be left out where only one has the key"
        " (steps=100, lr=3e-3). docs/training.md lists them all.",
    )
    made.add_argument(
        "settings", nargs="*", metavar="FILE.yaml | KEY=VALUE", help="settings, the later over the earlier"
    )
    made.add_argument(
        "--data",
        nargs="+",
        metavar="PATH",
        help="text files, folders of them, or flat uint16 token files (default: the English text that ships with Python)",
    )
    made.set_defaults(command=command)
    made.add_argument("--out", type=Path, default=Path(out), metavar="FOLDER", help="default: %(default)s")
    return made


def add_many(made: argparse.ArgumentParser, optimizers: Sequence[str]) -> None:
    """Add the arguments of commands that run many jobs."""
    made.add_argument(
        "--optimizers",
        nargs="+",
        default=list(optimizers),
        metavar="TYPE",
        help="types, or settings such as '{type: dash, p: 4, training.steps: 120}' (default: %(default)s)",
    )
    made.add_argument(
        "--seeds",
        type=_command.seed,
        nargs="+",
        default=(),
        help="of weights and data (default: training.seed)",
    )
    made.add_argument(
        "--workers",
        type=_command.count,
        default=1,
        help="runs at a time, with one thread each: faster for many small runs, but times cannot be compared",
    )


def guarded(work: Callable[[], object], kept: str) -> int:
    """Do the work and return the exit code, as :func:`matroots._command.guarded` does; a checkpoint or file that cannot be written is the user's to mend.

    A termination signal is an interrupt like Ctrl-C, at any moment. Where torchrun has started several processes, one says what went wrong.
    """
    return guarded_ranks(lambda _: work(), kept)


def guarded_ranks(work: Callable[[Launch | None], object], kept: str) -> int:
    """Do the same with work that is told by what this process was started."""

    def mended() -> None:
        launch = launched()
        with one_speaks(launch):
            try:
                with handling(signal.default_int_handler):
                    work(launch)
            except (CheckpointError, OSError) as error:
                raise InputError(str(error)) from error
            except (MemoryError, RuntimeError) as error:
                if not _is_of_memory(error):
                    raise
                said = " ".join(str(error).split()) or "more than there is was asked for"
                raise InputError(
                    f"out of memory: {said}; a smaller training.batch with more training.accumulate, or a smaller model, needs less"
                ) from error

    return _command.guarded(mended, kept, WHO)


def _is_of_memory(error: Exception) -> bool:
    """Whether memory was lacking, which the allocator of CPUs says in a sentence only."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def mapping_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of the command line as one mapping of sections; nothing is started before they and ``--out`` are known to be usable."""
    require_extras("training needs", "train", also=["yaml"])
    check_folder(options.out)
    merged = merged_settings(options.settings)
    return assign(merged, "data.paths", options.data) if options.data else merged


def merged_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Return the settings of YAML files and of ``section.key=value``, the later over the earlier."""
    merged: dict[str, Any] = {}
    for text in texts:
        if text.endswith((".yaml", ".yml")) and "=" not in text:
            merged = merge(merged, _read(Path(text)))
        else:
            merged = override(merged, [text])
    return merged


def contestants(
    texts: Sequence[str], mapping: Mapping[str, Any], varied: tuple[str, Sequence[Any]] | None = None
) -> dict[str, Job]:
    """Return a job for each optimizer of the command line, and each value of a setting that is varied, by label; one that is named twice is there once.

    Args:
        texts: types, or YAML mappings of options; a key with a point belongs to a section: ``{type: dash, training.steps: 120}``.
        mapping: settings by section that hold for all, where a contestant does not say otherwise.
        varied: a key and its values.
    """
    key, values = varied or ("", [None])
    found: dict[str, Job] = {}
    for text in texts:
        options = _contestant(text)
        for value in values:
            label, job = _labelled(mapping, {**options, **({key: value} if key else {})})
            if found.setdefault(label, job) != job:
                raise InputError(
                    f"--optimizers: expected contestants with names that differ, got two {label!r}"
                )
    return found


def _contestant(text: str) -> Mapping[str, Any]:
    """Return what a contestant sets, by key."""
    try:
        options = parse_yaml(text)
    except ValueError:
        options = None
    if isinstance(options, str):
        options = {"type": options}
    if not isinstance(options, Mapping):
        raise InputError(
            f"--optimizers: expected a type or a YAML mapping such as '{{type: dash, p: 4}}', got {text!r}"
        )
    named = {str(key) if "." in str(key) else f"optimizer.{key}": value for key, value in options.items()}
    return dict(sorted(named.items(), key=lambda item: item[0] != "optimizer.type"))  # first: options are its


def _labelled(mapping: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[str, Job]:
    """Return a job with values of its own, and its label: the optimizer with its options, and whatever else is its own."""
    merged = dict(mapping)
    for key, value in own.items():
        merged = assign(merged, key, value)
    job = read_job(merged)
    if job.training.seed != read_job(mapping).training.seed:
        raise InputError("training.seed: is the same for all that are compared, by --seeds")
    rest = [f"{key}={value}" for key, value in own.items() if section_of(key) != "optimizer"]
    return ", ".join([job.name, *rest]), job


def size_of(groups: Mapping[Any, Sequence[Outcome]]) -> str:
    """Return how many parameters the model of a comparison has, from the smallest to the largest, in words."""
    sizes = sorted({outcome.parameters for outcomes in groups.values() for outcome in outcomes})
    return " to ".join(dict.fromkeys(f"{size / 1e6:.2g}M" for size in (sizes[0], sizes[-1])))


def deliver(report: Report, options: argparse.Namespace, argv: Sequence[str], job: Job) -> None:
    """Write a report with what a reader needs to repeat it, and show it; seeds and threads are those of a job where the command line names none."""
    seeds = unique(options.seeds) or (job.training.seed,)
    threads = job.training.threads or (1 if options.workers > 1 else torch.get_num_threads())
    origin = circumstances(shlex.join(["python", "-m", WHO, options.command, *argv]), seeds[0], threads)
    paths = write(report, options.out, {**origin, "seed": " ".join(map(str, seeds))})
    show(report)
    say(f"Wrote {len(paths)} files, see {paths[-1]}")


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found = read_yaml(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"{path}: is no YAML: {error}") from error
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise InputError(f"{path}: expected a mapping of sections, got {type(found).__name__}")
    return found
