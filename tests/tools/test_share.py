"""`graphrt test --share`: processes at once, bits compared; and what its default cases are made for."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from support import TESTS
from support.toy import ToyBackend

from graphrt import get_backend
from graphrt.backend import Usage
from graphrt.backends.triton.memory import DeviceComparison, TritonBuffer
from graphrt.errors import GraphError
from graphrt.testing import all_cases
from graphrt.tools import cli
from graphrt.tools.conformance.cases.share import StepCase, share_cases
from graphrt.tools.conformance.run.repeated import repeat
from graphrt.tools.conformance.run.share import Sharing
from graphrt.tools.conformance.run.step import run_case

TOY = [
    "test",
    "-b",
    "support.toy:ToyBackend",
    "--cases",
    "support.broken_backends",
    "--share",
    "2",
    "--seconds",
    "1",
    "--json",
]


@pytest.fixture(autouse=True)
def _helpers_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=":")


def test_processes_repeat_every_case_and_agree(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(TOY) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["places"] == 2 and report["processes"] >= 2 and not report["problems"]
    cases = report["cases"]
    assert cases["ADD(kind=plain)"]["runs"] >= 64 and all(c["differing"] == 0 for c in cases.values())
    assert cases["SQRT()"]["refused"] == "op SQRT is unknown to it" and cases["SQRT()"]["runs"] == 0


def test_a_run_with_other_bits_fails(capsys: pytest.CaptureFixture[str]) -> None:
    args = [*TOY[:-1], "-o", "ADD"]
    args[2] = "support.broken_backends:Undecided"
    assert cli.main(args) == 1
    said = capsys.readouterr().out
    assert "DIFFERS: ADD(kind=spoilt)" in said and "off; NMSE against float64" in said
    assert "0 differ" in next(line for line in said.splitlines() if "kind=plain" in line)
    assert " 0 differ" not in next(line for line in said.splitlines() if "  ADD(kind=spoilt)" in line)


def test_a_crash_is_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    args = [*TOY]
    args[2] = "support.broken_backends:Crashing"
    assert cli.main(args) == 1
    assert "exit code" in json.loads(capsys.readouterr().out)["problems"][0]


@pytest.mark.parametrize("args", [["--seconds", "0"], ["--graphs", "3"], ["--output", "junit"], ["perf"]])
def test_what_cannot_be_shared_is_refused(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["test", *args, "-b", "cpu", "--share", "2"]) == 2
    assert "must be over 0" in (said := capsys.readouterr().err) or "--share" in said


def test_a_result_that_differs_is_told_by_its_place() -> None:
    runs = repeat(next(all_cases("ADD")), ToyBackend(), 0)
    assert not isinstance(runs, str)
    runs.first = runs.first.copy()
    runs.first[:4] ^= 1
    runs.comparison = runs.buffer.comparison(runs.offset, runs.first)
    n, differing, message = runs(0.01)
    assert differing == n and "have other bits" in message


def test_the_default_cases_are_right_and_steps_repeat() -> None:
    cases = list(share_cases())
    assert len({str(c) for c in cases}) == len(cases)
    cpu, tried = get_backend("cpu", exact=False), 0
    for case in cases:
        if case.axes.get("kernel") in ("cache write", "experts, few pairs", "back of v, D 64"):
            tried += 1
            assert run_case(case, cpu).status == "pass"
    assert tried == 3
    steps = repeat(StepCase("STEP", {}, lambda inputs: inputs.result, model="tiny", layers=1), cpu, 0)
    assert not isinstance(steps, str)
    runs, differing, message = steps(0.01)
    assert runs > 0 and runs % 65 == 0 and differing == 0 and not message
    steps.first["the tokens"] = []
    runs, differing, message = steps(0.01)
    assert differing == runs // 65 and message == "the tokens differ from the first time's"


def test_a_source_without_cases_is_refused() -> None:
    with pytest.raises(GraphError, match="there must be a case"):
        from graphrt.tools.conformance.run.share import chosen_cases

        chosen_cases(None, "FLASH_ATTN_EXT", "kernel=none of them")


def test_processes_that_agree_each_with_itself_must_agree_with_each_other() -> None:
    sharing = Sharing({}, 2, 1.0)
    answer = {"case": "a", "runs": 2, "differing": 0, "message": "", "refused": "", "digest": "1"}
    sharing._add([answer, answer], short=False)
    assert not sharing.tallies["a"].told()
    sharing._add([answer | {"digest": "2"}], short=True)
    assert sharing.tallies["a"].told() == ["processes' first runs gave 2 different results"]
    assert sharing.tallies["a"].runs == 6 and sharing.tallies["a"].short_lived == 2


@pytest.mark.parametrize(("offset", "nbytes"), [(8, 64), (4, 12), (2, 6), (3, 7)])
def test_a_gpus_comparison_counts_looks_that_saw_other_bytes(offset: int, nbytes: int) -> None:
    buffer = TritonBuffer(torch.arange(100, dtype=torch.uint8), Usage.COMPUTE)  # torch does the same on the CPU
    right = buffer.read(offset, nbytes)
    comparison = DeviceComparison(buffer, offset, right)
    comparison.look()
    buffer.memory[offset + nbytes - 1] ^= 4
    comparison.look()
    comparison.look()
    buffer.memory[offset + nbytes - 1] ^= 4
    comparison.look()
    differing, last = comparison.found()
    assert differing == 2 and np.flatnonzero(last ^ right).tolist() == [nbytes - 1]
    assert comparison.found()[0] == 0, "told once"
