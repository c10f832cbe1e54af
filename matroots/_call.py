"""The calls that users make: ``inv_root``, ``inv_root_ex``, ``root`` and ``root_pair``."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor
from torch.nn.functional import pad

from matroots._arguments import absolute_damping, check_count, check_matrices, check_number
from matroots._certificate import certify as certify_root
from matroots._exponent import Exponent, parse_exponent
from matroots._prepare import EMPTY_ROW, Prepared, prepare, prove_definite, rescaled
from matroots._products import HALF_DTYPES, Product, full_precision, unit_roundoff, wide
from matroots._result import InvRoot, RootError, RootWarning, Status, advise, member_name
from matroots.scaling import SCALINGS, Scaling
from matroots.scaling.bounds import guarded
from matroots.solvers import EVD, SOLVERS, Problem, Solution, Solver
from matroots.solvers._problem import Want
from matroots.solvers.evd import LAPACK_LIMIT

if TYPE_CHECKING:
    from typing_extensions import Unpack

_NAMES_SHOWN = 8


class Keywords(TypedDict, total=False):
    """The keywords that all calls share; see :func:`inv_root_ex`."""

    method: str | Solver
    scaling: str | Scaling | None
    damping: float | Tensor
    rel_damping: float
    tol: float | None
    max_steps: int | None
    matmul_dtype: torch.dtype | None
    max_batch: int | None
    generator: torch.Generator | None


@dataclass(frozen=True)
class Options:
    """The keywords of a call, checked and resolved."""

    p: Exponent
    solver: Solver
    scaling: Scaling
    damping: Tensor
    rel_damping: float
    tol: float | None
    solver_tol: float | None
    max_steps: int | None
    matmul_dtype: torch.dtype | None
    max_batch: int | None
    generator: torch.Generator | None
    compute_dtype: torch.dtype


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
    matmul_dtype: torch.dtype | None = None,
    max_batch: int | None = None,
    generator: torch.Generator | None = None,
    certify: bool = False,
) -> InvRoot:
    """Compute ``(A + eps I)^{-1/p}`` of each member of a batch and report on each; never raise for a bad member.

    ``eps = damping + rel_damping * lambda_bound(A)``, whatever the method and scaling. A member whose smallest
    eigenvalue is negative within rounding (``n u`` times the bound) gets the smallest of a few shifts that makes it
    positive; ``damping`` of the result includes it.

    Args:
        A: ``(*, n, n)`` symmetric positive definite, fp16/bf16 (computed in fp32), fp32 or fp64, any strides. Not
            written to. The symmetric part is used; an antisymmetric part above ``min(8 sqrt(n) u, sqrt(u)) ||A||_F`` makes
            the member INDEFINITE.
        p: order of the root. Any real ``p >= 1`` (``int``, ``float``, ``Fraction``) for "evd" and "chebyshev", any integer
            for "cn", powers of two for "ndb".
        method: "evd", "cn", "ndb", "chebyshev", "auto" (at present the same as "evd"), or a solver instance such as
            ``NewtonDB(steps=12)``.
        scaling: "frobenius", "power", "multi_power" (default), or an instance such as ``MultiPower(vectors=32)``.
            "evd" needs no scale and ignores it.
        damping: absolute, in the units of A; a number or a tensor that broadcasts to the batch shape, ``>= 0``.
        rel_damping: relative to :func:`lambda_bound` of A, ``>= 0``.
        tol: bound on the residual ``||I - A X^p||_F`` of the solver; for "auto" on the certified relative error, which
            it then computes. None: as far as the precision goes.
        max_steps: limit on the steps of "cn" and of each square root of "ndb" (60), or the degree of "chebyshev" (1000).
        matmul_dtype: ``torch.float16`` or ``torch.bfloat16``: operands of products are rounded to it and summed in fp32.
            Not for "evd".
        max_batch: members solved at once; bounds the workspace, does not change the answer.
        generator: random start vectors for the power iterations; None: the same ones on each call.
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
    options = _options(
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
    )
    result, _ = _solve(A, options, "inverse")
    if certify or options.tol != options.solver_tol:
        result = _with_certificate(A, result, options, certify)
    return result._replace(root=_undifferentiable(A, result.root))


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
    matmul_dtype: torch.dtype | None = None,
    max_batch: int | None = None,
    generator: torch.Generator | None = None,
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
    )
    _raise_or_warn(result, float(p))
    return result.root


def root(A: Tensor, p: float | Fraction, **keywords: Unpack[Keywords]) -> Tensor:
    """Return ``(A + eps I)^{1/p}`` of each member of a batch: a tensor like A, symmetric.

    A may be singular: rows that are exactly zero stay zero, and "evd" takes any positive semidefinite A. "ndb" has this
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
    options = _options(A, p, **keywords)
    if options.tol != options.solver_tol:
        raise ValueError('tol: method "auto" certifies inverse roots only; name a method, or drop tol')
    result, other = _solve(A, options, want)
    _raise_or_warn(result, float(options.p))
    return result._replace(root=_undifferentiable(A, result.root)), _undifferentiable(A, other)


def _options(
    A: Tensor,
    p: float | Fraction,
    *,
    method: str | Solver = "auto",
    scaling: str | Scaling | None = None,
    damping: float | Tensor = 0.0,
    rel_damping: float = 0.0,
    tol: float | None = None,
    max_steps: int | None = None,
    matmul_dtype: torch.dtype | None = None,
    max_batch: int | None = None,
    generator: torch.Generator | None = None,
) -> Options:
    """Check every keyword against A and the method, and resolve names to instances."""
    exponent = parse_exponent(p)
    solver = _resolve("method", method, {**SOLVERS, "auto": EVD}, "solve")
    if method == "auto" and max_steps is not None:
        raise ValueError('max_steps: method "auto" chooses its own work; name a method, or drop max_steps')
    is_auto = isinstance(method, str) and method == "auto"
    tol = None if tol is None else check_number("tol", tol, positive=True)
    check_count("max_steps", max_steps)
    check_count("max_batch", max_batch)
    solver.check(exponent, tol, max_steps)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator: expected torch.Generator or None, got {type(generator).__name__}")
    return Options(
        p=exponent,
        solver=solver,
        scaling=_resolve("scaling", "multi_power" if scaling is None else scaling, SCALINGS, "estimate"),
        damping=absolute_damping(damping, A),
        rel_damping=check_number("rel_damping", rel_damping),
        tol=tol,
        solver_tol=None if is_auto else tol,
        max_steps=max_steps,
        max_batch=max_batch,
        generator=generator,
        matmul_dtype=_matmul_dtype(matmul_dtype, solver),
        compute_dtype=torch.float64 if A.dtype == torch.float64 and matmul_dtype is None else torch.float32,
    )


def _resolve(name: str, value: Any, table: Mapping[str, Any], function: str) -> Any:
    """Return the instance that a name stands for, or ``value`` itself when it is an instance."""
    if isinstance(value, str):
        if value not in table:
            raise ValueError(f"{name}: expected one of {sorted(table)} or an instance, got {value!r}")
        return table[value]()
    if isinstance(value, type) or not hasattr(value, function):
        raise TypeError(f"{name}: expected one of {sorted(table)} or an instance, got {value!r}")
    return value


def _matmul_dtype(dtype: torch.dtype | None, solver: Solver) -> torch.dtype | None:
    if dtype is None:
        return None
    if dtype not in HALF_DTYPES:
        raise ValueError(f"matmul_dtype: expected torch.float16, torch.bfloat16 or None, got {dtype!r}")
    if isinstance(solver, EVD):
        raise ValueError(
            f'matmul_dtype: method "evd" has no products to round, got {dtype}; use "cn", "ndb" or "chebyshev"'
        )
    return dtype


def _solve(A: Tensor, options: Options, want: Want) -> tuple[InvRoot, Tensor]:
    """Solve in chunks of ``max_batch`` members; return the result and, for a pair, ``A^{1/p}`` beside it."""
    n, batch = A.shape[-1], A.shape[:-2]
    b = math.prod(batch)
    if isinstance(options.solver, EVD) and n > LAPACK_LIMIT:
        raise ValueError(f"A: LAPACK's eigh needs n <= {LAPACK_LIMIT} (32-bit workspace index), got n = {n}")
    if A.numel() == 0:
        parts = [_nothing(A, b)]
    else:
        flat = A.detach().reshape(b, n, n)
        chunk = min(b, options.max_batch or b)
        with full_precision(A.device):
            parts = list(_chunks(flat, chunk, options, want))
    fields = [_joined([getattr(part, name) for part in parts]) for name in _FIELDS]
    other = _joined([part.other for part in parts])
    shaped = [field.reshape((*batch, *field.shape[1:])) for field in fields]
    result = InvRoot._make([*shaped, None])
    return result, other.reshape((*batch, n, n))


@dataclass(frozen=True)
class _Part:
    """The fields of :class:`InvRoot` for one chunk, flat, and the other root of a pair (else ``root`` itself)."""

    root: Tensor
    other: Tensor
    status: Tensor
    steps: Tensor
    residual: Tensor
    history: Tensor
    scale: Tensor
    bound: Tensor
    damping: Tensor
    matmuls: Tensor


_FIELDS = tuple(name for name in InvRoot._fields if name != "certificate")


def _nothing(A: Tensor, b: int) -> _Part:
    """The result for an empty batch or 0 x 0 matrices, whose empty roots are exact."""
    root = A.detach().new_empty(b, A.shape[-1], A.shape[-1])
    zero = torch.zeros(b, dtype=wide(A.device), device=A.device)
    count = zero.to(torch.int64)
    return _Part(
        root=root,
        other=root,
        status=count.to(torch.int32),
        steps=count,
        residual=zero,
        history=zero.new_empty(b, 0),
        scale=zero,
        bound=zero,
        damping=zero,
        matmuls=count,
    )


def _joined(parts: list[Tensor]) -> Tensor:
    """Concatenate along the batch; histories of different lengths are filled up with NaN."""
    if len(parts) == 1:
        return parts[0]
    if parts[0].ndim == 2:
        width = max(part.shape[1] for part in parts)
        parts = [pad(part, (0, width - part.shape[1]), value=torch.nan) for part in parts]
    return torch.cat(parts)


def _chunks(A: Tensor, size: int, options: Options, want: Want) -> Iterator[_Part]:
    """Solve ``size`` members at a time; each chunk draws the same start vectors."""
    state = None if options.generator is None else options.generator.get_state()
    for start in range(0, A.shape[0], size):
        if options.generator is not None and state is not None:
            options.generator.set_state(state)
        members = slice(start, start + size)
        yield _solve_chunk(A[members], options.damping[members], options, want)


def _solve_chunk(A: Tensor, damping: Tensor, options: Options, want: Want) -> _Part:
    """Prepare, scale, solve, and bring the answer back to the user's units and dtype."""
    prepared = prepare(A, damping, options.rel_damping, options.compute_dtype)
    solver = options.solver
    scale = torch.ones_like(prepared.bound)
    if solver.needs_definite:
        prepared = prove_definite(prepared, unit_roundoff(A.dtype), want != "root")
        scale = _scale(prepared, options)
    solution = solver.solve(
        Problem(
            A=prepared.A.div_(scale.to(prepared.A.dtype).reshape(-1, 1, 1)),
            p=options.p,
            want=want,
            damping=prepared.damping / scale,
            noise=prepared.noise / scale,
            zero_rows=prepared.zero_rows,
            tol=options.solver_tol,
            max_steps=options.max_steps,
            multiply=Product(options.matmul_dtype),
        )
    )
    status = torch.where(prepared.status == int(Status.CONVERGED), solution.status, prepared.status)
    roots = [
        _returned(root, scale, prepared, options.p, sign, A.dtype)
        for sign, root in ((-1, solution.inverse), (1, solution.root))
        if root is not None
    ]
    for root in roots:
        overflown = (status < int(Status.DIVERGED)) & ~torch.isfinite(root.abs().amax((-2, -1)))
        status = torch.where(overflown, int(Status.SINGULAR), status).to(torch.int32)
    failed = status >= int(Status.DIVERGED)
    for root in roots:
        root.masked_fill_(failed.reshape(-1, 1, 1), torch.nan)
    return _Part(
        root=roots[0],
        other=roots[-1],
        status=status,
        steps=solution.steps.masked_fill(failed, 0),
        residual=solution.residual.masked_fill(failed, torch.nan),
        history=solution.history.masked_fill(failed.unsqueeze(-1), torch.nan),
        matmuls=solution.matmuls + (options.scaling.matmuls if solver.needs_definite else 0),
        **_in_units_of_input(prepared, solution, scale),
    )


def _scale(prepared: Prepared, options: Options) -> Tensor:
    """Estimate the largest eigenvalue and guard it by the proven bound; 1 for a member that has failed."""
    usable = prepared.status == int(Status.CONVERGED)
    bound = torch.where(usable, prepared.bound.clamp_min(EMPTY_ROW) + prepared.damping, 1.0)
    estimate = options.scaling.estimate(prepared.A, options.generator)
    return guarded(prepared.A, estimate, bound, options.solver.headroom(options.p))


def _returned(
    root: Tensor, scale: Tensor, prepared: Prepared, p: Exponent, sign: int, dtype: torch.dtype
) -> Tensor:
    """Return the symmetric part of a root of ``A/scale``, times ``(2^k scale)^(sign/p)``, in the user's dtype.

    ``2^(k/p)`` is split into an exact power of two and a rest below 2, so that scaling is as exact at 1e20 as at 1.
    """
    a, b = p.as_integer_ratio() if isinstance(p, Fraction) else (p, 1)
    whole = torch.floor(sign * prepared.exponent * b / a)
    rest = (sign * prepared.exponent * b - whole * a) / a
    factor = scale ** (sign / float(p)) * torch.exp2(rest) / 2
    doubled = torch.add(root, root.mT).mul_(factor.to(root.dtype).reshape(-1, 1, 1))
    result = rescaled(doubled, whole)
    if sign > 0:
        empty = prepared.zero_rows
        result.masked_fill_(empty.unsqueeze(-1) | empty.unsqueeze(-2), 0.0)
    return result.to(dtype)


def _in_units_of_input(prepared: Prepared, solution: Solution, scale: Tensor) -> dict[str, Tensor]:
    """Return scale, bound and damping as the user measures them; NaN where the input has none."""
    meaningless = (prepared.status == int(Status.NONFINITE_INPUT)) | ~prepared.symmetric
    found = scale if solution.scale is None else scale * solution.scale
    eps = prepared.damping if solution.shift is None else prepared.damping + scale * solution.shift
    return {
        name: rescaled(value, prepared.exponent).masked_fill(meaningless, torch.nan)
        for name, value in (("scale", found), ("bound", prepared.bound), ("damping", eps))
    }


def _with_certificate(A: Tensor, result: InvRoot, options: Options, keep: bool) -> InvRoot:
    """Certify the roots against the damping that was used; hold "auto" to its tolerance on the certified error."""
    certificate = certify_root(A, result.root, options.p, damping=result.damping)
    status = result.status
    if options.tol is not None and options.solver_tol is None:
        missed = (status == int(Status.CONVERGED)) & ~(certificate.relative_error <= options.tol)
        status = torch.where(missed, int(Status.STAGNATED), status).to(torch.int32)
    return result._replace(status=status, certificate=certificate if keep else None)


def _raise_or_warn(result: InvRoot, p: float) -> None:
    """Raise for members without a usable root, else warn once for those that are less accurate than asked for."""
    codes = result.status.flatten().tolist()
    kinds = [Status(code) for code in sorted(set(codes))]
    batch = tuple(result.status.shape)
    members = {kind: [i for i, code in enumerate(codes) if code == kind] for kind in kinds}
    failed = [kind for kind in kinds if kind.failed]
    if failed:
        text = "; ".join(_sentence(kind, members[kind], batch, kind.advice) for kind in failed)
        raise RootError(f"no usable root for {text}", result.status)
    late = [kind for kind in kinds if kind != Status.CONVERGED]
    if late:
        advice = (
            _sentence(kind, members[kind], batch, advise(result, members[kind], kind, p)) for kind in late
        )
        warnings.warn("root less accurate than asked for: " + "; ".join(advice), RootWarning, stacklevel=3)


def _sentence(kind: Status, members: list[int], batch: tuple[int, ...], advice: str) -> str:
    names = ", ".join(member_name(i, batch) for i in members[:_NAMES_SHOWN])
    more = f" and {len(members) - _NAMES_SHOWN} more" if len(members) > _NAMES_SHOWN else ""
    who = f"members {names}{more} of batch {batch}" if batch else "the matrix"
    return f"{who} ({kind.name}: {advice})"


class _Undifferentiable(torch.autograd.Function):
    """Hands the root through, and raises in the backward pass instead of returning a wrong or missing gradient."""

    @staticmethod
    def forward(ctx: Any, A: Tensor, root: Tensor) -> Tensor:
        return root.view_as(root)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        raise NotImplementedError(
            "matroots: roots are not differentiable yet; pass A.detach() if no gradient is wanted"
        )


def _undifferentiable(A: Tensor, root: Tensor) -> Tensor:
    if not (A.requires_grad and torch.is_grad_enabled()):
        return root
    apply: Callable[[Tensor, Tensor], Tensor] = _Undifferentiable.apply
    return apply(A, root)
