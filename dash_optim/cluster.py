# SPDX-License-Identifier: Apache-2.0
"""How long a step of DASH takes on the ranks of a cluster, and what they keep and send (docs/planning.md).

Counted from shapes: blocks, operations, bytes of state, bytes that are sent. Estimated from those and a `Machine`: seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dash_optim.balance import assign
from dash_optim.blocks import BlockClass
from dash_optim.workload import Array, Workload


@dataclass(frozen=True)
class Machine:
    """The constants that times are estimated with; the defaults are round numbers for one H100 and a network of 400 Gb/s for each.

    Attributes:
        flops_per_s: of batched float32 products: 0.6 of the data sheet's 67e12.
        root_flops_per_s: of roots, their traffic included: half of that.
        bytes_per_s: of memory: 0.75 of the data sheet's 3.35e12.
        link_bytes_per_s: into, and out of, a rank: 0.8 of 50e9.
        latency_s: of a message.
    """

    flops_per_s: float = 4e13
    root_flops_per_s: float = 2e13
    bytes_per_s: float = 2.5e12
    link_bytes_per_s: float = 4e10
    latency_s: float = 2e-5


@dataclass(frozen=True)
class ClusterRow:
    """What several ranks do. Everything but seconds is counted; those are estimated, for the slowest rank.

    Attributes:
        ranks: how many.
        blocks: on the rank that has most.
        operations: of a step on average, on the rank that has most.
        imbalance: that over the greater of the mean and the largest item.
        attainable: what no assignment is below, by the same measure.
        state, state_mean: bytes on the rank that has most, and on average.
        runs: of consecutive blocks or slices, on the rank that has most of them: what it sends in one piece.
        gathered: bytes of updates that a rank receives where parameters are replicated, on the rank that receives most.
        moved: bytes that a rank sends or receives, whichever is more, to bring the gradients of sharded parameters to the owners of their blocks, on the rank
            where that is most; updates take the way back.
        plain_s: seconds that a step without roots computes.
        refresh_s: that a step with all roots does.
        mean_s: that a step does on average.
        gather_s: that gathering the updates takes where parameters are replicated.
        move_s: that gradients and updates take, there and back, where parameters are sharded.
    """

    ranks: int
    blocks: int
    operations: float
    imbalance: float
    attainable: float
    state: int
    state_mean: float
    runs: int
    gathered: int
    moved: int
    plain_s: float
    refresh_s: float
    mean_s: float
    gather_s: float
    move_s: float


def spread(work: Workload, ranks: int, machine: Machine) -> ClusterRow:
    """Return what each of several ranks does, keeps and sends.

    Raises:
        TypeError, ValueError: for a number of ranks that is none, see :func:`dash_optim.balance.assign`.
    """
    made = assign(work.items, ranks)
    owners = np.array(made.owners, dtype=np.int64)

    def on_ranks(values: Array) -> Array:
        return np.bincount(owners, weights=values, minlength=ranks).astype(np.float64)

    state, size = on_ranks(work.each("state")) + work.everywhere, on_ranks(work.each("size"))
    gathered, moved = float(size.sum() - size.min()), _moved(work, owners, ranks)
    plain = on_ranks(work.each("step")) / machine.flops_per_s
    plain += on_ranks(work.each("traffic")) / machine.bytes_per_s
    refresh = on_ranks(work.each("refresh")) / machine.root_flops_per_s
    often = on_ranks(work.each("often")) / machine.root_flops_per_s
    return ClusterRow(
        ranks=ranks,
        blocks=int(on_ranks(work.blocks.astype(np.float64)).max()),
        operations=max(made.loads),
        imbalance=made.imbalance,
        attainable=made.attainable / made.bound if made.bound else 1.0,
        state=int(state.max()),
        state_mean=float(state.mean()),
        runs=_runs(work, owners, ranks),
        gathered=int(gathered),
        moved=int(moved),
        plain_s=float(plain.max()),
        refresh_s=float((plain + refresh).max()),
        mean_s=float((plain + often).max()),
        gather_s=_seconds(gathered, ranks, machine),
        move_s=2 * _seconds(moved, ranks, machine),
    )


def _seconds(size: float, ranks: int, machine: Machine) -> float:
    """Return the time in which a rank sends or receives so many bytes in a collective of ``log2`` rounds."""
    return math.ceil(math.log2(ranks)) * machine.latency_s + size / machine.link_bytes_per_s


def _runs(work: Workload, owners: NDArray[np.int64], ranks: int) -> int:
    """Return how many runs of consecutive items of one kind the rank has that has most of them."""
    if not len(owners):
        return 0
    starts = (np.diff(owners, prepend=-1) != 0) | (np.diff(work.kind, prepend=-1) != 0)
    return int(np.bincount(owners[starts], minlength=ranks).max())


def _moved(work: Workload, owners: NDArray[np.int64], ranks: int) -> float:
    """Return the most bytes of blocks that a rank must send or receive, of parameters of which each rank has consecutive rows (``Shard(0)``)."""
    owned, kept, sharded = np.zeros(ranks), np.zeros(ranks), np.zeros(ranks)
    for kind, (one, positions) in enumerate(zip(work.kinds, _positions(work), strict=True)):
        first = work.items[positions[0]]
        if first.blocks is None:  # AdamW needs no neighbours: every rank updates the rows that it has
            continue
        param, blocks = work.members[first.param][1], work.geometries[first.param].classes[first.blocks]
        mine = owners[positions]
        start, stop = _rows(blocks, np.array([work.items[i].start for i in positions]))
        if param.shape[0] == 1:  # the view has no such dimension; the only row is the first rank's
            start, stop = np.zeros_like(start), np.ones_like(stop)
        chunk = -(-param.shape[0] // ranks)
        inside = np.minimum(stop, (mine + 1) * chunk) - np.maximum(start, mine * chunk)
        row = one.size / (stop - start)
        owned += np.bincount(mine, minlength=ranks) * one.size
        kept += np.bincount(mine, weights=np.maximum(inside, 0) * row, minlength=ranks)
        if kind == 0 or work.items[positions[0] - 1].param != first.param:
            edges = np.minimum(np.arange(ranks + 1) * chunk, param.shape[0])
            sharded += np.diff(edges) * (param.nbytes / param.shape[0])
    return float(np.maximum(owned - kept, sharded - kept).max())


def _positions(work: Workload) -> list[NDArray[np.int64]]:
    """Return where in the items those of each kind stand: in a row."""
    edges = np.searchsorted(work.kind, np.arange(len(work.kinds) + 1))
    return [np.arange(start, stop) for start, stop in pairwise(edges.tolist())]


def _rows(blocks: BlockClass, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first row of each of these blocks, and one past the last."""
    start = blocks.offset[0] + numbers // math.prod(blocks.grid[1:]) * blocks.shape[0]
    return start, start + blocks.shape[0]
