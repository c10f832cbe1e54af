# SPDX-License-Identifier: Apache-2.0
"""Products of batches of matrices: the one operation that every iteration spends its time in."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.backends.mkldnn import MkldnnModule
from torch.compiler import is_compiling

from matroots._formats import Format

HALF_DTYPES = (torch.float16, torch.bfloat16)


Add = Callable[[Tensor, Tensor, Tensor, float, float], None]
"""Writes ``beta out + alpha A B``, given ``(A, B, out, beta, alpha)``; what ``out`` holds is not looked at where beta is 0."""


@dataclass(frozen=True)
class Product:
    """``alpha A B + beta out`` into a buffer of the caller's, with operands optionally rounded to a lower precision.

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

    def __call__(self, A: Tensor, B: Tensor, out: Tensor, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
        """Write ``alpha A B + beta out``, ``(b, n, k)`` times ``(b, k, m)``, into ``out``, which overlaps neither; views of any strides.

        Counted as one product whatever the number of parts.
        """
        return self.write(A, B, out, alpha, beta, _add_product)

    def symmetric(self, A: Tensor, B: Tensor, out: Tensor, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
        """Write ``alpha A B + beta out`` where that is symmetric up to rounding: its lower triangle is computed, and mirrored.

        A, B and ``out``, ``(b, n, n)``, are symmetric, and A and B commute up to rounding, as polynomials in one matrix do. The triangle is
        one of blocks: m panels of columns, each from its diagonal block down, take ``(1 + 1/m)/2`` of the work of the whole
        product (`panel_edges`). The result is symmetric exactly. Where that would not be faster it *is* the whole product.

        What A and B do not commute by, ``K = (A B - B A)/2``, stays in the antisymmetric part of a whole product, and here becomes an
        error of the symmetric one. So it is not for a product whose small eigenvalues matter (`symmetrised`).
        """
        fused = _fused(out, self.format)
        if fused is not None:
            return self.write(A, B, out, alpha, beta, fused)
        edges = panel_edges(out)
        if len(edges) == 2:
            return self(A, B, out, alpha, beta)
        self.write(A, B, out, alpha, beta, partial(_add_lower_panels, edges))
        for low, high in pairwise(edges):
            block = out[:, low:high, low:high]
            block.copy_(block.tril() + block.tril(-1).mT)
            out[:, low:high, high:] = out[:, high:, low:high].mT
        return out

    def symmetrised(self, A: Tensor, B: Tensor, out: Tensor) -> Tensor:
        """Write ``(A B + (A B)^T)/2``, of a whole product, where `symmetric` mirrors; elsewhere ``A B``.

        For the product that carries small eigenvalues on, ``Q^p M``, between mirrored ones. If what is wrong with ``Q^p`` is D, then ``D M`` changes an
        eigenvalue m of M by ``m v^T D v``, a factor near 1, and so does its symmetric part; a mirrored triangle of ``D M`` does not. And next to
        powers of Q that are symmetric exactly, an antisymmetric part of M is not a function of the same matrix any more, and grows.
        """
        edges = panel_edges(out)
        if len(edges) == 2 and _fused(out, self.format) is None:
            return self(A, B, out)
        self(A, B, out, alpha=0.5)
        for low, high in pairwise(edges):
            block, below = out[:, low:high, low:high], out[:, high:, low:high]
            block.copy_(block + block.mT)
            out[:, low:high, high:] = below.add_(out[:, low:high, high:].mT).mT
        return out

    def write(self, A: Tensor, B: Tensor, out: Tensor, alpha: float, beta: float, add: Add) -> Tensor:
        """Write the product with ``add``, once for each pair of parts."""
        if self.format is None:
            add(A, B, out, beta, alpha)
            return out
        if beta != 0.0:
            return out.mul_(beta).add_(self.write(A, B, torch.empty_like(out), alpha, 0.0, add))
        left, left_exponent = self.format.moderated(A)
        right, right_exponent = self.format.moderated(B)
        left_parts, right_parts = (self._parts(operand, out.is_cuda) for operand in (left, right))
        in_tf32 = out.is_cuda and self.format.dtype == out.dtype
        with _float32_as_written.tf32() if in_tf32 else nullcontext():
            _sum_of_parts(left_parts, right_parts, out, alpha, self.format.part_roundoff, add)
        if left_exponent is not None and right_exponent is not None:
            out.mul_(torch.exp2((left_exponent + right_exponent).to(out.dtype)))
        return out

    def _parts(self, A: Tensor, as_stored: bool) -> list[Tensor]:
        """Return the parts of A: as hardware multiplies them, or in A's dtype, which emulates that."""
        parts = [] if self.format is None else self.format.split(A)
        return parts if as_stored else [part.to(A.dtype) for part in parts]


class Spare:
    """Tensors of one shape that may be overwritten. Fresh memory is neither mapped nor in the cache: a product into it takes half as long again."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, like: Tensor) -> Tensor:
        """Return a tensor like this one, of any values."""
        return self._free.pop() if self._free else torch.empty_like(like)

    def give(self, *tensors: Tensor) -> None:
        """Offer tensors that nobody needs any more."""
        self._free += tensors


# (from which n, in how many panels). Products of two symmetric matrices on a 2-core x86 CPU, 2 threads, torch 2.13, mirroring
# included, in units of one whole bmm: float32, n = 256: 1.02 (2 panels), 1.06 (4); 384: 0.66 (4); 512: 0.80 (4), 0.82 (8);
# 1024: 0.72 (4), 0.69 (8); 2048: 0.66 (8). float64, n = 512: 0.91 (2); 1024: 0.86 (2), 0.80 (4). Other devices were not measured.
_PANELS = {torch.float32: ((1024, 8), (320, 4)), torch.float64: ((1024, 4), (512, 2))}


def panel_edges(out: Tensor) -> tuple[int, ...]:
    """Return the columns at which the panels of a symmetric product ``out`` begin, and n: ``(0, n)`` is the whole product.

    More than one panel on the CPU only. CUDA has a kernel for the triangle (`_fused`); other devices multiply whole matrices.
    """
    n = out.shape[-1]
    sizes = _PANELS.get(out.dtype, ()) if out.device.type == "cpu" else ()
    count = next((panels for least, panels in sizes if n >= least), 1)
    return tuple(n * i // count for i in range(count + 1))


_FUSED_FROM = 256  # n from which the kernel is used: four tiles a side, 5/8 of the work. Not measured.


def _fused(out: Tensor, format: Format | None) -> Add | None:
    """Return the kernel that writes both triangles of a symmetric product from one, if it is to be used for ``out``.

    On CUDA, with sums in float32, where Triton is installed (torch's builds for CUDA on Linux bring it) and runs; a product is whole where not.
    """
    if not out.is_cuda or out.dtype != torch.float32 or out.shape[-1] < _FUSED_FROM or is_compiling():
        return None
    kernel = _triangle_kernel(out.device)
    return None if kernel is None else partial(kernel, precision="ieee" if format is None else "tf32")


@cache
def _triangle_kernel(device: torch.device) -> Callable[..., None] | None:
    """Return the kernel of `matroots._triton` if this device can run it, which is tried once."""
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0):
        return None  # products of halves would not use tensor cores
    try:
        from matroots._triton import add_lower_triangle
    except ImportError:
        return None
    try:
        one = torch.ones(1, 1, 1, device=device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            add_lower_triangle(one, one, torch.empty_like(one), 0.0, 1.0)
    except (
        Exception
    ) as problem:  # it compiles when called, which needs a C compiler and a driver that it knows
        message = f"Triton is installed but does not run on {device}: whole products are computed, not one triangle ({problem})"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return None
    return add_lower_triangle


def _add_lower_panels(
    edges: tuple[int, ...], A: Tensor, B: Tensor, out: Tensor, beta: float, alpha: float
) -> None:
    """Write ``beta out + alpha A B`` on and below the diagonal blocks between ``edges``, a panel of columns at a time."""
    for low, high in pairwise(edges):
        _add_product(A[:, low:], B[:, :, low:high], out[:, low:, low:high], beta, alpha)


def _sum_of_parts(
    left: list[Tensor], right: list[Tensor], out: Tensor, alpha: float, u: float, add: Add
) -> None:
    """Write ``alpha sum u^(i + j) A_i B_j`` over ``i + j < parts``, by Horner's rule: the smallest terms first."""
    beta = 0.0
    for order in reversed(range(len(left))):
        for i in range(order + 1):
            add(left[i], right[order - i], out, beta, alpha)
            beta = 1.0
        beta = u


def _add_product(A: Tensor, B: Tensor, out: Tensor, beta: float, alpha: float) -> None:
    """Write ``beta out + alpha A B``; sums are in the dtype of ``out``, float32 where the operands are halves."""
    if A.dtype != out.dtype:
        torch.baddbmm(out, A, B, beta=beta, alpha=alpha, out_dtype=out.dtype, out=out)
    elif alpha == 1.0 and beta == 0.0:
        torch.bmm(A, B, out=out)
    else:
        torch.baddbmm(out, A, B, beta=beta, alpha=alpha, out=out)


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
