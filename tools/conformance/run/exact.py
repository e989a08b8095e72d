"""A whole graph in float64, by the reference functions: no result is rounded to its own type on the way.

What finite differences are taken of, and what a gradient is held against. It is torch all through, so that torch can
differentiate it too. Tensors that share memory share it here as well: a view is a view of its source's elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from graphrt.backends.cpu import backend  # noqa: F401  (fills REFERENCES)
from graphrt.backends.cpu.matmul import product
from graphrt.backends.cpu.reference import REFERENCES
from graphrt.op import op_spec
from graphrt.tensor import Tensor

T = torch.Tensor
Values = dict[Tensor, T]


def _look(t: Tensor, memory: T) -> T:
    """The elements of `t` in its root's memory, counted in elements."""
    size, block = t.dtype.type_size, t.dtype.block_size
    strides = [n // size * block for n in t.nb[:0:-1]]
    return memory.as_strided(t.shape, (*strides, t.nb[0] // size), t.view_offs // size * block)


def _get_rows(node: Tensor, table: T, ids: T) -> T:
    d3, d2 = table.shape[:2]
    i3, i2 = torch.arange(d3)[:, None, None], torch.arange(d2)[None, :, None]
    return table[i3, i2, ids.reshape(d3, d2, -1)]


def _set_rows(node: Tensor, rows: T, ids: T, target: T) -> T:
    d3, d2 = rows.shape[:2]
    spread = ids[0].repeat(d3 // ids.shape[1], d2 // ids.shape[2], 1)
    i3, i2, i1 = ((spread >= 0) & (spread < node.ne[1])).nonzero(as_tuple=True)
    return target.index_put((i3, i2, spread[i3, i2, i1]), rows[i3, i2, i1])


def _mul_mat_id(node: Tensor, weights: T, x: T, ids: T) -> T:
    out = x.new_full(node.shape, math.nan)
    x = x.expand(-1, -1, node.ne[1], -1)
    for expert in sorted(set(ids.reshape(-1).tolist())):
        if 0 <= expert < weights.shape[1]:
            chosen = ids[0] == expert
            out[chosen] = product(x[chosen], weights[0, expert])
    return out


def _mul_mat_id_back(node: Tensor, weights: T, d: T, ids: T) -> T:
    out = d.new_full(node.shape, math.nan)
    for expert in sorted(set(ids.reshape(-1).tolist())):
        if 0 <= expert < weights.shape[1]:
            chosen = ids[0] == expert
            out[chosen] = d[chosen] @ weights[0, expert]
    return out


#: Ops whose reference functions take stored elements, or write.
_OWN: dict[str, Callable[..., T]] = {
    "GET_ROWS": _get_rows,
    "SET_ROWS": _set_rows,
    "CPY": lambda node, a, target: a.reshape(node.shape),
    "MUL_MAT_ID": _mul_mat_id,
    "MUL_MAT_ID_BACK": _mul_mat_id_back,
}


def exact_values(nodes: Sequence[Tensor], given: Mapping[Tensor, Any]) -> Values:
    """The values of leafs and nodes in torch's shape: float64, integers int64.

    nodes: in an order in which sources come before users; given: the values of their leafs, of quantized ones as
    numbers, in torch's shape or flat.
    """
    memory: Values = {}
    values: Values = {}
    for leaf, numbers in given.items():
        kind = torch.int64 if leaf.dtype.kind == "int" else torch.float64
        memory[leaf] = torch.as_tensor(numbers).to(kind).reshape(-1)
        values[leaf] = memory[leaf].reshape(leaf.shape)
    for node in nodes:
        spec = op_spec(node.op)
        if spec.is_view:
            memory[node] = memory[next(node.sources())]
            values[node] = _look(node, memory[node])
            continue
        function = _OWN.get(node.op) or REFERENCES[node.op].function
        found = function(node, *[None if s is None else values[s] for s in node.src])
        if spec.writes is None:
            memory[node] = found.reshape(-1)
            values[node] = found.reshape(node.shape)
        else:
            before = memory[node[spec.writes]]
            places = _look(node, torch.arange(before.numel()))
            memory[node] = before.index_put((places.reshape(-1),), found.to(before.dtype).reshape(-1))
            values[node] = _look(node, memory[node])
    return values
