"""Rows of experts' matrices times vectors, straight from GGUF's blocks: each token's own experts, found at run time.

For few tokens pairs of a token and a slot go one after the other. For many they are put in order by expert first, so
that each expert's rows are unpacked once for all its pairs, as `tiles.py` does it for a matrix that all tokens share.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from graphrt.backends.cpu.fast.blocks import check_rows
from graphrt.backends.cpu.fast.integer import Form, integer_dots, panel_form_of
from graphrt.backends.cpu.fast.ir import F32, I32, LANES, Fn, Val
from graphrt.backends.cpu.fast.jit import Kernel
from graphrt.backends.cpu.fast.matvec import F32_BITS, Rows
from graphrt.backends.cpu.fast.pool import Entry, Step
from graphrt.backends.cpu.fast.rows import in_range, load_index
from graphrt.backends.cpu.fast.tiles import multiply_rows, own_panel, put_rows

#: Most pairs of an expert whose rows are decoded one by one: unpacking 16 rows pays beyond.
ROW_BY_ROW = 2


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


# many tokens


def order_bytes(n_expert: int, n_pairs: int) -> int:
    """What expert_order() needs: where each expert's pairs begin, and the pairs' numbers."""
    return 4 * (n_expert + 3 + n_pairs)


def _build_order(f: Fn) -> None:
    """Counts, adds up, places: an expert's pairs stay in order. Experts that don't exist are one behind the last."""
    ids, slot_nb, tok_nb, starts = f.args("ids", "ids_slot_nb", "ids_tok_nb", "starts")
    n_slots, n_tok, n_expert = f.args("n_slots", "n_tok", "n_expert")
    pairs = starts + (n_expert + 3) * 4

    def count(expert: Val, by: int) -> Val:
        """Adds to the number `by` behind an expert's, and gives what it was."""
        at = starts + (expert + by) * 4
        before = f.load(at, I32)
        f.store(at, before + 1)
        return before

    def each(body: Callable[[Val, Val], None]) -> None:
        with f.range(0, n_tok) as t, f.range(0, n_slots) as slot:
            expert = load_index(f, ids + slot * slot_nb + t * tok_nb, "i32")
            body(t * n_slots + slot, f.select(in_range(f, expert, n_expert), expert, n_expert))

    def place(pair: Val, expert: Val) -> None:
        f.store(pairs + count(expert, 1).sext(pair.t) * 4, pair.trunc(I32))

    with f.if_(f.ith.eq(0)):
        with f.range(0, n_expert + 3) as e:
            f.store(starts + e * 4, f.const(0, I32))
        each(lambda _, expert: (count(expert, 2), None)[1])
        with f.range(1, n_expert + 3) as e:
            f.store(starts + e * 4, f.load(starts + e * 4, I32) + f.load(starts + e * 4 - 4, I32))
        each(place)  # each start moves up to its end, which is the next one's start


@functools.cache
def order_kernel() -> Kernel:
    names = ("starts", "ids", "n_slots", "n_tok", "n_expert", "ids_slot_nb", "ids_tok_nb")
    return Kernel("expert_order", names, _build_order)


def expert_order(*, starts: int, ids: int, n_slots: int, n_tok: int, n_expert: int, ids_nb: tuple[int, int]) -> Step:
    """Puts pairs of a token and a slot in order by their expert, for expert_gemm(). ids: i32, ids_nb bytes between
    slots and between tokens; starts: order_bytes() of memory."""
    block = order_kernel().pack(
        starts=starts, ids=ids, n_slots=n_slots, n_tok=n_tok, n_expert=n_expert, ids_slot_nb=ids_nb[0],
        ids_tok_nb=ids_nb[1],
    )  # fmt: skip
    return Step([Entry(order_kernel(), block)], 16 * n_slots * n_tok)


class Pairs:
    """Pairs in order, and where their rows of x and y are."""

    def __init__(self, f: Fn) -> None:
        self.f = f
        self.starts, self.n_slots, n_expert = f.args("starts", "n_slots", "n_expert")
        self.pairs = self.starts + (n_expert + 3) * 4

    def of(self, expert: Val) -> tuple[Val, Val]:
        """Where an expert's begin and end."""
        first, last = (load_index(self.f, self.starts + (expert + i) * 4, "i32") for i in range(2))
        return first, last

    def row(self, name: str, place: Val) -> Val:
        """The address of the row of x or y of the pair at a place."""
        base, slot_nb, tok_nb = self.f.args(name, f"{name}_slot_nb", f"{name}_tok_nb")
        pair = load_index(self.f, self.pairs + place * 4, "i32")
        return base + pair % self.n_slots * slot_nb + pair // self.n_slots * tok_nb

    def spoil_missing(self, rows: tuple[Val, Val]) -> None:
        """Rows of y of the pairs whose expert does not exist become NaN, a thread's share of them."""
        f = self.f
        first, last = self.of(f.args("n_expert")[0])
        with f.range(first, last) as at, f.range(*rows) as r:
            f.store(self.row("y", at) + r * 4, f.const(math.nan, F32))


def _x_row(pairs: Pairs, first: Val, i: Val) -> Val:
    return pairs.row("x", first + i)


def _build_gemm(f: Fn, form: Form) -> None:
    """Experts one after the other; threads share the rows of each."""
    w, panels, n_panels, n_rows, n, n_expert = f.args("w", "panels", "n_panels", "n_rows", "n", "n_expert")
    w_nb, expert_nb, bias, bias_nb, most_few = f.args("w_nb", "expert_nb", "bias", "bias_nb", "most_few")
    f.nth = f.min_int(f.nth, n_panels)  # further threads find no rows
    n_slots, n_tok = f.args("n_slots", "n_tok")
    panel, pairs = own_panel(f, form, panels, n_slots * n_tok), Pairs(f)
    start, stop = f.share(n_rows, LANES)
    with f.range(0, n_expert) as e:
        first, last = pairs.of(e)
        matrix, added = w + e * expert_nb, bias + e * bias_nb

        def few(count: int) -> None:
            with f.range(start, stop) as r:
                found = integer_dots(f, form, matrix + r * w_nb, [pairs.row("x", first + i) for i in range(count)], n)
                for i, dot in enumerate(found):
                    total = f.var(dot)
                    with f.if_(bias.ne(0)):
                        total.v = dot + f.load(added + r * 4, F32)
                    f.store(pairs.row("y", first + i) + r * 4, total.v)

        for count in range(1, ROW_BY_ROW + 1):
            with f.if_(f.select(last - first > most_few, f.const(0), last - first).eq(count)):
                few(count)
        with f.if_(last - first > most_few), f.range(start, stop, LANES) as r0:
            rows = f.min_int(stop - r0, LANES)
            n_pairs = last - first
            row_of = functools.partial(_x_row, pairs, first)
            multiply_rows(f, form, panel, n, matrix + r0 * w_nb, rows, w_nb, n_pairs, row_of)
            with f.range(0, n_pairs) as i:
                sums, target = panel.sums + i * (4 * LANES), pairs.row("y", first + i) + r0 * 4
                put_rows(f, sums, rows, target, added + r0 * 4, bias)
    pairs.spoil_missing((start, stop))


@functools.cache
def gemm_kernel(type_name: str, form: Form) -> Kernel:
    strides = [f"{name}_{of}_nb" for name in ("y", "x") for of in ("slot", "tok")]
    return Kernel(
        f"expert_gemm_{type_name}_{form.dot.name}_{8 * form.parts}",
        ("y", "w", "x", "starts", "bias", "panels", "n_panels", "n_rows", "n", "n_slots", "n_tok", "n_expert",
         "w_nb", "expert_nb", "bias_nb", "most_few", *strides),
        lambda f: _build_gemm(f, form),
        optional=("bias", "bias_nb"),
    )  # fmt: skip


def expert_gemm(
    type_name: str,
    *,
    y: int,
    w: int,
    x: int,
    starts: int,
    panels: int,
    n_panels: int,
    n_rows: int,
    n: int,
    n_slots: int,
    n_tok: int,
    n_expert: int,
    w_nb: int,
    expert_nb: int,
    y_nb: tuple[int, int],
    x_nb: tuple[int, int],
    bits: int,
    bias: int = 0,
    bias_nb: int = 0,
    row_by_row: bool = True,
) -> Step:
    """As expert_gemv(), for any number of tokens. starts: what expert_order() made of their experts; x: rows that
    round_rows() rounded to `bits` (16 or 8) for panels of this type; panels: n_panels times panel_bytes() of memory, so
    many threads may work; row_by_row: an expert's rows are decoded one by one where it has few pairs, whose sums are
    added up in another order."""
    check_rows(n, type_name)
    form = panel_form_of(type_name, bits)
    kernel = gemm_kernel(type_name, form)
    block = kernel.pack(
        y=y, w=w, x=x, starts=starts, bias=bias, panels=panels, n_panels=n_panels, n_rows=n_rows, n=n, n_slots=n_slots,
        n_tok=n_tok, n_expert=n_expert, w_nb=w_nb, expert_nb=expert_nb, bias_nb=bias_nb, y_slot_nb=y_nb[0],
        y_tok_nb=y_nb[1], x_slot_nb=x_nb[0], x_tok_nb=x_nb[1], most_few=ROW_BY_ROW if row_by_row else 0,
    )  # fmt: skip
    return Step([Entry(kernel, block)], n_slots * n_tok * n_rows * w_nb)
