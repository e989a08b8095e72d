"""Launches in Triton's interpreter, each of whose loads and stores must be of bytes that the launch declares.

    with watched() as watch: exe.run()      # fails at an access that is not declared; watch.seen: how many there were

`pytest -p watched_memory FILES` does it for all tests in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from triton.runtime import interpreter

from graphrt.backends.triton.launch import Launch

Spans = list[tuple[int, int]]


class Watch:
    """spans: of the launch that runs, as addresses, of what it may read and write; name: its kernel's."""

    def __init__(self) -> None:
        self.name, self.seen = "", 0
        self.spans: dict[str, Spans] = {}

    def launch(self, run: Callable[[Launch], None]) -> Callable[[Launch], None]:
        """Launch.__call__ with what it declares in force."""

        def watched_launch(step: Launch) -> None:
            found: dict[str, Spans] = {"read": [], "written": []}
            for access in step.accesses():
                t = access.memory
                last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride()))
                span = (t.data_ptr(), t.data_ptr() + (last + 1) * t.itemsize)
                found["read"] += [span] if access.reads else []
                found["written"] += [span] if access.writes else []
            self.name, self.spans = step.name, found
            try:
                run(step)
            finally:
                self.spans = {}

        return watched_launch

    def builder(self, run: Callable[..., Any], *kinds: str, mask_at: int | None = None) -> Callable[..., Any]:
        """A method of the interpreter's builder whose first argument is pointers; mask_at: which one is their mask."""

        def checked(builder: Any, ptrs: Any, *more: Any) -> Any:
            for kind in kinds if self.spans else ():
                self.check(kind, ptrs, more[mask_at].data if mask_at is not None else None)
            return run(builder, ptrs, *more)

        return checked

    def check(self, kind: str, ptrs: Any, mask: Any) -> None:
        self.seen += 1
        at = ptrs.data.reshape(-1) if mask is None else ptrs.data[np.broadcast_to(mask, ptrs.data.shape).astype(bool)]
        if not at.size:
            return
        size = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        low, high, spans = int(at.min()), int(at.max()) + size, self.spans[kind]
        if any(start <= low and high <= stop for start, stop in spans):
            return
        inside = np.zeros(at.shape, bool)
        for start, stop in spans:
            inside |= (at >= start) & (at + np.uint64(size) <= stop)
        assert inside.all(), f"{self.name}: {int((~inside).sum())} elements {kind} of memory that it doesn't declare so"


@contextmanager
def watched() -> Iterator[Watch]:
    watch, builder = Watch(), interpreter.InterpreterBuilder
    wrapped = {
        "create_masked_load": watch.builder(builder.create_masked_load, "read", mask_at=0),
        "create_masked_store": watch.builder(builder.create_masked_store, "written", mask_at=1),
        "create_atomic_cas": watch.builder(builder.create_atomic_cas, "read", "written"),
    }
    rmw = builder.create_atomic_rmw

    def checked_rmw(own: Any, op: Any, ptr: Any, val: Any, mask: Any, *more: Any) -> Any:
        for kind in ("read", "written") if watch.spans else ():
            watch.check(kind, ptr, mask.data)
        return rmw(own, op, ptr, val, mask, *more)

    run = watch.launch(Launch.__call__)
    with patch.multiple(builder, **wrapped, create_atomic_rmw=checked_rmw), patch.object(Launch, "__call__", run):
        yield watch


@pytest.fixture(autouse=True)
def _all_launches_are_watched() -> Iterator[None]:
    with watched():
        yield
