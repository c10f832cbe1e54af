# SPDX-License-Identifier: Apache-2.0
"""Files that are there whole or not at all, whatever moment the process or the machine dies in."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO

if sys.platform != "win32":
    import fcntl


@contextmanager
def replacement(path: Path) -> Iterator[BinaryIO]:
    """Yield a file to write and read; it takes the place of ``path``, durably, when the block ends without an error.

    Until then it is a hidden file beside ``path``, removed on an error and left to :func:`sweep` by a kill.

    Raises:
        OSError: if it cannot be written; ``path`` is as it was.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("w+b") as stream:
            try_lock(stream)  # tells sweep that its writer lives
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)
        _sync_folder(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def sweep(folder: Path, pattern: str) -> None:
    """Remove what killed processes have left of replacements of the files that match ``pattern``."""
    for partial in folder.glob(f".{pattern}.*.partial"):
        with partial.open("r+b") as stream:
            if try_lock(stream):
                partial.unlink()


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it, durably; raise ``OSError`` if that cannot be done."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync_folder(folder.parent)


def try_lock(stream: IO[bytes]) -> bool | None:
    """Lock an open file until it is closed or the process dies; return False if another holds it, None where there are no such locks."""
    if sys.platform == "win32":
        return None
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):  # some network file systems
            return None
        raise
    return True


def _sync_folder(folder: Path) -> None:
    """Make the names in a folder durable; Windows has no call for that."""
    if sys.platform == "win32":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
