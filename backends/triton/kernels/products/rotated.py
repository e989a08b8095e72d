"""The launch of projections that rotate q and k and write k and v into a cache (gemv_rotated.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphrt.backends.triton.context import Context, Step, View
from graphrt.backends.triton.device import Target
from graphrt.backends.triton.kernels.products.activations import Q8Rows, Rows, uses_ptx
from graphrt.backends.triton.kernels.products.emit import activations_of, append_launch
from graphrt.backends.triton.kernels.products.gemv import Segment, config_for, options_for, packed_arguments
from graphrt.backends.triton.kernels.products.gemv_rotated import rotated_gemv
from graphrt.backends.triton.kernels.products.plan import plan_of
from graphrt.backends.triton.kernels.products.rotated_fusions import RotatedProjections, rotated_projections
from graphrt.backends.triton.kernels.quantize import stored
from graphrt.backends.triton.kernels.rope import RopeTable, rope_table
from graphrt.backends.triton.launch import Launch
from graphrt.fusion import Fusion

#: Tokens up to which angles and ids fit into registers beside a lane's first weights.
MAX_EARLY = 4


@dataclass(frozen=True, eq=False)
class Cells:
    """Where new k and v go. ids: i32 or i64, of n_new tokens of each sequence, by the strides s_id and s_id_seq, None
    for rows of the tokens' own; k, v: caches of n_cells rows a sequence, by the strides s_k and s_k_seq, as
    quantize.stored() has them, of these kinds."""

    ids: torch.Tensor | None
    s_id: int
    s_id_seq: int
    n_new: int
    n_cells: int
    k: torch.Tensor
    s_k: int
    s_k_seq: int
    k_kind: str
    v: torch.Tensor
    s_v: int
    s_v_seq: int
    v_kind: str

    @classmethod
    def of(cls, ids: View, k_cache: View, v_cache: View) -> Cells:
        (k, (s_k, s_k_seq, _)), (v, (s_v, s_v_seq, _)) = stored(k_cache), stored(v_cache)
        return cls(
            ids.data, ids.strides[0], ids.strides[1], ids.ne[0], k_cache.ne[1], k, s_k, s_k_seq, k_cache.kind,
            v, s_v, s_v_seq, v_cache.kind,
        )  # fmt: skip

    @classmethod
    def of_tokens(cls, k: View, v: View) -> Cells:
        """k: f32 [head size, heads, tokens], v: f32 [head size * heads, tokens]."""
        n = k.ne[2]
        return cls(None, 0, 0, n, n, k.data, k.strides[2], 0, "f32", v.data, v.strides[1], 0, "f32")


def rotated_launch(
    target: Target, segments: Sequence[Segment], x: Q8Rows | Rows, table: RopeTable, cells: Cells, early: bool
) -> Launch:
    """segments: of q, whose out is the rotated one, and of k and v, whose outs are the caches; all packed. early: ids
    and the table are older than the launch before."""
    kind = segments[0].weight.kind  # type: ignore[union-attr]
    config = config_for(kind, sum(s.m for s in segments), x.k, x.n, single=True).for_x(x)
    args: dict[str, Any] = packed_arguments(segments, x, None)
    for i, s in enumerate(segments):
        args |= {f"p_out{i}": s.out, f"m{i}": s.m, f"p_bias{i}": s.bias}
    args |= {
        "p_ids": cells.ids, "p_cos": table.cos, "p_sin": table.sin, "out_stride": segments[0].stride,
        "s_id": cells.s_id, "s_id_seq": cells.s_id_seq, "s_k": cells.s_k, "s_k_seq": cells.s_k_seq, "s_v": cells.s_v,
        "s_v_seq": cells.s_v_seq, "n_cells": cells.n_cells, "n_new": cells.n_new, "n": x.n, "K_KIND": cells.k_kind,
        "V_KIND": cells.v_kind, "HALF": table.params.n_dims // 2, "NEOX": table.params.mode == "neox",
        "EARLY": early and target.has_pdl and x.n <= MAX_EARLY, "N": 1 << (x.n - 1).bit_length(), "U": config.u,
        "W": config.w, "G": config.g, "PTX": uses_ptx(target), "PDL": target.has_pdl,
    }  # fmt: skip
    return Launch(rotated_gemv, (sum(-(-s.m // config.rows) for s in segments),), args, options_for(target, config))


def lower_rotated_projections(found: RotatedProjections, ctx: Context) -> list[Step]:
    """One launch, behind what rounds x and what fills the rotation's table, where these are not there yet."""
    (part,) = plan_of(ctx).of(found.products.products[0].product).parts  # all packed: one launch of gemv.py
    cache = found.cache
    table, steps = rope_table(cache.q, ctx)
    early = not steps
    q = ctx.view(cache.q)
    if found.in_rows:
        cells = Cells.of_tokens(ctx.view(cache.k), ctx.view(found.v_out))
    else:
        cells = Cells.of(*(ctx.view(t) for t in (cache.k_set["ids"], cache.k_set["target"], cache.v_set["target"])))
    segments = []
    outs = ((q.data, q.strides[2]), (cells.k, cells.s_k), (cells.v, cells.s_v))
    for p, (out, stride) in zip(part.products, outs, strict=True):
        weight, made = ctx.packed(p.weight)
        steps += made
        segments.append(Segment(weight, out, stride, None if p.bias is None else ctx.view(p.bias).data))
    x, rounding = activations_of(part, ctx)
    constant = all(ctx.is_constant(t) for p in part.products for t in (p.weight, p.bias) if t is not None)
    return append_launch([*steps, *rounding], rotated_launch(ctx.target, segments, x, table, cells, early), constant)


ROTATED_PROJECTIONS = Fusion("rotated_projections", rotated_projections, lower_rotated_projections)
