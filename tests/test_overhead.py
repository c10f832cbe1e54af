# SPDX-License-Identifier: Apache-2.0
"""What one more step costs, read off the operations themselves: products with `out=` and nothing of their size beside them."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import matroots
from matroots import Chebyshev, CoupledNewton, NewtonDB

B, N = 5, 6


class WholeBatchOperations(TorchDispatchMode):
    """Counts the operations that write a tensor of the size of the batch, and how many tensors they allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        is_view = func.is_view if hasattr(func, "is_view") else False
        if isinstance(out, torch.Tensor) and out.numel() == B * N * N and not is_view:
            self.operations[str(func)] += 1
        return out


def operations(solver: Any, p: int) -> Counter[str]:
    A = torch.eye(N).expand(B, N, N) + 0.1
    with WholeBatchOperations() as mode:
        matroots.inv_root_ex(A, p, method=solver, scaling="frobenius")
    return mode.operations


@pytest.mark.parametrize(
    ("make", "p", "products"),
    [
        (lambda k: NewtonDB(steps=k), 2, {"aten.bmm.out": 2, "aten.baddbmm.out": 1}),
        (lambda k: CoupledNewton(steps=k), 4, {"aten.bmm.out": 4}),
        # baby steps to T_7; seven degrees more are one giant step, with its addition of B_j
        (
            lambda k: Chebyshev(degree=7 * k - 10, floor=0.01),
            2,
            {"aten.baddbmm.out": 1, "aten.add_.Tensor": 1},
        ),
    ],
)
def test_a_step_is_its_products_and_fused_scalings(make: Any, p: int, products: dict[str, int]) -> None:
    extra = operations(make(9), p)
    extra.subtract(operations(make(8), p))
    spent = {name: count for name, count in extra.items() if count}
    # ndb scales within its product (alpha); cn needs one scaled copy of M for Q, and new powers of Q
    allowed = {"aten.mul.out", "aten.empty_like.default", "aten.empty.memory_format"}
    assert {name: count for name, count in spent.items() if name not in allowed} == products
    assert spent.get("aten.mul.out", 0) == (1 if isinstance(make(9), CoupledNewton) else 0)


def test_memory_is_the_output_and_a_few_chunks() -> None:
    """64 MiB of input: the process grows by its output and little else, not by several copies of the batch."""
    script = """
import resource, sys, torch, matroots
torch.set_num_threads(1)
A = torch.eye(128).expand(1024, 128, 128)
matroots.inv_root_ex(A[:2], 2, method=sys.argv[1], max_batch=2, certify=True)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
result = matroots.inv_root_ex(A, 2, method=sys.argv[1], max_batch=2, certify=True)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""
    for method in ("cn", "chebyshev"):
        run = subprocess.run(
            [sys.executable, "-c", script, method], capture_output=True, text=True, check=True
        )
        growth = float(
            run.stdout
        )  # MiB: the roots, 64, and some twenty buffers of a chunk of 0.1, in fp64 of 0.3
        assert growth < 1.5 * 64
