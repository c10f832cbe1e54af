"""Inverse p-th roots of batches of symmetric positive definite matrices, with proven error bounds."""

from matroots._call import inv_root, inv_root_ex, root, root_pair
from matroots._certificate import Certificate, certify
from matroots._prepare import lambda_bound
from matroots._result import InvRoot, RootError, RootWarning, Status
from matroots._tune import tune
from matroots.scaling import Frobenius, MultiPower, Power
from matroots.solvers import EVD, Chebyshev, CoupledNewton, Minimax, NewtonDB, Rational

__all__ = [
    "EVD",
    "Certificate",
    "Chebyshev",
    "CoupledNewton",
    "Frobenius",
    "InvRoot",
    "Minimax",
    "MultiPower",
    "NewtonDB",
    "Power",
    "Rational",
    "RootError",
    "RootWarning",
    "Status",
    "certify",
    "inv_root",
    "inv_root_ex",
    "lambda_bound",
    "root",
    "root_pair",
    "tune",
]

__version__ = "0.1.0"
