"""What hides keys: the mask's values, the end of the keys, positions."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from graphrt.backends.triton.kernels.common.constants import LOG2E
from graphrt.backends.triton.kernels.flash_attn.hopper.rings import mma_layout


@gluon.jit
def key_columns(p, block):
    """The keys of a block's columns of scores."""
    return block * p.spec.block_n + gl.arange(0, p.spec.block_n, gl.SliceLayout(0, mma_layout(p.spec.block_n)))


@gluon.jit
def readable(p, cols):
    """Which columns of the mask may be read."""
    inside = cols < p.n_kv
    if p.spec.mask_vec > 1:
        # Rows start at multiples of 16 bytes, so the pair of an odd last column is readable: ask by pairs, and each
        # thread's two neighbouring columns become one 4-byte load.
        inside = cols // 2 * 2 < p.n_kv
    return inside


@gluon.jit
def load_mask(p, seq, group, token, block):
    """[64, block_n] mask values in the scores' registers; -inf past n_q, anything past n_kv. `pack` divides 64."""
    layout: gl.constexpr = mma_layout(p.spec.block_n)
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))
    cols = key_columns(p, block)
    inside = readable(p, cols)
    vec: gl.constexpr = p.spec.mask_vec
    head = group * p.spec.pack
    base = p.mask + ((seq % p.mask_seqs).to(gl.int64) * p.sm_s + token.to(gl.int64) * p.sm_t) * vec
    places = rows // p.spec.pack * (p.sm_t * vec)
    if p.spec.pack == 1:
        base += (head % p.mask_heads).to(gl.int64) * p.sm_h * vec
    else:
        places += (head + rows % p.spec.pack) % p.mask_heads * (p.sm_h * vec)
    keep = (token + rows // p.spec.pack < p.n_q)[:, None] & inside[None, :]
    return gl.load(base + places[:, None] + cols[None, :], mask=keep, other=float("-inf"))


@gluon.jit
def load_mask_rows(p, seq, group, qt, block):
    """The same for any `pack`, with 64-bit offsets of rows."""
    layout: gl.constexpr = mma_layout(p.spec.block_n)
    token, head = p.rows(seq, group, qt, 64, gl.SliceLayout(1, layout))
    cols = key_columns(p, block)
    inside = readable(p, cols)
    rows = token.to(gl.int64) * p.sm_t + (head % p.mask_heads).to(gl.int64) * p.sm_h
    base = p.mask + (seq % p.mask_seqs).to(gl.int64) * p.sm_s * p.spec.mask_vec
    keep = (token < p.n_q)[:, None] & inside[None, :]
    return gl.load(base + (rows * p.spec.mask_vec)[:, None] + cols[None, :], mask=keep, other=float("-inf"))


@gluon.jit
def kept_inside(x):
    """Returns x, a number, and keeps what needs it inside the branch where this stands: the compiler would compute and
    select for every block, to be rid of the branch."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def hide_past_end(p, s, block):
    """Scores with -inf past n_kv, which only the last block reaches."""
    if (block + 1) * p.spec.block_n > p.n_kv:
        end = kept_inside(p.n_kv)
        s = gl.where((key_columns(p, block) < end)[None, :], s, float("-inf"))
    return s


@gluon.jit
def hide(p, s, block):
    """Without a mask: make scores past n_kv -inf."""
    return gl.where((key_columns(p, block) < p.n_kv)[None, :], s, float("-inf"))


@gluon.jit
def hide_masked(p, s, mask, block, slope, unit):
    """Add the mask (times each row's slope) to scores and make the hidden ones -inf, NaN or not. unit: of the scores,
    over log2 units."""
    inside = (key_columns(p, block) < p.n_kv)[None, :]
    if p.spec.has_mask:
        bias = mask.to(gl.float32)
        if p.spec.has_alibi:
            s = gl.where(inside & (bias != float("-inf")), s + bias * (slope * unit)[:, None], float("-inf"))
        else:
            s = gl.where(inside & (bias != float("-inf")), s + bias * (LOG2E * unit), float("-inf"))
    else:
        s = gl.where(inside, s, float("-inf"))
    return s


@gluon.jit
def hide_unseen(p, s, block, sight, slope):
    """Scores of a varlen tile's block with -inf where a row does not see a key, NaN or not.

    sight: (what varlen/hopper_work.py's visits() says, each row's token); slope: ALiBi's in the units of s, a number or
    a column of one for each row.
    """
    start, token = sight
    _low, _first, _full_first, _full_end, first_key, end_key, behind = start
    key = key_columns(p, block)
    position = behind + token
    seen = ((key >= first_key) & (key < end_key))[None, :]
    if p.spec.causal:
        seen = seen & (key[None, :] <= position[:, None])
    if p.spec.window:
        seen = seen & (key[None, :] > (position - p.window)[:, None])
    if p.spec.has_alibi:
        away = key[None, :] - position[:, None]
        s = s - slope * gl.maximum(away, -away).to(gl.float32)
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def clear_unseen(p, rows, block, sight, first: gl.constexpr):
    """Rows of values of a varlen tile's block, its keys from `first` on, become 0 where no row of the tile sees their
    keys: 0 times the NaN that they may hold would be NaN. rows: [n, cols] in shared memory."""
    start, _token = sight
    _low, _first, _full_first, _full_end, first_key, end_key, _behind = start
    n: gl.constexpr = rows.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    begin = block * p.spec.block_n + first
    if (begin < first_key) | (begin + n > end_key):
        key = begin + gl.arange(0, n, gl.SliceLayout(1, layout))
        values = rows.load(layout)
        seen = (key >= first_key) & (key < end_key)
        rows.store(gl.where(seen[:, None], values, gl.full_like(values, 0.0)))
