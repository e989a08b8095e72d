"""Launches of mma.py, and on Hopper of wgmma.py: which products they take, tiles, and how k is split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import triton

from graphrt.backends.triton.context import Context
from graphrt.backends.triton.device import Target
from graphrt.backends.triton.kernels.products.gemm_small import wgmma_launch
from graphrt.backends.triton.kernels.products.gemm_small.arguments import (
    REGISTERS,
    RESERVED,
    STEP,
    Split,
    arguments,
    row_bytes,
    tiles_of,
)
from graphrt.backends.triton.kernels.products.gemm_small.mma import batch_mma
from graphrt.backends.triton.kernels.products.gemm_small.wgmma_launch import HopperConfig
from graphrt.backends.triton.kernels.products.half import Activations, Gate
from graphrt.backends.triton.launch import Launch, launch_options
from graphrt.backends.triton.packing import PACKED_TYPES, Packed, packing_of

#: Types that it takes: codes of 4 and 8 bits.
KINDS = tuple(kind for kind in PACKED_TYPES if (p := packing_of(kind)) is not None and p.bits >= 4)
MAX_TOKENS = 64


@dataclass(frozen=True)
class BatchConfig:
    """rows: of a tile; wk: warps that share a step of k; warps: in all; stages: buffers of a step, at most.

    A warp has rows * wk / warps rows: 16 or 32, more would fill its registers. early: steps whose weights are asked for
    before what the launch before makes is there, stages - 1 at most. per_sm: programs that a multiprocessor shall hold,
    by registers and shared memory; as many are made by splits of k. least_steps: of a split.
    """

    rows: int
    wk: int
    warps: int
    stages: int
    early: int = 2
    per_sm: int = 1
    least_steps: int = 2

    @property
    def step(self) -> int:
        """Elements of k of a step."""
        return self.wk * STEP

    @property
    def counters(self) -> int:
        """Of a tile that is split."""
        return 1


#: By number of tokens. Measured on an H100.
_CONFIGS = {
    16: BatchConfig(128, 2, 8, 2, early=1, per_sm=2), 32: BatchConfig(128, 2, 8, 2, early=1),
    64: BatchConfig(128, 2, 8, 3),
}  # fmt: skip


def padded_tokens(n: int) -> int:
    """Tokens of a tile that holds n."""
    return max(16, 1 << (n - 1).bit_length())


def stage_bytes(kind: str, rows: int, tokens: int, wk: int) -> int:
    """Shared memory of a step's planes and x."""
    return wk * (rows * row_bytes(kind) + tokens * 2 * STEP)


def fitted(config: BatchConfig, shared_memory: int, stage_bytes_of: Callable[[BatchConfig], int]) -> BatchConfig | None:
    """A config that shared memory has room for: with fewer programs at a time, fewer stages (two at least) or fewer
    warps, in this order. None: no way."""
    while True:
        room = (shared_memory - (config.per_sm - 1) * RESERVED) // config.per_sm
        stages = room // stage_bytes_of(config)
        if config.per_sm > 1 and stages < config.stages:
            config = replace(config, per_sm=1)
        elif stages >= 2:
            return replace(config, stages=min(config.stages, stages))
        elif config.wk > 1 and config.warps > 1:
            config = replace(config, wk=config.wk // 2, warps=config.warps // 2)
        else:
            return None


def config_for(target: Target, kind: str, n: int) -> BatchConfig | None:
    """The config for n tokens."""
    tokens = padded_tokens(n)
    return fitted(_CONFIGS[tokens], target.shared_memory, lambda c: stage_bytes(kind, c.rows, tokens, c.wk))


def has_whole_steps(kind: str, k: int) -> bool:
    """Whether it is one of KINDS and rows of k elements are whole steps of mma.py and wgmma.py."""
    packing = packing_of(kind)
    return kind in KINDS and packing is not None and k % (256 if packing.supers else STEP) == 0


def fits(kind: str, k: int, n: int, target: Target) -> bool:
    """Whether a product of n tokens with weights of a type and rows of k elements can take mma.py."""
    if not target.is_nvidia or not has_whole_steps(kind, k) or not 1 <= n <= MAX_TOKENS:
        return False
    return config_for(target, kind, n) is not None


def aligned(w: Packed) -> bool:
    """Whether the planes of weights begin where copies can; those of a part of a matrix may not."""
    planes = (w.quants, w.high, w.scales)
    if any(p is not None and p.data_ptr() % 16 for p in planes):
        return False
    return w.supers is None or w.supers.data_ptr() % 4 == 0


def splits_of(target: Target, config: BatchConfig | HopperConfig, tiles: int, k: int) -> tuple[int, int]:
    """(ranges that k is split into, steps of a range), none of them empty."""
    steps = triton.cdiv(k, config.step)
    splits = max(1, min(target.sm_count * config.per_sm // tiles, steps // config.least_steps))
    each = triton.cdiv(steps, splits)
    return triton.cdiv(steps, each), each


def has_wgmma_config(target: Target, kind: str, k: int, n: int) -> bool:
    """Whether wgmma.py has a config for a product of up to wgmma_launch.MAX_TOKENS."""
    return wgmma_launch.config_for(target, kind, padded_tokens(n), 1, k) is not None


def product(
    weights: Sequence[Packed], x: Activations, outs: Sequence[torch.Tensor], ctx: Context,
    biases: Sequence[torch.Tensor] = (), residual: torch.Tensor | None = None, gate: Gate | None = None,
    config: BatchConfig | HopperConfig | None = None,
) -> Launch:  # fmt: skip
    """x times weights that mma.py or wgmma.py takes, which aligned() is true of, in one launch: of one type, up to
    MAX_SEGMENTS; with a gate two of one size.

    outs: f32 [n, m] of each, or one with a gate. biases: f32 [m] of each, or none. residual: f32 like the only out,
    which it may be. x: ordered for wgmma.py, else in order of k for mma.py.
    """
    kind, m = weights[0].kind, sum(w.rows for w in weights)
    if config is None and x.ordered:
        config = wgmma_launch.config_for(ctx.target, kind, padded_tokens(x.rows), m, x.k)
    elif config is None:
        config = config_for(ctx.target, kind, x.rows)
    assert config is not None
    tiles = tiles_of(weights, config.rows, gate)
    split = split_of(tiles, splits_of(ctx.target, config, tiles, x.k), config, padded_tokens(x.rows), ctx)
    if isinstance(config, HopperConfig):
        tokens = padded_tokens(x.rows)
        return wgmma_launch.launch(ctx.target, weights, x, outs, config, tokens, biases, residual, gate, split)
    return launch(ctx.target, weights, x, outs, config, biases, residual, gate, split)


def split_of(
    tiles: int, ranges: tuple[int, int], config: BatchConfig | HopperConfig, tokens: int, ctx: Context
) -> Split | None:
    """Memory for the parts of tiles and a counter for each warpgroup's, if there is more than one range."""
    if ranges[0] == 1:
        return None
    nbytes = ranges[0] * tiles * config.rows * tokens * 4
    parts = ctx.shared_scratch("parts of tiles", nbytes)[:nbytes].view(torch.float32)
    counters = tiles * config.counters
    counter = ctx.shared.get("counters of tiles")
    if counter is None or counter.numel() < counters:
        counter = torch.zeros(max(1024, counters), dtype=torch.int32, device=ctx.target.device)
        ctx.shared["counters of tiles"] = counter
    return Split(*ranges, parts, counter)


def launch(
    target: Target, weights: Sequence[Packed], x: Activations, outs: Sequence[torch.Tensor], config: BatchConfig,
    biases: Sequence[torch.Tensor] = (), residual: torch.Tensor | None = None, gate: Gate | None = None,
    split: Split | None = None,
) -> Launch:  # fmt: skip
    """As product(), with k split as it is told."""
    assert residual is None or len(weights) == 1
    assert not biases or (gate is None and len(biases) == len(weights))
    ranges = split.ranges if split else 1
    args = arguments(weights, x, outs, biases, residual, split, triton.cdiv(x.k, config.step))
    args |= {
        "p_x": x.values, "KIND": weights[0].kind, "ROWS": config.rows, "TOKENS": padded_tokens(x.rows), "WK": config.wk,
        "STAGES": config.stages, "EARLY": min(config.early, config.stages - 1), "SEGMENTS": 1 if gate else len(weights),
        "GLU": gate.kind if gate else "", "SPLIT": ranges > 1, "HAS_FACTORS": x.factors is not None,
        "HAS_BIAS": bool(biases), "HAS_RESIDUAL": residual is not None, "PDL": target.has_pdl,
    }  # fmt: skip
    grid = (tiles_of(weights, config.rows, gate) * ranges,)
    options = launch_options(target, config.warps)
    # Also where all registers are free: else the compiler may aim at more programs, and spill for them.
    options["maxnreg"] = min(255, REGISTERS // (config.per_sm * config.warps * 32))
    return Launch(batch_mma, grid, args, options)
