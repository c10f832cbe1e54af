# SPDX-License-Identifier: Apache-2.0
"""Faults that users of such optimizers have reported, each as its whole kind; what belongs to torch's contract is in test_dash_contract."""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import dash_optim.dash
import dash_optim.refresh
from dash_optim import DASH, NonfiniteGradientError, PreconditionerError, from_config, param_groups
from dash_optim.blocks import geometry
from dash_optim.grafting import Adam, RMSProp
from matroots import NewtonDB, RootError, Status, inv_root_ex

GRAFTINGS = ("none", "sgd", "adagrad", "rmsprop", "adam")
SCHEDULES = ("interval", "staggered", "certified")
STACKINGS = ("device", "layer", "none")
EXACT: dict[str, Any] = {"method": "evd", "damping": 1e-4, "rel_damping": 0.0, "update_freq": 1}
REALS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).to(dtype)


def parameters(
    *shapes: tuple[int, ...], dtype: torch.dtype = torch.float64, seed: int = 100
) -> list[nn.Parameter]:
    return [nn.Parameter(normal(*shape, seed=seed + i, dtype=dtype)) for i, shape in enumerate(shapes)]


def give(params: Sequence[Tensor], step: int, *, scale: float = 1.0) -> None:
    """Give gradients that depend on the step and the place of the parameter only."""
    for i, param in enumerate(params):
        param.grad = scale * normal(*param.shape, seed=1000 * step + i, dtype=param.dtype)


def train(opt: DASH, params: Sequence[Tensor], steps: range) -> None:
    for step in steps:
        give(params, step)
        opt.step()


def same(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def tensors(opt: DASH, param: Tensor) -> dict[str, Tensor]:
    return {name: value for name, value in opt.state[param].items() if isinstance(value, Tensor)}


def finite(opt: DASH) -> bool:
    """Whether all state is finite but what the records say is unknown."""
    return all(
        bool(torch.isfinite(value).all())
        for own in opt.state.values()
        for name, value in own.items()
        if isinstance(value, Tensor) and ".record_" not in name
    )


@contextmanager
def masked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Steps as accelerators take them: whether a gradient is finite is never looked at."""
    with monkeypatch.context() as patch:
        patch.setattr(dash_optim.dash, "_looking_is_free", lambda found: False)
        yield


class Naive:
    """The method for one matrix in NumPy, from the formulas, one block after the other."""

    def __init__(
        self,
        W: Tensor,
        *,
        block: int = 10**9,
        p: float = 2.0,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.85, 0.99),
        beta_factors: float = 0.95,
        damping: float = 1e-4,
        freq: int = 1,
        grafting: str = "adam",
        scope: str = "block",
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        self.W = W.detach().to(torch.float64).numpy().copy()
        rows, cols = (range(0, size, block) for size in self.W.shape)
        self.blocks = [(slice(r, r + block), slice(c, c + block)) for r, c in itertools.product(rows, cols)]
        zeros = [np.zeros_like(self.W[b]) for b in self.blocks]
        self.m, self.v, self.B = ([z.copy() for z in zeros] for _ in range(3))
        self.L = [np.zeros((len(z), len(z))) for z in zeros]
        self.R = [np.zeros((z.shape[1], z.shape[1])) for z in zeros]
        self.roots: list[tuple[np.ndarray, np.ndarray]] = [(np.eye(0), np.eye(0))] * len(zeros)
        self.p, self.lr, self.betas, self.b, self.damping = p, lr, betas, beta_factors, damping
        self.freq, self.grafting, self.scope = freq, grafting, scope
        self.momentum, self.weight_decay, self.t = momentum, weight_decay, 0

    def root(self, F: np.ndarray) -> np.ndarray:
        c = 1 - self.b**self.t if self.b < 1 else 1.0
        values, Q = np.linalg.eigh(F / c + self.damping * np.eye(len(F)))
        return (Q * values ** (-1 / self.p)) @ Q.T

    def direction(self, i: int) -> np.ndarray | None:
        beta2 = self.betas[1]
        m = self.m[i] / (1 - self.betas[0] ** self.t)
        if self.grafting in ("none", "sgd"):
            return m if self.grafting == "sgd" else None
        v = self.v[i] / (1 - beta2**self.t) if self.grafting == "adam" else self.v[i]
        return m / (np.sqrt(v) + 1e-8)

    def step(self, gradient: Tensor) -> np.ndarray:
        """Update W; return the update before momentum, learning rate and decay."""
        G = gradient.to(torch.float64).numpy()
        self.t += 1
        w = 1.0 if self.b == 1 else 1 - self.b
        U, D = [], []
        for i, where in enumerate(self.blocks):
            g = G[where]
            self.L[i] = self.b * self.L[i] + w * g @ g.T
            self.R[i] = self.b * self.R[i] + w * g.T @ g
            before, (beta1, _) = self.m[i], self.betas
            self.m[i] = beta1 * before + (1 - beta1) * g
            ahead = (beta1**2 * before + (1 - beta1**2) * g) / (1 - beta1 ** (self.t + 1))
            if self.grafting == "adagrad":
                self.v[i] = self.v[i] + g * g
            else:
                self.v[i] = self.betas[1] * self.v[i] + (1 - self.betas[1]) * g * g
            if (self.t - 1) % self.freq == 0:
                self.roots[i] = self.root(self.L[i]), self.root(self.R[i])
            left, right = self.roots[i]
            U.append(left @ ahead @ right)
            D.append(self.direction(i))
        total = np.zeros_like(self.W)
        whole = [math.sqrt(sum(np.sum(M * M) for M in Ms if M is not None)) for Ms in (D, U)]
        for i, where in enumerate(self.blocks):
            d = D[i]
            if d is not None:
                lengths = whole if self.scope == "layer" else [np.linalg.norm(d), np.linalg.norm(U[i])]
                U[i] = U[i] * (lengths[0] / lengths[1] if lengths[1] > 0 else 0.0)
            total[where] = U[i]
            self.B[i] = self.momentum * self.B[i] + U[i]
            self.W[where] = self.W[where] * (1 - self.lr * self.weight_decay) - self.lr * self.B[i]
        return total


def close(W: Tensor, reference: Naive | np.ndarray, tol: float = 1e-9) -> bool:
    truth = reference.W if isinstance(reference, Naive) else reference
    gap = np.abs(W.detach().to(torch.float64).numpy().reshape(truth.shape) - truth)
    return bool(gap.max(initial=0.0) <= tol * max(1.0, np.abs(truth).max(initial=0.0)))


# factors, whatever is done with them


@pytest.mark.parametrize("refresh", SCHEDULES)
@pytest.mark.parametrize("stacking", STACKINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", ["auto", "evd", "ndb"])
def test_factors_are_averages_and_roots_do_not_touch_them(
    refresh: str, stacking: str, dtype: torch.dtype, method: str
) -> None:
    (W,) = parameters((8, 4), dtype=dtype)
    options: dict[str, Any] = {"refresh": refresh, "update_freq": 2, "refresh_young": False}
    opt = DASH([W], block_size=4, stacking=stacking, method=method, **options)
    truth = torch.zeros(2, 2, 4, 4, dtype=torch.float64)
    for step in range(4):
        give([W], step)
        opt.step()
        opt.diagnostics(certify=True)
        assert W.grad is not None
        G = W.grad.double().reshape(2, 4, 4)
        truth = 0.95 * truth + 0.05 * torch.stack([G @ G.mT, G.mT @ G], dim=1)
    u = torch.finfo(dtype).eps
    found = torch.stack([opt.state[W][f"4x4.factor_{dim}"].double() for dim in (0, 1)], dim=1)
    assert torch.allclose(found, truth, rtol=0, atol=32 * u)


# B01 a zero gradient is no 0/0


@pytest.mark.parametrize("grafting", GRAFTINGS)
@pytest.mark.parametrize("options", [{}, {"grafting_scope": "layer"}, {"momentum": 0.9}, {"refresh": "certified"}, {"damping": 0.0, "rel_damping": 1e-6}, {"method": "auto", "damping": 0.0, "rel_damping": 1e-6}, {"betas": (0.0, 0.0)}, {"beta_factors": 1.0}], ids=str)  # fmt: skip
def test_zero_gradients_move_nothing_and_leave_nothing_behind(grafting: str, options: dict[str, Any]) -> None:
    W, b = parameters((8, 6), (5,))
    opt = DASH([W, b], block_size=4, grafting=grafting, lr=0.1, **{**EXACT, **options})
    before = [W.detach().clone(), b.detach().clone()]
    for _ in range(3):
        W.grad, b.grad = torch.zeros_like(W), torch.zeros_like(b)
        opt.step()
    assert same([W, b], before)
    assert finite(opt)
    train(opt, [W, b], range(1, 4))
    assert finite(opt)
    assert not bool((before[0] == W).any())
    assert not bool((b == before[1]).any())


@pytest.mark.parametrize("grafting", GRAFTINGS)
@pytest.mark.parametrize("scope", ["block", "layer"])
def test_gradients_that_come_after_zeros_are_used_as_the_formulas_say(grafting: str, scope: str) -> None:
    (W,) = parameters((8, 6))
    opt = DASH([W], block_size=4, grafting=grafting, grafting_scope=scope, **EXACT)
    naive = Naive(W, block=4, grafting=grafting, scope=scope)
    for step in range(6):
        give([W], step, scale=float(step > 2))
        assert W.grad is not None
        W.grad[:4, :4] = 0.0  # a block that never sees a gradient, next to blocks that do
        opt.step()
        naive.step(W.grad)
    assert close(W, naive)


@pytest.mark.parametrize("dtype", REALS)
def test_zero_gradients_only_decay(dtype: torch.dtype) -> None:
    params = parameters((8, 6), (5,), (), (3, 2, 2), dtype=dtype)
    opt = DASH(params, block_size=4, lr=0.5, weight_decay=0.5)
    before = [param.detach().clone() for param in params]
    for param in params:
        param.grad = torch.zeros_like(param)
    opt.step()
    assert same(params, [param * 0.75 for param in before])


# B02 a parameter that has no gradient yet


@pytest.mark.parametrize("stacking", STACKINGS)
@pytest.mark.parametrize("refresh", SCHEDULES)
@pytest.mark.parametrize("late", [0, 1, 2, 3])
@pytest.mark.parametrize("young", [False, True])
def test_a_parameter_without_gradient_is_untouched_and_starts_its_own_count(
    stacking: str, refresh: str, late: int, young: bool
) -> None:
    shapes = [(8, 6), (8, 6), (4, 9), (5,)]
    options: dict[str, Any] = {"block_size": 4, "stacking": stacking, "refresh": refresh, "update_freq": 3}
    options |= {"weight_decay": 0.1, "start_step": 1, "lr": 0.01, "refresh_young": young}
    params = parameters(*shapes)
    opt = DASH(params, **options)
    alone = [copy.deepcopy(param) for param in params]
    phase = list(params)
    for step in range(6):
        give(params, step)
        if step in (0, 1, 3):
            params[late].grad = None
        before, state = params[late].detach().clone(), copy.deepcopy(opt.state.get(params[late], {}))
        opt.step()
        if step in (0, 1, 3):
            assert torch.equal(params[late], before)
            own = opt.state.get(params[late], {})
            assert own.keys() == state.keys()
            assert all(
                torch.equal(own[k].nan_to_num(7.0), v.nan_to_num(7.0))
                if isinstance(v, Tensor)
                else own[k] == v
                for k, v in state.items()
            )
    solo = DASH(alone, **options)  # the same order, so that staggered blocks have the same turn
    for step in (2, 4, 5):
        give(alone, step)
        for i, param in enumerate(alone):
            if i != late:
                param.grad = None
        solo.step()
    assert float(opt.state[phase[late]]["step"]) == 3
    assert torch.allclose(params[late], alone[late], rtol=0, atol=1e-12)


# B04 no step without an update


@pytest.mark.parametrize("refresh", SCHEDULES)
@pytest.mark.parametrize("grafting", GRAFTINGS)
def test_every_step_moves_every_element_before_and_after_the_start(grafting: str, refresh: str) -> None:
    params = parameters((8, 6), (4, 9))
    options: dict[str, Any] = {"refresh": refresh, "update_freq": 10, "refresh_young": False}
    opt = DASH(params, block_size=4, grafting=grafting, start_step=3, lr=0.1, **options)
    for step in range(9):
        before = [param.detach().clone() for param in params]
        train(opt, params, range(step, step + 1))
        assert all(not bool((a == b).any()) for a, b in zip(params, before, strict=True))
        done = [f.refreshes for block in opt.diagnostics().blocks for f in block.factors]
        assert all((count > 0) == (step >= 3) for count in done)


@pytest.mark.parametrize(
    ("grafting", "betas", "reference", "keywords"),
    [
        ("adam", (0.9, 0.95), torch.optim.AdamW, {"betas": (0.9, 0.95)}),
        ("adam", (0.0, 0.99), torch.optim.AdamW, {"betas": (0.0, 0.99)}),
        ("rmsprop", (0.0, 0.95), torch.optim.RMSprop, {"alpha": 0.95}),
        ("adagrad", (0.0, 0.95), torch.optim.Adagrad, {"eps": 1e-8}),
        ("sgd", (0.0, 0.95), torch.optim.SGD, {}),
        ("none", (0.0, 0.95), torch.optim.SGD, {}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_before_the_start_it_is_the_grafted_method(
    grafting: str,
    betas: tuple[float, float],
    reference: type[torch.optim.Optimizer],
    keywords: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    params = parameters((8, 6), (4, 9), dtype=dtype)
    others = copy.deepcopy(params)
    decay = 0.1 if reference is torch.optim.AdamW else 0.0
    opt = DASH(
        params, block_size=4, grafting=grafting, betas=betas, start_step=5, lr=0.01, weight_decay=decay
    )
    other = reference(others, lr=0.01, weight_decay=decay, **keywords)
    for step in range(5):
        give(params, step)
        give(others, step)
        opt.step()
        other.step()
    tol = 1e-12 if dtype == torch.float64 else 1e-6
    assert all(torch.allclose(a, b, rtol=0, atol=tol) for a, b in zip(params, others, strict=True))


# B05 blocks that do not divide the dimensions


@pytest.mark.parametrize("shape", [(11, 13), (8, 13), (11, 8), (3, 5), (8, 8), (17, 25)])
@pytest.mark.parametrize("stacking", STACKINGS)
@pytest.mark.parametrize("scope", ["block", "layer"])
def test_rests_in_both_dimensions_are_blocks_like_others(
    shape: tuple[int, int], stacking: str, scope: str
) -> None:
    (W,) = parameters(shape)
    naive = Naive(W, block=8, scope=scope, momentum=0.5, weight_decay=0.1, lr=0.01)
    options: dict[str, Any] = {"momentum": 0.5, "weight_decay": 0.1, "lr": 0.01, "max_batch": 3}
    opt = DASH([W], block_size=8, stacking=stacking, grafting_scope=scope, **EXACT, **options)
    for step in range(4):
        give([W], step)
        opt.step()
        assert W.grad is not None
        naive.step(W.grad)
    assert close(W, naive)


@pytest.mark.parametrize(
    "shape", [(11, 13), (8, 13), (3, 5), (16, 1), (7, 5, 6), (2, 3, 4, 5), (9,), (1, 1, 12)]
)
@pytest.mark.parametrize("nd", ["matrix", "tensor"])
@pytest.mark.parametrize("block", [1, 2, 3, 8, math.inf])
def test_blocks_hold_every_element_once(shape: tuple[int, ...], nd: Any, block: float) -> None:
    seen = geometry(shape, block, math.inf, nd)
    count = torch.zeros(seen.view, dtype=torch.int64)
    numbers = []
    for blocks in seen.classes:
        for corner in itertools.product(*map(range, blocks.grid)):
            where = tuple(
                slice(o + c * s, o + (c + 1) * s)
                for o, c, s in zip(blocks.offset, corner, blocks.shape, strict=True)
            )
            count[where] += 1
        numbers += blocks.numbers.tolist()
    assert bool((count == 1).all())
    assert sorted(numbers) == list(range(seen.blocks))


# B07 scalars and empty parameters


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1)])
@pytest.mark.parametrize("one_d", ["adamw", "dash"])
def test_one_element_is_adamws(shape: tuple[int, ...], one_d: str) -> None:
    (W,) = parameters(shape)
    (V,) = parameters(shape)
    opt = DASH([W], one_d=one_d, lr=0.1, weight_decay=0.1)
    other = torch.optim.AdamW([V], lr=0.1, weight_decay=0.1, betas=(0.85, 0.99))
    for step in range(4):
        give([W], step)
        give([V], step)
        opt.step()
        other.step()
    assert torch.allclose(W, V, rtol=1e-12, atol=0)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0,), (0, 0), (2, 0, 3)])
@pytest.mark.parametrize("refresh", SCHEDULES)
def test_empty_parameters_are_carried_along(shape: tuple[int, ...], refresh: str) -> None:
    params = [*parameters(shape), *parameters((6, 4))]
    opt = DASH(params, block_size=4, refresh=refresh, one_d="dash", weight_decay=0.1)
    train(opt, params, range(3))
    state = opt.state_dict()
    assert 0 in state["state"]
    assert params[0].shape == shape
    assert "nothing" in opt.summary()
    other = DASH(copy.deepcopy(params), block_size=4, refresh=refresh, one_d="dash", weight_decay=0.1)
    other.load_state_dict(state)
    for p in other.param_groups[0]["params"]:
        p.grad = torch.zeros_like(p)
    other.step()


def test_only_empty_parameters_step() -> None:
    (W,) = parameters((0, 4))
    W.grad = torch.zeros_like(W)
    DASH([W]).step()


# B08 views of convolutions


@pytest.mark.parametrize("shape", [(16, 6, 3, 3), (4, 2, 3, 3, 3), (5, 7, 3), (1, 6, 3, 3), (6, 1, 1, 1)])
def test_a_convolution_is_the_matrix_of_its_filters(shape: tuple[int, ...]) -> None:
    (W,) = parameters(shape)
    sizes = [size for size in shape if size != 1]
    flat = (sizes[0], math.prod(sizes[1:])) if len(sizes) > 1 else (sizes[0],)
    V = nn.Parameter(W.detach().clone().reshape(flat))
    options: dict[str, Any] = {"block_size": 4, "one_d": "dash", "weight_decay": 0.1}
    first, second = DASH([W], **options), DASH([V], **options)
    for step in range(3):
        give([W], step)
        assert W.grad is not None
        V.grad = W.grad.reshape(flat)
        first.step()
        second.step()
    assert torch.equal(W.reshape(flat), V)


@pytest.mark.parametrize("algorithm", ["dash", "adamw"])
@pytest.mark.parametrize("nd", ["matrix", "tensor"])
@pytest.mark.parametrize("gradient", ["as parameter", "contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_format_changes_neither_the_update_nor_itself(
    algorithm: str, nd: str, gradient: str, dtype: torch.dtype
) -> None:
    base = normal(8, 6, 3, 3, dtype=dtype)
    V = nn.Parameter(base.clone())
    W = nn.Parameter(base.clone().contiguous(memory_format=torch.channels_last))
    stride = W.stride()
    options: dict[str, Any] = {"algorithm": algorithm, "nd": nd, "block_size": 4, "weight_decay": 0.1}
    first, second = DASH([W], **options), DASH([V], **options)
    for step in range(3):
        g = normal(8, 6, 3, 3, seed=step, dtype=dtype)
        V.grad = g.clone()
        last = gradient == "channels_last" or (gradient == "as parameter")
        W.grad = g.clone(memory_format=torch.channels_last if last else torch.contiguous_format)
        first.step()
        second.step()
    assert torch.equal(W, V)
    assert W.stride() == stride


@pytest.mark.parametrize("p", [None, 4, "8/3"])
def test_each_dimension_of_a_tensor_has_its_factor(p: Any) -> None:
    (W,) = parameters((4, 5, 3))
    opt = DASH([W], nd="tensor", p=p, grafting=None, betas=(0.0, 0.0), lr=1.0, **EXACT)
    before = W.detach().clone().numpy()
    give([W], 0)
    opt.step()
    assert W.grad is not None
    G = W.grad.numpy()
    exponent = 6.0 if p is None else 8 / 3 if p == "8/3" else 4.0
    roots = []
    for dim in range(3):
        M = np.moveaxis(G, dim, 0).reshape(G.shape[dim], -1)
        values, Q = np.linalg.eigh(M @ M.T + 1e-4 * np.eye(len(M)))
        roots.append((Q * values ** (-1 / exponent)) @ Q.T)
    assert close(W, before - np.einsum("abc,ai,bj,ck->ijk", G, *roots))


def test_blocks_of_a_tensor_have_their_own_factors() -> None:
    (W,) = parameters((3, 4, 5))
    opt = DASH([W], nd="tensor", block_size=2, p=4, grafting=None, betas=(0.0, 0.0), lr=1.0, **EXACT)
    expected = W.detach().clone()
    give([W], 0)
    opt.step()
    assert W.grad is not None
    for i, j, k in itertools.product(range(0, 3, 2), range(0, 4, 2), range(0, 5, 2)):
        where = (slice(i, i + 2), slice(j, j + 2), slice(k, k + 2))
        U = G = W.grad[where]
        for dim in range(3):
            M = G.movedim(dim, 0).flatten(1)
            values, Q = torch.linalg.eigh(M @ M.mT + 1e-4 * torch.eye(len(M)).double())
            U = torch.tensordot((Q * values**-0.25) @ Q.mT, U, dims=([1], [dim])).movedim(0, dim)
        expected[where] -= U
    assert torch.allclose(W, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("block", [4, 5, math.inf])
def test_a_dimension_without_factor_leaves_the_root_to_the_other(block: float) -> None:
    """One factor, so p=None is 2: ``U = M (M^T M + eps I)^{-1/2}``, for each block of rows."""
    (W,) = parameters((12, 3))
    opt = DASH(
        [W], p=None, max_factor_dim=4, block_size=block, grafting=None, betas=(0.0, 0.0), lr=1.0, **EXACT
    )
    expected = W.detach().clone()
    give([W], 0)
    opt.step()
    assert W.grad is not None
    rows = 12 if block == math.inf else int(block)
    update = []
    for G in W.grad.split(rows):
        values, Q = torch.linalg.eigh(G.mT @ G + 1e-4 * torch.eye(3).double())
        update.append(G @ (Q * values**-0.5) @ Q.mT)
    assert torch.allclose(W, expected - torch.cat(update), rtol=0, atol=1e-9)
    assert not any(name.endswith("_12") for name in opt.state[W])


# B09 sizes of blocks at their ends


@pytest.mark.parametrize("size", [math.inf, 10**9, 1e9, 9, 8])
def test_a_block_as_large_as_the_parameter_is_the_parameter(size: float) -> None:
    (W,) = parameters((8, 6))
    naive = Naive(W)
    opt = DASH([W], block_size=size, **EXACT)
    for step in range(3):
        give([W], step)
        opt.step()
        assert W.grad is not None
        naive.step(W.grad)
    assert close(W, naive)


def test_blocks_of_one_element_take_the_sign() -> None:
    (W,) = parameters((3, 4))
    before = W.detach().clone()
    opt = DASH(
        [W], p=4, block_size=1, grafting=None, lr=0.5, betas=(0.0, 0.0), rel_damping=0.0, update_freq=1
    )
    give([W], 0)
    opt.step()
    assert W.grad is not None
    assert torch.allclose(W, before - 0.5 * W.grad.sign(), rtol=0, atol=1e-5)


# B11 learning rates


@pytest.mark.parametrize("algorithm", ["dash", "adamw"])
@pytest.mark.parametrize("zero", [0, 0.0, torch.tensor(0.0), torch.tensor([0.0])])
@pytest.mark.parametrize("stacking", STACKINGS)
def test_each_group_has_its_rate_and_zero_is_a_rate(algorithm: str, zero: Any, stacking: str) -> None:
    W, V = parameters((8, 6), (8, 6))
    before = [W.detach().clone(), V.detach().clone()]
    groups = [{"params": [W], "lr": 0.1}, {"params": [V], "lr": zero}]
    opt = DASH(groups, algorithm=algorithm, stacking=stacking, weight_decay=0.1, block_size=4)
    train(opt, [W, V], range(3))
    assert torch.equal(V, before[1])
    assert not bool((before[0] == W).any())
    opt.param_groups[1]["lr"] = 0.1  # seen by the next step
    train(opt, [W, V], range(3, 4))
    assert not bool((before[1] == V).any())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("rate_dtype", [torch.float32, torch.float64])
def test_a_tensor_is_a_rate_like_a_number(dtype: torch.dtype, rate_dtype: torch.dtype) -> None:
    params = parameters((8, 6), (5,), (3, 2, 2), dtype=dtype)
    others = copy.deepcopy(params)
    rate = torch.tensor(0.125, dtype=rate_dtype)
    first = DASH(params, lr=rate, weight_decay=0.5, block_size=4)
    second = DASH(others, lr=0.125, weight_decay=0.5, block_size=4)
    for step in range(4):
        train(first, params, range(step, step + 1))
        train(second, others, range(step, step + 1))
        rate.mul_(0.5)  # in place, as a scheduler may
        second.param_groups[0]["lr"] *= 0.5
    tol = {torch.bfloat16: 1e-2, torch.float32: 1e-6, torch.float64: 1e-12}[dtype]
    assert all(torch.allclose(a, b, rtol=tol, atol=tol) for a, b in zip(params, others, strict=True))


def test_groups_are_those_that_the_optimizer_has_now() -> None:
    W, V = parameters((8, 6), (8, 6))
    opt = DASH([{"params": [W]}, {"params": [V]}], lr=0.1, block_size=4)
    train(opt, [W, V], range(2))
    opt.param_groups = [dict(group) for group in opt.param_groups]
    opt.param_groups[0]["lr"] = 0.0
    before = W.detach().clone()
    train(opt, [W, V], range(2, 3))
    assert torch.equal(W, before)


# B12 weight decay


@pytest.mark.parametrize("shape", [(8, 6), (5,), (), (4, 2, 3, 3), (1, 7)])
@pytest.mark.parametrize("options", [{}, {"one_d": "dash"}, {"algorithm": "adamw"}, {"maximize": True}, {"momentum": 0.9, "nesterov": True}, {"grafting": None}, {"start_step": 2}], ids=str)  # fmt: skip
def test_weight_decay_is_the_same_for_every_shape_and_path(
    shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    (W,) = parameters(shape)
    before = W.detach().clone()
    opt = DASH([W], lr=0.1, weight_decay=0.1, block_size=4, **options)
    for _ in range(5):
        W.grad = torch.zeros_like(W)
        opt.step()
    assert torch.allclose(W, before * (1 - 0.1 * 0.1) ** 5, rtol=1e-14, atol=0)
    opt.param_groups[0]["weight_decay"] = 0.0
    before = W.detach().clone()
    opt.step()
    assert torch.equal(W, before)


# B13, B18, B19: a resumed run is the run


def resumed(
    opt: DASH, params: Sequence[Tensor], used: bool, **options: Any
) -> tuple[DASH, list[nn.Parameter]]:
    """Return a new optimizer of new parameters that has loaded the state of this one."""
    state = copy.deepcopy(opt.state_dict())
    fresh = [nn.Parameter(torch.full_like(param, 3.0)) for param in params]
    other = DASH(fresh, **options)
    if used:
        train(other, fresh, range(50, 53))
    with torch.no_grad():
        for param, value in zip(fresh, params, strict=True):
            param.copy_(value)
    other.load_state_dict(state)
    return other, fresh


@pytest.mark.parametrize("stacking", STACKINGS)
@pytest.mark.parametrize("refresh", SCHEDULES)
@pytest.mark.parametrize("young", [False, True])
def test_resumed_equals_uninterrupted_and_not_cold(stacking: str, refresh: str, young: bool) -> None:
    """Saved one step after a refresh: that of the 4th gradient, with young factors that of the 9th, whose next is at the 11th."""
    options: dict[str, Any] = {"block_size": 4, "stacking": stacking, "refresh": refresh, "update_freq": 3}
    options |= {"momentum": 0.9, "lr": 0.05, "weight_decay": 0.01, "refresh_young": young}
    first = 10 if young else 5
    used = stacking != "none"
    dtype = torch.bfloat16 if stacking == "layer" else torch.float32
    params = parameters((8, 6), (8, 6), (4, 9), (5,), (3, 3), dtype=dtype)
    opt = DASH(params, **options)
    seen, never = params[:4], params[4]
    train(opt, seen, range(first))
    other, fresh = resumed(opt, params, used, **options)
    cold_params = copy.deepcopy(params)
    cold = DASH(cold_params, **options)
    for run, mine in ((opt, params), (other, fresh), (cold, cold_params)):
        for param in mine:
            param.grad = None
        train(run, mine[:4], range(first, first + 2))
        mine[0].grad = None  # the first of a stack, frozen after the resume
        run.step()
        train(run, mine, range(first + 2, first + 4))
    assert same(params, fresh)
    assert not torch.equal(params[0], cold_params[0])
    assert float(opt.state[never]["step"]) == 2
    for a, b in zip(params, fresh, strict=True):
        assert opt.state[a].keys() == other.state[b].keys()
        ours, theirs = tensors(opt, a), tensors(other, b)
        assert all(torch.equal(ours[k].nan_to_num(7.0), theirs[k].nan_to_num(7.0)) for k in ours)


def test_frozen_right_after_the_resume() -> None:
    params = parameters((8, 6), (8, 6), (5,))
    opt = DASH(params, block_size=4)
    train(opt, params, range(3))
    other, fresh = resumed(opt, params, False, block_size=4)
    train(other, fresh[1:], range(3, 4))
    assert torch.equal(fresh[0], params[0])


# B17 state belongs to parameters, not to stacks


@pytest.mark.parametrize("refresh", ["interval", "certified"])
def test_state_moves_to_a_model_with_one_more_layer(refresh: str) -> None:
    options: dict[str, Any] = {"block_size": 4, "refresh": refresh, "update_freq": 3, "method": "evd"}
    options["refresh_young"] = False
    params = parameters((8, 6), (8, 6), (5,))
    opt = DASH(params, **options)
    train(opt, params, range(4))
    new, *old = parameters((8, 6), (8, 6), (8, 6), (5,))
    with torch.no_grad():
        for a, b in zip(old, params, strict=True):
            a.copy_(b)
    other = DASH([new, *old], **options)
    state = other.state_dict()
    state["state"] = {i + 1: own for i, own in opt.state_dict()["state"].items()}
    other.load_state_dict(state)
    alone = copy.deepcopy(new)
    solo = DASH([alone], **options)
    for step in range(4, 9):
        give(params, step)
        opt.step()
        for a, b in zip(old, params, strict=True):
            assert b.grad is not None
            a.grad = b.grad.clone()
        give([new], 77 + step)
        give([alone], 77 + step)
        other.step()
        solo.step()
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(old, params, strict=True))
    assert torch.allclose(new, alone, rtol=0, atol=1e-12)


# B20 counters


@pytest.mark.parametrize("stacking", STACKINGS)
def test_steps_are_counted_once(stacking: str) -> None:
    params = parameters((8, 6), (11, 13), (5,), ())
    opt = DASH(params, block_size=4, stacking=stacking)
    opt.state_dict()
    opt.summary()
    opt.diagnostics(certify=True)
    assert len(opt.state) == 0
    for count in range(1, 5):
        train(opt, params, range(count, count + 1))
        opt.state_dict()
        opt.summary()
        opt.diagnostics(certify=True)
        assert [float(opt.state[param]["step"]) for param in params] == [count] * 4


# B22 gradients that are not finite


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("refresh", SCHEDULES)
@pytest.mark.parametrize("where", [0, 1, 2])
def test_a_step_with_a_bad_gradient_is_as_if_it_had_not_been(bad: float, refresh: str, where: int) -> None:
    options: dict[str, Any] = {"block_size": 4, "refresh": refresh, "update_freq": 2, "weight_decay": 0.1}
    options["refresh_young"] = False
    runs = []
    for with_bad in (False, True):
        params = parameters((8, 6), (4, 9), (5,))
        opt = DASH(params, momentum=0.9, **options)
        for step in range(3):
            if with_bad:
                before = copy.deepcopy(opt.state_dict())
                give(params, 99)
                grad = params[where].grad
                assert grad is not None
                grad.view(-1)[-1] = bad
                opt.step()
                assert str(before) == str(opt.state_dict())
            train(opt, params, range(step, step + 1))
        assert opt.diagnostics().skipped_steps == 3 * with_bad
        runs.append((params, opt))
    assert same(runs[0][0], runs[1][0])


MASKED: list[tuple[dict[str, Any], str]] = [
    *(({}, grafting) for grafting in GRAFTINGS),
    *(({"grafting_scope": "layer"}, grafting) for grafting in GRAFTINGS),
    *(({"momentum": 0.9}, grafting) for grafting in ("none", "adam")),
    ({"momentum": 0.9, "nesterov": True}, "rmsprop"),
    *(({"refresh": "certified", "refresh_tol": 1e-9}, grafting) for grafting in ("none", "adam")),
    *(({"start_step": 2}, grafting) for grafting in GRAFTINGS),
    *(({"betas": (0.0, 0.0)}, grafting) for grafting in GRAFTINGS),
    ({"beta_factors": 1.0}, "adagrad"),
    *(({"bias_correction": False, "damping": 1e-3}, grafting) for grafting in ("none", "adam")),
    ({"lr": torch.tensor(0.1)}, "adam"),
    ({"stacking": "none"}, "rmsprop"),
    ({"one_d": "dash"}, "adagrad"),
]


@pytest.mark.parametrize(
    ("options", "grafting", "dtype"),
    [*((*case, torch.float64) for case in MASKED), *((*case, torch.bfloat16) for case in MASKED[:10])],
    ids=str,
)
def test_the_masked_path_leaves_out_what_the_plain_path_does(
    grafting: str, options: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"block_size": 4, "weight_decay": 0.1, "lr": 0.1, "update_freq": 1, **options}
    if options.get("bias_correction") is False:
        options["rel_damping"] = 0.0
    runs = []
    for path in ("plain", "masked"):
        params = parameters((8, 6), (3, 5), (5,), (), dtype=dtype)
        opt = DASH(params, grafting=grafting, **options)
        with masked(monkeypatch) if path == "masked" else pytest.MonkeyPatch.context():
            for step in range(5):
                if step in (0, 3) and "start_step" not in options:  # the very first step too
                    bad_step(opt, params, step % 4)
                train(opt, params, range(step, step + 1))
        runs.append(params)
        assert opt.diagnostics().skipped_steps == (0 if "start_step" in options else 2)
        assert finite(opt)
    tol = 2e-2 if dtype == torch.bfloat16 else 1e-11
    assert all(torch.allclose(a, b, rtol=tol, atol=tol) for a, b in zip(*runs, strict=True))


def bad_step(opt: DASH, params: Sequence[Tensor], where: int) -> None:
    """Take a step with a NaN; parameters, averages and factors have to be what they were, to the last bit."""
    held = [param.detach().clone() for param in params]
    state = {param: {k: v.clone() for k, v in tensors(opt, param).items()} for param in params}
    give(params, 99)
    grad = params[where].grad
    assert grad is not None
    grad.view(-1)[0] = math.nan
    opt.step()
    assert same(params, held)
    for param, own in state.items():
        now = tensors(opt, param)
        for name, value in own.items():
            if ".root_" not in name and ".record_" not in name:
                assert torch.equal(now[name], value), name
        assert float(now["step"]) == float(own.get("step", 0.0)) if now else True


@pytest.mark.xfail(
    strict=True, reason="the calendar of refreshes counts steps that a device has left out, and cannot know"
)
def test_a_first_step_that_is_left_out_does_not_put_off_the_first_roots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = parameters((8, 6))
    opt = DASH(params, update_freq=10, refresh_young=False)
    with masked(monkeypatch):
        bad_step(opt, params, 0)
        train(opt, params, range(1))
    assert not torch.equal(opt.state[params[0]]["8x6.root_0"][0], torch.eye(8).double())


def test_a_first_step_that_is_left_out_is_made_up_for_by_the_next_while_factors_are_young(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The roots are those of the run that never saw it."""
    params, others = parameters((8, 6)), parameters((8, 6))
    opt, plain = DASH(params, update_freq=10), DASH(others, update_freq=10)
    with masked(monkeypatch):
        bad_step(opt, params, 0)
        train(opt, params, range(1))
    train(plain, others, range(1))
    for dim in (0, 1):
        root = opt.state[params[0]][f"8x6.root_{dim}"]
        assert torch.allclose(root, plain.state[others[0]][f"8x6.root_{dim}"], rtol=1e-9)
    assert torch.allclose(params[0], others[0], rtol=0, atol=1e-12)


def test_raising_touches_nothing_and_says_where() -> None:
    params = parameters((8, 6), (5,))
    opt = DASH([("layer.weight", params[0]), ("layer.bias", params[1])], nonfinite="raise")
    for step in range(2):
        give(params, step)
        assert params[1].grad is not None
        params[1].grad[2] = math.inf
        held, state = [p.detach().clone() for p in params], str(opt.state_dict())
        with pytest.raises(NonfiniteGradientError, match=rf"'layer.bias'.*1 of 5.*step {step + 1}.*norm"):
            opt.step()
        assert same(params, held)
        assert str(opt.state_dict()) == state
        train(opt, params, range(step, step + 1))


@pytest.mark.parametrize("path", ["plain", "masked"])
def test_large_finite_gradients_of_float64_are_finite(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params = parameters((8, 6), (5,))
    opt = DASH(params, lr=0.1, block_size=4)
    with masked(monkeypatch) if path == "masked" else pytest.MonkeyPatch.context():
        before = [p.detach().clone() for p in params]
        give(params, 0, scale=1e100)
        opt.step()
    assert opt.diagnostics().skipped_steps == 0
    assert finite(opt)
    assert not any(bool((a == b).any()) for a, b in zip(params, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("where", [0, 1])
def test_a_gradient_whose_square_overflows_does_not_stay(dtype: torch.dtype, where: int) -> None:
    params = parameters((8, 6), (5,), dtype=dtype)
    opt = DASH(params, lr=0.1, block_size=4, update_freq=1)
    for step in range(8):
        give(params, step)
        grad = params[where].grad
        if step == 2 and grad is not None:
            grad.view(-1)[0] = 1e200 if dtype == torch.float64 else 1e25
        opt.step()
        assert finite(opt)
        assert all(bool(torch.isfinite(p).all()) for p in params)
    assert opt.diagnostics().skipped_steps == 1


# B23 dtypes


@pytest.mark.parametrize("dtype", REALS)
@pytest.mark.parametrize("factor_dtype", [None, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(8, 6), (5,)])
def test_low_precision_parameters_are_rounded_once(
    dtype: torch.dtype, factor_dtype: torch.dtype | None, shape: tuple[int, ...]
) -> None:
    (W,) = parameters(shape, dtype=dtype)
    opt = DASH(
        [W],
        p=4,
        factor_dtype=factor_dtype,
        block_size=4,
        lr=0.25,
        weight_decay=0.5,
        update_freq=1,
        method="evd",
    )
    for step in range(3):
        wide = nn.Parameter(W.detach().double())
        other = DASH(
            [wide],
            p=4,
            factor_dtype=factor_dtype,
            block_size=4,
            lr=0.25,
            weight_decay=0.5,
            update_freq=1,
            method="evd",
        )
        if step:
            other.load_state_dict(copy.deepcopy(opt.state_dict()))
        give([W], step)
        assert W.grad is not None
        wide.grad = W.grad.double()
        opt.step()
        other.step()
        u = torch.finfo(dtype).eps
        slack = 1e-5 if factor_dtype != torch.float64 or dtype != torch.float64 else 1e-9
        assert torch.allclose(W.double(), wide, rtol=u, atol=u * 0.1 + slack)
    expected = factor_dtype or (torch.float64 if dtype == torch.float64 else torch.float32)
    if len(shape) == 2:
        kinds = {v.dtype for k, v in tensors(opt, W).items() if ".record_" not in k and k != "step"}
        assert kinds == {expected}


def test_a_model_of_many_dtypes_and_gradients_of_others() -> None:
    params = [*parameters((8, 6), (5,), dtype=torch.bfloat16), *parameters((8, 6), dtype=torch.float32)]
    params += [*parameters((8, 6), (5,), dtype=torch.float64), *parameters((8, 6), dtype=torch.float16)]
    opt = DASH(params, block_size=4)
    train(opt, params, range(3))
    assert finite(opt)
    assert [p.dtype for p in params] == [torch.bfloat16] * 2 + [torch.float32] + [torch.float64] * 2 + [
        torch.float16
    ]


# B25 nothing is silently another method


@pytest.mark.parametrize("one_d", ["adamw", "dash"])
def test_a_flattened_matrix_is_warned_of(one_d: str) -> None:
    with pytest.warns(UserWarning, match=r"parameter 'flat'.*flattened"):
        DASH([("flat", nn.Parameter(torch.zeros(2**16)))], one_d=one_d)
    zero3 = nn.Parameter(torch.empty(0))
    zero3.ds_shape = (8, 8)  # type: ignore[attr-defined]
    with pytest.warns(UserWarning, match="flattened"):
        DASH([zero3])
    DASH([nn.Parameter(torch.zeros(2**16))], algorithm="adamw")


def test_the_summary_says_which_way_each_parameter_takes() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1, bias=False))
    opt = DASH(model.named_parameters(), block_size=4, max_factor_dim=8)
    opt.add_param_group({"params": [("x", nn.Parameter(torch.zeros(0, 4)))]})
    rows = {
        line.split()[0]: line for line in opt.summary().splitlines()[1:] if ")" in line.split("stack:")[0]
    }
    ways = {name: line.split(")")[1].split()[0] for name, line in rows.items() if name != "state:"}
    assert ways == {
        "0.weight": "dash", "1.weight": "dash", "1.bias": "adamw", "2.weight": "adamw",
        "2.bias": "adamw", "3.weight": "dash", "x": "nothing",
    }  # fmt: skip
    assert "no factor for dimension 0" in rows["0.weight"]


# B27 the method really runs


@pytest.mark.parametrize(("refresh", "freq", "expected"), [("interval", 1, 7), ("interval", 3, 3), ("staggered", 3, None), ("interval", 10, 1)])  # fmt: skip
@pytest.mark.parametrize("stacking", STACKINGS)
def test_roots_are_computed_as_often_as_the_schedule_says(
    refresh: str, freq: int, expected: int | None, stacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    solved: list[int] = []

    def count(F: Tensor, *args: Any, **keywords: Any) -> Any:
        solved.append(len(F))
        return inv_root_ex(F, *args, **keywords)

    monkeypatch.setattr(dash_optim.refresh, "inv_root_ex", count)
    params = parameters((8, 6), (4, 9), (5,))
    options: dict[str, Any] = {"refresh": refresh, "update_freq": freq, "refresh_young": False}
    opt = DASH(params, block_size=4, stacking=stacking, **options)
    per_step = []
    for step in range(7):
        solved.clear()
        train(opt, params, range(step, step + 1))
        per_step.append(sum(solved))
    factors = 2 * (4 + 3)
    if expected is not None:
        assert sum(per_step) == expected * factors
        assert [bool(n) for n in per_step] == [step % freq == 0 for step in range(7)]
    else:  # all at first, then every block once in `freq` steps
        assert per_step[0] == factors
        assert sum(per_step[1:4]) == sum(per_step[4:7]) == factors
        assert max(per_step[1:]) <= 2 * math.ceil(7 / freq)
    done = [f.refreshes for block in opt.diagnostics().blocks for f in block.factors]
    assert sum(done) == sum(per_step)


@pytest.mark.parametrize(("p", "exponent"), [(2, -1.0), ("8/3", -0.5), (4, 0.0), (8, 0.5)])
@pytest.mark.parametrize("grafting", [None, "sgd"])
def test_a_first_step_has_the_singular_values_of_the_formula(
    p: Any, exponent: float, grafting: str | None
) -> None:
    """``U = (G G^T)^{-1/p} G (G^T G)^{-1/p}`` has ``s^(1 - 4/p)``, far from those of the gradient, as no other method's step."""
    (W,) = parameters((8, 6))
    Q, s, V = torch.linalg.svd(W.detach(), full_matrices=False)
    s = torch.logspace(0, -3, 6).double()
    before = W.detach().clone()
    opt = DASH(
        [W], p=p, grafting=grafting, lr=1.0, betas=(0.0, 0.0), method="evd", rel_damping=0.0, damping=1e-14
    )
    W.grad = (Q * s) @ V
    opt.step()
    found = torch.linalg.svdvals(before - W.detach())
    expected = (s**exponent).sort(descending=True).values
    if grafting:
        expected *= s.norm() / expected.norm()
    assert torch.allclose(found, expected, rtol=1e-6)


# B28 accumulated gradients are gradients


def test_accumulation_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def count(*args: Any, **keywords: Any) -> Any:
        calls.append(1)
        return inv_root_ex(*args, **keywords)

    monkeypatch.setattr(dash_optim.refresh, "inv_root_ex", count)
    X, Y = normal(5, 8, 6), normal(5, 8, 4, seed=1)
    weights, solved = [], []
    for parts in (1, 4):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
        opt = DASH(model.parameters(), lr=0.01, block_size=4, update_freq=2)
        calls.clear()
        for x, y in zip(X, Y, strict=True):
            opt.zero_grad()
            for xs, ys in zip(x.chunk(parts), y.chunk(parts), strict=True):
                (nn.functional.mse_loss(model(xs), ys) / parts).backward()
            opt.step()
        weights.append([p.detach() for p in model.parameters()])
        solved.append(len(calls))
    assert all(torch.allclose(a, b, rtol=0, atol=1e-9) for a, b in zip(*weights, strict=True))
    assert solved[0] == solved[1] > 0


# B30 vectors of many lengths


@pytest.mark.parametrize("stacking", STACKINGS)
def test_vectors_have_one_factor_each(stacking: str) -> None:
    params = parameters((10,), (7,), (1,), (3, 1), (1, 7))
    opt = DASH(params, p=None, one_d="dash", block_size=4, grafting=None, lr=1.0, betas=(0.0, 0.0), stacking=stacking, **EXACT)  # fmt: skip
    before = [param.detach().clone() for param in params]
    give(params, 0)
    opt.step()
    for i, (param, old) in enumerate(zip(params, before, strict=True)):
        assert param.grad is not None
        g = param.grad.flatten()
        if len(g) == 1:
            update = g / (g.abs() + 1e-8)  # AdamW's first step
        else:  # (g g^T + eps I)^{-1/2} g = g / sqrt(|g|^2 + eps)
            update = torch.cat([part / (part @ part + 1e-4).sqrt() for part in g.split(4)])
        assert torch.allclose(param.flatten(), old.flatten() - update, rtol=0, atol=1e-7), i


# B34 sparse gradients


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("algorithm", ["dash", "adamw"])
def test_sparse_gradients_are_refused_before_anything_happens(empty: bool, algorithm: str) -> None:
    embedding = nn.Embedding(9, 4, sparse=True)
    other = nn.Parameter(torch.ones(4, 4))
    opt = DASH([("first", other), ("emb.weight", embedding.weight)], algorithm=algorithm)
    index = torch.empty(0, dtype=torch.int64) if empty else torch.tensor([1, 5])
    (embedding(index).sum() + other.sum()).backward()
    with pytest.raises(TypeError, match=r"'emb\.weight'"):
        opt.step()
    assert not any(opt.state.values())
    assert torch.equal(other, torch.ones(4, 4))


# B35 gradients are read only


@pytest.mark.parametrize("options", [{}, {"maximize": True}, {"algorithm": "adamw", "maximize": True}, {"refresh": "certified", "grafting_scope": "layer"}, {"betas": (0.0, 0.9), "grafting": "sgd"}, {"momentum": 0.9, "nesterov": True}, {"block_size": math.inf, "betas": (0.0, 0.0), "start_step": 9, "grafting": None}], ids=str)  # fmt: skip
@pytest.mark.parametrize("path", ["plain", "masked"])
def test_gradients_stay_what_they_were(
    options: dict[str, Any], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = parameters((8, 6), (5,), (3, 2, 2), ())
    opt = DASH(params, **{"block_size": 4, "weight_decay": 0.1, **options})
    give(params, 0)
    held = [p.grad for p in params]
    copies = [None if g is None else g.clone() for g in held]
    with masked(monkeypatch) if path == "masked" else pytest.MonkeyPatch.context():
        for _ in range(3):
            opt.step()
    for param, grad, value in zip(params, held, copies, strict=True):
        assert param.grad is grad
        assert grad is not None
        assert value is not None
        assert torch.equal(grad, value)


# B36 memory


class Allocations(TorchDispatchMode):
    """The largest storage that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {a.untyped_storage().data_ptr() for a in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(a, Tensor)}  # fmt: skip
        for result in torch.utils._pytree.tree_leaves(out):
            if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in known:
                self.largest = max(self.largest, result.untyped_storage().nbytes())
        return out


def peak(step: Any) -> int:
    """Return how many bytes more than before are held at once while ``step`` runs."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    now = most = 0
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@pytest.mark.parametrize("refresh", ["interval", "certified"])
def test_workspace_grows_with_max_batch_and_not_with_blocks(refresh: str) -> None:
    peaks, weights = {}, {}
    for blocks, batch in ((64, 8), (64, 64), (192, 8)):
        params = parameters(*[(16, 16)] * blocks, dtype=torch.float32)
        opt = DASH(params, max_batch=batch, refresh=refresh, update_freq=1, refresh_tol=1e-9)
        train(opt, params, range(1))
        give(params, 2)
        peaks[blocks, batch] = peak(opt.step)
        weights[blocks, batch] = params
    matrix = 16 * 16 * 4
    assert peaks[192, 8] - peaks[64, 8] < 128 * matrix / 2  # what is kept for each block is a few numbers
    assert peaks[64, 64] > 3 * peaks[64, 8]
    assert same(weights[64, 8], weights[192, 8][:64])
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(weights[64, 8], weights[64, 64], strict=True))


@pytest.mark.parametrize("block", [512, math.inf])
def test_a_vocabulary_has_no_square_factor(block: float) -> None:
    W = nn.Parameter(torch.zeros(50_000, 8))
    opt = DASH([W], block_size=block)
    W.grad = torch.ones(50_000, 8)
    with Allocations() as allocations:
        opt.step()
    assert allocations.largest <= 4 * W.numel() * W.element_size()
    held = sum(v.numel() * v.element_size() for v in tensors(opt, W).values())
    assert held <= 4 * W.numel() * W.element_size()


@pytest.mark.parametrize("grafting", GRAFTINGS)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.0, 0.95)])
def test_state_is_factors_roots_and_moments(
    grafting: str, momentum: float, betas: tuple[float, float]
) -> None:
    params = parameters((16, 24), (11, 13), (5,), dtype=torch.bfloat16)
    opt = DASH(params, block_size=8, grafting=grafting, momentum=momentum, betas=betas)
    train(opt, params, range(2))
    moments = (betas[0] > 0) + (grafting not in ("none", "sgd")) + (momentum > 0)
    factors = 6 * 2 * 64 + (8 * 8 + 8 * 8) + (8 * 8 + 5 * 5) + (3 * 3 + 8 * 8) + (3 * 3 + 5 * 5)
    expected = 4 * (2 * factors + moments * (16 * 24 + 11 * 13) + 2 * 5)
    held = sum(
        value.numel() * value.element_size()
        for param in params
        for name, value in tensors(opt, param).items()
        if ".record_" not in name and name != "step"
    )
    assert held == expected
    storages = {v.untyped_storage().data_ptr(): v.untyped_storage().nbytes() for p in params for k, v in tensors(opt, p).items() if ".record_" not in k and k != "step"}  # fmt: skip
    assert sum(storages.values()) == expected  # and nothing is held that is not seen in the state


# B37 roots that fail


class Failing:
    """A solver whose refreshes fail when told to: it returns NaN and a status, as solvers do."""

    def __init__(self) -> None:
        self.fail: set[int] = set()
        self.members: slice = slice(None)
        self.now = 0

    def __call__(self, F: Tensor, *args: Any, **keywords: Any) -> Any:
        result = inv_root_ex(F, *args, **keywords)
        if self.now in self.fail:
            result.root[self.members] = math.nan
            result.status[self.members] = int(Status.INDEFINITE)
        return result


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Failing:
    solver = Failing()
    monkeypatch.setattr(dash_optim.refresh, "inv_root_ex", solver)
    return solver


@pytest.mark.parametrize("refresh", SCHEDULES)
@pytest.mark.parametrize("grafting", ["none", "adam"])
def test_a_first_failure_leaves_the_identity_and_later_ones_the_last_good_root(
    failing: Failing, refresh: str, grafting: str
) -> None:
    (W,) = parameters((4, 4))
    opt = DASH([W], lr=1.0, grafting=grafting, refresh=refresh, update_freq=1, betas=(0.0, 0.95), refresh_tol=1e-9)  # fmt: skip
    failing.fail = {0, 3, 4}
    held = torch.empty(0)
    for step in range(6):
        failing.now = step
        before = W.detach().clone()
        train(opt, [W], range(step, step + 1))
        roots = torch.stack([opt.state[W][f"4x4.root_{dim}"] for dim in (0, 1)], dim=1)
        assert bool(torch.isfinite(roots).all())
        assert W.grad is not None
        if step == 0:
            assert torch.equal(roots[0], torch.eye(4).double().expand(2, 4, 4))
            direction = (
                W.grad if grafting == "none" else W.grad / W.grad.norm() * 4
            )  # Adam's first step: signs
            assert torch.allclose(before - W, direction, rtol=0, atol=1e-6)
        elif step in failing.fail:
            assert torch.equal(roots, held)
        else:
            assert not torch.equal(roots, held)
        report = opt.diagnostics().blocks[0].factors[0]
        assert report.failures == sum(step >= f for f in failing.fail)
        assert (report.status == Status.INDEFINITE) == (step in failing.fail)
        held = roots
    record = opt.state[W]["4x4.record_0"]
    assert float(record[0, 2]) == 0.0  # in a row


@pytest.mark.parametrize("refresh", SCHEDULES)
@pytest.mark.parametrize("budget", [0, 2])
def test_the_budget_counts_failures_in_a_row_and_names_who_failed(
    failing: Failing, refresh: str, budget: int
) -> None:
    params = parameters((4, 4), (4, 8))
    named = [("a.weight", params[0]), ("b.weight", params[1])]
    opt = DASH(named, block_size=4, refresh=refresh, update_freq=1, failure_budget=budget, refresh_tol=1e-9)
    failing.members = slice(2, 3)  # of 6: the left factor of the second block of b
    failing.fail = {1, 2} if budget == 2 else set()
    for step in range(4):
        failing.now = step
        train(opt, params, range(step, step + 1))
    failing.fail = set(range(4, 9))
    for step in range(4, 4 + budget):
        failing.now = step
        train(opt, params, range(step, step + 1))
    failing.now = 4 + budget
    before = params[1].detach().clone()
    with pytest.raises(
        PreconditionerError, match=r"'b.weight', block 1 of 2.*dimension 0.*INDEFINITE"
    ) as caught:
        train(opt, params, range(9, 10))
    assert f"failure_budget={budget}" in str(caught.value)
    assert f"{budget + 1} roots" in str(caught.value)
    assert not torch.equal(before, params[1])  # raised after the step
    assert finite(opt)
    failing.fail = set()
    train(opt, params, range(10, 12))  # and whoever goes on can


@pytest.mark.parametrize("member", [0, 1, 2, 3])
def test_an_error_counts_blocks_as_diagnostics_do(failing: Failing, member: int) -> None:
    params = parameters((4, 6), (6, 4))  # of both a square block and a rest
    opt = DASH([("a", params[0]), ("b", params[1])], block_size=4, update_freq=1, failure_budget=0)
    failing.fail, failing.members = {0}, slice(member, member + 1)
    with pytest.raises(PreconditionerError) as caught:
        train(opt, params, range(1))
    failed = [
        (block.parameter, block.block, factor.dim)
        for block in opt.diagnostics().blocks
        for factor in block.factors
        if factor.failures
    ]
    parameter, number, dim = failed[0]
    assert f"parameter {parameter!r}, block {number} of 2 " in str(caught.value)
    assert f"dimension {dim}:" in str(caught.value)


def test_a_real_failure_is_counted_too() -> None:
    """No double: a factor that the method cannot take, in a solver that says so."""
    (W,) = parameters((6, 4), dtype=torch.float32)
    opt = DASH([W], method=NewtonDB(steps=30), rel_damping=0.0, damping=0.0, update_freq=1, failure_budget=1)
    W.grad = torch.zeros(6, 4)
    W.grad[:1] = 1.0  # rank one and no damping: singular
    opt.step()
    with pytest.raises(PreconditionerError, match="try rel_damping=1e-06, now 0"):
        opt.step()
    assert bool(torch.isfinite(W).all())


# B38 the same every time


@pytest.mark.parametrize("refresh", SCHEDULES)
@pytest.mark.parametrize("method", ["auto", "ndb", "minimax"])
def test_two_runs_are_equal_whatever_memory_held_before(refresh: str, method: str) -> None:
    """In torch's deterministic mode new memory is filled with NaN, so reading what nobody wrote would show."""
    runs = []
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            params = parameters((8, 6), (11, 13), (5,), dtype=torch.float32)
            opt = DASH(params, block_size=8, method=method, refresh=refresh, momentum=0.9, update_freq=2)
            train(opt, params, range(4))
        finally:
            torch.use_deterministic_algorithms(False)
        runs.append(params)
    assert same(*runs)


# B39 orders


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"grafting_scope": "layer", "momentum": 0.9},
    {"refresh": "certified", "refresh_tol": 1e-9},
    {"stacking": "layer"},
    {"stacking": "none"},
    {"max_batch": 2},
)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_order_of_parameters_does_not_matter(options: dict[str, Any]) -> None:
    shapes = [(8, 6), (4, 9), (8, 8), (6, 8), (5,), (9, 4)]
    results = []
    for order in ([0, 1, 2, 3, 4, 5], [3, 5, 4, 0, 2, 1]):
        params = parameters(*shapes)
        opt = DASH([params[i] for i in order], block_size=4, **{**EXACT, **options})
        train_by_place = range(4)
        for step in train_by_place:
            give(params, step)
            opt.step()
        results.append(params)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-10) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", [(8, 12), (12, 8), (12, 12)])
def test_rows_columns_blocks_and_transposes_are_permuted_with_the_update(
    shape: tuple[int, int], options: dict[str, Any]
) -> None:
    """Blocks of 4: rows within a block, whole rows of blocks, and both dimensions exchanged."""
    rows, cols = shape
    P = torch.arange(rows).reshape(-1, 4).flip(0).flatten()
    P[:4] = P[:4][[2, 0, 3, 1]]
    Q = torch.arange(cols).reshape(-1, 4).roll(1, 0).flatten()
    changes = [lambda M: M[P][:, Q], lambda M: M.mT.contiguous()]
    for change in changes:
        (W,) = parameters(shape)
        V = nn.Parameter(change(W.detach()))
        first = DASH([W], block_size=4, **{**EXACT, **options})
        second = DASH([V], block_size=4, **{**EXACT, **options})
        for step in range(3):
            give([W], step)
            assert W.grad is not None
            W.grad *= torch.linspace(0.1, 5, rows).double()[:, None]
            V.grad = change(W.grad)
            first.step()
            second.step()
        assert torch.allclose(change(W.detach()), V, rtol=0, atol=1e-10)


# B40 the length of grafted updates


@pytest.mark.parametrize("grafting", ["sgd", "adagrad", "rmsprop", "adam"])
@pytest.mark.parametrize("scope", ["block", "layer"])
@pytest.mark.parametrize("extra", [{}, {"momentum": 0.9, "weight_decay": 0.1}], ids=str)
def test_updates_have_the_length_of_the_grafted_step(
    grafting: str, scope: str, extra: dict[str, Any]
) -> None:
    (W,) = parameters((4, 7))
    options = {"betas": (0.9, 0.95), "block_size": 4, "grafting": grafting, "grafting_scope": scope, **extra}
    opt = DASH([W], lr=1.0, update_freq=3, **options)
    m, v = np.zeros((4, 7)), np.zeros((4, 7))
    held = np.zeros((4, 7))
    for t in range(1, 51):
        before = W.detach().clone()
        give([W], t, scale=0.1 * t)
        assert W.grad is not None
        g = W.grad.numpy()
        opt.step()
        m = 0.9 * m + 0.1 * g
        v = v + g * g if grafting == "adagrad" else 0.95 * v + 0.05 * g * g
        root = np.sqrt(v / (1 - 0.95**t) if grafting == "adam" else v) + 1e-8
        D = m / (1 - 0.9**t) / (1.0 if grafting == "sgd" else root)
        total = (before * (1 - extra.get("weight_decay", 0.0)) - W.detach()).numpy()
        update = total - extra.get("momentum", 0.0) * held
        held = total
        if t in (1, 2, 50):
            parts = [slice(0, 4), slice(4, 7)] if scope == "block" else [slice(0, 7)]
            for part in parts:
                a, b = np.linalg.norm(update[:, part]), np.linalg.norm(D[:, part])
                assert abs(a / b - 1) < 1e-6
            if scope == "block":
                U = [block.grafting for block in opt.diagnostics().blocks]
                assert len(U) == 2
                assert all(u > 0 for u in U)


@pytest.mark.parametrize("grafting", GRAFTINGS)
@pytest.mark.parametrize("scope", ["block", "layer"])
@pytest.mark.parametrize(("freq", "b", "p"), [(1, 0.9, 4), (3, 1.0, 4), (3, 0.9, 2), (1, 1.0, "8/3")])
def test_steps_are_those_of_the_formulas(grafting: str, scope: str, freq: int, b: float, p: Any) -> None:
    params = parameters((11, 13), (8, 8))
    exponent = 8 / 3 if p == "8/3" else float(p)
    shared: dict[str, Any] = {"lr": 0.01, "momentum": 0.5, "weight_decay": 0.1, "grafting": grafting, "beta_factors": b}  # fmt: skip
    naives = [Naive(W, block=8, p=exponent, scope=scope, freq=freq, **shared) for W in params]
    calendar = {"update_freq": freq, "refresh_young": False, "refresh": "interval"}
    opt = DASH(params, block_size=8, p=p, grafting_scope=scope, **{**EXACT, **calendar}, **shared)
    for step in range(7):
        give(params, step)
        opt.step()
        for naive, W in zip(naives, params, strict=True):
            assert W.grad is not None
            naive.step(W.grad)
    assert all(close(W, naive) for W, naive in zip(params, naives, strict=True))


# B41 values at the ends of what options may be


def test_zeros_and_ints_are_values_and_not_gaps() -> None:
    (W,) = parameters((8, 6))
    opt = DASH([W], betas=(0, 0), weight_decay=0, momentum=0, damping=0, rel_damping=1e-6, update_freq=1, beta_factors=1, start_step=0, lr=1, failure_budget=0, eps=1, refresh_tol=1)  # fmt: skip
    train(opt, [W], range(3))
    assert not any("exp_avg" in name or "momentum" in name for name in opt.state[W])
    (V,) = parameters((8, 6))
    other = DASH([V], betas=(0.0, 0.0), weight_decay=0.0, momentum=0.0, damping=0.0, rel_damping=1e-6, update_freq=1, beta_factors=1.0, start_step=0, lr=1.0, failure_budget=0, eps=1.0, refresh_tol=1.0)  # fmt: skip
    train(other, [V], range(3))
    assert torch.equal(W, V)
    (X,) = parameters((8, 6))
    zero = DASH([X], beta_factors=0, update_freq=1)  # only the last gradient counts
    train(zero, [X], range(2))
    L = zero.state[X]["8x6.factor_0"][0]
    assert X.grad is not None
    assert torch.allclose(L, X.grad @ X.grad.mT, rtol=1e-12)


@pytest.mark.parametrize(
    ("betas", "beta3"),
    [((0.9, 0.95), None), ((0.9, 0.95), 0.3), ((0.6, 0.95), 0.6), ((0.6, 0.95), 0.0), ((0.0, 0.9), None)],
)
@pytest.mark.parametrize("corrected", [True, False])
def test_what_is_preconditioned_is_a_sum_of_gradients_with_these_weights(
    betas: tuple[float, float], beta3: float | None, corrected: bool
) -> None:
    """A damping far above the factors makes roots a multiple of the identity: the steps are the sums themselves."""
    W = torch.zeros(4, 3, dtype=torch.float64, requires_grad=True)
    opt = DASH([W], lr=1.0, betas=betas, beta3=beta3, bias_correction=corrected, grafting=None, p=2, damping=1e12, rel_damping=0.0, method="evd")  # fmt: skip
    gradients = [normal(4, 3, seed=step) for step in range(6)]
    beta1 = betas[0]
    last = beta1**2 if beta3 is None else beta3
    for t, gradient in enumerate(gradients):
        before = W.detach().clone()
        W.grad = gradient.clone()
        opt.step()
        weights = [1 - last] + [last * (1 - beta1) * beta1 ** (k - 1) for k in range(1, t + 1)]
        expected = sum(w * gradients[t - k] for k, w in enumerate(weights))
        scale = sum(weights) if corrected else 1.0
        assert torch.allclose((before - W.detach()) * 1e12, expected / scale, rtol=1e-6, atol=1e-9)


def test_a_scheduler_may_take_the_first_beta_below_beta3() -> None:
    W, V = (normal(6, 5, seed=1).requires_grad_() for _ in range(2))
    ahead, plain = DASH([W], beta3=0.8), DASH([V], beta3=0.5, betas=(0.5, 0.95))
    ahead.param_groups[0]["betas"] = (0.5, 0.95)
    for optimizer, X in ((ahead, W), (plain, V)):
        train(optimizer, [X], range(3))
    assert torch.equal(W, V)


def test_a_checkpoint_from_before_beta3_goes_on_as_it_was() -> None:
    W = normal(6, 5, seed=1).requires_grad_()
    opt = DASH([W], beta3=0.85)
    train(opt, [W], range(3))
    old = copy.deepcopy(opt.state_dict())
    del old["param_groups"][0]["beta3"]
    V = W.detach().clone().requires_grad_()
    other = DASH([V])
    other.load_state_dict(old)
    for optimizer, X in ((opt, W), (other, V)):
        train(optimizer, [X], range(3, 6))
    assert torch.equal(W, V)


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("lr", -1.0, ValueError), ("lr", math.nan, ValueError), ("lr", "fast", TypeError),
        ("lr", torch.ones(2), ValueError), ("betas", (0.9,), ValueError), ("betas", (1.0, 0.9), ValueError),
        ("beta3", 0.86, ValueError), ("beta3", -0.1, ValueError), ("beta3", math.nan, ValueError), ("beta3", "nesterov", TypeError),
        ("betas", "ab", ValueError), ("betas", 0.9, ValueError), ("block_size", 0, ValueError), ("block_size", 2.5, ValueError),
        ("block_size", True, TypeError), ("block_size", math.nan, ValueError), ("update_freq", 0, ValueError),
        ("update_freq", 1.0, TypeError), ("update_freq", True, TypeError), ("start_step", -1, ValueError),
        ("p", 0, ValueError), ("p", "4/0", ValueError), ("p", "many", ValueError), ("p", math.inf, ValueError),
        ("method", "newton", ValueError), ("method", 3, TypeError), ("method", {"type": "ndb", "stps": 1}, TypeError),
        ("method", {"steps": 3}, ValueError), ("grafting", "lion", ValueError), ("grafting", {"type": "adam", "eps": 0.0}, ValueError),
        ("grafting", {"type": "adam", "beta2": 1.0}, ValueError), ("damping", -1e-9, ValueError), ("damping", math.nan, ValueError),
        ("rel_damping", math.inf, ValueError), ("beta_factors", 1.1, ValueError), ("momentum", 1.0, ValueError),
        ("nesterov", True, ValueError), ("nesterov", 1, TypeError), ("refresh_young", 1, TypeError), ("refresh_young", None, TypeError), ("refresh_young", "yes", TypeError), ("weight_decay", -0.1, ValueError),
        ("refresh", "never", ValueError), ("refresh_tol", 0.0, ValueError), ("stacking", "all", ValueError),
        ("max_batch", 0, ValueError), ("factor_dtype", torch.bfloat16, ValueError), ("factor_dtype", "float16", ValueError),
        ("matmul_dtype", "int8", (ValueError, TypeError)), ("scaling", "sum", ValueError), ("nonfinite", "ignore", ValueError),
        ("algorithm", "adam", ValueError), ("one_d", "none", ValueError), ("nd", "both", ValueError),
        ("grafting_scope", "model", ValueError), ("eps", 0.0, ValueError), ("tol", 0.0, ValueError), ("max_steps", 0, ValueError),
        ("failure_budget", 1.5, TypeError), ("max_factor_dim", -1, ValueError), ("fused", True, ValueError),
        ("capturable", True, ValueError), ("differentiable", True, ValueError), ("foreach", False, ValueError),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_is_refused_by_name(option: str, value: Any, error: Any) -> None:
    with pytest.raises(error, match=rf"^{option}|^.*{option}"):
        DASH(parameters((4, 4)), **{option: value})


def test_misspelt_options_are_refused_everywhere() -> None:
    W, V = parameters((4, 4), (4, 4))
    with pytest.raises(TypeError, match="update_frq"):
        DASH([W], update_frq=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="did you mean 'update_freq'"):
        DASH([{"params": [W], "update_frq": 3}])
    opt = DASH([W])
    with pytest.raises(TypeError, match="did you mean 'block_size'"):
        opt.add_param_group({"params": [V], "blocksize": 3})
    assert len(opt.param_groups) == 1
    with pytest.raises(TypeError, match="did you mean 'update_freq'"):
        from_config([W], {"type": "dash", "update_frq": 3})


@pytest.mark.parametrize("change", [{"block_size": 8}, {"p": 4}, {"p": None}, {"nd": "tensor"}, {"one_d": "dash"}, {"grafting": "sgd"}, {"grafting": Adam(eps=1e-6)}, {"algorithm": "adamw"}, {"factor_dtype": torch.float64}, {"max_factor_dim": 4}], ids=str)  # fmt: skip
def test_a_checkpoint_of_another_structure_is_refused_and_nothing_changes(change: dict[str, Any]) -> None:
    params = parameters((8, 6), (5,))
    opt = DASH(params, block_size=4)
    train(opt, params, range(2))
    others = copy.deepcopy(params)
    other = DASH(others, **{"block_size": 4, **change})
    train(other, others, range(3))
    before = str(other.state_dict())
    with pytest.raises(ValueError, match=next(iter(change))):
        other.load_state_dict(opt.state_dict())
    assert str(other.state_dict()) == before
    train(other, others, range(3, 4))


def test_grafting_that_means_the_same_is_the_same() -> None:
    (W,) = parameters((8, 6))
    opt, other = DASH([W]), DASH([W], grafting=Adam())
    train(opt, [W], range(2))
    other.load_state_dict(opt.state_dict())
    opt.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="grafting"):
        DASH([W], grafting=Adam(beta2=0.5)).load_state_dict(opt.state_dict())


def test_a_checkpoint_of_another_optimizer_is_refused() -> None:
    (W,) = parameters((8, 6))
    other = torch.optim.AdamW([W])
    with pytest.raises(ValueError, match="not a checkpoint of DASH"):
        DASH([W]).load_state_dict(other.state_dict())


@pytest.mark.parametrize("change", [{"update_freq": 1}, {"refresh_young": True}, {"method": "evd"}, {"method": {"type": "ndb", "steps": 40}}, {"damping": 1e-2}, {"refresh": "staggered"}, {"refresh": "certified"}, {"stacking": "none"}, {"max_batch": 1}, {"betas": (0.8, 0.9)}, {"start_step": 9}, {"weight_decay": 0.5}, {"momentum": 0.9}, {"failure_budget": 0}, {"scaling": "power"}], ids=str)  # fmt: skip
def test_options_may_change_during_training(change: dict[str, Any]) -> None:
    """What is changed in the groups is what an optimizer made with it, and given the same state, does."""
    params = parameters((8, 6), (5,))
    usual: dict[str, Any] = {"block_size": 4, "update_freq": 3, "refresh_young": False}
    opt = DASH(params, **usual)
    train(opt, params, range(3))
    others = copy.deepcopy(params)
    other = DASH(others, **{**usual, **change})
    state = copy.deepcopy(opt.state_dict())
    for name in change:
        state["param_groups"][0][name] = other.param_groups[0][name]
    other.load_state_dict(state)
    opt.param_groups[0].update(change)
    train(opt, params, range(3, 7))
    train(other, others, range(3, 7))
    assert same(params, others)
    copy.deepcopy(opt)
    torch.save(opt.state_dict(), buffer := __import__("io").BytesIO())
    buffer.seek(0)
    torch.load(buffer, weights_only=True)


def test_the_calendar_of_young_factors_is_changed_without_new_state() -> None:
    """Every step up to the 5th; then none before the 11th, which both calendars name; then every second until the 16th."""
    params = parameters((8, 6), (4, 9))
    opt = DASH(params, block_size=4, update_freq=10, refresh="interval")

    def refreshes() -> set[int]:
        return {f.refreshes for block in opt.diagnostics().blocks for f in block.factors}

    train(opt, params, range(5))
    assert refreshes() == {5}
    stacks, places = opt._stacks, [v.data_ptr() for W in params for v in tensors(opt, W).values()]
    opt.param_groups[0]["refresh_young"] = False
    train(opt, params, range(5, 10))
    assert refreshes() == {5}
    train(opt, params, range(10, 11))
    assert refreshes() == {6}
    opt.param_groups[0]["refresh_young"] = True
    train(opt, params, range(11, 15))
    assert refreshes() == {8}
    assert opt._stacks is stacks
    assert [v.data_ptr() for W in params for v in tensors(opt, W).values()] == places


# B42 strides


def strided(kind: str, value: Tensor) -> Tensor:
    rows, cols = value.shape
    if kind == "columns":
        big = torch.zeros(rows, 2 * cols, dtype=value.dtype)
        big[:, ::2] = value
        return big[:, ::2]
    if kind == "rows":
        big = torch.zeros(3 * rows, cols, dtype=value.dtype)
        big[::3] = value
        return big[::3]
    if kind == "transposed":
        return value.mT.contiguous().mT
    if kind == "both":
        return strided("columns", value.mT).mT
    return value.clone()


@pytest.mark.parametrize("kind", ["columns", "rows", "transposed", "both"])
@pytest.mark.parametrize("grad_kind", ["plain", "columns", "transposed"])
@pytest.mark.parametrize("algorithm", ["dash", "adamw"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("path", ["plain", "masked"])
def test_strides_do_not_matter(
    kind: str,
    grad_kind: str,
    algorithm: str,
    dtype: torch.dtype,
    path: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    value = normal(4, 17, dtype=dtype)
    W, V = nn.Parameter(strided(kind, value)), nn.Parameter(value.clone())
    stride = W.stride()
    options: dict[str, Any] = {"algorithm": algorithm, "block_size": 4, "weight_decay": 0.1, "lr": 0.1}
    first, second = DASH([W], **options), DASH([V], **options)
    with masked(monkeypatch) if path == "masked" else pytest.MonkeyPatch.context():
        for step in range(3):
            g = normal(4, 17, seed=step, dtype=dtype)
            W.grad, V.grad = strided(grad_kind, g), g
            first.step()
            second.step()
    assert torch.equal(W, V)
    assert W.stride() == stride
    if kind == "columns" and W._base is not None:
        assert bool((W._base[:, 1::2] == 0).all())  # what lies between is somebody else's


@pytest.mark.parametrize("shape", [(6,), (4, 6)])
@pytest.mark.parametrize("algorithm", ["dash", "adamw"])
def test_expanded_gradients_are_read_as_they_are(shape: tuple[int, ...], algorithm: str) -> None:
    W, V = (*parameters(shape), *parameters(shape))
    first, second = DASH([W], algorithm=algorithm), DASH([V], algorithm=algorithm)
    for step in range(3):
        W.grad = torch.tensor(0.5 + step, dtype=torch.float64).expand(shape)
        V.grad = W.grad.clone().contiguous()
        first.step()
        second.step()
    assert torch.equal(W, V)


# B43 what errors say


def test_no_file_is_written(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, failing: Failing) -> None:
    monkeypatch.chdir(tmp_path)
    params = parameters((8, 6))
    opt = DASH(params, nonfinite="raise", failure_budget=0, update_freq=1)
    params[0].grad = torch.full((8, 6), math.nan).double()
    with pytest.raises(NonfiniteGradientError, match=r"48 of 48.*step 1.*none"):
        opt.step()
    failing.fail = {0}
    with pytest.raises(PreconditionerError, match=r"parameter 0 of shape \(8, 6\), block 0 of 1 \(8x6\)"):
        train(opt, params, range(1))
    str(opt.diagnostics())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("param", [nn.Parameter(torch.zeros(4, 4, dtype=torch.complex64)), nn.Parameter(torch.zeros(4, dtype=torch.int64), requires_grad=False)])  # fmt: skip
def test_parameters_that_cannot_be_served_are_named(param: nn.Parameter) -> None:
    with pytest.raises(TypeError, match="'z': expected a real floating-point parameter"):
        DASH([("a", nn.Parameter(torch.zeros(2, 2))), ("z", param)])


def test_a_method_that_cannot_take_p_is_named_with_the_parameter() -> None:
    with pytest.raises(ValueError, match=r"'w', p=6: .*\"ndb\" takes"):
        DASH([("w", nn.Parameter(torch.zeros(4, 5, 3)))], p=None, nd="tensor", method="ndb")
    with pytest.raises(ValueError, match=r"'w', p=3: .*certified"):
        DASH([("w", nn.Parameter(torch.zeros(4, 5)))], p=3, refresh="certified")


# B44 compiled steps


def test_the_functions_of_a_step_compile_whole_and_once_a_shape() -> None:
    from torch._dynamo.utils import counters

    from dash_optim import update

    torch._dynamo.reset()
    counters.clear()
    F, G = normal(3, 4, 4), normal(3, 4, 5)
    X, V, T = F @ F.mT, normal(3, 4), normal(3, 4, 5, 2)
    t = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    compiled = {name: torch.compile(getattr(update, name), backend="aot_eager", fullgraph=True) for name in
                ("accumulate_factor", "mode_product", "norm", "graft_ratio", "per_block", "correction", "unfold")}  # fmt: skip
    for decay, taken in ((0.9, 1.0), (1.0, 1.0), (0.9, torch.tensor(1.0)), (0.9, torch.tensor(0.0))):
        ours, theirs = X.clone(), X.clone()
        update.accumulate_factor(ours, G, 0, decay, taken)
        compiled["accumulate_factor"](theirs, G, 0, decay, taken)
        assert torch.allclose(ours, theirs, rtol=1e-14)
    R = normal(3, 5, 5, seed=3)
    for M, dim, root in ((G, 0, X), (G, 1, R), (V, 0, X), (T, 1, R), (T, 0, X)):
        assert torch.allclose(compiled["mode_product"](root, M, dim), update.mode_product(root, M, dim))
        assert torch.equal(compiled["unfold"](M, dim), update.unfold(M, dim))
        assert torch.allclose(compiled["norm"](M), update.norm(M))
    assert torch.equal(compiled["correction"](0.9, t), update.correction(0.9, t))
    assert torch.equal(compiled["per_block"](t, G), update.per_block(t, G))
    zero = torch.tensor([0.0, 1.0, 2.0])
    assert torch.equal(compiled["graft_ratio"](t, zero), update.graft_ratio(t, zero))
    graphs = counters["stats"]["unique_graphs"]
    for _ in range(20):
        compiled["mode_product"](X, normal(3, 4, 5, seed=8), 0)
        compiled["accumulate_factor"](X.clone(), G, 0, 0.9, 1.0)
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]


@pytest.mark.filterwarnings("ignore")  # of torch's compiler, about its own business
@pytest.mark.slow  # ten seconds of compiling
def test_a_step_that_is_compiled_goes_on_seeing_what_changes() -> None:
    torch._dynamo.reset()
    params, others = parameters((4, 4), (4, 4), (3,)), parameters((4, 4), (4, 4), (3,))
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1, "update_freq": 2, "block_size": 4}
    opt, other = DASH(params, **options), DASH(others, **options)
    compiled = torch.compile(opt.step, backend="eager")
    for step in range(3):
        for run in (opt, other):
            run.param_groups[0]["lr"] = 0.1 * 0.5**step
            run.param_groups[0]["weight_decay"] = 0.1 * step
        give(params, step)
        give(others, step)
        if step < 2:
            params[1].grad = others[1].grad = None
        compiled()
        other.step()
    torch._dynamo.reset()
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(params, others, strict=True))


def test_rates_and_decays_are_never_frozen() -> None:
    """Nothing of a step is captured, so what changes between steps counts: also who takes part."""
    params = parameters((8, 6), (8, 6))
    opt = DASH(params, lr=0.1, weight_decay=0.1, block_size=4)
    params[1].grad = None
    train(opt, params[:1], range(2))
    for lr, decay in ((0.0, 0.5), (0.5, 0.0), (0.5, 0.5)):
        opt.param_groups[0].update(lr=lr, weight_decay=decay)
        for param in params:
            param.grad = torch.zeros_like(param)
        for own in opt.state.values():
            for name, value in own.items():
                if name.endswith("exp_avg"):
                    value.zero_()
        before = [p.detach().clone() for p in params]
        opt.step()
        assert same(params, [p * (1 - lr * decay) for p in before])


# global settings of torch


@pytest.mark.parametrize("refresh", SCHEDULES)
def test_the_default_device_and_dtype_are_nobodys_business(refresh: str) -> None:
    """Tensors of the default device "meta" have no values: whatever is made there by mistake cannot be read."""
    results = []
    for device, dtype in (("cpu", torch.float32), ("meta", torch.float64)):
        params = parameters((8, 6), (5,))
        torch.set_default_dtype(dtype)
        try:
            with torch.device(
                device
            ):  # torch.set_default_device would leave a mode behind for the tests that follow
                opt = DASH(
                    params, block_size=4, refresh=refresh, update_freq=2, grafting_scope="layer", momentum=0.9
                )
                train(opt, params, range(3))
                opt.summary()
                opt.diagnostics(certify=True)
                opt.load_state_dict(opt.state_dict())
                train(opt, params, range(3, 5))
        finally:
            torch.set_default_dtype(torch.float32)
        results.append(params)
    assert same(*results)


# what state the optimizer works on is the state that it shows


@pytest.mark.parametrize("how", ["replaced", "data"])
@pytest.mark.parametrize("algorithm", ["dash", "adamw"])
def test_state_that_is_moved_away_and_back_is_used(how: str, algorithm: str) -> None:
    """As programs do that bring the optimizer's memory to the host between phases of training."""
    params = parameters((8, 6), (8, 6), (5,))
    others = copy.deepcopy(params)
    opt, other = (
        DASH(p, block_size=4, update_freq=2, algorithm=algorithm, momentum=0.9) for p in (params, others)
    )
    for step in range(6):
        train(opt, params, range(step, step + 1))
        train(other, others, range(step, step + 1))
        for own in opt.state.values():
            for name, value in own.items():
                if isinstance(value, Tensor) and how == "replaced":
                    own[name] = value.clone()
                elif isinstance(value, Tensor):
                    value.data = value.data.clone()
    assert same(params, others)
    for a, b in zip(params, others, strict=True):
        ours, theirs = tensors(opt, a), tensors(other, b)
        assert all(torch.equal(ours[k].nan_to_num(7.0), theirs[k].nan_to_num(7.0)) for k in ours)


def test_warnings_of_solvers_do_not_reach_the_user() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        params = parameters((8, 6), dtype=torch.float32)
        opt = DASH(params, method=NewtonDB(steps=1), update_freq=1)
        with pytest.MonkeyPatch.context():
            train(opt, params, range(2))


def test_the_models_groups_are_trained() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 9))
    opt = DASH(param_groups(model, weight_decay=0.1, verbose=False), grafting=RMSProp(eps=1e-6))
    x = torch.arange(9)
    first = None
    for _ in range(60):
        loss = nn.functional.cross_entropy(model(x), (x + 1) % 9)
        first = first or loss.item()
        opt.zero_grad()
        loss.backward()
        opt.step()
    assert first is not None
    assert loss.item() < 0.8 * first
    assert issubclass(RootError, RuntimeError)
