"""What tests of the fast CPU kernels share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest


@pytest.fixture
def many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest work is cut up and shared, as only large work is otherwise."""
    from graphrt.backends.cpu.fast import pool

    monkeypatch.setattr(pool, "CHUNK_BYTES", 1)


@pytest.fixture
def mem() -> Iterator[Any]:
    """Memory whose guard bytes must survive."""
    from support.cpu_kernels import Memory

    memory = Memory()
    yield memory
    memory.check()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)
