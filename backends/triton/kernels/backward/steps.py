# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: no-check-untyped-defs, disable-error-code=annotation-unchecked
"""OPT_STEP_SGD and OPT_STEP_ADAMW. The fused form of AdamW also keeps the running means and writes all in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.context import Context, Step
from graphrt.backends.triton.kernels.backward.step_fusions import AdamwStep, adamw_step
from graphrt.backends.triton.kernels.common.pdl import take_turn
from graphrt.backends.triton.kernels.elementwise import Layout, Operand, row_offset
from graphrt.backends.triton.launch import Launch, launch_options
from graphrt.fusion import Fusion
from graphrt.tensor import Tensor

#: Elements of a row that a program takes at most.
_MOST = 1024


@triton.jit
def _adamw(a, m, v, p_hyper, s_hyper):
    """a * (1 - alpha * wd) - alpha * (m * m_h) / (sqrt(v * v_h) + eps)."""
    alpha, eps = tl.load(p_hyper), tl.load(p_hyper + s_hyper)
    wd, m_h, v_h = (
        tl.load(p_hyper + 2 * s_hyper), tl.load(p_hyper + 3 * s_hyper), tl.load(p_hyper + 4 * s_hyper)
    )  # fmt: skip
    return a * (1.0 - alpha * wd) - tl.div_rn(alpha * (m * m_h), tl.sqrt_rn(v * v_h) + eps)


@accesses(reads="p_a p_m p_v p_hyper", writes="p_out")
@triton.jit(do_not_specialize=["n1", "n2", "a1", "a2", "a3", "m1", "m2", "m3", "v1", "v2", "v3"])
def opt_step(
    p_a, p_m, p_v, p_hyper, p_out, s_hyper, n0, n1, n2, a0, a1, a2, a3, m0, m1, m2, m3, v0, v1, v2, v3,
    ADAM: tl.constexpr, COLS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program has COLS elements of one of the rows of n0, out without gaps. m, v: the running means, or with SGD (not
    ADAM) both the gradient; a0 to v3: strides in elements; hyper: the op's numbers, s_hyper apart."""
    take_turn(PDL)
    n_parts = (n0 - 1) // COLS + 1
    row = (tl.program_id(0) // n_parts).to(tl.int64)
    i = (tl.program_id(0) % n_parts).to(tl.int64) * COLS + tl.arange(0, COLS)
    a = tl.load(p_a + row_offset(row, n1, n2, a1, a2, a3, 1) + i * a0, mask=i < n0, other=0.0)
    m = tl.load(p_m + row_offset(row, n1, n2, m1, m2, m3, 1) + i * m0, mask=i < n0, other=0.0)
    if ADAM:
        v = tl.load(p_v + row_offset(row, n1, n2, v1, v2, v3, 1) + i * v0, mask=i < n0, other=0.0)
        out = _adamw(a, m, v, p_hyper, s_hyper)
    else:
        alpha, wd = tl.load(p_hyper), tl.load(p_hyper + s_hyper)
        out = a * (1.0 - alpha * wd) - alpha * m
    tl.store(p_out + row * n0 + i, out, mask=i < n0)


@accesses(reads="p_grad p_a p_m p_v p_hyper", writes="p_a p_m p_v")
@triton.jit(do_not_specialize=["beta1", "rest1", "beta2", "rest2"])
def adamw_in_place(
    p_grad, p_a, p_m, p_v, p_hyper, s_hyper, n, beta1, rest1, beta2, rest2, COLS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """COLS of n elements a program: m = beta1 m + rest1 grad, v = beta2 v + rest2 grad^2, and the step from them."""
    take_turn(PDL)
    i = tl.program_id(0).to(tl.int64) * COLS + tl.arange(0, COLS)
    grad = tl.load(p_grad + i, mask=i < n, other=0.0)
    m = tl.load(p_m + i, mask=i < n, other=0.0) * beta1 + grad * rest1
    v = tl.load(p_v + i, mask=i < n, other=0.0) * beta2 + (grad * grad) * rest2
    a = tl.load(p_a + i, mask=i < n, other=0.0)
    tl.store(p_m + i, m, mask=i < n)
    tl.store(p_v + i, v, mask=i < n)
    tl.store(p_a + i, _adamw(a, m, v, p_hyper, s_hyper), mask=i < n)


def _hyper(node: Tensor, ctx: Context) -> dict[str, Any]:
    hyper = ctx.view(node["hyper"])
    return {"p_hyper": hyper.data, "s_hyper": hyper.strides[0]}


def lower_opt_step(nodes: Sequence[Tensor], ctx: Context) -> list[Step]:
    """OPT_STEP_SGD, OPT_STEP_ADAMW."""
    (node,) = nodes
    adam = node.op == "OPT_STEP_ADAMW"
    sources = [node[name] for name in (("a", "m", "v") if adam else ("a", "grad", "grad"))]
    given = [Operand.of(ctx.view(t)) for t in sources]
    layout = Layout.of(node.ne, given)
    cols = min(_MOST, triton.next_power_of_2(layout.ne[0]))
    strides = {f"{name}{i}": s for name, ss in zip("amv", layout.strides) for i, s in enumerate(ss)}
    args: dict[str, Any] = {
        **{f"p_{name}": x.data for name, x in zip("amv", given)}, **_hyper(node, ctx), "p_out": ctx.view(node).data,
        "n0": layout.ne[0], "n1": layout.ne[1], "n2": layout.ne[2], **strides, "ADAM": adam, "COLS": cols,
        "PDL": ctx.target.has_pdl,
    }  # fmt: skip
    programs = triton.cdiv(layout.ne[0], cols) * layout.n_rows
    return [Launch(opt_step, (programs,), args, launch_options(ctx.target, max(1, min(4, cols // 256))))]


def lower_adamw_step(found: AdamwStep, ctx: Context) -> list[Step]:
    """A whole step of AdamW in one launch."""
    step = found.step
    a, m, v = (_flat(t, ctx) for t in (step["a"], step["m"], step["v"]))
    args: dict[str, Any] = {
        "p_grad": _flat(found.grad, ctx), "p_a": a, "p_m": m, "p_v": v, **_hyper(step, ctx), "n": step.n_elements,
        "beta1": found.beta1, "rest1": found.rest1, "beta2": found.beta2, "rest2": found.rest2, "COLS": _MOST,
        "PDL": ctx.target.has_pdl,
    }  # fmt: skip
    return [Launch(adamw_in_place, (triton.cdiv(step.n_elements, _MOST),), args, launch_options(ctx.target, 4))]


def _flat(t: Tensor, ctx: Context) -> torch.Tensor:
    return ctx.view(t).data


LOWERINGS: dict[str, Callable[[Sequence[Tensor], Context], list[Step]]] = dict.fromkeys(
    ("OPT_STEP_SGD", "OPT_STEP_ADAMW"), lower_opt_step
)
ADAMW_STEP = Fusion("adamw_step", adamw_step, lower_adamw_step)
