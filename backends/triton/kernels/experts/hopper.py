"""Launches of wgmma.py: which products it takes, and its configs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from graphrt.backends.triton.device import Target
from graphrt.backends.triton.kernels.experts.gather import MAX_ROW
from graphrt.backends.triton.kernels.experts.pairs import Pairs
from graphrt.backends.triton.kernels.experts.wgmma import Form, expert_wgmma
from graphrt.backends.triton.kernels.products.activations import GLU_KINDS
from graphrt.backends.triton.kernels.products.gemm_small.arguments import STEP
from graphrt.backends.triton.kernels.products.gemm_small.mma_launch import KINDS
from graphrt.backends.triton.kernels.products.gemm_small.wgmma import x_shared
from graphrt.backends.triton.kernels.products.gemm_small.wgmma_launch import PRODUCER, ROWS, registers_of
from graphrt.backends.triton.kernels.products.half import Activations, Gate
from graphrt.backends.triton.launch import Launch, launch_options
from graphrt.backends.triton.packing import Packed, packing_of, whole_plane

#: Gates that it joins.
GATES = (*GLU_KINDS, "swiglu_oai")


@dataclass(frozen=True)
class TileConfig:
    """tokens: of a tile; warpgroups: 1 to 4, beside the producer; chunk: steps of a buffer of codes; stages: such
    buffers, at most; x_stages: buffers of a step's x, at most."""

    tokens: int
    warpgroups: int
    chunk: int
    stages: int
    x_stages: int

    @property
    def rows(self) -> int:
        return self.warpgroups * ROWS


@dataclass(frozen=True, eq=False)
class Matrices:
    """Of all experts: packed rows, m of each, and a bias f32 [n_expert, m] with elements side by side, or None."""

    weight: Packed
    bias: torch.Tensor | None = None


def takes(target: Target, kind: str, k: int) -> bool:
    """Whether products of a type and rows of k elements can be wgmma.py's."""
    return target.arch == "sm_90" and kind in KINDS and STEP < k <= MAX_ROW


#: Up to so many pairs an expert on average. Measured on an H100.
_CONFIGS = (
    (12, TileConfig(32, 2, 4, 4, 6)),
    (52, TileConfig(64, 2, 4, 4, 4)),
    (1 << 30, TileConfig(128, 2, 4, 3, 4)),
)


def config_for(target: Target, kind: str, pairs: Pairs) -> TileConfig:
    """The config for some pairs and all that shared memory has room for."""
    each = triton.cdiv(pairs.count, pairs.n_expert)
    return fitted(next(config for most, config in _CONFIGS if each <= most), kind, target.shared_memory)


def fitted(config: TileConfig, kind: str, shared_memory: int) -> TileConfig:
    """A config with as many stages as there is room for, two at least: else with smaller chunks or fewer buffers."""
    packing = packing_of(kind)
    assert packing is not None
    codes = config.rows * 16 * (packing.words + packing.high_words) * config.chunk + 16
    room = shared_memory - 1024 - config.x_stages * (config.tokens * 2 * STEP + 16)
    stages = min(config.stages, room // codes)
    if stages >= 2:
        return replace(config, stages=stages)
    if config.x_stages > 3:
        return fitted(replace(config, x_stages=config.x_stages - 1), kind, shared_memory)
    return fitted(replace(config, chunk=config.chunk // 2, x_stages=4), kind, shared_memory)


def launch(
    target: Target, matrices: Sequence[Matrices], x: Activations, pairs: Pairs, tiles: torch.Tensor, k: int,
    out: torch.Tensor, c: TileConfig, gate: Gate | None = None,
) -> Launch:  # fmt: skip
    """Every pair's row of out, f32 [pairs, m], of a matrix or, with a gate, of this and its up.

    x: gather.gathered() of rows of k elements. tiles: pairs.listed_tiles() of the config's tokens.
    """
    weight, m = matrices[0].weight, out.shape[1]
    at_start, registers = registers_of(c.warpgroups)
    form = Form(
        kind=weight.kind, tokens=c.tokens, warpgroups=c.warpgroups, chunk=c.chunk, stages=c.stages,
        x_stages=c.x_stages, glu=gate.kind if gate else "", even=k % STEP == 0, pdl=target.has_pdl,
        registers=(registers, PRODUCER),
    )  # fmt: skip
    row_tiles = triton.cdiv(m, form.tile * c.warpgroups)
    args: dict[str, Any] = {
        **_planes("", matrices[0]), **_planes("_up", matrices[-1]), "p_factors": x.factors,
        "alpha": gate.alpha if gate else 0.0, "limit": gate.limit if gate else 0.0, "p_tiles": tiles,
        "n_columns": tiles.shape[0], "p_sorted": pairs.sorted, "p_out": out, "n_expert": pairs.n_expert, "m": m,
        "x_desc": TensorDescriptor(x.values, [x.rows, x.k], [x.k, 1], [c.tokens, 64], x_shared()),
        "row_tiles": row_tiles, "k": k, "form": form,
    }  # fmt: skip
    grid = (min(target.sm_count, tiles.shape[0] * row_tiles),)
    return Launch(expert_wgmma, grid, args, launch_options(target, 4) | {"maxnreg": at_start})


def _planes(suffix: str, matrices: Matrices) -> dict[str, Any]:
    """A matrix' planes and bias by the kernel's names. For planes that aren't there stand the quants."""
    w, bias = matrices.weight, matrices.bias
    supers = w.quants if w.supers is None else whole_plane(w.supers)
    return {
        f"p_quants{suffix}": w.quants, f"p_high{suffix}": w.quants if w.high is None else w.high,
        f"p_scales{suffix}": whole_plane(w.scales), f"p_supers{suffix}": supers, f"p_bias{suffix}": bias,
        f"bias{suffix}_step": 0 if bias is None else bias.stride(0),
    }  # fmt: skip
