"""llama.cpp in a process of its own, through llama-cpp-python, asked for one measurement at a time."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from typing import TYPE_CHECKING

from graphrt.dtypes import dtype
from graphrt.errors import SessionError
from graphrt.tools.bench.workload import Test

if TYPE_CHECKING:
    from graphrt.models.engine import SessionOptions

#: What the process runs: one request a line, "KIND START N IDS", answered with seconds. The cache is filled up to START
#: when that changes, and goes back there each time: eval() drops the cells after n_tokens.
SCRIPT = """
import sys, time, llama_cpp
path, n_ctx, n_batch, threads, type_k, type_v, layers = sys.argv[1], *map(int, sys.argv[2:])
model = llama_cpp.Llama(path, n_ctx=n_ctx, n_batch=n_batch, n_ubatch=n_batch, n_threads=threads,
                        n_threads_batch=threads, type_k=type_k, type_v=type_v, n_gpu_layers=layers,
                        flash_attn=True, verbose=False)
print("ready", llama_cpp.__version__, flush=True)
filled = 0
for line in sys.stdin:
    kind, first, n, ids = line.split()
    first, n, ids = int(first), int(n), [int(i) for i in ids.split(",")]
    if filled != first:
        model.reset()
        model.eval(ids[:first])
        filled = first
    model.n_tokens = first
    start = time.perf_counter()
    if kind == "pp":
        model.eval(ids[first:first + n])
    else:
        for i in ids[first:first + n]:
            model.eval([i])
    print(time.perf_counter() - start, flush=True)
"""


class Peer:
    """Started with the model's file. gpu: all layers on the GPU, where its build has one. version: what it says of
    itself. Raises SessionError when it can't be started or ends early."""

    def __init__(self, python: str, path: str, options: SessionOptions, threads: int, gpu: bool) -> None:
        kinds = [dtype(kind) for kind in (options.type_k, options.type_v)]
        unknown = next((kind for kind in kinds if kind.id is None), None)
        if unknown is not None:
            raise SessionError(
                f"llama.cpp's caches have types that ggml has, this one is {unknown}; leave out --peer-python"
            )
        types = [str(kind.id) for kind in kinds]
        numbers = [str(options.n_ctx), str(options.n_batch), str(threads), *types, "-1" if gpu else "0"]
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        env = {**os.environ, "PYTHONSAFEPATH": "1"}  # nothing is imported from the working directory
        try:
            self.process = subprocess.Popen(
                [python, "-c", SCRIPT, path, *numbers], text=True, stdin=pipe, stdout=pipe, stderr=null, env=env
            )
        except OSError as error:
            raise SessionError(f"--peer-python must be a Python, {python!r} can't be started: {error}") from error
        self.version = self._answer().split()[-1]

    def _answer(self) -> str:
        assert self.process.stdout is not None
        line: str = self.process.stdout.readline().strip()
        if not line:
            raise SessionError("the peer ended without an answer; its Python needs llama-cpp-python")
        return line

    def seconds(self, test: Test, ids: Sequence[int]) -> float:
        """Of one run of the test on ids [test.end]."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{test.kind} {test.start} {test.n} {','.join(map(str, ids))}\n")
        self.process.stdin.flush()
        return float(self._answer())

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *exc: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(10)
