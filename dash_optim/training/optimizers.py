# SPDX-License-Identifier: Apache-2.0
"""The optimizers of a job: which parameters go where, and one handle for all of them.

DASH takes its groups from :func:`dash_optim.param_groups`. Muon is made for matrices: embeddings, head and vectors get an AdamW beside it, at
the same rate. The others take everything. Vectors have no weight decay anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dash_optim.config import OPTIMIZERS, from_config, option_names
from dash_optim.dash import DASH
from dash_optim.routing import param_groups
from dash_optim.training.model import Architecture, Llama
from dash_optim.training.settings import nearest_key
from matroots._arguments import check_number
from matroots._command import InputError, MissingExtraError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

USUAL: Final[dict[str, dict[str, Any]]] = {
    "dash": {},
    "adamw": {"betas": (0.9, 0.95), "weight_decay": 0.0, "fused": True},
    "adam": {"betas": (0.9, 0.95), "fused": True},
    "sgd": {},
    "muon": {"weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"},
    "soap": {"betas": (0.95, 0.95), "weight_decay": 0.0},
    "shampoo": {"betas": (0.9, 0.95), "weight_decay": 0.0},
}
"""What a job gives each optimizer unless its configuration says otherwise: language models' usual betas, no weight decay, and for Muon the scale at
which AdamW's rates fit. The type's own defaults hold for the rest."""

RATES: Final = {
    "dash": 1e-2,
    "adamw": 3e-3,
    "adam": 3e-3,
    "sgd": 1e-1,
    "muon": 1e-2,
    "soap": 1e-2,
    "shampoo": 3e-1,
}
"""Peak learning rates that a job starts from: the best that were tried for 300 steps of the 0.9m preset (docs/studies/better.md)."""

WARMUP: Final = {
    "dash": 0.0,
    "adamw": 0.1,
    "adam": 0.1,
    "sgd": 0.1,
    "muon": 0.0,
    "soap": 0.1,
    "shampoo": 0.1,
}
"""Warm-up that a job has unless it says otherwise, as a share of its steps: of none and the usual tenth what is better for each. A warm-up wastes the first steps of
DASH and Muon; AdamW with 2 % ends higher by 0.09, and in runs of 300 steps a third or a half is better still for it and SOAP (docs/studies/better.md)."""

BESIDE: Final = 0.25
"""The rate of the AdamW that updates what DASH and Muon do not, as a share of theirs: AdamW's own best rates are lower by about that much."""


class Optimizers:
    """The optimizers of a model as one: they step together, and share a rate.

    Args:
        model: whose parameters are optimized.
        options: ``type`` and options by name; also ``routing``: "auto" as described above, "all" for no exceptions; ``adamw_lr``, the peak rate of the AdamW
            beside DASH and Muon (default: `BESIDE` times ``lr``); and ``overrides``, for DASH, as for :func:`dash_optim.param_groups`.
        group: ranks over which DASH shares its work; the others do all of theirs on each.
    """

    def __init__(
        self, model: nn.Module, options: Mapping[str, Any], group: ProcessGroup | None = None
    ) -> None:
        kind = options["type"]
        if not isinstance(kind, str) or kind not in OPTIMIZERS:
            raise InputError(f"optimizer.type: expected one of {sorted(OPTIMIZERS)}, got {kind!r}")
        options = {"lr": RATES[kind], **USUAL[kind], **options}
        routing, overrides = options.pop("routing", "auto"), options.pop("overrides", None)
        if routing not in ("auto", "all"):
            raise InputError(f"optimizer.routing: expected 'auto' or 'all', got {routing!r}")
        if not isinstance(overrides, Mapping | None):
            raise InputError(f"optimizer.overrides: expected a mapping, got {overrides!r}")
        with _about_options(options):
            self.peak = check_number("optimizer.lr", options["lr"])
            _refuse_unknown(kind, options)
            if kind == "dash" and group is not None:
                options["process_group"] = group
            self.each = _build(model, options, routing == "all", overrides)
        self.warmup = WARMUP[kind]
        self._peaks = [[float(group["lr"]) for group in one.param_groups] for one in self.each]

    @property
    def dash(self) -> DASH | None:
        """The DASH among them."""
        return next((one for one in self.each if isinstance(one, DASH)), None)

    def set_rate(self, factor: float) -> float:
        """Set the rate of each group to this multiple of its peak; return that of the groups that have none of their own."""
        for one, peaks in zip(self.each, self._peaks, strict=True):
            for group, peak in zip(one.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
        return self.peak * factor

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for one in self.each:
            one.zero_grad()

    def step(self) -> None:
        """Take a step with each."""
        for one in self.each:
            one.step()

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the states, in order. Where ranks share the work every one has to ask, and the first alone gets what a single process would have; no other can use it."""
        return [
            (one.full_state_dict(0) or {}) if isinstance(one, DASH) else one.state_dict() for one in self.each
        ]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Load what :meth:`state_dict` returned."""
        for one, state in zip(self.each, states, strict=True):
            one.load_state_dict(state)

    @property
    def plain(self) -> bool:
        """Whether their state is tensors, numbers and strings in dicts and lists: ScalableShampoo's holds objects, which no checkpoint takes."""
        return all(_is_plain(own) for one in self.each for own in one.state.values())

    @property
    def bytes(self) -> int:
        """The memory of their state, on this rank."""
        return _size([list(one.state.values()) for one in self.each], set())


def try_options(options: Mapping[str, Any], device: torch.device) -> None:
    """Take a step with a model of a few numbers: at some options torch's optimizers look only then.

    Raises:
        InputError: for options with which there is no step.
        MissingExtraError: for an optimizer of a package that is not installed.
    """
    shape = Architecture(width=4, layers=1, heads=2, hidden=4, context=2, vocab=4)
    model = Llama(shape).to(device)
    optimizers = Optimizers(model, options)
    model.loss(torch.zeros(1, 3, dtype=torch.int64, device=device)).backward()
    with _about_options(options):
        optimizers.step()


def _refuse_unknown(kind: str, options: Mapping[str, Any]) -> None:
    """Raise for an option that the optimizer does not have: where settings are given without their section, it may be meant for another."""
    known = [*option_names(kind), "type", "adamw_lr"]
    for name in options:
        near = None if name in known else nearest_key(name, known)
        if near is not None:
            raise InputError(f"optimizer.{name}: {kind} has no such option; did you mean {near!r}?")


@contextmanager
def _about_options(options: Mapping[str, Any]) -> Iterator[None]:
    """Make what optimizers raise, who raise what they like for a wrong option, an error of one line that says so, and what the options were."""
    given = ", ".join(f"{name}={value!r}" for name, value in options.items())
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(str(error)) from error
    except Exception as error:
        message = " ".join(str(error).split())
        named = message.startswith(("optimizer.", "overrides:"))
        raise InputError(message if named else f"optimizer: {message} (given: {given})") from error


def _build(
    model: nn.Module, options: dict[str, Any], everything: bool, overrides: Mapping[str, Any] | None
) -> list[Optimizer]:
    """Return the optimizers for a type."""
    kind, decay = options["type"], options.get("weight_decay", 0.0)
    beside = _rate_beside(options) if kind in ("dash", "muon") else None
    if kind == "dash":
        if everything:
            overrides = {
                **{name: {"algorithm": "dash"} for name in ("embeddings", "heads")},
                **(overrides or {}),
            }
        groups = param_groups(model, weight_decay=decay, overrides=overrides, verbose=False)
        for group in groups:
            if group["algorithm"] == "adamw":
                group.setdefault("lr", beside)
        return [from_config(groups, options)]
    if overrides is not None:
        raise ValueError("optimizer.overrides: is for type dash")
    groups = param_groups(model, weight_decay=decay, verbose=False)
    for group in groups:
        del group["algorithm"]
    if kind != "muon":
        return [from_config(groups, options)]
    names = ("matrices", "embeddings", "heads") if everything else ("matrices",)
    matrices = [group for group in groups if group["name"] in names]
    others = [group for group in groups if group["name"] not in names]
    adamw = {"type": "adamw", **USUAL["adamw"], "lr": beside, "weight_decay": decay}
    return [from_config(matrices, options), *([from_config(others, adamw)] if others else [])]


def _rate_beside(options: dict[str, Any]) -> float:
    """Take the rate of the AdamW beside out of the options."""
    rate = options.pop("adamw_lr", None)
    return BESIDE * float(options["lr"]) if rate is None else check_number("optimizer.adamw_lr", rate)


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (Tensor, bool, int, float, str))


def _size(value: Any, seen: set[int]) -> int:
    """Return the bytes of all tensors in a value, of mappings, sequences and whatever objects; each once."""
    if id(value) in seen:
        return 0
    seen.add(id(value))
    if isinstance(value, Tensor):
        held = [piece for _, piece in getattr(value, "shards", [(0, value)])]  # of `Pieces`, what is here
        return sum(piece.numel() * piece.element_size() for piece in held)
    if isinstance(value, Mapping):
        return sum(_size(part, seen) for part in value.values())
    if isinstance(value, (list, tuple)):
        return sum(_size(part, seen) for part in value)
    return (
        0
        if isinstance(value, type)
        else sum(_size(part, seen) for part in getattr(value, "__dict__", {}).values())
    )
