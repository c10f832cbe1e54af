# SPDX-License-Identifier: Apache-2.0
"""DASH in plain NumPy and fp64, by loops over parameters, blocks and dimensions: what the optimizer is compared with.

Nothing is shared with the library: roots come from ``numpy.linalg.eigh``, products from ``numpy.tensordot``.
Shampoo in blocks: arXiv:2309.06497; DASH: arXiv:2602.02016; decoupled weight decay: arXiv:1711.05101.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np

Index = tuple[slice, ...]


@dataclass(frozen=True)
class Graft:
    """A direction to take the norm from, by name; ``beta2=None`` means ``betas[1]``."""

    name: str
    beta2: float | None = None
    eps: float = 1e-8


@dataclass(frozen=True)
class Options:
    """What may differ from parameter to parameter: the keywords of ``dash_optim.DASH`` and their defaults."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.85, 0.99)
    beta3: float | None = None
    block_size: float = 1024
    p: int | float | Fraction | str | None = 2
    damping: float = 0.0
    rel_damping: float = 1e-6
    beta_factors: float = 0.95
    bias_correction: bool = True
    update_freq: int = 10
    refresh_young: bool = True
    start_step: int = 0
    grafting: Graft | str | None = "adam"
    grafting_scope: str = "block"
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    maximize: bool = False
    one_d: str = "adamw"
    nd: str = "matrix"
    max_factor_dim: int = 8192
    eps: float = 1e-8
    refresh: str = "staggered"
    algorithm: str = "dash"


def view_of(shape: tuple[int, ...], nd: str) -> tuple[int, ...]:
    """Dimensions of size 1 dropped; from order 3 on, all but the first as one if ``nd`` says "matrix"."""
    view = tuple(n for n in shape if n != 1)
    return (view[0], math.prod(view[1:])) if nd == "matrix" and len(view) > 2 else view


def blocks_of(view: tuple[int, ...], size: float) -> list[Index]:
    """Every dimension cut into pieces of ``size``, the last one the rest; blocks in row-major order."""
    pieces = [[slice(a, min(a + int(min(size, n)), n)) for a in range(0, n, int(min(size, n)))] for n in view]
    return list(product(*pieces))


def unfolding(G: np.ndarray, i: int) -> np.ndarray:
    """The matrix whose rows are the slices of G along dimension i."""
    return np.moveaxis(G, i, 0).reshape(G.shape[i], -1)


def mode_product(G: np.ndarray, X: np.ndarray, i: int) -> np.ndarray:
    """``G x_i X``: X applied to dimension i of G."""
    return np.moveaxis(np.tensordot(X, G, axes=(1, i)), 0, i)


def inverse_root(F: np.ndarray, p: float, damping: float, rel_damping: float) -> np.ndarray:
    """``(F + eps I)^{-1/p}``, ``eps = damping + rel_damping min(||F||_F, ||F||_inf)``; the identity where F is zero and not damped."""
    if not F.any() and damping == 0:
        return np.eye(len(F))
    eps = damping + rel_damping * min(np.linalg.norm(F), np.abs(F).sum(axis=1).max())
    eigenvalues, Q = np.linalg.eigh(F)
    if eigenvalues[0] + eps <= 0:
        raise ValueError(
            f"F: expected F + {eps} I positive definite, its least eigenvalue is {eigenvalues[0] + eps}"
        )
    return (Q * (eigenvalues + eps) ** (-1 / p)) @ Q.T


class AdamW:
    """One parameter under AdamW; weight decay first, bias corrections always."""

    def __init__(self, shape: tuple[int, ...], o: Options) -> None:
        self.o, self.t = o, 0
        self.m, self.v = np.zeros(shape), np.zeros(shape)

    def step(self, W: np.ndarray, G: np.ndarray) -> np.ndarray:
        """``W (1 - lr weight_decay) - lr m^ / (sqrt(v^) + eps)``."""
        o, (beta1, beta2) = self.o, self.o.betas
        g = -G if o.maximize else G
        self.t += 1
        self.m = beta1 * self.m + (1 - beta1) * g
        self.v = beta2 * self.v + (1 - beta2) * g**2
        m, v = self.m / (1 - beta1**self.t), self.v / (1 - beta2**self.t)
        return W * (1 - o.lr * o.weight_decay) - o.lr * m / (np.sqrt(v) + o.eps)


class Shampoo:
    """One parameter in blocks, each with a factor and a root for every dimension of at most ``max_factor_dim``.

    ``first`` is the number of its first block among all blocks of the optimizer.
    """

    def __init__(self, shape: tuple[int, ...], o: Options, first: int) -> None:
        self.o, self.first, self.t = o, first, 0
        self.view = view_of(shape, o.nd)
        self.blocks = blocks_of(self.view, o.block_size)
        self.sides = [i for i, n in enumerate(self.view) if n <= o.max_factor_dim]
        self.p = 2 * len(self.sides) if o.p is None else float(Fraction(o.p))
        self.graft = o.grafting if isinstance(o.grafting, Graft) else Graft(o.grafting or "none")
        self.m, self.v, self.B = np.zeros(self.view), np.zeros(self.view), np.zeros(self.view)
        sizes = [{i: self.m[b].shape[i] for i in self.sides} for b in self.blocks]
        self.F = [{i: np.zeros((n, n)) for i, n in size.items()} for size in sizes]
        self.X = [{i: np.eye(n) for i, n in size.items()} for size in sizes]

    def step(self, W: np.ndarray, G: np.ndarray) -> np.ndarray:
        """One update of W; the order of what happens is that of the lines."""
        o = self.o
        g = (-G if o.maximize else G).reshape(self.view)
        self.t += 1
        self.accumulate(g)
        N = self.ahead(g)
        D = self.direction(g, self.average(g))
        U = D if self.t <= o.start_step else self.preconditioned(N, D)
        W = W * (1 - o.lr * o.weight_decay)
        self.B = o.momentum * self.B + U
        return W - o.lr * (U + o.momentum * self.B if o.nesterov else self.B).reshape(W.shape)

    def accumulate(self, g: np.ndarray) -> None:
        """``F_i <- b F_i + (1 - b) G_(i) G_(i)^T``, without the ``1 - b`` for b = 1."""
        b = self.o.beta_factors
        for index, F in zip(self.blocks, self.F, strict=True):
            for i in self.sides:
                A = unfolding(g[index], i)
                F[i] = b * F[i] + (1.0 if b == 1 else 1 - b) * A @ A.T

    def ahead(self, g: np.ndarray) -> np.ndarray:
        """``beta3 m + (1 - beta3) g`` with m as it was before this step, over the weight that gradients have in it."""
        beta1 = self.o.betas[0]
        beta3 = beta1**2 if self.o.beta3 is None else self.o.beta3
        weight = beta3 * (1 - beta1 ** (self.t - 1)) + 1 - beta3
        return (beta3 * self.m + (1 - beta3) * g) / (weight if self.o.bias_correction else 1)

    def average(self, g: np.ndarray) -> np.ndarray:
        """``m <- beta1 m + (1 - beta1) g``, over ``1 - beta1^t`` if bias is to be corrected."""
        beta1 = self.o.betas[0]
        self.m = beta1 * self.m + (1 - beta1) * g
        return self.m / (1 - beta1**self.t) if self.o.bias_correction else self.m

    def direction(self, g: np.ndarray, m: np.ndarray) -> np.ndarray:
        """The graft direction, of which the norm is taken; m for "none" and "sgd"."""
        name, eps = self.graft.name, self.graft.eps
        beta2 = self.o.betas[1] if self.graft.beta2 is None else self.graft.beta2
        if name in ("none", "sgd"):
            return m
        self.v = self.v + g**2 if name == "adagrad" else beta2 * self.v + (1 - beta2) * g**2
        v = self.v / (1 - beta2**self.t) if name == "adam" else self.v
        return m / (np.sqrt(v) + eps)

    def preconditioned(self, m: np.ndarray, D: np.ndarray) -> np.ndarray:
        """``m x_1 X_1 x_2 X_2 ...`` in every block, with the norm of D over blocks or over the parameter."""
        U = np.zeros(self.view)
        for j, index in enumerate(self.blocks):
            if self.due(j):
                self.X[j] = {i: self.root(F) for i, F in self.F[j].items()}
            block = m[index]
            for i in self.sides:
                block = mode_product(block, self.X[j][i], i)
            U[index] = block
        if self.graft.name != "none":
            for index in self.blocks if self.o.grafting_scope == "block" else [(...,)]:
                size = np.linalg.norm(U[index])
                U[index] *= np.linalg.norm(D[index]) / size if size > 0 else 0.0
        return U

    def due(self, j: int) -> bool:
        """Whether the roots of block j are computed at this step; all are at the first that uses them."""
        since = self.t - self.o.start_step - 1
        turn = self.first + j if self.o.refresh == "staggered" else 0
        return since == 0 or (since + turn) % self.every() == 0

    def every(self) -> int:
        """Steps between refreshes: while the factors are young the largest power of two that is at most a quarter of their gradients."""
        if not self.o.refresh_young or self.t >= 4 * self.o.update_freq:
            return self.o.update_freq
        steps = 1
        while 8 * steps <= self.t:
            steps *= 2
        return steps

    def root(self, F: np.ndarray) -> np.ndarray:
        """The inverse p-th root of the factor, corrected for bias unless it is a plain sum."""
        o, b = self.o, self.o.beta_factors
        corrected = F / (1 - b**self.t) if o.bias_correction and b < 1 else F
        return inverse_root(corrected, self.p, o.damping, o.rel_damping)


def rule_of(shape: tuple[int, ...], o: Options, first: int) -> AdamW | Shampoo | None:
    """Which of the two steps a parameter of this shape takes; None if it is empty."""
    if 0 in shape:
        return None
    view = view_of(shape, o.nd)
    bare = not view or min(view) > o.max_factor_dim or (len(shape) == 1 and o.one_d == "adamw")
    return AdamW(shape, o) if bare or o.algorithm == "adamw" else Shampoo(shape, o, first)


class Reference:
    """The optimizer: groups are dictionaries of "params" (arrays) and options, as in torch; values are kept in it."""

    def __init__(self, groups: Iterable[dict[str, Any]], **defaults: Any) -> None:
        self.values: list[np.ndarray] = []
        self.rules: list[AdamW | Shampoo | None] = []
        blocks = 0
        for group in groups:
            options = Options(**{**defaults, **{k: v for k, v in group.items() if k != "params"}})
            for W in group["params"]:
                rule = rule_of(W.shape, options, blocks)
                blocks += len(rule.blocks) if isinstance(rule, Shampoo) else 0
                self.values.append(W)
                self.rules.append(rule)

    def step(self, gradients: Iterable[np.ndarray | None]) -> list[np.ndarray]:
        """Return the parameters after one more step; one without a gradient is left alone."""
        triples = zip(self.values, self.rules, gradients, strict=True)
        self.values = [W if G is None or rule is None else rule.step(W, G) for W, rule, G in triples]
        return self.values
