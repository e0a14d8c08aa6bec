"""The lists of ``docs/how_to_add.md`` are true: each names every module that has the section's example in its code."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/how_to_add.md"
ROOMS = ("memo_sim", "memo_exec", "hardware_profiles")
LEFT_OUT = (
    *("memo_sim/papers", "memo_sim/reasons", "memo_sim/validation", "memo_sim/interchange"),
    "memo_sim/program/layout/rules",
)
"""Rooms that may name anything, as the page says."""

SECTIONS = re.findall(
    r"^## ([^\n]+)\n(?:(?!^## ).)*?^<!-- example: (.+?) -->\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S
)


@cache
def words_of(module: Path) -> frozenset[str]:
    """Return the names and texts of a module's code, read once for all sections."""
    return frozenset(_words(module))


def _words(module: Path) -> Iterator[str]:
    """Yield the names and texts of a module's code: no comments, no docstrings."""
    tree = ast.parse(module.read_text())
    bodies = (getattr(parent, "body", None) for parent in ast.walk(tree))
    statements = (node for body in bodies if isinstance(body, list) for node in body)
    prose = {id(node.value) for node in statements if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in prose:
                yield text
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.alias(name=name):
                yield name
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.keyword(arg=str(name)):
                yield name


def naming(pattern: str) -> set[str]:
    """Return the files that name what ``pattern`` finds: modules in their code, profiles in their file's name."""
    found = set()
    for room in ROOMS:
        for path in (ROOT / room).rglob("*"):
            name = str(path.relative_to(ROOT))
            if name.startswith(LEFT_OUT):
                continue
            words = words_of(path) if path.suffix == ".py" else {path.stem} if room == "hardware_profiles" else set()
            if any(re.search(pattern, word) for word in words):
                found.add(name)
    return found


def test_every_recipe_has_an_example() -> None:
    assert [title for title, _, _ in SECTIONS] == [
        "A parallel layout",
        "An attention backend",
        "A GPU profile",
        "A schedule",
        "An output document",
    ]


@pytest.mark.parametrize(("pattern", "text"), [(p, t) for _, p, t in SECTIONS], ids=[title for title, _, _ in SECTIONS])
def test_the_example_is_in_these_files_and_no_others(pattern: str, text: str) -> None:
    listed = set(re.findall(r"`((?:memo_sim|memo_exec|hardware_profiles)/[\w./-]+)`", text))
    assert naming(pattern) == listed


def test_files_that_the_page_names_exist() -> None:
    named = re.findall(r"`((?:memo_sim|memo_exec|hardware_profiles|tests)/[\w./-]*\w)`", PAGE.read_text())
    assert [name for name in named if "NAME" not in name and not (ROOT / name).exists()] == []
