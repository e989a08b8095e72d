"""FLASH_ATTN_BACK and FLASH_ATTN_VARLEN_BACK: the gradients of attention, a node for each source that has one.

Per query head, of the forward's sources, its result `out`, the gradient d_out of that, and lse of FLASH_ATTN_LSE:

    delta = rowsum(d_out * out), less d_lse where the loss depends on lse too
    s = scale * q.k;  t = softcap * tanh(s / softcap) with a softcap, else s
    P = exp(t + slope * mask + attn_bias - lse);  0 where the mask is -inf, and in a row whose lse is -inf
    M = 1, with dropout 1 / (1 - left_out(dropout_p)) where dropout.py keeps a weight, else 0
    dT = P * (M * (d_out v) - delta);  dS = dT * dt/ds, with a softcap 1 - (t / softcap)^2, else 1, and times the
    derivative of the score function where there is one: t is then what it makes of t
    of q: scale * dS k;  of k: scale * dS^T q;  of v: (P * M)^T d_out
    of attn_bias: dT;  of sinks: -sum of exp(sink - lse) * delta over a head's rows

Sums over heads that share k and v, and over what shares a bias, are in it. Keys whose mask is -inf are skipped. Nodes
that differ in `of` alone may be fused.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from graphrt.arguments import checked
from graphrt.dtypes import F32
from graphrt.errors import GraphError
from graphrt.op import OpSpec, Result, Work, build, moved_bytes, register, require
from graphrt.ops.flash_attn_ext import FlashAttnParams, check_kv, check_rest
from graphrt.ops.flash_attn_varlen import FlashAttnVarlenParams, check_packed
from graphrt.tensor import Tensor

#: Sources that have a gradient.
PARTS = ("q", "k", "v", "attn_bias", "sinks")


@dataclass(frozen=True)
class FlashAttnBackParams:
    """of: the source whose gradient it is, one of PARTS; the rest are the forward's parameters."""

    of: str
    scale: float
    max_bias: float = 0.0
    softcap: float = 0.0
    dropout_p: float = 0.0
    seed: int = 0
    offset: int = 0
    score: str = ""
    score_numbers: tuple[float, ...] = ()

    @property
    def attn(self) -> FlashAttnParams:
        """The forward's."""
        return FlashAttnParams(
            self.scale, self.max_bias, self.softcap, self.dropout_p, self.seed, self.offset, score=self.score,
            score_numbers=self.score_numbers,
        )  # fmt: skip


@dataclass(frozen=True)
class FlashAttnVarlenBackParams:
    """of: the source whose gradient it is, one of PARTS but attn_bias; the rest are the forward's parameters."""

    of: str
    scale: float
    max_bias: float = 0.0
    softcap: float = 0.0
    causal: bool = True
    window: int = 0

    @property
    def attn(self) -> FlashAttnVarlenParams:
        """The forward's."""
        return FlashAttnVarlenParams(self.scale, self.max_bias, self.softcap, self.causal, self.window)


def _check_plain(op: str, k: Tensor, v: Tensor) -> None:
    plain = all(t.dtype.name in ("f32", "f16", "bf16") for t in (k, v))
    rule = "k and v must be f32, f16 or bf16: a quantized cache has no gradient, and its rounding hides that of others"
    require(plain, op, rule, k, v)


def _check_results(
    op: str, q: Tensor, v: Tensor, out: Tensor, d_out: Tensor, lse: Tensor, d_lse: Tensor | None
) -> None:
    """What the forward gave, and gradients of it."""
    wanted = (v.ne[0], q.ne[2], q.ne[1], q.ne[3])
    fits = all(t.dtype.name == "f32" and t.ne == wanted for t in (out, d_out))
    require(fits, op, f"the forward's result and its gradient must be f32 {list(wanted)}", out, d_out)
    rows = (q.ne[2], q.ne[1], q.ne[3], 1)
    fits = all(t is None or (t.dtype.name == "f32" and t.ne == rows) for t in (lse, d_lse))
    require(fits, op, f"lse and its gradient must be f32 {list(rows)}", lse, d_lse)


def _result(op: str, of: str, **parts: Tensor | None) -> Result:
    source = parts.get(of)
    given = [name for name, t in parts.items() if t is not None]
    require(source is not None, op, f"the gradient is of one of {', '.join(given)}, got {of!r}")
    assert source is not None
    return Result(F32, source.ne)


def _infer_back(
    params: FlashAttnBackParams, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    mask: Tensor | None, sinks: Tensor | None, attn_bias: Tensor | None, d_lse: Tensor | None,
) -> Result:  # fmt: skip
    op = "FLASH_ATTN_BACK"
    check_kv(op, q, k)
    _check_plain(op, k, v)
    require(k.ne[1:] == v.ne[1:], op, "k and v must agree in keys, heads and sequences", k, v)
    check_rest(op, q, k, mask, sinks, attn_bias, params.attn)
    _check_results(op, q, v, out, d_out, lse, d_lse)
    return _result(op, params.of, q=q, k=k, v=v, attn_bias=attn_bias, sinks=sinks)


def _infer_varlen_back(
    params: FlashAttnVarlenBackParams, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    q_starts: Tensor, k_starts: Tensor | None, sinks: Tensor | None, d_lse: Tensor | None,
) -> Result:  # fmt: skip
    op = "FLASH_ATTN_VARLEN_BACK"
    require(k_starts is not None, op, "keys must be packed: pages are of a cache, which has no gradient", k, k_starts)
    assert k_starts is not None
    check_packed(op, q, k, q_starts, k_starts, sinks, params.attn)
    _check_plain(op, k, v)
    require(k.ne[1:] == v.ne[1:], op, "k and v must agree in keys and heads", k, v)
    _check_results(op, q, v, out, d_out, lse, d_lse)
    return _result(op, params.of, q=q, k=k, v=v, sinks=sinks)


def _products(of: str, d_k: int, d_v: int) -> int:
    """Multiplications of a score: q.k and d_out.v again, and the gradient's own."""
    if of == "v":
        return d_k + d_v
    return {"q": 2 * d_k + d_v, "k": 2 * d_k + d_v, "attn_bias": d_k + d_v}.get(of, 0)


def _work(node: Tensor) -> Work:
    """FLOPs of every score, hidden or not, as the forward counts them; the sinks' need a product a row alone."""
    q, d_v = node["q"], node["v"].ne[0]
    scores = _products(node.params.of, q.ne[0], d_v) * node["k"].ne[1]
    return Work(2 * (scores or d_v) * q.n_rows, moved_bytes(node))


FLASH_ATTN_BACK = register(
    OpSpec(
        "FLASH_ATTN_BACK",
        _infer_back,
        _work,
        ("d_out", "q", "k", "v", "out", "lse", "mask?", "sinks?", "attn_bias?", "d_lse?"),
        params=FlashAttnBackParams,
        masked=("k", "v"),
    )
)
FLASH_ATTN_VARLEN_BACK = register(
    OpSpec(
        "FLASH_ATTN_VARLEN_BACK",
        _infer_varlen_back,
        _work,
        ("d_out", "q", "k", "v", "out", "lse", "q_starts", "k_starts?", "sinks?", "d_lse?"),
        params=FlashAttnVarlenBackParams,
    )
)


@checked(GraphError)
def flash_attn_back(
    of: str, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, params: FlashAttnParams, *,
    mask: Tensor | None = None, sinks: Tensor | None = None, attn_bias: Tensor | None = None,
    d_lse: Tensor | None = None, name: str = "",
) -> Tensor:  # fmt: skip
    """The gradient of one source of flash_attn_ext(), of its sources, its result and the gradient of that: with P the
    weights before dropout and dT = P * (M * (d_out v) - rowsum(d_out * out) + d_lse), for k result = scale * dT^T q.

    ops/flash_attn_back.py has the formula of each. of: "q", "k", "v", "attn_bias" or "sinks"; q: f32; k, v: f32, f16 or
    bf16; mask: f16 or None; sinks: f32 or None; attn_bias: f16, bf16, f32 or None; params: flash_attn_ext()'s, all as
    there. out, d_out: f32 [D_v, n_head, n_q, n_seq]; lse: what flash_attn_lse() gives, f32 [n_head, n_q, n_seq]; d_lse:
    its gradient where the loss depends on it too, or None. The result is f32 in the shape of the source. Cells that the
    mask hides from every query may hold NaN; their gradient is 0. Source: FlashAttention-2 (arXiv 2307.08691), section
    3.1; ggml has no such op that runs. Raises GraphError for what flash_attn_ext() refuses, for a quantized k or v, and
    for a source that is not there.
    """
    sources = (d_out, q, k, v, out, lse, mask, sinks, attn_bias, d_lse)
    of_forward = ("prec", "k_layout", "out_type", "out_scale")
    given = {name: value for name, value in asdict(params).items() if name not in of_forward}
    return build(FLASH_ATTN_BACK, *sources, params=FlashAttnBackParams(of, **given), name=name)


@checked(GraphError)
def flash_attn_varlen_back(
    of: str, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, q_starts: Tensor,
    k_starts: Tensor, params: FlashAttnVarlenParams, *, sinks: Tensor | None = None, d_lse: Tensor | None = None,
    name: str = "",
) -> Tensor:  # fmt: skip
    """The gradient of one source of flash_attn_varlen() over packed keys, as flash_attn_back() has it: for k result =
    scale * dT^T q, sequence by sequence.

    of: "q", "k", "v" or "sinks"; q: f32 [D_k, n_tokens, n_head]; k, v: f32, f16 or bf16 [D, n_keys, n_head_kv];
    q_starts, k_starts: i32 [n_seq + 1]; sinks: f32 [n_head] or None; params: flash_attn_varlen()'s; out, d_out: f32
    [D_v, n_head, n_tokens]; lse: what flash_attn_varlen_lse() gives, f32 [n_head, n_tokens]; d_lse: its gradient, or
    None. The result is f32 in the shape of the source, 0 for queries and keys of nobody. Source: FlashAttention-2
    (arXiv 2307.08691), section 3.1; ggml has no such op. Raises GraphError for what flash_attn_varlen() refuses, for
    pages, for a quantized k or v, for a score function or mask_new, and for a source that is not there.
    """
    if params.score:
        raise GraphError(f"gradients of packed sequences have no score function, got {params.score[:80]!r}")
    if params.mask_new:
        raise GraphError(
            "gradients of packed sequences have no explicit mask, got mask_new; run flash_attn_ext() on each"
        )
    given = {name: x for name, x in asdict(params).items() if not name.startswith(("score", "mask"))}
    sources = (d_out, q, k, v, out, lse, q_starts, k_starts, sinks, d_lse)
    return build(FLASH_ATTN_VARLEN_BACK, *sources, params=FlashAttnVarlenBackParams(of, **given), name=name)
