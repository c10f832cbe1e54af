# SPDX-License-Identifier: Apache-2.0
"""Matrices from files: what is accepted, and a sentence about what is not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path

import torch
from torch import Tensor

from matroots._arguments import check_matrices
from matroots._arrays import as_tensor, read_arrays, readable
from matroots._command import InputError
from matroots._prepare import asymmetry_tolerance
from matroots._products import frobenius, symmetric_part


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
    if path.suffix not in (".npy", ".npz", ".pt"):
        raise InputError(f"--input: expected a .npy, .npz or .pt file, got {str(path)!r}")
    with readable(path, "--input"):
        tensors = _read_pt(path) if path.suffix == ".pt" else _read_numpy(path)
    matrices = {
        name: matrix for key, tensor in tensors.items() for name, matrix in _members(path, key, tensor)
    }
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


def _read_numpy(path: Path) -> dict[str, Tensor]:
    arrays = read_arrays(path, "--input")
    return {key: as_tensor(array, f"--input: {path.name}[{key}]") for key, array in arrays.items()}


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
