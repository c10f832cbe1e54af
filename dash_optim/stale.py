"""How wrong an old root has become: two-sided bounds on the root in use, against the factor as it is now.

Let ``A = F/c + eps I`` be the damped, corrected factor and ``S = X^{a/2} A^b X^{a/2}``, ``p = a/b``. If ``alpha I <= S <= beta I`` then
``alpha^{1/a} A^{-1/p} <= X <= beta^{1/a} A^{-1/p}`` (docs/certificate.md): the relative error of X is at most
``max(1 - alpha^{1/a}, beta^{1/a} - 1)``, however old it is.

alpha is free: a factor loses nothing but by its decay, ``F_t >= b F_{t-1}``, so ``A_t >= g A_{t-1}`` with ``g = min(b c_{t-1} / c_t, eps_t / eps_{t-1})``,
less what rounding the factor may take, and ``alpha_t >= alpha_{t-1} g^b`` (of ``(X^{p/2} A X^{p/2})^b``, which S becomes by Loewner-Heinz: powers above 1
do not keep the order, so S itself may lose more, the bound on X does not). beta is bounded from random vectors
(Halko, Martinsson, Tropp 2011, lemma 4.1): ``P(||S^q|| > theta sqrt(2/pi) max_i ||S^q w_i||) <= theta^{-k}`` for k Gaussian w.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Final

import torch
from torch import Tensor

from dash_optim.stacks import FIELD, Chunk, Sides, Stack
from dash_optim.update import correction
from matroots import certify, lambda_bound
from matroots._bounded import U, gamma
from matroots._exponent import Exponent
from matroots._products import frobenius
from matroots.scaling.bounds import norm_bound
from matroots.scaling.multi_power import start_vectors

FAILURE: Final = 1e-6
"""Probability that one bound on beta is too low."""
_PROBES, _POWERS = 8, 3
_ROUNDING: Final = 2.0  # times eps of its dtype and the factor's norm: what rounding an update takes from the factor, above all seen
_SUMMANDS: Final = (
    1024  # up to so many products in a sum; where all have one sign rounding grows with their number
)


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
    c, eps, alpha = aged(stack, F, record, steps)
    tolerable = (1 - alpha ** (1 / a) <= stack.recipe.refresh_tol).nonzero().squeeze(-1)
    beta = torch.full_like(alpha, torch.inf)
    if len(tolerable):
        whole = len(tolerable) == len(alpha)
        pick = slice(None) if whole else tolerable
        beta[pick] = largest_eigenvalue(F[pick], X[pick], c[pick], eps[pick], stack.p)
    error = torch.maximum(1 - alpha ** (1 / a), beta ** (1 / a) - 1)
    kept = error <= stack.recipe.refresh_tol  # False where nothing is known (NaN)
    # of the others too: if the solve fails the old root stays, and it has aged by this step
    for name, values in (("alpha", alpha), ("beta", beta), ("damping", eps), ("correction", c)):
        record[:, FIELD[name]] = values
    record[:, FIELD["skipped"]] += kept
    due: Tensor = (~kept).nonzero().squeeze(-1).cpu() + span.start
    return due


def aged(stack: Stack, F: Tensor, record: Tensor, steps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return each factor's correction and eps in this step, and a lower bound alpha for its old root; NaN where there is none.

    The record's correction and eps are those of the last step for which alpha was written down, so one step of decay is all that is new.
    """
    recipe = stack.recipe
    b = recipe.beta_factors
    c = correction(b if recipe.bias_correction else 1.0, steps)
    eps = recipe.damping + (recipe.rel_damping * lambda_bound(F) / c if recipe.rel_damping else 0.0)
    eps = eps * torch.ones_like(c)
    ratio = torch.where(eps > 0, eps / record[:, FIELD["damping"]], 1.0)
    kept = torch.minimum(b * record[:, FIELD["correction"]] / c, ratio).clamp_max(1.0)
    summands = torch.Size(stack.shape).numel() / F.shape[-1]
    rounding = _ROUNDING * max(1.0, summands / _SUMMANDS) * torch.finfo(F.dtype).eps
    kept = (kept - rounding * frobenius(F) / (c * eps)).clamp_min(0.0)
    power = fraction_of(stack.p).denominator
    return c, eps, record[:, FIELD["alpha"]] * (kept * (1 - 8 * U)) ** power


def certify_fresh(F: Tensor, X: Tensor, c: Tensor, damping: Tensor, p: Exponent) -> tuple[Tensor, Tensor]:
    """Return alpha and beta of roots that have just been computed; alpha 0 and beta inf where they cannot be bounded.

    ``F + c eps I`` has the root ``c^{-1/p} X``.
    """
    scaled = X * (c ** (-1 / float(p))).to(X.dtype).reshape(-1, 1, 1)
    certificate = certify(F, scaled, p, damping=damping, kind="estimate", assume_positive=True)
    alpha = torch.where(certificate.valid, 1 - certificate.eta, 0.0).clamp_min(0.0)
    beta = torch.where(certificate.valid, 1 + certificate.eta, torch.inf)
    # what rounding the scaled root may change: a relative 2 u of float32 in X^{a/2} on both sides
    a, _ = fraction_of(p).as_integer_ratio()
    slack = 2 * a * torch.finfo(X.dtype).eps
    return alpha * (1 - slack), beta * (1 + slack)


def largest_eigenvalue(F: Tensor, X: Tensor, c: Tensor, eps: Tensor, p: Exponent) -> Tensor:
    """Return an upper bound on the largest eigenvalue of S, ``(b,)``, wrong with probability `FAILURE`; float64 throughout.

    From ``||S^q w||`` for q = 1, ..., 3 and eight vectors w; rounding is followed and added.
    """
    a, b = fraction_of(p).as_integer_ratio()
    A = F.to(torch.float64) / c.reshape(-1, 1, 1)  # a copy: F is the state itself
    A.diagonal(dim1=-2, dim2=-1).add_(eps.unsqueeze(-1))
    X = X.to(torch.float64)
    n = A.shape[-1]
    theta = FAILURE ** (-1 / _PROBES) * math.sqrt(2 / math.pi)
    W = start_vectors(_PROBES, A, None, seed=0).expand(A.shape[0], -1, -1)
    error = W.new_zeros(W.shape[:-1])
    norms = {
        id(M): (norm_bound(M).unsqueeze(-1), (gamma(n + 2) * frobenius(M)).unsqueeze(-1)) for M in (A, X)
    }
    best = torch.full_like(c, torch.inf)
    for q in range(1, _POWERS + 1):
        for M in (*[X] * (a // 2), *[A] * b, *[X] * (a // 2)):
            size, spoilt = norms[id(M)]
            error = (size + spoilt) * error + spoilt * torch.linalg.vector_norm(W, dim=-1)
            W = torch.bmm(W, M)
        largest = (torch.linalg.vector_norm(W, dim=-1) * (1 + 4 * n * U) + error).amax(-1)
        best = torch.fmin(best, (theta * largest) ** (1 / q))
    return best * (1 + 8 * U)
