# SPDX-License-Identifier: Apache-2.0
"""Which roots are computed in a step, and what becomes of them.

Three schedules: one ``update_freq``-th of the blocks each step ("staggered"), all every ``update_freq`` steps ("interval"), or where a certificate of
the old root against the new factor asks for it ("certified", :mod:`dash_optim.stale`). A solve that fails leaves the last good root in place,
the identity if there was none, and is counted.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dash_optim.names import parameter_name
from dash_optim.options import Recipe
from dash_optim.stacks import FIELD, Chunk, Sides, Stack
from dash_optim.stale import certified_due, certify_fresh
from dash_optim.update import correction
from matroots import Status, inv_root_ex
from matroots._products import may_hold


def due_blocks(stack: Stack, chunks: list[Chunk], calls: list[int]) -> Tensor | None:
    """Return the blocks that the calendar wants refreshed, an index on the CPU; None where there are none.

    ``calls`` counts each member's steps so far, this one included. The first step after ``start_step`` refreshes all.
    """
    recipe = stack.recipe
    due = []
    for chunk in chunks if recipe.refresh != "certified" else ():
        if not chunk.preconditioned:
            continue
        for member, _, where in chunk.pieces:
            age = calls[member.index] - recipe.start_step - 1
            every = (
                interval(calls[member.index], recipe.update_freq)
                if recipe.refresh_young
                else recipe.update_freq
            )
            blocks = torch.arange(chunk.start + where.start, chunk.start + where.stop, device="cpu")
            if recipe.refresh == "staggered" and age > 0:
                blocks = blocks[(age + stack.phase_of[blocks]) % every == 0]
            elif age % every:
                continue
            due.append(blocks)
    index = torch.cat(due) if due else torch.empty(0, dtype=torch.int64, device="cpu")
    return index if len(index) else None


def interval(gradients: int, update_freq: int) -> int:
    """Return the steps between refreshes of factors that have seen so many gradients.

    A root that was computed from k of t gradients preconditions with what those k have shown. Steps are the power of two at most a quarter of t, until that reaches ``update_freq``:
    with 10, every step until the 8th, every second until the 16th, then every fourth and eighth, and every tenth from the 40th.
    """
    quarter = max(1, gradients // 4)
    return update_freq if quarter >= update_freq else 1 << (quarter.bit_length() - 1)


def refresh(stack: Stack, due: Tensor, t: Tensor) -> None:
    """Compute the roots of all factors of the ``due`` blocks; ``t``, ``(b,)``, counts each block's steps."""
    for sides in stack.sides:
        refresh_factors(stack, sides, sides.numbers(due), t)


def refresh_certified(stack: Stack, chunks: list[Chunk], t: Tensor) -> None:
    """Compute the roots of those factors whose old root is not proven to be within ``refresh_tol``; looks at the device."""
    for sides in stack.sides:
        due = [certified_due(stack, sides, chunk, t) for chunk in chunks if chunk.preconditioned]
        if due:
            refresh_factors(stack, sides, torch.cat(due).sort().values, t)


def refresh_factors(stack: Stack, sides: Sides, index: Tensor, t: Tensor) -> None:
    """Compute the roots of factors by their numbers, `Stack.most_roots` at a time; consecutive ones without a copy."""
    most = stack.most_roots(sides.size)
    for start in range(0, len(index), most):
        part = index[start : start + most]
        first, last = int(part[0]), int(part[-1])
        whole = last - first + 1 == len(part)
        _refresh_part(stack, sides, slice(first, last + 1) if whole else part.to(stack.device), t)


def _refresh_part(stack: Stack, sides: Sides, which: slice | Tensor, t: Tensor) -> None:
    """Solve, keep the old root where that failed, and write down what happened.

    The factor divided by its correction c has the root ``c^{1/p} (F + c eps I)^{-1/p}``, which spares a copy of it.
    """
    recipe, p = stack.recipe, float(stack.p)
    F, roots = sides.factors.flatten(0, 1)[which], sides.roots.flatten(0, 1)
    record = sides.record.flatten(0, 1)
    steps = t.repeat(len(sides.dims))[which]
    c = correction(recipe.beta_factors if recipe.bias_correction else 1.0, steps)
    damping = recipe.damping * c if recipe.damping else 0.0
    keywords = recipe.keywords(stack.p, sides.size, F.dtype, F.device)
    result = inv_root_ex(F, stack.p, damping=damping, **keywords)
    X = result.root.mul_((c ** (1 / p)).to(F.dtype).reshape(-1, 1, 1))
    failed = result.status >= int(Status.DIVERGED)
    empty = failed & (result.bound == 0)  # no gradient has come yet: nothing to precondition, and no failure
    if may_hold(failed):
        failed = failed & ~empty
        X = torch.where(failed.reshape(-1, 1, 1), roots[which], X)
        X = torch.where(empty.reshape(-1, 1, 1), torch.eye(sides.size, dtype=X.dtype, device=X.device), X)
    roots[which] = X
    old = record[which]
    new = old.clone()
    new[:, FIELD["refreshed_at"]] = steps
    new[:, FIELD["damping"]] = result.damping / c
    new[:, FIELD["correction"]] = c
    new[:, FIELD["refreshes"]] += 1
    new[:, FIELD["alpha"]] = torch.nan
    new[:, FIELD["beta"]] = torch.nan
    if recipe.refresh == "certified":
        low, high = certify_fresh(F, X, c, result.damping / c, stack.p)
        new[:, FIELD["alpha"]], new[:, FIELD["beta"]] = low, high
    new = torch.where(failed.unsqueeze(-1), old, new)
    new[:, FIELD["status"]] = result.status.masked_fill(empty, int(Status.CONVERGED)).to(new.dtype)
    new[:, FIELD["failures"]] = torch.where(failed, old[:, FIELD["failures"]] + 1, 0.0)
    new[:, FIELD["failed"]] += failed
    new[:, FIELD["alpha"]].masked_fill_(failed, torch.nan)  # what held a step ago is not followed any further
    record[which] = new
    _watch(stack)


def _watch(stack: Stack) -> None:
    """Bring the largest number of failures in a row to the CPU, without waiting for it."""
    failures = torch.stack([sides.record[..., FIELD["failures"]].amax() for sides in stack.sides]).amax()
    if stack.worst is None:
        stack.worst = torch.zeros_like(failures, device="cpu", pin_memory=failures.is_cuda)
    stack.worst.copy_(failures, non_blocking=True)


def over_budget(stack: Stack) -> str | None:
    """Return a sentence about the first factor that has failed too often in a row, or None.

    Nobody waits for an accelerator: what has not arrived from it yet is seen a step later.
    """
    if stack.worst is None or float(stack.worst) <= stack.recipe.failure_budget:
        return None
    for sides in stack.sides:
        failures = sides.record[..., FIELD["failures"]]
        over = failures > stack.recipe.failure_budget
        if not bool(over.any()):
            continue
        j, block = (int(i) for i in over.nonzero()[0])
        member = next(member for member in stack.members if block < member.stop)
        status = Status(int(sides.record[j, block, FIELD["status"]]))
        number = int(member.blocks.numbers[block - member.start])  # as `diagnostics` counts
        return (
            f"{parameter_name(member.group, member.param)}, block {number} of {math.prod(member.blocks.whole)} ({member.blocks.name}), factor of"
            f" dimension {sides.dims[j]}: {int(failures[j, block])} roots have failed in a row (failure_budget="
            f"{stack.recipe.failure_budget}), the last as {status.name}: {status.advice}. The last good root is still in use;"
            f" {_remedy(status, stack.recipe)}"
        )
    return None


def _remedy(status: Status, recipe: Recipe) -> str:
    """Return which options of the optimizer help; another method or dtype finds the same zero eigenvalue."""
    if status == Status.NONFINITE_INPUT:
        return "something other than a gradient has put it into the optimizer's state: load the last good checkpoint"
    now = recipe.rel_damping
    damping = f"try rel_damping={10 * now or 1e-6:g}, now {now:g}" + ("" if now else " (1e-4 for p = 2)")
    if status == Status.SINGULAR:
        return damping
    return f"{damping}; then factor_dtype=torch.float64, or method='evd'"
