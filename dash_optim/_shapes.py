# SPDX-License-Identifier: Apache-2.0
"""Models by name or file, as the parameter groups of a DASH that has no memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from dash_optim.config import from_config, read_yaml
from dash_optim.dash import DASH
from dash_optim.shadows import twins_of
from dash_optim.training.model import PRESETS, Architecture, Llama
from dash_optim.training.optimizers import Optimizers
from dash_optim.training.settings import Job
from matroots._command import InputError, MissingExtraError

PUBLISHED: Final[dict[str, Architecture]] = {
    "7b": Architecture(width=4096, layers=32, heads=32, hidden=11_008, context=4096, vocab=32_000),
    "70b": Architecture(
        width=8192, layers=80, heads=64, kv_heads=8, hidden=28_672, context=8192, vocab=128_256
    ),
    "405b": Architecture(
        width=16_384, layers=126, heads=128, kv_heads=8, hidden=53_248, context=8192, vocab=128_256
    ),
}
"""Llama 2 7B (arXiv:2307.09288), Llama 3 70B and Llama 3.1 405B (arXiv:2407.21783)."""

_FILES: Final = (".json", ".yaml", ".yml")


def optimizer_of(job: Job, shapes: str | None, dtype: torch.dtype) -> DASH:
    """Return the DASH that a job describes, with parameters on the meta device and no state.

    Args:
        job: its ``optimizer``, and its ``model`` unless ``shapes`` names another.
        shapes: a preset, one of `PUBLISHED`, or a JSON or YAML file that maps names to shapes, all of which one group has.
        dtype: of the parameters.

    Raises:
        InputError: for shapes or options that cannot be used.
    """
    kind = job.optimizer["type"]
    if kind != "dash":
        raise InputError(f"optimizer.type: expected dash, which is what is planned, got {kind!r}")
    known = {**PRESETS, **PUBLISHED}
    if shapes is not None and shapes not in known:
        return _of_file(job, shapes, dtype)
    architecture = job.model.architecture(job.data.vocab) if shapes is None else known[shapes]
    with torch.device("meta"):
        model = Llama(architecture).to(dtype)
    found = Optimizers(model, job.optimizer).dash
    if found is None:
        raise InputError(f"optimizer.type: expected dash, got {kind!r}")
    return found


def _of_file(job: Job, shapes: str, dtype: torch.dtype) -> DASH:
    path = Path(shapes)
    if path.suffix not in _FILES:
        raise InputError(
            f"--shapes: expected one of {', '.join([*PRESETS, *PUBLISHED])}, or a file {', '.join(_FILES)} of names and shapes, got {shapes!r}"
        )
    listed = _read(path)
    try:
        groups, _ = twins_of(listed)
        for group in groups:
            group["params"] = [(name, nn.Parameter(twin.to(dtype))) for name, twin in group["params"]]
        found = from_config(groups, job.optimizer)
    except (TypeError, ValueError) as error:
        raise InputError(f"{path}: {' '.join(str(error).split())}") from error
    if not isinstance(found, DASH):
        raise InputError(f"optimizer.type: expected dash, got {job.optimizer['type']!r}")
    return found


def _read(path: Path) -> Mapping[str, Any]:
    """Return the shapes of a file by name."""
    try:
        found = json.loads(path.read_text()) if path.suffix == ".json" else read_yaml(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except ImportError as error:
        raise MissingExtraError(str(error)) from error
    except Exception as error:  # yaml's errors are its own
        raise InputError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(found, Mapping):
        raise InputError(
            f"{path}: expected a mapping of names to shapes, such as {{up: [512, 128]}}, got {type(found).__name__}"
        )
    return {str(name): shape for name, shape in found.items()}
