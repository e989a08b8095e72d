"""FLASH_ATTN_EXT: attention in one op, and FLASH_ATTN_LSE, the log of its softmax denominators.

    q     [D_k, n_q,  n_head,    n_seq]  f32, or f8_e4m3 as it is
    k     [D_k, n_kv, n_head_kv, n_seq]  any float or quantized type, any strides; or in panels (key_panels.py)
    v     [D_v, n_kv, n_head_kv, n_seq]  its own type; !! not transposed; may be a view of k
    mask  [n_kv, n_q, m2, m3]  f16, added after scale and softcap; m2 divides n_head, m3 divides n_seq; may be None
    sinks [n_head]  f32: one more logit without a value; may be None
    attn_bias [n_kv, n_q, b2, b3]  f16, bf16 or f32, added beside the mask; b2 divides n_head, b3 divides n_seq; may be
                    None
    k_scale, v_scale  f32, one value or one a head of k and v, which these are times of what they hold; may be None
    out   [D_v, n_head, n_q, n_seq]  f32, or f8_e4m3 of the values divided by out_scale  !! permuted

    s = q.k * scale * k_scale;  if softcap: s = softcap * tanh(s / softcap);  if score: s = score(s, sequence, head,
    query, key);  s += slope(head) * mask + attn_bias;  softmax over s and the sink;  out = p.v * v_scale / out_scale

Keys whose mask is -inf are skipped, so NaN in an unused cache cell is harmless. A row with every key masked gives 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from graphrt.arguments import checked
from graphrt.dtypes import F32, dtype
from graphrt.errors import GraphError
from graphrt.op import OpSpec, Result, Work, build, moved_bytes, register, require
from graphrt.ops.head_scales import check_scale
from graphrt.ops.key_panels import ROWS, check_layout, key_heads
from graphrt.ops.score import as_params, check_params
from graphrt.ops.score_tree import Expr
from graphrt.tensor import Tensor

#: What FlashAttnParams.prec may be: the backend's choice; products and sums in f32 (both ggml's numbers, op_params[3]);
#: products of 8-bit floats (a number of our own, which ggml does not know).
PREC_DEFAULT, PREC_F32, PREC_F8 = 0, 10, 8
#: What queries may be stored in; gradients want f32.
Q_TYPES = ("f32", "f8_e4m3")
#: What the result may be stored in.
OUT_TYPES = {"f32": F32, "f8_e4m3": dtype("f8_e4m3")}


@dataclass(frozen=True)
class FlashAttnParams:
    """scale on q.k; max_bias: ALiBi's, 0 without; softcap: 0 without. dropout_p: the part of the weights that is
    left out, rounded as dropout.py says, the others are divided by 1 less it; seed (64 bits) and offset (32 bits)
    choose which. prec: with PREC_F32 nothing is rounded to f16 or bf16 on the way; with PREC_F8 a backend may round q
    and the softmax weights to f8_e4m3, as k and v are; of the forward alone: gradients multiply in k's and v's
    types. score, score_numbers: a score function as score_text.py writes it, "" for none. k_layout: how k lies,
    ROWS or PANELS of key_panels.py. out_type: of the result, f32 or f8_e4m3 of what it is divided by out_scale, numbers
    past the largest one becoming that."""

    scale: float
    max_bias: float = 0.0
    softcap: float = 0.0
    dropout_p: float = 0.0
    seed: int = 0
    offset: int = 0
    prec: int = PREC_DEFAULT
    score: str = ""
    score_numbers: tuple[float, ...] = ()
    k_layout: str = ROWS
    out_type: str = "f32"
    out_scale: float = 1.0


def is_scaled(node: Tensor) -> bool:
    """Whether an attention multiplies by scales of k and v, or stores its result otherwise than as it is."""
    if node.op != "FLASH_ATTN_EXT":
        return False
    p = node.params
    return (p.out_type, p.out_scale) != ("f32", 1.0) or node["k_scale"] is not None or node["v_scale"] is not None


def check_kv(op: str, q: Tensor, k: Tensor, layout: str = ROWS, kinds: tuple[str, ...] = ("f32",)) -> None:
    """Raises GraphError for what q and k of an attention can't be. kinds: the types that q may have."""
    require(q.dtype.name in kinds, op, f"q must be {' or '.join(kinds)}", q)
    require(k.dtype.kind != "int", op, "k must be a float or quantized type", k)
    check_layout(op, q, k, layout)
    heads = key_heads(k, q.ne[0], layout)
    require(q.ne[2] % heads == 0, op, "the heads of k must divide the heads of q", q, k)
    require(q.ne[3] == k.ne[3], op, "q and k must have equally many sequences", q, k)


def check_rest(
    op: str, q: Tensor, k: Tensor, mask: Tensor | None, sinks: Tensor | None, attn_bias: Tensor | None,
    p: FlashAttnParams,
) -> None:  # fmt: skip
    """Raises GraphError for what an attention can't add to its logits, and for its numbers."""
    if mask is not None:
        require(mask.dtype.name == "f16", op, "the mask must be f16", mask)
        require(mask.ne[:2] == (k.ne[1], q.ne[1]), op, "the mask must be [n_kv, n_q, ...]", q, k, mask)
        divides = q.ne[2] % mask.ne[2] == 0 and q.ne[3] % mask.ne[3] == 0
        require(divides, op, "dimensions 2 and 3 of the mask must divide n_head and n_seq", q, mask)
    require(p.max_bias == 0 or mask is not None, op, "ALiBi (max_bias over 0) needs a mask", q)
    finite = all(math.isfinite(x) for x in (p.scale, p.max_bias, p.softcap)) and p.softcap >= 0 and p.max_bias >= 0
    require(finite, op, f"scale, max_bias and softcap must be finite, the last two not negative, got {p}")
    if sinks is not None:
        fits = sinks.dtype.name == "f32" and sinks.n_elements == q.ne[2]
        require(fits, op, "sinks must be f32 with one value a head of q", q, sinks)
    if attn_bias is not None:
        _check_bias(op, q, k, attn_bias)
    _check_dropout(op, q, p)
    known = f"{PREC_DEFAULT} (default), {PREC_F32} (f32) or {PREC_F8} (8-bit floats)"
    require(p.prec in (PREC_DEFAULT, PREC_F32, PREC_F8), op, f"prec must be {known}, got {p.prec}", q)
    eight = p.prec != PREC_F8 or k.dtype.name == "f8_e4m3"
    require(eight, op, f"prec {PREC_F8} multiplies 8-bit floats: k and v must be f8_e4m3", k)
    sizes = dict(zip("bhij", map(range, (q.ne[3], q.ne[2], q.ne[1], k.ne[1]))))
    check_params(p.score, p.score_numbers, sizes)


def _check_bias(op: str, q: Tensor, k: Tensor, attn_bias: Tensor) -> None:
    require(attn_bias.dtype.name in ("f16", "bf16", "f32"), op, "attn_bias must be f16, bf16 or f32", attn_bias)
    require(attn_bias.ne[:2] == (k.ne[1], q.ne[1]), op, "attn_bias must be [n_kv, n_q, ...]", q, k, attn_bias)
    divides = q.ne[2] % attn_bias.ne[2] == 0 and q.ne[3] % attn_bias.ne[3] == 0
    require(divides, op, "dimensions 2 and 3 of attn_bias must divide n_head and n_seq", q, attn_bias)


def _check_dropout(op: str, q: Tensor, p: FlashAttnParams) -> None:
    require(0 <= p.dropout_p < 1, op, f"dropout_p must be 0, for none, or more and below 1, got {p.dropout_p}")
    fits = 0 <= p.seed < 2**64 and 0 <= p.offset < 2**32
    require(fits, op, f"seed must have 64 bits, offset 32, neither negative, got {p.seed} and {p.offset}")
    counted = p.dropout_p == 0 or max(q.ne[2:]) <= 2**16
    require(counted, op, f"dropout counts up to {2**16} heads and sequences", q)


def _infer_attn(
    params: FlashAttnParams, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None,
    attn_bias: Tensor | None, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> Result:  # fmt: skip
    op = "FLASH_ATTN_EXT"
    check_kv(op, q, k, params.k_layout, Q_TYPES)
    require(v.dtype.kind != "int", op, "v must be a float or quantized type", v)
    alike = (k.ne[1], key_heads(k, q.ne[0], params.k_layout), k.ne[3]) == v.ne[1:]
    require(alike, op, "k and v must agree in keys, heads and sequences", k, v)
    check_rest(op, q, k, mask, sinks, attn_bias, params)
    eight = params.prec != PREC_F8 or v.dtype.name == "f8_e4m3"
    require(eight, op, f"prec {PREC_F8} multiplies 8-bit floats: k and v must be f8_e4m3", v)
    for name, t in (("k_scale", k_scale), ("v_scale", v_scale)):
        if t is not None:
            check_scale(op, name, t, v.ne[2])
    kind = params.out_type
    require(kind in OUT_TYPES, op, f"out_type must be {' or '.join(OUT_TYPES)}, got {kind}", q)
    positive = math.isfinite(params.out_scale) and params.out_scale > 0
    require(positive, op, f"out_scale must be finite and over 0, got {params.out_scale}", q)
    return Result(OUT_TYPES[kind], (v.ne[0], q.ne[2], q.ne[1], q.ne[3]))


def _infer_lse(
    params: FlashAttnParams, q: Tensor, k: Tensor, mask: Tensor | None, sinks: Tensor | None, attn_bias: Tensor | None
) -> Result:
    check_kv("FLASH_ATTN_LSE", q, k, params.k_layout, Q_TYPES)
    check_rest("FLASH_ATTN_LSE", q, k, mask, sinks, attn_bias, params)
    require(
        params.dropout_p == 0, "FLASH_ATTN_LSE", f"it is of all weights: dropout_p must be 0, got {params.dropout_p}"
    )
    return Result(F32, (q.ne[2], q.ne[1], q.ne[3]))


def _attn_work(node: Tensor) -> Work:
    """FLOPs of every score, hidden by the mask or not, as other runtimes count them.

    A v that begins where k does, as a view of the same memory, adds no bytes.
    """
    q, k = node["q"], node["k"]
    v = node["v"] if node.op == "FLASH_ATTN_EXT" else None
    d_v = v.ne[0] if v is not None else 0
    shared = v.data_nbytes if v is not None and v is not k and v.root is k.root and v.view_offs == k.view_offs else 0
    return Work(2 * (q.ne[0] + d_v) * k.ne[1] * q.n_rows, moved_bytes(node) - shared)


FLASH_ATTN_EXT = register(
    OpSpec(
        "FLASH_ATTN_EXT",
        _infer_attn,
        _attn_work,
        ("q", "k", "v", "mask?", "sinks?", "attn_bias?", "k_scale?", "v_scale?"),
        params=FlashAttnParams,
        masked=("k", "v"),
    )
)
FLASH_ATTN_LSE = register(
    OpSpec(
        "FLASH_ATTN_LSE",
        _infer_lse,
        _attn_work,
        ("q", "k", "mask?", "sinks?", "attn_bias?"),
        params=FlashAttnParams,
        masked=("k",),
    )
)


@checked(GraphError)
def flash_attn_ext(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, *, sinks: Tensor | None = None,
    max_bias: float = 0.0, softcap: float = 0.0, attn_bias: Tensor | None = None, dropout_p: float = 0.0,
    seed: int = 0, offset: int = 0, prec: int = PREC_DEFAULT, score: Expr | None = None, k_layout: str = ROWS,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None, out_type: str = "f32", out_scale: float = 1.0,
    name: str = "",
) -> Tensor:  # fmt: skip
    """Attention in one op: result = softmax(s) v over the keys and the sink, s = scale * q.k + slope(head) * mask.

    With a softcap s = softcap * tanh(scale * q.k / softcap) + slope(head) * mask. q: f32 or f8_e4m3 [D_k, n_q, n_head,
    n_seq]; k: [D_k, n_kv, n_head_kv, n_seq] any float or quantized type, any strides; v: [D_v, n_kv, n_head_kv, n_seq],
    its own type, !! not transposed, may be a view of k; mask: f16 [n_kv, n_q, m2, m3], m2 and m3 dividing n_head and
    n_seq, or None; sinks: f32 [n_head], one more logit without a value, or None; max_bias: ALiBi's, 0 for a slope of 1.
    The result is f32 [D_v, n_head, n_q, n_seq], !! permuted. attn_bias: f16, bf16 or f32 [n_kv, n_q, b2, b3], b2 and b3
    dividing n_head and n_seq, added to s after the softcap and never times a slope, or None. dropout_p: the part of the
    weights, from 0 up to 1, that is 0 instead, rounded to a multiple of 1/256 (below 1/16 of 1/65536), the others being
    divided by 1 less that; the denominator is that of all. seed: 64 bits, offset: 32 bits; with sequence, head, query
    and key they alone decide which (dropout.py). prec: 10 (PREC_F32): products and sums in f32, which a backend may
    refuse; 8 (PREC_F8): of k and v of f8_e4m3, it may
    round q and the weights to that too; 0: its choice. score: a function of score.py, whose value takes the place of
    scale * q.k or, with a softcap, of what that makes of it; None for none. Keys whose mask is -inf are skipped, so
    that NaN in an unused cell is harmless; a row with every key masked gives 0. k_layout: "panels" for a k of a float
    type as key_panels() makes it, [x, n_kv, D_k / x * n_head_kv, n_seq] with x the elements of 16 bytes.
    k_scale, v_scale: f32 with one value or n_head_kv, by which what k and v hold is multiplied, or None. out_type:
    "f8_e4m3" stores the result in that, divided by out_scale; a number past 448 then becomes 448 with its sign.
    Source: ggml_flash_attn_ext; the algorithm is FlashAttention-2 (arXiv 2307.08691). Raises GraphError for other types
    and shapes, for ALiBi without a mask, and for numbers that are not finite.
    """
    params = FlashAttnParams(
        float(scale), float(max_bias), float(softcap), float(dropout_p), int(seed), int(offset), int(prec),
        *as_params(score), k_layout, out_type, float(out_scale),
    )  # fmt: skip
    return build(FLASH_ATTN_EXT, q, k, v, mask, sinks, attn_bias, k_scale, v_scale, params=params, name=name)


@checked(GraphError)
def flash_attn_lse(
    q: Tensor, k: Tensor, mask: Tensor | None, scale: float, *, sinks: Tensor | None = None, max_bias: float = 0.0,
    softcap: float = 0.0, attn_bias: Tensor | None = None, prec: int = PREC_DEFAULT, score: Expr | None = None,
    k_layout: str = ROWS, name: str = "",
) -> Tensor:  # fmt: skip
    """The log of the softmax denominators of flash_attn_ext(): result = ln(sum exp(s)), the sink included.

    s as there, of the same arguments: q: f32 or f8_e4m3 [D_k, n_q, n_head, n_seq]; k: [D_k, n_kv, n_head_kv, n_seq] any
    float or quantized type; mask: f16 [n_kv, n_q, m2, m3] or None; scale, max_bias, softcap: numbers; sinks: f32
    [n_head] or None; attn_bias: f16, bf16 or f32 [n_kv, n_q, b2, b3] or None; prec: 0, 8 or 10; score: a function of
    score.py or None; k_layout: as there. The result is f32 [n_head, n_q, n_seq], -inf for a row with every key masked.
    A node of its own beside FLASH_ATTN_EXT with the same sources, so that a backend can fuse the two. Source:
    FlashAttention-2 (arXiv 2307.08691), section 3.1; ggml has no such op. Raises GraphError for what flash_attn_ext()
    refuses.
    """
    text, of_score = as_params(score)
    numbers = (float(scale), float(max_bias), float(softcap))
    params = FlashAttnParams(*numbers, prec=int(prec), score=text, score_numbers=of_score, k_layout=k_layout)
    return build(FLASH_ATTN_LSE, q, k, mask, sinks, attn_bias, params=params, name=name)
