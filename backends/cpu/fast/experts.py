"""Rows of experts' matrices times vectors, straight from GGUF's blocks: each token's own experts, found at run time."""

from __future__ import annotations

import functools
import math

from graphrt.backends.cpu.fast.ir import F32, LANES, Fn, Val
from graphrt.backends.cpu.fast.jit import Kernel
from graphrt.backends.cpu.fast.matvec import F32_BITS, Rows, check_rows
from graphrt.backends.cpu.fast.pool import Entry, Step
from graphrt.backends.cpu.fast.rows import in_range, load_index


def _build(f: Fn, rows: Rows) -> None:
    """Pairs of a token and a slot one after the other; threads share the rows of each."""
    y, w, x, ids, n_rows, n, n_slots, n_tok = f.args("y", "w", "x", "ids", "n_rows", "n", "n_slots", "n_tok")
    n_expert, w_nb, expert_nb, bias, bias_nb = f.args("n_expert", "w_nb", "expert_nb", "bias", "bias_nb")
    start, stop = f.share(n_rows, LANES)
    with f.range(0, n_tok) as t, f.range(0, n_slots) as slot:
        row_of: dict[str, Val] = {}
        for name, base in (("y", y), ("x", x), ("ids", ids)):
            slot_nb, tok_nb = f.args(f"{name}_slot_nb", f"{name}_tok_nb")
            row_of[name] = base + slot * slot_nb + t * tok_nb
        expert = load_index(f, row_of["ids"], "i32")
        with f.if_else(in_range(f, expert, n_expert)) as (then, other):
            with then, f.range(start, stop) as r:
                (dot,) = rows.dots(f, w + expert * expert_nb + r * w_nb, [row_of["x"]], n)
                total = f.var(dot)
                with f.if_(bias.ne(0)):
                    total.v = dot + f.load(bias + expert * bias_nb + r * 4, F32)
                f.store(row_of["y"] + r * 4, total.v)
            with other, f.range(start, stop) as r:
                f.store(row_of["y"] + r * 4, f.const(math.nan, F32))


@functools.cache
def _kernel(name: str, rows: Rows) -> Kernel:
    strides = [f"{name}_{of}_nb" for name in ("y", "x", "ids") for of in ("slot", "tok")]
    return Kernel(
        f"expert_gemv_{name}",
        ("y", "w", "x", "ids", "bias", "n_rows", "n", "n_slots", "n_tok", "n_expert", "w_nb", "expert_nb", "bias_nb",
         *strides),
        lambda f: _build(f, rows),
        optional=("bias", "bias_nb"),
    )  # fmt: skip


def expert_gemv(
    type_name: str,
    *,
    y: int,
    w: int,
    x: int,
    ids: int,
    n_rows: int,
    n: int,
    n_slots: int,
    n_tok: int,
    n_expert: int,
    w_nb: int,
    expert_nb: int,
    y_nb: tuple[int, int],
    x_nb: tuple[int, int],
    ids_nb: tuple[int, int],
    bias: int = 0,
    bias_nb: int = 0,
    bits: int = F32_BITS,
) -> Step:
    """y[t, s, r] = dot(W[e][r], x[t, s]) (+ bias[e, r]), e = ids[t, s]; NaN where that is not one of 0..n_expert-1.

    w: n_expert matrices, expert_nb bytes apart, of n_rows rows of n values, w_nb bytes apart; bias: f32 rows, bias_nb
    bytes apart. ids: i32. y_nb, x_nb and ids_nb: bytes between slots and between tokens; 0 between slots of x for one
    row a token. x and y: f32; bits: 16 or 8 where x are rows that round_rows() rounded to so many for this type.
    """
    check_rows(n, type_name)
    rows = Rows(type_name, bits)
    kernel = _kernel(rows.name, rows)
    strides = {
        f"{name}_{of}_nb": nb
        for name, pair in (("y", y_nb), ("x", x_nb), ("ids", ids_nb))
        for of, nb in zip(("slot", "tok"), pair, strict=True)
    }
    block = kernel.pack(
        y=y, w=w, x=x, ids=ids, n_rows=n_rows, n=n, n_slots=n_slots, n_tok=n_tok, n_expert=n_expert, w_nb=w_nb,
        expert_nb=expert_nb, bias=bias, bias_nb=bias_nb, **strides,
    )  # fmt: skip
    return Step([Entry(kernel, block)], n_slots * n_tok * n_rows * w_nb)
