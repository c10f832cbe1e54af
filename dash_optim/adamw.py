# SPDX-License-Identifier: Apache-2.0
"""AdamW by torch's fused kernel, for parameters that are not preconditioned: averages in float32 (float64) whatever the parameter's dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

_WORKING = (torch.float32, torch.float64)


def init_state(own: dict[str, Any], param: Tensor) -> None:
    """Put zero averages where there are none."""
    dtype = param.dtype if param.dtype in _WORKING else torch.float32
    for name in ("exp_avg", "exp_avg_sq"):
        if name not in own:
            own[name] = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)


def update(
    params: Sequence[Tensor],
    state: dict[Tensor, dict[str, Any]],
    group: dict[str, Any],
    steps: Sequence[Tensor],
    skip: Tensor | None,
) -> None:
    """Take one step: decoupled weight decay, then ``p <- p - lr m^ / (sqrt(v^) + eps)``.

    ``steps`` count up by one, unless ``skip``, a tensor with one element, is 1: then nothing changes, and no host waits to see it.
    """
    for device, dtype in dict.fromkeys((p.device, p.dtype) for p in params):
        chosen = [i for i, p in enumerate(params) if (p.device, p.dtype) == (device, dtype)]
        mine = [params[i] for i in chosen]
        averages = [state[p]["exp_avg"] for p in mine]
        squares = [state[p]["exp_avg_sq"] for p in mine]
        working = [_laid_out(p, m) for p, m in zip(mine, averages, strict=True)]
        squared = [_laid_out(v, m) for v, m in zip(squares, averages, strict=True)]
        adamw(
            working,
            [_laid_out(_gradient(p), m) for p, m in zip(mine, averages, strict=True)],
            averages,
            squared,
            [],
            [steps[i] for i in chosen],
            fused=True,
            found_inf=None if skip is None else skip.to(device),
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )
        for kept, used in ((mine, working), (squares, squared)):
            changed = [i for i, (k, u) in enumerate(zip(kept, used, strict=True)) if k is not u]
            if changed:
                torch._foreach_copy_([kept[i] for i in changed], [used[i] for i in changed])


def _laid_out(t: Tensor, average: Tensor) -> Tensor:
    """Return ``t`` with the dtype and strides of an average, itself if it has them: the fused kernels take memory as it lies."""
    if t.dtype == average.dtype and t.stride() == average.stride():
        return t
    return torch.empty_like(average).copy_(t)


def _gradient(p: Tensor) -> Tensor:
    """Return the gradient, which the caller knows is there."""
    if p.grad is None:
        raise RuntimeError("gradient: expected one for every parameter of this step")
    return p.grad
