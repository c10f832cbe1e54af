"""The command ``matroots``, also ``python -m matroots``."""

from __future__ import annotations

import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence
from importlib import import_module
from typing import cast

COMMANDS = {
    "study": ("matroots.studies._cli", "measure accuracy, convergence, transfer functions and scalings"),
    "bench": ("matroots.bench._cli", "measure accuracy against time, beside other people's routines"),
}
"""Name of each command: the module with its ``main``, and what it does in one line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with these arguments (default: those of the process) and return its exit code."""
    name, *arguments = (sys.argv[1:] if argv is None else argv) or [""]
    if name in COMMANDS:
        return cast(int, import_module(COMMANDS[name][0]).main(arguments))
    from matroots._command import Parser, guarded

    parser = Parser(
        prog="matroots",
        usage="matroots COMMAND [options]",
        description="Inverse p-th roots of SPD matrices with proven error bounds.\n\ncommands:\n"
        + "\n".join(f"  {command:<8}{what}" for command, (_, what) in COMMANDS.items()),
        epilog="matroots COMMAND --help lists the options of a command.",
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=list(COMMANDS), metavar="COMMAND", help="one of those above")
    return guarded(lambda: parser.parse_args([name] if name else []), "nothing was started")


if __name__ == "__main__":
    sys.exit(main())
