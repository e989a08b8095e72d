"""Which weights dropout keeps, for Hopper's kernels: bits of dropout_bits.py in the registers of scores."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from graphrt.backends.triton.kernels.flash_attn.dropout_bits import TILE
from graphrt.backends.triton.kernels.flash_attn.hopper.rings import mma_layout

BITS_TILE = gl.constexpr(TILE)
#: Of a row of a tile.
ROW_WORDS = gl.constexpr(TILE // 32)


@gluon.jit
def kept_tile(p, seq, head, query, key):
    """Where the bits are of the tile in which a query and a key of a head lie. p: its kept, n_head, n_q, n_kv count."""
    row = (seq * p.n_head + head) * gl.cdiv(p.n_q, BITS_TILE) + query // BITS_TILE
    return p.kept + (row.to(gl.int64) * gl.cdiv(p.n_kv, BITS_TILE) + key // BITS_TILE) * (BITS_TILE * ROW_WORDS)


@gluon.jit
def kept_of_keys(p, seq, head, query, key):
    """The words of 64 keys from `key` on, for block_m queries; see load_kept(). 0 without dropout."""
    if p.spec.has_dropout:
        at = key % BITS_TILE * ROW_WORDS + query % BITS_TILE // 32
        return load_kept(kept_tile(p, seq, head, query, key) + at, p.spec.block_m)
    else:
        return 0


@gluon.jit
def kept_of_queries(p, seq, head, query, key):
    """The words of 64 queries from `query` on, for block_n keys."""
    if p.spec.has_dropout:
        at = query % BITS_TILE * ROW_WORDS + key % BITS_TILE // 32
        return load_kept(kept_tile(p, seq, head, query, key) + at, p.spec.block_n)
    else:
        return 0


@gluon.jit
def load_kept(p_words, n: gl.constexpr):
    """The words of 64 rows of a tile of bits, each with those of n columns, by the threads that have the rows of scores
    [64, n]: n / 32 vectors. p_words: of the first row's first column."""
    at = p_words + gl.arange(0, 64, gl.SliceLayout(1, mma_layout(n))) * ROW_WORDS
    if n == 64:
        return gl.load(at), gl.load(at + 1)
    else:
        return gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3)


@gluon.jit
def reread(words, n: gl.constexpr):
    """The same words, as if they were others: so that what was made of them is made again, and not carried along in as
    many registers as there are scores."""
    if n == 64:
        return _opaque(words[0]), _opaque(words[1])
    else:
        return _opaque(words[0]), _opaque(words[1]), _opaque(words[2]), _opaque(words[3])


@gluon.jit
def _opaque(x):
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def dropped(x, words, n: gl.constexpr):
    """x f32 [64, n] with 0 where dropout keeps nothing. words: load_kept()'s."""
    col = gl.arange(0, n, gl.SliceLayout(0, mma_layout(n)))[None, :]
    word = gl.where(col < 32, words[0][:, None], words[1][:, None])
    if n == 128:
        word = gl.where(col < 64, word, gl.where(col < 96, words[2][:, None], words[3][:, None]))
    # A thread's columns differ in bits 0, 3 and up: one shift a word, and constants for the rest.
    return gl.where(((word >> (col & 6)) & (1 << (col & 25))) != 0, x, 0.0)
