"""What the kernels of an attention's gradients have in common: made once a run, whoever asks first launches it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton

from graphrt.backends.triton.accesses import Step
from graphrt.backends.triton.device import Target, interpreting
from graphrt.backends.triton.kernels.flash_attn.backward.deltas import (
    attention_back_delta,
    attention_back_halves,
    attention_back_norms,
    attention_back_scales,
)
from graphrt.backends.triton.kernels.flash_attn.backward.problem import KINDS, BackProblem
from graphrt.backends.triton.kernels.flash_attn.dropout_launch import KeptBits
from graphrt.backends.triton.kernels.flash_attn.score_code import function_of
from graphrt.backends.triton.launch import Launch, launch_options
from graphrt.tensor import Tensor

#: Elements that a program of attention_back_delta, attention_back_norms and attention_back_halves takes, in whole rows.
ELEMENTS = 4096
#: Of what these found, so many are looked at together.
SCALES_BLOCK = 4096
#: By how much less dS is scaled where a score function may multiply it: slopes up to 16 times that stay within f16.
STEEPEST = 256.0


@dataclass(frozen=True, eq=False)
class Rows:
    """Of the rows of the softmax. delta: f32 [n_seq, n_head, n_q]; scales: f32 [2], powers of two: what d_out is
    multiplied with before it is rounded, and what dS is (1 and 1 unless products are in f16)."""

    delta: torch.Tensor
    scales: torch.Tensor


@dataclass(frozen=True, eq=False)
class Halves:
    """What is multiplied with k and v, as kernels read it: q and d_out, each [n_seq, n_head, n_q, D] in memory of its
    own, rounded to what products are in, d_out times scales[0] before. Of f32 they are the graph's own.

    q_strides, d_strides: of a query, a head and a sequence, in elements.
    """

    q: torch.Tensor
    d_out: torch.Tensor
    q_strides: tuple[int, int, int]
    d_strides: tuple[int, int, int]


class Shared:
    """The shared things of one program, by what they are made of. kept: dropout's bits."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.kept = KeptBits()
        self._made: dict[tuple[Any, ...], Any] = {}

    def once(self, key: tuple[Any, ...], make: Any) -> tuple[Any, list[Step]]:
        """(what make() gives first, the launches that it gives behind it, none the second time)."""
        if key in self._made:
            return self._made[key], []
        self._made[key], steps = make()
        return self._made[key], steps

    def empty(self, *shape: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=kind, device=self.target.device)

    def rows(self, p: BackProblem) -> tuple[Rows, list[Step]]:
        """delta and scales."""
        return self.once(("rows", p.d_out_t, p.out_t, p.d_lse_t, p.v_t, p.kind), lambda: self._rows(p))

    def halves(self, p: BackProblem) -> tuple[Halves, list[Step]]:
        """q and d_out as kernels multiply them; the launches make rows() too where nobody has."""
        rows, steps = self.rows(p)
        if p.kind == "f32":
            own = Halves(p.f32(p.q_t), p.f32(p.d_out_t), p.strides(p.q_t)[1:], _by_query(p, p.d_out_t))
            return own, steps
        q, made = self.once(("half", p.q_t, p.kind), lambda: self._half(p, p.q_t, p.strides(p.q_t)[1:], None))
        steps += made
        d_out, made = self.once(
            ("half", p.d_out_t, p.kind), lambda: self._half(p, p.d_out_t, _by_query(p, p.d_out_t), rows.scales)
        )
        steps += made
        return Halves(q, d_out, _contiguous(p, p.d[0]), _contiguous(p, p.d[1])), steps

    def _rows(self, p: BackProblem) -> tuple[Rows, list[Step]]:
        scaled = p.kind == "f16"
        block = triton.next_power_of_2(p.d[1])
        at_once = max(1, ELEMENTS // block)
        grid = (p.n_head, triton.cdiv(p.n_q, at_once), p.n_batch)
        programs = math.prod(grid)
        rows = Rows(self.empty(p.n_batch, p.n_head, p.n_q), torch.ones(2, device=self.target.device))
        sizes = self.empty(programs if scaled else 1, 2)
        starts = p.memory(p.q_starts, torch.int32) if p.q_starts is not None else torch.zeros(
            1, dtype=torch.int32, device=self.target.device
        )  # fmt: skip
        d_lse = p.d_lse_t
        args = {
            "p_d_out": p.f32(p.d_out_t), "p_out": p.f32(p.out_t),
            "p_d_lse": p.f32(d_lse if d_lse is not None else p.lse_t), "p_starts": starts, "p_delta": rows.delta,
            "p_sizes": sizes, "n_q": p.n_q, "n_head": p.n_head, "n_seq": p.n_seq,
            **dict(zip(("od_t", "od_h", "od_s"), _by_query(p, p.d_out_t))),
            **dict(zip(("oo_t", "oo_h", "oo_s"), _by_query(p, p.out_t))),
            **dict(zip(("ol_h", "ol_t", "ol_s"), p.strides(d_lse) if d_lse is not None else (0, 0, 0, 0))),
            "D_V": p.d[1], "BLOCK": block, "ROWS": at_once, "HAS_D_LSE": d_lse is not None,
            "PACKED": p.is_packed, "SIZES": scaled, "PDL": self.target.has_pdl,
        }  # fmt: skip
        steps: list[Step] = [Launch(attention_back_delta, grid, args, launch_options(self.target, 4))]
        return rows, steps + (self._scales(p, rows, sizes) if scaled else [])

    def _scales(self, p: BackProblem, rows: Rows, sizes: torch.Tensor) -> list[Step]:
        v, (d, n, *heads) = p.v, p.v_t.ne
        block = triton.next_power_of_2(d)
        at_once = max(1, ELEMENTS // block)
        grid = (heads[0], triton.cdiv(n, at_once), heads[1])
        programs = math.prod(grid)
        norms = self.empty(programs)
        args = {
            "p_x": v.data, "p_norms": norms, "n": n,
            **dict(zip(("s_n", "s_h", "s_s"), v.strides)), "D": d, "BLOCK": block,
            "ROWS": at_once, "PDL": self.target.has_pdl,
        }  # fmt: skip
        options = launch_options(self.target, 4)
        slopes = STEEPEST if function_of(p.params) is not None else 1.0
        last = {
            "p_sizes": sizes, "p_norms": norms, "p_scales": rows.scales, "n_sizes": sizes.shape[0], "n_norms": programs,
            "inverse": slopes / (1.0 - p.dropout_p), "BLOCK": SCALES_BLOCK, "PDL": self.target.has_pdl,
        }  # fmt: skip
        return [
            Launch(attention_back_norms, grid, args, options),
            Launch(attention_back_scales, (1,), last, launch_options(self.target, 16)),
        ]

    def _half(
        self, p: BackProblem, t: Tensor, strides: tuple[int, int, int], scales: torch.Tensor | None
    ) -> tuple[torch.Tensor, list[Step]]:
        """A tensor's rows rounded, the result [n_seq, n_head, n_q, D]. strides: of a query, a head, a sequence."""
        d, kind = t.ne[0], KINDS[p.kind]
        if interpreting() and kind == torch.bfloat16:
            kind = torch.float32  # Triton's interpreter gets bf16 wrong
        made = self.empty(p.n_batch, p.n_head, p.n_q, d, kind=kind)
        block = triton.next_power_of_2(d)
        rows = max(1, ELEMENTS // block)
        args = {
            "p_x": p.f32(t), "p_scales": scales if scales is not None else p.f32(t), "p_made": made,
            "n_q": p.n_q, "n_head": p.n_head, **dict(zip(("s_t", "s_h", "s_s"), strides)),
            "D": d, "BLOCK": block, "ROWS": rows, "SCALED": scales is not None and p.kind == "f16",
            "PDL": self.target.has_pdl,
        }  # fmt: skip
        grid = (p.n_head, triton.cdiv(p.n_q, rows), p.n_batch)
        return made, [Launch(attention_back_halves, grid, args, launch_options(self.target, 4))]


def _by_query(p: BackProblem, t: Tensor) -> tuple[int, int, int]:
    """Strides of a query, a head and a sequence of a result [D, n_head, n_q, n_seq]."""
    _, head, query, sequence = p.strides(t)
    return query, head, sequence


def _contiguous(p: BackProblem, d: int) -> tuple[int, int, int]:
    return d, p.n_q * d, p.n_head * p.n_q * d
