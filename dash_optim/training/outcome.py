# SPDX-License-Identifier: Apache-2.0
"""What came of a run, and the file that keeps it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from dash_optim.training.metrics import decoded, encoded
from matroots._command import InputError
from matroots._files import replacement

RESULT: Final = "result.json"
PARTS: Final = ("forward", "backward", "optimizer")
"""The parts of a step that are timed."""


@dataclass(frozen=True)
class Outcome:
    """What came of a run.

    Attributes:
        name: the optimizer with its options.
        seed: of the run.
        parameters: of the model.
        step: the last that was taken; ``steps`` were to be.
        loss: on the held-out text after the last step, in nats per token; NaN if the run diverged or is not finished.
        curve: (step, seconds of training, validation loss) at each look.
        seconds: of training: forward, backward, clipping and optimizer, without validation and checkpoints.
        tokens_per_second: trained on.
        ms: means of forward, backward and optimizer in a step: a median would not see refreshes.
        optimizer_bytes: memory of the optimizer's state, of several ranks on the one that has most.
        roots: computed for each factor and step (DASH only).
        diverged: whether the run was given up: its loss stayed infinite or NaN, or its optimizer refused to go on.
        reason: why it was given up.
        data: the fingerprint of the data.
    """

    name: str
    seed: int
    parameters: int
    step: int
    steps: int
    loss: float
    curve: list[tuple[int, float, float]]
    seconds: float
    tokens_per_second: float
    ms: dict[str, float]
    optimizer_bytes: int
    roots: float | None = None
    diverged: bool = False
    reason: str = ""
    data: str = ""

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to do."""
        return self.diverged or self.step == self.steps

    def write(self, folder: Path) -> None:
        """Write ``result.json``."""
        write_json(folder / RESULT, asdict(self))

    @staticmethod
    def read(folder: Path) -> Outcome | None:
        """Return what a run has left in a folder; None if it has left nothing.

        Raises:
            InputError: if there is a ``result.json`` that no run has written.
        """
        found = read_json(folder / RESULT)
        if found is None:
            return None
        try:
            return Outcome(**{**found, "curve": [tuple(point) for point in found["curve"]]})
        except (KeyError, TypeError) as error:
            raise InputError(f"{folder / RESULT}: expected what a run has left; {error}") from error


def perplexity(loss: float) -> float:
    """Return ``exp(loss)``, per token; infinite where that is no float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file that is there whole or not at all; NaN and infinities as strings."""
    with replacement(path) as stream:
        stream.write(json.dumps(encoded(content), indent=1).encode() + b"\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """Return what :func:`write_json` wrote, None if there is no file; raise :class:`InputError` for something else."""
    try:
        found = decoded(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: expected what a run has left; {error}") from error
    if not isinstance(found, dict):
        raise InputError(f"{path}: expected what a run has left, got a {type(found).__name__}")
    return found
