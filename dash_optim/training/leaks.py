# SPDX-License-Identifier: Apache-2.0
"""Passages that stand in two parts of a text, and the text without them.

A *window* is ``WINDOW`` consecutive bytes. Two parts share a passage if they share a window, at whatever place in each. Windows are
compared by 64-bit polynomial hashes modulo 2^64 with one random word for each byte, which prefix sums give for all windows of a
chunk at once; two different ones agree with a probability of about 2^-64, and would cost no more than one passage of training text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint64]

WINDOW: Final = 64
"""About a line of prose: longer than set phrases, shorter than any passage that helps to predict another."""

PASSAGE: Final = 2000
"""Longest paragraph, in bytes, that is taken out as a whole; longer ones go by lines, longer lines by pieces of this size."""

_CHUNK: Final = 2**18  # windows hashed at a time: what is computed for them then stays in the cache
_LARGEST_FILTER: Final = 28  # bits: 256 MiB
_BASE: Final = 0x9E3779B97F4A7C15  # 5 modulo 8: its powers modulo 2^64 repeat as late as those of any number


def without_shared(text: Bytes, other: Bytes) -> Bytes:
    """Return a text without the passages that also stand in another: no window of the result is one of ``other``.

    Whole paragraphs are taken out, so that what is left is still prose; see :data:`PASSAGE`. What comes to stand side by side is looked
    at again, until nothing is shared. Time is proportional to the length of ``text``, and that of a sort to the length of ``other``;
    memory is about 16 bytes for each byte of ``other`` and 4 for each of ``text``.

    Args:
        text: uint8 ``(length,)``.
        other: uint8 ``(other length,)``.

    Returns:
        uint8 of at most ``(length,)``, ``text`` itself if nothing is shared.
    """
    known = _Windows(other)
    while (shared := known.are_in(text)).any():
        step = 1
        while step < WINDOW:  # from the starts of windows to all that they cover
            shared[step:] |= shared[:-step]
            step *= 2
        starts = passage_starts(text)
        kept = ~np.logical_or.reduceat(shared, starts)
        text = text[np.repeat(kept, np.diff(starts, append=len(text)))]
    return text


def passage_starts(text: Bytes) -> NDArray[np.int64]:
    """Return where the passages of a text start: int64 ``(passages,)``, ascending, the first of them 0.

    A passage is a paragraph with the blank lines after it, or a part of one that is longer than :data:`PASSAGE`.
    """
    lines = np.flatnonzero(text == ord("\n")) + 1
    lines = lines[lines < len(text)]
    after = np.append(text, np.uint8(0))
    blank = (after[lines] == ord("\n")) | ((after[lines] == ord("\r")) & (after[lines + 1] == ord("\n")))
    follows_blank = np.append(False, blank)[:-1]
    starts = np.append(0, lines[follows_blank & ~blank])
    for finer in (lines, np.arange(0, len(text), PASSAGE)):
        long = np.diff(starts, append=len(text)) > PASSAGE
        starts = np.union1d(starts, finer[long[np.searchsorted(starts, finer, side="right") - 1]])
    return starts.astype(np.int64)


class _Windows:
    """The set of the windows of a text: their hashes in order, and a table that tells most strangers by one look."""

    def __init__(self, text: Bytes) -> None:
        self._known = np.concatenate([np.zeros(0, np.uint64), *(hashes for _, hashes in _hashes(text))])
        self._known.sort()
        bits = min(len(self._known).bit_length() + 3, _LARGEST_FILTER)
        self._shift = np.uint64(64 - bits)
        self._filter = np.zeros(2**bits, bool)
        self._filter[self._known >> self._shift] = True

    def are_in(self, text: Bytes) -> NDArray[np.bool_]:
        """Return for every place of a text whether a window starts there that is in the set."""
        found = np.zeros(len(text), bool)
        for start, hashes in _hashes(text):
            likely = np.flatnonzero(self._filter[hashes >> self._shift])
            wanted = hashes[likely]
            places = np.searchsorted(self._known, wanted)
            places[places == len(self._known)] = 0
            if likely.size:
                found[start + likely] = self._known[places] == wanted
        return found


def _hashes(text: Bytes) -> Iterator[tuple[int, Words]]:
    """Yield, chunk by chunk, where a chunk starts and the hash of every window that starts in it."""
    words = np.frombuffer(np.random.RandomState(0).bytes(2048), "<u8").astype(np.uint64)
    powers = _powers(_BASE)
    # B^-i makes the hash of a window independent of its place i in the chunk: a power of two is the modulus, an odd B has an inverse
    inverses = _powers(pow(_BASE, -1, 2**64))
    for start in range(0, len(text) - WINDOW + 1, _CHUNK):
        piece = text[start : start + _CHUNK + WINDOW - 1]
        sums = np.append(np.uint64(0), np.cumsum(words[piece] * powers[: len(piece)]))
        hashes = sums[WINDOW:] - sums[:-WINDOW]
        yield start, hashes * inverses[: len(hashes)]


def _powers(base: int) -> Words:
    """Return ``base^i`` modulo 2^64 for every place in a chunk."""
    factors = np.full(_CHUNK + WINDOW - 1, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors)
