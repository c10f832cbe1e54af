# SPDX-License-Identifier: Apache-2.0
"""The training job: model, data, loop, checkpoints and metrics."""
