"""A quantized matrix times many vectors by a processor's tiles (AMX): y[t] = W x[t], 32 rows by 32 tokens at a time.

Weights and activations are each the sum of two bf16, the nearest one and what is left of it: 16 bits. Of the four
products three are made, w1 x1 + w1 x2 + w2 x1, and added up in f32; the fourth is under 2**-16 of w x. With activations
of 8 bits x2 is left out. bf16 has the range of f32: nothing is scaled afterwards, whatever runs of values a type has.
(Integers of 8 bits would take two products for 16 bits instead of three, but their sums end with each run of 16 or 32
values, where a tile holds 64: each is then stored, converted and scaled as vectors, which takes longer than a product.)

A tile of weights is 16 rows of 32 values, a row as it is decoded: the values' order is the decoder's, in pairs of
lanes. A tile of activations has the pairs of 16 tokens side by side. Values under 2**-126 count as 0.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import platform
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from graphrt.backends.cpu.fast.blocks import check_rows
from graphrt.backends.cpu.fast.code_type import CodeType
from graphrt.backends.cpu.fast.codes import CODE_TYPES
from graphrt.backends.cpu.fast.integer import block_ranges, in_order
from graphrt.backends.cpu.fast.ir import F32, I8, I32, LANES, Fn, Val
from graphrt.backends.cpu.fast.jit import Kernel, host
from graphrt.backends.cpu.fast.pool import LINE, Entry, Step
from graphrt.backends.cpu.fast.tiles import gemm_bytes, put_rows

#: Rows and columns of a tile of sums, values of a row in a tile of weights, bytes of a tile.
SIDE, DEPTH, TILE = 16, 32, 1024
#: Rows that are decoded together, and values of each: they stay in the second cache while the tokens pass by.
ROWS, PIECE = 128, 256
#: Steps of 32 values whose tiles, of 32 rows and of 32 tokens, are used one after the other.
STEPS = 8
#: Tokens that pass by: a thread has sums for so many.
TOKENS = 512
#: What a processor must have.
FEATURES = ("amx-tile", "amx-bf16", "amx-int8", "avx512f", "avx512bw")

_ARCH_PRCTL, _ASK_FOR_STATE, _TILE_DATA = 158, 0x1023, 18


class Tiles(ABC):
    """Eight registers, each a tile. name: a part of kernels' names."""

    name: ClassVar[str]

    @abstractmethod
    def begin(self, f: Fn, shapes: Sequence[tuple[int, int]] = ((SIDE, 64),) * 8) -> None:
        """Sets them up: rows and bytes of a row of each."""

    @abstractmethod
    def load(self, f: Fn, tile: int, at: Val, stride: int = 64) -> None:
        """tile = its rows, `stride` bytes apart."""

    @abstractmethod
    def store(self, f: Fn, tile: int, at: Val, stride: int = 64) -> None:
        """Its rows, `stride` bytes apart = tile."""

    @abstractmethod
    def zero(self, f: Fn, tile: int) -> None:
        """tile = 0."""

    @abstractmethod
    def add(self, f: Fn, total: int, a: int, b: int) -> None:
        """total[i, j] += a[i, 2 k] b[k, 2 j] + a[i, 2 k + 1] b[k, 2 j + 1] over k. total: f32; a, b: bf16."""

    @abstractmethod
    def add_bytes(self, f: Fn, total: int, a: int, b: int) -> None:
        """total[i, j] += a[i, 4 k + m] b[k, 4 j + m] over k and the four m. total: i32; a, b: signed bytes."""

    @abstractmethod
    def end(self, f: Fn) -> None:
        """Gives them back, so that neither the system nor torch's own library finds them in use."""


class Amx(Tiles):
    """The processor's."""

    name = "amx"

    def begin(self, f: Fn, shapes: Sequence[tuple[int, int]] = ((SIDE, 64),) * 8) -> None:
        rows, widths = zip(*shapes, strict=True)
        config = [1, *[0] * 15, *(b for w in widths for b in (w, 0)), *[0] * 16, *rows, *[0] * 8]  # 1: the palette
        f.call_external("llvm.x86.ldtilecfg", f.pointer(f.table("tile_config", config, I8)))

    def load(self, f: Fn, tile: int, at: Val, stride: int = 64) -> None:
        f.call_external("llvm.x86.tileloadd64", f.const(tile, I8), f.pointer(at), f.const(stride))

    def store(self, f: Fn, tile: int, at: Val, stride: int = 64) -> None:
        f.call_external("llvm.x86.tilestored64", f.const(tile, I8), f.pointer(at), f.const(stride))

    def zero(self, f: Fn, tile: int) -> None:
        f.call_external("llvm.x86.tilezero", f.const(tile, I8))

    def add(self, f: Fn, total: int, a: int, b: int) -> None:
        f.call_external("llvm.x86.tdpbf16ps", *(f.const(tile, I8) for tile in (total, a, b)))

    def add_bytes(self, f: Fn, total: int, a: int, b: int) -> None:
        f.call_external("llvm.x86.tdpbssd", *(f.const(tile, I8) for tile in (total, a, b)))

    def end(self, f: Fn) -> None:
        f.call_external("llvm.x86.tilerelease")


@functools.cache
def amx_tiles() -> Tiles | None:
    """This machine's, or None where it has none or the system doesn't let the process use them."""
    return Amx() if host().has(*FEATURES) and _allowed() else None


def _allowed() -> bool:
    """Asks Linux, once for a process and its threads and children, to keep tiles when it changes threads: 8 KB each
    that are not kept unasked."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    call = ctypes.CDLL(None, use_errno=True).syscall
    words = [ctypes.c_long(n) for n in (_ARCH_PRCTL, _ASK_FOR_STATE, _TILE_DATA)]
    return int(call(*words)) == 0


@dataclass(frozen=True)
class Split:
    """How rows of activations become tiles for a type of weights; types of one `key` share them. parts: bf16 of a
    value, 2 or 1."""

    type: CodeType
    parts: int

    @property
    def key(self) -> str:
        return f"{self.type.layout.__name__}_{self.type.at_once}_{self.parts}"

    def bytes(self, n: int, n_tok: int) -> int:
        """Of n_tok rows of n values."""
        return -(-n_tok // SIDE) * (n // DEPTH) * self.parts * TILE

    def vectors(self, count: int) -> list[list[int]]:
        """Of `count` blocks the values of each vector of 16; two after one another are a tile's pairs."""
        flat = [value for chunk in self.type.layout(count) for value in chunk]
        return [flat[at : at + LANES] for at in range(0, len(flat), LANES)]


def split_of(type_name: str, bits: int) -> Split:
    """How activations of 16 or 8 bits become tiles for a type."""
    return Split(CODE_TYPES[type_name], bits // 8)


# activations


def _words(f: Fn, a: Val, b: Val, parts: int) -> list[Val]:
    """f32 lanes of two vectors -> their bf16 in pairs, i32 lanes: the nearest ones, and what is left of these."""
    near = [f.to_bf16(v).zext(I32) << 16 for v in (a, b)]
    left = [(v - n.as_bits(F32)).as_bits(I32) for v, n in zip((a, b), near, strict=True)]
    return [(v >> 16) | (w & 0xFFFF0000) for v, w in (near, left)[:parts]]


def _build_split(f: Fn, split: Split) -> None:
    dst, x, n_tok, n, x_nb = f.args("dst", "x", "n_tok", "n", "x_nb")
    with f.range(0, (n_tok + (SIDE - 1)) // SIDE) as block:
        at = dst + block * (n // DEPTH) * (split.parts * TILE)
        split_block(f, split, n, at, lambda i: x + f.min_int(block * SIDE + i, n_tok - 1) * x_nb)


def split_block(f: Fn, split: Split, n: Val, target: Val, row_of: Callable[[Val], Val]) -> None:
    """Rows of n values of 16 tokens, of which this thread takes its part, as tiles at target. row_of(i): the row of
    token i.

    Token by token the words of a unit, then turned about: a tile's row has one word of 16 tokens.
    """
    t, parts = split.type, split.parts
    words = f.buffer(I8, max(t.units) * t.size // DEPTH * parts * TILE)
    for first, stop, count in block_ranges(f, t, n):
        size = t.size * count
        start, end = f.share((stop - first) // count)
        with f.range(start, end) as u:
            at = first * t.size + u * size
            with f.range(0, SIDE) as i:
                row = row_of(i) + at * 4
                values = [f.load(row + 4 * k, F32, LANES) for k in range(0, size, LANES)]
                lanes = [in_order(values, vector) for vector in split.vectors(count)]
                pairs = itertools.chain(*(_words(f, a, b, parts) for a, b in _pairs(lanes)))
                for tile, word in enumerate(pairs):
                    f.store(words + i * 64 + tile * TILE, word)
            with f.range(0, size // DEPTH * parts) as k:
                turned = f.transpose([f.load(words + k * TILE + 64 * i, I32, LANES) for i in range(SIDE)])
                for row_at, word in enumerate(turned):
                    f.store(target + at // DEPTH * (parts * TILE) + k * TILE + 64 * row_at, word)


def _pairs(values: list[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(values[::2], values[1::2], strict=True)


@functools.cache
def split_kernel(key: str, split: Split) -> Kernel:
    return Kernel(f"split_{key}", ("dst", "x", "n_tok", "n", "x_nb"), lambda f: _build_split(f, split))


def split_rows(split: Split, *, dst: int, x: int, n_tok: int, n: int, x_nb: int) -> Step:
    """Rows of activations as tiles of bf16. x: n_tok rows of n f32, x_nb bytes apart; dst: split.bytes(). A row with
    NaN or infinity makes its products NaN or infinite."""
    kernel = split_kernel(split.key, split)
    args = kernel.pack(dst=dst, x=x, n_tok=n_tok, n=n, x_nb=x_nb)
    return Step([Entry(kernel, args)], n_tok * n * 8)


# weights


def _piece_blocks(t: CodeType) -> int:
    return max(PIECE // t.size, t.at_once)


def amx_panel_bytes(split: Split, n_tok: int) -> int:
    """What a thread needs: a piece of 128 rows as tiles, and their sums with up to 512 tokens."""
    t = split.type
    return ROWS * (_piece_blocks(t) * t.size * 4 + min(-(-n_tok // SIDE) * SIDE, TOKENS) * 4)


def _decode(f: Fn, split: Split, count: int, blocks: Val, target: Val) -> None:
    """One unit of a row, whose tiles are at `target`: of each 32 values the nearest bf16, then what is left of them."""
    t = split.type
    decoded = t.decode(f, blocks, count)
    codes: list[Val] = []
    for chunk in decoded.chunks:
        chunk = chunk - t.zero if t.zero else chunk
        parts = [chunk.part(at, LANES) for at in range(0, chunk.lanes, LANES)]
        codes += [(p.sext(I32) if t.signed or t.zero else p.zext(I32)).to(F32) for p in parts]
    spread: dict[tuple[int, ...], tuple[Val, Val | None]] = {}  # scales and offsets by the lanes' runs
    values = []
    for code, vector in zip(codes, split.vectors(count), strict=True):
        runs = tuple(value // t.sub for value in vector)
        if runs not in spread:
            offsets = decoded.offsets
            spread[runs] = decoded.scales.shuffle(runs), offsets.shuffle(runs) if offsets is not None else None
        scale, offset = spread[runs]
        values.append(code * scale if offset is None else f.fma(code, scale, offset))
    for step, (a, b) in enumerate(_pairs(values)):
        # a NaN may become 0 here, not in what is left
        near = [(v.as_bits(I32) + 0x8000) & 0xFFFF0000 for v in (a, b)]
        left = [(v - n.as_bits(F32)).as_bits(I32) for v, n in zip((a, b), near, strict=True)]
        f.store(target + step * (2 * TILE), (near[0] >> 16) | near[1])
        f.store(target + step * (2 * TILE) + TILE, (left[0] >> 16) | (left[1] & 0xFFFF0000))


@dataclass(frozen=True)
class Panel:
    """A thread's memory. weights: of each 16 rows `weights_nb` bytes of tiles; sums: of each 16 rows `sums_nb` bytes, a
    tile for each 16 tokens, a row of weights in each row."""

    weights: Val
    weights_nb: int
    sums: Val
    sums_nb: Val


def _add(f: Fn, by: Tiles, split: Split, panel: Panel, steps: Val, rows: Val, x: Val, x_nb: Val, tokens: Val) -> None:
    """Adds a piece's products. rows, tokens: how many blocks of 16; x: the first one's tiles, x_nb bytes apart."""
    step_nb = split.parts * TILE
    with f.range(0, steps, STEPS) as s0, f.range(0, tokens, 2) as t0, f.range(0, rows, 2) as r0:
        # past the last block it is the last again: the same is added to the same sums and stored twice
        rs, ts = ([v, f.min_int(v + 1, n - 1)] for v, n in ((r0, rows), (t0, tokens)))
        sums = [panel.sums + r * panel.sums_nb + t * TILE for r in rs for t in ts]
        for i, at in enumerate(sums):
            by.load(f, i, at)
        ws, xs = [panel.weights + r * panel.weights_nb for r in rs], [x + t * x_nb for t in ts]

        def fetch(registers: tuple[int, int], at: list[Val], step: Val, step_nb: int, part: int) -> None:
            for register, base in zip(registers, at, strict=True):
                by.load(f, register, base + step * step_nb + part * TILE)

        def multiply() -> None:
            for i, (a, b) in enumerate(itertools.product((4, 5), (6, 7))):
                by.add(f, i, a, b)

        with f.range(s0, f.min_int(s0 + STEPS, steps)) as step:
            fetch((4, 5), ws, step, 2 * TILE, 0)
            if split.parts == 2:
                fetch((6, 7), xs, step, step_nb, 1)
                multiply()
            fetch((6, 7), xs, step, step_nb, 0)
            multiply()
            fetch((4, 5), ws, step, 2 * TILE, 1)
            multiply()
        for i, at in enumerate(sums):
            by.store(f, i, at)


def own_panel(f: Fn, split: Split, panels: Val, n_tok: Val) -> Panel:
    """This thread's memory for n_tok tokens, of those at `panels`."""
    steps_nb = _piece_blocks(split.type) * split.type.size * (4 * SIDE)
    most = (f.min_int(n_tok, TOKENS) + (SIDE - 1)) // SIDE  # blocks of tokens
    mine = panels + f.ith * (most * (ROWS // SIDE * TILE) + ROWS // SIDE * steps_nb)
    return Panel(mine, steps_nb, mine + ROWS // SIDE * steps_nb, most * TILE)


@dataclass(frozen=True)
class Product:
    """Some rows of n values, w_nb bytes apart, times n_tok tokens, whose tiles are at x."""

    w: Val
    w_nb: Val
    n: Val
    x: Val
    n_tok: Val


def multiply(
    f: Fn, split: Split, by: Tiles, panel: Panel, p: Product, rows: tuple[Val, Val],
    put: Callable[[Val, Val, Val, Val], None],
) -> None:  # fmt: skip
    """put(token, first row, how many of them, where their sums are) for all tokens and the rows from the first to
    before the second of `rows`."""
    t, start, stop = split.type, *rows
    blocks_of_piece = _piece_blocks(t)
    x_nb = p.n // DEPTH * (split.parts * TILE)  # of 16 tokens
    turned = f.buffer(F32, SIDE * LANES)
    with f.range(start, stop, ROWS) as r0, f.range(0, p.n_tok, TOKENS) as t0:
        n_rows, tokens = f.min_int(stop - r0, ROWS), f.min_int(p.n_tok - t0, TOKENS)
        row_blocks, token_blocks = ((v + (SIDE - 1)) // SIDE for v in (n_rows, tokens))
        with f.range(0, row_blocks * panel.sums_nb, LINE) as at:
            f.store(panel.sums + at, f.zeros())
        for first, stop_at, count in block_ranges(f, t, p.n):
            with f.range(first, stop_at, blocks_of_piece) as b0:
                b1 = f.min_int(b0 + blocks_of_piece, stop_at)
                with f.range(0, row_blocks * SIDE) as j, f.range(b0, b1, count) as block:
                    at = p.w + (r0 + f.min_int(j, n_rows - 1)) * p.w_nb + block * t.bytes
                    for line in range(0, t.bytes * count, LINE):
                        f.prefetch(at + (blocks_of_piece * t.bytes + line), far=True)  # of the next piece
                    target = panel.weights + j // SIDE * panel.weights_nb + j % SIDE * 64
                    _decode(f, split, count, at, target + (block - b0) * t.size // DEPTH * (2 * TILE))
                x_at = p.x + t0 // SIDE * x_nb + b0 * t.size // DEPTH * (split.parts * TILE)
                _add(f, by, split, panel, (b1 - b0) * t.size // DEPTH, row_blocks, x_at, x_nb, token_blocks)
        with f.range(0, token_blocks) as tb, f.range(0, row_blocks) as rb:
            sums = panel.sums + rb * panel.sums_nb + tb * TILE
            for at_token, v in enumerate(f.transpose([f.load(sums + 64 * i, F32, LANES) for i in range(SIDE)])):
                f.store(turned + 64 * at_token, v)
            with f.range(0, f.min_int(tokens - tb * SIDE, SIDE)) as i:
                n_put = f.min_int(n_rows - rb * SIDE, SIDE)
                put(t0 + tb * SIDE + i, r0 + rb * SIDE, n_put, turned + i * 64)


def _build(f: Fn, split: Split, by: Tiles) -> None:
    w, w_nb, panels, n_panels, n_rows, n, n_tok = f.args("w", "w_nb", "panels", "n_panels", "n_rows", "n", "n_tok")
    y, x, res, y_nb, res_nb = f.args("y", "x", "res", "y_nb", "res_nb")
    f.nth = f.min_int(f.nth, n_panels)  # further threads find no rows

    def put(token: Val, row: Val, count: Val, sums: Val) -> None:
        put_rows(f, sums, count, y + token * y_nb + row * 4, res + token * res_nb + row * 4, res)

    by.begin(f)
    panel = own_panel(f, split, panels, n_tok)
    multiply(f, split, by, panel, Product(w, w_nb, n, x, n_tok), f.share(n_rows, LANES), put)
    by.end(f)


@functools.cache
def gemm_kernel(type_name: str, parts: int, by: Tiles) -> Kernel:
    return Kernel(
        f"gemm_{type_name}_{by.name}_{8 * parts}",
        ("y", "w", "x", "res", "panels", "n_panels", "n_rows", "n", "n_tok", "w_nb", "y_nb", "res_nb"),
        lambda f: _build(f, Split(CODE_TYPES[type_name], parts), by),
        optional=("res", "res_nb"),
    )


def amx_gemm(
    type_name: str,
    *,
    y: int,
    w: int,
    x: int,
    panels: int,
    n_panels: int,
    n_rows: int,
    n: int,
    n_tok: int,
    w_nb: int,
    y_nb: int,
    bits: int,
    res: int = 0,
    res_nb: int = 0,
) -> Step:
    """y[t, r] = dot(W[r], x[t]) (+ res[t, r]), for any number of tokens, where amx_tiles() are there.

    As tiles.gemm(), but x: what split_rows() made of n_tok rows for this type and `bits`; panels: n_panels times
    amx_panel_bytes().
    """
    check_rows(n, type_name)
    by = amx_tiles()
    assert by is not None, "ask amx_tiles() first"
    kernel = gemm_kernel(type_name, bits // 8, by)
    args = kernel.pack(
        y=y, w=w, x=x, res=res, panels=panels, n_panels=n_panels, n_rows=n_rows, n=n, n_tok=n_tok, w_nb=w_nb,
        y_nb=y_nb, res_nb=res_nb,
    )  # fmt: skip
    return Step([Entry(kernel, args)], gemm_bytes(n_rows, w_nb, n_tok))
