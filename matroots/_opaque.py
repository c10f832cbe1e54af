# SPDX-License-Identifier: Apache-2.0
"""Roots as single operations, ``torch.ops.matroots.solve``, for whoever traces: torch.compile, torch.export, fake and meta tensors.

What a solver does depends on values, which a tracer does not have; so the graph has one node for the whole call, whatever the method. Everything that a call
says beside its tensors is one string in that node, which an exported program keeps.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from matroots._exponent import parse_exponent
from matroots._frechet import Power, frechet
from matroots.scaling import SCALINGS
from matroots.solvers import SOLVERS
from matroots.solvers._problem import Want

Run = Callable[[Tensor, Tensor, str], list[Tensor]]


def traced(A: Tensor) -> bool:
    """Whether A has no values now."""
    return torch.compiler.is_compiling() or isinstance(A, FakeTensor) or A.is_meta


def encoded(p: object, want: Want, certify: bool, strict: bool, **keywords: Any) -> str:
    """Return a call as text: JSON, by names and the fields of solvers and scalings.

    Raises:
        NotImplementedError: for what text cannot say: a random generator, a solver or scaling of the user's own.
    """
    if keywords.get("generator") is not None:
        raise NotImplementedError("generator: a compiled or exported call cannot carry one; leave it out")
    exponent = parse_exponent(p)
    number = str(exponent) if isinstance(exponent, Fraction) else exponent
    options = {name: _text_of(name, value) for name, value in keywords.items() if value is not None}
    return json.dumps({"p": number, "want": want, "keywords": options, "certify": certify, "strict": strict})


# all that torch.compiler.assume_constant_result does, after it has loaded the compiler, which takes a second
encoded._dynamo_marked_constant = True  # type: ignore[attr-defined]


def decoded(text: str) -> dict[str, Any]:
    """Return what :func:`encoded` was given."""
    call: dict[str, Any] = json.loads(text)
    call["p"] = Fraction(call["p"]) if isinstance(call["p"], str) else call["p"]
    call["keywords"] = {name: _value_of(name, value) for name, value in call["keywords"].items()}
    return call


_TABLES: dict[str, Mapping[str, type[Any]]] = {"method": SOLVERS, "scaling": SCALINGS}


def _text_of(name: str, value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if name not in _TABLES or isinstance(value, str):
        return value
    kind = next((key for key, known in _TABLES[name].items() if type(value) is known), None)
    if kind is None:
        raise NotImplementedError(
            f"{name}: a compiled or exported call takes those of matroots only, got {value!r}; call it outside of the compiled function"
        )
    fields = {field.name: _text_of("", getattr(value, field.name)) for field in dataclasses.fields(value)}
    return {"kind": kind, "fields": fields}


def _value_of(name: str, value: Any) -> Any:
    if isinstance(value, dict) and "dtype" in value:
        return getattr(torch, value["dtype"])
    if isinstance(value, dict):
        fields = {key: _value_of("", entry) for key, entry in value["fields"].items()}
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


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.powers = _powers_of(inputs[3])
    ctx.save_for_backward(*output[: len(ctx.powers)])


def _backward(ctx: Any, gradients: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    wanted = zip(ctx.saved_tensors, gradients, ctx.powers, strict=False)
    terms = [derivative(X, G, f.p, f.sign) for X, G, f in wanted if G is not None]
    return (sum(terms) if terms else None, None, None, None, None)


solve.register_autograd(_backward, setup_context=_keep)


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
