# SPDX-License-Identifier: Apache-2.0
"""The options of a parameter group: what each may be, as plain values that a checkpoint can hold, and as a `Recipe`.

A group holds only numbers, strings, dtypes and mappings of them, so that ``torch.load(..., weights_only=True)`` takes its
checkpoint: solvers, scalings and grafting methods stand there as ``{"type": name, option: value}``. `Recipe` is the same made usable.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import lru_cache
from numbers import Real
from typing import Any, Final, cast, get_args

import torch

from dash_optim.blocks import Order
from dash_optim.grafting import GRAFTINGS, Grafting
from matroots import EVD, Minimax, Rational
from matroots._arguments import check_count, check_number
from matroots._exponent import Exponent, as_integer, parse_exponent
from matroots._formats import parse_format
from matroots.scaling import SCALINGS, Frobenius, Scaling
from matroots.solvers import SOLVERS, Solver

DEFAULTS: Final[dict[str, Any]] = {
    "lr": 1e-3,
    "betas": (0.85, 0.99),
    "beta3": None,
    "eps": 1e-8,
    "weight_decay": 0.0,
    "momentum": 0.0,
    "nesterov": False,
    "maximize": False,
    "algorithm": "dash",
    "one_d": "adamw",
    "nd": "matrix",
    "block_size": 1024,
    "max_factor_dim": 8192,
    "p": 2,
    "method": "auto",
    "scaling": None,
    "matmul_dtype": None,
    "tol": None,
    "max_steps": None,
    "damping": 0.0,
    "rel_damping": 1e-6,
    "beta_factors": 0.95,
    "bias_correction": True,
    "update_freq": 10,
    "refresh_young": True,
    "start_step": 0,
    "refresh": "staggered",
    "refresh_tol": 0.5,
    "failure_budget": 3,
    "grafting": "adam",
    "grafting_scope": "block",
    "factor_dtype": None,
    "stacking": "device",
    "max_batch": None,
}
"""Every option of a group, with the value it has unless something else is said."""

STRUCTURE: Final = (
    "algorithm",
    "one_d",
    "nd",
    "block_size",
    "max_factor_dim",
    "p",
    "factor_dtype",
    "grafting",
)
"""Options that decide which tensors the state has, and what their numbers mean: a checkpoint of others does not fit."""

DESIGN_ERROR: Final = 2e-2
"""The relative error of a root that method "auto" designs for, unless ``tol`` says otherwise."""

_CHOICES: Final = {
    "algorithm": ("dash", "adamw"),
    "one_d": ("adamw", "dash"),
    "nd": get_args(Order),
    "refresh": ("interval", "staggered", "certified"),
    "grafting_scope": ("block", "layer"),
    "stacking": ("device", "layer", "none"),
    "factor_dtype": (None, torch.float32, torch.float64),
}
_FLAGS: Final = ("nesterov", "maximize", "bias_correction", "refresh_young")
_NOT_NEGATIVE: Final = ("weight_decay", "damping", "rel_damping")
_POSITIVE: Final = ("eps", "refresh_tol")
_COUNTS: Final = {"update_freq": 1, "start_step": 0, "failure_budget": 0}


def normalise(group: dict[str, Any]) -> None:
    """Check every option of a group and bring it to its plain form, in place.

    Raises:
        ValueError: for a value that an option cannot have, or options that contradict each other.
        TypeError: for a value of the wrong type, or a key that looks like a misspelt option.
    """
    refuse_misspelt(group, known={*DEFAULTS, "params", "param_names", "name"})
    for name in _FLAGS:
        if not isinstance(group[name], bool):
            raise TypeError(f"{name}: expected True or False, got {group[name]!r}")
    for name, choices in _CHOICES.items():
        group[name] = _chosen(name, group[name], choices)
    for name in (*_NOT_NEGATIVE, *_POSITIVE):
        group[name] = check_number(name, group[name], positive=name in _POSITIVE)
    for name, least in _COUNTS.items():
        _check_integer(name, group[name], least)
    for name in ("max_batch", "max_steps"):
        check_count(name, group[name])
    _check_rate(group["lr"])
    group["betas"] = _checked_betas(group["betas"])
    group["beta3"] = _checked_beta3(group["beta3"], group["betas"][0])
    group["momentum"] = _checked_decay("momentum", group["momentum"])
    group["beta_factors"] = _checked_decay("beta_factors", group["beta_factors"], one=True)
    for name in ("block_size", "max_factor_dim"):
        group[name] = _checked_size(name, group[name], 1 if name == "block_size" else 0)
    if group["nesterov"] and group["momentum"] == 0.0:
        raise ValueError("nesterov: needs a momentum > 0, got momentum=0.0")
    group["p"] = _plain_exponent(group["p"])
    if group["tol"] is not None:
        group["tol"] = check_number("tol", group["tol"], positive=True)
    parse_format(group["matmul_dtype"])
    group["method"] = plain("method", group["method"], {**SOLVERS, "auto": EVD})
    group["scaling"] = plain("scaling", group["scaling"], SCALINGS)
    group["grafting"] = plain("grafting", group["grafting"], GRAFTINGS) or "none"


def refuse_misspelt(options: Mapping[str, Any], known: set[str], where: str = "") -> None:
    """Raise ``TypeError`` for a key that is not known but close to one that is."""
    for key in sorted(set(options) - known):
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.85)
        if near:
            raise TypeError(f"{where}{key}: no such option; did you mean {near[0]!r}?")


@dataclass(frozen=True)
class Recipe:
    """What decides how a block is updated: blocks of one shape that share it are one stack."""

    betas: tuple[float, float]
    beta3: float | None
    momentum: float
    nesterov: bool
    solver: Solver | str
    scaling: Scaling | None
    matmul_dtype: torch.dtype | str | None
    tol: float | None
    max_steps: int | None
    damping: float
    rel_damping: float
    p: Exponent | None
    beta_factors: float
    bias_correction: bool
    update_freq: int
    refresh_young: bool
    start_step: int
    refresh: str
    refresh_tol: float
    failure_budget: int
    grafting: Grafting | None
    grafting_scope: str
    factor_dtype: torch.dtype | None
    stacking: str
    max_batch: int | None

    @property
    def average_share(self) -> float:
        """What part of the preconditioned direction is the gradient average, which has the last gradient in it; the rest is that gradient once more."""
        beta1 = self.betas[0]
        # a scheduler may take betas[0] below beta3
        return beta1 if self.beta3 is None or not beta1 else min(self.beta3 / beta1, 1.0)

    def dtype_for(self, param: torch.Tensor) -> torch.dtype:
        """Return the dtype of averages, factors and roots: float32, and float64 for float64 parameters, unless one is named."""
        own = torch.float64 if param.dtype == torch.float64 else torch.float32
        return self.factor_dtype or own

    def exponent(self, factors: int) -> Exponent:
        """Return p: what the user said, or twice the number of factors."""
        return Fraction(2 * factors) if self.p is None else self.p

    def solver_for(self, p: Exponent, device: torch.device) -> Solver | str:
        """Return the solver for p on a device; raise ``ValueError`` if it cannot take p or the options.

        "auto", with a relative damping, whose floor fixes the work beforehand, is designed for a relative error of ``tol`` (2 %, far below the error that
        factors have as averages of few gradients): by the best rational approximation on CPUs, which are good at Cholesky factors, and for a p that is no
        integer; else, and where ``matmul_dtype`` speaks of products, by minimax polynomials. Without relative damping it is matroots' own "auto".
        """
        if self.solver == "auto":
            return self._chosen(p, device)
        solver = cast(Solver, self.solver)
        solver.check(p, self.tol, self.max_steps)
        if self.matmul_dtype is not None and isinstance(solver, EVD | Rational):
            raise ValueError(
                f"matmul_dtype: method {type(solver).__name__} has no products to round; use 'minimax', 'ndb' or 'cn'"
            )
        return solver

    def _chosen(self, p: Exponent, device: torch.device) -> Solver | str:
        if self.rel_damping == 0 and self.matmul_dtype is None:
            return "auto"
        if as_integer(p) is not None and (self.matmul_dtype is not None or device.type != "cpu"):
            Minimax().check(p, self.tol, self.max_steps)
            return Minimax()
        if self.matmul_dtype is not None:
            raise ValueError(
                f"matmul_dtype: for p={float(p):g} method 'auto' is a rational approximation, which has no products to round; use 'chebyshev'"
            )
        return Rational(error=min(self.tol or DESIGN_ERROR, 0.5))

    def keywords(self, p: Exponent, n: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """Return the keywords of ``matroots.inv_root_ex`` for factors ``(n, n)`` of this dtype and device, beside p and damping.

        A relative error of x in every eigenvalue of the root is a residual ``||I - A X^p||_F`` of ``sqrt(n) ((1 + x)^p - 1)``. An average of Gram matrices
        is positive semidefinite but for rounding, of which a relative damping of a few u is proof enough.
        """
        solver = self.solver_for(p, device)
        tol, scaling = self.tol, self.scaling
        if self.solver == "auto" and isinstance(solver, Minimax):
            tol = math.sqrt(n) * math.expm1(float(p) * math.log1p(min(self.tol or DESIGN_ERROR, 0.5)))
            scaling = Frobenius() if scaling is None else scaling
        elif self.solver == "auto" and isinstance(solver, Rational):
            tol = None
        return {
            "method": solver,
            "scaling": scaling,
            "rel_damping": self.rel_damping,
            "tol": tol,
            "max_steps": self.max_steps,
            "matmul_dtype": self.matmul_dtype,
            "assume_positive": self.rel_damping >= 4 * torch.finfo(dtype).eps,
        }


_RECIPE_FIELDS: Final = tuple(
    field.name for field in fields(Recipe) if field.name not in ("solver", "scaling", "p", "grafting")
)


def recipe_of(group: Mapping[str, Any]) -> Recipe:
    """Return the recipe that a (normalised) group describes."""
    p = group["p"]
    return Recipe(
        **{name: group[name] for name in _RECIPE_FIELDS if name != "betas"},
        betas=tuple(group["betas"]),  # torch.distributed.checkpoint makes lists of tuples
        solver="auto" if group["method"] == "auto" else built("method", group["method"]),
        scaling=built("scaling", group["scaling"]),
        p=None if p is None else parse_exponent(Fraction(p) if isinstance(p, str) else p),
        grafting=built("grafting", group["grafting"]),
    )


_TABLES: Final[dict[str, Mapping[str, type[Any]]]] = {
    "method": SOLVERS,
    "scaling": SCALINGS,
    "grafting": GRAFTINGS,
}


def plain(name: str, value: Any, table: Mapping[str, type[Any]]) -> str | dict[str, Any] | None:
    """Return a solver, scaling or grafting as a name or as ``{"type": name, option: value}``, checked against the table."""
    if value is None or value == "none":
        return None
    if isinstance(value, str):
        if value not in table:
            raise ValueError(
                f"{name}: expected one of {sorted(table)}, an instance or a mapping, got {value!r}"
            )
        return value
    if isinstance(value, Mapping):
        mapping = {**value}
        if mapping.get("type") not in _TABLES[name]:
            raise ValueError(
                f"{name}: expected a mapping with 'type' one of {sorted(_TABLES[name])}, got {mapping}"
            )
        return _checked_mapping(name, mapping)
    kinds = {kind: key for key, kind in _TABLES[name].items()}
    if type(value) not in kinds:
        raise TypeError(f"{name}: expected one of {sorted(table)}, an instance or a mapping, got {value!r}")
    options = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
    return _checked_mapping(name, {"type": kinds[type(value)], **options})


def _checked_mapping(name: str, mapping: dict[str, Any]) -> dict[str, Any]:
    """Build what the mapping describes, once, so that what is wrong with it is said now."""
    known = {field.name for field in fields(_TABLES[name][mapping["type"]]) if field.init}
    for key in mapping:
        if key not in known | {"type"}:
            raise TypeError(f"{name}: {mapping['type']} has no option {key!r}; it has {sorted(known)}")
    built(name, mapping)
    return mapping


def built(name: str, value: str | Mapping[str, Any] | None) -> Any:
    """Return the instance that a plain value describes."""
    if value is None or value == "none":
        return None
    if isinstance(value, str):
        return _instance(name, value, ())
    if not isinstance(value, Mapping):
        raise TypeError(
            f"{name}: a group holds names and mappings, which checkpoints can hold, got {value!r}; write"
            f" {plain(name, value, _TABLES[name])!r}"
        )
    options = tuple(sorted((key, option) for key, option in value.items() if key != "type"))
    return _instance(name, value["type"], options)


@lru_cache(maxsize=256)
def _instance(name: str, kind: str, options: tuple[tuple[str, Any], ...]) -> Any:
    keywords = {
        key: getattr(torch, value) if key.endswith("dtype") and isinstance(value, str) else value
        for key, value in options
    }
    instance = _TABLES[name][kind](**keywords)
    if name == "grafting":
        for key, value in keywords.items():
            if key == "eps":
                check_number("grafting.eps", value, positive=True)
            elif value is not None:
                _checked_decay(f"grafting.{key}", value)
    return instance


def _chosen(name: str, value: Any, choices: tuple[Any, ...]) -> Any:
    if name == "factor_dtype" and isinstance(value, str):
        value = getattr(torch, value, value)
    if value not in choices:
        raise ValueError(f"{name}: expected one of {list(choices)}, got {value!r}")
    return value


def _check_integer(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an integer, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name}: expected an integer >= {least}, got {value}")


def _check_rate(lr: Any) -> None:
    """A learning rate is a number or a tensor of one element, whose value is not looked at: that may synchronise."""
    if isinstance(lr, torch.Tensor):
        if lr.numel() != 1:
            raise ValueError(f"lr: expected a number or a tensor of one element, got shape {tuple(lr.shape)}")
        return
    check_number("lr", lr)


def _checked_betas(betas: Any) -> tuple[float, float]:
    if isinstance(betas, (str, bytes)) or not hasattr(betas, "__len__") or len(betas) != 2:
        raise ValueError(f"betas: expected two numbers in [0, 1), got {betas!r}")
    return _checked_decay("betas[0]", betas[0]), _checked_decay("betas[1]", betas[1])


def _checked_beta3(value: Any, beta1: float) -> float | None:
    if value is None:
        return None
    beta3 = _checked_decay("beta3", value)
    if beta3 > beta1:
        raise ValueError(f"beta3: expected at most betas[0], {beta1}, or None, got {beta3}")
    return beta3


def _checked_decay(name: str, value: Any, *, one: bool = False) -> float:
    """Return a decay rate in [0, 1), with ``one`` in [0, 1]."""
    number = check_number(name, value)
    if number > 1 or (number == 1 and not one):
        raise ValueError(f"{name}: expected a number in [0, 1{']' if one else ')'}, got {number}")
    return number


def _checked_size(name: str, value: Any, least: int) -> float:
    """Return a size as an ``int``, or ``inf``."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected an integer or inf, got {value!r}")
    size = float(value)
    if not size >= least or not (size.is_integer() or math.isinf(size)):
        raise ValueError(f"{name}: expected an integer >= {least} or inf, got {value}")
    return size if math.isinf(size) else int(size)


def _plain_exponent(p: Any) -> int | float | str | None:
    """Return p as a number, or a fraction as the string that YAML and checkpoints can hold, ``"8/3"``."""
    if p is None:
        return None
    if isinstance(p, str):
        try:
            p = Fraction(p)
        except (ValueError, ZeroDivisionError) as error:
            raise ValueError(f"p: expected a number >= 1 or a fraction such as '8/3', got {p!r}") from error
    exponent = parse_exponent(p)
    if isinstance(exponent, float):
        return exponent
    return int(exponent) if exponent.denominator == 1 else str(exponent)
