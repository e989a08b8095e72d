"""Launches of portable.py's kernels: which tiles, and how k is split."""

from __future__ import annotations

from typing import Any

import torch
import triton

from graphrt.backends.triton.context import Context, Step, View
from graphrt.backends.triton.device import Target
from graphrt.backends.triton.kernels.products.broadcast import Broadcast
from graphrt.backends.triton.kernels.products.gemm_small.configs import Config, find_config
from graphrt.backends.triton.kernels.products.gemm_small.portable import gemm_packed, gemm_plain
from graphrt.backends.triton.kernels.products.half import Activations, Sums
from graphrt.backends.triton.launch import Launch
from graphrt.backends.triton.packing import Packed


def splits_of(target: Target, config: Config, tiles: int, k_steps: int) -> int:
    """Into how many ranges k is split: as many as make enough programs, none of them very short."""
    most = max(1, k_steps // config.least_steps)
    return max(1, min(target.sm_count * config.per_sm // tiles, most, config.most_splits))


def packed_product(
    packed: Packed, m: int, x: Activations, batch: Broadcast, out: torch.Tensor, bias: torch.Tensor | None,
    residual: torch.Tensor | None, ctx: Context, place: int = 0, config: Config | None = None,
) -> tuple[Sums, list[Step]]:  # fmt: skip
    """x times packed matrices of m rows each.

    out: f32 [batches * tokens, m]; bias: f32 [m] or None; residual: like out, contiguous, or None. place: products of
    different places may be unfinished at the same time.
    """
    config = config or find_config(ctx.target.arch, packed.kind, batch.tokens)
    even = packed.k % config.width == 0 and packed.k % 128 == 0
    args = {
        "packed": packed.word_planes(),
        "KIND": packed.kind,
        "GROUPS": config.width // 32,
        "PTX": ctx.target.is_nvidia,
    }
    return _launch(gemm_packed, args, m, packed.k, x, batch, out, bias, residual, ctx, place, config, even)


def plain_product(
    w: View, x: Activations, batch: Broadcast, out: torch.Tensor, bias: torch.Tensor | None,
    residual: torch.Tensor | None, ctx: Context, place: int = 0, config: Config | None = None,
) -> tuple[Sums, list[Step]]:  # fmt: skip
    """x times matrices of f16, bf16 or f32 with contiguous rows, in x's type; else as packed_product."""
    config = config or find_config(ctx.target.arch, w.kind, batch.tokens)
    k, m = w.ne[:2]
    exact = w.kind == "f32"
    args: dict[str, Any] = {
        "p_w": w.data, "row_stride": w.strides[1], "stride2": w.strides[2], "stride3": w.strides[3],
        "WIDTH": config.width, "WIDEN": exact or ctx.target.arch == "interpreter",
        "PRECISION": "ieee" if exact else "tf32",
    }  # fmt: skip
    return _launch(gemm_plain, args, m, k, x, batch, out, bias, residual, ctx, place, config, k % config.width == 0)


def _launch(
    kernel: Any, args: dict[str, Any], m: int, k: int, x: Activations, batch: Broadcast, out: torch.Tensor,
    bias: torch.Tensor | None, residual: torch.Tensor | None, ctx: Context, place: int, config: Config, even: bool,
) -> tuple[Sums, list[Step]]:  # fmt: skip
    """The launch of either kernel, its k split where tiles are few."""
    tokens = min(config.tokens, max(16, triton.next_power_of_2(batch.tokens)))
    tiles, token_tiles = triton.cdiv(m, config.rows), triton.cdiv(batch.tokens, tokens)
    k_steps = triton.cdiv(k, config.width)
    splits = splits_of(ctx.target, config, tiles * token_tiles * batch.count, k_steps)
    steps_a_split = triton.cdiv(k_steps, splits)
    splits = triton.cdiv(k_steps, steps_a_split)  # none of them empty
    sums = out.view(1, *out.shape)
    if splits > 1:
        nbytes = splits * out.numel() * 4
        memory = ctx.shared_scratch(f"parts of sums {place}", nbytes)[:nbytes]
        sums = memory.view(torch.float32).view(splits, *out.shape)
    complete = splits == 1
    args |= {
        "p_x": x.values, "p_factors": sums if x.factors is None else x.factors,
        "p_bias": sums if bias is None else bias, "p_residual": sums if residual is None else residual,
        "p_out": sums, "m": m, "n": batch.tokens, "n_batch": batch.count, "n_a2": batch.matrices2,
        "ratio3": batch.ratio3, "k": k, "k_steps": k_steps, "steps_a_split": steps_a_split, "n_splits": splits,
        "ROWS": config.rows, "TOKENS": tokens, "EVEN": even,
        "SPLIT": splits > 1, "HAS_FACTORS": complete and x.factors is not None,
        "HAS_BIAS": complete and bias is not None, "HAS_RESIDUAL": complete and residual is not None,
    }  # fmt: skip
    options = {"num_warps": config.warps, "num_stages": config.stages}
    launch = Launch(kernel, (tiles, token_tiles * splits, batch.count), args, options)
    return Sums(sums, None if complete else x.factors, complete), [launch]
