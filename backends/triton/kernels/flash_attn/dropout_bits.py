# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: no-check-untyped-defs, disable-error-code=annotation-unchecked
"""Which weights dropout keeps, as bits in memory: for kernels whose threads have no room to draw them.

A bit a weight is a sixteenth of what a mask takes, and is read once by each kernel; drawing takes as many instructions
as everything else that a kernel of gradients does with a weight, and its kernels are two or three.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.kernels.common.pdl import take_turn
from graphrt.backends.triton.kernels.flash_attn.dropout import drawn_words

#: Queries and keys of a program; both are filled up to a multiple of it.
TILE = 128
_WORDS = tl.constexpr(TILE // 32)
_TILE = tl.constexpr(TILE)


@triton.jit
def _exchanged(x, N: tl.constexpr, HALF: tl.constexpr, LOW: tl.constexpr):
    """One step of turning 32 x 32 bits: of x int32 [N, 32], rows that are HALF apart exchange half of their bits: the
    upper ones of the first for the lower ones of the second. LOW: a word with the lower bits of each 2 HALF."""
    pairs = tl.permute(tl.reshape(x, (N, 16 // HALF, 2, HALF)), (0, 1, 3, 2))
    first, second = tl.split(pairs)
    moved = ((first.to(tl.uint32, bitcast=True) >> HALF).to(tl.int32, bitcast=True) ^ second) & LOW
    first, second = first ^ (moved << HALF), second ^ moved
    return tl.reshape(tl.permute(tl.join(first, second), (0, 1, 3, 2)), (N, 32))


@triton.jit
def turned_bits(x, N: tl.constexpr):
    """x int32 [N, 32]: bit j of word i becomes bit i of word j."""
    x = _exchanged(x, N, 16, 0x0000FFFF)
    x = _exchanged(x, N, 8, 0x00FF00FF)
    x = _exchanged(x, N, 4, 0x0F0F0F0F)
    x = _exchanged(x, N, 2, 0x33333333)
    return _exchanged(x, N, 1, 0x55555555)


@accesses(reads="", writes="p_by_query p_by_key", helper=True)
@triton.jit(do_not_specialize=["n_head", "seed_low", "seed_high", "offset", "least"])
def attention_dropout_bits(
    p_by_query, p_by_key, n_head, seed_low, seed_high, offset, least, BY_KEY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (j, i, h): TILE keys and queries of head h % n_head of sequence h // n_head. by_query: int32 [n_seq,
    n_head, tiles of queries, of keys, TILE queries, TILE / 32], bit j of word w is set where the query keeps key
    32 w + j of the tile; by_key: likewise of [.., TILE keys, TILE / 32]. BY_KEY: it is written too."""
    take_turn(PDL)
    i_kb, i_qb, i_h = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_q = i_qb * _TILE + tl.arange(0, _TILE)
    i_four = i_kb * (_TILE // 4) + tl.arange(0, _TILE // 4)
    a, b, c, d = drawn_words(
        i_q[:, None], i_four[None, :], i_h % n_head, i_h // n_head, offset, seed_low, seed_high
    )  # fmt: skip
    least = least.to(tl.uint32, bitcast=True)
    nibble = (a >= least).to(tl.int32) + (b >= least).to(tl.int32) * 2
    nibble += (c >= least).to(tl.int32) * 4 + (d >= least).to(tl.int32) * 8
    shift = 4 * tl.arange(0, 8)
    words = tl.sum(tl.reshape(nibble, (_TILE, _WORDS, 8)) << shift[None, None, :], 2)
    i_word = tl.arange(0, _WORDS)
    tile = (i_h.to(tl.int64) * tl.num_programs(1) + i_qb) * tl.num_programs(0) + i_kb
    base = tile * (_TILE * _WORDS)
    tl.store(p_by_query + base + tl.arange(0, _TILE)[:, None] * _WORDS + i_word[None, :], words)
    if BY_KEY:
        # [words of queries, words of keys, 32 queries] to [.., 32 keys]
        blocks = tl.permute(tl.reshape(words, (_WORDS, 32, _WORDS)), (0, 2, 1))
        turned = turned_bits(tl.reshape(blocks, (_WORDS * _WORDS, 32)), _WORDS * _WORDS)
        block = tl.arange(0, _WORDS * _WORDS)
        i_k = (block % _WORDS * 32)[:, None] + tl.arange(0, 32)[None, :]
        tl.store(p_by_key + base + i_k * _WORDS + (block // _WORDS)[:, None], turned)
