# SPDX-License-Identifier: Apache-2.0
"""Other people's inverse roots, each as ``call(A, p, condition)`` on a batch ``(b, n, n)``; none needs the condition number."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import numpy as np
import scipy.linalg
import torch
from torch import Tensor

_ONE_AT_A_TIME = 4  # members that a routine for single matrices is run on


class Peer(NamedTuple):
    """A routine of a package that need not be installed; ``members``: see :class:`~matroots.bench._contestants.Contestant`."""

    name: str
    call: Callable[[Tensor, float, float], Tensor]
    how: str
    members: int | None


def eigh(A: Tensor, p: float, condition: float) -> Tensor:
    """Return ``Q diag(d^{-1/p}) Q^T`` by :func:`torch.linalg.eigh`; NaN where an eigenvalue is negative."""
    eigenvalues, Q = torch.linalg.eigh(A)
    return torch.bmm(Q * eigenvalues.pow(-1 / p).unsqueeze(-2), Q.mT)


def eigh_fp64(A: Tensor, p: float, condition: float) -> Tensor:
    """Return the same, computed in fp64."""
    return eigh(A.double(), p, condition).to(A.dtype)


def scipy_fractional_power(A: Tensor, p: float, condition: float) -> Tensor:
    """Return :func:`scipy.linalg.fractional_matrix_power` of each member; real, as the root of an SPD matrix is."""
    roots = [scipy.linalg.fractional_matrix_power(M, -1 / p) for M in A.numpy()]
    return torch.from_numpy(np.real(np.stack(roots))).to(A.dtype)


def pytorch_optimizer() -> tuple[list[Peer], str]:
    """Return the inverse roots of pytorch-optimizer, and why there is none where there is none."""
    try:
        import_module("pytorch_optimizer")
        matrix = import_module("pytorch_optimizer.optimizer.utils.matrix")
        dash = import_module("pytorch_optimizer.optimizer.dash")
        return _pytorch_optimizer(matrix, dash), ""
    except ModuleNotFoundError as error:
        if error.name != "pytorch_optimizer":
            return [], f"pytorch-optimizer takes no part, as it cannot be imported: {error}."
        return [], 'pytorch-optimizer takes no part, as it is not installed: pip install "matroots[bench]".'
    except Exception as error:  # whatever a package of others does wrong when imported, the bench goes on
        return [], f"pytorch-optimizer takes no part, as it cannot be used: {type(error).__name__}: {error}."


def _pytorch_optimizer(matrix: ModuleType, dash: ModuleType) -> list[Peer]:
    """Return its routines without their damping: what is computed here is the root of A as it is."""
    optimizer = dash.DASH([torch.nn.Parameter(torch.zeros(2, 2))])
    group = {**optimizer.param_groups[0], "matrix_eps": 0.0}

    def svd(A: Tensor, p: float, condition: float) -> Tensor:
        root: Tensor = matrix.compute_power_svd(A, p)
        return root

    def newton_db(A: Tensor, p: float, condition: float) -> Tensor:
        if p not in (2, 4):
            raise ValueError(f"p: DASH.compute_inverse_root takes 2 or 4, got {p}")
        root: Tensor = optimizer.compute_inverse_root(A, p, group)
        return root

    def schur_newton(tolerance: float) -> Callable[[Tensor, float, float], Tensor]:
        def call(A: Tensor, p: float, condition: float) -> Tensor:
            each = [matrix.compute_power_schur_newton(M, p, 100, tolerance, 0.0) for M in A]
            return torch.stack(each)

        return call

    name, place = "pt-opt", "pytorch_optimizer.optimizer"
    newton = f"{place}.utils.matrix.compute_power_schur_newton, no ridge, tolerance"
    return [
        Peer(f"{name}-svd", svd, f"{place}.utils.matrix.compute_power_svd", None),
        Peer(f"{name}-ndb", newton_db, f"{place}.dash.DASH.compute_inverse_root, 10 steps, no damping", None),
        Peer(f"{name}-cn", schur_newton(1e-3), f"{newton} 1e-3 (its default)", _ONE_AT_A_TIME),
        Peer(f"{name}-cn-1e-6", schur_newton(1e-6), f"{newton} 1e-6", _ONE_AT_A_TIME),
    ]
