"""Launches of wgmma.py: its configs, and what of shared memory and registers they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from graphrt.backends.triton.device import Target
from graphrt.backends.triton.kernels.products.gemm_small.arguments import (
    REGISTERS,
    RESERVED,
    STEP,
    Split,
    arguments,
    row_bytes,
    tiles_of,
)
from graphrt.backends.triton.kernels.products.gemm_small.results import MOST_SHARES
from graphrt.backends.triton.kernels.products.gemm_small.wgmma import Form, x_shared
from graphrt.backends.triton.kernels.products.gemm_small.wgmma import batch_wgmma as kernel
from graphrt.backends.triton.kernels.products.half import Activations, Gate
from graphrt.backends.triton.launch import Launch, launch_options
from graphrt.backends.triton.packing import Packed, packing_of

#: Tokens of a tile, at most: wgmma's second operand has no more columns.
MAX_TOKENS = 256
#: Rows of a warpgroup; registers of a thread of the producer.
ROWS, PRODUCER = 64, 72
#: Rows of up to so many elements are multiplied with 64 tokens by one warpgroup a program, if every tile of
#: 64 rows has a multiprocessor and k is split in two at most: two warpgroups would make more parts to add up.
SHORT = 8192
#: The producer's where the warpgroups have few. With a gate it has twice the pointers and needs them.
SPARING = 64


@dataclass(frozen=True)
class HopperConfig:
    """warpgroups: 1, 2 or 4, beside the producer; chunk: steps of a buffer of planes; stages: such buffers, at most;
    x_stages: buffers of a step's x; per_sm: as in mma_launch.BatchConfig."""

    warpgroups: int
    chunk: int
    stages: int
    x_stages: int
    per_sm: int = 1

    @property
    def rows(self) -> int:
        return self.warpgroups * ROWS

    @property
    def step(self) -> int:
        """Elements of k of a chunk."""
        return self.chunk * STEP

    @property
    def least_steps(self) -> int:
        """Chunks of a split of k, at least."""
        return 4 // self.chunk

    @property
    def counters(self) -> int:
        """Of a tile that is split: each warpgroup has its own, two where all programs add up parts."""
        return 2 * self.warpgroups


#: Configs for tiles of more than 64 tokens, in the order in which they are tried. There wgmma takes longer than weights
#: take to come: their chunks may be short, and x, whose steps are large, gets the shared memory.
_MANY: dict[int, tuple[HopperConfig, ...]] = {
    128: (HopperConfig(2, 2, 4, 4), HopperConfig(2, 1, 4, 3)),
    256: (HopperConfig(2, 1, 4, 3), HopperConfig(2, 1, 4, 2)),
}  # fmt: skip


def chunk_bytes(kind: str, config: HopperConfig) -> int:
    """Shared memory of a chunk's planes and their barriers."""
    return config.rows * row_bytes(kind) * config.chunk + 16


def fitted(config: HopperConfig, kind: str, tokens: int, shared_memory: int) -> HopperConfig | None:
    """A config with as many stages as shared memory has room for, two at least; else with smaller chunks, or None."""
    room = (shared_memory - (config.per_sm - 1) * RESERVED) // config.per_sm - 1024
    room -= config.x_stages * (tokens * 2 * STEP + 16)
    stages = min(config.stages, room // chunk_bytes(kind, config))
    if stages >= 2:
        return replace(config, stages=stages)
    if config.chunk > 1:
        return fitted(replace(config, chunk=config.chunk // 2), kind, tokens, shared_memory)
    return None


def config_for(target: Target, kind: str, tokens: int, m: int, k: int) -> HopperConfig | None:
    """The config for tiles of so many tokens, m rows in all of k elements; None: no way. Measured on an H100, of 64
    tokens and more on an H200."""
    packing = packing_of(kind)
    assert packing is not None
    if tokens > 64:
        many = _MANY[tokens]
        if tokens == 256 and -(-m // many[0].rows) > target.sm_count:
            many = (HopperConfig(2, 2, 2, 2), *many)
        tried = (fitted(config, kind, tokens, target.shared_memory) for config in many)
        return next((config for config in tried if config is not None), None)
    chunk = next(c for c in (4, 2, 1) if c == 1 or k % (c * STEP) == 0)
    config = HopperConfig(2, chunk, 16 // chunk, 6)
    if -(-m // config.rows) > target.sm_count and not packing.high_bits:  # which take registers that aren't there
        if tokens <= 32:
            config = HopperConfig(2, chunk, 8 // chunk, 4, per_sm=2)
        else:
            config = HopperConfig(4, chunk, 8 // chunk, 4)
    elif tokens == 64 and k <= SHORT and not packing.high_bits:
        tiles = -(-m // ROWS)
        if target.sm_count // 3 < tiles <= target.sm_count:
            config = HopperConfig(1, chunk, 16 // chunk, 6)
    return fitted(config, kind, tokens, target.shared_memory)


def registers_of(warpgroups: int, per_sm: int = 1, producer: int = PRODUCER) -> tuple[int, int]:
    """Registers of a thread at launch, and of the warpgroups' when the producer has given back all but so many."""
    at_start = min(255, REGISTERS // (per_sm * 128 * (warpgroups + 1))) // 8 * 8
    left = at_start * (warpgroups + 1) - producer
    return at_start, min(255, left // warpgroups) // 8 * 8


def adds_shares(ranges: int, tokens: int) -> bool:
    """Whether all programs of a tile add up its parts, instead of the last one: where parts are many or large.

    Measured on an H200 with 16 to 64 tokens and 2 to 8 parts. Of more tokens the last one would not have the registers
    to add up parts.
    """
    return ranges <= MOST_SHARES and (tokens > 64 or (ranges > 2 and ranges * tokens >= 128))


def launch(
    target: Target, weights: Sequence[Packed], x: Activations, outs: Sequence[torch.Tensor], config: HopperConfig,
    tokens: int, biases: Sequence[torch.Tensor] = (), residual: torch.Tensor | None = None, gate: Gate | None = None,
    split: Split | None = None,
) -> Launch:  # fmt: skip
    """As mma_launch.launch(), of x in the order that wgmma.py wants. split: in chunks."""
    tight = config.per_sm > 1 or (config.warpgroups == 4 and gate is None)
    producer = SPARING if tight else PRODUCER
    at_start, registers = registers_of(config.warpgroups, config.per_sm, producer)
    form = Form(
        kind=weights[0].kind, tokens=tokens, warpgroups=config.warpgroups, chunk=config.chunk, stages=config.stages,
        x_stages=config.x_stages, segments=1 if gate else len(weights), glu=gate.kind if gate else "",
        split=split is not None, shares=split is not None and adds_shares(split.ranges, tokens),
        has_factors=x.factors is not None, has_bias=bool(biases), has_residual=residual is not None,
        pdl=target.has_pdl, registers=(registers, producer),
    )  # fmt: skip
    args = arguments(weights, x, outs, biases, residual, split, -(-x.k // config.step))
    args |= {"x_desc": TensorDescriptor(x.values, [x.rows, x.k], [x.k, 1], [tokens, 64], x_shared()), "form": form}
    tiles = tiles_of(weights, config.rows, gate)
    options = launch_options(target, 4) | {"maxnreg": at_start}
    return Launch(kernel, (tiles * (split.ranges if split else 1),), args, options)
