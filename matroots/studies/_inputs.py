"""Matrices from files: what is accepted, and a sentence about what is not."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from matroots._arguments import check_matrices
from matroots._command import InputError
from matroots._prepare import asymmetry_tolerance
from matroots._products import frobenius, symmetric_part

# What numpy, zipfile and torch raise on files that are damaged or are something else than their suffix says
_UNREADABLE = (
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
    zipfile.BadZipFile,
)


_WRITTEN_BY = {
    ".npy": "an array as numpy.save writes it",
    ".npz": "arrays as numpy.savez writes them",
    ".pt": "tensors as torch.save writes them, which torch.load reads with weights_only=True",
}


@dataclass(frozen=True)
class Group:
    """Matrices of one size: a batch ``(k, n, n)`` and the name of each member."""

    names: list[str]
    A: Tensor

    @property
    def n(self) -> int:
        """The size of the matrices."""
        return self.A.shape[-1]


def default_matrices() -> dict[str, Tensor]:
    """Return the recorded Shampoo factors that ship with the package."""
    with as_file(files("matroots") / "data" / "shampoo_factors.npz") as path:
        return load_matrices(path)


def load_matrices(path: Path) -> dict[str, Tensor]:
    """Read symmetric matrices from a file, one name each.

    Args:
        path: ``.npy``, ``.npz`` (any number of arrays) or ``.pt`` (a tensor, or a dict, list or tuple of tensors, loaded
            with ``weights_only=True``). An array is one matrix ``(n, n)`` or a stack ``(k, ..., n, n)``.

    Returns:
        Names to CPU tensors ``(n, n)``, of the dtype in the file. A member of a stack is named like ``weight[3]``.

    Raises:
        InputError: if the file cannot be read, or holds anything but finite, symmetric, real floating-point matrices.
    """
    readers = {".npy": _read_npy, ".npz": _read_npz, ".pt": _read_pt}
    if path.suffix not in readers:
        raise InputError(f"--input: expected a .npy, .npz or .pt file, got {str(path)!r}")
    if not path.is_file():
        raise InputError(f"--input: no such file: {str(path)!r}")
    try:
        arrays = readers[path.suffix](path)
    except InputError:
        raise
    except _UNREADABLE as error:
        raise InputError(
            f"--input: cannot read {str(path)!r}: expected {_WRITTEN_BY[path.suffix]} ({type(error).__name__})"
        ) from error
    matrices = {name: matrix for key, array in arrays.items() for name, matrix in _members(path, key, array)}
    if not matrices:
        raise InputError(f"--input: expected at least one matrix, got none in {str(path)!r}")
    return matrices


def by_size(matrices: Mapping[str, Tensor], dtype: torch.dtype) -> list[Group]:
    """Return the matrices rounded to ``dtype`` as one batch per size, smallest size first."""
    sizes = sorted({matrix.shape[-1] for matrix in matrices.values()})
    groups = []
    for n in sizes:
        names = [name for name, matrix in matrices.items() if matrix.shape[-1] == n]
        groups.append(Group(names, torch.stack([matrices[name].to(dtype) for name in names])))
    return groups


def check_range(matrices: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Raise :class:`InputError` if rounding to ``dtype`` makes a matrix infinite, or zero what is not zero."""
    for name, matrix in matrices.items():
        largest = matrix.abs().amax()
        rounded = largest.to(dtype)
        if not torch.isfinite(rounded) or (rounded == 0 and largest > 0):
            raise InputError(
                f"--dtypes: {str(dtype).removeprefix('torch.')} cannot hold matrix {name}, whose largest entry is"
                f" {float(largest):.1e}; expected dtypes that can"
            )


def a_few(matrices: Mapping[str, Tensor], count: int, largest: int) -> dict[str, Tensor]:
    """Return ``count`` matrices spread over those up to size ``largest`` (over the smallest ones, if none is)."""
    limit = max(largest, min(matrix.shape[-1] for matrix in matrices.values()))
    names = [name for name, matrix in matrices.items() if matrix.shape[-1] <= limit]
    stride = max(1, len(names) // count)
    return {name: matrices[name] for name in names[::stride][:count]}


def _read_npy(path: Path) -> dict[str, Tensor]:
    array = np.load(path, allow_pickle=False)
    if not isinstance(array, np.ndarray):
        raise InputError(f"--input: expected one array in {str(path)!r}, got an archive: name it .npz")
    return {path.stem: _as_tensor(path, path.stem, array)}


def _read_npz(path: Path) -> dict[str, Tensor]:
    with path.open("rb") as stream:
        archive = np.load(stream, allow_pickle=False)
        if isinstance(archive, np.ndarray):
            raise InputError(f"--input: expected an archive in {str(path)!r}, got one array: name it .npy")
        return {key: _as_tensor(path, key, archive[key]) for key in archive.files}


def _read_pt(path: Path) -> dict[str, Tensor]:
    content: object = torch.load(path, map_location="cpu", weights_only=True)
    if isinstance(content, Tensor):
        return {path.stem: content}
    if isinstance(content, Mapping):
        entries = {str(key): value for key, value in content.items()}
    elif isinstance(content, (list, tuple)):
        entries = {str(index): value for index, value in enumerate(content)}
    else:
        raise InputError(
            f"--input: expected a tensor or a dict or list of tensors in {str(path)!r}, got {type(content).__name__}"
        )
    for key, value in entries.items():
        if not isinstance(value, Tensor):
            raise InputError(
                f"--input: {path.name}[{key}]: expected a torch.Tensor, got {type(value).__name__}"
            )
    return entries


def _as_tensor(path: Path, key: str, array: np.ndarray) -> Tensor:
    native = array.dtype.newbyteorder("=")
    if native not in (np.float16, np.float32, np.float64):
        raise InputError(
            f"--input: {path.name}[{key}]: expected float16, float32 or float64, got {array.dtype}"
        )
    return torch.from_numpy(array.astype(native, order="C"))


def _members(path: Path, key: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield each matrix of a stack with its name, or raise on the first that is no finite symmetric matrix."""
    label = f"--input: {path.name}[{key}]"
    try:
        check_matrices(tensor, label)
    except (TypeError, ValueError) as error:
        raise InputError(str(error)) from error
    if tensor.numel() == 0:
        raise InputError(f"{label}: expected matrices with entries, got an empty array {tuple(tensor.shape)}")
    flat = tensor.detach().reshape(-1, *tensor.shape[-2:])
    for index, matrix in enumerate(flat):
        name = key if tensor.ndim == 2 else f"{key}[{index}]"
        if not torch.isfinite(matrix).all():
            raise InputError(f"{label}: expected finite values, got a NaN or an infinity in matrix {name}")
        wide = matrix.double() / matrix.abs().amax().double().clamp_min(torch.finfo(torch.float64).tiny)
        S = symmetric_part(wide)
        gap, size = float(frobenius(wide - S)), float(frobenius(S))
        if gap > asymmetry_tolerance(matrix) * size:
            raise InputError(
                f"{label}: expected symmetric matrices, got an antisymmetric part of {gap:.1e} beside {size:.1e}"
                f" in matrix {name}"
            )
        yield name, matrix
