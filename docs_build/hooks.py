# SPDX-License-Identifier: Apache-2.0
"""What the documentation's site needs beyond its pages, which are written to be read on GitHub as well.

Pages link to files outside ``docs/`` (the changelog, the examples). `on_files` brings those files into the site, each from its only copy, and
`on_page_markdown` points the links at them. It also bridges what Python-Markdown and GitHub do not agree on.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
"""Files of the repository, and the pages of the site that show them."""
FOLDERS = ("examples", "benchmarks")
"""Folders with scripts, each of which has a page."""
MARKS = {folder: f"<!-- scripts: {folder} -->" for folder in FOLDERS}
"""Where the gallery's lists are put."""

_LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(\))")
_FENCE = re.compile(r"^ {0,3}(```|~~~)")
_ITEM = re.compile(r"^([-*+]|1[.)]) +")


def on_files(files: Any, config: Any) -> Any:
    """Add a page for each file outside of docs/ that pages may link to."""
    from mkdocs.structure.files import File

    for source, page in PAGES.items():
        if source != "README.md":  # index.md is the front page
            text = (ROOT / source).read_text(encoding="utf-8")
            files.append(File.generated(config, page, content=for_site(text, source)))
    for script in scripts():
        page = f"{script.parent.name}/{script.stem}.md"
        files.append(File.generated(config, page, content=script_page(script)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return a page of docs/ as the site shows it."""
    if page.file.generated_by:
        return markdown
    for folder, mark in MARKS.items():
        markdown = markdown.replace(mark, listed(folder))
    return for_site(markdown, f"docs/{page.file.src_uri}")


def for_site(markdown: str, source: str) -> str:
    """Return the text of a file of the repository with its links as they are on the site, and lists that Python-Markdown sees."""
    lines = []
    for line, code in zip(markdown.split("\n"), in_code(markdown), strict=True):
        lines.append(line if code else _LINK.sub(lambda match: _relinked(match, source), line))
    return apart("\n".join(lines)).replace("```python\n>>>", "```pycon\n>>>")


def _relinked(match: re.Match[str], source: str) -> str:
    opening, target, anchor, closing = match.groups()
    return f"{opening}{site_target(target, source)}{anchor or ''}{closing}"


def site_target(target: str, source: str) -> str:
    """Return where a relative link of a file of the repository leads on the site, relative to the page that shows the file.

    >>> site_target("../examples/ddp.py", "docs/distributed.md"), site_target("docs/bench.md", "CHANGELOG.md")
    ('examples/ddp.md', 'bench.md')
    """
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    folder, name = posixpath.split(path)
    if path in PAGES:
        path = PAGES[path]
    elif path in FOLDERS:
        path = "gallery.md"
    elif folder in FOLDERS and name.endswith(".py"):
        path = f"{folder}/{name.removesuffix('.py')}.md"
    elif path.startswith("docs/"):
        path = path.removeprefix("docs/")
    page = PAGES.get(source, source.removeprefix("docs/"))
    return posixpath.relpath(path, posixpath.dirname(page) or ".")


def in_code(markdown: str) -> list[bool]:
    """Return for each line whether it is of a fenced block."""
    found, fence = [], ""
    for line in markdown.split("\n"):
        match = _FENCE.match(line)
        found.append(bool(fence or match))
        if match and not fence:
            fence = match[1]
        elif match and match[1] == fence:
            fence = ""
    return found


def apart(markdown: str) -> str:
    r"""Put an empty line before a list that follows a paragraph at once: a list to GitHub, the paragraph's next line to Python-Markdown.

    >>> apart("Two things:\n- one\n- two")
    'Two things:\n\n- one\n- two'
    """
    found: list[str] = []
    paragraph = False
    for line, code in zip(markdown.split("\n"), in_code(markdown), strict=True):
        item = not code and bool(_ITEM.match(line))
        if item and paragraph:
            found.append("")
        if item or code or not line.strip():
            paragraph = False
        elif not found or not found[-1].strip():
            paragraph = not line.startswith((" ", "|", "#"))
        found.append(line)
    return "\n".join(found)


def scripts(*folders: str) -> list[Path]:
    """Return the scripts of these folders, of all without one."""
    return [path for folder in folders or FOLDERS for path in sorted((ROOT / folder).glob("*.py"))]


def described(script: Path) -> str:
    """Return the docstring of a script, as Markdown."""
    text = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
    return text.replace("``", "`")


def script_page(script: Path) -> str:
    """Return the page that shows a script: what it says of itself, and the code."""
    name = script.relative_to(ROOT).as_posix()
    code = script.read_text(encoding="utf-8")
    return f"# {script.name}\n\n`{name}`. {described(script)}\n\n```python\n{code}```\n"


def listed(folder: str) -> str:
    """Return the list of the scripts of a folder, with the first paragraph of each one's docstring."""
    rows = ["| script | what it does |", "|---|---|"]
    for script in scripts(folder):
        first = " ".join(described(script).split("\n\n")[0].split())
        rows.append(f"| [{script.name}](../{folder}/{script.name}) | {first.replace('|', chr(92) + '|')} |")
    return "\n".join(rows)
