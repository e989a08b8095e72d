"""A tile's query rows: which elements they have, and how they come from memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from graphrt.backends.triton.kernels.common.float8 import is_float8


@gluon.constexpr_function
def query_layout(d):
    """Registers of a [64, d] f32 tile of q as it is loaded: 16 bytes a thread, whole rows by consecutive threads."""
    lanes = min(32, d // 4)
    return gl.BlockedLayout([1, 4], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def slot_elements(i_slot, KIND: gl.constexpr):
    """Which element of a row each slot of a tile holds: rows of quantized blocks are unpacked in the order of their
    bytes, by pairs of blocks that start on a 4-byte word (see quant.py), floats in order. i_slot: int32, any shape."""
    if KIND == "" or is_float8(KIND):
        return i_slot
    i_block = i_slot // 32
    i = i_slot % 32
    # The first two values of a pair's first block share a word with its scale; they come last.
    turn = gl.where(i_block % 2 == 0, 2, 0)
    if KIND == "q8_0":
        element = i_block * 32 + (i + turn) % 32
    else:  # of a word's four bytes first the low halves, then the high ones
        i_byte = i // 8 * 4 + i % 4
        element = i_block * 32 + (i_byte + turn) % 16 + i // 4 % 2 * 16
    # Pairs stay pairs, which one load or store may take.
    return gl.max_contiguous(gl.multiple_of(element, 2), 2)


@gluon.jit
def fetch_queries(p, tile, wg: gl.constexpr):
    """A warpgroup's [64, d] f32 query rows of a tile; rows past the sequence's queries are 0. `pack` divides 64."""
    seq, group, qt = tile
    head = group * p.spec.pack
    token = p.first_token(seq, qt, wg)
    vec: gl.constexpr = p.spec.q_vec
    layout: gl.constexpr = query_layout(p.spec.d)
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))
    kind: gl.constexpr = p.spec.k_kind
    cols = slot_elements(gl.arange(0, p.spec.d, gl.SliceLayout(0, layout)), kind)
    base = p.q_of(seq) + (head.to(gl.int64) * p.sq_h + token.to(gl.int64) * p.sq_t) * vec
    places = rows // p.spec.pack * (p.sq_t * vec) + rows % p.spec.pack * (p.sq_h * vec)
    offsets = places[:, None] + cols[None, :]
    return gl.load(base + offsets, mask=(token + rows // p.spec.pack < p.n_queries(seq))[:, None], other=0.0)


@gluon.jit
def fetch_columns(p, seq, group, qt, first: gl.constexpr, cols: gl.constexpr, n: gl.constexpr):
    """Columns `first` and on of a tile's first n query rows, f32 [n, cols], for any `pack`; rows past the last: 0."""
    layout: gl.constexpr = query_layout(cols)
    token, head = p.rows(seq, group, qt, n, gl.SliceLayout(1, layout))
    column = first + gl.arange(0, cols, gl.SliceLayout(0, layout))
    offsets = (token.to(gl.int64) * p.sq_t + head.to(gl.int64) * p.sq_h) * p.spec.q_vec
    at = p.q_of(seq) + offsets[:, None] + column[None, :]
    return gl.load(at, mask=(token < p.n_queries(seq))[:, None], other=0.0)


@gluon.jit
def row_values(p, values, group, layout: gl.constexpr):
    """Of a value for each head, those of a tile's rows; one for all if heads are not packed."""
    if p.spec.pack == 1:
        return gl.load(values + group)
    else:
        return gl.load(values + group * p.spec.pack + gl.arange(0, 64, layout) % p.spec.pack)
