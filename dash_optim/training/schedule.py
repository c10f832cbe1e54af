# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedules: what the peak rate is multiplied by in each step."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

Kind = Literal["cosine", "wsd", "constant"]
KINDS: Final = get_args(Kind)


@dataclass(frozen=True)
class Schedule:
    """Warm-up, then one of three ways on.

    Attributes:
        type: "cosine" falls along half a cosine to ``final``; "wsd" (warm-up, stable, decay) stays at 1 and falls linearly to ``final`` over the
            last ``decay`` of all steps, not at all if that is none; "constant" stays at 1.
        warmup: steps over which the rate rises linearly from 0; the step after them is the first at the peak. A fraction below 1 is that share of all steps.
            None: what suits the optimizer (:data:`dash_optim.training.optimizers.WARMUP`), put in by :meth:`suited`.
        final: the last step's multiple of the peak.
        decay: the share of all steps over which "wsd" falls.
    """

    type: Kind = "cosine"
    warmup: float | None = None
    final: float = 0.1
    decay: float = 0.2

    def __post_init__(self) -> None:
        if self.type not in KINDS:
            raise ValueError(f"schedule.type: expected one of {list(KINDS)}, got {self.type!r}")
        warmup = 0 if self.warmup is None else self.warmup
        if not 0 <= warmup < math.inf or (warmup >= 1 and warmup != int(warmup)):
            raise ValueError(
                f"schedule.warmup: expected a number of steps, or a share of them below 1, got {self.warmup}"
            )
        for name in ("final", "decay"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"schedule.{name}: expected a number from 0 to 1, got {getattr(self, name)}")

    def factor(self, step: int, steps: int) -> float:
        """Return the multiple of the peak rate in a step, counted from 1 to ``steps``."""
        warmup = self.warmup_steps(steps)
        if step <= warmup:
            return step / warmup
        if self.type == "constant":
            return 1.0
        start = warmup if self.type == "cosine" else max(warmup, steps - round(self.decay * steps))
        done = max(step - start, 0) / (steps - start) if steps > start else 0.0
        left = 0.5 * (1 + math.cos(math.pi * done)) if self.type == "cosine" else 1 - done
        return self.final + (1 - self.final) * left

    def suited(self, warmup: float) -> Schedule:
        """Return the same with this warm-up, if none was asked for."""
        return replace(self, warmup=warmup) if self.warmup is None else self

    def warmup_steps(self, steps: int) -> int:
        """Return how many steps of ``steps`` the warm-up takes; raise ``ValueError`` where it is not known yet."""
        if self.warmup is None:
            raise ValueError("schedule.warmup: expected a number; None is for `suited` to replace")
        return round(self.warmup * steps) if self.warmup < 1 else int(self.warmup)
