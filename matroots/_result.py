# SPDX-License-Identifier: Apache-2.0
"""What a solve returns: the root, and per member what happened on the way to it."""

from __future__ import annotations

import math
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matroots._certificate import Certificate

    LinAlgError = RuntimeError  # its base class: torch exports the name without a type
else:
    from torch.linalg import LinAlgError

_ROWS_SHOWN = 32
_NAMES_SHOWN = 8


class Status(IntEnum):
    """How the solve of one member ended; :attr:`advice` is the sentence to read."""

    CONVERGED = 0
    MAX_STEPS = 1
    STAGNATED = 2
    DIVERGED = 3
    NONFINITE_INPUT = 4
    INDEFINITE = 5
    SINGULAR = 6

    @property
    def advice(self) -> str:
        """What this status means and what to try next."""
        return _ADVICE[self]

    @property
    def failed(self) -> bool:
        """Whether the member has no usable root and is filled with NaN."""
        return self >= Status.DIVERGED


_ADVICE = {
    Status.CONVERGED: "converged to the requested tolerance",
    Status.MAX_STEPS: (
        "ran out of steps (or degree, or poles) before the tolerance, or lies below the floor: increase max_steps, steps,"
        " degree, poles or the damping"
    ),
    Status.STAGNATED: (
        "stopped at the precision limit, above the tolerance: use a wider dtype, more damping or a larger tol"
    ),
    Status.DIVERGED: (
        'the iteration or the eigendecomposition broke down: use more damping, a wider dtype or method="evd"'
    ),
    Status.NONFINITE_INPUT: "the input has a NaN or an infinity: find out where it came from",
    Status.INDEFINITE: (
        "the input is not symmetric positive definite, by more than rounding: symmetrise it, or add damping"
        " above the size of its most negative eigenvalue"
    ),
    Status.SINGULAR: (
        "the input has a zero eigenvalue, or its root overflows the output's dtype: add damping, or use"
        ' method=EVD(spectrum="pinv")'
    ),
}


class RootError(LinAlgError):
    """Raised by :func:`matroots.inv_root` when members of the batch have no usable root.

    ``status`` holds the status of every member (int32, the batch shape).
    """

    def __init__(self, message: str, status: Tensor) -> None:
        super().__init__(message)
        self.status = status

    def __reduce__(self) -> tuple[type[RootError], tuple[str, Tensor]]:
        return RootError, (str(self), self.status)


class RootWarning(UserWarning):
    """Issued by :func:`matroots.inv_root` when a root is usable but less accurate than was asked for."""


class InvRoot(NamedTuple):
    """Result of :func:`matroots.inv_root_ex`. All tensors have the batch shape ``(*)`` unless stated.

    Attributes:
        root: ``(*, n, n)``, the dtype and device of the input, symmetric; NaN where ``status`` says failed.
        status: int32, values of :class:`Status`.
        steps: int64, iterations (polynomial degree for chebyshev, 0 for evd).
        residual: float64, bound on the solver's own ``||I - A X^p||_F`` in exact arithmetic, for the X that
            is returned. It says that the iteration has converged, not that the root is right: iterates drift
            from A. NaN where the method computes none.
        history: float64 ``(*, s)``, the residual after each step, NaN after a member's last one. For "ndb" with p >= 4 it is
            that of each square root in turn, which starts again near ``sqrt(n)``. Kept for DIVERGED members.
        scale: float64, the estimate of the largest eigenvalue that the solver divided by; NaN where nothing was solved.
        bound: float64, :func:`matroots.lambda_bound` of the input.
        damping: float64, the eps of ``(A + eps I)^{-1/p}`` that was really used.
        matmuls: int64, products of ``n x n`` matrices spent on this member; a product of split operands counts as one.
        certificate: a :class:`matroots.Certificate` when asked for, else None.
    """

    root: Tensor
    status: Tensor
    steps: Tensor
    residual: Tensor
    history: Tensor
    scale: Tensor
    bound: Tensor
    damping: Tensor
    matmuls: Tensor
    certificate: Certificate | None

    def __str__(self) -> str:
        """Return a table with one line per member, then the advice for each status that needs it."""
        return format_table(self)


def format_table(result: InvRoot) -> str:
    """Return ``result`` as a table: member, status, steps, products, residual and certified error."""
    batch = tuple(result.status.shape)
    codes = result.status.flatten().tolist()
    n = result.root.shape[-1]
    lines = [f"InvRoot: batch {batch}, {n} x {n}, {result.root.dtype}".replace("torch.", "")]
    lines.append(
        f"{'member':>10}  {'status':<15} {'steps':>5} {'products':>8} {'residual':>9} {'certified':>9}"
    )
    worst_first = sorted(range(len(codes)), key=lambda i: (-int(codes[i] != 0), i))
    shown = sorted(worst_first[:_ROWS_SHOWN])
    certified = _certified_column(result)
    columns = [c.flatten().tolist() for c in (result.steps, result.matmuls, result.residual)]
    for i in shown:
        steps, matmuls, residual = (column[i] for column in columns)
        lines.append(
            f"{member_name(i, batch):>10}  {Status(codes[i]).name:<15} {steps:>5} {matmuls:>8}"
            f" {residual:>9.1e} {certified[i]:>9}"
        )
    if len(codes) > len(shown):
        lines.append(f"{'...':>10}  {len(codes) - len(shown)} more")
    for code in sorted(set(codes) - {0}):
        members = [i for i in range(len(codes)) if codes[i] == code]
        lines.append(f"{Status(code).name}: {advise(result, members, Status(code))}")
    return "\n".join(lines)


def _certified_column(result: InvRoot) -> list[str]:
    if result.certificate is None:
        return ["-"] * result.status.numel()
    errors = result.certificate.relative_error.flatten().tolist()
    return [f"{error:.1e}" if math.isfinite(error) else "none" for error in errors]


def member_name(index: int, batch: tuple[int, ...]) -> str:
    """Return the index of a member of a flattened batch as the user would write it, e.g. ``[2, 0]``."""
    if not batch:
        return "[]"
    position = []
    for size in reversed(batch):
        index, remainder = divmod(index, size)
        position.append(str(remainder))
    return f"[{', '.join(reversed(position))}]"


def members_named(members: list[int], batch: tuple[int, ...]) -> str:
    """Return these members of a flattened batch in words, the first few by name."""
    names = ", ".join(member_name(i, batch) for i in members[:_NAMES_SHOWN])
    more = f" and {len(members) - _NAMES_SHOWN} more" if len(members) > _NAMES_SHOWN else ""
    return f"members {names}{more} of batch {batch}" if batch else "the matrix"


def members_by_status(result: InvRoot) -> dict[Status, list[int]]:
    """Return the members of the flattened batch that ended in each status that occurs, best status first."""
    codes = result.status.flatten().tolist()
    return {Status(kind): [i for i, code in enumerate(codes) if code == kind] for kind in sorted(set(codes))}


def sentence(kind: Status, members: list[int], batch: tuple[int, ...], advice: str) -> str:
    """Return members with their status and the advice for it."""
    return f"{members_named(members, batch)} ({kind.name}: {advice})"


def failure(result: InvRoot) -> str:
    """Return which members have no usable root, and why; an empty string if all have one."""
    batch = tuple(result.status.shape)
    failed = {kind: members for kind, members in members_by_status(result).items() if kind.failed}
    reasons = [sentence(kind, members, batch, kind.advice) for kind, members in failed.items()]
    return f"no usable root for {'; '.join(reasons)}" if reasons else ""


def advise(result: InvRoot, members: list[int], status: Status, p: float | None = None) -> str:
    """Return the advice for a status, with an estimate of the condition number where there is a root.

    The condition number of X to the power p estimates that of the input, from below when the iteration has
    not converged; without p (the result does not carry it) that of X is given.
    """
    if status.failed or not members:
        return status.advice
    worst = max(members, key=lambda i: float(result.residual.flatten()[i].nan_to_num(0.0)))
    n = result.root.shape[-1]
    X = result.root.detach().reshape(-1, n, n)[worst].to("cpu", torch.float64)
    spectrum = torch.linalg.eigvalsh(X).abs()
    smallest = torch.finfo(torch.float64).tiny
    condition = float((spectrum.max() / spectrum.min().clamp_min(smallest)).clamp_min(1.0))
    name = member_name(worst, tuple(result.status.shape))
    if p is None:
        return (
            f"{status.advice}; the condition number of root {name} is {condition:.1e}, A's is its p-th power"
        )
    estimate = p * math.log10(condition)
    return f"{status.advice}; the estimated condition number of member {name} is 1e{estimate:.1f} or more"
