# SPDX-License-Identifier: Apache-2.0
"""Inverse p-th roots of batches of symmetric positive definite matrices, with proven error bounds."""

from matroots._call import inv_root, inv_root_ex, root, root_pair
from matroots._certificate import Certificate, certify
from matroots._frechet_distance import FrechetDistance, frechet_distance, frechet_distance_ex
from matroots._orthogonalize import Orthogonal, orthogonalize, orthogonalize_ex
from matroots._prepare import lambda_bound
from matroots._result import InvRoot, RootError, RootWarning, Status
from matroots._tune import tune
from matroots._whiten import Whitening, whiten, whiten_ex
from matroots.scaling import Frobenius, MultiPower, Power
from matroots.solvers import EVD, Chebyshev, CoupledNewton, Minimax, NewtonDB, Rational

__all__ = [
    "EVD",
    "Certificate",
    "Chebyshev",
    "CoupledNewton",
    "FrechetDistance",
    "Frobenius",
    "InvRoot",
    "Minimax",
    "MultiPower",
    "NewtonDB",
    "Orthogonal",
    "Power",
    "Rational",
    "RootError",
    "RootWarning",
    "Status",
    "Whitening",
    "certify",
    "frechet_distance",
    "frechet_distance_ex",
    "inv_root",
    "inv_root_ex",
    "lambda_bound",
    "orthogonalize",
    "orthogonalize_ex",
    "root",
    "root_pair",
    "tune",
    "whiten",
    "whiten_ex",
]

__version__ = "0.1.0"
