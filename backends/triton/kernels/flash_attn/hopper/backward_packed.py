"""Gradients of packed sequences for Hopper (sm_90), in Gluon: backward_keys.py and backward_queries.py for the tiles of
a list, whose sequences follow one another. What is done in a step is theirs; what is visited comes from positions.

Queries lie in slots (backward_packing.py), so a block never has two sequences'. A block of keys may: those behind the
sequence's end are rows of scores of their own in the kernel of keys, which it does not store; that of queries hides
them and makes them 0.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.kernels.common.gluon_barriers import make_barriers
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_keys import add_step
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_packed_work import NUMBERS, PackedWork
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_queries import add_block
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_rings import make_row_ring
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_scores import store_rows
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_work import LISTED
from graphrt.backends.triton.kernels.flash_attn.hopper.rings import make_ring, mma_layout, tile_shared_layout


@gluon.jit
def produce_packed_queries(p, k_desc, v_desc, q_desc, o_desc, tiles, rings):
    """The producer warp: K and V of the program's keys, then every step of queries that see some of them."""
    k_tile, v_tile, here = tiles
    q_ring, o_ring, row_ring, _mask_ring = rings
    group, record = p.tile()
    _seq, first, _n, key0, _n_queries, _others_first, _behind, slot = record
    mbarrier.expect(here.index(0), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(k_desc, [0, group, first + key0, 0], here.index(0), k_tile)
    tma.async_copy_global_to_shared(v_desc, [0, group, first + key0, 0], here.index(0), v_tile)
    span = p.seen_by(record)
    n_all = span[3] - span[0]
    done = 0
    for turn in range(p.gqa):
        head = group * p.gqa + turn
        p_lse, behind = p.rows_of(head, slot)
        for i in range(n_all):
            query = p.step_of(span, i)
            q_ring.fill(q_desc, 0, head, slot * LISTED + query, done + i)
            row_ring.fill(p_lse + query, behind, done + i)
            o_ring.fill(o_desc, 0, head, slot * LISTED + query, done + i)
        done += n_all
    async_copy.commit_group()
    async_copy.wait_group(0)


@gluon.jit
def add_up_packed(p, tiles, rings, dk_out, dv_out, wg: gl.constexpr):
    """A consumer warpgroup: the sums of 64 keys over all heads and queries."""
    k_tile, v_tile, here = tiles
    d: gl.constexpr = p.spec.d
    k = k_tile.reshape([p.spec.block_n, d]).slice(64 * wg, 64, dim=0)
    v = v_tile.reshape([p.spec.block_n, d]).slice(64 * wg, 64, dim=0)
    group, record = p.tile()
    _seq, first, n, key0, _n_queries, _others_first, behind, _slot = record
    key = key0 + 64 * wg
    span = p.seen_by(record)
    n_full = span[2] - span[1]
    n_all = span[3] - span[0]
    dk = gl.full([64, d], 0.0, gl.float32, mma_layout(d))
    dv = gl.full([64, d], 0.0, gl.float32, mma_layout(d))
    ratio = p.ratio()
    mbarrier.wait(here.index(0), 0)
    done = 0
    for turn in range(p.gqa):
        head = group * p.gqa + turn
        place = (behind, head, key, p.mask_factor(head), ratio)
        for i in range(n_full):
            dk, dv = add_step(p, (k, v), rings, place, dk, dv, done + i, 0, 0, False, wg)
        for i in range(n_full, n_all):
            dk, dv = add_step(p, (k, v), rings, place, dk, dv, done + i, p.step_of(span, i), 0, True, wg)
        done += n_all
    at = (group * p.n_rows + first).to(gl.int64) * d
    if p.spec.of_k:
        store_rows(dk_out + at, key, n, dk, p.unscaled_scores(), d)
    if p.spec.of_v:
        store_rows(dv_out + at, key, n, dv, p.unscaled_weights(), d)


@accesses(reads="q_desc o_desc k_desc v_desc rows tiles slopes scales", writes="dk dv")
@gluon.jit(do_not_specialize=NUMBERS)
def hopper_attn_back_packed_keys(
    q_desc, o_desc, k_desc, v_desc, rows, tiles, slopes, scales, dk, dv, scale, softcap, n_head, gqa, n_tiles, padded,
    n_rows, window, section, spec: gl.constexpr,
):  # fmt: skip
    """q_desc, o_desc: of slots [1, n_head, padded, d]; k_desc, v_desc: of all keys. dk, dv: f32 [n_head_kv, n_rows, d],
    written, None for one that nobody asked for."""
    p = PackedWork(
        spec, rows, tiles, slopes, scales, scale, softcap, n_head, gqa, n_tiles, padded, n_rows, window, section
    )  # fmt: skip
    dtype: gl.constexpr = k_desc.dtype
    layout: gl.constexpr = tile_shared_layout(dtype, 4)
    k_tile = gl.allocate_shared_memory(dtype, [1, 1, spec.block_n, spec.d], layout)
    v_tile = gl.allocate_shared_memory(dtype, [1, 1, spec.block_n, spec.d], layout)
    here = make_barriers(1, 1)
    buffers: gl.constexpr = spec.of_queries
    q_ring = make_ring(dtype, spec.d, spec.n_wg, buffers)
    o_ring = make_ring(dtype, spec.d, spec.n_wg, buffers)
    row_ring = make_row_ring(spec, spec.n_wg)
    own = (k_tile, v_tile, here)
    rings = (q_ring, o_ring, row_ring, q_ring)  # there is no mask
    gl.warp_specialize(
        [
            (add_up_packed, (p, own, rings, dk, dv, 0)),
            (add_up_packed, (p, own, rings, dk, dv, 1)),
            (produce_packed_queries, (p, k_desc, v_desc, q_desc, o_desc, own, rings)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def produce_packed_keys(p, q_desc, o_desc, k_desc, v_desc, tiles, rings):
    """The producer warp: Q and d_out of the program's queries, then every block of keys that they see."""
    q_tile, o_tile, here = tiles
    k_ring, v_ring, _mask_ring = rings
    head, record = p.tile()
    _seq, _first, _n, row0, _length, k_first, _behind, slot = record
    at = slot * LISTED + row0
    mbarrier.expect(here.index(0), q_desc.block_type.nbytes + o_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(q_desc, [0, head, at, 0], here.index(0), q_tile.index(0))
    tma.async_copy_global_to_shared(o_desc, [0, head, at, 0], here.index(0), o_tile.index(0))
    visits, end = p.visits(record)
    group = head // p.gqa
    for j in range(end - visits[1]):
        key = k_first + p.block_of(visits, j) * p.spec.block_n
        k_ring.fill(k_desc, 0, group, key, j)
        v_ring.fill(v_desc, 0, group, key, j)


@gluon.jit
def add_up_packed_queries(p, tiles, rings, dq_out, wg: gl.constexpr):
    """A consumer warpgroup: the sum of 64 queries over all keys."""
    q_tile, o_tile, here = tiles
    d: gl.constexpr = p.spec.d
    head, record = p.tile()
    _seq, first, n, row0, _length, _k_first, _behind, slot = record
    query = row0 + 64 * wg
    p_lse, behind = p.rows_of(head, slot)
    at = query + gl.arange(0, 64, gl.SliceLayout(1, mma_layout(p.spec.block_n)))
    there = at < gl.cdiv(n, LISTED) * LISTED  # else the list has no such tile
    lse = gl.load(p_lse + at, mask=there, other=float("inf"))
    delta = gl.load(p_lse + behind + at, mask=there, other=0.0)
    visits, end = p.visits(record)
    n_full = visits[3] - visits[2]
    place = (0, head, query, lse, delta, p.mask_factor(head), p.ratio(), visits)
    dq = gl.full([64, d], 0.0, gl.float32, mma_layout(d))
    mbarrier.wait(here.index(0), 0)
    for j in range(n_full):
        dq = add_block(p, tiles, rings, place, dq, j, 0, 0, False, wg)
    for j in range(n_full, end - visits[1]):
        dq = add_block(p, tiles, rings, place, dq, j, p.block_of(visits, j), 0, True, wg)
    store_rows(dq_out + (head * p.n_rows + first).to(gl.int64) * d, query, n, dq, p.unscaled_scores(), d)


@accesses(reads="q_desc o_desc k_desc v_desc rows tiles slopes scales", writes="dq")
@gluon.jit(do_not_specialize=NUMBERS)
def hopper_attn_back_packed_queries(
    q_desc, o_desc, k_desc, v_desc, rows, tiles, slopes, scales, dq, scale, softcap, n_head, gqa, n_tiles, padded,
    n_rows, window, section, spec: gl.constexpr,
):  # fmt: skip
    """As hopper_attn_back_packed_keys; dq: f32 [n_head, n_rows, d], written."""
    p = PackedWork(
        spec, rows, tiles, slopes, scales, scale, softcap, n_head, gqa, n_tiles, padded, n_rows, window, section
    )  # fmt: skip
    dtype: gl.constexpr = k_desc.dtype
    layout: gl.constexpr = tile_shared_layout(dtype, 4)
    q_tile = gl.allocate_shared_memory(dtype, [1, 1, 1, LISTED, spec.d], layout)
    o_tile = gl.allocate_shared_memory(dtype, [1, 1, 1, LISTED, spec.d], layout)
    here = make_barriers(1, 1)
    k_ring = make_ring(dtype, spec.d, spec.n_wg, spec)
    buffers: gl.constexpr = spec.of_values
    v_ring = make_ring(dtype, spec.d, spec.n_wg, buffers)
    own = (q_tile, o_tile, here)
    rings = (k_ring, v_ring, k_ring)  # there is no mask
    gl.warp_specialize(
        [
            (add_up_packed_queries, (p, own, rings, dq, 0)),
            (add_up_packed_queries, (p, own, rings, dq, 1)),
            (produce_packed_keys, (p, q_desc, o_desc, k_desc, v_desc, own, rings)),
        ],
        [4, 1],
        [240, 24],
    )
