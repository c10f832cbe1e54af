# SPDX-License-Identifier: Apache-2.0
"""The README's examples run as they stand."""

import re
from pathlib import Path

import pytest
import torch

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_example_runs(block, capsys):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    before = [param.detach().clone() for param in model.parameters()]
    names = {"model": model, "data": [(torch.randn(4, 8), torch.tensor([0, 1, 2, 0]))] * 3, "torch": torch}
    exec(block, names)
    if "opt" in names:
        moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
        assert all(moved)
        assert (
            names["opt"].diagnostics().scalars()["dash/refreshes"] == 3 * 4
        )  # young: in each step, 2 matrices of 2 factors


def test_there_are_examples_of_both_packages():
    assert len(BLOCKS) == 2
    assert "DASH" in BLOCKS[1]
    assert len([line for line in BLOCKS[1].splitlines()[2:] if line.strip()]) == 5
