# SPDX-License-Identifier: Apache-2.0
"""The polynomial of one step, of degree 1, 2, 3, 4 or 8, and its value at a matrix in 0, 1, 2, 2 or 3 products.

In a variable t that maps the interval of the step to [-1, 1]: in powers of m itself the coefficients are a thousand times the value at degree 6,
and cost two digits. Degrees up to 4 are ``B_0 + T_2 B_1`` with B of degree 2 (Paterson and Stockmeyer, in the Chebyshev basis). Degree 8 is
J. Sastre's (Linear Algebra Appl. 539, 2018): with ``y = t^2 (c_4 t^2 + c_3 t)``,
``q = (y + d_2 t^2 + d_1 t)(y + e_2 t^2) + e_0 y + f_2 t^2 + f_1 t + f_0``, where Paterson and Stockmeyer reach degree 6.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from numpy.polynomial import Chebyshev, chebyshev
from torch import Tensor

from matroots._products import Spare, add_to_diagonal
from matroots.solvers._giant_steps import regrouped

Array = npt.NDArray[np.float64]
COSTS = {1: 0, 2: 1, 3: 2, 4: 2, 8: 3}
"""Products that q(M) takes, by the degree of q."""


@dataclass(frozen=True)
class Step:
    """The polynomial q of one step, ``q(m) = sum_k series_k T_k(t)``, where t maps ``domain`` to [-1, 1]."""

    series: tuple[float, ...]
    domain: tuple[float, float]

    @property
    def degree(self) -> int:
        """Of q."""
        return len(self.series) - 1

    def __call__(self, m: Array | float) -> Array:
        """Return q(m), elementwise."""
        value: Array = Chebyshev(self.series, self.domain)(m)
        return value


def evaluate(step: Step, M: Tensor, multiply: Callable[..., Tensor], spare: Spare) -> Tensor:
    """Return ``q(M)``: ``COSTS[step.degree]`` products."""
    low, high = step.domain
    t = torch.mul(M, 2 / (high - low), out=spare.take(M))
    add_to_diagonal(t, -(high + low) / (high - low))
    if step.degree == 1:
        return add_to_diagonal(t.mul_(step.series[1]), step.series[0])
    if step.degree == 8:
        return _eighth(step.series, t, multiply, spare)
    T_2 = add_to_diagonal(multiply(t, t, spare.take(t), alpha=2.0), -1.0)
    b = regrouped(step.series, 2).tolist()
    if len(b) == 1:
        q = add_to_diagonal(T_2.mul_(b[0][2]).add_(t, alpha=b[0][1]), b[0][0])
        spare.give(t)
        return q
    upper = torch.mul(T_2, b[1][2], out=spare.take(t)).add_(t, alpha=b[1][1])
    q = multiply(T_2, add_to_diagonal(upper, b[1][0]), spare.take(t))
    q.add_(T_2, alpha=b[0][2]).add_(t, alpha=b[0][1])
    spare.give(t, T_2, upper)
    return add_to_diagonal(q, b[0][0])


def _eighth(series: tuple[float, ...], t: Tensor, multiply: Callable[..., Tensor], spare: Spare) -> Tensor:
    """Return ``sum_k series_k T_k(t)`` of degree 8."""
    coefficients = two_factors(series)
    if coefficients is None:
        raise ValueError("series: a polynomial of degree 8 that is no product of two real factors and a rest")
    c_4, c_3, d_2, d_1, e_2, e_0, f_2, f_1, f_0 = coefficients
    square = multiply(t, t, spare.take(t))
    left = torch.mul(square, c_4, out=spare.take(t)).add_(t, alpha=c_3)
    y = multiply(square, left, spare.take(t))
    torch.add(y, square, alpha=d_2, out=left).add_(t, alpha=d_1)
    right = torch.add(y, square, alpha=e_2, out=spare.take(t))
    q = multiply(left, right, spare.take(t))
    q.add_(y, alpha=e_0).add_(square, alpha=f_2).add_(t, alpha=f_1)
    spare.give(t, square, left, right, y)
    return add_to_diagonal(q, f_0)


@lru_cache(maxsize=512)
def two_factors(series: tuple[float, ...]) -> tuple[float, ...] | None:
    """Return Sastre's ``c_4, c_3, d_2, d_1, e_2, e_0, f_2, f_1, f_0``; None where they are not real.

    From the coefficients b of powers, highest first; ``b_4`` leaves a quadratic equation for ``e_2``.
    """
    b = chebyshev.cheb2poly(np.array(series)).tolist()
    if not (b[8] > 0 and b[7] != 0):
        return None
    c_4 = b[8] ** 0.5
    c_3 = b[7] / (2 * c_4)
    both = (b[6] - c_3**2) / c_4
    d_1 = (b[5] - c_3 * both) / c_4
    half = (both - c_4 * d_1 / c_3) / 2
    inside = half**2 - b[4] + d_1 * c_3 + c_4 * b[3] / c_3
    if not inside >= 0:
        return None
    found = []
    for e_2 in (half + inside**0.5, half - inside**0.5):
        found.append((c_4, c_3, both - e_2, d_1, e_2, (b[3] - d_1 * e_2) / c_3, b[2], b[1], b[0]))
    return min(found, key=lambda c: max(abs(x) for x in c))
