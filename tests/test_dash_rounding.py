# SPDX-License-Identifier: Apache-2.0
"""The model of rounding behind certified refreshes: a product with a vector errs by a few ``u ||w|| ||M||_2``."""

import pytest
import torch
from matrices import with_spectrum

from dash_optim import stale


@pytest.mark.parametrize("condition", [1e1, 1e4, 1e8])
@pytest.mark.parametrize("n", [8, 64, 128, 512, 1024])
@pytest.mark.parametrize("negative", [False, True])
def test_products_err_by_less_than_half_of_what_is_allowed(n, condition, negative):
    M = with_spectrum(torch.logspace(0, -torch.tensor(condition).log10().item(), n), seed=n).float()
    if not negative:  # sums without cancellation err most
        M = M.abs()
    generator = torch.Generator().manual_seed(n)
    W = torch.randn(16, n, generator=generator)
    W = W if negative else W.abs()
    error = (torch.bmm(W[None], M[None])[0].double() - W.double() @ M.double()).norm(dim=-1)
    size = torch.linalg.matrix_norm(M.double(), 2) * W.double().norm(dim=-1)
    allowed = stale._PRODUCT_ROUNDING * max(1.0, (n / 128) ** 0.5) * torch.finfo(torch.float32).eps / 2
    assert float((error / size).max()) < allowed / 2
    assert float((error / size).max()) > 0


@pytest.mark.parametrize("p", [2, 4, 6])
@pytest.mark.parametrize("age", [0.0, 0.1, 3.0])
def test_gap_bounds_the_norm_that_eigenvalues_have(p, age):
    """For roots that are exact, slightly stale and very stale; never below the truth, and at most fifteen times it."""
    n, batch = 48, 12
    generator = torch.Generator().manual_seed(p)
    G = torch.randn(batch, n, n, generator=generator, dtype=torch.float64)
    old = G @ G.mT / n
    H = torch.randn(batch, n, 3, generator=generator, dtype=torch.float64)
    F = (old + age * H @ H.mT / n).float()
    eps = torch.full((batch,), 1e-2, dtype=torch.float64)
    values, Q = torch.linalg.eigh(old + 1e-2 * torch.eye(n))
    X = ((Q * values.unsqueeze(1) ** (-1 / p)) @ Q.mT).float()
    norm = torch.linalg.matrix_norm(X.double(), 2) * (1 + 1e-6)
    size = torch.linalg.matrix_norm(F.double(), 2) * (1 + 1e-6)
    found = stale.gap(F, X, size, norm, torch.ones_like(eps), eps, p)
    power = torch.linalg.matrix_power(X.double(), p // 2)
    S = power @ (F.double() + 1e-2 * torch.eye(n)) @ power
    truth = (torch.linalg.eigvalsh(S) - 1).abs().amax(-1)
    assert bool((found >= truth).all())
    assert bool((found <= 15 * truth + 5e-2).all())
