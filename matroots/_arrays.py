# SPDX-License-Identifier: Apache-2.0
"""Arrays in NumPy's files: what is accepted, and a sentence about what is not."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from matroots._command import InputError

Array = npt.NDArray[Any]
REAL = (np.float16, np.float32, np.float64)
COMPLEX = (np.complex64, np.complex128)

# What numpy, zipfile and torch raise on files that are damaged or are something else than their suffix says
_UNREADABLE = (
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
    zipfile.BadZipFile,
)

_WRITTEN_BY = {
    ".npy": "an array of numbers as numpy.save writes it",
    ".npz": "arrays of numbers as numpy.savez writes them",
    ".pt": "tensors as torch.save writes them, which torch.load reads with weights_only=True",
}


@contextmanager
def readable(path: Path, argument: str) -> Iterator[None]:
    """Raise :class:`InputError`, which names the argument, where there is no such file or the block cannot read it."""
    if not path.is_file():
        raise InputError(f"{argument}: no such file: {str(path)!r}")
    try:
        yield
    except InputError:
        raise
    except _UNREADABLE as error:
        raise InputError(
            f"{argument}: cannot read {str(path)!r}: expected {_WRITTEN_BY[path.suffix]} ({type(error).__name__})"
        ) from error


def read_arrays(path: Path, argument: str) -> dict[str, Array]:
    """Return the array of a ``.npy`` file, under its stem, or all those of a ``.npz`` file; Python objects are refused."""
    with readable(path, argument), path.open("rb") as stream:
        content = np.load(stream, allow_pickle=False)
        if path.suffix == ".npz":
            if isinstance(content, np.ndarray):
                raise InputError(
                    f"{argument}: expected an archive in {str(path)!r}, got one array: name it .npy"
                )
            return {key: np.asarray(content[key]) for key in content.files}
        if not isinstance(content, np.ndarray):
            raise InputError(f"{argument}: expected one array in {str(path)!r}, got an archive: name it .npz")
        return {path.stem: content}


def write_arrays(stream: BinaryIO, suffix: str, arrays: Mapping[str, Array]) -> None:
    """Write what :func:`read_arrays` has read from a file of this suffix, under the same names."""
    if suffix == ".npy":
        (array,) = arrays.values()
        np.save(stream, array, allow_pickle=False)
        return
    with zipfile.ZipFile(stream, "w") as archive:  # numpy.savez takes names as keywords, and not every name
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def as_tensor(array: Array, label: str, dtypes: Sequence[type[np.inexact[Any]]] = REAL) -> Tensor:
    """Return an array of one of the dtypes as a tensor of the machine's byte order; raise :class:`InputError` for any other."""
    native = array.dtype.newbyteorder("=")
    if native not in dtypes:
        *names, last = (np.dtype(dtype).name for dtype in dtypes)
        raise InputError(f"{label}: expected {', '.join(names)} or {last}, got {array.dtype}")
    return torch.from_numpy(np.asarray(array, native, order="C"))
