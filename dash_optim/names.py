"""What a parameter is called in messages."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def parameter_name(group: dict[str, Any], param: Tensor) -> str:
    """Return a parameter's name if the optimizer was given names, else its place in its group and its shape."""
    place = next(i for i, other in enumerate(group["params"]) if other is param)
    names = group.get("param_names")
    return f"parameter {names[place]!r}" if names else f"parameter {place} of shape {tuple(param.shape)}"
