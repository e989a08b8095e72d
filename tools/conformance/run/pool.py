"""Worker processes that run cases one at a time: one that crashes or hangs is replaced and its case reported so."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from graphrt.errors import BackendError
from graphrt.op import registered_ops
from graphrt.testing import Case
from graphrt.tools.conformance.cases.sources import Source
from graphrt.tools.conformance.run.reference import know
from graphrt.tools.conformance.run.saved import save_failure
from graphrt.tools.conformance.run.step import Outcome, file_name

#: Seconds that a worker may take to import everything and list the cases.
START_LIMIT = 300.0


@dataclass(frozen=True)
class Settings:
    """What every worker is told. save: a folder for failures, or None."""

    source: Source
    backend: str
    seed: int = 0
    time_limit: float = 60.0
    save: str | None = None

    def to_json(self) -> str:
        return json.dumps(
            {"source": self.source.to_json(), "backend": self.backend, "seed": self.seed, "save": self.save}
        )


class Gone(Exception):
    """A worker did not answer. timed_out: it still ran; else it ended."""

    def __init__(self, timed_out: bool) -> None:
        super().__init__()
        self.timed_out = timed_out


def child_environment() -> dict[str, str]:
    """The environment of a process `python -m ...` that is to import from where this one does: from the working
    directory, which may be full of a stranger's files, only if that is so here."""
    here = any(place in ("", os.path.abspath("")) for place in sys.path)
    return {**os.environ, **({} if here else {"PYTHONSAFEPATH": "1"})}


def _scratch_file() -> IO[bytes]:
    """A file without a name; in memory where the system's temporary folder can't be written."""
    try:
        return tempfile.TemporaryFile()
    except OSError:
        if not hasattr(os, "memfd_create"):  # beside Linux there is no other place
            raise
        return open(os.memfd_create("graphrt-worker"), "w+b")


class Worker:
    """One process. Raises BackendError when the backend can't be had there."""

    def __init__(self, settings: Settings) -> None:
        env = {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1", **child_environment()}
        self.errors = _scratch_file()
        command = [sys.executable, "-m", "graphrt.tools.conformance.run.worker", settings.to_json()]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, stderr=self.errors, env=env)
        self.answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            first = self._answer(START_LIMIT)
        except Gone as gone:
            reason = self.last_words() if not gone.timed_out else f"it took over {START_LIMIT:.0f} s"
            self.stop()
            raise BackendError(f"a worker must start, this one did not: {reason}") from None
        if "error" in first:
            self.stop()
            raise BackendError(first["error"])
        self.n_cases = int(first["ready"])

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.answers.put(line)
        self.answers.put("")

    def _answer(self, limit: float) -> dict[str, Any]:
        try:
            line = self.answers.get(timeout=limit)
        except queue.Empty:
            raise Gone(timed_out=True) from None
        if not line:
            raise Gone(timed_out=False)
        found: dict[str, Any] = json.loads(line)
        return found

    def run(self, index: int, limit: float) -> Outcome:
        """Runs the case at that place in the list. Raises Gone."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{index}\n")
            self.process.stdin.flush()
        except (BrokenPipeError, OSError):
            raise Gone(timed_out=False) from None
        return Outcome.from_json(self._answer(limit)["outcome"])

    def last_words(self) -> str:
        """How the process ended, with the first line that it wrote about it."""
        code = self.process.wait()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"the process ended with exit code {code}"
        self.errors.seek(0)
        text = self.errors.read().decode("utf-8", "replace")
        own, _, traceback = text.partition("Fatal Python error")  # what the backend itself wrote tells more
        lines = [line.strip() for line in (own if own.strip() else traceback).splitlines() if line.strip()]
        if not own.strip():
            lines = [line for line in lines if line.startswith("File ")][:1]
        return f"{how}: {lines[-1][:300]}" if lines else how

    def stop(self) -> None:
        """Ends the process."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.errors):
            assert stream is not None
            try:
                stream.close()
            except OSError:
                continue


def sweep(
    cases: Sequence[tuple[int, Case]], settings: Settings, jobs: int, done: Callable[[Outcome], None]
) -> list[Outcome]:
    """Runs cases, given with their places in the source's list, in `jobs` processes; outcomes in the same order.

    done: called with each outcome as it comes. Raises BackendError when no worker can be started.
    """
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    for i in range(len(cases)):
        todo.put(i)
    outcomes: dict[int, Outcome] = {}
    failures: list[BaseException] = []
    lock, stopping = threading.Lock(), threading.Event()
    running: set[Worker] = set()

    def finished(i: int, outcome: Outcome) -> None:
        with lock:
            outcomes[i] = outcome
            done(outcome)

    def work() -> None:
        try:
            _work(cases, settings, todo, finished, stopping, running)
        except BaseException as error:  # told in the main thread below
            failures.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(jobs, len(cases)))]

    def stop() -> None:
        stopping.set()
        for worker in list(running):  # after Ctrl-C; a case that hangs must not outlive us
            worker.stop()

    run_threads(threads, stop)
    if failures:
        raise failures[0]
    return [outcomes[i] for i in range(len(cases))]


def run_threads(threads: Sequence[threading.Thread], stop: Callable[[], None]) -> None:
    """Starts threads and waits until all have ended, in steps, so that Ctrl-C is heard. stop: called in the end,
    however that came."""
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)
    finally:
        stop()


def _work(
    cases: Sequence[tuple[int, Case]], settings: Settings, todo: queue.SimpleQueue[int],
    finished: Callable[[int, Outcome], None], stopping: threading.Event, running: set[Worker],
) -> None:  # fmt: skip
    worker: Worker | None = None
    try:
        while not stopping.is_set():
            try:
                i = todo.get_nowait()
            except queue.Empty:
                return
            worker = worker or Worker(settings)
            running.add(worker)
            outcome = _one(worker, *cases[i], settings)
            if outcome.status == "timeout" or worker.process.poll() is not None:
                running.discard(worker)
                worker.stop()
                worker = None
            if not stopping.is_set():
                finished(i, outcome)
    finally:
        if worker is not None:
            running.discard(worker)
            worker.stop()


def _one(worker: Worker, index: int, case: Case, settings: Settings) -> Outcome:
    started = time.perf_counter()
    try:
        return worker.run(index, settings.time_limit)
    except Gone as gone:
        seconds = time.perf_counter() - started
        message = (
            f"no answer within {settings.time_limit:g} s (--time-limit)" if gone.timed_out else worker.last_words()
        )
        outcome = Outcome(str(case), case.op, "timeout" if gone.timed_out else "crashed", message, seconds=seconds)
        if settings.save is not None and case.op in registered_ops():  # the worker could not
            inputs = case.build(settings.seed)
            save_failure(Path(settings.save) / file_name(str(case)), inputs, know(inputs).expected, None, message)
        return outcome
