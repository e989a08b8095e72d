"""Experts' products by a processor's tiles: as `amx.py`, with the tokens of each expert side by side."""

from __future__ import annotations

import functools
from collections.abc import Callable

from graphrt.backends.cpu.fast.amx import (
    DEPTH,
    SIDE,
    TILE,
    Product,
    Split,
    Tiles,
    amx_tiles,
    multiply,
    own_panel,
    split_block,
)
from graphrt.backends.cpu.fast.blocks import check_rows
from graphrt.backends.cpu.fast.codes import CODE_TYPES
from graphrt.backends.cpu.fast.experts import Pairs
from graphrt.backends.cpu.fast.ir import LANES, Fn, Val
from graphrt.backends.cpu.fast.jit import Kernel
from graphrt.backends.cpu.fast.pool import Entry, Step
from graphrt.backends.cpu.fast.tiles import put_rows


def most_rows(n_expert: int, n_pairs: int) -> int:
    """Rows of activations that n_pairs pairs of a token and a slot may take: each expert's are blocks of 16."""
    return (n_pairs // SIDE + n_expert) * SIDE


def _for_experts(f: Fn, split: Split, n: Val, x: Val, body: Callable[[Val, Val, Val, Val], None]) -> None:
    """body(expert, its first pair's place, how many it has, where its tiles are) for each expert."""
    (n_expert,) = f.args("n_expert")
    pairs, block = Pairs(f), f.var(f.const(0))
    with f.range(0, n_expert) as e:
        first, last = pairs.of(e)
        body(e, first, last - first, x + block.v * (n // DEPTH) * (split.parts * TILE))
        block.v = block.v + (last - first + (SIDE - 1)) // SIDE


def _build_split(f: Fn, split: Split) -> None:
    dst, n = f.args("dst", "n")
    pairs = Pairs(f)

    def one(expert: Val, first: Val, count: Val, tiles: Val) -> None:
        with f.range(0, (count + (SIDE - 1)) // SIDE) as block:
            at = tiles + block * (n // DEPTH) * (split.parts * TILE)
            split_block(f, split, n, at, lambda i: pairs.row("x", first + f.min_int(block * SIDE + i, count - 1)))

    _for_experts(f, split, n, dst, one)


@functools.cache
def split_kernel(key: str, split: Split) -> Kernel:
    names = ("dst", "x", "starts", "n", "n_slots", "n_expert", "x_slot_nb", "x_tok_nb")
    return Kernel(f"expert_split_{key}", names, lambda f: _build_split(f, split))


def split_pairs(
    split: Split, *, dst: int, x: int, starts: int, n: int, n_slots: int, n_tok: int, n_expert: int,
    x_nb: tuple[int, int],
) -> Step:  # fmt: skip
    """Rows of activations as tiles of bf16, in the order of expert_order(). starts: what that made; x: rows of n f32,
    x_nb bytes between slots and between tokens; dst: split.bytes() of most_rows()."""
    kernel = split_kernel(split.key, split)
    args = kernel.pack(
        dst=dst, x=x, starts=starts, n=n, n_slots=n_slots, n_expert=n_expert, x_slot_nb=x_nb[0], x_tok_nb=x_nb[1]
    )
    return Step([Entry(kernel, args)], n_slots * n_tok * n * 8)


def _build_gemm(f: Fn, split: Split, by: Tiles) -> None:
    """Experts one after the other; threads share the rows of each."""
    w, x, panels, n_panels, n_rows, n = f.args("w", "x", "panels", "n_panels", "n_rows", "n")
    w_nb, expert_nb, bias, bias_nb, n_slots, n_tok = f.args("w_nb", "expert_nb", "bias", "bias_nb", "n_slots", "n_tok")
    f.nth = f.min_int(f.nth, n_panels)  # further threads find no rows
    panel, pairs, rows = own_panel(f, split, panels, n_slots * n_tok), Pairs(f), f.share(n_rows, LANES)
    by.begin(f)

    def one(expert: Val, first: Val, count: Val, tiles: Val) -> None:
        def put(token: Val, row: Val, n_put: Val, sums: Val) -> None:
            target, added = pairs.row("y", first + token), bias + expert * bias_nb
            put_rows(f, sums, n_put, target + row * 4, added + row * 4, bias)

        multiply(f, split, by, panel, Product(w + expert * expert_nb, w_nb, n, tiles, count), rows, put)

    _for_experts(f, split, n, x, one)
    by.end(f)
    pairs.spoil_missing(rows)


@functools.cache
def gemm_kernel(type_name: str, parts: int, by: Tiles) -> Kernel:
    return Kernel(
        f"expert_gemm_{type_name}_{by.name}_{8 * parts}",
        ("y", "w", "x", "starts", "bias", "panels", "n_panels", "n_rows", "n", "n_slots", "n_tok", "n_expert", "w_nb",
         "expert_nb", "bias_nb", "y_slot_nb", "y_tok_nb"),
        lambda f: _build_gemm(f, Split(CODE_TYPES[type_name], parts), by),
        optional=("bias", "bias_nb"),
    )  # fmt: skip


def amx_expert_gemm(
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
    bits: int,
    bias: int = 0,
    bias_nb: int = 0,
) -> Step:
    """As expert_gemm(), where amx_tiles() are there. x: what split_pairs() made for this type and `bits`; panels:
    n_panels times amx_panel_bytes() for n_slots * n_tok."""
    check_rows(n, type_name)
    by = amx_tiles()
    assert by is not None, "ask amx_tiles() first"
    kernel = gemm_kernel(type_name, bits // 8, by)
    args = kernel.pack(
        y=y, w=w, x=x, starts=starts, bias=bias, panels=panels, n_panels=n_panels, n_rows=n_rows, n=n, n_slots=n_slots,
        n_tok=n_tok, n_expert=n_expert, w_nb=w_nb, expert_nb=expert_nb, bias_nb=bias_nb, y_slot_nb=y_nb[0],
        y_tok_nb=y_nb[1],
    )  # fmt: skip
    return Step([Entry(kernel, args)], n_slots * n_tok * n_rows * w_nb)
