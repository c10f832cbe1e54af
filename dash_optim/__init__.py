# SPDX-License-Identifier: Apache-2.0
"""DASH: Shampoo on stacked blocks, with certified inverse roots (arXiv:2602.02016), as a ``torch.optim.Optimizer``."""

from dash_optim import grafting
from dash_optim.config import from_config
from dash_optim.dash import DASH, PeerError, PreconditionerError
from dash_optim.diagnostics import Diagnostics
from dash_optim.gradients import NonfiniteGradientError
from dash_optim.planning import Plan, plan_block_size
from dash_optim.routing import param_groups

__all__ = [
    "DASH",
    "Diagnostics",
    "NonfiniteGradientError",
    "PeerError",
    "Plan",
    "PreconditionerError",
    "from_config",
    "grafting",
    "param_groups",
    "plan_block_size",
]
