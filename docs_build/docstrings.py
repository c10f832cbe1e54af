# SPDX-License-Identifier: Apache-2.0
"""Docstrings as the API's pages show them: they are written for ``help()``, the pages are Markdown."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from griffe import Extension

_OPTIONS = Path(__file__).parents[1] / "dash_optim" / "options.py"
_ROLE = re.compile(r":(?:func|class|meth|mod|attr):`~?([\w.]+)`")
_DEFAULT = re.compile(r"DEFAULTS\[['\"](\w+)['\"]\]")


class Docstrings(Extension):
    """Rewrites docstrings, and the defaults of ``DASH``, which stand in a table of their own."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Rewrite a docstring when its object has been read."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)

    def on_function(self, *, func: Any, **_: Any) -> None:
        """Show the values of defaults in place of where they stand."""
        for parameter in func.parameters:
            match = _DEFAULT.fullmatch(str(parameter.default))
            if match:
                parameter.default = repr(defaults()[match[1]])


def defaults() -> dict[str, Any]:
    """Return the table of ``dash_optim/options.py``, read without importing torch."""
    for statement in ast.parse(_OPTIONS.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.AnnAssign) and ast.unparse(statement.target) == "DEFAULTS":
            table: dict[str, Any] = ast.literal_eval(ast.unparse(statement.value or ast.Dict()))
            return table
    raise LookupError(f"{_OPTIONS}: has no DEFAULTS")


def as_markdown(text: str) -> str:
    r"""Return a docstring without roles and second colons, its doctests in fences.

    >>> as_markdown("See :func:`a.b`::\n\n>>> 1 + 1\n2").split("\n")
    ['See `a.b`:', '', '```pycon', '>>> 1 + 1', '2', '```']
    """
    text = re.sub(r"::$", ":", _ROLE.sub(r"`\1`", text), flags=re.MULTILINE)
    lines: list[str] = []
    inside = False
    for line in [*text.split("\n"), ""]:
        if line.startswith(">>>") and not inside:
            lines.append("```pycon")
            inside = True
        if inside and not line.strip():
            lines.append("```")
            inside = False
        lines.append(line)
    return "\n".join(lines).rstrip("\n")
