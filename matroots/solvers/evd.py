# SPDX-License-Identifier: Apache-2.0
"""Eigendecomposition: ``Q diag(f(lambda)) Q^T`` with one product, and what is done with eigenvalues that f cannot take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from matroots._arguments import check_number
from matroots._exponent import Exponent
from matroots._products import add_to_diagonal, unit_roundoff, wide
from matroots._result import Status
from matroots._rounding import decomposition_rounding
from matroots.solvers._problem import Problem, Solution

Spectrum = Literal["damp", "shift", "abs", "clip", "pinv", "refuse"]
LAPACK_LIMIT = 32766  # largest n whose workspace of 1 + 6 n + 2 n^2 a 32-bit LAPACK integer can hold


@dataclass(frozen=True)
class EVD:
    """``torch.linalg.eigh``, ``method="evd"``: any real p >= 1.

    Args:
        compute_dtype: ``torch.float32`` or ``torch.float64`` for everything, damping included; None: float64 for float64
            input, else float32. The output keeps the input's dtype.
        spectrum: what becomes of an eigenvalue l before the power is taken, eps being the damping.

            - ``"damp"``: ``l + eps``; a result in ``[-n u bound, 0]`` is rounding and is shifted just above zero, one
              below makes the member INDEFINITE (the rule of all methods). One less than ``n u l_max`` below eps, u of
              the compute dtype, is taken as eps.
            - ``"shift"``: ``l - min(l_min, 0) + eps``, as Distributed Shampoo does.
            - ``"abs"``: ``|l| + eps``. ``"clip"``: ``max(l, eps)``.
            - ``"pinv"``: ``l + eps``, but 0 in the result where ``l <= rtol l_max`` (pseudo-inverse).
            - ``"refuse"``: ``l + eps``; INDEFINITE for any negative result, SINGULAR for zero.
        rtol: rank tolerance of ``"pinv"``, relative to the largest eigenvalue; None: ``n u``.
    """

    compute_dtype: torch.dtype | None = None
    spectrum: Spectrum = "damp"
    rtol: float | None = None

    def __post_init__(self) -> None:
        if self.compute_dtype not in (None, torch.float32, torch.float64):
            raise ValueError(
                f"compute_dtype: expected torch.float32, torch.float64 or None, got {self.compute_dtype!r}"
            )
        if self.spectrum not in get_args(Spectrum):
            raise ValueError(f"spectrum: expected one of {get_args(Spectrum)}, got {self.spectrum!r}")
        if self.rtol is not None and (self.spectrum != "pinv" or check_number("rtol", self.rtol) >= 1):
            raise ValueError(
                f'rtol: expected a number in [0, 1) together with spectrum="pinv", got {self.rtol!r} with'
                f" {self.spectrum!r}"
            )

    @property
    def needs_definite(self) -> bool:
        """The eigenvalues tell, so no proof is needed beforehand."""
        return False

    @property
    def damped_input(self) -> bool:
        """Whether the spectrum is treated after the damping, or the damping is part of the treatment."""
        return self.spectrum in ("damp", "refuse")

    @property
    def own_scaling(self) -> str:
        """Not used; "auto" hands it on to "rational"."""
        return "frobenius"

    @property
    def buffers(self) -> int:
        """The input, the eigenvectors, scaled and not, and the root."""
        return 4

    def check(self, p: Exponent, tol: float | None, max_steps: int | None) -> None:
        """Raise ``ValueError`` for ``max_steps`` and ``tol``: there are no steps, and no residual."""
        if tol is not None:
            raise ValueError(
                f'tol: method "evd" has no residual to bound, got {tol}; "auto" bounds the certified error'
            )
        if max_steps is not None:
            raise ValueError(f'max_steps: method "evd" takes no steps, got {max_steps}; drop it')

    def headroom(self, p: Exponent) -> float:
        """No scale is needed."""
        return float("inf")

    def designed_floor(self, rel_damping: float, lowest: float) -> float:
        """None."""
        return 0.0

    def solve(self, problem: Problem) -> Solution:
        """Compute ``Q f(lambda) Q^T`` for the powers that are wanted."""
        A = problem.A
        eigenvalues, Q, jitter, decomposed = eigh_with_ladder(A)
        eigenvalues = eigenvalues.to(wide(A.device))
        top = eigenvalues.abs().amax(-1)
        kept, shift, status = self._treat(eigenvalues, problem, unit_roundoff(A.dtype))
        status = torch.where(decomposed, status, int(Status.DIVERGED)).to(torch.int32)
        power = 1.0 / float(problem.p)
        used = kept > 0
        inverse = root = None
        if problem.want != "root":
            inverse = _reconstruct(Q, torch.where(used, kept, 1.0) ** -power * used)
        if problem.want != "inverse":
            root = _reconstruct(Q, kept**power)
        residual, matmuls = torch.full_like(top, torch.nan), 2 if problem.want == "pair" else 1
        each = torch.ones_like(status, dtype=torch.int64)
        return Solution(
            inverse=inverse,
            root=root,
            status=status,
            steps=0 * each,
            residual=residual,
            history=top.new_empty(top.shape[0], 0),
            matmuls=matmuls * each,
            scale=top,
            shift=shift + jitter,
            rounding=decomposition_rounding(
                kept.amax(-1) / kept.amin(-1), A.shape[-1], float(problem.p), unit_roundoff(A.dtype)
            ),
        )

    def _treat(self, eigenvalues: Tensor, problem: Problem, u: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return the eigenvalues that the power is taken of, the shift that made them, and the status.

        The eigenvalues are those of the damped matrix for "damp" and "refuse", of A itself for the rest. A 0 among
        those returned stays 0 in either root.
        """
        eps = problem.damping.unsqueeze(-1)
        smallest = eigenvalues.amin(-1)
        if self.damped_input:
            return self._refusing(eigenvalues, problem, smallest, u)
        if self.spectrum == "pinv":
            return self._pseudo(eigenvalues, problem, u)
        if self.spectrum == "shift":
            changed = -smallest.clamp(max=0.0)
            kept = eigenvalues + changed.unsqueeze(-1) + eps
        elif self.spectrum == "abs":
            changed = torch.where(smallest < 0, torch.nan, 0.0)
            kept = eigenvalues.abs() + eps
        else:
            changed = torch.where(smallest < problem.damping, torch.nan, -problem.damping)
            kept = torch.maximum(eigenvalues, eps)
        singular = (kept.amin(-1) <= 0) & (problem.want != "root")
        return (
            kept.clamp_min(0.0),
            changed,
            torch.where(singular, int(Status.SINGULAR), int(Status.CONVERGED)),
        )

    def _refusing(
        self, eigenvalues: Tensor, problem: Problem, smallest: Tensor, u: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        zero = problem.zero_rows.any(-1) | (smallest == 0)
        if problem.want != "inverse":
            zero = zero & (problem.want == "pair")
        tolerance = 1.125 * problem.noise if self.spectrum == "damp" else torch.zeros_like(smallest)
        status = torch.where(zero, int(Status.SINGULAR), int(Status.CONVERGED))
        status = torch.where(smallest < -tolerance, int(Status.INDEFINITE), status)
        if problem.want == "root":
            return eigenvalues.clamp_min(0.0), torch.zeros_like(smallest), status
        shift = torch.where(smallest <= 0, problem.noise / 8 - smallest, 0.0)
        kept = eigenvalues + shift.unsqueeze(-1)
        # an eigenvalue below eps by no more than eigh's own rounding belongs to one of A that is not negative
        eps, rounding = (
            problem.damping.unsqueeze(-1),
            kept.shape[-1] * u * eigenvalues.abs().amax(-1, keepdim=True),
        )
        kept = torch.where((kept < eps) & (kept >= eps - rounding), eps, kept)
        return kept.clamp_min(0.0), shift.masked_fill(status != int(Status.CONVERGED), 0.0), status

    def _pseudo(self, eigenvalues: Tensor, problem: Problem, u: float) -> tuple[Tensor, Tensor, Tensor]:
        eps, sizes = problem.damping.unsqueeze(-1), eigenvalues.abs().amax(-1, keepdim=True)
        cutoff = (eigenvalues.shape[-1] * u if self.rtol is None else self.rtol) * sizes
        kept = torch.where(eigenvalues > cutoff, eigenvalues + eps, 0.0)
        noise = problem.noise.unsqueeze(-1) * sizes / (sizes + eps).clamp_min(torch.finfo(sizes.dtype).tiny)
        indefinite = (eigenvalues < -torch.maximum(cutoff, noise)).any(-1)
        shift = torch.where((eigenvalues <= cutoff).any(-1), torch.nan, 0.0)
        return kept, shift, torch.where(indefinite, int(Status.INDEFINITE), int(Status.CONVERGED))


def _reconstruct(Q: Tensor, values: Tensor) -> Tensor:
    """Return ``Q diag(values) Q^T``: a scaling of columns and one product."""
    return torch.bmm(Q * values.to(Q.dtype).unsqueeze(-2), Q.mT)


def eigh_with_ladder(A: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Decompose ``(b, n, n)``; where LAPACK gives up, each member alone climbs a ladder.

    The rungs: its own dtype, float64, float64 with a diagonal shift of ``n u``, and the same on the CPU. Returns
    eigenvalues, eigenvectors (in A's dtype), the shift added and whether the member could be decomposed, both ``(b,)``.
    """
    jitter = torch.zeros(A.shape[0], dtype=wide(A.device), device=A.device)
    decomposed = torch.ones(A.shape[0], dtype=torch.bool, device=A.device)
    try:
        eigenvalues, Q = torch.linalg.eigh(A)
    except RuntimeError as error:
        _reraise_memory(error)
        eigenvalues = A.new_ones(A.shape[:-1])
        Q = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device).repeat(A.shape[0], 1, 1)
        for i in range(A.shape[0]):
            rung = _climb(A[i])
            decomposed[i] = rung is not None
            if rung is not None:
                eigenvalues[i], Q[i], jitter[i] = rung
    return eigenvalues, Q, jitter, decomposed


def _climb(A: Tensor) -> tuple[Tensor, Tensor, float] | None:
    """Return eigenvalues, eigenvectors and shift from the first rung that holds, or None."""
    shift = A.shape[-1] * unit_roundoff(A.dtype) * float(A.abs().amax())
    precise = A.to(wide(A.device))
    shifted = add_to_diagonal(precise.clone().unsqueeze(0), shift)[0]
    for matrix, jitter in (
        (A, 0.0),
        (precise, 0.0),
        (shifted, shift),
        (shifted.to("cpu", torch.float64), shift),
    ):
        try:
            eigenvalues, Q = torch.linalg.eigh(matrix)
        except RuntimeError as error:
            _reraise_memory(error)
            continue
        return eigenvalues.to(A), Q.to(A), jitter
    return None


def _reraise_memory(error: RuntimeError) -> None:
    """Let lack of memory through: another rung would need more."""
    if isinstance(error, torch.OutOfMemoryError) or "alloc" in str(error).lower():
        raise error
