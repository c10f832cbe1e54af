# SPDX-License-Identifier: Apache-2.0
"""What a backward pass costs beside its forward pass, for every method, and beside torch's own gradient through ``eigh``.

``python benchmarks/gradients.py [--sizes 64 128 256 512] [--rounds 5]``: float32, p = 2 and 4, condition number 1e4, as many matrices as make about the same
work at each size. Times are the least of the rounds, taken in turns; the error is that of the gradient of ``sum(C * A^{-1/p})`` for a random symmetric C, in the
Frobenius norm, against the same in float64.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

import matroots

METHODS: dict[str, dict[str, object]] = {
    "evd": {"method": "evd"},
    "auto": {"method": "auto"},
    "ndb": {"method": "ndb"},
    "cn": {"method": "cn"},
    "minimax": {"method": "minimax"},
    "rational": {"method": "rational"},
    "chebyshev": {"method": "chebyshev"},
}


def matrices(n: int, count: int, condition: float) -> Tensor:
    """Return ``(count, n, n)`` float64 with eigenvalues from 1 to 1/condition, evenly spaced in the logarithm."""
    Q = torch.linalg.qr(torch.randn(count, n, n, dtype=torch.float64)).Q
    spectrum = torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), n, dtype=torch.float64)
    A = (Q * spectrum) @ Q.mT
    return (A + A.mT) / 2


def by_eigh(A: Tensor, p: int) -> Tensor:
    """The inverse root that torch differentiates by itself."""
    values, Q = torch.linalg.eigh(A)
    return (Q * values.unsqueeze(-2) ** (-1 / p)) @ Q.mT


def timed(root: Callable[[Tensor], Tensor], A: Tensor, C: Tensor) -> tuple[float, float, Tensor]:
    """Return seconds of a forward and a backward pass, and the gradient."""
    M = A.clone().requires_grad_()
    start = time.perf_counter()
    X = root(M)
    middle = time.perf_counter()
    (gradient,) = torch.autograd.grad(X, M, C)
    return middle - start, time.perf_counter() - middle, gradient


def main() -> None:
    """Print one table per p."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--work", type=float, default=5e7, help="elements to the power 3/2, all matrices together"
    )
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32, condition 1e4\n")
    for p in (2, 4):
        print(
            f"p = {p}\n\n| method | n | forward ms | backward ms | backward / forward | error |\n|---|---|---|---|---|---|"
        )
        for n in arguments.sizes:
            count = max(1, round(arguments.work / n**3))
            exact, C = matrices(n, count, 1e4), torch.randn(count, n, n, dtype=torch.float64)
            C = (C + C.mT) / 2
            truth = timed(lambda M, p=p: matroots.inv_root(M, p, method="evd"), exact, C)[2]
            A, weights = exact.float(), C.float()
            roots: dict[str, Callable[[Tensor], Tensor]] = {
                name: lambda M, p=p, options=options: matroots.inv_root(M, p, **options)
                for name, options in METHODS.items()
            }
            roots["torch.linalg.eigh"] = lambda M, p=p: by_eigh(M, p)
            best = {name: [float("inf")] * 2 for name in roots}
            errors = {}
            for _ in range(arguments.rounds):
                for name, root in roots.items():
                    forward, backward, gradient = timed(root, A, weights)
                    best[name] = [min(best[name][0], forward), min(best[name][1], backward)]
                    errors[name] = float((gradient.double() - truth).norm() / truth.norm())
            for name, (forward, backward) in best.items():
                print(
                    f"| {name} | {n} | {1e3 * forward:.1f} | {1e3 * backward:.1f} | {backward / forward:.2f} | {errors[name]:.1e} |",
                    flush=True,
                )
        print()


if __name__ == "__main__":
    main()
