"""FLASH_ATTN_VARLEN: attention of packed queries of sequences of any length, over pages or packed keys, and
FLASH_ATTN_VARLEN_LSE, the log of its softmax denominators.

    q        [D_k, n_tokens, n_head]             f32: the new tokens of all sequences, one sequence after the other
    k        [D_k, page, n_head_kv, n_pages]     any float or quantized type: pages, with lengths and block_table
             [D_k, n_keys, n_head_kv]            the keys of all sequences one after the other, with k_starts
    v        the same with D_v; its own type; !! not transposed; may be a view of k
    q_starts [n_seq + 1]           i32  first query of each sequence; those from the last number on belong to nobody
    lengths  [n_seq]               i32  keys of each sequence, its new tokens included
    block_table    [max_blocks, n_seq]   i32  page that holds keys i * page and following of a sequence
    k_starts [n_seq + 1]           i32  first key of each sequence
    prefixes [3, n_groups]         i32  groups: first sequence, sequences, pages that they share; may be None
    sinks    [n_head]              f32  one more logit without a value; may be None
    mask     [n_columns, n_tokens, m2]   f16  a row for each query over keys of its own sequence; m2 divides n_head; may
                                   be None
    out      [D_v, n_head, n_tokens]    f32

The last new token of a sequence stands at its last key: query i of n, with L keys, has position L - n + i. All of
q_starts, lengths, block_table, k_starts and prefixes are read when the graph runs; shapes bound them and decide nothing
else.

prefixes tells of sequences whose tables begin with the same pages, so that a backend can read those once for all of
them. It changes no result: lengths and tables are as without it.

A mask is beside the rules of causal and window, and counts like FLASH_ATTN_EXT's: slope(head) * mask is added after
softcap and score function, and -inf hides. Its column c is of the sequence's key c, wherever its page lies, or with
mask_new of its new token c, the key at position L - n + c: a tree of drafted tokens has a square of its own size,
however long what lies before it. Nothing is added to keys without a column. Elements of keys that there are not, and
rows of queries that are nobody's, count for nothing and may hold NaN.

Scales of k and v, which FLASH_ATTN_EXT has as sources, are products beside the op, whose 10 sources are all taken:
flash_attn_varlen() multiplies q's heads by k_scale before, and the result's by v_scale after. Keys are in rows, not in
panels, q and the result are f32, and there is no dropout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from graphrt.arguments import checked
from graphrt.dtypes import F32
from graphrt.errors import GraphError
from graphrt.op import OpSpec, Result, Work, build, register, require
from graphrt.ops.head_scales import scale_queries, scale_result
from graphrt.ops.score import as_params, check_params
from graphrt.ops.score_tree import Expr
from graphrt.tensor import Tensor

#: Tokens of a page.
PAGES = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class FlashAttnVarlenParams:
    """scale on q.k; max_bias: ALiBi's, 0 without; softcap: 0 without; causal: a query sees keys up to its position;
    window: how many positions back it sees, itself included, 0 for all. score, score_numbers: a score function as
    score_text.py writes it, "" for none. mask_new: columns of the mask are a sequence's new tokens, not its keys."""

    scale: float
    max_bias: float = 0.0
    softcap: float = 0.0
    causal: bool = True
    window: int = 0
    score: str = ""
    score_numbers: tuple[float, ...] = ()
    mask_new: bool = False


def _check_operands(op: str, q: Tensor, k: Tensor) -> None:
    require(q.dtype.name == "f32", op, "q must be f32", q)
    require(q.ne[3] == 1, op, "q must be [D_k, n_tokens, n_head]", q)
    require(k.dtype.kind != "int", op, "k must be a float or quantized type", k)
    require(q.ne[0] == k.ne[0], op, "q and k must have equal head size ne[0]", q, k)
    require(q.ne[2] % k.ne[2] == 0, op, "the heads of k must divide the heads of q", q, k)


def _check_numbers(op: str, what: str, t: Tensor, ne: tuple[int, ...]) -> None:
    """t: i32 of shape ne, elements side by side."""
    full = (*ne, *(1,) * (4 - len(ne)))
    require(t.dtype.name == "i32" and t.ne == full, op, f"{what} must be i32 {list(ne)}", t)
    require(t.has_contiguous_rows, op, f"{what} must lie side by side; make them so with ops.cont", t)


def _check_sequences(
    op: str, k: Tensor, q_starts: Tensor, lengths: Tensor | None, block_table: Tensor | None, k_starts: Tensor | None,
    prefixes: Tensor | None,
) -> None:  # fmt: skip
    n_seq = q_starts.ne[0] - 1
    require(n_seq >= 1, op, "q_starts must have a number for each sequence and one more", q_starts)
    _check_numbers(op, "q_starts", q_starts, (n_seq + 1,))
    paged = lengths is not None and block_table is not None and k_starts is None
    packed = lengths is None and block_table is None and k_starts is not None
    rule = "keys come in pages, with lengths and block_table, or packed, with k_starts"
    require(paged or packed, op, f"{rule}; give these", lengths, block_table, k_starts)
    if lengths is not None and block_table is not None:
        require(k.ne[1] in PAGES, op, f"a page must have one of {', '.join(map(str, PAGES))} tokens, k's ne[1]", k)
        _check_numbers(op, "lengths", lengths, (n_seq,))
        _check_numbers(op, "block_table", block_table, (block_table.ne[0], n_seq))
    if k_starts is not None:
        require(k.ne[3] == 1, op, "packed k must be [D_k, n_keys, n_head_kv]", k)
        _check_numbers(op, "k_starts", k_starts, (n_seq + 1,))
    if prefixes is not None:
        require(paged, op, "prefixes are of pages: packed keys have none", prefixes, k_starts)
        _check_numbers(op, "prefixes", prefixes, (3, prefixes.ne[1]))


def _check_rest(op: str, q: Tensor, sinks: Tensor | None, p: FlashAttnVarlenParams, mask: Tensor | None = None) -> None:
    finite = all(math.isfinite(x) for x in (p.scale, p.max_bias, p.softcap)) and p.softcap >= 0 and p.max_bias >= 0
    require(finite, op, f"scale, max_bias and softcap must be finite, the last two not negative, got {p}")
    require(0 <= p.window < 2**31, op, f"window must be 0, for all, to {2**31 - 1}, got {p.window}")
    if sinks is not None:
        fits = sinks.dtype.name == "f32" and sinks.n_elements == q.ne[2]
        require(fits, op, "sinks must be f32 with one value a head of q", q, sinks)
    require(mask is not None or not p.mask_new, op, "mask_new says what a mask's columns are: give it a mask", q)
    if mask is not None:
        require(mask.dtype.name == "f16", op, "the mask must be f16", mask)
        rows = mask.ne[1] == q.ne[1] and mask.ne[3] == 1
        require(rows, op, "the mask must be [n_columns, n_tokens, m2], a row for each query", q, mask)
        require(q.ne[2] % mask.ne[2] == 0, op, "dimension 2 of the mask must divide the heads of q", q, mask)
        require(
            mask.has_contiguous_rows, op, "the mask's columns must lie side by side; make them so with ops.cont", mask
        )


def _check_score(q: Tensor, k: Tensor, q_starts: Tensor, table: Tensor | None, p: FlashAttnVarlenParams) -> None:
    """Queries of a sequence with fewer keys than queries have positions below 0."""
    most = k.ne[1] * (table.ne[0] if table is not None else 1)
    sizes = {"b": range(q_starts.ne[0]), "h": range(q.ne[2]), "i": range(-q.ne[1], most), "j": range(most)}
    check_params(p.score, p.score_numbers, sizes)


def _infer_attn(
    params: FlashAttnVarlenParams, q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor, lengths: Tensor | None,
    block_table: Tensor | None, k_starts: Tensor | None, sinks: Tensor | None, prefixes: Tensor | None,
    mask: Tensor | None,
) -> Result:  # fmt: skip
    op = "FLASH_ATTN_VARLEN"
    _check_operands(op, q, k)
    require(v.dtype.kind != "int", op, "v must be a float or quantized type", v)
    require(k.ne[1:] == v.ne[1:], op, "k and v must agree in keys, heads and pages", k, v)
    _check_sequences(op, k, q_starts, lengths, block_table, k_starts, prefixes)
    _check_rest(op, q, sinks, params, mask)
    _check_score(q, k, q_starts, block_table, params)
    return Result(F32, (v.ne[0], q.ne[2], q.ne[1]))


def _infer_lse(
    params: FlashAttnVarlenParams, q: Tensor, k: Tensor, q_starts: Tensor, lengths: Tensor | None,
    block_table: Tensor | None, k_starts: Tensor | None, sinks: Tensor | None, prefixes: Tensor | None,
    mask: Tensor | None,
) -> Result:  # fmt: skip
    op = "FLASH_ATTN_VARLEN_LSE"
    _check_operands(op, q, k)
    _check_sequences(op, k, q_starts, lengths, block_table, k_starts, prefixes)
    _check_rest(op, q, sinks, params, mask)
    _check_score(q, k, q_starts, block_table, params)
    return Result(F32, (q.ne[2], q.ne[1]))


def check_packed(
    op: str, q: Tensor, k: Tensor, q_starts: Tensor, k_starts: Tensor, sinks: Tensor | None, p: FlashAttnVarlenParams
) -> None:
    """Raises GraphError for what is no attention over packed keys."""
    _check_operands(op, q, k)
    _check_sequences(op, k, q_starts, None, None, k_starts, None)
    _check_rest(op, q, sinks, p)


def longest(node: Tensor) -> int:
    """The most keys that a sequence of a node can have."""
    block_table, page = node["block_table"], node["k"].ne[1]
    return block_table.ne[0] * page if block_table is not None else page


def _work(node: Tensor) -> Work:
    """!! Upper bounds, since lengths are known on the device only: every sequence is as long as the table allows
    (packed keys: all are one sequence's), every query sees all of its keys, and every page that a table can name is
    read once.

    A v that lies in k adds no bytes.
    """
    q, k, block_table = node["q"], node["k"], node["block_table"]
    v = node["v"] if node.op == "FLASH_ATTN_VARLEN" else None
    caches = [k] if v is None or (v.root is k.root and v.view_offs == k.view_offs) else [k, v]
    named = min(block_table.n_elements, k.ne[3]) if block_table is not None else 1
    read = sum(t.data_nbytes * named // t.ne[3] for t in caches)
    rest = sum(t.data_nbytes for t in set(node.sources()) if t is not k and t is not v)
    d_v = v.ne[0] if v is not None else 0
    return Work(2 * (k.ne[0] + d_v) * longest(node) * q.n_rows, node.data_nbytes + read + rest)


_SEQUENCES = ("q_starts", "lengths?", "block_table?", "k_starts?", "sinks?", "prefixes?", "mask?")
FLASH_ATTN_VARLEN = register(
    OpSpec("FLASH_ATTN_VARLEN", _infer_attn, _work, ("q", "k", "v", *_SEQUENCES), params=FlashAttnVarlenParams)
)
FLASH_ATTN_VARLEN_LSE = register(
    OpSpec("FLASH_ATTN_VARLEN_LSE", _infer_lse, _work, ("q", "k", *_SEQUENCES), params=FlashAttnVarlenParams)
)


@checked(GraphError)
def flash_attn_varlen(
    q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor, scale: float, *, lengths: Tensor | None = None,
    block_table: Tensor | None = None, k_starts: Tensor | None = None, sinks: Tensor | None = None,
    prefixes: Tensor | None = None, max_bias: float = 0.0, softcap: float = 0.0, causal: bool = True, window: int = 0,
    score: Expr | None = None, mask: Tensor | None = None, mask_new: bool = False, k_scale: Tensor | None = None,
    v_scale: Tensor | None = None, name: str = "",
) -> Tensor:  # fmt: skip
    """Attention of packed queries of sequences of any length: for each of them result = softmax(s) v over its keys.

    s = scale * q.k, with a softcap softcap * tanh(s / softcap), less slope(head) * |query's - key's position| with
    max_bias (ALiBi's); one more logit without a value from sinks (f32 [n_head] or None). q: f32 [D_k, n_tokens,
    n_head]; queries q_starts[b] to q_starts[b + 1] - 1 are of sequence b, those from q_starts[n_seq] on of nobody;
    q_starts: i32 [n_seq + 1], never decreasing. Keys in pages: k [D_k, page, n_head_kv, n_pages] of any float or
    quantized type and any strides, v the same with D_v, may be a view of k; page is 16, 32, 64, 128 or 256; lengths:
    i32 [n_seq], keys of each sequence with its new tokens, at most max_blocks * page; block_table: i32 [max_blocks,
    n_seq]; key j of sequence b is in page block_table[j // page, b] at j % page. Entries behind a length, or wholly
    out of every query's window, are not read. Packed keys: k [D_k, n_keys, n_head_kv], and k_starts i32 [n_seq + 1] as
    q_starts. Query i of n of a sequence with L keys has position L - n + i; it sees keys at positions up to its own if
    causal, all if not; of these with a window only those over its own less window (0: all). The result is f32 [D_v,
    n_head, n_tokens], 0 for a query that sees nothing. Cells that no query sees may hold NaN. An entry that is read
    and names no page, and numbers beyond the tensors' ends, give results without a meaning and read nothing outside.
    prefixes: i32 [3, n_groups] or None, of pages only: column g, (first, count, pages), promises that sequences first
    to first + count - 1 have the first `pages` entries of the table in common, and that these pages * page keys come
    before the first new token of each; groups ascend and have no sequence in common; those of no sequence or no page
    say nothing. A backend may read such pages once; results mean what they do without, nothing where a promise is
    broken. score: a function of score.py or None, of what scale and softcap made of q.k, before ALiBi's part; its i and
    j are positions, i below 0 for a query before the first key. mask: f16 [n_columns, n_tokens, m2] or None, m2
    dividing n_head: slope(head) * mask[c, t, head % m2] is added to the logit of query t, behind the score function,
    and -inf hides, beside what causal and window do; c is the number of a key of the query's own sequence, or with
    mask_new the key's position less L - n, so that columns are the new tokens'; nothing is added to keys without a
    column. Elements of keys behind a length and rows of nobody's queries may hold NaN. k_scale, v_scale: f32 with one
    value or n_head_kv, by which what k and v hold is multiplied, or None; they are MULs before and behind the op.
    Source: varlen attention of FlashAttention-2 (arXiv 2307.08691) over the pages of PagedAttention (arXiv
    2309.06180); ggml has no such op. Raises GraphError for other types and shapes, for anything but pages or packed
    keys, and for numbers that are not finite.
    """
    numbers = (float(scale), float(max_bias), float(softcap), bool(causal), int(window))
    params = FlashAttnVarlenParams(*numbers, *as_params(score), bool(mask_new))
    if k_scale is not None:
        q = scale_queries("FLASH_ATTN_VARLEN", q, k_scale, k.ne[2])
    sources = (q, k, v, q_starts, lengths, block_table, k_starts, sinks, prefixes, mask)
    if v_scale is None:
        return build(FLASH_ATTN_VARLEN, *sources, params=params, name=name)
    out = build(FLASH_ATTN_VARLEN, *sources, params=params)
    return scale_result("FLASH_ATTN_VARLEN", out, v_scale, v.ne[2], name)


@checked(GraphError)
def flash_attn_varlen_lse(
    q: Tensor, k: Tensor, q_starts: Tensor, scale: float, *, lengths: Tensor | None = None,
    block_table: Tensor | None = None, k_starts: Tensor | None = None, sinks: Tensor | None = None,
    prefixes: Tensor | None = None, max_bias: float = 0.0, softcap: float = 0.0, causal: bool = True, window: int = 0,
    score: Expr | None = None, mask: Tensor | None = None, mask_new: bool = False, k_scale: Tensor | None = None,
    name: str = "",
) -> Tensor:  # fmt: skip
    """The log of the softmax denominators of flash_attn_varlen(): result = ln(sum exp(s)), the sink included.

    s as there, of the same arguments: q: f32 [D_k, n_tokens, n_head]; k: pages or packed keys of any float or
    quantized type; q_starts, lengths, block_table, k_starts, prefixes: i32; sinks: f32 [n_head] or None; scale,
    max_bias, softcap, causal, window: numbers; score: a function of score.py or None; mask: f16 or None, mask_new: what
    its columns are; k_scale: f32 with one value or n_head_kv, or None (v_scale changes no denominator). The result is
    f32 [n_head, n_tokens], -inf for a query that sees nothing, not even a sink, and for those of nobody. A node of its
    own beside FLASH_ATTN_VARLEN with the same sources, so that a backend can fuse the two; with k_scale each has a
    product of q of its own. Source: FlashAttention-2 (arXiv 2307.08691), section 3.1; ggml has no such op. Raises
    GraphError for what flash_attn_varlen() refuses.
    """
    numbers = (float(scale), float(max_bias), float(softcap), bool(causal), int(window))
    params = FlashAttnVarlenParams(*numbers, *as_params(score), bool(mask_new))
    if k_scale is not None:
        q = scale_queries("FLASH_ATTN_VARLEN_LSE", q, k_scale, k.ne[2])
    sources = (q, k, q_starts, lengths, block_table, k_starts, sinks, prefixes, mask)
    return build(FLASH_ATTN_VARLEN_LSE, *sources, params=params, name=name)
