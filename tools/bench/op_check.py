"""The gate before a time is reported: some rows of the result against float64, by the rule of graphrt.judge."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from graphrt.execute import Executable
from graphrt.judge import Verdict, judge
from graphrt.ops.dropout import kept_at, left_out
from graphrt.ops.flash_attn_ext import PREC_F8
from graphrt.ops.soft_max import alibi_slopes
from graphrt.tensor import Tensor
from graphrt.testing import dequantize
from graphrt.tools.bench.op_inputs import SEED, Program
from graphrt.tools.bench.op_shapes import CAP
from graphrt.tools.conformance.run.lowprec import to_e4m3

#: How many rows (head, query) of a node are judged.
ROWS = 64

Row = tuple[int, int]
Floats = npt.NDArray[np.floating]


@dataclass(frozen=True)
class Checked:
    """wrong: what is wrong, "" when nothing is. error: the largest relative error of the judged rows."""

    wrong: str
    error: float = math.inf


def check(program: Program, exe: Executable, device: str, seed: int = 0) -> Checked:
    """Judges what a run gives after its queries were rewritten, so that a run that computes nothing shows.

    Every output must be finite throughout; of the first and the last node, ROWS rows are judged. device: torch's,
    where the float64 rows are computed.
    """
    looked_at = sorted({0, len(program.nodes) - 1})
    for i in looked_at:
        program.new_queries(exe, i)
    exe.run()
    worst = 0.0
    for i, node in enumerate(program.nodes):
        actual = np.asarray(exe.read(node)[0])  # [n_q, n_head, d_v]
        if not np.isfinite(actual).all():
            return Checked(_not_finite(node, actual))
        if i in looked_at:
            rows = sample(node.ne[1], node.ne[2], seed + i)
            checked = _judge_rows(program, node, actual, rows, device)
            if checked.wrong:
                return checked
            worst = max(worst, checked.error)
    return Checked("", worst)


def _not_finite(node: Tensor, actual: Floats) -> str:
    bad = ~np.isfinite(actual)
    query, head, element = (int(i) for i in np.argwhere(bad)[0])
    return f"{node.name}: {int(bad.sum())} elements are NaN or infinite, first at head {head}, query {query}, {element}"


def sample(n_head: int, n_q: int, seed: int) -> list[Row]:
    """ROWS different rows (head, query), or all; the first and last query of the first and last head are among them."""
    corners = {h * n_q + i for h in (0, n_head - 1) for i in (0, n_q - 1)}
    drawn = np.random.default_rng(seed).choice(n_head * n_q, min(ROWS, n_head * n_q), replace=False)
    chosen = [*sorted(corners), *(int(i) for i in drawn if i not in corners)][: max(ROWS, len(corners))]
    return [divmod(i, n_q) for i in chosen]


def _judge_rows(program: Program, node: Tensor, actual: Floats, rows: Sequence[Row], device: str) -> Checked:
    expected, low = expected_rows(program, node, rows, device)
    verdict = judge(program.fused[node], np.stack([actual[i, h] for h, i in rows]), expected, low)
    error = math.sqrt(verdict.nmse) if verdict.nmse is not None else math.inf
    return Checked(f"{node.name}: {_told(verdict, rows)}" if not verdict.ok else "", error)


def _told(verdict: Verdict, rows: Sequence[Row]) -> str:
    """The verdict's figures, with the place in the whole result and not in the sample."""
    if verdict.worst is None or verdict.nmse is None or verdict.limit is None:
        return verdict.message
    (head, query), element = rows[verdict.worst[1]], verdict.worst[0]
    what = f"over {verdict.limit:.3g}"
    if verdict.nmse <= verdict.limit:  # another of the judge's rules, which counts rows in the sample
        what = f"over all; of {len(rows)} rows of the result: {verdict.message}"
    return f"NMSE {verdict.nmse:.3g} {what}; worst at head {head}, query {query}, element {element}"


def expected_rows(program: Program, node: Tensor, rows: Sequence[Row], device: str) -> tuple[Floats, Floats]:
    """Rows of a node's result, [len(rows), d_v]: in float64, and in float32 with q, k, v and p rounded to f16,
    or to e4m3 where products are of that.

    One head of k and v at a time is on the device, since all of them in float64 can be more than it has room for.
    """
    s = program.shape
    expected, low = (np.zeros((len(rows), s.d_v)) for _ in range(2))
    for group in range(s.n_head_kv):
        mine = [j for j, (head, _) in enumerate(rows) if head * s.n_head_kv // s.n_head == group]
        if mine:
            sources = _Sources.of(program, node, group, [rows[j] for j in mine], device)
            expected[mine] = sources.attend(torch.float64, lambda x: x)
            low[mine] = sources.attend(torch.float32, to_e4m3 if s.prec == PREC_F8 else lambda x: x.half().float())
    return expected, low


@dataclass(frozen=True)
class _Sources:
    """What some rows of a result are computed from, in float64 on the device.

    q: [rows, d]; k: [n_kv, d]; v: [n_kv, d_v]; bias: the mask times each head's slope, [rows, n_kv], or None; sinks:
    [rows, 1], -inf where there are none; kept: dropout's weights over what is kept of them, [rows, n_kv], or None.
    """

    program: Program
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bias: torch.Tensor | None
    sinks: torch.Tensor
    kept: torch.Tensor | None = None

    @classmethod
    def of(cls, program: Program, node: Tensor, group: int, rows: Sequence[Row], device: str) -> _Sources:
        node = program.fused[node]
        s, mask, sinks = program.shape, node["mask"], node["sinks"]
        heads, queries = (list(x) for x in zip(*rows))

        def put(values: npt.NDArray[np.generic]) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(device).double()

        def one_head(t: Tensor) -> torch.Tensor:
            if s.panels and t is node["k"]:
                x = t.ne[0]
                of_head = program.values[t].reshape(s.n_head_kv, s.d // x, s.n_kv, x)[group]
                return put(of_head.transpose(1, 0, 2).reshape(s.n_kv, s.d))
            raw = program.values[t].reshape(s.n_head_kv, s.n_kv, -1)[group]
            return put(dequantize(raw, t.dtype) if t.dtype.kind != "float" else raw)

        keys = one_head(node["k"])
        bias = None
        if mask is not None:
            slopes = np.array(alibi_slopes(s.n_head, s.max_bias))[heads]
            bias = put(program.values[mask][queries]) * put(slopes)[:, None]
        kept = None
        if s.dropout_p:
            places = np.array(heads)[:, None], np.array(queries)[:, None], np.arange(s.n_kv)[None]
            kept = put(kept_at(s.dropout_p, SEED, node.params.offset, *places)) / (1.0 - left_out(s.dropout_p))
        if s.score == "slopes":
            away = np.abs(np.array(queries)[:, None] - np.arange(s.n_kv))
            added = put(-np.array(alibi_slopes(s.n_head, 8.0))[heads][:, None] * away)
            bias = added if bias is None else bias + added
        no_sinks = np.full(len(rows), -math.inf)
        return cls(
            program,
            put(program.values[node["q"]].reshape(s.n_head, s.n_q, s.d)[heads, queries]),
            keys,
            keys[:, : s.d_v] if s.v_in_k else one_head(node["v"]),
            bias,
            put(program.values[sinks][heads] if sinks is not None else no_sinks)[:, None],
            kept,
        )

    def attend(self, kind: torch.dtype, rounded: Callable[[torch.Tensor], torch.Tensor]) -> Floats:
        """The rows computed in `kind`; `rounded` is applied to what a kernel multiplies."""
        shape = self.program.shape
        scores = rounded(self.q.to(kind)) @ rounded(self.k.to(kind)).T * shape.scale
        if shape.softcap:
            scores = shape.softcap * torch.tanh(scores / shape.softcap)
        if shape.score == "softcap":
            scores = CAP * torch.tanh(scores / CAP)
        if shape.score == "gate":
            scores = scores * torch.sigmoid(scores)
        if self.bias is not None:
            scores = scores + self.bias.to(kind)
        sinks = self.sinks.to(kind)
        top = torch.maximum(scores.amax(-1, keepdim=True), sinks)
        p = torch.exp(scores - top)
        total = p.sum(-1, keepdim=True) + torch.exp(sinks - top)
        p = p * self.kept.to(kind) if self.kept is not None else p
        out = rounded(p) @ rounded(self.v.to(kind)) / total
        result: Floats = out.double().cpu().numpy()
        return result
