# SPDX-License-Identifier: Apache-2.0
"""Operations that a block costs: what plans count, and what ranks are balanced by.

An operation is one of a product, ``2 a b c`` for ``(a, b)`` times ``(b, c)``; what is done element by element is not counted but for AdamW's elements, which
have nothing else (`ADAMW`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch

from dash_optim.blocks import BlockClass
from dash_optim.options import Recipe
from matroots import EVD, Rational, inv_root_ex
from matroots._exponent import Exponent

EIGENDECOMPOSITION: Final = 4.5
"""In products of ``2 n^3``: ``9 n^3`` operations for eigenvalues and vectors (Golub and Van Loan, Matrix Computations, section 8.3)."""
POLE: Final = 0.5
"""In products: two triangular factors and a product of them, ``n^3/3`` each (docs/rational.md)."""
ADAMW: Final = 560.0
"""What an element that AdamW updates is worth, in operations of products. It moves 28 bytes in float32 (reads p, g, m, v, writes p, m, v) and computes next to
nothing; in the time of a byte a device computes about 20 operations of float32 products (NVIDIA's data sheets: H100 67e12 / 3.35e12 = 20, A100
19.5e12 / 2.0e12 = 10, H200 67e12 / 4.8e12 = 14; two CPU cores with AVX-512 about 10)."""
_PROBE = 16


@dataclass(frozen=True)
class BlockCost:
    """What one block costs.

    Attributes:
        step: operations of a step that computes no root.
        refresh: of computing all roots of the block; NaN where the method decides from the matrices.
        expected: the same, of eigendecompositions where the method decides.
        update_freq: steps between refreshes; "certified" refreshes when it has to, and is counted as if it had to that often.
    """

    step: float
    refresh: float
    expected: float
    update_freq: int

    @property
    def mean(self) -> float:
        """Operations of a step on average, in the long run."""
        return self.step + self.expected / self.update_freq


def block_cost(
    recipe: Recipe, p: Exponent, blocks: BlockClass, dtype: torch.dtype, device: torch.device
) -> BlockCost:
    """Return what each block of a class costs.

    Args:
        recipe: of its group.
        p: the root, ``recipe.exponent(len(blocks.factored))``.
        blocks: the class.
        dtype: of factors and roots.
        device: which decides what method "auto" is.
    """
    sides = [blocks.shape[dim] for dim in blocks.factored]
    products = [products_per_root(recipe, p, n, dtype, device) for n in sides]
    known = [EIGENDECOMPOSITION + 1 if math.isnan(count) else count for count in products]
    return BlockCost(
        # each factor gains a product G G^T, and one more of that size applies its root
        step=4.0 * math.prod(blocks.shape) * sum(sides),
        refresh=_operations(sides, products),
        expected=_operations(sides, known),
        update_freq=recipe.update_freq,
    )


def _operations(sides: list[int], products: list[float]) -> float:
    return sum(2.0 * n**3 * count for n, count in zip(sides, products, strict=True))


@lru_cache(maxsize=1024)
def products_per_root(recipe: Recipe, p: Exponent, n: int, dtype: torch.dtype, device: torch.device) -> float:
    """Return how many products of ``n x n`` matrices a root takes by the recipe's solver; NaN where that is not known beforehand.

    The solver is asked: it solves one small matrix whose spectrum reaches down to the damping, with its own count of products. That count depends on n only
    through a tolerance, which is scaled. Methods without a fixed schedule may take fewer for a factor that is better conditioned.
    """
    solver = recipe.solver_for(p, device)
    if solver == "auto" and recipe.tol is not None:
        return math.nan
    keywords = recipe.keywords(p, n, dtype, device)
    m = min(n, _PROBE)
    if keywords["tol"] is not None:
        keywords["tol"] *= math.sqrt(m / n)  # the same relative error in each eigenvalue
    lowest = max(recipe.rel_damping, torch.finfo(dtype).eps)
    spectrum = torch.logspace(0, math.log10(lowest), m, dtype=dtype, device="cpu")
    result = inv_root_ex(torch.diag(spectrum), p, **keywords)
    products = float(result.matmuls)
    if isinstance(solver, Rational):
        return products + POLE * float(result.steps)
    return products + (EIGENDECOMPOSITION if solver == "auto" or isinstance(solver, EVD) else 0.0)
