"""Rounding f32 values to what a tensor stores: f16, bf16, floats of 8 bits, and ggml's blocks of 32 values.

The arithmetic is that of ggml's reference code (the `gguf` package has it too), operation by operation, so that equal
values give equal bytes. A launch that rounds to blocks needs the option `enable_fp_fusion=False`: a product and a sum
have a rounding each.

Memory is written in units of 2 bytes (see `stored`), but for floats of 8 bits: every block has a whole number of them
and starts on one.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from graphrt.backends.triton.context import View
from graphrt.backends.triton.device import Target
from graphrt.backends.triton.kernels.common.blocks import halves_a_block, is_quantized, values_at
from graphrt.backends.triton.kernels.common.float8 import float8_codes, is_float8
from graphrt.backends.triton.kernels.common.reduce import maximum, minimum
from graphrt.backends.triton.kernels.kinds import code_bits, code_offset, has_min, high_bits
from graphrt.backends.triton.launch import launch_options

#: Elements of a block.
BLOCK = 32


def stored(view: View) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """A tensor of a WRITABLE type or i32, with contiguous rows, as kernels write it: its memory and the strides of
    ne[1] to ne[3] in elements of that; int16 for bf16 and for blocks, uint8 for floats of 8 bits."""
    data, (_, s1, s2, s3) = view.data, view.strides
    if view.kind in ("f32", "f16", "i32") or view.tensor.dtype.is_float8:
        return data, (s1, s2, s3)
    unit = 2 // data.itemsize
    return data.view(torch.int16), (s1 // unit, s2 // unit, s3 // unit)


def writing_options(target: Target, warps: int, kind: str) -> dict[str, Any]:
    """How a kernel that writes values of a type is launched."""
    return launch_options(target, warps) | rounding_options(kind)


def rounding_options(*kinds: str) -> dict[str, Any]:
    """What a launch that writes values of these types needs: products that are rounded to blocks are not fused."""
    return {"enable_fp_fusion": False} if any(is_quantized(kind) for kind in kinds) else {}


@triton.jit
def bf16_bits(x):
    """The bits of f32 values rounded to bf16, to nearest even, as int16."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x == x, rounded, (bits >> 16) | 0x40).to(tl.int16)  # NaN keeps its sign and stays NaN


@triton.jit
def store_plain(p, x, mask, KIND: tl.constexpr):
    """Stores f32 values in the pointers' own type, as bf16 or as floats of 8 bits. p: pointers as `stored` has them."""
    if KIND == "bf16":
        tl.store(p, bf16_bits(x), mask=mask)
    elif is_float8(KIND):
        tl.store(p, float8_codes(x, KIND), mask=mask)
    else:
        tl.store(p, x.to(p.dtype.element_ty), mask=mask)


@triton.jit
def block_elements(KIND: tl.constexpr):
    """Which element of its block each slot of `store_blocks` holds: int32 [16, 2].

    A pair of slots is what lies in one 16-bit unit (codes of 8 bits) or in one byte.
    """
    i = tl.arange(0, 16)[:, None]
    j = tl.arange(0, 2)[None, :]
    if code_bits(KIND) == 8:
        return 2 * i + j
    else:
        return i + 16 * j


@triton.jit
def _over_block(x, MAX: tl.constexpr):
    """The largest or least of each block [n, 16, 2], NaN of a block that has one: [n, 1, 1]."""
    if MAX:
        y = maximum(maximum(x, 2), 1)
    else:
        y = minimum(minimum(x, 2), 1)
    return y[:, None, None]


@triton.jit
def _inverse(d):
    one = tl.full(d.shape, 1.0, tl.float32)
    return tl.where(d == 0.0, 0.0, tl.div_rn(one, tl.where(d == 0.0, one, d)))


@triton.jit
def _largest_with_sign(x, i_element):
    """Of each block the value of the largest magnitude; of two the one that comes first."""
    size = _over_block(tl.abs(x), True)
    positive = _over_block(tl.where(x == size, i_element, 32), False)
    negative = _over_block(tl.where(x == -size, i_element, 32), False)
    return tl.where(positive <= negative, size, -size)


@triton.jit
def block_codes(x, KIND: tl.constexpr):
    """(codes int32 [n, 16, 2], d f32 [n, 1, 1], m f32 [n, 1, 1]) of blocks x, f32 [n, 16, 2] by `block_elements`.

    A value is d * (code - code_offset(KIND)), or d * code + m where the type has a min; else m is 0.
    """
    m = tl.zeros([x.shape[0], 1, 1], tl.float32)
    if code_bits(KIND) == 8:
        d = tl.div_rn(_over_block(tl.abs(x), True), tl.full([x.shape[0], 1, 1], 127.0, tl.float32))
        y = x * _inverse(d)
        size = tl.abs(y)
        whole = tl.floor(size)
        rounded = whole + tl.floor(2.0 * (size - whole))  # halves go away from zero
        codes = tl.where(y < 0.0, -rounded, rounded).to(tl.int32)
    elif not has_min(KIND):
        MIDDLE: tl.constexpr = code_offset(KIND)
        d = _largest_with_sign(x, block_elements(KIND)[None, :, :]) * (-1.0 / MIDDLE)
        codes = (x * _inverse(d) + (MIDDLE + 0.5)).to(tl.int32)
        codes = tl.minimum(tl.maximum(codes, 0), 2 * MIDDLE - 1)
    else:
        LAST: tl.constexpr = (1 << (code_bits(KIND) + high_bits(KIND))) - 1
        m = _over_block(x, False)
        d = tl.div_rn(_over_block(x, True) - m, tl.full([x.shape[0], 1, 1], LAST, tl.float32))
        codes = ((x - m) * _inverse(d) + 0.5).to(tl.int32)
        codes = tl.minimum(tl.maximum(codes, 0), LAST)
    return codes, d, m


@triton.jit
def _f16_bits(x):
    return x.to(tl.float16).to(tl.int16, bitcast=True)


@triton.jit
def store_blocks(p_blocks, x, m_block, KIND: tl.constexpr):
    """Rounds and stores blocks. p_blocks: int16 pointers [n]; x: f32 [n, 16, 2] by `block_elements`; m_block: [n]."""
    N: tl.constexpr = x.shape[0]
    FIRST: tl.constexpr = values_at(KIND)
    codes, d, m = block_codes(x, KIND)
    tl.store(p_blocks, _f16_bits(tl.reshape(d, (N,))), mask=m_block)
    if has_min(KIND):
        tl.store(p_blocks + 1, _f16_bits(tl.reshape(m, (N,))), mask=m_block)
    if high_bits(KIND) != 0:
        fifth = ((codes >> 4) & 1) << block_elements(KIND)[None, :, :]
        high = tl.sum(tl.sum(fifth, 2), 1).to(tl.int32)
        tl.store(p_blocks + (FIRST - 2), high.to(tl.int16), mask=m_block)
        tl.store(p_blocks + (FIRST - 1), (high >> 16).to(tl.int16), mask=m_block)
    low, up = tl.split(codes)
    if code_bits(KIND) == 8:
        halves = (low & 255) | ((up & 255) << 8)
        i = tl.arange(0, 16)
    else:
        first, second = tl.split(tl.reshape((low & 15) | ((up & 15) << 4), (N, 8, 2)))
        halves = first | (second << 8)
        i = tl.arange(0, 8)
    tl.store(p_blocks[:, None] + FIRST + i[None, :], halves.to(tl.int16), mask=m_block[:, None])


@triton.jit
def store_part(p_in, s0, p_out, part, n, KIND: tl.constexpr, SIZE: tl.constexpr):
    """Rounds and stores elements part * SIZE to (part + 1) * SIZE - 1 of a row of n. SIZE: a power of two, from 32 on.

    p_in, p_out: the row's start; s0: its elements' stride. A row of blocks is a whole number of them.
    """
    if is_quantized(KIND):
        i_block = part * (SIZE // 32) + tl.arange(0, SIZE // 32)
        m_block = i_block < n // 32
        i = i_block[:, None, None] * 32 + block_elements(KIND)[None, :, :]
        x = tl.load(p_in + i.to(tl.int64) * s0, mask=m_block[:, None, None], other=0.0).to(tl.float32)
        store_blocks(p_out + i_block.to(tl.int64) * halves_a_block(KIND), x, m_block, KIND)
    elif KIND == "i32":
        i = part * SIZE + tl.arange(0, SIZE)
        tl.store(p_out + i, tl.load(p_in + i.to(tl.int64) * s0, mask=i < n), mask=i < n)
    else:
        i = part * SIZE + tl.arange(0, SIZE)
        x = tl.load(p_in + i.to(tl.int64) * s0, mask=i < n, other=0.0).to(tl.float32)
        store_plain(p_out + i, x, i < n, KIND)
