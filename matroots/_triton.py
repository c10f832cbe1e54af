# SPDX-License-Identifier: Apache-2.0
"""A Triton kernel for products that are symmetric: tiles on and below the diagonal, each written to both places.

Imported where a product runs on CUDA and Triton is there, and nowhere else. T tiles a side take ``(1 + 1/T)/2`` of the work of a whole product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE, _DEPTH, _WARPS = 64, 32, 4  # not tuned: the sums of a tile are 32 registers a thread


@triton.jit
def _lower_tiles(
    A,
    B,
    out,
    n,
    tiles,
    alpha,
    beta,
    A_batch,
    A_row,
    A_column,
    B_batch,
    B_row,
    B_column,
    out_batch,
    out_row,
    out_column,
    ACCUMULATE: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Write the k-th tile on or below the diagonal of one member, and its transpose above; k counts row by row."""
    count = tiles * (tiles + 1) // 2
    member = (tl.program_id(0) // count).to(tl.int64)
    k = tl.program_id(0) % count
    i = ((tl.sqrt(8.0 * k.to(tl.float32) + 1.0) - 1.0) / 2.0).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > k, i - 1, i)  # the square root may be rounded either way
    i = tl.where((i + 1) * (i + 2) // 2 <= k, i + 1, i)
    j = k - i * (i + 1) // 2
    rows = (i * TILE + tl.arange(0, TILE)).to(tl.int64)
    columns = (j * TILE + tl.arange(0, TILE)).to(tl.int64)
    in_rows, in_columns = rows < n, columns < n
    A += member * A_batch + rows[:, None] * A_row
    B += member * B_batch + columns[None, :] * B_column
    out += member * out_batch
    total = tl.zeros((TILE, TILE), dtype=tl.float32)
    for start in range(0, n, DEPTH):
        inner = (start + tl.arange(0, DEPTH)).to(tl.int64)
        a = tl.load(A + inner[None, :] * A_column, mask=in_rows[:, None] & (inner < n)[None, :], other=0.0)
        b = tl.load(B + inner[:, None] * B_row, mask=(inner < n)[:, None] & in_columns[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    total *= alpha
    here = out + rows[:, None] * out_row + columns[None, :] * out_column
    inside = in_rows[:, None] & in_columns[None, :]
    if ACCUMULATE:
        total += beta * tl.load(here, mask=inside, other=0.0)
    mirrored = tl.trans(total)
    if i == j:  # what is above the diagonal of a tile on it, too
        total = tl.where(rows[:, None] >= columns[None, :], total, mirrored)
        tl.store(here, total, mask=inside)
    else:
        tl.store(here, total, mask=inside)
        there = out + columns[:, None] * out_row + rows[None, :] * out_column
        tl.store(there, mirrored, mask=in_columns[:, None] & in_rows[None, :])


def add_lower_triangle(
    A: Tensor, B: Tensor, out: Tensor, beta: float, alpha: float, precision: str = "ieee"
) -> None:
    """Write ``beta out + alpha A B`` on and below the diagonal, and the same mirrored above it; sums are in float32.

    Args:
        A: ``(b, n, n)``, any strides, float32, float16 or bfloat16.
        B: like A.
        out: ``(b, n, n)``, float32, overlaps neither; what is above its diagonal is not read. Not read at all where ``beta`` is 0.
        beta: see above.
        alpha: see above.
        precision: of products of float32: ``"ieee"``, or ``"tf32"`` for operands that are rounded to it.
    """
    b, n = out.shape[0], out.shape[-1]
    tiles = triton.cdiv(n, _TILE)
    if b == 0 or n == 0:
        return
    with torch.cuda.device_of(out):
        _lower_tiles[(b * tiles * (tiles + 1) // 2,)](
            A,
            B,
            out,
            n,
            tiles,
            alpha,
            beta,
            *A.stride(),
            *B.stride(),
            *out.stride(),
            ACCUMULATE=beta != 0.0,
            PRECISION=precision,
            TILE=_TILE,
            DEPTH=_DEPTH,
            num_warps=_WARPS,
        )
