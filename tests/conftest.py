"""Makes `pytest` work from a checkout, random numbers and hypothesis repeatable, hangs end, unwritten memory NaN."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import random
import secrets
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
for path in (ROOT, ROOT / "tests"):
    if str(path) not in sys.path:
        sys.path.insert(0, str(path))

from support import wide  # noqa: E402

from graphrt import private_files  # noqa: E402

# Before any kernel is imported: without a GPU they run in Triton's interpreter, in child processes too.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Tests have caches of their own; compiling the CPU's kernels anew in each would take minutes.
with contextlib.suppress(OSError):
    os.environ.setdefault("GRAPHRT_KERNEL_CACHE", str(private_files.user_cache() / "kernels"))

# Most of these tests' time would be the interpreter's own.
if os.environ.get("TRITON_INTERPRET") == "1" and os.environ.get("GRAPHRT_QUICK_INTERPRETER") != "0":
    import triton

    if triton.__version__.startswith("3.6."):
        from support import quick_interpreter

        quick_interpreter.use()

settings.register_profile("graphrt", deadline=None, derandomize=True)
settings.load_profile("graphrt")


_STDERR = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """Keeps stderr as it is here: pytest captures it while it loads this file and while a test runs."""
    config.stash[_STDERR] = os.dup(2)


@pytest.hookimpl(tryfirst=True)  # before -m picks by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wide.mark(items)
    config.hook.pytest_deselected(items=wide.share(items))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Ends the process when a test takes twice its time limit, and shows what each thread was doing.

    The limit itself is a signal, which Python handles between two of its own instructions: code that hangs in a native
    call never gets there. This watchdog needs neither a signal nor the GIL.
    """
    marker, given = item.get_closest_marker("timeout"), item.config.getoption("timeout")
    seconds = float(marker.args[0] if marker else given if given is not None else item.config.getini("timeout") or 0)
    if seconds > 0 and not item.config.getoption("usepdb"):
        faulthandler.dump_traceback_later(2 * seconds, exit=True, file=item.config.stash[_STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _poisoned(make: Callable[..., Any], is_float: Callable[[Any], bool]) -> Callable[..., Any]:
    @functools.wraps(make)
    def poisoned(*args: Any, **kwargs: Any) -> Any:
        array = make(*args, **kwargs)
        if is_float(array):
            array.fill(np.nan) if isinstance(array, np.ndarray) else array.fill_(float("nan"))
        return array

    return poisoned


@pytest.fixture(autouse=True)
def _same_numbers_each_time(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails in CI fails here too, whichever tests ran before it. RNG is a test module's own generator."""
    seed = zlib.crc32(request.node.nodeid.encode())
    torch.manual_seed(seed)
    # What a run without --seed draws: a test whose words depend on it passes or fails always.
    monkeypatch.setattr(secrets, "randbits", random.Random(seed).getrandbits)
    if hasattr(request.module, "RNG"):
        request.module.RNG.bit_generator.state = np.random.default_rng(seed).bit_generator.state


@pytest.fixture(autouse=True)
def _nan_in_unwritten_memory() -> Iterator[None]:
    """What `empty` gives is NaN in every test, so that reading what nobody wrote shows in the result."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("empty", "empty_like"):
            patch.setattr(torch, name, _poisoned(getattr(torch, name), torch.Tensor.is_floating_point))
            patch.setattr(np, name, _poisoned(getattr(np, name), lambda a: a.dtype.kind == "f"))
        yield


@pytest.fixture(autouse=True)
def _pages_are_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """After whatever an engine does with its pages, each is owned as often as tables and the tree say."""
    if "graphrt.models.engine_paged" not in sys.modules:
        return
    from graphrt.models.engine_paged import PagedEngine
    from graphrt.models.paging.check import check

    plain = PagedEngine.alone

    @contextlib.contextmanager
    def alone(engine: PagedEngine) -> Iterator[None]:
        with plain(engine):
            yield
            check(engine.cache.pool)

    monkeypatch.setattr(PagedEngine, "alone", alone)
