# SPDX-License-Identifier: Apache-2.0
"""Roots as single operations, ``torch.ops.matroots.solve``, for whoever traces: torch.compile, torch.export, fake and meta tensors.

What a solver does depends on values, which a tracer does not have; so the graph has one node for the whole call, whatever the method. Everything that a call
says beside its tensors is one string in that node, which an exported program keeps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad

from matroots._exponent import parse_exponent
from matroots._frechet import Power, frechet
from matroots.scaling import SCALINGS
from matroots.solvers import EVD, SOLVERS
from matroots.solvers._problem import Want

Run = Callable[[Tensor, Tensor, str], list[Tensor]]


def traced(A: Tensor) -> bool:
    """Whether A has no values now."""
    return torch.compiler.is_compiling() or isinstance(A, FakeTensor) or A.is_meta


def encoded(p: object, want: Want, certify: bool, strict: bool, hermitian: bool, **keywords: Any) -> str:
    """Return a call as text: JSON, by names and the fields of solvers and scalings, which have been :func:`taken_apart`.

    Raises:
        NotImplementedError: for what text cannot say: a random generator, a solver or scaling of the user's own; within derivatives that are part of what is traced.
    """
    _refuse_transforms()
    if keywords.get("generator") is not None:
        raise NotImplementedError("generator: a compiled or exported call cannot carry one; leave it out")
    exponent = parse_exponent(p)
    number = str(exponent) if isinstance(exponent, Fraction) else exponent
    options = {name: _text_of(name, value) for name, value in keywords.items() if value is not None}
    flags = {"certify": certify, "strict": strict, "hermitian": hermitian}
    return json.dumps({"p": number, "want": want, "keywords": options, **flags})


# all that torch.compiler.assume_constant_result does, after it has loaded the compiler, which takes a second
encoded._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _refuse_transforms() -> None:
    """Raise within ``grad`` or ``jvp``: torch drops the derivatives of operations there without a word."""
    levels = {level.key() for level in get_interpreter_stack() or ()}
    if levels & {TransformType.Grad, TransformType.Jvp} or forward_ad._current_level >= 0:
        raise NotImplementedError(
            "A: torch.func.grad, jvp and forward mode are not possible inside of a compiled or exported function; take derivatives outside of it: compile the function, then"
            " call backward"
        )


def decoded(text: str) -> dict[str, Any]:
    """Return what :func:`encoded` was given."""
    call: dict[str, Any] = json.loads(text)
    call["p"] = Fraction(call["p"]) if isinstance(call["p"], str) else call["p"]
    call["keywords"] = {name: _value_of(name, value) for name, value in call["keywords"].items()}
    return call


_TABLES: dict[str, Mapping[str, type[Any]]] = {"method": SOLVERS, "scaling": SCALINGS}


def taken_apart(value: Any) -> Any:
    """Return the class and the fields of a solver or scaling, everything else as it is.

    The compiler follows this; to :func:`encoded`, which it calls, it would hand an instance that was made in the compiled function without its fields.
    """
    if value is None or isinstance(value, (str, int, float, torch.dtype, torch.Generator)):
        return value
    kind = type(value)
    return kind, tuple([getattr(value, name) for name in getattr(kind, "__match_args__", ())])


def _text_of(name: str, value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if not isinstance(value, tuple):
        return value
    cls, fields = value
    kind = next((key for key, known in _TABLES.get(name, {}).items() if cls is known), None)
    if kind is None:
        raise NotImplementedError(
            f"{name}: a compiled or exported call takes those of matroots only, got a {cls.__name__}; call it outside of the compiled function"
        )
    named = zip(cls.__match_args__, fields, strict=True)
    return {"kind": kind, "fields": {key: _text_of("", field) for key, field in named}}


def _value_of(name: str, value: Any) -> Any:
    if isinstance(value, dict) and "dtype" in value:
        return getattr(torch, value["dtype"])
    if isinstance(value, dict):
        fields = {key: _value_of("", field) for key, field in value["fields"].items()}
        return _TABLES[name][value["kind"]](**fields)
    return value


def powers(p: object, want: Want) -> tuple[Power, ...]:
    """Return the functions that a call computes, in the order of its results."""
    signs = {"inverse": (-1,), "root": (1,), "pair": (1, -1)}[want]
    return tuple(Power(float(parse_exponent(p)), sign) for sign in signs)


runner: list[Run] = []
"""What runs a call that has been decoded; `matroots._call` puts itself here, which this module cannot import."""


@torch.library.custom_op("matroots::solve", mutates_args=())
def solve(B: Tensor, A: Tensor, damping: Tensor, call: str, report: bool) -> list[Tensor]:
    """Return the roots, and with ``report`` all fields of the result; B is what they are differentiated by."""
    found = runner[0](A, damping, call)
    return found if report else found[: len(_powers_of(call))]


@torch.library.custom_op("matroots::frechet", mutates_args=())
def derivative(X: Tensor, E: Tensor, p: float, sign: int) -> Tensor:
    """Return :func:`matroots._frechet.frechet`."""
    return frechet(X, E, Power(p, sign))


@solve.register_fake
def _(B: Tensor, A: Tensor, damping: Tensor, call: str, report: bool) -> list[Tensor]:
    roots = [torch.empty_like(A, memory_format=torch.contiguous_format) for _ in _powers_of(call)]
    if not report:
        return roots
    batch = A.shape[:-2]
    try:
        steps = torch.library.get_ctx().new_dynamic_size()
    except Exception as problem:
        raise NotImplementedError(
            "A: the length of the history depends on values, which a meta or fake tensor does not have; inv_root, root and root_pair work"
        ) from problem
    real = A.new_empty(batch, dtype=torch.float64)
    status, count = real.new_empty(batch, dtype=torch.int32), real.new_empty(batch, dtype=torch.int64)
    history = real.new_empty((*batch, steps))
    fields = [status, count, real, history, real, real, real, count]
    if decoded(call)["certify"]:
        flag = real.new_empty(batch, dtype=torch.bool)
        fields += [real, real, real, real, flag, flag]
    return roots + [torch.empty_like(field) for field in fields]


@derivative.register_fake
def _(X: Tensor, E: Tensor, p: float, sign: int) -> Tensor:
    dtype = torch.promote_types(X.dtype, torch.float32)
    return E.new_empty(torch.broadcast_shapes(X.shape, E.shape), dtype=dtype)


def _powers_of(call: str) -> tuple[Power, ...]:
    found = decoded(call)
    return powers(found["p"], found["want"])


def refuse_derivative(keywords: Mapping[str, Any]) -> None:
    """Raise where the result is not the power of a matrix that differs from A by a multiple of the identity."""
    method = keywords.get("method")
    if isinstance(method, EVD) and not method.damped_input:
        raise NotImplementedError(
            f'method: EVD(spectrum="{method.spectrum}") changes eigenvalues one by one and has no derivative; use "damp", or detach A'
        )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.keywords = decoded(inputs[3])["keywords"]
    ctx.powers = _powers_of(inputs[3])
    ctx.save_for_backward(*output[: len(ctx.powers)])


def _backward(ctx: Any, gradients: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    refuse_derivative(ctx.keywords)
    wanted = zip(ctx.saved_tensors, gradients, ctx.powers, strict=False)
    terms = [derivative(X, G, f.p, f.sign) for X, G, f in wanted if G is not None]
    return (sum(terms) if terms else None, None, None, None, None)


def _no_second(ctx: Any, gradient: Tensor) -> None:
    raise NotImplementedError(
        "matroots: compiled and exported roots have first derivatives only; call inv_root outside of what is compiled for second ones"
    )


solve.register_autograd(_backward, setup_context=_keep)
derivative.register_autograd(_no_second)


@solve.register_vmap
def _(
    info: Any, in_dims: tuple[int | None, ...], B: Tensor, A: Tensor, damping: Tensor, call: str, report: bool
) -> Any:
    B, A, damping = (
        t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
        for t, dim in zip((B, A, damping), in_dims, strict=False)
    )
    found = solve(B, A, damping, call, report)
    return found, [0] * len(found)


@derivative.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], X: Tensor, E: Tensor, p: float, sign: int) -> Any:
    X, E = (
        t.unsqueeze(0) if dim is None else t.movedim(dim, 0) for t, dim in zip((X, E), in_dims, strict=False)
    )
    return derivative(X, E, p, sign), 0
