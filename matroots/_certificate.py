# SPDX-License-Identifier: Apache-2.0
"""Proven bounds on the error of any X that is offered as ``A^{-1/p}``.

The two theorems used, with their proofs, are in ``docs/certificate.md``. For ``p = a/b``, A and X positive definite, let S be the
symmetric matrix similar to ``A^b X^a`` with ``alpha I <= S <= beta I``, ``alpha > 0``. Then, in the Loewner order,

    alpha^{1/a} A^{-1/p} <= X <= beta^{1/a} A^{-1/p}                                                     (1)

    ||X - A^{-1/p}||_2 <= max(1, beta)^{(a-1)/a} / a * ||X^{1/2} (I - S^{-1}) X^{1/2}||_2                   (2)

Neither needs X to commute with A. (1) is sharp when errors are spread evenly over the spectrum, (2) when they do not commute
with A and weigh heavily in S; the smaller one is reported. Everything is computed in float64, from A and X alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from matroots._arguments import (
    REAL_DTYPES,
    absolute_damping,
    check_count,
    check_matrices,
    check_number,
    check_values,
)
from matroots._bounded import Bounded, U, gamma, norm_from_below, power, spectrum
from matroots._exponent import parse_exponent
from matroots._hermitian import COMPLEX_DTYPES, real_form
from matroots._prepare import asymmetry_tolerance, lambda_bound, members_of, rescaled, with_identity
from matroots._products import (
    add_to_diagonal,
    frobenius,
    full_precision,
    has_cholesky_factor,
    symmetric_part,
    wide,
)
from matroots.scaling.bounds import norm_bound
from matroots.scaling.multi_power import start_vectors
from matroots.solvers.evd import eigh_with_ladder

Kind = Literal["residual", "reference", "estimate"]
LARGEST_POWER = 64  # p = a/b: X^a is formed (its square root is)
LARGEST = 1e100  # beyond it, and below its inverse, intermediate results could over- or underflow unseen
FAILURE = 1e-9  # of each of the two probabilistic bounds behind kind="estimate"
_PROBES, _PROBE_STEPS = 16, 4
_PROBE_SEED = 271828  # not the vectors that a scaling has used on the way to X


class Certificate(NamedTuple):
    """Bounds on the error of X, one per member: float64 (bool for the last two) with the batch shape.

    Attributes:
        lower, upper: Loewner factors, ``lower A^{-1/p} <= X <= upper A^{-1/p}``; NaN, as eta is, for ``kind="reference"``.
        relative_error: at least ``||X - A^{-1/p}||_2 / ||A^{-1/p}||_2``; inf where not valid.
        eta: at least ``||I - S||_2`` with S similar to ``A X^p`` (``A^b X^a`` for p = a/b); inf where not valid.
        positive_definite: X was shown to be positive definite (``"estimate"``: was assumed to be).
        valid: the bounds hold. Where False nothing is claimed.
    """

    lower: Tensor
    upper: Tensor
    relative_error: Tensor
    eta: Tensor
    positive_definite: Tensor
    valid: Tensor


def certify(
    A: Tensor,
    X: Tensor,
    p: float | Fraction,
    *,
    damping: float | Tensor = 0.0,
    rel_damping: float = 0.0,
    kind: Kind = "residual",
    assume_positive: bool = False,
    max_batch: int | None = None,
    generator: torch.Generator | None = None,
) -> Certificate:
    """Bound the error of X as ``(A + eps I)^{-1/p}``, whoever computed it and however.

    Args:
        A: ``(*, n, n)`` symmetric, or complex Hermitian. The norm of an antisymmetric part is added to the error, one that no
            call would accept (see :func:`inv_root_ex`) makes the member invalid.
        X: ``(*, n, n)``, like A in shape and device, any floating or complex dtype. The norm of its antisymmetric part is added.
        p: a rational >= 1 with numerator at most 64: ``int``, ``Fraction``, or a ``float`` such as 2.5 or 8/3.
        damping: absolute, as for :func:`inv_root_ex`. Pass the ``damping`` of an :class:`InvRoot` to certify against what
            was really solved.
        rel_damping: relative to :func:`lambda_bound` of A; ``eps = damping + rel_damping * lambda_bound(A)``.
        kind: ``"residual"`` costs 4 products for p = 2, 5 for 4, 6 for 6 and 8, two eigenvalue decompositions (values only) and a
            Cholesky factor, all in fp64. ``"reference"`` solves again by fp64 eigendecomposition, certifies that and adds
            the distance to X: within a few per cent of the truth, about twice as dear. ``"estimate"`` costs O(n^2): the
            norm of ``I - S`` from a few random vectors, wrong with probability at most 2e-9 over their choice, if X does not
            depend on them; for p with an even numerator only.
        assume_positive: must be True for ``"estimate"``, which cannot see the signs of X's eigenvalues.
        max_batch: members certified at once; bounds the workspace, does not change the answer.
        generator: of the random vectors of ``"estimate"``; None: the same ones on each call.

    Returns:
        :class:`Certificate`. Devices without fp64 are served on the CPU and get their tensors back in fp32.

    Raises:
        TypeError, ValueError: for arguments that do not fit.

    >>> A = torch.diag(torch.tensor([1.0, 4.0]))
    >>> bool(certify(A, torch.diag(torch.tensor([1.0, 0.5])), p=2).relative_error < 1e-14)
    True
    >>> bool(certify(A, torch.diag(torch.tensor([1.0, -0.5])), p=2).valid)
    False
    """
    for M, name in ((A, "A"), (X, "X")):
        check_matrices(M, name, (*REAL_DTYPES, *COMPLEX_DTYPES))
        check_values(M, name)
    if A.shape != X.shape:
        raise ValueError(f"X: expected the shape of A, {tuple(A.shape)}, got {tuple(X.shape)}")
    if A.device != X.device:
        raise ValueError(f"X: expected the device of A, {A.device}, got {X.device}")
    if A.is_complex() or X.is_complex():
        A, X = (real_form(M) if M.is_complex() else real_form(M + 0j) for M in (A, X))
    if kind not in get_args(Kind):
        raise ValueError(f"kind: expected one of {get_args(Kind)}, got {kind!r}")
    fraction, slack = rational_exponent(p)
    if kind == "estimate" and (not assume_positive or fraction.numerator % 2):
        raise ValueError(
            f'kind: "estimate" is blind to the signs of X and needs an even p and assume_positive=True; got p={p},'
            f" assume_positive={assume_positive}"
        )
    check_count("max_batch", max_batch)
    eps, relative = absolute_damping(damping, A), check_number("rel_damping", rel_damping)
    whole = _vacuous(eps)
    size = max_batch or max(eps.shape[0], 1)
    for start in range(0, eps.shape[0] if A.numel() else 0, size):
        members = slice(start, start + size)
        flat, other = (members_of(M.detach(), start, size) for M in (A, X))
        total = eps[members] + relative * lambda_bound(flat) if relative else eps[members]
        part = _settled(_certified(flat, other, total, fraction, kind, generator), slack)
        for field, value in zip(whole, part, strict=True):
            field[members] = value
    return Certificate(*(field.reshape(A.shape[:-2]) for field in whole))


def _certified(
    A: Tensor, X: Tensor, eps: Tensor, p: Fraction, kind: Kind, generator: torch.Generator | None
) -> Certificate:
    """Certify one chunk, on the CPU where the device has no float64."""
    device = A.device if wide(A.device) == torch.float64 else torch.device("cpu")
    with full_precision(device):
        pair = _normalised(A.to(device), X.to(device), eps.to(device, torch.float64), p)
        if kind == "residual":
            certificate = _residual(pair, p)
        elif kind == "reference":
            certificate = _reference(pair, p)
        else:
            certificate = _estimate(pair, p, generator)
    return certificate._replace(
        positive_definite=certificate.positive_definite & pair.usable, valid=certificate.valid & pair.usable
    )


def _vacuous(eps: Tensor) -> Certificate:
    """The certificate of matrices without entries, one for each element of ``eps``."""
    one, yes = torch.ones_like(eps), torch.ones_like(eps, dtype=torch.bool)
    return Certificate(one, one.clone(), 0 * one, 0 * one, yes, yes.clone())


def _settled(certificate: Certificate, slack: float) -> Certificate:
    """Claim nothing where nothing is known."""
    error = certificate.relative_error + slack
    valid = certificate.valid & torch.isfinite(error)
    return certificate._replace(
        lower=torch.where(valid, certificate.lower * (1 - slack), torch.nan),
        upper=torch.where(valid, certificate.upper * (1 + slack), torch.nan),
        relative_error=torch.where(valid, error, torch.inf),
        eta=torch.where(valid, certificate.eta, torch.inf),
        valid=valid,
    )


def rational_exponent(p: object) -> tuple[Fraction, float]:
    """Return p as a fraction with a small numerator, and what its rounding adds to a relative error.

    The root's exponent moves by at most ``2 u / p``, its eigenvalues (relatively) by that times ``|log lambda|`` of at most
    1,500.
    """
    exponent = parse_exponent(p)
    fraction = exponent if isinstance(exponent, Fraction) else Fraction(exponent).limit_denominator(64)
    if float(fraction) != float(exponent) or fraction.numerator > LARGEST_POWER:
        raise ValueError(
            f"p: a certificate needs a rational p = a/b with a <= {LARGEST_POWER}, b <= 64, got {p}"
        )
    return fraction, 0.0 if Fraction(exponent) == fraction else 3000.0 * U / float(exponent)


@dataclass(frozen=True)
class _Pair:
    """A + eps I and X, ``(b, n, n)`` float64, symmetric, of moderate size; identity where not usable."""

    A: Tensor
    X: Tensor
    A_error: Tensor  # how far A may be from the matrix that is meant, in the Frobenius norm
    X_error: Tensor
    usable: Tensor


def _normalised(A: Tensor, X: Tensor, eps: Tensor, p: Fraction) -> _Pair:
    """Bring both to moderate size: A by ``2^{-a t}``, X by ``2^{b t}``, which leaves ``A^b X^a`` as it is, exactly."""
    a, b = p.as_integer_ratio()
    tolerance = asymmetry_tolerance(A)
    A, X = A.to(torch.float64), X.to(torch.float64)
    largest = torch.maximum(A.abs().amax((-2, -1)), eps)
    usable = torch.isfinite(largest) & torch.isfinite(X.abs().amax((-2, -1))) & (largest > 0)
    exponent = torch.frexp(torch.where(usable, largest, 1.0)).exponent.to(torch.float64)
    t = torch.round(exponent / a)
    A, X = rescaled(A, -a * t), rescaled(X, b * t)
    S, T = symmetric_part(A), symmetric_part(X)
    A_error, X_error = frobenius(A.sub_(S)), frobenius(X.sub_(T))
    usable = usable & (A_error <= tolerance * frobenius(S))
    S = add_to_diagonal(S, torch.where(usable, rescaled(eps, -a * t), 0.0))
    # forming S and T rounds each entry once, adding eps each diagonal entry once more
    A_error = A_error + U * (frobenius(S) + S.diagonal(dim1=-2, dim2=-1).norm(dim=-1))
    return _Pair(
        A=with_identity(S, ~usable),
        X=with_identity(T, ~usable),
        A_error=torch.where(usable, A_error, 0.0),
        X_error=torch.where(usable, X_error + U * frobenius(T), 0.0),
        usable=usable,
    )


def _factor(pair: _Pair) -> tuple[Tensor, Tensor, Tensor]:
    """Return C with ``C C^T ~ X``, a bound on ``||X - C C^T||_2``, and whether X is proven positive definite.

    The factor is taken of ``X - delta I`` with delta above the backward error ``gamma_{n+1} tr(C C^T)`` of Cholesky's method:
    its existence then proves that X itself is positive definite (Higham 2002, theorem 10.3).
    """
    n = pair.X.shape[-1]
    trace = pair.X.diagonal(dim1=-2, dim2=-1).abs().sum(-1)
    delta = 2 * gamma(n + 2) * trace
    C, info = torch.linalg.cholesky_ex(add_to_diagonal(pair.X.clone(), -delta))
    positive = (info == 0) & torch.isfinite(C.diagonal(dim1=-2, dim2=-1).sum(-1))
    C = with_identity(C, ~positive)
    return C, 2 * delta, positive


def _residual(pair: _Pair, p: Fraction) -> Certificate:
    """Both theorems, with every rounding error bounded and added.

    For even a, ``S = X^{a/2} A^b X^{a/2}``. For odd a, ``S = C^T X^{(a-1)/2} A^b X^{(a-1)/2} C`` for the Cholesky factor C of X.
    """
    a, b = p.as_integer_ratio()
    n, even, exact = pair.A.shape[-1], a % 2 == 0, torch.zeros_like(pair.A_error)
    C, C_error, positive = _factor(pair)
    # what is certified is X for even a and C C^T for odd a; the second is C_error away
    X_error = pair.X_error if even else pair.X_error + C_error
    S = _similar(pair, Bounded(C, exact), a, b)
    alpha, beta, valid = _extreme_eigenvalues(S)
    valid = (
        valid & positive & (_definite(pair) if b % 2 == 0 else True)
    )  # A^b hides the signs of A if b is even
    alpha, beta = torch.where(valid, alpha, 1.0), torch.where(valid, beta, 1.0)
    low, high = _roots_outwards(alpha, beta, a)
    loewner = torch.maximum(1 - low, high - 1)
    distance = _weighted_gap(S, Bounded(C, exact), alpha, even)
    if even:
        distance = distance + _padding(C, C_error, alpha, beta)
    normwise = high.clamp_min(1.0) ** (a - 1) / a * distance * (1 + 8 * U)
    X_norm = (norm_from_below(pair.X) - X_error).clamp_min(0.0)
    root_norm = torch.maximum(X_norm / high, X_norm - normwise)  # <= ||A^{-1/p}||, by (1) or by (2)
    relative = torch.minimum(loewner, normwise / root_norm) + X_error / root_norm
    A_norm = frobenius(pair.A) * (1 + 2 * n * U) + pair.A_error
    spread = X_error * A_norm ** (b / a)  # X <= high R + X_error I and I <= ||A||^{1/p} R
    eta = torch.maximum(1 - alpha, beta - 1).clamp_min(0.0)
    if not even:  # from C C^T to X: ||X^a - (X + E)^a|| <= a ||E|| (||X|| + ||E||)^{a-1}
        eta = eta + A_norm**b * a * C_error * (frobenius(pair.X) * (1 + 2 * n * U) + C_error) ** (a - 1)
    return Certificate(
        lower=low - spread,
        upper=high + spread,
        relative_error=relative * (1 + 8 * U),
        eta=eta * (1 + 64 * U),
        positive_definite=positive,
        valid=valid & (root_norm > 0),
    )


def _roots_outwards(alpha: Tensor, beta: Tensor, a: int) -> tuple[Tensor, Tensor]:
    """Return ``alpha^{1/a}`` and ``beta^{1/a}`` rounded outwards: the power and the exponent 1/a are off by a few u."""
    low = alpha ** (1 / a) * (1 - (4 + alpha.log().abs() / a) * U)
    return low, beta ** (1 / a) * (1 + (4 + beta.log().abs() / a) * U)


def _definite(pair: _Pair) -> Tensor:
    """Return whether A, and every matrix within ``A_error`` of it, is proven positive definite, as X is in `_factor`."""
    trace = pair.A.diagonal(dim1=-2, dim2=-1).abs().sum(-1)
    delta = 2 * gamma(pair.A.shape[-1] + 2) * trace + pair.A_error
    return has_cholesky_factor(add_to_diagonal(pair.A.clone(), -delta * (1 + 4 * U)))


def _similar(pair: _Pair, C: Bounded, a: int, b: int) -> Bounded:
    """Return S, symmetric and similar to ``A^b X^a``, with a bound on its error."""
    A = Bounded(pair.A, pair.A_error)
    if a % 2 == 0:
        W = power(Bounded(pair.X, torch.zeros_like(pair.X_error)), a // 2)
    else:
        W = C if a == 1 else power(C @ C.mT, (a - 1) // 2) @ C
    V = W if b == 1 else power(A, b // 2) @ W
    S = V.mT @ (A @ V) if b % 2 else V.mT @ V
    return Bounded(symmetric_part(S.value), S.error + U * frobenius(S.value))


def _extreme_eigenvalues(S: Bounded) -> tuple[Tensor, Tensor, Tensor]:
    """Return bounds alpha, beta with ``alpha I <= S <= beta I``, and whether alpha is positive.

    Values so extreme that a norm on the way may have underflowed are refused. ``eigvalsh`` is backward stable: its eigenvalues are off by at most a modest multiple of ``u ||S||``, for which
    ``4 n u ||S||_F`` stands.
    """
    eigenvalues = spectrum(S.value)
    slop = S.error + 4 * S.value.shape[-1] * U * frobenius(S.value)
    alpha, beta = eigenvalues[..., 0] - slop, eigenvalues[..., -1] + slop
    return alpha, beta, (alpha > 1 / LARGEST) & (beta < LARGEST)


def _weighted_gap(S: Bounded, C: Bounded, alpha: Tensor, even: bool) -> Tensor:
    """Bound ``||X^{1/2} (I - S^{-1}) X^{1/2}||_2`` with ``X = C C^T``, from ``I - S^{-1} = D - D S^{-1} D``, ``D = S - I``.

    For the S of even a that norm is ``||C^T (I - S^{-1}) C||``, for odd a, whose S is the same one rotated, ``||C (I - S^{-1}) C^T||``.
    """
    n = S.value.shape[-1]
    D = Bounded(add_to_diagonal(S.value.clone(), -1.0), S.error + U * (frobenius(S.value) + n**0.5))
    F = C if even else C.mT
    DF = D @ F
    N = F.mT @ DF
    first = spectrum(symmetric_part(N.value)).abs().amax(-1)
    slop = N.error + 4 * n * U * frobenius(N.value)
    return first + slop + (frobenius(DF.value) + DF.error) ** 2 / alpha


def _padding(C: Tensor, C_error: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """Return what ``X = C C^T + F``, ``0 <= F <= C_error I``, may add to ``||C^T G C||``, ``G = I - S^{-1}``.

    ``X = B B^T`` with ``B = (C, F^{1/2})``, so ``||X^{1/2} G X^{1/2}|| = ||B^T G B|| <= ||C^T G C|| + ||F^{1/2} G C|| + ||F^{1/2} G F^{1/2}||``.
    """
    gap = torch.maximum(1 / alpha - 1, 1 - 1 / beta).clamp_min(0.0)
    return gap * (C_error.sqrt() * frobenius(C) + C_error)


def _reference(pair: _Pair, p: Fraction) -> Certificate:
    """Certify an fp64 eigendecomposition's root and add its distance to X."""
    eigenvalues, Q, _, decomposed = eigh_with_ladder(pair.A)
    positive_A = decomposed & (eigenvalues[..., 0] > 0)
    powers = eigenvalues.clamp_min(torch.finfo(torch.float64).tiny) ** -(1 / float(p))
    R = symmetric_part(torch.bmm(Q * powers.unsqueeze(-2), Q.mT))
    finite = positive_A & torch.isfinite(R.abs().amax((-2, -1)))
    R = with_identity(R, ~finite)
    reference = _residual(replace(pair, X=R, X_error=torch.zeros_like(pair.X_error)), p)
    gap = symmetric_part(pair.X - R)
    n = gap.shape[-1]
    distance = spectrum(gap).abs().amax(-1) + 4 * n * U * frobenius(gap) + pair.X_error
    distance = distance + U * (frobenius(pair.X) + frobenius(R))
    root_norm = norm_from_below(R) / (1 + reference.relative_error)
    nothing = torch.full_like(distance, torch.nan)
    return Certificate(
        lower=nothing,
        upper=nothing,
        relative_error=(distance / root_norm + reference.relative_error) * (1 + 8 * U),
        eta=nothing,
        positive_definite=_factor(pair)[2],
        valid=finite & reference.valid & (root_norm > 0),
    )


def _estimate(pair: _Pair, p: Fraction, generator: torch.Generator | None) -> Certificate:
    """Bound ``||D||_2``, ``D = S - I``, from products with k Gaussian vectors w (Halko, Martinsson, Tropp 2011, lemma 4.1).

    ``P(||D^q|| > t sqrt(2/pi) max_i ||D^q w_i||) <= t^{-k}``; used for q = 1 and, sharper, for a power of D whose rounding is
    bounded with the help of the first.
    """
    a, b = p.as_integer_ratio()
    factor = FAILURE ** (-1 / _PROBES) * math.sqrt(2 / math.pi)
    V = start_vectors(_PROBES, pair.A, generator, seed=_PROBE_SEED).expand(pair.A.shape[0], -1, -1)
    error = torch.zeros(V.shape[:-1], dtype=V.dtype, device=V.device)
    first = eta = torch.full_like(pair.A_error, torch.inf)
    for q in range(1, _PROBE_STEPS + 1):
        V, rounding = _apply_gap(pair, V, a, b)
        error = rounding if q == 1 else first.unsqueeze(-1) * error + rounding
        largest = (torch.linalg.vector_norm(V, dim=-1) * (1 + 2 * V.shape[-1] * U) + error).amax(-1)
        if q == 1:
            first = factor * largest
    eta = torch.fmin(first, (factor * largest) ** (1 / _PROBE_STEPS)) * (1 + 8 * U)
    low, high = _roots_outwards((1 - eta).clamp_min(1 / LARGEST), 1 + eta, a)
    root_norm = (norm_from_below(pair.X) - pair.X_error).clamp_min(0.0) / high
    A_norm = frobenius(pair.A) * (1 + 2 * pair.A.shape[-1] * U) + pair.A_error
    spread = pair.X_error * A_norm ** (b / a)
    return Certificate(
        lower=low - spread,
        upper=high + spread,
        relative_error=torch.maximum(1 - low, high - 1) + pair.X_error / root_norm,
        eta=eta,
        positive_definite=torch.ones_like(pair.usable),
        valid=(eta < 1) & (root_norm > 0),
    )


def _apply_gap(pair: _Pair, V: Tensor, a: int, b: int) -> tuple[Tensor, Tensor]:
    """Return ``D v`` for the rows v of V, ``D = X^{a/2} A^b X^{a/2} - I``, and a bound on its rounding error, ``(b, k)``."""
    n, exact = V.shape[-1], torch.zeros_like(pair.A_error)
    W, error = V, V.new_zeros(V.shape[:-1])
    sides = [(pair.X, exact)] * (a // 2)
    for F, F_error in (*sides, *[(pair.A, pair.A_error)] * b, *sides):
        size = torch.linalg.vector_norm(W, dim=-1)
        F_norm = norm_bound(F).unsqueeze(-1)
        spoilt = (gamma(n) * frobenius(F) + F_error).unsqueeze(-1)
        error = (F_norm + spoilt) * error + spoilt * size * (1 + 2 * n * U)
        W = torch.bmm(W, F)
    sizes = torch.linalg.vector_norm(W, dim=-1) + torch.linalg.vector_norm(V, dim=-1)
    return W - V, error + 2 * U * sizes
