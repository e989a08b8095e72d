"""The one process that renders chat templates for this one: started on first need, kept, started anew when it ends.

A chat template is a program by whoever made the file. Limits within Python are a list of cases, and a list misses
some; what chat_child runs has limits of memory and time that the system keeps.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from graphrt.errors import ChatTemplateError

MEMORY = 200 << 20  # bytes of address space, beyond what the interpreter takes
OUT_OF_MEMORY = 70  # exit status
COMPILING = 2.0  # seconds of the processor
MARGIN = 0.5  # the same, for a rendering beyond its own limit, which speaks plainer
WALL = 120.0  # seconds that an answer may take, on a machine however busy; the child's own limits count its work
MAX_REPLY = 64 << 20  # bytes; a result of 8 million characters has at most 48 MiB in JSON
MAX_REQUEST = 32 << 20  # bytes


class ChatProcess:
    """The process and its pipes. Threads take turns; a process forked from this one starts its own."""

    def __init__(self, wall: float = WALL) -> None:
        self.wall = wall
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the process, and does not wait until it is ready. Raises ChatTemplateError."""
        with self._lock:
            self._running()

    def ask(self, request: dict[str, Any]) -> str:
        """The text of the reply. Raises ChatTemplateError with the reply's sentence, or why there is none."""
        line = _encoded(request)
        with self._lock:
            process = self._running()
            late = threading.Event()
            timer = threading.Timer(self.wall, _end_late, (process, late))
            timer.daemon = True
            timer.start()
            try:
                with contextlib.suppress(BrokenPipeError):  # the reading says why it has ended
                    _write(process, line)
                reply = _read_line(process)
                if not reply.endswith(b"\n"):
                    raise ChatTemplateError(f"the chat template was stopped: {self._end(reply, late, request)}.")
            except BaseException:
                self._stop()  # an answer that nobody read would be taken for the next one
                raise
            finally:
                timer.cancel()
                timer.join()
                if late.is_set():
                    self._stop()  # ended just after it had answered: not the one to ask next
        return _text_of(reply)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._stop()
            try:
                # a session of its own: Ctrl-C is for this process, which then ends that one
                self._process = subprocess.Popen(
                    _command(), bufsize=0, start_new_session=True,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                )  # fmt: skip
            except OSError as error:
                raise ChatTemplateError(
                    f"chat templates are rendered in a process of their own, which can't be started: {error}."
                ) from error
            atexit.register(self._stop)
        return self._process

    def _end(self, reply: bytes, late: threading.Event, request: dict[str, Any]) -> str:
        """Why there is no whole reply: a clause."""
        assert self._process is not None
        if len(reply) >= MAX_REPLY:
            return f"an answer may have {MAX_REPLY} bytes, and it had more"
        code = self._process.wait()  # it ends its output by ending
        if late.is_set():
            return f"an answer may take {self.wall:g} s, and there was none"
        if code == OUT_OF_MEMORY:
            return f"it may take {MEMORY} bytes of memory, and needs more"
        if code == -signal.SIGPROF:
            return (
                f"compiling may take {COMPILING:g} s of the processor and rendering {request['seconds'] + MARGIN:g} s, "
                f"and one of them takes more"
            )
        if code < 0:
            return f"the process that renders must not crash, and did (signal {-code}, {signal.strsignal(-code)})"
        return f"the process that renders must not end, and did (exit status {code})"

    def _stop(self) -> None:
        atexit.unregister(self._stop)
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            _close(process)
            process.wait()

    def forget(self) -> None:
        """In a process just forked: what the parent started is not this process's to use, wait for or end."""
        self._lock = threading.Lock()
        process, self._process = self._process, None
        if process is not None:
            process.returncode = 0  # else its finalizer would wait for it
            _close(process)


def available() -> bool:
    """Whether the system can limit a process, and this interpreter can start another."""
    frozen = getattr(sys, "frozen", False)  # then sys.executable is the program, not Python
    return importlib.util.find_spec("resource") is not None and bool(sys.executable) and not frozen


def _command() -> list[str]:
    """The command line of the child: Python without site packages, which knows where Jinja and our modules are."""
    path = []
    for name in ("jinja2", "markupsafe"):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise ChatTemplateError(f"chat templates need the package {name}; install it: pip install {name}")
        path.append(str(Path(spec.origin).parents[1]))
    models = Path(__file__).parent
    packages = {"graphrt": list(sys.modules["graphrt"].__path__), "graphrt.models": [str(models)]}
    setup = {
        "packages": packages, "path": list(dict.fromkeys(path)), "memory": MEMORY, "out_of_memory": OUT_OF_MEMORY,
        "compiling": COMPILING, "margin": MARGIN,
    }  # fmt: skip
    return [sys.executable, "-I", "-S", str(models / "chat_child.py"), json.dumps(setup)]


def _encoded(request: dict[str, Any]) -> bytes:
    try:
        line = json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise ChatTemplateError(
            f"messages may hold texts, numbers, lists and mappings, and these don't: {error}."
        ) from error
    if len(line) > MAX_REQUEST:
        raise ChatTemplateError(f"messages may have {MAX_REQUEST} bytes together, these have {len(line)}.")
    return line


def _write(process: subprocess.Popen[bytes], data: bytes) -> None:
    assert process.stdin is not None
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(process.stdin.fileno(), rest) :]


def _read_line(process: subprocess.Popen[bytes]) -> bytes:
    """A line of the process's output; less where that ends, or where it is MAX_REPLY or longer.

    No buffered reader: one that a thread has locked while another forks could never be closed in the new process.
    """
    assert process.stdout is not None
    line = bytearray()
    while not line.endswith(b"\n") and len(line) < MAX_REPLY:
        piece = os.read(process.stdout.fileno(), 1 << 16)
        if not piece:
            break
        line += piece
    return bytes(line)


def _text_of(reply: bytes) -> str:
    """The text of a reply. Raises ChatTemplateError with its sentence, or if it is none that chat_child makes."""
    try:
        answer = json.loads(reply.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        answer = None
    if isinstance(answer, dict) and isinstance(answer.get("text"), str):
        text: str = answer["text"]
        return text
    if isinstance(answer, dict) and isinstance(answer.get("error"), str):
        raise ChatTemplateError(answer["error"])
    raise ChatTemplateError(f"the process that renders chat templates must answer in JSON, got {reply[:40]!r}.")


def _close(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _end_late(process: subprocess.Popen[bytes], late: threading.Event) -> None:
    late.set()
    process.kill()


CHAT_PROCESS = ChatProcess()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=CHAT_PROCESS.forget)
