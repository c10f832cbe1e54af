# SPDX-License-Identifier: Apache-2.0
"""``assume_positive``: the proof is left out, and nothing else."""

import pytest
import torch
from matrices import with_spectrum

import matroots
from matroots import Status, _prepare, _solve

METHODS = ["cn", "ndb", "minimax", "rational", "evd", "chebyshev"]


def gram(n: int = 24, rank: int = 9, batch: int = 3) -> torch.Tensor:
    G = torch.randn(batch, n, rank, generator=torch.Generator().manual_seed(n))
    return G @ G.mT / rank


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("method", METHODS)
def test_root_is_the_same_bit_for_bit(method, p, monkeypatch):
    A = gram()
    proven = matroots.inv_root_ex(A, p, method=method, rel_damping=1e-4)
    forbidden = pytest.fail.__call__
    monkeypatch.setattr(_prepare, "has_cholesky_factor", lambda A: forbidden("a factor was computed"))
    monkeypatch.setattr(_solve, "has_cholesky_factor", lambda A: forbidden("a factor was computed"))
    assumed = matroots.inv_root_ex(A, p, method=method, rel_damping=1e-4, assume_positive=True)
    assert torch.equal(assumed.root, proven.root)
    for name in ("status", "steps", "damping", "bound", "matmuls"):
        assert torch.equal(getattr(assumed, name), getattr(proven, name))
    assert torch.equal(
        matroots.inv_root(A, p, method=method, rel_damping=1e-4, assume_positive=True), proven.root
    )


def test_row_of_zeros_without_damping_is_still_singular():
    A = gram(rank=40)
    A[1, 3], A[1, :, 3] = 0.0, 0.0
    r = matroots.inv_root_ex(A, 2, method="cn", assume_positive=True)
    assert r.status.tolist() == [0, int(Status.SINGULAR), 0]
    assert torch.isnan(r.root[1]).all()


def test_other_bad_input_is_still_refused():
    A = gram(rank=40)
    A[0, 0, 1] = torch.nan
    A[2, 0, 1] += 1.0
    r = matroots.inv_root_ex(A, 2, method="minimax", rel_damping=1e-4, assume_positive=True)
    assert r.status.tolist() == [int(Status.NONFINITE_INPUT), 0, int(Status.INDEFINITE)]


def test_only_the_certificate_tells_of_a_wrong_assumption():
    spectrum = torch.logspace(0, -2, 12, dtype=torch.float64)
    spectrum[-1] = -0.5
    A = with_spectrum(spectrum, seed=1)
    assert matroots.inv_root_ex(A, 2, method="minimax", rel_damping=1e-4).status == int(Status.INDEFINITE)
    r = matroots.inv_root_ex(A, 2, method="minimax", rel_damping=1e-4, assume_positive=True, certify=True)
    assert not bool(r.certificate.valid)


@pytest.mark.parametrize("value", [1, "yes", None])
def test_anything_but_a_flag_is_refused(value):
    with pytest.raises(TypeError, match="assume_positive: expected True or False"):
        matroots.inv_root_ex(gram(), 2, assume_positive=value)
