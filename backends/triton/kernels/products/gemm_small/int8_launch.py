"""Launches of int8.py: which products it takes, its tiles, and how k is split."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton

from graphrt.backends.triton.context import Context
from graphrt.backends.triton.device import Target
from graphrt.backends.triton.kernels.products.activations import Q8Rows, parts_of
from graphrt.backends.triton.kernels.products.gemm_small.arguments import (
    REGISTERS,
    STEP,
    Split,
    arguments,
    row_bytes,
    tiles_of,
)
from graphrt.backends.triton.kernels.products.gemm_small.int8 import batch_int8
from graphrt.backends.triton.kernels.products.gemm_small.mma_launch import (
    BatchConfig,
    fitted,
    split_of,
    splits_of,
)
from graphrt.backends.triton.kernels.products.half import Gate
from graphrt.backends.triton.launch import Launch, launch_options
from graphrt.backends.triton.packing import Packed, packing_of

#: Tokens that it takes: one is gemv.py's, of more f16 in wgmma.py costs less.
MIN_TOKENS, MAX_TOKENS = 2, 16

#: By tokens of a tile: 16 leave registers for 16 rows a warp.
_CONFIGS = {8: BatchConfig(128, 2, 8, 3, per_sm=2), 16: BatchConfig(64, 2, 8, 3, per_sm=2)}


def tile_tokens(n: int) -> int:
    """Tokens of a tile that holds n."""
    return 8 if n <= 8 else 16


def stage_bytes(kind: str, rows: int, n: int, k: int, wk: int) -> int:
    """Shared memory of a step's planes and x."""
    packing = packing_of(kind)
    assert packing is not None
    numbers = 4 * (3 if packing.has_min else 1) * STEP // 32
    return wk * (rows * row_bytes(kind) + tile_tokens(n) * (parts_of(k) * STEP + numbers))


def config_for(target: Target, kind: str, n: int, k: int) -> BatchConfig | None:
    """The config for n tokens and rows of k elements; None: no way."""
    return fitted(_CONFIGS[tile_tokens(n)], target.shared_memory, lambda c: stage_bytes(kind, c.rows, n, k, c.wk))


def product(
    weights: Sequence[Packed], x: Q8Rows, outs: Sequence[torch.Tensor], ctx: Context,
    biases: Sequence[torch.Tensor] = (), residual: torch.Tensor | None = None, gate: Gate | None = None,
    config: BatchConfig | None = None,
) -> Launch:  # fmt: skip
    """As mma_launch.product(), of x in 8 bits."""
    config = config or config_for(ctx.target, weights[0].kind, x.n, x.k)
    assert config is not None
    tiles = tiles_of(weights, config.rows, gate)
    split = split_of(tiles, splits_of(ctx.target, config, tiles, x.k), config, tile_tokens(x.n), ctx)
    return launch(ctx.target, weights, x, outs, config, biases, residual, gate, split)


def launch(
    target: Target, weights: Sequence[Packed], x: Q8Rows, outs: Sequence[torch.Tensor], config: BatchConfig,
    biases: Sequence[torch.Tensor] = (), residual: torch.Tensor | None = None, gate: Gate | None = None,
    split: Split | None = None,
) -> Launch:  # fmt: skip
    """As product(), with k split as it is told."""
    assert residual is None or len(weights) == 1
    assert not biases or (gate is None and len(biases) == len(weights))
    ranges = split.ranges if split else 1
    args = arguments(weights, x, outs, biases, residual, split, triton.cdiv(x.k, config.step))
    args |= {
        "p_q": x.q.view(torch.int32), "p_d": x.d, "p_s": x.s, "KIND": weights[0].kind, "ROWS": config.rows,
        "TOKENS": tile_tokens(x.n), "PARTS": x.parts, "WK": config.wk, "STAGES": config.stages,
        "EARLY": min(config.early, config.stages - 1), "SEGMENTS": 1 if gate else len(weights),
        "GLU": gate.kind if gate else "", "SPLIT": ranges > 1, "HAS_BIAS": bool(biases),
        "HAS_RESIDUAL": residual is not None, "PDL": target.has_pdl,
    }  # fmt: skip
    grid = (tiles_of(weights, config.rows, gate) * ranges,)
    options = launch_options(target, config.warps)
    options["maxnreg"] = min(255, REGISTERS // (config.per_sm * config.warps * 32))
    return Launch(batch_int8, grid, args, options)
