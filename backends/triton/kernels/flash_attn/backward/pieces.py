# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: no-check-untyped-defs, disable-error-code=annotation-unchecked
"""What the kernels of attention's gradients share: loads of tiles, weights and dS of a tile, and what they are told.

Tiles of scores are [queries, keys], or TURNED [keys, queries], so that what is multiplied next lies where it is needed.
Weights are 2^WEIGHT_BITS times P (of f32: P), which keeps small ones of long rows from the end of f16's range. dS is
scales[1] times itself, see deltas.py. ops/flash_attn_back.py has the formula and its letters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from graphrt.backends.triton.kernels.common.activation import exp_f32, tanh
from graphrt.backends.triton.kernels.common.constants import LOG2E, NEG_INF
from graphrt.backends.triton.kernels.flash_attn.dropout import kept_weights

WEIGHT_BITS = tl.constexpr(4)
#: Columns of products of f32 at a time.
CHUNK = tl.constexpr(32)
INF = tl.constexpr(float("inf"))


class Given(NamedTuple):
    """Pointers. q, d_out: as Halves has them; lse, delta: f32, delta [n_seq, n_head, n_q]; slopes: ALiBi's of each
    head; scales: deltas.py's. counts, blocks, seen: of mask.py for tiles of queries; column_counts, columns, ranks: of
    lists.py for tiles of keys; tiles: of packed sequences, tile_list.py's; score: a score function's numbers, f32.
    What is absent is any memory: nobody reads it."""

    q: Any
    k: Any
    v: Any
    d_out: Any
    lse: Any
    delta: Any
    mask: Any
    bias: Any
    slopes: Any
    scales: Any
    counts: Any
    blocks: Any
    seen: Any
    column_counts: Any
    columns: Any
    ranks: Any
    tiles: Any
    score: Any


class Steps(NamedTuple):
    """Strides in elements: t of a query, n of a key, h of a head, s of a sequence."""

    q_t: Any
    q_h: Any
    q_s: Any
    k_n: Any
    k_h: Any
    k_s: Any
    v_n: Any
    v_h: Any
    v_s: Any
    d_t: Any
    d_h: Any
    d_s: Any
    l_h: Any
    l_t: Any
    l_s: Any
    m_t: Any
    m_h: Any
    m_s: Any
    b_t: Any
    b_h: Any
    b_s: Any


class Numbers(NamedTuple):
    """What changes no code. scale, softcap; slope, i_head, i_seq: of what a program is at; behind: the position of the
    first query, of packed sequences; q_end, k_end: queries and keys of the sequence; of_d_w: what d_out v is multiplied
    with; p_score: a score function's; the rest is dropout's."""

    scale: Any
    softcap: Any
    slope: Any
    i_head: Any
    i_seq: Any
    behind: Any
    window: Any
    q_end: Any
    k_end: Any
    of_d_w: Any
    seed_low: Any
    seed_high: Any
    offset: Any
    least: Any
    p_score: Any


@dataclass(frozen=True)
class BackSpec:
    """What kernels are compiled for.

    d_k, d_v, and the powers of two that cover them: dk0 and dk1, dv0 and dv1; block_m, block_n: queries and keys of a
    tile; dot: the type of products; precision: of those of f32; keep: what a program owns is read once and stays on
    chip, else it is read again for each tile (and always of f32, a few columns at a time); makes_q, makes_k, makes_v:
    the gradients that are made; stages: tiles in flight; packed: sequences follow one another; wide: offsets within a
    tile need 64 bits; score: score_code.py's function with its slope, or None.
    """

    d_k: int
    d_v: int
    dk0: int
    dk1: int
    dv0: int
    dv1: int
    block_m: int
    block_n: int
    dot: Any
    precision: str
    has_mask: bool
    has_bias: bool
    softcap: bool
    dropout: bool
    packed: bool
    causal: bool
    window: bool
    alibi: bool
    wide: bool
    ptx: bool
    pdl: bool
    keep: bool = True
    makes_q: bool = True
    makes_k: bool = True
    makes_v: bool = True
    stages: int = 2
    score: Any = None

    @property
    def accurate(self) -> bool:
        """Products are exact: nothing else may lose more than a bit."""
        return bool(self.dot == tl.float32)

    @property
    def unit(self) -> float:
        """P of a weight."""
        return 1.0 if self.accurate else 0.5**WEIGHT_BITS.value


@triton.jit
def zeros(M: tl.constexpr, N: tl.constexpr):
    return tl.zeros([M, N], tl.float32)


@triton.jit
def of_query(x, TURNED: tl.constexpr):
    """A vector of queries along a tile of scores."""
    return x[None, :] if TURNED else x[:, None]


@triton.jit
def of_key(x, TURNED: tl.constexpr):
    """A vector of keys along a tile of scores."""
    return x[:, None] if TURNED else x[None, :]


@triton.jit
def load_rows(
    p_rows, first, i, stride, m_row, D: tl.constexpr, FROM: tl.constexpr, SIZE: tl.constexpr, DOT: tl.constexpr,
    WIDE: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Columns FROM to FROM + SIZE of rows first + i, as DOT; zeros where m_row is false (ALL: nowhere) and past D."""
    i_d = FROM + tl.arange(0, SIZE)
    offset = (i.to(tl.int64) if WIDE else i) * stride
    p_tile = p_rows + first.to(tl.int64) * stride + offset[:, None] + i_d[None, :]
    if ALL and FROM + SIZE <= D:
        return tl.load(p_tile).to(DOT)
    elif ALL:
        return tl.load(p_tile, mask=(i_d < D)[None, :], other=0.0).to(DOT)
    elif FROM + SIZE <= D:
        return tl.load(p_tile, mask=m_row[:, None], other=0.0).to(DOT)
    else:
        return tl.load(p_tile, mask=m_row[:, None] & (i_d < D)[None, :], other=0.0).to(DOT)


@triton.jit
def load_two(
    p_rows, first, i, stride, m_row, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, spec: tl.constexpr,
    ALL: tl.constexpr = False,
):  # fmt: skip
    """Both parts of rows; the first twice where there is one."""
    x0 = load_rows(p_rows, first, i, stride, m_row, D, 0, D0, spec.dot, spec.wide, ALL)
    x1 = x0
    if D1 > 0:
        x1 = load_rows(p_rows, first, i, stride, m_row, D, D0, D1, spec.dot, spec.wide, ALL)
    return x0, x1


@triton.jit
def dot_two(a0, a1, b0, b1, D1: tl.constexpr, spec: tl.constexpr):
    """a times b transposed, over both parts."""
    made = tl.dot(a0, tl.trans(b0), input_precision=spec.precision)
    if D1 > 0:
        made = tl.dot(a1, tl.trans(b1), made, input_precision=spec.precision)
    return made


@triton.jit
def dot_chunks(p_a, first_a, i_a, stride_a, m_a, p_b, first_b, i_b, stride_b, m_b, D: tl.constexpr, spec: tl.constexpr):
    """Rows a times rows b transposed, CHUNK columns at a time: of f32 products, whose operands lie in registers."""
    made = tl.zeros([i_a.shape[0], i_b.shape[0]], tl.float32)
    for start in tl.range(0, D, CHUNK, num_stages=1):
        i_d = start + tl.arange(0, CHUNK)
        m_d = (i_d < D)[None, :]
        at_a = (first_a.to(tl.int64) + i_a)[:, None] * stride_a + i_d[None, :]
        at_b = (first_b.to(tl.int64) + i_b)[:, None] * stride_b + i_d[None, :]
        a = tl.load(p_a + at_a, mask=m_a[:, None] & m_d, other=0.0).to(tl.float32)
        b = tl.load(p_b + at_b, mask=m_b[:, None] & m_d, other=0.0).to(tl.float32)
        made = tl.dot(a, tl.trans(b), made, input_precision=spec.precision)
    return made


@triton.jit
def load_lse(p_lse, step, i_q, m_q, spec: tl.constexpr):
    """lse of queries, as weights() takes it: +inf, which makes weights 0, of rows that are not there or see nothing."""
    lse = tl.load(p_lse + i_q.to(tl.int64) * step, mask=m_q, other=NEG_INF)
    lse = tl.where(lse == NEG_INF, INF, lse)
    return lse if spec.accurate else lse * LOG2E - WEIGHT_BITS


@triton.jit
def weights(
    s, lse, i_q, i_k, p_mask, m_t, p_bias, b_t, n, spec: tl.constexpr, PARTIAL: tl.constexpr, TURNED: tl.constexpr
):  # fmt: skip
    """(weights, dt/ds) of q.k. i_q, i_k: queries and keys, counted in their sequence; p_mask, p_bias: of the
    head. PARTIAL: some query may not see some key."""
    UNIT: tl.constexpr = 1.0 if spec.accurate else LOG2E
    OF_T: tl.constexpr = UNIT if spec.score is None else 1.0  # a score function takes scores as they are
    at_q, at_k = of_query(i_q, TURNED), of_key(i_k, TURNED)
    bend = tl.full([1, 1], 1.0, tl.float32)
    if spec.softcap:
        bent = _bent(s * (n.scale / n.softcap), spec.accurate)
        bend = 1.0 - bent * bent
        t = bent * (n.softcap * OF_T)
    else:
        t = s * (n.scale * OF_T)
    if spec.score is not None:
        t, steep = spec.score(t, n.i_seq, n.i_head, at_q, at_k, n.p_score, spec.accurate)
        t *= UNIT
        bend *= steep
    inside = (at_q < n.q_end) & (at_k < n.k_end)
    seen = inside
    if PARTIAL and spec.has_mask:
        mask = tl.load(p_mask + at_q.to(tl.int64) * m_t + at_k, mask=inside, other=NEG_INF).to(tl.float32)
        seen = mask > NEG_INF
        t += (n.slope * UNIT) * tl.where(seen, mask, 0.0)
    if PARTIAL and spec.packed:
        behind = n.behind + at_q - at_k
        if spec.causal:
            seen = seen & (behind >= 0)
        if spec.window:
            seen = seen & (behind < n.window)
        if spec.alibi:
            t -= (n.slope * UNIT) * tl.abs(behind).to(tl.float32)
    if spec.has_bias:
        t += tl.load(p_bias + at_q.to(tl.int64) * b_t + at_k, mask=inside, other=0.0).to(tl.float32) * UNIT
    x = t - of_query(lse, TURNED)
    if spec.score is not None:  # of queries that are not there it may give anything
        x = tl.where(of_query(lse, TURNED) == INF, NEG_INF, x)
    if PARTIAL:
        x = tl.where(seen, x, NEG_INF)
        if spec.softcap:
            bend = tl.where(seen, bend, 0.0)
    w = exp_f32(x) if spec.accurate else tl.exp2(x)
    if spec.score is not None:  # where the weight is 0 the function may be anything
        bend = tl.where(w == 0.0, 0.0, bend)
    return w, bend


@triton.jit
def _bent(x, ACCURATE: tl.constexpr):
    """tanh, to the last bit or as good as f16 products deserve."""
    if ACCURATE:
        return tanh(x)
    else:
        return 1.0 - 2.0 / (1.0 + tl.exp2(2.0 * LOG2E * x))


@triton.jit
def d_weights(d_w, kept, n, spec: tl.constexpr):
    """What comes to a weight before delta is subtracted, in dS's units. d_w: d_out v; kept: dropout's, if there is."""
    d_w = d_w * n.of_d_w
    if spec.dropout:
        d_w = tl.where(kept, d_w, 0.0)
    return d_w


@triton.jit
def d_logits(w, d_w, delta, PARTIAL: tl.constexpr, TURNED: tl.constexpr):
    """dT: w times what comes to it less delta. Where the weight is 0 it is 0, whatever v is: cells that nobody sees may
    hold NaN. A NaN that is seen makes the weight, or this, NaN."""
    made = w * (d_w - of_query(delta, TURNED))
    return tl.where(w == 0.0, 0.0, made) if PARTIAL else made


@triton.jit
def kept_of(i_q, first_key, n, spec: tl.constexpr, TURNED: tl.constexpr):
    """Which weights of a tile dropout keeps. first_key: a multiple of 4."""
    if spec.dropout:
        i_four = first_key // 4 + tl.arange(0, spec.block_n // 4)
        made = kept_weights(
            i_q[:, None], i_four[None, :], n.i_head, n.i_seq, n.offset, n.seed_low, n.seed_high, n.least
        )  # fmt: skip
        return tl.trans(made) if TURNED else made
    else:
        return i_q[:, None] < 0
