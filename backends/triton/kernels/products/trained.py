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
from graphrt.backends.triton.kernels.dequantize import plane_args
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
    dequantize_with_columns,
    dequantize_with_rows,
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
    values, factors = _half("activations and ranks", n, k + count * rank, ctx), _factors(n, ctx)
    steps = _rounded(found, values, factors, ctx)
    stack = kept([part.y["weights"] for part in parts], count * rank, ctx)
    for place, part in enumerate(parts):
        packed, made = ctx.packed(part.y["weights"])
        b, out = ctx.view(part.up["weights"]).torch()[0, 0], ctx.view(part.out).torch()[0, 0]
        if stack is not None:
            w = stack.memory[stack.starts[place] : stack.starts[place + 1], : k + count * rank]
            columns = _with_columns(packed, b, w, place, count)
            steps += [Once(columns), _only_columns(columns), gemm_large.multiply_step(values, w, out)]
            steps += finish_steps(Sums(out[None], factors), out)
            continue
        steps += made
        for first, end in gemm_large.slices(packed.rows, k + count * rank):
            w = _half("weights in f16", end - first, k + count * rank, ctx)
            steps.append(_with_columns(packed.part(first, end), b[first:end], w, place, count))
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


def _with_columns(packed: Packed, b: torch.Tensor, w: torch.Tensor, place: int, count: int) -> Launch:
    """[packed, 0.., b, 0..] to w; b: f32 [rows, rank], in place `place` of `count`."""
    groups, rank = packed.rows * packed.k // GROUP, b.shape[1]
    tiles = triton.cdiv(groups, _GROUPS)
    args = plane_args(packed) | {
        "p_b": b, "p_out": memory_of(w), "n_groups": groups, "row_groups": packed.k // GROUP, "n_rows": packed.rows,
        "n_tiles": tiles, "pitch": w.stride(0), "GROUPS": _GROUPS, "RANK": rank, "PLACE": place, "N": count,
        "COLS": triton.next_power_of_2(count * rank), "ROWS": _ROWS,
    }  # fmt: skip
    grid = (tiles + triton.cdiv(packed.rows, _ROWS),)
    return Launch(dequantize_with_columns, grid, args, {"num_warps": _WARPS})


def _only_columns(launch: Launch) -> Launch:
    """The part of _with_columns() that a run must do anew."""
    tiles = launch.args["n_tiles"]
    return Launch(launch.kernel, (launch.grid[0] - tiles,), launch.args | {"n_tiles": 0}, launch.options)


def lower_gradient(found: GradientOfOne, ctx: Context) -> list[Step]:
    """The sum of the gradients of one x."""
    k, n = found.out.ne[:2]
    rank, more = found.plain[0]["a"].ne[1], len(found.plain) * found.plain[0]["a"].ne[1]
    stack = kept_before([t["a"] for t in found.packed], more, ctx)
    if stack is not None:  # gradients side by side in the order in which the weights lie
        by_weight = {t["a"]: t for t in found.packed}
        found = found._replace(packed=tuple(by_weight[w] for w in stack.weights))
    total = sum(t["a"].ne[1] for t in found.packed)
    values, factors = _half("activations and ranks", n, total + more, ctx), _factors(n, ctx)
    steps: list[Step] = [_side_by_side(found, values, factors, ctx)]
    w = gemm_large.scratch(total + more, k, ctx) if stack is None else stack.memory[:, :k]
    start = 0
    for i, node in enumerate(found.packed):
        packed, made = ctx.packed(node["a"])
        own = w[start : start + packed.rows]
        # the first one's launch copies the first adapter's rows too, and so on; the last one's those that are left
        last = i == len(found.packed) - 1
        for j in range(i, max(i + 1, len(found.plain)) if last else i + 1):
            a, at = (found.plain[j]["a"], total + j * rank) if j < len(found.plain) else (None, 0)
            launch = _with_rows(packed, own, None if a is None else ctx.view(a).data, w[at : at + rank])
            if stack is None and j == i:
                steps += [*made, launch]
            elif a is not None:
                steps.append(_only_rows(launch))
        start += packed.rows
    out = ctx.view(found.out).torch()[0, 0]
    return [*steps, gemm_large.multiply_step(values, w.t(), out), *finish_steps(Sums(out[None], factors), out)]


def _with_rows(packed: Packed, w: torch.Tensor, a: torch.Tensor | None, rows: torch.Tensor) -> Launch:
    """packed to w, and a, f32, if there is one, to rows in f16."""
    groups, more = packed.rows * packed.k // GROUP, 0 if a is None else a.numel()
    tiles = triton.cdiv(groups, _GROUPS)
    args = plane_args(packed) | {
        "p_a": w if a is None else a, "p_out": memory_of(w), "p_rows": memory_of(rows), "n_groups": groups,
        "n_tiles": tiles, "n_more": more, "k": packed.k, "pitch": rows.stride(0), "GROUPS": _GROUPS, "BLOCK": _BLOCK,
    }  # fmt: skip
    return Launch(dequantize_with_rows, (tiles + triton.cdiv(more, _BLOCK),), args, {"num_warps": _WARPS})


def _only_rows(launch: Launch) -> Launch:
    """The part of _with_rows() that copies an adapter."""
    tiles = launch.args["n_tiles"]
    args = launch.args | {"n_tiles": 0, "p_out": launch.args["p_rows"]}
    return Launch(launch.kernel, (launch.grid[0] - tiles,), args, launch.options)


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
