"""Many tokens times the matrices of their experts: tiles of one expert's pairs, weights dequantized on their way.

The arithmetic is products/gemm_small/portable.py's. Which pairs a tile has, and which expert's they are, pairs.py
found out on the device; the grid has as many tiles as there can be, and programs past the last one end at once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.context import View
from graphrt.backends.triton.device import Target
from graphrt.backends.triton.kernels.experts.pairs import Pairs, tile_of
from graphrt.backends.triton.kernels.products.gemm_small.configs import Config, find_config
from graphrt.backends.triton.kernels.products.gemm_small.portable import packed_sums, plain_sums
from graphrt.backends.triton.kernels.products.half import Activations
from graphrt.backends.triton.launch import Launch
from graphrt.backends.triton.packing import Packed


@triton.jit
def _pairs_of(p_sorted, start, stop, used, x_slots, TOKENS: tl.constexpr):
    """A tile's pairs, int64; their rows of x; which of the tile's columns are any."""
    place = start + tl.arange(0, TOKENS)
    m_pair = place < stop
    pair = tl.load(p_sorted + place, mask=m_pair, other=0).to(tl.int64)
    return pair, pair // used * x_slots + tl.minimum(pair % used, x_slots - 1), m_pair


@triton.jit
def _store(
    acc, p_out, p_factors, p_bias, bias_row, expert, inside, pair, x_row, m_pair, row, m, HAS_FACTORS: tl.constexpr
):  # fmt: skip
    """Sums [rows, pairs] times the factors of their rows of x, plus the expert's bias, to out [pair, row].

    NaN where the id is no expert's.
    """
    m_row = row < m
    if HAS_FACTORS:
        acc = acc * tl.load(p_factors + x_row, mask=m_pair, other=0.0)[None, :]
    if p_bias is not None:
        bias = tl.load(p_bias + expert.to(tl.int64) * bias_row + row, mask=m_row & inside, other=0.0)
        acc = acc + bias[:, None]
    acc = tl.where(inside, acc, float("nan"))
    tl.store(p_out + pair[None, :] * m + row[:, None], acc, mask=m_row[:, None] & m_pair[None, :])


_GENERAL = ("bias_row", "m", "k_steps", "n_expert", "used", "x_slots")


@accesses(reads="packed p_x p_factors p_bias p_first p_sorted", writes="p_out")
@triton.jit(do_not_specialize=_GENERAL)
def expert_gemm_packed(
    packed, p_x, p_factors, p_bias, bias_row, p_first, p_sorted, p_out,
    m, k, k_steps, n_expert, used, x_slots,
    KIND: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, STEP: tl.constexpr, SORTED: tl.constexpr,
    EVEN: tl.constexpr, HAS_FACTORS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Program (i, j): ROWS rows of the expert that tile j is of, times the tile's rows of x, to out f32 [pairs, m].

    x: f16 [tokens * x_slots, k]; packed: of all experts, m rows each; bias: f32 or None; STEP: groups of k a step;
    SORTED: as tile_of()'s GROUPS; the rest as gemm_packed.
    """
    expert, start, stop = tile_of(p_first, tl.program_id(1), n_expert, TOKENS, SORTED)
    if expert > n_expert:
        return
    inside = expert < n_expert
    pair, x_row, m_pair = _pairs_of(p_sorted, start, stop, used, x_slots, TOKENS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    matrix = tl.where(inside, expert, 0).to(tl.int64)
    acc = packed_sums(
        packed, matrix * m + tl.minimum(row, m - 1), p_x, x_row, k, 0, k_steps,
        KIND, STEP, EVEN, PTX,
    )  # fmt: skip
    _store(acc, p_out, p_factors, p_bias, bias_row, expert, inside, pair, x_row, m_pair, row, m, HAS_FACTORS)


@accesses(reads="p_w p_x p_factors p_bias p_first p_sorted", writes="p_out")
@triton.jit(do_not_specialize=_GENERAL)
def expert_gemm_plain(
    p_w, row_step, expert_step, p_x, p_factors, p_bias, bias_row, p_first, p_sorted, p_out,
    m, k, k_steps, n_expert, used, x_slots,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, STEP: tl.constexpr, SORTED: tl.constexpr, EVEN: tl.constexpr,
    HAS_FACTORS: tl.constexpr, WIDEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same for weights of f16, bf16 or f32, x of their type; STEP: elements of k. Strides are in elements."""
    expert, start, stop = tile_of(p_first, tl.program_id(1), n_expert, TOKENS, SORTED)
    if expert > n_expert:
        return
    inside = expert < n_expert
    pair, x_row, m_pair = _pairs_of(p_sorted, start, stop, used, x_slots, TOKENS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    p_w += tl.where(inside, expert, 0).to(tl.int64) * expert_step
    at = tl.minimum(row, m - 1).to(tl.int64) * row_step
    acc = plain_sums(p_w, at, p_x, x_row, k, 0, k_steps, STEP, EVEN, WIDEN, PRECISION)
    _store(acc, p_out, p_factors, p_bias, bias_row, expert, inside, pair, x_row, m_pair, row, m, HAS_FACTORS)


def expert_gemm(
    target: Target, weight: Packed | View, n_expert: int, x: Activations, pairs: Pairs, out: torch.Tensor,
    bias: torch.Tensor | None = None, config: Config | None = None,
) -> Launch:  # fmt: skip
    """Every pair's row of out, f32 [pairs, m]: its expert's matrix times its row of x, plus its bias.

    weight: all experts' packed rows, or a plain tensor [k, m, n_expert] whose rows' elements lie side by side, of x's
    type. x: as many rows as tokens or as pairs. bias: f32 [n_expert, m]. Rows of no expert are NaN.
    """
    m, kind = out.shape[1], weight.kind
    c = config or find_config(target.arch, kind, -(-pairs.count // n_expert))
    tokens = min(c.tokens, max(16, triton.next_power_of_2(-(-pairs.count // n_expert))))
    even = x.k % c.width == 0 and (x.k % 128 == 0 or not isinstance(weight, Packed))
    args: dict[str, Any] = {
        "p_x": x.values, "p_factors": pairs.first if x.factors is None else x.factors, "p_bias": bias,
        "bias_row": 0 if bias is None else bias.stride(0), "p_first": pairs.first, "p_sorted": pairs.sorted,
        "p_out": out, "m": m, "k": x.k, "k_steps": -(-x.k // c.width), "n_expert": n_expert,
        "used": pairs.used, "x_slots": x.rows * pairs.used // pairs.count, "ROWS": c.rows,
        "TOKENS": tokens, "SORTED": pairs.groups, "EVEN": even, "HAS_FACTORS": x.factors is not None,
    }  # fmt: skip
    if isinstance(weight, Packed):
        kernel, more = expert_gemm_packed, _packed_arguments(weight, target, c)
    else:
        kernel, more = expert_gemm_plain, _plain_arguments(weight, target, c)
    grid = (-(-m // c.rows), pairs.tiles(tokens))
    return Launch(kernel, grid, args | more, {"num_warps": c.warps, "num_stages": c.stages})


def _packed_arguments(w: Packed, target: Target, c: Config) -> dict[str, Any]:
    return {"packed": w.word_planes(), "KIND": w.kind, "STEP": c.width // 32, "PTX": target.is_nvidia}


def _plain_arguments(w: View, target: Target, c: Config) -> dict[str, Any]:
    exact = w.kind == "f32"
    return {
        "p_w": w.data, "row_step": w.strides[1], "expert_step": w.strides[2], "STEP": c.width,
        "WIDEN": exact or target.arch == "interpreter", "PRECISION": "ieee" if exact else "tf32",
    }  # fmt: skip
