# SPDX-License-Identifier: Apache-2.0
"""A model's parameters without their memory: tensors on torch's meta device, in the groups that an optimizer would be given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from dash_optim.routing import param_groups

Model = nn.Module | Mapping[str, Sequence[int]] | ParamsT
"""A module, shapes by name, or what an optimizer takes."""

Groups = list[dict[str, Any]]


def twins_of(model: Model) -> tuple[Groups, dict[Tensor, torch.device]]:
    """Return the groups with tensors on the meta device in place of their parameters, and where those are."""
    twins: dict[Tensor, Tensor] = {}

    def twin(param: object) -> Tensor:
        if not isinstance(param, Tensor):
            raise TypeError(
                f"model: expected parameters, pairs of name and parameter or groups, got {param!r}"
            )
        if param not in twins:
            twins[param] = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=False)
        return twins[param]

    groups = []
    for group in _groups(model):
        params = group["params"]
        listed = [params] if isinstance(params, Tensor) else list(params)
        named = [(item[0], twin(item[1])) if isinstance(item, tuple) else twin(item) for item in listed]
        groups.append({**group, "params": named})
    if not twins:
        raise ValueError("model: has no parameters")
    return groups, {other: param.device for param, other in twins.items()}


def _groups(model: Model) -> Groups:
    """Return the groups that a model stands for."""
    if isinstance(model, nn.Module):
        return param_groups(model, verbose=False)
    if isinstance(model, Mapping):
        return [{"params": [(name, _shaped(name, shape)) for name, shape in model.items()]}]
    if isinstance(model, Tensor):
        raise TypeError(
            "model: expected a module, shapes, or what DASH takes, got a tensor; put it into a list"
        )
    items: list[Any] = list(model)
    grouped = bool(items) and isinstance(items[0], dict)
    return items if grouped else [{"params": items}]


def _shaped(name: str, shape: object) -> Tensor:
    """Return a tensor of a shape, without memory."""
    sizes: Sequence[Any] = shape if isinstance(shape, Sequence) and not isinstance(shape, str) else [None]
    if not all(isinstance(size, int) and size >= 0 for size in sizes):
        raise TypeError(f"model: expected a shape for {name!r}, such as (512, 128), got {shape!r}")
    return torch.empty(tuple(sizes), device="meta")
