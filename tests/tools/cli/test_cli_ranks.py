"""`graphrt run --tp N` and `graphrt info --ranks N`: ranks of this host, what ends them, plans for what is not here."""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from support.tiny import write_model

from graphrt.backend import get_backend
from graphrt.errors import ArchError, HubError, RankError
from graphrt.models.arch import architecture, read_file
from graphrt.models.engine import SessionOptions
from graphrt.models.gguf import GGUFFile
from graphrt.models.memory import memory_needs
from graphrt.models.ranks.network import plan_of
from graphrt.models.ranks.plan import RankPlan
from graphrt.models.ranks.weights import RankWeights
from graphrt.ranks import Ranks
from graphrt.tools.cli import main
from graphrt.tools.ranks import launch, member
from graphrt.tools.ranks.launch import Job, ServerJob, _error, _failed, _failure, check_plan
from graphrt.tools.ranks.member import SERVES, own_backend

TEXT = ("--raw", "-p", "hello the sea", "--temp", "0", "--ignore-eos", "--backend", "cpu", "-t", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("ranks") / "m.gguf", "llama", tokenizer="spm", context_length=4096)


def ended(code: int) -> Any:
    return SimpleNamespace(exitcode=code)


def said(folder: Path, rank: int, text: str, *, lost: bool) -> None:
    (folder / f"{rank}.json").write_text(json.dumps({"text": text, "lost": lost, "rank": rank}))


def test_the_rank_that_has_a_reason_says_it(tmp_path: Path) -> None:
    said(tmp_path, 0, "one has not answered", lost=True)
    said(tmp_path, 1, "the disk is gone", lost=False)
    found = [_failure(rank, ended(2), tmp_path) for rank in range(2)]
    assert str(_error(found, 3)) == "rank 1 of 3: the disk is gone"
    killed = _failure(2, ended(-signal.SIGKILL), tmp_path)
    assert str(_error([found[0], killed], 3)).startswith("rank 2 of 3: it was ended by SIGKILL, as the system does")
    assert "exit code 7 and said nothing" in _failure(2, ended(7), tmp_path).text
    assert str(_error(found[:1], 3)) == "rank 0 of 3: one has not answered"
    assert [_failed(code) for code in (None, 0, 130, 2, -9)] == [False, False, False, True, True]


class Ending:
    """A rank's process that ends while it is looked at: its sentinel is there before its code."""

    def __init__(self, code: int, looks: int) -> None:
        self.code, self.looks = code, looks
        self.sentinel, other = os.pipe()
        os.close(other)

    @property
    def exitcode(self) -> int | None:
        self.looks -= 1
        return self.code if self.looks < 0 else None

    def is_alive(self) -> bool:
        return self.exitcode is None


@pytest.mark.parametrize("looks", range(5))
def test_a_rank_that_ends_between_two_looks_has_failed(looks: int, tmp_path: Path) -> None:
    said(tmp_path, 0, "the disk is gone", lost=False)
    ranks = [Ending(2, looks), Ending(0, 10**9)]
    with pytest.raises(RankError, match="rank 0 of 2: the disk is gone"):
        Job(Namespace(), 2, lambda *_: 0, "")._watch(ranks, tmp_path)  # type: ignore[arg-type]
    assert Job(Namespace(), 2, lambda *_: 0, "")._watch([Ending(0, looks), Ending(0, 3 - looks)], tmp_path) == 0  # type: ignore[list-item]


def test_what_all_say_is_said_once(tmp_path: Path) -> None:
    for rank in range(2):
        said(tmp_path, rank, "the file is damaged", lost=False)
    assert str(_error([_failure(rank, ended(2), tmp_path) for rank in range(2)], 2)) == "the file is damaged"


def test_what_all_come_to_say_is_nobody_s_alone(tmp_path: Path) -> None:
    """The second one a little after the first."""
    for rank in range(2):
        said(tmp_path, rank, "the file is damaged", lost=False)
    with pytest.raises(RankError, match="^the file is damaged$"):
        Job(Namespace(), 2, lambda *_: 0, "")._watch([Ending(2, 0), Ending(2, 6)], tmp_path)  # type: ignore[list-item]


class Process:
    """A rank's, which runs until it is ended, and notes how."""

    def __init__(self) -> None:
        self.sentinel, self._other = os.pipe()
        self.exitcode: int | None = None
        self.ended: list[str] = []

    def is_alive(self) -> bool:
        return self.exitcode is None

    def join(self, seconds: float | None = None) -> None:
        pass

    def _end(self, how: str, code: int) -> None:
        self.ended.append(how)
        if self.is_alive():
            self.exitcode = code
            os.close(self._other)

    def terminate(self) -> None:
        self._end("asked", 0)

    def kill(self) -> None:
        self._end("killed", -signal.SIGKILL)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    """Of the ranks that are started."""
    made = [Process(), Process()]
    spawn = importlib.import_module("torch.multiprocessing.spawn")
    monkeypatch.setattr(spawn, "start_processes", lambda *given, **more: SimpleNamespace(processes=made))
    return made


@pytest.mark.parametrize(
    ("name", "ranks", "error", "why"),
    [
        ("", 3, ArchError, "each of 3 ranks must have heads of .* use 2 or 4"),
        ("nowhere.gguf", 2, HubError, "there is no such file"),
    ],
)
def test_what_no_rank_could_do_is_refused_while_they_start(
    name: str, ranks: int, error: type[Exception], why: str, model: Path, processes: list[Process],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(Job, "_watch", lambda *_: pytest.fail("they are waited for"))
    with pytest.raises(error, match=f"^(?!rank ).*{why}"):
        Job(Namespace(model=name or str(model), pp=1), ranks, lambda *_: 0, "").run()
    assert processes[0].ended[0] == "asked" and processes[1].ended[0] == "killed"


def test_of_a_model_that_is_fetched_or_made_up_nothing_is_known(model: Path) -> None:
    for given in ({"model": None}, {"model": "hf:a/b"}, {"model": None, "synthetic": "tiny"}):
        check_plan(Namespace(**given), 3)
    check_plan(Namespace(model="nowhere.gguf"), 1)
    check_plan(Namespace(model=str(model)), 2)
    with pytest.raises(ArchError, match="3 stages"):
        check_plan(Namespace(model=str(model), pp=3), 3)
    with pytest.raises(ArchError, match="this model has none"):
        check_plan(Namespace(model=str(model), ep=True), 2)


def test_a_signal_ends_the_ranks_and_takes_their_folder(
    model: Path, processes: list[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[Path] = []

    def watch(self: Job, _: object, folder: Path) -> int:
        folders.append(folder)
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("SIGTERM ends it")

    monkeypatch.setattr(Job, "_watch", watch)
    monkeypatch.setattr(launch, "check_plan", lambda *_: None)
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN), signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as under nohup
    try:
        with pytest.raises(SystemExit) as ended:
            Job(Namespace(), 2, lambda *_: 0, "").run()
        assert ended.value.code == 143 and not folders[0].exists() and processes[1].ended
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, old[0])
        signal.signal(signal.SIGTERM, old[1])


@pytest.mark.parametrize("served", [True, False])
def test_a_server_that_is_asked_to_end_does_not_begin_again(
    served: bool, processes: list[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked while its ranks start, of which the first one then dies."""
    looks: list[Path] = []

    def watch(self: Job, ranks: Any, folder: Path) -> int:
        looks.append(folder)
        if served:
            Path(folder, SERVES).touch()
        signal.raise_signal(signal.SIGTERM)
        raise RankError("rank 0 of 2: it is gone")

    monkeypatch.setattr(Job, "_watch", watch)
    monkeypatch.setattr(launch, "check_plan", lambda *_: None)
    with socket.socket() as listening:
        job = ServerJob(Namespace(listening=listening), 2, lambda *_: 0, "")
        if served:
            with pytest.raises(RankError, match="it is gone"):
                job.run()
        else:
            assert job.run() == 143
        assert listening.fileno() == -1, "whoever connects now is refused"
    assert len(looks) == 1 and processes[0].ended[0] == "asked"


def test_a_server_that_was_asked_while_its_processes_were_made(
    processes: list[Process], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Job, "_watch", lambda *_: 0)
    job = ServerJob(Namespace(), 2, lambda *_: 0, "")
    job.asked = True
    assert job._watch(processes, tmp_path) == 0  # type: ignore[arg-type]
    assert processes[0].ended == ["asked"]


def test_what_one_rank_does_alone_is_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(model), *TEXT, "--tp", "2", "--prompt-cache", "x.bin", "-np", "2"]) == 2
    wanted = "several ranks write texts of one prompt, got --prompt-cache of several texts"
    assert wanted in capsys.readouterr().err


class Older(Ranks):
    """One of two ranks, whose other one has an older graphrt."""

    def everyones(self, value: Any) -> list[Any]:
        return [value, "0.0.1"]


def test_versions_that_differ_are_found_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "join", lambda *given, **more: Older(0, 2))
    args = SimpleNamespace(backend="cpu", model="nowhere.gguf", threads=1)
    with pytest.raises(RankError, match=r"one version of graphrt, they run .*, 0\.0\.1; install one"):
        member.as_rank(args, lambda *_: 0, "", (0, 2), print)  # type: ignore[arg-type]


def test_each_rank_has_a_device_of_its_own() -> None:
    asked = ("auto", "cpu", "triton", "triton:0")
    assert [own_backend(name, 1) for name in asked] == ["cpu", "cpu", "triton:1", "triton:0"]


def test_torchrun_s_number_counts(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["run", str(model), *TEXT, "--tp", "3"]) == 2
    assert "--tp must be the number of ranks that torchrun started, 2, got 3" in capsys.readouterr().err


def test_a_rank_that_is_killed_ends_the_others(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the middle of a text. The first rank alone has spoken, as one rank would."""
    command = [sys.executable, "-m", "graphrt", "run", str(model), *TEXT, "-n", "-1", "--tp", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as job:
        assert job.stdout is not None
        text = os.read(job.stdout.fileno(), 20)
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        ranks = [int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(ranks) == 2
        os.kill(max(ranks), signal.SIGKILL)
        out, err = job.communicate(timeout=300)
    assert job.returncode == 2
    assert err.decode().count("ended by SIGKILL") == 1 and "graphrt run: rank 1 of 2: it was ended by" in err.decode()
    assert "Traceback" not in err.decode()
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    assert main(["run", str(model), *TEXT, "-n", "8"]) == 0
    whole, found = capsys.readouterr().out.rstrip("\n").encode(), text + out
    assert found and whole.startswith(found[: len(whole)])


def test_torchrun_starts_the_ranks(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """torch's launcher as it is; the first rank reads standard input and speaks."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    given = ["graphrt", "run", str(model), *TEXT[:1], *TEXT[3:], "-n", "6", "--json"]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([*launcher, *given], input=b"hello the sea", capture_output=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr.decode()
    assert main(["run", str(model), *TEXT, "-n", "6", "--json"]) == 0
    assert json.loads(done.stdout)["tokens"] == json.loads(capsys.readouterr().out)["tokens"]


def rows(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    """What a verb prints as JSON, but for its times."""
    assert main([*argv, "--json", "--backend", "cpu", "-t", "1"]) == 0
    return json.loads(capsys.readouterr().out)


def printed(*argv: str) -> Any:
    """The same of a process of its own, whose ranks have its stdout."""
    command = [sys.executable, "-m", "graphrt", *argv, "--json", "--backend", "cpu", "-t", "1"]
    done = subprocess.run(command, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


def test_perplexity_over_ranks(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text"
    text.write_text("hello the sea " * 60)
    given = ("perplexity", str(model), "-f", str(text), "-c", "32", "--chunks", "2")
    one, two = rows(capsys, *given), printed(*given, "--tp", "2")
    assert two["tokens"] == one["tokens"] and two["ppl"] == pytest.approx(one["ppl"], rel=1e-4)


def test_bench_over_ranks(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ("bench", str(model), "-p", "8", "-n", "4", "-r", "1", "--batch", "1,2")
    one, two = rows(capsys, *given), printed(*given, "--tp", "2")
    assert (one["ranks"], two["ranks"]) == (1, 2) and one["weight_bytes"] == two["weight_bytes"]
    assert [row["test"] for row in two["results"]] == [row["test"] for row in one["results"]]
    assert 0 < two["error_nmse"] < 1e-6
    assert main([*given, "--tp", "2", "--train", "lora:4"]) == 2
    assert "several ranks measure what they do together, got --train" in capsys.readouterr().err


def test_samples_over_stages(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of one rank each: texts over pages, whose prompt is read once."""
    given = ("run", str(model), "--raw", "-p", "hello the sea", "-n", "6", "-np", "2", "--seed", "3")
    one, two = rows(capsys, *given), printed(*given, "--pp", "2")
    found, wanted = ([text["tokens"] for text in of["samples"]] for of in (two, one))
    assert found == wanted and found[0] != found[1]


def test_a_rank_s_memory(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(model), "--ranks", "2", "-c", "64", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    with GGUFFile.open(model) as file:
        for rank in range(2):
            needs = memory_needs(file, [get_backend("cpu")], SessionOptions(64), 1, Ranks(rank, 2))
            assert (needs.weights, needs.cache) == (facts["ranks"][rank]["weights"], facts["ranks"][rank]["cache"])
            weights = RankWeights(file, Reads(), played_plan(file), rank)  # type: ignore[arg-type]
            for name, info in file.tensors.items():
                weights(name, *weights.shape(info, name))
            assert needs.copied == sum(Reads.copied) and needs.taken == needs.cache + needs.copied
            Reads.copied.clear()


class Reads:
    """A backend that reads the file in place, and counts the bytes that it can't."""

    copied: ClassVar[list[int]] = []

    def wrap_host(self, data: np.ndarray) -> object:
        mapped = data.base
        while isinstance(mapped, np.ndarray) and mapped.base is not None:
            mapped = mapped.base
        if isinstance(mapped, np.ndarray) or mapped is None:  # memory of its own
            self.copied.append(data.size)
        return object()


def played_plan(file: GGUFFile) -> RankPlan:
    hp = read_file(file)
    return plan_of(architecture(hp.arch), hp, file, 2)[0]


def test_a_plan_for_ranks_that_are_not_here(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(model), "--ranks", "2", "--json", "-c", "64"]) == 0
    facts = json.loads(capsys.readouterr().out)
    first, second = facts["ranks"]
    assert (first["heads"], first["kv_heads"], first["columns"], first["meetings"]) == (2, 1, 48, 5)
    assert first["cache"] == second["cache"] == facts["needs"]["cache_bytes"] // 2 == 2 * 2 * 16 * 64 * 2
    # Two all-reduces of 64 f32 in two layers, half a row there and back; 165 of 329 logits.
    assert first["link"] == second["link"] == 4 * 256 + 165 * 4
    cut = {c["name"]: c for c in facts["cuts"]}
    assert cut["blk.*.attn_output.weight"]["parts"] == [[32, 64], [32, 64]]
    assert cut["output.weight"]["parts"] == [[64, 164], [64, 165]] and cut["token_embd.weight"]["by"] == "whole"
    assert main(["info", str(model), "--ranks", "2"]) == 0
    assert "sums over columns  96x64   48x64  48x64" in capsys.readouterr().out
