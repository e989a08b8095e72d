"""The graphs that `graphrt bench op FLASH_ATTN_BACK` measures, and some rows of what they give against float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import graphrt
from graphrt import ops
from graphrt.backend import Backend
from graphrt.graph import Graph
from graphrt.ops.dropout import kept_at
from graphrt.ops.flash_attn_ext import FlashAttnParams
from graphrt.ops.flash_attn_varlen import FlashAttnVarlenParams
from graphrt.ops.soft_max import alibi_slopes
from graphrt.tensor import Tensor, new_input
from graphrt.testing import AnyArray, dequantize, nmse
from graphrt.tools.bench.back_shapes import BackShape
from graphrt.tools.bench.op_inputs import Noise

#: Rows of a gradient that are judged, and the NMSE over which a result is not reported: products in bf16.
_ROWS, _LIMIT = 12, 1e-4
SEED, OFFSET = 2**33 + 9, 5


@dataclass
class BackProgram:
    """Gradients of one attention, with out and lse of its forward. values: of all leafs; nodes: by source."""

    shape: BackShape
    leafs: dict[str, Tensor] = field(default_factory=dict)
    values: dict[Tensor, AnyArray] = field(default_factory=dict)
    nodes: dict[str, Tensor] = field(default_factory=dict)

    @property
    def params(self) -> Any:
        s = self.shape
        scale = s.d**-0.5 * (2.0 if s.softcap else 1.0)
        if s.packed:
            return FlashAttnVarlenParams(scale, s.max_bias, s.softcap, s.causal)
        return FlashAttnParams(scale, s.max_bias, s.softcap, s.dropout_p, SEED, OFFSET)


def build(shape: BackShape, noise: Noise, backend: Backend) -> BackProgram:
    """The graph and its values; the forward runs on the backend."""
    program, (n_head, n_kv_head), n, d = BackProgram(shape), shape.heads, shape.n, shape.d

    def leaf(name: str, kind: str, ne: tuple[int, ...], values: AnyArray | None = None) -> Tensor:
        t = program.leafs[name] = new_input(kind, *ne, name=name)
        if values is None:
            values = noise.take(kind, t.n_elements, len(program.leafs))
        program.values[t] = values.reshape(t.shape)
        return t

    q = leaf("q", "f32", (d, n, n_head))
    k, v = (leaf(name, shape.kv_type, (d, n, n_kv_head)) for name in "kv")
    sinks = None
    if shape.sinks:  # as heavy as all keys together
        sinks = leaf("sinks", "f32", (n_head,), np.add(noise.take("f32", n_head, 0), np.float32(np.log(n))))
    out, lse = _forward(program, q, k, v, sinks, leaf, backend)
    d_out = leaf("d_out", "f32", (d, n_head, n))
    for of in shape.of:
        if shape.packed:
            starts = program.leafs["starts"]
            program.nodes[of] = ops.flash_attn_varlen_back(
                of, d_out, q, k, v, out, lse, starts, starts, program.params, sinks=sinks
            )
        else:
            given: dict[str, Any] = {name: program.leafs.get(name) for name in ("mask", "attn_bias")}
            program.nodes[of] = ops.flash_attn_back(
                of, d_out, q, k, v, out, lse, program.params, sinks=sinks, **given
            )  # fmt: skip
    return program


def _forward(
    program: BackProgram, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, leaf: Any, backend: Backend
) -> tuple[Tensor, Tensor]:
    """Leafs with out and lse."""
    s, p = program.shape, program.params
    same: dict[str, Any] = {"sinks": sinks, "max_bias": s.max_bias, "softcap": s.softcap}
    if s.packed:
        starts = leaf("starts", "i32", (len(s.seqs) + 1,), np.cumsum([0, *s.seqs]).astype(np.int32))
        same |= {"k_starts": starts, "causal": s.causal}
        made = ops.flash_attn_varlen(q, k, v, starts, p.scale, **same)
        logs = ops.flash_attn_varlen_lse(q, k, starts, p.scale, **same)
    else:
        mask = leaf("mask", "f16", (s.n, s.n), _mask(s)) if s.causal else None
        same["attn_bias"] = leaf("attn_bias", "f16", (s.n, s.n)) if s.bias else None
        dropout: dict[str, Any] = {"dropout_p": s.dropout_p, "seed": SEED, "offset": OFFSET} if s.dropout_p else {}
        made = ops.flash_attn_ext(q, k, v, mask, p.scale, **same, **dropout)
        logs = ops.flash_attn_lse(q, k, mask, p.scale, **same)
    exe = graphrt.prepare(Graph(made, logs), backend)
    fill(program, exe, made, logs)
    exe.run()
    out = leaf("out", "f32", made.ne[:3], np.array(exe.read(made)))
    return out, leaf("lse", "f32", logs.ne[:2], np.array(exe.read(logs)))


def _mask(s: BackShape) -> npt.NDArray[np.float16]:
    """Causal; with ALiBi each position's distance."""
    values = np.zeros((s.n, s.n), np.float16)
    for i, row in enumerate(values):  # by row: a matrix of positions would take eight times the mask
        row[i + 1 :] = -np.inf
        if s.max_bias:
            row[: i + 1] = np.arange(-i, 1)
    return values


def fill(program: BackProgram, exe: Any, *of: Tensor) -> None:
    """Writes the leafs that the nodes read."""
    wanted = {t for node in of for t in node.sources()}
    for t, values in program.values.items():
        if t in wanted:
            exe.write(t, values)


def wrong(program: BackProgram, exe: Any, device: str) -> str:
    """What is wrong with the gradients, "" for nothing: rows of each against float64."""
    rng, truth = np.random.default_rng(1), _Truth(program, device)
    for of, node in program.nodes.items():
        actual = np.asarray(exe.read(node))
        if not np.isfinite(actual).all():
            return f"of {of}: {int((~np.isfinite(actual)).sum())} elements are NaN or infinite"
        if of == "sinks":
            continue  # a sum over all rows of a head, which would take all of them
        heads = {"q": program.shape.heads[0], "attn_bias": 1}.get(of, program.shape.heads[1])
        n = program.shape.n
        rows = [(int(rng.integers(heads)), int(i)) for i in [0, n - 1, *rng.integers(0, n, _ROWS)]]
        flat = actual.reshape(heads, n, -1)
        error = nmse(np.stack([flat[h, i] for h, i in rows]), np.stack([truth.row(of, h, i) for h, i in rows]))
        if not error < _LIMIT:
            return f"of {of}: NMSE {error:.3g} of rows (head, row) {rows[:3]}, ..., over {_LIMIT:g}"
    return ""


class _Truth:
    """Rows of gradients in float64."""

    def __init__(self, program: BackProgram, device: str) -> None:
        self.program, self.s, self.p, self.device = program, program.shape, program.params, device
        n, (h, g), d = self.s.n, self.s.heads, self.s.d
        self.q, self.k, self.v = (self._leaf(x).reshape(m, n, d) for x, m in (("q", h), ("k", g), ("v", g)))
        self.out, self.d_out = (self._leaf(x).reshape(n, h, d) for x in ("out", "d_out"))
        self.lse = self._leaf("lse").reshape(n, h)
        self.bias = self._leaf("attn_bias").reshape(n, n) if self.s.bias else None
        self.slopes = alibi_slopes(h, self.s.max_bias)

    def _leaf(self, name: str) -> torch.Tensor:
        t = self.program.leafs[name]
        values = self.program.values[t]
        plain = dequantize(values, t.dtype) if t.dtype.name == "bf16" else values
        return torch.from_numpy(np.array(plain, np.float32)).to(self.device)

    def row(self, of: str, head: int, i: int) -> npt.NDArray[np.float64]:
        """A row of the gradient of q (head, query), of k or v (KV head, key), or of the bias (0, query)."""
        per = self.s.heads[0] // self.s.heads[1]
        everyone = range(self.s.n)
        if of == "q":
            _, d_s, _ = self._scores(head, [i], everyone)
            found = self.p.scale * d_s @ self.k[head // per].double()
        elif of == "attn_bias":
            found = sum(self._scores(h, [i], everyone)[2] for h in range(self.s.heads[0]))
        else:
            found = torch.zeros(1, self.s.d, dtype=torch.float64, device=self.device)
            for h in range(head * per, head * per + per):
                weights, d_s, _ = self._scores(h, everyone, [i])
                mine = weights.T @ self.d_out[:, h].double() if of == "v" else (
                    self.p.scale * d_s.T @ self.q[h].double()
                )  # fmt: skip
                found = found + mine
        result: npt.NDArray[np.float64] = found[0].cpu().numpy()
        return result

    def _scores(self, h: int, i: Any, j: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(dropped weights, dS, dT) of queries i and keys j of a head, [len(i), len(j)]."""
        s, g = self.s, h // (self.s.heads[0] // self.s.heads[1])
        i, j = (torch.as_tensor(list(x), device=self.device) for x in (i, j))
        t = self.q[h, i].double() @ self.k[g, j].double().T * self.p.scale
        bend = torch.ones_like(t)
        if s.softcap:
            bent = torch.tanh(t / s.softcap)
            t, bend = s.softcap * bent, 1 - bent**2
        behind = (i[:, None] - j).double()
        t = t - self.slopes[h] * behind.abs() if s.max_bias else t
        if self.bias is not None:
            t = t + self.bias[i][:, j].double()
        starts = torch.tensor(np.cumsum([0, *s.seqs]), device=self.device)
        seen = torch.bucketize(i, starts, right=True)[:, None] == torch.bucketize(j, starts, right=True)
        seen = seen & (behind >= 0) if s.causal else seen
        w = torch.where(seen, torch.exp(t - self.lse[i, h].double()[:, None]), 0.0)
        factor = self._kept(h, i, j) / (1 - s.dropout_p) if s.dropout_p else torch.ones_like(w)
        d_w = self.d_out[i, h].double() @ self.v[g, j].double().T * factor
        delta = (self.d_out[i, h].double() * self.out[i, h].double()).sum(-1, keepdim=True)
        d_t = w * (d_w - delta)
        return w * factor, d_t * bend, d_t

    def _kept(self, h: int, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        """ops/dropout.py for some queries and keys of a head."""
        queries, keys = i.cpu().numpy()[:, None], j.cpu().numpy()[None]
        found = kept_at(self.s.dropout_p, SEED, OFFSET, h, queries, keys)
        return torch.from_numpy(found.astype(np.float64)).to(self.device)
