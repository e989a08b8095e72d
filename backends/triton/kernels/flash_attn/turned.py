"""V of 8-bit floats laid out anew for hopper/fp8.py: along the keys, in the order in which softmax weights lie."""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses

#: Keys of one program, and what their number is rounded up to.
BLOCK = 128


@triton.jit
def key_of_slot(slot):
    """Which key of its 16 a slot holds: a thread's four neighbouring slots are keys 2t, 2t + 1, 2t + 8 and 2t + 9."""
    return slot // 16 * 16 + slot // 4 % 4 * 2 + slot % 2 + slot // 2 % 2 * 8


@accesses(reads="p_v", writes="p_turned")
@triton.jit(do_not_specialize=["n_kv", "n_head"])
def turn_values(p_v, p_turned, sv_n, sv_h, sv_s, n_kv, n_head, D: tl.constexpr, BLOCK: tl.constexpr):
    """A block of keys of one head. p_v: uint8 [n_seq, n_head, n_kv, D] by strides sv_s, sv_h, sv_n; p_turned: uint8
    [n_seq, n_head, D, blocks * BLOCK], written, 0 past the last key."""
    i_block = tl.program_id(0)
    i_head = tl.program_id(1)
    slot = tl.arange(0, BLOCK)
    key = i_block * BLOCK + key_of_slot(slot)
    i_d = tl.arange(0, D)
    seq = (i_head // n_head).to(tl.int64)
    p_head = p_v + seq * sv_s + (i_head % n_head).to(tl.int64) * sv_h
    codes = tl.load(
        p_head + key.to(tl.int64)[:, None] * sv_n + i_d[None, :],
        mask=(key < n_kv)[:, None] & (i_d < D)[None, :],
        other=0,
    )
    row = (i_head.to(tl.int64) * D + i_d) * (tl.num_programs(0) * BLOCK) + i_block * BLOCK
    tl.store(p_turned + row[:, None] + slot[None, :], tl.trans(codes))
