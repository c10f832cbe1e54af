# SPDX-License-Identifier: Apache-2.0
"""Chunks in several threads: the same answers, and torch's settings left as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from matrices import spd
from table import FP32, FP64
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import matroots
from matroots import Power, Status, _solve, _threads

METHODS = ("evd", "cn", "ndb", "rational")


class Untouched(TorchDispatchMode):
    """Hands every operation on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.fixture
def started(monkeypatch) -> Iterator[list[tuple[int, int]]]:
    """Two torch threads, and a small batch is worth both: the number of chunks and threads of each time they are used."""
    before = torch.get_num_threads()
    calls: list[tuple[int, int]] = []
    mapped = _threads.mapped

    def counted(function: Callable[[int], Any], items: range, threads: int) -> Iterator[Any]:
        calls.append((len(items), threads))
        return mapped(function, items, threads)

    monkeypatch.setattr(_threads, "_WORTH_A_THREAD", 64)
    monkeypatch.setattr(_solve, "mapped", counted)
    torch.set_num_threads(2)
    yield calls
    torch.set_num_threads(before)


def batch(members: int = 6, n: int = 20, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.stack([spd(n, 10.0 ** (1 + i % 3), seed=i, dtype=dtype) for i in range(members)])


def on_one_thread(A: torch.Tensor, p: float, **keywords: Any) -> matroots.InvRoot:
    torch.set_num_threads(1)
    result = matroots.inv_root_ex(A, p, **keywords)
    torch.set_num_threads(2)
    return result


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [FP32, FP64])
@pytest.mark.parametrize("keywords", [{}, {"max_batch": 2}], ids=["halves", "smaller chunks"])
def test_threads_change_no_answer(started, method, dtype, keywords):
    A = batch(8, dtype=dtype)
    shared = matroots.inv_root_ex(A, 2, method=method, **keywords)
    assert started == [(4 if keywords else 2, 2)]
    assert torch.get_num_threads() == 2
    alone = on_one_thread(A, 2, method=method, **keywords)
    assert len(started) == 1
    assert shared.status.tolist() == alone.status.tolist() == [Status.CONVERGED] * 8
    if method == "rational":
        assert torch.allclose(shared.root, alone.root, rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(shared.root, alone.root)
        assert torch.equal(shared.steps, alone.steps)


def test_members_that_fail_do_so_in_their_place(started):
    A = batch(6)
    A[1], A[4, 0, 0] = -A[1], torch.nan
    shared = matroots.inv_root_ex(A, 2, method="ndb")
    assert started == [(2, 2)]
    expected = [Status.CONVERGED] * 6
    expected[1], expected[4] = Status.INDEFINITE, Status.NONFINITE_INPUT
    assert shared.status.tolist() == expected
    assert torch.equal(shared.root.isnan(), on_one_thread(A, 2, method="ndb").root.isnan())


@pytest.mark.parametrize("failing", [0, 3])
def test_an_exception_in_a_chunk_is_raised_and_restores_the_threads(started, monkeypatch, failing):
    A = batch(8)
    solve_chunk = _solve._solve_chunk

    def fails(chunk: torch.Tensor, *rest: Any) -> Any:
        if torch.equal(chunk[0], A[2 * failing]):
            raise MemoryError("of one chunk")
        return solve_chunk(chunk, *rest)

    monkeypatch.setattr(_solve, "_solve_chunk", fails)
    with pytest.raises(MemoryError, match="of one chunk"):
        matroots.inv_root_ex(A, 2, method="cn", max_batch=2)
    assert started == [(4, 2)]
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, nullcontext])
def test_the_gradient_mode_of_the_caller_is_respected(started, method, mode):
    with mode():
        A = batch(6)  # under inference_mode, a tensor that no other thread may write to
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        X = matroots.inv_root_ex(A, 2, method=method, damping=torch.full((6,), 1e-3)).root
        assert started == [(2, 2)]
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == modes
        assert not X.requires_grad
    plain = matroots.inv_root_ex(batch(6), 2, method=method, damping=1e-3).root
    assert torch.allclose(X, plain, rtol=1e-6, atol=1e-6)


def test_a_gradient_comes_through_the_threads(started):
    A = batch(6).requires_grad_()
    X = matroots.inv_root_ex(A, 1, method="evd").root
    assert started == [(2, 2)]
    X.sum().backward()
    column = X.detach().sum(-1, keepdim=True)
    assert A.grad is not None
    assert torch.allclose(A.grad, -column @ column.mT, rtol=1e-4, atol=1e-4)


def test_autocast_reaches_no_thread(started):
    A = batch(6)
    plain = matroots.inv_root_ex(A, 2, method="ndb").root
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(matroots.inv_root_ex(A, 2, method="ndb").root, plain)
        assert torch.is_autocast_enabled("cpu")
    assert started == [(2, 2)] * 2


@pytest.mark.parametrize(
    "mode", [Untouched, lambda: FlopCounterMode(display=False), lambda: torch.device("cpu")]
)
def test_under_a_mode_no_thread_is_started(started, mode):
    A = batch(6)
    with mode():
        watched = matroots.inv_root_ex(A, 2, method="ndb")
    assert started == []
    assert torch.equal(watched.root, matroots.inv_root_ex(A, 2, method="ndb").root)
    assert started == [(2, 2)]


def test_with_a_generator_no_thread_is_started(started):
    A = batch(6)
    drawn = [
        matroots.inv_root_ex(
            A,
            2,
            method="ndb",
            scaling=Power(steps=3),
            max_batch=3,
            generator=torch.Generator().manual_seed(s),
        ).root
        for s in (0, 0)
    ]
    assert started == []
    assert torch.equal(*drawn)


def test_one_member_or_one_thread_is_solved_here(started):
    matroots.inv_root_ex(batch(1), 2, method="evd")
    on_one_thread(batch(6), 2, method="evd")
    matroots.inv_root_ex(batch(6)[:0], 2, method="evd")
    assert started == []


@pytest.mark.parametrize(
    ("members", "size", "threads", "expected"),
    [
        (3, 2, 2, False),  # one round of 2 + 1: 3 of 4
        (4, 2, 2, True),
        (4, 4, 2, False),
        (3, 1, 2, False),  # two rounds, the second half empty: 3 of 4
        (5, 1, 2, True),  # 5 of 6
        (8, 1, 10, True),  # just four fifths
        (7, 1, 10, False),
    ],
)
def test_balanced_chunks_keep_four_fifths_of_the_time_busy(members, size, threads, expected):
    assert _threads.balanced(members, size, threads) is expected


def test_an_unbalanced_batch_is_solved_here(started):
    A = batch(3)
    X = matroots.inv_root_ex(A, 2, method="evd").root
    assert started == []
    assert torch.equal(X, on_one_thread(A, 2, method="evd").root)


def test_workers_are_as_many_as_torch_has_and_the_work_is_worth(started):
    assert _threads.workers(6, 20) == 2
    assert _threads.workers(1, 20) == 1
    assert _threads.workers(6, 1) == 1, "n^3 of all is below what a thread is worth"
    assert _threads.workers(0, 20) == 1
    with Untouched():
        assert _threads.workers(6, 20) == 1
    torch.set_num_threads(1)
    assert _threads.workers(6, 20) == 1


def test_results_come_in_the_order_of_the_items(started):
    seen = list(_threads.mapped(lambda i: (i, torch.get_num_threads()), range(20), 2))
    assert seen == [(i, 1) for i in range(20)]
    assert torch.get_num_threads() == 2


def test_a_caller_that_stops_early_gets_its_threads_back(started):
    results = _threads.mapped(lambda i: i, range(20), 2)
    assert next(results) == 0
    results.close()
    assert torch.get_num_threads() == 2
