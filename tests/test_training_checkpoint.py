# SPDX-License-Identifier: Apache-2.0
"""Checkpoints survive a kill at every moment, a full disk and damaged files, and give back every bit."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dash_optim import DASH
from dash_optim.training import checkpoint as ck
from dash_optim.training.checkpoint import CheckpointError, CheckpointWarning, exclusive, latest, save
from matroots import _files

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def state_of(step: int) -> dict[str, Any]:
    """A state of which every part tells its step."""
    return {"w": torch.full((9,), float(step)), "nested": {"step": step, "m": [torch.full((40, 40), step)]}}


def check_state(found: tuple[int, dict[str, Any]] | None, *steps: int) -> int:
    assert found is not None
    step, state = found
    assert step in steps
    assert_same(state, state_of(step))
    return step


def assert_same(left: Any, right: Any) -> None:
    """Equal to the bit, with the same types, strides and keys in the same order."""
    assert type(left) is type(right)
    if isinstance(left, Tensor):
        assert (left.dtype, left.shape, left.stride()) == (right.dtype, right.shape, right.stride())
        assert (
            left.contiguous()
            .flatten()
            .view(torch.uint8)
            .equal(right.contiguous().flatten().view(torch.uint8))
        )
    elif isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert_same(a, b)
    else:
        assert repr(left) == repr(right)  # NaN and -0.0 too


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def filled(folder: Path, *steps: int, keep: int = 2) -> Path:
    for step in steps:
        save(folder, step, state_of(step), keep=keep)
    return folder


def in_child(work: Callable[[], object]) -> int:
    """Run it in a process that ends without any clean-up; return its exit code."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class PythonStream:
    """Lets torch write through Python, where a profiler sees each write."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, data: Any) -> int:
        return int(self.stream.write(data))

    def flush(self) -> None:
        self.stream.flush()


CHANGES = {
    "open",
    "write",
    "flush",
    "seek",
    "truncate",
    "close",
    "__exit__",
    "fsync",
    "flock",
    "replace",
    "unlink",
    "mkdir",
}


def killed_at(k: int, work: Callable[[], object]) -> bool:
    """Run ``work`` in a process that dies just before its k-th call that may change a file; False if it made fewer."""
    calls = 0

    def count(frame: FrameType, event: str, function: Any) -> None:
        nonlocal calls
        if event != "c_call" or function.__name__ not in CHANGES:
            return
        owner = getattr(function, "__self__", None)
        where = {
            getattr(function, "__module__", None),
            type(owner).__module__,
            getattr(owner, "__name__", None),
        }
        if where & {"posix", "fcntl", "_io", "io"}:
            calls += 1
            if calls == k:
                os.kill(os.getpid(), signal.SIGKILL)

    def run() -> None:
        real = torch.save
        torch.save = lambda state, stream: real(state, PythonStream(stream))
        sys.setprofile(count)
        work()

    code = in_child(run)
    assert code in (0, -signal.SIGKILL)
    return code != 0


@pytest.mark.parametrize("before", [(), (1, 2)])
def test_kill_at_every_call_leaves_a_whole_checkpoint(tmp_path: Path, before: tuple[int, ...]) -> None:
    start, folder = tmp_path / "start", tmp_path / "run"
    start.mkdir()
    filled(start, *before)
    seen = []
    for k in range(1, 1000):
        shutil.copytree(start, folder)
        if not killed_at(k, lambda: save(folder, 3, state_of(3))):
            break
        found = latest(folder)  # a warning would be an error
        seen.append(check_state(found, 3, *before[-1:]) if found or before else 0)
        save(folder, 4, state_of(4))  # goes on from what was left, and tidies up
        assert check_state(latest(folder), 4) == 4
        older = f"step-{seen[-1]:08d}.pt"
        assert names(folder) == ["checkpoints.json", *[older] * bool(seen[-1]), "step-00000004.pt"]
        shutil.rmtree(folder)
    assert len(seen) > 60
    assert seen == sorted(seen)  # the old one until some call, the new one from then on
    assert {seen[0], seen[-1]} == {*(before[-1:] or [0]), 3}


def test_kill_at_random_times(tmp_path: Path) -> None:
    chance = random.Random(0)
    last = 0
    for _ in range(12):
        pid = os.fork()
        if pid == 0:
            with exclusive(tmp_path):
                for step in range(last, 10**6):
                    save(tmp_path, step, {"step": step, "w": torch.full((200_000,), step)})
        time.sleep(chance.uniform(0.05, 0.15))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        found = latest(tmp_path)
        if found is not None:
            step, state = found
            assert step >= last
            assert state["step"] == step
            assert state["w"].eq(step).all()
            last = step
    assert last > 12


def test_order_of_durable_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path, 1, 2)
    log: list[str] = []
    fsync, replace, unlink = os.fsync, os.replace, Path.unlink

    def logged_fsync(handle: int) -> None:
        log.append(
            "sync " + Path(os.readlink(f"/proc/self/fd/{handle}")).name.rpartition(f".{os.getpid()}")[0]
        )
        fsync(handle)

    def logged_replace(source: Path, target: Path) -> None:
        log.append(f"replace {target.name}")
        replace(source, target)

    def logged_unlink(path: Path, missing_ok: bool = False) -> None:
        if path.exists():
            log.append(f"remove {path.name}")
        unlink(path, missing_ok)

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(os, "replace", logged_replace)
    monkeypatch.setattr(Path, "unlink", logged_unlink)
    save(tmp_path, 3, state_of(3))
    one = [[f"sync .{name}", f"replace {name}", "sync "] for name in ("step-00000003.pt", "checkpoints.json")]
    assert log == [*one[0], *one[1], "remove step-00000001.pt"]


@pytest.mark.parametrize("kind", ["flipped", "cut"])
def test_every_damage_of_the_newest_file_is_seen(tmp_path: Path, kind: str) -> None:
    filled(tmp_path, 1)
    save(tmp_path, 2, {"w": torch.arange(3.0), "n": 1})
    path = tmp_path / "step-00000002.pt"
    content = path.read_bytes()
    for place in [*range(0, len(content), 9), *range(len(content) - 120, len(content))]:
        damaged = bytearray(content[: place if kind == "cut" else None])
        if kind == "flipped":
            damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        with pytest.warns(
            CheckpointWarning, match=r"step-00000002\.pt is damaged.*step-00000001\.pt is used"
        ):
            check_state(latest(tmp_path), 1)
    path.write_bytes(content)
    assert latest(tmp_path) is not None


def test_a_damaged_index_costs_nothing(tmp_path: Path) -> None:
    filled(tmp_path, 1, 2)
    path = tmp_path / "checkpoints.json"
    content = path.read_bytes()
    for place in range(0, len(content), 4):
        for damaged in (
            content[:place],
            content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :],
        ):
            path.write_bytes(damaged)
            with pytest.warns(
                CheckpointWarning, match=r"checkpoints\.json is damaged.*step-00000002\.pt is used"
            ):
                check_state(latest(tmp_path), 2)
    filled(tmp_path, 3)  # made anew from the files
    assert [entry["step"] for entry in json.loads(path.read_bytes())["checkpoints"]] == [2, 3]
    path.unlink()
    check_state(latest(tmp_path), 3)


def test_missing_renamed_and_unreadable_files_are_named(tmp_path: Path) -> None:
    filled(tmp_path, 1, 2, 3, 4, keep=4)
    (tmp_path / "step-00000004.pt").unlink()
    (tmp_path / "step-00000003.pt").unlink()
    shutil.copy(tmp_path / "step-00000001.pt", tmp_path / "step-00000003.pt")
    (tmp_path / "step-00000002.pt").unlink()
    (tmp_path / "step-00000002.pt").mkdir()
    with pytest.warns(CheckpointWarning) as seen:
        check_state(latest(tmp_path), 1)
    faults = [
        "step-00000004.pt is missing",
        "step-00000003.pt is not of step 3",
        "step-00000002.pt cannot be read",
    ]
    for warning, fault in zip(seen, faults, strict=True):
        assert fault in str(warning.message)
        assert "step-00000001.pt is used" in str(warning.message)
    for path in tmp_path.glob("step-*[134].pt"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint is whole.*4\.pt is missing.*1\.pt is missing"):
        latest(tmp_path)


def test_none_only_if_there_never_was_one(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    assert latest(tmp_path / "not there") is None
    (tmp_path / ".step-00000001.pt.1.partial").write_bytes(b"half")
    (tmp_path / "step-final.pt").write_bytes(b"someone else's")
    assert latest(tmp_path) is None
    (tmp_path / "checkpoints.json").write_bytes(b"{")
    with pytest.raises(CheckpointError, match=r"checkpoints\.json is damaged"):
        latest(tmp_path)
    (tmp_path / "checkpoints.json").unlink()
    (tmp_path / "step-00000001.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"step-00000001\.pt is damaged"):
        latest(tmp_path)


def test_files_are_torchs_own_and_the_index_is_true(tmp_path: Path) -> None:
    path = save(tmp_path / "a" / "b", 123456789, state_of(5))
    assert path == tmp_path / "a" / "b" / "step-123456789.pt"
    for mmap in (False, True):
        assert_same(torch.load(path, weights_only=True, mmap=mmap), state_of(5))
    assert zipfile.ZipFile(path).testzip() is None
    content = path.read_bytes()
    (entry,) = json.loads((path.parent / "checkpoints.json").read_text())["checkpoints"]
    assert entry == {
        "file": path.name,
        "step": 123456789,
        "sha256": hashlib.sha256(content).hexdigest(),
        "size": len(content),
    }


def test_keep_and_stale_files(tmp_path: Path) -> None:
    leftover = tmp_path / ".step-00000007.pt.4000000.partial"
    leftover.write_bytes(b"half")
    strange = [".notes.1.partial", "step-7.pt", "step-0000000007.pt", "step-00000007.pt.bak"]
    for name in strange:
        (tmp_path / name).write_bytes(b"not ours")
    with _files.replacement(tmp_path / "step-00000008.pt"):  # a writer that lives
        living = next(path.name for path in tmp_path.glob(".step-00000008*"))
        filled(tmp_path, 1, 2, 3, 4, 5, keep=3)
        kept = [f"step-0000000{step}.pt" for step in (3, 4, 5)]
        assert names(tmp_path) == sorted([*strange, "checkpoints.json", living, *kept])
    (tmp_path / "step-00000008.pt").unlink()
    filled(tmp_path, 6, keep=1)
    assert names(tmp_path) == sorted([*strange, "checkpoints.json", "step-00000006.pt"])
    save(tmp_path, 6, state_of(7), keep=1)  # the same step again
    found = latest(tmp_path)
    assert found is not None
    assert_same(found, (6, state_of(7)))


def test_damaged_files_never_push_out_whole_ones(tmp_path: Path) -> None:
    filled(tmp_path, 10, 20, 30, keep=3)
    for step in (20, 30):
        path = tmp_path / f"step-000000{step}.pt"
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.warns(CheckpointWarning, match="it is removed") as seen:
        filled(tmp_path, 25)
    assert [str(warning.message).split()[1] for warning in seen] == ["step-00000020.pt", "step-00000030.pt"]
    check_state(latest(tmp_path), 25)
    assert names(tmp_path) == ["checkpoints.json", "step-00000010.pt", "step-00000025.pt"]


def test_a_later_whole_checkpoint_is_not_lost(tmp_path: Path) -> None:
    filled(tmp_path, 10, 20)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(CheckpointError, match=r"step 15: .* holds a later one, step-00000020\.pt"):
        filled(tmp_path, 15)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("where", ["write", "fsync", "replace"])
def test_a_full_disk_leaves_the_old_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    start, folder = filled(tmp_path / "start", 1, 2), tmp_path / "run"
    calls = [0, 0]  # made, and the one that fails

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls[0] += 1
            if calls[0] == calls[1]:
                raise full
            return real(*args)

        return call

    if where == "write":
        monkeypatch.setattr(PythonStream, "write", failing(PythonStream.write))
        real = torch.save
        monkeypatch.setattr(torch, "save", lambda state, stream: real(state, PythonStream(stream)))
    else:
        monkeypatch.setattr(os, where, failing(getattr(os, where)))
    failures = 0
    for k in range(1, 1000):
        shutil.copytree(start, folder)
        calls[:] = 0, k
        try:
            save(folder, 3, state_of(3))
            break
        except CheckpointError as error:
            failures += 1
            assert "No space left on device; the earlier ones remain" in str(error)  # noqa: PT017
            assert error.__cause__ is full  # noqa: PT017
        check_state(latest(folder), 2, 3)
        assert {"step-00000001.pt", "step-00000002.pt"} < {*names(folder)}
        assert not any(name.endswith(".partial") for name in names(folder))
        filled(folder, 4)
        shutil.rmtree(folder)
    assert failures >= {"write": 20, "fsync": 4, "replace": 2}[where]


def test_a_limit_on_the_size_of_files_is_a_clear_error(tmp_path: Path) -> None:
    filled(tmp_path, 1)
    state = {"w": torch.zeros(100_000)}

    def work(limit: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        with pytest.raises(CheckpointError, match=r"step-00000002\.pt.*: File too large"):
            save(tmp_path, 2, state)
        assert names(tmp_path) == ["checkpoints.json", "step-00000001.pt"]

    for limit in (0, 10, 5_000, 300_000, 400_000):
        assert in_child(lambda limit=limit: work(limit)) == 0
    save(tmp_path, 2, state)


def test_an_interrupt_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path, 1)
    before = names(tmp_path)

    def interrupted(handle: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        filled(tmp_path, 2)
    assert names(tmp_path) == before


def test_every_bit_comes_back(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    bits = torch.randint(0, 256, (64,), dtype=torch.uint8, generator=generator)
    floats = (
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.float8_e4m3fn,
    )
    ints = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    state = {
        "any bits": {str(dtype): bits.clone().view(dtype) for dtype in (*floats, *ints)},  # NaNs of all kinds
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(-0.0, dtype=torch.bfloat16),
        "empty": [torch.empty(0), torch.empty(3, 0, 2, dtype=torch.int64)],
        "strided": (torch.arange(24.0).reshape(4, 6).T, torch.arange(24)[3::4], torch.ones(1).expand(3)),
        "python": [
            1,
            -(2**200),
            0.1,
            -0.0,
            float("nan"),
            float("inf"),
            5e-324,
            None,
            True,
            "Ünïcode\0",
            b"\xff",
            (),
            {},
        ],
        "keys": {0: "a", "0": "b", (1, 2): "c", None: "d"},
        "ordered": OrderedDict(b=1, a=2),
        "set": {1, 2},
        "dtype": [torch.bfloat16, torch.device("cpu"), torch.Size([2, 3])],
        "random": random.Random(1).getstate(),
        "numpy": np.random.default_rng(2).bit_generator.state,
        "torch": generator.get_state(),
    }
    save(tmp_path, 0, state)
    found = latest(tmp_path)
    assert found is not None
    assert_same(found, (0, state))
    again = torch.Generator()
    again.set_state(found[1]["torch"])
    assert torch.rand(5, generator=again).equal(torch.rand(5, generator=generator))
    fresh = random.Random()
    fresh.setstate(found[1]["random"])
    first = random.Random(1)
    assert [fresh.gauss(0, 1) for _ in range(9)] == [first.gauss(0, 1) for _ in range(9)]


def test_shared_storage_stays_shared(tmp_path: Path) -> None:
    w = torch.zeros(3)
    save(tmp_path, 0, {"a": w, "b": w[1:]})
    found = latest(tmp_path)
    assert found is not None
    found[1]["a"][1] = 7.0
    assert found[1]["b"][0] == 7.0


def test_an_optimizer_goes_on_to_the_bit(tmp_path: Path) -> None:
    def begin() -> tuple[nn.Parameter, DASH]:
        w = nn.Parameter(torch.linspace(-1, 1, 48).reshape(8, 6))
        return w, DASH([w], lr=0.05, block_size=4, update_freq=3, refresh_young=False, momentum=0.9)

    def train(w: nn.Parameter, optimizer: DASH, steps: range) -> None:
        for step in steps:
            w.grad = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
            optimizer.step()

    w, optimizer = begin()
    train(w, optimizer, range(4))
    save(tmp_path, 4, {"w": w.detach(), "optimizer": optimizer.state_dict()})
    train(w, optimizer, range(4, 9))
    found = latest(tmp_path)
    assert found is not None
    again, other = begin()
    again.data.copy_(found[1]["w"])
    other.load_state_dict(found[1]["optimizer"])
    train(again, other, range(found[0], 9))
    assert again.equal(w)


class Unknown:
    """A class that a checkpoint may not hold."""


@pytest.mark.parametrize(
    "value", [Unknown(), lambda: 0, np.ones(3), np.float32(1), Path("a"), sys.stdout, print]
)
def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path, value: object) -> None:
    filled(tmp_path, 1)
    before = names(tmp_path)
    with pytest.raises(TypeError, match="state: expected tensors, numbers, strings"):
        save(tmp_path, 2, {"ok": 1, "bad": [value]})
    assert names(tmp_path) == before
    check_state(latest(tmp_path), 1)


def test_map_location(tmp_path: Path) -> None:
    filled(tmp_path, 1)
    found = latest(tmp_path, map_location=torch.device("meta"))
    assert found is not None
    assert found[1]["w"].is_meta
    with pytest.raises(RuntimeError, match="device"):  # not taken for damage
        latest(tmp_path, map_location="no such device")


@pytest.mark.parametrize(
    ("step", "state", "keep", "error", "message"),
    [
        (-1, {}, 2, ValueError, "step: expected an int >= 0, got -1"),
        (1.0, {}, 2, TypeError, "step: expected an int, got float"),
        (True, {}, 2, TypeError, "step: expected an int, got bool"),
        (1, {}, 0, ValueError, "keep: expected an int >= 1, got 0"),
        (1, {}, None, TypeError, "keep: expected an int, got NoneType"),
        (1, [1], 2, TypeError, "state: expected a mapping, got list"),
    ],
)
def test_bad_arguments(
    tmp_path: Path, step: Any, state: Any, keep: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        save(tmp_path, step, state, keep=keep)
    assert names(tmp_path) == []


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file: File exists"):
        save(tmp_path / "file", 1, {})
    with pytest.raises(CheckpointError, match="File exists"), exclusive(tmp_path / "file"):
        pass


def holder(folder: Path, then: Callable[[], object]) -> int:
    """Start a process that takes the folder, then does something; return its id once it holds it."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        with exclusive(folder):
            os.write(write_end, b"x")
            then()
        os._exit(0)
    assert os.read(read_end, 1) == b"x"
    os.close(read_end)
    os.close(write_end)
    return pid


def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    pid = holder(folder, signal.pause)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=f"in use by process {pid};"), exclusive(folder):
            pass
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with exclusive(folder):
        assert (folder / ".lock").read_text() == str(os.getpid())
        with pytest.raises(CheckpointError, match=f"in use by process {os.getpid()};"), exclusive(folder):
            pass
        assert in_child(lambda: holds(folder)) == 1
    assert in_child(lambda: holds(folder)) == 0


def holds(folder: Path) -> None:
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    with exclusive(folder):
        pass


def test_workers_of_a_killed_process_do_not_hold_the_folder(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()

    def work() -> None:
        worker = os.fork()
        if worker == 0:
            signal.pause()
        os.write(write_end, f"{worker:08d}".encode())
        signal.pause()

    pid = holder(tmp_path, work)
    worker = int(os.read(read_end, 8))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    try:
        os.kill(worker, 0)  # it lives
        for _ in range(100):  # its hook after the fork may still be to run
            try:
                with exclusive(tmp_path):
                    break
            except CheckpointError:
                time.sleep(0.02)
        else:
            pytest.fail("the worker holds the folder")
    finally:
        os.kill(worker, signal.SIGKILL)
        os.close(read_end)
        os.close(write_end)


def no_flock(stream: object, operation: int) -> None:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


@pytest.mark.parametrize("where", ["Windows", "network file system"])
def test_without_flock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    if where == "Windows":
        monkeypatch.setattr(sys, "platform", "win32")
    else:
        monkeypatch.setattr(fcntl, "flock", no_flock)
    leftover = tmp_path / ".step-00000001.pt.1.partial"
    leftover.write_bytes(b"whose process may live, for all that is known")
    holding = exclusive(tmp_path)
    with pytest.warns(CheckpointWarning, match="not locked: there is no flock here") as seen:
        holding.__enter__()
    assert Path(seen[0].filename).name == Path(__file__).name
    filled(tmp_path, 1, 2, 3)
    check_state(latest(tmp_path), 3)
    kept = ["step-00000002.pt", "step-00000003.pt"]
    assert names(tmp_path) == sorted([leftover.name, ".lock", "checkpoints.json", *kept])
    holding.__exit__(None, None, None)


def test_the_warning_points_at_the_caller(tmp_path: Path) -> None:
    filled(tmp_path, 1, 2)
    (tmp_path / "step-00000002.pt").write_bytes(b"")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        latest(tmp_path)
        filled(tmp_path, 3)
        assert [Path(warning.filename).name for warning in seen] == [Path(__file__).name] * 2
    assert ck.INDEX in names(tmp_path)
