"""FLASH_ATTN_VARLEN on Hopper (sm_90) of MLA's shape: hopper/mla.py's scorer and accumulators over the list of tiles of
tile_list.py, K by TMA, a box for each page or piece of one that a k-block has. Tiles are always shared out.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.kernels.common.gluon_pdl import gdc_launch_dependents, gdc_wait
from graphrt.backends.triton.kernels.flash_attn.hopper.mla_accumulator import accumulate
from graphrt.backends.triton.kernels.flash_attn.hopper.mla_parts import PART, REST, make_channel
from graphrt.backends.triton.kernels.flash_attn.hopper.mla_scorer import score
from graphrt.backends.triton.kernels.flash_attn.hopper.rings import tile_shared_layout
from graphrt.backends.triton.kernels.flash_attn.varlen.attend_hopper import program_share
from graphrt.backends.triton.kernels.flash_attn.varlen.hopper_rings import make_page_ring
from graphrt.backends.triton.kernels.flash_attn.varlen.hopper_work import NUMBERS, VarlenWork


@gluon.jit
def produce(p, k_desc, rings, last: gl.constexpr):
    """A producer warp: stream these parts of the blocks of every tile, in the order in which the scorer takes them. Two
    share them, since a block in small pages is many copies. last: it lets the next launch begin when it is done."""
    step = 0
    for turn in range(p.rounds()):
        seq, group, tile = p.tile(turn)
        kv_head = group * p.spec.pack // p.gqa
        n_full, n_all, start = p.visits(seq, group, tile)
        for j in range(0, n_all):
            block = p.block(start, j)
            for i in gl.static_range(len(rings)):
                rings[i].fill(p, k_desc, seq, kv_head, block, step + j)
        step += n_all
    if last and p.spec.pdl:
        gdc_launch_dependents()


@accesses(reads="q k_desc slopes sinks tiles table unit_start", writes="out lse part")
@gluon.jit(do_not_specialize=NUMBERS)
def hopper_varlen_mla(
    q, out, lse, slopes, sinks, tiles, table, unit_start, part, k_desc, scale, softcap, sq_t, sq_h, so_t, so_h,
    n_head, gqa, n_groups, n_tiles, n_seq, n_pages, max_blocks, s_table, window, splits, spec: gl.constexpr,
):  # fmt: skip
    """See attend_hopper.py's hopper_varlen_attn for the arguments, mla.py for the warpgroups."""
    if spec.pdl:
        gdc_wait()
    whole, first_tile, first_unit, stop_unit, turns = program_share(unit_start, n_tiles, splits)
    p = VarlenWork(
        spec, q, out, lse, slopes, sinks, tiles, table, unit_start, part, scale, softcap, sq_t, sq_h, so_t, so_h,
        n_head, gqa, n_groups, n_tiles, n_seq, n_pages, max_blocks, s_table, window, splits,
        whole, first_tile, first_unit, stop_unit, turns,
    )  # fmt: skip
    dtype: gl.constexpr = k_desc.dtype
    q_pieces = gl.allocate_shared_memory(dtype, [8, 64, REST], tile_shared_layout(dtype, 2))
    q_rest = gl.allocate_shared_memory(dtype, [64, REST], tile_shared_layout(dtype, 2))
    part0 = make_page_ring(dtype, PART, 1, spec, 0)
    part1 = make_page_ring(dtype, PART, 1, spec, PART)
    part2 = make_page_ring(dtype, PART, 1, spec, 2 * PART)
    part3 = make_page_ring(dtype, PART, 1, spec, 3 * PART)
    rest = make_page_ring(dtype, REST, 1, spec, 4 * PART)
    parts = (part0, part1, part2, part3)
    weights = make_channel(
        gl.allocate_shared_memory(dtype, [64, spec.block_n], tile_shared_layout(dtype, 2, spec.block_n))
    )
    factors = make_channel(gl.allocate_shared_memory(gl.float32, [64], gl.SwizzledSharedLayout(1, 1, 1, [0])))
    gl.warp_specialize(
        [
            (score, (p, q_pieces, q_rest, parts, rest, weights, factors)),
            (accumulate, (p, (part0, part1), weights, factors, 0)),
            (accumulate, (p, (part2, part3), weights, factors, 1)),
            (produce, (p, k_desc, (rest, part0, part1), False)),
            (produce, (p, k_desc, (part2, part3), True)),
        ],
        [4, 4, 1, 1],
        [168, 168, 24, 24],
    )
