"""What the loops of the decode kernel share: rows of queries and masks, logits, softmax, copies. Names: decode.py's."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from graphrt.backends.triton.kernels.common.constants import LOG2E, NEG_INF
from graphrt.backends.triton.kernels.common.gluon_pdl import gdc_launch_dependents
from graphrt.backends.triton.kernels.flash_attn.decode_operands import copy_run, copy_tile, seen_bits
from graphrt.backends.triton.kernels.flash_attn.gluon_visits import block_of_run, first_row, page_of


@gluon.constexpr_function
def sees(SEES, what):
    """Whether a word is in SEES, see logits."""
    return what in SEES.split()


@gluon.constexpr_function
def by_position(SEES):
    return SEES.startswith("position")


@gluon.jit
def tanh(x):
    return 1.0 - 2.0 / (1.0 + gl.exp2(2.0 * LOG2E * x))


@gluon.jit
def mask_rows(
    mask, row, i_seq, i_group, n_q, factor, SOFTCAP: gl.constexpr, SEES: gl.constexpr, PACK: gl.constexpr,
    PER_HEAD: gl.constexpr,
):  # fmt: skip
    """(tokens, slopes, the mask's rows) of a tile's rows: ALiBi's factors in the units of s, f32; pointers to f16.

    Of positions (see logits) their positions instead of pointers.
    """
    token = row // PACK
    head = i_group * PACK + row % PACK
    slope = token.to(gl.float32)
    p_rows = token
    if by_position(SEES):
        behind, p_slopes, _, _ = mask
        p_rows = behind + token
        if sees(SEES, "alibi"):
            slope = gl.load(p_slopes + head, mask=token < n_q, other=0.0) * (LOG2E if SOFTCAP else LOG2E / factor)
    if SEES == "mask":
        p_mask, p_slopes, sm_t, sm_h, sm_s, m2, m3 = mask
        # In the units of s, which so stays exact where the mask adds 0.
        slope = gl.load(p_slopes + head, mask=token < n_q, other=0.0) * (LOG2E if SOFTCAP else LOG2E / factor)
        mask_row = (i_seq % m3).to(gl.int64) * sm_s + token.to(gl.int64) * sm_t
        if PER_HEAD:
            mask_row += (head % m2).to(gl.int64) * sm_h
        p_rows = p_mask + mask_row
    return token, slope, p_rows


@gluon.jit
def load_bias(bias, p_mask_rows, m_rows, visits, i, i_key, n_kv, BLOCK_N: gl.constexpr, SEES: gl.constexpr):
    """The mask of the i-th k-block of the list, f32; `bias`, zeros, where it is full."""
    if SEES == "mask":
        p_list, run_first, run, n_full, _ = visits
        if i >= n_full:
            col = block_of_run(p_list, i, run_first, run) * BLOCK_N + i_key
            bias = gl.load(p_mask_rows + col, mask=m_rows & (col < n_kv), other=NEG_INF).to(gl.float32)
    return bias


@gluon.jit
def logits(
    s, bias, mask, p_mask_rows, slope, i, i_key, n_kv, factor, softcap, BLOCK_N: gl.constexpr, SOFTCAP: gl.constexpr,
    SEES: gl.constexpr,
):  # fmt: skip
    """Scores soft-capped, with the mask added; -inf where a key is hidden.

    SEES: "mask"; "", all keys; "position" and any of "causal", "window" and "alibi": what follows from the positions of
    keys and rows (p_mask_rows, see mask_rows).
    """
    if SOFTCAP:
        s = (softcap * LOG2E) * tanh(s * factor)
    if by_position(SEES):
        key = i * BLOCK_N + i_key
        _, _, window, first_key = mask
        seen = (key >= first_key) & (key < n_kv)
        if sees(SEES, "causal"):
            seen = seen & (key <= p_mask_rows)
        if sees(SEES, "window"):
            seen = seen & (key > p_mask_rows - window)
        if sees(SEES, "alibi"):
            s -= slope * gl.maximum(key - p_mask_rows, p_mask_rows - key).to(gl.float32)
        return gl.where(seen, s, NEG_INF)
    elif SEES == "mask":  # where the mask is -inf, so is the logit, whatever q.k is
        return gl.where(bias == NEG_INF, NEG_INF, s + slope * bias)
    else:
        return gl.where(i * BLOCK_N + i_key < n_kv, s, NEG_INF)


@gluon.jit
def softmax_step(s, m, factor, AXIS: gl.constexpr, SOFTCAP: gl.constexpr):
    """(weights, m, factor on earlier sums) of one k-block.

    m is in the units of s, so that the largest logit's weight is exactly 1, as forward.py has it.
    """
    m_new = gl.maximum(m, gl.max(s, AXIS))
    top = gl.where(m_new == NEG_INF, 0.0, m_new)  # a row may be all -inf so far
    if SOFTCAP:
        p = gl.exp2(s - gl.expand_dims(top, AXIS))
        alpha = gl.exp2(m - top)
    else:
        p = gl.exp2((s - gl.expand_dims(top, AXIS)) * factor)
        alpha = gl.exp2((m - top) * factor)
    return p, m_new, alpha


@gluon.jit
def query_rows(queries, row, i_group, PACK: gl.constexpr):
    """(tokens, offsets in the sequence's q) of a tile's rows."""
    _, sq_t, sq_h, row0, _, _ = queries
    token = (row0 + row) // PACK
    head = i_group * PACK + (row0 + row) % PACK
    return token, token.to(gl.int64) * sq_t + head.to(gl.int64) * sq_h


@gluon.jit
def copy_block(
    caches, visits, i, buffer, sk_n: gl.constexpr, sv_n: gl.constexpr, NW: gl.constexpr, D: gl.constexpr,
    K_KIND: gl.constexpr, V_KIND: gl.constexpr, BLOCK_N: gl.constexpr, SEES: gl.constexpr, PAGE: gl.constexpr,
    PDL: gl.constexpr, FULL: gl.constexpr,
):  # fmt: skip
    """Starts the copies of the i-th k-block of the list, as two groups: K, V. Empty ones if i is not below high.

    Of positions (see logits) i is the k-block itself; PAGE: keys of a page, 0 for keys that lie one after the other.
    FULL: how full k-blocks are copied: "masked", as others; "whole", by code of their own; "run", see copy_run: then
    K's group has V too.
    """
    ring_k, ring_v, p_kh, p_vh, where, n_kv = caches
    _, _, _, _, high = visits
    SKIP: gl.constexpr = "bits" if SEES == "mask" else "first" if by_position(SEES) else ""
    if i < high:
        i_kb = i
        hidden = i
        full = i < 0
        if SEES == "mask":
            p_list, run_first, run, n_full, _ = visits
            i_kb = block_of_run(p_list, i, run_first, run)
            hidden = seen_bits(where + i_kb * (BLOCK_N // 32), i >= n_full, NW)
        left = n_kv - i_kb * BLOCK_N
        row = first_row(i_kb, BLOCK_N).to(gl.int64)
        k_pages, v_pages = (), ()
        if by_position(SEES):
            first_key, p_table, max_blocks, n_pages, sk_p, sv_p = where
            hidden = first_key - i_kb * BLOCK_N
            full = (left >= BLOCK_N) & (hidden <= 0)
            if PAGE >= BLOCK_N:
                page = page_of(p_table, i_kb * BLOCK_N // PAGE, n_pages, max_blocks).to(gl.int64)
                row = (i_kb * BLOCK_N % PAGE).to(gl.int64)
                p_kb = p_kh + (page * sk_p + row * sk_n)
                p_vb = p_vh + (page * sv_p + row * sv_n)
            elif PAGE > 0:
                k_pages = (p_table, i_kb * (BLOCK_N // PAGE), max_blocks, n_pages, sk_p)
                v_pages = (p_table, i_kb * (BLOCK_N // PAGE), max_blocks, n_pages, sv_p)
                p_kb = p_kh
                p_vb = p_vh
            else:
                p_kb = p_kh + row * sk_n
                p_vb = p_vh + row * sv_n
        else:
            _, _, _, n_full, _ = visits
            full = i < n_full
            p_kb = p_kh + row * sk_n
            p_vb = p_vh + row * sv_n
            if FULL == "run":  # said here of operations of this function: what is said of an argument is lost
                p_kb = gl.multiple_of(p_kb, 16)
                p_vb = gl.multiple_of(p_vb, 16)
        SMALL: gl.constexpr = PAGE if PAGE < BLOCK_N else 0
        if FULL == "run" and full:
            # Triton has the warps meet between two copies to one ring: so once for both rings.
            for part in gl.static_range(2):
                copy_run(ring_k, p_kb, NW, D, K_KIND, part, buffer)
                copy_run(ring_v, p_vb, NW, D, V_KIND, part, buffer)
            async_copy.commit_group()
        elif FULL == "whole" and full:
            copy_tile(ring_k, p_kb, left, hidden, k_pages, sk_n, NW, D, K_KIND, False, SKIP, SMALL, buffer)
            async_copy.commit_group()
            copy_tile(ring_v, p_vb, left, hidden, v_pages, sv_n, NW, D, V_KIND, False, SKIP, SMALL, buffer)
        else:
            copy_tile(ring_k, p_kb, left, hidden, k_pages, sk_n, NW, D, K_KIND, True, SKIP, SMALL, buffer)
            async_copy.commit_group()
            copy_tile(ring_v, p_vb, left, hidden, v_pages, sv_n, NW, D, V_KIND, True, SKIP, SMALL, buffer)
    else:
        async_copy.commit_group()
        if PDL:
            gdc_launch_dependents()
    async_copy.commit_group()
