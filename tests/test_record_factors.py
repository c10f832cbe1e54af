# SPDX-License-Identifier: Apache-2.0
"""The script behind the default input: what it records are Shampoo factors, the same ones on every run."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from matroots.studies._inputs import default_matrices
from matroots.studies.record_factors import main


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("factors")
    for name in ("first", "second"):
        main(["--out", str(folder / f"{name}.npz"), "--steps", "3"])
    return [dict(np.load(folder / f"{name}.npz")) for name in ("first", "second")]


def test_the_seed_decides_every_bit(recorded):
    first, second = recorded
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[key], second[key]) for key in first)


def test_the_shipped_factors_have_the_same_names_and_shapes(recorded):
    shipped = default_matrices()
    names = {key.replace("step3/", "step300/"): value.shape for key, value in recorded[0].items()}
    assert names == {key: tuple(value.shape) for key, value in shipped.items()}


@pytest.mark.parametrize("source", ["recorded", "shipped"])
def test_both_sides_of_a_whole_gradient_have_the_same_trace_and_are_semidefinite(source, recorded):
    """tr G G^T = tr G^T G, also after averaging, for matrices that are not cut into blocks."""
    factors = recorded[0] if source == "recorded" else {k: v.numpy() for k, v in default_matrices().items()}
    pairs = [key for key in factors if "attn.q/left" in key or "attn.o/left" in key]
    assert len(pairs) == 4
    for key in pairs:
        left, right = factors[key].astype(float), factors[key.replace("left", "right")].astype(float)
        assert np.trace(left) == pytest.approx(np.trace(right), rel=1e-5)
    for matrix in factors.values():
        assert np.array_equal(matrix, matrix.T)
        eigenvalues = torch.linalg.eigvalsh(torch.from_numpy(matrix.astype(float)))
        assert eigenvalues[0] >= -1e-6 * eigenvalues[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "x.csv"], "must end in .npz"),
        (["--out", "nowhere/x.npz"], "no such folder"),
        (["--out", "x.npz", "--steps", "1"], "steps"),
    ],
)
def test_bad_arguments(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
