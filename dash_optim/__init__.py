"""DASH: Shampoo on stacked blocks, with certified inverse roots (arXiv:2602.02016), as a ``torch.optim.Optimizer``."""

from dash_optim import grafting
from dash_optim.dash import DASH, NonfiniteGradientError, PreconditionerError
from dash_optim.diagnostics import Diagnostics

__all__ = [
    "DASH",
    "Diagnostics",
    "NonfiniteGradientError",
    "PreconditionerError",
    "grafting",
]
