"""Many tokens times the quantized matrices of their experts on Hopper (sm_90): gemm_small/wgmma.py's, tile by tile.

A tile is 64 rows for each of some warpgroups of one expert (with a gate 32 rows of it and the same 32 of its up) times
up to `tokens` of its pairs, whose rows of x lie side by side, f16, in gemm_small/wgmma.py's order (gather.py puts them
there). Programs stay, one a multiprocessor, and take every so many-th tile, an expert's one after the other, so that
its weights come from memory once. Which tiles there are is known on the device only (pairs.py lists them).

Beside the warpgroups four warps, the producer, copy codes by cp.async and x by TMA, each into a ring that runs on from
tile to tile. Scales go straight to the registers that need them, two steps ahead: their rows need not be aligned.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_init, warpgroup_mma_wait

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.kernels.common.gluon_activation import glu
from graphrt.backends.triton.kernels.common.gluon_barriers import make_barriers
from graphrt.backends.triton.kernels.common.gluon_layouts import axis_index
from graphrt.backends.triton.kernels.common.gluon_pdl import gdc_launch_dependents, gdc_wait
from graphrt.backends.triton.kernels.kinds import has_plain_nibbles, has_supers
from graphrt.backends.triton.kernels.products.gemm_small.layouts import words_layout
from graphrt.backends.triton.kernels.products.gemm_small.operands import halves_of, paired_scales_of
from graphrt.backends.triton.kernels.products.gemm_small.rings import (
    allocate_codes,
    copy_codes,
    rows_in_plane,
    steps_of_codes,
)
from graphrt.backends.triton.kernels.products.gemm_small.wgmma import (
    ROWS,
    Shape,
    copy_x,
    half_product,
    sums_layout,
    x_shared,
)


@dataclass(frozen=True)
class Form(Shape):
    """expert_wgmma's choices. tokens: 16 to 256; stages: two at least; even: k is a multiple of 128."""

    even: bool


@gluon.jit
def read(p):
    """A number that a launch before made. Past the L1 cache, which may hold an older one."""
    return gl.load(p, cache_modifier=".cg")


@gluon.jit
def look_up(tile, order):
    """(group, first place, place past the last one, tile of rows) of a tile: the group is an expert, n_expert for pairs
    whose ids are none's, and more past the last tile."""
    p_tiles, p_sorted, n_columns, n_expert, m, row_tiles = order
    column = tile // row_tiles
    p_tiles += gl.minimum(column, n_columns - 1) * 4
    group = gl.where(column < n_columns, read(p_tiles), n_expert + 1)
    return group, read(p_tiles + 1), read(p_tiles + 2), tile % row_tiles


@gluon.jit
def part_of(found, order, wg: gl.constexpr, form: gl.constexpr):
    """Of look_up()'s tile: (a warpgroup's first row in its matrix, that row among all experts', rows that there are
    from there on, one at least)."""
    p_tiles, p_sorted, n_columns, n_expert, m, row_tiles = order
    row = found[3] * (form.tile * form.warpgroups) + wg * form.tile
    inside = gl.minimum(row, m - 1)
    return row, gl.where(found[0] < n_expert, found[0], 0) * m + inside, m - inside


@gluon.jit
def begin(order, form: gl.constexpr):
    """A program's first tile, and look_up() of it and of its next one."""
    if form.pdl:
        gdc_wait()
        gdc_launch_dependents()
    tile = gl.program_id(0)
    return tile, look_up(tile, order), look_up(tile + gl.num_programs(0), order)


@gluon.jit
def copy_chunk(rings, barriers, planes, planes_up, i, chunk, found, order, k, form: gl.constexpr):
    """Starts the copies of a chunk of a tile's codes, for all warpgroups, once its buffer is free: the i-th chunk of
    all. What is past the end of k becomes 0."""
    full, empty, x_full, x_empty = barriers
    KIND: gl.constexpr = form.kind
    WARPGROUPS: gl.constexpr = form.warpgroups
    if form.even:
        n_groups = k // 128 * 4  # so that the compiler knows what it is a multiple of
    else:
        n_groups = k // 32
    slot = i % form.stages
    # A fresh barrier counts as having completed the phase before its first, so the first round does not wait.
    mbarrier.wait(empty.index(slot), ((i // form.stages) & 1) ^ 1)
    for wg in gl.static_range(WARPGROUPS):
        row, first_row, left = part_of(found, order, wg, form)
        copy_codes(
            rings, planes, planes_up, slot * form.warpgroups + wg, chunk, n_groups, first_row, left, (k + 127) // 128,
            KIND, ROWS, form.chunk, form.pair, form.even,
        )  # fmt: skip
    async_copy.mbarrier_arrive(full.index(slot), increment_count=False)


@gluon.jit
def produce(rings, x_ring, barriers, planes, planes_up, x_desc, order, k, form: gl.constexpr):
    """The producer: chunks of codes, all but two of the buffers ahead of their steps of x.

    A buffer of codes becomes free when the chunk in it is done with; x of the chunk after that one has then been asked
    for, so that no warpgroup waits for what this waits to copy.
    """
    AHEAD: gl.constexpr = form.stages - 2
    full, empty, x_full, x_empty = barriers
    n_expert = order[3]
    n_steps = (k + 127) // 128
    chunks = (n_steps + (form.chunk - 1)) // form.chunk
    tile, found, after = begin(order, form)
    x_tile = tile
    x_found = found
    x_after = after
    i = tile * 0
    chunk = tile * 0
    x_chunk = tile * 0
    x_done = tile * 0
    while x_found[0] <= n_expert:
        if found[0] <= n_expert:
            copy_chunk(rings, barriers, planes, planes_up, i, chunk, found, order, k, form)
            chunk += 1
            if chunk == chunks:
                chunk = 0
                tile += gl.num_programs(0)
                found = after
                after = look_up(tile + gl.num_programs(0), order)
        if i >= AHEAD:
            last = gl.minimum(n_steps, x_chunk * form.chunk + form.chunk)
            for step in range(x_chunk * form.chunk, last):
                copy_x(x_ring, x_full, x_empty, x_desc, x_done + step, x_found[1], step, form)
            x_chunk += 1
            if x_chunk == chunks:
                x_chunk = 0
                x_done += n_steps
                x_tile += gl.num_programs(0)
                x_found = x_after
                x_after = look_up(x_tile + gl.num_programs(0), order)
        i += 1
    async_copy.commit_group()
    async_copy.wait_group(0)


@gluon.jit
def load_scales(planes, planes_up, first_row, left, step, k, form: gl.constexpr):
    """(integers of the plane of scales, supers) of a step's groups, [1, ROWS, 4] as paired_scales_of() takes them."""
    KIND: gl.constexpr = form.kind
    L: gl.constexpr = gl.SliceLayout(3, words_layout(1, 4, ROWS, 4))
    n_groups = k // 32
    base = first_row.to(gl.int64) * n_groups
    p, row = rows_in_plane(planes[2], planes_up[2], base, axis_index(L, 3, 1, ROWS), left, form.pair)
    group = step * 4 + axis_index(L, 3, 2, 4)
    p += row * n_groups + group
    if form.even:
        scales = gl.load(p)
    else:
        scales = gl.load(p, mask=(row >= 0) & (group < n_groups), other=0)
    supers = scales
    if has_supers(KIND):
        base = first_row.to(gl.int64) * (k // 256)
        p, row = rows_in_plane(planes[3], planes_up[3], base, axis_index(L, 3, 1, ROWS), left, form.pair)
        supers = gl.load(p + (row * (k // 256) + step // 2))
    return scales, supers


@gluon.jit
def scales_ahead(planes, planes_up, first_row, left, next_first_row, next_left, step, k, form: gl.constexpr):
    """load_scales() of the step after next of a tile, or of the next tile."""
    n_steps = (k + 127) // 128
    ahead = step + 2
    later = n_steps <= ahead
    return load_scales(
        planes, planes_up, gl.where(later, next_first_row, first_row), gl.where(later, next_left, left),
        ahead - gl.where(later, n_steps, 0), k, form,
    )  # fmt: skip


@gluon.jit
def consume(
    rings, x_ring, barriers, planes, planes_up, order, results, k, wg: gl.constexpr, form: gl.constexpr,
):  # fmt: skip
    """A warpgroup: its rows' sums of each tile, and out."""
    KIND: gl.constexpr = form.kind
    keep: gl.constexpr = has_plain_nibbles(form.kind)
    full, empty, x_full, x_empty = barriers
    p_tiles, p_sorted, n_columns, n_expert, m, row_tiles = order
    quants, high = steps_of_codes(rings[0], rings[1], KIND)
    codes = (quants, high, quants, quants)
    n_steps = (k + 127) // 128
    chunks = (n_steps + (form.chunk - 1)) // form.chunk
    tile, found, after = begin(order, form)
    row, first_row, left = part_of(found, order, wg, form)
    now = load_scales(planes, planes_up, first_row, left, 0, k, form)
    then = load_scales(planes, planes_up, first_row, left, 1, k, form)
    chunks_done = tile * 0
    steps_done = tile * 0
    while found[0] <= n_expert:
        tile += gl.num_programs(0)
        last = look_up(tile + gl.num_programs(0), order)  # long before it is needed
        next_row, next_first_row, next_left = part_of(after, order, wg, form)
        acc = warpgroup_mma_init(gl.full([ROWS, form.tokens], 0.0, gl.float32, sums_layout(form.tokens)))
        low, top = read_codes(codes, x_ring, barriers, 0, chunks_done, steps_done, wg, form)
        s0, a0, s1, a1 = paired_scales_of(now[0], now[1], KIND)
        now = then
        then = scales_ahead(planes, planes_up, first_row, left, next_first_row, next_left, 0, k, form)
        x_slot = steps_done % form.x_stages
        acc, w0 = half_product(low, s0, a0, x_ring, x_slot * 2, acc, False, form)
        acc, w1 = half_product(top, s1, a1, x_ring, x_slot * 2 + 1, acc, keep, form)
        for step in range(1, n_steps):
            low, top = read_codes(codes, x_ring, barriers, step, chunks_done, steps_done, wg, form)
            s0, a0, s1, a1 = paired_scales_of(now[0], now[1], KIND)
            now = then
            then = scales_ahead(planes, planes_up, first_row, left, next_first_row, next_left, step, k, form)
            w0 = warpgroup_mma_wait(1, [w0])
            x_slot = (steps_done + step) % form.x_stages
            acc, w0 = half_product(low, s0, a0, x_ring, x_slot * 2, acc, False, form)
            w1 = warpgroup_mma_wait(1, [w1])
            release(barriers, steps_done + step - 1, chunks_done + step // form.chunk, step % form.chunk == 0, form)
            acc, w1 = half_product(top, s1, a1, x_ring, x_slot * 2 + 1, acc, keep, form)
        sums, w0, w1 = warpgroup_mma_wait(0, [acc, w0, w1])
        steps_done += n_steps
        chunks_done += chunks
        release(barriers, steps_done - 1, chunks_done, n_steps > 0, form)
        deliver(sums, results, p_sorted, found[0], n_expert, row, m, found[1], found[2] - found[1], form)
        found, after = after, last
        row, first_row, left = next_row, next_first_row, next_left


@gluon.jit
def read_codes(codes, x_ring, barriers, step, chunks_done, steps_done, wg: gl.constexpr, form: gl.constexpr):
    """halves_of() a tile's step, when it is there, and its x too."""
    KIND: gl.constexpr = form.kind
    full, empty, x_full, x_empty = barriers
    chunk = chunks_done + step // form.chunk
    slot = chunk % form.stages
    mbarrier.wait(full.index(slot), (chunk // form.stages) & 1)
    low, top = halves_of(codes, (slot * form.warpgroups + wg) * form.chunk + step % form.chunk, KIND, 4, True)
    i = steps_done + step
    mbarrier.wait(x_full.index(i % form.x_stages), (i // form.x_stages) & 1)
    return low, top


@gluon.jit
def release(barriers, step, chunk, is_first, form: gl.constexpr):
    """This warpgroup is done with a step; and with the chunk before `chunk`, if that begins after it."""
    full, empty, x_full, x_empty = barriers
    gl.thread_barrier()
    mbarrier.arrive(x_empty.index(step % form.x_stages), count=1)
    mbarrier.arrive(empty.index((chunk + (form.stages - 1)) % form.stages), count=1, pred=is_first)


@gluon.jit
def deliver(
    y, results, p_sorted, group, n_expert, first_row, m, place, places, form: gl.constexpr,
):  # fmt: skip
    """Sums [ROWS, tokens], times the factors of their rows of x, plus the expert's bias, joined if they are a gate and
    its up, to out [pair, row]: NaN where the id is no expert's."""
    p_out, p_factors, p_bias, bias_step, p_bias_up, bias_up_step, alpha, limit = results
    TOKENS: gl.constexpr = form.tokens
    GLU: gl.constexpr = form.glu
    R: gl.constexpr = form.tile
    up = y
    if form.pair:
        y, up = gl.split(gl.permute(gl.reshape(y, [4, 2, 8, TOKENS]), (0, 2, 3, 1)))
        y = gl.reshape(y, [R, TOKENS])
        up = gl.reshape(up, [R, TOKENS])
    L: gl.constexpr = y.type.layout
    row = first_row + axis_index(L, 2, 0, R)
    token = axis_index(L, 2, 1, TOKENS)
    live = token < places
    factor = gl.load(p_factors + place + token, mask=live, other=0.0, cache_modifier=".cg")
    pair = gl.load(p_sorted + place + token, mask=live, other=0, cache_modifier=".cg")
    inside = group < n_expert
    y = y * factor
    up = up * factor
    if p_bias is not None:
        y = y + gl.load(p_bias + group.to(gl.int64) * bias_step + row, mask=(row < m) & inside, other=0.0)
    if p_bias_up is not None:
        up = up + gl.load(p_bias_up + group.to(gl.int64) * bias_up_step + row, mask=(row < m) & inside, other=0.0)
    if GLU != "":
        y = glu(y, up, alpha, limit, GLU)
    y = gl.where(inside, y, float("nan"))
    gl.store(p_out + (pair.to(gl.int64) * m + row), y, mask=(row < m) & live)


@accesses(
    reads=(
        "p_quants p_high p_scales p_supers p_quants_up p_high_up p_scales_up p_supers_up x_desc "
        "p_factors p_bias p_bias_up p_tiles p_sorted"
    ),
    writes="p_out",
)
@gluon.jit(
    do_not_specialize=("bias_step", "bias_up_step", "alpha", "limit", "n_columns", "n_expert", "m", "row_tiles", "k")
)
def expert_wgmma(
    p_quants, p_high, p_scales, p_supers, p_quants_up, p_high_up, p_scales_up, p_supers_up, x_desc, p_factors,
    p_bias, bias_step, p_bias_up, bias_up_step, alpha, limit, p_tiles, n_columns, p_sorted, p_out, n_expert, m,
    row_tiles, k, form: gl.constexpr,
):  # fmt: skip
    """x_desc: of x f16 [pairs, k rounded up to 128] in order of `sorted`, in blocks [tokens, 64]; factors: f32 [pairs],
    what products of these rows are multiplied by; planes: of all experts, m rows of k elements each, a multiple of 32
    and over 128 (256 where the type has supers); of quants and high int32, of scales integers of what a group has, of
    supers integers of what 256 elements have. bias: f32, rows bias_step apart, or None; up: with a gate, its other
    matrix. tiles, sorted: pairs.py's, of tiles n_columns. out: f32 [pairs, m]. row_tiles: of a matrix. Four warps at
    launch.
    """
    KIND: gl.constexpr = form.kind
    planes = (p_quants, p_high, p_scales, p_supers)
    planes_up = (p_quants_up, p_high_up, p_scales_up, p_supers_up)
    order = (p_tiles, p_sorted, n_columns, n_expert, m, row_tiles)
    results = (p_out, p_factors, p_bias, bias_step, p_bias_up, bias_up_step, alpha, limit)
    rings = allocate_codes(KIND, ROWS, form.chunk, form.stages * form.warpgroups)
    x_ring = gl.allocate_shared_memory(gl.float16, [form.x_stages * 2, form.tokens, 64], x_shared())
    full = make_barriers(form.stages, 128)
    empty = make_barriers(form.stages, form.warpgroups)
    x_full = make_barriers(form.x_stages, 1)
    x_empty = make_barriers(form.x_stages, form.warpgroups)
    barriers = (full, empty, x_full, x_empty)
    if form.warpgroups == 1:
        gl.warp_specialize(
            [
                (consume, (rings, x_ring, barriers, planes, planes_up, order, results, k, 0, form)),
                (produce, (rings, x_ring, barriers, planes, planes_up, x_desc, order, k, form)),
            ],
            [4],
            [form.registers[1]],
        )
    elif form.warpgroups == 2:
        gl.warp_specialize(
            [
                (consume, (rings, x_ring, barriers, planes, planes_up, order, results, k, 0, form)),
                (consume, (rings, x_ring, barriers, planes, planes_up, order, results, k, 1, form)),
                (produce, (rings, x_ring, barriers, planes, planes_up, x_desc, order, k, form)),
            ],
            [4, 4],
            [form.registers[0], form.registers[1]],
        )
    elif form.warpgroups == 3:
        gl.warp_specialize(
            [
                (consume, (rings, x_ring, barriers, planes, planes_up, order, results, k, 0, form)),
                (consume, (rings, x_ring, barriers, planes, planes_up, order, results, k, 1, form)),
                (consume, (rings, x_ring, barriers, planes, planes_up, order, results, k, 2, form)),
                (produce, (rings, x_ring, barriers, planes, planes_up, x_desc, order, k, form)),
            ],
            [4, 4, 4],
            [form.registers[0], form.registers[0], form.registers[1]],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (rings, x_ring, barriers, planes, planes_up, order, results, k, 0, form)),
                (consume, (rings, x_ring, barriers, planes, planes_up, order, results, k, 1, form)),
                (consume, (rings, x_ring, barriers, planes, planes_up, order, results, k, 2, form)),
                (consume, (rings, x_ring, barriers, planes, planes_up, order, results, k, 3, form)),
                (produce, (rings, x_ring, barriers, planes, planes_up, x_desc, order, k, form)),
            ],
            [4, 4, 4, 4],
            [form.registers[0], form.registers[0], form.registers[0], form.registers[1]],
        )
