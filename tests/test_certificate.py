# SPDX-License-Identifier: Apache-2.0
"""The certificate against truth that is known more accurately than the bound claims."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor

from matroots import Certificate, certify, inv_root_ex, lambda_bound

Wide = np.longdouble
Array = np.ndarray
WIDE_EPS = float(np.finfo(Wide).eps)
ORDERS = (1, 2, 3, 4, 6, 8, 8 / 3)
MADE = ("exact", "commuting", "general", "asymmetric", "wrong sign", "wrong p", "wrong scale", "stale", "nan")
F64 = torch.float64

needs_wide = pytest.mark.skipif(WIDE_EPS > 1e-18, reason="np.longdouble is no wider than float64 here")


# ---------------------------------------------------------------------------------------------------------------------
# Truth: f(A) in extended precision, from an fp64 eigendecomposition corrected to first order (the error is of second)


def transposed(M: Array) -> Array:
    return np.swapaxes(M, -1, -2)


def diagonal(values: Array) -> Array:
    return values[..., :, None] * np.eye(values.shape[-1])


def extreme(M: Array) -> Array:
    """The 2-norm of each member: the top singular vectors from fp64, the bilinear form in extended precision."""
    U, _, Vt = np.linalg.svd(M.astype(np.float64))
    u, v = U[..., :, 0].astype(Wide), Vt[..., 0, :].astype(Wide)
    form = (u * (M @ v[..., None])[..., 0]).sum(-1)
    return np.abs(form) / np.sqrt((u * u).sum(-1) * (v * v).sum(-1))


@dataclass(frozen=True)
class Truth:
    """``A = Q (diag(eigenvalues) + rest) Q^T`` in extended precision; ``known`` where A is positive definite."""

    Q: Array
    eigenvalues: Array
    rest: Array
    slack: Array  # relative error of any power that is taken
    known: Array

    @classmethod
    def of(cls, A: Array) -> Truth:
        n = A.shape[-1]
        Q = np.linalg.eigh(A)[1].astype(Wide)
        Q = Q @ (3 * np.eye(n) - transposed(Q) @ Q) / 2
        B = transposed(Q) @ (A.astype(Wide) @ Q)
        B = (B + transposed(B)) / 2
        found = np.diagonal(B, axis1=-2, axis2=-1)
        known = found.min(-1) > 0
        eigenvalues = np.where(known[:, None], found, 1)
        rest = np.where(known[:, None, None], B - diagonal(found), 0)
        relative = rest / np.sqrt(eigenvalues[..., :, None] * eigenvalues[..., None, :])
        condition = eigenvalues.max(-1) / eigenvalues.min(-1)
        slack = 2 * (relative**2).sum((-2, -1)) + 8 * n * WIDE_EPS * condition
        return cls(Q, eigenvalues, rest, slack, known & (slack < 1e-2))

    def power(self, s: float | Wide) -> Array:
        """Return ``A^s``: the derivative is a Schur product with divided differences (Daleckii and Krein)."""
        return self.Q @ (diagonal(self.eigenvalues**s) + self._first_order(s)) @ transposed(self.Q)

    def _first_order(self, s: float | Wide) -> Array:
        log = np.log(self.eigenvalues)
        half = (log[..., :, None] - log[..., None, :]) / 2
        safe = np.where(half == 0, 1, half)
        ratio = np.where(half == 0, s, np.sinh(s * safe) / np.sinh(safe))
        mean = np.exp((log[..., :, None] + log[..., None, :]) / 2)
        return ratio * mean ** (s - 1) * self.rest

    def relative_error(self, X: Array, p: Fraction) -> Array:
        """Return ``||X - A^{-1/p}||_2 / ||A^{-1/p}||_2``, off by at most ``slack`` and rounding."""
        R = self.power(-Wide(p.denominator) / p.numerator)
        return extreme(X - R) / extreme(R)

    def below_and_above(self, X: Array, p: Fraction, lower: Array, upper: Array) -> tuple[Array, Array]:
        """Return the smallest eigenvalues of ``R^{-1/2} X R^{-1/2} - lower I`` and ``upper I - R^{-1/2} X R^{-1/2}``."""
        s = -Wide(p.denominator) / p.numerator
        scale = self.eigenvalues ** (-s / 2)
        weights = scale[..., :, None] * scale[..., None, :]
        one = np.eye(X.shape[-1])
        M = weights * (transposed(self.Q) @ X @ self.Q) - one  # exact: Q^T R Q is D^s + first order
        H = weights * self._first_order(s)

        def smallest(G: Array) -> Array:
            return np.linalg.eigvalsh((G + transposed(G)).astype(np.float64) / 2)[..., 0]

        lower, upper = lower[:, None, None], upper[:, None, None]
        return smallest(M + (1 - lower) * one - lower * H), smallest((upper - 1) * one + upper * H - M)

    def eta(self, X: Array, p: Fraction) -> tuple[Array, Array]:
        """Return ``||I - S||_2`` and how far off that may be; ``A^{1/2} A^c X^a A^c A^{1/2}``, b = 2 c + 1, is similar to S."""
        a, b = p.numerator, p.denominator
        n, half, root_of_A = X.shape[-1], b // 2, self.power(Wide(0.5))
        A = self.power(Wide(1))
        F = np.linalg.matrix_power(A, half) @ root_of_A
        S = transposed(F) @ np.linalg.matrix_power(X, a) @ F
        rounding = 8 * n * a * WIDE_EPS * extreme(A) ** b * extreme(X) ** a
        eta = extreme(np.eye(n) - S)
        return eta, 4 * b * self.slack * extreme(S) + rounding + 1e-15 * eta


def rational(p: float) -> Fraction:
    return Fraction(p).limit_denominator(64)


def wide(M: Tensor) -> Array:
    return M.to(F64).numpy().astype(Wide)


def symmetric(M: Array) -> Array:
    return (M + transposed(M)) / 2


# ---------------------------------------------------------------------------------------------------------------------
# Draws


def rotation(rng: np.random.Generator, b: int, n: int) -> Array:
    return np.linalg.qr(rng.standard_normal((b, n, n)))[0]


def spectra(rng: np.random.Generator, b: int, n: int, largest: float) -> Array:
    """Eigenvalues in ``[1/condition, 1]``, times a scale: spread, clustered, one apart at either end."""
    condition = 10 ** rng.uniform(0, largest, (b, 1))
    position = np.linspace(0, 1, n)[None] if n > 1 else np.ones((1, 1))
    kind = rng.integers(0, 4, (b, 1))
    spread = np.where(kind == 1, np.round(position), position)
    spread = np.where(kind == 2, np.floor(position), spread)
    spread = np.where(kind == 3, np.ceil(position), spread)
    spread = spread * (1 - 1e-3 * rng.random((b, n)) * (kind == 1))
    return condition**-spread * 10 ** rng.uniform(-5, 5, (b, 1))


@dataclass(frozen=True)
class Draw:
    """A batch of matrices of one size and order, a candidate for each, how it was made, and the truth."""

    A: Tensor
    X: Tensor
    p: float
    made: list[str]
    truth: Truth
    error: Array  # relative, in extended precision
    sure: Array  # the truth is known to a hundredth of what a float64 bound can claim

    @property
    def fraction(self) -> Fraction:
        return rational(self.p)


def draw(
    rng: np.random.Generator, n: int, p: float, dtype: torch.dtype, *, copies: int, single: bool
) -> Draw:
    made = [kind for kind in MADE for _ in range(copies)]
    b = len(made)
    Q = rotation(rng, b, n)
    A = symmetric((Q * spectra(rng, b, n, 5 if single else 12)[:, None, :]) @ transposed(Q))
    A_tensor = torch.from_numpy(A).to(torch.float32 if single else F64)
    truth = Truth.of(A_tensor.to(F64).numpy())
    fraction = rational(p)
    R = truth.power(-Wide(fraction.denominator) / fraction.numerator).astype(np.float64)
    X = torch.from_numpy(np.stack([candidate(rng, R[i], A[i], fraction, made[i]) for i in range(b)])).to(
        dtype
    )
    finite = torch.isfinite(X).all(-1).all(-1).numpy() & truth.known
    error = truth.relative_error(np.where(finite[:, None, None], wide(X), 0), fraction)
    return Draw(A_tensor, X, p, made, truth, error, finite)


def candidate(rng: np.random.Generator, R: Array, A: Array, p: Fraction, made: str) -> Array:
    n, size = len(R), np.linalg.norm(R, 2)
    strength = 10 ** rng.uniform(-10, 0)
    noise = rng.standard_normal((n, n)) / math.sqrt(n) * strength
    roots, Q = np.linalg.eigh(R)
    if made == "commuting":
        return symmetric((Q * (roots * np.exp(strength * rng.standard_normal(n)))) @ Q.T)
    if made == "general":
        floor = roots.min() if rng.random() < 0.7 else size
        return R + symmetric(noise) * floor
    if made == "asymmetric":
        return R + noise * (roots.min() if rng.random() < 0.7 else size)
    if made == "wrong sign":
        roots[rng.integers(n)] *= -1
        return symmetric((Q * roots) @ Q.T)
    if made == "wrong p":
        other = rng.choice([q for q in (1.0, 2.0, 3.0, 4.0, 5.0, float(p) * 1.01) if q != float(p)])
        return symmetric((Q * roots ** (float(p) / other)) @ Q.T)
    if made == "wrong scale":
        return R * 10 ** rng.uniform(-3, 3)
    if made == "stale":
        G = rng.standard_normal((n, max(1, n // 4))) * np.linalg.norm(A, 2) ** 0.5
        earlier, Q = np.linalg.eigh(A + 10 ** rng.uniform(-6, 1) * G @ G.T)
        return symmetric((Q * earlier.clip(1e-300) ** (-1 / float(p))) @ Q.T)
    return R if made == "exact" else np.full_like(R, np.nan)


@cache
def draws() -> tuple[Draw, ...]:
    rng = np.random.default_rng(20240607)
    sizes = [1, 1, 2, 2, 3, 3, 4, 5, 6, 8, 11, 14, 18, 24, 33, 48, 64, 96]
    batches = []
    for p in ORDERS:
        for i, n in enumerate(sizes):
            dtype = (torch.float32, F64)[i % 2]
            copies = 4 if n <= 16 else 2 if n <= 48 else 1
            batches.append(draw(rng, n, p, dtype, copies=copies, single=i % 4 == 0))
    return tuple(batches)


def exceeded(truth: Array, claimed: Array, slack: Array) -> tuple[Array, Array]:
    """Return where ``truth <= claimed`` is disproved, and where it can be told at all."""
    tolerance = slack + truth * 1e-15
    return truth - tolerance > claimed, np.abs(truth - claimed) > tolerance


def checked(kind: str, *, counted: int, valid: int) -> None:
    """Certify all draws; no claim may be smaller than the truth, and the counts must show that the test has teeth."""
    decided = proven = 0
    for d in draws():
        if kind == "estimate" and d.fraction.numerator % 2:
            continue
        certificate = certify(d.A, d.X, d.p, kind=kind, assume_positive=True)
        claims, usable = certificate.relative_error.numpy(), certificate.valid.numpy()
        sure = d.sure & ~blind_spots(d) if kind == "estimate" else d.sure
        assert not usable[np.array(d.made) == "nan"].any()
        assert np.isinf(claims[~usable]).all()
        wrong, told = exceeded(d.error, claims.astype(Wide), d.truth.slack)
        for i in np.flatnonzero(sure & usable):
            about = (d.p, d.A.shape[-1], d.X.dtype, d.made[i], float(d.error[i]), claims[i])
            assert not wrong[i], about
        decided += int((sure & (told | ~usable)).sum())
        proven += int((sure & told & usable).sum())
        check_order(d, certificate, sure & usable)
    assert decided >= counted
    assert proven >= valid


def blind_spots(d: Draw) -> Array:
    """Members with X not clearly positive definite, for which "estimate" is not to be used."""
    X = symmetric(np.where(d.sure[:, None, None], wide(d.X), np.eye(d.X.shape[-1]))).astype(np.float64)
    eigenvalues = np.linalg.eigvalsh(X)
    return eigenvalues[..., 0] <= 1e-13 * eigenvalues[..., -1]


def check_order(d: Draw, certificate: Certificate, members: Array) -> None:
    """``lower A^{-1/p} <= X <= upper A^{-1/p}`` for the symmetric part of X."""
    lower, upper = (field.numpy().astype(Wide) for field in (certificate.lower, certificate.upper))
    members = members & np.isfinite(lower.astype(np.float64))
    if not members.any():
        return
    keep = members[:, None, None]
    X = np.where(keep, symmetric(wide(d.X)), 0)
    lower, upper = (np.where(members, bound, 0) for bound in (lower, upper))
    below, above = d.truth.below_and_above(X, d.fraction, lower, upper)
    slack = d.truth.slack * (1 + upper) + 1e-15 * (np.abs(lower - 1) + np.abs(upper - 1))
    assert (below >= -slack)[members].all(), (d.p, np.array(d.made)[members & (below < -slack)])
    assert (above >= -slack)[members].all(), (d.p, np.array(d.made)[members & (above < -slack)])


@needs_wide
@pytest.mark.parametrize("p", ORDERS)
def test_truth_agrees_with_arbitrary_precision(p):
    rng = np.random.default_rng(4)
    fraction = rational(p)
    for largest in (2, 10):
        b = 3
        Q = rotation(rng, b, 3)
        A = symmetric((Q * spectra(rng, b, 3, largest)[:, None, :]) @ transposed(Q))
        X = symmetric(rng.standard_normal((b, 3, 3)))
        truth = Truth.of(A)
        with mpmath.workdps(60):
            for i in np.flatnonzero(truth.known):
                eigenvalues, Q = mpmath.eigsy(mpmath.matrix(A[i].tolist()))
                power = [v ** (-mpmath.mpf(fraction.denominator) / fraction.numerator) for v in eigenvalues]
                R = Q * mpmath.diag(power) * Q.T
                gap = max(abs(v) for v in mpmath.eigsy(mpmath.matrix(X[i].tolist()) - R, eigvals_only=True))
                expected = float(gap / max(power))
                found = float(truth.relative_error(X.astype(Wide), fraction)[i])
                assert abs(found - expected) <= float(truth.slack[i]) + 1e-15 * expected


@needs_wide
def test_residual_is_never_below_the_true_error():
    checked("residual", counted=2000, valid=2000)


@needs_wide
def test_reference_is_never_below_the_true_error():
    checked("reference", counted=2000, valid=2500)


@needs_wide
def test_estimate_is_never_below_the_true_error():
    checked("estimate", counted=1500, valid=800)


@needs_wide
@pytest.mark.parametrize("kind", ["residual", "estimate"])
def test_eta_is_never_below_the_true_residual(kind):
    for d in draws():
        if d.A.shape[-1] > 40 or (kind == "estimate" and d.fraction.numerator % 2):
            continue
        certificate = certify(d.A, d.X, d.p, kind=kind, assume_positive=True)
        members = d.sure & certificate.valid.numpy() & ~blind_spots(d)
        true, slack = d.truth.eta(np.where(members[:, None, None], symmetric(wide(d.X)), 0), d.fraction)
        wrong = members & (true - slack > certificate.eta.numpy())
        assert not wrong.any(), (d.p, d.A.shape[-1], np.array(d.made)[wrong])


# ---------------------------------------------------------------------------------------------------------------------
# Tightness


def spread_out(rng: np.random.Generator, n: int, b: int, condition: float) -> Tensor:
    Q = rotation(rng, b, n)
    position = np.concatenate([np.zeros((b, 1)), rng.random((b, n - 2)), np.ones((b, 1))], axis=1)
    return torch.from_numpy(symmetric((Q * condition ** -position[:, None, :]) @ transposed(Q)))


def tightness(A: Tensor, X: Tensor, p: float, kind: str, floor: float = 0.0) -> list[float]:
    """Return claimed over true error of each member whose true error is at least ``floor``."""
    true = Truth.of(A.to(F64).numpy()).relative_error(wide(X), rational(p)).astype(np.float64)
    claimed = certify(A, X, p, kind=kind, assume_positive=True).relative_error.numpy()
    return list((claimed / true)[true >= floor])


# measured medians: residual 1.0 to 1.1 for every solver; rounded roots 1.01, 1.9, 2.7, 3.1, 3.8, 4.0; estimate 1.6 to 2.1
SOLVED = [(p, m) for p in (1, 2, 3, 4, 6, 8) for m in ("evd", "cn", "ndb") if m != "ndb" or p in (2, 4, 8)]


@needs_wide
@pytest.mark.parametrize(("p", "method"), SOLVED)
def test_certificates_of_solved_fp32_roots_are_tight(p, method):
    rng = np.random.default_rng(11)
    ratios = {"residual": [], "reference": [], "estimate": []}
    for n, b in ((16, 8), (48, 4)):
        A = spread_out(rng, n, b, 1e4).to(torch.float32)
        X = inv_root_ex(A, p, method=method).root
        for kind, found in ratios.items():
            if kind != "estimate" or p % 2 == 0:
                found += tightness(A, X, p, kind, 1e-6)
    assert len(ratios["residual"]) >= 6
    assert np.median(ratios["residual"]) <= 1.25
    assert np.median(ratios["reference"]) <= 1.05
    assert p % 2 or np.median(ratios["estimate"]) <= 3


@needs_wide
@pytest.mark.parametrize(("p", "limit"), [(1, 1.2), (2, 3), (3, 4.5), (4, 5), (6, 6), (8, 6.5)])
def test_certificates_of_roots_rounded_to_fp32_are_tight(p, limit):
    rng = np.random.default_rng(12)
    ratios = []
    for n, b in ((16, 12), (48, 6)):
        A = spread_out(rng, n, b, 1e4)
        X = torch.from_numpy(Truth.of(A.numpy()).power(-1 / Wide(p)).astype(np.float64)).to(torch.float32)
        ratios += tightness(A, X, p, "residual")
    assert np.median(ratios) <= limit


@needs_wide
def test_reference_is_tight_where_the_true_error_is_visible():
    ratios = []
    for d in draws():
        if d.X.dtype == torch.float32:
            certificate = certify(d.A, d.X, d.p, kind="reference")
            visible = d.sure & certificate.valid.numpy() & (d.error >= 1e-6)
            ratios += list((certificate.relative_error.numpy() / d.error)[visible])
    assert len(ratios) >= 500
    assert np.median(ratios) <= 1.05


# ---------------------------------------------------------------------------------------------------------------------
# Blind to nothing


def turned(values: list[float], seed: int = 0) -> tuple[Tensor, Tensor]:
    Q = torch.from_numpy(rotation(np.random.default_rng(seed), 1, len(values))[0])
    return (Q * torch.tensor(values, dtype=F64)) @ Q.mT, Q


def spd(*shape: int, condition: float = 1e3, seed: int = 0) -> Tensor:
    *batch, n = shape
    A = spread_out(np.random.default_rng(seed), n, max(1, math.prod(batch)), condition)
    return A.reshape(*batch, n, n)


def exact_root(A: Tensor, p: float) -> Tensor:
    eigenvalues, Q = torch.linalg.eigh(A.to(F64))
    return (Q * eigenvalues.unsqueeze(-2) ** (-1 / p)) @ Q.mT


def assert_same(first: Certificate, second: Certificate, rtol: float = 1e-9) -> None:
    for name, one, other in zip(Certificate._fields, first, second, strict=True):
        torch.testing.assert_close(
            one, other, rtol=rtol, atol=1e-12, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("kind", ["residual", "reference"])
@pytest.mark.parametrize(("p", "roots"), [(4, [-1.0, 1.351, 1.778]), (2, [-1.0, 1.826, 3.162])])
def test_wrong_sign_root_with_a_perfect_residual(p, roots, kind, dtype):
    A, _ = turned([1.0, 0.3, 0.1])
    X, _ = turned([math.copysign(v ** (-1 / p), r) for v, r in zip((1.0, 0.3, 0.1), roots, strict=True)])
    rounded, _ = turned(roots)
    for candidate_root in (X, rounded):
        certificate = certify(A, candidate_root.to(dtype), p, kind=kind)
        assert not certificate.positive_definite
        assert kind == "reference" or not certificate.valid
        error = torch.linalg.matrix_norm(candidate_root - exact_root(A, p), 2) / 0.1 ** (-1 / p)
        assert (
            not certificate.valid
            or certificate.relative_error >= error - 1e-6 * (dtype == torch.float32) - 1e-14
        )


@needs_wide
@pytest.mark.parametrize("kind", ["residual", "reference"])
@pytest.mark.parametrize(("p", "method"), [(2, "ndb"), (4, "ndb"), (4, "cn"), (2, "cn"), (4, "evd")])
def test_drifted_iterates_are_certified_from_the_original_matrix(p, method, kind):
    Q = torch.from_numpy(rotation(np.random.default_rng(3), 8, 16))
    A = (Q * torch.logspace(0, -6, 16, dtype=F64)) @ Q.mT
    A = ((A + A.mT) / 2).to(torch.float32)
    result = inv_root_ex(A, p, method=method)
    truth = Truth.of((A.to(F64) + result.damping[:, None, None] * torch.eye(16)).numpy())
    error = truth.relative_error(wide(result.root), Fraction(p))
    certificate = certify(A, result.root, p, damping=result.damping, kind=kind)
    assert error.max() > 1e-5
    assert certificate.valid.any()
    assert (error - truth.slack <= certificate.relative_error.numpy()).all()


@pytest.mark.parametrize("p", [Fraction(3, 2), Fraction(5, 2), Fraction(9, 4), 2, 3, 1, Fraction(8, 3)])
@pytest.mark.parametrize("kind", ["residual", "reference"])
def test_indefinite_matrix_is_invalid(p, kind):
    """For an even denominator ``A^b`` does not show the signs of A's eigenvalues."""
    A, Q = turned([1.0, -0.5, 0.25])
    X = (Q * torch.tensor([1.0, 0.5, 0.25], dtype=F64) ** (-1 / float(p))) @ Q.mT
    certificate = certify(A, X, p, kind=kind)
    assert not certificate.valid
    assert torch.isinf(certificate.relative_error)


@pytest.mark.parametrize("p", [1, 2, Fraction(3, 2), 4])
@pytest.mark.parametrize("kind", ["residual", "reference"])
def test_singular_matrix_is_invalid(p, kind):
    A, Q = turned([1.0, 0.5, 0.0])
    X = (Q * torch.tensor([1.0, 2.0, 1e8], dtype=F64)) @ Q.mT
    assert not certify(A, X, p, kind=kind).valid
    assert not certify(torch.zeros(3, 3, dtype=F64), torch.eye(3, dtype=F64), p, kind=kind).valid


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8, Fraction(5, 2), 16, 64])
@pytest.mark.parametrize("n", [1, 2, 40])
def test_root_wrong_by_any_scale(p, n):
    """A tiny or huge X is not mistaken for a good one, by vectors that under- or overflow either."""
    factor = 10.0 ** torch.arange(-160, 161, dtype=F64)
    X = factor[:, None, None] * torch.eye(n, dtype=F64)
    A = torch.eye(n, dtype=F64).expand_as(X)
    for kind in ("residual", "reference"):
        certificate = certify(A, X, p, kind=kind)
        true = (factor - 1).abs()
        wrong = certificate.valid & (certificate.relative_error < true)
        assert not wrong.any(), (kind, factor[wrong], certificate.relative_error[wrong])
        assert certificate.valid[157:164].all() or p == 64


def test_powers_of_a_huge_residual_are_rounded_outwards():
    """``beta^{1/a}`` moves by ``|log beta|`` units in the last place of 1/a."""
    for p in range(1, 65):
        for x in (10.0**k for k in (2, 5, 9, 14, 20, 30, 60)):
            X = torch.full((1, 1), x, dtype=F64)
            certificate = certify(torch.ones(1, 1, dtype=F64), X, p)
            if certificate.valid:
                assert Fraction(certificate.relative_error.item()) >= Fraction(x) - 1
                assert Fraction(certificate.lower.item()) <= Fraction(x) <= Fraction(certificate.upper.item())


@pytest.mark.parametrize("p", [1, 3, 5])
def test_eta_of_odd_orders_is_that_of_X(p):
    """Not that of the Cholesky factor's ``C C^T``, which is a padding away."""
    A = torch.diag(torch.tensor([1.0, 2.0**-26], dtype=F64))
    for top in (0.5, 1.5):
        X = torch.diag(torch.tensor([top, 2.0 ** (26 // p)], dtype=F64))
        certificate = certify(A, X, p)
        exact = max(abs(1 - Fraction(A[i, i].item()) * Fraction(X[i, i].item()) ** p) for i in range(2))
        assert certificate.valid
        assert Fraction(certificate.eta.item()) >= exact


# ---------------------------------------------------------------------------------------------------------------------
# Arguments


@pytest.mark.parametrize("kind", ["residual", "reference", "estimate"])
def test_damping_is_that_of_inv_root(kind):
    A = spd(3, 12)
    X = exact_root(A + 0.125 * torch.eye(12), 4)
    damped = A + 0.125 * torch.eye(12, dtype=F64)
    with_damping = certify(A, X, 4, damping=0.125, kind=kind, assume_positive=True)
    assert_same(with_damping, certify(damped, X, 4, kind=kind, assume_positive=True), 1e-5)
    relative = certify(A, X, 4, rel_damping=0.01, damping=0.5, kind=kind, assume_positive=True)
    each = 0.5 + 0.01 * lambda_bound(A)
    assert_same(relative, certify(A, X, 4, damping=each, kind=kind, assume_positive=True))
    one_by_one = [certify(A[i], X[i], 4, damping=each[i], kind=kind, assume_positive=True) for i in range(3)]
    assert_same(relative, Certificate(*(torch.stack(field) for field in zip(*one_by_one, strict=True))), 1e-5)


def test_damping_makes_a_singular_matrix_valid():
    A, Q = turned([1.0, 0.5, 0.0])
    X = (Q * torch.tensor([1.5, 1.0, 0.5], dtype=F64) ** -0.5) @ Q.mT
    assert certify(A, X, 2, damping=0.5).relative_error < 1e-13


@pytest.mark.parametrize("kind", ["residual", "reference", "estimate"])
@pytest.mark.parametrize("batch", [(), (1,), (4,), (2, 3)])
@pytest.mark.parametrize("n", [1, 2, 7])
def test_batch_shapes(kind, batch, n):
    A = spd(*batch, n + 1)[..., :n, :n]
    X = exact_root(A, 2)
    certificate = certify(A, X, 2, kind=kind, assume_positive=True)
    assert all(field.shape == batch for field in certificate)
    assert [field.dtype for field in certificate] == [F64] * 4 + [torch.bool] * 2
    assert certificate.valid.all()
    assert (certificate.relative_error < 1e-9).all()


@pytest.mark.parametrize("kind", ["residual", "reference", "estimate"])
@pytest.mark.parametrize("shape", [(0, 3, 3), (0, 0), (2, 0, 0), (2, 0, 5, 5)])
def test_nothing_to_certify(kind, shape):
    A = torch.zeros(shape)
    certificate = certify(A, A, 2, kind=kind, assume_positive=True)
    assert all(field.shape == shape[:-2] for field in certificate)
    assert certificate.valid.all()


def test_members_do_not_change_each_other():
    A, X = spd(4, 9), exact_root(spd(4, 9), 2)
    alone = certify(A[2], X[2], 2)
    A[0], X[1], A[3] = torch.nan, torch.inf, -A[3]
    together = certify(A, X, 2)
    assert together.valid.tolist() == [False, False, True, False]
    assert_same(alone, Certificate(*(field[2] for field in together)), 1e-6)


@pytest.mark.parametrize("kind", ["residual", "reference", "estimate"])
@pytest.mark.parametrize("max_batch", [1, 3, 5, 100])
@pytest.mark.parametrize("seed", [None, 7])
def test_max_batch_does_not_change_the_answer(kind, max_batch, seed):
    A = spd(5, 6)
    X = exact_root(A, 2) * 1.01
    certificates = [
        certify(
            A,
            X,
            2,
            damping=1e-3 * torch.arange(5),
            kind=kind,
            assume_positive=True,
            max_batch=size,
            generator=None if seed is None else torch.Generator().manual_seed(seed),
        )
        for size in (None, max_batch)
    ]
    assert_same(*certificates, rtol=1e-6)


@pytest.mark.parametrize("kind", ["residual", "reference", "estimate"])
def test_inputs_of_any_strides_are_left_alone(kind):
    A = spd(3, 8).repeat(2, 1, 1)[::2].mT
    X = exact_root(A, 2).permute(1, 2, 0).contiguous().permute(2, 0, 1)
    damping = torch.full((3,), 0.0, dtype=F64)
    kept = A.clone(), X.clone(), damping.clone()
    certificate = certify(A, X, 2, kind=kind, damping=damping, assume_positive=True)
    assert all(torch.equal(now, then) for now, then in zip((A, X, damping), kept, strict=True))
    dense = certify(A.contiguous(), X.contiguous(), 2, kind=kind, assume_positive=True)
    assert_same(certificate, dense)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_roots(dtype):
    A = spd(4, 8, condition=50.0)
    X = exact_root(A, 2).to(dtype)
    certificate = certify(A, X, 2)
    assert_same(certificate, certify(A, X.to(F64), 2))
    true = torch.linalg.matrix_norm(X.to(F64) - exact_root(A, 2), 2)
    true = true / torch.linalg.matrix_norm(exact_root(A, 2), 2)
    assert certificate.valid.all()
    assert (certificate.relative_error >= true).all()
    assert (certificate.relative_error <= 5 * true).all()
    half = (A.to(dtype) + A.to(dtype).mT) / 2
    assert_same(certify(half, X, 2), certify(half.to(F64), X, 2))


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("power", [-300, -150, -20, 20, 150, 300])
def test_scale_of_the_input_does_not_matter(p, power):
    A = spd(3, 6, condition=100.0)
    scaled = A * 10.0**power
    X = exact_root(A, p) * 10.0 ** (-power / p)
    certificate = certify(scaled, X * 1.01, p)
    assert certificate.valid.all()
    torch.testing.assert_close(
        certificate.relative_error, torch.full((3,), 0.01, dtype=F64), rtol=1e-6, atol=0
    )


def test_asymmetry():
    A = spd(6)
    K = torch.randn(6, 6, dtype=F64, generator=torch.Generator().manual_seed(0))
    K = K - K.mT
    assert not certify(A + 1e-3 * K, exact_root(A, 2), 2).valid
    assert certify(A + 1e-16 * K, exact_root(A, 2), 2).valid
    R = exact_root(A, 2)
    size = torch.linalg.matrix_norm(K, 2) / torch.linalg.matrix_norm(R, 2)
    for kind in ("residual", "reference", "estimate"):
        certificate = certify(A, R + 1e-3 * K, 2, kind=kind, assume_positive=True)
        assert 1e-3 * size <= certificate.relative_error <= 10e-3 * size


@pytest.mark.parametrize(
    ("error", "name", "arguments"),
    [
        (ValueError, "p", {"p": math.pi}),
        (ValueError, "p", {"p": 65}),
        (ValueError, "p", {"p": 0.5}),
        (ValueError, "p", {"p": math.nan}),
        (TypeError, "p", {"p": "2"}),
        (TypeError, "p", {"p": True}),
        (ValueError, "kind", {"kind": "guess"}),
        (ValueError, "kind", {"kind": "estimate"}),
        (ValueError, "kind", {"kind": "estimate", "p": 3, "assume_positive": True}),
        (ValueError, "X", {"X": torch.eye(4)}),
        (ValueError, "X", {"X": torch.eye(3).expand(2, 3, 3)}),
        (ValueError, "X", {"X": torch.ones(3, 2)}),
        (ValueError, "X", {"X": torch.eye(3, device="meta")}),
        (TypeError, "X", {"X": torch.eye(3, dtype=torch.int64)}),
        (TypeError, "X", {"X": torch.eye(3, dtype=torch.bool)}),
        (TypeError, "X", {"X": np.eye(3)}),
        (ValueError, "A", {"A": torch.ones(3)}),
        (TypeError, "A", {"A": torch.eye(3, dtype=torch.int32)}),
        (ValueError, "damping", {"damping": -1.0}),
        (ValueError, "damping", {"damping": torch.ones(2)}),
        (ValueError, "rel_damping", {"rel_damping": math.inf}),
    ],
)
def test_errors_name_the_argument(error, name, arguments):
    call = {"A": torch.eye(3), "X": torch.eye(3), "p": 2, **arguments}
    with pytest.raises(error, match=f"^{name}: "):
        certify(**call)


@pytest.mark.parametrize("kind", ["residual", "reference"])
def test_rational_orders(kind):
    A = spd(2, 6, condition=10.0)
    for p in (8 / 3, Fraction(8, 3), 2.5, Fraction(7, 3), Fraction(3, 2), 1.25, 16, 64):
        certificate = certify(A, exact_root(A, float(p)), p, kind=kind)
        assert certificate.valid.all()
        assert (certificate.relative_error < 1e-8).all()


@pytest.mark.parametrize("p", [2, 3, 4, 8 / 3])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_certificate_of_a_result(p, dtype):
    A = spd(4, 10).to(dtype)
    A[3] = torch.nan
    result = inv_root_ex(A, p, method="evd", damping=1e-3, rel_damping=1e-3, certify=True)
    assert_same(result.certificate, certify(A, result.root, p, damping=result.damping))
    assert result.certificate.valid.tolist() == [True, True, True, False]
    assert inv_root_ex(A, p, method="evd").certificate is None
