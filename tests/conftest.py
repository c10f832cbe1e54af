# SPDX-License-Identifier: Apache-2.0
"""Set-up shared by all tests."""

from __future__ import annotations

import torch

# matrices here are small and pytest-xdist fills the cores: threads inside an operation would only wait for each other
torch.set_num_threads(1)
