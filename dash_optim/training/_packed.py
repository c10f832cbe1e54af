# SPDX-License-Identifier: Apache-2.0
"""A value and the memory of its tensors apart, so that neither is copied to be sent."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor


def pack(value: Any) -> tuple[bytes, list[torch.UntypedStorage]]:
    """Return a value without its tensors' memory, and that memory, each piece once; tensors have to be on the CPU, and keep dtype, shape and strides."""
    stream = io.BytesIO()
    packer = _Packer(stream)
    packer.dump(value)
    return stream.getvalue(), list(packer.storages.values())


def unpack(content: bytes) -> tuple[Any, list[torch.UntypedStorage]]:
    """Return the value, and the memory of its tensors, in the same order, which is still to be filled."""
    unpacker = _Unpacker(io.BytesIO(content))
    return unpacker.load(), list(unpacker.storages.values())


class _Packer(pickle.Pickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self.storages: dict[int, torch.UntypedStorage] = {}

    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        """Return what a tensor is made of; the optimizer's are views into memory that many share."""
        if not isinstance(value, Tensor):
            return None
        storage = value.untyped_storage()
        key = storage.data_ptr() if storage.nbytes() else 0  # nothing is shared of nothing
        self.storages.setdefault(key, storage)
        return key, storage.nbytes(), value.dtype, value.storage_offset(), tuple(value.shape), value.stride()


class _Unpacker(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self.storages: dict[int, torch.UntypedStorage] = {}

    def persistent_load(self, made_of: tuple[Any, ...]) -> Tensor:
        """Return a tensor over memory of its own, or that of an earlier one."""
        key, size, dtype, offset, shape, stride = made_of
        storage = self.storages.setdefault(key, torch.UntypedStorage(size))
        return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)
