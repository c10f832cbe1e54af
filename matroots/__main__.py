"""The command ``matroots``, also ``python -m matroots``."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with these arguments (default: those of the process) and return its exit code."""
    from matroots.studies._cli import main as study_main

    return study_main(argv)


if __name__ == "__main__":
    sys.exit(main())
