# SPDX-License-Identifier: Apache-2.0
"""What a parameter is called in tables and in messages."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def label(group: dict[str, Any], param: Tensor) -> str:
    """Return a parameter's name if the optimizer was given names, else its place in its group and its shape."""
    place = next(i for i, other in enumerate(group["params"]) if other is param)
    names = group.get("param_names")
    return str(names[place]) if names else f"{place} of shape {tuple(param.shape)}"


def parameter_name(group: dict[str, Any], param: Tensor) -> str:
    """Return the same as it stands in a sentence."""
    name = label(group, param)
    return f"parameter {name!r}" if group.get("param_names") else f"parameter {name}"
