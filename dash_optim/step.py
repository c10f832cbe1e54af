# SPDX-License-Identifier: Apache-2.0
"""A step of one stack: gradients in, averages and factors brought up to date, directions out, parameters written.

Everything here works on a `Chunk` of blocks at a time: that bounds the workspace, and on CPUs keeps it in the cache.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from dash_optim.blocks import Piece, block_view, matrix_view
from dash_optim.grafting import Adam, Scalar
from dash_optim.refresh import refresh, refresh_certified
from dash_optim.stacks import Chunk, Member, Stack
from dash_optim.update import accumulate_factor, correction, graft_ratio, mode_product, norm, per_block

_WORKING = (torch.float32, torch.float64)
_FUSED = ("cpu", "cuda")  # where torch's fused kernel for AdamW is


@dataclass(frozen=True)
class Waiting:
    """A direction that waits for the norms of whole layers: U, the factor in front of it, and the norm of the graft direction."""

    stack: Stack
    chunk: Chunk
    U: Tensor
    factor: Tensor
    D_norm: Tensor


def update_stack(
    stack: Stack, chunks: list[Chunk], due: Tensor | None, t: Tensor, taken: Scalar
) -> list[Waiting]:
    """Take a step with the chunks of one stack; ``due`` are the blocks whose roots are to be computed, ``t`` counts each block's steps.

    Returns what has to wait for other stacks.
    """
    waiting: list[Waiting] = []
    later: list[tuple[Chunk, Tensor | None, Tensor | None]] = []
    for chunk in chunks:
        G = gather(stack, chunk, taken)
        D, factor = accumulate(stack, chunk, G, t, taken)
        if not chunk.preconditioned:
            apply(stack, chunk, D, factor, taken)
            continue
        length = norm(D).to(t.dtype) * factor if stack.recipe.grafting is not None else None
        if due is None and stack.recipe.refresh != "certified":
            waiting += _finish(stack, chunk, G, length, t, taken)
        else:
            later.append((chunk, G if len(chunks) == 1 else None, length))  # the next one takes its memory
    if due is not None:
        refresh(stack, due, t)
    elif stack.recipe.refresh == "certified":
        refresh_certified(stack, chunks, t)
    for chunk, G_kept, length in later:
        waiting += _finish(stack, chunk, G_kept, length, t, taken)
    return waiting


def _finish(
    stack: Stack, chunk: Chunk, G: Tensor | None, length: Tensor | None, t: Tensor, taken: Scalar
) -> list[Waiting]:
    """Move the parameters of a chunk, or return what has to wait for the norms of whole layers."""
    U, factor = precondition(stack, chunk, G, t, taken)
    if length is None:
        apply(stack, chunk, U, factor, taken)
        return []
    if stack.recipe.grafting_scope == "layer":
        return [Waiting(stack, chunk, U, factor, length)]
    _apply_grafted(stack, chunk, U, factor, length, norm(U).to(t.dtype) * factor, taken)
    return []


def _apply_grafted(
    stack: Stack, chunk: Chunk, U: Tensor, factor: Tensor, D_norm: Tensor, U_norm: Tensor, taken: Scalar
) -> None:
    """Bring U to the length of D, and keep the coefficient for :meth:`DASH.diagnostics`."""
    ratio = graft_ratio(D_norm, U_norm)
    if stack.ratio is None:
        stack.ratio = torch.full((stack.blocks,), torch.nan, dtype=ratio.dtype, device=ratio.device)
    stack.ratio[chunk.span] = ratio
    apply(stack, chunk, U, factor * ratio, taken)


def finish_layers(waiting: list[Waiting], taken: Scalar) -> None:
    """Graft whole parameters: the squares of the norms of all their blocks, of whatever shape, are added first."""
    squares: dict[object, Tensor] = defaultdict(lambda: torch.zeros((), device="cpu"))
    for one in waiting:
        U_norm = norm(one.U).to(one.D_norm.dtype) * one.factor
        both = torch.stack([one.D_norm, U_norm]).square()
        for member, _, where in one.chunk.pieces:
            squares[member.layer] = squares[member.layer].to(both) + both[:, where].sum(1)
    for one in waiting:
        of_blocks = [
            squares[member.layer].sqrt().unsqueeze(-1).expand(2, where.stop - where.start)
            for member, _, where in one.chunk.pieces
        ]
        D_norm, U_norm = torch.cat(of_blocks, dim=1)
        mask = taken.to(one.stack.device) if isinstance(taken, Tensor) else taken
        _apply_grafted(one.stack, one.chunk, one.U, one.factor, D_norm, U_norm, mask)


def gather(stack: Stack, chunk: Chunk, taken: Scalar) -> Tensor:
    """Return the gradients of a chunk's blocks, ``(b, *shape)``; zeros where the step is not taken."""
    G = stack.buffer("gradient", chunk)
    for member, piece, where in chunk.pieces:
        grad = member.param.grad
        if grad is None:
            raise RuntimeError("gradient: it was there when the step began")
        seen, _ = matrix_view(grad, member.view)
        blocks = block_view(seen, member.blocks, piece)
        G[where].view(blocks.shape).copy_(blocks)
    if isinstance(taken, Tensor):
        G.masked_fill_(taken == 0, 0.0)
    return G


def accumulate(stack: Stack, chunk: Chunk, G: Tensor, t: Tensor, taken: Scalar) -> tuple[Tensor, Tensor]:
    """Bring factors and averages up to date; return the graft direction up to a factor for each block, and the factor, ``(b,)``.

    Without grafting that is the averaged gradient. Corrections ``1 - beta^t`` are in the factor: they take no pass over the blocks.
    """
    recipe, span, elements = stack.recipe, chunk.span, stack.elements
    for dim, (sides, j) in stack.side_of.items():
        accumulate_factor(sides.factors[j, span], G, dim, recipe.beta_factors, taken)
    first = correction(recipe.betas[0], t[span])  # of the averaged gradient
    if "exp_avg" in elements and isinstance(recipe.grafting, Adam) and stack.device.type in _FUSED:
        D = stack.buffer("direction", chunk)
        counts = t[span].to(torch.float32)
        m, v = elements["exp_avg"][span], elements["graft_avg_sq"][span]
        pieces = [where for _, _, where in chunk.pieces]
        lists = [whole.split([where.stop - where.start for where in pieces]) for whole in (m, v, G, D)]
        steps = [counts[where.start] for where in pieces]
        recipe.grafting.fused(lists[0], lists[1], lists[2], recipe.betas, steps, lists[3], taken)
        return D, torch.ones_like(first) if recipe.bias_correction else first
    m = G
    if "exp_avg" in elements:
        weight = (1 - recipe.betas[0]) * taken
        m = elements["exp_avg"][span].lerp_(G, weight.to(G.dtype) if isinstance(weight, Tensor) else weight)
    factor = 1 / first if recipe.bias_correction else torch.ones_like(first)
    if recipe.grafting is None:
        return m, factor
    kept = elements["graft_avg_sq"][span] if recipe.grafting.keeps else None
    if kept is not None:
        recipe.grafting.accumulate(kept, G, recipe.betas[1], taken)
    D, own = recipe.grafting.direction(m, kept, recipe.betas[1], t[span], stack.buffer("direction", chunk))
    return D, factor * own


def precondition(
    stack: Stack, chunk: Chunk, G: Tensor | None, t: Tensor, taken: Scalar
) -> tuple[Tensor, Tensor]:
    """Return ``U`` up to a factor for each block, and the factor, ``(b,)``.

    With a = beta3 / beta1 and M as it is after the step, what is preconditioned is ``N = a M + (1 - a) G``, of weight ``1 - a beta1^t``. Writes to G.
    """
    recipe, span, share = stack.recipe, chunk.span, stack.recipe.average_share
    M = stack.elements["exp_avg"][span] if "exp_avg" in stack.elements else None
    if M is not None and share == 1:
        U = M
    else:
        U = gather(stack, chunk, taken) if G is None else G
        if M is not None:
            U.lerp_(M, share)
    for i, (dim, (sides, j)) in enumerate(stack.side_of.items()):
        # what waits for the norms of a layer needs memory of its own
        fresh = recipe.grafting_scope == "layer" and i == len(stack.side_of) - 1
        out = None if fresh else stack.buffer(("direction", "gradient")[i % 2], chunk)
        U = mode_product(sides.roots[j, span], U, dim, out)
    if not recipe.bias_correction:
        return U, torch.ones_like(t[span])
    return U, 1 / (1 - share * recipe.betas[0] ** t[span])


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
    factor = scale.to(U.dtype)
    for member, piece, where in chunk.pieces:
        write(member, piece, U[where], factor[where], taken)


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
        target.addcmul_(U, scale * rate.to(U.dtype), value=sign)
    else:
        target.addcmul_(U, scale, value=sign * rate)
    if target is not blocks:
        blocks.copy_(target)
    if not in_place:
        param.copy_(seen.view(param.shape))
