# SPDX-License-Identifier: Apache-2.0
"""Studies of the optimizer on a language model: each asks one question, at several settings and seeds."""
