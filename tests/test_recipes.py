# SPDX-License-Identifier: Apache-2.0
"""The recipes run with the real packages, docs/recipes.md quotes them, and each does what the page says."""

from __future__ import annotations

import copy
import csv
import importlib
import importlib.util
import json
import math
import os
import re
import shutil
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed_jobs import same
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dash_optim import DASH, param_groups

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "recipes.md").read_text()
QUOTES = [block.split("\n", 1) for block in re.findall(r"```python\n# (.*?)```", PAGE, re.DOTALL)]
OPTIONS: dict[str, Any] = {"lr": 1e-2, "block_size": 32}
_DECLARED: list[Any] = []  # torch forgets operators whose library is gone

Run = Callable[..., str]


def needs(package: str) -> None:
    """Skip where a package is not installed."""
    if importlib.util.find_spec(package) is None:
        extra = "vision" if package == "timm" else "integrations"
        pytest.skip(f"{package} is not installed: pip install matroots[{extra}]")


def declare_missing_operators() -> None:
    """Let torchvision be imported where it was built for another build of torch.

    PyPI's is built for CUDA; beside a CPU build of torch it does not load its operators, and then fails to describe two of them, which belong to
    detection models. Packages that find torchvision import it, whether they need it or not.
    """
    if importlib.util.find_spec("torchvision") is None or _DECLARED:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _DECLARED.append(library)


@pytest.fixture(autouse=True)
def _undisturbed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Allow no connection but to this machine, and leave no trace of a framework for the tests that follow."""
    connect, environment = socket.socket.connect, dict(os.environ)

    def only_here(self: socket.socket, address: Any) -> None:
        assert not isinstance(address, tuple) or address[0] in ("127.0.0.1", "localhost", "::1"), address
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", only_here)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    yield
    os.environ.clear()
    os.environ.update(environment)
    if "accelerate.state" in sys.modules:
        state = importlib.import_module("accelerate.state")
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return what calls an example's ``main`` with arguments, and returns what it prints."""

    def main(name: str, *args: object) -> str:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, args)])
        importlib.import_module(name).main()
        return capsys.readouterr().out

    return main


def loss_of(out: str) -> float:
    (found,) = re.findall(r"loss ([\d.e-]+)$", out, re.MULTILINE)
    return float(found)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    return param_groups(model, weight_decay=0.1, verbose=False)


def by_hand(
    rates: list[float] | Callable[[list[float]], float], betas: list[float] | None = None, clip: float = 0.5
) -> tuple[float, list[float]]:
    """Return the loss of the examples' task after a loop that knows of no framework and no scheduler, and the rate of each step.

    The rates are given, or follow from the losses so far.
    """
    task: Any = importlib.import_module("task")
    model = task.make_model()
    opt = DASH(groups_of(model), **OPTIONS)
    used: list[float] = []
    losses: list[float] = []
    for step in range(task.STEPS if callable(rates) else len(rates)):
        used.append(rates(losses) if callable(rates) else rates[step])
        for group in opt.param_groups:
            group["lr"], group["betas"] = used[-1], (betas[step] if betas else 0.85, 0.99)
        x, y = task.batch(step % task.STEPS)
        opt.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()
    return float(task.evaluate(model)), used


def cosine(start: float, end: float, part: float) -> float:
    """Return where half a wave of the cosine is, after this part of the way."""
    return end + (start - end) * (1 + math.cos(math.pi * part)) / 2


def one_cycle(first: float, top: float, last: float, steps: int) -> list[float]:
    """Return the values of OneCycleLR: up for three tenths of the steps, down for the others."""
    peak = 0.3 * steps - 1
    return [
        cosine(first, top, t / peak) if t <= peak else cosine(top, last, (t - peak) / (steps - 1 - peak))
        for t in range(steps)
    ]


# ------------------------------------------------------------------------------------------------------------ the page


@pytest.mark.parametrize(("name", "code"), QUOTES, ids=[f"{i}-{name}" for i, (name, _) in enumerate(QUOTES)])
def test_the_page_quotes_the_recipes_as_they_are(name: str, code: str) -> None:
    assert code in (ROOT / name).read_text()


def test_the_page_has_no_other_code() -> None:
    assert len(QUOTES) == PAGE.count("```python") >= 7


# -------------------------------------------------------------------------------------------------------- transformers


WARMED_UP = [1e-2 * step / 2 for step in range(2)] + [cosine(1e-2, 0, t / 10) for t in range(10)]


@pytest.mark.parametrize("way", ["instance", "class"])
def test_transformers_takes_the_steps_of_a_plain_loop_and_goes_on_bit_for_bit(
    way: str, run: Run, tmp_path: Path
) -> None:
    needs("transformers")
    declare_missing_operators()
    loss = loss_of(run("transformers_trainer", tmp_path, "--way", way))
    first = _trainer_checkpoint(tmp_path / "checkpoint-12")
    history = json.loads((tmp_path / "checkpoint-12" / "trainer_state.json").read_text())["log_history"]
    assert [entry["learning_rate"] for entry in history] == pytest.approx(WARMED_UP)
    assert loss == pytest.approx(_transformer_by_hand(way, WARMED_UP), rel=1e-4)
    shutil.rmtree(tmp_path / "checkpoint-12")
    assert loss_of(run("transformers_trainer", tmp_path, "--way", way)) == loss
    assert same(_trainer_checkpoint(tmp_path / "checkpoint-12"), first)


def _trainer_checkpoint(folder: Path) -> dict[str, Any]:
    optimizer = torch.load(folder / "optimizer.pt", weights_only=True)
    scheduler = torch.load(folder / "scheduler.pt", weights_only=True)
    return {
        "model": (folder / "model.safetensors").read_bytes(),
        "optimizer": optimizer,
        "scheduler": scheduler,
    }


@torch.enable_grad()
def _transformer_by_hand(way: str, rates: list[float]) -> float:
    """Return the loss after steps at these rates of the optimizer that the page says each way gives."""
    recipe: Any = importlib.import_module("transformers_trainer")
    model = recipe.make_model()
    rows = torch.stack([sample["input_ids"] for sample in recipe.dataset()])
    matrices = [param for param in model.parameters() if param.ndim > 1]
    vectors = [param for param in model.parameters() if param.ndim == 1]
    decayed = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors}]
    opt = DASH(groups_of(model) if way == "instance" else decayed, **OPTIONS)
    for rate, batch in zip(rates, rows.split(16), strict=True):
        for group in opt.param_groups:
            group["lr"] = rate
        opt.zero_grad()
        _next_token_loss(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
    with torch.no_grad():
        return float(_next_token_loss(model, rows))


def _next_token_loss(model: Any, rows: Tensor) -> Tensor:
    return cross_entropy(model(rows).logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())


def test_transformers_clips_before_dash_sees_the_gradients_and_has_a_schedule_for_it(tmp_path: Path) -> None:
    needs("transformers")
    declare_missing_operators()
    from transformers import TrainerCallback

    norms = []

    class Norms(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, *_: Any, model: nn.Module, **__: Any) -> None:
            norms.append(float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm()))  # type: ignore[union-attr]

    recipe: Any = importlib.import_module("transformers_trainer")
    usual = recipe.make_trainer(tmp_path, "instance")
    opt = DASH(groups_of(usual.model), **OPTIONS)
    trainer = recipe.Trainer(
        usual.model, usual.args, train_dataset=recipe.dataset(), optimizers=(opt, None), callbacks=[Norms()]
    )
    trainer.train()
    assert norms == pytest.approx([0.5] * 12, rel=1e-5)
    steps = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    assert all(entry["grad_norm"] > 0.7 for entry in steps)
    assert [entry["learning_rate"] for entry in steps] == pytest.approx(WARMED_UP)
    assert trainer.optimizer.optimizer is opt


# ----------------------------------------------------------------------------------------------- accelerate, Lightning


def test_accelerate_accumulates_clips_follows_the_schedule_and_goes_on(run: Run, tmp_path: Path) -> None:
    needs("accelerate")
    declare_missing_operators()
    out = run("accelerate_single", tmp_path)
    assert loss_of(out) == pytest.approx(by_hand([cosine(1e-2, 0, t / 40) for t in range(40)])[0], rel=1e-3)
    assert "8 blocks, " in out
    last = tmp_path / "epoch0002"
    saved = [torch.load(last / name, weights_only=True) for name in ("optimizer.bin", "scheduler.bin")]
    shutil.rmtree(last)
    assert loss_of(run("accelerate_single", tmp_path)) == loss_of(out)
    assert same(
        [torch.load(last / name, weights_only=True) for name in ("optimizer.bin", "scheduler.bin")], saved
    )


@pytest.mark.filterwarnings(
    "ignore:Checkpoint directory",  # it is the one to go on from
    "ignore:The 'train_dataloader' does not have many workers",
    "ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated:FutureWarning",  # Lightning's own use of torch
)
def test_lightning_clips_logs_the_schedule_and_goes_on(run: Run, tmp_path: Path) -> None:
    needs("lightning")
    declare_missing_operators()
    loss = loss_of(run("lightning_single", tmp_path))
    rates, betas = one_cycle(1e-2 / 25, 1e-2, 1e-2 / 25e4, 40), one_cycle(0.95, 0.85, 0.95, 40)
    assert loss == pytest.approx(by_hand(rates, betas)[0], rel=1e-3)
    rows = _csv(tmp_path / "lightning_logs" / "version_0" / "metrics.csv")
    for group in ("matrices", "vectors"):
        logged = [float(row[f"lr-DASH/{group}"]) for row in rows if row[f"lr-DASH/{group}"]]
        assert logged == pytest.approx(rates)
    logged = [float(row["lr-DASH/matrices-momentum"]) for row in rows if row["lr-DASH/matrices-momentum"]]
    assert logged == pytest.approx(betas)
    assert [float(row["dash/blocks"]) for row in rows if row["dash/blocks"]] == [2 + 4 + 2] * 2
    last = tmp_path / "epoch=0001.ckpt"
    saved = torch.load(last, weights_only=True)
    last.unlink()
    assert loss_of(run("lightning_single", tmp_path)) == loss
    again = torch.load(last, weights_only=True)
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert same(again[part], saved[part])


def _csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


# ---------------------------------------------------------------------------------------------------------------- timm


def test_timm_makes_dash_with_rates_that_fall_with_the_depth_and_a_list_for_adamw() -> None:
    needs("timm")
    declare_missing_operators()
    recipe: Any = importlib.import_module("timm_factory")
    torch.manual_seed(0)
    model = recipe.create_model("test_vit", img_size=32, num_classes=4)
    other = copy.deepcopy(model)
    opt, loss = recipe.train(model, layer_decay=0.75, fallback_list=["head*"], fallback_no_weight_decay=True)
    assert isinstance(opt, DASH)
    ways = {param: group["algorithm"] for group in opt.param_groups for param in group["params"]}
    adamw = {name for name, param in model.named_parameters() if ways[param] == "adamw"}
    assert adamw == {"cls_token", "pos_embed", "head.weight", "head.bias"}

    rates = [1e-3, (1e-3 + 1e-2) / 2] + [cosine(1e-2, 0, t / 10) for t in range(8)]
    assert loss == pytest.approx(_vit_by_hand(other, recipe.images(), adamw, rates), rel=1e-3)


def _vit_by_hand(
    model: nn.Module, images: tuple[Tensor, Tensor], adamw: set[str], rates: list[float]
) -> float:
    """Return the last loss when each parameter is a group of its own: stem, six blocks (the norm with the last), head, 0.75 between neighbours."""
    groups, scales = [], []
    for name, param in model.named_parameters():
        block = re.match(r"blocks\.(\d+)", name)
        layer = 7 if name.startswith("head") else 6 if name.startswith("norm") else 0
        scales.append(0.75 ** (7 - (1 + int(block[1]) if block else layer)))
        decay = 0.05 if param.ndim > 1 and name not in ("cls_token", "pos_embed") else 0.0
        way = "adamw" if name in adamw else "dash"
        groups.append({"params": [param], "algorithm": way, "weight_decay": decay})
    opt = DASH(groups, lr=1e-2, block_size=64)
    for rate in rates:
        for group, scale in zip(opt.param_groups, scales, strict=True):
            group["lr"] = rate * scale
        opt.zero_grad()
        loss = cross_entropy(model(images[0]), images[1])
        loss.backward()
        opt.step()
    return loss.item()


def test_timm_convolutions_are_matrices_of_output_channels_by_all_else(run: Run) -> None:
    needs("timm")
    declare_missing_operators()
    out = run("timm_factory")
    vit, resnet = re.findall(r"network: loss (\S+)|transformer: loss (\S+)", out)
    assert float(vit[1]) < 0.5 * math.log(4)  # what a guess costs
    assert float(resnet[0]) < 0.5 * math.log(4)
    recipe: Any = importlib.import_module("timm_factory")
    torch.manual_seed(0)
    model = recipe.create_model("test_resnet", num_classes=4)
    weight = next(p for p in model.parameters() if p.shape == (16, 3, 3, 3))
    opt, _ = recipe.train(model, steps=1)
    G = weight.grad.double().reshape(16, 27)
    own = opt.state[weight]
    assert torch.allclose(
        own["16x27.factor_0"][0].double(), 0.05 * G @ G.T, rtol=1e-4, atol=1e-7 * G.norm() ** 2
    )
    assert torch.allclose(
        own["16x27.factor_1"][0].double(), 0.05 * G.T @ G, rtol=1e-4, atol=1e-7 * G.norm() ** 2
    )
    assert re.search(r"\.weight +\(16, 3, 3, 3\) +dash +1 of 16x27\n", out)


# ---------------------------------------------------------------------------------------------------------- schedulers


def _on_plateau(losses: list[float]) -> float:
    """Return the rate after these losses: half of it whenever two in a row are not below the best."""
    rate, best, bad = 1e-2, math.inf, 0
    for loss in losses:
        better = loss < best * (1 - 1e-4)
        best, bad = (loss, 0) if better else (best, bad + 1)
        if bad > 1:
            rate, bad = rate / 2, 0
    return rate


EXPECTED_RATES: dict[str, list[float] | Callable[[list[float]], float]] = {
    "OneCycleLR": one_cycle(1e-2 / 25, 1e-2, 1e-2 / 25e4, 20),
    "CosineAnnealingLR": [cosine(1e-2, 0, t / 20) for t in range(20)],
    "SequentialLR": [1e-2 * (0.1 + 0.9 * t / 5) for t in range(5)]
    + [cosine(1e-2, 0, t / 15) for t in range(15)],
    "ReduceLROnPlateau": _on_plateau,
}


@pytest.mark.parametrize("name", EXPECTED_RATES)
def test_schedulers_set_the_rates_and_betas_of_their_formulas(name: str) -> None:
    recipe: Any = importlib.import_module("schedulers")
    assert list(recipe.SCHEDULES) == list(EXPECTED_RATES)
    loss, rates = recipe.train(name)
    betas = one_cycle(0.95, 0.85, 0.95, 20) if name == "OneCycleLR" else None
    expected, used = by_hand(EXPECTED_RATES[name], betas, clip=math.inf)
    assert rates == pytest.approx(used)
    assert min(rates) < max(rates)
    assert loss == pytest.approx(expected, rel=1e-3)


def test_schedulers_print_a_line_each(run: Run) -> None:
    assert [line.split(":")[0] for line in run("schedulers").splitlines()] == list(EXPECTED_RATES)


def test_rates_of_zero_move_nothing_and_half_a_rate_moves_half_as_far() -> None:
    """The factors see the gradients all the same."""
    task: Any = importlib.import_module("task")
    moved, states = [], []
    for rate in (0.0, 1e-2, 5e-3):
        model = task.make_model().double()
        opt = DASH(groups_of(model), lr=1e-2, block_size=32)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            opt, lambda step, rate=rate: 1.0 if step < 3 else rate / 1e-2
        )
        for step in range(4):
            before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
            x, y = task.batch(step)
            opt.zero_grad()
            cross_entropy(model(x.double()), y).backward()
            opt.step()
            scheduler.step()
        moved.append(nn.utils.parameters_to_vector(model.parameters()).detach() - before)
        states.append(opt.state_dict()["state"])
    assert same(states[0], states[1])
    assert same(states[1], states[2])
    assert not moved[0].any()
    assert moved[1].norm() > 0.01
    assert torch.allclose(moved[1], 2 * moved[2], rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("cycle", [True, False])
@pytest.mark.parametrize(("kind", "lowest"), [("OneCycleLR", 0.85), ("CyclicLR", 0.8)])
def test_cycles_bring_back_an_average_of_gradients_unless_told_not_to(
    kind: str, lowest: float, cycle: bool
) -> None:
    task: Any = importlib.import_module("task")
    model = task.make_model()
    opt = DASH(groups_of(model), betas=(0.0, 0.95), **OPTIONS)
    rates = {"max_lr": 1e-2, **({"total_steps": 8} if kind == "OneCycleLR" else {"base_lr": 1e-3})}
    scheduler = getattr(torch.optim.lr_scheduler, kind)(opt, cycle_momentum=cycle, **rates)
    for step in range(2):
        x, y = task.batch(step)
        opt.zero_grad()
        cross_entropy(model(x), y).backward()
        opt.step()
        scheduler.step()
    assert ("32x32.exp_avg" in opt.state[model[3].weight]) == cycle
    first = opt.param_groups[0]["betas"][0]
    assert lowest <= first <= lowest + 0.1 if cycle else first == 0.0


# --------------------------------------------------------------------------------------------------------- GradScaler


def test_a_step_that_overflows_is_the_scalers_and_leaves_dash_as_it_was() -> None:
    recipe, task = importlib.import_module("grad_scaler"), importlib.import_module("task")
    model = task.make_model()
    opt = DASH(groups_of(model), **OPTIONS)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)  # type: ignore[attr-defined]
    for step in range(3):
        recipe.train_step(model, opt, scaler, *task.batch(step), torch.float16)
    assert _norm(model) == pytest.approx(0.5, rel=1e-5)  # clipped at its own size, and no longer scaled
    before = copy.deepcopy((model.state_dict(), opt.state_dict()))
    scaler.update(2.0**30)
    recipe.train_step(model, opt, scaler, *task.batch(3), torch.float16)
    assert scaler.get_scale() == 2.0**29
    assert same(model.state_dict(), before[0])
    assert same(opt.state_dict(), before[1])
    assert opt.diagnostics().skipped_steps == 0
    scaler.update(2.0**10)
    recipe.train_step(model, opt, scaler, *task.batch(3), torch.float16)
    assert int(opt.state[model[0].weight]["step"]) == 4
    assert not same(model.state_dict(), before[0])


def _norm(model: nn.Module) -> float:
    return float(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_learns_as_float32_does(dtype: str, run: Run) -> None:
    """Each step that is left out halves the scale: of 2^24 there are as many left as steps are missing."""
    out = run("grad_scaler", "--dtype", dtype)
    (taken, scale) = re.findall(r"^(\d+) of 20 steps taken, scale (\S+), ", out)[0]
    if dtype == "float16":
        assert 10 <= int(taken) < 20
        assert float(scale) == 2.0 ** (24 - (20 - int(taken)))
    else:
        assert (taken, scale) == ("20", "1")
    steps = 20 - int(taken)
    assert loss_of(out) == pytest.approx(_from_batch(steps), rel=0.02)


def _from_batch(first: int) -> float:
    """Return the loss after float32 steps from this batch on."""
    task: Any = importlib.import_module("task")
    model = task.make_model()
    opt = DASH(groups_of(model), **OPTIONS)
    for step in range(first, task.STEPS):
        x, y = task.batch(step)
        opt.zero_grad()
        cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
    return float(task.evaluate(model))


# ------------------------------------------------------------------------------------------------------------- logging


def _logged() -> tuple[float, dict[tuple[str, int], float]]:
    """Return the loss, and what the recipe logs, by name and step."""
    found: dict[tuple[str, int], float] = {}
    loss = importlib.import_module("log_diagnostics").train(
        lambda numbers, step: found.update({(name, step): value for name, value in numbers.items()})
    )
    return loss, found


def test_tensorboard_has_the_numbers(run: Run, tmp_path: Path) -> None:
    needs("tensorboard")
    loss, logged = _logged()
    assert loss_of(run("log_diagnostics", tmp_path)) == pytest.approx(loss, rel=1e-8)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path))
    events.Reload()
    read = {(tag, e.step): e.value for tag in events.Tags()["scalars"] for e in events.Scalars(tag)}
    assert read == {key: float(np.float32(value)) for key, value in logged.items()}
    _check_numbers(logged)


def test_wandb_has_the_numbers_offline(run: Run, tmp_path: Path) -> None:
    needs("wandb")
    import wandb

    loss, logged = _logged()
    assert loss_of(run("log_diagnostics", tmp_path, "--to", "wandb")) == pytest.approx(loss, rel=1e-8)
    wandb.teardown()  # ends its process
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert _wandb_history(path) == logged


def _wandb_history(path: Path) -> dict[tuple[str, int], float]:
    """Read a run's file: seven bytes, then records in LevelDB's log format, in blocks of 32 KiB, each a protocol buffer."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, record, found = path.read_bytes(), 7, b"", {}
    while at + 7 <= len(data):
        if 2**15 - at % 2**15 < 7:  # no room for a header at the end of a block
            at += 2**15 - at % 2**15
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # the whole of a record, or its last part
            history, record = Record.FromString(record).history, b""
            for item in history.item:
                name = "/".join(item.nested_key) or item.key
                if not name.startswith("_"):
                    found[name, history.step.num] = float(json.loads(item.value_json))
    return found


def _refreshed(block: int, until: int) -> list[int]:
    """Return the steps up to ``until`` in which it is a block's turn: one in 1, 2, 4 while a quarter of the gradients is as many."""
    return [t for t in range(1, until + 1) if (t - 1 + block) % (1 << (max(1, t // 4).bit_length() - 1)) == 0]


def _check_numbers(logged: dict[tuple[str, int], float]) -> None:
    """What must hold of the numbers, whoever logs them."""
    steps = sorted({step for _, step in logged})
    assert steps == [5, 10, 15, 20]
    assert {name for name, _ in logged if name.startswith("grafting/")} == {
        f"grafting/{i}.weight" for i in (0, 3, 5)
    }
    for step in steps:
        assert logged["dash/blocks", step] == 2 + 4 + 2
        assert logged["dash/failures", step] == logged["dash/skipped_steps", step] == 0
        assert 0 < logged["dash/largest_certified_error", step] < math.inf
        assert logged["grafting/3.weight", step] > 0
    turns = {step: [_refreshed(block, step) for block in range(8)] for step in steps}
    for step in steps:  # two factors a block
        assert logged["dash/refreshes", step] == 2 * sum(map(len, turns[step]))
        assert logged["dash/largest_staleness", step] == max(step - turn[-1] for turn in turns[step])


def test_scalars_by_parameter_are_medians_of_its_blocks() -> None:
    task: Any = importlib.import_module("task")
    model = task.make_model()
    opt = DASH(groups_of(model), lr=1e-2, block_size=16)
    for step in range(3):
        x, y = task.batch(step)
        opt.zero_grad()
        cross_entropy(model(x), y).backward()
        opt.step()
    found = opt.diagnostics()
    numbers = found.scalars(by_parameter=True)
    medians = {name: value for name, value in numbers.items() if name.startswith("grafting/")}
    assert set(medians) == set(numbers) - set(found.scalars()) == {f"grafting/{i}.weight" for i in (0, 3, 5)}
    for i in (0, 3, 5):
        own = [block.grafting for block in found.blocks if block.parameter == f"{i}.weight"]
        assert medians[f"grafting/{i}.weight"] == pytest.approx(float(np.median(own)))


def test_scikit_learn_takes_whitening_for_an_estimator_of_its_own(run: Run) -> None:
    """Its own checks of estimators, the covariance that comes out, and the script."""
    needs("sklearn")
    from sklearn.utils.estimator_checks import check_estimator

    whitener = importlib.import_module("sklearn_whitening").Whitener
    failed = [
        found
        for found in check_estimator(whitener(), on_skip=None, on_fail=None)
        if found["status"] == "failed"
    ]
    assert not failed, failed
    X = np.random.default_rng(0).normal(size=(200, 4)) @ np.diag([1.0, 10.0, 0.1, 3.0])
    for kind in ("zca", "pca"):
        fitted = whitener(kind, rel_damping=1e-12).fit(X)
        assert np.abs(np.cov(fitted.transform(X).T) - np.eye(4)).max() < 1e-6
        assert fitted.error_ < 1e-8
    before, after = (
        float(value) for value in re.findall(r": (0\.\d+) of the test samples", run("sklearn_whitening"))
    )
    assert 0.5 < before < after
