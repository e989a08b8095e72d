"""CPY, CONT, DUP, CONCAT, REPEAT. torch's copies move plain elements and bytes; rounding to blocks is rows.py's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from graphrt.backends.triton.accesses import Call
from graphrt.backends.triton.context import Context, Step
from graphrt.backends.triton.kernels.dequantize import dequantize
from graphrt.backends.triton.kernels.rows import block_rows, write_launch
from graphrt.tensor import Tensor


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


def lower_cpy(nodes: Sequence[Tensor], ctx: Context) -> list[Step]:
    """CPY: the same type as it is, all others through f32 or torch's conversion."""
    a, target = nodes[0]["a"], nodes[0]["target"]
    if a.dtype == target.dtype or not (a.dtype.is_quantized or target.dtype.is_quantized):
        return [_copy(_elements(a, ctx), _elements(target, ctx))]
    values, steps = _decoded(a, ctx) if a.dtype.is_quantized else (_elements(a, ctx), [])
    if target.dtype.is_quantized:
        return [*steps, write_launch(values, None, ctx.view(target), ctx)]
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
