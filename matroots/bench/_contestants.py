# SPDX-License-Identifier: Apache-2.0
"""Who takes part: every solver of this package and variants of some, the papers' formulas, and other people's routines.

A new solver takes part by being in ``SOLVERS``; a variant, a formula or a peer is one row of a table here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from matroots import EVD, CoupledNewton, InvRoot, Minimax, NewtonDB, Rational, inv_root_ex
from matroots.bench import papers, peers
from matroots.solvers import SOLVERS, Solver

FP64, FP32 = torch.float64, torch.float32
TARGETS = {"auto-1e-2": 1e-2, "auto-1e-4": 1e-4}
"""The methods that promise an error, and the errors, at which the summary compares."""


@dataclass(frozen=True)
class Contestant:
    """One way to compute an inverse root of a batch ``(b, n, n)``.

    Attributes:
        name: as in tables and figures.
        kind: this package, a published formula, or other people's code.
        call: from A, p and the condition number, which only a variant with a known floor uses.
        how: what is called, for the report.
        dtypes: of the input that it makes sense for.
        devices: that it runs on.
        members: how many of the batch it is run on, where it takes one matrix at a time: its time is multiplied up.
        units: a guess of its time per member in products of that size, where it should not even be tried if that is too long.
    """

    name: str
    kind: Literal["ours", "paper", "peer"]
    call: Callable[[Tensor, float, float], Tensor | InvRoot]
    how: str
    dtypes: tuple[torch.dtype, ...] = (FP32, FP64)
    devices: tuple[str, ...] = ("cpu", "cuda")
    members: int | None = None
    units: float = 0.0


@dataclass(frozen=True)
class Method:
    """Arguments of ``inv_root_ex``; ``method`` makes one from the condition number, as a user who knows a floor would."""

    name: str
    how: str
    method: Callable[[float], str | Solver]
    tol: float | None = None
    dtypes: tuple[torch.dtype, ...] = (FP32, FP64)

    def contestant(self, matmul_dtype: torch.dtype | None = None) -> Contestant:
        """Return the contestant, with operands of products rounded to ``matmul_dtype``."""

        def call(A: Tensor, p: float, condition: float) -> InvRoot:
            return inv_root_ex(A, p, method=self.method(condition), tol=self.tol, matmul_dtype=matmul_dtype)

        name, how, dtypes = self.name, f"method={self.how}", self.dtypes
        if self.tol is not None:
            how += f", tol={self.tol:g}"
        if matmul_dtype is not None:  # fp64 input would be computed in fp32
            label = str(matmul_dtype).removeprefix("torch.")
            name, how, dtypes = f"{name}-{label}", f"{how}, matmul_dtype={label}", (FP32,)
        return Contestant(name, "ours", call, f"inv_root_ex(A, p, {how})", dtypes=dtypes)


def _named(name: str) -> Method:
    return Method(name, f'"{name}"', lambda condition: name)


METHODS: tuple[Method, ...] = (
    *map(_named, SOLVERS),
    _named("auto"),
    *(Method(name, '"auto"', lambda condition: "auto", tol) for name, tol in TARGETS.items()),
    Method("evd-fp64", "EVD(compute_dtype=float64)", lambda condition: EVD(compute_dtype=FP64), dtypes=(FP32,)),
    Method("cn-10", "CoupledNewton(steps=10)", lambda condition: CoupledNewton(steps=10)),
    Method("ndb-10", "NewtonDB(steps=10)", lambda condition: NewtonDB(steps=10)),
    Method("rational-1e-2", "Rational(error=8e-3)", lambda condition: Rational(error=8e-3)),
    Method("rational-1e-4", "Rational(error=6e-5)", lambda condition: Rational(error=6e-5)),
    Method("minimax-floor", "Minimax(floor=1/(2 condition))", lambda condition: Minimax(floor=0.5 / condition)),
    Method(
        "minimax-floor-1e-2",
        "Minimax(floor=1/(2 condition))",
        lambda condition: Minimax(floor=0.5 / condition),
        tol=1e-2,
    ),
    Method(
        "minimax-floor-1e-4",
        "Minimax(floor=1/(2 condition))",
        lambda condition: Minimax(floor=0.5 / condition),
        tol=1e-3,
    ),
)  # fmt: skip

PAPERS = (
    Contestant(
        "paper-ndb-10",
        "paper",
        lambda A, p, condition: papers.newton_denman_beavers(A, p, 10),
        "Newton-Denman-Beavers, 10 steps per square root, scale 2 lambda_max (DASH, arXiv:2602.02016)",
    ),
    *(
        Contestant(
            f"paper-cn-{steps}",
            "paper",
            lambda A, p, condition, steps=steps: papers.coupled_newton(A, p, steps),  # type: ignore[misc]
            f"coupled Newton, Frobenius scale, tolerance 1e-6, at most {steps} steps (Guo and Higham 2006)",
        )
        for steps in (10, 40)
    ),
)

PEERS = (
    Contestant("eigh", "peer", peers.eigh, "torch.linalg.eigh in the dtype of the input, then Q f(D) Q^T"),
    Contestant(
        "eigh-fp64", "peer", peers.eigh_fp64, "the same in fp64, from and to the dtype of the input", dtypes=(FP32,)
    ),
    Contestant(
        "scipy",
        "peer",
        peers.scipy_fractional_power,
        "scipy.linalg.fractional_matrix_power",
        devices=("cpu",),
        members=1,
        units=500.0,  # measured: 440 for n = 512
    ),
)  # fmt: skip


def ours(names: Sequence[str], matmul_dtypes: Sequence[torch.dtype] = ()) -> list[Contestant]:
    """Return this package's methods of these names, once as they are and once for each dtype of operands."""
    methods = [method for method in METHODS if method.name in names]
    return [method.contestant(dtype) for dtype in (None, *matmul_dtypes) for method in methods]


def others() -> tuple[list[Contestant], list[str]]:
    """Return formulas and peers, and a sentence for what cannot take part."""
    found, note = peers.pytorch_optimizer()
    installed = [Contestant(name, "peer", call, how, members=members) for name, call, how, members in found]
    return [*PAPERS, *PEERS, *installed], [note] if note else []
