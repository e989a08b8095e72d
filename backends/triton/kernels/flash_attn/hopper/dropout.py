"""Which weights dropout keeps, for Hopper's kernels: bits of dropout_bits.py in the registers of scores."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from graphrt.backends.triton.kernels.flash_attn.dropout_bits import TILE, WORDS
from graphrt.backends.triton.kernels.flash_attn.hopper.rings import mma_layout

BITS_TILE, TILE_WORDS = gl.constexpr(TILE), gl.constexpr(WORDS)


@gluon.jit
def kept_tile(p, seq, head, query, key):
    """Where the bits are of the tile in which a query and a key of a head lie. p: its kept, n_head, n_q, n_kv count."""
    row = (seq * p.n_head + head) * gl.cdiv(p.n_q, BITS_TILE) + query // BITS_TILE
    return p.kept + (row.to(gl.int64) * gl.cdiv(p.n_kv, BITS_TILE) + key // BITS_TILE) * TILE_WORDS


@gluon.jit
def kept_of_keys(p, seq, head, query, key):
    """The words of 64 keys from `key` on, for block_m queries; see load_kept(). 0 without dropout."""
    if p.spec.has_dropout:
        return load_kept(kept_tile(p, seq, head, query, key), key, query, p.spec.block_m)
    else:
        return 0


@gluon.jit
def kept_of_queries(p, seq, head, query, key):
    """The words of 64 queries from `query` on, for block_n keys."""
    if p.spec.has_dropout:
        return load_kept(kept_tile(p, seq, head, query, key), query, key, p.spec.block_n)
    else:
        return 0


@gluon.constexpr_function
def words_layout():
    """Of words [64, 4]: each thread has those of its rows and columns of scores."""
    return gl.DistributedLinearLayout(
        reg_bases=[[8, 0]], lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], warp_bases=[[16, 0], [32, 0]],
        block_bases=[], shape=[64, 4],
    )  # fmt: skip


@gluon.jit
def load_kept(p_tile, row, col, n: gl.constexpr):
    """The words of 64 rows of a tile of bits, from `row` on, int32 [64, 4], of which a thread has those with its
    columns of scores [64, n]; bit 0 is that of the first of n columns from `col` on."""
    layout: gl.constexpr = words_layout()
    i = gl.arange(0, 64, gl.SliceLayout(1, layout))
    t = gl.arange(0, 4, gl.SliceLayout(0, layout))
    # A row's words: dropout_bits.py.
    at = row % BITS_TILE * 4 + i // 8 * 16 + i % 2 * 128 + i % 8 // 2 * 4
    words = gl.load(p_tile + at[:, None] + t[None, :])
    if n == 64:
        words = words >> (col % BITS_TILE // 4)
    return words


@gluon.jit
def reread(words):
    """The same words, as if they were others: so that what was made of them is made again, and not carried along in as
    many registers as there are scores."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [words], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _each(words, like):
    """words int32 [64, 4] in the layout of `like` [64, n / 8, 4, ..], and of each n / 8 its number."""
    layout: gl.constexpr = gl.SliceLayout(1, like.type.layout)
    eight: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, like.type.layout))
    number = gl.arange(0, like.shape[1], eight)[None, :, None]
    return gl.convert_layout(words, layout, assert_trivial=True)[:, None, :], number


@gluon.jit
def dropped(x, words, n: gl.constexpr):
    """x f32 [64, n] with 0 where dropout keeps nothing. words: load_kept()'s."""
    even, odd = x.reshape([64, n // 8, 4, 2]).split()
    word, number = _each(words, even)
    bit = 1 << (number % 8 + number // 8 * 16)
    even = gl.where((word & bit) != 0, even, 0.0)
    odd = gl.where((word & (bit << 8)) != 0, odd, 0.0)
    return gl.convert_layout(gl.join(even, odd).reshape([64, n]), mma_layout(n), assert_trivial=True)


@gluon.jit
def dropped_pairs(pairs, words, n: gl.constexpr):
    """consumer.packed()'s pairs of weights [64, n] with 0 where dropout keeps nothing: a byte's sign, four times over,
    is the mask of 16 bits of a weight."""
    four = pairs.reshape([64, n // 8, 4])
    word, number = _each(words, four)
    # Bytes 0 and 1 of the first eight numbers, 2 and 3 of the next; 8: the sign of the byte.
    chosen = gl.where(number < 8, 0x9988, 0xBBAA)
    mask = gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, 0, $2;", "=r,r,r", [word << (7 - number % 8), chosen], dtype=gl.int32, is_pure=True, pack=1
    )
    return gl.convert_layout((four & mask).reshape([64, n // 2]), pairs.type.layout, assert_trivial=True)
