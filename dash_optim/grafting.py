# SPDX-License-Identifier: Apache-2.0
"""Grafting: the length of each update is that of another method's, which also leads until preconditioning starts.

Shampoo says where to go, the grafted method how far: ``U <- U ||D|| / ||U||``, with D the step that the other method would take,
by block or by layer (Agarwal et al., arXiv:2002.11803). With it the learning rates of the other method carry over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

Scalar = float | Tensor
"""A number, or a tensor that broadcasts: the weights of steps that a device decides to leave out."""


@dataclass(frozen=True)
class SGD:
    """The direction is the averaged gradient: ``D = m``."""

    keeps: ClassVar[bool] = False

    def accumulate(self, v: Tensor, G: Tensor, beta2: float, taken: Scalar) -> None:
        """Nothing to keep."""

    def direction(
        self, m: Tensor, v: Tensor | None, beta2: float, t: Tensor, out: Tensor
    ) -> tuple[Tensor, Scalar]:
        """Return D up to a factor for each block, and the factor; D is not to be written to."""
        return m, 1.0


@dataclass(frozen=True)
class AdaGrad:
    """``v <- v + g^2``, ``D = m / (sqrt(v) + eps)``."""

    eps: float = 1e-8
    keeps: ClassVar[bool] = True

    def accumulate(self, v: Tensor, G: Tensor, beta2: float, taken: Scalar) -> None:
        """Add ``g^2``; G is zero where a step is not taken."""
        v.addcmul_(G, G)

    def direction(
        self, m: Tensor, v: Tensor | None, beta2: float, t: Tensor, out: Tensor
    ) -> tuple[Tensor, Scalar]:
        """Return D up to a factor for each block, and the factor."""
        return _scaled(m, v, self.eps, out), 1.0


@dataclass(frozen=True)
class RMSProp:
    """``v <- beta2 v + (1 - beta2) g^2``, ``D = m / (sqrt(v) + eps)``; ``beta2=None`` is that of ``betas``."""

    beta2: float | None = None
    eps: float = 1e-8
    keeps: ClassVar[bool] = True

    def accumulate(self, v: Tensor, G: Tensor, beta2: float, taken: Scalar) -> None:
        """Average ``g^2``; ``taken`` is 0 where the step is not, and G too."""
        decay = beta2 if self.beta2 is None else self.beta2
        v.mul_(1 - (1 - decay) * taken).addcmul_(G, G, value=1 - decay)

    def direction(
        self, m: Tensor, v: Tensor | None, beta2: float, t: Tensor, out: Tensor
    ) -> tuple[Tensor, Scalar]:
        """Return D up to a factor for each block, and the factor."""
        return _scaled(m, v, self.eps, out), 1.0


@dataclass(frozen=True)
class Adam(RMSProp):
    """``v`` as RMSProp's, ``D = m / (sqrt(v / (1 - beta2^t)) + eps)``: with it the step before preconditioning is AdamW's."""

    def direction(
        self, m: Tensor, v: Tensor | None, beta2: float, t: Tensor, out: Tensor
    ) -> tuple[Tensor, Scalar]:
        """Return D up to a factor for each block, and the factor ``c = sqrt(1 - beta2^t)``: ``D = c m / (sqrt(v) + c eps)``."""
        decay = beta2 if self.beta2 is None else self.beta2
        c = (1 - decay**t).sqrt()
        return _scaled(m, v, self.eps * c, out), c

    def fused(
        self,
        m: Sequence[Tensor],
        v: Sequence[Tensor],
        G: Sequence[Tensor],
        betas: tuple[float, float],
        t: Sequence[Tensor],
        out: Sequence[Tensor],
        taken: Scalar,
    ) -> None:
        """Bring both averages up to date and write the corrected D into ``out``: torch's kernel for AdamW on parameters that are zero, at a rate of -1.

        One pass over memory where the operations one by one take nine. Lists of blocks that have the same step t, a tensor of one element.
        """
        torch._foreach_zero_(list(out))
        torch._fused_adamw_(
            list(out),
            list(G),
            list(m),
            list(v),
            [],
            list(t),
            lr=-1.0,
            beta1=betas[0],
            beta2=betas[1] if self.beta2 is None else self.beta2,
            weight_decay=0.0,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
            found_inf=(1.0 - taken).to(torch.float32) if isinstance(taken, Tensor) else None,
        )


Grafting = SGD | AdaGrad | RMSProp | Adam
GRAFTINGS: dict[str, type[Grafting]] = {"sgd": SGD, "adagrad": AdaGrad, "rmsprop": RMSProp, "adam": Adam}


def _scaled(m: Tensor, v: Tensor | None, eps: Scalar, out: Tensor) -> Tensor:
    """Write ``m / (sqrt(v) + eps)`` into ``out``; eps is a number or one for each block, ``(b,)``."""
    if v is None:
        raise ValueError("grafting: its second moment is missing from the state")
    root = torch.sqrt(v, out=out)
    if isinstance(eps, Tensor):
        eps = eps.to(v.dtype).reshape(-1, *(1,) * (v.ndim - 1))
    return torch.div(m, root.add_(eps), out=root)
