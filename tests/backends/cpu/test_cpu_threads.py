"""How many threads the CPU backend uses, and the settings of torch's libraries."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support import ROOT
from support.tiny import write_model

from graphrt import library_settings
from graphrt.backends.cpu import threads
from graphrt.errors import SessionError
from graphrt.models import load
from graphrt.models.engine import SessionOptions
from graphrt.tools import cli


@pytest.fixture(autouse=True)
def same_threads_after() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of eight logical CPUs on four cores, in two control groups without a limit."""
    for cpu in range(8):
        topology = tmp_path / f"cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    for group in ("", "outer", "outer/inner"):
        folder = tmp_path / "cgroup" / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cpu.max").write_text("max 100000\n")
    (tmp_path / "own").write_text("0::/outer/inner\n")
    monkeypatch.setattr(threads, "_CPUS", tmp_path / "cpu")
    monkeypatch.setattr(threads, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(threads, "_OWN_CGROUP", tmp_path / "own")
    monkeypatch.setattr(threads, "_allowed_cpus", lambda: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return tmp_path


def test_hyperthreads_of_a_core_count_once(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert threads.usable_cores() == 4
    monkeypatch.setattr(threads, "_allowed_cpus", lambda: {0, 1, 4})
    assert threads.usable_cores() == 2
    monkeypatch.setattr(threads, "_CPUS", machine / "nothing")
    assert threads.usable_cores() == 3


@pytest.mark.parametrize(
    ("group", "limit", "cores"),
    [("outer/inner", "250000 100000", 2), ("outer", "150000 50000", 3), ("", "40000 100000", 1), ("outer", "9 1", 4)],
)
def test_the_processor_time_of_every_control_group_limits_threads(
    group: str, limit: str, cores: int, machine: Path
) -> None:
    (machine / "cgroup" / group / "cpu.max").write_text(limit + "\n")
    assert threads.usable_cores() == cores


def test_control_groups_of_the_first_version(machine: Path) -> None:
    (machine / "own").write_text("4:memory:/m\n3:cpu,cpuacct:/box\n1:name=systemd:/\n0::/\n")
    box = machine / "cgroup/cpu/box"
    box.mkdir(parents=True)
    (box / "cpu.cfs_period_us").write_text("100000\n")
    for quota, cores in (("-1", 4), ("300000", 3)):
        (box / "cpu.cfs_quota_us").write_text(quota + "\n")
        assert threads.usable_cores() == cores


def test_torchs_own_choice_is_lowered_to_the_cores_and_nobody_elses(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for chosen, expected in ((8, 4), (4, 4), (6, 6), (1, 1)):
        torch.set_num_threads(chosen)
        threads.limit_threads.__wrapped__()
        assert torch.get_num_threads() == expected
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    torch.set_num_threads(8)
    threads.limit_threads.__wrapped__()
    assert torch.get_num_threads() == 8


# ---- -t and -tb ----


def test_prompts_are_read_on_threads_of_their_own_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(write_model(tmp_path / "m.gguf", "llama", tokenizer="spm"), "cpu")
    torch.set_num_threads(1)
    session, seen = model.session(SessionOptions(n_threads_batch=3)), list[int]()
    for n in (5, 1):
        exe = session.executable(n, 1)
        monkeypatch.setattr(exe, "run", lambda run=exe.run: (seen.append(threads.count()), run()))
        session.eval([1] * n)
    assert seen == [3, 1] and threads.count() == 1
    with pytest.raises(SessionError, match="got -1"):
        model.session(SessionOptions(n_threads_batch=-1))


def test_threads_of_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_model(tmp_path / "m.gguf", "llama", tokenizer="spm")
    seen, using = list[int](), threads.using
    monkeypatch.setattr(threads, "using", lambda n: (seen.append(n), using(n))[1])
    options = ["--raw", "--temp", "0", "--ignore-eos", "-n", "3", "-t", "2", "-tb", "3"]
    assert cli.main(["run", str(path), "-p", "the sea", *options]) == 0
    assert threads.count() == 2 and seen == [3]
    monkeypatch.setattr(threads, "use", lambda n: seen.append(-n))
    assert cli.main(["run", str(path), "-p", "the sea", *options[:6], "-t", "-1", "-tb", "0"]) == 0
    assert seen == [3], "numbers below 1 are the defaults, as llama.cpp has it"
    with pytest.raises(SystemExit):
        cli.main(["run", str(path), "-p", "the sea", "-tb", "-2"])
    assert "must be from -1 to 512, got -2" in capsys.readouterr().err


# ---- the environment ----


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "2000 128 128"),
        ({"OMP_WAIT_POLICY": "active"}, "None 128 128"),
        ({"GOMP_SPINCOUNT": "7", "LRU_CACHE_CAPACITY": "9"}, "7 9 128"),
    ],
)
def test_settings_are_there_before_torch_is_and_leave_those_of_the_user(given: dict[str, str], expected: str) -> None:
    names = (library_settings.SPIN_COUNT, *library_settings.PREPARED_PRODUCTS, "OMP_WAIT_POLICY")
    env = {name: value for name, value in os.environ.items() if name not in names}
    code = "import os, sys, graphrt; print('torch' in sys.modules, *(os.environ.get(n) for n in sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, "GOMP_SPINCOUNT", "LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"],
        env={**env, **given, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    assert done.stdout.split() == ["False", *expected.split()]
