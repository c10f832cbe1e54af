# SPDX-License-Identifier: Apache-2.0
"""Accuracy studies: ``python -m matroots study``. One study, one file.

They need the extra ``matroots[study]`` (matplotlib, rich); ``import matroots`` does not load them.
"""
