# SPDX-License-Identifier: Apache-2.0
"""The examples run, the page quotes them, and what it says about checkpoints holds."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_jobs import gathered
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from dash_optim import DASH, param_groups

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "distributed.md").read_text()
BLOCKS = [block.split("\n", 1) for block in re.findall(r"```python\n# (.*?)```", PAGE, re.DOTALL)]
QUOTES = [(name, code) for name, code in BLOCKS if name.startswith("examples/")]
SNIPPETS = {name: code for name, code in BLOCKS if not name.startswith("examples/")}
OPTIONS: dict[str, Any] = {"lr": 1e-2, "block_size": 32}
SHARED: dict[str, Any] = {
    **{"os": os, "torch": torch, "dist": dist, "nullcontext": nullcontext, "cross_entropy": cross_entropy},
    **{"init_device_mesh": init_device_mesh, "fully_shard": fully_shard},
    **{"DASH": DASH, "param_groups": param_groups},
}


@cache
def _example(name: str) -> Any:
    """Return an example as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        return importlib.import_module(name)


def _batch(step: int, rank: int = 0, ranks: int = 1) -> tuple[Tensor, Tensor]:
    task = _example("task")
    found: tuple[Tensor, Tensor] = task.batch(step % task.STEPS, rank, ranks)
    return found


def _shuffled(step: int) -> tuple[Tensor, Tensor]:
    """Return the batch that a ``DistributedSampler`` gives to all ranks together."""
    task = _example("task")
    epoch, start = step // task.STEPS, step % task.STEPS * task.BATCH
    x, y = task.dataset()[:]
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
    return x[order[start : start + task.BATCH]], y[order[start : start + task.BATCH]]


def _step(model: nn.Module, opt: DASH, batch: tuple[Tensor, Tensor], clip: float = 0.5) -> None:
    opt.zero_grad()
    cross_entropy(model(batch[0]), batch[1]).backward()
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    opt.step()


def _optimizer(model: nn.Module) -> DASH:
    return DASH(param_groups(model, weight_decay=0.1, verbose=False), **OPTIONS)


@cache
def _alone(steps: int, batches: Callable[[int], tuple[Tensor, Tensor]] = _batch, clip: float = 0.5) -> float:
    """Return the loss after so many steps of the examples in one process, which knows nothing of others."""
    model = _example("task").make_model()
    opt = _optimizer(model)
    for step in range(steps):
        _step(model, opt, batches(step), clip)
    return float(_example("task").evaluate(model))


def _launched(example: str, *args: object, ranks: int = 2, timeout: float = 120.0) -> str:
    """Return what an example prints when torchrun starts it; torchrun, ended, ends its processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    process = subprocess.Popen(
        [*command, str(ROOT / "examples" / example), *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
        pytest.fail(f"{example}: not finished after {timeout} s\n{out}\n{err}")
    assert process.returncode == 0, f"{out}\n{err}"
    return out


def _loss(out: str) -> float:
    found = re.findall(r"loss (\S+)", out)
    assert len(found) == 1, out
    return float(found[0])


@pytest.mark.parametrize(("name", "code"), QUOTES, ids=[f"{i}-{name}" for i, (name, _) in enumerate(QUOTES)])
def test_the_page_quotes_the_examples_as_they_are(name: str, code: str) -> None:
    assert code in (ROOT / name).read_text()


def test_the_page_and_that_of_recipes_quote_every_example() -> None:
    scripts = {f"examples/{path.name}" for path in (ROOT / "examples").glob("*.py")} - {"examples/task.py"}
    recipes = re.findall(r"```python\n# (examples/\S+)", (ROOT / "docs" / "recipes.md").read_text())
    assert {name for name, _ in QUOTES}.isdisjoint(recipes)
    assert {name for name, _ in QUOTES} | set(recipes) == scripts
    assert len(BLOCKS) == PAGE.count("```python")


def test_ddp_takes_the_steps_of_one_process_and_says_what_each_rank_has() -> None:
    out = _launched("ddp.py")
    assert _loss(out) == pytest.approx(_alone(20), rel=1e-3)
    (quoted,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert quoted in out


def test_fsdp2_takes_the_steps_of_one_process() -> None:
    assert _loss(_launched("fsdp2.py")) == pytest.approx(_alone(20), rel=1e-3)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_goes_from_two_ranks_to_three_that_shard_and_to_one_process(tmp_path: Path) -> None:
    script = "checkpoint_across_world_sizes.py"
    first = _launched(script, tmp_path, "--steps", 8)
    assert "steps 0 to 8 as ddp on 2" in first
    assert _loss(first) == pytest.approx(_alone(8), rel=1e-3)
    second = _launched(script, tmp_path, "--steps", 8, "--way", "fsdp2", ranks=3)
    assert "steps 8 to 16 as fsdp2 on 3" in second
    assert _loss(second) == pytest.approx(_alone(16), rel=1e-3)
    model = _example("task").make_model()
    opt = _optimizer(model)
    assert _example("checkpoint_across_world_sizes").load(tmp_path, model, opt) == 16
    for step in range(16, 20):
        _step(model, opt, _batch(step))
    assert _example("task").evaluate(model) == pytest.approx(_alone(20), rel=1e-3)


@pytest.mark.parametrize(
    ("package", "saved", "batches"),
    [("accelerate", "epoch0002", _batch), ("lightning", "epoch=0001.ckpt", _shuffled)],
)
def test_frameworks_take_the_steps_of_one_process_and_go_on_as_if_undisturbed(
    package: str, saved: str, batches: Callable[[int], tuple[Tensor, Tensor]], tmp_path: Path
) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install matroots[integrations]")
    out = _launched(f"{package}_ddp.py", tmp_path)
    assert _loss(out) == pytest.approx(_alone(40, batches), rel=1e-3)
    last = tmp_path / saved
    (shutil.rmtree if last.is_dir() else Path.unlink)(last)
    again = _launched(f"{package}_ddp.py", tmp_path)
    assert last.exists()
    assert _loss(again) == _loss(out)


def _accelerated(rank: int, world: int, given: bool, folder: Path) -> tuple[str, float, list[float]]:
    """Let accelerate shard the model; save after a while, take two steps, load, and take them again."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import (
        DistributedType,
        load_fsdp_model,
        load_fsdp_optimizer,
        save_fsdp_model,
        save_fsdp_optimizer,
    )

    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)})
    os.environ.update({"MASTER_ADDR": "unused", "MASTER_PORT": "0"})  # the ranks know one another already
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    accelerator = Accelerator(cpu=True)
    accelerator.state.distributed_type = DistributedType.FSDP  # it would only on GPUs
    accelerator.state.fsdp_plugin = plugin
    model = _example("task").make_model()
    shared = {"process_group": dist.group.WORLD} if given else {}
    opt = DASH(param_groups(model, weight_decay=0.1, verbose=False), **OPTIONS, **shared)
    model, opt = accelerator.prepare(model, opt)
    for step in range(8):
        _step(model, opt, _batch(step, rank, world))
    loss, losses = _example("task").evaluate(model), []
    save_fsdp_model(plugin, accelerator, model, folder)
    save_fsdp_optimizer(plugin, accelerator, opt, model, folder)
    for _ in range(2):
        for step in (8, 9):
            _step(model, opt, _batch(step, rank, world))
        losses.append(_example("task").evaluate(model))
        load_fsdp_model(plugin, accelerator, model, folder)
        load_fsdp_optimizer(plugin, accelerator, opt, model, folder)
    return opt.optimizer.summary(), loss, losses


@pytest.mark.parametrize("given", [False, True])
def test_accelerate_shards(given: bool, tmp_path: Path) -> None:
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed: pip install matroots[integrations]")
    for summary, loss, losses in on_ranks(2, _accelerated, given, tmp_path):
        assert "imbalance" in summary
        assert loss == pytest.approx(_alone(8), rel=1e-3)
        assert losses[0] == losses[1] != loss


def _lightning_shards(rank: int, world: int, folder: Path) -> list[float]:
    """Train for an epoch and for two, and go on from the first epoch to the second."""
    import lightning
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.tensor import DTensor

    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)})
    os.environ.update({"MASTER_ADDR": "unused", "MASTER_PORT": "0"})  # the ranks know one another already
    task = _example("task")

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = task.make_model()

        def configure_model(self) -> None:
            if not isinstance(self.model[0].weight, DTensor):
                fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

        def configure_optimizers(self) -> DASH:
            return _optimizer(self.model)

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            return cross_entropy(self.model(batch[0]), batch[1])

    losses = []
    for epochs, start in ((1, None), (2, None), (2, folder / "one")):
        module = Classifier()
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=world,
            strategy=ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1),
            plugins=[TorchElasticEnvironment()],
            max_epochs=epochs,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        data = torch.utils.data.DataLoader(task.dataset(), batch_size=task.BATCH // world)
        trainer.fit(module, data, ckpt_path=start)
        if epochs == 1:
            trainer.save_checkpoint(folder / "one")
        losses.append(task.evaluate(module.model))
    return losses


def test_lightning_shards(tmp_path: Path) -> None:
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("lightning is not installed: pip install matroots[integrations]")
    for one, two, again in on_ranks(2, _lightning_shards, tmp_path):
        assert one == pytest.approx(_alone(20, _shuffled, math.inf), rel=1e-3)
        assert again == two != one


def _double(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return batch[0].double(), batch[1]


def _run_snippets(rank: int, world: int, file: Path) -> dict[str, Tensor]:
    """Run each piece of code with a model and an optimizer of its own, and take what is missing of four steps."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    DistributedDataParallel._check_comm_hook = lambda *_: (
        None
    )  # torch wants NCCL for bfloat16; gloo can do it too
    found = {}
    for name, code in SNIPPETS.items():
        model = _example("task").make_model().double()  # float32: rounding grows a thousandfold
        names: dict[str, Any] = {**SHARED, "model": model, "file": file}
        if name == "HSDP":
            names["ddp"] = model
        else:
            names["ddp"] = DistributedDataParallel(model)
            groups = param_groups(model, verbose=False)
            names["opt"] = DASH(groups, process_group=dist.group.WORLD, **OPTIONS)
        names["parts"] = list(zip(*(part.chunk(2) for part in _double(_batch(0, rank, world))), strict=True))
        before, taken = {"accumulation": (0, 1), "one file, written": (2, 2), "one file, read": (0, 2)}.get(
            name, (0, 0)
        )
        for step in range(before):
            _step(names["ddp"], names["opt"], _double(_batch(step, rank, world)), math.inf)
        exec(code, names)
        for step in range(taken, 4):
            _step(names["ddp"], names["opt"], _double(_batch(step, rank, world)), math.inf)
        found[name] = torch.cat([gathered(param).flatten() for param in model.parameters()])
        if name == "hybrid":
            assert dist.get_world_size(names["node"]) == 2
    return found


def test_the_pieces_of_code_on_the_page_do_what_it_says(tmp_path: Path) -> None:
    model = _example("task").make_model().double()
    start = torch.cat([param.detach().flatten() for param in model.parameters()])
    opt = DASH(param_groups(model, verbose=False), **OPTIONS)
    for step in range(4):
        _step(model, opt, _double(_batch(step)), math.inf)
    expected = torch.cat([param.detach().flatten() for param in model.parameters()])
    # of the way; what rounds gradients changes directions that few gradients have had
    limits = {"hook: bfloat16": 1.0, "hook: PowerSGD": 1.0, "communication_dtype": 0.01}
    ranks = on_ranks(4, _run_snippets, tmp_path / "checkpoint.pt")
    for name in SNIPPETS:
        for found in ranks:
            apart = float((found[name] - expected).norm() / (expected - start).norm())
            assert apart < limits.get(name, 1e-9), name
            assert (apart > 1e-9) == (name in limits), f"{name}: {apart}"
            assert torch.equal(found[name], ranks[0][name]), name
