"""Flash decoding in Gluon: attention of few query rows over f16, bf16, q8_0 and q4_0 caches, from sm_80 on.

It does what forward.py's `flash_attn` does for BLOCK_M = 16 rows that share one KV head, and shares its ranges of
units, lists of k-blocks, slots of scratch and fixup.py; only how the work inside a program is done differs:

- Copies of the first STAGES k-blocks start before Q is read: a ring of buffers in shared memory, filled by cp.async.
- Each warp has its own keys of a k-block ("way") with sums of its own; the ways meet once, at the end of a segment.
  Where such sums leave a warp no registers (f16 and bf16 heads of 256) the warps own columns of the result instead:
  keys are shared out for Q K^T only, and every k-block's maxima and weights pass through shared memory.
- Quantized rows are copied as they are, in 4-byte words, and read from shared memory straight into the registers where
  the matrix units want the dequantized values: which element of a row a slot of an operand holds is free as long as Q
  (for K) or the result (for V) follows the same order, and the orders here are made so that no value changes its lane.

Of a pair of q8_0 or q4_0 blocks (2 * J + 1 words, J = 8 or 4) these words are copied: 1 .. 2J, the values, as
[NB = D / 32 blocks, J]; and words 0 and J, the "heads", as [NB]. See tiles.py: in an even block the head's low half is
d and its high half the first two values, which here take the place of the two after the last ones (the block is
"turned"); in an odd block the head's high half is d.

Axes: W ways (warps), NW = BLOCK_N / W keys a way, 16 query rows, D head size (of K and V).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

LOG2E = gl.constexpr(1.4426950408889634)
NEG_INF = gl.constexpr(float("-inf"))
ROWS = gl.constexpr(16)  # query rows of a tile: the M of mma.sync


@dataclass(frozen=True)
class Config:
    """block_n: keys a k-block; warps: ways; stages: k-blocks in flight; per_sm: programs a multiprocessor holds."""

    block_n: int
    warps: int
    stages: int
    per_sm: int


#: By head size and kind of cache ("half", "q8_0", "q4_0"), the wider of K's and V's. With less shared memory than
#: Hopper has, fewer stages fit: see shared_bytes.
CONFIGS: dict[tuple[int, str], Config] = {
    (64, "half"): Config(128, 4, 3, 2),
    (128, "half"): Config(128, 4, 3, 1),
    (256, "half"): Config(64, 4, 3, 1),
    (64, "q8_0"): Config(64, 2, 4, 4),
    (128, "q8_0"): Config(32, 2, 4, 4),
    (256, "q8_0"): Config(64, 4, 3, 1),
    (64, "q4_0"): Config(128, 4, 3, 2),
    (128, "q4_0"): Config(64, 4, 3, 2),
    (256, "q4_0"): Config(64, 4, 4, 1),
}
#: By head size, of K and V that are both f16 or bf16: heads whose columns are shared out among the warps.
COLUMNS: dict[int, Config] = {256: Config(32, 4, 6, 1)}
KINDS = ("f16", "bf16", "q8_0", "q4_0")


def owns_columns(d: int, k_kind: str, v_kind: str) -> bool:
    """Whether a warp has columns of the result, and not keys, as its own."""
    return d in COLUMNS and all(k in ("f16", "bf16") for k in (k_kind, v_kind))


def find_decode_config(d: int, k_kind: str, v_kind: str) -> Config:
    """The configuration for a head size and the types of K and V."""
    if owns_columns(d, k_kind, v_kind):
        return COLUMNS[d]
    kinds = ("half" if k in ("f16", "bf16") else k for k in (k_kind, v_kind))
    return CONFIGS[d, min(kinds, key=("half", "q8_0", "q4_0").index)]


def shared_bytes(d: int, k_kind: str, v_kind: str, config: Config) -> int:
    """Shared memory of a program."""
    per_block = {"f16": 64, "bf16": 64, "q8_0": 36, "q4_0": 20}  # of 32 values, heads included
    ring = config.stages * config.block_n * (d // 32) * (per_block[k_kind] + per_block[v_kind])
    if owns_columns(d, k_kind, v_kind):  # while Q or weights pass through
        return ring + ROWS.value * max(d * 2, config.block_n * 2 + 64)
    join = config.warps * ROWS.value * (d + 2) * 4
    return max(ring, join)


def config_for(p: Any, hopper: bool) -> Config | None:
    """The configuration for a problem (problem.py's Problem), None if this kernel does not serve it.

    hopper: the GPU is an sm_90 or later. On others heads of 256 are the portable kernel's: there registers spill here,
    and nobody has measured whether it is the faster one all the same, as it is on an H100.
    """
    k, v = p.k, p.v
    if p.out is None or p.n_q * p.gqa > ROWS.value or k.d != v.d or k.d not in (64, 128, 256):
        return None
    if k.d == 256 and not hopper:
        return None
    for x, t in ((k, p.k_t), (v, p.v_t)):
        half = x.kind in ("f16", "bf16")
        # What Triton must know to copy 16 bytes at once: of an address that they are its unit, of an element count that
        # 16 divides it. Quantized rows are copied by words.
        if x.kind not in KINDS or any(n % (16 if half else 4) for n in (t.nb[1], p.place(t)[1])):
            return None
        if any(n % (32 if half else 4) for n in t.nb[2:]):
            return None
    config = find_decode_config(k.d, k.kind, v.kind)
    return config if max(t.nb[1] for t in (p.k_t, p.v_t)) * config.block_n < 2**31 else None


#: Parts of f16 and bf16 are joined in the same launch if a tile's are at most so many bytes: one multiprocessor reads
#: them all. (H100: gains 1.1 us of 13 at D128; over q8_0 and q4_0, whose loops lack the registers, it loses 2 to 4 us.)
JOIN_BYTES = 160 << 10
#: The largest head size that is joined so. (With sums of its own in each warp the join's registers made the loop spill
#: more at 256: 18 us lost. Not measured since columns are shared out there.)
JOIN_D = 128


#: Read counts and runs of a plan that is old enough while the launch before still runs; off to compare.
PLAN_EARLY = True


def join_of(main: dict[str, Any], t: Any, config: Config) -> tuple[int, int]:
    """(rows, parts at a time) of the join within a launch of these arguments; (0, 0): fixup.py joins, or nobody need.

    t: the tiling. Powers of two, so that a thread holds at most 128 values and every lane one of the row maxima.
    """
    most = min(main["splits"] or main["programs"] // t.n_tiles + 2, t.n_blocks)
    rows, d = 1 << (main["n_q"] * t.pack - 1).bit_length(), main["D_K"]
    if not main["RANGES"] or main["programs"] < t.n_tiles or d > JOIN_D:
        return 0, 0
    if any(main[kind] not in ("f16", "bf16") for kind in ("K_KIND", "V_KIND")):
        return 0, 0
    if rows * (d + 2) * most * 4 > JOIN_BYTES:
        return 0, 0
    return rows, max(32 // rows, min(1 << (most - 1).bit_length(), 128 * 32 * config.warps // (rows * d)))


def arguments(
    main: dict[str, Any],
    config: Config,
    runs: Any,
    counter: Any,
    join: tuple[int, int] = (0, 0),
    early: bool = False,
) -> dict[str, Any]:
    """The portable kernel's arguments (portable.py) as this kernel takes them.

    runs: the mask's (mask.py); counter: int32 [tiles], zeros; join: join_of's; early: the mask's plan was made before
    the launch that precedes this one.
    """
    known = {
        **main, "D": main["D_K"], "STAGES": config.stages, "p_runs": runs, "p_counter": counter,
        "JOIN": join[0], "JOIN_PARTS": join[1], "PLAN_EARLY": early and PLAN_EARLY,
        "COLUMNS": owns_columns(main["D_K"], main["K_KIND"], main["V_KIND"]),
    }  # fmt: skip
    return {name: known[name] for name in flash_attn_decode.arg_names}


# --- orders and layouts: plain Python, run when compiled ---


@gluon.constexpr_function
def is_half(KIND):
    return KIND == "f16" or KIND == "bf16"


@gluon.constexpr_function
def dot_dtype(KIND):
    return gl.bfloat16 if KIND == "bf16" else gl.float16


@gluon.constexpr_function
def words_a_block(KIND):
    """J: words of values in a block of 32."""
    return 8 if KIND == "q8_0" else 4


@gluon.constexpr_function
def log2(n):
    return n.bit_length() - 1


@gluon.constexpr_function
def word_bits(D, KIND):
    """How many bits number the words of values of a row."""
    return log2(D // 32 * words_a_block(KIND))


@gluon.constexpr_function
def chunk_bits(D, KIND, LANE_BITS):
    """Of these, the low ones that number the words a lane reads at once: what the lanes leave, at most 16 bytes."""
    return min(2, word_bits(D, KIND) - LANE_BITS)


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
def axis_layout(layout, rank, axis):
    """The layout of a vector along one axis of a tensor of that layout."""
    for i in reversed(range(rank)):
        if i != axis:
            layout = gl.SliceLayout(i, layout)
    return layout


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
    """Words of V [W, NW, NB, J] where the second operand of P V wants them: lane 4g + t has keys 2t, 2t + 1 (in pairs

    of registers), 2t + 8, 2t + 9 of every 16, and of each the g-th of eight runs of words."""
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
def heads_shared(D, NW, W, KIND, IS_V):
    """Shared memory of the heads [W, NW, NB]: what a lane reads side by side where that is possible."""
    words = value_words_layout(D, NW, W, KIND) if IS_V else key_words_layout(D, NW, W, KIND)
    regs = [b[:3] for b in words.reg_bases if any(b[:3])]
    lanes = [b[:3] for b in words.lane_bases if any(b[:3])]
    return gl.SharedLinearLayout(regs[:2] + lanes + regs[2:] + way_bases(W, 3))


@gluon.constexpr_function
def copy_layout(shape):
    """Which thread copies what of [W, NW, ..]: consecutive lanes along the last axes, each warp its own keys."""
    rank = len(shape)
    bases = []
    for axis in reversed(range(1, rank)):
        bases += [[1 << i if a == axis else 0 for a in range(rank)] for i in range(log2(shape[axis]))]
    return gl.DistributedLinearLayout(bases[5:], bases[:5], way_bases(shape[0], rank), [], list(shape))


@gluon.constexpr_function
def half_copy_layout(D, W):
    """[W, NW, D] in copies of 16 bytes."""
    lanes = min(32, D // 8)
    return gl.BlockedLayout([1, 1, 8], [1, 32 // lanes, lanes], [W, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def query_layout(D, W, KIND):
    """Q [W, 16, D slots] as the first operand of Q K^T has it, a slot's place being where K's bytes lie.

    q8_0: slot 4 * word + byte; q4_0: slot 8 * word + 2 * byte + half.
    """
    if is_half(KIND):
        regs, lanes = [1], [2, 4]
        rest = [1 << i for i in range(3, log2(D))]
    else:
        e = 2 if KIND == "q8_0" else 3  # bits within a word
        v = chunk_bits(D, KIND, 2)
        lanes = [1 << (e + v), 2 << (e + v)]
        # Elements 2t, 2t + 1 of a product's step: bytes 0, 1 or nibbles of bytes 0, 2 (1, 3).
        regs = [1] if KIND == "q8_0" else [4]
        rest = [1 << i for i in range(log2(D)) if 1 << i not in (*regs, *lanes)]
    columns = [[0, 0, b] for b in regs + rest]
    rows = [[0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(
        [columns[0], [0, 8, 0], *columns[1:]], [[0, 0, b] for b in lanes] + rows, way_bases(W, 3), [], [W, 16, D]
    )


@gluon.constexpr_function
def join_layout(D, W):
    """[W, 16, D] with all ways of an element in one thread, four columns a thread side by side, rows over warps."""
    columns = [[0, 0, 1 << i] for i in range(log2(D))]
    rows = [[0, 1 << i, 0] for i in range(4)]
    lanes = (columns[2:7] + rows)[:5]
    rows = [r for r in rows if r not in lanes]
    w = log2(W)
    warps = rows[:w] + [[0, 0, 0]] * max(0, w - len(rows))
    return gl.DistributedLinearLayout(
        columns[:2] + way_bases(W, 3) + columns[7:] + rows[w:], lanes, warps, [], [W, 16, D]
    )


@gluon.constexpr_function
def join_shared(D, W, KIND):
    """Shared memory for [W, 16, D slots] f32, written from mma_layout (of V's order) and read in join_layout."""
    n = log2(D)
    bases = [[0, 0, 1 << i] for i in range(n)] + [[0, 1 << i, 0] for i in range(4)] + way_bases(W, 3)
    if is_half(KIND):  # lanes t lie in bank bits 1 and 2, so rows go to 3 and 4
        swaps = [(n, 3), (n + 1, 4)]
    else:  # lanes t and bit 0 of the row to bank bits 2 to 4, unless they are there
        t = (2 if KIND == "q8_0" else 3) + chunk_bits(D, KIND, 3) + 1
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


# --- small things ---


@gluon.jit
def gdc_wait():
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def gdc_launch_dependents():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def quotient(a, b):
    """a // b of int32 that are not negative: fewer instructions than with signs."""
    return (a.to(gl.uint32) // b.to(gl.uint32)).to(gl.int32)


@gluon.jit
def axis_index(LAYOUT: gl.constexpr, RANK: gl.constexpr, AXIS: gl.constexpr, N: gl.constexpr):
    """0 .. N - 1 along one axis of RANK, int32 [1, .., N, .., 1]."""
    x = gl.arange(0, N, layout=axis_layout(LAYOUT, RANK, AXIS))
    for i in gl.static_range(RANK):
        if i != AXIS:
            x = gl.expand_dims(x, i)
    return x


@gluon.jit
def slot_elements(i_slot, KIND: gl.constexpr):
    """Which element of a row a slot holds; tiles.py's for aligned rows."""
    if is_half(KIND):
        return i_slot
    turned = (i_slot & 32) == 0
    if KIND == "q8_0":
        i = i_slot & 31
        return (i_slot & -32) + gl.where(turned, (i + 2) & 31, i)
    else:
        i = (i_slot & 31) >> 1
        return (i_slot & -32) + gl.where(turned, (i + 2) & 15, i) + 16 * (i_slot & 1)


@gluon.jit
def tanh(x):
    return 1.0 - 2.0 / (1.0 + gl.exp2(2.0 * LOG2E * x))


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
def planned(p):
    """A number of the mask's plan. Past the L1 cache, which may hold an older one before gdc_wait."""
    return gl.load(p, cache_modifier=".cg")


@gluon.jit
def tile_units(tile, p_counts, n_blocks, HAS_MASK: gl.constexpr, p_unit_start, UNIFORM: gl.constexpr):
    """(first unit, units) of a tile, int32. UNIFORM: all tiles have as many."""
    if UNIFORM:
        if HAS_MASK:
            n = gl.maximum(1, planned(p_counts) + planned(p_counts + 1))
        else:
            n = n_blocks
        return tile * n, n
    else:
        start = planned(p_unit_start + tile)
        return start, planned(p_unit_start + tile + 1) - start


@gluon.jit
def find_tile(unit, p_unit_start, n_tiles):
    """The tile that holds a unit: how many tiles end at or before it."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    tile = 0
    for first in range(0, n_tiles, 1024):
        i = first + gl.arange(0, 1024, layout=LAYOUT)
        ends = gl.load(p_unit_start + 1 + i, mask=i < n_tiles, other=2**31 - 1, cache_modifier=".cg")
        tile += gl.sum((ends <= unit).to(gl.int32), 0)
    return tile


# --- copies ---


@gluon.jit
def allocate(STAGES: gl.constexpr, NW: gl.constexpr, D: gl.constexpr, KIND: gl.constexpr, IS_V: gl.constexpr):
    """The ring of K or V: (tiles, heads); a half tile has no heads."""
    W: gl.constexpr = gl.num_warps()
    if is_half(KIND):
        layout: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
        tiles = gl.allocate_shared_memory(dot_dtype(KIND), [STAGES, W, NW, D], layout)
        return tiles, tiles
    else:
        J: gl.constexpr = words_a_block(KIND)
        words = gl.allocate_shared_memory(gl.int32, [STAGES, W, NW, D // 32, J], words_shared(D, NW, W, KIND, IS_V))
        heads = gl.allocate_shared_memory(gl.int32, [STAGES, W, NW, D // 32], heads_shared(D, NW, W, KIND, IS_V))
        return words, heads


@gluon.jit
def copy_tile(
    ring, p, left, bits, STRIDE: gl.constexpr, NW: gl.constexpr, D: gl.constexpr, KIND: gl.constexpr,
    MASKED: gl.constexpr, HAS_MASK: gl.constexpr, slot,
):  # fmt: skip
    """Starts the copies of a k-block's rows of K or V into buffer `slot` of the ring.

    p: its first row; STRIDE: between rows, in units of the pointer. MASKED: rows from `left` on and those whose bit is
    0 (bits: see seen_bits) are not read and become 0.
    """
    W: gl.constexpr = gl.num_warps()
    tiles, heads = ring
    if is_half(KIND):
        L: gl.constexpr = half_copy_layout(D, W)
        key = axis_index(L, 3, 0, W) * NW + axis_index(L, 3, 1, NW)
        p = gl.multiple_of(p, 16)
        pointers = p + (key * STRIDE + axis_index(L, 3, 2, D))
        if MASKED:
            mask = row_mask(L, 3, key, left, bits, NW, HAS_MASK)
            async_copy.async_copy_global_to_shared(tiles.index(slot), pointers, mask)
        else:
            async_copy.async_copy_global_to_shared(tiles.index(slot), pointers)
    else:
        J: gl.constexpr = words_a_block(KIND)
        NB: gl.constexpr = D // 32
        LW: gl.constexpr = copy_layout([W, NW, NB, J])
        key = axis_index(LW, 4, 0, W) * NW + axis_index(LW, 4, 1, NW)
        nb = axis_index(LW, 4, 2, NB)
        pointers = p + (key * STRIDE + (nb // 2 * (2 * J + 1) + nb % 2 * J + 1 + axis_index(LW, 4, 3, J)))
        LH: gl.constexpr = copy_layout([W, NW, NB])
        key_h = axis_index(LH, 3, 0, W) * NW + axis_index(LH, 3, 1, NW)
        nb_h = axis_index(LH, 3, 2, NB)
        pointers_h = p + (key_h * STRIDE + (nb_h // 2 * (2 * J + 1) + nb_h % 2 * J))
        if MASKED:
            mask = row_mask(LW, 4, key, left, bits, NW, HAS_MASK)
            mask_h = row_mask(LH, 3, key_h, left, bits, NW, HAS_MASK)
            async_copy.async_copy_global_to_shared(tiles.index(slot), pointers, mask)
            async_copy.async_copy_global_to_shared(heads.index(slot), pointers_h, mask_h)
        else:
            async_copy.async_copy_global_to_shared(tiles.index(slot), pointers)
            async_copy.async_copy_global_to_shared(heads.index(slot), pointers_h)


@gluon.jit
def row_mask(LAYOUT: gl.constexpr, RANK: gl.constexpr, key, left, bits, NW: gl.constexpr, HAS_MASK: gl.constexpr):
    """Which rows of a k-block to read."""
    inside = key < left
    if HAS_MASK:
        words = gl.convert_layout(bits, axis_layout(LAYOUT, RANK, 0))
        for i in gl.static_range(1, RANK):
            words = gl.expand_dims(words, i)
        inside = inside & (((words >> axis_index(LAYOUT, RANK, 1, NW)) & 1) != 0)
    return inside


@gluon.jit
def seen_bits(p_bits, partial, NW: gl.constexpr):
    """The `seen` bits of each way's keys: int32 [W], bit i for key i of the way. p_bits: the k-block's first word.

    All ones unless partial.
    """
    W: gl.constexpr = gl.num_warps()
    LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 1], [1, 32], [W, 1], [1, 0]))
    first = gl.arange(0, W, layout=LAYOUT) * NW
    return gl.load(p_bits + first // 32, mask=partial & (first >= 0), other=-1) >> (first % 32)


# --- operands ---


@gluon.jit
def load_q(p_q, p_row, m_row, sign, D: gl.constexpr, KIND: gl.constexpr, DOT: gl.constexpr):
    """Q in the order of K's slots as the first operand: [W, 16, D]. p_row: int64 offsets [1, 16, 1]."""
    W: gl.constexpr = gl.num_warps()
    L: gl.constexpr = query_layout(D, W, KIND)
    column = slot_elements(axis_index(L, 3, 2, D), KIND) + axis_index(L, 3, 0, W) * 0
    q = gl.load(p_q + p_row + column, mask=m_row & (column >= 0), other=0.0)
    q = (q * sign).to(DOT)
    if is_half(KIND):
        q = q
    elif KIND == "q8_0":  # [rest, t, i, b1, b0] to steps' [rest, i], b1, t, b0
        V: gl.constexpr = 1 << chunk_bits(D, KIND, 2)
        q = gl.reshape(q, [W, 16, D // (16 * V), 4, V, 2, 2])
        q = gl.reshape(gl.permute(q, (0, 1, 2, 4, 5, 3, 6)), [W, 16, D])
    else:  # [rest, t, i, b1, b0, half] to [rest, i, b0], half, t, b1
        U: gl.constexpr = 1 << chunk_bits(D, KIND, 2)
        q = gl.reshape(q, [W, 16, D // (32 * U), 4, U, 2, 2, 2])
        q = gl.reshape(gl.permute(q, (0, 1, 2, 4, 6, 7, 3, 5)), [W, 16, D])
    return gl.convert_layout(q, gl.DotOperandLayout(0, mma_layout(W), 2), assert_trivial=True)


@gluon.jit
def whole_words(words, heads, LAYOUT: gl.constexpr, NB: gl.constexpr, J: gl.constexpr):
    """Words with an even block's first two values, from its head, in the place after its last ones."""
    turned = ((axis_index(LAYOUT, 4, 2, NB) & 1) == 0) & (axis_index(LAYOUT, 4, 3, J) == J - 1)
    return gl.where(turned, (words & 0xFFFF) | (heads & -65536), words)


@gluon.jit
def load_k(ring, slot, NW: gl.constexpr, D: gl.constexpr, KIND: gl.constexpr):
    """A k-block of K as the second operand of Q K^T: [W, D, NW]."""
    W: gl.constexpr = gl.num_warps()
    OPERAND: gl.constexpr = gl.DotOperandLayout(1, mma_layout(W), 2)
    tiles, heads = ring
    if is_half(KIND):
        return tiles.index(slot).permute((0, 2, 1)).load(OPERAND)
    else:
        L: gl.constexpr = key_words_layout(D, NW, W, KIND)
        J: gl.constexpr = words_a_block(KIND)
        NB: gl.constexpr = D // 32
        V: gl.constexpr = 1 << chunk_bits(D, KIND, 2)
        words = tiles.index(slot).load(L)
        head = heads.index(slot).load(gl.SliceLayout(3, L))
        odd = (gl.arange(0, NB, layout=axis_layout(gl.SliceLayout(3, L), 3, 2)) & 1) != 0
        which = gl.expand_dims(gl.expand_dims(gl.where(odd, 0x3232, 0x1010), 0), 1)
        head, which = gl.broadcast(head, which)
        dd = gl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $1, $2;", "=r,r,r", [head, which], dtype=gl.int32, is_pure=True, pack=1
        )
        words = whole_words(words, gl.expand_dims(head, 3), L, NB, J)
        words, dd = gl.broadcast(words, gl.expand_dims(dd, 3))
        if KIND == "q8_0":
            a, b, c, d = key_bytes(words, dd)
            x = gl.join(gl.join(a, c), gl.join(b, d))  # [W, NW, NB, J, b1, b0]
            x = gl.reshape(x, [W, NW, D // (16 * V), 4, V, 2, 2])  # .., rest, t, i, b1, b0
            x = gl.permute(x, (0, 2, 4, 5, 3, 6, 1))
        else:
            a, a1, b, b1, c, c1, d, d1 = key_nibbles(words, dd)
            x = gl.join(gl.join(gl.join(a, c), gl.join(b, d)), gl.join(gl.join(a1, c1), gl.join(b1, d1)))
            x = gl.reshape(x, [W, NW, D // (32 * V), 4, V, 2, 2, 2])  # .., rest, t, i, b1, b0, half
            x = gl.permute(x, (0, 2, 4, 6, 7, 3, 5, 1))
        return gl.convert_layout(gl.reshape(x, [W, D, NW]), OPERAND, assert_trivial=True)


@gluon.jit
def load_v(ring, slot, NW: gl.constexpr, D: gl.constexpr, KIND: gl.constexpr):
    """A k-block of V as the second operand of P V: [W, NW, D], columns in the order that slot_order undoes."""
    W: gl.constexpr = gl.num_warps()
    OPERAND: gl.constexpr = gl.DotOperandLayout(1, mma_layout(W), 2)
    tiles, heads = ring
    if is_half(KIND):
        return tiles.index(slot).load(OPERAND)
    else:
        L: gl.constexpr = value_words_layout(D, NW, W, KIND)
        J: gl.constexpr = words_a_block(KIND)
        NB: gl.constexpr = D // 32
        V: gl.constexpr = 1 << chunk_bits(D, KIND, 3)
        words = tiles.index(slot).load(L)
        head = heads.index(slot).load(gl.SliceLayout(3, L))
        odd = (gl.arange(0, NB, layout=axis_layout(gl.SliceLayout(3, L), 3, 2)) & 1) != 0
        which = gl.expand_dims(gl.expand_dims(gl.where(odd, 0x7632, 0x5410), 0), 1)
        head, which = gl.broadcast(head, which)
        dd = gl.inline_asm_elementwise(  # d of keys 2t and 2t + 1, the same in both keys' registers
            "prmt.b32 $0, $2, $3, $4; mov.b32 $1, $0;", "=r,=r,r,r,r,r", [head, which], dtype=gl.int32, is_pure=True,
            pack=2,
        )  # fmt: skip
        words = whole_words(words, gl.expand_dims(head, 3), L, NB, J)
        words, dd = gl.broadcast(words, gl.expand_dims(dd, 3))
        if KIND == "q8_0":
            a, b, c, d = value_bytes(words, dd)
            x = gl.join(gl.join(a, c), gl.join(b, d))  # [W, NW, NB, J, byte / 2, byte % 2]
            x = gl.reshape(x, [W, NW, D // (32 * V), 8, V, 4])  # .., rest, g, i, byte
        else:
            a, a1, b, b1, c, c1, d, d1 = value_nibbles(words, dd)
            x = gl.join(gl.join(gl.join(a, c), gl.join(b, d)), gl.join(gl.join(a1, c1), gl.join(b1, d1)))
            x = gl.reshape(x, [W, NW, D // (64 * V), 8, V, 8])  # .., rest, g, i, byte and half
        x = gl.reshape(gl.permute(x, (0, 1, 2, 4, 5, 3)), [W, NW, D])
        return gl.convert_layout(x, OPERAND, assert_trivial=True)


@gluon.jit
def slot_order(acc, D: gl.constexpr, KIND: gl.constexpr):
    """Sums [W, 16, D] with the columns of load_v, put in the order of slots."""
    if is_half(KIND):
        return acc
    else:
        V: gl.constexpr = 1 << chunk_bits(D, KIND, 3)
        E: gl.constexpr = 4 if KIND == "q8_0" else 8
        W: gl.constexpr = gl.num_warps()
        x = gl.reshape(acc, [W, 16, D // (8 * V * E), V, E, 8])
        return gl.reshape(gl.permute(x, (0, 1, 2, 5, 3, 4)), [W, 16, D])


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


@gluon.jit
def value_bytes(words, dd):
    """Four f16 of each word of four int8, times d. Two words (of two keys) at once; dd: both keys' d, in each."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 t<4>, base;
        mov.b32 base, 0x64806480;
        prmt.b32 t0, $4, $5, 0x0400;
        prmt.b32 t1, $4, $5, 0x0501;
        prmt.b32 t2, $4, $5, 0x0602;
        prmt.b32 t3, $4, $5, 0x0703;
        lop3.b32 t0, t0, 0x00FF00FF, base, 0x6A;
        lop3.b32 t1, t1, 0x00FF00FF, base, 0x6A;
        lop3.b32 t2, t2, 0x00FF00FF, base, 0x6A;
        lop3.b32 t3, t3, 0x00FF00FF, base, 0x6A;
        sub.f16x2 t0, t0, base;
        sub.f16x2 t1, t1, base;
        sub.f16x2 t2, t2, base;
        sub.f16x2 t3, t3, base;
        mul.f16x2 $0, t0, $6;
        mul.f16x2 $1, t1, $6;
        mul.f16x2 $2, t2, $6;
        mul.f16x2 $3, t3, $6;
        }
        """,
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


# --- the kernel ---


@gluon.jit(
    do_not_specialize=[
        "n_q",
        "n_kv",
        "n_groups",
        "n_blocks",
        "n_tiles",
        "programs",
        "splits",
        "has_sinks",
        "has_lse",
        "sm_t",
        "sm_h",
        "sm_s",
    ],  # fmt: skip
)
def flash_attn_decode(
    p_q, p_k, p_v, p_mask, p_sinks, p_slopes, p_out, p_lse, p_counts, p_blocks, p_seen, p_runs, p_unit_start, p_part,
    p_counter, sq_t, sq_h, sq_s, sk_h, sk_s, sv_h, sv_s, sm_t, sm_h, sm_s,
    n_q, n_kv, n_head, n_groups, n_blocks, n_tiles, m2, m3, mask_groups, programs, splits, sign, factor, softcap,
    has_sinks, has_lse,
    sk_n: gl.constexpr, sv_n: gl.constexpr, D: gl.constexpr, K_KIND: gl.constexpr, V_KIND: gl.constexpr,
    BLOCK_N: gl.constexpr, SOFTCAP: gl.constexpr, HAS_MASK: gl.constexpr, PACK: gl.constexpr, PER_HEAD: gl.constexpr,
    RANGES: gl.constexpr, UNIFORM: gl.constexpr, PDL: gl.constexpr, STAGES: gl.constexpr,
    JOIN: gl.constexpr, JOIN_PARTS: gl.constexpr, PLAN_EARLY: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Arguments are those of forward.py's flash_attn with one query tile a KV head: at most 16 rows, all heads of a KV

    head in one tile (PACK of them, n_groups = KV heads, n_qt = 1), and not BIG nor WIDE. D: of K and V. K and V of f16
    and bf16 have rows aligned to 16 bytes; q8_0 and q4_0 are int32, rows aligned to 4 bytes.

    JOIN: rows that are joined in this launch, JOIN_PARTS parts at a time, by the last of a tile's programs to be done,
    which counter [n_tiles] tells; 0: fixup.py joins.

    PLAN_EARLY: the mask's plan is older than the launch before this one. Kernels let their successors start only after
    a gdc_wait of their own, so that when this one starts, all launches but the one before it are complete.

    COLUMNS: the warps own columns of the result and not keys; K and V are f16 or bf16.
    """
    W: gl.constexpr = gl.num_warps()
    NW: gl.constexpr = BLOCK_N // W
    # All that is read of a plan before the first copies is what list_blocks and sum_units made of it.
    WAIT_LATE: gl.constexpr = PLAN_EARLY or (UNIFORM and not HAS_MASK)
    gl.static_assert(NW % (8 if COLUMNS else 16) == 0 and (NW <= 32 or not HAS_MASK))
    pid = gl.program_id(0)
    if PDL and not WAIT_LATE:  # what follows reads what the mask's kernels wrote
        gdc_wait()
    # A mask that all tiles share has one mask tile: all that is known of it is loaded at once, first of all.
    n_full = n_kv // BLOCK_N
    n_all = n_blocks
    run_first = 0
    run = 0
    if HAS_MASK and UNIFORM:
        n_full = planned(p_counts)
        n_all = n_full + planned(p_counts + 1)
        run_first = planned(p_runs)
        run = planned(p_runs + 1)
    if RANGES:
        if splits > 0:
            tile = quotient(pid, splits)
            part = pid - tile * splits
            start0, n0 = tile_units(tile, p_counts, n_blocks, HAS_MASK, p_unit_start, UNIFORM)
            unit = start0 + quotient(part * n0, splits)
            stop = start0 + quotient((part + 1) * n0, splits)
        else:
            if UNIFORM:
                total, n0 = tile_units(n_tiles, p_counts, n_blocks, HAS_MASK, p_unit_start, True)
            else:
                total = planned(p_unit_start + n_tiles)
                n0 = 1
            unit = quotient(pid * total, programs)
            stop = quotient((pid + 1) * total, programs)
            if UNIFORM:
                tile = quotient(unit, n0)
            else:
                tile = find_tile(unit, p_unit_start, n_tiles)
    else:
        tile = pid
        unit = pid
        stop = n_tiles

    while unit < stop:
        if not RANGES:
            tile = unit
        i_seq = quotient(tile, n_groups)
        i_group = tile - i_seq * n_groups
        mask_tile = i_seq
        if HAS_MASK:
            if UNIFORM:
                mask_tile = i_seq * 0
            else:
                mask_tile = (i_seq % m3) * mask_groups + i_group % mask_groups
                n_full = planned(p_counts + 2 * mask_tile)
                n_all = n_full + planned(p_counts + 2 * mask_tile + 1)
                run_first = planned(p_runs + 2 * mask_tile)
                run = planned(p_runs + 2 * mask_tile + 1)
        if RANGES:
            start, n_units = tile_units(tile, p_counts, n_blocks, HAS_MASK, p_unit_start, UNIFORM)
            low = unit - start
            high = gl.minimum(stop, start + n_units) - start
            finishes = high == n_units
            whole = (low == 0) & finishes
            unit = start + high
            high = gl.minimum(high, n_all)
        else:
            low = unit * 0
            high = n_all
            finishes = unit >= 0
            whole = finishes
            unit += programs

        p_kh = p_k + i_seq.to(gl.int64) * sk_s + i_group.to(gl.int64) * sk_h
        p_vh = p_v + i_seq.to(gl.int64) * sv_s + i_group.to(gl.int64) * sv_h
        p_list = p_blocks + mask_tile.to(gl.int64) * n_blocks
        p_bits = p_seen + mask_tile.to(gl.int64) * n_blocks * (BLOCK_N // 32)
        ring_k = allocate(STAGES, NW, D, K_KIND, False)
        ring_v = allocate(STAGES, NW, D, V_KIND, True)

        if PDL and WAIT_LATE:  # so late that all that comes before overlaps with the kernel before
            gdc_wait()
        # A buffer's copies are two groups, K's and V's; where there is no k-block left, they are empty.
        for i in range(STAGES):
            copy_block(
                ring_k, ring_v, p_kh, p_vh, p_list, p_bits, run_first, run, low + i, n_full, high, n_kv, i, sk_n, sv_n,
                NW, D, K_KIND, V_KIND, BLOCK_N, HAS_MASK, PDL, COLUMNS,
            )  # fmt: skip

        if COLUMNS:
            m, l, acc = column_sums(
                p_q, p_mask, p_slopes, ring_k, ring_v, p_kh, p_vh, p_list, p_bits, run_first, run, low, n_full, high,
                i_seq, i_group, sq_t, sq_h, sq_s, sm_t, sm_h, sm_s, n_q, n_kv, m2, m3, sign, factor, softcap,
                sk_n, sv_n, D, K_KIND, V_KIND, BLOCK_N, SOFTCAP, HAS_MASK, PACK, PER_HEAD, PDL, STAGES,
            )  # fmt: skip
            LAYOUT: gl.constexpr = column_mma_layout(W)
        else:
            m, l, acc = way_sums(
                p_q, p_mask, p_slopes, ring_k, ring_v, p_kh, p_vh, p_list, p_bits, run_first, run, low, n_full, high,
                i_seq, i_group, sq_t, sq_h, sq_s, sm_t, sm_h, sm_s, n_q, n_kv, m2, m3, sign, factor, softcap,
                sk_n, sv_n, D, K_KIND, V_KIND, BLOCK_N, SOFTCAP, HAS_MASK, PACK, PER_HEAD, PDL, STAGES,
            )  # fmt: skip
            m, l, acc = joined_ways(m, l, acc, D, V_KIND)
            LAYOUT: gl.constexpr = gl.SliceLayout(0, join_layout(D, W))
        deliver(
            p_sinks, p_out, p_lse, p_part, m, l, acc, pid, splits, i_seq, i_group, whole, finishes, n_q, n_head,
            has_sinks, has_lse, p_counter, p_counts, p_unit_start, tile, programs, n_tiles, n_blocks,
            LAYOUT, PACK, D, V_KIND, HAS_MASK, UNIFORM, JOIN, JOIN_PARTS,
        )  # fmt: skip
        tile += 1


@gluon.jit
def mask_rows(
    p_mask, p_slopes, token, head, i_seq, sm_t, sm_h, sm_s, n_q, m2, m3, factor,
    SOFTCAP: gl.constexpr, HAS_MASK: gl.constexpr, PER_HEAD: gl.constexpr,
):  # fmt: skip
    """(slopes, the mask's rows) of a tile's rows: ALiBi's factors in the units of s, f32, and pointers to f16."""
    slope = token.to(gl.float32)
    p_rows = p_mask
    if HAS_MASK:
        # In the units of s, which so stays exact where the mask adds 0.
        slope = gl.load(p_slopes + head, mask=token < n_q, other=0.0) * (LOG2E if SOFTCAP else LOG2E / factor)
        mask_row = (i_seq % m3).to(gl.int64) * sm_s + token.to(gl.int64) * sm_t
        if PER_HEAD:
            mask_row += (head % m2).to(gl.int64) * sm_h
        p_rows = p_mask + mask_row
    return slope, p_rows


@gluon.jit
def way_sums(
    p_q, p_mask, p_slopes, ring_k, ring_v, p_kh, p_vh, p_list, p_bits, run_first, run, low, n_full, high,
    i_seq, i_group, sq_t, sq_h, sq_s, sm_t, sm_h, sm_s, n_q, n_kv, m2, m3, sign, factor, softcap,
    sk_n: gl.constexpr, sv_n: gl.constexpr, D: gl.constexpr, K_KIND: gl.constexpr, V_KIND: gl.constexpr,
    BLOCK_N: gl.constexpr, SOFTCAP: gl.constexpr, HAS_MASK: gl.constexpr, PACK: gl.constexpr, PER_HEAD: gl.constexpr,
    PDL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """(m, l, acc) of a segment, k-blocks low .. high - 1 of the list, of which copies of the first STAGES have started.

    m: f32 [W, 16], each way's row maxima, log2; l: f32 [W, 16], its sums of weights; acc: f32 [W, 16, D], its weighted
    sums of V, in the order of slots.
    """
    W: gl.constexpr = gl.num_warps()
    NW: gl.constexpr = BLOCK_N // W
    MMA: gl.constexpr = mma_layout(W)
    LQ: gl.constexpr = query_layout(D, W, K_KIND)
    row_q = axis_index(LQ, 3, 1, ROWS)
    token_q = row_q // PACK
    head_q = i_group * PACK + row_q % PACK
    p_row = i_seq.to(gl.int64) * sq_s + token_q.to(gl.int64) * sq_t + head_q.to(gl.int64) * sq_h
    q = load_q(p_q, p_row, token_q < n_q, sign, D, K_KIND, dot_dtype(K_KIND))

    row = axis_index(MMA, 3, 1, ROWS)
    token = row // PACK
    head = i_group * PACK + row % PACK
    slope, p_mask_rows = mask_rows(
        p_mask, p_slopes, token, head, i_seq, sm_t, sm_h, sm_s, n_q, m2, m3, factor, SOFTCAP, HAS_MASK, PER_HEAD
    )
    i_key = axis_index(MMA, 3, 0, W) * NW + axis_index(MMA, 3, 2, NW)
    m = gl.full([W, ROWS], NEG_INF, gl.float32, layout=gl.SliceLayout(2, MMA))
    l = gl.full([W, ROWS], 0.0, gl.float32, layout=gl.SliceLayout(2, MMA))
    acc = gl.full([W, ROWS, D], 0.0, gl.float32, layout=MMA)
    buffer = 0
    for i in range(low, high):
        bias = gl.full([W, ROWS, NW], 0.0, gl.float32, layout=MMA)
        if HAS_MASK:  # loaded before the wait for K, so that it takes no time of its own
            if i >= n_full:
                col = listed(p_list, run_first, run, i) * BLOCK_N + i_key
                bias = gl.load(
                    p_mask_rows + col, mask=(token < n_q) & (col < n_kv), other=NEG_INF
                ).to(gl.float32)  # fmt: skip
        async_copy.wait_group(2 * STAGES - 1)
        s = mma_v2(q, load_k(ring_k, buffer, NW, D, K_KIND), gl.full([W, ROWS, NW], 0.0, gl.float32, layout=MMA))
        if SOFTCAP:
            s = (softcap * LOG2E) * tanh(s * factor)
        if HAS_MASK:  # where the mask is -inf, so is the logit, whatever q.k is
            s = gl.where(bias == NEG_INF, NEG_INF, s + slope * bias)
        else:
            s = gl.where(i * BLOCK_N + i_key < n_kv, s, NEG_INF)
        # m is in the units of s, so that the largest logit's weight is exactly 1, as forward.py has it.
        m_new = gl.maximum(m, gl.max(s, 2))
        top = gl.where(m_new == NEG_INF, 0.0, m_new)  # a row may be all -inf so far
        if SOFTCAP:
            p = gl.exp2(s - gl.expand_dims(top, 2))
            alpha = gl.exp2(m - top)
        else:
            p = gl.exp2((s - gl.expand_dims(top, 2)) * factor)
            alpha = gl.exp2((m - top) * factor)
        l = l * alpha + gl.sum(p, 2)
        m = m_new
        acc = acc * gl.expand_dims(alpha, 2)
        p = gl.convert_layout(p.to(dot_dtype(V_KIND)), gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)
        async_copy.wait_group(2 * STAGES - 2)
        acc = mma_v2(p, load_v(ring_v, buffer, NW, D, V_KIND), acc)
        copy_block(
            ring_k, ring_v, p_kh, p_vh, p_list, p_bits, run_first, run, i + STAGES, n_full, high, n_kv, buffer,
            sk_n, sv_n, NW, D, K_KIND, V_KIND, BLOCK_N, HAS_MASK, PDL, True,
        )  # fmt: skip
        buffer = gl.where(buffer == STAGES - 1, 0, buffer + 1)

    if not SOFTCAP:
        m = m * factor
    return m, l, slot_order(acc, D, V_KIND)


@gluon.jit
def column_sums(
    p_q, p_mask, p_slopes, ring_k, ring_v, p_kh, p_vh, p_list, p_bits, run_first, run, low, n_full, high,
    i_seq, i_group, sq_t, sq_h, sq_s, sm_t, sm_h, sm_s, n_q, n_kv, m2, m3, sign, factor, softcap,
    sk_n: gl.constexpr, sv_n: gl.constexpr, D: gl.constexpr, K_KIND: gl.constexpr, V_KIND: gl.constexpr,
    BLOCK_N: gl.constexpr, SOFTCAP: gl.constexpr, HAS_MASK: gl.constexpr, PACK: gl.constexpr, PER_HEAD: gl.constexpr,
    PDL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As way_sums, with the keys of all warps together: (m, l, acc) f32 [16, 1], [16, 1], [16, D].

    Of S = Q K^T a warp has 8 keys of every 8 W, of acc as many columns.
    """
    W: gl.constexpr = gl.num_warps()
    NW: gl.constexpr = BLOCK_N // W
    MMA: gl.constexpr = column_mma_layout(W)
    FIRST: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    q = gl.allocate_shared_memory(
        dot_dtype(K_KIND), [ROWS, D], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]),
        load_rows(p_q, i_seq, i_group, sq_t, sq_h, sq_s, n_q, sign, D, PACK).to(dot_dtype(K_KIND)),
    ).load(FIRST)  # fmt: skip

    row = axis_index(MMA, 2, 0, ROWS)
    token = row // PACK
    head = i_group * PACK + row % PACK
    slope, p_mask_rows = mask_rows(
        p_mask, p_slopes, token, head, i_seq, sm_t, sm_h, sm_s, n_q, m2, m3, factor, SOFTCAP, HAS_MASK, PER_HEAD
    )
    i_key = axis_index(MMA, 2, 1, BLOCK_N)
    m = gl.full([ROWS], NEG_INF, gl.float32, layout=gl.SliceLayout(1, MMA))
    l = lane_sums(gl.full([ROWS, BLOCK_N], 0.0, gl.float32, layout=MMA))
    acc = gl.full([ROWS, D], 0.0, gl.float32, layout=MMA)
    buffer = 0
    for i in range(low, high):
        bias = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, layout=MMA)
        if HAS_MASK:  # loaded before the wait for K, so that it takes no time of its own
            if i >= n_full:
                col = listed(p_list, run_first, run, i) * BLOCK_N + i_key
                bias = gl.load(
                    p_mask_rows + col, mask=(token < n_q) & (col < n_kv), other=NEG_INF
                ).to(gl.float32)  # fmt: skip
        async_copy.wait_group(2 * STAGES - 1)
        k = block_rows(ring_k, buffer, BLOCK_N, D).permute((1, 0)).load(gl.DotOperandLayout(1, MMA, 2))
        s = mma_v2(q, k, gl.full([ROWS, BLOCK_N], 0.0, gl.float32, layout=MMA))
        if SOFTCAP:
            s = (softcap * LOG2E) * tanh(s * factor)
        if HAS_MASK:  # where the mask is -inf, so is the logit, whatever q.k is
            s = gl.where(bias == NEG_INF, NEG_INF, s + slope * bias)
        else:
            s = gl.where(i * BLOCK_N + i_key < n_kv, s, NEG_INF)
        m_new = gl.maximum(m, gl.max(s, 1))
        top = gl.where(m_new == NEG_INF, 0.0, m_new)  # a row may be all -inf so far
        if SOFTCAP:
            p = gl.exp2(s - gl.expand_dims(top, 1))
            alpha = gl.exp2(m - top)
        else:
            p = gl.exp2((s - gl.expand_dims(top, 1)) * factor)
            alpha = gl.exp2((m - top) * factor)
        m = m_new
        shrink = gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout), assert_trivial=True)
        l = l * gl.expand_dims(shrink, 1) + lane_sums(p)
        acc = acc * gl.expand_dims(alpha, 1)
        p = gl.convert_layout(p.to(dot_dtype(V_KIND)), FIRST)
        async_copy.wait_group(2 * STAGES - 2)
        acc = mma_v2(p, block_rows(ring_v, buffer, BLOCK_N, D).load(gl.DotOperandLayout(1, MMA, 2)), acc)
        copy_block(
            ring_k, ring_v, p_kh, p_vh, p_list, p_bits, run_first, run, i + STAGES, n_full, high, n_kv, buffer,
            sk_n, sv_n, NW, D, K_KIND, V_KIND, BLOCK_N, HAS_MASK, PDL, True,
        )  # fmt: skip
        buffer = gl.where(buffer == STAGES - 1, 0, buffer + 1)

    if not SOFTCAP:
        m = m * factor
    l = gl.convert_layout(gl.sum(l, 1), gl.SliceLayout(1, MMA), assert_trivial=True)
    return gl.expand_dims(m, 1), gl.expand_dims(l, 1), acc


@gluon.jit
def load_rows(
    p_q, i_seq, i_group, sq_t, sq_h, sq_s, n_q, sign, D: gl.constexpr, PACK: gl.constexpr
):  # fmt: skip
    """A tile's rows of Q times sign, f32 [16, D], each thread with four columns side by side; rows past n_q are 0."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])
    row = axis_index(L, 2, 0, ROWS)
    column = axis_index(L, 2, 1, D)
    token = row // PACK
    head = i_group * PACK + row % PACK
    p_row = i_seq.to(gl.int64) * sq_s + token.to(gl.int64) * sq_t + head.to(gl.int64) * sq_h
    return gl.load(p_q + p_row + column, mask=(token < n_q) & (column >= 0), other=0.0) * sign


@gluon.jit
def block_rows(ring, slot, BLOCK_N: gl.constexpr, D: gl.constexpr):
    """A buffer of the ring of a half K or V as one tile in shared memory, [BLOCK_N, D]."""
    tiles, _ = ring
    return tiles.index(slot).reshape([BLOCK_N, D])


@gluon.jit
def lane_sums(p):
    """Row sums of [16, n] in column_mma_layout as far as a thread has them, so that none waits: [16, 4 W]."""
    W: gl.constexpr = gl.num_warps()
    return gl.sum(gl.sum(gl.reshape(p, [ROWS, p.shape[1] // (8 * W), 4 * W, 2]), 3), 1)


@gluon.jit
def copy_block(
    ring_k, ring_v, p_kh, p_vh, p_list, p_bits, run_first, run, i, n_full, high, n_kv, buffer, sk_n: gl.constexpr,
    sv_n: gl.constexpr, NW: gl.constexpr, D: gl.constexpr, K_KIND: gl.constexpr, V_KIND: gl.constexpr,
    BLOCK_N: gl.constexpr, HAS_MASK: gl.constexpr, PDL: gl.constexpr, BOTH: gl.constexpr,
):  # fmt: skip
    """Starts the copies of the i-th k-block of the list, as two groups: K, V. Empty ones if i is not below high.

    BOTH: full k-blocks have code of their own.
    """
    if i < high:
        i_kb = i
        bits = i
        if HAS_MASK:
            i_kb = listed(p_list, run_first, run, i)
            bits = seen_bits(p_bits + i_kb * (BLOCK_N // 32), i >= n_full, NW)
        first = i_kb * BLOCK_N
        left = n_kv - first
        p_kb = p_kh + first.to(gl.int64) * sk_n
        p_vb = p_vh + first.to(gl.int64) * sv_n
        if BOTH and i < n_full:
            copy_tile(ring_k, p_kb, left, bits, sk_n, NW, D, K_KIND, False, HAS_MASK, buffer)
            async_copy.commit_group()
            copy_tile(ring_v, p_vb, left, bits, sv_n, NW, D, V_KIND, False, HAS_MASK, buffer)
        else:
            copy_tile(ring_k, p_kb, left, bits, sk_n, NW, D, K_KIND, True, HAS_MASK, buffer)
            async_copy.commit_group()
            copy_tile(ring_v, p_vb, left, bits, sv_n, NW, D, V_KIND, True, HAS_MASK, buffer)
    else:
        async_copy.commit_group()
        if PDL:
            gdc_launch_dependents()
    async_copy.commit_group()


@gluon.jit
def listed(p_list, run_first, run, i):
    """The i-th k-block of the list, which need not be read within its run."""
    return gl.load(p_list + i, mask=i >= run, other=run_first + i)


@gluon.jit
def joined_ways(m, l, acc, D: gl.constexpr, KIND: gl.constexpr):
    """The ways' sums as one: way_sums' to f32 [16, 1], [16, 1], [16, D]."""
    W: gl.constexpr = gl.num_warps()
    L: gl.constexpr = join_layout(D, W)
    sums = gl.allocate_shared_memory(gl.float32, [2, W, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    rows = gl.allocate_shared_memory(gl.float32, [W, ROWS, D], join_shared(D, W, KIND))
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
    p_sinks, p_out, p_lse, p_part, m, l, acc, pid, splits, i_seq, i_group, whole, finishes, n_q, n_head, has_sinks,
    has_lse, p_counter, p_counts, p_unit_start, tile, programs, n_tiles, n_blocks,
    LAYOUT: gl.constexpr, PACK: gl.constexpr, D: gl.constexpr, KIND: gl.constexpr, HAS_MASK: gl.constexpr,
    UNIFORM: gl.constexpr, JOIN: gl.constexpr, JOIN_PARTS: gl.constexpr,
):  # fmt: skip
    """Writes a segment's result, or its part of it. m, l: [16, 1]; acc: [16, D] in LAYOUT, slots' order.

    With JOIN the last of a tile's programs to write its part joins them all.
    """
    i_row = axis_index(LAYOUT, 2, 0, ROWS)
    i_slot = axis_index(LAYOUT, 2, 1, D)
    token = i_row // PACK
    head = i_group * PACK + i_row % PACK
    m_row = token < n_q
    if whole:
        sink = gl.full([ROWS, 1], NEG_INF, gl.float32, layout=LAYOUT)
        if has_sinks != 0:
            sink = gl.load(p_sinks + head, mask=m_row, other=NEG_INF) * LOG2E
        lse, scale = normalized(m, l, sink)
        out_row = ((i_seq * n_q).to(gl.int64) + token) * n_head + head
        gl.store(p_out + (out_row * D + slot_elements(i_slot, KIND)), acc * scale, mask=m_row & (i_slot >= 0))
        if has_lse != 0:
            gl.store(p_lse + out_row, lse * 0.6931471805599453, mask=m_row)
    else:
        slot = pid
        if splits == 0:
            # With JOIN side by side: from a segment to the next the program, the tile or both go up.
            slot = pid + tile if JOIN > 0 else 2 * pid + gl.where(finishes, 0, 1)
        SLOT: gl.constexpr = ROWS * (D + 2)
        p_slot = p_part + slot.to(gl.int64) * SLOT
        gl.store(p_slot + (i_row * D + i_slot), acc, mask=m_row & (i_slot >= 0))
        gl.store(p_slot + ROWS * D + i_row, m, mask=m_row)
        gl.store(p_slot + ROWS * D + ROWS + i_row, l, mask=m_row)
        if JOIN > 0:
            first, last, parts, shares, units = tile_parts(
                tile, programs, splits, n_tiles, p_counts, n_blocks, p_unit_start, HAS_MASK, UNIFORM
            )
            # All threads' stores come before the count, and all reads of others' parts after it.
            gl.thread_barrier()
            done = gl.atomic_add(p_counter + tile, 1, sem="acq_rel", scope="gpu")
            if done == parts - 1:
                gl.store(p_counter + tile, 0)  # for the next launch; in this one nobody counts here any more
                join_parts(
                    p_sinks, p_out, p_lse, p_slot - (pid - first).to(gl.int64) * SLOT, first, last, shares, units,
                    splits, i_seq, i_group, n_q, n_head,
                    has_sinks, has_lse, PACK, D, KIND, JOIN, JOIN_PARTS,
                )  # fmt: skip


@gluon.jit
def tile_parts(
    tile, programs, splits, n_tiles, p_counts, n_blocks, p_unit_start, HAS_MASK: gl.constexpr, UNIFORM: gl.constexpr
):
    """(first program, last program, programs between them that have units, shares, units) of a tile, int32: ranges.py's

    fixup_range and stream_k.py's part_count. Of `shares` shares of `units` units the programs have their own: of the
    tile's units if it is split, else of all tiles'."""
    start, n = tile_units(tile, p_counts, n_blocks, HAS_MASK, p_unit_start, UNIFORM)
    if splits > 0:
        first = tile * splits
        last = first + splits - 1
        shares = splits
        units = n
    else:
        if UNIFORM:
            units = n_tiles * n
        else:
            units = planned(p_unit_start + n_tiles)
        first = quotient((start + 1) * programs - 1, units)
        last = quotient((start + n) * programs - 1, units)
        shares = programs
    return first, last, gl.minimum(last - first + 1, n), shares, units


@gluon.jit
def join_parts(
    p_sinks, p_out, p_lse, p_first, first, last, shares, units, splits, i_seq, i_group, n_q, n_head, has_sinks, has_lse,
    PACK: gl.constexpr, D: gl.constexpr, KIND: gl.constexpr, R: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """Joins a tile's parts in the order of their programs and writes the result: fixup.py in one program. p_first: the

    slot of program `first`, the next programs' follow.

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
    first_row = (i_seq * n_q).to(gl.int64)
    i_row = axis_index(gl.SliceLayout(0, L), 2, 0, R)
    i_slot = axis_index(gl.SliceLayout(0, L), 2, 1, D)
    token = i_row // PACK
    out_row = (first_row + token) * n_head + (i_group * PACK + i_row % PACK)
    gl.store(p_out + (out_row * D + slot_elements(i_slot, KIND)), acc * scale, mask=(token < n_q) & (i_slot >= 0))
    if has_lse != 0:
        gl.store(p_lse + ((first_row + s_token) * n_head + s_head), lse * 0.6931471805599453, mask=s_token < n_q)
