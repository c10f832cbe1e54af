# SPDX-License-Identifier: Apache-2.0
"""What a file is, from its first and last bytes: files that are not what their name says are refused by what they look like."""

from __future__ import annotations

import codecs
import struct
from pathlib import Path
from typing import Final

import numpy as np

from matroots._command import InputError

HEAD: Final = 4096  # bytes that are looked at

ZEROS: Final = "has bytes that are 0 (UTF-16 has them too: convert it to UTF-8)"

_MAGIC: Final = {
    b"PK\x03\x04": "a zip archive (.zip, .npz, or .pt of torch.save)",
    b"\x93NUMPY": "a numpy array (.npy)",
    b"BZh91AY&SY": "a bzip2 archive",
    b"\xfd7zXZ\0": "an xz archive",
    b"\x28\xb5\x2f\xfd": "a zstandard archive",
    b"\x89HDF\r\n": "an HDF5 file",
    b"\x89PNG": "a PNG image",
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"MMIDIDX": "a Megatron-LM index (.idx)",
    b"\x7fELF": "a program",
    b"%PDF-": "a PDF",
}
_TOKENS_WITH_HEADER: Final = {
    20240520: "tokens after a header of 256 int32, as llm.c and modded-nanogpt write them",
    20240801: "32-bit tokens after a header of 256 int32, as llm.c writes them for Llama 3",
}
# protocols 2 and 3 have no frame to check: what opens nearly every pickle is a collection, a string or a global
_OPENS_PICKLE: Final = (b"}", b"]", b"(", b"c", b"X", b"C")


def looks_like(head: bytes, size: int, last: bytes) -> str | None:
    """Return what known format a file is in, in words, or None.

    Args:
        head: Its first bytes, up to :data:`HEAD`.
        size: Its size in bytes.
        last: Its last byte.
    """
    if len(head) >= 4 and (header := _TOKENS_WITH_HEADER.get(struct.unpack("<i", head[:4])[0])):
        return header
    for magic, name in _MAGIC.items():
        if head.startswith(magic):
            return name
    if head[:3] == b"\x1f\x8b\x08":
        return "a gzip archive"
    if head[:3] in (b"\x80\x04\x95", b"\x80\x05\x95") and len(head) >= 11:
        # two bytes would be too little: 0x0480 is a token like any other
        return "a pickle" if struct.unpack("<Q", head[3:11])[0] <= size - 11 else None
    if head[:2] in (b"\x80\x02", b"\x80\x03") and head[2:3] in _OPENS_PICKLE and last == b".":
        return "a pickle"
    if len(head) >= 10 and head[8:10] == b'{"' and struct.unpack("<Q", head[:8])[0] <= size - 8:
        return "a safetensors file"
    return None


def is_text(head: bytes) -> bool:
    """Whether the first bytes of a file are UTF-8 without control characters other than tabs, line ends and form feeds."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return all(c >= " " or c in "\t\n\r\f" for c in text)


def peek(path: Path) -> tuple[bytes, int, bytes]:
    """Return the first bytes of a file, its size and its last byte.

    Raises:
        InputError: If it cannot be read or is empty.
    """
    try:
        with path.open("rb") as stream:
            head = stream.read(HEAD)
            size = stream.seek(0, 2)
            stream.seek(max(0, size - 1))
            last = stream.read(1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not size:
        raise InputError(f"{path}: is empty")
    return head, size, last


def why_not_text(path: Path) -> str | None:
    """Return why a file is not text, in words, as far as its first bytes and its last show it, or None.

    Raises:
        InputError: If it cannot be read or is empty.
    """
    head, size, last = peek(path)
    if found := looks_like(head, size, last):
        return f"looks like {found}"
    return ZEROS if b"\0" in head else None


def check_tokens(path: Path) -> None:
    """Raise unless a file can be what it has to be: uint16 tokens, little-endian, without a header.

    Raises:
        InputError: If it is unreadable, empty, of an odd number of bytes, text, in another format, or of wider or big-endian tokens.
    """
    head, size, last = peek(path)
    expected = f"{path}: expected uint16 tokens without a header, as nanoGPT writes them; it"
    if found := looks_like(head, size, last):
        raise InputError(f"{expected} looks like {found}")
    if is_text(head):
        raise InputError(f"{expected} looks like text: give it a name that does not end in .bin")
    if size % 2:
        raise InputError(f"{expected} has an odd number of bytes, {size}")
    tokens = np.frombuffer(head[: len(head) // 2 * 2], "<u2")
    # enough to judge by, and not just a run of zeros with something in it
    if len(tokens) >= 32 and np.count_nonzero(tokens) >= len(tokens) // 8:
        if not tokens[1::2].any():
            raise InputError(f"{expected} looks like 32-bit or 64-bit integers: every second token is 0")
        if not (tokens % 256).any():
            raise InputError(f"{expected} looks big-endian: every token is a multiple of 256")
