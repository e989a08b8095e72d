"""Tries inputs under limits: a warmed process that forks for each batch and watches the fork.

    python -m fuzz.child NAME LIMITS        requests on stdin, answers on stdout, a line of JSON each

    {"first": 0, "count": 100, "until": T}  inputs of these seeds, until the monotonic clock shows T
    {"path": "a file"}                      that input

The answer: {"done": inputs tried, "outcomes": {word: count}, "findings": [...]}. A finding ends its fork, and the rest
of the batch goes on in a new one, so that nothing that it left behind spoils what follows; then it is tried alone.
"""

from __future__ import annotations

import base64
import contextlib
import faulthandler
import gc
import json
import os
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from fuzz import Fuzzer, load
from fuzz.limits import Limits
from graphrt.errors import GraphrtError

PAGE = os.sysconf("SC_PAGE_SIZE")
POLL = 0.25  # seconds between looks at a fork that says nothing
Item = tuple[int, Callable[[], bytes]]  # a seed, -1 for a file's content, and what makes the input
Result = dict[str, Any]


def main(argv: list[str]) -> int:
    fuzzer, limits = load(argv[0]), Limits.from_text(argv[1])
    answers = os.fdopen(os.dup(1), "w")
    asked_for = os.fdopen(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what inputs print is not an answer
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # nor is a request what they read: they would wait for it for ever
    getattr(fuzzer, "warm", lambda: None)()
    gc.collect()
    gc.freeze()  # or the first collection of each fork copies every page
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in asked_for:
        asked = json.loads(line)
        if "path" in asked:
            data = Path(asked["path"]).read_bytes()
            answer = run_items(fuzzer, [(-1, lambda data=data: data)], limits)  # type: ignore[misc]
        else:
            answer = run_seeds(fuzzer, asked["first"], asked["count"], asked["until"], limits)
        print(json.dumps(answer), file=answers, flush=True)
    return 0


def run_seeds(fuzzer: Fuzzer, first: int, count: int, until: float | None, limits: Limits) -> Result:
    """Tries the seeds first, first + 1, ... and tries each finding again alone, adding "alone" and "input"."""
    items: list[Item] = [(seed, lambda seed=seed: fuzzer.make(seed)) for seed in range(first, first + count)]  # type: ignore[misc]
    answer = run_items(fuzzer, items, limits, until)
    for finding in answer["findings"]:
        again = run_items(fuzzer, [items[finding["seed"] - first]], limits)["findings"]
        finding["alone"] = bool(again)
        finding["after"] = first
        finding["input"] = base64.b64encode(fuzzer.make(finding["seed"])).decode()
    return answer


def run_items(fuzzer: Fuzzer, items: list[Item], limits: Limits, until: float | None = None) -> Result:
    outcomes: Counter[str] = Counter()
    findings: list[dict[str, Any]] = []
    done = 0
    while done < len(items):
        words, finding, finished = _run_fork(fuzzer, items[done:], limits, until)
        outcomes.update(words)
        done += len(words)
        if finding is not None:
            finding["seed"] = items[done][0]
            findings.append(finding)
            outcomes[f"FINDING {finding['kind']}"] += 1
            done += 1
        elif finished:
            break
    return {"done": done, "outcomes": dict(outcomes), "findings": findings}


def _run_fork(
    fuzzer: Fuzzer, items: list[Item], limits: Limits, until: float | None
) -> tuple[list[str], dict[str, Any] | None, bool]:
    """(the words of the inputs that ended well, what the one after them did, whether the fork came to its end)."""
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as said:
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            _be_the_fork(fuzzer, items, limits, until, writing, said)
        os.close(writing)
        try:
            text, status, hung = _watch(pid, reading, limits)
        finally:
            os.close(reading)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)  # processes that an input started and left behind
        words, finding = _read(text)
        if finding is None and (hung or status != 0):
            finding = _verdict(status, hung, limits) | {"said": _tail(said)}
        return words, finding, status == 0


def _read(text: bytes) -> tuple[list[str], dict[str, Any] | None]:
    """The fork's lines: a word for each input, or an object that says what a finding is; half a line is dropped."""
    lines = [json.loads(line) for line in text.split(b"\n")[:-1]]
    words = [line for line in lines if isinstance(line, str)]
    return words, next((line for line in lines if isinstance(line, dict)), None)


def _watch(pid: int, reading: int, limits: Limits) -> tuple[bytes, int, bool]:
    """Waits for the fork: (all that it wrote, its exit status as subprocess has it, whether it hung)."""
    text, asleep_since, cpu, hung = b"", time.monotonic(), -1, False
    while True:
        ready, _, _ = select.select([reading], [], [], POLL)
        more = os.read(reading, 1 << 16) if ready else b""
        text += more
        ended, status = os.waitpid(pid, 0 if ready and not more else os.WNOHANG)
        if ended:
            while select.select([reading], [], [], 0)[0] and (more := os.read(reading, 1 << 16)):
                text += more
            return text, os.waitstatus_to_exitcode(status), hung
        state, used = _state(pid)
        if more or used != cpu or state not in "SD":
            asleep_since, cpu = time.monotonic(), used
        if time.monotonic() - asleep_since > limits.hang:
            hung = True
            os.kill(pid, signal.SIGKILL)


def _state(pid: int) -> tuple[str, int]:
    """The process's state letter and its clock ticks of CPU so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return fields[0], int(fields[11]) + int(fields[12])


def _verdict(status: int, hung: bool, limits: Limits) -> dict[str, Any]:
    if hung:
        return {"kind": "hang", "what": f"slept for {limits.hang:g} s", "sign": "hang"}
    if status == -signal.SIGPROF:
        return {"kind": "cpu", "what": f"took more than {limits.cpu:g} s of CPU", "sign": "cpu"}
    name = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    return {"kind": "crash", "what": name, "sign": name}


def _tail(file: BinaryIO) -> str:
    """The last lines on the fork's stderr, where faulthandler writes of a crash."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 4000))
    return file.read().decode("utf-8", "backslashreplace")


# -- in the fork


def _be_the_fork(
    fuzzer: Fuzzer, items: Iterable[Item], limits: Limits, until: float | None, writing: int, said: BinaryIO
) -> NoReturn:
    """Tries the inputs one by one, a line for each, and ends the process."""
    code = 1
    try:
        os.setpgid(0, 0)
        os.dup2(said.fileno(), 2)
        faulthandler.enable(said.fileno())
        _limit(limits)
        out = os.fdopen(writing, "w")
        code = 0
        for _, make in items:
            if until is not None and time.monotonic() > until:
                break
            line = _try(fuzzer, make(), limits)
            print(json.dumps(line), file=out, flush=True)
            if isinstance(line, dict):
                break
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        os._exit(code)


def _limit(limits: Limits) -> None:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE + limits.address_space
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits.file, limits.file))
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)  # ends the process, which no code can catch


def _try(fuzzer: Fuzzer, data: bytes, limits: Limits) -> str | dict[str, Any]:
    held, peak = _held(), _peak()
    signal.setitimer(signal.ITIMER_PROF, limits.cpu)
    try:
        word = fuzzer.attempt(data)
    except GraphrtError as error:
        word = type(error).__name__
    except BaseException as error:  # the verdict of the frame: anything else that comes out is a finding
        signal.setitimer(signal.ITIMER_PROF, 0)
        return _raised(error)
    signal.setitimer(signal.ITIMER_PROF, 0)
    grown = _peak() - held
    if _peak() > peak and grown > limits.memory:
        return {"kind": "memory", "what": f"took {grown >> 20} MB (outcome: {word})", "sign": "memory", "said": ""}
    return word


def _raised(error: BaseException) -> dict[str, Any]:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "/graphrt/" in f.filename or "/models/" in f.filename or "/backends/" in f.filename]
    last = (ours or frames)[-1]
    text = "".join(traceback.format_exception(error, limit=-12))
    sign = f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}"
    return {"kind": "exception", "what": sign, "sign": sign, "said": text[-4000:]}


def _held() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
