"""Runs prepared kernels: one native call for a step or for a whole program, on the threads of torch's own pool.

A program is a list of items: a kernel, its arguments, and the number of chunks its work is cut into. The team is
forked once for a program; every thread takes the next free chunk, and where one step needs another's result, waits
until all chunks so far are done. No thread waits for a thread, only for work that has begun: a worker that the system
has put aside, or that wakes up late, costs nothing but its help. (OpenMP's own barrier between the steps was tried:
on a shared machine a token took ten times as long.)

The team comes from torch's OpenMP library, not from a second one, whose spinning workers would fight with torch's.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import functools
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

from graphrt.backends.cpu import threads
from graphrt.backends.cpu.fast.ir import I32, I64, PTR, Fn, Val, new_module
from graphrt.backends.cpu.fast.jit import Kernel, host, load, load_kernels

#: Below this many bytes of memory traffic a single step runs on the calling thread: a fork costs more than it gives.
FORK_BYTES = 128 * 1024
#: Least memory traffic of a chunk. At most one chunk for each thread: more even out the threads, but each restarts the
#: hardware prefetcher, which cost a tenth of a token's time.
CHUNK_BYTES = 64 * 1024

#: Bytes of a cache line.
LINE = 64

# A program's words, in cache lines of 8: first a header, then the items.
_N_THREADS, _N_ITEMS, _DONE = 0, 8, 64  # in bytes; what all threads write has a line of its own
_ITEMS = 2 * LINE
_KERNEL, _ARGS, _N_CHUNKS, _TARGET, _FLAGS, _NEXT = 0, 8, 16, 24, 32, LINE
_ITEM = 2 * LINE
_WAIT, _CHAINED = 1, 2

#: Looks at the counter before a waiting thread offers its core to others.
_SPINS = 4000


def _openmp_paths() -> Iterator[str]:
    """Where it may lie: with torch, else where the system keeps libraries."""
    torch = importlib.util.find_spec("torch")
    if torch is not None and torch.origin is not None:
        folder = Path(torch.origin).parent / "lib"
        for pattern in ("libgomp*", "libiomp5*", "libomp*"):
            yield from map(str, sorted(folder.glob(pattern)))
    for name in ("gomp", "iomp5", "omp"):
        with contextlib.suppress(OSError):  # it may ask a compiler, which needs a temporary folder
            found = ctypes.util.find_library(name)
            if found:
                yield found


@functools.cache
def _openmp() -> Any | None:
    """The OpenMP library that torch uses (GNU's, or LLVM's and Intel's with its GNU entry points), or None."""
    for path in _openmp_paths():
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        if hasattr(library, "GOMP_parallel"):
            return library
    return None


def max_threads() -> int:
    """Threads that a parallel step uses: torch.set_num_threads and OMP_NUM_THREADS set it. 1 without OpenMP."""
    return threads.count() if _openmp() is not None else 1


# the native code


def _walk_team(f: Fn, base: Val) -> None:
    """What each thread of a team does."""
    done, n_items = base + _DONE, f.load(base + _N_ITEMS, I64)
    with f.range(0, n_items) as i:
        item = base + _ITEMS + i * _ITEM
        flags, target = f.load(item + _FLAGS, I64), f.load(item + _TARGET, I64)
        with f.if_((flags & _CHAINED).eq(0) & (f.atomic_load(done) < target)):
            n_chunks = f.load(item + _N_CHUNKS, I64)
            chunk = f.var(f.atomic_add(item + _NEXT, 1))
            with f.while_(lambda: chunk.v < n_chunks):
                _call(f, item, chunk.v, n_chunks)
                following = f.var(i + 1)

                def chained(following: Any = following) -> Val:
                    # the item past the last one is a zeroed line, so its flags can be read
                    return (f.load(base + _ITEMS + following.v * _ITEM + _FLAGS, I64) & _CHAINED).ne(0)

                with f.while_(chained):
                    _call(f, base + _ITEMS + following.v * _ITEM, f.const(0), f.const(1))
                    following.v = following.v + 1
                f.atomic_add(done, 1)
                chunk.v = f.atomic_add(item + _NEXT, 1)
            with f.if_((flags & _WAIT).ne(0)):
                _wait(f, done, target)


def _call(f: Fn, item: Val, ith: Val, nth: Val) -> None:
    f.call_kernel(f.load(item + _KERNEL, I64), f.load(item + _ARGS, I64), ith, nth)


def _wait(f: Fn, done: Val, target: Val) -> None:
    spins = f.var(f.const(0))
    with f.while_(lambda: f.atomic_load(done) < target):
        f.relax()
        spins.v = spins.v + 1
        with f.if_(spins.v > _SPINS):
            f.call_external("sched_yield")


def _run_ir(name: str, parallel: bool) -> str:
    """`name(program)`: walks a program alone, or forks a team that walks it together."""
    module = new_module(name, host())
    run = Fn(module, host(), name, [I64])
    base = Val(run, run.function.args[0])
    n_items = run.load(base + _N_ITEMS, I64)

    def alone() -> None:
        with run.range(0, n_items) as i:
            _call(run, base + _ITEMS + i * _ITEM, run.const(0), run.const(1))

    if not parallel:
        alone()
        return run.finish()
    team = Fn(module, host(), "walk_team", [I64])
    _walk_team(team, Val(team, team.function.args[0]))
    team.finish()
    n_threads = run.load(base + _N_THREADS, I64)
    with run.if_else(n_threads > 1) as (many, one):
        with many:
            run.store(base + _DONE, run.const(0))
            with run.range(0, n_items) as i:
                run.store(base + _ITEMS + i * _ITEM + _NEXT, run.const(0))
            walk = Val(run, run.b.bitcast(team.function, PTR))
            run.call_external("GOMP_parallel", walk, base, n_threads.trunc(I32), run.const(0, I32))
        with one:
            alone()
    return run.finish()


@functools.cache
def _run() -> Any:
    """The native entry point as a ctypes function of one address. It releases the GIL."""
    library = _openmp()
    if library is not None:
        # by address: the symbol that the process would find by name may belong to another OpenMP library
        llvm.add_symbol("GOMP_parallel", ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value)
    parallel = library is not None
    name = "run_team" if parallel else "run_alone"
    return ctypes.CFUNCTYPE(None, ctypes.c_int64)(load(name, lambda: _run_ir(name, parallel)))


# steps and programs


@dataclass(frozen=True)
class Entry:
    """A kernel with its packed arguments."""

    kernel: Kernel
    args: ctypes.Array[ctypes.c_int64]


class Step:
    """Prepared work: call it with nothing, as often as you like, one call at a time.

    entries: kernels in order, each needing the ones before; they are loaded at the first call, or with a program that
    has the step. bytes: about what it reads and writes; decides whether threads pay. keep: objects whose memory the
    arguments point to. Arguments stay writable: `step.entries[0].args[i]`, 8-byte words in `kernel.ints` order.
    """

    __slots__ = ("_call", "_n_threads", "bytes", "entries", "keep")

    def __init__(self, entries: Sequence[Entry], n_bytes: int, keep: Sequence[object] = ()) -> None:
        self.entries, self.bytes, self.keep = tuple(entries), n_bytes, tuple(keep)
        self._n_threads = max_threads() if n_bytes >= FORK_BYTES else 1
        self._call: Callable[[], None] | None = None

    def __call__(self) -> None:
        if self._call is None:
            load_kernels(entry.kernel for entry in self.entries)
            program = _pack([[(entry, self.bytes)] for entry in self.entries], self._n_threads)
            self.keep = (program, *self.keep)
            self._call = functools.partial(_run(), program.address)
        self._call()


class Program:
    """Many steps as one native call: the team is forked once for all of them.

    stages: steps in order; a stage may be a list of steps that do not depend on each other, which then run side by
    side (the q, k and v projections). n_threads: None for max_threads(). One call at a time.
    """

    __slots__ = ("call", "keep")

    def __init__(self, stages: Iterable[Step | Sequence[Step]], n_threads: int | None = None) -> None:
        groups: list[list[tuple[Entry, int]]] = []
        steps: list[Step] = []
        for stage in stages:
            together = [stage] if isinstance(stage, Step) else list(stage)
            steps += together
            phases = max((len(s.entries) for s in together), default=0)
            groups += [[(s.entries[i], s.bytes) for s in together if i < len(s.entries)] for i in range(phases)]
        if not groups:
            raise ValueError("a program needs at least one step")
        load_kernels(entry.kernel for group in groups for entry, _ in group)
        program = _pack(groups, n_threads or max_threads())
        self.keep = (program, *steps)
        self.call = functools.partial(_run(), program.address)

    def __call__(self) -> None:
        self.call()


class _Words:
    """8-byte words from a cache line's start on."""

    def __init__(self, n_bytes: int) -> None:
        self._raw = (ctypes.c_char * (n_bytes + LINE))()
        self.address = ctypes.addressof(self._raw) + -ctypes.addressof(self._raw) % LINE

    def __setitem__(self, offset: int, value: int) -> None:
        ctypes.c_int64.from_address(self.address + offset).value = value


def _pack(groups: Sequence[Sequence[tuple[Entry, int]]], n_threads: int) -> _Words:
    """Groups of entries, each with its memory traffic -> a program; a group needs all groups before it."""
    words = _Words(_ITEMS + (sum(map(len, groups)) + 1) * _ITEM)
    at, target = _ITEMS, 0
    head = None  # the chunk that small items join: whoever takes it goes through them all, and no one waits between
    head_opens_group = False
    for group in groups:
        for k, (entry, n_bytes) in enumerate(group):
            n_chunks = max(1, min(n_threads, n_bytes // CHUNK_BYTES))
            # into the next group only if all of this one is in the chain, else the rest might not be done
            chained = n_chunks == 1 and head is not None and (k > 0 or head_opens_group)
            target += 0 if chained else n_chunks
            words[at + _KERNEL], words[at + _ARGS] = entry.kernel.address, ctypes.addressof(entry.args)
            words[at + _N_CHUNKS], words[at + _TARGET] = n_chunks, target
            words[at + _FLAGS] = _CHAINED if chained else 0
            if not chained:
                head, head_opens_group = (at if n_chunks == 1 else None), k == 0
            if k == len(group) - 1:
                words[(at if head is None else head) + _FLAGS] = _WAIT
            at += _ITEM
    only_chain = target == 1
    words[_N_THREADS], words[_N_ITEMS] = 1 if only_chain else n_threads, (at - _ITEMS) // _ITEM
    return words
