# SPDX-License-Identifier: Apache-2.0
"""Roots in torch's graphs: backward, forward mode, and the transforms of torch.func.

A root is a function of the damped symmetric matrix ``B = (A + A^H)/2 + eps(A) I``. `Solve` hands the values through the solver and knows the derivative
with respect to B; that of B with respect to A and the damping is torch's own. Derivatives do not depend on the method: they are those of the
exact function, taken at the X that was found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.autograd.forward_ad import unpack_dual

from matroots._frechet import Power, frechet, second_frechet
from matroots._products import wide
from matroots.scaling.bounds import norm_bound


def followed(A: Tensor, damping: object) -> bool:
    """Whether somebody wants derivatives of a root, or transforms its call."""
    return any(
        isinstance(t, Tensor)
        and (
            is_functorch_wrapped_tensor(t)
            or (t.requires_grad and torch.is_grad_enabled())
            or unpack_dual(t).tangent is not None
        )
        for t in (A, damping)
    )


def plain(t: Tensor) -> Tensor:
    """Return the values of a tensor that a transform has wrapped; what was mapped over is in front."""
    while is_functorch_wrapped_tensor(t):
        t = get_unwrapped(t)
    return t


def damped(A: Tensor, damping: Tensor, rel_damping: float) -> Tensor:
    """Return ``B = (A + A^T)/2 + (damping + rel_damping lambda_bound(A)) I`` in torch's operations; the damping has the batch shape.

    Its values are not used, its derivatives are.
    """
    S = (A + A.mT) / 2
    S = S.to(torch.promote_types(S.dtype, torch.float32))
    eps = damping.to(S.device, wide(S.device))
    if rel_damping:
        largest = S.detach().to(eps.dtype).abs().amax((-2, -1)) if S.numel() else torch.ones_like(eps)
        scale = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)  # squares stay in range
        eps = eps + rel_damping * scale * norm_bound(S.to(eps.dtype) / scale[..., None, None])
    return S + eps.to(S.dtype)[..., None, None] * torch.eye(S.shape[-1], dtype=S.dtype, device=S.device)


def solve(
    B: Tensor, A: Tensor, damping: Tensor, run: Run, powers: tuple[Power, ...], check: Callable[[], None]
) -> tuple[Tensor, ...]:
    """Return what ``run(A, damping)`` does; its first ``len(powers)`` tensors, these functions of B, are differentiable if ``check()`` does not raise."""
    found: tuple[Tensor, ...] = _applied(Solve, B, A.detach(), damping.detach(), run, powers, check)
    return found


Run = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


class Solve(torch.autograd.Function):
    """See :func:`solve`."""

    @staticmethod
    def forward(
        B: Tensor, A: Tensor, damping: Tensor, run: Run, powers: tuple[Power, ...], check: Callable[[], None]
    ) -> tuple[Tensor, ...]:
        return run(A, damping)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *_, ctx.powers, ctx.check = inputs
        roots, others = output[: len(ctx.powers)], output[len(ctx.powers) :]
        ctx.others = len(others)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*others)
        kept = (inputs[0], *(root.detach() for root in roots))
        ctx.save_for_backward(*kept)
        ctx.save_for_forward(*kept)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.check()
        B, *roots = ctx.saved_tensors
        wanted = zip(roots, gradients, ctx.powers, strict=False)
        terms = [_applied(Frechet, B, X, G, power) for X, G, power in wanted if G is not None]
        return (sum(terms) if terms else None, *[None] * 5)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *others: None) -> tuple[Tensor | None, ...]:
        ctx.check()
        B, *roots = ctx.saved_tensors
        pairs = zip(roots, ctx.powers, strict=True)
        return (
            *(_applied(Frechet, B, X, tangent, power).to(X.dtype) for X, power in pairs),
            *[None] * ctx.others,
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[tuple[Tensor, ...], Any]:
        found = _applied(Solve, *_in_front(info, in_dims, args, expand=True))
        return found, (0,) * len(found)


class Frechet(torch.autograd.Function):
    """:func:`frechet` of the root X of B in the direction E: linear in E, and a function of B."""

    @staticmethod
    def forward(B: Tensor, X: Tensor, E: Tensor, power: Power) -> Tensor:
        return frechet(X, E, power)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        B, X, E, ctx.power = inputs
        ctx.save_for_backward(B, X, E)
        ctx.save_for_forward(B, X, E)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        B, X, E = ctx.saved_tensors
        by_B = _applied(SecondFrechet, B, X, E, gradient, ctx.power) if ctx.needs_input_grad[0] else None
        by_E = _applied(Frechet, B, X, gradient, ctx.power).to(E.dtype) if ctx.needs_input_grad[2] else None
        return by_B, None, by_E, None

    @staticmethod
    def jvp(ctx: Any, by_B: Tensor | None, _: None, by_E: Tensor | None, __: None) -> Tensor:
        B, X, E = ctx.saved_tensors
        terms = [] if by_E is None else [_applied(Frechet, B, X, by_E, ctx.power)]
        if by_B is not None:
            terms.append(_applied(SecondFrechet, B, X, E, by_B, ctx.power))
        total: Tensor = terms[0] if len(terms) == 1 else terms[0] + terms[1]
        return total

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        return _applied(Frechet, *_in_front(info, in_dims, args)), 0


class SecondFrechet(torch.autograd.Function):
    """:func:`second_frechet` in the directions E and F, a function of B too; the end of what is differentiable."""

    @staticmethod
    def forward(B: Tensor, X: Tensor, E: Tensor, F: Tensor, power: Power) -> Tensor:
        return second_frechet(X, E, F, power).to(torch.promote_types(X.dtype, torch.float32))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        raise NotImplementedError(_THIRD)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> None:
        raise NotImplementedError(_THIRD)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        return _applied(SecondFrechet, *_in_front(info, in_dims, args)), 0


_THIRD = "matroots: roots have first and second derivatives, a third was asked for; detach what is not to be differentiated"


def _applied(function: Any, *args: Any) -> Any:
    """Return ``function.apply(*args)``, which torch has no types for."""
    return function.apply(*args)


def _in_front(
    info: Any, in_dims: tuple[int | None, ...], args: tuple[Any, ...], expand: bool = False
) -> list[Any]:
    """Move the mapped dimension of every tensor to the front; tensors without it get one of size 1, or expanded."""
    moved: list[Any] = []
    for t, dim in zip(args, in_dims, strict=True):
        if not isinstance(t, Tensor):
            moved.append(t)
        elif dim is not None:
            moved.append(t.movedim(dim, 0))
        else:
            moved.append(t.expand(info.batch_size, *t.shape) if expand else t.unsqueeze(0))
    return moved
