"""What queries of packed sequences see, from positions, for Hopper's kernels of attention's gradients: what a mask says
elsewhere."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from graphrt.backends.triton.kernels.common.constants import NEG_INF
from graphrt.backends.triton.kernels.flash_attn.hopper.masks import clear_unseen, hide_unseen
from graphrt.backends.triton.kernels.flash_attn.hopper.rings import mma_layout


@gluon.jit
def seeing_span(key0, n_keys, n_queries, behind, window, spec: gl.constexpr):
    """(first step of queries, first full one, end of the full ones, end) of those that see a block of keys, each of
    spec.block_m queries: backward/keys.py's _seeing_span. A full one sees all keys of the block, with nothing to add;
    keys past the sequence's end don't count."""
    m: gl.constexpr = spec.block_m
    n_steps = gl.cdiv(n_queries, m)
    reach = gl.minimum(window, 1 << 29)
    last_key = gl.minimum(key0 + spec.block_n, n_keys) - 1
    first = n_steps * 0
    full_first = first
    end = n_steps
    full_end = n_steps
    if spec.causal:  # query i sees keys up to behind + i
        first = gl.minimum(gl.maximum(key0 - behind, 0) // m, n_steps)
        full_first = (gl.maximum(last_key - behind, 0) + m - 1) // m
    if spec.window:  # and those from behind + i - window + 1 on
        end = gl.minimum(gl.maximum((gl.maximum(last_key + reach - behind, 0) + m - 1) // m, first), n_steps)
        full_end = gl.maximum(key0 + reach - behind, 0) // m
    if spec.has_alibi:
        full_end = first
    full_first = gl.minimum(gl.maximum(full_first, first), end)
    full_end = gl.minimum(gl.maximum(full_end, full_first), end)
    return first, full_first, full_end, end


@gluon.jit
def sight_of_keys(p, behind, key, query):
    """[64 keys, block_m] as a mask's values, f32: of keys from `key` on and queries from `query` on, both counted in
    their sequence, whose first query's position is `behind`."""
    layout: gl.constexpr = mma_layout(p.spec.block_m)
    keys = (key + gl.arange(0, 64, gl.SliceLayout(1, layout)))[:, None]
    positions = (behind + query + gl.arange(0, p.spec.block_m, gl.SliceLayout(0, layout)))[None, :]
    away = positions - keys
    seen = away > -(1 << 30)
    if p.spec.causal:
        seen = away >= 0
    if p.spec.window:
        seen = seen & (away < p.window)
    values = gl.full([64, p.spec.block_m], 0.0, gl.float32, layout)
    if p.spec.has_alibi:
        values = values - gl.maximum(away, -away).to(gl.float32)
    return gl.where(seen, values, NEG_INF)


@gluon.jit
def sight_of_queries(p, visits, query, block):
    """[64 queries, block_n] likewise. visits: what masks.hide_unseen() asks of a tile."""
    layout: gl.constexpr = mma_layout(p.spec.block_n)
    token = query + gl.arange(0, 64, gl.SliceLayout(1, layout))
    return hide_unseen(p, gl.full([64, p.spec.block_n], 0.0, gl.float32, layout), block, (visits, token), 1.0)


@gluon.jit
def clear_unseen_keys(p, tile, visits, block):
    """Rows of K of a block, its keys that no query of the tile sees or that are another sequence's, become 0: 0 times
    the NaN that they may hold would be NaN. tile: [block_n, d]; both warpgroups do so, and write the same."""
    _low, _first, _full_first, _full_end, first_key, end_key, _behind = visits
    begin = block * p.spec.block_n
    if (begin < first_key) | (begin + p.spec.block_n > end_key):
        n: gl.constexpr = 16
        for i in gl.static_range(p.spec.block_n // n):
            clear_unseen(p, tile.slice(i * n, n, dim=0), block, (visits, 0), i * n)
        fence_async_shared()
        gl.thread_barrier()
