# SPDX-License-Identifier: Apache-2.0
"""Which parameters of a model are preconditioned, and which are not: what experience says, written into parameter groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor, nn

_EMBEDDINGS: Final = (nn.Embedding, nn.EmbeddingBag)
_HEADS: Final = frozenset(
    {"head", "lm_head", "output", "classifier", "fc", "logits", "unembed", "output_layer", "score"}
)
_ALWAYS_HEADS: Final = frozenset({"lm_head", "unembed"})
_WHY: Final = {
    "matrices": "weights of two and more dimensions: preconditioned",
    "embeddings": "one row for each symbol, few of them touched in a step: AdamW",
    "heads": "one row for each class, often as many as symbols: AdamW",
    "vectors": "norms, biases, scalars: AdamW without weight decay",
}


def param_groups(
    model: nn.Module,
    *,
    weight_decay: float = 0.0,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    verbose: bool = True,
) -> list[dict[str, Any]]:
    """Return parameter groups for :class:`DASH`, and print what goes where.

    Embeddings and heads (the last linear layer if it has one of the usual names, ``lm_head`` anywhere, or one that shares its weight with an embedding) go to AdamW, norms, biases and other vectors to
    AdamW without weight decay, everything else is preconditioned.

    Args:
        model: its parameters with ``requires_grad``, each once, with their names.
        weight_decay: of all groups but the vectors'.
        overrides: options for one of the kinds "matrices", "embeddings", "heads", "vectors", e.g. ``{"heads": {"algorithm": "dash"}}``.
        verbose: print a table.

    Raises:
        ValueError: for a kind that is none of these, or a model without parameters.

    >>> model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4))
    >>> [(g["name"], g["algorithm"], len(g["params"])) for g in param_groups(model, verbose=False)]
    [('matrices', 'dash', 1), ('embeddings', 'adamw', 1), ('vectors', 'adamw', 1)]
    """
    unknown = sorted(set(overrides or {}) - set(_WHY))
    if unknown:
        raise ValueError(f"overrides: expected kinds among {sorted(_WHY)}, got {unknown[0]!r}")
    kinds = _kinds(model)
    if not kinds:
        raise ValueError("model: has no parameters that require gradients")
    groups = []
    for kind, why in _WHY.items():
        named = [(name, param) for name, param in model.named_parameters() if kinds.get(param) == kind]
        if not named:
            continue
        group = {
            "params": named,
            "name": kind,
            "algorithm": "dash" if kind == "matrices" else "adamw",
            "weight_decay": 0.0 if kind == "vectors" else weight_decay,
            **(overrides or {}).get(kind, {}),
        }
        groups.append(group)
        if verbose:
            count = sum(param.numel() for _, param in named)
            print(f"{kind} ({len(named)} parameters, {count:,} elements; {why}):")
            print("".join(f"    {name} {tuple(param.shape)}\n" for name, param in named), end="")
    return groups


def _kinds(model: nn.Module) -> dict[Tensor, str]:
    """Return the kind of each parameter that requires a gradient; the first module that has it decides."""
    embeddings = {
        param
        for module in model.modules()
        if isinstance(module, _EMBEDDINGS)
        for param in module.parameters(recurse=False)
    }
    kinds: dict[Tensor, str] = {}
    last_layer = [module for module in model.modules() if isinstance(module, nn.Linear)][-1:]
    for path, module in model.named_modules():
        last = path.rpartition(".")[2]
        for param in module.parameters(recurse=False):
            if not param.requires_grad or param in kinds:
                continue
            if param in embeddings:
                kinds[param] = "embeddings"
            elif param.ndim < 2:
                kinds[param] = "vectors"
            elif last in _ALWAYS_HEADS or (last in _HEADS and module in last_layer):
                kinds[param] = "heads"
            else:
                kinds[param] = "matrices"
    return kinds
