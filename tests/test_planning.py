# SPDX-License-Identifier: Apache-2.0
"""What is planned is what a real optimizer then allocates and computes: measured on its state, and by torch's own counter of operations."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from dash_optim import DASH, Plan, param_groups, plan_block_size
from dash_optim.grafting import Adam
from dash_optim.planning import POLE, PlanRow
from matroots import EVD, Chebyshev, CoupledNewton, Minimax, NewtonDB, Rational

SHAPES = [(33, 20), (64, 64), (7,), (), (1, 40), (6, 4, 3, 3), (5, 2, 4), (50, 3), (0, 4), (33, 20)]
SIZES = (7, math.inf)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"grafting": None},
    {"grafting": "sgd", "betas": (0.0, 0.95)},
    {"grafting": "adagrad", "momentum": 0.9, "nesterov": True},
    {"grafting": Adam(beta2=0.9), "betas": (0.0, 0.9)},
    {"one_d": "dash", "nd": "tensor"},
    {"max_factor_dim": 32, "stacking": "layer"},
    {"max_factor_dim": 0},
    {"factor_dtype": torch.float64, "stacking": "layer", "max_batch": 3},
    {"algorithm": "adamw"},
    {"p": 2, "refresh": "certified", "rel_damping": 1e-4},
]


def held(opt: DASH) -> int:
    return sum(
        value.numel() * value.element_size()
        for own in opt.state.values()
        for value in own.values()
        if isinstance(value, Tensor)
    )


def with_gradients(opt: DASH) -> DASH:
    torch.manual_seed(0)
    for group in opt.param_groups:
        for param in group["params"]:
            param.grad = torch.randn_like(param)
    return opt


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_planned_state_is_the_state(options: dict[str, Any], dtype: torch.dtype) -> None:
    params = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    plan = plan_block_size(params, block_sizes=SIZES, **options)
    for row in plan.rows:
        opt = with_gradients(DASH(params, block_size=row.block_size, **options))
        opt.step()
        assert row.state_bytes == row.fullest_bytes == held(opt) == sum(row.kinds.values())
        assert sum(layer.state_bytes for layer in row.layers) == row.state_bytes
        assert row.blocks == len(opt.diagnostics().blocks) == sum(layer.blocks for layer in row.layers)
        opt.state.clear()


def test_shapes_modules_groups_and_meta_parameters_are_planned_alike() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 48), nn.Linear(48, 16, bias=False))

    module = build()
    with torch.device("meta"):
        shadow = build()
    groups = param_groups(module, verbose=False)
    opt = with_gradients(DASH(groups, block_size=16))
    opt.step()
    for given in (module, shadow, param_groups(shadow, verbose=False)):
        row = plan_block_size(given, block_sizes=[16]).rows[0]
        assert row.state_bytes == held(opt)
        assert {layer.kind for layer in row.layers} == {"*.weight", "*.bias"}
    shapes = {name: tuple(param.shape) for name, param in module.named_parameters()}
    whole = [
        plan_block_size(given).rows[-1] for given in (shapes, module.named_parameters(), shadow.parameters())
    ]
    assert len({row.state_bytes for row in whole}) == 1
    assert all(param.device.type == "meta" for param in shadow.parameters())


def test_a_group_keeps_its_own_block_size_and_a_tied_parameter_counts_once() -> None:
    a, b = nn.Parameter(torch.zeros(32, 32)), nn.Parameter(torch.zeros(32, 32))
    rows = plan_block_size([{"params": [a], "block_size": 8}, {"params": b}], block_sizes=(4, 32)).rows
    assert [row.blocks for row in rows] == [16 + 64, 16 + 1]
    assert plan_block_size(iter([("x", a)]), block_sizes=(32,)).rows[0].layers[0].kind == "x"


def in_place(like: torch.Size, a: torch.Size, b: torch.Size, *args: Any, **keywords: Any) -> int:
    """Operations of a product that is added to what is there, which torch counts only where it makes a new tensor."""
    return 2 * a[0] * a[1] * a[2] * b[2]


@pytest.mark.parametrize("options", [{}, {"p": 2, "nd": "tensor"}, {"one_d": "dash", "max_factor_dim": 32}])
def test_operations_of_a_step_are_those_that_torch_counts(options: dict[str, Any]) -> None:
    params = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    for row in plan_block_size(params, block_sizes=(8, 32), **options).rows:
        opt = with_gradients(
            DASH(params, block_size=row.block_size, refresh_young=False, refresh="interval", **options)
        )
        opt.step()  # computes the roots
        with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.baddbmm_: in_place}) as counter:
            opt.step()
        assert counter.get_total_flops() == row.step_operations
        opt.state.clear()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"p": 2, "rel_damping": 1e-4},
        {"p": 3, "tol": 1e-5},
        {"method": Minimax(floor=1e-5), "matmul_dtype": "fp16x2"},
        {"method": NewtonDB(steps=10), "scaling": "power"},
        {"method": CoupledNewton(steps=8)},
        {"method": Chebyshev(degree=60, floor=1e-3)},
    ],
    ids=str,
)
def test_products_of_a_refresh_are_those_that_are_computed(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import dash_optim.refresh as module

    spent = []
    solve = module.inv_root_ex

    def counted(A: Tensor, *args: Any, **keywords: Any) -> Any:
        result = solve(A, *args, **keywords)
        poles = result.steps.sum() if isinstance(keywords["method"], Rational) else 0
        spent.append(2.0 * A.shape[-1] ** 3 * float(result.matmuls.sum() + POLE * poles))
        return result

    monkeypatch.setattr(module, "inv_root_ex", counted)
    params = [nn.Parameter(torch.zeros(shape)) for shape in [(64, 64), (40, 20), (9, 64)]]
    row = plan_block_size(params, block_sizes=[32], update_freq=4, **options).rows[0]
    opt = with_gradients(DASH(params, block_size=32, update_freq=4, **options))
    opt.step()
    assert row.refresh_operations == pytest.approx(sum(spent), rel=1e-12)
    assert sum(spent) > 0
    assert row.mean_operations == pytest.approx(row.step_operations + row.refresh_operations / 4)


def test_mean_operations_are_those_of_a_long_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the ``4 update_freq``-th gradient on; before, factors are young and more roots are computed."""
    import dash_optim.refresh as module

    solve, roots = module.inv_root_ex, [0]

    def counted(A: Tensor, *args: Any, **keywords: Any) -> Any:
        roots[-1] += len(A)
        return solve(A, *args, **keywords)

    monkeypatch.setattr(module, "inv_root_ex", counted)
    param = nn.Parameter(torch.zeros(32, 32))
    opt = with_gradients(DASH([param], block_size=16, update_freq=5))
    for _ in range(60):
        opt.step()
        roots.append(0)
    factors = 2 * 4
    assert sum(roots[20:60]) == 40 / 5 * factors
    assert sum(roots[:20]) > 2 * 20 / 5 * factors
    young, old = (
        plan_block_size([param], block_sizes=[16], update_freq=5, refresh_young=young).rows[0]
        for young in (True, False)
    )
    assert young == old
    assert young.mean_operations == pytest.approx(young.step_operations + young.refresh_operations / 5)
    assert "in the long run" in str(PlanRow.__doc__)


def test_poles_and_eigendecompositions_are_counted_in_operations() -> None:
    """Of one 32 x 32 factor a side: 9 n^3 and a product for an eigendecomposition, n^3 for a pole; unknown where the method decides later."""

    def refresh(**options: Any) -> float:
        return plan_block_size({"w": (32, 32)}, block_sizes=[32], **options).rows[0].refresh_operations

    for options in ({"method": "evd"}, {"method": EVD()}, {"rel_damping": 0.0}):
        assert refresh(**options) == 2 * 11 * 32**3
    assert refresh(method=Rational(poles=6)) == 2 * 6 * 32**3
    assert refresh(p="8/3") in [2 * poles * 32**3 for poles in range(3, 10)]
    assert math.isnan(refresh(rel_damping=0.0, tol=1e-3))
    mean = plan_block_size({"w": (32, 32)}, refresh="certified").rows[0].mean_operations
    assert math.isnan(mean)


def test_memory_marks_the_largest_block_size_that_fits() -> None:
    shapes = {"a": (256, 16)}
    free = plan_block_size(shapes, block_sizes=(16, 64, 256))
    assert [row.fits for row in free.rows] == [None] * 3
    assert free.largest is None
    sizes = [row.state_bytes for row in free.rows]
    assert sizes == sorted(sizes)
    for memory, expected in (
        (sizes[0] - 1, None),
        (sizes[0], 16),
        (sizes[1], 64),
        (sizes[2] - 1, 64),
        (1e9, 256),
    ):
        plan = plan_block_size(shapes, memory=memory, block_sizes=(16, 64, 256))
        assert (None if plan.largest is None else plan.largest.block_size) == expected
        assert str(plan).count("fits") == sum(size <= memory for size in sizes)
        assert str(plan).count("too large") == sum(size > memory for size in sizes)


def test_factors_and_roots_take_the_same_memory_at_every_block_size_up_to_the_shorter_side() -> None:
    """4 elements for each of the parameter's; for a block r times as long as wide 2 (r + 1/r)."""
    plan = plan_block_size({"w": (512, 128)}, block_sizes=(16, 64, 128, 256, 512))
    each = [(row.kinds["factor"] + row.kinds["root"]) / (4 * 512 * 128) for row in plan.rows]
    assert each == pytest.approx([4, 4, 4, 2 * (2 + 1 / 2), 2 * (4 + 1 / 4)])


def test_the_table_is_readable() -> None:
    plan = plan_block_size(
        {"layer.0.up": (300, 100), "layer.1.up": (300, 100), "bias": (7,)},
        method="auto",
        rel_damping=0.0,
        tol=1.0,
    )
    text = str(plan)
    assert isinstance(plan, Plan)
    assert text.count("2 of 300x100 layer.*.up") == 2
    assert "bias" not in text
    assert "whole" in text
    assert "?" in text
    assert len({len(line) for line in text.splitlines()}) == 2


@pytest.mark.parametrize(
    ("error", "match", "keywords"),
    [
        (TypeError, "block_size: is what is planned", {"block_size": 64}),
        (TypeError, "blok", {"blok": 1}),
        (ValueError, "block_sizes: expected at least one", {"block_sizes": ()}),
        (ValueError, "block_size: expected an integer", {"block_sizes": (0,)}),
        (TypeError, "block_sizes: expected several", {"block_sizes": 64}),
        (ValueError, "memory: expected", {"memory": 0}),
        (TypeError, "memory: expected", {"memory": "1 GB"}),
        (ValueError, "grafting", {"grafting": "adamm"}),
    ],
)
def test_what_cannot_be_planned_is_refused(
    error: type[Exception], match: str, keywords: dict[str, Any]
) -> None:
    with pytest.raises(error, match=match):
        plan_block_size({"w": (8, 8)}, **keywords)


def test_nothing_is_allocated() -> None:
    """A state of half a terabyte: six numbers for each element, and the records of the factors."""
    side = 2**17
    (row,) = plan_block_size({"w": (side, side)}, block_sizes=[8192], max_factor_dim=math.inf).rows
    assert row.state_bytes == 4 * 6 * side**2 + 2 * (side // 8192) ** 2 * 80 + 4


@pytest.mark.parametrize(
    "model", [{"w": 8}, {"w": "8x8"}, {"w": (8, 2.5)}, {"w": torch.zeros(2, 2)}, torch.zeros(2), [8]]
)
def test_what_is_no_model_is_named(model: Any) -> None:
    with pytest.raises(TypeError, match="model: expected"):
        plan_block_size(model)


def test_a_model_without_parameters_is_refused() -> None:
    for nothing in ({}, [], nn.Identity()):
        with pytest.raises(ValueError, match="model: has no parameters"):
            plan_block_size(nothing)
