"""`graphrt test` itself: what is right passes, and each kind of wrong is reported as what it is."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from support import ROOT, broken_backends
from support.plugins import by_hand

from graphrt import get_backend, ops
from graphrt.testing import Case, all_cases
from graphrt.tools import cli
from graphrt.tools.conformance.run import pool
from graphrt.tools.conformance.run.step import Outcome, run_case


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Worker processes import this folder's modules, and no test leaves a trace in the user's cache."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "tests"), str(ROOT)]))
    monkeypatch.setenv("GRAPHRT_CACHE", str(tmp_path / "cache"))


def _report(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, dict[str, dict[str, object]]]:
    code = cli.main(["test", "--json", *args])
    report = json.loads(capsys.readouterr().out)
    return code, {case["case"]: case for case in report["cases"]}


def _spoilt(capsys: pytest.CaptureFixture[str], backend: str, *args: str) -> dict[str, object]:
    """The outcome of the case that a broken backend spoils; all others must be as they should."""
    code, cases = _report(
        capsys, "-b", f"support.broken_backends:{backend}", "--cases", "support.broken_backends", *args
    )
    spoilt = cases.pop(broken_backends.SPOILT)
    statuses = {name: case["status"] for name, case in cases.items()}
    assert statuses.pop("SQRT()") == "unsupported" and set(statuses.values()) == {"pass"}, statuses
    assert len(statuses) == 5 and code == 1
    return spoilt


WRONG = {
    "Raising": ("crashed", "SystemExit: no more"),
    "OutOfBounds": ("fail", "it wrote 8 bytes past the end of 'node_0'"),
    "InputWriting": ("fail", "it wrote to its input 'b': 4 bytes, from byte 4"),
    "Undecided": ("fail", "two runs on the same inputs differ"),
    "NotANumber": ("fail", "first at batch 0, matrix 2, row 5, column 31: nan"),
    "Unwritten": ("fail", "all of column 31 of 32, the last"),
    "Swapping": ("fail", "all of matrices 1 to 2 of 4"),
    "TailLosing": ("fail", "all of only the last 5 of 6 rows"),
}


@pytest.mark.parametrize("backend", WRONG)
def test_what_is_wrong_is_reported_as_what_it_is(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, message = WRONG[backend]
    spoilt = _spoilt(capsys, backend, "-j", "0")
    assert spoilt["status"] == status and message in str(spoilt["message"]), spoilt


@pytest.mark.parametrize(
    "backend, status, message",
    [
        ("Crashing", "crashed", "killed by SIGABRT: toy: assertion failed"),
        ("Leaving", "crashed", "the process ended with exit code 3"),
        ("Hanging", "timeout", "no answer within 2 s"),
    ],
)
def test_a_crash_or_a_hang_ends_its_case_only(
    backend: str, status: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is the hanging case's alone: the others may take long where others keep the machine busy."""
    hanging = [str(c) for c in broken_backends.cases()].index(broken_backends.SPOILT) if backend == "Hanging" else None
    run = pool.Worker.run
    monkeypatch.setattr(pool.Worker, "run", lambda self, i, limit: run(self, i, limit if i == hanging else 300.0))
    spoilt = _spoilt(capsys, backend, "--time-limit", "2")
    assert spoilt["status"] == status and message in str(spoilt["message"]), spoilt


def test_a_backend_that_prints_disturbs_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    code, cases = _report(
        capsys, "-b", "support.broken_backends:Printing", "--cases", "support.broken_backends", "-j", "2"
    )
    assert code == 0 and cases[broken_backends.SPOILT]["status"] == "pass"
    assert list(cases) == [str(c) for c in broken_backends.cases()]


def test_a_lie_about_support_is_a_crash_and_no_pass() -> None:
    outcome = run_case(next(all_cases("SQRT")), broken_backends.Lying())
    assert outcome.status == "crashed" and outcome.message.startswith("KeyError: 'SQRT'")


def test_unsupported_counts_only_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["-b", "support.broken_backends:Right", "--cases", "support.broken_backends", "-j", "0"]
    code, cases = _report(capsys, *args)
    assert code == 0 and cases["SQRT()"]["message"] == "op SQRT is unknown to it"
    assert cli.main(["test", *args, "--require-supported"]) == 1
    out = capsys.readouterr().out
    assert "6 passed, 1 unsupported" in out and "1  op SQRT is unknown to it" in out


def test_a_failure_is_saved_and_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _spoilt(capsys, "Swapping", "-j", "0", "--save", str(tmp_path))
    saved = list(tmp_path.glob("*.npz"))
    assert len(saved) == 1 and saved[0].name.startswith("ADD-")
    with np.load(saved[0]) as file:
        assert file["actual"].shape == file["expected"].shape == (1, 4, 6, 32)
    assert cli.main(["replay", str(saved[0]), "-b", "support.broken_backends:Swapping"]) == 1
    assert "all of matrices 1 to 2 of 4" in capsys.readouterr().out
    assert cli.main(["replay", str(saved[0]), "-b", "cpu"]) == 0
    assert cli.main(["replay", __file__]) == 2


def test_a_crash_is_saved_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _spoilt(capsys, "Leaving", "--save", str(tmp_path))
    assert cli.main(["replay", str(next(tmp_path.glob("*.npz"))), "-b", "cpu"]) == 0


def test_a_worker_has_the_seed_and_saves_what_it_got(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = next(str(c) for c in all_cases("FLASH_ATTN_EXT") if "n_q=9" in str(c) and "heads=[4,2]" in str(c))
    args = ["-b", "support.broken_backends:WrongStride", "-o", name, "--seed", "5"]
    alone = _report(capsys, *args, "-j", "0")[1][name]
    found = _report(capsys, *args, "--save", str(tmp_path))[1][name]
    assert found["status"] == "fail" and found["nmse"] == alone["nmse"]
    with np.load(next(tmp_path.glob("*.npz"))) as file:
        assert json.loads(str(file["about"]))["seed"] == 5 and file["actual"].size > 0


def test_every_kind_of_case_survives_being_saved(tmp_path: Path) -> None:
    from graphrt.tools.conformance.run.saved import load_failure, save_failure
    from graphrt.tools.conformance.run.step import run_inputs

    picked = {case.op: case for case in all_cases() if "layout=far" not in str(case)}
    for case in picked.values():
        inputs = case.build()
        save_failure(tmp_path / "case.npz", inputs, np.zeros(1), None, "")
        again = run_inputs(case.op, load_failure(tmp_path / "case.npz"), get_backend("cpu"))
        assert again.status == "pass" and again.case == str(case), again


def test_equal_seeds_give_equal_results_and_others_do_not(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["-b", "cpu", "-o", "RMS_NORM|MUL_MAT", "-p", "256|32", "-j", "0"]

    def figures(seed: str) -> list[object]:
        return [(c["case"], c["nmse"], c["limit"]) for c in _report(capsys, *args, "--seed", seed)[1].values()]

    first = figures("0")
    assert first and first == figures("0") and first != figures("1")


def test_the_formats_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["test", "-b", "support.broken_backends:Swapping", "--cases", "support.broken_backends", "-j", "0"]
    assert cli.main([*args, "--output", "csv"]) == 1
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(rows) == 7 and rows[2]["status"] == "fail" and rows[2]["worst"].count(" ") == 3
    assert cli.main([*args, "--output", "junit", "-O", str(tmp_path / "report.xml")]) == 1
    shown = capsys.readouterr()
    assert "FAILED: ADD(kind=spoilt)" in shown.out
    assert "FAILED: ADD(kind=spoilt)" in shown.err  # when it fails, before the report
    suite = ElementTree.parse(tmp_path / "report.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("7", "1", "1")


def test_what_failed_can_be_rerun(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["-b", "support.broken_backends:Swapping", "--cases", "support.broken_backends", "-j", "0"]
    _report(capsys, *args)
    code, cases = _report(capsys, *args, "--rerun-failed")
    assert code == 1 and list(cases) == [broken_backends.SPOILT]
    assert cli.main(["test", *args, "-o", "SQR", "--rerun-failed"]) == 0
    assert cli.main(["test", *args, "-o", "SQR"]) == 0  # what did not run keeps its note, of its own backend
    other = ["-b", "support.broken_backends:Right", *args[2:]]
    assert cli.main(["test", *other, "--rerun-failed"]) == 0 and "nothing to rerun" in capsys.readouterr().err
    assert list(_report(capsys, *args, "--rerun-failed")[1]) == [broken_backends.SPOILT]


def test_a_printed_case_reruns_exactly_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["test", "-o", "ROPE", "--list"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed == [str(c) for c in all_cases("ROPE")]
    code, cases = _report(capsys, "-b", "cpu", "-o", printed[3], "-j", "0")
    assert code == 0 and list(cases) == [printed[3]]


@pytest.mark.parametrize("args", [["-o", "NO_OP"], ["-o", "ADD("], ["-o", "ADD(type=nothing)"], ["-p", "["]])
def test_a_choice_of_nothing_is_an_error(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["test", "-b", "cpu", *args]) == 2
    assert len(capsys.readouterr().err.splitlines()) <= 3


@pytest.mark.parametrize("exact", [True, False])
def test_the_cpu_is_right(exact: bool) -> None:
    """A sample of every op's cases; `graphrt test -b cpu` runs all of them."""
    backend = get_backend("cpu", exact=exact)
    picked = [c for op in {c.op for c in all_cases()} for c in list(all_cases(op))[::7] if "far" not in str(c)]
    wrong = [o for o in (run_case(c, backend) for c in picked[:250]) if o.status != "pass"]
    assert not wrong


def test_weights_that_come_and_go_are_not_mixed_up() -> None:
    """The CPU keeps decoded weights by buffer: a later buffer at the same address is another one."""
    backend = get_backend("cpu")
    for case in [c for c in all_cases("MUL_MAT") if "q" in str(c)]:
        assert run_case(case, backend).status == "pass"


def test_an_outcome_survives_json() -> None:
    outcome = Outcome("A()", "A", "fail", "m", float("inf"), 1e-6, None, (1, 2, 3, 4), 0.5)
    assert Outcome.from_json(json.loads(json.dumps(outcome.to_json(), allow_nan=False))) == outcome


def test_a_case_without_energy_must_be_met_exactly() -> None:
    def make(zero: float) -> Case:
        return Case("SCALE", {"by": zero}, lambda inputs: ops.scale(inputs("a", "f32", (8, 3)), zero))

    assert run_case(make(0.0), get_backend("cpu")).status == "pass"


def test_the_plugin_is_right(tmp_path: Path) -> None:
    """`graphrt test -b tiny`, as a backend author runs it."""
    by_hand(tmp_path)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "graphrt", "test", "-b", "tiny", "-o", "ADD|MUL|SCALE|SQRT"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout and "it has ADD, MUL, SCALE, not SQRT" in done.stdout
