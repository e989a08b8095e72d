"""CPY, CONT, DUP, CONCAT, REPEAT. torch's copies move plain elements and bytes; rounding to blocks and to 8 bits is
rows.py's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from graphrt.backends.triton.accesses import Call
from graphrt.backends.triton.context import Context, Step, View
from graphrt.backends.triton.kernels.dequantize import dequantize
from graphrt.backends.triton.kernels.rows import block_rows, write_launch
from graphrt.dtypes import DType
from graphrt.tensor import Tensor

#: torch's types of the floats of 8 bits.
_FLOATS8 = {"f8_e4m3": torch.float8_e4m3fn, "f8_e5m2": torch.float8_e5m2}


def _elements(t: Tensor, ctx: Context) -> torch.Tensor:
    """What a copy moves: a plain tensor's elements, a quantized one's rows of bytes, in torch's order."""
    view = ctx.view(t)
    return block_rows(view) if t.dtype.is_quantized else view.torch()


def _copy(source: torch.Tensor, target: torch.Tensor) -> Step:
    """Moves elements in order, whatever the shapes."""

    def step() -> None:
        target.copy_(source.reshape(target.shape))

    return Call("copy", step, [source], [target], helper=True)


def _decoded(t: Tensor, ctx: Context) -> tuple[torch.Tensor, list[Step]]:
    """The values of a quantized tensor as f32 in torch's shape, and the steps that make them."""
    memory = ctx.shared_scratch("decoded copy", 4 * t.n_elements)[: 4 * t.n_elements].view(torch.float32)
    values = memory.view(t.shape)
    packed, steps = ctx.packed(t)
    return values, [*steps, dequantize(packed, memory)]


def _encoded(values: torch.Tensor, dt: DType, ctx: Context) -> tuple[torch.Tensor, list[Step]]:
    """Floats as codes of 8 bits, uint8 in their shape, and the step that makes them."""
    n = values.numel()
    memory = ctx.shared_scratch("encoded copy", n)[:n]
    whole = Tensor(dt, tuple(reversed(values.shape)))
    steps: list[Step] = [write_launch(values, None, View(whole, memory, whole.nb), ctx)]
    return memory.view(values.shape), steps


def lower_cpy(nodes: Sequence[Tensor], ctx: Context) -> list[Step]:
    """CPY: the same type as it is, all others through f32 or torch's conversion.

    torch reads floats of 8 bits as they are stored, but rounds what is too large to NaN: write_launch rounds to them.
    """
    a, target = nodes[0]["a"], nodes[0]["target"]
    if a.dtype == target.dtype:
        return [_copy(_elements(a, ctx), _elements(target, ctx))]
    values, steps = _decoded(a, ctx) if a.dtype.is_quantized else (_elements(a, ctx), [])
    if a.dtype.is_float8:
        values = values.view(_FLOATS8[a.dtype.name])
        if target.dtype.kind != "float":
            memory = ctx.shared_scratch("decoded copy", 4 * a.n_elements)[: 4 * a.n_elements].view(torch.float32)
            values, steps = memory.view(a.shape), [_copy(values, memory.view(a.shape))]
    if target.dtype.is_quantized:
        return [*steps, write_launch(values, None, ctx.view(target), ctx)]
    if target.dtype.is_float8:
        values, encoding = _encoded(values, target.dtype, ctx)
        steps = [*steps, *encoding]
    return [*steps, _copy(values, _elements(target, ctx))]


def lower_cont(nodes: Sequence[Tensor], ctx: Context) -> list[Step]:
    """CONT, DUP."""
    return [_copy(_elements(nodes[0]["a"], ctx), _elements(nodes[0], ctx))]


def lower_concat(nodes: Sequence[Tensor], ctx: Context) -> list[Step]:
    """CONCAT: two copies into parts of the result."""
    node = nodes[0]
    a, b = node["a"], node["b"]
    out, dim = _elements(node, ctx), 3 - node.params.dim
    n, m = a.shape[dim], b.shape[dim]
    return [_copy(_elements(a, ctx), out.narrow(dim, 0, n)), _copy(_elements(b, ctx), out.narrow(dim, n, m))]


def lower_repeat(nodes: Sequence[Tensor], ctx: Context) -> list[Step]:
    """REPEAT: one copy, of dimensions (times, source's) in turn."""
    node = nodes[0]
    a = _elements(node["a"], ctx)
    pairs = [n for full, own in zip(node.shape, a.shape) for n in (full // own, own)]
    return [_copy(_with_ones(a).expand(pairs), _elements(node, ctx).view(pairs))]


def _with_ones(a: torch.Tensor) -> torch.Tensor:
    """A look at `a` with a dimension of 1 before each of its own."""
    for i in range(4):
        a = a.unsqueeze(2 * i)
    return a


LOWERINGS: dict[str, Callable[[Sequence[Tensor], Context], list[Step]]] = {
    "CPY": lower_cpy, "CONT": lower_cont, "DUP": lower_cont, "CONCAT": lower_concat, "REPEAT": lower_repeat,
}  # fmt: skip
