# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: no-check-untyped-defs, disable-error-code=annotation-unchecked
"""ADD, SUB, MUL, DIV, SCALE, CLAMP, SQR, SQRT, FILL, UNARY, GLU, SILU_BACK, UNARY_BACK: one kernel for what maps
elements to elements.

Tensors of any strides are seen with as few dimensions as they allow: those without gaps are one row of any shape.
All arithmetic is f32; a result is rounded once, to its own type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.context import Context, Step, View
from graphrt.backends.triton.device import Target
from graphrt.backends.triton.kernels.common.activation import activation, clamped, glu, tanh
from graphrt.backends.triton.kernels.common.bits import stored_as
from graphrt.backends.triton.kernels.common.derivative import derivative
from graphrt.backends.triton.kernels.common.pdl import take_turn
from graphrt.backends.triton.kernels.elementwise_fusions import softcap
from graphrt.backends.triton.launch import Launch, launch_options
from graphrt.fusion import Fusion, Softcap
from graphrt.tensor import Tensor

BINARY_OPS = ("ADD", "SUB", "MUL", "DIV")
#: What the gradient of a UNARY is called, before its kind: it multiplies what comes from the result by the derivative.
BACK = "back of "
#: Offsets over this are computed in 64 bits. Less than 2^31, because lanes that a mask hides go past the end.
MAX_OFFSET = 2**31 - 2**24
#: Elements a program: of small tensors, and of those that keep a GPU busy for long.
BLOCK, BIG_BLOCK, BIG_FROM = 1024, 4096, 1 << 22


@triton.constexpr_function
def has_second(OP):
    return OP in ("ADD", "SUB", "MUL", "DIV", "reglu", "geglu", "swiglu", "swiglu_oai") or OP.startswith(BACK)


@triton.constexpr_function
def function_of(OP):
    """The function whose gradient an op is, "" for any other op."""
    return OP[len(BACK) :] if OP.startswith(BACK) else ""


@triton.jit
def combined(a, b, x, y, OP: tl.constexpr):
    """The result of an op: its name, a UNARY's or GLU's kind, or BACK and a UNARY's kind. x, y: its parameters."""
    FUNCTION: tl.constexpr = function_of(OP)
    if OP == "ADD":
        return a + b
    elif OP == "SUB":
        return a - b
    elif OP == "MUL":
        return a * b
    elif OP == "DIV":
        return tl.div_rn(a, b)
    elif OP == "SCALE":
        return a * x + y
    elif OP == "SOFTCAP":  # SCALE, tanh and SCALE
        return tanh(a * x) * y
    elif OP == "CLAMP":
        return clamped(a, x, y)
    elif OP == "FILL":
        return tl.zeros_like(a) + x
    elif OP == "SQR":
        return a * a
    elif OP == "SQRT":
        return tl.sqrt_rn(a)
    elif FUNCTION != "":
        return a * derivative(b, FUNCTION)
    elif has_second(OP):
        return glu(a, b, x, y, OP, False)
    else:
        return activation(a, OP, False)


@triton.jit
def row_offset(row, n1, n2, s1, s2, s3, VEC: tl.constexpr):
    """Where rows start. row: their numbers in the order of dimensions 1 to 3; s1 to s3: strides, multiples of VEC."""
    outer = row // n1
    at = (row % n1) * s1 + (outer % n2) * s2 + (outer // n2) * s3
    return tl.multiple_of(at, VEC)  # here, because what is said of a call's result is lost with the call


@accesses(reads="p_a p_b", writes="p_out")
@triton.jit(
    do_not_specialize=[
        "n_rows", "n1", "n2", "a0", "a1", "a2", "a3", "b0", "b1", "b2", "b3", "m0", "m1", "m2", "m3", "x", "y",
    ]
)  # fmt: skip
def elementwise(
    p_a, p_b, p_out, n_rows, n0, n1, n2, a0, a1, a2, a3, b0, b1, b2, b3, m0, m1, m2, m3, x, y,
    OP: tl.constexpr, FLAT: tl.constexpr, A_UNIT: tl.constexpr, B_STEP: tl.constexpr, A_VEC: tl.constexpr,
    B_VEC: tl.constexpr, REPEATS: tl.constexpr, BIG: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out[row, i] = OP(a[row, i], b[row, i]) for a block of ROWS rows and COLS columns, out without gaps.

    n_rows: rows of n0 elements; n1, n2: of dimensions 1 and 2; a0 to b3: strides in elements (0: repeats an element);
    m0 to m3: b's sizes, with REPEATS alone. FLAT: there is one row. A_UNIT: a0 is 1; B_STEP: b0 where it is 0 or 1,
    else -1. A_VEC, B_VEC: what divides the strides a1 to a3, b1 to b3. BIG: offsets need 64 bits.
    """
    pid = tl.program_id(0)
    take_turn(PDL)
    if BIG:
        pid = pid.to(tl.int64)
    n_blocks = (n0 - 1) // COLS + 1  # tl.cdiv would add before it divides, past the largest int32
    i_col = ((pid % n_blocks) * COLS + tl.arange(0, COLS))[None, :]
    i_row = (pid // n_blocks) * ROWS + tl.arange(0, ROWS)
    m_load = i_col < n0
    at_a = tl.zeros_like(i_row)
    at_b = at_a
    at_out = at_a
    i_b = i_col
    if not FLAT:
        m_load = m_load & (i_row < n_rows)[:, None]
        at_a = row_offset(i_row, n1, n2, a1, a2, a3, A_VEC)
        if has_second(OP):
            if REPEATS:
                outer = i_row // n1
                at_b = ((i_row % n1) % m1) * b1 + ((outer % n2) % m2) * b2 + ((outer // n2) % m3) * b3
            else:
                at_b = row_offset(i_row, n1, n2, b1, b2, b3, B_VEC)
        at_out = i_row * n0
    if REPEATS:
        i_b = i_col % m0
    p_as = p_a + at_a[:, None]
    if A_UNIT:
        a = tl.load(p_as + i_col, mask=m_load, other=0.0).to(tl.float32)
    else:
        a = tl.load(p_as + i_col * a0, mask=m_load, other=0.0).to(tl.float32)
    b = a
    if has_second(OP):
        p_bs = p_b + at_b[:, None]
        if B_STEP == 1:
            b = tl.load(p_bs + i_b, mask=m_load, other=1.0).to(tl.float32)
        elif B_STEP == 0:
            m_row = (i_row < n_rows)[:, None]
            b = tl.broadcast_to(tl.load(p_bs, mask=m_row, other=1.0).to(tl.float32), (ROWS, COLS))
        else:
            b = tl.load(p_bs + i_b * b0, mask=m_load, other=1.0).to(tl.float32)
    out = stored_as(combined(a, b, x, y, OP), p_out.dtype.element_ty)
    tl.store(p_out + at_out[:, None] + i_col, out, mask=m_load)


Dims = tuple[int, int, int, int]


@dataclass(frozen=True, eq=False)
class Operand:
    """A source as kernels read it. ne: its own sizes, which repeat to fill the result's; strides: in elements."""

    data: torch.Tensor
    ne: Dims
    strides: Dims

    @classmethod
    def of(cls, view: View) -> Operand:
        return cls(view.data, view.ne, view.strides)

    def halves(self) -> tuple[Operand, Operand]:
        """The first and the second half of each row."""
        n, step = self.ne[0] // 2, self.strides[0]
        ne = (n, *self.ne[1:])
        return Operand(self.data, ne, self.strides), Operand(self.data[n * step :], ne, self.strides)


@dataclass(frozen=True)
class Layout:
    """Sizes of a result and what its operands' strides are along them, in as few dimensions as possible.

    strides: of each operand, 0 where it repeats one element; sizes: of each operand, equal to ne but where it repeats
    several elements (repeats), or one.
    """

    ne: Dims
    strides: tuple[Dims, ...]
    sizes: tuple[Dims, ...]
    repeats: bool
    big: bool

    @classmethod
    def of(cls, ne: Dims, operands: Sequence[Operand], keep_rows: bool = False) -> Layout:
        """keep_rows: ne[0] stays as it is, for what works on rows."""
        axes: list[_Axis] = []
        for i, n in enumerate(ne):
            axis = _Axis.of(n, i, operands)
            if n == 1 and not (keep_rows and i == 0):
                continue
            if axes and not (keep_rows and len(axes) == 1) and axes[-1].continues(axis):
                axes[-1] = axes[-1].joined(axis)
            else:
                axes.append(axis)
        axes += [_Axis(1, (0,) * len(operands), (1,) * len(operands))] * (4 - len(axes))
        strides = tuple(_dims([a.strides[i] for a in axes]) for i in range(len(operands)))
        sizes = tuple(_dims([a.sizes[i] for a in axes]) for i in range(len(operands)))
        reach = [sum((a.sizes[i] - 1) * a.strides[i] for a in axes) for i in range(len(operands))]
        total = ne[0] * ne[1] * ne[2] * ne[3]
        big = max(total, *reach, *(s for st in strides for s in st)) > MAX_OFFSET
        return cls(_dims([a.n for a in axes]), strides, sizes, any(a.repeats for a in axes), big)

    @property
    def n_rows(self) -> int:
        return self.ne[1] * self.ne[2] * self.ne[3]

    def vec(self, i: int) -> int:
        """16 if whole vectors of 16 elements lie between the rows of an operand, else 1."""
        return 16 if all(s % 16 == 0 for s in self.strides[i][1:]) else 1


@dataclass(frozen=True)
class _Axis:
    """One dimension: its size, strides and sizes of each operand."""

    n: int
    strides: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, n: int, i: int, operands: Sequence[Operand]) -> _Axis:
        return cls(n, tuple(0 if o.ne[i] == 1 else o.strides[i] for o in operands), tuple(o.ne[i] for o in operands))

    @property
    def repeats(self) -> bool:
        return any(size not in (1, self.n) for size in self.sizes)

    def continues(self, outer: _Axis) -> bool:
        """A step along `outer` is a whole run of this one, for each operand."""
        return not (self.repeats or outer.repeats) and all(t == s * self.n for s, t in zip(self.strides, outer.strides))

    def joined(self, outer: _Axis) -> _Axis:
        n = self.n * outer.n
        return _Axis(n, self.strides, tuple(1 if s == 0 else n for s in self.strides))


def _dims(values: Sequence[int]) -> Dims:
    return values[0], values[1], values[2], values[3]


def block_of(layout: Layout) -> tuple[int, int, int]:
    """Rows and columns a program, and its warps. Columns are such that few lanes are idle at the end of a row."""
    n0, n_rows = layout.ne[0], layout.n_rows
    block = BIG_BLOCK if n0 * n_rows >= BIG_FROM else BLOCK
    if layout.strides[0][0] != 1 and n_rows > 1 and n0 > 1:  # a transposed source: whole sectors both ways
        cols = min(32, triton.next_power_of_2(n0))
    elif n_rows == 1 or n0 >= 8 * block:
        cols = block
    else:
        sizes = [1 << i for i in range(block.bit_length()) if 1 << i <= triton.next_power_of_2(n0)]
        cols = min(reversed(sizes), key=lambda c: max(-(-n0 // c) * c / n0, 1.125))
    rows = min(block // cols, triton.next_power_of_2(n_rows))
    return rows, cols, max(1, min(8, rows * cols // 256))


def elementwise_launch(
    op: str, ne: Dims, a: Operand, b: Operand | None, out: torch.Tensor, target: Target, x: float = 0.0, y: float = 0.0
) -> Launch:
    """out = op(a, b). op: as combined() names it; out: flat, without gaps, may be a's memory, or a b's as large."""
    layout = Layout.of(ne, [a] if b is None else [a, b])
    (a0, a1, a2, a3), (b0, b1, b2, b3) = layout.strides[0], layout.strides[-1]
    m0, m1, m2, m3 = layout.sizes[-1]
    n0, n1, n2, _ = layout.ne
    rows, cols, warps = block_of(layout)
    args = {
        "p_a": a.data, "p_b": a.data if b is None else b.data, "p_out": out, "n_rows": layout.n_rows,
        "n0": n0, "n1": n1, "n2": n2, "a0": a0, "a1": a1, "a2": a2, "a3": a3, "b0": b0, "b1": b1, "b2": b2, "b3": b3,
        "m0": m0, "m1": m1, "m2": m2, "m3": m3, "x": x, "y": y,
        "OP": op, "FLAT": layout.n_rows == 1, "A_UNIT": a0 == 1, "B_STEP": b0 if b0 in (0, 1) else -1,
        "A_VEC": layout.vec(0), "B_VEC": layout.vec(-1), "REPEATS": layout.repeats, "BIG": layout.big,
        "ROWS": rows, "COLS": cols, "PDL": target.has_pdl,
    }  # fmt: skip
    programs = triton.cdiv(n0, cols) * triton.cdiv(layout.n_rows, rows)
    return Launch(elementwise, (programs,), args, launch_options(target, warps))


def _launch(node: Tensor, ctx: Context, op: str, x: float = 0.0, y: float = 0.0) -> list[Step]:
    a, *rest = (Operand.of(ctx.view(t)) for t in node.sources())
    return [elementwise_launch(op, node.ne, a, rest[0] if rest else None, ctx.view(node).data, ctx.target, x, y)]


def lower_plain(nodes: Sequence[Tensor], ctx: Context) -> list[Step]:
    """ADD, SUB, MUL, DIV, SQR, SQRT."""
    return _launch(nodes[0], ctx, nodes[0].op)


def lower_scale(nodes: Sequence[Tensor], ctx: Context) -> list[Step]:
    p = nodes[0].params
    return _launch(nodes[0], ctx, "SCALE", p.scale, p.bias)


def lower_softcap(found: Softcap, ctx: Context) -> list[Step]:
    """SCALE, tanh and SCALE of f32."""
    inner, out = found.inner, found.out
    a = Operand.of(ctx.view(inner["a"]))
    memory, scales = ctx.view(out).data, (inner.params.scale, out.params.scale)
    return [elementwise_launch("SOFTCAP", out.ne, a, None, memory, ctx.target, *scales)]


def lower_clamp(nodes: Sequence[Tensor], ctx: Context) -> list[Step]:
    p = nodes[0].params
    return _launch(nodes[0], ctx, "CLAMP", p.low, p.high)


def lower_fill(nodes: Sequence[Tensor], ctx: Context) -> list[Step]:
    return _launch(nodes[0], ctx, "FILL", nodes[0].params.value)


def lower_unary(nodes: Sequence[Tensor], ctx: Context) -> list[Step]:
    return _launch(nodes[0], ctx, nodes[0].params.kind)


def lower_unary_back(nodes: Sequence[Tensor], ctx: Context) -> list[Step]:
    """SILU_BACK, UNARY_BACK."""
    p = nodes[0].params
    return _launch(nodes[0], ctx, BACK + ("silu" if p is None else p.kind))


def lower_glu(nodes: Sequence[Tensor], ctx: Context) -> list[Step]:
    node = nodes[0]
    p = node.params
    gate = Operand.of(ctx.view(node["gate"]))
    if (other := node["value"]) is not None:
        value = Operand.of(ctx.view(other))
    else:
        gate, value = gate.halves()
        gate, value = (value, gate) if p.swapped else (gate, value)
    out = ctx.view(node).data
    return [elementwise_launch(p.kind, node.ne, gate, value, out, ctx.target, p.alpha, p.limit)]


LOWERINGS: dict[str, Callable[[Sequence[Tensor], Context], list[Step]]] = {
    **dict.fromkeys((*BINARY_OPS, "SQR", "SQRT"), lower_plain),
    "SCALE": lower_scale,
    "CLAMP": lower_clamp,
    "FILL": lower_fill,
    "UNARY": lower_unary,
    "GLU": lower_glu,
    **dict.fromkeys(("SILU_BACK", "UNARY_BACK"), lower_unary_back),
}

SOFTCAP = Fusion("softcap", softcap, lower_softcap)
