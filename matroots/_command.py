# SPDX-License-Identifier: Apache-2.0
"""What the commands share: errors of one line, types of arguments."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from importlib import import_module
from typing import NoReturn, TypeVar, cast

Item = TypeVar("Item")
INTERRUPTED = 130  # what a shell reports for a process that Ctrl-C ended


class InputError(ValueError):
    """A command-line argument that cannot be used; the message is one line and names it."""


class MissingExtraError(ImportError):
    """A package of an extra is not installed."""


class Parser(argparse.ArgumentParser):
    """Reports a wrong argument as the rest of the command does: in one line, by an exception."""

    def error(self, message: str) -> NoReturn:
        """Raise :class:`InputError`."""
        raise InputError(message)


def guarded(work: Callable[[], object], kept: str, who: str = "matroots") -> int:
    """Do the work; return the exit code: 0, 2 for what the user can mend, 130 if interrupted, said in one line on stderr.

    ``kept`` is what an interrupt leaves behind, ``who`` the command that speaks.
    """
    try:
        work()
    except (InputError, MissingExtraError) as error:
        sys.stderr.write(f"{who}: error: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write(f"{who}: interrupted; {kept}\n")
        return INTERRUPTED
    return 0


def run(who: str, what: str, commands: Mapping[str, tuple[str, str]], argv: Sequence[str]) -> int:
    """Run one of several commands, each the ``main`` of a module that is imported when it is called for; return its exit code."""
    name, *arguments = argv or [""]
    if name in commands:
        return cast(int, import_module(commands[name][0]).main(arguments))
    width = max(map(len, commands)) + 2
    parser = Parser(
        prog=who,
        usage=f"{who} COMMAND [options]",
        description=f"{what}\n\ncommands:\n"
        + "\n".join(f"  {command:<{width}}{line}" for command, (_, line) in commands.items()),
        epilog=f"{who} COMMAND --help lists the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=list(commands), metavar="COMMAND", help="one of those above")
    return guarded(lambda: parser.parse_args([name] if name else []), "nothing was started", who)


def exponent(text: str) -> float:
    """Read p: an ``int`` where it is one."""
    try:
        p = Fraction(text)
    except (ValueError, ZeroDivisionError):
        p = Fraction(0)
    if not 1 <= p <= 64 or p.limit_denominator(64) != p or p.numerator > 64:
        raise argparse.ArgumentTypeError(
            f"expected a number >= 1 such as 4, 2.5 or 8/3 (a/b with a, b <= 64), got {text!r}"
        )
    return int(p) if p.denominator == 1 else float(p)


def count(text: str) -> int:
    """Read a number of things: 1 to 1000."""
    if not text.isdecimal() or not 1 <= int(text) <= 1000:
        raise argparse.ArgumentTypeError(f"expected an integer from 1 to 1000, got {text!r}")
    return int(text)


def whole(text: str) -> int:
    """Read an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer >= 1, got {text!r}")
    return int(text)


def seed(text: str) -> int:
    """Read a seed of a random generator."""
    if not text.isdecimal() or int(text) >= 2**63 - 1000:
        raise argparse.ArgumentTypeError(f"expected an integer >= 0, got {text!r}")
    return int(text)


def positive(text: str) -> float:
    """Read a finite number above 0."""
    value = real(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a finite number > 0, got {text!r}")
    return value


def nonnegative(text: str) -> float:
    """Read a finite number, 0 or above."""
    value = real(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a finite number >= 0, got {text!r}")
    return value


def real(text: str) -> float:
    """Read a number; NaN, which no range holds, where there is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def unique(values: Sequence[Item]) -> tuple[Item, ...]:
    """Return the values without repetitions, in their order."""
    return tuple(dict.fromkeys(values))
