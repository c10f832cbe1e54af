"""The calls that users make: ``inv_root``, ``inv_root_ex``, ``root`` and ``root_pair``."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from matroots._arguments import check_matrices
from matroots._auto import solve_auto
from matroots._certificate import certify as certify_root
from matroots._certificate import rational_exponent
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
            the member INDEFINITE.
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
        (``NewtonDB(steps=...)``, ``CoupledNewton(steps=...)``) and no certificate, nothing synchronises with the host.

    Raises:
        TypeError: for a dtype or argument type that is not supported.
        ValueError: for a shape or value that is not, or a keyword that contradicts a solver instance.

    >>> A = torch.diag(torch.tensor([16.0, 81.0], dtype=torch.float64))
    >>> inv_root_ex(A, 4, method="cn").root.diagonal()
    tensor([0.5000, 0.3333], dtype=torch.float64)
    """
    check_matrices(A, "A")
    options = resolve_options(
        A,
        p,
        method=method,
        scaling=scaling,
        damping=damping,
        rel_damping=rel_damping,
        tol=tol,
        max_steps=max_steps,
        matmul_dtype=matmul_dtype,
        max_batch=max_batch,
        generator=generator,
        assume_positive=assume_positive,
    )
    if certify:
        rational_exponent(p)  # refuse before the work what could not be certified after it
    result, _ = solve_auto(A, options, "inverse") if method == "auto" else solve(A, options, "inverse")
    if certify:
        result = _with_certificate(A, result, options)
    return result._replace(root=_undifferentiable(A, damping, result.root))


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
    """Return ``(A + eps I)^{-1/p}`` of each member of a batch: a tensor like A, symmetric.

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
    result = inv_root_ex(
        A,
        p,
        method=method,
        scaling=scaling,
        damping=damping,
        rel_damping=rel_damping,
        tol=tol,
        max_steps=max_steps,
        matmul_dtype=matmul_dtype,
        max_batch=max_batch,
        generator=generator,
        assume_positive=assume_positive,
    )
    _raise_or_warn(result, float(p), stacklevel=3)
    return result.root


def root(A: Tensor, p: float | Fraction, **keywords: Unpack[Keywords]) -> Tensor:
    """Return ``(A + eps I)^{1/p}`` of each member of a batch: a tensor like A, symmetric.

    A may be singular: rows that are exactly zero stay zero for every method, and "evd" takes any positive semidefinite A,
    which the iterations need not survive. "ndb" has this
    root as its other iterate, "cn" computes it as ``A X^{p-1}`` from ``X = A^{-1/p}``.
    Keywords, errors and warnings are those of :func:`inv_root`, but ``tol`` bounds the solver's residual, which "auto"
    has none of.

    >>> root(torch.diag(torch.tensor([4.0, 0.0])), p=2, method="ndb")
    tensor([[2., 0.],
            [0., 0.]])
    """
    result, _ = _solve_or_raise("root", A, p, keywords)
    return result.root


def root_pair(A: Tensor, p: float | Fraction, **keywords: Unpack[Keywords]) -> tuple[Tensor, Tensor]:
    """Return ``(A + eps I)^{1/p}`` and ``(A + eps I)^{-1/p}`` of each member of a batch, from one solve.

    Keywords, errors and warnings are those of :func:`root`; A must be positive definite.

    >>> S, X = root_pair(torch.eye(3) * 4, p=2, method="ndb")
    >>> S[0, 0].item(), X[0, 0].item()
    (2.0, 0.5)
    """
    result, root_side = _solve_or_raise("pair", A, p, keywords)
    return root_side, result.root


def _solve_or_raise(want: Want, A: Tensor, p: float | Fraction, keywords: Keywords) -> tuple[InvRoot, Tensor]:
    """Return the result (whose ``root`` is the inverse one for a pair) and ``A^{1/p}``, both differentiation-safe."""
    unknown = sorted(set(keywords) - set(Keywords.__annotations__))
    if unknown:
        raise TypeError(f"{unknown[0]}: no such keyword; expected some of {sorted(Keywords.__annotations__)}")
    check_matrices(A, "A")
    options = resolve_options(A, p, **keywords)
    if options.certified_tol is not None:
        raise ValueError(
            'tol: method "auto" bounds the error of inverse roots only; name a method, or drop tol'
        )
    named = keywords.get("method", "auto") != "auto"
    result, other = solve(A, options, want) if named else solve_auto(A, options, want)
    _raise_or_warn(result, float(options.p), stacklevel=4)
    eps = keywords.get("damping")
    root_side = _undifferentiable(A, eps, other)
    return result._replace(root=_undifferentiable(A, eps, result.root)), root_side


def _with_certificate(A: Tensor, result: InvRoot, options: Options) -> InvRoot:
    """Certify the roots against the damping that was used; hold "auto" to its tolerance on the certified error."""
    certificate = certify_root(A, result.root, options.p, damping=result.damping, max_batch=options.max_batch)
    status = result.status
    if options.certified_tol is not None:
        missed = (status == int(Status.CONVERGED)) & ~(certificate.relative_error <= options.certified_tol)
        status = torch.where(missed, int(Status.STAGNATED), status).to(torch.int32)
    return result._replace(status=status, certificate=certificate)


def _raise_or_warn(result: InvRoot, p: float, stacklevel: int) -> None:
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
            "root less accurate than asked for: " + "; ".join(advice), RootWarning, stacklevel=stacklevel
        )


class _Undifferentiable(torch.autograd.Function):
    """Hands the root through, and raises in the backward pass instead of returning a wrong or missing gradient."""

    @staticmethod
    def forward(ctx: Any, A: Tensor, damping: object, root: Tensor) -> Tensor:
        return root.view_as(root)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise NotImplementedError(
            "matroots: roots are not differentiable yet; pass A.detach() if no gradient is wanted"
        )


def _undifferentiable(A: Tensor, damping: object, root: Tensor) -> Tensor:
    wanted = A.requires_grad or (isinstance(damping, Tensor) and damping.requires_grad)
    if not (wanted and torch.is_grad_enabled()):
        return root
    apply: Callable[[Tensor, object, Tensor], Tensor] = _Undifferentiable.apply
    return apply(A, damping, root)
