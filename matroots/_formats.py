# SPDX-License-Identifier: Apache-2.0
"""Formats that the operands of a product can be rounded to: half precision, TF32, and sums of two or three halves.

Products of rounded operands are summed in float32, as tensor cores do. A product of two halves (or of two TF32 numbers)
is exact in float32, so multiplying rounded operands in float32 gives the same numbers on any device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

# stands for the rounding of sums in float32: 4 of its u; with 1 of them one inverse in a hundred was lost
_SUMS = 2.0**-22
_TINIEST = -100  # exponent below which a member is not brought to size 1: the power of two would overflow


@dataclass(frozen=True)
class Format:
    """An operand as a sum of ``parts`` numbers: ``a ~ a_0 + u a_1 + u^2 a_2``, u the unit roundoff of one of them.

    What a part leaves is at most u times it, so divided by u, a power of two, it is of the same size again: no part is
    subnormal where the one before is not. Products keep the terms up to ``u^(parts - 1)``: 1, 3 or 6 of them.

    Attributes:
        name: what users call it.
        dtype: of a part, as hardware multiplies it; float32 for TF32, whose numbers are float32 with 10 stored bits.
        bits: of a part's significand, the implicit one included.
        parts: how many.
        carrier_parts: how many in the one product of a step that carries the small eigenvalues on (None: ``parts``).
    """

    name: str
    dtype: torch.dtype
    bits: int
    parts: int = 1
    carrier_parts: int | None = None

    @property
    def part_roundoff(self) -> float:
        """The u of one part, ``2^-bits``."""
        return 2.0**-self.bits

    @property
    def unit_roundoff(self) -> float:
        """``u^parts``: a product of two numbers is right to twice that, as with operands rounded to a u of that size.

        What is left of an operand of two parts is at most ``u^2/2`` of it, as a remainder has a sign of its own, and the term that
        is left out of the product at most ``u^2``: together ``2 u^2``. Three parts of 8 bits hold float32, and ``u^3 + u^4/4`` is left out.
        """
        return self.part_roundoff**self.parts

    @property
    def products(self) -> int:
        """Products of parts in one product."""
        return self.parts * (self.parts + 1) // 2

    @property
    def carrier(self) -> Format:
        """The format of the product that carries the small eigenvalues on: ``Q^p M``, ``Y E``, ``T B``."""
        return (
            self
            if self.carrier_parts is None
            else replace(self, parts=self.carrier_parts, carrier_parts=None)
        )

    def least_eigenvalue(self, p: float) -> float:
        """What the smallest eigenvalue must be, relative to ``min(||A||_F, ||A||_inf)``, for the root of order p to stay positive.

        Rounding moves an entry by at most ``u |m_ij|``, hence an eigenvalue of M by at most u times that bound, whatever n is: twice
        the carrier's u leaves half of the smallest one, and a step multiplies the smallest by more than the norm. All other
        products round what is multiplied *onto* M and X, which changes eigenvalues by factors near 1, but for X itself:
        ``u ||X|| = u lambda^{-1/p}`` must stay below X's smallest eigenvalue, which is 1, by as much as several steps add to it.
        """
        carrier, u = max(self.carrier.unit_roundoff, _SUMS), max(self.unit_roundoff, _SUMS)
        return float(max(2.0 * carrier, (4.0 * u) ** p))

    def split(self, A: Tensor) -> list[Tensor]:
        """Return the parts of A (float32), each in ``dtype``."""
        parts = []
        for _ in range(self.parts - 1):
            parts.append(self._rounded(A))
            A = (A - parts[-1]) / self.part_roundoff
        return [*parts, self._rounded(A)]

    def moderated(self, A: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return A with members of size 1, and the powers of two they are to be multiplied by, if the format needs that.

        float16 does: it ends at 65504, which X may exceed, and at 6e-8.
        """
        if self.dtype != torch.float16:
            return A, None
        exponent = torch.frexp(A.abs().amax((-2, -1), keepdim=True)).exponent.clamp_min(_TINIEST)
        return torch.ldexp(A, -exponent), exponent

    def _rounded(self, A: Tensor) -> Tensor:
        return to_tf32(A) if self.dtype == torch.float32 else A.to(self.dtype)


def to_tf32(A: Tensor) -> Tensor:
    """Round float32 to 10 stored bits of significand, ties to even; infinities and NaN stay."""
    bits = A.view(torch.int32)
    # just under half of the last bit that stays, and one more where that bit is odd: what carries is rounded up
    rounded = (bits + (0xFFF + ((bits >> 13) & 1))) & ~0x1FFF
    return torch.where(torch.isfinite(A), rounded.view(torch.float32), A)


FORMATS = {
    format.name: format
    for format in (
        Format("fp16", torch.float16, 11),
        Format("bf16", torch.bfloat16, 8),
        Format("tf32", torch.float32, 11),
        Format("fp16x2", torch.float16, 11, 2),
        Format("bf16x2", torch.bfloat16, 8, 2, carrier_parts=3),
        Format("bf16x3", torch.bfloat16, 8, 3),
    )
}
"""Every format by its name."""


def parse_format(matmul_dtype: object) -> Format | None:
    """Return the format that a user's ``matmul_dtype`` means; None for None.

    Raises:
        ValueError: for anything but None, ``torch.float16``, ``torch.bfloat16`` and the names in `FORMATS`.
    """
    if matmul_dtype is None:
        return None
    for format in FORMATS.values():
        same_dtype = format.parts == 1 and format.dtype != torch.float32 and matmul_dtype == format.dtype
        if same_dtype or matmul_dtype == format.name:
            return format
    raise ValueError(
        f"matmul_dtype: expected torch.float16, torch.bfloat16, one of {sorted(FORMATS)} or None, got {matmul_dtype!r}"
    )
