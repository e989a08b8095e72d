"""Orders of elements and layouts of registers and shared memory of the decode kernel: plain Python, run when compiled.

Axes and names are decode.py's.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from graphrt.backends.triton.kernels.common.blocks import words_a_block
from graphrt.backends.triton.kernels.common.float8 import is_float8
from graphrt.backends.triton.kernels.common.gluon_layouts import log2

ROWS = gl.constexpr(16)  # query rows of a tile: the M of mma.sync
THIN_ROWS = gl.constexpr(8)  # of a tile that has no more: its N


@gluon.constexpr_function
def is_half(KIND):
    return KIND == "f16" or KIND == "bf16"


@gluon.constexpr_function
def has_bytes(KIND):
    """A byte a value: codes of q8_0, or floats of 8 bits."""
    return KIND == "q8_0" or is_float8(KIND)


@gluon.constexpr_function
def dot_dtype(KIND):
    return gl.bfloat16 if KIND == "bf16" else gl.float16


@gluon.constexpr_function
def word_bits(D, KIND):
    """How many bits number the words of values of a row."""
    return log2(D // 32 * words_a_block(KIND))


@gluon.constexpr_function
def chunk_bits(D, KIND, LANE_BITS):
    """Of these, the low ones that number the words a lane reads at once: what the lanes leave, at most 16 bytes.

    Rows of blocks lie off words as they do in memory: there a lane reads single words.
    """
    return min(2, word_bits(D, KIND) - LANE_BITS) if is_float8(KIND) else 0


@gluon.constexpr_function
def unit_words(STRIDE):
    """Words that one copy of a row of blocks brings. STRIDE: words from a key to the next."""
    return 4 if STRIDE % 4 == 0 else 1


@gluon.constexpr_function
def row_units(D, KIND, STRIDE):
    """(units of a row's values, and behind them) of its copies: the values' words, and in units of 16 bytes one unit
    more, for scales and for words of the neighbours that a row of no whole 16 bytes shares its units with."""
    unit, words = unit_words(STRIDE), D // 32 * words_a_block(KIND)
    return words // unit, (1 if unit == 4 else D // 64)


@gluon.constexpr_function
def unit_copy_layout(UNIT, W):
    """[n, UNIT]: a unit a lane, consecutive lanes along the row."""
    return gl.BlockedLayout([1, UNIT], [32, 1], [W, 1], [1, 0])


@gluon.constexpr_function
def flat_shared(rank):
    """Shared memory in which elements lie in order."""
    return gl.SwizzledSharedLayout(1, 1, 1, list(range(rank - 1, -1, -1)))


@gluon.constexpr_function
def _padded(pairs, shape):
    """Elements in order, and after so many of them so many words: pairs of both, sums where intervals are the same."""
    found = {}
    for interval, padding in pairs:
        found[interval] = found.get(interval, 0) + padding
    known = [[interval, padding] for interval, padding in found.items() if padding > 0]
    return gl.PaddedSharedLayout.with_identity_for(known, list(shape), list(range(len(shape) - 1, -1, -1)))


@gluon.constexpr_function
def row_pitch(D, KIND, STRIDE):
    """Words from a row of blocks to the next in shared memory."""
    return unit_words(STRIDE) * sum(row_units(D, KIND, STRIDE))


@gluon.constexpr_function
def keys_a_step(IS_V):
    """Of how many keys that lie one after the other a lane reads the first in a load: K's next key is the next lane's,
    of V a lane has two."""
    return 2 if IS_V else 1


@gluon.constexpr_function
def piece_shape(IS_V):
    """Keys and words of a piece, what one load of a warp reads: a word a lane."""
    return (4, 8) if IS_V else (8, 4)


@gluon.constexpr_function
def words_shared_from(D, NW, W, KIND, STRIDE, IS_V):
    """[W, steps of keys, n] of rows of blocks as they lie in memory, seen from any of their words: the words behind it.
    (Powers of two of them, as far as a step's rows reach; what a piece has is the beginning.)"""
    step, words = keys_a_step(IS_V), D // 32 * words_a_block(KIND)
    return _padded([(step * words, step * (row_pitch(D, KIND, STRIDE) - words))], (W, NW // step, step * words))


@gluon.constexpr_function
def heads_shared_from(D, NW, W, KIND, STRIDE, IS_V):
    """[W, steps of keys, keys of a step, NB, 2] of the same rows, seen from a block's head: elements 0 are the heads of
    it and of those behind it, J words apart and of each second block one more. (What is between two elements is there
    so that 0 and 1 are not read at once.)"""
    J, NB, step = words_a_block(KIND), D // 32, keys_a_step(IS_V)
    rest = row_pitch(D, KIND, STRIDE) - NB * J - NB // 2
    return _padded([(1, 1), (2, J - 4), (4, 1), (2 * NB, rest)], (W, NW // step, step, NB, 2))


@gluon.constexpr_function
def words_piece_layout(W, IS_V):
    """[W, keys, words] of a piece: lane 4g + t has word t of key g; of V word g of key t."""
    keys, words = piece_shape(IS_V)
    of_keys = [key_basis(i, 3) for i in range(log2(keys))]
    of_words = [[0, 0, 1 << i] for i in range(log2(words))]
    lanes = of_keys + of_words if IS_V else of_words + of_keys
    return gl.DistributedLinearLayout([], lanes, way_bases(W, 3), [], [W, keys, words])


@gluon.constexpr_function
def blocks_a_piece(KIND, IS_V):
    return max(1, piece_shape(IS_V)[1] // words_a_block(KIND))


@gluon.constexpr_function
def heads_piece_layout(W, KIND, IS_V):
    """[W, keys, 1, blocks, 2] of a piece's heads, each lane with its word's, elements 0 and 1 in registers."""
    keys, words = piece_shape(IS_V)
    blocks = blocks_a_piece(KIND, IS_V)
    of_keys = [key_basis(i, 5) for i in range(log2(keys))]
    of_blocks = [[0, 0, 0, 1 << i, 0] for i in range(log2(blocks))]
    of_words = [[0] * 5] * (log2(words) - len(of_blocks)) + of_blocks
    lanes = of_keys + of_words if IS_V else of_words + of_keys
    return gl.DistributedLinearLayout(
        [[0, 0, 0, 0, 1]], lanes, way_bases(W, 5), [], [W, keys, 1, blocks, 2]
    )  # fmt: skip


@gluon.constexpr_function
def word_basis(i, KIND):
    """Bit i of a row's words as coordinates of [W, NW, NB, J]."""
    j_bits = log2(words_a_block(KIND))
    return [0, 0, 0, 1 << i] if i < j_bits else [0, 0, 1 << (i - j_bits), 0]


@gluon.constexpr_function
def key_basis(i, rank):
    return [0, 1 << i] + [0] * (rank - 2)


@gluon.constexpr_function
def way_bases(W, rank):
    return [[1 << i] + [0] * (rank - 1) for i in range(log2(W))]


@gluon.constexpr_function
def mma_layout(W):
    """[W, 16, n]: each warp a product of its own. Lane 4g + t holds rows g, g + 8 and columns 2t, 2t + 1 of every 8."""
    return gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])


@gluon.constexpr_function
def column_mma_layout(W):
    """[16, n] of all warps: warp w holds columns 8w .. 8w + 7 of every 8 W. Lanes as in mma_layout."""
    return gl.NVMMADistributedLayout([2, 0], [1, W], [16, 8])


@gluon.constexpr_function
def key_words_layout(D, NW, W, KIND):
    """Words of K [W, NW, NB, J] where the second operand of Q K^T wants them: lane 4g + t has words of key g.

    Lane t has the t-th of four runs of words (of each 16 words, or of all if there are fewer).
    """
    n = word_bits(D, KIND)
    v = chunk_bits(D, KIND, 2)
    regs = [word_basis(i, KIND) for i in (*range(v), *range(v + 2, n))]
    regs += [key_basis(i, 4) for i in range(3, log2(NW))]
    lanes = [word_basis(i, KIND) for i in range(v, v + 2)] + [key_basis(i, 4) for i in range(3)]
    return gl.DistributedLinearLayout(regs, lanes, way_bases(W, 4), [], [W, NW, D // 32, words_a_block(KIND)])


@gluon.constexpr_function
def value_words_layout(D, NW, W, KIND):
    """Words of V [W, NW, NB, J] where the second operand of P V wants them.

    Lane 4g + t has keys 2t, 2t + 1 (in pairs of registers), 2t + 8, 2t + 9 of every 16, and of each the g-th of eight
    runs of words.
    """
    n = word_bits(D, KIND)
    v = chunk_bits(D, KIND, 3)
    regs = [key_basis(0, 4)] + [word_basis(i, KIND) for i in range(v)] + [key_basis(3, 4)]
    regs += [word_basis(i, KIND) for i in range(v + 3, n)] + [key_basis(i, 4) for i in range(4, log2(NW))]
    lanes = [key_basis(1, 4), key_basis(2, 4)] + [word_basis(i, KIND) for i in range(v, v + 3)]
    return gl.DistributedLinearLayout(regs, lanes, way_bases(W, 4), [], [W, NW, D // 32, words_a_block(KIND)])


@gluon.constexpr_function
def swapped(bases, swaps):
    """Bases of offsets in shared memory where bit `bit`'s coordinate also turns over bank bit `bank`."""
    bases = [list(b) for b in bases]
    for bit, bank in swaps:
        bases[bit] = [x + y for x, y in zip(bases[bit], bases[bank])]
    return bases


@gluon.constexpr_function
def words_shared(D, NW, W, KIND, IS_V):
    """Shared memory of [W, NW, NB, J]: row by row, keys turned so that lanes that read at once hit different banks."""
    n = word_bits(D, KIND)
    bases = [word_basis(i, KIND) for i in range(n)] + [key_basis(i, 4) for i in range(log2(NW))] + way_bases(W, 4)
    if IS_V:  # keys 2t: bits 1 and 2 of the key in bank bits 3 and 4
        swaps = [(n + 2, 3)] if n == 3 else [(n + 1, 3), (n + 2, 4)]
    else:  # bit 0 of the key in bank bit 4
        swaps = [(n, 4)] if n >= 5 else []
    return gl.SharedLinearLayout(swapped(bases, swaps))


@gluon.constexpr_function
def wide_copy_layout(shape):
    """Which thread copies what of [W, NW, ..]: four words a lane side by side, copies of 16 bytes, consecutive lanes
    along the last axes, each warp its own keys."""
    rank = len(shape)
    bases = []
    for axis in reversed(range(1, rank)):
        bases += [[1 << i if a == axis else 0 for a in range(rank)] for i in range(log2(shape[axis]))]
    return gl.DistributedLinearLayout(
        bases[:2] + bases[7:], bases[2:7], way_bases(shape[0], rank), [], list(shape)
    )  # fmt: skip


@gluon.constexpr_function
def half_copy_layout(D, W):
    """[W, NW, D] in copies of 16 bytes."""
    lanes = min(32, D // 8)
    return gl.BlockedLayout([1, 1, 8], [1, 32 // lanes, lanes], [W, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def query_layout(D, W, KIND, R=16):
    """Q [W, R rows, D slots] as an operand of Q K^T has it, a slot's place being where K's bytes lie.

    A byte a value: slot 4 * word + byte; q4_0: slot 8 * word + 2 * byte + half.
    """
    if is_half(KIND):
        regs, lanes = [1], [2, 4]
        rest = [1 << i for i in range(3, log2(D))]
    else:
        e = 2 if has_bytes(KIND) else 3  # bits within a word
        v = chunk_bits(D, KIND, 2)
        lanes = [1 << (e + v), 2 << (e + v)]
        # Elements 2t, 2t + 1 of a product's step: bytes 0, 1 or nibbles of bytes 0, 2 (1, 3).
        regs = [1] if has_bytes(KIND) else [4]
        rest = [1 << i for i in range(log2(D)) if 1 << i not in (*regs, *lanes)]
    columns = [[0, 0, b] for b in regs + rest]
    rows = [[0, 1, 0], [0, 2, 0], [0, 4, 0]]
    more = [[0, 8, 0]] if R == 16 else []
    return gl.DistributedLinearLayout(
        [columns[0], *more, *columns[1:]], [[0, 0, b] for b in lanes] + rows, way_bases(W, 3), [], [W, R, D]
    )


@gluon.constexpr_function
def join_layout(D, W, R):
    """[W, R rows, D] with all ways of an element in one thread, four columns a thread side by side, rows over warps."""
    columns = [[0, 0, 1 << i] for i in range(log2(D))]
    rows = [[0, 1 << i, 0] for i in range(log2(R))]
    lanes = (columns[2:7] + rows)[:5]
    rows = [r for r in rows if r not in lanes]
    w = log2(W)
    warps = rows[:w] + [[0, 0, 0]] * max(0, w - len(rows))
    return gl.DistributedLinearLayout(
        columns[:2] + way_bases(W, 3) + columns[7:] + rows[w:], lanes, warps, [], [W, R, D]
    )


@gluon.constexpr_function
def join_shared(D, W, KIND, R):
    """Shared memory for [W, R rows, D slots] f32, written from mma_layout (of V's order) and read in join_layout."""
    n = log2(D)
    bases = [[0, 0, 1 << i] for i in range(n)] + [[0, 1 << i, 0] for i in range(log2(R))] + way_bases(W, 3)
    if is_half(KIND):  # lanes t lie in bank bits 1 and 2, so rows go to 3 and 4
        swaps = [(n, 3), (n + 1, 4)]
    else:  # lanes t and bit 0 of the row to bank bits 2 to 4, unless they are there
        t = (2 if has_bytes(KIND) else 3) + chunk_bits(D, KIND, 3) + 1
        free = [b for b in (2, 3, 4) if b not in (t, t + 1)]
        swaps = [(bit, free.pop(0)) for bit in (t, t + 1, n) if bit > 4]
    return gl.SharedLinearLayout(swapped(bases, swaps))


@gluon.constexpr_function
def sums_layout(P, R, W):
    """[P, R], all of it in each warp: rows over lanes, then parts."""
    bits = [[0, 1 << i] for i in range(log2(R))] + [[1 << i, 0] for i in range(log2(P))]
    return gl.DistributedLinearLayout(bits[5:], bits[:5], [[0, 0]] * log2(W), [], [P, R])


@gluon.constexpr_function
def parts_layout(P, R, D, W):
    """[P, R, D]: four columns a thread side by side, the other columns over the threads, then rows, then parts."""
    columns = [[0, 0, 1 << i] for i in range(log2(D))]
    bits = columns[2:] + [[0, 1 << i, 0] for i in range(log2(R))] + [[1 << i, 0, 0] for i in range(log2(P))]
    w = 5 + log2(W)
    return gl.DistributedLinearLayout(columns[:2] + bits[w:], bits[:5], bits[5:w], [], [P, R, D])


@gluon.jit
def slot_elements(i_slot, KIND: gl.constexpr):
    """Which element of a row a slot holds; tiles.py's for aligned rows."""
    if is_half(KIND) or is_float8(KIND):
        return i_slot
    turned = (i_slot & 32) == 0
    if KIND == "q8_0":
        i = i_slot & 31
        return (i_slot & -32) + gl.where(turned, (i + 2) & 31, i)
    else:
        i = (i_slot & 31) >> 1
        return (i_slot & -32) + gl.where(turned, (i + 2) & 15, i) + 16 * (i_slot & 1)
