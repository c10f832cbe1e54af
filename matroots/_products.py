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

HALF_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Product:
    """``alpha * A @ B`` into a buffer of the caller's, with operands optionally rounded to half precision.

    With ``operand_dtype`` the operands are rounded to it and the products are summed in float32, as tensor
    cores do. On CPU, whose own half ``bmm`` rounds its sums to half, this is emulated: a product of two
    halves is exact in float32, so rounding the operands and multiplying in float32 gives the same numbers.
    """

    operand_dtype: torch.dtype | None = None

    def __call__(self, A: Tensor, B: Tensor, out: Tensor, alpha: float = 1.0) -> Tensor:
        """Write ``alpha * A @ B`` (each ``(b, n, n)``) into ``out``, which is neither A nor B."""
        if self.operand_dtype is None:
            if alpha == 1.0:
                torch.bmm(A, B, out=out)
            else:
                torch.baddbmm(out, A, B, beta=0, alpha=alpha, out=out)
            return out
        A_low, B_low = A.to(self.operand_dtype), B.to(self.operand_dtype)
        if A.is_cuda:
            torch.bmm(A_low, B_low, out_dtype=torch.float32, out=out)
        else:
            torch.bmm(A_low.to(A.dtype), B_low.to(B.dtype), out=out)
        return out if alpha == 1.0 else out.mul_(alpha)


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
