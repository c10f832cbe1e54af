# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of which one whole is always there, whenever the process is killed.

A checkpoint is what ``torch.save`` writes, with a seal as the comment at the end of the zip archive: the step, and the SHA-256 of all bytes
before. So each file can be verified on its own, to the last byte (the CRCs of a zip archive cover neither its headers nor its padding, and
``torch.load`` does not look at them). The index ``checkpoints.json`` is verified in the same way, and tells one thing that the files cannot:
which of them are missing. Each file takes its place in one atomic step, after it has reached the disk; old ones go after that.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import struct
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch

from matroots._files import make_folder, replacement, sweep, try_lock

INDEX: Final = "checkpoints.json"
LOCK: Final = ".lock"
_DIGEST: Final = 64  # hexadecimal digits of a SHA-256
_CHUNK: Final = 1 << 20

Entry = dict[str, Any]
"""A line of the index: file, step, sha256 and size, of the whole file."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read, or its folder is in use."""


class CheckpointWarning(UserWarning):
    """A checkpoint is not whole, and another one is used."""


def save(folder: Path, step: int, state: Mapping[str, Any], *, keep: int = 2) -> Path:
    """Write ``folder/step-00000120.pt`` and the index, then remove all but the newest ``keep`` checkpoints; return the path.

    To be called by the process that holds the folder (:func:`exclusive`). After a kill at any moment :func:`latest` finds this checkpoint or
    the one before it.

    Args:
        folder: made if it is not there.
        step: number of steps done, >= 0, not below that of a whole checkpoint in the folder. One of the same step is replaced.
        state: tensors (any dtype, layout of strides and device), numbers, strings, None, and dicts, lists and tuples of them: what
            ``torch.load(..., weights_only=True)`` takes. Comes back bit for bit.
        keep: how many checkpoints remain, >= 1.

    Raises:
        CheckpointError: if the disk is full or the like, or if there is a whole checkpoint of a later step. The earlier ones remain.
        TypeError: if ``state`` holds what could not be loaded again; nothing is written.
        ValueError: for a negative ``step``, or ``keep`` below 1.
    """
    _check_count("step", step, least=0)
    _check_count("keep", keep, least=1)
    if not isinstance(state, Mapping):
        raise TypeError(f"state: expected a mapping, got {type(state).__name__}")
    path = folder / _name(step)
    try:
        make_folder(folder)
        sweep(folder, "step-*.pt")
        sweep(folder, INDEX)
        entries = _others(folder, step)
        with replacement(path) as stream:
            _write(stream, dict(state))
            entries.append(_seal(stream, step))
        entries = entries[-keep:]
        with replacement(folder / INDEX) as stream:
            stream.write(_index(entries))
        for old in set(_steps(folder)).difference(entry["step"] for entry in entries):
            (folder / _name(old)).unlink()
    except OSError as error:
        raise CheckpointError(
            f"checkpoint of step {step}: {error.filename or path}: {error.strerror}; the earlier ones remain"
        ) from error
    return path


def latest(folder: Path, *, map_location: Any = "cpu") -> tuple[int, dict[str, Any]] | None:
    """Return step and state of the newest checkpoint that is whole; None if there never was one.

    Args:
        folder: need not exist.
        map_location: where the tensors go, as for ``torch.load``.

    Warns:
        CheckpointWarning: for each newer one that is truncated, altered, renamed or missing, and for such an index.

    Raises:
        CheckpointError: if there were checkpoints and none is whole.
    """
    index = _read_index(folder)
    faults = [f"{INDEX} is damaged or cannot be read"] if index is None else []
    for step in sorted({*_steps(folder), *(index or {})}, reverse=True):
        try:
            with (folder / _name(step)).open("rb") as stream:
                _verify(stream, step)
                stream.seek(0)
                state = torch.load(stream, map_location=map_location, weights_only=True)
        except (OSError, CheckpointError) as error:
            faults.append(f"{_name(step)} {_reason(error)}")
            continue
        for fault in faults:
            warnings.warn(f"{folder}: {fault}; {_name(step)} is used", CheckpointWarning, stacklevel=2)
        return step, state
    if faults:
        raise CheckpointError(
            f"{folder}: no checkpoint is whole: {'; '.join(faults)}; delete this folder to start over"
        )
    return None


def clear(folder: Path) -> None:
    """Remove all checkpoints and the index; to be called by the process that holds the folder."""
    (folder / INDEX).unlink(missing_ok=True)  # first: without it no checkpoint is missed
    for step in _steps(folder):
        (folder / _name(step)).unlink()


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold a folder, made if it is not there, for this process; a process that is killed lets go of it.

    Where there is no ``flock`` (Windows, some network file systems) nothing keeps a second process out, which is said by a :class:`CheckpointWarning`.

    Raises:
        CheckpointError: if another process holds the folder (it is named), or if it cannot be written to.
    """
    with ExitStack() as held:
        try:
            make_folder(folder)
            _take(held.enter_context((folder / LOCK).open("a+b", buffering=0)), folder)
        except OSError as error:
            raise CheckpointError(f"{folder}: cannot be locked: {error.strerror}") from error
        yield


def _take(stream: FileIO, folder: Path) -> None:
    """Lock the file of a folder, and write this process down in it."""
    free = try_lock(stream)
    if free is None:
        warnings.warn(f"{folder}: not locked: there is no flock here", CheckpointWarning, stacklevel=4)
        return
    stream.seek(0)
    if not free:
        holder = stream.read().decode(errors="replace").strip() or "(unknown)"
        raise CheckpointError(f"{folder}: in use by process {holder}; let it end, or use another folder")
    if sys.platform != "win32":
        os.register_at_fork(
            after_in_child=stream.close
        )  # workers that outlive this process would hold the lock
    stream.truncate(0)
    stream.write(str(os.getpid()).encode())


def _check_count(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name}: expected an int >= {least}, got {value}")


def _name(step: int) -> str:
    return f"step-{step:08d}.pt"


def _steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoint files, in ascending order."""
    names = [path.name for path in folder.glob("step-*.pt")]
    steps = [int(match[1]) for name in names if (match := re.fullmatch(r"step-(\d{8,})\.pt", name))]
    return sorted(step for step in steps if _name(step) in names)


def _others(folder: Path, step: int) -> list[Entry]:
    """Return the entries of the whole checkpoints before ``step``, in ascending order; raise :class:`CheckpointError` if there is one after it.

    One that the index lists, of the size it lists, is taken as whole. Any other is read.
    """
    index, entries = _read_index(folder) or {}, []
    for other in _steps(folder):
        path = folder / _name(other)
        if other == step:
            continue
        if other < step and other in index and path.stat().st_size == index[other]["size"]:
            entries.append(index[other])
            continue
        try:
            with path.open("rb") as stream:
                entries.append(_verify(stream, other))
        except CheckpointError as error:
            warnings.warn(f"{folder}: {path.name} {error}; it is removed", CheckpointWarning, stacklevel=3)
            continue
        if other > step:
            raise CheckpointError(
                f"checkpoint of step {step}: {folder} holds a later one, {path.name}: resume from it, remove it, or use another folder"
            )
    return entries


def _write(stream: BinaryIO, state: dict[str, Any]) -> None:
    """Write what can be loaded again; raise ``TypeError`` otherwise."""
    try:
        torch.save(state, stream)
        stream.seek(0)
        torch.load(stream, map_location="meta", weights_only=True)  # makes every object, reads no tensor
    except RuntimeError as error:
        # what torch makes of a disk that is full: "unexpected pos"
        raise error.__context__ if isinstance(error.__context__, OSError) else error from None
    except (pickle.PickleError, AttributeError, TypeError) as error:
        raise TypeError(
            "state: expected tensors, numbers, strings, None and dicts, lists, tuples of them;"
            f" torch.load(..., weights_only=True) would not take this: {error}"
        ) from error


def _seal(stream: BinaryIO, step: int) -> Entry:
    """Add the comment to the zip archive; return the entry of the index."""
    mark = _mark(step)
    stream.seek(-2, os.SEEK_END)  # the length of the comment
    stream.write(struct.pack("<H", len(mark) + _DIGEST) + mark)
    size = stream.tell()
    digest = _sha256(stream, size)
    seal = digest.hexdigest().encode()
    stream.write(seal)
    digest.update(seal)
    return _entry(step, digest.hexdigest(), size + _DIGEST)


def _verify(stream: BinaryIO, step: int) -> Entry:
    """Return the entry of a checkpoint file; raise :class:`CheckpointError` if it is not whole, or not of this step."""
    size = stream.seek(0, os.SEEK_END)
    digest = _sha256(stream, max(0, size - _DIGEST))
    seal = stream.read()
    if seal != digest.hexdigest().encode():
        raise CheckpointError("is damaged: its SHA-256 is not the one at its end")
    mark = _mark(step)
    stream.seek(max(0, size - _DIGEST - len(mark)))
    if stream.read(len(mark)) != mark:
        raise CheckpointError(f"is not of step {step}, by what stands at its end")
    digest.update(seal)
    return _entry(step, digest.hexdigest(), size)


def _mark(step: int) -> bytes:
    return f"dash_optim checkpoint, step {step:08d}, sha256 ".encode()


def _sha256(stream: BinaryIO, stop: int) -> Any:
    """Return the hash of the first ``stop`` bytes; leave the stream there."""
    digest = hashlib.sha256()
    stream.seek(0)
    while chunk := stream.read(min(_CHUNK, stop - stream.tell())):
        digest.update(chunk)
    return digest


def _entry(step: int, sha256: str, size: int) -> Entry:
    return {"file": _name(step), "step": step, "sha256": sha256, "size": size}


def _index(entries: list[Entry]) -> bytes:
    """Return the content of the index, which has a digest of its own."""
    content = {"checkpoints": entries, "sha256": hashlib.sha256(json.dumps(entries).encode()).hexdigest()}
    return json.dumps(content, indent=1).encode() + b"\n"


def _read_index(folder: Path) -> dict[int, Entry] | None:
    """Return the entries by their steps, none if there is no index; None if it is damaged."""
    try:
        content = (folder / INDEX).read_bytes()
        entries = json.loads(content)["checkpoints"]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return {entry["step"]: entry for entry in entries} if content == _index(entries) else None


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "is missing"
    return f"cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
