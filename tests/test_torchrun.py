# SPDX-License-Identifier: Apache-2.0
"""One model on several ranks: what they compute, what is left when they are stopped, killed or fail, and torchrun itself.

Most ranks here are forks of this process with torchrun's variables: a new interpreter takes seconds to import torch. Those of torchrun are few.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from training_jobs import Child, command, computed, flat, lines, text, until, words

from dash_optim import DASH, PreconditionerError
from dash_optim.__main__ import main
from dash_optim.training import checkpoint, loop
from dash_optim.training._packed import pack, unpack
from dash_optim.training.checkpoint import latest
from dash_optim.training.launch import Launch
from dash_optim.training.metrics import read
from dash_optim.training.outcome import Outcome
from dash_optim.training.run import Run
from dash_optim.training.settings import Training
from matroots._command import InputError

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

Before = Callable[[int], object]
"""What happens in a rank before anything else."""

CLOSE = 1e-4
"""Losses of fp32 runs that add in another order."""


@pytest.fixture(autouse=True)
def without_fsync(monkeypatch):
    """Kills of processes, which are what is tested here, cannot tell."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def data(tmp_path):
    return text(tmp_path / "text.txt")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What runs compute that nothing happens to, by their steps, batch and ranks; each is run once."""

    @cache
    def find(count: int, *more: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("undisturbed")
        argv = words("train", *more, data=text(folder / "text.txt"), out=folder / "run")
        codes, logs = ranks(argv, count, folder)
        assert codes == [0] * count, logs
        return computed(folder / "run")

    return find


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        return int(listening.getsockname()[1])


def ranks(
    argv: list[str] | Callable[[int], list[str]],
    count: int,
    tmp_path: Path,
    *,
    before: Before = lambda _: None,
    seconds: float = 30,
) -> tuple[list[int], list[str]]:
    """Run a command line as so many ranks; return their exit codes and all that they have said."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # as torchrun keeps one

    def enter(rank: int) -> None:
        told = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank, "MASTER_PORT": store.port}
        os.environ.update({name: str(value) for name, value in told.items()})
        os.environ.update(MASTER_ADDR="localhost", TORCHELASTIC_USE_AGENT_STORE="True")
        before(rank)

    children: list[Child] = []
    try:
        for rank in range(count):
            own = argv if isinstance(argv, list) else argv(rank)
            children.append(command(own, tmp_path / f"log{rank}", before=partial(enter, rank)))
        codes = [child.wait(seconds) for child in children]
    finally:
        for child in children:
            child.end()
    return codes, [child.log.read_text() for child in children]


def in_step(step: int, rank: int, act: Callable[[], object]) -> Before:
    """Let a rank do something in the middle of a step."""

    def before(own: int) -> None:
        clip = Run._clip

        def acting(self: Run) -> Any:
            if self.step == step and own == rank:
                act()
            return clip(self)

        Run._clip = acting  # type: ignore[method-assign]

    return before


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def errors(logs: list[str]) -> list[str]:
    """Return every line of an error, of all ranks."""
    return [line for log in logs for line in log.splitlines() if "error" in line.lower()]


def losses(folder: Path) -> list[float]:
    """Return all losses that a run has written down."""
    return [record[name] for record in read(folder) for name in ("loss", "validation_loss") if name in record]


def assert_close(folder: Path, expected: Path, limit: float = CLOSE) -> None:
    found, wanted = losses(folder), losses(expected)
    assert len(found) == len(wanted)
    assert max(abs(a - b) for a, b in zip(found, wanted, strict=True)) < limit


def form(folder: Path) -> dict[str, Any]:
    """Return what the newest checkpoint holds, but for the numbers."""
    found = latest(folder)
    assert found is not None
    return {where: leaf[:2] if isinstance(leaf, tuple) else "" for where, leaf in flat(found[1]).items()}


# what is computed


@pytest.mark.parametrize(
    ("count", "more"),
    [
        (2, ["accumulate=2", "diagnostics=true"]),
        (4, ["optimizer.p=4", "optimizer.refresh=staggered", "clip=0.1"]),
        (2, ["optimizer={type: adamw}"]),
        (2, ["optimizer={type: muon}", "accumulate=2"]),
    ],
)
def test_ranks_train_what_one_process_does(tmp_path, data, count, more):
    argv = words("train", *more, data=data, out=tmp_path / "one")
    assert main(argv) == 0
    codes, logs = ranks(words("train", *more, data=data, out=tmp_path / "run"), count, tmp_path)
    assert codes == [0] * count, logs
    limit = (
        1e-3 if "muon" in more[0] else CLOSE
    )  # torch's Muon orthogonalises in bfloat16, which enlarges the rounding of a mean
    assert_close(tmp_path / "run", tmp_path / "one", limit=limit)
    assert form(tmp_path / "run") == form(tmp_path / "one")
    assert "12 of 12, finished" in logs[0]
    assert set(logs[1:]) == {""}
    one, several = Outcome.read(tmp_path / "one"), Outcome.read(tmp_path / "run")
    assert (several.loss, several.roots) == (pytest.approx(one.loss, abs=limit), one.roots)
    last, expected = read(tmp_path / "run")[-1], read(tmp_path / "one")[-1]
    assert set(last) == set(expected)
    for name in expected:
        if name.startswith(("dash/", "grafting/")):
            assert last[name] == pytest.approx(expected[name], rel=0.02, nan_ok=True), name
    if "adamw" not in more[0] and "muon" not in more[0]:
        assert several.optimizer_bytes < one.optimizer_bytes * (1 / count + 0.3)  # blocks are few here


def test_shares_of_a_batch_are_the_batch(tmp_path, data):
    """The gradient of every step's own batch: with a rate of nothing all steps start from the same weights, and losses differ by their windows alone."""
    more = ["lr=1e-9", "optimizer.adamw_lr=1e-9", "accumulate=2", "batch=6", "validation_windows=7"]
    assert main(words("train", *more, data=data, out=tmp_path / "one")) == 0
    codes, logs = ranks(words("train", *more, data=data, out=tmp_path / "run"), 3, tmp_path)
    assert codes == [0] * 3, logs
    assert_close(tmp_path / "run", tmp_path / "one", limit=2e-6)
    norms = [[record["gradient_norm"] for record in read(tmp_path / name)] for name in ("run", "one")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert len(set(losses(tmp_path / "one"))) > 10


def test_gradients_travel_once_a_step(tmp_path, data):
    def noting(rank: int) -> None:
        forward = DistributedDataParallel.forward

        def noted(self: DistributedDataParallel, *inputs: Any) -> Any:
            with (tmp_path / f"noted{rank}").open("a") as stream:
                stream.write("+" if self.require_backward_grad_sync else "-")
            return forward(self, *inputs)

        DistributedDataParallel.forward = noted

    argv = words("train", "accumulate=3", "steps=2", data=data, out=tmp_path / "run")
    assert ranks(argv, 2, tmp_path, before=noting)[0] == [0, 0]
    for rank in range(2):  # first what lays out the buckets
        assert (tmp_path / f"noted{rank}").read_text() == "+" + 2 * "--+"


# stops, and going on


def test_a_signal_to_any_rank_stops_all_and_any_number_goes_on(tmp_path, data):
    argv, folder = words("train", data=data, out=tmp_path / "run"), tmp_path / "run"
    assert main(words("train", data=data, out=tmp_path / "whole")) == 0
    for step, count, rank, number in (
        (3, 1, 0, signal.SIGTERM),
        (6, 2, 1, signal.SIGTERM),
        (8, 4, 0, signal.SIGINT),
    ):
        stopping = in_step(step, rank, partial(signal.raise_signal, number))
        codes, logs = ranks(argv, count, tmp_path, before=stopping)
        assert codes == [130] * count, logs
        assert latest(folder)[0] == step == Outcome.read(folder).step
        assert "".join(logs).count("dash_optim: interrupted; ") == 1
        assert f"{step} of 12, stopped" in logs[0]
    assert main(argv) == 0  # without torchrun
    assert_close(folder, tmp_path / "whole")


@pytest.mark.parametrize(("count", "dying"), [(2, 0), (3, 1)])
def test_a_killed_rank_ends_the_others_within_seconds(tmp_path, data, undisturbed, count, dying):
    argv = words("train", "batch=6", data=data, out=tmp_path / "run")
    started = time.monotonic()
    codes, logs = ranks(argv, count, tmp_path, before=in_step(8, dying, killed))
    assert time.monotonic() - started < 20
    assert codes.pop(dying) == -signal.SIGKILL
    assert 0 not in codes
    (said,) = errors(logs)
    assert re.fullmatch(
        r"dash_optim: error: rank \d: another rank has ended or cannot be reached \(.*\); the same command goes on from the last checkpoint",
        said,
    )
    assert latest(tmp_path / "run")[0] == 5
    if count == 3:  # sums over three ranks are rounded as the buckets of gradients lie
        assert ranks(argv, count, tmp_path)[0] == [0] * count
        assert computed(tmp_path / "run") == undisturbed(count, "batch=6")


def test_a_finished_run_is_not_run_again_and_another_is_refused(tmp_path, data):
    argv = words("train", "steps=2", data=data, out=tmp_path / "run")
    assert main(argv) == 0
    left = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    codes, logs = ranks(argv, 2, tmp_path, before=in_step(1, 0, killed))
    assert codes == [0, 0]
    assert "2 of 2, finished" in logs[0]
    said = said_once([*argv, "steps=3"], tmp_path)
    assert (
        "rank 0: --out: this folder holds a run with other settings (training.steps: 2 then, 3 now)" in said
    )
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == left


# failures


def said_once(argv: Any, tmp_path: Path, count: int = 2, before: Before = lambda _: None) -> str:
    """Return the one line of an error; all ranks have to end, with an error, within seconds."""
    started = time.monotonic()
    codes, logs = ranks(argv, count, tmp_path, before=before)
    assert time.monotonic() - started < 20
    assert 0 not in codes
    (said,) = errors(logs)
    assert "Traceback" not in "".join(logs)
    return said


def test_a_batch_that_ranks_cannot_share(tmp_path, data):
    said = said_once(words("train", "batch=3", data=data, out=tmp_path / "run"), tmp_path)
    assert said.endswith("training.batch: expected a multiple of the number of ranks, 2, got 3")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["compare", "sweep", "study"])
def test_commands_for_many_models_are_refused(tmp_path, data, name):
    said = said_once([name, "steps=2", "--out", str(tmp_path / "run")], tmp_path)
    assert said.endswith(
        f": {name}: trains many models, each in one process; start it without torchrun, which is for train"
    )
    assert not (tmp_path / "run").exists()


def test_data_that_one_rank_lacks(tmp_path, data):
    said = said_once(
        lambda rank: words("train", data=data if rank == 0 else tmp_path / "no", out=tmp_path / "run"),
        tmp_path,
    )
    assert said == f"dash_optim: error: rank 1: {tmp_path / 'no'}: no such file or folder"
    assert not (tmp_path / "run").exists()


def test_settings_that_one_rank_lacks(tmp_path, data):
    """Before the ranks have met."""
    said = said_once(
        lambda rank: words("train", *["no.yaml"] * rank, data=data, out=tmp_path / "run"), tmp_path
    )
    assert said == "dash_optim: error: rank 1: no.yaml: cannot be read: No such file or directory"


def test_each_rank_has_a_device_of_its_own(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(Training, "place", lambda self: torch.device(self.device))
    store = dist.HashStore()
    assert Launch(3, 4, 1, store, "").place(Training(device="cuda")) == torch.device("cuda", 1) == chosen[0]
    assert Launch(3, 4, 1, store, "").place(Training(device="cpu")) == torch.device("cpu")
    for device, expected in (
        ("cuda:0", "'cuda' (each rank takes the one of its LOCAL_RANK), with several ranks, got 'cuda:0'"),
        ("meta", "got 'meta'"),
        ("cuda", "expected a CUDA device for each rank, there are 2 here"),
    ):
        with pytest.raises(InputError, match=re.escape(expected)):
            Launch(3, 4, 2, store, "").place(Training(device=device))


def test_ranks_with_other_settings_or_data(tmp_path, data):
    def other(rank: int) -> list[str]:
        return words("train", f"validate_every={2 + rank}", data=data, out=tmp_path / "run")

    assert said_once(other, tmp_path).endswith(
        "expected the same settings on all ranks, got logging.validate_every: 2 on rank 0, 3 on rank 1"
    )

    def changed(rank: int) -> None:
        if rank == 1:
            loop.load_corpus = lambda *_, **__: real(str(text(tmp_path / "other.txt", seed=1)))

    real = loop.load_corpus
    said = said_once(words("train", data=data, out=tmp_path / "run"), tmp_path, before=changed)
    assert said.endswith("data: expected the same on all ranks, those of rank 1 are not those of rank 0")
    assert not (tmp_path / "run").exists()


def test_a_disk_that_is_full(tmp_path, data):
    def full(rank: int) -> None:
        def save(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        checkpoint.torch.save = save

    said = said_once(words("train", data=data, out=tmp_path / "run"), tmp_path, before=full)
    assert said.startswith("dash_optim: error: rank 0: checkpoint of step 5: ")


def test_a_folder_that_is_in_use(tmp_path, data):
    with checkpoint.exclusive(tmp_path / "run"):
        said = said_once(words("train", data=data, out=tmp_path / "run"), tmp_path)
    assert f"rank 0: {tmp_path / 'run'}: in use by process {os.getpid()}" in said


def test_a_defect_is_traced_once(tmp_path, data):
    def defective() -> None:
        raise ZeroDivisionError("of rank 1")

    codes, logs = ranks(
        words("train", data=data, out=tmp_path / "run"), 2, tmp_path, before=in_step(3, 1, defective)
    )
    assert codes[0] == 1
    assert logs[1].count("ZeroDivisionError: of rank 1") == 1
    assert not errors(logs[:1])


def test_variables_that_make_no_sense(tmp_path, data):
    def without(rank: int) -> None:
        del os.environ["LOCAL_RANK"]

    said = said_once(words("train", data=data, out=tmp_path / "run"), tmp_path, count=1, before=without)
    assert said.endswith(
        "LOCAL_RANK: expected what torchrun sets beside RANK and WORLD_SIZE, which is not there"
    )


def test_a_loss_that_stays_infinite_ends_the_run_on_all(tmp_path, data):
    argv = words("train", "lr=1e30", "steps=40", "validate_every=100", data=data, out=tmp_path / "run")
    codes, logs = ranks(argv, 2, tmp_path)
    assert codes == [0, 0], logs
    assert Outcome.read(tmp_path / "run").reason == "no finite loss in 10 steps"


@pytest.mark.parametrize("failing", [0, 1])
def test_an_optimizer_that_refuses_on_one_rank_ends_the_run_on_all(tmp_path, data, failing):
    def refusing(rank: int) -> None:
        budget = DASH._check_budget

        def check(self: DASH, stacks: Any) -> None:
            budget(self, stacks)
            counts = [int(own["step"]) for own in self.state.values()]
            if rank == failing and counts and max(counts) == 4:
                raise PreconditionerError("layer: a root has failed")

        DASH._check_budget = check

    codes, logs = ranks(words("train", data=data, out=tmp_path / "run"), 2, tmp_path, before=refusing)
    assert codes == [0, 0], logs
    outcome = Outcome.read(tmp_path / "run")
    assert (outcome.step, outcome.reason) == (4, "layer: a root has failed")
    assert latest(tmp_path / "run")[0] == 4


# what travels


def test_values_are_packed_with_their_tensors_apart():
    whole = torch.arange(24.0).reshape(4, 6)
    value = {
        "views": [whole[:2], whole[2:].T, whole[1, 2]],
        "nothing": torch.empty(0, 3, dtype=torch.bfloat16),
        "flags": torch.tensor([True, False]),
        "rest": (1, "two", None, 3.5),
    }
    content, storages = pack(value)
    assert [storage.nbytes() for storage in storages] == [96, 0, 2]  # the views have one memory
    found, empty = unpack(content)
    for target, source in zip(empty, storages, strict=True):
        target.copy_(source)
    assert flat({**found, "nothing": found["nothing"].float()}) == flat(
        {**value, "nothing": torch.empty(0, 3)}
    )
    assert found["nothing"].dtype == torch.bfloat16
    assert [t.stride() for t in found["views"]] == [t.stride() for t in value["views"]]
    assert found["views"][0].untyped_storage().data_ptr() == found["views"][2].untyped_storage().data_ptr()


def test_without_torchrun_nothing_of_it_is_loaded(tmp_path, data, monkeypatch):
    monkeypatch.setitem(sys.modules, "dash_optim.distributed", None)  # cannot be imported
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: pytest.fail("a group was made"))
    assert main(words("train", data=data, out=tmp_path / "run")) == 0


# torchrun


@contextmanager
def torchrun(argv: list[str], log: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start it, and whatever happens leave nothing of it running."""
    started = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "dash_optim", *argv]
    with log.open("wb") as stream, subprocess.Popen(started, stdout=stream, stderr=stream) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                for pid in workers(process.pid):
                    os.kill(pid, signal.SIGKILL)
                process.kill()


def workers(parent: int) -> list[int]:
    """Return the processes that a process has started, in their order."""
    found = Path(f"/proc/{parent}/task").glob("*/children")
    return sorted(int(pid) for path in found for pid in path.read_text().split())


def test_a_signal_to_torchrun_stops_all_ranks(tmp_path, data, undisturbed):
    argv = words("train", "steps=60", data=data, out=tmp_path / "run")
    with torchrun(argv, tmp_path / "log", "--standalone", "--nproc-per-node", "2") as process:
        until(lambda: lines(tmp_path / "run") >= 12)
        process.send_signal(signal.SIGTERM)
        assert process.wait(25) != 0
    said = (tmp_path / "log").read_text()
    assert said.count("dash_optim: interrupted; ") == 1
    step = Outcome.read(tmp_path / "run").step
    assert latest(tmp_path / "run")[0] == step == lines(tmp_path / "run") < 60
    assert f"{step} of 60, stopped" in said
    assert ranks(argv, 2, tmp_path)[0] == [0, 0]
    assert computed(tmp_path / "run") == undisturbed(2, "steps=60")


def test_two_machines_start_again_after_a_kill(tmp_path, data, undisturbed):
    """They count their starts each for itself, and what those before have left with torchrun is in the way."""
    argv = words("train", "steps=60", data=data, out=tmp_path / "run")
    place = "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}"
    with ExitStack() as running:
        machines = [
            running.enter_context(
                torchrun(argv, tmp_path / f"log{i}", "--nnodes", "2", "--max-restarts", "1", *place)
            )
            for i in range(2)
        ]
        until(lambda: lines(tmp_path / "run") >= 12)
        (victim,) = workers(machines[1].pid)
        os.kill(victim, signal.SIGKILL)
        assert [machine.wait(60) for machine in machines] == [0, 0]
    said = "".join((tmp_path / f"log{i}").read_text() for i in range(2))
    assert said.count(": another rank has ended or cannot be reached (") == 1
    assert said.count("60 of 60, finished") == 1
    assert computed(tmp_path / "run") == undisturbed(2, "steps=60")
