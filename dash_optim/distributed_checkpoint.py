# SPDX-License-Identifier: Apache-2.0
"""State that is spread over ranks, as checkpoints see it: tensors of which each rank has some pieces.

A rank keeps averages, factors and roots of the blocks that it owns. In a ``state_dict`` they are `Pieces`: a tensor of the size that a single process would have, with the pieces
that are here. ``torch.distributed.checkpoint`` writes every piece once and reads whatever pieces another layout wants, so that any number of ranks can go on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

Shard = tuple[int, Tensor]
"""Where a piece begins in dimension 0, and the piece."""

_aten = torch.ops.aten
_ON_EACH = (_aten._to_copy.default, _aten.clone.default, _aten.detach.default)


class Pieces(Tensor):
    """A tensor of which some pieces along dimension 0 are here; it can be copied, moved, and saved by ``torch.distributed.checkpoint``.

    Attributes:
        shards: the pieces, in ascending order.
    """

    shards: list[Shard]

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, shards: list[Shard]
    ) -> Pieces:
        """Return a tensor without memory of its own."""
        made: Pieces = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device)
        made.shards = shards
        return made

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, shards: list[Shard]
    ) -> None:
        """All is done by ``__new__``."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Copy or move every piece; nothing else can be done with a part of a tensor."""
        if func is _aten.new_empty.default:
            # async_save begins with this, and then fills in copies of the pieces
            shape, device = args[1], (kwargs or {}).get("device") or args[0].device
            return Pieces(shape, (kwargs or {}).get("dtype") or args[0].dtype, device, [])
        if func not in _ON_EACH:
            raise NotImplementedError(
                f"{func}: this is the state of blocks that one rank owns; the others have the rest. DASH.full_state_dict() gathers it"
            )
        whole: Pieces = args[0]
        return whole.map(lambda piece: func(piece, *args[1:], **(kwargs or {})))

    def map(self, change: Callable[[Tensor], Tensor]) -> Pieces:
        """Return the same with every piece changed; what becomes of the dtype and device, an empty tensor shows."""
        example = change(torch.empty(0, dtype=self.dtype, device=self.device))
        shards = [(start, change(piece)) for start, piece in self.shards]
        return Pieces(self.shape, example.dtype, example.device, shards)

    def __deepcopy__(self, memo: dict[int, Any]) -> Pieces:
        """Copy the pieces."""
        return self.map(torch.clone)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse: a file with the pieces of one rank would look like a checkpoint, and the others' state would be lost."""
        raise TypeError(
            "state_dict: a rank has only the state of the blocks that it owns. Save it with torch.distributed.checkpoint on all ranks, or save what"
            " DASH.full_state_dict() returns, called on all ranks"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Say which pieces are here."""
        spans = ", ".join(f"{start}:{start + _rows(piece)}" for start, piece in self.shards)
        return f"Pieces([{spans}] of {tuple(self.shape)}, {self.dtype}, {self.device})"

    def _chunk(self, shard: Shard) -> ChunkStorageMetadata:
        start, piece = shard
        offsets = torch.Size((start, *(0 for _ in self.shape[1:])) if self.ndim else ())
        return ChunkStorageMetadata(offsets=offsets, sizes=piece.shape)

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """What ``torch.distributed.checkpoint`` is to write: every piece."""
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties.create_from_tensor(piece), size=self.shape
                ),
            )
            for shard in self.shards
            for chunk, piece in [(self._chunk(shard), shard[1])]
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Where the pieces are that it is to read."""
        return [self._chunk(shard) for shard in self.shards]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the piece that begins at an offset."""
        for shard in self.shards:
            if self._chunk(shard).offsets == index.offset:
                return shard[1]
        raise ValueError(f"{index.fqn}: no piece begins at {index.offset}")


def _rows(piece: Tensor) -> int:
    return piece.shape[0] if piece.ndim else 1


def pieces_of(whole: Tensor, places: Sequence[int], own: Tensor) -> Pieces:
    """Return the rows ``places``, ascending, of a tensor like ``whole`` (which may be on the meta device) as pieces: views into ``own``."""
    shards: list[Shard] = []
    if whole.ndim == 0:
        return Pieces((), whole.dtype, own.device, [(0, own.reshape(()))] if len(places) else [])
    if len(places) and places[-1] - places[0] + 1 == len(places):  # one run, maybe of very many rows
        return Pieces(whole.shape, whole.dtype, own.device, [(places[0], own)])
    start = 0
    for i in range(1, len(places) + 1):
        if i == len(places) or places[i] != places[i - 1] + 1:
            shards.append((places[start], own[start:i]))
            start = i
    return Pieces(whole.shape, whole.dtype, own.device, shards)


def rows_of(value: Tensor, places: Sequence[int]) -> Tensor | None:
    """Return a copy of some rows, ascending, of a whole tensor or of pieces; None where one of them is not there."""
    shards = value.shards if isinstance(value, Pieces) else [(0, value)]
    rest = value.shape[1:]
    found = torch.empty((len(places), *rest), dtype=value.dtype, device=value.device)
    count = 0
    for start, piece in shards:
        rows = piece if piece.ndim else piece.reshape(1)
        first, last = bisect_left(places, start), bisect_left(places, start + len(rows))
        if first < last:
            found[first:last] = rows[[place - start for place in places[first:last]]]
        count += last - first
    return found if count == len(places) else None
