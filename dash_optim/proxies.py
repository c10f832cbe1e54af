# SPDX-License-Identifier: Apache-2.0
"""An optimizer over tensors that stand for parts of parameters: what one rank of several does by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from dash_optim.blocks import Geometry
from dash_optim.dash import DASH


class Proxies(DASH):
    """`DASH` over proxies, which are cut into blocks as they are told, not as their shapes say.

    Args:
        groups: as another optimizer has them, options checked, with names for the proxies; a group may be empty.
        defaults: of that optimizer.
        geometries: of each proxy.
        phases: how many blocks that optimizer has before those of each proxy.
        layers: the number of the parameter that each proxy is a part of.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        defaults: Mapping[str, Any],
        geometries: Mapping[Tensor, Geometry],
        phases: Mapping[Tensor, int],
        layers: Mapping[Tensor, int],
    ) -> None:
        self._geometries, self._first_blocks, self._layers = geometries, dict(phases), layers
        Optimizer.__init__(self, groups, dict(defaults))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as it is: its options have been checked, and several proxies may bear one name."""
        self.param_groups.append(param_group)

    def geometry_of(self, group: dict[str, Any], param: Tensor) -> Geometry:
        """Return how a proxy is cut."""
        return self._geometries[param]

    def phases(self) -> dict[Tensor, int]:
        """Return where its blocks stand among all."""
        return self._first_blocks

    def layer_of(self, param: Tensor) -> object:
        """Return which parameter a proxy is a part of."""
        return self._layers[param]

    def replace_state(self, state: Mapping[Tensor, dict[str, Any]]) -> None:
        """Forget what there was, and go on from another state."""
        self.state.clear()
        self.state.update(state)
        self._stacks = None
