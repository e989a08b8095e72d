"""`graphrt bench op FLASH_ATTN_VARLEN`: attention over pages and packed keys, and over contiguous caches beside it."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

import graphrt
from graphrt import ops
from graphrt.backend import Backend
from graphrt.graph import Graph
from graphrt.tensor import Tensor, new_input
from graphrt.testing import AnyArray, dequantize, nmse
from graphrt.tools.bench.op_inputs import CACHES_BYTES, CACHES_TIMES, DECODE_NODES, Noise
from graphrt.tools.bench.timing import Clock, runs_for
from graphrt.tools.bench.varlen_shapes import TABLES, VarlenShape
from graphrt.tools.common import markdown_lines, table_lines

COLUMNS = (
    "model", "BS", "HQ", "HK", "SEQ_LEN", "HEAD_DIM", "shape", "Time_(ms)", "TFLOPS", "Bandwidth_(GB/s)", "of_ceiling",
    "beside",
)  # fmt: skip
#: The most nodes of a graph, and the fewest where a node's caches are at most so many bytes: lists of tiles are made
#: once for all of a run's layers, and one layer alone would pay for what a model's share. Rows that are checked.
_MOST_NODES, _LARGE, _ROWS = 16, 2**29, 24
#: NMSE over which a result is not reported: products in f16.
_LIMIT = 1e-4


@dataclass
class VarlenProgram:
    """A graph of some attentions of a shape, with caches of their own, and the values of all leafs."""

    shape: VarlenShape
    nodes: list[Tensor] = field(default_factory=list)
    values: dict[Tensor, AnyArray] = field(default_factory=dict)
    pages: npt.NDArray[np.int64] | None = None


def build(shape: VarlenShape, n_nodes: int, noise: Noise) -> VarlenProgram:
    """The graph. Pages are in no order, those of no sequence left out."""
    program = VarlenProgram(shape)
    n_seq, starts = len(shape.seqs), np.cumsum([0, *(n for n, _ in shape.seqs)])
    given: dict[str, Any] = {}

    def numbers(name: str, values: npt.NDArray[np.int64]) -> Tensor:
        t = new_input("i32", *values.shape[::-1], name=name)
        program.values[t] = values.astype(np.int32)
        return t

    n_cells = sum(length for _, length in shape.seqs)
    if not shape.contiguous:
        given["q_starts"] = numbers("q_starts", starts)
    if shape.page and not shape.contiguous:
        same = shape.shared // shape.page
        blocks = [-(-length // shape.page) - same for _, length in shape.seqs]
        n_pages, table = same + sum(blocks), np.full((n_seq, same + max(blocks)), -1)
        order = np.random.default_rng(0).permutation(n_pages)
        table[:, :same] = order[:same]
        for i, (n, end) in enumerate(zip(blocks, same + np.cumsum(blocks))):
            table[i, same : same + n] = order[end - n : end]
        program.pages, n_cells = table, n_pages * shape.page
        if same and shape.told:
            given["prefixes"] = numbers("prefixes", np.array([[0, n_seq, same]]))
        given["lengths"] = numbers("lengths", np.array([length for _, length in shape.seqs]))
        given["block_table"] = numbers("block_table", table)
    elif shape.padded:
        n_cells = shape.longest * n_seq
    elif not shape.contiguous:
        own = all(n == length for n, length in shape.seqs)
        ends = np.cumsum([0, *(length for _, length in shape.seqs)])
        given["k_starts"] = given["q_starts"] if own else numbers("k_starts", ends)
    mask = _mask(program) if shape.contiguous else _explicit(program)
    if mask is not None and not shape.contiguous:
        given |= {"mask": mask, "mask_new": shape.mask == "new"}
    for i in range(n_nodes):
        _node(program, i, n_cells, noise, given, mask)
    return program


def _node(
    program: VarlenProgram, i: int, n_cells: int, noise: Noise, given: dict[str, Any], mask: Tensor | None
) -> None:
    s = program.shape
    n_head, n_head_kv, d_k, d_v = s.heads
    n_seq = len(s.seqs)

    def cache(name: str, d: int, which: int) -> Tensor:
        whole = new_input(s.kv_type, d * n_head_kv, n_cells, name=f"{name}{i}")
        program.values[whole] = noise.take(s.kv_type, whole.n_elements, which).reshape(n_cells, -1)
        return heads_of(whole, d)

    def heads_of(whole: Tensor, d: int) -> Tensor:
        row, head = whole.nb[1], whole.nb[1] // n_head_kv
        if s.contiguous:
            return ops.view(whole, (d, s.longest, n_head_kv, n_seq), (row, head, s.longest * row))
        if s.page:
            return ops.view(whole, (d, s.page, n_head_kv, n_cells // s.page), (row, head, s.page * row))
        return ops.view(whole, (d, n_cells, n_head_kv), (row, head))

    k = cache("k", d_k, 2 * i)
    v = ops.view(k, (d_v, *k.ne[1:]), k.nb[1:]) if d_k == 576 else cache("v", d_v, 2 * i + 1)
    q = new_input("f32", d_k, n_head, s.firsts[-1], name=f"q{i}")
    program.values[q] = noise.take("f32", q.n_elements, i).reshape(q.shape)
    scale = d_k**-0.5
    if s.contiguous:
        n = s.longest if s.padded else s.seqs[0][0]
        queries = ops.permute(ops.reshape(q, d_k, n_head, n, n_seq), 0, 2, 1, 3)
        program.nodes.append(ops.flash_attn_ext(queries, k, v, mask, scale, name=f"out{i}"))
    else:
        queries = ops.permute(q, 0, 2, 1, 3)
        program.nodes.append(
            ops.flash_attn_varlen(queries, k, v, scale=scale, causal=s.causal, name=f"out{i}", **given)
        )


def _mask(program: VarlenProgram) -> Tensor | None:
    """The contiguous form's: causal, none for one query; of padded sequences of texts, each its own."""
    s = program.shape
    n, length = s.seqs[0]
    if s.padded:
        key, end = np.arange(s.longest), np.array([n for _, n in s.seqs])[:, None, None, None]
        seen = np.broadcast_to(key < end, (len(s.seqs), 1, s.longest, s.longest))
        mask = new_input("f16", s.longest, s.longest, 1, len(s.seqs), name="mask")
    elif n == 1:
        return None
    else:
        mask = new_input("f16", length, n, name="mask")
        seen = np.arange(length) <= length - n + np.arange(n)[:, None]
    program.values[mask] = np.where(seen, 0, -np.inf).astype(np.float16)
    return mask


def _explicit(program: VarlenProgram) -> Tensor | None:
    """The paged form's, which hides nothing."""
    s = program.shape
    if not s.mask:
        return None
    mask = new_input("f16", max(n for n, _ in s.seqs) if s.mask == "new" else s.longest, s.n_tokens, name="mask")
    program.values[mask] = np.zeros(mask.shape, np.float16)
    return mask


def wrong(program: VarlenProgram, exe: Any) -> str:
    """What is wrong with the first and the last node's results, "" for nothing: some rows against float64."""
    s, rng = program.shape, np.random.default_rng(1)
    n_head = s.heads[0]
    for node in {program.nodes[0], program.nodes[-1]}:
        actual = np.asarray(exe.read(node)).reshape(s.firsts[-1], n_head, -1)
        if not np.isfinite(actual).all():
            return f"{node.name}: {int((~np.isfinite(actual)).sum())} elements are NaN or infinite"
        tokens = np.concatenate([first + np.arange(n) for first, (n, _) in zip(s.firsts, s.seqs)])
        chosen = tokens[[0, -1, *rng.integers(0, s.n_tokens, _ROWS)]]
        rows = [(int(t), int(rng.integers(n_head))) for t in chosen]
        error = nmse(np.stack([actual[t, h] for t, h in rows]), np.stack([_row(program, node, t, h) for t, h in rows]))
        if not error < _LIMIT:
            return f"{node.name}: NMSE {error:.3g} of rows (token, head) {rows[:3]}, ..., over {_LIMIT:g}"
    return ""


def _row(program: VarlenProgram, node: Tensor, token: int, head: int) -> npt.NDArray[np.float64]:
    """One row of a result in float64."""
    s = program.shape
    n_head, n_head_kv, d_k, d_v = s.heads
    starts = np.array(s.firsts)
    seq = int(np.searchsorted(starts, token, "right")) - 1
    n, length = s.seqs[seq]
    seen = length - n + token - starts[seq] + 1 if s.causal else length
    key = np.arange(seen)
    if program.pages is not None:
        cells = program.pages[seq, key // s.page] * s.page + key % s.page
    else:
        cells = (seq * s.longest if s.padded else sum(at for _, at in s.seqs[:seq])) + key
    kv_head = head * n_head_kv // n_head

    def rows(t: Tensor, d: int) -> npt.NDArray[np.float64]:
        stored = program.values[t.root]
        raw = stored.reshape(len(stored), n_head_kv, -1)[cells, kv_head]
        values = dequantize(raw, t.dtype) if t.dtype.kind != "float" else raw
        return np.asarray(values.reshape(seen, -1)[:, :d], np.float64)

    logits = rows(node["k"], d_k) @ program.values[node["q"].root][0, token, head].astype(np.float64) * d_k**-0.5
    p = np.exp(logits - logits.max())
    out: npt.NDArray[np.float64] = p @ rows(node["v"], d_v) / p.sum()
    return out


@dataclass
class VarlenRow:
    """One shape's outcome; seconds: of one op, None where message says why there is none."""

    shape: VarlenShape
    seconds: float | None = None
    message: str = ""


def measure(
    shapes: Sequence[VarlenShape], backend: Backend, clock: Clock, cache_bytes: int, repetitions: int | None,
    say: Callable[[str], None],
) -> list[VarlenRow]:  # fmt: skip
    """A row for each shape; whatever is raised on the way becomes a message. cache_bytes: of the device's own cache."""
    noise, rows = Noise(), []
    for shape in shapes:
        row = VarlenRow(shape)
        rows.append(row)
        try:
            least = DECODE_NODES[0] if shape.cache_bytes <= _LARGE else 1
            n_nodes = min(max(max(CACHES_BYTES, CACHES_TIMES * cache_bytes) // shape.cache_bytes, least), _MOST_NODES)
            program = build(shape, n_nodes if cache_bytes else 2, noise)
            exe = graphrt.prepare(Graph(*program.nodes), backend)
            for leaf, values in program.values.items():
                exe.write(leaf, values.reshape(leaf.shape) if not leaf.dtype.is_quantized else values)
            for _ in range(3):
                exe.run()
            row.message = wrong(program, exe)
            if not row.message:
                n = repetitions or runs_for(clock.times(exe.run, 3, exe.synchronize).median)
                row.seconds = clock.times(exe.run, n, exe.synchronize).median / len(program.nodes)
            del exe, program
        except Exception as error:  # a compiler's, a driver's, lack of memory
            row.message = f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}"
        say(f"{shape.name}: {1e6 * row.seconds:.1f} us" if row.seconds is not None else f"{shape.name}: {row.message}")
    return rows


def cells_of(row: VarlenRow, rows: Sequence[VarlenRow], copy_gb_per_s: float, tflop_per_s: float) -> list[str]:
    """A row of the tables. of_ceiling: of copied bytes, or of a matrix product; beside: the speed as a share of another
    shape's, by real work."""
    s = row.shape
    n_head, n_head_kv, d_k, d_v = s.heads
    length = f"{min(n for _, n in s.seqs)}..{s.longest}" if s.ragged else str(s.longest)
    head = [s.model, str(len(s.seqs)), str(n_head), str(n_head_kv), length, f"{d_k}" if d_k == d_v else f"{d_k}/{d_v}"]
    if row.seconds is None:
        return [*head, s.name, "-", "-", "-", "-", row.message or "-"]
    rates = s.flops / row.seconds / 1e12, s.bytes / row.seconds / 1e9
    share = rates[1] / copy_gb_per_s if s.table == "pa_decode" else rates[0] / tflop_per_s
    other = next((r for r in rows if r.shape.name == s.beside), None)
    beside = "-"
    if other is not None and other.seconds is not None:
        beside = f"{rates[0] / (other.shape.flops / other.seconds / 1e12):.3f} of {s.beside}"
    figures = [f"{1e3 * row.seconds:.4f}", f"{rates[0]:.3g}", f"{rates[1]:.0f}", f"{100 * share:.0f} %"]
    return [*head, s.name, *figures, beside]


def lines(rows: Sequence[VarlenRow], form: str, copy_gb_per_s: float, tflop_per_s: float) -> list[str]:
    """The tables as text: form is "table", "md" or "csv"."""
    found: list[str] = []
    for table in TABLES:
        cells = [cells_of(r, rows, copy_gb_per_s, tflop_per_s) for r in rows if r.shape.table == table]
        if not cells:
            continue
        columns = [c if c != "SEQ_LEN" or table == "pa_decode" else "MAX_SEQ_LEN" for c in COLUMNS]
        if form == "csv":
            text = io.StringIO()
            csv.writer(text, lineterminator="\n").writerows([["table", *columns], *([table, *c] for c in cells)])
            found += text.getvalue().splitlines()
        else:
            found += [table, "", *(markdown_lines if form == "md" else table_lines)(columns, cells), ""]
    return found


def as_json(rows: Sequence[VarlenRow]) -> list[dict[str, Any]]:
    """Every row with its sizes; rates are of real work."""
    return [
        {
            **{k: v for k, v in asdict(r.shape).items() if k != "seqs"}, "sequences": len(r.shape.seqs),
            "tokens": r.shape.n_tokens, "longest": r.shape.longest,
            "ms": None if r.seconds is None else 1e3 * r.seconds,
            "tflop_per_s": None if r.seconds is None else r.shape.flops / r.seconds / 1e12,
            "gb_per_s": None if r.seconds is None else r.shape.bytes / r.seconds / 1e9, "message": r.message,
        }
        for r in rows
    ]  # fmt: skip


def failed(rows: Sequence[VarlenRow]) -> bool:
    return any(r.seconds is None or not math.isfinite(r.seconds) for r in rows)
