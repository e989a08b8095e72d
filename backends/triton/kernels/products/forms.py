"""The form of activations: what the memory of a tensor holds that products read.

A kernel reads activations in one form (route.py). Where only products read what a norm or a GLU makes, and all of them
in the same form, its launch writes that form into the tensor's own memory, which is large enough for each. Where others
read it too, it is stored as the graph has it, and a norm may write a copy in 8 bits beside it. plan.py decides this
before anything is launched. Writers and readers find the memory by the functions here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from graphrt.backends.triton.context import Context
from graphrt.backends.triton.kernels.products.activations import Q8Rows
from graphrt.backends.triton.kernels.products.half import Activations
from graphrt.tensor import Tensor


class Form(Enum):
    """AS_IS: the tensor's own type and strides. F16_SCALED: each row may be scaled by a power of two, whose inverse is
    in a row of factors behind the values (half.py). F16_ORDERED: each 128 elements in the order in which the kernels
    for wgmma read them. Q8: 8 bits in groups of 32 (activations.py). All but AS_IS: rows without gaps."""

    AS_IS = "as the graph has it"
    F32 = "f32"
    BF16 = "bf16"
    F16 = "f16"
    F16_SCALED = "f16 with a factor a row"
    F16_ORDERED = "f16 in wgmma's order"
    Q8 = "8 bits in groups of 32"

    @property
    def dtype(self) -> torch.dtype:
        """The type of the values, of all forms but AS_IS and Q8."""
        return {Form.F32: torch.float32, Form.BF16: torch.bfloat16}.get(self, torch.float16)

    def is_readable_as(self, wanted: Form) -> bool:
        """A kernel that reads `wanted` can read this: what lies AS_IS is converted first, other forms stay as they are.
        Kernels for F16 take factors of rows."""
        return self in (Form.AS_IS, wanted) or (self is Form.F16_SCALED and wanted is Form.F16)


@dataclass(frozen=True)
class Stored:
    """What a launch stores of its result. form: in the tensor's memory; q8_copy: also 8 bits, in memory of its own."""

    form: Form = Form.AS_IS
    q8_copy: bool = False


def q8_in_place(t: Tensor, ctx: Context) -> Q8Rows:
    """t's memory as its rows in 8 bits."""
    return Q8Rows.inside(ctx.view(t).data, t.n_rows, t.ne[0])


def q8_copy(t: Tensor, ctx: Context) -> Q8Rows:
    """Memory for t's rows in 8 bits: the same one whenever it is asked for."""
    key = ("copy in 8 bits", t)
    if key not in ctx.shared:
        ctx.shared[key] = Q8Rows.empty(t.n_rows, t.ne[0], ctx.target.device)
    found: Q8Rows = ctx.shared[key]
    return found


def f16_in_place(t: Tensor, form: Form, ctx: Context) -> Activations:
    """t's memory as its rows in F16, F16_ORDERED or F16_SCALED."""
    rows, k, memory = t.n_rows, t.ne[0], ctx.view(t).data
    values = memory.view(torch.float16)[: rows * k].view(rows, k)
    factors = memory[-(-rows * k // 2) :][:rows] if form is Form.F16_SCALED else None
    return Activations(values, factors, form is Form.F16_ORDERED)
