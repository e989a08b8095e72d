"""What the documents name is there: files, and the places that links lead to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support import ROOT

FOLDERS = ("graphrt", "ops", "backends", "models", "tools", "tests", "docs")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("tests/**/*.md")])
FILES = {
    path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()
}
#: Stand for a name of one's own: ops/x.py.
STAND_INS = re.compile(r"(^|/)x\.py$|^FILE-")


def named_files(text: str) -> set[str]:
    """The files with an ending of sources that a document names in backquotes, patterns left out."""
    found = re.findall(r"`([\w/.-]+\.(?:py|md|toml|cu|json))`", text)
    return {name for name in found if not STAND_INS.search(name)}


def is_there(name: str) -> bool:
    """Whether a file of that name, or with a path that ends so, is in the tree."""
    name = name.removeprefix("graphrt/") if name not in FILES else name
    return name in FILES or (ROOT / name).is_file() or any(file.endswith(f"/{name}") for file in FILES)


def links(text: str) -> list[str]:
    prose = re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", prose) if "://" not in link]


def anchors(text: str) -> set[str]:
    """Of a document's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.strip().lower()).replace(" ", "-") for head in heads}


def broken(document: Path) -> list[str]:
    found = []
    for link in links(document.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        if not target.exists():
            found.append(f"{link}: there is no such file")
        elif anchor and anchor not in anchors(target.read_text(encoding="utf-8")):
            found.append(f"{link}: there is no such heading")
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_it_names_is_there(document: Path) -> None:
    missing = [name for name in sorted(named_files(document.read_text(encoding="utf-8"))) if not is_there(name)]
    assert not missing and not broken(document)


def test_what_is_not_there_is_found(tmp_path: Path) -> None:
    assert named_files("`no_such_file.py` of `ops/x.py`, `*fusions.py`") == {"no_such_file.py"}
    assert not is_there("no_such_file.py") and is_there("backends/cpu/fuse.py") and is_there("graphrt/ops/rope.py")
    page = tmp_path / "page.md"
    page.write_text("# One head\n[a](#one-head) [b](#two) [c](gone.md) `f[i](**x)`\n")
    assert broken(page) == ["#two: there is no such heading", "gone.md: there is no such file"]
