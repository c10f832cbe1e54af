# SPDX-License-Identifier: Apache-2.0
"""What all ranks have to know before a step: one vector of numbers, of which every rank sees the largest.

Whatever decides about a collective comes from here, never from what one rank alone knows.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor

from dash_optim.gradients import ceiling
from dash_optim.names import parameter_name

Owner = tuple[dict[str, Any], Tensor]
"""A group, and a parameter of it."""

SAME: Final = 1e-3
"""Relative difference of a gradient's norm between ranks above which it is not one gradient: other hardware may round it differently."""

_OPTIONS: Final = ("lr", "weight_decay")  # of each group


@dataclass(frozen=True)
class Notes:
    """What one rank says, or what all together have said.

    Attributes:
        failed: whether something went wrong before the step.
        nonfinite: whether a gradient has a NaN or an infinity.
        holder: of each parameter, ranks minus the number of the first rank that has its gradient; 0 where none has.
        lacking: of each parameter, whether a rank has no gradient of it.
        norms: of each gradient that every rank should have, and with the other sign; minus infinity where it is not to be compared.
        options: learning rate and weight decay of each group, and all with the other sign.
        begun: a sum of the steps that each parameter has behind it, and that with the other sign.
    """

    failed: float
    nonfinite: float
    holder: tuple[float, ...]
    lacking: tuple[float, ...]
    norms: tuple[float, ...]
    options: tuple[float, ...]
    begun: tuple[float, ...]

    @classmethod
    def of_failure(cls, parameters: int, groups: int) -> Notes:
        """Return what a rank says that cannot say more than that it has failed."""
        none, options = (0.0,) * parameters, (0.0,) * (2 * len(_OPTIONS) * groups)
        return cls(1.0, 0.0, none, none, (-math.inf,) * (2 * parameters), options, (0.0, 0.0))

    def packed(self) -> list[float]:
        """Return all numbers in one list."""
        lists = (self.holder, self.lacking, self.norms, self.options, self.begun)
        return [self.failed, self.nonfinite, *chain.from_iterable(lists)]

    def unpacked(self, values: Sequence[float]) -> Notes:
        """Return notes of the same lengths with other numbers."""
        lengths = [len(part) for part in (self.holder, self.lacking, self.norms, self.options, self.begun)]
        parts, start = [], 2
        for length in lengths:
            parts.append(tuple(values[start : start + length]))
            start += length
        return Notes(values[0], values[1], *parts)


def notes_of(
    owners: Sequence[Owner],
    gradients: Sequence[Tensor | None],
    compared: Sequence[bool],
    groups: Sequence[dict[str, Any]],
    steps: Sequence[int],
    rank: int,
    ranks: int,
) -> Notes:
    """Return what a rank has to say: about its gradients, of which those that are ``compared`` should be the same on all ranks, its options, and how many steps it has taken.

    Raises:
        ValueError: for an option that is no finite number.
    """
    norms = _norms(gradients)
    known = [norm is not None for norm in norms]
    bad = any(
        norm is not None and not norm <= ceiling(group, param)
        for norm, (group, param) in zip(norms, owners, strict=True)
    )
    shown = [
        norm if norm is not None and use and not bad else None
        for norm, use in zip(norms, compared, strict=True)
    ]
    options = [_number(name, i, group[name]) for i, group in enumerate(groups) for name in _OPTIONS]
    return Notes(
        failed=0.0,
        nonfinite=float(bad),
        holder=tuple(float(ranks - rank) if there else 0.0 for there in known),
        lacking=tuple(float(not there) for there in known),
        norms=tuple(_signed(shown)),
        options=(*options, *(-value for value in options)),
        begun=sum_of(steps),
    )


def _number(name: str, group: int, value: Any) -> float:
    """Return an option that a scheduler, or anybody, may have set since it was checked."""
    try:
        found = float(value)
    except (TypeError, ValueError, RuntimeError):
        found = math.nan
    if not math.isfinite(found):
        raise ValueError(f"{name}: expected a finite number in group {group}, got {value!r}")
    return found


def sum_of(steps: Sequence[int]) -> tuple[float, float]:
    """Return a sum by which to tell whether each parameter has taken as many steps on all ranks, and that with the other sign."""
    found = float(zlib.crc32(repr(list(steps)).encode()))
    return found, -found


def check_begun(begun: Sequence[float]) -> None:
    """Raise where ranks do not go on from the same step: each of them has only the state of its own blocks."""
    if begun[0] != -begun[1]:
        raise ValueError(
            "state: ranks have taken different numbers of steps; load a checkpoint on all of them, not on one"
        )


def _signed(norms: Sequence[float | None]) -> list[float]:
    """Return each norm, then each with the other sign: the largest of those is the smallest norm."""
    return [sign * norm if norm is not None else -math.inf for sign in (1.0, -1.0) for norm in norms]


def _norms(gradients: Sequence[Tensor | None]) -> list[float | None]:
    """Return the norm of each gradient, taken at least in float32."""
    there = [(i, g) for i, g in enumerate(gradients) if g is not None]
    norms: list[float | None] = [None if g is None else 0.0 for g in gradients]
    for dtype in dict.fromkeys(g.dtype for _, g in there):
        chosen = [(i, g) for i, g in there if g.dtype == dtype and g.numel()]
        if chosen:
            found = torch._foreach_norm(
                [g for _, g in chosen], 2, dtype=torch.promote_types(dtype, torch.float32)
            )
            for (i, _), norm in zip(chosen, torch.stack(found).tolist(), strict=True):
                norms[i] = norm
    return norms


def check_options(notes: Notes) -> None:
    """Raise where ranks have been given different options: their parameters would drift apart."""
    high, low = notes.options[: len(notes.options) // 2], notes.options[len(notes.options) // 2 :]
    for i, (most, least) in enumerate(zip(high, low, strict=True)):
        if most != -least:
            group, which = divmod(i, len(_OPTIONS))
            raise ValueError(
                f"{_OPTIONS[which]}: group {group} has {-least!r} on one rank and {most!r} on another"
            )


def check_norms(notes: Notes, owners: Sequence[Owner]) -> None:
    """Raise where a gradient that every rank should have is not the same on all."""
    high, low = notes.norms[: len(owners)], notes.norms[len(owners) :]
    for (group, param), most, least in zip(owners, high, low, strict=True):
        if most > -math.inf and most + least > SAME * most:
            raise ValueError(
                f"gradient of {parameter_name(group, param)}: its norm is {-least:.6g} on one rank and {most:.6g} on another. Average gradients over the ranks before the step:"
                " DistributedDataParallel does, but not within no_sync()"
            )
