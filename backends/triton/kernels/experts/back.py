# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: no-check-untyped-defs, disable-error-code=annotation-unchecked
"""MUL_MAT_ID_BACK and OUT_PROD_ID: the gradients of experts' products by what was multiplied, and by plain weights.

Pairs of token and expert are sorted by expert on the device (pairs.py). A program of the first has columns of a tile's
pairs, and adds up over the rows of their expert's matrix; one of the second has a tile of an expert's matrix, and adds
up over the expert's pairs. Both in one order, without atomics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.context import Context, Step
from graphrt.backends.triton.device import Target
from graphrt.backends.triton.kernels.dequantize import dequantize
from graphrt.backends.triton.kernels.experts.pairs import Pairs, sorted_pairs, tile_of
from graphrt.backends.triton.kernels.products import gemm_large
from graphrt.backends.triton.kernels.products.half import Activations, in_type
from graphrt.backends.triton.kernels.products.plan import plan_of
from graphrt.backends.triton.launch import Launch
from graphrt.tensor import Tensor

#: Most pairs of a tile, and columns and rows of a step, of 16-bit and of f32 weights; warps.
_TOKENS, _COLS, _STEP, _F32_COLS, _F32_STEP, _WARPS = 64, 128, 64, 64, 32, 4
#: Rows of d, columns of x and pairs of a step of expert_outer.
_OUTER = (64, 64, 32)


@accesses(reads="p_w p_d p_factors p_first p_sorted", writes="p_out")
@triton.jit(do_not_specialize=["first_expert", "held", "n_expert"])
def expert_back(
    p_w, w_k, w_m, w_e, p_d, p_factors, p_first, p_sorted, p_out, m, k, first_expert, held, n_expert,
    COLS: tl.constexpr, TOKENS: tl.constexpr, STEP: tl.constexpr, SORTED: tl.constexpr, HAS_FACTORS: tl.constexpr,
    WIDEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (i, j): COLS columns of out, f32 [pairs, k], of tile j's pairs: their rows of d, [pairs, m], times their
    expert's matrix.

    w: [k, m] of the experts from first_expert on, `held` of them, with strides w_k, w_m, w_e; other experts' pairs are
    left to other launches. Rows of no expert are NaN; the launch with the first expert writes them. SORTED: as
    tile_of()'s GROUPS; WIDEN: multiply in f32.
    """
    expert, start, stop = tile_of(p_first, tl.program_id(1), n_expert, TOKENS, SORTED)
    inside = expert < n_expert
    own = inside & (expert >= first_expert) & (expert < first_expert + held)
    if own | ((expert == n_expert) & (first_expert == 0)):
        place = start + tl.arange(0, TOKENS)
        m_pair = place < stop
        pair = tl.load(p_sorted + place, mask=m_pair, other=0).to(tl.int64)
        col = tl.program_id(0) * COLS + tl.arange(0, COLS)
        acc = tl.zeros([TOKENS, COLS], tl.float32)
        if own:
            p_ws = p_w + (expert - first_expert).to(tl.int64) * w_e + col.to(tl.int64)[None, :] * w_k
            for at in range(0, m, STEP):
                row = at + tl.arange(0, STEP)
                d = tl.load(
                    p_d + pair[:, None] * m + row[None, :], mask=m_pair[:, None] & (row < m)[None, :], other=0.0
                )
                live = (row < m)[:, None] & (col < k)[None, :]
                w = tl.load(p_ws + row.to(tl.int64)[:, None] * w_m, mask=live, other=0.0)
                if WIDEN:
                    d, w = d.to(tl.float32), w.to(tl.float32)
                acc = tl.dot(d, w.to(d.dtype), acc, input_precision=PRECISION)
        if HAS_FACTORS:
            acc = acc * tl.load(p_factors + pair, mask=m_pair, other=0.0)[:, None]
        acc = tl.where(inside, acc, float("nan"))
        tl.store(p_out + pair[:, None] * k + col[None, :], acc, mask=m_pair[:, None] & (col < k)[None, :])


@accesses(reads="p_x p_d p_first p_sorted", writes="p_out")
@triton.jit
def expert_outer(
    p_x, p_d, p_first, p_sorted, p_out, m, k, used, slots, x0, x1, x2, d0, d1, d2,
    ROWS: tl.constexpr, COLS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Program (i, j, e): ROWS by COLS elements of out, f32 [k, m, n_expert], of expert e: the sum over its pairs.

    x: f32 [k, slots, tokens], d: f32 [m, used, tokens], with strides x0 to d2; slots: 1 or used.
    """
    expert = tl.program_id(2)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    start, stop = tl.load(p_first + expert), tl.load(p_first + expert + 1)
    acc = tl.zeros([ROWS, COLS], tl.float32)
    for at in range(start, stop, STEP):
        place = at + tl.arange(0, STEP)
        pair = tl.load(p_sorted + place, mask=place < stop, other=0)
        token, slot = (pair // used).to(tl.int64), (pair % used).to(tl.int64)
        p_ds = p_d + (token * d2 + slot * d1)[None, :] + row.to(tl.int64)[:, None] * d0
        d = tl.load(p_ds, mask=(row < m)[:, None] & (place < stop)[None, :], other=0.0)
        p_xs = p_x + (token * x2 + tl.minimum(slot, slots - 1) * x1)[:, None] + col.to(tl.int64)[None, :] * x0
        x = tl.load(p_xs, mask=(place < stop)[:, None] & (col < k)[None, :], other=0.0)
        acc = tl.dot(d, x, acc, input_precision="ieee")
    p_outs = p_out + expert.to(tl.int64) * m * k + row.to(tl.int64)[:, None] * k + col[None, :]
    tl.store(p_outs, acc, mask=(row < m)[:, None] & (col < k)[None, :])


def back_launch(
    target: Target, weight: torch.Tensor, first: int, n_expert: int, d: Activations, pairs: Pairs, out: torch.Tensor
) -> Launch:
    """expert_back over the matrices [experts, m, k] of some experts, `first` the first of them. d: [pairs, m]; out: f32
    [pairs, k]."""
    held, m, k = weight.shape
    exact = d.values.dtype is torch.float32
    cols, step = (_F32_COLS, _F32_STEP) if exact else (_COLS, _STEP)
    tokens = min(_TOKENS, max(16, triton.next_power_of_2(-(-pairs.count // n_expert))))
    args: dict[str, Any] = {
        "p_w": weight, "w_k": weight.stride(2), "w_m": weight.stride(1), "w_e": weight.stride(0), "p_d": d.values,
        "p_factors": pairs.first if d.factors is None else d.factors, "p_first": pairs.first,
        "p_sorted": pairs.sorted, "p_out": out, "m": m, "k": k, "first_expert": first, "held": held,
        "n_expert": n_expert, "COLS": cols, "TOKENS": tokens, "STEP": step, "SORTED": pairs.groups,
        "HAS_FACTORS": d.factors is not None, "WIDEN": exact or target.arch == "interpreter",
        "PRECISION": "ieee" if exact else "tf32",
    }  # fmt: skip
    grid = (triton.cdiv(k, cols), pairs.tiles(tokens))
    return Launch(expert_back, grid, args, {"num_warps": _WARPS, "num_stages": 2})


def lower_mul_mat_id_back(nodes: Sequence[Tensor], ctx: Context) -> list[Step]:
    """MUL_MAT_ID_BACK: quantized experts are dequantized some at a time."""
    (node,) = nodes
    (part,) = plan_of(ctx).of(node).parts
    (p,) = part.products
    k, m, n_expert = p.weight.ne[:3]
    assert p.ids is not None
    d, steps = in_type(ctx.view(p.x).torch(), part.route.form.dtype, ctx)
    pairs, sorting = sorted_pairs(p.ids, n_expert, ctx)
    out = ctx.view(node).data.view(-1, k)
    steps = [*steps, *sorting]
    if not p.is_packed:
        weight = ctx.view(p.weight).torch()[0]
        return [*steps, back_launch(ctx.target, weight, 0, n_expert, d, pairs, out)]
    packed, packing = ctx.packed(p.weight)
    steps = [*steps, *packing]
    for first, held in _pieces(n_expert, 2 * m * k):
        weight = gemm_large.scratch(held * m, k, ctx)
        steps.append(dequantize(packed.part(first * m, (first + held) * m), weight))
        steps.append(back_launch(ctx.target, weight.view(held, m, k), first, n_expert, d, pairs, out))
    return steps


def _pieces(n_expert: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """(first, how many) of the experts that are dequantized at a time, of so many bytes each."""
    step = max(1, gemm_large.SCRATCH // nbytes)
    yield from ((first, min(step, n_expert - first)) for first in range(0, n_expert, step))


def lower_out_prod_id(nodes: Sequence[Tensor], ctx: Context) -> list[Step]:
    """OUT_PROD_ID."""
    (node,) = nodes
    x, d = ctx.view(node["x"]), ctx.view(node["d"])
    k, m, n_expert = node.ne[:3]
    pairs, steps = sorted_pairs(node["ids"], n_expert, ctx)
    rows, cols, step = _OUTER
    args: dict[str, Any] = {
        "p_x": x.data, "p_d": d.data, "p_first": pairs.first, "p_sorted": pairs.sorted, "p_out": ctx.view(node).data,
        "m": m, "k": k, "used": pairs.used, "slots": x.ne[1], **dict(zip(("x0", "x1", "x2"), x.strides)),
        **dict(zip(("d0", "d1", "d2"), d.strides)), "ROWS": rows, "COLS": cols, "STEP": step,
    }  # fmt: skip
    grid = (triton.cdiv(k, cols), triton.cdiv(m, rows), n_expert)
    return [*steps, Launch(expert_outer, grid, args, {"num_warps": 8})]


LOWERINGS: dict[str, Callable[[Sequence[Tensor], Context], list[Step]]] = {
    "MUL_MAT_ID_BACK": lower_mul_mat_id_back, "OUT_PROD_ID": lower_out_prod_id,
}  # fmt: skip
