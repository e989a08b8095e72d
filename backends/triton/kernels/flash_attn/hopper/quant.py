"""Hopper's flash attention forward (half.py) for caches of 8 and 4 bits: K and V of q8_0 or q4_0 blocks, or of 8-bit
floats.

The consumers are the same. What differs is the producer: where one warp asked the TMA for tiles, a whole warpgroup
loads the blocks' bytes into registers, one or two tiles ahead of those it unpacks, makes f16 values of them and stores
these into the rings, in the swizzled form in which the TMA would have left them.

Both types' blocks have 2 bytes more than a whole number of 4-byte words, so that a row is read by pairs of blocks:

    q8_0    word 0: d0 v0 v1    words 1..7: v2..v29    word 8: v30 v31 d1    words 9..16: the second block's values
    q4_0    the same with bytes of two values: word 0: d0 b0 b1, words 1..3, word 4: b14 b15 d1, words 5..8

All words but the first are taken as they lie; in the one with d1 these 2 bytes give way to the last 2 of word 0. The
elements thus come in the order that queries.slot_elements says. The columns of Q and of the output are permuted alike.

8-bit floats have neither blocks nor scales: their rows are whole words of four codes, in order.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.core import _aggregate as aggregate

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.kernels.common.float8 import has_one_nan, is_float8
from graphrt.backends.triton.kernels.common.gluon_layouts import axis_index
from graphrt.backends.triton.kernels.flash_attn.gluon_visits import block_in_range
from graphrt.backends.triton.kernels.flash_attn.hopper.consumer import consume
from graphrt.backends.triton.kernels.flash_attn.hopper.rings import make_ring, make_turns, tile_shared_layout
from graphrt.backends.triton.kernels.flash_attn.hopper.work import NUMBERS, Work

#: Two f16 of two codes each: e4m3 by the instruction that sm_89 and later have, e5m2 are the high bytes of f16.
E4M3_PAIRS = gl.constexpr(
    """
    {
    .reg .b16 a, b;
    mov.b32 {a, b}, $2;
    cvt.rn.f16x2.e4m3x2 $0, a;
    cvt.rn.f16x2.e4m3x2 $1, b;
    }
    """
)
E5M2_PAIRS = gl.constexpr("prmt.b32 $0, $2, 0, 0x1404; prmt.b32 $1, $2, 0, 0x3424;")


@gluon.constexpr_function
def group_words(kind):
    """Words of 8 values, which one thread unpacks together."""
    return 1 if kind == "q4_0" else 2


@gluon.constexpr_function
def rows_at_once(d):
    """Rows that the producer's threads load by one instruction each: a row's groups of 8 lie in consecutive lanes."""
    return 128 // (d // 8)


@gluon.constexpr_function
def raw_layout(kind, d, rows):
    """Registers of [rows / rows_at_once, rows_at_once, d / 8 groups, words of a group]."""
    lanes = d // 8
    chunks = rows // rows_at_once(d)
    return gl.BlockedLayout([chunks, 1, 1, group_words(kind)], [1, 32 // lanes, lanes, 1], [1, 4, 1, 1], [3, 2, 1, 0])


@aggregate
class Cache:
    """K or V. words: pointer to int32; stride_h, stride_s: words from head to head and sequence to sequence; stride_n:
    from key to key; kind: the type; parts: units of one tile."""

    words: gl.tensor
    stride_h: gl.tensor
    stride_s: gl.tensor
    stride_n: gl.constexpr
    kind: gl.constexpr
    parts: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, words, stride_h, stride_s, stride_n, kind, parts):
        self.words = words
        self.stride_h = stride_h
        self.stride_s = stride_s
        self.stride_n = gl.constexpr(stride_n)
        self.kind = gl.constexpr(kind)
        self.parts = gl.constexpr(parts)

    @gluon.jit
    def fetch(self, spec: gl.constexpr, block, part: gl.constexpr):
        """One unit's raw words in raw_layout, 0 past the last key: int32 (values, the words with d); of the latter the
        last dimension is 1, and floats have none: there it is the number 0."""
        seq, kv_head, first, left = block
        rows: gl.constexpr = spec.block_n // self.parts
        words: gl.constexpr = group_words(self.kind)
        layout: gl.constexpr = raw_layout(self.kind, spec.d, rows)
        step: gl.constexpr = rows_at_once(spec.d)
        base = self.words + (
            seq.to(gl.int64) * self.stride_s
            + kv_head.to(gl.int64) * self.stride_h
            + (first + part * rows).to(gl.int64) * self.stride_n
        )
        chunk = axis_index(layout, 4, 0, rows // step)
        row = axis_index(layout, 4, 1, step)
        group = axis_index(layout, 4, 2, spec.d // 8)
        word = axis_index(layout, 4, 3, words)
        inside = chunk * step + row < left - part * rows
        # What differs between a thread's registers is added last: it then goes into the instructions.
        chunks = chunk * (step * self.stride_n)
        if is_float8(self.kind):
            heads = gl.to_tensor(0)
            at = gl.multiple_of(base, 16) + (row * self.stride_n + group * words + word)
            values = gl.load(at + chunks, mask=inside, other=0)
        else:
            pair = base + (row * self.stride_n + group // 8 * (8 * words + 1))
            # Of the pair's eight groups the first four are the first block's.
            heads = gl.load(pair + gl.where(group % 8 < 4, 0, 4 * words) + chunks, mask=inside, other=0)
            values = gl.load(pair + group % 8 * words + (chunks + (1 + word)), mask=inside, other=0)
        return values, heads


@gluon.jit
def select_bytes(a, b, selector):
    """Four bytes of eight: digit i of the selector says which becomes byte i; 0 to 3 are a's, 4 to 7 b's. int32."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, selector], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def widen(codes, kind: gl.constexpr):
    """Words of four 8-bit floats as f16 pairs: int32 [rows, d / 2]."""
    rows: gl.constexpr = codes.shape[0] * codes.shape[1]
    pairs: gl.constexpr = 2 * codes.shape[2] * codes.shape[3]
    source: gl.constexpr = E4M3_PAIRS if has_one_nan(kind) else E5M2_PAIRS
    a, b = gl.inline_asm_elementwise(
        source, "=&r,=&r,r", [codes], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )  # fmt: skip
    return gl.join(a, b).reshape([rows, pairs])


@gluon.jit
def unpack(values, heads, kind: gl.constexpr):
    """A unit of blocks' raw words as f16 pairs: int32 [rows, d / 2]."""
    rows: gl.constexpr = values.shape[0] * values.shape[1]
    groups: gl.constexpr = values.shape[2]
    words: gl.constexpr = values.shape[3]
    layout: gl.constexpr = values.type.layout
    group = axis_index(layout, 4, 2, groups) % 8
    word = axis_index(layout, 4, 3, words)
    # Byte selectors: d, twice, is the low half of word 0 or the high half of the word with d1; this one's high half is
    # replaced by that of word 0, which the threads of the first block have as their `heads`.
    heads, pick_d = gl.broadcast(heads, gl.where(group < 4, 0x1010, 0x3232))
    d, values = gl.broadcast(select_bytes(heads, heads, pick_d), values)
    heads, values = gl.broadcast(heads, values)
    if kind == "q8_0":
        pick, values = gl.broadcast(gl.where((group == 3) & (word == words - 1), 0x7610, 0x3210), values)
    else:  # with the two bytes in the middle swapped, so that the masks below yield neighbours
        pick, values = gl.broadcast(gl.where((group == 3) & (word == words - 1), 0x7160, 0x3120), values)
    values = select_bytes(values, heads, pick)
    if kind == "q8_0":
        # A byte under the exponent of 1024 is the f16 number 1024 + byte; with its sign bit turned, 1152 + int8.
        a, b = gl.inline_asm_elementwise(
            """{
            .reg .b32 w, t, base, zero;
            mov.b32 base, 0x64646464;
            mov.b32 zero, 0x64806480;
            xor.b32 w, $2, 0x80808080;
            prmt.b32 t, w, base, 0x4140;
            sub.f16x2 t, t, zero;
            mul.f16x2 $0, t, $3;
            prmt.b32 t, w, base, 0x4342;
            sub.f16x2 t, t, zero;
            mul.f16x2 $1, t, $3;
            }""",
            "=&r,=&r,r,r",
            [values, d],
            dtype=(gl.int32, gl.int32),
            is_pure=True,
            pack=1,
        )
        pairs = gl.join(a, b)
    else:
        # Low halves n are put under 1024 as n, high ones as 16 n: (1024 + 16 n) / 16 - 72 is exactly n - 8.
        a, b, c, e = gl.inline_asm_elementwise(
            """{
            .reg .b32 w, t, base, eight, sixteenth, offset;
            mov.b32 base, 0x64006400;
            mov.b32 eight, 0x64086408;
            mov.b32 sixteenth, 0x2C002C00;
            mov.b32 offset, 0xD480D480;
            mov.b32 w, $4;
            lop3.b32 t, w, 0x000F000F, base, 0xEA;
            sub.f16x2 t, t, eight;
            mul.f16x2 $0, t, $5;
            lop3.b32 t, w, 0x00F000F0, base, 0xEA;
            fma.rn.f16x2 t, t, sixteenth, offset;
            mul.f16x2 $1, t, $5;
            shr.b32 w, w, 8;
            lop3.b32 t, w, 0x000F000F, base, 0xEA;
            sub.f16x2 t, t, eight;
            mul.f16x2 $2, t, $5;
            lop3.b32 t, w, 0x00F000F0, base, 0xEA;
            fma.rn.f16x2 t, t, sixteenth, offset;
            mul.f16x2 $3, t, $5;
            }""",
            "=&r,=&r,=&r,=&r,r,r",
            [values, d],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
            is_pure=True,
            pack=1,
        )
        # join() puts its second argument last: the outer join's index is the innermost.
        pairs = gl.join(gl.join(a, b), gl.join(c, e))
    return pairs.reshape([rows, groups * 4])


@gluon.jit
def put(spec: gl.constexpr, ring, step, raw, cache, part: gl.constexpr):
    """Unpack one unit into the step-th block's buffer: the first waits until that is free, the last passes it on."""
    rows: gl.constexpr = spec.block_n // cache.parts
    slot = step % spec.stages
    if part == 0:
        ring.wait_empty(step)
    values, heads = raw
    # Two f16 are one word, in the same swizzled place.
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    tile = ring.operand(step)._reinterpret(gl.int32, [spec.block_n, spec.d // 2], layout)
    rows_of_unit = tile.slice(part * rows, rows, dim=0)
    if is_float8(cache.kind):
        rows_of_unit.store(widen(values, cache.kind))
    else:
        rows_of_unit.store(unpack(values, heads, cache.kind))
    if part == cache.parts - 1:
        # Every thread's stores must be seen by wgmma before one thread says that they are done.
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(ring.full.index(slot), count=1)


@gluon.jit
def block_of(p, at, rounds):
    """A cursor's block: sequence, kv head, first key, and how many keys it has (none past the last tile)."""
    turn, j, n_all, start, seq, kv_head, index = at
    first = p.first_row(block_in_range(index, p.key_blocks()))
    return seq, kv_head, first, gl.where(turn < rounds, p.n_kv - first, 0)


@gluon.jit
def cursor_at(p, turn, rounds):
    """The first block of this program's turn-th tile: turn, j, n_all, start, sequence, kv head, the block's index.

    That is loaded a step before it is used, so that nothing waits for it.
    """
    seq, head, qt = p.tile(gl.minimum(turn, rounds - 1))
    n_full, n_all, start = p.visits(seq, head, qt)
    zero = turn * 0
    return turn, zero, n_all, start, seq, head // p.gqa, p.listed(start, zero)


@gluon.jit
def next_cursor(p, at, rounds):
    """The block after a cursor's."""
    turn, j, n_all, start, seq, kv_head, index = at
    if j + 1 < n_all:
        j += 1
        index = p.listed(start, j)
    else:
        turn, j, n_all, start, seq, kv_head, index = cursor_at(p, turn + 1, rounds)
    return turn, j, n_all, start, seq, kv_head, index


@gluon.jit
def fetch_unit(spec: gl.constexpr, cache, block, then, then_block, unit: gl.constexpr):
    """The unit-th unit of a block, or past its end the first ones of the block that comes then."""
    if unit < cache.parts:
        raw = cache.fetch(spec, block, unit)
    else:
        raw = then.fetch(spec, then_block, unit - cache.parts)
    return raw


@gluon.jit
def produce(p, k, v, k_ring, v_ring):
    """The producer warpgroup: unpack the blocks of every tile, K one block ahead of V as the consumers use them. Two
    units are always on their way from memory: those that are unpacked next. They are asked for after the fence and the
    barrier of what was stored before, which would wait for them."""
    spec: gl.constexpr = p.spec
    parts: gl.constexpr = k.parts
    rounds = p.rounds()
    turn = gl.to_tensor(0)
    ahead = cursor_at(p, turn, rounds)
    this = block_of(p, ahead, rounds)
    ahead = next_cursor(p, ahead, rounds)
    coming = block_of(p, ahead, rounds)
    coming_turn = ahead[0]
    ahead = next_cursor(p, ahead, rounds)
    if parts == 1:
        a = k.fetch(spec, this, 0)
        b = v.fetch(spec, this, 0)
        put(spec, k_ring, 0, a, k, 0)
        a = k.fetch(spec, coming, 0)
    else:
        a = k.fetch(spec, this, 0)
        b = k.fetch(spec, this, 1)
        for i in gl.static_range(0, parts, 2):
            put(spec, k_ring, 0, a, k, i)
            a = fetch_unit(spec, k, this, k, coming, i + 2)
            put(spec, k_ring, 0, b, k, i + 1)
            b = fetch_unit(spec, k, this, k, coming, i + 3)
    step = turn
    while turn < rounds:
        later = block_of(p, ahead, rounds)
        later_turn = ahead[0]
        ahead = next_cursor(p, ahead, rounds)
        if parts == 1:
            if coming_turn < rounds:
                put(spec, k_ring, step + 1, a, k, 0)
            a = k.fetch(spec, later, 0)
            put(spec, v_ring, step, b, v, 0)
            b = v.fetch(spec, coming, 0)
        else:
            for i in gl.static_range(0, parts, 2):
                if coming_turn < rounds:
                    put(spec, k_ring, step + 1, a, k, i)
                a = fetch_unit(spec, k, coming, v, this, i + 2)
                if coming_turn < rounds:
                    put(spec, k_ring, step + 1, b, k, i + 1)
                b = fetch_unit(spec, k, coming, v, this, i + 3)
            for i in gl.static_range(0, parts, 2):
                put(spec, v_ring, step, a, v, i)
                a = fetch_unit(spec, v, this, k, later, i + 2)
                put(spec, v_ring, step, b, v, i + 1)
                b = fetch_unit(spec, v, this, k, later, i + 3)
        this = coming
        coming = later
        turn = coming_turn
        coming_turn = later_turn
        step += 1


@accesses(reads="q k_words v_words mask counts blocks slopes sinks", writes="out bad lse")
@gluon.jit(do_not_specialize=(*NUMBERS, "sk_h", "sk_s", "sv_h", "sv_s"))
def hopper_quant_attn(
    q, k_words, v_words, out, mask, counts, blocks, slopes, sinks, bad, lse, scale, softcap,
    sq_t, sq_h, sq_s, so_t, so_h, so_s, sm_t, sm_h, sm_s, mask_heads, mask_seqs, mask_groups,
    n_seq, n_head, gqa, n_q, n_kv, section, sk_h, sk_s, sv_h, sv_s,
    sk_n: gl.constexpr, sv_n: gl.constexpr, parts: gl.constexpr, producer_registers: gl.constexpr, spec: gl.constexpr,
):  # fmt: skip
    p = Work(
        spec, q, out, mask, counts, blocks, slopes, sinks, bad, lse, scale, softcap,
        sq_t, sq_h, sq_s, so_t, so_h, so_s, sm_t, sm_h, sm_s, mask_heads, mask_seqs, mask_groups,
        n_seq, n_head, gqa, n_q, n_kv, section,
    )  # fmt: skip
    k = Cache(k_words, sk_h, sk_s, sk_n, spec.k_kind, parts)
    v = Cache(v_words, sv_h, sv_s, sv_n, spec.v_kind, parts)
    query_buffers = gl.allocate_shared_memory(gl.float16, [spec.n_wg, 64, spec.d], tile_shared_layout(gl.float16, 2))
    k_ring = make_ring(gl.float16, spec.d, spec.n_wg, spec)
    v_ring = make_ring(gl.float16, spec.d, spec.n_wg, spec)
    turns = make_turns(spec, k_ring)
    # setmaxnreg moves registers from the producers to the consumers, see half.py.
    gl.warp_specialize(
        [
            (consume, (p, query_buffers, k_ring, v_ring, turns, 0)),
            (consume, (p, query_buffers, k_ring, v_ring, turns, 1)),
            (produce, (p, k, v, k_ring, v_ring)),
        ],
        [4, 4],
        [(504 - producer_registers) // 16 * 8, producer_registers],
    )
