"""The list of planted bugs fits the sources; and its runner, on a tiny tree, tells caught from survived."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from mutants import run
from mutants.planted import AREAS, Bug, Rotten, load, problems

#: The fewest bugs of the whole list.
AT_LEAST = 400
#: The areas that have a list, and the fewest bugs of each.
COVERED = {"graphrt": 50, "ops": 40, "tools": 80, "models": 90, "cpu": 45, "triton": 80}

BUGS = load()


def test_the_list_is_in_order() -> None:
    assert problems(BUGS) == []


def test_every_area_has_bugs() -> None:
    counts = Counter(bug.area for bug in BUGS)
    assert set(COVERED) <= set(counts) and len(BUGS) >= AT_LEAST
    assert all(counts[area] >= n for area, n in COVERED.items()), counts
    files = {area: {bug.file for bug in BUGS if bug.area == area} for area in COVERED}
    assert all(len(found) >= 8 for found in files.values()), "they are spread over an area's files"


def _bug(**changed: object) -> Bug:
    plain = {
        "name": "b",
        "file": "ops/a.py",
        "find": "1",
        "replace": "2",
        "tests": ("t.py",),
        "why": "w",
        "area": "ops",
    }
    return Bug(**{**plain, **changed})  # type: ignore[arg-type]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of one module and one test."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # pytest alone starts in a third of the time
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops/a.py").write_text("def one():\n    return 1\n\n\ndef two():\n    return 2\n")
    (tmp_path / "t.py").write_text(
        "import sys\nsys.path.insert(0, 'ops')\nimport a\n\n\ndef test_one():\n    assert a.one() == 1\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    "changed, said",
    [
        ({}, None),
        ({"find": "return"}, "once in ops/a.py, it does 2 times"),
        ({"find": "three"}, "it does 0 times"),
        ({"replace": "1"}, "it changes nothing"),
        ({"replace": "("}, "was never closed"),
        ({"file": "tools/a.py"}, "lie in ops/, not in tools/a.py"),
        ({"tests": ()}, "it names no test"),
        ({"tests": ("u.py",)}, "u.py does not exist"),
        ({"tests": ("t.py::test_two",)}, "t.py has no test_two"),
        ({"tests": ("t.py::test_one[x]",)}, None),
        ({"why": ""}, "must say what goes wrong"),
    ],
)
def test_what_is_wrong_with_a_list_is_said(tree: Path, changed: dict[str, object], said: str | None) -> None:
    found = problems([_bug(**changed)], tree)
    assert found == [] if said is None else said in found[0]


def test_a_name_is_used_once(tree: Path) -> None:
    assert problems([_bug(), _bug()], tree) == ["b: a name is used once"]


def test_the_score_counts_what_is_not_argued() -> None:
    bugs = [_bug(name=name) for name in "abcd"] + [_bug(name="e", survives="because")]
    text, share = run.report(bugs, {"a": "caught", "b": "timed out", "c": "survived", "d": "broken", "e": "survived"})
    assert share == 0.5 and text.splitlines() == [
        "2 of 4 planted bugs caught (50.0 %), 1 more are argued to survive",
        "timed out: b",
        "survived: c",
        "broken: d",
    ]
    assert "not run yet: 4" in run.report(bugs, {"a": "caught"})[0]
    assert "yet caught (drop the argument): e" in run.report(bugs, {"e": "caught"})[0]


LIST = """
[[bug]]
name = "seen"
file = "ops/a.py"
find = "return 1"
replace = "return 7"
tests = ["t.py"]
why = "w"

[[bug]]
name = "unseen"
file = "ops/a.py"
find = "return 2"
replace = "return 7"
tests = ["t.py"]
why = "w"
"""


def test_the_runner_on_a_tiny_tree(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One bug is caught, one survives, the tree stays as it is, and a second run has nothing left to run."""
    (tree / "tests/mutants").mkdir(parents=True)
    (tree / "tests/mutants/ops.toml").write_text(LIST)
    (tree / ".gitignore").write_text("/build/\n")
    subprocess.run(["git", "init", "-q", str(tree)], check=True)
    before = (tree / "ops/a.py").read_text()
    assert run.main([], tree) == 1
    out = capsys.readouterr().out
    assert "1 of 2 planted bugs caught (50.0 %)" in out and "survived: unseen" in out
    assert (tree / "ops/a.py").read_text() == before == (tree / "build/mutants/tree-0/ops/a.py").read_text()
    rows = [json.loads(line) for line in (tree / "build/mutants/results.jsonl").read_text().splitlines()]
    assert [row.get("result", "unchanged") for row in rows] == ["unchanged", "caught", "survived"]
    assert run.main(["seen"], tree) == 0 and capsys.readouterr().out == "1 of 1 planted bugs caught (100.0 %)\n"
    assert run.main(["--again", "--seconds", "0"], tree) == 3 and "not run yet: 2" in capsys.readouterr().out


def test_a_tree_that_fails_its_tests_says_nothing_of_bugs(tree: Path) -> None:
    (tree / "t.py").write_text("def test_one():\n    assert False\n")
    subprocess.run(["git", "init", "-q", str(tree)], check=True)
    runner = run.Runner(tree, tree / "build", 60.0)
    with pytest.raises(Rotten, match=r"t.py must pass without a bug within 60 s, it ended with 1"):
        runner.check_unchanged(run.Tree(tree, tree / "build/tree"), ("t.py",))


def test_exit_codes_and_time_limits() -> None:
    assert [run.verdict(code) for code in (0, 1, None, -11, 2, 4, 5)] == [
        "survived", "caught", "timed out", "caught", "broken", "broken", "broken",
    ]  # fmt: skip
    assert set(AREAS) >= set(COVERED)


def test_a_hang_ends(tree: Path) -> None:
    (tree / "t.py").write_text("import time\n\n\ndef test_one():\n    time.sleep(600)\n")
    assert run.run_tests(tree, ["t.py"], 2.0)["code"] is None
