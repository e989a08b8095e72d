"""gluon_emulator.py for kernels with warps of their own for copies (Hopper): partitions, mbarriers, TMA and wgmma.

One partition runs at a time. At each of its copies, products, waits and arrivals a seed chooses who goes on and what
of all that is under way lands, so that a seed always gives one order of things and other seeds other orders. Shared
memory holds 0xFF from a copy's start until it lands, and a product reads its second operand when it is waited for or
at a point before: a buffer used too early or given back too early makes a wrong result. Waits that can't end fail.
"""

from __future__ import annotations

import random
import sys
import threading
import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from triton.experimental.gluon._runtime import GluonJITFunction

from support.gluon_emulator import Gl, Memory, Shared, Value, arguments_of, product, rebuilt


class Stopped(BaseException):
    """Ends a partition when another one has failed."""


class Late:
    """What was started and is done later, once."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self.landed = False

    def land(self) -> None:
        if not self.landed:
            self.landed = True
            self._act()


class Partition:
    """Warps that run one function. ready: whether they can go on; what: what they wait for, in words."""

    def __init__(self, name: str, warps: int, may_read: bool, weight: int = 1) -> None:
        self.name = name
        self.warps = warps
        self.may_read = may_read  # what the launch before makes
        self.weight = weight
        self.turn = threading.Semaphore(0)
        self.ready: Callable[[], bool] = lambda: True
        self.what: Callable[[], str] = str
        self.copies: list[Late] = []
        self.products: list[Sums] = []

    def check_end(self) -> None:
        """Nothing may be under way where a partition ends."""
        assert not self.products, "products that nobody waits for"
        assert all(copy.landed for copy in self.copies), "copies that nobody waits for"


class Schedule:
    """Who runs, and what is under way, in one program."""

    def __init__(self, seed: int, warps: int, pdl: bool) -> None:
        self.random = random.Random(seed)
        self.haste = self.random.choice((0.0, 0.1, 0.5))
        self.running = Partition("0", warps, not pdl)
        self.partitions = [self.running]
        self.threads: list[threading.Thread] = []
        self.late: list[Late] = []
        self.failure: BaseException | None = None

    def later(self, act: Callable[[], None]) -> Late:
        """Something that lands at a point of the seed's choice."""
        found = Late(act)
        self.late.append(found)
        return found

    def pause(self, ready: Callable[[], bool] = lambda: True, what: Callable[[], str] = str) -> None:
        """Lets others run, at least until this partition is ready."""
        me = self.running
        me.ready, me.what = ready, what
        self._choose()
        if self.running is not me:
            self.running.turn.release()
            me.turn.acquire()
        if self.failure is not None:
            raise Stopped

    def _choose(self) -> None:
        """Chooses who runs. What is under way lands by chance, and for certain when none can go on."""
        for late in self.late:
            if self.random.random() < self.haste:
                late.land()
        while True:
            self.late = [late for late in self.late if not late.landed]
            able = [p for p in self.partitions if p.ready()]
            if able:
                break
            if not self.late:
                raise AssertionError("deadlock: " + "; ".join(f"{p.name} {p.what()}" for p in self.partitions))
            self.random.choice(self.late).land()
        self.running = self.random.choices(able, [p.weight for p in able])[0]

    def specialize(self, runs: Sequence[Callable[[], None]], warps: Sequence[int]) -> None:
        """Runs the first function here and the others in partitions of their own, until all have ended."""
        me = self.running
        me.weight = self.random.choice((1, 20))
        workers = []
        for i, (run, count) in enumerate(zip(runs[1:], warps, strict=True)):
            worker = Partition(f"{me.name}.{i + 1}", count, me.may_read, self.random.choice((1, 20)))
            workers.append(worker)
            self.partitions.append(worker)
            self.threads.append(threading.Thread(target=self._work, args=(worker, run), daemon=True))
            self.threads[-1].start()
        self.pause()
        runs[0]()
        self.pause(lambda: not any(w in self.partitions for w in workers), lambda: "waits for the end of the others")

    def _work(self, me: Partition, run: Callable[[], None]) -> None:
        me.turn.acquire()
        try:
            if self.failure is None:
                run()
                me.check_end()
                self.partitions.remove(me)
                self._choose()
                self.running.turn.release()
        except Stopped:
            pass
        except BaseException as e:
            self._stop(e)

    def _stop(self, failure: BaseException) -> None:
        self.failure = failure
        for p in self.partitions:
            p.turn.release()

    def run(self, program: Callable[[], None]) -> None:
        """Runs a program. Raises what failed in any of its partitions."""
        try:
            program()
            self.running.check_end()
            assert all(late.landed for late in self.late), "copies that nobody waits for"
        except Stopped:
            pass
        except BaseException as e:
            self._stop(e)
        for thread in self.threads:
            thread.join()
        if self.failure is not None:
            raise self.failure


class Barrier:
    """An mbarrier. phases: completed ones; left: arrivals that the present one lacks; due: bytes that it lacks."""

    def __init__(self, count: int) -> None:
        self.count = self.left = count
        self.due = 0
        self.phases = 0

    def __str__(self) -> str:
        return f"in phase {self.phases}, which lacks {self.left} of {self.count} arrivals and {self.due} bytes"

    def arrive(self, count: int, nbytes: int = 0) -> None:
        """Arrivals, which may announce bytes."""
        assert 0 < count <= self.left, "more arrivals than a barrier was made for"
        self.due += nbytes
        self.left -= count
        self._complete()

    def deliver(self, nbytes: int) -> None:
        self.due -= nbytes
        self._complete()

    def _complete(self) -> None:
        if self.left == 0 and self.due == 0:
            self.phases += 1
            self.left = self.count

    def passes(self, parity: int) -> bool:
        """Whether the last completed phase has that parity. The one before the first has 1."""
        return (self.phases - 1) & 1 == parity


class Barriers:
    """gluon's mbarrier."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.found: dict[int, tuple[Barrier, Shared]] = {}  # with its memory, which thus isn't used again

    def MBarrierLayout(self) -> None:
        """Layouts are ignored."""

    def init(self, place: Shared, count: int) -> None:
        self.found[place.data.ctypes.data] = Barrier(count), place

    def of(self, place: Shared) -> Barrier:
        assert place.data.ctypes.data in self.found, "not a barrier"
        return self.found[place.data.ctypes.data][0]

    def wait(self, place: Shared, phase: Any, pred: Any = True, deps: Any = ()) -> None:
        parity, barrier, frame = int(phase), self.of(place), sys._getframe(1)
        where = f"waits at {frame.f_code.co_name}:{frame.f_lineno} for parity {parity}"
        if pred:
            self.schedule.pause(lambda: barrier.passes(parity), lambda: f"{where} {barrier}")

    def arrive(self, place: Shared, *, count: int = 1, pred: Any = True) -> None:
        if pred:
            self.of(place).arrive(count)
            self.schedule.pause()

    def expect(self, place: Shared, nbytes: int, pred: Any = True) -> None:
        """Arrives, too."""
        if pred:
            self.of(place).arrive(1, nbytes)
            self.schedule.pause()


def _clear(target: Shared) -> None:
    """What a copy does when it starts: nobody may rely on the bytes from now on."""
    target.data[...] = np.full(1, -1, f"i{target.data.itemsize}").view(target.data.dtype)


class LateCopies:
    """gluon's async_copy and tma."""

    def __init__(self, schedule: Schedule, memory: Memory, barriers: Barriers) -> None:
        self.schedule = schedule
        self.memory = memory
        self.barriers = barriers

    def async_copy_global_to_shared(self, *args: Any) -> None:
        if isinstance(args[0], Descriptor):
            self._tensor(*args)
        else:
            self._elements(*args)
        self.schedule.pause()

    def _elements(self, target: Shared, p: Value, mask: Any = None) -> None:
        data = self.memory.load(p, mask, 0).data
        assert data.dtype == target.data.dtype
        _clear(target)

        def land() -> None:
            target.data[...] = np.broadcast_to(data, target.data.shape)

        self.schedule.running.copies.append(self.schedule.later(land))

    def _tensor(self, desc: Descriptor, place: Sequence[Any], barrier: Shared, target: Shared) -> None:
        """What is outside of the tensor becomes 0."""
        assert self.schedule.running.may_read, "what the launch before makes is read too early"
        assert list(target.shape) == desc.block_shape and target.data.dtype == desc.data.dtype
        found, first = self.barriers.of(barrier), [int(i) for i in place]
        assert min(first) >= 0
        _clear(target)

        def land() -> None:
            part = desc.data[tuple(slice(i, i + n) for i, n in zip(first, desc.block_shape))]
            target.data[...] = np.pad(part, [(0, n - have) for n, have in zip(desc.block_shape, part.shape)])
            found.deliver(desc.block_type.nbytes)

        self.schedule.later(land)

    def add(self, desc: Descriptor, place: Sequence[Any], source: Shared) -> None:
        """TMA's addition of f32: reads shared memory as late as it may."""
        first = [int(i) for i in place]
        assert list(source.shape) == desc.block_shape and desc.data.dtype == np.float32 and min(first) >= 0

        def land() -> None:
            part = desc.data[tuple(slice(i, i + n) for i, n in zip(first, desc.block_shape))]
            part += source.data[tuple(slice(n) for n in part.shape)]

        self.schedule.running.copies.append(self.schedule.later(land))
        self.schedule.pause()

    def async_copy_shared_to_global(self, desc: Descriptor, place: Sequence[Any], source: Shared) -> None:
        """TMA's store: reads shared memory as late as it may."""
        first = [int(i) for i in place]
        assert list(source.shape) == desc.block_shape and min(first) >= 0

        def land() -> None:
            part = desc.data[tuple(slice(i, i + n) for i, n in zip(first, desc.block_shape))]
            part[...] = source.data[tuple(slice(n) for n in part.shape)]

        self.schedule.running.copies.append(self.schedule.later(land))
        self.schedule.pause()

    def store_wait(self, left: int) -> None:
        """Waits for all of these."""
        self.wait_group(left)

    def mbarrier_arrive(self, place: Shared, increment_count: bool = True) -> None:
        """Each thread arrives when its copies have landed. increment_count: the barrier does not count on them."""
        me, barrier = self.schedule.running, self.barriers.of(place)
        before, threads = list(me.copies), 32 * me.warps
        barrier.left += threads if increment_count else 0

        def land() -> None:
            for copy in before:
                copy.land()
            barrier.arrive(threads)

        me.copies.append(self.schedule.later(land))
        self.schedule.pause()

    def commit_group(self) -> None:
        """See wait_group."""

    def wait_group(self, left: int) -> None:
        """Waits for all copies, also those that no commit_group() put into a group (the instruction does not)."""
        assert left == 0
        while self.schedule.running.copies:
            self.schedule.running.copies.pop(0).land()


class Descriptor:
    """A TensorDescriptor."""

    def __init__(self, desc: Any, memory: Memory) -> None:
        pointer = memory.pointer(desc.base)
        start, kind = int(pointer.data), pointer.unit
        strides = [n * np.dtype(kind).itemsize for n in desc.strides]
        assert desc.strides[-1] == 1 and all(n % 16 == 0 for n in strides[:-1])
        self.data = np.lib.stride_tricks.as_strided(
            memory.bytes[start : start + np.dtype(kind).itemsize].view(kind), desc.shape, strides
        )
        self.layout = None
        name = "fp8e4nv" if desc.base.dtype == torch.float8_e4m3fn else np.dtype(kind).name
        name = name.replace("bfloat", "bf").replace("float", "fp")
        self.dtype = types.SimpleNamespace(name=name, primitive_bitwidth=8 * np.dtype(kind).itemsize)
        self.block_shape = list(desc.block_shape)
        self.block_type = types.SimpleNamespace(nbytes=int(np.prod(desc.block_shape)) * np.dtype(kind).itemsize)


class Sums:
    """Sums of a wgmma: `value` is None until they are waited for."""

    def __init__(self, value: Value | None, finish: Callable[[], Value] | None = None) -> None:
        self.value = value
        self.finish = finish


class Products:
    """gluon's warpgroup_mma. The first operand is in registers or in shared memory."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule

    def init(self, sums: Value) -> Sums:
        return Sums(sums)

    def start(self, a: Value | Shared, b: Shared, acc: Sums | Value, is_async: bool, use_acc: bool = True) -> Sums:
        assert is_async and a.shape[0] == 64 and self.schedule.running.warps == 4
        found: list[Value] = []
        read = self.schedule.later(lambda: found.extend((Value(a.data.copy()), Value(b.data.copy()))))

        def finish() -> Value:
            read.land()
            before = acc.value if isinstance(acc, Sums) else acc
            assert before is not None  # products end in order
            return product(*found, before if use_acc else before * 0.0)

        sums = Sums(None, finish)
        self.schedule.running.products.append(sums)
        self.schedule.pause()
        return sums

    def wait(self, left: int, deps: Sequence[Any]) -> Any:
        """deps: sums, and first operands, whose registers are in use until then."""
        self.schedule.pause()
        products = self.schedule.running.products
        while len(products) > left:
            done = products.pop(0)
            assert done.finish is not None
            done.value = done.finish()
        values = tuple(dep.value if isinstance(dep, Sums) else dep for dep in deps)
        assert all(value is not None for value in values), "sums that were not waited for"
        return values[0] if len(values) == 1 else values


class HopperGl(Gl):
    """gluon.language with warp_specialize. Memory is read and written after gdc_wait only."""

    def __init__(self, memory: Memory, warps: int) -> None:
        super().__init__(memory, warps)
        self.schedule: Schedule
        self.constexpr = lambda x: x

    def num_warps(self) -> int:
        return self.schedule.running.warps

    def warp_specialize(self, parts: Sequence[tuple[Any, Any]], warps: Sequence[int], registers: Sequence[int]) -> None:
        assert len(parts) == len(warps) + 1 == len(registers) + 1
        assert all(8 <= n <= 256 and n % 8 == 0 for n in registers)
        self.schedule.specialize([partial(run, *args) for run, args in parts], warps)

    def _check(self) -> None:
        assert self.schedule.running.may_read, "what the launch before makes is used too early"

    def load(self, *args: Any, **kwargs: Any) -> Value:
        self._check()
        return super().load(*args, **kwargs)

    def store(self, *args: Any, **kwargs: Any) -> None:
        self._check()
        super().store(*args, **kwargs)

    def atomic_add(self, p: Value, n: int, sem: str, scope: str) -> Value:
        """Others may go on before."""
        self._check()
        self.schedule.pause()
        return super().atomic_add(p, n, sem, scope)


def _may_read(schedule: Schedule) -> None:
    """gdc_wait."""
    schedule.running.may_read = True


def _functions_of_spec(launch: Any, replaced: dict[str, Any]) -> dict[str, Any]:
    """The Spec of a launch whose functions, if it has any, run here."""
    spec = launch.args.get("spec")
    found = {name: x for name, x in vars(spec or object).items() if isinstance(x, GluonJITFunction)}
    return {"spec": replace(spec, **{name: rebuilt(x, replaced) for name, x in found.items()})} if found else {}


def emulate(launch: Any, seed: int, others: dict[str, Any] | None = None, together: bool = False) -> None:
    """Runs a Launch on tensors of the host, in an order of the seed's choice: its programs one after the other, or
    together. others: functions in place of those of these names, as of
    code in PTX."""
    memory = Memory(launch.args)
    warps, pdl = launch.options["num_warps"], launch.options.get("launch_pdl", False)
    given = arguments_of(launch, memory)
    given |= {k: Descriptor(a, memory) for k, a in launch.args.items() if hasattr(a, "block_shape")}
    programs = list(range(launch.grid[0]))
    random.Random(seed).shuffle(programs)

    def program_of(i: int, schedule: Schedule) -> Callable[[], None]:
        gl, barriers = HopperGl(memory, warps), Barriers(schedule)
        gl.schedule, gl.program, gl.programs = schedule, i, len(programs)
        copies, products = LateCopies(schedule, memory, barriers), Products(schedule)
        replaced = {
            "gl": gl, "async_copy": copies, "tma": copies, "mbarrier": barriers, "warpgroup_mma": products.start,
            "warpgroup_mma_init": products.init, "warpgroup_mma_wait": products.wait,
            "gdc_wait": partial(_may_read, schedule), "gdc_launch_dependents": lambda: None,
            "fence_async_shared": lambda: None,
            "async_add_shared_to_global": copies.add, **(others or {}),
        }  # fmt: skip
        return partial(rebuilt(launch.kernel, replaced), **given | _functions_of_spec(launch, replaced))

    if together:
        schedule = Schedule(seed, warps, pdl)
        runs = [program_of(i, schedule) for i in programs]
        schedule.run(lambda: schedule.specialize(runs, [warps] * (len(runs) - 1)))
    else:
        for i in programs:
            schedule = Schedule(seed * len(programs) + i, warps, pdl)
            schedule.run(program_of(i, schedule))
    memory.give_back()
