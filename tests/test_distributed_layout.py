# SPDX-License-Identifier: Apache-2.0
"""Every element has one owner and reaches all holders; the work, the state and the traffic are shared as promised."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_jobs import farthest, gathered
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.flop_counter import FlopCounterMode

from dash_optim import DASH
from dash_optim.balance import assign, items_of
from dash_optim.checks import route
from dash_optim.distributed_layout import Holding, Layout, chunk_rows, parts_of

SHAPES = [
    (5, 7),
    (16, 8),
    (1, 9),
    (9, 1),
    (3, 4, 5),
    (13,),
    (),
    (0, 4),
    (24, 1, 3),
    (2, 2, 2, 2),
    (1, 1),
    (30, 2),
]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    shapes=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=5),
    block_size=st.integers(1, 9),
    ranks=st.integers(1, 5),
    sharded=st.booleans(),
    options=st.sampled_from([{}, {"nd": "tensor"}, {"one_d": "dash"}, {"algorithm": "adamw"}]),
)
def test_every_element_has_one_owner_and_reaches_every_holder(
    shapes: list[tuple[int, ...]], block_size: int, ranks: int, sharded: bool, options: dict[str, Any]
) -> None:
    """Owners send numbers that say which element they are; holders have each of theirs once."""
    params = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    opt = DASH(params, block_size=block_size, **options)
    geometries = [route(opt.param_groups[0], param) for param in params]
    rows = [tuple(chunk_rows(s[0], ranks)) if sharded and s else None for s in shapes]
    items = items_of(opt.param_groups, geometries)
    parts = parts_of(items, assign(items, ranks), geometries, shapes)
    layout = Layout(
        tuple(Holding(s, g, r) for s, g, r in zip(shapes, geometries, rows, strict=True)),
        tuple(map(tuple, parts)),
    )
    numbers = [torch.arange(1.0, param.numel() + 1).reshape(param.shape) for param in params]
    held = [
        [_rows_of(number, h.held(r)).clone() for number, h in zip(numbers, layout.holdings, strict=True)]
        for r in range(ranks)
    ]
    owned = [[torch.zeros(part.shape) for part in own] for own in parts]
    for owner in range(ranks):
        for holder in range(ranks):
            for cell in layout.cells(owner, holder):
                seen, _ = layout.holdings[cell.param].seen(held[holder][cell.param])
                owned[owner][cell.part][cell.own] = seen[cell.held]
    pairs = list(zip(chain.from_iterable(owned), chain.from_iterable(parts), strict=True))
    found = [
        sorted(chain.from_iterable(t.flatten().tolist() for t, part in pairs if part.param == i))
        for i in range(len(params))
    ]
    assert found == [sorted(number.flatten().tolist()) for number in numbers]
    for holder in range(ranks):
        counts = [torch.zeros_like(t) for t in held[holder]]
        for owner in range(ranks):
            for cell in layout.cells(owner, holder):
                layout.holdings[cell.param].seen(counts[cell.param])[0][cell.held] += 1
        assert all(bool((count == 1).all()) for count in counts)


def _rows_of(t: Tensor, rows: tuple[int, int]) -> Tensor:
    return t[rows[0] : rows[1]] if t.ndim else t


def _drawn(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    shapes = draw.sample(SHAPES, draw.randint(1, 4))
    options: dict[str, Any] = {
        "block_size": draw.choice([1, 2, 3, 5, 8, 100]),
        "update_freq": draw.randint(1, 3),
    }
    options |= draw.choice(
        [{}, {"p": 4}, {"p": "8/3"}, {"grafting": "none"}, {"betas": (0.0, 0.9)}, {"momentum": 0.9}]
    )
    options |= draw.choice(
        [{}, {"nd": "tensor"}, {"one_d": "dash"}, {"grafting_scope": "layer"}, {"max_factor_dim": 6}]
    )
    return {
        "shapes": shapes,
        "sharded": draw.random() < 0.5,
        "options": {"lr": 0.1, "weight_decay": 0.1, **options},
    }


def _steps(shapes: list[tuple[int, ...]], seed: int) -> Iterator[list[Tensor | None]]:
    generator = torch.Generator().manual_seed(seed)
    draw = random.Random(seed)
    for _ in range(4):
        gradients = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
        yield [None if draw.random() < 0.2 else gradient for gradient in gradients]


def _cases(rank: int, world: int, seeds: range) -> list[list[Tensor]]:
    """Take four steps of random gradients, some of them missing, with random shapes and options."""
    mesh = init_device_mesh("cpu", (world,))
    found = []
    for seed in seeds:
        case = _drawn(seed)
        params = []
        for i, shape in enumerate(case["shapes"]):
            whole = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(i))
            shared = case["sharded"] and bool(shape)
            params.append(nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]) if shared else whole))
        opt = DASH(params, process_group=mesh.get_group(), **case["options"])
        for gradients in _steps(case["shapes"], seed):
            for param, gradient in zip(params, gradients, strict=True):
                placed = gradient is not None and hasattr(param, "placements")
                param.grad = distribute_tensor(gradient, mesh, [Shard(0)]) if placed else gradient
            opt.step()
        found.append([gathered(param) for param in params])
    return found


@pytest.mark.parametrize("world", [2, 3, 4])
def test_random_shapes_and_options_as_in_one_process(world: int) -> None:
    seeds = range(100 * world, 100 * world + 25)
    answers = on_ranks(world, _cases, seeds)
    for number, seed in enumerate(seeds):
        case = _drawn(seed)
        params = [
            nn.Parameter(torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(i)))
            for i, shape in enumerate(case["shapes"])
        ]
        opt = DASH(params, **case["options"])
        for gradients in _steps(case["shapes"], seed):
            for param, gradient in zip(params, gradients, strict=True):
                param.grad = gradient
            opt.step()
        for found in answers:
            expected = {str(i): param.detach() for i, param in enumerate(params)}
            assert farthest({str(i): t for i, t in enumerate(found[number])}, expected) < 1e-10, case


class _Traffic:
    """Counts the bytes that a rank receives."""

    def __init__(self) -> None:
        self.received = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count while the body runs."""
        kept = {
            name: getattr(dist, name)
            for name in ("broadcast", "all_reduce", "all_to_all_single", "all_gather_object")
        }

        def broadcast(tensor: Tensor, src: int, **keywords: Any) -> Any:
            self.received += tensor.nbytes * (src != dist.get_rank())
            return kept["broadcast"](tensor, src, **keywords)

        def all_reduce(tensor: Tensor, *args: Any, **keywords: Any) -> Any:
            self.received += tensor.nbytes
            return kept["all_reduce"](tensor, *args, **keywords)

        def all_to_all_single(output: Tensor, *args: Any, **keywords: Any) -> Any:
            self.received += output.nbytes
            return kept["all_to_all_single"](output, *args, **keywords)

        def all_gather_object(*args: Any, **keywords: Any) -> None:
            raise AssertionError("a step that is well gathers no objects")

        for function in (broadcast, all_reduce, all_to_all_single, all_gather_object):
            setattr(dist, function.__name__, function)
        try:
            yield
        finally:
            for name, function in kept.items():
                setattr(dist, name, function)


def _measured(
    rank: int, world: int, wire: torch.dtype | None, kind: torch.dtype
) -> tuple[int, int, int, int, int]:
    """Return bytes received in a step, of parameters, of state; operations of a step with roots, and those of all ranks."""
    params = [
        nn.Parameter(torch.zeros(shape, dtype=kind))
        for shape in [(96, 64)] * 6 + [(64, 64), (300, 64), (64,)]
    ]
    shared = {"process_group": dist.group.WORLD, "communication_dtype": wire} if world > 1 else {}
    opt = DASH(params, block_size=32, method="minimax", refresh_young=False, **shared)  # type: ignore[arg-type]
    opt.param_groups[0]["update_freq"] = 1
    traffic = _Traffic()
    for step in range(3):
        for param in params:
            param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(step)).to(kind)
        with traffic.counted() if step == 2 else FlopCounterMode(display=False) as counter:  # type: ignore[union-attr]
            opt.step()
        if step == 1:
            operations = counter.get_total_flops()
    state = opt.state_dict()["state"]
    pieces = [v for own in state.values() for v in own.values() if isinstance(v, Tensor)]
    held = sum(sum(p.nbytes for _, p in v.shards) if hasattr(v, "shards") else v.nbytes for v in pieces)
    return traffic.received, sum(p.nbytes for p in params), held, operations, rank


@pytest.mark.parametrize(
    ("wire", "kind"), [(None, torch.float32), (None, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_work_and_state_fall_with_the_ranks_and_no_more_travels_than_parameters(
    wire: torch.dtype | None, kind: torch.dtype
) -> None:
    _, _, whole_state, operations, _ = _measured(0, 1, None, kind)
    answers = on_ranks(4, _measured, wire, kind)
    for received, parameters, held, own, _ in answers:
        assert own <= 0.3 * operations
        assert held <= 0.3 * whole_state
        assert received <= 1.05 * parameters * (0.5 if wire is not None else 1)
    assert sum(own for _, _, _, own, _ in answers) == operations
