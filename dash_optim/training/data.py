# SPDX-License-Identifier: Apache-2.0
"""What a language model is trained on: text as bytes, or tokens as nanoGPT and llm-baselines store them.

Batches are drawn by a hash of (seed, step) and nothing else, so that a resumed run needs no state and continues exactly, and what a
step sees does not depend on the machine, on the versions of libraries, or on what was drawn before.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor

from dash_optim.training import text
from dash_optim.training.formats import check_tokens
from matroots._command import InputError

__all__ = ["Corpus", "load_corpus"]

Tokens: TypeAlias = NDArray[np.unsignedinteger[Any]]

BYTES: Final = 256
_PADDED: Final = 64  # 50,257 becomes 50,304: whole tiles of matrix units, as in nanoGPT; and room for symbols seen nowhere yet
_CHUNK: Final = 2**20  # tokens searched together
_SEARCHED: Final = (
    2**30
)  # bytes of a token file up to which a given vocabulary is compared with all of it: that takes a second
_WHOLE: Final = 2**24  # bytes of a token file up to which all of it goes into the fingerprint
_BLOCK: Final = 4096  # bytes of one sample of a longer one
_BLOCKS: Final = 256  # samples: each may cost a disk a search


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokens to train on and tokens held out.

    Attributes:
        train: uint8 or little-endian uint16 ``(length,)``, read-only, perhaps a memory map.
        held_out: The same, of another length.
        vocab: Number of symbols; tokens are ``0, ..., vocab - 1``.
        name: What a table calls it.
        fingerprint: 16 hexadecimal digits: a hash of lengths, dtype and content, of token files above 16 MiB only 256 samples of 4
            KiB each.
        notes: What was left out of what was read and why, a sentence each.
    """

    train: Tokens = field(repr=False)
    held_out: Tokens = field(repr=False)
    vocab: int
    name: str
    fingerprint: str
    notes: tuple[str, ...] = ()

    def batch(self, step: int, *, batch: int, context: int, seed: int) -> Tensor:
        """Return random windows of the training part, all positions equally likely: int64 ``(batch, context + 1)``.

        A pure function of ``(seed, step)``: windows start at 64-bit words of SHAKE-128 of both, modulo the number of positions. Neighbouring
        seeds and steps are as independent as any others. A smaller batch has the first rows of a larger one.

        Raises:
            InputError: If a window does not fit into the training part, or holds a token that is not below ``vocab``.
        """
        _check_count("batch", batch)
        windows = self._windows(self.train, "training", context)
        words = np.frombuffer(hashlib.shake_128(f"{int(seed)} {int(step)}".encode()).digest(8 * batch), "<u8")
        return self._checked(windows, (words % np.uint64(len(windows))).astype(np.int64), "training")

    def validation(self, *, context: int, most: int | None = None) -> Tensor:
        """Return consecutive windows of the held-out part: int64 ``(windows, context + 1)``.

        Each starts with the last token of the one before it, so that every token is predicted exactly once, apart from the first and a
        rest of less than ``context``. If there are more than ``most``, that many of them, spread evenly over the part.

        Raises:
            InputError: If a window does not fit into the held-out part, or holds a token that is not below ``vocab``.
        """
        windows = self._windows(self.held_out, "held-out", context)
        count = (len(self.held_out) - 1) // context
        places = np.arange(count)
        if most is not None and _check_count("most", most) < count:
            places = (2 * np.arange(most) + 1) * count // (2 * most)
        return self._checked(windows, places * context, "held-out")

    def _windows(self, tokens: Tokens, part: str, context: int) -> Tokens:
        """Return a view of all windows of a part: ``(positions, context + 1)``."""
        if len(tokens) <= _check_count("context", context):
            raise InputError(
                f"{self.name}: context {context} needs windows of {context + 1} tokens, the {part} part has {len(tokens)}"
            )
        return sliding_window_view(tokens, context + 1)

    def _checked(self, windows: Tokens, starts: NDArray[np.int64], part: str) -> Tensor:
        """Return a copy of windows, or raise: files may be too large to be searched for wrong tokens before."""
        drawn = np.asarray(windows[starts]).astype(np.int64)
        if (largest := int(drawn.max())) >= self.vocab:
            row, column = np.unravel_index(drawn.argmax(), drawn.shape)
            raise InputError(
                f"{self.name}: token {int(starts[row] + column)} of the {part} part is {largest}, expected less than vocab, {self.vocab}"
            )
        return torch.from_numpy(drawn)


def load_corpus(
    paths: Sequence[str | Path] | str | Path | None = None, *, held_out: float = 0.1, vocab: int | None = None
) -> Corpus:
    """Load what to train on.

    ``None`` is the text that ships with Python. Otherwise

    * a text file, several, or folders of them (by name, also those below; hidden, empty and binary ones are left out and noted): the
      symbols are bytes. Whole documents are held out, and the training part has no passage of theirs: see :mod:`.text`. Text is
      held in memory, at most 1 GiB of it;
    * a folder with ``train.bin`` and ``val.bin``, or one file ``.bin``, of which the last ``held_out`` are held out, as they are:
      little-endian uint16 tokens, memory-mapped and read as needed. ``meta.pkl`` beside them is not opened: to unpickle a file is to
      run it.

    Args:
        paths: One path or several.
        held_out: Share of the data to hold out, between 0 and 1; of no meaning where there is a ``val.bin``.
        vocab: Number of symbols, 256 for text. By default that of token files is what the largest token in them needs, for which they are
            read once, rounded up to a multiple of 64. If given, files up to 1 GiB are searched for tokens that cannot be; those of longer ones are compared
            with it when they are drawn.

    Raises:
        InputError: (a ``ValueError``) If a file is missing, unreadable, empty, or not what it has to be; the message says what it looks
            like. If ``held_out`` or ``vocab`` is out of range.
        TypeError: If ``paths`` is no path.
    """
    if not 0 < held_out < 1:
        raise InputError(f"held_out: expected a share between 0 and 1, got {held_out!r}")
    if vocab is not None and _check_count("vocab", vocab) > 2**16:
        raise InputError(f"vocab: expected at most {2**16}, as tokens are uint16, got {vocab}")
    if paths is None:
        return _of_text(text.help_topics(), (), "Python's help topics", held_out, vocab)
    found = _existing(paths)
    tokens = [path for path in found if _has_tokens(path)]
    if not tokens:
        name = str(found[0]) + (f" and {len(found) - 1} more" if len(found) > 1 else "")
        documents, notes = text.read_documents(found)
        return _of_text(documents, notes, name, held_out, vocab)
    if len(found) > 1:
        raise InputError(
            f"{tokens[0]}: expected token files alone: one .bin, or one folder with train.bin and val.bin"
        )
    return _of_tokens(tokens[0], held_out, vocab)


def _existing(paths: Sequence[str | Path] | str | Path) -> list[Path]:
    several = [paths] if isinstance(paths, str | os.PathLike) else paths
    if not isinstance(several, Sequence) or not all(isinstance(p, str | os.PathLike) for p in several):
        raise TypeError(f"paths: expected a path or several, got {paths!r}")
    found = [Path(p) for p in several]
    if not found:
        raise InputError("paths: expected at least one, got none")
    for path in found:
        try:
            path.stat()
        except FileNotFoundError:
            raise InputError(f"{path}: no such file or folder") from None
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    return found


def _has_tokens(path: Path) -> bool:
    if not path.is_dir():
        return path.suffix == ".bin"
    return (path / "train.bin").exists() or (path / "val.bin").exists()


def _of_text(
    documents: Sequence[text.Document], notes: tuple[str, ...], name: str, held_out: float, vocab: int | None
) -> Corpus:
    if vocab is not None and vocab < BYTES:
        raise InputError(f"vocab: text is bytes, of which there are {BYTES}, got {vocab}")
    parts = text.split(documents, held_out, name)
    fingerprint = _fingerprint(parts.train, parts.held_out, (parts.train.data, parts.held_out.data))
    return Corpus(parts.train, parts.held_out, vocab or BYTES, name, fingerprint, notes + parts.notes)


def _of_tokens(path: Path, held_out: float, vocab: int | None) -> Corpus:
    files = [path / "train.bin", path / "val.bin"] if path.is_dir() else [path]
    files = [file for file in files if file.exists() or file.name == "train.bin"]
    parts = [_mapped(file) for file in files]
    if len(parts) == 1:
        (whole,) = parts
        cut = len(whole) - max(1, round(held_out * len(whole)))
        parts = [whole[:cut], whole[cut:]]
    train, held = parts
    if min(len(train), len(held)) < 2:
        raise InputError(
            f"{path}: expected more tokens, got {len(train)} to train on and {len(held)} held out"
        )
    searched = [file for file in files if vocab is None or file.stat().st_size <= _SEARCHED]
    largest = {file: _largest(file) for file in searched}
    if vocab is None:
        vocab = -(-(1 + max(largest.values())) // _PADDED) * _PADDED
    for file, token in largest.items():
        if token >= vocab:
            raise InputError(f"{file}: holds token {token}, expected less than vocab, {vocab}")
    samples = itertools.chain.from_iterable(_samples(file) for file in files)
    return Corpus(train, held, vocab, str(path), _fingerprint(train, held, samples))


def _mapped(path: Path) -> Tokens:
    if not path.is_file():
        beside = ", only a val.bin" if path.name == "train.bin" else ""
        raise InputError(f"{path}: no such file{beside}")
    check_tokens(path)
    return np.memmap(path, dtype="<u2", mode="r")


def _largest(path: Path) -> int:
    """Return the largest token of a file, read once from end to end."""
    largest = 0
    with path.open("rb") as stream:
        while (tokens := np.fromfile(stream, "<u2", _CHUNK)).size:
            largest = max(largest, int(tokens.max()))
    return largest


def _samples(path: Path) -> Iterator[bytes]:
    """Yield a file's content, of a long one samples spread evenly from its first bytes to its last.

    They are read, not taken from the map: for each page touched in a map a system may fetch megabytes around it.
    """
    size = path.stat().st_size
    with path.open("rb") as stream:
        if size <= _WHOLE:
            yield stream.read()
            return
        for i in range(_BLOCKS):
            stream.seek((size - _BLOCK) * i // (_BLOCKS - 1))
            yield stream.read(_BLOCK)


def _fingerprint(train: Tokens, held_out: Tokens, content: Iterable[bytes | memoryview]) -> str:
    state = hashlib.sha256(f"{train.dtype.str} {len(train)} {len(held_out)};".encode())
    for piece in content:
        state.update(piece)
    return state.hexdigest()[:16]


def _check_count(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name}: expected an integer of at least 1, got {value!r}")
    return value
