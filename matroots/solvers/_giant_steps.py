# SPDX-License-Identifier: Apache-2.0
"""Chebyshev series of a matrix in about ``2 sqrt(degree)`` products: baby steps and giant steps in the Chebyshev basis.

Paterson and Stockmeyer's scheme (SIAM J. Comput. 2, 1973) with T_m in place of powers. Baby steps make ``T_1 .. T_k``; the series is
regrouped as ``sum_j B_j T_j(T_k)`` with B_j of degree below k; Clenshaw's recurrence in ``T_k`` makes the giant steps.

Nothing in it grows (docs/chebyshev.md). ``T_{jk+i} = 2 T_i T_{jk} - T_{jk-i}`` turns the coefficients c into
``2 (c_{jk+i} - c_{(j+2)k-i} + c_{(j+2)k+i} - ...)``, whose indices differ by even numbers: where c alternates in sign and decreases, as for ``x^{-1/p}``, they are at most ``2 |c_{jk+i}|``.
Halving the degree by ``T_{2^m k}`` takes more products, and the variant for monic polynomials, which takes fewer, divides by c_d.

A rounding in ``T_i`` enters ``T_m`` times ``(m/i)^2`` in each pair of eigenvectors whose eigenvalues T_i maps to one value. Two choices
keep that away from the largest and the smallest eigenvalue, where it is a residual of ``u / f^2`` in place of ``u / f``:
k is odd (an even T_k is 1 at both ends), and the baby steps are ``T_{i+1} = 2 T_1 T_i - T_{i-1}``, not ``T_{2i} = 2 T_i^2 - I``.
Measured in fp32, f = 1e-5, p = 2, half of the eigenvalues at each end: ``||I - A X^2||_F`` in units of ``sqrt(n) u / f`` is 5786 with
doubling and k = 32, 96 with doubling and k = 31, 43 as it stands; Clenshaw's recurrence of full degree leaves 822.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from matroots._products import Product, add_to_diagonal

MOST_BABY_STEPS = 31  # each is a buffer of the size of the batch; reached at degree 929
_ROWS = 8  # B_j made by one read of the baby steps


def products(degree: int) -> int:
    """Return ``k + ceil(degree / k) - 2``: what a series of this degree >= 1 takes."""
    k = baby_steps(degree)
    return k - 1 + _giant_steps(degree, k)


@lru_cache(maxsize=256)
def baby_steps(degree: int) -> int:
    """Return the odd k that takes the fewest products, the smallest of several."""
    return min(range(1, MOST_BABY_STEPS + 1, 2), key=lambda k: k + _giant_steps(degree, k))


def _giant_steps(degree: int, k: int) -> int:
    return -(-degree // k) - 1


@lru_cache(maxsize=64)
def regrouped(c: tuple[float, ...], k: int) -> npt.NDArray[np.float64]:
    """Return b with ``sum_m c_m T_m = sum_j (sum_{i <= k} b_{ji} T_i) T_j(T_k)``; ``b_{jk}`` is zero but for the last j.

    From the highest term down, ``T_{jk+i} = 2 T_i T_{jk} - T_{jk-i}``.
    """
    rest = np.array(c)
    last = _giant_steps(len(c) - 1, k)
    b = np.zeros((last + 1, k + 1))
    stop = len(c)
    for j in range(last, 0, -1):
        above = rest[j * k + 1 : stop]
        b[j, 0] = rest[j * k]
        b[j, 1 : len(above) + 1] = 2 * above
        rest[j * k - len(above) : j * k] -= above[::-1]
        stop = j * k
    b[0, :stop] = rest[:stop]
    return b


def evaluate(A: Tensor, c: tuple[float, ...], floor: float, multiply: Product) -> Tensor:
    """Return ``sum_m c_m T_m(t(A))`` for symmetric A with spectrum in [floor, 1], at least two coefficients c."""
    b = regrouped(c, baby_steps(len(c) - 1))
    T = _first_polynomials(A, b.shape[1] - 1, floor, multiply)
    baby = T.flatten(1)
    # from pageable memory: the host waits for nothing
    weights = torch.from_numpy(b[:, 1:]).to(A.dtype).to(A.device, non_blocking=True)
    rows = baby.new_empty(min(_ROWS, len(b)), baby.shape[1])
    start = len(b)
    for j in range(len(b) - 1, -1, -1):
        if j < start:
            stop, start = start, max(0, start - len(rows))
            torch.mm(weights[start:stop], baby, out=rows[: stop - start])
        B = add_to_diagonal(rows[j - start].view_as(A), float(b[j, 0]))
        if j == len(b) - 1:
            current, after = B.clone(), torch.zeros_like(B)
        else:  # the sum is B_0 + T_k V_1 - V_2: the last product is not doubled
            doubled = multiply.symmetric(T[-1], current, after, alpha=2.0 if j else 1.0, beta=-1.0)
            current, after = doubled.add_(B), current
    return current


def _first_polynomials(A: Tensor, k: int, floor: float, multiply: Product) -> Tensor:
    """Return ``T_1 .. T_k`` of ``t(A)``, ``(k, b, n, n)``."""
    T = A.new_empty(k, *A.shape)
    add_to_diagonal(torch.mul(A, 2.0 / (1.0 - floor), out=T[0]), -(1.0 + floor) / (1.0 - floor))
    for i in range(1, k):
        multiply.symmetric(T[0], T[i - 1], T[i], alpha=2.0)
        if i == 1:
            add_to_diagonal(T[1], -1.0)
        else:
            T[i].sub_(T[i - 2])
    return T
