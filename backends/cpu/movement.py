"""GET_ROWS, SET_ROWS, CPY, CONT, DUP, CONCAT, REPEAT, ARGMAX, ARGSORT, TOP_K."""

from __future__ import annotations

import math

import torch

from graphrt.backends.cpu.blocks import decode, encode
from graphrt.backends.cpu.reference import reference
from graphrt.tensor import Tensor


@reference("GET_ROWS", stored=("table",))
def get_rows(node: Tensor, table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Decodes only the rows asked for; float32 holds what a row of any type holds. A row that is not there is NaN, -1
    in integers."""
    source = node["table"]
    d3, d2 = table.shape[:2]
    i3, i2 = torch.arange(d3)[:, None, None], torch.arange(d2)[None, :, None]
    rows = ids.reshape(d3, d2, -1)
    outside = (rows < 0) | (rows >= source.ne[1])
    picked = decode(table[i3, i2, rows.masked_fill(outside, 0)], source.dtype, torch.float32)
    return picked.masked_fill(outside[..., None], -1 if source.dtype.kind == "int" else math.nan)


@reference("SET_ROWS", stored=("target",))
def set_rows(node: Tensor, rows: torch.Tensor, ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Writes into `target`, the stored elements, and returns the rows as they were given. An index outside is left
    out, so that a wrong one does not write elsewhere."""
    d3, d2 = rows.shape[:2]
    e3, e2 = ids.shape[1:3]
    spread = ids.reshape(e3, e2, -1).repeat(d3 // e3, d2 // e2, 1)
    i3, i2, i1 = ((spread >= 0) & (spread < node.ne[1])).nonzero(as_tuple=True)
    target[i3, i2, spread[i3, i2, i1]] = encode(rows, node.dtype)[i3, i2, i1]
    return rows


@reference("CPY", stored=("target",))
def cpy(node: Tensor, a: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Writes into `target`, the stored elements, and returns the values in its shape."""
    values = a.reshape(node.shape)
    if node["a"].root is node["target"].root:  # what is read may be written meanwhile
        values = values.clone()
    target.copy_(encode(values, node.dtype))
    return values


@reference("CONT")
def cont(node: Tensor, a: torch.Tensor) -> torch.Tensor:
    return a


@reference("DUP")
def dup(node: Tensor, a: torch.Tensor) -> torch.Tensor:
    return a


@reference("CONCAT")
def concat(node: Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.cat((a, b), dim=3 - node.params.dim)


@reference("REPEAT")
def repeat(node: Tensor, a: torch.Tensor) -> torch.Tensor:
    return a.repeat([full // n for n, full in zip(a.shape, node.shape)])


@reference("ARGMAX")
def argmax(node: Tensor, a: torch.Tensor) -> torch.Tensor:
    return a.argmax(-1).reshape(node.shape)


@reference("ARGSORT")
def argsort(node: Tensor, a: torch.Tensor) -> torch.Tensor:
    return a.argsort(dim=-1, descending=node.params.descending, stable=True)


@reference("TOP_K")
def top_k(node: Tensor, a: torch.Tensor) -> torch.Tensor:
    return a.topk(node.params.k, dim=-1).indices
