"""What notes the times of named spans, and writes them as a trace file: the host's clock, or torch's profiler."""

from __future__ import annotations

import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from graphrt import whole_files
from graphrt.errors import BackendError

Event = Mapping[str, Any]


class Trace(ABC):
    """Notes named spans of the host's time, and on a GPU what ran meanwhile. passes: how often parts are run."""

    def __init__(self, passes: int) -> None:
        self.passes = passes

    @abstractmethod
    def span(self, name: str) -> AbstractContextManager[object]:
        """A context: the time that is spent in it is noted under this name."""

    @abstractmethod
    def __enter__(self) -> Trace: ...

    @abstractmethod
    def __exit__(self, *error: object) -> None: ...

    @abstractmethod
    def write(self, path: Path) -> list[Event]:
        """Writes the trace file and returns its events."""


class HostTrace(Trace):
    """The host's clock alone."""

    def __enter__(self) -> HostTrace:
        self.events: list[dict[str, Any]] = []
        self.start = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        return None

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        end = time.perf_counter()
        where = {"pid": os.getpid(), "tid": 1, "ts": (start - self.start) * 1e6, "dur": (end - start) * 1e6}
        self.events.append({"ph": "X", "cat": "user_annotation", "name": name, **where})

    def write(self, path: Path) -> list[Event]:
        name = {"ph": "M", "name": "process_name", "pid": os.getpid(), "tid": 1, "args": {"name": "graphrt run"}}
        with whole_files.writing(path) as out:
            out.write(json.dumps({"traceEvents": [name, *self.events], "displayTimeUnit": "ms"}).encode())
        return [*self.events]


class GpuTrace(Trace):
    """torch's profiler: the host's spans, and every kernel of the GPU."""

    def __enter__(self) -> GpuTrace:
        from torch.profiler import ProfilerActivity, profile

        self.profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
        try:
            self.profiler.start()
        except RuntimeError as error:
            raise BackendError(f"torch's profiler must start, and it says: {error}; is another one running?") from error
        return self

    def __exit__(self, *error: object) -> None:
        import torch

        torch.cuda.synchronize()
        self.profiler.stop()

    def span(self, name: str) -> AbstractContextManager[object]:
        from torch.profiler import record_function

        return record_function(name)

    def write(self, path: Path) -> list[Event]:
        try:
            self.profiler.export_chrome_trace(str(path))
            found = json.loads(path.read_text(encoding="utf-8", errors="replace"), strict=False)
        except (RuntimeError, ValueError) as error:
            raise BackendError(f"torch's profiler must write a trace, and {path} is none: {error}") from error
        return list(found["traceEvents"])
