# SPDX-License-Identifier: Apache-2.0
"""What a step asks of its gradients before anything is changed: that they are dense, finite, and that their squares are."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from dash_optim.names import parameter_name

Active = list[tuple[dict[str, Any], list[Tensor]]]
"""Groups, each with those of its parameters that have a gradient."""


class NonfiniteGradientError(RuntimeError):
    """A gradient has a NaN or an infinity and ``nonfinite="raise"``; raised before anything is changed."""


def with_gradient(group: dict[str, Any]) -> list[Tensor]:
    """Return the parameters of a group that have a gradient, each once; raise for a sparse one."""
    params = []
    for param in dict.fromkeys(group["params"]):
        if param.grad is None:
            continue
        if param.grad.layout != torch.strided:
            raise TypeError(
                f"gradient of {parameter_name(group, param)}: expected a dense tensor, got layout {param.grad.layout}; use"
                " torch.optim.SparseAdam for it, or Embedding(sparse=False)"
            )
        params.append(param)
    return params


def nonfinite(active: Active) -> Tensor | None:
    """Return whether a gradient is not finite, or its squares are not, as a tensor of one element; None where there are no elements."""
    alike: dict[tuple[torch.device, torch.dtype, float], list[Tensor]] = defaultdict(list)
    for group, params in active:
        for param in params:
            if param.grad is not None and param.grad.numel():
                alike[param.device, param.grad.dtype, ceiling(group, param)].append(param.grad)
    bad = [_too_large(gradients, ceiling) for (_, _, ceiling), gradients in alike.items()]
    if len(bad) > 1:
        return torch.stack([one.to(bad[0].device) for one in bad]).any()
    return bad[0] if bad else None


def describe_nonfinite(
    gradients: Iterable[tuple[dict[str, Any], Tensor, Tensor | None]], state: Mapping[Tensor, dict[str, Any]]
) -> str:
    """Return which gradient is not finite, and what it looks like; ``gradients`` are (group, parameter, gradient)."""
    for group, param, grad in gradients:
        if grad is None or grad.numel() == 0:
            continue
        good = grad.abs() <= ceiling(group, param) / math.sqrt(grad.numel())
        if bool(good.all()):
            continue
        finite = grad[good].double()
        extent = f"{float(finite.min()):.3g} to {float(finite.max()):.3g}" if len(finite) else "none"
        step = int(state.get(param, {}).get("step", 0)) + 1
        return (
            f"gradient of {parameter_name(group, param)}: {grad.numel() - len(finite)} of {grad.numel()} elements are NaN,"
            f" infinite or so large that their squares are, at its step {step}; the others are {extent}, of norm"
            f" {float(finite.norm()):.3g}. Nothing was changed; nonfinite='skip' leaves such steps out"
        )
    return "gradients: not finite"


def ceiling(group: dict[str, Any], param: Tensor) -> float:
    """Return the norm of a gradient up to which the averages of its squares cannot overflow: an infinity would never leave them."""
    in_double = param.dtype == torch.float64 and group["factor_dtype"] != torch.float32
    return math.sqrt(torch.finfo(torch.float64 if in_double else torch.float32).max)


def _too_large(gradients: list[Tensor], ceiling: float) -> Tensor:
    """Return whether a norm, taken at least in float32, exceeds the ceiling, as that of a gradient with an infinity does, or is NaN."""
    dtype = torch.promote_types(gradients[0].dtype, torch.float32)
    norms = torch.stack(torch._foreach_norm(gradients, 2, dtype=dtype))
    return ~(norms <= ceiling).all()
