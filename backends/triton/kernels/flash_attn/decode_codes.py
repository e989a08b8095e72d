"""Scores of K's codes alone, for decode_thin.py's loop: a block's scale multiplies what its 32 codes have summed up.

A code becomes an f16 number by a bit trick that adds a constant to it. Neither that constant nor the scale is taken
care of code by code: the constant's share of a block's product depends on the query alone and is what the product's
sum starts from, with the sign turned; the scale is one factor for each score of a block. That takes 3 instructions for
4 codes of q8_0, where d * code takes 7, and the blocks' products do not wait for each other.

Axes and names are decode.py's.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from graphrt.backends.triton.kernels.common.blocks import words_a_block
from graphrt.backends.triton.kernels.common.gluon_layouts import axis_index
from graphrt.backends.triton.kernels.flash_attn.decode_layouts import (
    THIN_ROWS,
    has_bytes,
    key_words_layout,
    mma_layout,
    query_layout,
)
from graphrt.backends.triton.kernels.flash_attn.decode_operands import load_q, load_rows_of_blocks, whole_words
from graphrt.backends.triton.kernels.flash_attn.decode_pieces import query_rows


@gluon.jit
def code_queries(
    queries, i_group, NW: gl.constexpr, D: gl.constexpr, KIND: gl.constexpr, PACK: gl.constexpr
):  # fmt: skip
    """(Q of each block as load_q has it; what each block's products start from, f32 [W, 16, 8], all rows the same)."""
    W: gl.constexpr = gl.num_warps()
    J: gl.constexpr = words_a_block(KIND)
    MMA: gl.constexpr = mma_layout(W)
    L: gl.constexpr = gl.SliceLayout(2, key_words_layout(32, 16, W, KIND))
    p_q, _, _, _, n_q, sign = queries
    token, p_row = query_rows(
        queries, axis_index(query_layout(32, W, KIND, THIN_ROWS), 3, 1, THIN_ROWS), i_group, PACK
    )  # fmt: skip
    # Codes that are all zero sum up the constant's share, the same for all keys.
    zero = axis_index(L, 3, 0, W) * 0 + axis_index(L, 3, 1, 16) * 0 + axis_index(L, 3, 2, J) * 0
    nothing = codes_of(zero + (0 if has_bytes(KIND) else -0x77777778), 16, KIND)
    none = gl.full([W, 16, THIN_ROWS], 0.0, gl.float32, layout=MMA)
    q = ()
    starts = ()
    for first in gl.static_range(0, D, 32):
        of_block = load_q(p_q, p_row, token < n_q, sign, 32, KIND, gl.float16, True, first)
        q = q + (of_block,)  # noqa: RUF005
        starts = starts + (0.0 - mma_v2(nothing, of_block, none),)  # noqa: RUF005
    return q, starts


@gluon.jit
def code_scores(
    ring, slot, q, starts, NW: gl.constexpr, D: gl.constexpr, KIND: gl.constexpr, STRIDE: gl.constexpr
):  # fmt: skip
    """K Q^T of a k-block, f32 [W, NW, 8]."""
    W: gl.constexpr = gl.num_warps()
    MMA: gl.constexpr = mma_layout(W)
    L: gl.constexpr = key_words_layout(D, NW, W, KIND)
    words, heads = load_rows_of_blocks(ring, slot, NW, D, KIND, STRIDE, False, L)
    words = whole_words(words, gl.expand_dims(heads, 3), L, D // 32, words_a_block(KIND))
    words = in_blocks(words)
    heads = in_blocks(gl.expand_dims(heads, 3))
    s = gl.full([W, NW, THIN_ROWS], 0.0, gl.float32, layout=MMA)
    for block in gl.static_range(D // 32):
        scores = mma_v2(codes_of(words[block], NW, KIND), q[block], for_keys(starts[block], NW))
        d = gl.convert_layout(scale_of(heads[block], block % 2), MMA, assert_trivial=True)
        if block == 0:
            s = scores * d
        else:
            s += scores * d
    return s


@gluon.jit
def for_keys(start, NW: gl.constexpr):
    """What 16 keys start from for NW keys, in the same registers."""
    W: gl.constexpr = start.shape[0]
    if start.shape[1] == NW:
        return gl.convert_layout(start, mma_layout(W), assert_trivial=True)
    else:
        pair = gl.permute(gl.join(start, start), (0, 3, 1, 2))
        return for_keys(gl.reshape(pair, [W, 2 * start.shape[1], THIN_ROWS]), NW)


@gluon.jit
def in_blocks(x):
    """[W, NW, NB, n] cut into what the blocks have, [W, NW, n] each."""
    W: gl.constexpr = x.shape[0]
    NW: gl.constexpr = x.shape[1]
    NB: gl.constexpr = x.shape[2]
    N: gl.constexpr = x.shape[3]
    if NB == 1:
        return (gl.reshape(x, [W, NW, N]),)
    else:
        pairs = gl.permute(gl.reshape(x, [W, NW, 2, NB // 2, N]), (0, 1, 3, 4, 2))
        low, high = gl.split(pairs)
        return in_blocks(low) + in_blocks(high)


@gluon.jit
def scale_of(heads, ODD: gl.constexpr):
    """Blocks' d, f32, out of their heads: the low half, of odd blocks the high one."""
    if ODD:
        return half_of(heads, "cvt.f32.f16 $0, b;")
    else:
        return half_of(heads, "cvt.f32.f16 $0, a;")


@gluon.jit
def half_of(words, CONVERT: gl.constexpr):
    SOURCE: gl.constexpr = "{ .reg .b16 a, b; mov.b32 {a, b}, $1; " + CONVERT + " }"
    return gl.inline_asm_elementwise(SOURCE, "=f,r", [words], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def codes_of(words, NW: gl.constexpr, KIND: gl.constexpr):
    """Codes of a block, [W, NW, J] words, and a constant, as the first operand of K Q^T: [W, NW, 32]. The constant is
    1152 for codes of q8_0; for q4_0's low and high nibbles 1032 and 72."""
    W: gl.constexpr = gl.num_warps()
    if has_bytes(KIND):
        a, b, c, d = bytes_and_1152(words)
        x = gl.join(gl.join(a, c), gl.join(b, d))
        x = gl.reshape(x, [W, NW, 2, 4, 2, 2])  # step, t, b1, b0
        x = gl.permute(x, (0, 1, 2, 4, 3, 5))
    else:
        a, a1, b, b1, c, c1, d, d1 = nibbles_and_some(words)
        x = gl.join(gl.join(gl.join(a, c), gl.join(b, d)), gl.join(gl.join(a1, c1), gl.join(b1, d1)))
        x = gl.permute(x, (0, 1, 4, 5, 2, 3))  # of [W, NW, t, b1, b0, half]
    x = gl.reshape(x, [W, NW, 32])
    return gl.convert_layout(x, gl.DotOperandLayout(0, mma_layout(W), 2), assert_trivial=True)


@gluon.jit
def bytes_and_1152(words):
    """Four f16 of each word of four int8, plus 1152."""
    # A byte b under the exponent of 1024 is the f16 number 1024 + b; with its sign bit turned, 1152 + int8.
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 x, t<2>;
        xor.b32 x, $4, 0x80808080;
        prmt.b32 t0, x, 0x64646464, 0x4140;
        prmt.b32 t1, x, 0x64646464, 0x4342;
        mov.b32 {$0, $1}, t0;
        mov.b32 {$2, $3}, t1;
        }
        """,
        "=h,=h,=h,=h,r", [words], dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def nibbles_and_some(words):
    """Eight f16 of each word of eight 4-bit numbers n, low and high nibble of bytes 0, 1, 2, 3: 1024 + n and 64 + n."""
    # The low four bits of a mantissa are units under the exponent of 1024, the next four under that of 64.
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 x, t<4>, low, high;
        mov.b32 low, 0x64006400;
        mov.b32 high, 0x54005400;
        shr.u32 x, $8, 8;
        lop3.b32 t0, $8, 0x000F000F, low, 0xEA;
        lop3.b32 t1, $8, 0x00F000F0, high, 0xEA;
        lop3.b32 t2, x, 0x000F000F, low, 0xEA;
        lop3.b32 t3, x, 0x00F000F0, high, 0xEA;
        mov.b32 {$0, $4}, t0;
        mov.b32 {$1, $5}, t1;
        mov.b32 {$2, $6}, t2;
        mov.b32 {$3, $7}, t3;
        }
        """,
        "=h,=h,=h,=h,=h,=h,=h,=h,r", [words],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True, pack=1,
    )  # fmt: skip
