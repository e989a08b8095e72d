"""The cases of FLASH_ATTN_VARLEN and FLASH_ATTN_VARLEN_LSE: ragged sequences over pages in any order, and packed ones.

Whatever no query sees holds NaN: the rest of a last page, pages that no table names, and, behind a window, pages that
are out of it. Entries of a table that are not to be read are -1.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from graphrt.dtypes import DType, dtype
from graphrt.ops.cases.flash_attn_axes import SINKS
from graphrt.ops.cases.scores import SCORES
from graphrt.ops.flash_attn_varlen import flash_attn_varlen, flash_attn_varlen_lse
from graphrt.ops.view import permute, view
from graphrt.tensor import Tensor
from graphrt.testing import AnyArray, Case, Init, Inputs, Normal, Uniform, grid, quantize, register_cases

Integers = npt.NDArray[np.int64]
#: Pages that no table names, and blocks of the longest sequence's table behind its last.
_SPARE_PAGES, _SPARE_BLOCKS = 3, 1


@dataclass(frozen=True)
class Axes:
    """One point. d: D_k and D_v; heads: n_head and n_head_kv; types: of k and v; page: 0 for packed keys.

    seqs: queries and keys of each sequence. spare: tokens at the end that belong to nobody. tables: "shuffled";
    "in_order"; "shared", where sequences begin with the pages of the first; layout: "cache", rows of all heads side by
    side in cells; "plain", as the op has it; "v_in_k": v is the beginning of k's rows. sinks: of flash_attn's SINKS.
    groups: (first sequence, sequences) of those that share what pages they can, as `prefixes` tells; () to give none.
    score: a name of scores.py's SCORES. mask: of MASKS; mask_heads: its m2.
    """

    d: tuple[int, int] = (64, 64)
    heads: tuple[int, int] = (4, 2)
    types: tuple[str, str] = ("f16", "f16")
    page: int = 32
    seqs: tuple[tuple[int, int], ...] = ((1, 70), (3, 33), (1, 1))
    spare: int = 0
    tables: str = "shuffled"
    layout: str = "cache"
    causal: bool = True
    window: int = 0
    softcap: float = 0.0
    max_bias: float = 0.0
    sinks: str | None = None
    groups: tuple[tuple[int, int], ...] = ()
    score: str | None = None
    mask: str | None = None
    mask_heads: int = 1

    @cached_property
    def prefixes(self) -> Integers:
        """[n_groups + 1, 3]: the groups with the whole pages before all their new tokens; the last says nothing."""
        pages = [min((length - n) // self.page for n, length in self.seqs[i : i + m]) for i, m in self.groups]
        return np.array([*((*group, n) for group, n in zip(self.groups, pages)), (0, 0, 1)])

    @cached_property
    def q_starts(self) -> Integers:
        return np.cumsum([0, *(n for n, _ in self.seqs)])

    @cached_property
    def k_starts(self) -> Integers:
        return np.cumsum([0, *(n for _, n in self.seqs)])

    def seen(self, i: int) -> Integers:
        """The keys that a query of sequence i sees."""
        n, length = self.seqs[i]
        first = max(length - n - self.window + 1, 0) if self.window else 0
        return np.arange(first, length) if n else np.arange(0)

    @cached_property
    def table(self) -> Integers:
        """[n_seq, max_blocks], -1 where no query looks."""
        most = max(-(-n // self.page) for _, n in self.seqs) + _SPARE_BLOCKS
        table = np.full((len(self.seqs), most), -1)
        pages = iter(self._order)
        for i in range(len(self.seqs)):
            blocks = np.unique(self.seen(i) // self.page)
            table[i, blocks] = [next(pages) for _ in blocks]
            if self.tables == "shared":
                whole = min(self.seqs[0][1], self.seqs[i][1]) // self.page
                table[i, :whole] = table[0, :whole]
        for first, count, n in self.prefixes if self.groups else ():
            table[first : first + count, :n] = table[first, :n]
        return table

    @cached_property
    def n_pages(self) -> int:
        return sum(-(-n // self.page) for _, n in self.seqs) + _SPARE_PAGES

    @cached_property
    def _order(self) -> list[int]:
        order = np.arange(self.n_pages)
        if self.tables != "in_order":
            np.random.default_rng(zlib.crc32(repr(self).encode())).shuffle(order)
        return [int(page) for page in order]

    @cached_property
    def seen_cells(self) -> npt.NDArray[np.bool_]:
        """Which cells, in the order of pages (packed keys: in theirs), some query sees."""
        if not self.page:
            cells = [self.k_starts[i] + self.shown(i) for i in range(len(self.seqs))]
            n = int(self.k_starts[-1])
        else:
            cells = [self.table[i, k // self.page] * self.page + k % self.page for i, k in self._keys()]
            n = self.n_pages * self.page
        out = np.zeros(n, np.bool_)
        out[np.concatenate(cells)] = True
        return out

    def _keys(self) -> Iterator[tuple[int, Integers]]:
        return ((i, self.shown(i)) for i in range(len(self.seqs)))

    @property
    def mask_new(self) -> bool:
        return self.mask in ("tree", "new")

    @cached_property
    def mask_values(self) -> npt.NDArray[np.float32]:
        """[m2, n_tokens, n_columns]: what MASKS says, NaN where nothing is to be read."""
        n = int(self.q_starts[-1])
        most = max((n if self.mask_new else length) for n, length in self.seqs)
        width = {"short": 24, "new": most + 3}.get(str(self.mask), max(most, 1))
        out = np.full((self.mask_heads, n + self.spare, width), np.nan, np.float32)
        for i in range(len(self.seqs)):
            rows, there = slice(*self.q_starts[i : i + 2]), self._columns(i, width)
            out[:, rows, there] = self._of_mask(i, len(there))[..., there]
        return out

    def _columns(self, i: int, width: int) -> Integers:
        """The columns of a mask that a sequence has keys for."""
        n, length = self.seqs[i]
        return np.arange(max(n - length, 0), min(n, width)) if self.mask_new else np.arange(min(length, width))

    def _of_mask(self, i: int, n_columns: int) -> npt.NDArray[np.float32]:
        """A sequence's rows, [m2, queries, at least n_columns]."""
        (n, length), rng = self.seqs[i], np.random.default_rng((zlib.crc32(repr(self).encode()), i))
        if self.mask == "tree":
            seen = np.zeros((n, n), np.bool_)
            for row in range(n):  # itself, and what a token before it sees, or no other
                seen[row] = seen[rng.integers(row)] if row and rng.random() < 0.8 else False
                seen[row, row] = True
            return np.broadcast_to(np.where(seen, 0, -np.inf).astype(np.float32), (self.mask_heads, n, n))
        shape = (self.mask_heads, n, max(n, length) + 1)
        out = np.where(rng.random(shape) < 0.3, -np.inf, rng.normal(size=shape)).astype(np.float32)
        if not self.mask_new:
            out[..., 20:70] = -np.inf
        if i % 2:
            out[:, :1] = -np.inf
        return out

    def shown(self, i: int) -> Integers:
        """Of the keys that sequence i sees by position, those that the mask leaves."""
        seen, (n, length) = self.seen(i), self.seqs[i]
        if self.mask is None or not n:
            return seen
        behind = length - n + np.arange(n)[:, None] - seen
        near = (behind >= 0) | (not self.causal)
        near &= (behind < self.window) | (self.window == 0)
        column = seen - (length - n if self.mask_new else 0)
        rows = self.mask_values[:, slice(*self.q_starts[i : i + 2])]
        inside = (column >= 0) & (column < rows.shape[-1])
        hidden = np.isneginf(rows[..., column.clip(0, rows.shape[-1] - 1)]).all(0) & inside
        return np.asarray(seen[(near & ~hidden).any(0)])


@dataclass(frozen=True)
class _Numbers:
    """These numbers, in the input's shape."""

    values: Integers | npt.NDArray[np.float32]

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...]) -> AnyArray:
        return self.values.reshape(shape)


@dataclass(frozen=True)
class _Cells:
    """`base` in the cells that some query sees; the bits of all others are ones: NaN, and NaN as a block's scale.

    by_page: cells are along dimensions 0 and 2 of an input [n_pages, n_head_kv, page, D], else along its last but one.
    """

    base: Init
    seen: npt.NDArray[np.bool_]
    by_page: bool

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...]) -> AnyArray:
        return self.base(rng, shape)

    def store(self, rng: np.random.Generator, shape: tuple[int, ...], dt: DType) -> AnyArray:
        raw = np.ascontiguousarray(quantize(self.base(rng, shape), dt, rng))
        as_bytes = raw.view(np.uint8)
        if self.by_page:
            np.moveaxis(as_bytes, 1, 2)[~self.seen.reshape(as_bytes.shape[0], as_bytes.shape[2])] = 0xFF
        else:
            np.moveaxis(as_bytes, -2, 0)[~self.seen] = 0xFF
        return raw


def _cache(inputs: Inputs, name: str, dt: str, d: int, axes: Axes, init: Init) -> Tensor:
    """k or v as the layout says."""
    heads = axes.heads[1]
    if axes.layout == "plain":
        ne = (d, axes.page, heads, axes.n_pages) if axes.page else (d, int(axes.k_starts[-1]), heads)
        return inputs(name, dt, ne, _Cells(init, axes.seen_cells, bool(axes.page)))
    whole = inputs(name, dt, (d * heads, len(axes.seen_cells)), _Cells(init, axes.seen_cells, False))
    head, row = dtype(dt).row_size(d), whole.nb[1]
    if not axes.page:
        return view(whole, (d, whole.ne[1], heads), (row, head))
    return view(whole, (d, axes.page, heads, axes.n_pages), (row, head, axes.page * row))


def _make(inputs: Inputs, axes: Axes, lse: bool) -> Tensor:
    n = int(axes.q_starts[-1]) + axes.spare
    q = inputs("q", "f32", (axes.d[0], axes.heads[0], n), Normal(2.0))
    q = permute(q, 0, 2, 1, 3)
    k = _cache(inputs, "k", axes.types[0], axes.d[0], axes, Normal(1.0))
    numbers = {"q_starts": axes.q_starts}
    if axes.groups:
        numbers |= {"prefixes": axes.prefixes}
    if axes.page:
        numbers |= {"lengths": np.array([n for _, n in axes.seqs]), "block_table": axes.table}
    else:
        numbers |= {"k_starts": axes.k_starts}
    given: dict[str, Any] = {
        name: inputs(name, "i32", values.shape[::-1], _Numbers(values)) for name, values in numbers.items()
    }
    if axes.sinks is not None:
        near = math.log(max(1, max(length for _, length in axes.seqs))) + 2.0
        given["sinks"] = inputs("sinks", "f32", axes.heads[:1], SINKS[axes.sinks](near))
    q_starts = given.pop("q_starts")
    given |= {"softcap": axes.softcap, "max_bias": axes.max_bias, "causal": axes.causal, "window": axes.window}
    if axes.score is not None:
        given["score"] = SCORES[axes.score](axes.heads[0], max(length for _, length in axes.seqs))
    if axes.mask is not None:
        values = axes.mask_values
        given |= {"mask": inputs("mask", "f16", values.shape[::-1], _Numbers(values)), "mask_new": axes.mask_new}
    scale = axes.d[0] ** -0.5
    if lse:
        return flash_attn_varlen_lse(q, k, q_starts, scale, **given)
    if axes.layout == "v_in_k":
        v = view(k, (axes.d[1], *k.ne[1:]), k.nb[1:])
    else:
        v = _cache(inputs, "v", axes.types[1], axes.d[1], axes, Uniform())
    return flash_attn_varlen(q, k, v, q_starts, scale, **given)


def as_case(op: str, axes: Axes) -> Case:
    base, always = asdict(Axes()), ("d", "heads", "types", "page", "seqs")
    shown = {name: value for name, value in asdict(axes).items() if name in always or value != base[name]}
    return Case(op, shown, partial(_make, axes=axes, lse=op == "FLASH_ATTN_VARLEN_LSE"))


BASE = Axes()
#: A page's ends, nothing, one; a few tokens each, as drafts have; prompts beside single tokens; several k-blocks.
ENDS = ((1, 0), (1, 1), (1, 31), (1, 32), (1, 33), (0, 40), (1, 63), (1, 64), (1, 65))
FEW = ((2, 40), (5, 5), (8, 130), (1, 33))
MIXED = ((40, 40), (1, 97), (0, 0), (33, 130), (9, 9), (1, 5))
LONG = ((1, 700), (1, 3), (2, 257))
#: Explicit masks: "tree": over new tokens, each sees itself and its ancestors; "new": any values and -inf over these,
#: more columns than there are tokens; "keys": the same over keys, some of them hidden from all; "short": of the first
#: 24.
MASKS = ("tree", "new", "keys", "short")
#: Single tokens, and chunks beside them, behind keys that sequences may share.
ALIKE = ((1, 170), (1, 163), (1, 135), (1, 40))
CHUNKS = ((1, 100), (20, 150), (1, 90), (33, 135), (5, 88))
TYPES = ("f32", "bf16", "q8_0", "q4_0", "f8_e4m3")


def _quick() -> Iterator[Axes]:
    for page in (16, 64, 128, 256):
        yield from grid(replace(BASE, page=page), {"seqs": (ENDS, FEW, LONG), "tables": ("shuffled", "shared")})
    yield from grid(BASE, {"seqs": (ENDS, FEW, MIXED, LONG), "tables": ("shuffled", "shared", "in_order")})
    yield from grid(replace(BASE, layout="plain"), {"seqs": (FEW, MIXED), "page": (0, 16, 64, 256)})
    yield from grid(replace(BASE, page=0, spare=5), {"seqs": (MIXED, LONG), "causal": (True, False)})
    heads = [(h, 2) for h in (2, 8, 16)] + [(1, 1), (7, 1), (16, 1), (32, 2), (12, 4)]
    yield from grid(BASE, {"heads": heads, "seqs": (ENDS, MIXED)})
    yield from grid(replace(BASE, heads=(4, 1)), {"d": [(128, 128), (256, 256), (192, 128), (40, 40), (80, 80)],
                    "page": (16, 64), "seqs": (FEW, MIXED)})  # fmt: skip
    latent = replace(BASE, d=(576, 512), heads=(16, 1), layout="v_in_k")
    yield from grid(latent, {"page": (16, 64, 128), "seqs": (((1, 70), (1, 129)), ((4, 33), (1, 17)))})
    yield replace(latent, types=("q8_0", "q8_0"), seqs=((1, 70), (2, 40)))
    yield from grid(BASE, {"types": [(t, t) for t in TYPES] + [("q8_0", "f16"), ("f16", "q4_0")],
                    "page": (0, 16, 64), "seqs": (FEW, MIXED)})  # fmt: skip
    yield from grid(replace(BASE, seqs=FEW, spare=3), {"sinks": ("near", "large"), "softcap": (0.0, 10.0)})
    yield from grid(replace(BASE, sinks="near"), {"seqs": (ENDS, MIXED), "page": (0, 16, 64)})
    yield from grid(replace(BASE, max_bias=8.0, heads=(6, 3)), {"seqs": (FEW, MIXED), "causal": (True, False)})
    yield from grid(BASE, {"window": (1, 20, 100), "seqs": (ENDS, MIXED, LONG), "page": (16, 64)})
    yield from grid(replace(BASE, causal=False), {"seqs": (FEW, MIXED, ((70, 70), (33, 33), (1, 1))),
                    "page": (0, 32), "window": (0, 20)})  # fmt: skip
    yield replace(BASE, seqs=((5, 2), (3, 0), (4, 4)), page=0)  # queries before the first key see nothing
    yield replace(BASE, seqs=((5, 2), (3, 0), (4, 4)))
    yield replace(BASE, seqs=((0, 0), (0, 40), (1, 0)), spare=2)
    yield replace(BASE, seqs=tuple((1, 1 + 13 * i % 150) for i in range(24)), page=16)
    # Groups: of all, of some beside others, of one, of none that share a page; new tokens of one and of many.
    prefix = replace(BASE, groups=((0, 3),), page=16)
    for groups, seqs in ((((0, 3),), ALIKE), (((1, 2), (3, 1)), ALIKE), (((0, 2), (2, 3)), CHUNKS)):
        yield from grid(replace(prefix, groups=groups, seqs=seqs), {"page": (16, 64), "d": [(64, 64), (128, 128)]})
    yield from grid(replace(prefix, seqs=ALIKE, heads=(8, 1)), {"sinks": (None, "near"), "softcap": (0.0, 10.0)})
    yield from grid(replace(prefix, seqs=CHUNKS, types=("q8_0", "q8_0")), {"causal": (True, False), "window": (0, 500)})
    yield replace(prefix, seqs=CHUNKS, max_bias=8.0)
    yield replace(prefix, seqs=CHUNKS, spare=3, groups=((1, 4),))
    # Functions of positions over pages and packed keys, of each sequence its own, of few rows and of many.
    yield from grid(BASE, {"score": ("branches", "relative", "softcap"), "seqs": (FEW, MIXED)})
    yield from grid(replace(BASE, score="branches", heads=(8, 2)), {"page": (0, 16), "seqs": (ENDS, MIXED, LONG)})
    yield replace(BASE, score="hides", seqs=MIXED, sinks="near", softcap=5.0)
    yield replace(BASE, score="temperature", seqs=MIXED, window=20, max_bias=8.0, d=(128, 128))
    yield replace(BASE, score="smooth", seqs=CHUNKS, causal=False, d=(256, 256), types=("bf16", "bf16"))
    yield replace(BASE, score="branches", seqs=((5, 2), (3, 0), (4, 4)), page=0, causal=False)
    yield replace(BASE, score="gate", seqs=FEW, types=("q8_0", "q4_0"))
    yield replace(prefix, score="branches", seqs=CHUNKS, groups=((0, 2), (2, 3)))
    yield from _masked()


def _full() -> Iterator[Axes]:
    yield from _quick()
    ragged = tuple((1, 100 + 277 * i % 3000) for i in range(32))
    prompts = tuple((64 + 131 * i % 600, 64 + 131 * i % 600) for i in range(8))
    chunks = tuple((65, 65 + 411 * i) for i in range(6))
    wide = replace(BASE, d=(128, 128), heads=(32, 8))
    types = [("f16", "f16"), *((t, t) for t in TYPES)]
    yield from grid(wide, {"page": (0, 16, 32, 64, 128, 256), "seqs": (ragged, prompts, chunks), "types": types})
    yield from grid(replace(wide, types=("q8_0", "q8_0")), {"d": [(64, 64), (256, 256)], "seqs": (FEW, ragged, chunks)})
    yield from grid(wide, {"window": (128, 1000), "seqs": (ragged, prompts, chunks), "page": (16, 64)})
    many = tuple((1, 1 + 7 * i % 90) for i in range(300))
    yield from grid(wide, {"seqs": (many,), "page": (16, 32, 64), "heads": [(8, 2), (4, 4)]})
    yield from grid(replace(wide, d=(576, 512), layout="v_in_k"), {"heads": [(16, 1), (128, 1)], "page": (16, 64, 128),
                    "seqs": (FEW, ragged, chunks)})  # fmt: skip


def _masked() -> Iterator[Axes]:
    """An explicit mask, with the rules of positions and without."""
    tree = replace(BASE, mask="tree", page=16)
    yield from grid(tree, {"page": (0, 16, 64), "seqs": (FEW, MIXED)})
    yield from grid(tree, {"d": [(128, 128), (256, 256)], "heads": [(8, 2), (12, 4)], "seqs": (FEW, CHUNKS)})
    keys = replace(BASE, mask="keys", causal=False)
    yield from grid(keys, {"page": (0, 16, 128), "seqs": (FEW, MIXED, LONG), "causal": (True, False)})
    yield from grid(keys, {"mask_heads": (2, 4), "seqs": (FEW, MIXED), "max_bias": (0.0, 8.0)})
    yield from grid(replace(keys, mask="new"), {"page": (0, 32), "seqs": (FEW, MIXED), "causal": (True, False)})
    yield from grid(replace(keys, mask="short"), {"page": (0, 16), "seqs": (MIXED, LONG)})
    yield from grid(keys, {"types": [("q8_0", "q4_0"), ("f32", "f32"), ("f8_e4m3", "f8_e4m3")], "page": (16,)})
    yield from grid(replace(keys, window=20, seqs=MIXED), {"mask": ("keys", "new"), "causal": (True, False)})
    yield replace(keys, sinks="near", softcap=10.0, seqs=MIXED, spare=3)
    yield replace(keys, score="branches", seqs=FEW)
    yield replace(keys, mask="new", seqs=((5, 2), (3, 0), (4, 4), (2, 9)), page=0)
    yield replace(keys, d=(576, 512), heads=(16, 1), layout="v_in_k", seqs=((2, 70), (1, 129)))
    shared = replace(BASE, groups=((0, 2), (2, 3)), page=16, seqs=CHUNKS)
    yield from grid(shared, {"mask": ("tree", "new", "keys"), "d": [(64, 64)], "mask_heads": (1, 4)})


#: Of the quick points FLASH_ATTN_VARLEN_LSE has every so many: v it doesn't know.
_LSE_SHARE = 4


def points(op: str, which: str) -> list[Axes]:
    """The points of an op's set, each once."""
    found = list(dict.fromkeys(_quick() if which == "quick" else _full()))
    if op == "FLASH_ATTN_VARLEN":
        return found
    alone = (replace(a, d=(a.d[0], a.d[0]), types=(a.types[0], "f16"), layout="cache") for a in found)
    each = list(dict.fromkeys(alone))
    return [a for a in each if zlib.crc32(repr(a).encode()) % _LSE_SHARE == 0 or a.sinks or not a.causal]


def cases(op: str, which: str = "quick") -> Iterator[Case]:
    yield from (as_case(op, axes) for axes in points(op, which))


for _op in ("FLASH_ATTN_VARLEN", "FLASH_ATTN_VARLEN_LSE"):
    register_cases(_op, quick=partial(cases, _op), full=partial(cases, _op, "full"))
