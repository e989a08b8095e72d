"""FLASH_ATTN_VARLEN on Hopper (sm_90) for prompts: hopper/half.py's consumers over the list of tiles of tile_list.py.

K and V of f16 or bf16 come by TMA, a box for each page or piece of one that a k-block has; boxes of packed keys take
whatever lies behind a sequence's end along. Rows of V that no row of the tile sees are made 0 before they are
multiplied, so that what is in them does not matter; of keys their scores are. Tiles that programs share leave their
parts to fixup.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.kernels.common.gluon_pdl import gdc_launch_dependents, gdc_wait
from graphrt.backends.triton.kernels.flash_attn.gluon_ranges import listed_range, planned
from graphrt.backends.triton.kernels.flash_attn.hopper.consumer import consume
from graphrt.backends.triton.kernels.flash_attn.hopper.rings import make_turns, tile_shared_layout
from graphrt.backends.triton.kernels.flash_attn.varlen.hopper_rings import make_page_ring
from graphrt.backends.triton.kernels.flash_attn.varlen.hopper_work import NUMBERS, VarlenWork


@gluon.jit
def program_share(unit_start, n_tiles, splits):
    """(rounds of whole tiles, first tile of those that are shared out, first unit, end, tiles it has anything of) of
    this program. unit_start: see tile_list.py's sum_varlen_units."""
    whole = planned(unit_start + n_tiles + 1) // gl.num_programs(0)
    first_tile, last_tile, first_unit, stop_unit = listed_range(gl.program_id(0), splits, n_tiles, unit_start, True)
    turns = whole + gl.where(first_unit < stop_unit, last_tile - first_tile + 1, 0)
    return whole, first_tile, first_unit, stop_unit, turns


@gluon.jit
def produce(p, desc, ring, last: gl.constexpr):
    """A producer warp: stream the blocks of K or of V of every tile. One for each, since a block in small pages is many
    copies. last: it lets the next launch begin when it is done."""
    step = 0
    for turn in range(p.rounds()):
        seq, group, tile = p.tile(turn)
        kv_head = group * p.spec.pack // p.gqa
        n_full, n_all, start = p.visits(seq, group, tile)
        for j in range(0, n_all):
            ring.fill(p, desc, seq, kv_head, p.block(start, j), step + j)
        step += n_all
    if last and p.spec.pdl:
        gdc_launch_dependents()


@accesses(reads="q k_desc v_desc slopes sinks tiles table unit_start score", writes="out lse part")
@gluon.jit(do_not_specialize=NUMBERS)
def hopper_varlen_attn(
    q, out, lse, slopes, sinks, tiles, table, unit_start, part, k_desc, v_desc, scale, softcap, sq_t, sq_h, so_t, so_h,
    n_head, gqa, n_groups, n_tiles, n_seq, n_pages, max_blocks, s_table, window, splits,
    registers: gl.constexpr, spec: gl.constexpr, score=None,
):  # fmt: skip
    """q: f32; out: f32 [n_tokens, n_head, d]; lse: f32 [n_tokens, n_head]; k_desc, v_desc: of pages, see PageRing.fill;
    the rest as attend.py's flash_attn_varlen has it. registers: of the producers; score: numbers of spec.score."""
    if spec.pdl:
        gdc_wait()
    whole, first_tile, first_unit, stop_unit, turns = program_share(unit_start, n_tiles, splits)
    p = VarlenWork(
        spec, q, out, lse, slopes, sinks, tiles, table, unit_start, part, scale, softcap, sq_t, sq_h, so_t, so_h,
        n_head, gqa, n_groups, n_tiles, n_seq, n_pages, max_blocks, s_table, window, splits,
        whole, first_tile, first_unit, stop_unit, turns, score=score,
    )  # fmt: skip
    dtype: gl.constexpr = k_desc.dtype
    query_buffers = gl.allocate_shared_memory(dtype, [spec.n_wg, 64, spec.d], tile_shared_layout(dtype, 2))
    k_ring = make_page_ring(dtype, spec.d, spec.n_wg, spec)
    v_ring = make_page_ring(dtype, spec.d, spec.n_wg, spec)
    turns_ring = make_turns(spec, k_ring)
    # setmaxnreg moves registers from the producers' warpgroup to the consumers, see half.py.
    gl.warp_specialize(
        [
            (consume, (p, query_buffers, k_ring, v_ring, turns_ring, 0)),
            (consume, (p, query_buffers, k_ring, v_ring, turns_ring, 1)),
            (produce, (p, k_desc, k_ring, False)),
            (produce, (p, v_desc, v_ring, True)),
        ],
        [4, 1, 1],
        [(504 - registers) // 16 * 8, registers, registers],
    )
