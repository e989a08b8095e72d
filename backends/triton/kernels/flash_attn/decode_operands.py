"""How the decode kernel copies k-blocks to shared memory and reads them as operands; see decode.py's docstring."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from graphrt.backends.triton.kernels.common.bits import BYTES_TIMES_F16
from graphrt.backends.triton.kernels.common.blocks import words_a_block
from graphrt.backends.triton.kernels.common.float8 import has_one_nan, is_float8
from graphrt.backends.triton.kernels.common.gluon_layouts import axis_index, axis_layout
from graphrt.backends.triton.kernels.flash_attn.decode_layouts import (
    blocks_a_piece,
    chunk_bits,
    dot_dtype,
    flat_shared,
    half_copy_layout,
    has_bytes,
    heads_piece_layout,
    heads_shared_from,
    is_half,
    key_words_layout,
    keys_a_step,
    mma_layout,
    piece_shape,
    query_layout,
    row_pitch,
    row_units,
    slot_elements,
    unit_copy_layout,
    unit_words,
    value_words_layout,
    wide_copy_layout,
    words_piece_layout,
    words_shared,
    words_shared_from,
)
from graphrt.backends.triton.kernels.flash_attn.gluon_visits import key_offsets

# --- copies ---


@gluon.jit
def allocate(
    STAGES: gl.constexpr, NW: gl.constexpr, D: gl.constexpr, KIND: gl.constexpr, IS_V: gl.constexpr,
    STRIDE: gl.constexpr, offset,
):  # fmt: skip
    """The ring of K or V: (tiles, words that rows lie behind their first unit); only rows of blocks lie so.

    offset: of the first key of the sequence and head from the cache's first word, which lies on a unit.
    """
    W: gl.constexpr = gl.num_warps()
    if is_half(KIND):
        layout: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
        return gl.allocate_shared_memory(dot_dtype(KIND), [STAGES, W, NW, D], layout), 0
    elif is_float8(KIND):
        words = gl.allocate_shared_memory(
            gl.int32, [STAGES, W, NW, D // 32, words_a_block(KIND)], words_shared(D, NW, W, KIND, IS_V)
        )
        return words, 0
    else:
        UNIT: gl.constexpr = unit_words(STRIDE)
        UNITS: gl.constexpr = row_units(D, KIND, STRIDE)
        shape: gl.constexpr = [STAGES * (UNITS[0] + UNITS[1]), W * NW * UNIT]
        return gl.allocate_shared_memory(gl.int32, shape, flat_shared(1)), (offset & (UNIT - 1)).to(gl.int32)


@gluon.jit
def copy_tile(
    ring, p, left, hidden, pages, STRIDE: gl.constexpr, NW: gl.constexpr, D: gl.constexpr, KIND: gl.constexpr,
    MASKED: gl.constexpr, HIDES: gl.constexpr, PAGE: gl.constexpr, slot,
):  # fmt: skip
    """Starts the copies of a k-block's rows of K or V into buffer `slot` of the ring.

    p: the first, or of pages of PAGE keys the cache, see gluon_visits.key_offsets; PAGE 0: they are STRIDE apart.
    MASKED: rows from `left` on are not read and become 0, nor are those that `hidden` names: HIDES "bits",
    those whose bit is 0 (see seen_bits); "first", those before it; "", none.
    """
    W: gl.constexpr = gl.num_warps()
    tiles, shift = ring
    if is_half(KIND):
        L: gl.constexpr = half_copy_layout(D, W)
        key = axis_index(L, 3, 0, W) * NW + axis_index(L, 3, 1, NW)
        p = gl.multiple_of(p, 16)
        if PAGE == 0:
            pointers = p + (key * STRIDE + axis_index(L, 3, 2, D))
        else:
            S: gl.constexpr = gl.SliceLayout(2, L)
            pointers = p + (gl.expand_dims(block_offsets(S, pages, STRIDE, NW, PAGE), 2) + axis_index(L, 3, 2, D))
        if MASKED:
            mask = row_mask(L, 3, key, left, hidden, NW, HIDES)
            async_copy.async_copy_global_to_shared(tiles.index(slot), pointers, mask)
        else:
            async_copy.async_copy_global_to_shared(tiles.index(slot), pointers)
    elif is_float8(KIND):
        J: gl.constexpr = words_a_block(KIND)
        NB: gl.constexpr = D // 32
        LW: gl.constexpr = wide_copy_layout([W, NW, NB, J])
        key = axis_index(LW, 4, 0, W) * NW + axis_index(LW, 4, 1, NW)
        p = gl.multiple_of(p, 16)
        if PAGE == 0:
            at = key * STRIDE
        else:
            S: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, LW))
            at = gl.expand_dims(gl.expand_dims(block_offsets(S, pages, STRIDE, NW, PAGE), 2), 3)
        pointers = p + (at + (axis_index(LW, 4, 2, NB) * J + axis_index(LW, 4, 3, J)))
        if MASKED:
            mask = row_mask(LW, 4, key, left, hidden, NW, HIDES)
            async_copy.async_copy_global_to_shared(tiles.index(slot), pointers, mask)
        else:
            async_copy.async_copy_global_to_shared(tiles.index(slot), pointers)
    else:
        UNITS: gl.constexpr = row_units(D, KIND, STRIDE)
        copy_units(ring, p, left, hidden, pages, STRIDE, NW, MASKED, HIDES, PAGE, slot, UNITS, 0)
        copy_units(ring, p, left, hidden, pages, STRIDE, NW, MASKED, HIDES, PAGE, slot, UNITS, 1)


@gluon.jit
def copy_run(
    ring, p, NW: gl.constexpr, D: gl.constexpr, KIND: gl.constexpr, PART: gl.constexpr, slot,
):  # fmt: skip
    """Starts the copies of a whole k-block whose rows lie side by side and begin on a unit: one run of memory, by 16
    bytes, which so lies in shared memory as copies of single words would have put it. In two parts, as copy_units."""
    words, _ = ring
    N: gl.constexpr = NW * gl.num_warps()
    WORDS: gl.constexpr = row_units(D, KIND, 1)
    FIRST: gl.constexpr = PART * WORDS[0]
    UNITS: gl.constexpr = N * WORDS[PART] // 4
    L: gl.constexpr = unit_copy_layout(4, gl.num_warps())
    at = axis_index(L, 2, 0, UNITS) * 4 + axis_index(L, 2, 1, 4) + N * FIRST
    target = words.index(slot * (WORDS[0] + WORDS[1]) + FIRST)._reinterpret(gl.int32, [UNITS, 4], flat_shared(2))
    async_copy.async_copy_global_to_shared(target, p + at)


@gluon.jit
def copy_units(
    ring, p, left, hidden, pages, STRIDE: gl.constexpr, NW: gl.constexpr, MASKED: gl.constexpr, HIDES: gl.constexpr,
    PAGE: gl.constexpr, slot, UNITS: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Starts the copies of rows of blocks, as they lie, the k-block's units one after the other: a first part of as
    many as the values are long (PART 0), a second of what is left. Arguments: copy_tile's."""
    words, shift = ring
    N: gl.constexpr = NW * gl.num_warps()
    UNIT: gl.constexpr = unit_words(STRIDE)
    ALL: gl.constexpr = UNITS[0] + UNITS[1]
    L: gl.constexpr = unit_copy_layout(UNIT, gl.num_warps())
    i_unit = axis_index(L, 2, 0, N * UNITS[PART]) + PART * N * UNITS[0]
    key = i_unit // ALL
    if PAGE == 0:
        at = key * STRIDE
    else:
        at = key_offsets(key, pages, STRIDE, PAGE)
    # Of the difference, an operation of this function: what is said of an argument is lost when it is inlined.
    pointers = gl.multiple_of(p - shift, 4 * UNIT) + (at + (i_unit % ALL * UNIT + axis_index(L, 2, 1, UNIT)))
    target = words.index(slot * ALL + PART * UNITS[0])._reinterpret(gl.int32, [N * UNITS[PART], UNIT], flat_shared(2))
    if MASKED:
        mask = key < left
        if HIDES == "first":
            mask = mask & (key >= hidden)
        if HIDES == "bits":
            _, p_bits, partial = hidden
            mask = mask & ((gl.load(p_bits + key // 32, mask=partial & mask, other=-1) >> (key % 32) & 1) != 0)
        async_copy.async_copy_global_to_shared(target, pointers, mask)
    else:
        async_copy.async_copy_global_to_shared(target, pointers)


@gluon.jit
def block_offsets(LAYOUT: gl.constexpr, pages, STRIDE: gl.constexpr, NW: gl.constexpr, PAGE: gl.constexpr):
    """key_offsets of a k-block's keys, [W, NW], in a layout without columns: a thread looks a key's page up once."""
    W: gl.constexpr = gl.num_warps()
    key = axis_index(LAYOUT, 2, 0, W) * NW + axis_index(LAYOUT, 2, 1, NW)
    return key_offsets(key, pages, STRIDE, PAGE)


@gluon.jit
def row_mask(LAYOUT: gl.constexpr, RANK: gl.constexpr, key, left, hidden, NW: gl.constexpr, HIDES: gl.constexpr):
    """Which rows of a k-block to read."""
    inside = key < left
    if HIDES == "first":
        inside = inside & (key >= hidden)
    if HIDES == "bits":
        words = gl.convert_layout(hidden[0], axis_layout(LAYOUT, RANK, 0))
        for i in gl.static_range(1, RANK):
            words = gl.expand_dims(words, i)
        inside = inside & (((words >> axis_index(LAYOUT, RANK, 1, NW)) & 1) != 0)
    return inside


@gluon.jit
def seen_bits(p_bits, partial, NW: gl.constexpr):
    """The `seen` bits of a k-block's keys: (int32 [W], bit i for key i of the way, all ones unless partial; the
    arguments p_bits, the k-block's first word, and partial)."""
    W: gl.constexpr = gl.num_warps()
    LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 1], [1, 32], [W, 1], [1, 0]))
    first = gl.arange(0, W, layout=LAYOUT) * NW
    return gl.load(p_bits + first // 32, mask=partial & (first >= 0), other=-1) >> (first % 32), p_bits, partial


# --- operands ---


@gluon.jit
def load_q(
    p_q, p_row, m_row, sign, D: gl.constexpr, KIND: gl.constexpr, DOT: gl.constexpr, THIN: gl.constexpr,
    FIRST: gl.constexpr = 0,
):  # fmt: skip
    """Q in the order of K's slots as the first operand: [W, 16, D]; THIN: of 8 rows as the second one, [W, D, 8].

    p_row: int64 offsets [1, rows, 1]. FIRST: the first of D slots that are wanted."""
    W: gl.constexpr = gl.num_warps()
    R: gl.constexpr = 8 if THIN else 16
    L: gl.constexpr = query_layout(D, W, KIND, R)
    column = slot_elements(FIRST + axis_index(L, 3, 2, D), KIND) + axis_index(L, 3, 0, W) * 0
    q = gl.load(p_q + p_row + column, mask=m_row & (column >= 0), other=0.0)
    q = (q * sign).to(DOT)
    if is_half(KIND):
        q = q
    elif has_bytes(KIND):  # [rest, t, i, b1, b0] to steps' [rest, i], b1, t, b0
        V: gl.constexpr = 1 << chunk_bits(D, KIND, 2)
        q = gl.reshape(q, [W, R, D // (16 * V), 4, V, 2, 2])
        q = gl.reshape(gl.permute(q, (0, 1, 2, 4, 5, 3, 6)), [W, R, D])
    else:  # [rest, t, i, b1, b0, half] to [rest, i, b0], half, t, b1
        U: gl.constexpr = 1 << chunk_bits(D, KIND, 2)
        q = gl.reshape(q, [W, R, D // (32 * U), 4, U, 2, 2, 2])
        q = gl.reshape(gl.permute(q, (0, 1, 2, 4, 6, 7, 3, 5)), [W, R, D])
    if THIN:
        q = gl.permute(q, (0, 2, 1))
        return gl.convert_layout(q, gl.DotOperandLayout(1, mma_layout(W), 2), assert_trivial=True)
    else:
        return gl.convert_layout(q, gl.DotOperandLayout(0, mma_layout(W), 2), assert_trivial=True)


@gluon.jit
def load_rows_of_blocks(ring, slot, NW: gl.constexpr, D: gl.constexpr, KIND: gl.constexpr, STRIDE: gl.constexpr,
                        IS_V: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    """(words [W, NW, NB, J] in LAYOUT, heads [W, NW, NB] in a slice of it) of a buffer.

    Read by pieces, each from a place of its own that is the same in all lanes: then a lane computes one address, and
    pieces are constants away from it. (Of one load of everything it computes an address for each register.)
    """
    W: gl.constexpr = gl.num_warps()
    J: gl.constexpr = words_a_block(KIND)
    NB: gl.constexpr = D // 32
    UNITS: gl.constexpr = row_units(D, KIND, STRIDE)
    WORDS: gl.constexpr = W * NW * NB * J  # fewer than there are
    PIECE: gl.constexpr = piece_shape(IS_V)
    STEP: gl.constexpr = keys_a_step(IS_V)
    GROUPS: gl.constexpr = NW // (PIECE[0] * STEP)
    ACROSS: gl.constexpr = NB * J // PIECE[1]
    BLOCKS: gl.constexpr = blocks_a_piece(KIND, IS_V)
    PITCH: gl.constexpr = row_pitch(D, KIND, STRIDE)
    tiles, shift = ring
    rows = tiles.index(slot * (UNITS[0] + UNITS[1]))._reinterpret(gl.int32, [WORDS, 1], flat_shared(1))
    words = ()
    heads = ()
    for group in gl.static_range(GROUPS):
        for step in gl.static_range(STEP):
            row = shift + (group * PIECE[0] * STEP + step) * PITCH
            for i in gl.static_range(ACROSS):
                # A word comes between each two blocks and the next two.
                words = words + (  # noqa: RUF005
                    load_words(rows, row + (1 + i * PIECE[1] + i * PIECE[1] // (2 * J)), NW, D, KIND, STRIDE, IS_V),
                )
            for i in gl.static_range(0, NB, BLOCKS):
                heads = heads + (  # noqa: RUF005
                    load_heads(rows, row + (i * J + i // 2), NW, D, KIND, STRIDE, IS_V),
                )
    # [W, keys, words, across, steps, groups]
    x = stacked(words, 0, GROUPS * STEP * ACROSS)
    x = gl.reshape(x, [W, PIECE[0], PIECE[1], GROUPS, STEP, ACROSS])
    x = gl.reshape(gl.permute(x, (0, 3, 1, 4, 5, 2)), [W, NW, NB, J])
    h = stacked(heads, 0, GROUPS * STEP * NB // BLOCKS)
    h = gl.reshape(h, [W, PIECE[0], BLOCKS, GROUPS, STEP, NB // BLOCKS])
    h = gl.reshape(gl.permute(h, (0, 3, 1, 4, 5, 2)), [W, NW, NB])
    return (
        gl.convert_layout(x, LAYOUT, assert_trivial=True),
        gl.convert_layout(h, gl.SliceLayout(3, LAYOUT), assert_trivial=True),
    )


@gluon.jit
def load_words(
    rows, at, NW: gl.constexpr, D: gl.constexpr, KIND: gl.constexpr, STRIDE: gl.constexpr, IS_V: gl.constexpr
):  # fmt: skip
    """The words of a piece whose first one is the at-th: [W, keys, words]."""
    W: gl.constexpr = gl.num_warps()
    PIECE: gl.constexpr = piece_shape(IS_V)
    SHARED: gl.constexpr = words_shared_from(D, NW, W, KIND, STRIDE, IS_V)
    words = rows.index(at)._reinterpret(gl.int32, SHARED.shape, SHARED)
    return words.slice(0, PIECE[0], dim=1).slice(0, PIECE[1], dim=2).load(words_piece_layout(W, IS_V))


@gluon.jit
def load_heads(
    rows, at, NW: gl.constexpr, D: gl.constexpr, KIND: gl.constexpr, STRIDE: gl.constexpr, IS_V: gl.constexpr
):  # fmt: skip
    """The heads of a piece's blocks, the first of which is the at-th word: [W, keys, blocks]."""
    W: gl.constexpr = gl.num_warps()
    PIECE: gl.constexpr = piece_shape(IS_V)
    BLOCKS: gl.constexpr = blocks_a_piece(KIND, IS_V)
    SHARED: gl.constexpr = heads_shared_from(D, NW, W, KIND, STRIDE, IS_V)
    heads = rows.index(at)._reinterpret(gl.int32, SHARED.shape, SHARED)
    heads = heads.slice(0, PIECE[0], dim=1).slice(0, 1, dim=2).slice(0, BLOCKS, dim=3)
    head, _ = gl.split(heads.load(heads_piece_layout(W, KIND, IS_V)))
    return gl.reshape(head, [W, PIECE[0], BLOCKS])


@gluon.jit
def stacked(pieces, first: gl.constexpr, n: gl.constexpr):
    """n tensors of a tuple, a power of two, from the first-th on, along a new last axis."""
    if n == 1:
        one = pieces[first]
        return gl.reshape(one, [one.shape[0], one.shape[1], one.shape[2], 1])
    else:
        both = gl.join(stacked(pieces, first, n // 2), stacked(pieces, first + n // 2, n // 2))
        both = gl.permute(both, (0, 1, 2, 4, 3))
        return gl.reshape(both, [both.shape[0], both.shape[1], both.shape[2], n])


@gluon.jit
def whole_words(words, heads, LAYOUT: gl.constexpr, NB: gl.constexpr, J: gl.constexpr):
    """Words with an even block's first two values, from its head, in the place after its last ones."""
    turned = ((axis_index(LAYOUT, 4, 2, NB) & 1) == 0) & (axis_index(LAYOUT, 4, 3, J) == J - 1)
    own = gl.where(turned, 0xFFFF, -1)  # bits; that none change in most registers, the compiler sees
    return (words & own) | (heads & (own ^ -1))


@gluon.jit
def load_k(
    ring, slot, NW: gl.constexpr, D: gl.constexpr, KIND: gl.constexpr, STRIDE: gl.constexpr, THIN: gl.constexpr = False,
):  # fmt: skip
    """A k-block of K as the second operand of Q K^T: [W, D, NW]; THIN: as the first of K Q^T, [W, NW, D]."""
    W: gl.constexpr = gl.num_warps()
    OPERAND: gl.constexpr = gl.DotOperandLayout(0 if THIN else 1, mma_layout(W), 2)
    tiles, _ = ring
    if is_half(KIND):
        return tiles.index(slot).permute((0, 2, 1)).load(OPERAND)
    else:
        L: gl.constexpr = key_words_layout(D, NW, W, KIND)
        J: gl.constexpr = words_a_block(KIND)
        NB: gl.constexpr = D // 32
        V: gl.constexpr = 1 << chunk_bits(D, KIND, 2)
        if is_float8(KIND):
            words = tiles.index(slot).load(L)
            dd = words
        else:
            words, head = load_rows_of_blocks(ring, slot, NW, D, KIND, STRIDE, False, L)
            odd = (gl.arange(0, NB, layout=axis_layout(gl.SliceLayout(3, L), 3, 2)) & 1) != 0
            which = gl.expand_dims(gl.expand_dims(gl.where(odd, 0x3232, 0x1010), 0), 1)
            head, which = gl.broadcast(head, which)
            dd = gl.inline_asm_elementwise(
                "prmt.b32 $0, $1, $1, $2;", "=r,r,r", [head, which], dtype=gl.int32, is_pure=True, pack=1
            )
            words = whole_words(words, gl.expand_dims(head, 3), L, NB, J)
            words, dd = gl.broadcast(words, gl.expand_dims(dd, 3))
        if has_bytes(KIND):
            a, b, c, d = float8_words(words, KIND) if is_float8(KIND) else key_bytes(words, dd)
            x = gl.join(gl.join(a, c), gl.join(b, d))  # [W, NW, NB, J, b1, b0]
            x = gl.reshape(x, [W, NW, D // (16 * V), 4, V, 2, 2])  # .., rest, t, i, b1, b0
            x = gl.permute(x, (0, 1, 2, 4, 5, 3, 6))
        else:
            a, a1, b, b1, c, c1, d, d1 = key_nibbles(words, dd)
            x = gl.join(gl.join(gl.join(a, c), gl.join(b, d)), gl.join(gl.join(a1, c1), gl.join(b1, d1)))
            x = gl.reshape(x, [W, NW, D // (32 * V), 4, V, 2, 2, 2])  # .., rest, t, i, b1, b0, half
            x = gl.permute(x, (0, 1, 2, 4, 6, 7, 3, 5))
        x = gl.reshape(x, [W, NW, D])
        if not THIN:
            x = gl.permute(x, (0, 2, 1))
        return gl.convert_layout(x, OPERAND, assert_trivial=True)


@gluon.jit
def load_v(
    ring, slot, NW: gl.constexpr, D: gl.constexpr, KIND: gl.constexpr, STRIDE: gl.constexpr, THIN: gl.constexpr = False,
):  # fmt: skip
    """A k-block of V as the second operand of P V: [W, NW, D], columns in the order that slot_order undoes; THIN:
    as the first of V^T P^T, [W, D, NW]."""
    W: gl.constexpr = gl.num_warps()
    OPERAND: gl.constexpr = gl.DotOperandLayout(0 if THIN else 1, mma_layout(W), 2)
    tiles, _ = ring
    if is_half(KIND):
        return tiles.index(slot).load(OPERAND)
    else:
        L: gl.constexpr = value_words_layout(D, NW, W, KIND)
        J: gl.constexpr = words_a_block(KIND)
        NB: gl.constexpr = D // 32
        V: gl.constexpr = 1 << chunk_bits(D, KIND, 3)
        if is_float8(KIND):
            words = tiles.index(slot).load(L)
            dd = words
        else:
            words, head = load_rows_of_blocks(ring, slot, NW, D, KIND, STRIDE, True, L)
            odd = (gl.arange(0, NB, layout=axis_layout(gl.SliceLayout(3, L), 3, 2)) & 1) != 0
            which = gl.expand_dims(gl.expand_dims(gl.where(odd, 0x7632, 0x5410), 0), 1)
            head, which = gl.broadcast(head, which)
            dd = gl.inline_asm_elementwise(  # d of keys 2t and 2t + 1, the same in both keys' registers
                "prmt.b32 $0, $2, $3, $4; mov.b32 $1, $0;", "=r,=r,r,r,r,r", [head, which], dtype=gl.int32,
                is_pure=True, pack=2,
            )  # fmt: skip
            words = whole_words(words, gl.expand_dims(head, 3), L, NB, J)
            words, dd = gl.broadcast(words, gl.expand_dims(dd, 3))
        if has_bytes(KIND):
            a, b, c, d = float8_words(words, KIND) if is_float8(KIND) else value_bytes(words, dd)
            x = gl.join(gl.join(a, c), gl.join(b, d))  # [W, NW, NB, J, byte / 2, byte % 2]
            x = gl.reshape(x, [W, NW, D // (32 * V), 8, V, 4])  # .., rest, g, i, byte
        else:
            a, a1, b, b1, c, c1, d, d1 = value_nibbles(words, dd)
            x = gl.join(gl.join(gl.join(a, c), gl.join(b, d)), gl.join(gl.join(a1, c1), gl.join(b1, d1)))
            x = gl.reshape(x, [W, NW, D // (64 * V), 8, V, 8])  # .., rest, g, i, byte and half
        x = gl.reshape(gl.permute(x, (0, 1, 2, 4, 5, 3)), [W, NW, D])
        if THIN:
            x = gl.permute(x, (0, 2, 1))
        return gl.convert_layout(x, OPERAND, assert_trivial=True)


@gluon.jit
def slot_order(acc, D: gl.constexpr, KIND: gl.constexpr):
    """Sums [W, R, D] with the columns of load_v, put in the order of slots."""
    if is_half(KIND):
        return acc
    else:
        V: gl.constexpr = 1 << chunk_bits(D, KIND, 3)
        E: gl.constexpr = 4 if has_bytes(KIND) else 8
        W: gl.constexpr = gl.num_warps()
        R: gl.constexpr = acc.shape[1]
        x = gl.reshape(acc, [W, R, D // (8 * V * E), V, E, 8])
        return gl.reshape(gl.permute(x, (0, 1, 2, 5, 3, 4)), [W, R, D])


@gluon.jit
def key_bytes(words, dd):
    """Four f16 of each word of four int8, times d (both halves of dd)."""
    # A byte b under the exponent of 1024 is the f16 number 1024 + b; with its sign bit turned, 1152 + int8.
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 x, t<2>, base;
        mov.b32 base, 0x64806480;
        xor.b32 x, $4, 0x80808080;
        prmt.b32 t0, x, 0x64646464, 0x4140;
        prmt.b32 t1, x, 0x64646464, 0x4342;
        sub.f16x2 t0, t0, base;
        sub.f16x2 t1, t1, base;
        mul.f16x2 t0, t0, $5;
        mul.f16x2 t1, t1, $5;
        mov.b32 {$0, $1}, t0;
        mov.b32 {$2, $3}, t1;
        }
        """,
        "=h,=h,=h,=h,r,r", [words, dd], dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def key_nibbles(words, dd):
    """Eight f16 of each word of eight 4-bit numbers n: (n - 8) * d; low, high nibble of bytes 0, 1, 2, 3."""
    # n under the exponent of 1024 is 1024 + n; 16 bits higher nibbles are 16 n, which one exact fma takes to n - 8.
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 x, t<4>, base, low, small, high;
        mov.b32 base, 0x64006400;
        mov.b32 low, 0x64086408;
        mov.b32 small, 0x2C002C00;
        mov.b32 high, 0xD480D480;
        shr.u32 x, $8, 8;
        lop3.b32 t0, $8, 0x000F000F, base, 0xEA;
        lop3.b32 t1, $8, 0x00F000F0, base, 0xEA;
        lop3.b32 t2, x, 0x000F000F, base, 0xEA;
        lop3.b32 t3, x, 0x00F000F0, base, 0xEA;
        sub.f16x2 t0, t0, low;
        fma.rn.f16x2 t1, t1, small, high;
        sub.f16x2 t2, t2, low;
        fma.rn.f16x2 t3, t3, small, high;
        mul.f16x2 t0, t0, $9;
        mul.f16x2 t1, t1, $9;
        mul.f16x2 t2, t2, $9;
        mul.f16x2 t3, t3, $9;
        mov.b32 {$0, $4}, t0;
        mov.b32 {$1, $5}, t1;
        mov.b32 {$2, $6}, t2;
        mov.b32 {$3, $7}, t3;
        }
        """,
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [words, dd],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True, pack=1,
    )  # fmt: skip


#: Four f16 of a word's four codes: by the instruction of sm_89 and later; of e5m2 the high bytes of f16.
_E4M3_WORD = gl.constexpr(
    """
    {
    .reg .b16 a, b;
    .reg .b32 s, t;
    mov.b32 {a, b}, $4;
    cvt.rn.f16x2.e4m3x2 s, a;
    cvt.rn.f16x2.e4m3x2 t, b;
    mov.b32 {$0, $1}, s;
    mov.b32 {$2, $3}, t;
    }
    """
)
_E5M2_WORD = gl.constexpr(
    """
    {
    .reg .b32 s, t;
    prmt.b32 s, $4, 0, 0x1404;
    prmt.b32 t, $4, 0, 0x3424;
    mov.b32 {$0, $1}, s;
    mov.b32 {$2, $3}, t;
    }
    """
)


@gluon.jit
def float8_words(words, KIND: gl.constexpr):
    """Four f16 of each word of four floats of 8 bits."""
    source: gl.constexpr = _E4M3_WORD if has_one_nan(KIND) else _E5M2_WORD
    return gl.inline_asm_elementwise(
        source, "=h,=h,=h,=h,r", [words], dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def value_bytes(words, dd):
    """Four f16 of each word of four int8, times d. Two words (of two keys) at once; dd: both keys' d, in each."""
    return gl.inline_asm_elementwise(
        BYTES_TIMES_F16,
        "=&r,=&r,=&r,=&r,r,r,r,r", [words, dd], dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True,
        pack=2,
    )  # fmt: skip


@gluon.jit
def value_nibbles(words, dd):
    """Eight f16 of each word of eight 4-bit numbers, as key_nibbles; two words at once, as value_bytes."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 u, v, t<8>, base, low, small, high;
        mov.b32 base, 0x64006400;
        mov.b32 low, 0x64086408;
        mov.b32 small, 0x2C002C00;
        mov.b32 high, 0xD480D480;
        prmt.b32 u, $8, $9, 0x5410;
        prmt.b32 v, $8, $9, 0x7632;
        lop3.b32 t0, u, 0x000F000F, base, 0xEA;
        lop3.b32 t1, u, 0x00F000F0, base, 0xEA;
        lop3.b32 t4, v, 0x000F000F, base, 0xEA;
        lop3.b32 t5, v, 0x00F000F0, base, 0xEA;
        shr.u32 u, u, 8;
        shr.u32 v, v, 8;
        lop3.b32 t2, u, 0x000F000F, base, 0xEA;
        lop3.b32 t3, u, 0x00F000F0, base, 0xEA;
        lop3.b32 t6, v, 0x000F000F, base, 0xEA;
        lop3.b32 t7, v, 0x00F000F0, base, 0xEA;
        sub.f16x2 t0, t0, low;
        fma.rn.f16x2 t1, t1, small, high;
        sub.f16x2 t2, t2, low;
        fma.rn.f16x2 t3, t3, small, high;
        sub.f16x2 t4, t4, low;
        fma.rn.f16x2 t5, t5, small, high;
        sub.f16x2 t6, t6, low;
        fma.rn.f16x2 t7, t7, small, high;
        mul.f16x2 $0, t0, $10;
        mul.f16x2 $1, t1, $10;
        mul.f16x2 $2, t2, $10;
        mul.f16x2 $3, t3, $10;
        mul.f16x2 $4, t4, $10;
        mul.f16x2 $5, t5, $10;
        mul.f16x2 $6, t6, $10;
        mul.f16x2 $7, t7, $10;
        }
        """,
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r", [words, dd],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def block_rows(ring, slot, BLOCK_N: gl.constexpr, D: gl.constexpr):
    """A buffer of the ring of a half K or V as one tile in shared memory, [BLOCK_N, D]."""
    tiles, _ = ring
    return tiles.index(slot).reshape([BLOCK_N, D])
