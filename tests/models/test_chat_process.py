"""The process that renders chat templates: what its limits end, and that it is there again after each end.

Its time is the processor's, counted by the system, so none of this depends on how busy the machine is.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import TESTS

from graphrt.errors import ChatTemplateError
from graphrt.models import chat, chat_process
from graphrt.models.chat import ChatTemplate, start_soon
from graphrt.models.chat_process import CHAT_PROCESS, ChatProcess

pytestmark = pytest.mark.skipif(not chat_process.available(), reason="this system can't limit a process")
HI = [{"role": "user", "content": "Hi"}]


def request(source: str, seconds: float = 0.1) -> dict[str, Any]:
    tokens = {"source": source, "bos_token": "", "eos_token": "", "seconds": seconds}
    return tokens | {"messages": HI, "add_generation_prompt": True}


@pytest.fixture
def process() -> Iterator[ChatProcess]:
    one = ChatProcess(wall=600.0)
    yield one
    one._stop()


@pytest.fixture
def unbounded(monkeypatch: pytest.MonkeyPatch, process: ChatProcess) -> ChatProcess:
    """One whose checks within Python are gone."""
    command = chat_process._command()
    script = str(TESTS / "support" / "unbounded_chat_child.py")
    monkeypatch.setattr(chat_process, "_command", lambda: [*command[:-2], script, command[-1]])
    return process


KEEP = "{% set ns = namespace(v=1, w=1) %}{% macro f() %}{% set ns.v = varargs %}{% endmacro %}"
TWICE = "{% set ns.v = 1 %}{% for i in range(60) %}{{ f(ns.v, ns.v) }}{% endfor %}"  # 2 ** 60 in all, 60 tuples
DEEP = "{% for i in range(99999) %}{{ f(ns.v) }}{{ f(ns.v) }}{% endfor %}"  # hash() follows them on the C stack
VARIABLES = "".join("{% if a %}{% set " + f"a{i}" + " = 1 %}{% endif %}" for i in range(3500))  # quadratic in Jinja
TIME, MEMORY = "2 s of the processor and rendering", "209715200 bytes of memory"
BEYOND = {
    "time of a comparison": (KEEP + TWICE + "{% set ns.w = ns.v %}" + TWICE + "{{ ns.v == ns.w }}", TIME),
    "time of a hash": (KEEP + TWICE + "{{ {ns.v: 1} }}", TIME),
    "time of tests": ("{% set l = range(99999) | list %}{{ l | select('in', l) | list }}", TIME),
    "time of steps": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", TIME),
    "time of a program": (VARIABLES, TIME),
    "memory in one step": ("{{ 'a' * 10**9 }}", MEMORY),
    "memory in many steps": (
        "{% set ns = namespace(s='aa') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        MEMORY,
    ),
    "memory of a program": ("{{ [" + "a," * 60_000 + "] }}", f"{MEMORY}|{TIME}"),
    "depth": (KEEP + DEEP + "{{ {ns.v: 1} }}", "must not crash, and did .signal 11, "),
}


@pytest.mark.parametrize("name", BEYOND)
def test_the_system_stops_what_python_does_not(name: str, unbounded: ChatProcess) -> None:
    source, why = BEYOND[name]
    seconds = 0.1 if why == TIME else 30.0
    with pytest.raises(ChatTemplateError, match=why):
        unbounded.ask(request(source, seconds))
    assert unbounded.ask(request("{{ messages[0].content }}")) == "Hi"


def test_a_process_that_does_not_answer_is_ended(process: ChatProcess) -> None:
    process.ask(request("a"))
    assert process._process is not None
    process.wall = 0.2
    os.kill(process._process.pid, signal.SIGSTOP)
    with pytest.raises(ChatTemplateError, match="an answer may take 0.2 s, and there was none"):
        process.ask(request("a"))
    process.wall = 600.0
    assert process.ask(request("b")) == "b"


def test_one_that_was_ended_after_its_answer_is_not_asked_again(
    process: ChatProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(threading, "Timer", LateTimer)
        assert process.ask(request("a")) == "a"
    assert process.ask(request("b")) == "b"


class LateTimer:
    """Fires while it is cancelled."""

    def __init__(self, seconds: float, function: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.daemon = False
        self.cancel = lambda: function(*args)

    def start(self) -> None:
        pass

    def join(self) -> None:
        pass


def test_a_process_that_died_is_started_anew(process: ChatProcess) -> None:
    process.ask(request("a"))
    assert process._process is not None
    process._process.kill()
    process._process.wait()
    assert process.ask(request("b")) == "b"


def test_an_interrupted_answer_is_not_taken_for_the_next(process: ChatProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    process.ask(request("a"))
    with monkeypatch.context() as patch:
        patch.setattr(chat_process, "_read_line", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            process.ask(request("first"))
    assert process.ask(request("second")) == "second"


def _interrupt(process: object) -> bytes:
    raise KeyboardInterrupt


@pytest.mark.parametrize("reply", [b"", b"[1]", b'{"text": 3}', b"{" * 99_999, b"\xff"])
def test_what_it_says_is_not_trusted(reply: bytes, process: ChatProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_process, "_read_line", lambda _: reply + b"\n")
    with pytest.raises(ChatTemplateError, match="must answer in JSON") as caught:
        process.ask(request("a"))
    assert len(str(caught.value)) < 300


def test_an_endless_answer_is_cut(process: ChatProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_process, "MAX_REPLY", 1000)
    assert process.ask(request("{{ 'a' * 900 }}")) == "a" * 900
    with pytest.raises(ChatTemplateError, match="an answer may have 1000 bytes, and it had more"):
        process.ask(request("{{ 'a' * 10**6 }}"))


def test_a_process_that_can_not_start_says_so(process: ChatProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_process, "_command", lambda: ["/nowhere/python"])
    with pytest.raises(ChatTemplateError, match="can't be started: .*No such file"):
        process.ask(request("a"))
    monkeypatch.setattr(chat_process, "_command", lambda: [sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(ChatTemplateError, match="must not end, and did .exit status 3"):
        process.ask(request("a"))


def test_threads_get_their_own_answers() -> None:
    answers: dict[int, str] = {}

    def render(i: int) -> None:
        answers[i] = ChatTemplate("{{ messages[0].content }}" + f" {i}").render(HI)

    threads = [threading.Thread(target=render, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {i: f"Hi {i}" for i in range(16)}


def test_a_forked_process_starts_its_own() -> None:
    """And leaves the parent's alone."""
    template = ChatTemplate("{{ messages[0].content }}")
    before = CHAT_PROCESS._process
    pid = os.fork()
    if pid == 0:
        try:
            forgot = CHAT_PROCESS._process is None
            os._exit(0 if forgot and template.render(HI) == "Hi" and CHAT_PROCESS._process is not before else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert template.render(HI) == "Hi" and CHAT_PROCESS._process is before


ENDS = """
from graphrt.models.chat import ChatTemplate
from graphrt.models.chat_process import CHAT_PROCESS
ChatTemplate("a")
print(CHAT_PROCESS._process.pid, flush=True)
END
"""


@pytest.mark.parametrize("end", ["", "import os; os._exit(0)"], ids=["exit", "sudden"])
def test_it_ends_with_its_parent(end: str) -> None:
    """At once, or when it reads next: standard output, which it does not have, would stay open else."""
    run = subprocess.run([sys.executable, "-c", ENDS.replace("END", end)], capture_output=True, text=True, check=True)
    pid = int(run.stdout)
    while Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        pass  # it ends, or this test does not


def test_it_starts_without_what_takes_long(process: ChatProcess) -> None:
    process.ask(request("a"))
    assert process._process is not None
    maps = Path(f"/proc/{process._process.pid}/maps")
    if not maps.exists():
        pytest.skip("this system does not show what a process has loaded")
    assert not any(name in maps.read_text() for name in ("torch", "numpy", "triton"))


def test_it_has_no_files_and_starts_no_process(process: ChatProcess) -> None:
    process.ask(request("a"))
    assert process._process is not None
    limits = Path(f"/proc/{process._process.pid}/limits")
    if not limits.exists():
        pytest.skip("this system does not show the limits of a process")
    soft_and_hard = {line[:26].strip(): line[26:].split()[:2] for line in limits.read_text().splitlines()}
    for name, value in (("open files", "3"), ("processes", "0"), ("file size", "0"), ("core file size", "0")):
        assert soft_and_hard[f"Max {name}"] == [value, value]


def test_a_file_without_a_template_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[None] = []
    monkeypatch.setattr(chat.CHAT_PROCESS, "start", lambda: started.append(None))
    start_soon({})
    start_soon({chat.KEY: 3})
    assert not started
    start_soon({chat.KEY: "a"})
    assert len(started) == 1


def test_messages_are_values() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    with pytest.raises(ChatTemplateError, match="messages may hold texts, numbers, lists and mappings"):
        template.render([{"role": "user", "content": object()}])
    with pytest.raises(ChatTemplateError, match="messages may have 33554432 bytes together"):
        template.render([{"role": "user", "content": "a" * (33 << 20)}])
    assert (
        template.render([{"role": "user", "content": "\udcff \ud83d\ude00 \n \x00"}]) == "\udcff \ud83d\ude00 \n \x00"
    )


def test_without_such_a_process_the_limits_within_python_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "available", lambda: False)
    monkeypatch.setattr(chat.CHAT_PROCESS, "ask", None)
    assert ChatTemplate("{{ messages[0].content }}").render(HI) == "Hi"
    with pytest.raises(ChatTemplateError, match="one value may have 4194304 bytes"):
        ChatTemplate("{{ 'a' * 10**9 }}").render(HI)
    with pytest.raises(ChatTemplateError, match="can't be compiled"):
        ChatTemplate("{{").render(HI)
