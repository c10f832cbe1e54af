# SPDX-License-Identifier: Apache-2.0
"""The command ``python -m dash_optim``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from matroots._command import run

COMMANDS = {
    "train": (
        "dash_optim.training._train_cli",
        "train a language model on text, with DASH or another optimizer",
    ),
    "compare": (
        "dash_optim.training._compare_cli",
        "the same model, data and seeds under several optimizers",
    ),
    "sweep": ("dash_optim.training._sweep_cli", "learning rates and seeds, each optimizer at its best"),
    "plan": (
        "dash_optim._plan_cli",
        "what each rank of a cluster would keep, compute and send, and how long a step would take",
    ),
    "study": (
        "dash_optim.studies._cli",
        "is it better, accuracy or filter, staleness, blocks, grafting, compressibility",
    ),
}
"""Name of each command: the module with its ``main``, and what it does in one line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with these arguments (default: those of the process) and return its exit code."""
    return run(
        "dash_optim",
        "The DASH optimizer: training jobs, comparisons, studies and plans.",
        COMMANDS,
        sys.argv[1:] if argv is None else argv,
    )


if __name__ == "__main__":
    sys.exit(main())
