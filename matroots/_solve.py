# SPDX-License-Identifier: Apache-2.0
"""A solve in chunks: prepare, scale, solve, and bring the answer back to the user's units and dtype."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain

import torch
from torch import Tensor
from torch.nn.functional import pad

from matroots._exponent import Exponent
from matroots._options import Options
from matroots._prepare import (
    EMPTY_ROW,
    Prepared,
    decoupled,
    flag_zero_rows,
    largest_entry,
    members_of,
    prepare,
    prove_definite,
    raise_damping,
    rescaled,
)
from matroots._products import (
    HALF_DTYPES,
    Product,
    exceeds,
    full_precision,
    has_cholesky_factor,
    may_hold,
    symmetric_part,
    unit_roundoff,
    wide,
)
from matroots._result import InvRoot, Status
from matroots._threads import balanced, mapped, workers
from matroots.scaling.bounds import guarded
from matroots.solvers import EVD, Problem, Solution
from matroots.solvers._problem import Want
from matroots.solvers.evd import LAPACK_LIMIT

# bytes; 512 x 64 x 64 fp32 by ndb on 32 MB of L3 cache: 1.06 times the products alone, unchunked 1.5
_CACHE = 12 * 2**20


def solve(A: Tensor, options: Options, want: Want) -> tuple[InvRoot, Tensor]:
    """Solve in chunks of ``max_batch`` members; return the result and, for a pair, ``A^{1/p}`` beside it."""
    return solve_judged(A, options, want)[:2]


def solve_judged(A: Tensor, options: Options, want: Want) -> tuple[InvRoot, Tensor, Tensor]:
    """Return the same and the solver's estimate of its error from rounding, NaN where it has none; float64."""
    n, batch = A.shape[-1], A.shape[:-2]
    b = math.prod(batch)
    if isinstance(options.solver, EVD) and n > LAPACK_LIMIT:
        raise ValueError(f"A: LAPACK's eigh needs n <= {LAPACK_LIMIT} (32-bit workspace index), got n = {n}")
    if A.numel() == 0:
        whole = _nothing(A, b)
    else:
        whole = _collected(_chunks(A.detach(), chunk_size(A, options), options, want), b)
    small = {name: field.reshape((*batch, *field.shape[1:])) for name, field in whole.diagnostics.items()}
    roots = [root.reshape(A.shape) for root in whole.roots]
    rounding = small.pop("rounding")
    return InvRoot(root=roots[0], **small, certificate=None), roots[-1], rounding


def chunk_size(A: Tensor, options: Options) -> int:
    """Return how many members are solved at once: what the cache of a CPU holds, at most ``max_batch``."""
    b, n = A.shape[:-2].numel(), A.shape[-1]
    held = b
    if A.is_cpu:
        held = max(1, _CACHE // (options.solver.buffers * n * n * options.compute_dtype.itemsize))
    return min(b, held, options.max_batch or b)


@dataclass(frozen=True)
class _Part:
    """Some members' roots (one, or the inverse and the other), the fields of :class:`InvRoot` beside ``root``, and "rounding"."""

    roots: tuple[Tensor, ...]
    diagnostics: dict[str, Tensor]


def _nothing(A: Tensor, b: int) -> _Part:
    """The result for an empty batch or 0 x 0 matrices, whose empty roots are exact."""
    zero = torch.zeros(b, dtype=wide(A.device), device=A.device)
    count = zero.to(torch.int64)
    counts = {"status": count.to(torch.int32), "steps": count, "matmuls": count}
    values = dict.fromkeys(("residual", "scale", "bound", "damping", "rounding"), zero)
    return _Part((torch.empty_like(A.detach()),), {**counts, **values, "history": zero.new_empty(b, 0)})


def _chunks(A: Tensor, size: int, options: Options, want: Want) -> Iterator[_Part]:
    """Solve ``size`` members at a time, on CPU several chunks at once; each chunk draws the same start vectors."""
    b, n = options.damping.shape[0], A.shape[-1]
    generator = options.generator
    state = None if generator is None else generator.get_state()

    def part(start: int) -> _Part:
        if generator is not None and state is not None:
            generator.set_state(state)
        with full_precision(A.device):
            chunk = members_of(A, start, size)
            return _solve_chunk(chunk, options.damping[start : start + size], options, want)

    # a generator has one state, and a mode of torch's one thread
    threads = workers(b, n) if A.is_cpu and generator is None else 1
    if threads > 1:  # as many chunks as keep every thread busy to the end
        rounds = -(-b // (size * threads))
        size = -(-b // (threads * rounds))
    starts = range(0, b, size)
    if threads > 1 and balanced(b, size, threads):
        yield from mapped(part, starts, threads)
    else:
        yield from map(part, starts)


def _collected(parts: Iterator[_Part], b: int) -> _Part:
    """Write the chunks into whole tensors as they come: no second copy of the result builds up."""
    first = next(parts)
    if first.roots[0].shape[0] == b:
        return first
    roots = tuple(root.new_empty(b, *root.shape[1:]) for root in first.roots)
    fields = {name: field.new_empty(b, *field.shape[1:]) for name, field in first.diagnostics.items()}
    start = 0
    for part in chain([first], parts):
        stop = start + part.roots[0].shape[0]
        for whole, root in zip(roots, part.roots, strict=True):
            whole[start:stop] = root
        width = max(fields["history"].shape[1], part.diagnostics["history"].shape[1])
        for diagnostics in (fields, part.diagnostics):
            history = diagnostics["history"]
            diagnostics["history"] = pad(history, (0, width - history.shape[1]), value=torch.nan)
        for name, field in part.diagnostics.items():
            fields[name][start:stop] = field
        start = stop
    return _Part(roots, fields)


def _solve_chunk(A: Tensor, damping: Tensor, options: Options, want: Want) -> _Part:
    """Prepare, scale, solve, and bring the answer back to the user's units and dtype."""
    solver = options.solver
    prepared = prepare(A, damping, options.rel_damping, options.compute_dtype, solver.damped_input)
    scale = torch.ones_like(prepared.bound)
    covered = torch.ones_like(prepared.symmetric)
    if solver.needs_definite:
        scale = _scale(decoupled(prepared), options)
        floor = scale * solver.designed_floor(options.rel_damping, options.lowest)
        eps = prepared.damping
        if options.assume_positive:
            prepared = flag_zero_rows(prepared) if want != "root" else prepared
        else:
            prepared, covered = prove_definite(prepared, floor, unit_roundoff(A.dtype), want != "root")
        if options.operands is not None:
            prepared = raise_damping(prepared, options.operands.least_eigenvalue(float(options.p)))
            covered = covered | exceeds(prepared.A, floor)
        scale = scale + (prepared.damping - eps)
    solution = solver.solve(_problem(prepared, scale, covered, options, want))
    if solution.shift is not None:  # a shifted row is no longer empty
        prepared = replace(prepared, zero_rows=prepared.zero_rows & (solution.shift == 0).unsqueeze(-1))
    unsolved = prepared.status != int(Status.CONVERGED)  # something else stood in its place
    status = torch.where(unsolved, prepared.status, solution.status)
    computed = [(s, X) for s, X in ((-1, solution.inverse), (1, solution.root)) if X is not None]
    roots = [_returned(X, scale, prepared, options.p, sign, A.dtype) for sign, X in computed]
    for root, (_, X) in zip(roots, computed, strict=True):
        status = status.masked_fill(
            (status < int(Status.DIVERGED)) & _lost(X, covered | unsolved, options), int(Status.DIVERGED)
        )
        unusable = (status < int(Status.DIVERGED)) & _unusable(root, X) & ~prepared.zero_rows.all(-1)
        status = torch.where(unusable, int(Status.SINGULAR), status).to(torch.int32)
    failed = status >= int(Status.DIVERGED)
    if may_hold(failed):
        for root in roots:
            root.masked_fill_(failed.reshape(-1, 1, 1), torch.nan)
    unknown = torch.full_like(scale, torch.nan)
    rounding = unknown if solution.rounding is None else solution.rounding
    diagnostics = {
        "status": status,
        "steps": solution.steps.masked_fill(unsolved, 0),
        "residual": solution.residual.masked_fill(failed, torch.nan),
        "rounding": rounding.masked_fill(failed | unsolved, torch.nan),
        "history": solution.history.masked_fill(unsolved.unsqueeze(-1), torch.nan),
        "matmuls": solution.matmuls + (options.scaling.matmuls if solver.needs_definite else 0),
    }
    return _Part(tuple(roots), diagnostics | _in_units_of_input(prepared, solution, scale))


def _unusable(root: Tensor, computed: Tensor) -> Tensor:
    """Return whether a root has overflown its dtype, or vanished in half precision, ``(b,)``."""
    largest = largest_entry(root)
    if root.dtype not in HALF_DTYPES:
        return ~torch.isfinite(largest)
    return ~torch.isfinite(largest) | ((largest == 0) & (largest_entry(computed) > 0))


def _lost(X: Tensor, covered: Tensor, options: Options) -> Tensor:
    """Return whether X may have a wrong sign, ``(b,)``: no Cholesky factor, where rounding could have carried an eigenvalue across zero.

    That is where A is not proven to lie above a few u, and wherever all products are plain half precision.
    """
    plain = options.operands is not None and options.operands.parts == 1
    suspect = torch.ones_like(covered) if plain else ~covered
    return suspect & ~has_cholesky_factor(symmetric_part(X)) if may_hold(suspect) else suspect


def _problem(prepared: Prepared, scale: Tensor, covered: Tensor, options: Options, want: Want) -> Problem:
    """Divide by the scale, in place."""
    return Problem(
        A=prepared.A.div_(scale.to(prepared.A.dtype).reshape(-1, 1, 1)),
        p=options.p,
        want=want,
        damping=prepared.damping / scale,
        rel_damping=options.rel_damping,
        noise=prepared.noise / scale,
        zero_rows=prepared.zero_rows,
        tol=options.solver_tol,
        max_steps=options.max_steps,
        lowest=options.lowest,
        covered=covered,
        multiply=Product(options.operands),
        judged=options.certified_tol is not None,
    )


def _scale(prepared: Prepared, options: Options) -> Tensor:
    """Estimate the largest eigenvalue and guard it by the proven bound; 1 for a member that has failed."""
    usable = prepared.status == int(Status.CONVERGED)
    bound = torch.where(usable, prepared.bound.clamp_min(EMPTY_ROW) + prepared.damping, 1.0)
    estimate = options.scaling.estimate(prepared.A, options.generator)
    return guarded(prepared.A, estimate, bound, options.solver.headroom(options.p))


def _returned(
    root: Tensor, scale: Tensor, prepared: Prepared, p: Exponent, sign: int, dtype: torch.dtype
) -> Tensor:
    """Return the symmetric part of a root of ``A/scale``, times ``(2^k scale)^(sign/p)``, in the user's dtype.

    ``2^(k/p)`` is split into an exact power of two and a rest below 2, so that scaling is as exact at 1e20 as at 1.
    """
    a, b = p.as_integer_ratio() if isinstance(p, Fraction) else (p, 1)
    whole = torch.floor(sign * prepared.exponent * b / a)
    rest = (sign * prepared.exponent * b - whole * a) / a
    factor = scale ** (sign / float(p)) * torch.exp2(rest) / 2
    result = torch.add(root, root.mT).mul_(factor.to(root.dtype).reshape(-1, 1, 1))
    if may_hold(whole != 0):
        result = rescaled(result, whole)
    if sign > 0:
        empty = prepared.zero_rows
        result.masked_fill_(empty.unsqueeze(-1) | empty.unsqueeze(-2), 0.0)
    return result.to(dtype)


def _in_units_of_input(prepared: Prepared, solution: Solution, scale: Tensor) -> dict[str, Tensor]:
    """Return scale, bound and damping as the user measures them; NaN where the input has none."""
    meaningless = (prepared.status == int(Status.NONFINITE_INPUT)) | ~prepared.symmetric
    unsolved = prepared.status != int(Status.CONVERGED)
    found = scale if solution.scale is None else scale * solution.scale
    eps = prepared.damping if solution.shift is None else prepared.damping + scale * solution.shift
    return {
        name: rescaled(value, prepared.exponent).masked_fill(unknown, torch.nan)
        for name, value, unknown in (
            ("scale", found, unsolved),
            ("bound", prepared.bound, meaningless),
            ("damping", eps, meaningless),
        )
    }
