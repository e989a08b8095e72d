"""Lowering for the CPU backend's fast form: a group of nodes to native steps, or to a few torch calls.

Small batches are bound by memory, so their matrices are read as the file's blocks by the kernels of `fast`, and a whole
decode step becomes one native program. Large ones are bound by arithmetic: blocks are decoded a slice at a time and go
through oneDNN. Both compute in f32 from the same weights as the reference; nothing is rounded that it does not round.
A group that no lowering takes falls back to the reference functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from graphrt.backend import Group, Place
from graphrt.backends.cpu import fast
from graphrt.backends.cpu.memory import CpuBuffer, strided
from graphrt.backends.cpu.prefill import Attention
from graphrt.backends.cpu.reference import REFERENCES
from graphrt.ops.rope import rope_frequencies
from graphrt.ops.soft_max import alibi_slopes
from graphrt.tensor import Tensor

if TYPE_CHECKING:
    from graphrt.backends.cpu.fast import Step

#: What a group becomes: native steps that a program may join, or a function.
Lowered = "list[Step] | Callable[[], None]"

ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}

#: Decoded slices of a matrix are at most this large, so that they are still in cache when the product reads them.
SLICE_BYTES = 4 * 2**20


class Lowering:
    """Lowers groups, given where tensors lie. keep: objects whose memory the native steps point to."""

    def __init__(self, place: Callable[[Tensor], Place]) -> None:
        self.place = place
        self.keep: list[Any] = []
        self._temporaries: dict[tuple[str, int, int], torch.Tensor] = {}

    def lower(self, group: Group) -> Any | None:
        """Native steps, a function, or None when the group is for the reference."""
        method = _METHODS.get(group.kernel)
        return method(self, group.nodes) if method is not None else None

    def program(self, steps: Sequence[Step]) -> Callable[[], None]:
        """Native steps as one native call."""
        joined = fast.Program(steps)
        self.keep.append(joined)
        return joined.call

    def at(self, t: Tensor | None) -> int:
        """The address of a tensor, 0 for an absent one."""
        if t is None:
            return 0
        buffer, offset = self.place(t)
        assert isinstance(buffer, CpuBuffer)
        return buffer.memory.data_ptr() + offset

    def look(self, t: Tensor) -> torch.Tensor:
        """The tensor's stored elements as torch sees them."""
        buffer, offset = self.place(t)
        assert isinstance(buffer, CpuBuffer)
        return strided(buffer.memory, offset, t)

    def array(self, values: Sequence[float], kind: type) -> int:
        """The address of a new constant array."""
        array: Any = np.asarray(values, kind)
        self.keep.append(array)
        return int(array.ctypes.data)

    def temporary(self, purpose: str, rows: int, n: int) -> torch.Tensor:
        """f32 [rows, n] that the steps of this program share for one purpose, one after the other."""
        known = self._temporaries.get((purpose, rows, n))
        if known is None:
            known = self._temporaries[purpose, rows, n] = torch.empty((rows, n), dtype=torch.float32)
        return known


def _rows(t: Tensor | None) -> tuple[int, int] | None:
    """(number of rows, bytes between them) of an f32 tensor whose rows lie evenly, else None."""
    if t is None or t.dtype.name != "f32" or not t.has_contiguous_rows:
        return None
    even = t.is_contiguous or t.ne[2] == t.ne[3] == 1
    return (t.n_rows, t.ne[0] * 4 if t.is_contiguous else t.nb[1]) if even else None


def norm_mul(self: Lowering, nodes: list[Tensor]) -> Any | None:
    norm, out = nodes[0], nodes[-1]
    x, weight = norm.src[0], out.src[1] if len(nodes) == 2 else None
    source, target = _rows(x), _rows(out)
    if source is None or target is None or x is None:
        return None
    return [
        fast.rms_norm(
            y=self.at(out), x=self.at(x), w=self.at(weight), n_rows=source[0], n=x.ne[0], x_nb=source[1],
            y_nb=target[1], eps=norm.params.eps,
        )
    ]  # fmt: skip


def _product(t: Tensor) -> tuple[Tensor, Tensor, int] | None:
    """Weights, activations and the number of tokens of a MUL_MAT that is one matrix times rows; else None."""
    weight, x = t.src[0], t.src[1]
    assert weight is not None and x is not None
    rows = _rows(x)
    plain = weight.ne[2] == weight.ne[3] == 1 and weight.has_contiguous_rows and weight.dtype.name in fast.TYPES
    return (weight, x, rows[0]) if plain and rows is not None else None


def matmul(self: Lowering, nodes: list[Tensor]) -> Any | None:
    """MUL_MAT, alone or with a residual added."""
    product, out = nodes[0], nodes[-1]
    residual = None
    if len(nodes) == 2:
        residual = out.src[1] if out.src[0] is product else out.src[0]
    found, extra = _product(product), _rows(residual) if residual is not None else (0, 0)
    if found is None or extra is None:
        return None
    weight, x, n_tok = found
    if n_tok > fast.MAX_TOKENS:
        return _matmul_large(self, weight, x, out, residual)
    return [
        fast.gemv(
            weight.dtype.name, y=self.at(out), w=self.at(weight), x=self.at(x), n_rows=weight.ne[1], n=weight.ne[0],
            w_nb=weight.nb[1], n_tok=n_tok, x_nb=_rows(x)[1], y_nb=weight.ne[1] * 4, res=self.at(residual),  # type: ignore[index]
            res_nb=extra[1],
        )
    ]  # fmt: skip


def _matmul_large(
    self: Lowering, weight: Tensor, x: Tensor, out: Tensor, residual: Tensor | None
) -> Callable[[], None]:
    """Products of decoded slices of the weights with all tokens."""
    target = self.look(out).view(-1, out.ne[0])
    return _product_into(self, weight, x, target, self.look(residual).view(-1, out.ne[0]) if residual else None)


def _product_into(
    self: Lowering, weight: Tensor, x: Tensor, target: torch.Tensor, added: torch.Tensor | None = None
) -> Callable[[], None]:
    activations = self.look(x).view(-1, x.ne[0])
    slices = list(_slices(self, weight))

    def run() -> None:
        for start, stop, decode, matrix in slices:
            decode()
            y = dense(activations, matrix)
            if added is None:
                target[:, start:stop] = y
            else:
                torch.add(y, added[:, start:stop], out=target[:, start:stop])

    return run


def _glu_large(self: Lowering, nodes: list[Tensor], act: str) -> Callable[[], None]:
    gate, up, out = nodes
    x = gate.src[1]
    assert gate.src[0] is not None and up.src[0] is not None and x is not None
    halves = self.temporary("gate", x.n_rows, out.ne[0]), self.temporary("up", x.n_rows, out.ne[0])
    make_gate = _product_into(self, gate.src[0], x, halves[0])
    make_up = _product_into(self, up.src[0], x, halves[1])
    join = fast.elementwise(
        f"{act}_glu", y=self.at(out), a=halves[0].data_ptr(), b=halves[1].data_ptr(), n_rows=x.n_rows, n=out.ne[0],
        y_nb=out.nb[1], a_nb=4 * out.ne[0], b_nb=4 * out.ne[0],
    )  # fmt: skip

    def run() -> None:
        make_gate()
        make_up()
        join()

    return run


def _slices(self: Lowering, weight: Tensor) -> Any:
    """(first row, end, what decodes them, the f32 matrix) for slices of a weight; a plain f32 one is taken whole."""
    n, m = weight.ne[0], weight.ne[1]
    if weight.dtype.name == "f32":
        yield 0, m, lambda: None, self.look(weight)[0, 0]
        return
    step = max(1, min(m, SLICE_BYTES // (4 * n)))
    for start in range(0, m, step):
        stop = min(m, start + step)
        matrix = self.temporary("weights", step, n)[: stop - start]
        decode = fast.dequant_rows(
            weight.dtype.name, "f32", dst=matrix.data_ptr(), w=self.at(weight) + start * weight.nb[1],
            n_rows=stop - start, n=n, w_nb=weight.nb[1], dst_nb=4 * n,
        )  # fmt: skip
        yield start, stop, decode, matrix


def _onednn() -> Callable[..., torch.Tensor] | None:
    ops = getattr(torch.ops, "mkldnn", None)
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return getattr(ops, "_linear_pointwise", None) if available else None


_ONEDNN = _onednn()


def dense(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x [n, k] times w [m, k] transposed, f32.

    oneDNN's product is asked for by name where torch has it: torch's own choice, MKL, reaches less than half of its
    speed on AMD processors. The arithmetic is plain f32 either way.
    """
    if _ONEDNN is None:
        return torch.nn.functional.linear(x, w)
    # oneDNN takes a matrix with gaps between its rows too, by a code a thousand times slower
    y: torch.Tensor = _ONEDNN(x.contiguous(), w.contiguous(), None, "none", [], "")
    return y


def gate_up_glu(self: Lowering, nodes: list[Tensor]) -> Any | None:
    gate, up, out = nodes
    found, other, target = _product(gate), _product(up), _rows(out)
    if found is None or other is None or target is None:
        return None
    (w_gate, x, n_tok), w_up = found, other[0]
    act = ACTIVATIONS[out.params.kind]
    if n_tok > fast.MAX_TOKENS:
        return _glu_large(self, nodes, act)
    return [
        fast.gemv_glu(
            w_gate.dtype.name, w_up.dtype.name, act, y=self.at(out), w_gate=self.at(w_gate), w_up=self.at(w_up),
            x=self.at(x), n_rows=w_gate.ne[1], n=w_gate.ne[0], gate_nb=w_gate.nb[1], up_nb=w_up.nb[1], n_tok=n_tok,
            x_nb=_rows(x)[1], y_nb=target[1],  # type: ignore[index]
        )
    ]  # fmt: skip


def _elementwise(
    self: Lowering, op: str, out: Tensor, a: Tensor | None, b: Tensor | None = None, s0: float = 0.0, s1: float = 0.0
) -> Any | None:
    """op over rows; b has a's shape or is one row for all."""
    left, target = _rows(a), _rows(out)
    right = _rows(b) if b is not None else (0, 0)
    if left is None or right is None or target is None or a is None or out.ne != a.ne:
        return None
    if b is not None and b.ne != a.ne and b.ne != (a.ne[0], 1, 1, 1):
        return None
    b_nb = right[1] if b is not None and b.ne == a.ne else 0
    return [
        fast.elementwise(
            op, y=self.at(out), a=self.at(a), b=self.at(b), n_rows=left[0], n=a.ne[0], y_nb=target[1], a_nb=left[1],
            b_nb=b_nb, s0=s0, s1=s1,
        )
    ]  # fmt: skip


def add_or_mul(self: Lowering, nodes: list[Tensor]) -> Any | None:
    (out,) = nodes
    return _elementwise(self, out.op.lower(), out, out.src[0], out.src[1])


def scale(self: Lowering, nodes: list[Tensor]) -> Any | None:
    (out,) = nodes
    return _elementwise(self, "scale", out, out.src[0], s0=out.params.scale, s1=out.params.bias)


def softcap(self: Lowering, nodes: list[Tensor]) -> Any | None:
    return _elementwise(self, "softcap", nodes[-1], nodes[0].src[0], s0=nodes[-1].params.scale)


def unary(self: Lowering, nodes: list[Tensor]) -> Any | None:
    (out,) = nodes
    known = out.params.kind in ("silu", "gelu", "relu")
    return _elementwise(self, out.params.kind, out, out.src[0]) if known else None


def glu(self: Lowering, nodes: list[Tensor]) -> Any | None:
    (out,) = nodes
    if out.params.kind not in ACTIVATIONS or len(out.src) < 2 or out.src[1] is None:
        return None
    return _elementwise(self, f"{ACTIVATIONS[out.params.kind]}_glu", out, out.src[0], out.src[1])


def rope(self: Lowering, nodes: list[Tensor]) -> Any | None:
    (out,) = nodes
    x, positions, factors = (*out.src, None)[:3]
    assert x is not None and positions is not None
    constant = factors is None or (factors.buffer is not None and factors.is_contiguous)
    if x.dtype.name != "f32" or x.ne[3] != 1 or not x.has_contiguous_rows or not constant:
        return None
    divide_by = self.look(factors).reshape(-1).tolist() if factors is not None else None
    theta, magnitude = rope_frequencies(out.params, divide_by)
    return [
        fast.rope(
            y=self.at(out), x=self.at(x), pos=self.at(positions), freq=self.array(theta, np.float64),
            head_dim=x.ne[0], n_dims=out.params.n_dims, neox=out.params.mode == "neox", n_head=x.ne[1], n_tok=x.ne[2],
            x_nb1=x.nb[1], x_nb2=x.nb[2], y_nb1=out.nb[1], y_nb2=out.nb[2], mscale=magnitude,
        )
    ]  # fmt: skip


def get_rows(self: Lowering, nodes: list[Tensor]) -> Any | None:
    (out,) = nodes
    table, ids = out.src
    assert table is not None and ids is not None
    flat = table.ne[2] == table.ne[3] == 1 and ids.is_contiguous and table.has_contiguous_rows
    if not flat or table.dtype.name not in fast.TYPES:
        return None
    return [
        fast.get_rows(
            table.dtype.name, "i32", dst=self.at(out), w=self.at(table), idx=self.at(ids), n_rows=ids.ne[0],
            n=table.ne[0], w_nb=table.nb[1], dst_nb=out.nb[1], n_src=table.ne[1],
        )
    ]  # fmt: skip


def set_rows(self: Lowering, nodes: list[Tensor]) -> Any | None:
    (out,) = nodes
    rows, ids, target = out.src
    assert rows is not None and ids is not None and target is not None
    lies = _rows(rows)
    flat = target.ne[2] == target.ne[3] == 1 and ids.is_contiguous
    if lies is None or not flat or target.dtype.name not in fast.SET_ROWS_TYPES:
        return None
    return [
        fast.set_rows(
            target.dtype.name, ids.dtype.name, src=self.at(rows), idx=self.at(ids), dst=self.at(target),
            n_rows=rows.ne[1], n=rows.ne[0], src_nb=lies[1], dst_nb=target.nb[1], n_dst=target.ne[1],
        )
    ]  # fmt: skip


def flash_attn(self: Lowering, nodes: list[Tensor]) -> Any | None:
    (out,) = nodes
    q, k, v, mask, sinks = (*out.src, None, None)[:5]
    assert q is not None and k is not None and v is not None
    if q.ne[1] > fast.MAX_TOKENS:
        return _flash_attn_large(self, out, q, k, v, mask, sinks)
    known = k.dtype.name in fast.KV_TYPES and v.dtype.name in fast.KV_TYPES
    if not known or not all(t.has_contiguous_rows for t in (q, k, v)):
        return None
    p = out.params
    slopes = self.array(alibi_slopes(q.ne[2], p.max_bias), np.float32) if p.max_bias else 0
    return [
        fast.flash_attn_decode(
            k.dtype.name, v.dtype.name, d_k=k.ne[0], d_v=v.ne[0], n_q=q.ne[1], n_kv=k.ne[1], n_head=q.ne[2],
            n_head_kv=k.ne[2], n_seq=q.ne[3], q=self.at(q), q_nb=q.nb[1:], k=self.at(k), k_nb=k.nb[1:], v=self.at(v),
            v_nb=v.nb[1:], out=self.at(out), out_nb=out.nb[1:], scale=p.scale, mask=self.at(mask),
            mask_nb=mask.nb[1:] if mask is not None else (0, 0, 0), mask_ne=mask.ne[2:] if mask is not None else (1, 1),
            softcap=p.softcap, sinks=self.at(sinks), slopes=slopes,
        )
    ]  # fmt: skip


def _flash_attn_large(
    self: Lowering, out: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None
) -> Callable[[], None] | None:
    """Many queries. Sinks, a mask of each head's own and quantized caches are left to the reference."""
    plain = not (k.dtype.is_quantized or v.dtype.is_quantized)
    if sinks is not None or not plain or (mask is not None and mask.ne[2] != 1):
        return None
    looks = self.look(q), self.look(k), self.look(v)
    seen = self.look(mask) if mask is not None else None
    attention = Attention(out, looks[0], looks[1], looks[2], seen, self.look(out), dense)

    def run() -> None:
        if not attention.run():
            attention.out.copy_(REFERENCES["FLASH_ATTN_EXT"].function(out, *(t.float() for t in looks), seen))

    return run


_METHODS: dict[str, Callable[[Lowering, list[Tensor]], Any | None]] = {
    "RMS_NORM": norm_mul, "norm_mul": norm_mul, "MUL_MAT": matmul, "matmul_add": matmul, "gate_up_glu": gate_up_glu,
    "ADD": add_or_mul, "MUL": add_or_mul, "SCALE": scale, "softcap": softcap, "UNARY": unary, "GLU": glu, "ROPE": rope,
    "GET_ROWS": get_rows, "SET_ROWS": set_rows, "FLASH_ATTN_EXT": flash_attn,
}  # fmt: skip
