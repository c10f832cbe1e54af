# SPDX-License-Identifier: Apache-2.0
"""The settings of a training job: what a YAML file and the command line may say, checked before anything is started.

A job has the sections ``model``, ``data``, ``optimizer``, ``schedule``, ``training`` and ``logging``. Every key has a default; an unknown one is refused with the
nearest that is known. What ``optimizer`` may hold is what its ``type`` takes (:func:`dash_optim.from_config`).
"""

from __future__ import annotations

import copy
import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Final, Literal, TypeVar, get_args, get_origin, get_type_hints

import torch

from dash_optim.config import as_number, parse_yaml
from dash_optim.training.model import PRESETS, Architecture
from dash_optim.training.schedule import Schedule
from matroots._command import InputError

Section = TypeVar("Section")
Precision = Literal["float32", "bfloat16"]
MOST_THREADS: Final = 1024
"""No machine has more cores, and where threads cannot be made torch ends the process without a word."""


@dataclass(frozen=True)
class Model:
    """A preset, and what is to be different; ``vocab`` is that of the data unless something else is said."""

    preset: str = "0.9m"
    width: int | None = None
    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    hidden: int | None = None
    context: int | None = None
    vocab: int | None = None
    tied: bool | None = None
    rope_base: float | None = None

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise InputError(f"model.preset: expected one of {list(PRESETS)}, got {self.preset!r}")

    def architecture(self, vocab: int | None = None) -> Architecture:
        """Return the sizes, with the data's vocabulary where the settings name none."""
        changed = {key: value for key, value in asdict(self).items() if key != "preset" and value is not None}
        if vocab is not None:
            changed.setdefault("vocab", vocab)
        try:
            return replace(PRESETS[self.preset], **changed)
        except ValueError as error:
            raise InputError(str(error)) from error


@dataclass(frozen=True)
class Data:
    """What is read: ``paths`` as for :func:`dash_optim.training.data.load_corpus` (none: the text that ships with Python)."""

    paths: tuple[str, ...] = ()
    held_out: float = 0.1
    vocab: int | None = None


@dataclass(frozen=True)
class Training:
    """How long, on what and how.

    Attributes:
        steps: of the optimizer.
        batch: windows in a batch; a step takes ``accumulate`` batches.
        clip: the most that the norm of all gradients may be; 0: they are left as they are.
        seed: of the weights and of the order of the data.
        precision: "bfloat16" computes forward and backward under autocast.
        compile: compile the model (``torch.compile``).
        device: "auto": an accelerator where there is one.
        threads: of torch on the CPU; None: as torch has it.
    """

    steps: int = 300
    batch: int = 16
    accumulate: int = 1
    clip: float = 1.0
    seed: int = 0
    precision: Precision = "float32"
    compile: bool = False
    device: str = "auto"
    threads: int | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "accumulate"):
            _at_least(f"training.{name}", getattr(self, name), 1)
        if self.threads is not None:
            _at_least("training.threads", self.threads, 1)
            if self.threads > MOST_THREADS:
                raise InputError(f"training.threads: expected at most {MOST_THREADS}, got {self.threads}")
        _at_least("training.clip", self.clip, 0)
        if not 0 <= self.seed < 2**63:
            raise InputError(f"training.seed: expected an integer from 0 to 2^63 - 1, got {self.seed}")

    def place(self) -> torch.device:
        """Return the device, and raise :class:`InputError` for one that this machine does not have."""
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if self.device == "auto":
            return accelerator or torch.device("cpu")
        there = ["cpu", *([accelerator.type] if accelerator else [])]
        try:
            device = torch.device(self.device)
            if device.type not in there:
                raise RuntimeError(f"nothing can be computed on {device}")
            torch.empty(0, device=device)
        except RuntimeError as error:
            raise InputError(
                f"training.device: expected a device that this machine has ({', '.join(there)}), got {self.device!r}"
            ) from error
        return device


@dataclass(frozen=True)
class Logging:
    """What is written down, and when; a multiple of each interval, and the last step.

    Attributes:
        validate_every: steps between looks at the held-out text.
        validation_windows: how many windows of it are looked at then; the last look takes all, at most 4096.
        checkpoint_every: steps between checkpoints.
        diagnostics: whether the metrics of each validation also have DASH's own numbers.
        tensorboard: whether metrics go there too.
    """

    validate_every: int = 50
    validation_windows: int = 128
    checkpoint_every: int = 100
    diagnostics: bool = False
    tensorboard: bool = False

    def __post_init__(self) -> None:
        for name in ("validate_every", "validation_windows", "checkpoint_every"):
            _at_least(f"logging.{name}", getattr(self, name), 1)


@dataclass(frozen=True)
class Job:
    """A training job."""

    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    optimizer: dict[str, Any] = field(default_factory=lambda: {"type": "dash"})
    schedule: Schedule = field(default_factory=Schedule)
    training: Training = field(default_factory=Training)
    logging: Logging = field(default_factory=Logging)

    @property
    def name(self) -> str:
        """What tables call the optimizer of this job."""
        options = ", ".join(f"{key}={value}" for key, value in self.optimizer.items() if key != "type")
        return f"{self.optimizer['type']}" + (f" ({options})" if options else "")

    def plain(self) -> dict[str, Any]:
        """Return the settings as a mapping of plain values, which YAML, JSON and :func:`torch.load` take."""
        sections: dict[str, Any] = _plain(asdict(self))
        return sections

    def with_values(self, **sections: Mapping[str, Any]) -> Job:
        """Return the same job with other values in some sections: ``job.with_values(training={"seed": 1})``."""
        merged = self.plain()
        for name, values in sections.items():
            merged[name] = {**merged[name], **values}
        return read_job(merged)


_SECTIONS: Final[dict[str, Any]] = {
    "model": Model,
    "data": Data,
    "schedule": Schedule,
    "training": Training,
    "logging": Logging,
}
"""The sections with keys of their own; what ``optimizer`` holds depends on its type."""

FREE: Final = ("training.device", "training.threads", "logging")
"""What may differ when a run is resumed: it does not change what is computed (threads may change the last bits)."""


def read_job(mapping: Mapping[str, Any]) -> Job:
    """Return the job that a mapping of sections describes.

    Raises:
        InputError: for an unknown section or key, with the nearest that is known, or a value that a key cannot have.
    """
    _refuse_unknown(mapping, [*_SECTIONS, "optimizer"], "", "section")
    found: dict[str, Any] = {
        name: _section(kind, name, _filled(mapping.get(name))) for name, kind in _SECTIONS.items()
    }
    options = _as_options("optimizer", mapping.get("optimizer"))
    if not isinstance(options, Mapping):
        options = {"type": options}
    options = {str(key): _plain(as_number(value)) for key, value in options.items()}
    for key, value in _flat(options, "optimizer."):
        _refuse_other_kinds(key, value)
    job = Job(optimizer={"type": "dash", **options}, **found)
    job.model.architecture()
    return job


def override(mapping: Mapping[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """Return a mapping of sections with ``section.key=value`` put in, see :func:`assign`; values are read as YAML.

    ``training.steps=100``, ``optimizer.grafting={type: adam, eps: 1e-6}``
    """
    merged = dict(mapping)
    for assignment in assignments:
        key, sign, text = assignment.partition("=")
        if not sign or not key:
            raise InputError(
                f"expected section.key=value such as training.steps=100, or a YAML file, got {assignment!r}"
            )
        try:
            value = parse_yaml(text)
        except ValueError as error:
            raise InputError(f"{key}: expected a YAML value, got {text!r}") from error
        merged = assign(merged, key, value)
    return merged


def assign(mapping: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return a mapping of sections with a value put in for ``section.key``.

    The section may be left out where only one has the key, an option that none has is the optimizer's; ``optimizer`` alone is its type. What
    else a section holds stays, see :func:`merge`.
    """
    merged = copy.deepcopy(dict(mapping))
    section = section_of(key)
    if key in (section, "optimizer.type"):
        return merge(merged, {section: value})
    path = key.split(".")[1:] or [key]
    merged[section] = _as_options(section, merged.get(section))
    place: Any = merged
    for part in (section, *path[:-1]):
        if place.get(part) is None:
            place[part] = {}
        place = place[part]
        if not isinstance(place, dict):
            raise InputError(f"{key}: expected section.key=value, and {part} is no mapping of values")
    place[path[-1]] = value
    return merged


def merge(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of both, key by key, those of the new over those of the old. An optimizer of another type than was named starts anew: options are those of a type."""
    both = dict(old)
    for name, values in new.items():
        before, after = (_as_options(name, section) for section in (both.get(name), values))
        both[name] = {**before, **after} if _go_together(name, before, after) else after
    return both


def _go_together(name: str, before: Any, after: Any) -> bool:
    """Whether what was said of a section before still holds."""
    if not isinstance(before, Mapping) or not isinstance(after, Mapping):
        return False
    return name != "optimizer" or before.get("type", after.get("type")) == after.get(
        "type", before.get("type")
    )


def _as_options(name: str, section: Any) -> Any:
    """Return a section; nothing where a YAML file has its name alone, and of an optimizer that is its type alone a mapping."""
    if name == "optimizer" and isinstance(section, str):
        return {"type": section}
    return _filled(section)


def section_of(key: str) -> str:
    """Return the section that a key names, or else the only one that has it; the optimizer's if none has, whose options are its own affair."""
    named = key.partition(".")[0]
    if "." in key or named == "optimizer" or named in _SECTIONS:
        return named
    having = [name for name, kind in _SECTIONS.items() if key in _keys(kind)]
    if len(having) > 1:
        raise InputError(f"{key}: which one is meant, {' or '.join(f'{name}.{key}' for name in having)}?")
    return having[0] if having else "optimizer"


def nearest_key(name: str, options: Iterable[str]) -> str | None:
    """Return what is nearest to an option that an optimizer does not have: another of its ``options``, or a key of another section; None if nothing is near."""
    keys = {key: f"{section}.{key}" for section, kind in _SECTIONS.items() for key in _keys(kind)}
    keys |= {option: option for option in options}
    near = difflib.get_close_matches(name, keys, n=1, cutoff=0.6)
    return keys[near[0]] if near else None


def _keys(kind: Any) -> list[str]:
    return [one.name for one in fields(kind)]


def differences(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    free: tuple[str, ...] = FREE,
    where: tuple[str, str] = ("then", "now"),
) -> list[str]:
    """Return in which keys two jobs, as plain mappings, differ so that one cannot go on where the other stopped.

    Args:
        old: a job.
        new: another.
        free: what may differ.
        where: what the jobs are called.
    """
    flat = [dict(_flat(job)) for job in (old, new)]
    keys = dict.fromkeys([*flat[0], *flat[1]])
    return [
        f"{key}: {flat[0].get(key)!r} {where[0]}, {flat[1].get(key)!r} {where[1]}"
        for key in keys
        if flat[0].get(key) != flat[1].get(key) and not key.startswith(free)
    ]


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _section(kind: type[Section], name: str, values: Any) -> Section:
    """Build a section from a mapping, every value of the type that its field has."""
    if not isinstance(values, Mapping):
        raise InputError(f"{name}: expected a mapping of values, got {values!r}")
    hints = get_type_hints(kind)
    _refuse_unknown(values, list(hints), f"{name}.", "key")
    typed = {key: _typed(f"{name}.{key}", as_number(value), hints[key]) for key, value in values.items()}
    try:
        return kind(**typed)
    except InputError:
        raise
    except ValueError as error:
        raise InputError(str(error)) from error


def _typed(where: str, value: Any, hint: Any) -> Any:
    """Return a value in the type of its field, or raise :class:`InputError`."""
    kinds = get_args(hint) if get_origin(hint) is not Literal and get_origin(hint) is not tuple else (hint,)
    kinds = kinds or (hint,)
    if value is None and type(None) in kinds:
        return None
    for kind in kinds:
        if get_origin(kind) is Literal and value in get_args(kind):
            return value
        if get_origin(kind) is tuple:
            listed = [value] if isinstance(value, str) else value
            if isinstance(listed, (list, tuple)) and all(isinstance(part, str) for part in listed):
                return tuple(listed)
            continue
        if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            if math.isfinite(value):
                return float(value)
            continue
        if kind is int and isinstance(value, float) and value.is_integer():
            return int(value)
        if isinstance(kind, type) and type(value) is kind:
            return value
    expected = " or ".join(_described(kind) for kind in kinds)
    raise InputError(f"{where}: expected {expected}, got {value!r}")


def _described(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {list(get_args(kind))}"
    if get_origin(kind) is tuple:
        return "a list of strings"
    names = {
        int: "an integer",
        float: "a finite number",
        bool: "true or false",
        str: "a string",
        type(None): "null",
    }
    return names[kind]


def _refuse_unknown(values: Mapping[Any, Any], known: list[str], where: str, what: str) -> None:
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {sorted(known)}"
            raise InputError(f"{where}{key}: no such {what}; {hint}")


def _refuse_other_kinds(where: str, value: Any) -> None:
    """Raise for what YAML knows and JSON does not: dates, bytes, sets, and NaN, which no option means."""
    for part in value if isinstance(value, list) else [value]:
        if isinstance(part, float) and math.isnan(part):
            raise InputError(f"{where}: expected a number, got {part}")
        if not isinstance(part, (str, int, float, list, Mapping, type(None))):
            raise InputError(
                f"{where}: expected numbers, strings, true, false, null, or lists and mappings of them, got {part!r}"
            )


def _at_least(where: str, value: float, least: int) -> None:
    if not value >= least:
        raise InputError(f"{where}: expected a number >= {least}, got {value}")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return value


def _filled(section: Any) -> Any:
    """Return a section; nothing where a YAML file has its name alone."""
    return {} if section is None else section
