"""Steps that append to a cache whose keys lie in panels and attend it: graphs, inputs and what must come out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from graphrt import ops, prepare
from graphrt.backend import Backend, Region, Usage, get_backend
from graphrt.backends.triton.context import Context
from graphrt.backends.triton.device import Target
from graphrt.backends.triton.kernels.flash_attn.launcher import PANEL_APPEND, Launcher
from graphrt.backends.triton.launch import Launch
from graphrt.backends.triton.lowering import lower
from graphrt.backends.triton.memory import TritonBuffer
from graphrt.dtypes import dtype
from graphrt.execute import Executable
from graphrt.fusion import Fusion, fuse
from graphrt.graph import Graph
from graphrt.judge import judge
from graphrt.op import made_by
from graphrt.ops.key_panels import panel_width, set_key_panels
from graphrt.tensor import Tensor, new_input
from graphrt.testing import dequantize, quantize
from support.reference64 import REFERENCE64


@dataclass
class PanelStep:
    """A step's graph. values: of each leaf; k_set, v_set: the caches behind it; out: the attention."""

    values: dict[Tensor, np.ndarray]
    k_set: Tensor
    v_set: Tensor
    out: Tensor

    @property
    def graph(self) -> Graph:
        return Graph(self.out, self.k_set, self.v_set)

    def launches(self, target: Target, schedule: str, fusion: Fusion = PANEL_APPEND) -> list[Launch]:
        """What the attention and its append, as the fusion finds it, become on a GPU, in memory of zeros."""
        places: dict[Tensor, TritonBuffer] = {}

        def place(t: Tensor) -> tuple[TritonBuffer, int]:
            zeros = torch.zeros(t.root.nbytes, dtype=torch.uint8)
            return places.setdefault(t.root, TritonBuffer(zeros, Usage.COMPUTE)), t.view_offs

        groups = fuse(Region(self.graph.nodes, lambda t: t is self.out), [fusion])
        segments = lower(groups, Context(place, target, False), Launcher(target, place, schedule))
        steps = [step for segment in segments for step in segment.steps]
        return [step for step in steps if isinstance(step, Launch)]

    def filled(self, backend: Backend) -> Executable:
        exe = prepare(self.graph, backend)
        for leaf, values in self.values.items():
            exe.write(leaf, values)
        return exe

    def caches(self) -> list[np.ndarray]:
        """Both caches as SET_ROWS of the exact CPU backend leaves them."""
        exe = prepare(Graph(self.k_set, self.v_set), get_backend("cpu"))
        for leaf in exe.graph.inputs:
            exe.write(leaf, self.values[leaf])
        exe.run()
        return [exe.read(t) for t in (self.k_set, self.v_set)]

    def why_wrong(self, exe: Executable) -> str:
        """What is wrong with a run: "" if both caches have SET_ROWS' own bytes, and the result is right by float64."""
        caches = self.caches()
        for t, expected in zip((self.k_set, self.v_set), caches):
            if exe.read(t).tobytes() != expected.tobytes():
                return f"{t.name} does not hold what SET_ROWS writes"
        k, v = (dequantize(x, t.dtype) for x, t in zip(caches, (self.k_set, self.v_set)))
        node = self.out
        d, n_kv, heads, n_seq = node["v"].ne
        k, v = (
            x.reshape(n_seq, -1, heads, d).transpose(0, 2, 1, 3) if x.shape[3] == d * heads else x for x in (k, v)
        )  # a row for all heads of a cell
        more = (self.values.get(node[name]) for name in ("mask", "sinks"))
        sources = [self.values[node["q"]], k[:, :, :n_kv], v[:, :, :n_kv], *more]

        def reference(kind: Any) -> np.ndarray:
            return REFERENCE64["FLASH_ATTN_EXT"](node, *(x if x is None else x.astype(kind) for x in sources))

        return judge(node, exe.read(node), reference(np.float64), reference(np.float16)).message


def panel_step(
    d: int, heads: tuple[int, int], n_kv: int, cells: list[int], kinds: tuple[str, str] = ("f16", "f16"),
    mask: np.ndarray | None = None, sinks: bool = False, n_cells: int | None = None, d_v: int | None = None,
    cell_rows: bool = False, rows: str = "f32", ids: str = "i64", apart: bool = False, from_cell: int = 0,
    n_q: int = 1, attn_bias: bool = False, nan_value: bool = False, layer: str = "", **more: Any,
) -> PanelStep:  # fmt: skip
    """A step of len(cells) sequences, one token each, which goes to cells[i] of its own cache. n_kv: cells that are
    read, of n_cells, from from_cell on; mask: f16 [n_seq or 1, n_kv], None for none: cells that it hides from a
    sequence and the token's own hold NaN; cell_rows: V has one row for all heads of a cell; rows: the new rows' type;
    apart: V's indices are others than K's; nan_value: the new V is NaN; layer: inputs' names begin with it; more: of
    flash_attn_ext."""
    rng, n_seq, (n_head, n_head_kv) = np.random.default_rng(d + n_kv), len(cells), heads
    n_cells, d_v, x = n_cells or n_kv, d_v or d, panel_width(dtype(kinds[0]))
    values: dict[Tensor, np.ndarray] = {}

    def leaf(name: str, kind: str, *ne: int, given: Any = None) -> Tensor:
        t = new_input(kind, *ne, name=layer + name)
        found = rng.standard_normal(t.shape) if given is None else np.asarray(given).reshape(t.shape)
        values[t] = quantize(found.astype(np.float32), t.dtype)
        return t

    unread = np.zeros((n_seq, n_cells), bool)
    unread[:, n_kv:] = True
    if mask is not None:
        unread[:, :n_kv] = np.isneginf(mask)
    for row, cell in zip(unread, cells):
        if 0 <= cell < n_cells:
            row[cell] = True

    def cache(name: str, kind: str, *ne: int) -> Tensor:
        """Cells along dimension 1 of each sequence, the last dimension."""
        found = np.moveaxis(rng.standard_normal(ne[::-1]), -2, 1)
        found[unread] = np.nan
        return leaf(name, kind, *ne, given=np.moveaxis(found, 1, -2))

    where = leaf("cells", ids, 1, 1, n_seq, given=cells)
    k_cache = cache("k_cache", kinds[0], x, n_cells, d // x * n_head_kv, n_seq)
    k_set = set_key_panels(leaf("k", rows, d, n_head_kv, 1, n_seq), where, k_cache, name="k_set")
    if apart:
        where = leaf("cells of v", ids, 1, 1, n_seq, given=cells)
    if cell_rows:
        v_cache = cache("v_cache", kinds[1], d_v * n_head_kv, n_cells, n_seq)
        v_set = ops.set_rows(
            leaf("v", rows, d_v * n_head_kv, 1, n_seq), ops.reshape(where, 1, n_seq), v_cache, name="v_set"
        )
        size = dtype(kinds[1]).type_size
        v = ops.view(v_set, (d_v, n_kv, n_head_kv, n_seq), (v_set.nb[1], d_v * size, v_set.nb[2]))
    else:
        v_cache = cache("v_cache", kinds[1], d_v, n_cells, n_head_kv, n_seq)
        v_new = ops.permute(leaf("v", rows, d_v, n_head_kv, 1, n_seq), 0, 2, 1, 3)
        v_set = ops.set_rows(v_new, where, v_cache, name="v_set")
        v = ops.view(v_set, (d_v, n_kv, n_head_kv, n_seq), v_set.nb[1:])
    if nan_value:
        values[made_by(v_set["rows"])][:] = np.nan
    k = ops.view(k_set, (x, n_kv, *k_set.ne[2:]), k_set.nb[1:], from_cell * k_set.nb[1])
    masked = None if mask is None else leaf("mask", "f16", n_kv, 1, 1, len(mask), given=mask)
    if sinks:
        more["sinks"] = leaf("sinks", "f32", n_head, given=rng.standard_normal(n_head) + np.log(n_kv))
    if attn_bias:
        more["attn_bias"] = leaf("bias", "f32", n_kv, n_q, n_head)
    q = leaf("q", "f32", d, n_q, n_head, n_seq)
    out = ops.flash_attn_ext(q, k, v, masked, d**-0.5, k_layout="panels", name="out", **more)
    return PanelStep(values, k_set, v_set, out)
