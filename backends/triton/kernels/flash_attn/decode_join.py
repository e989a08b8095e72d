"""The end of a segment of the decode kernel: its ways become one, and a tile's parts or the result are written."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from graphrt.backends.triton.kernels.common.constants import LN2, LOG2E, NEG_INF
from graphrt.backends.triton.kernels.common.gluon_layouts import axis_index, axis_layout
from graphrt.backends.triton.kernels.flash_attn.decode_layouts import (
    ROWS,
    join_layout,
    join_shared,
    parts_layout,
    slot_elements,
    sums_layout,
)
from graphrt.backends.triton.kernels.flash_attn.gluon_ranges import fixup_range, quotient, slot_of_part


@gluon.jit
def normalized(m, l, sink):
    """(log2 of the denominator, the factor on acc) with the sink's weight added; as in forward.py."""
    top = gl.maximum(m, sink)
    safe = gl.where(top == NEG_INF, 0.0, top)
    shrink = gl.exp2(m - safe)
    total = l * shrink + gl.exp2(sink - safe)
    empty = total == 0.0
    whole = gl.where(empty, 1.0, total)
    return gl.where(empty, NEG_INF, safe + gl.log2(whole)), gl.where(empty, 0.0, shrink / whole)


@gluon.jit
def joined_ways(m, l, acc, D: gl.constexpr, KIND: gl.constexpr):
    """The ways' sums as one: way_sums' to f32 [R, 1], [R, 1], [R, D], R rows."""
    W: gl.constexpr = gl.num_warps()
    R: gl.constexpr = m.shape[1]
    L: gl.constexpr = join_layout(D, W, R)
    sums = gl.allocate_shared_memory(gl.float32, [2, W, R], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    rows = gl.allocate_shared_memory(gl.float32, [W, R, D], join_shared(D, W, KIND, R))
    sums.index(0).store(m)
    sums.index(1).store(l)
    rows.store(acc)
    m = gl.expand_dims(sums.index(0).load(gl.SliceLayout(2, L)), 2)
    l = gl.expand_dims(sums.index(1).load(gl.SliceLayout(2, L)), 2)
    acc = rows.load(L)
    top = gl.max(m, 0)
    safe = gl.where(top == NEG_INF, 0.0, top)
    weight = gl.exp2(m - gl.expand_dims(safe, 0))
    return top, gl.sum(l * weight, 0), gl.sum(acc * weight, 0)


@gluon.jit
def deliver(
    p_sinks, p_out, p_lse, p_part, m, l, acc, pid, splits, first_token, row0, i_group, whole, finishes, n_q, n_head,
    has_sinks, has_lse, p_counter, p_counts, p_unit_start, tile, programs, n_tiles, n_blocks,
    LAYOUT: gl.constexpr, PACK: gl.constexpr, D: gl.constexpr, KIND: gl.constexpr, HAS_MASK: gl.constexpr,
    UNIFORM: gl.constexpr, JOIN: gl.constexpr, JOIN_PARTS: gl.constexpr,
):  # fmt: skip
    """Writes a segment's result, or its part of it. m, l: [R, 1]; acc: [R, D] in LAYOUT, slots' order;
    R rows of a tile of 16.

    first_token: of the result, that of the sequence's n_q; row0: the tile's first row of the sequence's. With JOIN the
    last of a tile's programs to write its part joins them all.
    """
    R: gl.constexpr = m.shape[0]
    i_row = axis_index(LAYOUT, 2, 0, R)
    i_slot = axis_index(LAYOUT, 2, 1, D)
    token = (row0 + i_row) // PACK
    head = i_group * PACK + (row0 + i_row) % PACK
    m_row = token < n_q
    if whole:
        sink = gl.full([R, 1], NEG_INF, gl.float32, layout=LAYOUT)
        if has_sinks != 0:
            sink = gl.load(p_sinks + head, mask=m_row, other=NEG_INF) * LOG2E
        lse, scale = normalized(m, l, sink)
        out_row = (first_token.to(gl.int64) + token) * n_head + head
        gl.store(p_out + (out_row * D + slot_elements(i_slot, KIND)), acc * scale, mask=m_row & (i_slot >= 0))
        if has_lse != 0:
            gl.store(p_lse + out_row, lse * LN2, mask=m_row)
    else:
        slot = pid
        if JOIN == 0:
            slot = slot_of_part(pid, splits, finishes)
        elif splits == 0:
            # Side by side: from a segment to the next the program, the tile or both go up.
            slot = pid + tile
        SLOT: gl.constexpr = ROWS * (D + 2)
        p_slot = p_part + slot.to(gl.int64) * SLOT
        gl.store(p_slot + (i_row * D + i_slot), acc, mask=m_row & (i_slot >= 0))
        gl.store(p_slot + ROWS * D + i_row, m, mask=m_row)
        gl.store(p_slot + ROWS * D + ROWS + i_row, l, mask=m_row)
        if JOIN > 0:
            first, last, parts, shares, units = fixup_range(
                tile, programs, splits, n_tiles, n_blocks, p_counts, p_unit_start, HAS_MASK, UNIFORM
            )
            # All threads' stores come before the count, and all reads of others' parts after it.
            gl.thread_barrier()
            done = gl.atomic_add(p_counter + tile, 1, sem="acq_rel", scope="gpu")
            if done == parts - 1:
                gl.store(p_counter + tile, 0)  # for the next launch; in this one nobody counts here any more
                join_parts(
                    p_sinks, p_out, p_lse, p_slot - (pid - first).to(gl.int64) * SLOT, first, last, shares, units,
                    splits, first_token, i_group, n_q, n_head,
                    has_sinks, has_lse, PACK, D, KIND, JOIN, JOIN_PARTS,
                )  # fmt: skip


@gluon.jit
def join_parts(
    p_sinks, p_out, p_lse, p_first, first, last, shares, units, splits, first_token, i_group, n_q, n_head, has_sinks,
    has_lse, PACK: gl.constexpr, D: gl.constexpr, KIND: gl.constexpr, R: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """Joins a tile's parts in the order of their programs and writes the result: fixup.py in one program.

    p_first: the slot of program `first`, the next programs' follow. first, last, shares, units: see fixup_range.

    Whoever runs it gets the same bits. Others wrote the parts in this launch, so they are read past the L1 cache.
    """
    W: gl.constexpr = gl.num_warps()
    S: gl.constexpr = sums_layout(P, R, W)
    L: gl.constexpr = parts_layout(P, R, D, W)
    SLOT: gl.constexpr = ROWS * (D + 2)
    s_row = axis_index(S, 2, 1, R)
    a_row = axis_index(L, 3, 1, R)
    i_slot = axis_index(L, 3, 2, D)
    s_head = gl.arange(0, R, layout=axis_layout(S, 2, 1))
    s_token = s_head // PACK
    s_head = i_group * PACK + s_head % PACK
    sink = gl.full([R], NEG_INF, gl.float32, layout=axis_layout(S, 2, 1))
    if has_sinks != 0:
        sink = gl.load(p_sinks + s_head, mask=s_token < n_q, other=NEG_INF) * LOG2E
    m = gl.full([R], NEG_INF, gl.float32, layout=axis_layout(S, 2, 1))
    l = gl.full([R], 0.0, gl.float32, layout=axis_layout(S, 2, 1))
    acc = gl.full([R, D], 0.0, gl.float32, layout=gl.SliceLayout(0, L))
    for base in range(first, last + 1, P):
        i = base + axis_index(S, 2, 0, P)
        used = i <= last
        if units < shares:  # some programs have nothing and wrote no part
            i_share = gl.where(splits > 0, i - first, i)
            used = used & (quotient(i_share * units, shares) < quotient((i_share + 1) * units, shares))
        p_base = p_first + (base - first).to(gl.int64) * SLOT
        p_sums = p_base + (axis_index(S, 2, 0, P) * SLOT + ROWS * D + s_row)
        m_sums = used & (s_row // PACK < n_q)
        m_part = gl.load(p_sums, mask=m_sums, other=NEG_INF, cache_modifier=".cg")
        l_part = gl.load(p_sums + ROWS, mask=m_sums, other=0.0, cache_modifier=".cg")
        i = base + axis_index(L, 3, 0, P)
        p_acc = p_base + (axis_index(L, 3, 0, P) * SLOT + a_row * D + i_slot)
        # What a program without units never wrote is read too, and left out below.
        a = gl.load(
            p_acc, mask=(i <= last) & (a_row // PACK < n_q) & (i_slot >= 0), other=0.0, cache_modifier=".cg"
        )  # fmt: skip
        m_new = gl.maximum(m, gl.max(m_part, 0))
        safe = gl.where(m_new == NEG_INF, 0.0, m_new)
        weight = gl.exp2(m_part - gl.expand_dims(safe, 0))
        alpha = gl.exp2(m - safe)
        l = l * alpha + gl.sum(l_part * weight, 0)
        m = m_new
        weight = gl.convert_layout(gl.where(used, weight, -1.0), gl.SliceLayout(2, L))
        weight = gl.expand_dims(weight, 2)
        alpha = gl.expand_dims(gl.convert_layout(alpha, axis_layout(gl.SliceLayout(0, L), 2, 0)), 1)
        acc = acc * alpha + gl.sum(gl.where(weight < 0.0, 0.0, a * weight), 0)
    lse, scale = normalized(m, l, sink)
    scale = gl.expand_dims(gl.convert_layout(scale, axis_layout(gl.SliceLayout(0, L), 2, 0)), 1)
    first_row = first_token.to(gl.int64)
    i_row = axis_index(gl.SliceLayout(0, L), 2, 0, R)
    i_slot = axis_index(gl.SliceLayout(0, L), 2, 1, D)
    token = i_row // PACK
    out_row = (first_row + token) * n_head + (i_group * PACK + i_row % PACK)
    gl.store(p_out + (out_row * D + slot_elements(i_slot, KIND)), acc * scale, mask=(token < n_q) & (i_slot >= 0))
    if has_lse != 0:
        gl.store(p_lse + ((first_row + s_token) * n_head + s_head), lse * LN2, mask=s_token < n_q)
