"""Docstrings can be read: no sentence is cut in two by an empty line."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from support import ROOT

FOLDERS = ("graphrt", "ops", "backends", "models", "tools", "tests")
#: What a docstring's first line may end with where an empty line follows: a sentence's end, or of a quotation.
ENDS = tuple(".:!?)]}\"'`")


def cut_docstrings(source: str) -> Iterator[tuple[int, str]]:
    """The line numbers and first lines of docstrings whose first sentence goes on after an empty line."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node) or ""
        first, *rest = text.split("\n")
        if len(rest) > 1 and not rest[0].strip() and not first.rstrip().endswith(ENDS):
            yield node.body[0].lineno, first


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_docstring_is_cut_by_an_empty_line(folder: str) -> None:
    files = [path for path in sorted((ROOT / folder).rglob("*.py")) if "site-packages" not in path.parts]
    found = [
        f"{path.relative_to(ROOT)}:{line}: {first}"
        for path in files
        for line, first in cut_docstrings(path.read_text(encoding="utf-8"))
    ]
    assert files and not found, "\n".join(["the sentence goes on after an empty line:", *found])


def test_a_cut_docstring_is_found() -> None:
    cut = 'def f():\n    """What is seen gets 0, with `distance` minus\n\n    its distance."""\n'
    assert list(cut_docstrings(cut)) == [(2, "What is seen gets 0, with `distance` minus")]
    whole = 'def f():\n    """What is seen gets 0.\n\n    With `distance` minus its distance.\n    """\n'
    assert list(cut_docstrings(whole)) == list(cut_docstrings(whole.replace("0.\n\n    With", "0, with"))) == []
