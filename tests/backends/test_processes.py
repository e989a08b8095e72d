"""Child processes that use what their parent made: forked ones and spawned ones."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import in_child
from support.tiny import write_model

from graphrt import Executable, get_backend, prepare
from graphrt.backend import Backend
from graphrt.backends.cpu import CpuBackend, threads
from graphrt.errors import BackendError
from graphrt.models import load

#: Seconds after which a child counts as hanging.
HANGS = 120

needs_fork = pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="this system can't fork a process"
)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """Two threads in this process, which are there before a test begins."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.ones(1 << 20).exp()
    yield
    torch.set_num_threads(before)


def asked(method: str, work: Callable[..., None], given: Any) -> Any:
    """What a child process sends."""
    context = multiprocessing.get_context(method)
    mine, its = context.Pipe(duplex=False)
    child = context.Process(target=work, args=(given, its), daemon=True)
    child.start()
    its.close()
    try:
        if not mine.poll(HANGS):
            pytest.fail(f"the child gave no answer within {HANGS} s")
        return mine.recv()
    finally:
        child.kill()
        child.join()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("processes") / "m.gguf", "llama", tokenizer="spm")


@needs_fork
@pytest.mark.parametrize("exact", [False, True])
def test_a_forked_child_runs_its_parents_programs_on_as_many_threads(exact: bool) -> None:
    exes = [prepare(in_child.graph(n), get_backend("cpu", exact=exact)) for n in (1, 40)]
    for exe in exes:
        in_child.fill(exe)
    expected = in_child.answer(exes)
    for _ in range(2):
        assert asked("fork", in_child.run_graphs, exes) == (expected, 2)
    assert in_child.answer(exes) == expected and threads.count() == torch.get_num_threads() == 2


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_generates_what_its_parent_does(method: str, model: Path) -> None:
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"this system can't {method} a process")
    loaded = load(model, "cpu")
    mine, its = multiprocessing.Pipe(duplex=False)
    in_child.generate(loaded, its)
    assert asked(method, in_child.generate, loaded if method == "fork" else str(model)) == mine.recv()


class OnDevice(CpuBackend):
    """A backend whose memory a forked process can't reach, as a GPU's."""

    survives_fork = False


def say_error(exe: Executable, out: Any) -> None:
    try:
        exe.run()
        out.send("no error")
    except BackendError as error:
        out.send(str(error))


@needs_fork
def test_a_forked_child_of_a_gpu_is_told_so() -> None:
    exe = prepare(in_child.graph(1), OnDevice(device=1))
    in_child.fill(exe)
    exe.run()
    said = asked("fork", say_error, exe)
    assert "forked" in said and "cpu:1" in said and "spawn" in said
    assert Backend.survives_fork
    exe.run()
