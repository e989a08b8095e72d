"""Flash attention for Hopper (sm_90) of MLA's shape: rows of K hold 576 numbers, V is the first 512 of each.

A tile is 64 query rows: of one sequence, `pack` heads that share a KV head, the heads of a query next to each other
(problem.py's Tiling). Its f32 output [64, 512] takes half of the register file, so the work on a block of keys is
split by what it is, not by query rows:

    scorer        one warpgroup; S_j = Q K_j^T (both operands in shared memory), the online softmax, P_j in 16 bits
    accumulators  two warpgroups; each O[:, half] += P_j V_j[:, half], 256 columns, P_j and V_j in shared memory
    producer      one warp; K_j by TMA, in five parts: columns 0..127, .., 384..511 (V) and 512..575

A part is freed, and its buffer filled anew, as soon as its last reader is done: each accumulator has two of the parts,
one product each. (One product of 256 columns does not compile: ptxas wants more registers for it than the 128 that 512
threads start with.) While the accumulators multiply with block j, the scorer is at block j + 1.

Why so. A wgmma of [64, 16] x [16, n] takes n / 2 cycles, and reads 2 KB (its left operand, unless in registers) and
32 n bytes of shared memory at 128 bytes a cycle. For 64 rows and 64 keys that is, in cycles,

                                       tensor cores          shared memory, TMA's writes (576) included
    scores once, this form             1152 + 1024 = 2176    1152 + 512 + 256 + 576 + 64 = 2560
    scores by both warpgroups          2304 + 1024 = 3328    2304 + 512 + 576            = 3392
    scores of 32 keys by each          1152 + 1024 = 2176    1728 + 512 + 256 + 576 + 64 = 3136
    two consumers that swap P          1152 + 1024 = 2176    1152 + 512 + 64 + 576 + 64  = 2368

Two consumers, each scoring every other block, need the running maximum from each other on the way, and the registers
of a score tile beside 128 for the output; here one warpgroup owns all of the softmax, and the accumulators get by
without any of it. What both have in common decides the rest: shared memory holds two blocks of 64 keys, so a block's
time in it (arrival, scores, softmax, output, about 4000 cycles) bounds the rate at one block per half of that. Starting
S_{j+1} ahead of the softmax of S_j would keep blocks for longer, which is why the scorer does not. Blocks of 32 keys
are bound by reading Q: 24 cycles of shared memory for 16 of the tensor cores.

Shared out (RANGES, for decode and few tiles): a program has a range of units, as stream_k.py says, and puts its part of
a tile into scratch for fixup.py. Rows past the real ones are padding: they cost shared memory's and the tensor cores'
time (2560 cycles a block), of which there is more than enough while a block takes 5700 cycles to arrive (72 KB, 132
multiprocessors, 3 TB/s). Here nothing is done again by another kernel: keys that the mask hides from all rows are made
0 in shared memory, and maxima are subtracted before they are scaled, as in forward.py.

Units and conventions are half.py's: log2 units, hidden scores -inf, a finite start of the running maximum.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.kernels.common.gluon_pdl import gdc_launch_dependents, gdc_wait
from graphrt.backends.triton.kernels.flash_attn.gluon_ranges import program_range
from graphrt.backends.triton.kernels.flash_attn.hopper.mla_accumulator import accumulate
from graphrt.backends.triton.kernels.flash_attn.hopper.mla_parts import PART, READ_ORDER, REST, make_channel
from graphrt.backends.triton.kernels.flash_attn.hopper.mla_scorer import score
from graphrt.backends.triton.kernels.flash_attn.hopper.rings import make_ring, tile_shared_layout
from graphrt.backends.triton.kernels.flash_attn.hopper.work import NUMBERS, Work


@gluon.jit
def produce(p, part_desc, rest_desc, parts, rest):
    """The producer warp: stream the blocks of every tile, the parts in the order in which the scorer takes them."""
    step = 0
    for turn in range(p.rounds()):
        seq, group, qt = p.tile(turn)
        kv_head = group * p.spec.pack // p.gqa
        n_full, n_all, start = p.visits(seq, group, qt)
        low = 0
        high = n_all
        if p.spec.ranges:
            low, high, _whole, _slot = p.segment(turn, n_all)
        block = p.block_ahead(start, low)
        for j in range(low, high):
            row = p.first_row(block)
            block = p.block_ahead(start, j + 1)  # before the waits
            rest.fill(rest_desc, seq, kv_head, row, step + j - low)
            for i in gl.static_range(4):
                parts[READ_ORDER[i]].fill(part_desc, seq, kv_head, row, step + j - low)
        step += high - low
    if p.spec.pdl:
        gdc_launch_dependents()


@accesses(reads="q part_desc rest_desc mask counts blocks slopes sinks seen unit_start", writes="out bad lse part")
@gluon.jit(do_not_specialize=(*NUMBERS, "programs", "splits", "n_tiles"))
def hopper_mla_attn(
    q, part_desc, rest_desc, out, mask, counts, blocks, slopes, sinks, bad, lse, scale, softcap,
    sq_t, sq_h, sq_s, so_t, so_h, so_s, sm_t, sm_h, sm_s, mask_heads, mask_seqs, mask_groups,
    n_seq, n_head, gqa, n_q, n_kv, section, programs, splits, n_tiles, part, seen, unit_start, spec: gl.constexpr,
):  # fmt: skip
    if spec.pdl:
        gdc_wait()
    first_tile = n_tiles
    first_unit = n_tiles
    stop_unit = n_tiles
    turns = n_tiles
    if spec.ranges:
        first_tile, last_tile, first_unit, stop_unit = program_range(
            gl.program_id(0), programs, splits, n_tiles, gl.cdiv(n_kv, spec.block_n), counts, unit_start,
            spec.has_mask, spec.uniform, True,
        )  # fmt: skip
        turns = gl.where(first_unit < stop_unit, last_tile - first_tile + 1, 0)
    p = Work(
        spec, q, out, mask, counts, blocks, slopes, sinks, bad, lse, scale, softcap,
        sq_t, sq_h, sq_s, so_t, so_h, so_s, sm_t, sm_h, sm_s, mask_heads, mask_seqs, mask_groups,
        n_seq, n_head, gqa, n_q, n_kv, section, part, seen, unit_start, splits, first_tile, first_unit, stop_unit,
        turns,
    )  # fmt: skip
    dtype: gl.constexpr = part_desc.dtype
    q_pieces = gl.allocate_shared_memory(dtype, [8, 64, REST], tile_shared_layout(dtype, 2))
    q_rest = gl.allocate_shared_memory(dtype, [64, REST], tile_shared_layout(dtype, 2))
    # The last to read the columns of a block frees them: of V's that is their accumulator, because P_j comes after S_j;
    # of the rest it is the scorer.
    part0 = make_ring(dtype, PART, 1, spec, 0)
    part1 = make_ring(dtype, PART, 1, spec, PART)
    part2 = make_ring(dtype, PART, 1, spec, 2 * PART)
    part3 = make_ring(dtype, PART, 1, spec, 3 * PART)
    rest = make_ring(dtype, REST, 1, spec, 4 * PART)
    parts = (part0, part1, part2, part3)
    weights = make_channel(
        gl.allocate_shared_memory(dtype, [64, spec.block_n], tile_shared_layout(dtype, 2, spec.block_n))
    )
    factors = make_channel(gl.allocate_shared_memory(gl.float32, [64], gl.SwizzledSharedLayout(1, 1, 1, [0])))
    # setmaxnreg moves registers from the producer's warpgroup to the accumulators; the scorer, the default partition,
    # takes what the others leave of the 64 Ki registers: 512 a lane, less 2 * 168 and 24.
    gl.warp_specialize(
        [
            (score, (p, q_pieces, q_rest, parts, rest, weights, factors)),
            (accumulate, (p, (part0, part1), weights, factors, 0)),
            (accumulate, (p, (part2, part3), weights, factors, 1)),
            (produce, (p, part_desc, rest_desc, parts, rest)),
        ],
        [4, 4, 1],
        [168, 168, 24],
    )
