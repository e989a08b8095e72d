"""The list of planted bugs as data: reads tests/mutants/<area>.toml, and says what is wrong with it.

These bugs are planted in the project's sources, and the project's tests must see them; tools/conformance/mutants*.py
are kernels with planted bugs that `graphrt test` must see. A bug is a table:

    [[bug]]
    name = "stale-twin-of-a-view"        # of all files, once
    file = "graphrt/schedule.py"
    find = "exact text"                  # once in the file; several lines are allowed
    replace = "text"
    tests = ["tests/runtime/test_schedule.py"]   # files, or file::test, that should see it
    why = "what goes wrong for a user"
    survives = "argument"                # only of a bug that is argued to change nothing that can be observed
"""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
#: The areas, each a file of bugs, and the folder that their bugs lie in.
AREAS = {
    "graphrt": "graphrt/", "ops": "ops/", "tools": "tools/", "models": "models/", "cpu": "backends/cpu/",
    "triton": "backends/triton/",
}  # fmt: skip


class Rotten(Exception):
    """The list no longer fits the sources."""


@dataclass(frozen=True)
class Bug:
    """One change of one file; the module's docstring says what the fields are."""

    name: str
    file: str
    find: str
    replace: str
    tests: tuple[str, ...]
    why: str
    area: str
    survives: str = ""

    def planted_in(self, text: str) -> str:
        """The file's text with the bug. Raises Rotten unless `find` is there exactly once."""
        found = text.count(self.find)
        if found != 1:
            raise Rotten(f"{self.name}: `find` must occur once in {self.file}, it does {found} times; mend the list")
        return text.replace(self.find, self.replace)


def load(folder: Path = HERE) -> list[Bug]:
    """Every bug of the folder's lists, in the order of AREAS. Raises Rotten for a field that is missing or unknown."""
    return [bug for area in AREAS for bug in _of_area(folder / f"{area}.toml", area)]


def _of_area(path: Path, area: str) -> Iterator[Bug]:
    if not path.exists():
        return
    for row in tomllib.loads(path.read_text(encoding="utf-8"))["bug"]:
        try:
            yield Bug(**{**row, "tests": tuple(row["tests"]), "area": area})
        except (TypeError, KeyError) as error:
            raise Rotten(f"a bug {row.get('name')!r} of {path.name}: {error}") from error


def problems(bugs: Sequence[Bug], root: Path = ROOT) -> list[str]:
    """What is wrong with a list, a sentence each; empty when it is in order."""
    wrong = [f"{name}: a name is used once" for name, n in Counter(b.name for b in bugs).items() if n > 1]
    for bug in bugs:
        wrong += [f"{bug.name}: {what}" for what in _problems(bug, root)]
    return wrong


def _problems(bug: Bug, root: Path) -> Iterator[str]:
    if not bug.file.startswith(AREAS[bug.area]):
        yield f"bugs of {bug.area}.toml lie in {AREAS[bug.area]}, not in {bug.file}"
    if bug.find == bug.replace:
        yield "it changes nothing"
    if not bug.why:
        yield "`why` must say what goes wrong for a user"
    try:
        planted = bug.planted_in((root / bug.file).read_text(encoding="utf-8"))
        if bug.file.endswith(".py"):
            ast.parse(planted)
    except (Rotten, OSError, SyntaxError) as error:
        yield str(error)
    if not bug.tests:
        yield "it names no test"
    for test in bug.tests:
        path, _, name = test.partition("::")
        if not (root / path).is_file():
            yield f"{path} does not exist"
        elif name and f"def {name.partition('[')[0]}(" not in (root / path).read_text(encoding="utf-8"):
            yield f"{path} has no {name}"
