# SPDX-License-Identifier: Apache-2.0
"""The command ``matroots``, also ``python -m matroots``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from matroots._command import run

COMMANDS = {
    "inv-root": (
        "matroots._inv_root_cli",
        "inverse roots of the matrices in a NumPy file, certified if asked",
    ),
    "study": ("matroots.studies._cli", "measure accuracy, convergence, transfer functions and scalings"),
    "bench": ("matroots.bench._cli", "measure accuracy against time, beside other people's routines"),
}
"""Name of each command: the module with its ``main``, and what it does in one line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with these arguments (default: those of the process) and return its exit code."""
    return run(
        "matroots",
        "Inverse p-th roots of SPD matrices with proven error bounds.",
        COMMANDS,
        sys.argv[1:] if argv is None else argv,
    )


if __name__ == "__main__":
    sys.exit(main())
