# SPDX-License-Identifier: Apache-2.0
"""Products of commuting symmetric matrices: one triangle is computed and mirrored, and no accuracy is lost by it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from matrices import error, geometric, inverse_root, spd, symmetric, with_spectrum
from table import FP32, FP64, ROWS, cases, name, newton_products, series_products, shortest_chain
from torch.utils._python_dispatch import TorchDispatchMode

import matroots
from matroots import Chebyshev, CoupledNewton, NewtonDB, Status, _products
from matroots._formats import FORMATS
from matroots._products import Product, panel_edges
from matroots.solvers import minimax
from matroots.solvers.minimax import cheapest_schedule

MIRRORING = tuple(row for row in ROWS if row.name in ("cn", "ndb", "minimax", "chebyshev"))
HAS_TRITON = importlib.util.find_spec("triton") is not None
requires_triton = pytest.mark.skipif(not HAS_TRITON, reason="requires triton")
requires_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="requires cuda")


def mirror_from(monkeypatch: pytest.MonkeyPatch, n: int, panels: int) -> None:
    """Let products mirror from this n, in so many panels."""
    table = dict.fromkeys((FP32, FP64), ((n, panels),))
    monkeypatch.setattr(_products, "_PANELS", table)


def mirrored(A: torch.Tensor) -> torch.Tensor:
    return A.tril() + A.tril(-1).mT


def symmetric_batch(n: int, dtype: torch.dtype, start: int = 0) -> torch.Tensor:
    A = torch.randn(3, n, n, generator=torch.Generator().manual_seed(start), dtype=FP64)
    return (A + A.mT).to(dtype)


# ------------------------------------------------------------------------------------------------------- the product


@pytest.mark.parametrize("alpha", [1.0, -0.5])
@pytest.mark.parametrize("beta", [0.0, -1.0])
@pytest.mark.parametrize("panels", [1, 2, 4, 8])
@pytest.mark.parametrize(("dtype", "given"), [(FP64, None), (FP32, None), *((FP32, f) for f in FORMATS)])
def test_the_lower_triangle_is_that_of_the_product(dtype, given, panels, beta, alpha, monkeypatch):
    """Also where A and B do not commute: then it is the definition. What ``out`` holds is not read where beta is 0."""
    multiply = Product(FORMATS.get(given))
    for n in (1, 3, 8, 37):
        A, B, C = (symmetric_batch(n, dtype, start) for start in range(3))
        mirror_from(monkeypatch, 1, 1)
        whole = multiply(A, B, C.clone(), alpha, beta)
        mirror_from(monkeypatch, 1, panels)
        out = C.clone() if beta else torch.full_like(C, torch.nan)
        assert multiply.symmetric(A, B, out, alpha, beta) is out
        expected = whole if panels == 1 else mirrored(whole)
        assert torch.allclose(out, expected, rtol=0, atol=50 * torch.finfo(dtype).eps * n)
        assert panels == 1 or symmetric(out)


@pytest.mark.parametrize("panels", [2, 4])
@pytest.mark.parametrize("given", [None, *FORMATS])
def test_a_symmetrised_product_is_the_symmetric_part_of_the_whole_one(given, panels, monkeypatch):
    multiply = Product(FORMATS.get(given))
    for n in (1, 3, 8, 37):
        A, B = symmetric_batch(n, FP32), symmetric_batch(n, FP32, 1)
        mirror_from(monkeypatch, n + 1, panels)
        whole = multiply.symmetrised(A, B, torch.full_like(A, torch.nan))
        assert torch.equal(whole, multiply(A, B, torch.empty_like(A)))
        mirror_from(monkeypatch, 1, panels)
        out = multiply.symmetrised(A, B, torch.full_like(A, torch.nan))
        assert torch.allclose(out, (whole + whole.mT) / 2, rtol=0, atol=1e-5 * n)
        assert symmetric(out)


@pytest.mark.parametrize(
    ("dtype", "panels"),
    [
        (FP32, {256: 1, 319: 1, 320: 4, 1000: 4, 1024: 8, 2048: 8}),
        (FP64, {384: 1, 512: 2, 1000: 2, 1024: 4}),
    ],
    ids=name,
)
def test_panels_by_size(dtype, panels):
    """Where the measurement that the table comes from says that a triangle is faster; on the CPU only."""
    for n, count in panels.items():
        edges = panel_edges(torch.empty(1, n, n, dtype=dtype))
        assert len(edges) == count + 1
        assert (edges[0], edges[-1]) == (0, n)
        assert max(np.diff(edges)) - min(np.diff(edges)) <= 1
        assert panel_edges(torch.empty(1, n, n, dtype=dtype, device="meta")) == (0, n)


def test_small_products_are_the_whole_product():
    A, B = symmetric_batch(64, FP32), symmetric_batch(64, FP32, 1)
    whole = torch.bmm(A, B)
    assert torch.equal(Product().symmetric(A, B, torch.empty_like(A)), whole)
    assert torch.equal(Product().symmetrised(A, B, torch.empty_like(A)), whole)


# ---------------------------------------------------------------------------------------------------------- the work


class Work(TorchDispatchMode):
    """Sums the work of all products of matrices, in units of one of n x n."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n, self.total = n, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation = func._overloadpacket.__name__
        if operation in ("bmm", "baddbmm"):
            A, B = args[-2:]
            if A.shape[-1] == self.n:  # not with vectors
                self.total += A.shape[-2] * B.shape[-1] / self.n**2
        return func(*args, **(kwargs or {}))


def work(n: int, p: int, method: Any, **keywords: Any) -> tuple[float, int]:
    with Work(n) as watch:
        result = matroots.inv_root_ex(spd(n, 50.0), p, method=method, scaling="frobenius", **keywords)
    return watch.total, result.matmuls.item()


@pytest.mark.parametrize("panels", [2, 4, 8])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_the_share_of_the_work(p, panels, monkeypatch):
    """A mirrored product takes ``(1 + 1/m)/2`` of a whole one; which are mirrored is counted by hand, and all count as one."""
    n, share, steps = 16, (1 + 1 / panels) / 2, 6
    mirror_from(monkeypatch, n, panels)
    # Q^p M is whole
    total, products = work(n, p, CoupledNewton(steps=steps))
    assert products == newton_products(p, steps)
    assert total == pytest.approx(steps - 1 + share * (products - (steps - 1)))
    # half of Q^a M Q^b and X Q are, but for the last X Q; for p = 1 all are
    lowest = 1e-3
    total, products = work(n, p, matroots.Minimax(floor=lowest), tol=1e-6)
    schedule = next(
        s for s in SCHEDULES if s.products == products and len(s.steps) >= 2
    )  # the one that the solve has asked for
    whole = products if p == 1 else (len(schedule.steps) - 1) + (len(schedule.steps) - 2)
    assert total == pytest.approx(whole + share * (products - whole))
    # nothing is
    total, products = work(n, p, Chebyshev(degree=40, floor=1e-2))
    assert products == series_products(40)
    assert total == pytest.approx(share * products)
    if p in (2, 4, 8):  # Z Y is: in each square root one a step, but for the first, where Z is I
        total, products = work(n, p, NewtonDB(steps=steps))
        whole = shortest_chain(p) * (steps - 1)
        assert total == pytest.approx(whole + share * (products - whole))


SCHEDULES: list[minimax.Schedule] = []


@pytest.fixture(autouse=True)
def _noted_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    def noted(*arguments: Any) -> minimax.Schedule:
        SCHEDULES.insert(0, cheapest_schedule(*arguments))
        return SCHEDULES[0]

    monkeypatch.setattr(minimax, "cheapest_schedule", noted)


def test_members_that_stop_early_are_mirrored_too(monkeypatch):
    mirror_from(monkeypatch, 16, 4)
    A = torch.stack([spd(16, condition) for condition in (2.0, 1e4, 50.0)])
    for method in ("cn", "ndb"):
        together = matroots.inv_root_ex(A, 2, method=method)
        for k, member in enumerate(A):
            alone = matroots.inv_root_ex(member, 2, method=method)
            assert together.matmuls[k] == alone.matmuls
            assert error(together.root[k], alone.root.double()) <= 1e-12


# ------------------------------------------------------------------------------------------------------- the accuracy


def growth(A: torch.Tensor, p: float, method: Any, monkeypatch: Any, panels: int, **keywords: Any) -> float:
    """Largest error of mirrored solves over that of whole products, both next to a bit of rounding."""
    truth, errors = inverse_root(A, p), []
    for m in (1, panels):
        mirror_from(monkeypatch, 1, m)
        X = matroots.inv_root_ex(A, p, method=method, **keywords).root
        assert symmetric(X)
        errors.append(error(X, truth).max().item())
    return errors[1] / errors[0]


def batch(n: int, condition: float, dtype: torch.dtype, count: int = 4) -> torch.Tensor:
    return torch.stack([spd(n, condition, seed, dtype) for seed in range(count)])


@pytest.mark.parametrize("panels", [2, 4, 48])
@pytest.mark.parametrize("dtype", [FP32, FP64], ids=name)
@pytest.mark.parametrize(("row", "p"), cases(MIRRORING, (2, 4)), ids=name)
def test_mirroring_keeps_the_accuracy(row, p, dtype, panels, monkeypatch):
    """To condition 1e6, a series as far as it converges; 48 panels are one number wide, so that all that can be is mirrored."""
    hard = 1e6 if row.name != "chebyshev" else 1e4 if dtype == FP32 else 1e3
    for condition in (30.0, hard):
        assert growth(batch(48, condition, dtype), p, row.method, monkeypatch, panels) <= 2.5


@pytest.mark.parametrize("p", [1, 3, 8])
@pytest.mark.parametrize("row", [row for row in MIRRORING if row.name in ("cn", "minimax")], ids=name)
def test_mirroring_keeps_the_accuracy_of_other_orders(row, p, monkeypatch):
    """Also with half of the eigenvalues at each end, and with a floor far below the spectrum."""
    for spectrum in (geometric(48, 2.0), geometric(48, 1e3), [1.0] * 24 + [1e-4] * 24):
        A = torch.stack([with_spectrum(spectrum, seed) for seed in range(4)])
        assert growth(A, p, row.method, monkeypatch, 4) <= 2.5


@pytest.mark.parametrize("given", FORMATS)
@pytest.mark.parametrize(("row", "p"), cases(MIRRORING, (2, 4)), ids=name)
def test_mirroring_keeps_the_accuracy_of_formats(row, p, given, monkeypatch):
    condition = 30.0 if FORMATS[given].parts == 1 else 1e4 if row.name != "chebyshev" else 1e3
    assert growth(batch(48, condition, FP32), p, row.method, monkeypatch, 4, matmul_dtype=given) <= 2.5


@pytest.mark.parametrize("want", ["root", "root_pair"])
@pytest.mark.parametrize(("row", "p"), cases(MIRRORING, (2, 4)), ids=name)
def test_roots_that_are_not_inverse(row, p, want, monkeypatch):
    A = batch(48, 1e3, FP64)
    truth = inverse_root(A, -p)
    errors = []
    for panels in (1, 4):
        mirror_from(monkeypatch, 1, panels)
        answer = getattr(matroots, want)(A, p, method=row.method)
        errors.append(error(answer if want == "root" else answer[0], truth).max())
    # where a whole product is right to a twentieth of cond u, as minimax is here, a mirrored one is right to a fifth; 2.5 on one CPU, 2.58 on another
    assert errors[1] <= max(2.6 * errors[0], 0.2 * 1e3 * torch.finfo(FP64).eps / 2)


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("method", ["cn", "ndb", "minimax"])
def test_mirroring_where_it_is_used(method, p, monkeypatch):
    """At n = 384, in float32, by the table as it is, and with whole products; condition 1e6."""
    A = batch(384, 1e6, FP32, count=1)
    eigenvalues, Q = torch.linalg.eigh(A.double())
    truth = (Q * eigenvalues.pow(-1 / p).unsqueeze(-2)) @ Q.mT
    assert len(panel_edges(A)) == 5
    ours = matroots.inv_root_ex(A, p, method=method)
    monkeypatch.setattr(_products, "_PANELS", {})
    whole = matroots.inv_root_ex(A, p, method=method)
    assert symmetric(ours.root)
    assert error(ours.root, truth) <= 2.5 * error(whole.root, truth)
    assert ours.matmuls <= 1.1 * whole.matmuls


# ------------------------------------------------------------------------------------------- what must not be mirrored


@pytest.mark.parametrize("change", [mirrored, lambda E: (E + E.mT) / 2], ids=["mirrored", "averaged"])
def test_e_of_denman_and_beavers_must_be_computed_in_full(change, monkeypatch):
    """Y and Z commute up to their errors only; the antisymmetric part of E is what keeps them consistent."""
    A, whole, fixed = batch(48, 1e4, FP32), Product.__call__, NewtonDB(steps=25)
    mirror_from(monkeypatch, 1, 4)
    truth = inverse_root(A, 2)
    assert error(matroots.inv_root_ex(A, 2, method=fixed).root, truth).max() <= 2e-4

    def wrong(self: Product, A: Any, B: Any, out: Any, alpha: float = 1.0, beta: float = 0.0) -> Any:
        return out.copy_(change(whole(self, A, B, out, alpha, beta)))

    monkeypatch.setattr(Product, "__call__", wrong)  # nothing but E is a whole product
    assert bool((matroots.inv_root_ex(A, 2, method=fixed).status == Status.DIVERGED).all())
    stopped = matroots.inv_root_ex(A, 2, method="ndb")
    assert bool((stopped.status == Status.STAGNATED).all())
    assert error(stopped.root, truth).min() > 0.01


def test_diagonal_blocks_must_be_mirrored_too(monkeypatch):
    """An antisymmetric part of Y and Z that is left in the diagonal blocks alone grows."""
    A = batch(48, 1e6, FP64)
    mirror_from(monkeypatch, 1, 4)
    exact = Product.symmetric

    def blocks_only(self: Product, A: Any, B: Any, out: Any) -> Any:
        whole = self(A, B, torch.empty_like(out))
        exact(self, A, B, out)
        for low in range(0, 48, 12):
            block = slice(low, low + 12)
            out[:, block, block] = whole[:, block, block]
        return out

    monkeypatch.setattr(Product, "symmetric", blocks_only)
    assert error(matroots.inv_root_ex(A, 2, method="ndb").root, inverse_root(A, 2)).min() > 1e-6
    monkeypatch.undo()
    assert error(matroots.inv_root_ex(A, 2, method="ndb").root, inverse_root(A, 2)).max() < 1e-10


@pytest.mark.parametrize("p", [2, 4])
def test_x_and_m_of_minimax_must_be_computed_in_full(p, monkeypatch):
    """With a floor far below the spectrum eigenvalues are pulled up and pushed down in turn: means of factors multiply to more."""
    A, whole = batch(48, 30.0, FP64), Product.__call__
    method = matroots.Minimax(floor=1e-14)
    assert growth(A, p, method, monkeypatch, 4) <= 2.5

    def all_mirrored(
        self: Product, A: Any, B: Any, out: Any, alpha: float = 1.0, beta: float = 0.0
    ) -> torch.Tensor:
        whole(self, A, B, out, alpha, beta)
        return out.copy_(mirrored(out)) if len(panel_edges(out)) > 2 else out

    monkeypatch.setattr(Product, "__call__", all_mirrored)
    assert growth(A, p, method, monkeypatch, 4) > 2.5


def test_what_carries_small_eigenvalues_on_must_be_symmetrised(monkeypatch):
    """What is wrong with ``Q^p``, in 16 bits, reaches the small eigenvalues of a mirrored ``Q^p M``."""
    A = batch(48, 1e4, FP32)
    assert growth(A, 2, "cn", monkeypatch, 4, matmul_dtype="bf16x2") <= 2.5
    monkeypatch.setattr(Product, "symmetrised", Product.symmetric)
    assert growth(A, 2, "cn", monkeypatch, 4, matmul_dtype="bf16x2") > 10


# --------------------------------------------------------------------------------------------------------- the kernel

INTERPRETED = """
import torch
from functools import partial
from matroots import _products, inv_root_ex
from matroots._formats import FORMATS
from matroots._triton import add_lower_triangle

def mirrored(A):
    return A.tril() + A.tril(-1).mT

generator = torch.Generator().manual_seed(0)
for dtype in (torch.float32, torch.float16):
    for n in (1, 5, 64, 65, 150):
        A, B, C = (torch.randn(3, n, n, generator=generator) for _ in range(3))
        C = mirrored(C)
        A, B = A.to(dtype), B.to(dtype).mT
        P = A.double() @ B.double()
        for alpha, beta in ((1.0, 0.0), (-0.5, 0.0), (2.0, -1.0), (1.0, 2.0**-11)):
            out = C.clone() if beta else torch.full_like(C, torch.nan)
            add_lower_triangle(A, B, out, beta, alpha)
            expected = mirrored(alpha * P + (beta * C.double() if beta else 0))
            assert (out - expected).abs().max() <= 4e-6 * n**0.5 * (1 + abs(alpha)), (dtype, n, alpha, beta)
            assert torch.equal(out, out.mT)
        strided = torch.full((3, n + 1, 2 * n), 7.0)
        add_lower_triangle(A, B, strided[:, 1:, ::2], 0.0, 1.0)
        assert (strided[:, 1:, ::2] - mirrored(P)).abs().max() <= 4e-6 * n
        assert (strided[:, 0] == 7).all() and (strided[:, :, 1::2] == 7).all()
add_lower_triangle(torch.empty(0, 4, 4), torch.empty(0, 4, 4), torch.empty(0, 4, 4), 0.0, 1.0)

# the same solves, as they would run on CUDA
G = torch.randn(2, 70, 140, generator=generator)
A = G @ G.mT / 140
def solve(method, given):
    return inv_root_ex(A, 2, method=method, matmul_dtype=given)
todo = [("minimax", None), ("ndb", "fp16x2"), ("chebyshev", "bf16x2"), ("cn", "tf32")]
before = [solve(*one) for one in todo]
asked = []
def kernel(A, B, out, beta, alpha, precision):
    asked.append(precision)
    add_lower_triangle(A, B, out, beta, alpha, precision)
_products._fused = lambda out, format: partial(kernel, precision="ieee" if format is None else "tf32")
for one, expected in zip(todo, before):
    got = solve(*one)
    close = 1e-5 if one[1] != "tf32" else 1e-2
    assert (got.root - expected.root).abs().max() <= close * expected.root.abs().max(), one
    assert torch.equal(got.matmuls, expected.matmuls) and torch.equal(got.status, expected.status), one
assert len(asked) > 20 and set(asked) == {"ieee", "tf32"}
print("done")
"""

COMPILED = """
import warnings
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from matroots import _triton

warnings.simplefilter("ignore")
kernel = _triton._lower_tiles
for capability in (80, 90):
    for dtype, precision in (("fp32", "ieee"), ("fp32", "tf32"), ("fp16", "tf32"), ("bf16", "tf32")):
        constants = {"ACCUMULATE": True, "PRECISION": precision, "TILE": _triton._TILE, "DEPTH": _triton._DEPTH}
        types = {name: "constexpr" if name in constants else "i32" for name in kernel.arg_names}
        types |= {"A": "*" + dtype, "B": "*" + dtype, "out": "*fp32", "alpha": "fp32", "beta": "fp32"}
        source = ASTSource(kernel, types, constants)
        compiled = triton.compile(
            source, target=GPUTarget("cuda", capability, 32), options={"num_warps": _triton._WARPS}
        )
        assert ("mma" in compiled.asm["ptx"]) == (precision != "ieee"), (capability, dtype, precision)
        assert compiled.metadata.shared <= 48 * 1024
print("done")
"""


def run(script: str, **environment: str) -> None:
    """Run in a process of its own: whether Triton interprets or compiles is settled when it is imported."""
    outcome = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert outcome.stdout.strip() == "done", outcome.stderr


@requires_triton
def test_the_kernel_computes_the_triangle():
    """By Triton's interpreter, on the CPU. It cannot multiply bfloat16, which runs on CUDA only."""
    run(INTERPRETED, TRITON_INTERPRET="1")


@requires_triton
def test_the_kernel_compiles_for_tensor_cores(tmp_path):
    """For two generations of devices, of which none is needed: in float32 without, otherwise with tensor cores."""
    run(COMPILED, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))


def test_without_triton_products_on_cuda_are_whole(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "triton", None)  # an import of it fails
    monkeypatch.delitem(sys.modules, "matroots._triton", raising=False)
    assert _products._triangle_kernel.__wrapped__(torch.device("cuda:0")) is None


def test_devices_without_tensor_cores_for_all_formats_do_not_use_the_kernel(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert _products._triangle_kernel.__wrapped__(torch.device("cuda:0")) is None


def test_a_triton_that_does_not_run_is_said(monkeypatch):
    """Where there is no compiler, for instance: not an error, but not silent either."""

    def broken(*_: Any) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch, "ones", lambda *shape, device: torch.zeros(shape))
    monkeypatch.setitem(sys.modules, "matroots._triton", SimpleNamespace(add_lower_triangle=broken))
    with pytest.warns(RuntimeWarning, match="does not run on cuda:0.*C compiler"):
        assert _products._triangle_kernel.__wrapped__(torch.device("cuda:0")) is None


def test_which_products_use_the_kernel(monkeypatch):
    """Float32 sums on CUDA from n = 256; a tensor that says it is there is enough to ask."""

    def kernel(*_: Any, precision: str) -> None:
        raise AssertionError(precision)

    monkeypatch.setattr(_products, "_triangle_kernel", lambda device: kernel)
    for device, dtype, n, used in (
        ("cuda:0", FP32, 256, True),
        ("cuda:0", FP32, 255, False),
        ("cuda:0", FP64, 256, False),
        ("cpu", FP32, 256, False),
    ):
        out: Any = SimpleNamespace(
            is_cuda=device != "cpu", device=torch.device(device), dtype=dtype, shape=(1, n, n)
        )
        fused = _products._fused(out, None)
        assert (fused is not None) == used
        assert not used or isinstance(fused, partial)
        precision = fused.keywords["precision"] if isinstance(fused, partial) else "ieee"
        assert precision == "ieee"
        half = _products._fused(out, FORMATS["tf32"])
        assert not isinstance(half, partial) or half.keywords["precision"] == "tf32"


@requires_cuda
@requires_triton
@pytest.mark.parametrize("given", [None, *FORMATS])
def test_the_kernel_on_cuda(given):
    multiply = Product(FORMATS.get(given))
    for n in (256, 300):
        A, B, C = (symmetric_batch(n, FP32, start).cuda() for start in range(3))
        expected = mirrored(multiply(A, B, C.clone(), -0.5, -1.0))
        out = multiply.symmetric(A, B, C.clone(), -0.5, -1.0)
        assert torch.allclose(out, expected, rtol=0, atol=1e-5 * n)
        assert symmetric(out)
