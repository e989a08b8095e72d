"""The row of k and v that a step adds to a cache of q8_0 or q4_0, inside of the decode kernel (decode.py) that attends
it.

append_blocks.py is the same for the portable kernel, and says who writes: the one program that reads the cell, before
it does. All others have nothing to do with it. Copies of the first k-blocks start before it is known who that is; where
the cell is in one of those, they start again behind it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from graphrt.backends.triton.kernels.common.blocks import halves_a_block
from graphrt.backends.triton.kernels.common.gluon_layouts import axis_index
from graphrt.backends.triton.kernels.flash_attn.decode_layouts import has_bytes
from graphrt.backends.triton.kernels.flash_attn.decode_pieces import copy_block

#: K-blocks of a list that are looked at in a round.
_ROUND = gl.constexpr(128)


@gluon.jit
def copy_and_append(
    new, firsts, caches, visits, low, n_all, i_seq, i_group, sk_n: gl.constexpr, sv_n: gl.constexpr, NW: gl.constexpr,
    D: gl.constexpr, K_KIND: gl.constexpr, V_KIND: gl.constexpr, BLOCK_N: gl.constexpr, SEES: gl.constexpr,
    PDL: gl.constexpr, FIRST: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Starts the copies of the first STAGES k-blocks, and writes the new row if that is this program's.

    new: flash_attn_decode_blocks's k_new, v_new, ids, k_head, k_seq, v_head, v_seq and n_cells; firsts: words of the
    caches, and where of them the head's first key begins: (p_k, k_first, p_v, v_first); n_all: k-blocks of the tile.
    """
    p_k_new, p_v_new, p_ids, k_head, k_seq, v_head, v_seq, n_cells = new
    p_k, k_first, p_v, v_first = firsts
    _, _, _, _, _, n_kv = caches
    _, _, _, _, high = visits
    cell = gl.load(p_ids + i_seq)
    cell = gl.where((cell >= 0) & (cell < n_cells), cell, -1).to(gl.int32)
    rounds = low * 0 + 1
    turn = low * 0
    while turn < rounds:
        for i in range(STAGES):
            copy_block(
                caches, visits, low + i, i, sk_n, sv_n, NW, D, K_KIND, V_KIND, BLOCK_N, SEES, 0, PDL, FIRST
            )  # fmt: skip
        if turn == 0:
            at = place_in_list(gl.where(cell < n_kv, cell // BLOCK_N, -1), visits, low, n_all, SEES)
            reads = (at >= low) & (at < high)
            if (cell >= 0) & (reads | ((at < 0) & (low == 0))):
                if reads & (at < low + STAGES):  # its copy came too early
                    async_copy.wait_group(0)
                    rounds = rounds + 1
                of_seq = i_seq.to(gl.int64)
                where_k = p_k + (k_first + cell.to(gl.int64) * sk_n)
                where_v = p_v + (v_first + cell.to(gl.int64) * sv_n)
                write_blocks(p_k_new + (of_seq * k_seq + i_group * k_head), where_k, D, K_KIND)
                write_blocks(p_v_new + (of_seq * v_seq + i_group * v_head), where_v, D, V_KIND)
                gl.thread_barrier()
        turn = turn + 1


@gluon.jit
def place_in_list(block, visits, low, n_all, SEES: gl.constexpr):
    """Where a tile's list has a k-block, as far as the program of k-blocks `low` and behind must know; -1: nowhere."""
    p_list, _, _, _, high = visits
    at = block
    if SEES == "mask":
        L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        at = low * 0 - 1
        for first in range(low, gl.where(low == 0, n_all, high), _ROUND):
            i = first + gl.arange(0, _ROUND, layout=L)
            listed = gl.load(p_list + i, mask=i < n_all, other=-2)
            at = gl.maximum(at, gl.max(gl.where(listed == block, i, -1), 0))
    return at


@gluon.jit
def write_blocks(p_row, p_cell, D: gl.constexpr, KIND: gl.constexpr):
    """Rounds a head's D values to blocks, as quantize.py does, and stores them. p_row: f32 or f16; p_cell: words."""
    NB: gl.constexpr = D // 32
    HALVES: gl.constexpr = halves_a_block(KIND)
    L: gl.constexpr = gl.BlockedLayout([1, 1, 2], [2, 16, 1], [gl.num_warps(), 1, 1], [2, 1, 0])
    BYTES: gl.constexpr = gl.SliceLayout(2, L)
    block = axis_index(L, 3, 0, NB)
    i = axis_index(L, 3, 1, 16)
    j = axis_index(L, 3, 2, 2)
    element = 2 * i + j if has_bytes(KIND) else i + 16 * j
    x = gl.load(p_row + (block * 32 + element)).to(gl.float32)
    d = step_of(x, element, KIND)
    zero = d == 0.0
    one = gl.full([NB, 1, 1], 1.0, gl.float32, layout=L)
    inverse = gl.where(zero, 0.0, divided(one, gl.where(zero, 1.0, d)))
    x, inverse = gl.broadcast(x, inverse)
    y = multiplied(x, inverse)
    p_bytes = p_cell.to(gl.pointer_type(gl.int8), bitcast=True) + 2
    if has_bytes(KIND):
        size = gl.abs(y)
        whole = size.to(gl.int32)
        rounded = whole + (2.0 * (size - whole.to(gl.float32))).to(gl.int32)  # halves go away from zero
        codes = gl.where(y < 0.0, 0 - rounded, rounded)
        gl.store(p_bytes + (block * (2 * HALVES) + element), codes.to(gl.int8))
    else:
        codes = gl.minimum(gl.maximum((y + 8.5).to(gl.int32), 0), 15)
        byte = gl.sum(codes << (4 * j), 2)
        at = axis_index(BYTES, 2, 0, NB) * (2 * HALVES) + axis_index(BYTES, 2, 1, 16)
        gl.store(p_bytes + at, byte.to(gl.int8))
    bits = d.to(gl.float16).to(gl.int16, bitcast=True)
    gl.store(p_cell.to(gl.pointer_type(gl.int16), bitcast=True) + block * HALVES, bits)


@gluon.jit
def step_of(x, element, KIND: gl.constexpr):
    """Each block's d, f32 [NB, 1, 1], NaN of a block that has one. x: f32 [NB, 16, 2], of its elements `element`."""
    size = over_block(gl.abs(x))
    if has_bytes(KIND):
        d = divided(size, gl.full_like(size, 127.0))
    else:  # by the value of the largest magnitude; of two the one that comes first
        first = 0 - over_block(gl.where(gl.abs(x) == size, 0 - element, -32))
        d = gl.sum(gl.sum(gl.where(element == first, x, 0.0), 2), 1)
        d = gl.expand_dims(gl.expand_dims(d, 1), 2) * -0.125
    return gl.where(over_block(gl.where(x == x, 0, 1)) > 0, float("nan"), d)


@gluon.jit
def over_block(x):
    """The largest of each block [NB, 16, 2]: [NB, 1, 1]."""
    return gl.expand_dims(gl.expand_dims(gl.max(gl.max(x, 2), 1), 1), 2)


@gluon.jit
def divided(a, b):
    return gl.inline_asm_elementwise(
        "div.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=gl.float32, is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def multiplied(a, b):
    """A product with a rounding of its own, whatever is added to it."""
    return gl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=gl.float32, is_pure=True, pack=1
    )  # fmt: skip
