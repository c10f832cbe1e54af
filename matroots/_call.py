# SPDX-License-Identifier: Apache-2.0
"""The calls that users make: ``inv_root``, ``inv_root_ex``, ``root`` and ``root_pair``."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from matroots import _opaque
from matroots._arguments import REAL_DTYPES, broadcast_damping, check_matrices, check_number
from matroots._auto import solve_auto
from matroots._autograd import damped, followed, plain
from matroots._autograd import solve as differentiable
from matroots._certificate import Certificate, rational_exponent
from matroots._certificate import certify as certify_root
from matroots._hermitian import COMPLEX_DTYPES, complex_form, real_form
from matroots._opaque import powers, refuse_derivative
from matroots._options import Keywords, Options, resolve_options
from matroots._result import (
    InvRoot,
    RootError,
    RootWarning,
    Status,
    advise,
    failure,
    members_by_status,
    sentence,
)
from matroots._solve import solve
from matroots.scaling import Scaling
from matroots.solvers import Solver
from matroots.solvers._problem import Want

if TYPE_CHECKING:
    from typing_extensions import Unpack


def inv_root_ex(
    A: Tensor,
    p: float | Fraction,
    *,
    method: str | Solver = "auto",
    scaling: str | Scaling | None = None,
    damping: float | Tensor = 0.0,
    rel_damping: float = 0.0,
    tol: float | None = None,
    max_steps: int | None = None,
    matmul_dtype: torch.dtype | str | None = None,
    max_batch: int | None = None,
    generator: torch.Generator | None = None,
    assume_positive: bool = False,
    certify: bool = False,
) -> InvRoot:
    """Compute ``(A + eps I)^{-1/p}`` of each member of a batch and report on each; never raise for a bad member.

    ``eps = damping + rel_damping * lambda_bound(A)``, whatever the method and scaling. A member whose smallest
    eigenvalue is negative within rounding (``n u`` times the bound) gets the smallest of a few shifts that makes it
    positive, and lower precision of the products may need more; ``damping`` of the result includes both.

    Args:
        A: ``(*, n, n)`` symmetric positive definite, fp16/bf16 (computed in fp32), fp32 or fp64, any strides. Not
            written to. The symmetric part is used; an antisymmetric part above ``min(8 sqrt(n) u, sqrt(u)) ||A||_F`` makes
            the member INDEFINITE. Complex Hermitian (complex64, complex128): solved as the real symmetric ``[[Re, -Im], [Im, Re]]``, which
            diagnostics speak of.
        p: order of the root. Any real ``p >= 1`` (``int``, ``float``, ``Fraction``) for "evd", "chebyshev" and
            "rational", any integer for "cn" and "minimax", powers of two for "ndb".
        method: "evd", "cn", "ndb", "chebyshev", "minimax", "rational", "auto" (the cheapest that reaches ``tol``; docs/auto.md), or a solver
            instance such as ``NewtonDB(steps=12)``.
        scaling: "frobenius", "power", "multi_power" (default; "frobenius" for "rational"), or an instance such as ``MultiPower(vectors=32)``.
            "evd" needs no scale and ignores it.
        damping: absolute, in the units of A; a number or a tensor that broadcasts to the batch shape, ``>= 0``.
        rel_damping: relative to :func:`lambda_bound` of A, ``>= 0``.
        tol: bound on the residual ``||I - A X^p||_F`` of the solver; for "auto" on the relative 2-norm error, as predicted for
            each member, or certified if ``certify``; "evd" has none. None: as far as the precision goes.
        max_steps: limit on the steps of "cn" and of each square root of "ndb" (60), the degree of "chebyshev" (8000), or the poles of "rational" (80).
        matmul_dtype: what the operands of products are rounded to, with sums in fp32: "fp16", "bf16" (or the torch dtypes), "tf32", or
            sums of two or three halves, "fp16x2", "bf16x2", "bf16x3", which are as accurate as fp32. Where the spectrum is not proven to
            lie above ``2 u`` times the bound (``4 u`` for p = 1), u of the precision, the damping is raised to that. Not for "evd".
        max_batch: members solved at once; bounds the workspace, does not change the answer.
        generator: random start vectors for the power iterations; None: the same ones on each call.
        assume_positive: A is known to be positive semidefinite up to rounding that the damping exceeds, as an average of Gram matrices with a
            relative damping is: the proof by a Cholesky factor is left out, which for small n takes as long as several products. Of a matrix that
            is not, the root may be one of another sign, with status CONVERGED; only ``certify`` would tell.
        certify: fill ``certificate`` by :func:`matroots.certify` of the result.

    Returns:
        :class:`InvRoot`; ``root`` is NaN for a member whose status is DIVERGED or worse. With a fixed number of steps
        (``NewtonDB(steps=...)``, ``CoupledNewton(steps=...)``) and no certificate, nothing synchronises with the host. ``root`` is
        differentiable by A and a tensor ``damping``, twice and in forward mode, whatever the method (docs/gradients.md); nothing else is.

    Raises:
        TypeError: for a dtype or argument type that is not supported.
        ValueError: for a shape or value that is not, or a keyword that contradicts a solver instance.

    >>> A = torch.diag(torch.tensor([16.0, 81.0], dtype=torch.float64))
    >>> inv_root_ex(A, 4, method="cn").root.diagonal()
    tensor([0.5000, 0.3333], dtype=torch.float64)
    """
    keywords: Keywords = {
        "method": method,
        "scaling": scaling,
        "damping": damping,
        "rel_damping": rel_damping,
        "tol": tol,
        "max_steps": max_steps,
        "matmul_dtype": matmul_dtype,
        "max_batch": max_batch,
        "generator": generator,
        "assume_positive": assume_positive,
    }
    return _outcome(A, Call(p, "inverse", keywords, certify), report=True)[0]


def inv_root(
    A: Tensor,
    p: float | Fraction,
    *,
    method: str | Solver = "auto",
    scaling: str | Scaling | None = None,
    damping: float | Tensor = 0.0,
    rel_damping: float = 0.0,
    tol: float | None = None,
    max_steps: int | None = None,
    matmul_dtype: torch.dtype | str | None = None,
    max_batch: int | None = None,
    generator: torch.Generator | None = None,
    assume_positive: bool = False,
) -> Tensor:
    """Return ``(A + eps I)^{-1/p}`` of each member of a batch: a tensor like A, symmetric (Hermitian), differentiable (docs/gradients.md).

    The arguments are those of :func:`inv_root_ex`, which returns diagnostics as well and does not raise.

    Raises:
        RootError: if a member has no usable root (DIVERGED, NONFINITE_INPUT, INDEFINITE, SINGULAR); names the members.
        TypeError, ValueError: as :func:`inv_root_ex`.

    Warns:
        RootWarning: once, if members ran out of steps or stagnated above ``tol``.

    >>> A = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    >>> X = inv_root(A, p=2, method="ndb")
    >>> torch.dist(X @ A @ X, torch.eye(2)).item() < 1e-14
    True
    """
    keywords: Keywords = {
        "method": method,
        "scaling": scaling,
        "damping": damping,
        "rel_damping": rel_damping,
        "tol": tol,
        "max_steps": max_steps,
        "matmul_dtype": matmul_dtype,
        "max_batch": max_batch,
        "generator": generator,
        "assume_positive": assume_positive,
    }
    return _outcome(A, Call(p, "inverse", keywords, strict=True))[0].root


def root(A: Tensor, p: float | Fraction, **keywords: Unpack[Keywords]) -> Tensor:
    """Return ``(A + eps I)^{1/p}`` of each member of a batch: a tensor like A, symmetric (Hermitian), differentiable.

    A may be singular: rows that are exactly zero stay zero for every method, and "evd" takes any positive semidefinite A,
    which the iterations need not survive. "ndb" has this
    root as its other iterate, "cn" computes it as ``A X^{p-1}`` from ``X = A^{-1/p}``.
    Keywords, errors and warnings are those of :func:`inv_root`, but ``tol`` bounds the solver's residual, which "auto"
    has none of.

    >>> root(torch.diag(torch.tensor([4.0, 0.0])), p=2, method="ndb")
    tensor([[2., 0.],
            [0., 0.]])
    """
    return _outcome(A, Call(p, "root", _known(keywords), strict=True))[0].root


def root_pair(A: Tensor, p: float | Fraction, **keywords: Unpack[Keywords]) -> tuple[Tensor, Tensor]:
    """Return ``(A + eps I)^{1/p}`` and ``(A + eps I)^{-1/p}`` of each member of a batch, from one solve.

    Keywords, errors and warnings are those of :func:`root`; A must be positive definite.

    >>> S, X = root_pair(torch.eye(3) * 4, p=2, method="ndb")
    >>> S[0, 0].item(), X[0, 0].item()
    (2.0, 0.5)
    """
    result, root_side = _outcome(A, Call(p, "pair", _known(keywords), strict=True))
    return root_side, result.root


def _known(keywords: Keywords) -> Keywords:
    """Return the keywords, or raise ``TypeError`` for one that there is not."""
    unknown = sorted(set(keywords) - set(Keywords.__annotations__))
    if unknown:
        raise TypeError(f"{unknown[0]}: no such keyword; expected some of {sorted(Keywords.__annotations__)}")
    return keywords


@dataclass(frozen=True)
class Call:
    """What is asked for, beside the matrices.

    Attributes:
        p: as the user gave it.
        want: which roots.
        keywords: as the user gave them.
        certify: whether the result gets a certificate.
        strict: raise for members without a usable root, and warn of inaccurate ones.
        hermitian: the matrices are real forms of complex ones, and so are the roots that are returned, and certified.
    """

    p: Any
    want: Want
    keywords: Keywords
    certify: bool = False
    strict: bool = False
    hermitian: bool = False

    def run(self, A: Tensor, damping: float | Tensor) -> tuple[InvRoot, Tensor]:
        """Solve for tensors with values; return the result, whose ``root`` is the inverse one for a pair, and ``A^{1/p}``."""
        keywords: Keywords = {**self.keywords, "damping": damping}
        options = resolve_options(A, self.p, **keywords)
        if self.want != "inverse" and options.certified_tol is not None:
            raise ValueError(
                'tol: method "auto" bounds the error of inverse roots only; name a method, or drop tol'
            )
        if self.certify:
            rational_exponent(self.p)  # refuse before the work what could not be certified after it
        solver = solve_auto if self.keywords.get("method", "auto") == "auto" else solve
        result, other = solver(A, options, self.want)
        if self.hermitian:
            result = result._replace(root=real_form(complex_form(result.root)))
            other = real_form(complex_form(other))
        return _with_certificate(A, result, options) if self.certify else result, other


def _outcome(A: Tensor, call: Call, report: bool = False) -> tuple[InvRoot, Tensor]:
    """Return what :meth:`Call.run` does, for real and complex matrices, with or without values, inside and outside of torch's graphs and transforms."""
    check_matrices(A, "A", (*REAL_DTYPES, *COMPLEX_DTYPES))
    if A.is_complex():
        result, other = _outcome(real_form(A), replace(call, hermitian=True), report)
        return result._replace(root=complex_form(result.root)), complex_form(other)
    damping = call.keywords.get("damping", 0.0)
    if _opaque.traced(A):
        return _traced(A, damping, call, report)
    if followed(A, damping):
        result, other = _followed(A, damping, call)
    else:
        result, other = call.run(A, damping)
    if call.strict:
        _raise_or_warn(InvRoot._make([*map(plain, result[:-1]), None]), float(call.p))
    return result, other


def _followed(A: Tensor, damping: float | Tensor, call: Call) -> tuple[InvRoot, Tensor]:
    """Solve as one function in torch's graph, or under its transforms."""
    eps = broadcast_damping(damping, A)
    B = damped(A, eps, check_number("rel_damping", call.keywords.get("rel_damping", 0.0)))

    def run(A: Tensor, eps: Tensor) -> tuple[Tensor, ...]:
        return _flattened(call.want, *call.run(A, eps))

    found = differentiable(
        B, A, eps, run, powers(call.p, call.want), partial(refuse_derivative, call.keywords)
    )
    return _rebuilt(call.want, found)


def _traced(A: Tensor, damping: float | Tensor, call: Call, report: bool) -> tuple[InvRoot, Tensor]:
    """Put one operation into the graph; without a report nothing but roots."""
    eps = broadcast_damping(damping, A)
    # whether somebody will ask for a gradient is not known: an exported program is given other tensors, and vmap hides who asks
    B = damped(A, eps, call.keywords.get("rel_damping", 0.0))
    others = {name: _opaque.taken_apart(value) for name, value in call.keywords.items() if name != "damping"}
    text = _opaque.encoded(call.p, call.want, call.certify, call.strict, call.hermitian, **others)
    found = _opaque.solve(B, A.detach(), eps.detach(), text, report)
    missing = [] if report else [found[0]] * 8
    return _rebuilt(call.want, (*found, *missing))


def _run_traced(A: Tensor, damping: Tensor, text: str) -> list[Tensor]:
    """Run a call that a graph holds as text."""
    call = Call(**_opaque.decoded(text))
    result, other = call.run(A, damping)
    if call.strict:
        _raise_or_warn(result, float(call.p))
    # the graph takes each for memory of its own
    return [t.clone() if t.numel() == 0 else t for t in _flattened(call.want, result, other)]


_opaque.runner.append(_run_traced)


def _flattened(want: Want, result: InvRoot, other: Tensor) -> tuple[Tensor, ...]:
    """Return all tensors of a result, roots first."""
    roots = [other, result.root] if want == "pair" else [result.root]
    roots = [X.clone() if X._is_view() else X for X in roots]  # which may be written to
    return (*roots, *result[1:-1], *(result.certificate or ()))


def _rebuilt(want: Want, tensors: Sequence[Tensor]) -> tuple[InvRoot, Tensor]:
    """Return the result that :func:`_flattened` has taken apart."""
    other, rest = tensors[0], tensors[want == "pair" :]
    certificate = Certificate(*rest[9:]) if len(rest) > 9 else None
    return InvRoot._make([*rest[:9], certificate]), other


def _with_certificate(A: Tensor, result: InvRoot, options: Options) -> InvRoot:
    """Certify the roots against the damping that was used; hold "auto" to its tolerance on the certified error."""
    certificate = certify_root(A, result.root, options.p, damping=result.damping, max_batch=options.max_batch)
    status = result.status
    if options.certified_tol is not None:
        missed = (status == int(Status.CONVERGED)) & ~(certificate.relative_error <= options.certified_tol)
        status = torch.where(missed, int(Status.STAGNATED), status).to(torch.int32)
    return result._replace(status=status, certificate=certificate)


def _raise_or_warn(result: InvRoot, p: float) -> None:
    """Raise for members without a usable root, else warn once for those that are less accurate than asked for."""
    problem = failure(result)
    if problem:
        raise RootError(problem, result.status)
    members, batch = members_by_status(result), tuple(result.status.shape)
    late = [kind for kind in members if kind != Status.CONVERGED]
    if late:
        advice = (
            sentence(kind, members[kind], batch, advise(result, members[kind], kind, p)) for kind in late
        )
        warnings.warn(
            "root less accurate than asked for: " + "; ".join(advice), RootWarning, stacklevel=_user_level()
        )


def _user_level() -> int:
    """Return the ``stacklevel`` of whoever called into this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in (
        "matroots",
        "torch",
    ):
        level, frame = level + 1, frame.f_back
    return level
