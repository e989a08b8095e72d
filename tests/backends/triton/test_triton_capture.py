"""A split as a CUDA graph: what happens when capturing fails, and that other threads can't make it fail."""

from __future__ import annotations

import gc
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import graphrt
from graphrt import Graph, get_backend, new_input, ops
from graphrt.backend import Group
from graphrt.backends.triton import capture, device
from graphrt.backends.triton.capture import Captured, CaptureWarning
from graphrt.backends.triton.segment import Segment


class Broken:
    """Stands for a CUDA graph whose capture the driver ends."""

    def capture_begin(self, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"

    def capture_end(self) -> None:
        raise RuntimeError("operation failed due to a previous error during capture\nmore of it")


def test_a_split_that_cannot_be_captured_runs_as_it_is_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Broken)
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    runs: list[str] = []
    program = Captured(
        [Segment(Group([new_input("f32", 1, name="a")], "a group"), [lambda: runs.append("run")])], device.INTERPRETER
    )
    program()
    with pytest.warns(CaptureWarning, match=r"1 launches .* failed \(operation failed .* during capture\); it runs"):
        program()
    runs.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program()
        program()
    assert runs == ["run", "run"] and program.graph is None


def _exe(n: int) -> tuple[Any, Any]:
    """A graph of some launches on a GPU, prepared and not yet run; its result."""
    a = new_input("f32", n, 3, name="a")
    out = ops.soft_max(ops.scale(ops.rms_norm(a, 1e-5), 3.0))
    exe = graphrt.prepare(Graph(out), get_backend("triton", exact=False))
    exe.write("a", np.random.default_rng(n).normal(size=(3, n)).astype(np.float32))
    return exe, out


def _while(work: Callable[[int], None], stop: threading.Event, failed: list[BaseException]) -> threading.Thread:
    """A thread that does some work again and again until it is told to stop."""

    def loop() -> None:
        i = 0
        try:
            torch.empty(1, device="cuda")  # gives the thread the device's context, which loading a kernel needs
            while not stop.is_set():
                work(i)
                i += 1
                time.sleep(0.002)  # for the thread that captures, which needs the interpreter too
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=loop)
    thread.start()
    return thread


def _allocate(i: int) -> None:
    torch.empty(1000 + i % 4096 * 4096, device="cuda").fill_(1.0)
    torch.empty(1000 + i % 512 * 4096, pin_memory=True)
    if i % 50 == 0:
        torch.cuda.empty_cache()


def _load(i: int) -> None:
    """A kernel that is new to the process, most of the times."""
    torch.cuda._compile_kernel(  # type: ignore[attr-defined]
        f'extern "C" __global__ void k{i}(float* x) {{ x[0] = {i}; }}', f"k{i}"
    )


def _collect(i: int) -> None:
    event = torch.cuda.Event()
    event.record()
    event.query()
    gc.collect()


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.skipif(device.interpreting() or not torch.cuda.is_available(), reason="needs a GPU")
def test_other_threads_do_not_break_a_capture() -> None:
    """1000 captures while threads allocate device and pinned memory, load kernels, collect garbage and run a graph."""
    other, other_out = _exe(257)
    other.run()
    expected_other = other.read(other_out)
    exe, out = _exe(1024)
    exe.run()
    expected = exe.read(out)
    (split,) = (s for s in exe.splits)
    stop, failed = threading.Event(), list[BaseException]()

    def run_other(i: int) -> None:
        other.run()
        if i % 10 == 0:
            np.testing.assert_array_equal(other.read(other_out), expected_other)

    threads = [_while(work, stop, failed) for work in (_allocate, _load, _collect, run_other)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", CaptureWarning)
            for _ in range(1000):
                split.run.graph = None  # captured anew by the next run
                exe.run()
                np.testing.assert_array_equal(exe.read(out), expected)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failed, failed[0]
    assert isinstance(split.run, capture.Captured) and split.run.graph is not None
