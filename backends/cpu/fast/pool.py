"""Runs prepared kernels: one native call for a step or for a whole program, on the threads of torch's own pool.

A program is an array of 8-byte words that native code walks:
    n_threads, n_entries, then per entry: function, argument block, flags.
The team is forked once for a program; between entries that depend on each other it meets at a barrier, which costs far
less than a fork. Using torch's OpenMP library, and not a second one, keeps two sets of spinning workers from
fighting over the same cores.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from graphrt.backends.cpu.fast.ir import I64, PTR
from graphrt.backends.cpu.fast.jit import Kernel, host, load

BARRIER, SERIAL = 1, 2
_ENTRY_WORDS = 3

#: Below this many bytes of memory traffic a single step runs on the calling thread: a fork costs more than it gives.
FORK_BYTES = 192 * 1024

_NEEDED = ("GOMP_parallel", "GOMP_barrier", "omp_get_thread_num", "omp_get_num_threads", "omp_get_max_threads")


@functools.cache
def _openmp() -> Any | None:
    """The OpenMP library that torch uses (GNU's, or LLVM's and Intel's with its GNU entry points), or None."""
    paths: list[str] = []
    torch = importlib.util.find_spec("torch")
    if torch is not None and torch.origin is not None:
        folder = Path(torch.origin).parent / "lib"
        paths += [str(p) for pattern in ("libgomp*", "libiomp5*", "libomp*") for p in sorted(folder.glob(pattern))]
    found = (ctypes.util.find_library(name) for name in ("gomp", "iomp5", "omp"))
    for path in [*paths, *(f for f in found if f)]:
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        if all(hasattr(library, name) for name in _NEEDED):
            return library
    return None


def max_threads() -> int:
    """Threads that a parallel step uses: torch.set_num_threads and OMP_NUM_THREADS set it. 1 without OpenMP."""
    library = _openmp()
    return int(library.omp_get_max_threads()) if library is not None else 1


def _run_ir(name: str, parallel: bool) -> str:
    """`name(program)`: walks a program alone, or forks a team that walks it together."""
    module = ir.Module(name=name)
    module.triple = host().triple
    i32 = ir.IntType(32)
    kernel_type = ir.FunctionType(ir.VoidType(), [PTR, I64, I64])

    def walker(name: str, team: bool) -> Any:
        fn = ir.Function(module, ir.FunctionType(ir.VoidType(), [PTR]), name)
        b = ir.IRBuilder(fn.append_basic_block())

        def word(index: Any) -> Any:
            return b.load(b.gep(fn.args[0], [index], source_etype=I64), typ=I64)

        def external(symbol: str, result: Any) -> Any:
            known = module.globals.get(symbol) or ir.Function(module, ir.FunctionType(result, []), symbol)
            return b.call(known, [])

        ith, nth = I64(0), I64(1)
        if team:
            ith = b.sext(external("omp_get_thread_num", i32), I64)
            nth = b.sext(external("omp_get_num_threads", i32), I64)
        end = b.add(I64(2), b.mul(word(I64(1)), I64(_ENTRY_WORDS)))
        loop, done = b.append_basic_block("loop"), b.append_basic_block("done")
        start = b.block
        b.branch(loop)
        b.position_at_end(loop)
        at = b.phi(I64)
        at.add_incoming(I64(2), start)
        kernel = b.inttoptr(word(at), kernel_type.as_pointer())
        args = b.inttoptr(word(b.add(at, I64(1))), PTR)
        flags = word(b.add(at, I64(2)))
        if team:
            serial = b.icmp_unsigned("!=", b.and_(flags, I64(SERIAL)), I64(0))
            with b.if_else(serial) as (alone, together):
                with alone, b.if_then(b.icmp_signed("==", ith, I64(0))):
                    b.call(kernel, [args, I64(0), I64(1)])
                with together:
                    b.call(kernel, [args, ith, nth])
            with b.if_then(b.icmp_unsigned("!=", b.and_(flags, I64(BARRIER)), I64(0))):
                external("GOMP_barrier", ir.VoidType())
        else:
            b.call(kernel, [args, ith, nth])
        following = b.add(at, I64(_ENTRY_WORDS))
        at.add_incoming(following, b.block)
        b.cbranch(b.icmp_signed("<", following, end), loop, done)
        b.position_at_end(done)
        b.ret_void()
        return fn

    alone = walker("walk_alone", team=False)
    run = ir.Function(module, ir.FunctionType(ir.VoidType(), [PTR]), name)
    b = ir.IRBuilder(run.append_basic_block())
    if parallel:
        team = walker("walk_team", team=True)
        fork_type = ir.FunctionType(ir.VoidType(), [PTR, PTR, i32, i32])
        fork = ir.Function(module, fork_type, "GOMP_parallel")
        n_threads = b.load(run.args[0], typ=I64)
        with b.if_else(b.icmp_signed(">", n_threads, I64(1))) as (many, one):
            with many:
                b.call(fork, [team, run.args[0], b.trunc(n_threads, i32), i32(0)])
            with one:
                b.call(alone, [run.args[0]])
    else:
        b.call(alone, [run.args[0]])
    b.ret_void()
    return str(module)


@functools.cache
def _run() -> Any:
    """The native entry point as a ctypes function of one address. It releases the GIL."""
    library = _openmp()
    if library is not None:
        for name in _NEEDED:
            # by address: the symbol that the process would find by name may belong to another OpenMP library
            llvm.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
    parallel = library is not None
    name = "run_team" if parallel else "run_alone"
    address = load(name, lambda: _run_ir(name, parallel))
    return ctypes.CFUNCTYPE(None, ctypes.c_int64)(address)


@dataclass(frozen=True)
class Entry:
    """A kernel with its packed arguments. serial: one thread does it all, the rest go on to the next barrier."""

    kernel: Kernel
    args: ctypes.Array[ctypes.c_int64]
    serial: bool = False


class Step:
    """Prepared work: call it with nothing, as often as you like.

    entries: in order, with a barrier between two. bytes: about what it reads and writes; decides if threads pay.
    keep: objects whose memory the arguments point to. Arguments stay writable: `step.args[0][i]` are 8-byte words.
    """

    __slots__ = ("args", "bytes", "call", "entries", "keep")

    def __init__(self, entries: Sequence[Entry], n_bytes: int, keep: Sequence[object] = ()) -> None:
        self.entries, self.bytes, self.keep = tuple(entries), n_bytes, tuple(keep)
        self.args = [e.args for e in self.entries]
        program = _program([(e, True) for e in self.entries], max_threads() if n_bytes >= FORK_BYTES else 1)
        self.keep += (program,)
        self.call = functools.partial(_run(), ctypes.addressof(program))

    def __call__(self) -> None:
        self.call()


class Program:
    """Many steps as one native call: the team is forked once for all of them.

    stages: steps in order; a stage may be a list of steps that do not depend on each other, which then run without
    a barrier between them (the q, k and v projections). n_threads: None for max_threads().
    """

    __slots__ = ("call", "keep")

    def __init__(self, stages: Iterable[Step | Sequence[Step]], n_threads: int | None = None) -> None:
        groups: list[list[Entry]] = []
        steps: list[Step] = []
        for stage in stages:
            together = [stage] if isinstance(stage, Step) else list(stage)
            steps += together
            phases = max((len(s.entries) for s in together), default=0)
            groups += [[s.entries[i] for s in together if i < len(s.entries)] for i in range(phases)]
        entries: list[tuple[Entry, bool]] = []
        one_thread_so_far = True
        for i, group in enumerate(groups):
            # what one thread wrote, that thread may read without waiting for the others
            one_thread_so_far = one_thread_so_far and all(e.serial for e in group)
            skip = one_thread_so_far and i + 1 < len(groups) and all(e.serial for e in groups[i + 1])
            entries += [(e, not skip and e is group[-1]) for e in group]
            one_thread_so_far = one_thread_so_far if skip else True
        if not entries:
            raise ValueError("a program needs at least one step")
        only_serial = all(e.serial for e, _ in entries)
        program = _program(entries, 1 if only_serial else n_threads or max_threads())
        self.keep = (program, *steps)
        self.call = functools.partial(_run(), ctypes.addressof(program))

    def __call__(self) -> None:
        self.call()


def _program(entries: Sequence[tuple[Entry, bool]], n_threads: int) -> ctypes.Array[ctypes.c_int64]:
    words = [n_threads, len(entries)]
    for i, (e, barrier) in enumerate(entries):
        last = i == len(entries) - 1  # the end of the region is a barrier by itself
        flags = (BARRIER if barrier and not last else 0) | (SERIAL if e.serial else 0)
        words += [e.kernel.address, ctypes.addressof(e.args), flags]
    return (ctypes.c_int64 * len(words))(*words)
