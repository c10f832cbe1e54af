# SPDX-License-Identifier: Apache-2.0
"""Accuracy against time, of every method and of other people's routines in one run: ``python -m matroots bench``.

It needs the extra ``matroots[bench]`` (matplotlib, rich, pytorch-optimizer); ``import matroots`` does not load it.
"""
