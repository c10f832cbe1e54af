# SPDX-License-Identifier: Apache-2.0
"""An optimizer from a mapping, as it comes from YAML: ``optimizer: {type: dash, block_size: 1024, update_freq: 1}``.

Names are those of the Python keywords. An unknown one is refused, with the nearest that is known.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from dash_optim.dash import DASH

OPTIMIZERS: Final[dict[str, type[Optimizer] | str]] = {
    "dash": DASH,
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "muon": torch.optim.Muon,
    "soap": "SOAP",
    "shampoo": "ScalableShampoo",
}
"""Optimizers by type; those that are named by a string are pytorch-optimizer's (extra ``bench``)."""


def option_names(kind: str) -> list[str]:
    """Return the options of a type of optimizer."""
    parameters = inspect.signature(_optimizer(OPTIMIZERS[kind])).parameters
    return [
        name
        for name, parameter in parameters.items()
        if name != "params" and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]


def from_config(params: ParamsT, config: Mapping[str, Any] | str | Path) -> Optimizer:
    """Return the optimizer that a configuration describes.

    Args:
        params: as for every optimizer of ``torch.optim``.
        config: a mapping with ``type`` ("dash", "adamw", "adam", "sgd", "muon" of ``torch.optim``, or "soap", "shampoo" of pytorch-optimizer, extra
            ``bench``) and options by their Python names, or one with such a mapping under ``optimizer``; or the path of a YAML file that holds one
            (extra ``config``).

    Raises:
        TypeError: for an option that the optimizer does not have, naming the nearest that it has.
        ValueError: for an unknown ``type`` or a value that an option cannot have.

    >>> w = torch.nn.Parameter(torch.zeros(4, 4))
    >>> opt = from_config([w], {"optimizer": {"type": "dash", "block_size": 2, "matmul_dtype": "fp16", "scaling": "power"}})
    >>> type(opt).__name__, opt.param_groups[0]["block_size"]
    ('DASH', 2)
    """
    if isinstance(config, (str, Path)):
        config = read_yaml(Path(config))
    if not isinstance(config, Mapping):
        raise TypeError(f"config: expected a mapping, got {type(config).__name__}")
    options = dict(config.get("optimizer", config))
    kind = options.pop("type", "dash")
    if kind not in OPTIMIZERS:
        raise ValueError(f"optimizer.type: expected one of {sorted(OPTIMIZERS)}, got {kind!r}")
    build, known = _optimizer(OPTIMIZERS[kind]), option_names(kind)
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.6)
            hint = f"did you mean {near[0]!r}?" if near else f"{kind} has {sorted(known)}"
            raise TypeError(f"optimizer.{name}: {kind} has no such option; {hint}")
    return build(params, **{name: as_number(value) for name, value in options.items()})


def _optimizer(kind: type[Optimizer] | str) -> Callable[..., Optimizer]:
    """Return the class, imported if it is someone else's."""
    if not isinstance(kind, str):
        return kind
    try:
        import pytorch_optimizer
    except ImportError as error:
        raise ImportError(
            f"optimizer.type: {kind} is pytorch-optimizer's, which needs the extra 'bench': pip install 'matroots[bench]'"
        ) from error
    found: Callable[..., Optimizer] = getattr(pytorch_optimizer, kind)
    return found


def read_yaml(path: Path) -> Any:
    """Return what a YAML file holds; see :func:`parse_yaml`."""
    _yaml()  # what to install is said before a file is missed
    return parse_yaml(path.read_text(encoding="utf-8"))


def parse_yaml(text: str) -> Any:
    """Return what a YAML text holds, of plain values only.

    Raises:
        ValueError: for what is no YAML, a key that stands twice in a mapping, of which one would be lost, and a value that holds itself.
        ImportError: without the extra ``config``.
    """
    yaml = _yaml()
    try:
        _refuse_lost(yaml.compose(text, yaml.SafeLoader), ())
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error


def _yaml() -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ImportError(
            "config: reading YAML needs the extra 'config': pip install 'matroots[config]'"
        ) from error
    return yaml


def _refuse_lost(node: Any, above: tuple[Any, ...]) -> None:
    """Raise for keys that stand twice in a mapping of a YAML text, and for nodes that are below themselves."""
    if not isinstance(getattr(node, "value", None), list):
        return
    if node in above:
        raise ValueError(f"line {node.start_mark.line + 1}: a value that holds itself")
    inside = node.value
    if inside and isinstance(inside[0], tuple):
        names = [(key.tag, key.value) for key, _ in inside if isinstance(key.value, str)]
        for i, (_, name) in enumerate(names):
            if names[i] in names[:i]:
                raise ValueError(f"line {node.start_mark.line + 1}: the key {name!r} stands twice")
        inside = [value for _, value in inside]
    for one in inside:
        _refuse_lost(one, (*above, node))


def as_number(value: Any) -> Any:
    """Return a number that YAML 1.1 takes for a string (``1e-3`` has no point) as one; other strings as they are."""
    if isinstance(value, str) and value[:1] in "+-.0123456789" and "/" not in value:
        for kind in (int, float):
            try:
                return kind(value)
            except ValueError:
                continue
    if isinstance(value, str) and value.lstrip("+.").lower() in ("inf", "infinity"):
        return float("inf")
    if isinstance(value, list):
        return tuple(as_number(element) for element in value)
    if isinstance(value, Mapping):
        return {key: as_number(element) for key, element in value.items()}
    return value
