# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: no-check-untyped-defs, disable-error-code=annotation-unchecked
"""Both gradients of a GLU in one launch: gate, value and what comes from the result are read once."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.context import Context, Step
from graphrt.backends.triton.kernels.backward.glu_fusions import GluBack, glu_back
from graphrt.backends.triton.kernels.common.activation import activation
from graphrt.backends.triton.kernels.common.derivative import derivative
from graphrt.backends.triton.kernels.common.pdl import take_turn
from graphrt.backends.triton.launch import Launch, launch_options
from graphrt.fusion import Fusion

#: Elements of a program.
_BLOCK = 1024


@accesses(reads="p_d p_gate p_value", writes="p_of_gate p_of_value")
@triton.jit
def glu_gradients(
    p_d, p_gate, p_value, p_of_gate, p_of_value, n, KIND: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """of_gate = d * value * f'(gate), of_value = d * f(gate), BLOCK of n elements a program."""
    take_turn(PDL)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.load(p_d + i, mask=i < n, other=0.0)
    gate = tl.load(p_gate + i, mask=i < n, other=0.0)
    value = tl.load(p_value + i, mask=i < n, other=0.0)
    tl.store(p_of_gate + i, d * value * derivative(gate, KIND), mask=i < n)
    tl.store(p_of_value + i, d * activation(gate, KIND, False), mask=i < n)


def lower_glu_back(found: GluBack, ctx: Context) -> list[Step]:
    """Both gradients of a GLU."""
    n = found.d.n_elements
    args: dict[str, Any] = {
        "p_d": ctx.view(found.d).data, "p_gate": ctx.view(found.gate).data, "p_value": ctx.view(found.value).data,
        "p_of_gate": ctx.view(found.of_gate).data, "p_of_value": ctx.view(found.of_value).data, "n": n,
        "KIND": found.kind, "BLOCK": _BLOCK, "PDL": ctx.target.has_pdl,
    }  # fmt: skip
    return [Launch(glu_gradients, (triton.cdiv(n, _BLOCK),), args, launch_options(ctx.target, 4))]


GLU_BACK = Fusion("glu_back", glu_back, lower_glu_back)
