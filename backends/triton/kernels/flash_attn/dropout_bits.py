# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: no-check-untyped-defs, disable-error-code="annotation-unchecked, assignment"
"""Which weights dropout keeps, as bits in memory: for kernels whose threads have no room to draw them.

A bit a weight is a sixteenth of what a mask takes. By query, a word has bits of keys, as ops/dropout.py draws them; by
key likewise bits of queries, in the same order: word t of a row and bit b are its column 8 (b % 8 + 8 (b // 16)) + 2 t
+ b // 8 % 2 (`bit_of` turned round). Words of a tile lie by b and t of their row, then by t: sixteen side by side, as
threads write them here, and as those that have the rows of a matrix unit's tile read them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.kernels.common.pdl import take_turn
from graphrt.backends.triton.kernels.flash_attn.dropout import kept_words

#: Queries and keys of a tile; both are filled up to a multiple of it. Words of one; tiles of a program.
TILE = 128
WORDS = TILE * TILE // 32
TILES = 8
_TILE, _WORDS, _TILES = tl.constexpr(TILE), tl.constexpr(WORDS), tl.constexpr(TILES)


@triton.jit
def _exchanged(x, HALF: tl.constexpr, LOW: tl.constexpr):
    """One step of turning 32 x 32 bits: of 32 words those that are HALF apart exchange half of their bits: the upper
    ones of the first for the lower ones of the second. LOW: a word with the lower bits of each 2 HALF."""
    made = ()
    for i in tl.static_range(32):
        first, second = x[i & (31 - HALF)], x[i | HALF]
        moved = ((first >> HALF) ^ second) & LOW
        made = made + ((first ^ (moved << HALF)) if i & HALF == 0 else (second ^ moved),)
    return made


@triton.jit
def turned_bits(x):
    """x: 32 words, uint32 of any shape. Bit j of word i becomes bit i of word j."""
    x = _exchanged(x, 16, 0x0000FFFF)
    x = _exchanged(x, 8, 0x00FF00FF)
    x = _exchanged(x, 4, 0x0F0F0F0F)
    x = _exchanged(x, 2, 0x33333333)
    return _exchanged(x, 1, 0x55555555)


@accesses(reads="p_by_query", writes="p_by_query p_by_key", helper=True)
@triton.jit(do_not_specialize=["n_tiles", "n_kb", "n_qb", "n_head", "seed_low", "seed_high", "offset", "least"])
def attention_dropout_bits(
    p_by_query, p_by_key, n_tiles, n_kb, n_qb, n_head, seed_low, seed_high, offset, least, CALLS: tl.constexpr,
    BY_KEY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A thread has 32 queries, and of each a word of 32 keys; sixteen of them a tile. by_query, by_key: int32 [n_seq,
    n_head, tiles of queries, of keys, 32, 4, 4], see the module. BY_KEY: it is written too."""
    take_turn(PDL)
    thread = tl.arange(0, 16 * _TILES)
    tile = tl.program_id(0) * _TILES + thread // 16
    of_query, of_key = thread // 4 % 4, thread % 4
    i_h = tile // (n_kb * n_qb)
    i_word = tile % n_kb * 4 + of_key
    first = tile // n_kb % n_qb * _TILE + 2 * of_query
    at = tile * _WORDS
    inside = tile < n_tiles
    p_mine = p_by_query + at + of_query * 4 + of_key
    for b in tl.range(0, 32):  # not one after the other: that takes half a minute to compile
        i_query = first + (b % 8 + b // 16 * 8) * 8 + b // 8 % 2
        word = kept_words(
            i_query, i_word, i_h % n_head, i_h // n_head, offset, seed_low, seed_high, least, CALLS
        )  # fmt: skip
        tl.store(p_mine + b * 16, word.to(tl.int32, bitcast=True), mask=inside)
    if BY_KEY:
        tl.debug_barrier()  # what was stored is read again
        words = ()
        for b in tl.static_range(32):
            words = words + (tl.load(p_mine + b * 16, mask=inside, other=0).to(tl.uint32, bitcast=True),)
        words = turned_bits(words)
        for b in tl.static_range(32):
            word = words[b].to(tl.int32, bitcast=True)
            tl.store(p_by_key + at + b * 16 + of_key * 4 + of_query, word, mask=inside)
