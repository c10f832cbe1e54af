# SPDX-License-Identifier: Apache-2.0
"""A root with a wrong sign is never returned, however ill-conditioned the input is for the precision."""

from __future__ import annotations

import pytest
import torch
from matrices import with_spectrum
from table import FP32, ROWS, cases, name

import matroots
from matroots import Status


@pytest.mark.parametrize(("row", "p"), cases(ROWS, (1, 2, 4)), ids=name)
def test_no_root_has_a_negative_eigenvalue(row, p):
    members = []
    for seed in range(40):
        n = (2, 3, 4, 12)[seed % 4]
        values = torch.logspace(-9 - seed % 3, 0, n, dtype=torch.float64)
        A = torch.eye(12, dtype=torch.float64)
        A[:n, :n] = with_spectrum(values, seed)
        members.append(A.to(FP32))
    result = matroots.inv_root_ex(torch.stack(members), p, method=row.method)
    usable = result.root[result.status < Status.DIVERGED].double()
    assert bool((torch.linalg.eigvalsh(usable)[:, 0] > -1e-4 * torch.linalg.eigvalsh(usable)[:, -1]).all())
