"""Products of batches of matrices: the one operation that every iteration spends its time in."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.backends.mkldnn import MkldnnModule

from matroots._formats import Format

HALF_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Product:
    """``alpha * A @ B`` into a buffer of the caller's, with operands optionally rounded to a lower precision.

    With a format the operands are written as sums of its parts, whose products are summed in float32, as tensor cores do.
    On CPU, whose own half ``bmm`` rounds its sums to half, this is emulated, exactly: the parts are multiplied in float32.
    """

    format: Format | None = None

    @property
    def carrier(self) -> Product:
        """The product for what carries the small eigenvalues of A on from step to step."""
        if self.format is None or self.format.carrier_parts is None:
            return self
        return Product(self.format.carrier)

    def __call__(self, A: Tensor, B: Tensor, out: Tensor, alpha: float = 1.0) -> Tensor:
        """Write ``alpha * A @ B``, ``(b, n, k)`` times ``(b, k, m)``, into ``out``, which overlaps neither; views of any strides.

        Counted as one product whatever the number of parts.
        """
        if self.format is None:
            if alpha == 1.0:
                torch.bmm(A, B, out=out)
            else:
                torch.baddbmm(out, A, B, beta=0, alpha=alpha, out=out)
            return out
        left, left_exponent = self.format.moderated(A)
        right, right_exponent = self.format.moderated(B)
        _sum_of_parts(
            self.format.split(left), self.format.split(right), out, alpha, self.format.part_roundoff
        )
        if left_exponent is not None and right_exponent is not None:
            out.mul_(torch.exp2((left_exponent + right_exponent).to(out.dtype)))
        return out


def _sum_of_parts(left: list[Tensor], right: list[Tensor], out: Tensor, alpha: float, u: float) -> None:
    """Write ``alpha sum u^(i + j) A_i B_j`` over ``i + j < parts``, by Horner's rule: the smallest terms first."""
    beta = 0.0
    for order in reversed(range(len(left))):
        for i in range(order + 1):
            _add_product(left[i], right[order - i], out, beta, alpha)
            beta = 1.0
        beta = u


def _add_product(A: Tensor, B: Tensor, out: Tensor, beta: float, alpha: float) -> None:
    """Write ``beta out + alpha A B``, summed in float32 whatever the dtype of A and B."""
    if not A.is_cuda:
        torch.baddbmm(out, A.to(out.dtype), B.to(out.dtype), beta=beta, alpha=alpha, out=out)
    elif A.dtype == out.dtype:
        with _float32_as_written.tf32():
            torch.baddbmm(out, A, B, beta=beta, alpha=alpha, out=out)
    else:
        torch.baddbmm(out, A, B, beta=beta, alpha=alpha, out_dtype=out.dtype, out=out)


def add_to_diagonal(A: Tensor, value: float | Tensor) -> Tensor:
    """Add ``value`` (a number, or one per member, shape ``(b,)``) to the diagonals of A, in place."""
    diagonal = A.diagonal(dim1=-2, dim2=-1)
    diagonal += value if isinstance(value, float) else value.to(A.dtype).unsqueeze(-1)
    return A


def symmetric_part(A: Tensor) -> Tensor:
    """Return ``(A + A^T) / 2``."""
    return torch.add(A, A.mT).mul_(0.5)


def may_hold(mask: Tensor) -> bool:
    """Return whether any of ``mask`` may be True, without waiting for a device: on the CPU looking is free."""
    return not mask.is_cpu or bool(mask.any())


def has_cholesky_factor(A: Tensor) -> Tensor:
    """Return whether symmetric ``(b, n, n)`` has a Cholesky factor, ``(b,)``: then it is positive definite up to rounding.

    The upper factor of a row-major matrix is LAPACK's lower one, a quarter faster than the other.
    """
    info: Tensor = torch.linalg.cholesky_ex(A, upper=True).info
    return info == 0


def exceeds(A: Tensor, floor: Tensor) -> Tensor:
    """Return whether ``A - floor I`` has a Cholesky factor, ``(b,)``; ``floor`` is one number per member."""
    return has_cholesky_factor(add_to_diagonal(A.clone(), -floor) if may_hold(floor != 0) else A)


def frobenius(A: Tensor) -> Tensor:
    """Return the Frobenius norm of each member, in float64 where the device has it, else float32."""
    norm: Tensor = torch.linalg.vector_norm(A, dim=(-2, -1))
    return norm.to(wide(A.device))


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return u: half the spacing of the numbers of a dtype at 1."""
    return float(torch.finfo(dtype).eps) / 2


def wide(device: torch.device) -> torch.dtype:
    """Return the dtype for scalars per member: float64, or float32 on devices without it (mps)."""
    return torch.float32 if device.type == "mps" else torch.float64


class _Float32AsWritten:
    """Hold torch's global precision flags for float32 products at "ieee" while any solve is running.

    The flags are global to the process, so solves in several threads share one hold: the first to enter saves and
    sets what is not "ieee" by itself, the last to leave restores, on any exit. A flag that had been inherited
    ("none") goes back to being inherited.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._saved: list[tuple[Any, str]] = []

    def __enter__(self) -> None:
        with self._lock:
            if self._holders == 0:
                lowered = [flags for flags in (_CUDA, _CPU) if flags.fp32_precision not in ("ieee", "none")]
                self._saved = [(flags, flags.fp32_precision) for flags in lowered]
                for flags in lowered:
                    flags.fp32_precision = "ieee"
            self._holders += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._holders -= 1
            if self._holders == 0:
                for flags, precision in self._saved:
                    _restore(flags, precision)

    @contextmanager
    def tf32(self) -> Iterator[None]:
        """Let CUDA use TF32 inside this block, unless another solve is running, whose products must stay as written."""
        with self._lock:
            before, alone = _CUDA.fp32_precision, self._holders == 1
            if alone:
                _CUDA.fp32_precision = "tf32"
            try:
                yield
            finally:
                if alone:
                    _restore(_CUDA, before)


def _restore(flags: Any, precision: str) -> None:
    """Set a flag back; one that had been inherited is inherited again."""
    flags.fp32_precision = "none"
    if flags.fp32_precision != precision:
        flags.fp32_precision = precision


_CUDA, _CPU = torch.backends.cuda.matmul, MkldnnModule.matmul
_float32_as_written = _Float32AsWritten()


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Compute as written: no autocast, no TF32 or bf16 inside float32 products, no gradient graph."""
    with _float32_as_written, torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield
