# SPDX-License-Identifier: Apache-2.0
"""Cost: matrix products counted where torch dispatches them, and what must not happen inside a fixed solve."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from matrices import spd
from table import (
    FIXED,
    FP32,
    FP64,
    ITERATIVE,
    ROWS,
    SCALINGS,
    Row,
    cases,
    name,
    newton_products,
    series_products,
    shortest_chain,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import matroots
from matroots import (
    Chebyshev,
    CoupledNewton,
    Frobenius,
    Minimax,
    MultiPower,
    NewtonDB,
    Power,
    Status,
    _prepare,
    _products,
    _solve,
)
from matroots.scaling import bounds

PRODUCTS = {
    "mm",
    "bmm",
    "addmm",
    "addmm_",
    "baddbmm",
    "baddbmm_",
    "addbmm",
    "addbmm_",
    "_int_mm",
    "linear",
    "einsum",
}
SYNCHRONISATIONS = {
    "_local_scalar_dense",
    "item",
    "is_nonzero",
    "nonzero",
    "equal",
    "masked_select",
    "_unique2",
}
SIZE = 24  # differs from every count of start vectors: a product with a block of vectors is told from one of matrices


class Watch(TorchDispatchMode):
    """Counts what is dispatched: products of n x n matrices (per member), synchronisations, changes of dtype."""

    def __init__(self, n: int = SIZE) -> None:
        super().__init__()
        self.n = n
        self.products = 0
        self.operand_dtypes: set[torch.dtype] = set()
        self.calls: Counter[str] = Counter()
        self.casts: list[tuple[torch.dtype, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation = func._overloadpacket.__name__
        self.calls[operation] += 1
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        square = (self.n, self.n)
        if operation in PRODUCTS and all(t.ndim >= 2 and t.shape[-2:] == square for t in tensors):
            self.products += 1
            self.operand_dtypes |= {t.dtype for t in tensors}
        result = func(*args, **(kwargs or {}))
        if operation in ("_to_copy", "copy_") and tensors and tensors[0].shape[-2:] == square:
            target = result if operation == "_to_copy" else tensors[0]
            self.casts.append((tensors[-1].dtype, target.dtype))
        return result

    @property
    def synchronisations(self) -> int:
        """How often a value was handed to the host."""
        return sum(self.calls[operation] for operation in SYNCHRONISATIONS)


def watched(A: torch.Tensor, p: Any, **keywords: Any) -> tuple[Watch, matroots.InvRoot]:
    with Watch(A.shape[-1]) as watch:
        result = matroots.inv_root_ex(A, p, **keywords)
    return watch, result


def test_the_watch_sees_products_of_matrices_only():
    A, V = torch.randn(2, SIZE, SIZE), torch.randn(2, 16, SIZE)
    with Watch() as watch:
        torch.bmm(A, A)
        torch.bmm(A, A, out=torch.empty_like(A))
        torch.empty_like(A).baddbmm_(A, A, beta=0, alpha=2)
        A[0] @ A[1]
        torch.addmm(A[0], A[0], A[1])
        torch.matmul(A, A)
        torch.einsum("bij,bjk->bik", A, A)
        assert watch.products == 7
        torch.bmm(V, A)
        A[0] @ V[0, 0]
        assert watch.products == 7
        assert watch.synchronisations == 0
        float(A[0, 0, 0])
        assert watch.synchronisations == 1


def test_shortest_chains():
    """Lengths of shortest addition chains: OEIS A003313."""
    assert [shortest_chain(p) for p in range(1, 17)] == [0, 1, 2, 2, 3, 3, 4, 3, 4, 4, 5, 4, 5, 5, 5, 4]


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 10])
def test_coupled_newton_fourth_root_costs_four_products_a_step(steps):
    watch, result = watched(spd(SIZE), 4, method=CoupledNewton(steps=steps))
    assert watch.products == result.matmuls.item() == 4 * steps - 4


@pytest.mark.parametrize("p", [1, 2, 3, 5, 6, 7, 8, 11, 15])
def test_coupled_newton_costs_a_chain_and_two_products_a_step(p):
    """Three steps: X_1 free, M_1, X_2, M_2, X_3, and no M_3: 2 for X and 2 (l + 1) for M."""
    watch, result = watched(spd(SIZE), p, method=CoupledNewton(steps=3))
    chain = {1: 0, 2: 1, 3: 2, 5: 3, 6: 3, 7: 4, 8: 3, 11: 5, 15: 5}[p]
    assert watch.products == result.matmuls.item() == 2 + 2 * (chain + 1) == newton_products(p, 3)


@pytest.mark.parametrize("steps", [2, 3, 7, 10])
@pytest.mark.parametrize(("p", "stages"), [(2, 1), (4, 2), (8, 3)])
def test_denman_beavers_costs_three_products_a_step(p, stages, steps):
    watch, result = watched(spd(SIZE), p, method=NewtonDB(steps=steps))
    assert watch.products == result.matmuls.item() == stages * (3 * steps - 3)


def test_one_step_of_denman_beavers():
    """Z_1 = E needs no product, Y_1 = A E one, for all square roots but the last."""
    for p, products in ((2, 0), (4, 1), (8, 2)):
        watch, result = watched(spd(SIZE), p, method=NewtonDB(steps=1))
        assert watch.products == result.matmuls.item() == products


@pytest.mark.parametrize(
    ("degree", "products"),
    [
        (1, 0),
        (2, 1),
        (3, 2),
        (7, 4),
        (10, 5),
        (30, 9),
        (60, 14),
        (97, 18),
        (120, 20),
        (250, 30),
        (500, 43),
        (1000, 62),
    ],
)
@pytest.mark.parametrize("p", [1, 2, 2.5])
def test_chebyshev_costs_twice_the_root_of_its_degree(p, degree, products):
    """2 sqrt(d) - 2, rounded up, and at most one more: k - 1 + ceil(d/k) - 1 for the best odd k."""
    watch, result = watched(spd(SIZE), p, method=Chebyshev(degree=degree, floor=1e-4))
    assert watch.products == result.matmuls.item() == products == series_products(degree)
    assert products <= 2 * degree**0.5 + 1 - 2 + 0.5
    assert result.steps.item() == degree


@pytest.mark.parametrize("p", [1, 2, 3, 4, 2.5])
def test_evd_costs_one_product(p):
    watch, result = watched(spd(SIZE), p, method="evd")
    assert watch.products == result.matmuls.item() == 1
    assert watch.calls["_linalg_eigh"] == 1


@pytest.mark.parametrize("work", [1, 2, 5])
@pytest.mark.parametrize("scaling", SCALINGS, ids=name)
@pytest.mark.parametrize(("row", "p"), cases(FIXED, (2, 3, 4, 8)), ids=name)
def test_fixed_work_is_counted_right(row, p, scaling, work):
    watch, result = watched(spd(SIZE), p, method=row.fixed(work), scaling=scaling)
    estimate = 1 if scaling == Frobenius(order=2) else 0  # A^2; power iterations multiply vectors only
    assert watch.products == row.products(p, work) + estimate
    assert result.matmuls.item() == watch.products


@pytest.mark.parametrize("dtype", [FP64, FP32], ids=name)
@pytest.mark.parametrize("condition", [1.5, 1e5])
@pytest.mark.parametrize(("row", "p"), cases(ROWS, (1, 2, 3, 4, 8)), ids=name)
def test_adaptive_work_is_counted_right(row: Row, p, condition, dtype):
    if condition > row.converges_to[dtype]:
        condition = row.converges_to[dtype]
    for keywords in ({}, {"scaling": Frobenius(order=2)} if row.scaled else {}):
        watch, result = watched(spd(SIZE, condition, dtype=dtype), p, method=row.method, **keywords)
        assert result.matmuls.item() == watch.products


@pytest.mark.parametrize(("row", "p"), cases(ITERATIVE, (2, 4)), ids=name)
def test_adaptive_work_is_that_of_its_steps(row, p):
    """A member that converges by itself after s steps has spent what s fixed steps spend."""
    result = matroots.inv_root_ex(spd(SIZE, 30.0), p, method=row.method)
    assert result.status == Status.CONVERGED
    if p == 2 or row.name == "cn":  # p = 4 by square roots: the field has the sum over both
        assert result.matmuls.item() == row.products(p, int(result.steps))


@pytest.mark.parametrize(("row", "p"), cases(ITERATIVE, (2, 4)), ids=name)
def test_stagnation_is_counted_right(row, p):
    """fp32 at cond 1e7 cannot reach this tolerance: what is spent before giving up counts too."""
    for seed in range(4):
        watch, result = watched(spd(SIZE, 3e6, seed, FP32), p, method=row.method, tol=1e-9)
        assert result.status == Status.STAGNATED
        assert result.matmuls.item() == watch.products


@pytest.mark.parametrize(("row", "p"), cases(ITERATIVE, (2, 4)), ids=name)
def test_running_out_of_steps_is_counted_right(row, p):
    for limit in (1, 2, 5):
        watch, result = watched(spd(SIZE, 1e6), p, method=row.method, max_steps=limit)
        assert result.status == Status.MAX_STEPS
        assert result.matmuls.item() == watch.products == row.products(p, limit)


@pytest.mark.parametrize(("row", "p"), cases(ITERATIVE, (2, 4)), ids=name)
def test_a_batch_costs_each_member_what_it_costs_alone(row, p):
    A = torch.stack([spd(SIZE, condition) for condition in (2.0, 1e5, 50.0)])
    together = matroots.inv_root_ex(A, p, method=row.method)
    alone = [watched(member, p, method=row.method)[0].products for member in A]
    assert together.matmuls.tolist() == alone
    assert len(set(alone)) == 3


@pytest.mark.parametrize(("row", "p"), cases(ROWS, (1, 2, 3, 4)), ids=name)
@pytest.mark.parametrize("want", ["root", "root_pair"])
def test_roots_cost_little_more_than_inverse_roots(row, p, want):
    """A X^{p-1} costs at most l(p - 1) + 1 products, a pair of square roots one; two series cost about twice one."""
    A = spd(SIZE, 30.0)
    with Watch() as watch:
        getattr(matroots, want)(A, p, method=row.method)
    inverse = watched(A, p, method=row.method)[0].products
    extra = 1.2 * inverse if row.name == "chebyshev" else 1
    if row.by_inverse:
        extra = 0 if p == 1 else shortest_chain(p - 1) + 1
    assert watch.products > 0 or row.name == "rational"
    assert watch.products <= inverse + extra


# ------------------------------------------------------------------------------------------------ what must not happen


@pytest.mark.parametrize("scaling", SCALINGS, ids=name)
@pytest.mark.parametrize(("row", "p"), cases(FIXED, (2, 4)), ids=name)
def test_fixed_work_does_not_look_at_values(row, p, scaling, monkeypatch):
    """Where looking is not free, as it is on a CPU, nothing is looked at, and the answer is the same."""
    A = torch.stack([spd(SIZE, seed=s) for s in range(3)])
    half: tuple[dict[str, Any], ...] = (
        ({"matmul_dtype": "fp16"}, {"matmul_dtype": "bf16x2"}) if row.half_products else ()
    )
    for keywords in ({}, {"damping": 1e-3}, {"rel_damping": 1e-6}, *half):
        _, looked = watched(A, p, method=row.fixed(5), scaling=scaling, **keywords)
        with monkeypatch.context() as blind:
            for module in (_prepare, _products, _solve, bounds):
                blind.setattr(module, "may_hold", lambda mask: True)
            watch, result = watched(A, p, method=row.fixed(5), scaling=scaling, **keywords)
        assert watch.synchronisations == 0, watch.calls
        assert torch.equal(result.root, looked.root)


@pytest.mark.parametrize(
    ("solver", "keywords"), [(Minimax(floor=1e-4), {}), (Minimax(), {"rel_damping": 1e-6})], ids=repr
)
def test_a_schedule_known_beforehand_does_not_look_at_values(solver, keywords, monkeypatch):
    A = torch.stack([spd(SIZE, seed=s) for s in range(3)])
    for module in (_prepare, _products, _solve, bounds):
        monkeypatch.setattr(module, "may_hold", lambda mask: True)
    watch, result = watched(A, 4, method=solver, **keywords)
    assert watch.synchronisations == 0, watch.calls
    assert watch.products == int(result.matmuls.max())


@pytest.mark.parametrize("power_steps", [1, 10])
def test_power_iterations_spend_no_products_of_matrices(power_steps):
    for scaling in (Power(steps=power_steps), MultiPower(steps=power_steps, vectors=8)):
        A = spd(SIZE).unsqueeze(0)
        with Watch() as watch:
            scaling.estimate(A)
        assert watch.products == 0
        assert watch.synchronisations == 0
        assert watch.calls["bmm"] == power_steps


@pytest.mark.parametrize(("row", "p"), cases(FIXED, (2, 4)), ids=name)
def test_fp32_is_computed_in_fp32(row, p):
    """No product in fp64, no copy of a matrix in another dtype."""
    A = torch.stack([spd(SIZE, seed=s, dtype=FP32) for s in range(2)])
    watch, _ = watched(A, p, method=row.fixed(5))
    assert watch.operand_dtypes <= {FP32}
    assert [cast for cast in watch.casts if cast[0] != cast[1]] == []


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=name)
@pytest.mark.parametrize(("row", "p"), cases(FIXED, (2, 4)), ids=name)
def test_half_input_is_cast_twice(row, p, half):
    """Up on the way in, down on the way out; every product is in fp32."""
    watch, _ = watched(spd(SIZE, dtype=half), p, method=row.fixed(5))
    assert watch.operand_dtypes <= {FP32}
    assert [cast for cast in watch.casts if cast[0] != cast[1]] == [(half, FP32), (FP32, half)]


@pytest.mark.parametrize(("row", "p"), cases(FIXED, (2,)), ids=name)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="requires cuda")
def test_fixed_work_does_not_synchronise_on_cuda(row, p):
    A = torch.stack([spd(SIZE, seed=s) for s in range(3)]).cuda()
    matroots.inv_root_ex(A, p, method=row.fixed(5))  # loads kernels, which may synchronise
    torch.cuda.set_sync_debug_mode("error")
    try:
        matroots.inv_root_ex(A, p, method=row.fixed(5))
    finally:
        torch.cuda.set_sync_debug_mode("default")
