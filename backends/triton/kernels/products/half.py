"""What stands before and after a product in 16 bits: rows of activations as f16, and sums made into results.

f16 ends at 65504, and activations may pass that. So a row is held as x * 2^-e, whose largest value lies in f16's range
with room below, and its products are multiplied by 2^e again: exact both ways. e is 0 for all but very large and very
small rows, and is found on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton

from graphrt.backends.triton.accesses import Call
from graphrt.backends.triton.context import Context, Step
from graphrt.backends.triton.kernels.products.half_kernels import finish, finish_rounded, rescale_rows, round_rows
from graphrt.backends.triton.launch import Launch, launch_options
from graphrt.backends.triton.memory import span_of

#: Elements that a program handles at a time.
_BLOCK = 1024
#: The longest rows that a program holds whole.
MAX_WHOLE_ROW = 16384
#: Programs of `finish` for a row at most, when there is work for each of its elements.
_MOST_BLOCKS = 128


@dataclass(frozen=True, eq=False)
class Activations:
    """Activations [rows, k], contiguous, in the type that they are multiplied in: f16, bf16 or f32.

    factors: f32 [rows], what each row's products are to be multiplied by; None: nothing. ordered: of each 128 elements
    in gemm_small/wgmma.py's order.
    """

    values: torch.Tensor
    factors: torch.Tensor | None = None
    ordered: bool = False

    @property
    def rows(self) -> int:
        return self.values.shape[0]

    @property
    def k(self) -> int:
        return self.values.shape[1]


@dataclass(frozen=True)
class Gate:
    """A GLU that joins two products. kind: as in ops/unary.py's GLU_KINDS; alpha, limit: swiglu_oai's."""

    kind: str
    alpha: float = 0.0
    limit: float = 0.0


@dataclass(frozen=True, eq=False)
class Sums:
    """A product on its way. parts: f32 [parts, rows, m], to be added up and multiplied by `factors`, f32 [rows].

    complete: there is one part, the result itself, with all that was to be added.
    """

    parts: torch.Tensor
    factors: torch.Tensor | None = None
    complete: bool = False


def in_type(x: torch.Tensor, kind: torch.dtype, ctx: Context, ordered: bool = False) -> tuple[Activations, list[Step]]:
    """Activations f32 or f16 [b3, b2, n, k] of any strides in `kind`, rounded once, and the steps that make them so.

    ordered: of f32 as f16; k is a multiple of 128.
    """
    rows, k = x[..., 0].numel(), x.shape[-1]
    if x.dtype == kind and x.is_contiguous():
        return Activations(x.view(rows, k)), []
    memory = ctx.shared_scratch(f"activations in {kind}{', ordered' * ordered}", rows * k * kind.itemsize)
    out = memory[: rows * k * kind.itemsize].view(kind).view(rows, k)
    if kind is not torch.float16 or x.dtype is not torch.float32:
        return Activations(out), [copying(x, out.view(x.shape))]
    factors = ctx.shared_scratch("factors of activations", rows * 4)[: rows * 4].view(torch.float32)
    whole = k <= MAX_WHOLE_ROW
    block, warps = _whole_row(k) if whole else (_BLOCK, 4)
    args: dict[str, Any] = {
        "p_x": memory_of(x), "p_out": out, "p_factors": factors, "stride_0": x.stride(3), "stride_1": x.stride(2),
        "stride_2": x.stride(1), "stride_3": x.stride(0), "n_1": x.shape[2], "n_2": x.shape[1], "k": k, "WHOLE": whole,
        "ORDERED": ordered, "BLOCK": block, "PDL": ctx.target.has_pdl,
    }  # fmt: skip
    return Activations(out, factors, ordered), [Launch(round_rows, (rows,), args, launch_options(ctx.target, warps))]


def _whole_row(k: int) -> tuple[int, int]:
    """(block, warps) of a program that holds a row of k elements."""
    block = triton.next_power_of_2(k)
    return block, max(1, min(16, block // 512))


def copying(source: torch.Tensor, target: torch.Tensor) -> Step:
    """Copies a tensor into another of its shape, rounding to its type."""
    return Call("copy", partial(target.copy_, source), [source], [target], helper=True)


def memory_of(x: torch.Tensor) -> torch.Tensor:
    """A strided tensor's memory from its first element to its last, as what a kernel gets a pointer from."""
    return x.as_strided((1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride())),), (1,))


def finish_steps(
    a: Sums, out: torch.Tensor, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None,
    b: Sums | None = None, gate: Gate | None = None,
) -> list[Step]:  # fmt: skip
    """What makes sums into out, f32 [rows, m]: nothing, if that is what they are.

    b: the other product, for a gate. bias: f32 [m]; residual: f32 [rows, m]; it may be out. All are contiguous.
    """
    if a.complete and gate is None:
        return []
    rows, cols = out.shape
    in_place = span_of(a.parts)[:2] == span_of(out)[:2] and a.parts.shape[0] == 1
    only_factors = in_place and bias is None and residual is None and gate is None
    if only_factors and a.factors is None:
        return []
    b = b or a
    args: dict[str, Any] = {
        "p_a": a.parts, "p_a_factors": out if a.factors is None else a.factors, "p_b": b.parts,
        "p_b_factors": out if b.factors is None else b.factors, "p_bias": out if bias is None else bias,
        "p_residual": out if residual is None else residual, "p_out": out, "part_stride": rows * cols, "cols": cols,
        "alpha": gate.alpha if gate else 0.0, "limit": gate.limit if gate else 0.0, "A_PARTS": a.parts.shape[0],
        "A_FACTORS": a.factors is not None, "B_PARTS": b.parts.shape[0], "B_FACTORS": b.factors is not None,
        "GLU": gate.kind if gate else "", "HAS_BIAS": bias is not None, "HAS_RESIDUAL": residual is not None,
        "ONLY_FACTORS": only_factors, "BLOCK": _BLOCK,
    }  # fmt: skip
    blocks = 1 if only_factors else min(triton.cdiv(cols, _BLOCK), _MOST_BLOCKS)
    return [Launch(finish, (rows, blocks), args, {"num_warps": 4})]


def finish_in_f16(a: Sums, b: Sums, out: Activations, gate: Gate) -> list[Step]:
    """What joins sums by a gate and rounds the result as in_type() would. out: f16 and factors, in memory that none of
    the sums has; rows of 2 to MAX_WHOLE_ROW elements."""
    assert out.factors is not None
    block, warps = _whole_row(out.k)
    args: dict[str, Any] = {
        "p_a": a.parts, "p_a_factors": out.factors if a.factors is None else a.factors, "p_b": b.parts,
        "p_b_factors": out.factors if b.factors is None else b.factors, "p_out": out.values, "p_factors": out.factors,
        "part_stride": out.rows * out.k, "cols": out.k, "alpha": gate.alpha, "limit": gate.limit,
        "A_PARTS": a.parts.shape[0], "A_FACTORS": a.factors is not None, "B_PARTS": b.parts.shape[0],
        "B_FACTORS": b.factors is not None, "GLU": gate.kind, "BLOCK": block,
    }  # fmt: skip
    return [Launch(finish_rounded, (out.rows,), args, {"num_warps": warps})]


def rescaling(out: torch.Tensor, factors: torch.Tensor | None) -> list[Step]:
    """What multiplies out, f32 [n, heads, m] with rows of any place, by the factors of its rows, f32 [n * heads]."""
    if factors is None:
        return []
    n, heads, m = out.shape
    args: dict[str, Any] = {
        "p_out": out, "p_factors": factors, "stride_0": out.stride(0), "stride_1": out.stride(1), "n_1": heads,
        "cols": m, "BLOCK": _BLOCK,
    }  # fmt: skip
    return [Launch(rescale_rows, (n * heads,), args, {"num_warps": 4})]
