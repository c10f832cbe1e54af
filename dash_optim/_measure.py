# SPDX-License-Identifier: Apache-2.0
"""The constants of the cost model that this machine has, measured in a few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch

from dash_optim.cluster import Machine
from dash_optim.cost import EIGENDECOMPOSITION, products_per_root
from dash_optim.options import Recipe
from matroots import inv_root_ex
from matroots._exponent import Exponent

_CPU_BATCH = 2**24  # bytes of the matrices that are worked on at once, as many as a stack's roots are
_DEVICE_BATCH = 2**28
_BYTES = 2**28  # of each vector of the pass over memory: no cache holds it
_REPEATS = 5
_SECONDS = 3.0  # that one measurement may take, from when no further repeat is begun


def measured(machine: Machine, recipe: Recipe, p: Exponent, n: int, device: torch.device) -> Machine:
    """Return the machine with the rates of products and roots ``(n, n)`` in float32, and of memory, as measured on a device; the link is left as it was."""
    batch = max(1, (_CPU_BATCH if device.type == "cpu" else _DEVICE_BATCH) // (4 * n**2))
    generator = torch.Generator(device="cpu").manual_seed(0)
    G = torch.randn(batch, n, n, generator=generator).to(device)
    A = G @ G.mT / n
    out = torch.empty_like(G)
    product = _seconds(lambda: torch.bmm(G, G, out=out), device)
    keywords = recipe.keywords(p, n, torch.float32, device)
    root = _seconds(lambda: inv_root_ex(A, p, damping=recipe.damping, **keywords), device)
    products = products_per_root(recipe, p, n, torch.float32, device)
    products = EIGENDECOMPOSITION + 1 if products != products else products
    x = torch.zeros(_BYTES // 4, device=device)
    y = torch.zeros_like(x)
    memory = _seconds(lambda: torch.add(x, 1.0, out=y), device)
    return replace(
        machine,
        flops_per_s=batch * 2.0 * n**3 / product,
        root_flops_per_s=batch * 2.0 * n**3 * products / root,
        bytes_per_s=2.0 * _BYTES / memory,
    )


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the median time of a piece of work, after one that is not timed."""
    times: list[float] = []
    work()
    while len(times) < _REPEATS and sum(times) < _SECONDS:
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - start)
    return median(times)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()
