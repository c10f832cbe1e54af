# SPDX-License-Identifier: Apache-2.0
"""What is planned for a cluster is what optimizers really keep, what is counted element by element, and what the formulas give by hand."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dash_optim import DASH, _measure, param_groups, plan_block_size
from dash_optim.__main__ import main
from dash_optim._measure import measured
from dash_optim._plan_cli import counted, estimated, head
from dash_optim._shapes import PUBLISHED, optimizer_of
from dash_optim.balance import assign
from dash_optim.blocks import block_view, matrix_view, pieces_of
from dash_optim.cluster import ClusterRow, Machine, spread
from dash_optim.cost import products_per_root
from dash_optim.diagnostics import state_bytes
from dash_optim.options import recipe_of
from dash_optim.training.model import PRESETS, Llama
from dash_optim.training.settings import read_job
from dash_optim.workload import Workload, workload
from matroots import Rational
from matroots._command import InputError

SHAPES = [(33, 20), (64, 64), (7,), (), (1, 40), (6, 4, 3, 3), (5, 2, 4), (50, 3), (0, 4), (33, 20)]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"grafting": None},
    {"grafting": "sgd", "betas": (0.0, 0.95)},
    {"grafting": "adagrad", "momentum": 0.9, "nesterov": True},
    {"one_d": "dash", "nd": "tensor"},
    {"max_factor_dim": 32, "stacking": "layer"},
    {"max_factor_dim": 0},
    {"factor_dtype": torch.float64},
    {"algorithm": "adamw"},
    {"grafting_scope": "layer"},
]
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def real(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32, **options: Any) -> DASH:
    """An optimizer that has taken a step."""
    opt = DASH([nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes], **options)
    torch.manual_seed(0)
    for param in opt.param_groups[0]["params"]:
        param.grad = torch.randn_like(param)
    opt.step()
    return opt


def planned(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32, **options: Any) -> Workload:
    """The same without memory."""
    params = [nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")) for shape in shapes]
    return workload(DASH(params, **options).param_groups, torch.device("cpu"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_bytes_of_state_are_those_that_an_optimizer_keeps(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    for size in (7, math.inf):
        opt = real(SHAPES, dtype, block_size=size, **options)
        work = planned(SHAPES, dtype, block_size=size, **options)
        held = {name: n for name, n in state_bytes(opt.state).items() if n}
        assert work.state == held
        row = spread(work, 1, Machine())
        assert row.state == row.state_mean == sum(held.values())


def bytes_of_ranks(opt: DASH, work: Workload, ranks: int) -> list[int]:
    """What each rank would keep of an optimizer's real tensors."""
    params = opt.param_groups[0]["params"]
    held = [4 * len(params)] * ranks
    for item, owner in zip(work.items, assign(work.items, ranks).owners, strict=True):
        own = opt.state[params[item.param]]
        if item.blocks is None:
            parts = [own[name].flatten()[item.start : item.stop] for name in ("exp_avg", "exp_avg_sq")]
        else:
            name = work.geometries[item.param].classes[item.blocks].name
            parts = [value[item.start] for key, value in own.items() if key.startswith(f"{name}.")]
        held[owner] += sum(part.nbytes for part in parts)
    return held


@pytest.mark.parametrize("ranks", [2, 5])
def test_each_rank_keeps_what_its_items_have(ranks: int) -> None:
    work = planned(SHAPES, block_size=9, nd="tensor")
    held = bytes_of_ranks(real(SHAPES, block_size=9, nd="tensor"), work, ranks)
    row = spread(work, ranks, Machine())
    assert row.state == max(held)
    assert row.state_mean == pytest.approx(sum(held) / ranks)


@pytest.mark.parametrize("options", [{}, {"p": 4, "update_freq": 3}, {"max_factor_dim": 32}], ids=str)
def test_operations_are_those_of_a_plan(options: dict[str, Any]) -> None:
    work = planned(SHAPES, block_size=16, **options)
    params = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    row = plan_block_size(params, block_sizes=[16], **options).rows[0]
    assert work.each("step").sum() == row.step_operations
    assert work.each("refresh").sum() == pytest.approx(row.refresh_operations, rel=1e-12)
    assert (work.each("step") + work.each("often")).sum() == pytest.approx(row.mean_operations, rel=1e-12)
    assert work.blocks.sum() == row.blocks


def owners_of_elements(work: Workload, owners: tuple[int, ...]) -> list[Tensor]:
    """The owner of each element of parameters that are all preconditioned, written block by block."""
    found = [torch.full(param.shape, -1) for _, param in work.members]
    at = 0
    for t, geometry in zip(found, work.geometries, strict=True):
        for blocks in geometry.classes:
            view, is_view = matrix_view(t, geometry.view)
            assert is_view
            (piece,) = pieces_of(blocks.grid, blocks.count)
            flat = torch.tensor(owners[at : at + blocks.count]).reshape(blocks.grid)
            block_view(view, blocks, piece).copy_(
                flat.reshape(*blocks.grid, *(1,) * len(blocks.shape)).expand(*blocks.grid, *blocks.shape)
            )
            at += blocks.count
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("nd", ["matrix", "tensor"])
def test_moved_bytes_are_those_of_elements_that_lie_elsewhere(ranks: int, nd: str) -> None:
    shapes = [(33, 20), (1, 40), (6, 4, 3, 3), (5, 2, 4), (50, 3), (1, 6, 4)]
    work = planned(shapes, torch.bfloat16, block_size=6, nd=nd)
    owned = owners_of_elements(work, assign(work.items, ranks).owners)
    sent, received = np.zeros(ranks), np.zeros(ranks)
    for (_, param), owner in zip(work.members, owned, strict=True):
        assert (owner >= 0).all()
        place = torch.cat(
            [torch.full_like(part, r) for r, part in enumerate(owner.chunk(ranks))]
        )  # as Shard(0) does
        for rank in range(ranks):
            sent[rank] += 2 * ((place == rank) & (owner != rank)).sum()
            received[rank] += 2 * ((place != rank) & (owner == rank)).sum()
        assert param.dtype.itemsize == 2
    assert spread(work, ranks, Machine()).moved == max(sent.max(), received.max())


def test_replicated_parameters_receive_what_they_do_not_own() -> None:
    work = planned([(24, 24), (10,)], block_size=8)
    plan = assign(work.items, 4)
    own = [4 * n for n in plan.elements]
    row = spread(work, 4, Machine())
    assert row.gathered == max(4 * (24 * 24 + 10) - n for n in own)
    assert spread(work, 1, Machine()).gathered == 0


def test_runs_are_counted_within_parameters() -> None:
    """Four ranks have four blocks of each parameter's sixteen: one run each, and the vectors' owner one more for each of those."""
    work = planned([(32, 32), (32, 32), (3,)], block_size=8)
    row = spread(work, 4, Machine())
    mine = list(assign(work.items, 4).owners)
    labels = [(owner, item.param) for owner, item in zip(mine, work.items, strict=True)]
    runs = [label for i, label in enumerate(labels) if i == 0 or label != labels[i - 1]]
    assert row.runs == max([owner for owner, _ in runs].count(rank) for rank in range(4))
    assert row.blocks == 8
    assert spread(work, 1, Machine()).runs == 3  # one owner's runs end where parameters do


def test_times_follow_from_the_constants() -> None:
    """Three blocks of 8 x 8 on two ranks: the first owns two of them, the second receives their updates."""
    work = planned([(24, 8)], block_size=8, method=Rational(poles=4), update_freq=5)
    machine = Machine(
        flops_per_s=7.0, root_flops_per_s=11.0, bytes_per_s=13.0, link_bytes_per_s=17.0, latency_s=0.5
    )
    step, roots = 4 * 64 * 16, 2 * 4 * 8**3
    size = 4 * 64
    traffic = (3 + 2 * 2 + 3 * 2) * size  # parameter and gradient, two averages, two factors and roots
    row = spread(work, 2, machine)
    plain = 2 * (step / 7 + traffic / 13)
    assert row.plain_s == pytest.approx(plain)
    assert row.refresh_s == pytest.approx(plain + 2 * roots / 11)
    assert row.mean_s == pytest.approx(plain + 2 * roots / 11 / 5)
    assert row.gather_s == pytest.approx(0.5 + 2 * size / 17)
    # of 24 rows the first rank has 12 and owns 16
    assert row.move_s == pytest.approx(2 * (0.5 + 4 * 8 * 4 / 17))
    assert spread(work, 1, machine).gather_s == 0


def test_adamw_is_a_pass_over_memory() -> None:
    work = planned([(100,)], torch.bfloat16)
    row = spread(work, 1, Machine(bytes_per_s=1e3))
    assert row.plain_s == row.mean_s == pytest.approx(100 * (3 * 2 + 4 * 4) / 1e3)
    assert row.blocks == 0


def test_nothing_is_spread() -> None:
    row = spread(planned([(0, 4)]), 3, Machine())
    assert (row.blocks, row.state, row.gathered, row.moved, row.runs, row.imbalance) == (0, 4, 0, 0, 0, 1.0)


@pytest.mark.parametrize(
    ("name", "parameters"), [("7b", 6_738_415_616), ("70b", 70_553_706_496), ("405b", 405_853_388_800)]
)
def test_published_models_have_their_published_sizes(name: str, parameters: int) -> None:
    """The counts of the models' cards, to the last parameter."""
    assert PUBLISHED[name].parameters == parameters


@pytest.mark.parametrize(
    ("name", "ranks", "options", "most"),
    [
        ("953m", 8, {}, 1.001),
        ("7b", 1024, {}, 1.01),
        ("70b", 1024, {}, 1.01),
        ("405b", 1024, {}, 1.01),
    ],
)
def test_large_models_are_balanced(name: str, ranks: int, options: dict[str, Any], most: float) -> None:
    job = read_job({"optimizer": {"max_factor_dim": math.inf, **options}})
    opt = optimizer_of(job, name, torch.float32)
    work = workload(opt.param_groups, torch.device("cuda"))
    row = spread(work, ranks, Machine())
    assert row.imbalance < most
    if name == "953m":  # by the formula what planning finds on the meta device
        with torch.device("meta"):
            model = Llama(PRESETS[name])
        plan = plan_block_size(model, block_sizes=[1024]).rows[0]
        assert sum(work.state.values()) == plan.state_bytes
        assert work.each("refresh").sum() == pytest.approx(plan.refresh_operations)


def test_sides_without_factors_are_noticed() -> None:
    work = planned([(40, 8), (40, 40), (8, 8), (40,)], max_factor_dim=32, one_d="dash")
    assert (work.partly, work.wholly) == (1, 2)
    text = "\n".join(head(work, "model"))
    assert "3 parameters have sides above max_factor_dim" in text
    assert "2 of them no other" in text
    partly = head(planned([(40, 8)], max_factor_dim=32), "model")[-1]
    assert partly.startswith("Note: 1 parameters have sides above max_factor_dim, which get no factor; ")
    assert "max_factor_dim" not in "\n".join(head(planned([(8, 8)]), "model"))


def test_tables_are_aligned_and_say_what_is_estimated() -> None:
    row = ClusterRow(
        8, 3, 2.5e12, 1.25, 1.125, 3 * 2**30, 2.0**31, 5, 2**20, 2**21, 1e-3, 2.5, 0.25, 0.5, 0.1
    )
    lines = counted([row, row])
    assert lines[0].startswith("Counted")
    assert len({len(line) for line in lines[1:]}) == 1
    assert lines[2].split() == [
        "8",
        "3",
        "2.5",
        "T",
        "1.2500",
        "1.1250",
        "3.0",
        "GiB",
        "2.0",
        "GiB",
        "5",
        "1.0",
        "MiB",
        "2.0",
        "MiB",
    ]
    lines = estimated([row], Machine(), measure=True)
    assert lines[0].startswith("Estimated")
    assert lines[2].split() == [
        "8",
        "1.00",
        "ms",
        "2.50",
        "s",
        "250.00",
        "ms",
        "500.00",
        "ms",
        "750.00",
        "ms",
        "100.00",
        "ms",
        "350.00",
        "ms",
    ]
    assert sum("measured here" in line for line in lines) == 3
    assert sum("assumed" in line for line in lines) == 2


def test_constants_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate of roots is that of the products that the solver says it takes: over one second a root it is their number."""
    monkeypatch.setattr(_measure, "_BYTES", 2**16)
    monkeypatch.setattr(_measure, "_CPU_BATCH", 4 * 32 * 32)
    recipe = recipe_of(DASH([nn.Parameter(torch.zeros(4, 4))]).param_groups[0])
    cpu = torch.device("cpu")
    found = measured(Machine(), recipe, recipe.exponent(2), 32, cpu)
    assert found.link_bytes_per_s == Machine().link_bytes_per_s
    assert found.latency_s == Machine().latency_s
    assert all(1e4 < x < 1e15 for x in (found.flops_per_s, found.root_flops_per_s, found.bytes_per_s))
    calls: list[int] = []

    def a_second(work: Any, device: torch.device) -> float:
        work()
        calls.append(1)
        return 1.0

    monkeypatch.setattr(_measure, "_seconds", a_second)
    found = measured(Machine(), recipe, recipe.exponent(2), 32, cpu)
    assert len(calls) == 3
    products = products_per_root(recipe, recipe.exponent(2), 32, torch.float32, cpu)
    assert (found.flops_per_s, found.root_flops_per_s, found.bytes_per_s) == (
        2 * 32**3,
        2 * 32**3 * products,
        2**17,
    )


def test_the_command_prints_what_is_planned(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "job.yaml"
    config.write_text("optimizer: {type: dash, block_size: 64, update_freq: 4}\nmodel: {preset: 0.5m}\n")
    assert main(["plan", "--config", str(config), "update_freq=5", "--world", "1", "4"]) == 0
    text = capsys.readouterr().out
    with torch.device("meta"):
        model = Llama(PRESETS["0.5m"])
    opt = DASH(param_groups(model, verbose=False), block_size=64, update_freq=5)
    work = workload(opt.param_groups, torch.device("cuda"))
    rows = [spread(work, ranks, Machine()) for ranks in (1, 4)]
    for line in [*head(work, "")[1:], *counted(rows), *estimated(rows, Machine(), measure=False)]:
        assert line in text
    assert text.startswith("0.5m, float32, dash (block_size=64, update_freq=5), roots as on cuda\n")


@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_shapes_are_read_from_files(suffix: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shapes = {"up": [512, 128], "down": [128, 512], "bias": [7]}
    path = tmp_path / f"shapes{suffix}"
    path.write_text(json.dumps(shapes))  # JSON is YAML
    arguments = ["plan", "block_size=128", "device=cpu", "--shapes", str(path), "--world", "2"]
    assert main([*arguments, "--dtype", "bfloat16"]) == 0
    work = planned([(512, 128), (128, 512), (7,)], torch.bfloat16, block_size=128)
    text = capsys.readouterr().out
    for line in [*head(work, "")[1:], *counted([spread(work, 2, Machine())])]:
        assert line in text
    assert work.state["factor"] == 2 * 4 * 2 * 128 * 128 * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--world", "0"], "--world: expected an integer from 1 to"),
        (["--world", "two"], "--world: expected an integer"),
        (["--world", "8", "block_size=64"], "got 'block_size=64'; settings come before --world"),
        ([], "--world"),
        (["--world", "1", "--shapes", "8b"], "--shapes: expected one of 0.5m, "),
        (["--world", "1", "--shapes", "none.json"], "none.json: cannot be read: No such file"),
        (["--world", "1", "--shapes", "{tmp}/broken.json"], "broken.json: cannot be read: Expecting"),
        (["--world", "1", "--shapes", "{tmp}/broken.yaml"], "broken.yaml: cannot be read:"),
        (["--world", "1", "--shapes", "{tmp}/list.json"], "expected a mapping of names to shapes"),
        (["--world", "1", "--shapes", "{tmp}/text.json"], "expected a shape for 'w'"),
        (["--world", "1", "--shapes", "{tmp}/empty.yaml"], "empty.yaml: model: has no parameters"),
        (["--world", "1", "--config", "none.yaml"], "none.yaml: cannot be read"),
        (["model.preset=8b", "--world", "1"], "model.preset: expected one of"),
        (["optimizer=adamw", "--world", "1"], "optimizer.type: expected dash"),
        (["blok_size=64", "--world", "1"], "did you mean 'block_size'?"),
        (["block_size=0", "--world", "1"], "block_size: expected an integer >= 1"),
        (["block_size=0", "--world", "1", "--shapes", "{tmp}/fine.json"], "block_size: expected an integer"),
        (["device=nowhere", "--world", "1"], "training.device: expected a device"),
        (["device=nowhere", "--world", "1", "--measure"], "training.device: expected a device"),
        (["--world", "1", "--flops-per-s", "0"], "--flops-per-s: expected a finite number > 0"),
        (["--world", "1", "--latency-s", "fast"], "--latency-s: expected a finite number > 0"),
        (["--world", "1", "--dtype", "float8"], "--dtype"),
    ],
    ids=str,
)
def test_what_cannot_be_planned_is_said_in_a_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    files = {
        "broken.json": "{",
        "broken.yaml": "[1, ",
        "list.json": "[1]",
        "text.json": '{"w": "8x8"}',
        "empty.yaml": "{}",
        "fine.json": '{"w": [8, 8]}',
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert main(["plan", *(a.replace("{tmp}", str(tmp_path)) for a in arguments)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert message in said.err


def test_other_optimizers_are_refused_with_their_name() -> None:
    with pytest.raises(InputError, match="got 'muon'"):
        optimizer_of(read_job({"optimizer": "muon"}), "7b", torch.float32)


@pytest.mark.parametrize(
    "arguments", [["block_size=64"], ["--config", "job.yaml"], ["--shapes", "shapes.yaml"]], ids=str
)
def test_without_yaml_the_extra_is_named(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert main(["plan", *arguments, "--world", "1"]) == 2
    assert "pip install" in capsys.readouterr().err
    assert main(["plan", "--world", "1", "--shapes", "0.5m"]) == 0  # presets need none


def test_a_machine_is_measured_where_nothing_is_preconditioned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("dash_optim._plan_cli._LARGEST", 16)
    monkeypatch.setattr(_measure, "_BYTES", 2**16)
    monkeypatch.setattr(_measure, "_CPU_BATCH", 4 * 16 * 16)
    path = tmp_path / "shapes.json"
    path.write_text('{"bias": [7]}')
    assert main(["plan", "device=cpu", "--shapes", str(path), "--world", "2", "--measure"]) == 0
    text = capsys.readouterr().out
    assert "blocks      0 of 0 elements; AdamW 7 elements in 1 slices" in text
    assert text.count("(measured here)") == 3
