# SPDX-License-Identifier: Apache-2.0
"""Which way a parameter takes, and what is refused: parameters, flags and checkpoints that the options cannot serve."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dash_optim.blocks import Geometry, geometry
from dash_optim.names import parameter_name
from dash_optim.options import STRUCTURE, built, recipe_of
from dash_optim.stale import fraction_of

_FLAT = 2**16  # elements from which a vector is more likely a flattened matrix than a bias
UNSUPPORTED = {
    "fused": "there is no fused kernel for preconditioned steps",
    "capturable": "which roots are refreshed is decided on the host, and a captured graph would repeat one decision for ever",
    "differentiable": "a step is taken without gradients",
}


def route(group: dict[str, Any], param: Tensor) -> Geometry:
    """Return how a parameter is cut into blocks; without any it is AdamW's."""
    nothing = Geometry(tuple(param.shape), ())
    if group["algorithm"] == "adamw" or (param.ndim == 1 and group["one_d"] == "adamw"):
        return nothing
    return geometry(tuple(param.shape), group["block_size"], group["max_factor_dim"], group["nd"])


def refuse_unsupported(**flags: bool | None) -> None:
    """Raise for what other optimizers of torch can do and this one cannot."""
    if flags.pop("foreach") is False:
        raise ValueError(
            "foreach: blocks are always worked on in batches; use stacking='none' for one at a time"
        )
    for name, value in flags.items():
        if value:
            raise ValueError(f"{name}: not supported: {UNSUPPORTED[name]}")


def is_sharded(param: Tensor) -> bool:
    """Return whether a parameter is a DTensor, without importing what takes long to import."""
    return type(param).__name__ == "DTensor"


def check_wire(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return ``communication_dtype``, or raise for what it cannot be."""
    found = getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
    if found not in (None, torch.bfloat16, torch.float16, torch.float32, torch.float64):
        raise TypeError(
            f"communication_dtype: expected torch.bfloat16, float16, float32, float64 or None, got {dtype!r}"
        )
    return found


def check_parameter(group: dict[str, Any], param: Tensor) -> None:
    """Raise if the options cannot serve a parameter; warn if it looks like a matrix that something has flattened."""
    name = parameter_name(group, param)
    if not param.is_floating_point():
        raise TypeError(f"{name}: expected a real floating-point parameter, got {param.dtype}")
    if param.layout != torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, got {type(param).__name__}, {param.layout}")
    if (
        group["algorithm"] == "dash"
        and param.ndim == 1
        and (hasattr(param, "ds_shape") or param.numel() >= _FLAT)
    ):
        warnings.warn(
            f"{name}: a vector of {param.numel()} elements, which {group['one_d']} will update: was it a matrix that a sharding library has"
            " flattened? DASH needs the original shapes",
            stacklevel=5,
        )
    factors = route(group, param).factors
    if factors:
        recipe = recipe_of(group)
        p = recipe.exponent(factors)
        try:
            recipe.solver_for(p, param.device)
            if recipe.refresh == "certified":
                fraction_of(p)
        except ValueError as error:
            raise ValueError(f"{name}, p={float(p):g}: {error}") from error


def check_groups(groups: list[dict[str, Any]], incoming: list[dict[str, Any]]) -> None:
    """Raise if a checkpoint's groups were made with options that give the state another shape."""
    if len(groups) != len(incoming):
        raise ValueError(f"state_dict: expected {len(groups)} parameter groups, got {len(incoming)}")
    for i, (group, other) in enumerate(zip(groups, incoming, strict=True)):
        if len(group["params"]) != len(other["params"]):
            raise ValueError(
                f"state_dict: group {i} has {len(other['params'])} parameters, the optimizer's has {len(group['params'])}"
            )
        for name in STRUCTURE:
            if name not in other:
                raise ValueError(f"state_dict: group {i} has no {name!r}: it is not a checkpoint of DASH")
            if not _means_the_same(name, other[name], group[name]):
                raise ValueError(
                    f"{name}: the checkpoint's group {i} has {other[name]!r}, the optimizer {group[name]!r}; construct it with"
                    f" {name}={other[name]!r} to continue"
                )


def _means_the_same(name: str, first: Any, second: Any) -> bool:
    """Whether two plain values of an option do: ``"adam"`` is ``{"type": "adam", ...}`` with nothing else said."""
    if name == "grafting":
        first, second = built(name, first), built(name, second)
    return bool(first == second)


def refuse_pieces(state: Mapping[Any, Mapping[str, Any]]) -> None:
    """Raise for a state of which one rank had pieces, given to a process on its own."""
    for own in state.values():
        for key, value in own.items():
            if type(value).__name__ == "Pieces":
                raise ValueError(
                    f"state_dict: {key!r} is {value!r}, what one rank of several had. Load it with torch.distributed.checkpoint, or save what"
                    " DASH.full_state_dict() returns"
                )


def check_state(group: dict[str, Any], param: Tensor, seen: Geometry, own: dict[str, Any]) -> None:
    """Raise if a parameter's state was made for blocks of another size."""
    found = {key.partition(".")[0]: value.shape[0] for key, value in own.items() if "." in key}
    expected = {blocks.name: blocks.count for blocks in seen.classes}
    if found and found != expected:
        raise ValueError(
            f"block_size: the state of {parameter_name(group, param)} has {_listed(found)}, its shape and its group's options give"
            f" {_listed(expected)}"
        )


def _listed(counts: Mapping[str, int]) -> str:
    """Return how many blocks there are of each shape."""
    return " and ".join(f"{count} of {shape}" for shape, count in counts.items()) or "no blocks"
