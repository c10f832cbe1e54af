# SPDX-License-Identifier: Apache-2.0
"""From the user's matrix to one that a solver can take: symmetric, of moderate size, damped, proven positive definite.

Every method goes through here, so that damping, symmetry and definiteness mean the same for all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from matroots._arguments import REAL_DTYPES, check_matrices, check_values
from matroots._hermitian import COMPLEX_DTYPES, real_form
from matroots._products import (
    HALF_DTYPES,
    add_to_diagonal,
    exceeds,
    frobenius,
    has_cholesky_factor,
    may_hold,
    symmetric_part,
    unit_roundoff,
    wide,
)
from matroots._result import Status
from matroots.scaling.bounds import norm_bound

_ONE_FACTOR = 60  # powers of two that are far from the limits of every dtype of the computation
EMPTY_ROW = 0.5  # stands in for the diagonal of a zero row: no larger than max |a_ij| after equilibration


@dataclass(frozen=True)
class Prepared:
    """A batch ``(b, n, n)`` in the compute dtype; vectors have shape ``(b,)`` and are float64.

    Attributes:
        A: ``2^-exponent`` times the symmetric part, with ``damping`` on the diagonal; identity where ``status`` failed.
        exponent: power of two taken out.
        bound: ``lambda_bound`` of the undamped matrix, in the units of A.
        damping: eps, in the units of A, the shift for rounding included.
        noise: eigenvalues above ``-noise`` may be negative by rounding alone.
        status: int32, CONVERGED where nothing is wrong.
        symmetric: bool, no antisymmetric part beyond rounding.
        zero_rows: ``(b, n)`` bool, rows that are exactly zero and undamped.
    """

    A: Tensor
    exponent: Tensor
    bound: Tensor
    damping: Tensor
    noise: Tensor
    status: Tensor
    symmetric: Tensor
    zero_rows: Tensor


def prepare(
    A: Tensor, damping: Tensor, rel_damping: float, dtype: torch.dtype, damped: bool = True
) -> Prepared:
    """Symmetrise, equilibrate and damp ``(b, n, n)``; flag what is not finite or not symmetric.

    Equilibration divides by a power of two, which is exact, so that no norm overflows or underflows.
    ``damping`` is float64 ``(b,)``, in the units of the input; it is put on the diagonal unless ``damped`` is False.
    """
    largest = largest_entry(A).to(wide(A.device))
    finite = torch.isfinite(largest) & torch.isfinite(damping)
    own = torch.frexp(torch.where(finite, largest, 1.0)).exponent.to(largest.dtype)
    both = torch.where(finite, torch.maximum(largest, damping), 1.0)
    exponent = torch.frexp(both).exponent.to(largest.dtype)
    full = rescaled(A.to(torch.promote_types(A.dtype, dtype)), -own)
    S = symmetric_part(full)
    size = frobenius(S)
    symmetric = frobenius(full.sub_(S)) <= asymmetry_tolerance(A) * size
    status = torch.where(symmetric, int(Status.CONVERGED), int(Status.INDEFINITE))
    status = torch.where(finite, status, int(Status.NONFINITE_INPUT)).to(torch.int32)
    S = with_identity(S, status != int(Status.CONVERGED))
    down = torch.exp2((own - exponent).clamp_min(-1000.0))  # a damping far above A sets the unit of both
    # in the dtype of `lambda_bound`, which knows of no compute dtype: what multiplies rel_damping is one number
    own_dtype = S.to(torch.float64 if A.dtype == torch.float64 else torch.float32)
    row_sums = own_dtype.abs().sum(-1)
    bound = norm_bound(own_dtype, row_sums) * down
    if may_hold(down != 1):
        S.mul_(down.to(S.dtype).reshape(-1, 1, 1))
    S = S.to(dtype)
    eps = torch.where(finite, rescaled(damping, -exponent), 0.0) + rel_damping * bound
    zero_rows = (row_sums == 0) & (eps.to(dtype) == 0).unsqueeze(-1)
    noise = rounding_tolerance(A, unit_roundoff(dtype)) * (bound + eps)
    S = add_to_diagonal(S, eps) if damped else S
    return Prepared(S, exponent, bound, eps, noise, status, symmetric, zero_rows)


def decoupled(prepared: Prepared) -> Prepared:
    """Give rows that are exactly zero a positive diagonal entry: the root of the rest is unaffected."""
    diagonal = prepared.A.diagonal(dim1=-2, dim2=-1)
    diagonal.add_(prepared.zero_rows.to(diagonal.dtype), alpha=EMPTY_ROW)
    return prepared


def prove_definite(
    prepared: Prepared, floor: Tensor, u_input: float, singular_fails: bool
) -> tuple[Prepared, Tensor]:
    """Show by Cholesky factors that A is positive definite, shifted for rounding where it must be, and whether it exceeds ``floor``.

    A member for which ``A - floor I`` (floor ``(b,)``, 0 for none) has a factor has shown both. One that has no factor itself
    gets the smallest of a few shifts, up to about twice ``noise``, or is INDEFINITE. An inverse root of a matrix with
    zero rows does not exist (SINGULAR, if ``singular_fails``).
    """
    A = prepared.A
    failed = ~exceeds(A, floor)
    covered = ~failed  # and not by the damping: A may have had an eigenvalue almost as negative
    if may_hold(failed & (floor > 0)):
        failed = failed & ~has_cholesky_factor(A)
    shift = torch.zeros_like(prepared.damping)
    if may_hold(failed):
        shift, failed = _shift(A, failed, prepared, u_input)
    status = prepared.status.masked_fill(
        failed & (prepared.status == int(Status.CONVERGED)), int(Status.INDEFINITE)
    )
    proven = replace(
        prepared,
        A=with_identity(add_to_diagonal(A, shift), failed),
        damping=prepared.damping + shift,
        status=status,
    )
    return flag_zero_rows(proven) if singular_fails else proven, covered


def flag_zero_rows(prepared: Prepared) -> Prepared:
    """Mark what has a row of zeros and is not damped SINGULAR: it has no inverse root."""
    singular = prepared.zero_rows.any(-1) & (prepared.status == int(Status.CONVERGED))
    return replace(prepared, status=prepared.status.masked_fill(singular, int(Status.SINGULAR)))


def raise_damping(prepared: Prepared, least: float) -> Prepared:
    """Raise the damping to ``least`` times the bound for members that are not proven to lie above that.

    ``A - least bound I`` having a Cholesky factor is the proof. What the products round away is then never negative.
    """
    A, level = prepared.A, least * prepared.bound
    low = ~has_cholesky_factor(add_to_diagonal(A.clone(), -level)) & (
        prepared.status == int(Status.CONVERGED)
    )
    shift = torch.where(low, (level - prepared.damping).clamp_min(0.0), 0.0)
    return replace(prepared, A=add_to_diagonal(A, shift), damping=prepared.damping + shift)


def _shift(A: Tensor, failed: Tensor, prepared: Prepared, u_input: float) -> tuple[Tensor, Tensor]:
    """Return the shift of each failed member, and whether none was enough.

    Half of a shift must give a Cholesky factor: the other half then stands between zero and the smallest eigenvalue.
    """
    u = unit_roundoff(A.dtype)
    finest = A.shape[-1] * u * (prepared.bound + prepared.damping)
    shift = torch.zeros_like(finest)
    rungs = [fraction * finest for fraction in (1 / 8, 1 / 2)]
    while u_input > 4 * u:  # half-precision input: its rounding is coarser than that of the computation
        rungs.append(torch.minimum(finest * (4 * u / unit_roundoff(A.dtype)), prepared.noise))
        u *= 4
    for rung in (*rungs, prepared.noise * 2.25):
        trial = torch.where(failed, rung / 2, 0.0)
        holds = has_cholesky_factor(add_to_diagonal(A.clone(), trial))
        shift = torch.where(failed & holds, rung, shift)
        failed = failed & ~holds
    return shift, failed


def largest_entry(A: Tensor) -> Tensor:
    """Return ``max |a_ij|`` of each member, ``(b,)``, NaN where there is one."""
    flat = A.flatten(-2)
    return torch.maximum(flat.amax(-1), -flat.amin(-1))


def members_of(A: Tensor, start: int, count: int) -> Tensor:
    """Return members ``start : start + count`` of ``(*, n, n)``, numbered row by row, as ``(count, n, n)``.

    Nothing but these members is copied, and they only where the batch has several dimensions.
    """
    batch = A.shape[:-2]
    if len(batch) <= 1:
        return A.reshape(-1, *A.shape[-2:])[start : start + count]
    numbers = torch.arange(start, min(start + count, batch.numel()), device=A.device)
    return A[torch.unravel_index(numbers, batch)]


def rescaled(A: Tensor, exponent: Tensor) -> Tensor:
    """Return ``2^exponent A`` (exponent ``(b,)``, A ``(b, ...)``), in two factors where one of them could overflow."""
    shape = (-1, *[1] * (A.ndim - 1))
    if not may_hold(exponent.abs() > _ONE_FACTOR):
        return A * torch.exp2(exponent).to(A.dtype).reshape(shape)
    half = torch.floor(exponent / 2)
    return (A * torch.exp2(half).to(A.dtype).reshape(shape)).mul_(
        torch.exp2(exponent - half).to(A.dtype).reshape(shape)
    )


def with_identity(A: Tensor, members: Tensor) -> Tensor:
    """Put the identity in place of these members (``(b,)`` bool): harmless in every kernel. Written into A."""
    if not may_hold(members):
        return A
    A.masked_fill_(members.reshape(-1, 1, 1), 0.0)
    return add_to_diagonal(A, members.to(A.dtype))


def asymmetry_tolerance(A: Tensor) -> float:
    """Return how large ``||A - A^T||_F / (2 ||A||_F)`` may be: ``8 sqrt(n) u``, at most ``sqrt(u)``, u of A's dtype."""
    u = unit_roundoff(A.dtype)
    return float(min(8.0 * A.shape[-1] ** 0.5 * u, u**0.5))


def rounding_tolerance(A: Tensor, u: float) -> float:
    """Return the n u of the rule on negative eigenvalues; u at least that of A's dtype, and at most ``sqrt(u)`` in all."""
    u = max(u, unit_roundoff(A.dtype))
    return float(min(A.shape[-1] * u, u**0.5))


def lambda_bound(A: Tensor) -> Tensor:
    """Return a proven upper bound on the largest eigenvalue, ``min(||A||_F, ||A||_inf) (1 + 2 n u)``.

    Deterministic, O(n^2), the same for every method and scaling: it is what ``rel_damping`` multiplies.

    Args:
        A: ``(*, n, n)`` symmetric (complex: Hermitian) up to rounding; its symmetric part is used.

    Returns:
        float64 ``(*)``; NaN for a member that is not finite or not symmetric.

    Raises:
        TypeError: if A is not a floating-point or complex tensor.
        ValueError: if A is not a batch of square matrices.

    >>> lambda_bound(torch.eye(4, dtype=torch.float64)).item()
    1.0000000000000009
    """
    check_matrices(A, "A", (*REAL_DTYPES, *COMPLEX_DTYPES))
    check_values(A, "A")
    if A.is_complex():
        A = real_form(A)
    if A.numel() == 0:
        return A.new_zeros(A.shape[:-2], dtype=wide(A.device))
    flat = A.detach().reshape(-1, *A.shape[-2:])
    dtype = torch.float32 if A.dtype in HALF_DTYPES else A.dtype
    prepared = prepare(flat, flat.new_zeros(flat.shape[0], dtype=wide(A.device)), 0.0, dtype)
    bound = rescaled(prepared.bound, prepared.exponent)
    return bound.masked_fill(prepared.status != int(Status.CONVERGED), torch.nan).reshape(A.shape[:-2])
