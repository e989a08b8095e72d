"""Runs a Gluon kernel's own source on numpy arrays, program after program: what it computes, not how that is laid out.

Tensors are arrays of their logical shape, and layouts are ignored: that no conversion between them moves data is
checked when the kernel is compiled (assert_trivial). Memory is one array of bytes with gaps between the tensors: what
reads or writes outside of them fails. Copies to shared memory land when they are waited for, or at once (`late`).
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.language import PaddedSharedLayout
from triton.language import PropagateNan, constexpr

from graphrt import float8
from support.ptx_arithmetic import E4M3, run_ptx

_GAP = 256
_TYPES = {
    "int8": np.int8, "int16": np.int16, "int32": np.int32, "int64": np.int64, "fp16": np.float16, "fp32": np.float32,
    "uint32": np.uint32, "int1": np.bool_, "uint8": np.uint8, "fp8e4nv": np.uint8, "bf16": ml_dtypes.bfloat16,
}  # fmt: skip


def _plain(x: Any) -> Any:
    return x.value if isinstance(x, constexpr) else x


def _numpy_type(kind: Any) -> Any:
    return _TYPES[_plain(kind).name]


class Value:
    """A tensor or a number of a kernel. unit: numpy type of what it points to, None: it is no pointer."""

    def __init__(self, data: Any, unit: Any = None) -> None:
        self.data = np.asarray(data)
        self.unit = unit
        self.type = types.SimpleNamespace(layout=None)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def to(self, kind: Any, bitcast: bool = False) -> Value:
        if self.unit is not None:  # what else it points to
            return Value(self.data, kind.unit)
        target = _numpy_type(kind)
        if bitcast:
            return Value(self.data.view(target))
        if _plain(kind).name == "fp8e4nv":
            return Value(float8.encode(self.data, E4M3))
        with np.errstate(over="ignore", invalid="ignore"):
            return Value(self.data.astype(target))

    def _with(self, other: Any, how: Callable[[Any, Any], Any]) -> Value:
        other = _plain(other)
        a, b = self.data, other.data if isinstance(other, Value) else other
        if isinstance(b, int) and a.dtype.kind == "i" and not -(1 << 31) <= b < 1 << 31:
            raise OverflowError(b)
        if not isinstance(other, Value):  # a number takes the tensor's type
            b = np.asarray(b, a.dtype if not isinstance(b, float) or a.dtype.kind == "f" else np.float32)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            return Value(how(a, b))

    def __add__(self, other: Any) -> Value:
        if self.unit is not None:
            steps = other.data if isinstance(other, Value) else other
            return Value(self.data + np.int64(np.dtype(self.unit).itemsize) * np.asarray(steps, np.int64), self.unit)
        return self._with(other, np.add)

    __radd__ = __add__

    def __mul__(self, other: Any) -> Value:
        return self._with(other, np.multiply)

    __rmul__ = __mul__

    def __sub__(self, other: Any) -> Value:
        if self.unit is not None:
            return self + -other
        return self._with(other, np.subtract)

    def __rsub__(self, other: Any) -> Value:
        return self._with(other, lambda a, b: b - a)

    def __neg__(self) -> Value:
        return Value(-self.data)

    def __truediv__(self, other: Any) -> Value:
        return self._with(other, np.divide)

    def __rtruediv__(self, other: Any) -> Value:
        return self._with(other, lambda a, b: b / a)

    def __floordiv__(self, other: Any) -> Value:
        return self._with(other, np.floor_divide)

    def __mod__(self, other: Any) -> Value:
        return self._with(other, np.mod)

    def __and__(self, other: Any) -> Value:
        return self._with(other, np.bitwise_and)

    def __or__(self, other: Any) -> Value:
        return self._with(other, np.bitwise_or)

    def __xor__(self, other: Any) -> Value:
        return self._with(other, np.bitwise_xor)

    def __rshift__(self, other: Any) -> Value:
        return self._with(other, np.right_shift)

    def __lshift__(self, other: Any) -> Value:
        return self._with(other, np.left_shift)

    def __rlshift__(self, other: Any) -> Value:
        return self._with(other, lambda a, b: np.left_shift(b, a))

    def __lt__(self, other: Any) -> Value:  # type: ignore[override]
        return self._with(other, np.less)

    def __gt__(self, other: Any) -> Value:
        return self._with(other, np.greater)

    def __le__(self, other: Any) -> Value:
        return self._with(other, np.less_equal)

    def __ge__(self, other: Any) -> Value:
        return self._with(other, np.greater_equal)

    def __eq__(self, other: Any) -> Value:  # type: ignore[override]
        return self._with(other, np.equal)

    def __ne__(self, other: Any) -> Value:  # type: ignore[override]
        return self._with(other, np.not_equal)

    def __getitem__(self, at: Any) -> Value:
        return Value(self.data[at], self.unit)

    def reshape(self, shape: Sequence[int]) -> Value:
        return Value(self.data.reshape([int(_plain(n)) for n in shape]))

    def permute(self, order: Sequence[int]) -> Value:
        return Value(self.data.transpose(order))

    def split(self) -> tuple[Value, Value]:
        return Value(self.data[..., 0]), Value(self.data[..., 1])

    def __bool__(self) -> bool:
        return bool(self.data)

    def __index__(self) -> int:
        return int(self.data)


def _value(x: Any) -> Value:
    """A number as the kernel's language has it."""
    return x if isinstance(x, Value) else Value(np.int32(x) if isinstance(x, int) else np.float32(x))


def _flat(t: torch.Tensor) -> torch.Tensor:
    """A tensor's memory from its first element to its last."""
    return t.as_strided((1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride())),), (1,))


class Memory:
    """Tensors of a launch at addresses of their own."""

    def __init__(self, args: dict[str, Any]) -> None:
        self.spans: list[tuple[int, int]] = []
        self.places: dict[int, tuple[int, torch.Tensor]] = {}
        end = _GAP
        tensors = (getattr(a, "base", a) for a in args.values())  # of a TensorDescriptor: what it describes
        for t in (_flat(a) for a in tensors if isinstance(a, torch.Tensor)):
            if t.data_ptr() not in self.places or self.places[t.data_ptr()][1].nbytes < t.nbytes:
                self.places[t.data_ptr()] = (end, t)
                self.spans.append((end, end + t.nbytes))
                end = (end + t.nbytes + 2 * _GAP) // _GAP * _GAP
        self.bytes = np.full(end, 0xFF, np.uint8)
        self.allowed = np.zeros(end, bool)
        for start, t in self.places.values():
            self.bytes[start : start + t.nbytes] = t.view(torch.uint8).numpy()
            self.allowed[start : start + t.nbytes] = True

    def pointer(self, t: torch.Tensor) -> Value:
        name = "uint8" if t.dtype == torch.float8_e4m3fn else str(t.dtype).removeprefix("torch.")
        return Value(np.int64(self.places[t.data_ptr()][0]), np.dtype(name).type)

    def _at(self, p: Value, mask: Any, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        address, mask, _ = np.broadcast_arrays(p.data, True if mask is None else mask.data, other)
        size = np.dtype(p.unit).itemsize
        at = address[mask][:, None] + np.arange(size)
        assert (at >= 0).all() and (at < len(self.allowed)).all() and self.allowed[at].all(), "outside of memory"
        assert (address[mask] % size == 0).all(), "not aligned"
        return at, mask

    def load(self, p: Value, mask: Any = None, other: Any = 0.0) -> Value:
        fill = other.data if isinstance(other, Value) else other
        at, mask = self._at(p, mask, np.zeros(()))
        found = np.broadcast_to(np.asarray(fill, p.unit), mask.shape).copy()
        found[mask] = self.bytes[at].view(p.unit)[:, 0]
        return Value(found)

    def store(self, p: Value, data: Value, mask: Any = None) -> None:
        at, mask = self._at(p, mask, data.data)
        values = np.broadcast_to(data.data, mask.shape)[mask].astype(p.unit)
        self.bytes[at] = values[:, None].view(np.uint8)

    def give_back(self) -> None:
        """Writes what the kernel stored to the tensors."""
        for start, t in self.places.values():
            data = torch.from_numpy(self.bytes[start : start + t.nbytes].copy())
            t.view(torch.uint8).copy_(data)


class Shared:
    """A tensor in shared memory."""

    def __init__(self, data: np.ndarray) -> None:
        self.data = data

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def index(self, i: Any) -> Shared:
        return Shared(self.data[int(i)])

    def reshape(self, shape: Sequence[int]) -> Shared:
        return Shared(self.data.reshape([_plain(n) for n in shape]))

    def slice(self, first: int, n: int, dim: int = 0) -> Shared:
        return Shared(self.data[(slice(None),) * dim + (slice(first, first + n),)])

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.data.transpose(order))

    def _reinterpret(self, kind: Any, shape: Sequence[int], layout: Any) -> Shared:
        """The same elements in the same order: that layouts agree on it is for tests of layouts. Rows that become wider
        do so by panels, as swizzled ones lie. As another type: the same bytes."""
        if self.data.dtype != _numpy_type(kind):
            return Shared(self.data.view(_numpy_type(kind))).reshape(shape)
        if isinstance(_plain(layout), PaddedSharedLayout):
            return Scattered(*self._from_here(), places_of(_plain(layout)))
        if math.prod(_plain(n) for n in shape) > self.data.size and len(shape) == 2:  # more of what lies behind it
            whole, first = self._from_here()
            return Shared(whole[first : first + math.prod(shape)]).reshape(shape)
        n, rows, cols = (*shape, 0, 0)[:3] if len(shape) == 3 else (0, 0, 0)
        width = self.data.shape[-1]
        if cols > width:
            return Panels(self.data.reshape(n, cols // width, rows, width).transpose(0, 2, 1, 3))
        return self.reshape(shape)

    def _from_here(self) -> tuple[np.ndarray, int]:
        """All that was allocated with this, flat, and the place of its first element."""
        whole = self.data
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        bytes_before = self.data.ctypes.data - whole.ctypes.data
        return whole.reshape(-1), bytes_before // whole.itemsize

    @property
    def dtype(self) -> Any:
        two = "bf16" if self.data.dtype == ml_dtypes.bfloat16 else "fp16"
        name = {1: "int8", 2: two, 4: "fp32", 8: "int64"}[self.data.itemsize]
        return types.SimpleNamespace(name=name, primitive_bitwidth=8 * self.data.itemsize)

    def load(self, layout: Any) -> Value:
        return Value(self.data.copy())

    def store(self, value: Value) -> None:
        self.data[...] = value.data


def places_of(layout: PaddedSharedLayout) -> np.ndarray:
    """Where a padded layout has each element of its shape, in elements."""
    count = math.prod(layout.shape)
    offset = np.arange(count)
    at = np.zeros((count, len(layout.shape)), np.int64)
    for bit, basis in enumerate(layout.offset_bases):
        at ^= np.where(offset[:, None] >> bit & 1, np.array(basis), 0)
    found = np.empty(layout.shape, np.int64)
    found[tuple(at.T)] = offset + sum(
        offset // interval * padding for interval, padding in layout.interval_padding_pairs
    )
    return found


class Scattered(Shared):
    """Elements at any places of what was allocated, from the first-th on."""

    def __init__(self, whole: np.ndarray, first: int, places: np.ndarray) -> None:
        self.whole = whole
        self.places = first + places

    @property
    def data(self) -> np.ndarray:  # type: ignore[override]
        return self.whole[self.places]

    def slice(self, first: int, n: int, dim: int = 0) -> Scattered:
        return Scattered(self.whole, 0, self.places[(slice(None),) * dim + (slice(first, first + n),)])

    def store(self, value: Value) -> None:
        self.whole[self.places] = value.data


class Panels(Shared):
    """Operands [..., rows, cols] whose columns lie in panels: data of it as [..., rows, panels, columns of a panel]."""

    def __init__(self, parts: np.ndarray, turned: bool = False) -> None:
        self.parts = parts
        self.turned = turned

    @property
    def data(self) -> np.ndarray:  # type: ignore[override]
        whole = self.parts.reshape(*self.parts.shape[:-2], -1)
        return whole.T if self.turned else whole

    def index(self, i: Any) -> Panels:
        return Panels(self.parts[int(i)])

    def permute(self, order: Sequence[int]) -> Panels:
        assert tuple(order) == (1, 0)
        return Panels(self.parts, not self.turned)

    def slice(self, first: int, n: int, dim: int = 0) -> Panels:
        assert dim == 0 and not self.turned
        return Panels(self.parts[first : first + n])

    def store(self, value: Value) -> None:
        self.parts[...] = value.data.reshape(self.parts.shape)


class Copies:
    """gluon's async_copy. late: a copy lands when it is waited for, not when it starts."""

    def __init__(self, memory: Memory, late: bool) -> None:
        self.memory = memory
        self.late = late
        self.groups: list[list[Callable[[], None]]] = []
        self.open: list[Callable[[], None]] = []

    def async_copy_global_to_shared(self, target: Shared, p: Value, mask: Any = None, cache_modifier: str = "") -> None:
        data = self.memory.load(p, mask, 0).data
        assert data.dtype == target.data.dtype

        def land() -> None:
            target.data[...] = np.broadcast_to(data, target.data.shape)

        self.open.append(land)
        if not self.late:
            land()
        else:
            target.data.view(np.uint8)[...] = 0xFF  # anything

    def commit_group(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def wait_group(self, left: int) -> None:
        while len(self.groups) > left:
            for land in self.groups.pop(0):
                if self.late:
                    land()


class Gl:
    """gluon.language, as far as kernels need it."""

    constexpr = constexpr

    def __init__(self, memory: Memory, warps: int) -> None:
        self.memory = memory
        self.warps = warps
        self.program = 0
        self.programs = 1
        for name in ("int8", "int16", "int32", "uint32", "int64", "float16", "float32"):
            bits = int(name.strip("uintfloa"))
            setattr(self, name, types.SimpleNamespace(name=name.replace("float", "fp"), primitive_bitwidth=bits))
        self.bfloat16 = types.SimpleNamespace(name="bf16", primitive_bitwidth=16)
        self.float8e4nv = types.SimpleNamespace(name="fp8e4nv", primitive_bitwidth=8)

    def pointer_type(self, kind: Any) -> types.SimpleNamespace:
        return types.SimpleNamespace(unit=_numpy_type(kind))

    def program_id(self, axis: int) -> Value:
        return Value(np.int32(self.program))

    def num_programs(self, axis: int) -> Value:
        return Value(np.int32(self.programs))

    def num_warps(self) -> int:
        return self.warps

    def static_range(self, *args: Any) -> range:
        return range(*(int(_plain(a)) for a in args))

    def static_assert(self, condition: Any) -> None:
        assert condition

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None  # layouts

    def arange(self, first: int, last: int, layout: Any = None) -> Value:
        return Value(np.arange(first, last, dtype=np.int32))

    def full(self, shape: Any, value: float, kind: Any, layout: Any = None) -> Value:
        return Value(np.full([_plain(n) for n in shape], value, _numpy_type(kind)))

    def expand_dims(self, x: Value, axis: int) -> Value:
        return Value(np.expand_dims(x.data, axis))

    def broadcast(self, a: Value, b: Value) -> tuple[Value, Value]:
        x, y = np.broadcast_arrays(a.data, b.data)
        return Value(x), Value(y)

    def reshape(self, x: Value, shape: Any) -> Value:
        return Value(x.data.reshape([_plain(n) for n in shape]))

    def permute(self, x: Value, dims: Any) -> Value:
        return Value(x.data.transpose(dims))

    def join(self, a: Value, b: Value) -> Value:
        return Value(np.stack([a.data, b.data], -1))

    def split(self, x: Value) -> tuple[Value, Value]:
        return Value(x.data[..., 0]), Value(x.data[..., 1])

    def convert_layout(self, x: Value, layout: Any, assert_trivial: bool = False) -> Value:
        return x

    def where(self, condition: Any, a: Any, b: Any) -> Value:
        unit = a.unit if isinstance(a, Value) else None
        numbers = {float: np.float32, int: np.int32}
        a, b = (v.data if isinstance(v, Value) else numbers[type(v)](v) for v in (a, b))
        return Value(np.where(condition.data if isinstance(condition, Value) else condition, a, b), unit)

    def to_tensor(self, x: Any) -> Value:
        return _value(x)

    def full_like(self, x: Value, value: float) -> Value:
        return Value(np.full_like(x.data, value))

    def cdiv(self, a: Value, b: int) -> Value:
        return (a + (b - 1)) // b

    def minimum(self, a: Any, b: Any, propagate_nan: Any = PropagateNan.NONE) -> Value:
        """Of NaN and a number the number, unless told otherwise: as min.f32 and min.NaN.f32."""
        return _value(a)._with(b, np.minimum if _plain(propagate_nan) == PropagateNan.ALL else np.fmin)

    def maximum(self, a: Any, b: Any, propagate_nan: Any = PropagateNan.NONE) -> Value:
        return _value(a)._with(b, np.maximum if _plain(propagate_nan) == PropagateNan.ALL else np.fmax)

    def exp(self, x: Value) -> Value:
        with np.errstate(over="ignore"):
            return Value(np.exp(x.data))

    def exp2(self, x: Value) -> Value:
        return Value(np.exp2(x.data))

    def log2(self, x: Value) -> Value:
        return Value(np.log2(x.data))

    def log(self, x: Value) -> Value:
        with np.errstate(divide="ignore", invalid="ignore"):
            return Value(np.log(x.data))

    def sqrt(self, x: Value) -> Value:
        with np.errstate(invalid="ignore"):
            return Value(np.sqrt(x.data))

    def abs(self, x: Value) -> Value:
        return Value(np.abs(x.data))

    def sum(self, x: Value, axis: int) -> Value:
        total = x.data.take(0, axis)
        for i in range(1, x.data.shape[axis]):
            total = total + x.data.take(i, axis)
        return Value(total)

    def max(self, x: Value, axis: int) -> Value:
        """NaN is left out, as reductions on a GPU do."""
        return Value(np.fmax.reduce(x.data, axis))

    def multiple_of(self, p: Value, n: int) -> Value:
        """Of numbers it is said of the first of those that max_contiguous names, of pointers in bytes."""
        assert p.unit is None or (p.data % n == 0).all(), "not a multiple"
        return p

    def max_contiguous(self, x: Value, n: int) -> Value:
        return x

    def load(self, p: Value, mask: Any = None, other: Any = 0.0, cache_modifier: str = "") -> Value:
        return self.memory.load(p, mask, other)

    def store(self, p: Value, data: Any, mask: Any = None) -> None:
        self.memory.store(p, data if isinstance(data, Value) else Value(data), mask)

    def thread_barrier(self) -> None:
        """A program's threads are one here."""

    def atomic_add(self, p: Value, n: int, sem: str, scope: str) -> Value:
        old = self.memory.load(p)
        self.memory.store(p, old + n)
        return old

    def allocate_shared_memory(self, kind: Any, shape: Any, layout: Any = None, value: Any = None) -> Shared:
        data = np.empty([_plain(n) for n in shape], _numpy_type(kind))
        data.view(np.uint8)[...] = 0xFF
        if value is not None:
            data[...] = value.data
        return Shared(data)

    def inline_asm_elementwise(
        self, asm: str, constraints: str, args: Sequence[Value], dtype: Any, is_pure: bool, pack: int
    ) -> Any:
        kinds = dtype if isinstance(dtype, tuple) else (dtype,)
        shape = np.broadcast_shapes(*(a.shape for a in args))
        inputs = [np.broadcast_to(a.data, shape).copy() for a in args]
        found = (_run_pairs if pack == 2 else run_ptx)(asm, [_numpy_type(k) for k in kinds], inputs)
        values = tuple(Value(f) for f in found)
        return values if isinstance(dtype, tuple) else values[0]


def _run_pairs(asm: str, kinds: Sequence[Any], inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """run_ptx where an operand is two elements, side by side along axis 1: registers of their own, or the halves of one
    where they are of 16 bits. (That a thread has such two is for the layouts' tests.)"""
    halves = [k == np.float16 for k in kinds]
    registers = [np.int32 for is_half in halves for _ in range(1 if is_half else 2)]
    sides = [x[:, i::2] for x in inputs for i in range(2)]
    found = iter(run_ptx(asm, registers, sides))
    results = []
    for kind, is_half, like in zip(kinds, halves, [inputs[0]] * len(kinds)):
        result = np.empty(like.shape, kind)
        first = next(found)
        result[:, 0::2] = (first & 0xFFFF).astype(np.uint16).view(kind) if is_half else first.view(kind)
        result[:, 1::2] = (first >> 16 & 0xFFFF).astype(np.uint16).view(kind) if is_half else next(found).view(kind)
        results.append(result)
    return results


# --- kernels ---


def rebuilt(kernel: GluonJITFunction, replaced: dict[str, Any]) -> Callable[..., Any]:
    """A kernel's function, and those that it calls, with names of their modules' globals replaced."""
    scopes: dict[int, dict[str, Any]] = {}

    def aggregate(found: type) -> type:
        """A class of values, with __init__ of constexprs, as a plain one."""
        (original,) = (c.cell_contents for c in found.__new__.__closure__ or () if isinstance(c.cell_contents, type)
                       and c.cell_contents.__name__ == found.__name__ and c.cell_contents is not found)  # fmt: skip
        members = {k: function(v) for k, v in vars(original).items() if isinstance(v, GluonJITFunction)}
        return type(found.__name__, (), {**members, "__init__": function(vars(original)["__init__"])})

    def function(found: Any) -> Callable[..., Any]:
        given = found.fn.__globals__
        if id(given) not in scopes:
            scope = scopes[id(given)] = dict(given)
            for name, value in given.items():
                if isinstance(value, GluonJITFunction):
                    scope[name] = function(value)
                elif getattr(value, "__triton_aggregate__", False):
                    scope[name] = aggregate(value)
                elif isinstance(value, constexpr):
                    scope[name] = value.value
            scope.update((name, value) for name, value in replaced.items() if name in scope or name == "range")
        made = types.FunctionType(
            found.fn.__code__, scopes[id(given)], found.fn.__name__, found.fn.__defaults__, found.fn.__closure__
        )
        made.__kwdefaults__ = found.fn.__kwdefaults__
        return made

    return function(kernel)


def product(a: Value, b: Value, acc: Value) -> Value:
    """A matrix unit's: operands of f16, of bf16 or codes of e4m3, sums in f32."""
    assert a.data.dtype == b.data.dtype and a.data.dtype in (np.float16, ml_dtypes.bfloat16, np.uint8)
    x, y = (float8.decode(v.data, E4M3) if v.data.dtype == np.uint8 else v.data.astype(np.float64) for v in (a, b))
    return Value((acc.data + np.matmul(x, y)).astype(np.float32))


def arguments_of(launch: Any, memory: Memory) -> dict[str, Any]:
    """A launch's arguments as its kernel gets them."""
    fixed = {p.name for p in launch.kernel.params if p.is_constexpr}
    return {
        name: memory.pointer(a) if isinstance(a, torch.Tensor)
        else Value(np.int32(a)) if type(a) is int and name not in fixed else a
        for name, a in launch.args.items()
    }  # fmt: skip


def _counting(*bounds: Any) -> Iterator[Value]:
    """range() whose numbers are the kernel's, as a loop that is not unrolled has them."""
    return (Value(np.int32(i)) for i in range(*(int(_plain(b)) for b in bounds)))


def emulate(launch: Any, late: bool, backwards: bool = False) -> None:
    """Runs a Launch of a Gluon kernel on tensors of the host; backwards: its last program first."""
    memory = Memory(launch.args)
    gl, copies = Gl(memory, launch.options["num_warps"]), Copies(memory, late)
    nothing = {name: lambda *args: None for name in ("gdc_wait", "gdc_launch_dependents")}
    function = rebuilt(
        launch.kernel, {"gl": gl, "async_copy": copies, "mma_v2": product, "range": _counting, **nothing}
    )
    given = arguments_of(launch, memory)
    programs = range(launch.grid[0])
    for program in reversed(programs) if backwards else programs:
        gl.program = program
        function(**given)
        assert not copies.open, "copies that nobody waits for"
    memory.give_back()
