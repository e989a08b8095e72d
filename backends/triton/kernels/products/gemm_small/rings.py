"""Buffers in shared memory for planes and x of mma.py and wgmma.py, and the copies that fill them (Gluon)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from graphrt.backends.triton.kernels.common.gluon_layouts import axis_index
from graphrt.backends.triton.kernels.kinds import code_bits, has_supers, high_bits, pairs_of_supers
from graphrt.backends.triton.kernels.products.gemm_small.layouts import (
    pieces_copy,
    pieces_shared,
    rows_copy,
    rows_shared,
    scale_type,
    turned_shared,
)


@gluon.jit
def allocate_codes(
    KIND: gl.constexpr, ROWS: gl.constexpr, WK: gl.constexpr, STAGES: gl.constexpr, BY_WORD: gl.constexpr = False
):  # fmt: skip
    """Rings of (quants, high); quants stand for what a type lacks. BY_WORD: as words_layout has it."""
    E: gl.constexpr = code_bits(KIND)
    L: gl.constexpr = turned_shared(WK, ROWS, E) if BY_WORD else pieces_shared(WK, ROWS, E, 4)
    quants = gl.allocate_shared_memory(gl.int32, [STAGES, WK, ROWS, 4, E], L)
    high = quants
    if high_bits(KIND) > 0:
        H: gl.constexpr = high_bits(KIND)
        high = gl.allocate_shared_memory(gl.int32, [STAGES, WK, ROWS, 4, H], rows_shared([WK, ROWS, 4, H]))
    return quants, high


@gluon.jit
def allocate_planes(
    KIND: gl.constexpr, ROWS: gl.constexpr, WK: gl.constexpr, STAGES: gl.constexpr, BY_WORD: gl.constexpr = False
):  # fmt: skip
    """Rings of (quants, high, scales, supers); quants stand for what a type lacks."""
    quants, high = allocate_codes(KIND, ROWS, WK, STAGES, BY_WORD)
    supers = quants
    scales = gl.allocate_shared_memory(scale_type(KIND), [STAGES, WK, ROWS, 4], rows_shared([WK, ROWS, 4]))
    if has_supers(KIND):
        supers = gl.allocate_shared_memory(gl.int32, [STAGES, WK, ROWS], rows_shared([WK, ROWS]))
    return quants, high, scales, supers


@gluon.jit
def steps_of_codes(quants, high, KIND: gl.constexpr):
    """allocate_codes' rings of WK steps a buffer as rings of one step."""
    ROWS: gl.constexpr = quants.shape[2]
    N: gl.constexpr = quants.shape[0] * quants.shape[1]
    E: gl.constexpr = code_bits(KIND)
    H: gl.constexpr = high_bits(KIND)
    quants = quants._reinterpret(gl.int32, [N, 1, ROWS, 4, E], pieces_shared(1, ROWS, E, 4))
    if H > 0:
        high = high._reinterpret(gl.int32, [N, 1, ROWS, 4, H], rows_shared([1, ROWS, 4, H]))
    else:
        high = quants
    return quants, high


@gluon.jit
def steps_of(rings, KIND: gl.constexpr):
    """allocate_planes' rings of WK steps a buffer as rings of one step."""
    quants, high, scales, supers = rings
    ROWS: gl.constexpr = quants.shape[2]
    N: gl.constexpr = quants.shape[0] * quants.shape[1]
    quants, high = steps_of_codes(quants, high, KIND)
    scales = scales._reinterpret(scale_type(KIND), [N, 1, ROWS, 4], rows_shared([1, ROWS, 4]))
    if has_supers(KIND):
        supers = supers._reinterpret(gl.int32, [N, 1, ROWS], rows_shared([1, ROWS]))
    else:
        supers = quants
    return quants, high, scales, supers


@gluon.jit
def allocate_x(TOKENS: gl.constexpr, WK: gl.constexpr, STAGES: gl.constexpr):
    """Rings of x's first and second half groups."""
    x_low = gl.allocate_shared_memory(gl.float16, [STAGES, WK, TOKENS, 4, 16], pieces_shared(WK, TOKENS, 16, 8))
    x_top = gl.allocate_shared_memory(gl.float16, [STAGES, WK, TOKENS, 4, 16], pieces_shared(WK, TOKENS, 16, 8))
    return x_low, x_top


@gluon.jit
def rows_in_plane(p, p_up, offset, row, left, PAIR: gl.constexpr):
    """(a tile's rows in the plane of p, offset from the tile's first one on, as pointers, rows of it that there are)"""
    if PAIR:
        p = gl.where(row % 16 < 8, p + offset, p_up + offset)
    else:
        p = p + offset
    return p, gl.minimum(matrix_row(row, PAIR), left - 1)


@gluon.jit
def matrix_row(row, PAIR: gl.constexpr):
    """The row of its matrix that a row of a tile is, from the tile's first one on: with PAIR of 16 rows the first eight
    are a gate's and the others its up's, which thus are in the same lanes."""
    if PAIR:
        return row // 16 * 8 + row % 8
    else:
        return row


@gluon.jit
def copy_codes(
    rings, planes, planes_up, slot, step, n_groups, first_row, left, q_end,
    KIND: gl.constexpr, ROWS: gl.constexpr, WK: gl.constexpr, PAIR: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """Starts the copies of a step's quants and high into buffer `slot`. What is past q_end (in 128 elements of k), or
    unless EVEN past a row's n_groups, becomes 0."""
    W: gl.constexpr = gl.num_warps()
    E: gl.constexpr = code_bits(KIND)
    H: gl.constexpr = high_bits(KIND)
    base = first_row.to(gl.int64) * n_groups
    L: gl.constexpr = pieces_copy(WK, ROWS, E, 4, W)
    q = step * WK + axis_index(L, 4, 0, WK)
    group = q * 4 + axis_index(L, 4, 2, 4)
    p, row = rows_in_plane(planes[0], planes_up[0], base * E, axis_index(L, 4, 1, ROWS), left, PAIR)
    at = (row * n_groups + group) * E + axis_index(L, 4, 3, E)
    async_copy.async_copy_global_to_shared(rings[0].index(slot), p + at, q < q_end if EVEN else group < n_groups)
    if H > 0:
        LH: gl.constexpr = rows_copy([WK, ROWS, 4, H], 4, W)
        q = step * WK + axis_index(LH, 4, 0, WK)
        group = q * 4 + axis_index(LH, 4, 2, 4)
        p, row = rows_in_plane(planes[1], planes_up[1], base * H, axis_index(LH, 4, 1, ROWS), left, PAIR)
        at = (row * n_groups + group) * H + axis_index(LH, 4, 3, H)
        async_copy.async_copy_global_to_shared(rings[1].index(slot), p + at, q < q_end if EVEN else group < n_groups)


@gluon.jit
def copy_weights(
    rings, planes, planes_up, slot, step, k, first_row, left, q_end,
    KIND: gl.constexpr, ROWS: gl.constexpr, WK: gl.constexpr, PAIR: gl.constexpr,
):  # fmt: skip
    """Starts the copies of a step's planes into buffer `slot`. What is past q_end (in 128 elements of k) becomes 0.

    planes: pointers to int32 but for the scales, which are as wide as what a group has of them.
    """
    W: gl.constexpr = gl.num_warps()
    n_groups = k // 128 * 4  # so that the compiler knows what it is a multiple of
    first = step * WK
    copy_codes(rings, planes, planes_up, slot, step, n_groups, first_row, left, q_end, KIND, ROWS, WK, PAIR, True)
    LS: gl.constexpr = rows_copy([WK, ROWS, 4], 4, W)
    q = first + axis_index(LS, 3, 0, WK)
    base = first_row.to(gl.int64) * n_groups
    p, row = rows_in_plane(planes[2], planes_up[2], base, axis_index(LS, 3, 1, ROWS), left, PAIR)
    at = (row * n_groups + q * 4) + axis_index(LS, 3, 2, 4)
    async_copy.async_copy_global_to_shared(rings[2].index(slot), p + at, q < q_end)
    if has_supers(KIND):
        LU: gl.constexpr = rows_copy([WK, ROWS], 1, W)
        q = first + axis_index(LU, 2, 0, WK)
        p, row = rows_in_plane(planes[3], planes_up[3], 0, axis_index(LU, 2, 1, ROWS), left, PAIR)
        at = (first_row + row).to(gl.int64) * (k // 256) + q // 2
        if not pairs_of_supers(KIND):
            at = at // 2
        async_copy.async_copy_global_to_shared(rings[3].index(slot), p + at, q < q_end)


@gluon.jit
def copy_x(x_rings, p_x, slot, step, k, n, q_end, TOKENS: gl.constexpr, WK: gl.constexpr):
    """Starts the copies of a step's x, f16 [n, k]: of each group of 32 its two halves go to buffers of their own."""
    L: gl.constexpr = pieces_copy(WK, TOKENS, 16, 8, gl.num_warps())
    q = step * WK + axis_index(L, 4, 0, WK)
    token = gl.minimum(axis_index(L, 4, 1, TOKENS), n - 1)
    at = (token * (k // 32) + q * 4 + axis_index(L, 4, 2, 4)) * 32 + axis_index(L, 4, 3, 16)
    async_copy.async_copy_global_to_shared(x_rings[0].index(slot), p_x + at, q < q_end)
    async_copy.async_copy_global_to_shared(x_rings[1].index(slot), p_x + (at + 16), q < q_end)
