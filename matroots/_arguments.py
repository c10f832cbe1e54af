# SPDX-License-Identifier: Apache-2.0
"""Checks of what users pass in. Each error names the argument, what was expected and what it was."""

from __future__ import annotations

import math
from numbers import Integral, Real

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses import FakeTensor

from matroots._products import HALF_DTYPES, wide

REAL_DTYPES = (*HALF_DTYPES, torch.float32, torch.float64)


def check_matrices(A: object, name: str, dtypes: tuple[torch.dtype, ...] = REAL_DTYPES) -> None:
    """Raise unless ``A`` is a dense tensor ``(*, n, n)`` of one of the dtypes."""
    if not isinstance(A, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(A).__name__}")
    _check_dtype(A, name, dtypes)
    if A.ndim < 2 or A.shape[-1] != A.shape[-2]:
        raise ValueError(f"{name}: expected (*, n, n), got {tuple(A.shape)}")


def check_rows(x: object, name: str, dtypes: tuple[torch.dtype, ...] = REAL_DTYPES) -> None:
    """Raise unless ``x`` is a dense tensor ``(*, m, n)`` of one of the dtypes, m and n at least 1."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    _check_dtype(x, name, dtypes)
    if x.ndim < 2 or 0 in x.shape[-2:]:
        raise ValueError(f"{name}: expected (*, m, n) with m, n >= 1, got {tuple(x.shape)}")


def _check_dtype(A: Tensor, name: str, dtypes: tuple[torch.dtype, ...]) -> None:
    if A.dtype not in dtypes:
        names = [str(dtype).removeprefix("torch.") for dtype in (*dtypes, A.dtype)]
        raise TypeError(f"{name}: expected {', '.join(names[:-2])} or {names[-2]}, got {names[-1]}")
    if A.layout != torch.strided:
        raise TypeError(f"{name}: expected a dense (strided) tensor, got layout {A.layout}")


def check_values(A: Tensor, name: str) -> None:
    """Raise unless ``A`` has values that a function may look at which is no part of torch's graphs or transforms."""
    if A.device.type == "meta":
        raise ValueError(f"{name}: expected values, got a meta tensor, which has none")
    if isinstance(A, FakeTensor):
        raise NotImplementedError(
            f"{name}: expected values, got a fake tensor (torch.export), which has none"
        )
    if is_functorch_wrapped_tensor(A):
        raise NotImplementedError(
            f"{name}: not possible within transforms of torch.func; a batch needs no vmap: pass (*, n, n), outside"
        )


def check_number(name: str, value: object, *, positive: bool = False) -> float:
    """Return ``value`` as a float, or raise unless it is a finite number, not negative (``positive``: not 0 either)."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected a real number, got {type(value).__name__}")
    number = float(value)
    if not math.isfinite(number) or number < 0 or (positive and number == 0):
        raise ValueError(f"{name}: expected a finite number {'> 0' if positive else '>= 0'}, got {number}")
    return number


def check_fraction(name: str, value: object) -> None:
    """Raise unless ``value`` is a number between 0 and 1, both excluded, or None."""
    if value is not None and not 0 < check_number(name, value) < 1:
        raise ValueError(f"{name}: expected a number in (0, 1) or None, got {value!r}")


def check_count(name: str, value: object, *, optional: bool = True) -> None:
    """Raise unless ``value`` is an integer (numpy's count) of at least 1, or None where that is allowed."""
    if value is None and optional:
        return
    or_none = " or None" if optional else ""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}: expected an integer{or_none}, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name}: expected an integer >= 1{or_none}, got {value}")


def absolute_damping(damping: object, A: Tensor) -> Tensor:
    """Return the absolute damping of each member as float64 ``(b,)`` on A's device.

    Values in a tensor are checked where looking does not synchronise, on the CPU.
    """
    if isinstance(damping, Tensor) and damping.is_cpu and damping.is_floating_point():
        known = damping.detach().nan_to_num(0.0, posinf=-1.0)
        if not bool((known >= 0).all()):
            raise ValueError("damping: expected values >= 0 (NaN for a member that has none) and finite")
    return broadcast_damping(damping, A).detach().reshape(-1)


def broadcast_damping(damping: object, A: Tensor) -> Tensor:
    """Return the damping of each member, float64 of the batch shape on A's device, differentiable; the values of a tensor are not looked at."""
    batch = A.shape[:-2]
    if not isinstance(damping, Tensor):
        value = check_number("damping", damping)
        return torch.full(batch, value, dtype=wide(A.device), device=A.device)
    if not damping.is_floating_point():
        raise TypeError(f"damping: expected a floating-point tensor, got {damping.dtype}")
    try:
        return damping.to(A.device, wide(A.device)).expand(batch)
    except RuntimeError as error:
        raise ValueError(
            "damping: expected a number or a tensor that broadcasts to the batch shape"
            f" {tuple(batch)}, got {tuple(damping.shape)}"
        ) from error
