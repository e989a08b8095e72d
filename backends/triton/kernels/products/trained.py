"""Products of many tokens with packed weights and adapters beside them, and the gradients of what they read.

An adapter is columns more of its weight: y + b u, u = scale (a x), is the product of the rows [w, b] with [x, u], made
by the vendor's product at once. So x is rounded once for all products that read it, beside the u of all their
adapters; nothing is added to a result afterwards. The gradient of x is the product of [d, v] of all these products,
side by side, with their weights and adapters' a below each other: one sum, made at once. What is rounded to f16 beside
x, d and the weights: u, v, a and b.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from graphrt.backends.triton.context import Context, Step
from graphrt.backends.triton.kernels.dequantize import dequantize, plane_args
from graphrt.backends.triton.kernels.products import gemm_large
from graphrt.backends.triton.kernels.products.adapters import n_parts
from graphrt.backends.triton.kernels.products.fusions import MAX_ADAPTED
from graphrt.backends.triton.kernels.products.half import Sums, finish_steps, memory_of
from graphrt.backends.triton.kernels.products.kept import LINE, Once, kept, kept_before
from graphrt.backends.triton.kernels.products.trained_fusions import (
    GradientOfOne,
    TrainedOfOne,
    gradient_of_x,
    trained_products,
)
from graphrt.backends.triton.kernels.products.trained_kernels import (
    copy_columns,
    copy_rows,
    dequantize_lines,
    ranks_of,
    round_several,
    round_with_ranks,
)
from graphrt.backends.triton.launch import Launch, launch_options
from graphrt.backends.triton.packing import GROUP, Packed
from graphrt.fusion import Fusion

#: Tokens of a program, and elements that it multiplies at a time.
_TOKENS, _DEPTH = 64, 64
#: Groups of a program that dequantizes, its warps, and rows and elements of adapters that one copies.
_GROUPS, _WARPS, _ROWS, _BLOCK = 256, 4, 64, 4096


def _of_rows(size: int) -> tuple[int, int]:
    """(block, warps) of a program that holds a row."""
    block = triton.next_power_of_2(size)
    return block, max(1, min(16, block // 512))


def _half(name: str, rows: int, size: int, ctx: Context) -> torch.Tensor:
    """f16 [rows, size], rows a whole number of lines apart, the same memory for all such products of a split."""
    pitch = -(-size // LINE) * LINE
    memory = ctx.shared_scratch(name, 2 * rows * pitch)[: 2 * rows * pitch].view(torch.float16)
    return memory.view(rows, pitch)[:, :size]


def _factors(n: int, ctx: Context) -> torch.Tensor:
    return ctx.shared_scratch("factors of activations", 4 * n)[: 4 * n].view(torch.float32)


def lower_trained(found: TrainedOfOne, ctx: Context) -> list[Step]:
    """Up to three products of one x with adapters beside them."""
    parts, x = found.parts, found.parts[0].down["x"]
    (k, n), rank, count = x.ne[:2], parts[0].down.ne[0], len(parts)
    wide = k + count * rank
    values, factors = _half("activations and ranks", n, wide, ctx), _factors(n, ctx)
    steps = _rounded(found, values, factors, ctx)
    stack = kept([part.y["weights"] for part in parts], count * rank, ctx)
    for place, part in enumerate(parts):
        packed, made = ctx.packed(part.y["weights"])
        b, out = ctx.view(part.up["weights"]).torch()[0, 0], ctx.view(part.out).torch()[0, 0]
        if stack is not None:
            w = stack.memory[stack.starts[place] : stack.starts[place + 1], :wide]
            steps += [Once(lines(packed, w)), _columns(b, w[:, k:], place, count)]
            steps.append(gemm_large.multiply_step(values, w, out))
        else:
            steps += made
            for first, end in gemm_large.slices(packed.rows, wide):
                w = _half("weights in f16", end - first, wide, ctx)
                steps += [lines(packed.part(first, end), w), _columns(b[first:end], w[:, k:], place, count)]
                steps.append(gemm_large.multiply_step(values, w, out[:, first:end]))
        steps += finish_steps(Sums(out[None], factors), out)
    return steps


def _rounded(found: TrainedOfOne, values: torch.Tensor, factors: torch.Tensor, ctx: Context) -> list[Step]:
    """[x, u] of all adapters in f16, and u in f32."""
    parts, x = found.parts, found.parts[0].down["x"]
    (k, n), rank, count = x.ne[:2], parts[0].down.ne[0], len(parts)
    tiles = -(-n // _TOKENS)
    divided = n_parts(k, tiles)
    size = 4 * count * divided * n * rank
    sums = ctx.shared_scratch("parts of adapters' sums", size)[:size].view(torch.float32)
    three = [*parts, *[parts[0]] * (MAX_ADAPTED - count)]  # where there are fewer, the first one stands for the others
    a = {f"p_a{i}": ctx.view(part.down["weights"]).data for i, part in enumerate(three)}
    u = {f"p_u{i}": ctx.view(part.scaled).data for i, part in enumerate(three)}
    block, warps = _of_rows(k)
    shared: dict[str, Any] = {
        "p_x": ctx.view(x).data, "p_sums": sums, "n": n, "k": k, "N": count, "RANK": rank, "PDL": ctx.target.has_pdl,
    }  # fmt: skip
    down = shared | a | {
        "depth": -(-k // (divided * _DEPTH)) * _DEPTH, "T": _TOKENS, "D": _DEPTH,
        "PRECISION": "tf32x3" if ctx.target.is_nvidia else "ieee",
    }  # fmt: skip
    rounded = shared | u | {
        "p_out": memory_of(values), "p_factors": factors, "pitch": values.stride(0),
        "scale": parts[0].scaled.params.scale, "PARTS": divided, "BLOCK": block,
    }  # fmt: skip
    return [
        Launch(ranks_of, (tiles, divided), down, launch_options(ctx.target, 4)),
        Launch(round_with_ranks, (n,), rounded, launch_options(ctx.target, warps)),
    ]


def lines(packed: Packed, w: torch.Tensor) -> Launch:
    """packed to the first columns of w."""
    groups = packed.rows * packed.k // GROUP
    args = plane_args(packed) | {
        "p_out": memory_of(w), "n_groups": groups, "row_groups": packed.k // GROUP, "pitch": w.stride(0),
        "GROUPS": _GROUPS,
    }  # fmt: skip
    return Launch(dequantize_lines, (triton.cdiv(groups, _GROUPS),), args, {"num_warps": _WARPS})


def _columns(b: torch.Tensor, w: torch.Tensor, place: int, count: int) -> Launch:
    """[0.., b, 0..] to w, b in place `place` of `count`. b: f32 [rows, rank]."""
    rows, rank = b.shape
    args: dict[str, Any] = {
        "p_b": b, "p_out": memory_of(w), "n_rows": rows, "pitch": w.stride(0), "RANK": rank, "PLACE": place, "N": count,
        "COLS": triton.next_power_of_2(count * rank), "ROWS": _ROWS,
    }  # fmt: skip
    return Launch(copy_columns, (triton.cdiv(rows, _ROWS),), args, {"num_warps": _WARPS})


def lower_gradient(found: GradientOfOne, ctx: Context) -> list[Step]:
    """The sum of the gradients of one x."""
    k, n = found.out.ne[:2]
    more = len(found.plain) * found.plain[0]["a"].ne[1]
    stack = kept_before([t["a"] for t in found.packed], more, ctx)
    if stack is not None:  # gradients side by side in the order in which the weights lie
        by_weight = {t["a"]: t for t in found.packed}
        found = found._replace(packed=tuple(by_weight[w] for w in stack.weights))
    total = sum(t["a"].ne[1] for t in found.packed)
    values, factors = _half("activations and ranks", n, total + more, ctx), _factors(n, ctx)
    steps: list[Step] = [_side_by_side(found, values, factors, ctx)]
    w = gemm_large.scratch(total + more, k, ctx) if stack is None else stack.memory[:, :k]
    start = 0
    for node in found.packed if stack is None else ():
        packed, made = ctx.packed(node["a"])
        steps += [*made, dequantize(packed, w[start : start + packed.rows])]
        start += packed.rows
    steps.append(_rows(found, w[total:], ctx))
    out = ctx.view(found.out).torch()[0, 0]
    return [*steps, gemm_large.multiply_step(values, w.t(), out), *finish_steps(Sums(out[None], factors), out)]


def _rows(found: GradientOfOne, w: torch.Tensor, ctx: Context) -> Launch:
    """All adapters' a below each other to w."""
    a = [ctx.view(t["a"]).data for t in found.plain]
    n, k = found.plain[0]["a"].n_elements, w.shape[1]
    # where there are fewer, the first one stands for the others
    args: dict[str, Any] = {f"p_a{i}": a[i] if i < len(a) else a[0] for i in range(MAX_ADAPTED)}
    args |= {"p_out": memory_of(w), "n": n, "k": k, "pitch": w.stride(0), "BLOCK": _BLOCK}
    return Launch(copy_rows, (triton.cdiv(n, _BLOCK), len(a)), args, {"num_warps": _WARPS})


def _side_by_side(found: GradientOfOne, values: torch.Tensor, factors: torch.Tensor, ctx: Context) -> Launch:
    """[d, v] of all products in f16."""
    args: dict[str, Any] = {
        "p_out": memory_of(values), "p_factors": factors, "pitch": values.stride(0), "N": len(found.packed),
        "N_RANKS": len(found.plain), "RANK": found.plain[0]["a"].ne[1], "PDL": ctx.target.has_pdl,
    }  # fmt: skip
    warps = 1
    for i in range(MAX_ADAPTED):
        d = ctx.view((found.packed[i] if i < len(found.packed) else found.packed[0])["b"]).torch()[0, 0].t()
        v = ctx.view((found.plain[i] if i < len(found.plain) else found.plain[0])["b"]).torch()[0, 0].t()
        counts = i < len(found.packed)
        block, wished = _of_rows(d.shape[1]) if counts else (1, 1)
        warps = max(warps, wished)
        args |= {
            f"p_d{i}": memory_of(d), f"p_v{i}": memory_of(v), f"row{i}": d.stride(0), f"m{i}": d.shape[1],
            f"BLOCK{i}": block,
        }  # fmt: skip
    return Launch(round_several, (values.shape[0],), args, launch_options(ctx.target, warps))


TRAINED_PRODUCTS = Fusion("trained_products", trained_products, lower_trained)
GRADIENT_OF_X = Fusion("gradient_of_x", gradient_of_x, lower_gradient)
