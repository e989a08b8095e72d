"""Launches of Hopper's kernels for attention's gradients, from tensors in torch's shapes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from graphrt.backends.triton.kernels.flash_attn.hopper.backward_bias import hopper_attn_back_bias
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_fused import hopper_attn_back_fused
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_keys import hopper_attn_back_keys
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_queries import hopper_attn_back_queries
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_rows import WEIGHT_BITS
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_specs import (
    N_WG,
    PLAN_QUERIES,
    GradientConfig,
    GradientSpec,
    config_of,
    crowded,
)
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_stored import hopper_attn_back_stored
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_wide import hopper_attn_back_wide
from graphrt.backends.triton.kernels.flash_attn.hopper.launch import (
    L2_SECTION_BYTES,
    MAX_SHARED_BYTES,
    aligned,
    box_descriptor,
    strides_in,
)
from graphrt.backends.triton.kernels.flash_attn.hopper.specs import WG_ROWS
from graphrt.backends.triton.kernels.flash_attn.mask_plan import MaskPlan
from graphrt.backends.triton.launch import Launch

#: Registers of a thread at launch: an even share of all, the producer's group included.
OPTIONS = {"num_warps": 4, "maxnreg": 65536 // (128 * (N_WG + 1)) // 8 * 8}


@dataclass(frozen=True, eq=False)
class Given:
    """What both kernels are given. q, d_out: of 16 bits, [n_seq, n_head, n_q, d]; k, v: their type, [n_seq, n_head_kv,
    n_kv, d], any strides that TMA takes; rows, scales: see backward_rows.py; mask: f16 [m3, m2, n_q, n_kv] or None;
    slopes: f32 [n_head], None without ALiBi. kept: dropout's bits by key and by query (dropout_bits.py), None without;
    inverse: what kept weights are multiplied with; dense: see crowded()."""

    q: torch.Tensor
    d_out: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    rows: torch.Tensor
    scales: torch.Tensor
    mask: torch.Tensor | None
    slopes: torch.Tensor | None
    scale: float
    softcap: float
    kept: tuple[torch.Tensor, torch.Tensor] | None = None
    inverse: float = 1.0
    dense: bool = False

    @property
    def d(self) -> int:
        return self.k.shape[3]

    def config(self, own: str) -> GradientConfig:
        """config_of()'s."""
        return config_of(own, self.d, crowded(own, self.softcap, self.kept is not None, self.dense))

    @property
    def mask_groups(self) -> int:
        """Heads whose masks differ."""
        return 1 if self.mask is None or self.mask.shape[1] == 1 else self.q.shape[1]

    def numbers(self) -> dict[str, Any]:
        """The kernels' numbers, by name."""
        n_seq, n_head, n_q, _ = self.q.shape
        mask_strides, m3, m2 = [0, 0, 0], 1, 1
        if self.mask is not None:
            m3, m2 = self.mask.shape[:2]
            mask_strides = strides_in(self.mask_vec, self.mask, (2, 1, 0))
        return {
            "scale": self.scale, "softcap": self.softcap, **dict(zip(("sm_t", "sm_h", "sm_s"), mask_strides)),
            "mask_heads": m2, "mask_seqs": m3, "mask_groups": self.mask_groups, "n_seq": n_seq, "n_head": n_head,
            "gqa": n_head // self.k.shape[1], "n_q": n_q, "n_kv": self.k.shape[2], "inverse": self.inverse,
        }  # fmt: skip

    @property
    def mask_vec(self) -> int:
        return 8 if self.mask is not None and aligned(self.mask, 8) else 1

    def box(self, t: torch.Tensor, rows: int) -> Any:
        """TMA descriptor of rows of q, d_out, k or v."""
        return box_descriptor(t, rows, self.d, idle=self.d)

    def mask_ring(self, used: int, rows: int, parts: int, cols: int) -> tuple[int, Any]:
        """(buffers of the mask's ring, at most two, that fit beside so many bytes; its descriptor), of boxes of rows
        and cols; none where TMA can't bring the mask."""
        if self.mask is None or self.mask_vec == 1 or self.mask.stride(3) != 1:
            return 0, None
        stages = min(2, (MAX_SHARED_BYTES - used) // (2 * rows * cols * parts))
        return stages, box_descriptor(self.mask, rows, cols, idle=8) if stages else None

    def spec(self, c: GradientConfig) -> GradientSpec:
        """Without the mask's ring."""
        bits = WEIGHT_BITS if self.k.dtype == torch.float16 else 0
        return GradientSpec(
            d=self.d, block_m=c.block_m, block_n=c.block_n, stages=c.stages, has_mask=self.mask is not None,
            has_softcap=self.softcap != 0.0, has_alibi=self.slopes is not None, weight=2.0**-bits,
            mask_vec=self.mask_vec, has_dropout=self.kept is not None, dense=self.dense,
        )  # fmt: skip

    def common(self, section: int, first_head: int = 0) -> dict[str, Any]:
        """Arguments of both. section: heads whose programs run side by side; first_head: the launch's first one."""
        given = {"rows": self.rows, "mask": self.mask, "slopes": self.slopes, "scales": self.scales}
        return given | self.numbers() | {"section": section, "first_head": first_head}


def side_by_side(x: Given, rows: int, heads: int) -> int:
    """Of how many heads programs run side by side: those of one KV head where tiles are equally long, else as many as
    keep what they walk within the L2 cache, so that the longest tiles of many come first. rows: of 16 bits, twice, that
    a KV head's programs walk; heads: so many have a KV head's."""
    return heads * (1 if x.mask is None else max(1, L2_SECTION_BYTES // (4 * x.d * max(1, rows))))


def keys_launch(
    x: Given, counts: torch.Tensor | None, blocks: torch.Tensor | None, dk: torch.Tensor | None,
    dv: torch.Tensor | None, scores: torch.Tensor | None = None, heads: range | None = None,
) -> Launch:  # fmt: skip
    """The launch for dk and dv, f32 [n_seq, n_head_kv, n_kv, d], None for one that nobody wants. counts, blocks: the
    mask's turned lists; scores: where dS^T is stored, see room_for_scores(), if it is; heads: the KV heads of this
    launch, of all sequences' (default: all)."""
    gqa = x.q.shape[1] // x.k.shape[1]
    heads = range(x.k.shape[0] * x.k.shape[1]) if heads is None else heads
    c = x.config("keys")
    n_kv, n_q = x.k.shape[2], x.q.shape[2]
    parts = c.block_n // WG_ROWS
    used = c.keys_bytes(x.d) + (c.scores_bytes() if scores is not None else 0)
    stages, mask_desc = x.mask_ring(used, c.block_m, parts, WG_ROWS)
    s_desc = box_descriptor(scores, WG_ROWS, c.block_m, idle=scores.stride(2)) if scores is not None else None
    stored = scores is not None
    spec = replace(x.spec(c), mask_stages=stages, of_k=dk is not None, of_v=dv is not None, stored=stored)
    some = dk if dk is not None else dv
    args = x.common(side_by_side(x, gqa * n_q, 1), heads.start * gqa) | {
        "q_desc": x.box(x.q, c.block_m), "o_desc": x.box(x.d_out, c.block_m), "k_desc": x.box(x.k, c.block_n),
        "v_desc": x.box(x.v, c.block_n), "mask_desc": mask_desc, "counts": counts, "blocks": blocks,
        "dk": dk if dk is not None else some, "dv": dv if dv is not None else some, "spec": spec,
        "kept": x.kept[0] if x.kept is not None else None,
    }  # fmt: skip
    kernel = hopper_attn_back_keys
    if c.wide:
        kernel = hopper_attn_back_wide
    else:
        args["s_desc"] = s_desc
    return Launch(kernel, (-(-n_kv // c.block_n) * len(heads),), args, OPTIONS)


def fused_launch(
    x: Given, counts: torch.Tensor | None, blocks: torch.Tensor | None, dq: torch.Tensor, dk: torch.Tensor | None,
    dv: torch.Tensor | None,
) -> Launch:  # fmt: skip
    """keys_launch with dq, f32 [n_seq, n_head, n_q, d], which it adds to."""
    c = x.config("fused")
    n_seq, n_head_kv, n_kv, _ = x.k.shape
    parts = c.block_n // WG_ROWS
    stages, mask_desc = x.mask_ring(c.fused_bytes(x.d), c.block_m, parts, WG_ROWS)
    spec = replace(x.spec(c), mask_stages=stages, of_k=dk is not None, of_v=dv is not None)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=4)
    box = TensorDescriptor(dq, list(dq.shape), list(dq.stride()), [1, 1, c.block_m, x.d // 2], layout)
    args = x.common(side_by_side(x, x.q.shape[1] // n_head_kv * x.q.shape[2], 1)) | {
        "q_desc": x.box(x.q, c.block_m), "o_desc": x.box(x.d_out, c.block_m), "k_desc": x.box(x.k, c.block_n),
        "v_desc": x.box(x.v, c.block_n), "mask_desc": mask_desc, "dq_desc": box, "counts": counts, "blocks": blocks,
        "dk": dk if dk is not None else dq, "dv": dv if dv is not None else dq, "spec": spec, "kept": None,
    }  # fmt: skip
    return Launch(hopper_attn_back_fused, (-(-n_kv // c.block_n) * n_head_kv * n_seq,), args, OPTIONS)


def queries_launch(
    x: Given, counts: torch.Tensor | None, blocks: torch.Tensor | None, seen: torch.Tensor | None, dq: torch.Tensor,
) -> Launch:  # fmt: skip
    """The launch for dq, f32 [n_seq, n_head, n_q, d]. counts, blocks, seen: the mask's plan."""
    c = x.config("queries")
    n_seq, n_head, n_q, _ = x.q.shape
    gqa, n_kv = n_head // x.k.shape[1], x.k.shape[2]
    stages, mask_desc = x.mask_ring(c.queries_bytes(x.d), WG_ROWS, N_WG, c.block_n)
    args = x.common(side_by_side(x, n_kv, gqa)) | {
        "q_desc": x.box(x.q, PLAN_QUERIES), "o_desc": x.box(x.d_out, PLAN_QUERIES), "k_desc": x.box(x.k, c.block_n),
        "v_desc": x.box(x.v, c.block_n), "mask_desc": mask_desc, "counts": counts, "blocks": blocks, "seen": seen,
        "dq": dq, "spec": replace(x.spec(c), mask_stages=stages), "kept": x.kept[1] if x.kept is not None else None,
    }  # fmt: skip
    return Launch(hopper_attn_back_queries, (-(-n_q // PLAN_QUERIES) * n_head * n_seq,), args, OPTIONS)


def room_for_scores(n_head: int, n_q: int, n_kv: int) -> tuple[int, int, int, int]:
    """The shape of the memory of dS^T of so many heads of Q, head by head: for each block of queries [n_kv,
    PLAN_QUERIES], so that what a tile stores or reads lies in one piece."""
    return 1, n_head * -(-n_q // PLAN_QUERIES), n_kv, PLAN_QUERIES


def stored_launch(
    x: Given, plan: MaskPlan | None, dq: torch.Tensor, scores: torch.Tensor, heads: range,
) -> Launch:  # fmt: skip
    """queries_launch where dS^T lies in memory, as room_for_scores() has it, for these KV heads."""
    c = x.config("stored")
    n_q, gqa = x.q.shape[2], x.q.shape[1] // x.k.shape[1]
    args = x.common(side_by_side(x, x.k.shape[2], gqa), heads.start * gqa) | {
        "k_desc": x.box(x.k, c.block_n), "s_desc": box_descriptor(scores, c.block_n, WG_ROWS, idle=scores.stride(2)),
        **{name: getattr(plan, name, None) for name in ("counts", "blocks", "seen")}, "dq": dq, "spec": x.spec(c),
    }  # fmt: skip
    for name in ("rows", "mask", "slopes"):
        del args[name]
    return Launch(hopper_attn_back_stored, (-(-n_q // PLAN_QUERIES) * gqa * len(heads),), args, OPTIONS)


def bias_launch(x: Given, kinds: torch.Tensor, d_bias: torch.Tensor) -> Launch:
    """The launch for the gradient of a bias that is read as a mask, f32 [m3, m2, n_q, n_kv]. kinds: of its tiles."""
    assert x.mask is not None
    c = x.config("bias")
    stages, mask_desc = x.mask_ring(c.bias_bytes(x.d), WG_ROWS, N_WG, c.block_n)
    args = x.common(1) | {
        "q_desc": x.box(x.q, PLAN_QUERIES), "o_desc": x.box(x.d_out, PLAN_QUERIES), "k_desc": x.box(x.k, c.block_n),
        "v_desc": x.box(x.v, c.block_n), "mask_desc": mask_desc, "kept": x.kept[1] if x.kept is not None else None,
        "kinds": kinds, "d_bias": d_bias, "spec": replace(x.spec(c), mask_stages=min(1, stages)),
    }  # fmt: skip
    del args["slopes"]
    m3, m2, n_q, n_kv = x.mask.shape
    tiles = -(-n_q // PLAN_QUERIES) * -(-n_kv // c.block_n)
    return Launch(hopper_attn_back_bias, (tiles * m2 * m3,), args, OPTIONS)
