"""The process that renders chat templates: requests come in on standard input, replies go out on standard output.

chat_process starts this file by its path, in an interpreter without site packages: it must import neither torch nor
graphrt's own __init__, so that it is ready in a tenth of a second. Its argument is JSON: {"packages": {name: folders},
"path": folders of Jinja, "memory": bytes, "compiling" and "margin": seconds of the processor, "out_of_memory": the
exit status that says so}. Requests and replies are JSON, one a line: values only, so that neither side runs what the
other sends. A request is {source, bos_token, eos_token, seconds}, to compile, and with {messages,
add_generation_prompt}, perhaps {variables}, to render; a reply {"text": ...} or {"error": a sentence}.

What a template does beyond the limits of chat_environment ends here, by the system: memory, time, files, processes.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import resource
import signal
import sys
import time
import types
from collections.abc import Callable
from typing import Any

STACK = 8 << 20  # bytes


def main() -> None:
    """Serves until standard input ends or memory has run out."""
    setup = json.loads(sys.argv[1])
    for name, folders in setup["packages"].items():
        package = sys.modules[name] = types.ModuleType(name)
        package.__path__ = folders
    sys.path += setup["path"]

    # what Jinja, and Python for it, would import later, when no file can be opened any more
    codecs.lookup("unicode_escape")
    import jinja2.debug  # noqa: F401

    from graphrt.errors import ChatTemplateError
    from graphrt.models.chat_renderer import Renderer

    time.tzset()
    _limit_process(setup["memory"])
    server = _Server(Renderer, ChatTemplateError, setup["compiling"], setup["margin"])
    for line in sys.stdin.buffer:
        try:
            reply = json.dumps(server.answer(line), ensure_ascii=False).encode("utf-8", "surrogatepass")
        except MemoryError:
            os._exit(setup["out_of_memory"])
        sys.stdout.buffer.write(reply + b"\n")
        sys.stdout.buffer.flush()


class _Server:
    """Keeps the last template compiled: most processes have one model."""

    def __init__(self, make: Callable[..., Any], error: type[Exception], compiling: float, margin: float) -> None:
        self._make, self._error, self._compiling, self._margin = make, error, compiling, margin
        self._key: tuple[Any, ...] = ()
        self.renderer: Any = None

    def answer(self, line: bytes) -> dict[str, str]:
        request = json.loads(line.decode("utf-8", "surrogatepass"))
        key = tuple(request[name] for name in ("source", "bos_token", "eos_token", "seconds"))
        try:
            if self.renderer is None or self._key != key:
                _limit_seconds(self._compiling)
                self.renderer = None
                self.renderer, self._key = self._make(*key), key
            if "messages" not in request:
                return {"text": ""}
            _limit_seconds(request["seconds"] + self._margin)
            given = request["messages"], request["add_generation_prompt"], request.get("variables")
            return {"text": self.renderer.render(*given)}
        except self._error as error:
            return {"error": str(error)}
        finally:
            _limit_seconds(0)


def _limit_seconds(seconds: float) -> None:
    """From now on, of the processor; the signal ends the process wherever it is. 0: no limit.

    RLIMIT_CPU counts whole seconds since the process began, and this one serves many templates.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _limit_process(memory: int) -> None:
    """Limits that a template can't reach by any code that it gets to run. macOS does not keep the one of memory."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the parent may ignore or block it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    _limit(resource.RLIMIT_AS, _address_space() + memory)
    _limit(resource.RLIMIT_STACK, STACK)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_NPROC, 0)
    _limit(resource.RLIMIT_NOFILE, 3)  # standard input, output and error are open


def _limit(which: int, value: int) -> None:
    # a stricter limit that was there before stays
    given = [limit for limit in resource.getrlimit(which) if limit != resource.RLIM_INFINITY]
    value = min([value, *given])
    with contextlib.suppress(ValueError, OSError):  # this system has no such limit
        resource.setrlimit(which, (value, value))


def _address_space() -> int:
    """Bytes that this process has mapped."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 64 << 20


if __name__ == "__main__":
    main()
