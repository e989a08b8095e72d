"""Layouts of registers and shared memory of mma.py: plain Python, run when a kernel is compiled.

Axes: WK warps along k, rows of weights, tokens; of each 128 elements of k 4 groups of 32, one a lane of four.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from graphrt.backends.triton.kernels.common.gluon_layouts import log2
from graphrt.backends.triton.kernels.kinds import scale_bytes


@gluon.constexpr_function
def bit(axis, i, rank):
    """The basis of bit i of an axis."""
    return [1 << i if a == axis else 0 for a in range(rank)]


@gluon.constexpr_function
def bits(axis, first, last, rank):
    """The bases of bits first .. last - 1 of an axis."""
    return [bit(axis, i, rank) for i in range(first, last)]


@gluon.constexpr_function
def scale_type(KIND):
    return {1: gl.int8, 2: gl.int16, 4: gl.int32}[scale_bytes(KIND)]


@gluon.constexpr_function
def mma_layout(WK, WR):
    """[WK, rows, tokens]: lane 4g + c holds rows g, g + 8 and tokens 2c, 2c + 1 of every 16 x 8."""
    return gl.NVMMADistributedLayout([2, 0], [WK, WR, 1], [1, 16, 8])


@gluon.constexpr_function
def words_layout(WK, WR, ROWS, E, BY_WORD=False):
    """[WK, ROWS, 4, E]: lane 4g + c has E words, side by side, of group c of rows g, g + 8 of each 16 rows.

    BY_WORD: of all groups word c, and of groups of eight words word 4 + c.
    """
    groups, words = bits(2, 0, 2, 4), bits(3, 0, 2, 4)
    mine, across = (groups, words) if BY_WORD else (words, groups)
    regs = mine + bits(3, 2, log2(E), 4) + bits(1, 3, 4, 4) + bits(1, 4 + log2(WR), log2(ROWS), 4)
    lanes = across + bits(1, 0, 3, 4)
    warps = bits(1, 4, 4 + log2(WR), 4) + bits(0, 0, log2(WK), 4)
    return gl.DistributedLinearLayout(regs, lanes, warps, [], [WK, ROWS, 4, E])


@gluon.constexpr_function
def high_layout(WK, WR, ROWS, BY_WORD=False):
    """[WK, ROWS, 4, 2, 2]: words_layout of four words, their number as two axes."""
    words = words_layout(WK, WR, ROWS, 4, BY_WORD)

    def split(basis):
        return [*basis[:3], basis[3] >> 1, basis[3] & 1]

    regs, lanes, warps = ([split(b) for b in x] for x in (words.reg_bases, words.lane_bases, words.warp_bases))
    return gl.DistributedLinearLayout(regs, lanes, warps, [], [WK, ROWS, 4, 2, 2])


@gluon.constexpr_function
def x_layout(WK, WR, TOKENS):
    """[WK, TOKENS, 4, 16]: lane 4g + c has 16 elements, side by side, of group c of token g of each 8."""
    regs = bits(3, 0, 4, 4) + bits(1, 3, log2(TOKENS), 4)
    lanes = bits(2, 0, 2, 4) + bits(1, 0, 3, 4)
    warps = [[0, 0, 0, 0]] * log2(WR) + bits(0, 0, log2(WK), 4)
    return gl.DistributedLinearLayout(regs, lanes, warps, [], [WK, TOKENS, 4, 16])


@gluon.constexpr_function
def pieces_shared(WK, N, E, V):
    """Shared memory of [WK, N, 4, E] as words_layout and x_layout read it, V elements (16 bytes) at a time.

    Lanes that read at once (two of N, four groups) have 128 bytes side by side. If E is more than V, the pieces of V
    are turned against each other: those that pieces_copy's lanes write at once lie in different banks.
    """
    v, e, n = log2(V), log2(E), log2(N)
    offsets = bits(3, 0, v, 4) + bits(2, 0, 2, 4) + bits(1, 0, 3, 4)
    for i in range(v, e):
        offsets.append([x + y for x, y in zip(bit(3, i, 4), bit(1, i - v, 4))])
    return gl.SharedLinearLayout(offsets + bits(1, 3, n, 4) + bits(0, 0, log2(WK), 4))


@gluon.constexpr_function
def turned_shared(WK, N, E):
    """Shared memory of [WK, N, 4, E] words as words_layout reads it BY_WORD: eight rows' same 16 bytes at a time, which
    lie in different banks, since a row's 16 bytes are turned against those of the rows before it. What pieces_copy's
    lanes write at once does too."""
    pieces = bits(3, 2, log2(E), 4) + bits(2, 0, 2, 4)
    offsets = bits(3, 0, 2, 4) + pieces
    for r in range(log2(N)):
        i = r + len(pieces) - 3  # the first bits of the number of a row shorter than all banks say which banks
        turned = pieces[i] if 0 <= i and r < 3 else [0, 0, 0, 0]
        offsets.append([x + y for x, y in zip(bit(1, r, 4), turned)])
    return gl.SharedLinearLayout(offsets + bits(0, 0, log2(WK), 4))


@gluon.constexpr_function
def spread(order, V, SHAPE, WARPS):
    """A layout over all threads: of the bits in that order V elements to registers, then lanes, then warps, then more
    registers; where there are too few, threads hold the same."""
    order = [list(b) for b in order]
    v = log2(V)
    rank = len(SHAPE)
    regs, lanes, warps = order[:v], order[v : v + 5], order[v + 5 : v + 5 + log2(WARPS)]
    regs = regs + order[v + 5 + log2(WARPS) :]
    lanes = lanes + [[0] * rank] * (5 - len(lanes))
    warps = warps + [[0] * rank] * (log2(WARPS) - len(warps))
    return gl.DistributedLinearLayout(regs, lanes, warps, [], list(SHAPE))


@gluon.constexpr_function
def pieces_copy(WK, N, E, V, WARPS):
    """Which thread copies what of [WK, N, 4, E]: a row's pieces by neighbouring lanes, eight of them into all banks."""
    order = bits(3, 0, log2(E), 4) + bits(2, 0, 2, 4)
    first = 1 if E == V else 0
    order += bits(1, 0, first, 4) + bits(0, 0, log2(WK), 4) + bits(1, first, log2(N), 4)
    return spread(order, V, [WK, N, 4, E], WARPS)


@gluon.constexpr_function
def rows_shared(SHAPE):
    """Shared memory of a tensor as it is, the last axis first."""
    rank = len(SHAPE)
    return gl.SharedLinearLayout([b for a in reversed(range(rank)) for b in bits(a, 0, log2(SHAPE[a]), rank)])


@gluon.constexpr_function
def rows_copy(SHAPE, V, WARPS):
    """Which thread copies what of [WK, ROWS, ..], V elements at a time: of a row all that lies side by side first."""
    rank = len(SHAPE)
    order = [b for a in reversed(range(2, rank)) for b in bits(a, 0, log2(SHAPE[a]), rank)]
    order += bits(0, 0, log2(SHAPE[0]), rank) + bits(1, 0, log2(SHAPE[1]), rank)
    return spread(order, V, SHAPE, WARPS)


@gluon.constexpr_function
def sums_shared(WK, ROWS, TOKENS):
    """Shared memory for [WK, ROWS, TOKENS] f32, written from mma_layout and read along rows: in different banks."""
    r = log2(ROWS)
    offsets = bits(1, 0, r, 3) + bits(2, 0, log2(TOKENS), 3) + bits(0, 0, log2(WK), 3)
    for at, bank in ((r + 1, 3), (r + 2, 4)):
        if bank < r:
            offsets[at] = [x + y for x, y in zip(offsets[at], offsets[bank])]
    return gl.SharedLinearLayout(offsets)


@gluon.constexpr_function
def sums_layout(WK, ROWS, TOKENS, WARPS, PAIR):
    """[WK, ROWS, TOKENS] with all parts of a sum in one thread, rows over lanes. PAIR: rows i and i + 8 of 16 too."""
    rows, t = bits(1, 0, log2(ROWS), 3), log2(TOKENS)
    mine = bits(0, 0, log2(WK), 3)
    if PAIR:
        mine, rows = mine + rows[3:4], rows[:3] + rows[4:]
    order = rows + bits(2, 0, t, 3)
    w = 5 + log2(WARPS)
    warps = order[5:w] + [[0, 0, 0]] * max(0, w - len(order))
    return gl.DistributedLinearLayout(mine + order[w:], order[:5], warps, [], [WK, ROWS, TOKENS])
