"""The frame of the fuzzers: bugs planted in an input are found, each by itself; and each fuzzer runs a little."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import fuzz
import pytest
from fuzz import _planted as planted
from fuzz import run
from fuzz.limits import Limits

from support import ROOT, TESTS

QUICK = Limits(cpu=1.5, hang=1.0)
FOUND = {
    planted.HANG: "hang",
    planted.SPIN: "cpu",
    planted.CRASH: "crash",
    planted.MEMORY: "memory",
    planted.ADDRESS_SPACE: "exception",
    planted.EXCEPTION: "exception",
    planted.EXIT: "exception",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(run, "FOLDER", tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{TESTS}:{ROOT}")
    return tmp_path


def test_planted_bugs_are_found(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    campaign = run.Campaign("_planted", 0, 20, None, 1, QUICK).run()
    assert {f["seed"]: f["kind"] for f in campaign.findings} == FOUND
    assert all(f["alone"] for f in campaign.findings)
    assert campaign.done == 20 and campaign.outcomes["fine"] == 12 and campaign.outcomes["ArchError"] == 1
    assert {path.name for path in folder.iterdir()} == {f"_planted-{seed}.bin" for seed in FOUND}
    assert (folder / "_planted-7.bin").read_bytes() == planted.make(7)
    said = capsys.readouterr().out
    assert "SIGSEGV" in said and "string_at" in said, "a crash is told with where it was"
    assert "MemoryError at _planted.py" in said and f"--replay {folder / '_planted-7.bin'}" in said


def test_a_finding_is_replayed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.replay("_planted", run.save("_planted", planted.EXCEPTION, planted.make(planted.EXCEPTION)), QUICK) == 1
    assert "ValueError: planted" in capsys.readouterr().out
    assert run.replay("_planted", run.save("_planted", 0, planted.make(0)), QUICK) == 0
    assert "fine" in capsys.readouterr().out


def test_a_process_that_says_nothing_is_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = run.Child("_planted", Limits(cpu=4.0))
    monkeypatch.setattr(run, "SILENT", 0.3)
    with pytest.raises(RuntimeError, match="said nothing for 0.3 s"):
        child.ask(path=str(run.save("_planted", planted.SPIN, planted.make(planted.SPIN))))


def test_seeds_of_days_are_apart() -> None:
    day = datetime.date(2026, 11, 22)
    assert run.seed_of(day + datetime.timedelta(1)) - run.seed_of(day) == run.A_DAY > 10**8


def test_a_run_goes_on_where_the_last_ended(folder: Path) -> None:
    campaign = run.Campaign("_planted", 100, 130, None, 1, QUICK).run()
    assert (campaign.done, campaign.following) == (130, 230)


def test_time_counts_from_when_a_process_is_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    class Slow:
        def __init__(self, name: str, limits: Limits) -> None:
            clock[0] += 100.0  # longer than the campaign may take

        def ask(self, first: int, count: int, until: float) -> dict[str, Any]:
            clock[0] = until
            return {"done": count, "outcomes": {"fine": count}, "findings": []}

        def close(self) -> None: ...

    monkeypatch.setattr(run, "Child", Slow)
    monkeypatch.setattr(run.time, "monotonic", lambda: clock[0])
    assert run.Campaign("_planted", 0, None, 7.5, 1, QUICK).run().done == run.BATCH


@pytest.mark.parametrize("name", fuzz.names())
def test_fuzzers_are_deterministic(name: str) -> None:
    module = fuzz.load(name)
    assert name not in fuzz.FRAME and isinstance(module.NAME, str)
    assert [module.make(seed) for seed in (1, 2)] == [module.make(seed) for seed in (1, 2)]
    assert module.make(1) != module.make(2)
