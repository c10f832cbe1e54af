# SPDX-License-Identifier: Apache-2.0
"""Time a solve of fixed steps against its matrix products alone: `torch.bmm` with `out=`, as many of the same size.

Run as `python benchmarks/products_alone.py [--threads N]`. The two alternate, so that both see the same machine; the
median of the ratios is what counts. Prints one line per solve, with its true error beside the time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

import matroots


def main() -> None:
    """Parse the options and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    A = wishart(options.batch, options.size, options.device)
    print(
        f"{options.batch} x {options.size} x {options.size} fp32, {options.threads} threads, torch {torch.__version__}"
    )
    print(f"{'solve':<34} {'products':>8} {'solve ms':>9} {'bmm ms':>8} {'ratio':>6} {'error':>8}")
    for p, steps in ((4, 10), (2, 10), (2, 20)):
        for scaling in ("multi_power", "frobenius"):
            row(A, p, steps, scaling, options.repeats)


def wishart(batch: int, n: int, device: str) -> Tensor:
    """Return well-conditioned random SPD matrices, ``(batch, n, n)``."""
    G = torch.randn(batch, n, 2 * n, generator=torch.Generator().manual_seed(0))
    return ((G @ G.mT) / (2 * n)).to(device)


def row(A: Tensor, p: int, steps: int, scaling: str, repeats: int) -> None:
    """Measure and print one solve."""

    def solve() -> matroots.InvRoot:
        return matroots.inv_root_ex(A, p, method=matroots.NewtonDB(steps=steps), scaling=scaling)

    products = int(solve().matmuls.max())
    B, C = A / 100, torch.empty_like(A)

    def alone() -> None:
        for _ in range(products):
            torch.bmm(A, B, out=C)

    ours, theirs = alternate(solve, alone, repeats, A.device)
    ratio = statistics.median(x / y for x, y in zip(ours, theirs, strict=True))
    X = solve().root.double()
    eigenvalues, Q = torch.linalg.eigh(A.double())
    R = (Q * eigenvalues.pow(-1 / p).unsqueeze(-2)) @ Q.mT
    error = (torch.linalg.matrix_norm(X - R, 2) / torch.linalg.matrix_norm(R, 2)).max()
    name = f"ndb p={p}, {steps} steps a root, {scaling}"
    times = f"{1e3 * statistics.median(ours):9.1f} {1e3 * statistics.median(theirs):8.1f}"
    print(f"{name:<40} {products:>3} {times} {ratio:6.2f} {error:8.1e}")


def alternate(
    first: Callable[[], object], second: Callable[[], object], repeats: int, device: torch.device
) -> tuple[list[float], list[float]]:
    """Return the seconds of ``repeats`` runs of each, taken in turn after a warm-up."""
    times: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats + 2):
        for seconds, run in zip(times, (first, second), strict=True):
            start = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if repeat >= 2:
                seconds.append(time.perf_counter() - start)
    return times


if __name__ == "__main__":
    main()
