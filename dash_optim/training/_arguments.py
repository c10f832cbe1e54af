"""The arguments that the commands share: settings from a YAML file and from ``section.key=value``."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dash_optim.training.checkpoint import CheckpointError
from dash_optim.training.settings import Job, override, read_job
from matroots import _command
from matroots._command import InputError, MissingExtraError, Parser
from matroots.studies._report import check_folder, require_extras

WHO = "dash_optim"


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
        "--seeds", type=_command.seed, nargs="+", default=[0], help="of weights and data (default: 0)"
    )
    made.add_argument(
        "--workers",
        type=_command.count,
        default=1,
        help="runs at a time, with one thread each: faster for many small runs, but times cannot be compared",
    )


def guarded(work: Callable[[], object], kept: str) -> int:
    """Do the work and return the exit code, as :func:`matroots._command.guarded` does; a checkpoint or file that cannot be written is the user's to mend."""

    def mended() -> None:
        try:
            work()
        except (CheckpointError, OSError) as error:
            raise InputError(str(error)) from error

    return _command.guarded(mended, kept, WHO)


def command_line(command: str, argv: Sequence[str]) -> str:
    """Return the command as it was typed."""
    return shlex.join(["python", "-m", WHO, command, *argv])


def mapping_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of the command line as one mapping of sections; nothing is started before they and ``--out`` are known to be usable."""
    require_extras("training needs", "train")
    check_folder(options.out)
    merged: dict[str, Any] = {}
    for text in options.settings:
        if text.endswith((".yaml", ".yml")) and "=" not in text:
            merged = _merged(merged, _read(Path(text)))
        else:
            merged = override(merged, [text])
    if options.data:
        merged["data"] = {**(merged.get("data") or {}), "paths": options.data}
    return merged


def contestants(texts: Sequence[str], mapping: Mapping[str, Any]) -> dict[str, Job]:
    """Return a job for each optimizer of the command line, by name; options under ``optimizer`` in the settings hold for all.

    A key with a point belongs to another section: ``{type: dash, training.steps: 120}``.
    """
    import yaml

    found: dict[str, Job] = {}
    for text in texts:
        try:
            options = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise InputError(
                f"--optimizers: expected a type or a YAML mapping such as '{{type: dash, p: 4}}', got {text!r}"
            ) from error
        if isinstance(options, str):
            options = {"type": options}
        if not isinstance(options, Mapping):
            raise InputError(f"--optimizers: expected a type or a YAML mapping, got {text!r}")
        own = {
            f"optimizer.{key}" if "." not in str(key) else str(key): value for key, value in options.items()
        }
        merged = override(
            mapping, [f"{key}={yaml.safe_dump(value, default_flow_style=True)}" for key, value in own.items()]
        )
        job = read_job(merged)
        rest = [
            f"{key.rpartition('.')[2]}={value}"
            for key, value in own.items()
            if not key.startswith("optimizer.")
        ]
        found[", ".join([job.name, *rest])] = job
    return found


def _read(path: Path) -> Mapping[str, Any]:
    from dash_optim.config import read_yaml

    try:
        found = read_yaml(path)
    except ImportError as error:
        raise MissingExtraError(str(error)) from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # yaml's errors are
        raise InputError(f"{path}: {error}") from error
    except Exception as error:
        if type(error).__module__.startswith("yaml"):
            raise InputError(f"{path}: is no YAML: {' '.join(str(error).split())}") from error
        raise
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise InputError(f"{path}: expected a mapping of sections, got {type(found).__name__}")
    return found


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    both = dict(old)
    for key, value in new.items():
        before = both.get(key)
        both[key] = (
            {**before, **value} if isinstance(before, Mapping) and isinstance(value, Mapping) else value
        )
    return both
