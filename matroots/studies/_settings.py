# SPDX-License-Identifier: Apache-2.0
"""What a study is asked to do, and the combinations of method, scaling and p that it then runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from matroots._command import InputError
from matroots._exponent import parse_exponent
from matroots.solvers import SOLVERS
from matroots.studies._inputs import a_few

METHODS = tuple(SOLVERS)
SCALING_NAMES = ("multi_power", "power", "frobenius")  # the default scaling first: figures show that one
DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}
NO_SCALING = "-"
QUICK_MATRICES, QUICK_SIZE = 6, 64


@dataclass(frozen=True)
class Settings:
    """The options of the command line, checked."""

    matrices: Mapping[str, Tensor]
    source: str
    out: Path
    p: tuple[float, ...] = (2, 4)
    methods: tuple[str, ...] = METHODS
    scalings: tuple[str, ...] = SCALING_NAMES
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64)
    rel_damping: float = 1e-6
    steps: int = 10
    seed: int = 0
    threads: int = 1
    quick: bool = False

    def reduced(self) -> Settings:
        """Return the settings with a few small matrices in place of all, if ``quick`` says so."""
        if not self.quick:
            return self
        return replace(self, matrices=a_few(self.matrices, QUICK_MATRICES, QUICK_SIZE))


class Case(NamedTuple):
    """One way to compute a root."""

    p: float
    method: str
    scaling: str

    @property
    def scaling_argument(self) -> str | None:
        """The ``scaling`` of :func:`matroots.inv_root_ex`: None for a method that uses none."""
        return None if self.scaling == NO_SCALING else self.scaling


def refusal(method: str, p: float) -> str | None:
    """Return why a method does not take this p, or None if it does."""
    try:
        SOLVERS[method]().check(parse_exponent(p), None, None)
    except ValueError as error:
        return str(error)
    return None


def cases(settings: Settings, study: str, methods: Sequence[str] = METHODS) -> tuple[list[Case], list[str]]:
    """Return the cases to run, and a note for each that the options name but that does not exist.

    Args:
        settings: The options.
        study: Name of the study, for messages.
        methods: The methods that this study is about.

    Raises:
        InputError: if nothing is left to run.
    """
    found, notes = [], []
    for method in settings.methods:
        if method not in methods:
            notes.append(f'Skipped method "{method}": the {study} study is about {", ".join(methods)}.')
            continue
        scalings = settings.scalings if SOLVERS[method]().needs_definite else (NO_SCALING,)
        if scalings == (NO_SCALING,):
            notes.append(f'Method "{method}" uses no scaling: it is run once, whatever --scalings says.')
        for p in settings.p:
            reason = refusal(method, p)
            if reason is None:
                found += [Case(p, method, scaling) for scaling in scalings]
            else:
                notes.append(f'Skipped method "{method}" with p = {p_label(p)}: {reason}.')
    if not found:
        raise InputError(
            f"--methods, --p: nothing is left for the {study} study: expected a method among {', '.join(methods)} that"
            f" takes p, got {', '.join(settings.methods)} with p = {', '.join(map(p_label, settings.p))}"
        )
    return found, notes


def p_label(p: float) -> str:
    """Return p as a user would write it, e.g. ``4``, ``2.5`` or ``8/3``."""
    fraction = Fraction(p).limit_denominator(64)
    short = f"{p:g}"
    return short if float(short) == float(p) or float(fraction) != float(p) else str(fraction)


def dtype_label(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its module."""
    return str(dtype).removeprefix("torch.")
