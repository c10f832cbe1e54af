# SPDX-License-Identifier: Apache-2.0
"""How wrong an old root has become: two-sided bounds on the root in use, against the factor as it is now.

Let ``A = F/c + eps I`` be the damped, corrected factor and ``S = X^{a/2} A^b X^{a/2}``, ``p = a/b``. If ``alpha I <= S <= beta I`` then
``alpha^{1/a} A^{-1/p} <= X <= beta^{1/a} A^{-1/p}`` (docs/certificate.md): the relative error of X is at most
``max(1 - alpha^{1/a}, beta^{1/a} - 1)``, however old it is.

alpha is free: a factor loses nothing but by its decay, ``F_t >= b F_{t-1}``, so ``A_t >= g A_{t-1}`` with ``g = min(b c_{t-1} / c_t, eps_t / eps_{t-1})``,
less what rounding the factor may take, and ``alpha_t >= alpha_{t-1} g^b`` (of ``(X^{p/2} A X^{p/2})^b``, which S becomes by Loewner-Heinz: powers above 1
do not keep the order, so S itself may lose more, the bound on X does not). beta is bounded by ``1 + ||D||``, ``D = S - I``, from random vectors
(Halko, Martinsson, Tropp 2011, lemma 4.1): ``P(||D^q|| > theta sqrt(2/pi) max_i ||D^q w_i||) <= theta^{-k}`` for k Gaussian w. That is done in the factor's
own dtype (float64 for b > 1): rounding errors of a product with a vector are taken as independent (Higham and Mary 2019), then they have a norm of a few ``u ||w|| ||M||_2``.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Final

import torch
from torch import Tensor

from dash_optim.stacks import FIELD, Chunk, Sides, Stack
from dash_optim.update import correction
from matroots._bounded import U
from matroots._exponent import Exponent
from matroots.scaling.bounds import norm_bound
from matroots.scaling.multi_power import start_vectors

FAILURE: Final = 1e-6
"""Probability that one bound on beta is too low."""
_PROBES, _POWERS = 8, 2
_ROUNDING: Final = 2.0  # times eps of its dtype and the factor's norm: what rounding an update takes from the factor, above all seen
_SUMMANDS: Final = 1024  # in a sum without growth: where all have one sign rounding grows with their number
_PRODUCT_ROUNDING: Final = 8.0  # times u ||w|| ||M||_2, of a product with a vector of up to 128 elements: twice what is seen where all have one sign


def fraction_of(p: Exponent) -> Fraction:
    """Return p as ``a/b`` with even a, for which S is symmetric; raise ``ValueError`` if it has none that is small."""
    fraction = Fraction(p).limit_denominator(64)
    if float(fraction) != float(p) or fraction.numerator % 2 or fraction.numerator > 64:
        raise ValueError(f'refresh: "certified" needs p = a/b with even a <= 64 and b <= 64, got {p}')
    return fraction


def certified_due(stack: Stack, sides: Sides, chunk: Chunk, t: Tensor) -> Tensor:
    """Return the numbers of the factors of a chunk that need a new root; write the bounds of the others down."""
    numbers = sides.numbers(torch.arange(chunk.start, chunk.stop, device="cpu"))
    due = [
        _due(stack, sides, slice(int(part[0]), int(part[-1]) + 1), t)
        for part in numbers.split(chunk.stop - chunk.start)
    ]
    joined: Tensor = torch.cat(due)
    return joined


def _due(stack: Stack, sides: Sides, span: slice, t: Tensor) -> Tensor:
    """Do the same for factors with consecutive numbers."""
    F, X, record = (part.flatten(0, 1)[span] for part in (sides.factors, sides.roots, sides.record))
    steps = t.repeat(len(sides.dims))[span]
    a, _ = fraction_of(stack.p).as_integer_ratio()
    before = record[:, FIELD["beta"]] / record[:, FIELD["damping"]]
    size = norm_bound(F)
    c, eps, alpha = aged(stack, size, record, steps)
    X_norm = before ** (1 / float(stack.p))  # X <= beta^{1/a} A^{-1/p} a step ago, and A >= eps
    distance = gap(F, X, size, X_norm, c, eps, stack.p)
    alpha, beta = torch.fmax(alpha, 1 - distance), 1 + distance
    error = torch.maximum(1 - alpha ** (1 / a), beta ** (1 / a) - 1)
    kept = error <= stack.recipe.refresh_tol  # False where nothing is known (NaN)
    # of the others too: if the solve fails the old root stays, and it has aged by this step
    for name, values in (("alpha", alpha), ("beta", beta), ("damping", eps), ("correction", c)):
        record[:, FIELD[name]] = values
    record[:, FIELD["skipped"]] += kept
    due: Tensor = (~kept).nonzero().squeeze(-1).cpu() + span.start
    return due


def aged(stack: Stack, size: Tensor, record: Tensor, steps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return each factor's correction and eps in this step, and a lower bound alpha for its old root; NaN where there is none.

    ``size`` is the bound on each factor's norm. The record's correction and eps are those of the last step for which alpha was written down, so one step of decay is all that is new.
    """
    recipe = stack.recipe
    b = recipe.beta_factors
    c = correction(b if recipe.bias_correction else 1.0, steps)
    eps = recipe.damping + recipe.rel_damping * size / c
    eps = eps * torch.ones_like(c)
    ratio = torch.where(eps > 0, eps / record[:, FIELD["damping"]], 1.0)
    kept = torch.minimum(b * record[:, FIELD["correction"]] / c, ratio).clamp_max(1.0)
    summands = torch.Size(stack.shape).numel() / min(stack.shape[dim] for dim in stack.factored)
    rounding = _ROUNDING * max(1.0, summands / _SUMMANDS) * torch.finfo(stack.dtype).eps
    kept = (kept - rounding * size / (c * eps)).clamp_min(0.0)
    power = fraction_of(stack.p).denominator
    return c, eps, record[:, FIELD["alpha"]] * (kept * (1 - 8 * U)) ** power


def certify_fresh(F: Tensor, X: Tensor, c: Tensor, eps: Tensor, p: Exponent) -> tuple[Tensor, Tensor]:
    """Return alpha and beta of roots that have just been computed; alpha 0 where it cannot be bounded."""
    distance = gap(F, X, norm_bound(F), norm_bound(X), c, eps, p)
    return (1 - distance).clamp_min(0.0), 1 + distance


def gap(F: Tensor, X: Tensor, F_norm: Tensor, X_norm: Tensor, c: Tensor, eps: Tensor, p: Exponent) -> Tensor:
    """Return an upper bound on ``||S - I||_2``, float64 ``(b,)``, wrong with probability `FAILURE`; NaN where nothing is known.

    From one and two applications to eight vectors. ``F_norm`` and ``X_norm`` are upper bounds on the 2-norms.
    """
    a, b = fraction_of(p).as_integer_ratio()
    if b > 1:  # rounding is relative to ||A||^b: three times the digits for p = 8/3
        F, X = F.to(c.dtype), X.to(c.dtype)
    n, u = F.shape[-1], torch.finfo(F.dtype).eps / 2
    spoilt = _PRODUCT_ROUNDING * max(1.0, (n / 128) ** 0.5) * u
    theta = FAILURE ** (-1 / _PROBES) * math.sqrt(2 / math.pi)
    A_norm = F_norm / c + eps
    scale, shift = (v.to(F.dtype).reshape(-1, 1, 1) for v in (1 / c, eps))
    W = start_vectors(_PROBES, F, None, seed=0).expand(F.shape[0], -1, -1)
    error = torch.zeros((), dtype=c.dtype, device=F.device)
    best = first = torch.full_like(c, torch.inf)
    for q in range(1, _POWERS + 1):
        before, rounding = W, torch.zeros_like(error)
        for M, size in (*[(X, X_norm)] * (a // 2), *[(F, A_norm)] * b, *[(X, X_norm)] * (a // 2)):
            rounding = size.unsqueeze(-1) * (rounding + spoilt * _lengths(W, c))
            W = torch.bmm(W, M).mul_(scale).add_(W * shift) if M is F else torch.bmm(W, M)
        rounding = rounding + u * (_lengths(W, c) + _lengths(before, c))
        W = W - before
        error = rounding if q == 1 else first.unsqueeze(-1) * error + rounding
        largest = theta * (_lengths(W, c) + error).amax(-1) * (1 + 4 * n * u)
        first = largest if q == 1 else first
        best = torch.fmin(best, largest ** (1 / q))
    return best * (1 + 8 * U)


def _lengths(W: Tensor, like: Tensor) -> Tensor:
    """Return the norm of each row, ``(b, k)``, in the dtype of ``like``."""
    lengths: Tensor = torch.linalg.vector_norm(W, dim=-1).to(like.dtype)
    return lengths
