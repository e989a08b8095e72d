"""Arguments of Hopper's kernels: what they all have, TMA descriptors, and what fits a multiprocessor."""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from graphrt.backends.triton.kernels.flash_attn.mask_plan import MaskPlan
from graphrt.backends.triton.kernels.flash_attn.problem import Problem, Tiling
from graphrt.backends.triton.kernels.flash_attn.score_code import numbers_of
from graphrt.ops.soft_max import alibi_slopes
from graphrt.tensor import Tensor

MAX_SHARED_BYTES = 232448  # of one thread block on sm_90
L2_SECTION_BYTES = 32 << 20  # K and V of the heads that run side by side should stay within this much of the L2 cache


def common_arguments(p: Problem, t: Tiling, plan: MaskPlan | None, bad: torch.Tensor | None) -> dict[str, Any]:
    """The arguments that all of them have, by name.

    q: f32, any strides but the last, which is 1; out: f32 [n_seq, n_q, n_head, d_v], written. Strides of both come in
    units of q_vec elements and the mask's in units of mask_vec, see constants_of. scale: not negative.

    mask: f16 [m3, m2, n_q, n_kv]; sequence s and head h use mask[s % m3, h % m2]. -inf hides a key. counts, blocks: of
    its plan (mask_plan.py). slopes: f32 [n_head], ALiBi factors of the mask. sinks: f32 [n_head], a score that joins
    each row's denominator. lse: f32 [n_seq, n_q, n_head], written: the natural logarithm of each row's denominator.

    bad: int32 [tiles], written: 0, or not 0 where a tile should be done again: its output holds NaN or infinity (K and
    V may hold such values in rows that the mask hides; the softmax and the products let them through), or its logits
    are so large that their rounding shows. A row whose keys are all hidden gives 0.
    """
    q, out, mask = _operands(p)
    q_vec, mask_vec = vectors(p)
    slopes = None
    if mask is not None and p.params.max_bias > 0:
        slopes = torch.tensor(alibi_slopes(p.n_head, p.params.max_bias), device=out.device)
    mask_strides = strides_in(mask_vec, mask, (2, 1, 0)) if mask is not None else [0, 0, 0]
    return {
        "q": q, "out": out, "mask": mask, "counts": plan.counts if plan is not None else None,
        "blocks": plan.blocks if plan is not None else None, "slopes": slopes,
        "sinks": p.memory(p.sinks_t, torch.float32) if p.sinks_t is not None else None, "bad": bad,
        "lse": p.memory(p.lse, torch.float32) if p.lse is not None else None,
        "scale": float(p.params.scale), "softcap": float(p.params.softcap),
        **dict(zip(("sq_t", "sq_h", "sq_s"), strides_in(q_vec, q, (2, 1, 0)))),
        **dict(zip(("so_t", "so_h", "so_s"), strides_in(q_vec, out, (1, 2, 0)))),
        **dict(zip(("sm_t", "sm_h", "sm_s"), mask_strides)), "mask_heads": p.m2, "mask_seqs": p.m3,
        "mask_groups": t.mask_groups, "n_seq": p.n_seq, "n_head": p.n_head, "gqa": p.gqa, "n_q": p.n_q, "n_kv": p.n_kv,
        "section": side_by_side(p, t),
    }  # fmt: skip


def constants_of(p: Problem, t: Tiling, has_bad: bool) -> dict[str, Any]:
    """What all Specs have beside the configuration, by name."""
    q_vec, mask_vec = vectors(p)
    return {
        "reversed_order": p.mask_t is not None, "pack": t.pack, "q_vec": q_vec, "mask_vec": mask_vec,
        "has_mask": p.mask_t is not None, "has_softcap": p.params.softcap != 0.0,
        "has_alibi": p.mask_t is not None and p.params.max_bias > 0, "has_sinks": p.sinks_t is not None,
        "has_bad": has_bad, "has_lse": p.lse is not None,
    }  # fmt: skip


def score_numbers(p: Problem) -> torch.Tensor | None:
    """The numbers of a score function, None without one."""
    return numbers_of(p.params, p.memory(p.q_t, torch.float32).device) if p.params.score else None


def _operands(p: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """q, out and mask in torch's shapes."""
    assert p.out is not None
    q = as_torch(p.q_t, p.memory(p.q_t, torch.float32))
    out = p.memory(p.out, torch.float32).view(p.n_seq, p.n_q, p.n_head, p.v.d)
    return q, out, None if p.mask_t is None else as_torch(p.mask_t, p.memory(p.mask_t, torch.float16))


def vectors(p: Problem) -> tuple[int, int]:
    """(q_vec, mask_vec): what divides the strides of q and out, and of the mask, see Spec."""
    q, out, mask = _operands(p)
    return 4 if aligned(q, 4) and aligned(out, 4) else 1, 8 if mask is not None and aligned(mask, 8) else 1


def as_torch(t: Tensor, memory: torch.Tensor) -> torch.Tensor:
    """A tensor in torch's shape and strides over its memory."""
    size = t.dtype.type_size
    return memory.as_strided(t.shape, [n // size for n in t.nb[::-1]])


def strides_in(unit: int, tensor: torch.Tensor, dims: tuple[int, ...]) -> list[int]:
    """Strides of some dimensions in units of `unit` elements; a dimension of size 1 has none."""
    return [tensor.stride(i) // unit if tensor.shape[i] > 1 else 0 for i in dims]


def aligned(tensor: torch.Tensor, unit: int) -> bool:
    """Whether every row of `unit` elements along the last dimension starts at a multiple of its own size."""
    rows = range(tensor.dim() - 1)
    return tensor.data_ptr() % (unit * tensor.element_size()) == 0 and all(
        tensor.shape[i] == 1 or tensor.stride(i) % unit == 0 for i in rows
    )


def box_descriptor(tensor: torch.Tensor, rows: int, cols: int, idle: int) -> TensorDescriptor:
    """TMA descriptor of a tensor [n0, n1, n2, n3] of 16 or 8 bits in boxes of [1, 1, rows, cols]; what lies outside
    reads as 0.

    idle: the stride of a dimension of size 1. It means nothing, but TMA wants whole 16 bytes there too.
    """
    size = tensor.element_size()
    swizzle = min(128, cols * size)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=8 * size, rank=4)
    shape = list(tensor.shape)
    strides = [tensor.stride(i) if shape[i] > 1 else idle for i in range(3)] + [1]
    return TensorDescriptor(tensor, shape, strides, [1, 1, rows, cols], layout)


def mask_descriptor(p: Problem, pack: int, rows: int, cols: int) -> TensorDescriptor | None:
    """Of the mask for so many query rows of a warpgroup, where TMA can bring it: rows are whole 16 bytes, and the heads
    of a tile share them."""
    mask = _operands(p)[2]
    if mask is None or not aligned(mask, 8) or mask.stride(3) != 1 or (pack > 1 and mask.shape[1] > 1):
        return None
    return box_descriptor(mask, rows // pack, cols, idle=8)


def side_by_side(p: Problem, t: Tiling) -> int:
    """How many groups of heads run at the same time: those of one KV head where tiles are equally long, else as many as
    keep K and V within the L2 cache, so that there are enough tiles of one length to go round."""
    per_kv_head = p.gqa // t.pack
    if p.mask_t is None:
        return per_kv_head
    # By 2 bytes an element, which quantized K and V have once they are unpacked.
    kv_head_bytes = 2 * (p.k.d + (0 if p.v_in_k else p.v.d)) * max(1, p.n_kv)
    return min(p.n_seq * t.n_groups, per_kv_head * max(1, L2_SECTION_BYTES // kv_head_bytes))


def programs_of(tiles: int, persistent: bool, sm_count: int) -> int:
    """Programs of a launch that does not share tiles out: one a tile, or of persistent ones one a multiprocessor."""
    return min(tiles, sm_count) if persistent else tiles
