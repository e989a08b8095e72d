"""A small language for writing vector kernels: Python expressions that emit LLVM IR.

Kernels need what compilers do not find by themselves in 4-bit block formats: explicit 16-wide vectors. Everything is
generic LLVM (`<16 x float>`): the same code becomes AVX-512, AVX2 or NEON. The one exception is `lookup16`.

    with f.range(0, n, 16) as i:
        acc.v = f.fma(f.load(x + i * 4, F32, 16), f.load(y + i * 4, F32, 16), acc.v)

Addresses are plain i64 values in bytes. Loads and stores assume no alignment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from graphrt.backends.cpu.fast.constants import vector

F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
PTR = ir.PointerType()

KERNEL_PARAMS = (PTR, I64, I64)

#: Lanes of a full vector. AVX2 and NEON split one into 2 or 4 registers, which only lengthens the unrolled code.
LANES = 16


def _scalar(t: Any) -> Any:
    return t.element if isinstance(t, ir.VectorType) else t


def _is_float(t: Any) -> bool:
    return isinstance(_scalar(t), (ir.HalfType, ir.FloatType, ir.DoubleType))


def _like(t: Any, scalar: Any) -> Any:
    """The type with the lanes of `t` and the element `scalar`."""
    return ir.VectorType(scalar, t.count) if isinstance(t, ir.VectorType) else scalar


def pieces(n: int) -> list[tuple[int, int]]:
    """(start, lanes) that cover n values: full vectors, then powers of two."""
    out, at, lanes = [], 0, LANES
    while at < n:
        while lanes > n - at:
            lanes //= 2
        out.append((at, lanes))
        at += lanes
    return out


class Val:
    """An SSA value with operators. Integers: `<` is signed, `>>` shifts in zeros, `//` and `%` are unsigned."""

    __slots__ = ("f", "v")

    def __init__(self, f: Fn, v: Any) -> None:
        self.f, self.v = f, v

    @property
    def t(self) -> Any:
        return self.v.type

    @property
    def lanes(self) -> int:
        return int(self.t.count) if isinstance(self.t, ir.VectorType) else 0

    def _operand(self, other: Any) -> Any:
        if not isinstance(other, Val):
            return self.f.const(other, self.t).v
        return self.f.splat(other, self.lanes).v if self.lanes and not other.lanes else other.v

    def _op(self, other: Any, int_op: str, float_op: str | None = None, swap: bool = False) -> Val:
        a, b = self, other
        if isinstance(other, Val) and other.lanes and not self.lanes:
            a = self.f.splat(self, other.lanes)
        x, y = a.v, a._operand(b)
        name = float_op if _is_float(self.t) else int_op
        assert name is not None, f"no float form of {int_op}"
        return Val(self.f, getattr(self.f.b, name)(*((y, x) if swap else (x, y))))

    # fmt: off
    def __add__(self, o: Any) -> Val: return self._op(o, "add", "fadd")
    def __sub__(self, o: Any) -> Val: return self._op(o, "sub", "fsub")
    def __rsub__(self, o: Any) -> Val: return self._op(o, "sub", "fsub", swap=True)
    def __mul__(self, o: Any) -> Val: return self._op(o, "mul", "fmul")
    def __truediv__(self, o: Any) -> Val: return self._op(o, "sdiv", "fdiv")
    def __rtruediv__(self, o: Any) -> Val: return self._op(o, "sdiv", "fdiv", swap=True)
    def __floordiv__(self, o: Any) -> Val: return self._op(o, "udiv")
    def __mod__(self, o: Any) -> Val: return self._op(o, "urem")
    def __and__(self, o: Any) -> Val: return self._op(o, "and_")
    def __or__(self, o: Any) -> Val: return self._op(o, "or_")
    def __xor__(self, o: Any) -> Val: return self._op(o, "xor")
    def __lshift__(self, o: Any) -> Val: return self._op(o, "shl")
    def __rshift__(self, o: Any) -> Val: return self._op(o, "lshr")
    def __neg__(self) -> Val: return Val(self.f, self.f.b.fneg(self.v)) if _is_float(self.t) else 0 - self
    __radd__, __rmul__ = __add__, __mul__
    # fmt: on

    def _cmp(self, op: str, o: Any) -> Val:
        y = self._operand(o)
        b = self.f.b
        if _is_float(self.t):
            return Val(self.f, b.fcmp_unordered(op, self.v, y) if op == "!=" else b.fcmp_ordered(op, self.v, y))
        return Val(self.f, b.icmp_signed(op, self.v, y))

    def __lt__(self, o: Any) -> Val:
        return self._cmp("<", o)

    def __le__(self, o: Any) -> Val:
        return self._cmp("<=", o)

    def __gt__(self, o: Any) -> Val:
        return self._cmp(">", o)

    def __ge__(self, o: Any) -> Val:
        return self._cmp(">=", o)

    def eq(self, o: Any) -> Val:
        return self._cmp("==", o)

    def ne(self, o: Any) -> Val:
        return self._cmp("!=", o)

    def __getitem__(self, lane: int) -> Val:
        return Val(self.f, self.f.b.extract_element(self.v, I32(lane)))

    def bits(self, t: Any, n: int = 0) -> Val:
        """The same bits as another type of the same total size; n: lanes, 0 for a scalar."""
        return Val(self.f, self.f.b.bitcast(self.v, ir.VectorType(t, n) if n else t))

    def as_bits(self, t: Any) -> Val:
        """Lane by lane the same bits as another type of the same width."""
        return Val(self.f, self.f.b.bitcast(self.v, _like(self.t, t)))

    def zext(self, t: Any) -> Val:
        return Val(self.f, self.f.b.zext(self.v, _like(self.t, t)))

    def sext(self, t: Any) -> Val:
        return Val(self.f, self.f.b.sext(self.v, _like(self.t, t)))

    def trunc(self, t: Any) -> Val:
        return Val(self.f, self.f.b.trunc(self.v, _like(self.t, t)))

    def shift_sign(self, n: int) -> Val:
        """To the right by n bits, copies of the sign coming in."""
        return Val(self.f, self.f.b.ashr(self.v, self._operand(n)))

    def to(self, t: Any) -> Val:
        """Converts value to a float type: from signed integers, or between float widths (round to nearest even)."""
        target, b = _like(self.t, t), self.f.b
        if self.t == target:
            return self
        if not _is_float(self.t):
            return Val(self.f, b.sitofp(self.v, target))
        widths = {F16: 16, F32: 32, F64: 64}
        grow = widths[t] > widths[_scalar(self.t)]
        return Val(self.f, b.fpext(self.v, target) if grow else b.fptrunc(self.v, target))

    def to_int(self, t: Any) -> Val:
        """Truncates toward zero; the value must be in range."""
        return Val(self.f, self.f.b.fptosi(self.v, _like(self.t, t)))

    def shuffle(self, lanes: Sequence[int], other: Val | None = None) -> Val:
        mask = vector(I32, lanes)
        second = other.v if other is not None else ir.Constant(self.t, ir.Undefined)
        return Val(self.f, self.f.b.shuffle_vector(self.v, second, mask))

    def lane(self, i: int, n: int = LANES) -> Val:
        """Lane i in all of n lanes."""
        return self.shuffle([i] * n)

    def part(self, start: int, n: int) -> Val:
        return self.shuffle(range(start, start + n))


class Var:
    """A mutable variable: read and assign `.v`. LLVM turns it into registers."""

    __slots__ = ("f", "p", "t")

    def __init__(self, f: Fn, init: Val) -> None:
        self.f, self.t, self.p = f, init.t, f.alloca(init.t)
        f.b.store(init.v, self.p)

    @property
    def v(self) -> Val:
        return Val(self.f, self.f.b.load(self.p, typ=self.t))

    @v.setter
    def v(self, value: Val) -> None:
        self.f.b.store(value.v, self.p)


class Fn:
    """One function under construction: `void name(params)`, with the values that its code computes."""

    ith: Val
    nth: Val

    def __init__(self, module: ir.Module, host: Host, name: str, params: Sequence[Any]) -> None:
        self.module, self.host = module, host
        self.function = ir.Function(module, ir.FunctionType(ir.VoidType(), params), name)
        self._entry = self.function.append_basic_block("entry")
        self.b: Any = ir.IRBuilder(self.function.append_basic_block("body"))
        self._args: dict[str, Val] = {}

    @classmethod
    def kernel(cls, name: str, ints: Sequence[str], floats: Sequence[str], host: Host) -> Fn:
        """`void kernel(i64 *args, i64 ith, i64 nth)`: does part `ith` of `nth` of the work.

        Arguments are 8-byte words in the order of `ints + floats`; a float is stored as a double.
        """
        f = cls(new_module(name, host), host, name, KERNEL_PARAMS)
        f.ith, f.nth = (Val(f, v) for v in f.function.args[1:])
        base = Val(f, f.b.ptrtoint(f.function.args[0], I64))
        for i, arg in enumerate([*ints, *floats]):
            word = f.load(base + 8 * i, I64 if arg in ints else F64)
            f._args[arg] = word if arg in ints else word.to(F32)
        return f

    def finish(self) -> str:
        """Closes the function and returns the module's IR."""
        self.b.ret_void()
        ir.IRBuilder(self._entry).branch(self.function.blocks[1])
        return str(self.module)

    def args(self, *names: str) -> list[Val]:
        return [self._args[n] for n in names]

    # values

    def const(self, x: Any, t: Any = I64) -> Val:
        if isinstance(t, ir.VectorType):
            values = list(x) if isinstance(x, (list, tuple, range)) else [x] * t.count
            return Val(self, vector(t.element, values))
        return Val(self, ir.Constant(t, _element(t, x)))

    def vconst(self, values: Sequence[Any], t: Any) -> Val:
        return self.const(list(values), ir.VectorType(t, len(values)))

    def zeros(self, t: Any = F32, n: int = LANES) -> Val:
        return self.const(0, ir.VectorType(t, n) if n else t)

    def splat(self, x: Val, n: int = LANES) -> Val:
        if x.lanes:
            return x
        undef = ir.Constant(ir.VectorType(x.t, n), ir.Undefined)
        return Val(self, self.b.insert_element(undef, x.v, I32(0))).lane(0, n)

    def var(self, init: Val) -> Var:
        return Var(self, init)

    def select(self, cond: Val, a: Any, b: Any) -> Val:
        like = a if isinstance(a, Val) else b
        x, y = (v if isinstance(v, Val) else self.const(v, like.t) for v in (a, b))
        if x.lanes != y.lanes:
            n = max(x.lanes, y.lanes)
            x, y = self.splat(x, n), self.splat(y, n)
        return Val(self, self.b.select(cond.v, x.v, y.v))

    def any_set(self, cond: Val) -> Val:
        """True when a lane of an i1 vector is set."""
        return cond.bits(ir.IntType(cond.lanes)).ne(0)

    # memory

    def alloca(self, t: Any, n: int = 1) -> Any:
        with self.b.goto_block(self._entry):
            return self.b.alloca(t, n)

    def buffer(self, t: Any, n: int) -> Val:
        """The address of n elements on the stack, uninitialised."""
        p = self.alloca(t, n)
        p.align = 64
        return Val(self, self.b.ptrtoint(p, I64))

    def pointer(self, addr: Val) -> Val:
        """A byte address as functions take it."""
        return Val(self, self._pointer(addr))

    def _pointer(self, addr: Val) -> Any:
        return self.b.inttoptr(addr.v, PTR)

    def load(self, addr: Val, t: Any, n: int = 0) -> Val:
        """Element of type t at a byte address, or n of them as a vector."""
        return Val(self, self.b.load(self._pointer(addr), typ=ir.VectorType(t, n) if n else t, align=1))

    def store(self, addr: Val, value: Val) -> None:
        self.b.store(value.v, self._pointer(addr), align=1)

    def prefetch(self, addr: Val, far: bool = False) -> None:
        """Asks for the cache line of a byte address. Reads nothing: the address need not be anyone's memory.

        far: into the second cache only. The nearest has few places for lines that are on their way, and what waits for
        memory there keeps loads from it.
        """
        symbol, kind = "llvm.prefetch.p0", ir.FunctionType(ir.VoidType(), [PTR, I32, I32, I32])
        fn = self.module.globals.get(symbol) or ir.Function(self.module, kind, symbol)
        self.b.call(fn, [self._pointer(addr), I32(0), I32(2 if far else 3), I32(1)])  # to read, how near, data

    def gather(self, addr: Val, offsets: Sequence[int], wanted: Val) -> Val:
        """32-bit words that lie so many bytes behind a byte address, of lanes where `wanted` is set; else 0."""
        n = len(offsets)
        places = self.b.inttoptr((self.splat(addr, n) + self.vconst(offsets, I64)).v, ir.VectorType(PTR, n))
        words = ir.VectorType(I32, n)
        symbol, kinds = f"llvm.masked.gather.v{n}i32.v{n}p0", [places.type, I32, wanted.t, words]
        fn = self.module.globals.get(symbol) or ir.Function(self.module, ir.FunctionType(words, kinds), symbol)
        return Val(self, self.b.call(fn, [places, I32(1), wanted.v, self.zeros(I32, n).v]))

    def table(self, name: str, values: Sequence[int], t: Any) -> Val:
        """The address of constants, once in a module."""
        found = self.module.globals.get(name)
        if found is None:
            kind = ir.ArrayType(t, len(values))
            found = ir.GlobalVariable(self.module, kind, name)
            found.global_constant, found.linkage, found.initializer = True, "internal", ir.Constant(kind, list(values))
        return Val(self, self.b.ptrtoint(found, I64))

    # memory that threads share, and functions

    def atomic_add(self, addr: Val, n: int) -> Val:
        """Adds and returns the value before. Orders all memory around it."""
        return Val(self, self.b.atomic_rmw("add", self._pointer(addr), I64(n), "seq_cst"))

    def atomic_load(self, addr: Val) -> Val:
        """Reads an aligned word; what its writer wrote before it is visible afterwards."""
        return Val(self, self.b.load_atomic(self._pointer(addr), "acquire", 8, typ=I64))

    def relax(self) -> None:
        """Tells the core that this is a waiting loop."""
        if self.host.triple.startswith("x86_64"):
            self.call_external("llvm.x86.sse2.pause")
        elif self.host.is_arm:
            self.call_external("llvm.aarch64.hint", self.const(1, I32))

    def call_kernel(self, address: Val, args: Val, ith: Val, nth: Val) -> None:
        kind = ir.FunctionType(ir.VoidType(), KERNEL_PARAMS).as_pointer()
        self.b.call(self.b.inttoptr(address.v, kind), [self._pointer(args), ith.v, nth.v])

    def call_external(self, symbol: str, *xs: Val) -> None:
        """Calls a C function, or one of LLVM's own, for its effect."""
        fn = self.module.globals.get(symbol)
        if fn is None:
            fn = ir.Function(self.module, ir.FunctionType(ir.VoidType(), [x.t for x in xs]), symbol)
        self.b.call(fn, [x.v for x in xs])

    # arithmetic

    def call(self, name: str, *xs: Val) -> Val:
        """An overloaded LLVM intrinsic that maps values of one type to that type, e.g. "llvm.sqrt"."""
        full = f"{name}.{_mangle(xs[0].t)}"
        fn = self.module.globals.get(full)
        if fn is None:
            fn = ir.Function(self.module, ir.FunctionType(xs[0].t, [x.t for x in xs]), full)
        return Val(self, self.b.call(fn, [x.v for x in xs]))

    def join(self, scalars: Sequence[Val]) -> Val:
        """Scalars as the lanes of a vector."""
        v = ir.Constant(ir.VectorType(scalars[0].t, len(scalars)), ir.Undefined)
        for i, x in enumerate(scalars):
            v = self.b.insert_element(v, x.v, I32(i))
        return Val(self, v)

    def intrinsic(self, symbol: str, t: Any, *xs: Val) -> Val:
        """One of LLVM's own functions by its whole name; t: the result's type."""
        fn = self.module.globals.get(symbol)
        if fn is None:
            fn = ir.Function(self.module, ir.FunctionType(t, [x.t for x in xs]), symbol)
        return Val(self, self.b.call(fn, [x.v for x in xs]))

    def fma(self, a: Val, b: Any, c: Any) -> Val:
        """a * b + c, fused where the machine has it."""
        n = max(x.lanes for x in (a, b, c) if isinstance(x, Val))
        a, b, c = (x if isinstance(x, Val) else self.const(x, _scalar(a.t)) for x in (a, b, c))
        return self.call("llvm.fmuladd", *(self.splat(x, n) if n else x for x in (a, b, c)))

    def sqrt(self, x: Val) -> Val:
        return self.call("llvm.sqrt", x)

    def abs(self, x: Val) -> Val:
        return self.call("llvm.fabs", x)

    def floor(self, x: Val) -> Val:
        return self.call("llvm.floor", x)

    def count_trailing_zeros(self, x: Val) -> Val:
        return Val(self, self.b.cttz(x.v, I1(0)))

    def max_or_nan(self, a: Val, b: Val) -> Val:
        """The larger; NaN when either is NaN."""
        return self.select((a > b) | a.ne(a), a, b)

    def min_int(self, a: Val, b: Any) -> Val:
        return self.select(a < b, a, b)

    def max_int(self, a: Val, b: Any) -> Val:
        return self.select(a > b, a, b)

    def fold(self, v: Val, op: Callable[[Val, Val], Val]) -> Val:
        """Reduces the lanes (a power of two) to one scalar."""
        n = v.lanes
        while n > 1:
            n //= 2
            v = op(v.part(0, n), v.part(n, n))
        return v[0]

    def sum(self, v: Val) -> Val:
        return self.fold(v, lambda a, b: a + b)

    def sum_each(self, vs: Sequence[Val]) -> Val:
        """Sums of up to 16 vectors of 16 lanes at once: lane i of the result is the sum of vs[i].

        Halving all vectors together costs about one shuffle-add per vector, where a sum for each costs four.
        """
        rows = list(vs) + [self.zeros()] * (LANES - len(vs))
        step = LANES // 2
        while step:
            lo = [i % (2 * step) // step * LANES + i // (2 * step) * (2 * step) + i % step for i in range(LANES)]
            half = len(rows) // 2
            rows = [
                a.shuffle(lo, b) + a.shuffle([i + step for i in lo], b)
                for a, b in zip(rows[:half], rows[half:], strict=True)
            ]
            step //= 2
        return rows[0]

    def transpose(self, rows: Sequence[Val], n: int = LANES) -> list[Val]:
        """16 vectors of 16 lanes -> the same with rows and lanes exchanged, the first n of them."""
        out, steps = list(rows), (8, 4, 2, 1)
        wanted = [set(range(n))]  # of each step, the last one first
        for step in reversed(steps[1:]):
            wanted.append(wanted[-1] | {i ^ step for i in wanted[-1]})
        for step, these in zip(steps, reversed(wanted), strict=True):
            low = [i if not i & step else LANES + i - step for i in range(LANES)]
            high = [i + step if not i & step else LANES + i for i in range(LANES)]
            before = list(out)
            for i in these:
                out[i] = before[i & ~step].shuffle(high if i & step else low, before[i | step])
        return out[:n]

    def exp(self, x: Val) -> Val:
        """e^x in f32 to about 1e-7; exactly 0 below -87.3, 2.4e38 above 88.3, NaN for NaN."""
        magic = 12582912.0  # 1.5 * 2^23: adding it rounds to an integer that stands in the low mantissa bits
        c = self.select(x > 88.3, 88.3, x)
        t = self.fma(c, 1.4426950408889634, magic)
        n = t - magic
        r = self.fma(n, 2.12194440e-4, self.fma(n, -0.693359375, c))
        p = self.poly(r, [1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5])
        y = self.fma(p, r * r, r) + 1.0
        scale = ((t.as_bits(I32) << 23) + 0x3F800000).as_bits(F32)
        return self.select(x < -87.3, 0.0, y * scale)

    def poly(self, x: Val, coefficients: Sequence[float]) -> Val:
        """Horner's scheme, highest power first."""
        acc = self.const(coefficients[0], x.t)
        for c in coefficients[1:]:
            acc = self.fma(acc, x, c)
        return acc

    def sigmoid(self, x: Val) -> Val:
        """1 / (1 + e^-x); 0 below -88.3, where exp stops growing: -inf * sigmoid(-inf) is the NaN that it must be."""
        return self.select(x < -88.3, 0.0, 1.0 / (self.exp(-x) + 1.0))

    def tanh(self, x: Val) -> Val:
        a, z = self.abs(x), x * x
        small = [-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1]
        near = self.fma(self.poly(z, small) * z, x, x)
        far = self.call("llvm.copysign", 1.0 - 2.0 / (self.exp(a + a) + 1.0), x)
        return self.select(a < 0.625, near, far)

    def to_bf16(self, x: Val) -> Val:
        """f32 -> the 16 bits of bf16, nearest even, NaN kept quiet (gguf's own rule)."""
        n = x.as_bits(I32)
        is_nan = x.ne(x)
        n = self.select(is_nan, (n & 0xFFFF0000) | 0x400000, n)
        return ((n + 0x7FFF + ((n >> 16) & 1)) >> 16).trunc(I16)

    def lookup16(self, table: Sequence[int], index: Val) -> Val:
        """table[index] for byte lanes with values 0..15; lanes: 16 or a larger power of two."""
        shuffles = self.host.byte_shuffles
        if not shuffles:
            t = self.vconst(table, I8)
            return self.join([Val(self, self.b.extract_element(t.v, index[i].v)) for i in range(index.lanes)])

        def part(at: int, n: int) -> Val:
            t = self.vconst(list(table) * (n // 16), I8)
            return self.intrinsic(shuffles[n], t.t, t, index.part(at, n))

        return self.by_parts(shuffles, index.lanes, part)

    def by_parts(self, widths: Iterable[int], lanes: int, make: Callable[[int, int], Val]) -> Val:
        """Vectors of the widest of `widths` that fits, make(first lane, lanes), one after the other."""
        width = max(w for w in widths if w <= lanes)
        return concat([make(at, width) for at in range(0, lanes, width)])

    # control flow

    @contextmanager
    def range(self, start: Any, stop: Any, step: int = 1) -> Iterator[Val]:
        """for i in range(start, stop, step), step > 0."""
        first, last = (x if isinstance(x, Val) else self.const(x) for x in (start, stop))
        b, before = self.b, self.b.block
        head, body, done = (b.append_basic_block(n) for n in ("head", "loop", "done"))
        b.branch(head)
        b.position_at_end(head)
        i = b.phi(I64)
        i.add_incoming(first.v, before)
        b.cbranch(b.icmp_signed("<", i, last.v), body, done)
        b.position_at_end(body)
        yield Val(self, i)
        i.add_incoming(b.add(i, I64(step)), b.block)
        b.branch(head)
        b.position_at_end(done)

    @contextmanager
    def while_(self, condition: Callable[[], Val]) -> Iterator[None]:
        b = self.b
        head, body, done = (b.append_basic_block(n) for n in ("head", "loop", "done"))
        b.branch(head)
        b.position_at_end(head)
        b.cbranch(condition().v, body, done)
        b.position_at_end(body)
        yield
        b.branch(head)
        b.position_at_end(done)

    @contextmanager
    def if_(self, cond: Val) -> Iterator[None]:
        with self.b.if_then(cond.v):
            yield

    @contextmanager
    def if_else(self, cond: Val) -> Iterator[tuple[Any, Any]]:
        """with f.if_else(c) as (then, other): with then: ...; with other: ..."""
        with self.b.if_else(cond.v) as branches:
            yield branches

    def elements(self, n: Val, body: Callable[[Val, int], None]) -> None:
        """body(i, lanes) over n elements: 16 lanes at a time, then what is left one by one."""
        whole = n // LANES * LANES
        with self.range(0, whole, LANES) as i:
            body(i, LANES)
        with self.range(whole, n) as i:
            body(i, 1)

    def share(self, n: Val, unit: int = 1) -> tuple[Val, Val]:
        """This thread's contiguous part [start, stop) of n items, in whole units."""
        units = (n + (unit - 1)) // unit
        start = units * self.ith // self.nth * unit
        stop = units * (self.ith + 1) // self.nth * unit
        return start, self.min_int(stop, n)


class Host:
    """What the machine is, as far as code depends on it. byte_shuffles: LLVM's names of table lookups, by bytes."""

    def __init__(self, triple: str, cpu: str, features: dict[str, bool]) -> None:
        self.triple, self.cpu, self.features = triple, cpu, features
        self.byte_shuffles: dict[int, str] = {}
        if self.is_arm:
            self.byte_shuffles[16] = "llvm.aarch64.neon.tbl1.v16i8"
        for feature, n, symbol in (
            ("ssse3", 16, "llvm.x86.ssse3.pshuf.b.128"),
            ("avx2", 32, "llvm.x86.avx2.pshuf.b"),
            ("avx512bw", 64, "llvm.x86.avx512.pshuf.b.512"),
        ):
            if features.get(feature):
                self.byte_shuffles[n] = symbol

    def has(self, *features: str) -> bool:
        return all(self.features.get(name) for name in features)

    @property
    def is_arm(self) -> bool:
        return self.triple.startswith(("aarch64", "arm64"))


def new_module(name: str, host: Host) -> ir.Module:
    module = ir.Module(name=name)
    module.triple = host.triple
    return module


def concat(vs: Sequence[Val]) -> Val:
    """Vectors of one length one after the other, a power of two of them."""
    while len(vs) > 1:
        vs = [a.shuffle(range(2 * a.lanes), b) for a, b in zip(vs[::2], vs[1::2], strict=True)]
    return vs[0]


def widen(v: Val, n: int = LANES) -> Val:
    """Zeros behind, up to n lanes."""
    return v if v.lanes == n else v.shuffle([min(i, v.lanes) for i in range(n)], v.f.zeros(v.t.element, v.lanes))


def _element(t: Any, x: Any) -> Any:
    if _is_float(t):
        return float(x)
    return int(x)


def _mangle(t: Any) -> str:
    names = {F16: "f16", F32: "f32", F64: "f64", I8: "i8", I16: "i16", I32: "i32", I64: "i64"}
    return f"v{t.count}{names[t.element]}" if isinstance(t, ir.VectorType) else names[t]
