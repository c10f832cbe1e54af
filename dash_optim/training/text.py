# SPDX-License-Identifier: Apache-2.0
"""Text to train on and text held out, of which no passage stands in both.

Text repeats itself: help topics quote one another, files share licenses. A model that has read a passage in training predicts it
well, and a validation loss then measures memory. So whole documents are held out, and what the training part shares with them is
removed from it, paragraph by paragraph.

On the default text, the topics of ``pydoc_data`` of Python 3.11 (466 kB in 79 topics), the share of held-out 64-byte windows that
also stand in the training part is

================================================  ==========  ============  =====
split                                             to train    held out      share
================================================  ==========  ============  =====
the last tenth                                    419,575     46,620        8.4%
the last tenth, of each paragraph only the first  336,737     37,416        0.2%
topics held out whole                             419,085     46,586        71.2%
**topics held out whole, the shared removed**     373,349     46,586        0
================================================  ==========  ============  =====

The last is what is done here, with any text. Removing repetitions first, as in the second row, would cost a tenth of the text more and
not be enough: passages also stand in paragraphs that differ. Of 32-byte windows, set phrases mostly, 2.5% still stand in both parts.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from dash_optim.training.formats import ZEROS, why_not_text
from dash_optim.training.leaks import Bytes, passage_starts, without_shared
from matroots._command import InputError

MOST: Final = 2**30
"""Largest text, in bytes: it is held in memory, several times over while it is split, which takes about two minutes for so much."""

_SEPARATOR: Final = b"\n\n"


@dataclass(frozen=True)
class Document:
    """A text and the name that decides its place and whether it is held out."""

    name: str
    content: bytes


@dataclass(frozen=True)
class Split:
    """The two parts of a text, uint8, and what has been left out of it, in words."""

    train: Bytes
    held_out: Bytes
    notes: tuple[str, ...]


def help_topics() -> list[Document]:
    """Return the help topics of Python by name: the same bytes wherever the same Python runs.

    Raises:
        InputError: If this Python has been installed without them.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise InputError(
            "data: this Python has been installed without its help topics (pydoc_data); name a text to train on"
        ) from error
    return [Document(name, topics[name].encode()) for name in sorted(topics)]


def read_documents(paths: Sequence[Path]) -> tuple[list[Document], tuple[str, ...]]:
    """Read text files, and all those in folders, by name.

    In a folder, and those in it, files whose name starts with a dot, files that are not text, and empty ones are left out.

    Returns:
        The documents, and notes on what was left out.

    Raises:
        InputError: If a path does not exist, cannot be read, is empty or no text; if a folder has no text; if all is too much.
    """
    documents: list[Document] = []
    left_out: list[str] = []
    room = MOST
    for path in paths:
        before = len(documents)
        files = _files_in(path) if path.is_dir() else [path]
        for file in files:
            reason = _refused(file, in_folder=path.is_dir())
            content = b"" if reason else _read(file, room)
            reason = reason or (ZEROS if b"\0" in content else None)
            if reason and not path.is_dir():
                raise InputError(f"{path}: expected text; it {reason}")
            if reason:
                left_out.append(f"{file}: left out: {reason}")
                continue
            room -= len(content)
            name = file.relative_to(path).as_posix() if path.is_dir() else file.name
            documents.append(Document(name, content))
        if len(documents) == before:
            raise InputError(f"{path}: expected a folder with text; none of its {len(files)} files is")
    return documents, tuple(left_out)


def split(documents: Sequence[Document], held_out: float, name: str) -> Split:
    """Hold out documents, and remove from the others every passage that also stands in these.

    Documents are taken in the order of a hash of their name, whole as long as they fit into ``held_out`` of all bytes; of the first that
    does not fit, the end is. A single text so loses its end, at a blank line or the end of a line if there is one nearby. Both parts
    keep the order of the documents. Of documents with the same content the first counts.

    Raises:
        InputError: If there is no text to speak of, or nothing is left to train on.
    """
    unique, notes = _without_repetitions(documents)
    cuts = _cuts(unique, held_out)
    train = _joined([d.content[:cut] for d, cut in zip(unique, cuts, strict=True)])
    held = _joined([d.content[cut:] for d, cut in zip(unique, cuts, strict=True)])
    if min(len(train), len(held)) < 2:
        raise InputError(f"{name}: expected more text; {len(train) + len(held)} bytes cannot be split")
    clean = without_shared(train, held)
    if len(clean) < 2:
        raise InputError(
            f"{name}: repeats itself: every passage of the {len(train):,} bytes to train on also stands in the"
            f" {len(held):,} held out (held_out={held_out:g})"
        )
    if len(clean) < len(train):
        notes.append(
            f"{len(train) - len(clean):,} bytes left out of the training part that also stand in the held-out part"
        )
    clean.flags.writeable = False
    return Split(clean, held, tuple(notes))


def _without_repetitions(documents: Sequence[Document]) -> tuple[list[Document], list[str]]:
    """Return the documents that differ, and a note on each that repeats another."""
    first: dict[bytes, Document] = {}
    notes = []
    for document in documents:
        earlier = first.setdefault(hashlib.sha256(document.content).digest(), document)
        if earlier is not document:
            notes.append(f"{document.name}: left out: the same as {earlier.name}")
    return list(first.values()), notes


def _cuts(documents: Sequence[Document], held_out: float) -> list[int]:
    """Return for each document from where on it is held out."""
    cuts = [len(d.content) for d in documents]
    wanted = max(1, round(held_out * sum(cuts)))
    for i in sorted(range(len(cuts)), key=lambda i: hashlib.sha256(os.fsencode(documents[i].name)).digest()):
        if cuts[i] > wanted:
            cuts[i] = _cut(documents[i].content, wanted)
            break
        wanted -= cuts[i]
        cuts[i] = 0
    return cuts


def _cut(content: bytes, wanted: int) -> int:
    """Return the start of a passage about so many bytes before the end, or that very place if there is none nearby."""
    exact = len(content) - wanted
    starts = passage_starts(np.frombuffer(content, np.uint8))
    nearest = int(starts[np.abs(starts - exact).argmin()])
    return nearest if nearest > 0 and abs(nearest - exact) <= wanted // 2 else exact


def _joined(contents: Sequence[bytes]) -> Bytes:
    return np.frombuffer(_SEPARATOR.join(c for c in contents if c), np.uint8)


def _files_in(folder: Path) -> list[Path]:
    """Return the files in a folder and those below, by name; hidden ones are none of a text."""

    def unreadable(error: OSError) -> None:
        raise InputError(f"{error.filename}: cannot be read: {error.strerror}") from error

    found: list[Path] = []
    for parent, folders, files in os.walk(folder, onerror=unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(parent, name) for name in files if not name.startswith(".")]
    return sorted(found, key=lambda file: file.relative_to(folder).as_posix())


def _refused(file: Path, in_folder: bool) -> str | None:
    """Return why a file is not read, if its first bytes show it; what cannot be read is an error."""
    if file.exists() and not file.is_file():
        return "is not a regular file"  # reading from a pipe or a device may never end
    if in_folder and not file.exists():
        return "is a link to nothing"
    if in_folder and not file.stat().st_size:
        return "is empty"
    return why_not_text(file)


def _read(file: Path, room: int) -> bytes:
    size = file.stat().st_size
    if size > room:
        raise InputError(
            f"{file}: too much text: with it there are {MOST - room + size:,} bytes, more than the {MOST:,} that are held in memory;"
            " write it as uint16 tokens to train.bin and val.bin, which are read as needed"
        )
    try:
        return file.read_bytes()
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror or error}") from error
