# SPDX-License-Identifier: Apache-2.0
"""The documentation holds: code on it is executed, links lead somewhere, and tables say what the code says. None of this needs mkdocs."""

from __future__ import annotations

import ast
import csv
import doctest
import importlib
import importlib.util
import inspect
import itertools
import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from dash_optim import DASH
from dash_optim.options import STRUCTURE

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
TEXTS = [*PAGES, *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md"))]
EXECUTED = {
    "README.md": "test_readme.py",
    "docs/distributed.md": "test_distributed_docs.py",
    "docs/recipes.md": "test_recipes.py",
}
"""Pages whose code is not written as doctests, and the tests that execute it."""
PACKAGES = ("matroots", "matroots.solvers", "matroots.scaling", "dash_optim")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def built(name: str) -> ModuleType:
    """Return a module of docs_build/, which is no package."""
    spec = importlib.util.spec_from_file_location(f"docs_build_{name}", ROOT / "docs_build" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hooks = built("hooks")


def without_code(text: str) -> str:
    """Return Markdown without what stands in fenced blocks and between backticks."""
    lines = [line for line, code in zip(text.split("\n"), hooks.in_code(text), strict=True) if not code]
    return re.sub(r"`[^`\n]*`", lambda match: "x" * len(match[0]), "\n".join(lines))


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    found: dict[str, int] = {}
    for line, code in zip(text.split("\n"), hooks.in_code(text), strict=True):
        heading = None if code else re.match(r"#{1,6} +(.*?)(?: +#+)?$", line)
        if heading:
            shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1])
            slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
            found[slug] = found.get(slug, -1) + 1
    return {
        slug if turn == 0 else f"{slug}-{turn}" for slug, count in found.items() for turn in range(count + 1)
    }


# --- code ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", TEXTS, ids=name_of)
def test_every_block_of_python_is_executed(page: Path, pytestconfig: pytest.Config) -> None:
    text = page.read_text()
    blocks = re.findall(r"^```(?:python|pycon|py)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == len(re.findall(r"^ *```py", text, re.MULTILINE))
    runner = EXECUTED.get(name_of(page))
    if runner is not None:
        assert page.name in (ROOT / "tests" / runner).read_text()
        return
    assert [block for block in blocks if not block.startswith(">>>")] == []
    if blocks:  # pytest finds the page, and every block is in what it finds
        assert "docs" in pytestconfig.getini("testpaths")
        assert "--doctest-glob=*.md" in pytestconfig.getini("addopts")
        assert page in PAGES
        examples = doctest.DocTestParser().get_examples(text)
        assert len(examples) == sum(block.count("\n>>>") + 1 for block in blocks)
        assert not any(doctest.SKIP in example.options for example in examples)


def test_the_examples_in_docs_build_hold() -> None:
    assert doctest.testmod(hooks).attempted >= 2
    assert doctest.testmod(hooks).failed == 0


def test_docstrings_become_markdown() -> None:
    if importlib.util.find_spec("griffe") is None:
        pytest.skip("griffe is not installed: pip install matroots[docs]")
    docstrings = built("docstrings")
    assert doctest.testmod(docstrings).attempted == 1
    assert doctest.testmod(docstrings).failed == 0
    signature = inspect.signature(DASH).parameters
    table = docstrings.defaults()
    assert {name: signature[name].default for name in table} == table


def commands() -> list[tuple[str, str, str]]:
    """Return (package, command, arguments) of each command line on the pages, in blocks and in sentences."""
    pattern = re.compile(r"python -m (matroots|dash_optim) ([a-z][\w-]*)([^`\n#&|;()]*)")
    texts = (page.read_text().replace("\\\n", " ") for page in TEXTS)
    return list(dict.fromkeys(itertools.chain.from_iterable(map(pattern.findall, texts))))


@pytest.mark.parametrize(("package", "command", "arguments"), commands())
def test_command_lines_are_understood(package: str, command: str, arguments: str) -> None:
    table = importlib.import_module(f"{package}.__main__").COMMANDS
    assert command in table
    make = getattr(importlib.import_module(table[command][0]), "_parser", None)
    if make is None:  # those of training jobs take any setting, and have tests of their own
        assert command in ("train", "compare", "sweep", "study")
    elif arguments.strip(" ."):  # more than a mention
        make().parse_intermixed_args(shlex.split(arguments))


# --- links ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", TEXTS, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text()))
    for target in targets:
        if re.match(r"[a-z]+:", target):
            assert target.startswith("https://"), target
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{name_of(page)}: {target}"
        assert there.is_relative_to(ROOT), f"{name_of(page)}: {target}"
        if anchor:
            assert anchor in anchors(there.read_text()), f"{name_of(page)}: {target}"


def test_anchors_are_those_of_github() -> None:
    text = "# From AdamW to DASH\n## `torch.linalg`: why?\n```sh\n# no heading\n```\n## [A](b.md) root\n## A root\n"
    assert anchors(text) == {"from-adamw-to-dash", "torchlinalg-why", "a-root", "a-root-1"}


def test_no_page_is_an_orphan() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]

    def files(entry: Any) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        parts = entry.values() if isinstance(entry, dict) else entry
        return list(itertools.chain.from_iterable(map(files, parts)))

    listed = files(nav)
    assert len(set(listed)) == len(listed)
    made = set(hooks.PAGES.values()) - {"index.md"}
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in PAGES}
    assert set(listed) - made == pages, "each page of docs/ has one line in the nav of mkdocs.yml"


def test_links_out_of_docs_lead_to_pages_of_the_site() -> None:
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in PAGES} | set(hooks.PAGES.values())
    pages |= {f"{script.parent.name}/{script.stem}.md" for script in hooks.scripts()}
    pages |= {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.*")}
    for page in TEXTS:
        source = name_of(page)
        if source == "README.md":
            continue
        shown = Path(hooks.PAGES.get(source, source.removeprefix("docs/")))
        text = hooks.for_site(page.read_text(), source)
        for target in re.findall(r"\]\(([^)\s:#]+)(?:#[^)\s]*)?\)", without_code(text)):
            there = (ROOT / "docs" / shown.parent / target).resolve().relative_to(ROOT / "docs").as_posix()
            assert there in pages, f"{source}: {target}"


# --- what the pages list -------------------------------------------------------------------------------------------------


def test_the_gallery_has_every_example() -> None:
    page = (ROOT / "docs" / "gallery.md").read_text()
    for folder, mark in hooks.MARKS.items():
        assert page.count(mark) == 1
        page = page.replace(mark, hooks.listed(folder))
    shown = hooks.for_site(page, "docs/gallery.md")
    scripts = sorted((ROOT / "examples").rglob("*.py"))
    assert len(scripts) >= 6
    for script in scripts:
        assert f"[{script.name}](examples/{script.stem}.md) | " in shown, (
            "examples are files of examples/ itself"
        )
        assert len(hooks.described(script)) > 20, f"{script.name}: its docstring says what it does"
        assert script.read_text() in hooks.script_page(script)


def test_every_public_name_is_on_a_page_of_the_api() -> None:
    pages = (ROOT / "docs" / "api").glob("*.md")
    identifiers = [
        name for page in pages for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    ]
    assert len(set(identifiers)) == len(identifiers)
    shown = []
    for identifier in identifiers:
        package, _, name = identifier.rpartition(".")
        assert name in importlib.import_module(package).__all__, identifier
        shown.append(getattr(importlib.import_module(package), name))
    for package in map(importlib.import_module, PACKAGES):
        missing = [
            name for name in package.__all__ if not any(getattr(package, name) is one for one in shown)
        ]
        assert missing == [], package.__name__


def rows(page: str) -> list[list[str]]:
    """Return the cells of the rows of a page's tables that start with a name in backticks."""
    found = re.findall(r"^\| (`.*) \|$", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    return [[cell.strip() for cell in row.split(" | ")] for row in found]


def test_every_argument_of_dash_is_in_the_table_with_its_default() -> None:
    table = {row[0].split("`")[1]: row for row in rows("hyperparameters.md")}
    signature = inspect.signature(DASH).parameters
    assert len(table) == len(rows("hyperparameters.md"))
    assert set(table) == set(signature)
    for name, parameter in signature.items():
        if parameter.default is not inspect.Parameter.empty:
            assert ast.literal_eval(table[name][1].strip("`")) == parameter.default, name
        assert len(table[name][2]) > 10, name
    assert {name for name, row in table.items() if row[0].endswith("°")} == set(STRUCTURE)


def test_the_measured_table_is_that_of_the_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("which_method", ROOT / "benchmarks" / "which_method.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    data = ROOT / "docs" / "data" / "bench.csv"
    script.main([str(data), "--figure", str(tmp_path / "figure.png")])
    assert capsys.readouterr().out.strip() in (ROOT / "docs" / "choosing.md").read_text()
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    with data.open(newline="") as file:  # the fastest at one batch, found another way
        records = [
            row
            for row in csv.DictReader(file)
            if (row["p"], row["n"], float(row["condition"])) == ("4", "64", 1e4)
        ]
    able = [row for row in records if row["failed"] == "0" and float(row["error_max"]) <= 1e-4]
    times = {row["method"]: float(row["units"]) for row in able if row["kind"] == "ours"}
    times = {method: units for method, units in times.items() if not method.startswith("auto")}
    best = min(times, key=lambda method: times[method])
    found = script.fastest(
        [row for row in script.read(data) if (row.p, row.n, row.condition) == ("4", 64, 1e4)], 1e-4
    )
    assert next(row.method for name, row in found.items() if name not in (script.AUTO, script.PEER)) == best


QUOTED = {
    (
        "comparison.md",
        "bench.md",
    ): "7.9 16.4 8e-4 2e-3 11.7 31.1 3e-8 0.64 0.90 0.75 1.04 1.41 4e-5 9e-5 6e-5 24.8 0.6",
    ("choosing.md", "bench.md"): "0.64 1.04",
    ("choosing.md", "auto.md"): "1.1 1.9",
    ("from_adamw.md", "dash.md"): "5.6 44 554 103",
    ("from_adamw.md", "studies/better.md"): "1.622 1.536 1.243 0.003 0.01 120",
    ("mathematics.md", "rational.md"): "76",
    ("scaling.md", "studies.md"): "log(9/4)",
}
"""Numbers on a page that are another page's."""


@pytest.mark.parametrize(
    ("pages", "numbers"),
    QUOTED.items(),
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_quoted_numbers_are_those_of_their_source(pages: tuple[str, str], numbers: str) -> None:
    for page, number in itertools.product(pages, numbers.split()):
        found = re.search(rf"(?<![\d.]){re.escape(number)}(?![\d]|\.\d)", (ROOT / "docs" / page).read_text())
        assert found is not None, f"docs/{page}: {number}"
