"""A step of one stack: gradients in, averages and factors brought up to date, directions out, parameters written.

Everything here works on a `Chunk` of blocks at a time: that bounds the workspace, and on CPUs keeps it in the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dash_optim.blocks import Piece, block_view, matrix_view
from dash_optim.grafting import Scalar
from dash_optim.stacks import Chunk, Member, Stack
from dash_optim.update import accumulate_factor, correction, mode_product, norm, per_block

_WORKING = (torch.float32, torch.float64)


def gather(stack: Stack, chunk: Chunk, taken: Scalar) -> Tensor:
    """Return the gradients of a chunk's blocks, ``(b, *shape)``; zeros where the step is not taken."""
    G = torch.empty((chunk.stop - chunk.start, *stack.shape), dtype=stack.dtype, device=stack.device)
    for member, piece, where in chunk.pieces:
        grad = member.param.grad
        if grad is None:
            raise RuntimeError("gradient: it was there when the step began")
        seen, _ = matrix_view(grad, member.view)
        blocks = block_view(seen, member.blocks, piece)
        G[where].view(blocks.shape).copy_(blocks)
    return torch.where(taken > 0, G, 0.0) if isinstance(taken, Tensor) else G


def accumulate(stack: Stack, chunk: Chunk, G: Tensor, taken: Scalar) -> None:
    """Bring factors and averages up to date with the gradients."""
    recipe, span = stack.recipe, chunk.span
    for dim, (sides, j) in stack.side_of.items():
        accumulate_factor(sides.factors[j, span], G, dim, recipe.beta_factors, taken)
    if "exp_avg" in stack.elements:
        weight = (1 - recipe.betas[0]) * taken
        m = stack.elements["exp_avg"][span]
        m.lerp_(G, weight.to(G.dtype) if isinstance(weight, Tensor) else weight)
    if recipe.grafting is not None and recipe.grafting.keeps:
        recipe.grafting.accumulate(stack.elements["graft_avg_sq"][span], G, recipe.betas[1], taken)


def direction(
    stack: Stack, chunk: Chunk, G: Tensor | None, t: Tensor, taken: Scalar
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return ``U`` and, ``(b,)``, the factor that belongs in front of it and ``||D||`` to which U is to be brought.

    Before preconditioning starts U is the graft direction D itself, and there is no norm to bring it to. The averages' corrections ``1 - beta^t`` are in
    the factors: they never take a pass over the blocks.
    """
    recipe, span = stack.recipe, chunk.span
    m = stack.elements["exp_avg"][span] if "exp_avg" in stack.elements else G
    if m is None:
        m = gather(stack, chunk, taken)
    steps = t[span]
    corrected = 1 / correction(recipe.betas[0] if recipe.bias_correction else 0.0, steps)
    grafted = corrected
    D: Tensor | None = None
    if recipe.grafting is not None:
        v = stack.elements["graft_avg_sq"][span] if recipe.grafting.keeps else None
        D, factor = recipe.grafting.direction(m, v, recipe.betas[1], steps)
        grafted = corrected * factor
    if not chunk.preconditioned:
        return (m, corrected, None) if D is None else (D, grafted, None)
    U = m
    for dim, (sides, j) in stack.side_of.items():
        U = mode_product(sides.roots[j, span], U, dim)
    return U, corrected, None if D is None else norm(D).to(t.dtype) * grafted


def apply(stack: Stack, chunk: Chunk, U: Tensor, scale: Tensor, taken: Scalar) -> None:
    """Move the parameters by ``-lr scale U``, through the momentum where there is one; ``scale`` is ``(b,)``."""
    momentum = stack.recipe.momentum
    scale = scale * taken
    if momentum > 0:
        B = stack.elements["momentum"][chunk.span]
        scaled = U * per_block(scale, U)
        decay = 1 - (1 - momentum) * taken
        B.mul_(decay.to(B.dtype) if isinstance(decay, Tensor) else decay).add_(scaled)
        U = scaled.add_(B, alpha=momentum) if stack.recipe.nesterov else B
        scale = torch.ones_like(scale) * taken
    for member, piece, where in chunk.pieces:
        write(member, piece, U[where], scale[where], taken)


def write(member: Member, piece: Piece, U: Tensor, scale: Tensor, taken: Scalar) -> None:
    """Decay a piece of a parameter's blocks and subtract ``lr scale U``; rounded to the parameter's dtype once."""
    group, param = member.group, member.param
    rate, decay = group["lr"], group["weight_decay"]
    if isinstance(rate, Tensor):
        rate = rate.reshape(()).to(param.device, U.dtype)  # 1 - lr weight_decay is as exact as the update
    seen, in_place = matrix_view(param, member.view)
    blocks = block_view(seen, member.blocks, piece)
    target = blocks if blocks.dtype in _WORKING else blocks.float()
    if decay:
        kept = 1 - rate * decay * taken
        target.mul_(kept.to(target.dtype) if isinstance(kept, Tensor) else kept)
    U = U.view(blocks.shape)
    scale = scale.view(piece.extent + (1,) * len(member.blocks.shape))
    sign = 1.0 if group["maximize"] else -1.0
    if isinstance(rate, Tensor):
        target.addcmul_(U, (scale * rate).to(U.dtype), value=sign)
    else:
        target.addcmul_(U, scale.to(U.dtype), value=sign * rate)
    if target is not blocks:
        blocks.copy_(target)
    if not in_place:
        param.copy_(seen.view(param.shape))
