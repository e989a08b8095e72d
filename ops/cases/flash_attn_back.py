"""Conformance cases of FLASH_ATTN_BACK and FLASH_ATTN_VARLEN_BACK: head sizes, groups of heads, tails, masks, what is
added to logits and what is hidden, for the gradient of each source.

out and lse are inputs like any other: of values near those of a forward, but not its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial

from graphrt.ops.cases.scores import SCORES
from graphrt.ops.flash_attn_back import flash_attn_back, flash_attn_varlen_back
from graphrt.ops.flash_attn_ext import FlashAttnParams
from graphrt.ops.flash_attn_varlen import FlashAttnVarlenParams
from graphrt.ops.score import as_params
from graphrt.ops.view import permute
from graphrt.tensor import Tensor
from graphrt.testing import Case, Given, Init, Inputs, Normal, Uniform, register_cases
from graphrt.testing.masks import CausalMask, MaskValues
from graphrt.testing.values import Spoiled


@dataclass(frozen=True)
class Axes:
    """One point. heads: of q, and of k and v; d: D_k and D_v; type: of k and v. mask: None, causal, window, random, or
    per_head; empty: so many of the first and last rows see nothing; bias: dimensions 2 and 3 of attn_bias, None for
    none; layout: plain, or cache (heads inside rows, NaN in cells that nobody sees); size: of d_out's numbers;
    score: a name of scores.py's SCORES; together: the graph has the gradients of all other sources as well."""

    of: str
    n_q: int = 5
    n_kv: int = 33
    heads: tuple[int, int] = (4, 2)
    n_seq: int = 1
    d: tuple[int, int] = (40, 40)
    type: str = "f32"
    mask: str | None = "random"
    empty: int = 0
    softcap: float = 0.0
    max_bias: float = 0.0
    sinks: bool = False
    bias: tuple[int, int] | None = None
    bias_type: str = "f32"
    d_lse: bool = False
    dropout_p: float = 0.0
    layout: str = "plain"
    size: float = 1.0
    score: str | None = None
    together: bool = False


def _points() -> Iterator[Axes]:
    base = Axes("q")
    for d in ((64, 64), (72, 72), (128, 128), (64, 32), (1, 1), (192, 128)):
        yield replace(base, d=d)
    for heads in ((1, 1), (7, 1), (16, 2), (3, 3)):
        yield replace(base, heads=heads, n_seq=2)
    for n_q in (1, 127, 128, 129):
        yield replace(base, n_q=n_q, heads=(2, 1), mask="causal", n_kv=n_q + 3)
    yield replace(base, n_q=150, n_kv=150, heads=(2, 1), mask="window", d=(16, 16))
    for n_kv in (1, 31, 32, 65, 130):
        yield replace(base, n_kv=n_kv, mask=None)
    for kind in ("f16", "bf16"):
        yield replace(base, type=kind, mask=None)
        yield replace(base, type=kind, softcap=3.0, sinks=True, layout="cache")
    yield replace(base, mask="per_head", n_seq=2)
    yield replace(base, empty=2, n_q=9, sinks=True)
    yield replace(base, softcap=2.0)
    yield replace(base, max_bias=8.0, heads=(6, 2))
    yield replace(base, d_lse=True, sinks=True)
    yield replace(base, layout="cache")
    yield from _long_points(base)
    for bias in ((1, 1), (4, 2), (2, 1)):
        yield replace(base, bias=bias, n_seq=2, bias_type="bf16" if bias == (1, 1) else "f32")
    yield replace(base, bias=(1, 1), max_bias=4.0, bias_type="f16")
    yield replace(base, dropout_p=0.3, n_seq=2, n_q=9)
    yield replace(base, dropout_p=0.9, mask=None)
    yield replace(base, type="f16", dropout_p=0.3, bias=(1, 1), softcap=2.0, n_q=40, mask="causal")
    yield replace(base, type="bf16", dropout_p=0.3, bias=(2, 1), n_seq=2, d=(128, 128), mask=None)
    for name in SCORES:
        kind = "f32" if name in ("branches", "smooth") else "f16"
        yield replace(base, score=name, type=kind, n_q=19, n_kv=70, n_seq=2, mask="causal")
    yield replace(base, score="branches", n_seq=2, mask=None, bias=(2, 1), sinks=True)
    yield replace(base, score="relative", type="bf16", n_q=130, n_kv=140, d=(64, 64), layout="cache", empty=2)
    for size in (1e-7, 1e6):
        yield replace(base, type="f16", size=size, d=(64, 64), bias=(1, 1))
    for kind in ("f16", "f32"):
        yield replace(base, type=kind, d=(576, 512), heads=(2, 1), n_q=3)
        yield replace(base, type=kind, d=(256, 256), heads=(2, 1), mask="causal", n_q=33)
    yield replace(base, dropout_p=0.1, softcap=2.0, max_bias=4.0, sinks=True, bias=(2, 1), d_lse=True, n_seq=2)
    yield from _together_points(replace(base, together=True))


def _together_points(base: Axes) -> Iterator[Axes]:
    """Kernels that make several gradients at once, and those that make what others left: of each type, with and
    without what is added to logits."""
    yield replace(base, bias=(2, 1), n_seq=2, sinks=True)
    large = replace(base, n_q=140, n_kv=208, n_seq=2, d=(64, 64), mask=None, bias=(2, 1), bias_type="f16")
    yield from (replace(large, type="f16"), replace(large, type="bf16"), replace(large, type="bf16", bias_type="bf16"))
    yield replace(large, type="bf16", d=(128, 128), dropout_p=0.3, bias=(1, 2))
    yield replace(large, type="f16", d=(256, 256), n_q=70, heads=(2, 1), n_seq=1, bias=(1, 1))
    yield replace(base, type="bf16", n_q=140, n_kv=208, d=(128, 128), mask="causal", sinks=True, d_lse=True)


def _long_points(base: Axes) -> Iterator[Axes]:
    """Several tiles of 64 or 128 queries and keys, of 16 bits, whose last ones are not whole; rows of the mask that
    start on 16 bytes, and others."""
    for d, kind in ((64, "f16"), (128, "bf16"), (256, "f16")):
        yield replace(base, n_q=150, n_kv=203, d=(d, d), type=kind, mask=None)
    base = replace(base, n_q=140, n_kv=208)
    yield replace(base, d=(128, 128), type="f16", mask="causal", heads=(4, 1), n_seq=2, d_lse=True)
    yield replace(base, d=(64, 64), type="bf16", softcap=2.0, sinks=True)
    yield replace(base, d=(128, 128), type="f16", softcap=30.0, mask=None)
    yield replace(base, d=(64, 64), type="bf16", softcap=8.0, mask="causal")
    yield replace(base, d=(64, 64), type="f16", n_kv=207, heads=(6, 2), max_bias=8.0, empty=2)
    yield replace(base, d=(128, 128), type="f16", heads=(2, 2), softcap=2.0, mask="per_head", n_seq=2)
    yield replace(base, d=(256, 256), type="f16", n_q=64, softcap=2.0, layout="cache")
    yield replace(base, d=(128, 128), type="f16", n_q=70, heads=(2, 1), layout="cache")
    yield replace(base, d=(256, 256), type="bf16", n_q=70, mask="causal")
    kept = replace(base, type="f16", dropout_p=0.3)
    biased = replace(kept, mask=None, bias=(2, 2), bias_type="f16", d=(128, 128), n_seq=2)
    yield biased
    yield replace(kept, d=(64, 64), n_kv=207, heads=(2, 1), mask="causal", softcap=2.0)
    yield replace(biased, d=(64, 64), n_q=70, heads=(4, 1), bias=(1, 1))
    yield replace(biased, d=(256, 256), n_q=64, heads=(2, 1), bias=(1, 1), n_seq=1)
    yield replace(base, d=(64, 64), type="f16", n_q=400, n_kv=400, mask="window", heads=(2, 1), layout="cache")


def axes_of_cases() -> Iterator[Axes]:
    for point in _points():
        for of in _sources(point):
            yield replace(point, of=of)


def _sources(axes: Axes) -> list[str]:
    """Those that have a gradient."""
    return ["q", "k", "v", *(["attn_bias"] if axes.bias else []), *(["sinks"] if axes.sinks else [])]


def _lse(axes: Axes) -> Init:
    middle = math.log(axes.n_kv) + (0.5 if axes.mask is None else 0.0)
    return Uniform(middle, middle + 1.0)


def _mask_init(axes: Axes) -> Init:
    if axes.mask in ("causal", "window"):
        return CausalMask(window=48 if axes.mask == "window" else 0)
    return MaskValues(0.3, axes.empty)


def _operand(i: Inputs, name: str, d: int, axes: Axes) -> Tensor:
    ne = (d, axes.heads[1], axes.n_kv, axes.n_seq)
    if axes.layout == "plain":
        return i(name, axes.type, (d, axes.n_kv, axes.heads[1], axes.n_seq), Normal(1.0))
    return permute(i(name, axes.type, ne, Spoiled(Normal(1.0), range(axes.n_kv - 4, axes.n_kv), -3)), 0, 2, 1, 3)


def _make(axes: Axes, i: Inputs) -> Tensor:
    (d_k, d_v), (n_head, _), n_q, n_seq = axes.d, axes.heads, axes.n_q, axes.n_seq
    q = i("q", "f32", (d_k, n_q, n_head, n_seq), Normal(1.0))
    k, v = _operand(i, "k", d_k, axes), _operand(i, "v", d_v, axes)
    rows, mask = (n_head, n_q, n_seq), None
    if axes.mask is not None:
        init = _mask_init(axes)
        if axes.layout == "cache":
            init = Hidden(init, 4)
        dims = (n_head, n_seq) if axes.mask == "per_head" else (1, n_seq)
        mask = i("mask", "f16", (axes.n_kv, n_q, *dims), init)
    bias = None
    if axes.bias is not None:
        bias = i("attn_bias", axes.bias_type, (axes.n_kv, n_q, *axes.bias))
    sinks = i("sinks", "f32", (n_head,), Uniform(1.0, 4.0)) if axes.sinks else None
    out = i("out", "f32", (d_v, *rows), Normal(1.0))
    d_out = i("d_out", "f32", (d_v, *rows), Normal(axes.size))
    lse: Init = Given((-math.inf,)) if axes.mask is None and axes.n_kv == 1 else _lse(axes)
    function = SCORES[axes.score](n_head, axes.n_kv) if axes.score is not None else None
    text, numbers = as_params(function)
    params = FlashAttnParams(
        d_k**-0.5, axes.max_bias, axes.softcap, axes.dropout_p, 2**33 + 9, 5, score=text, score_numbers=numbers
    )  # fmt: skip
    of_source = partial(
        flash_attn_back, d_out=d_out, q=q, k=k, v=v, out=out, lse=i("lse", "f32", rows, lse), params=params, mask=mask,
        sinks=sinks, attn_bias=bias, d_lse=i("d_lse", "f32", rows) if axes.d_lse else None,
    )  # fmt: skip
    if axes.together:
        i.beside = [of_source(other) for other in _sources(axes) if other != axes.of]
    return of_source(axes.of)


@dataclass(frozen=True)
class Hidden:
    """`base`, and the last `cells` keys are hidden from every query."""

    base: Init
    cells: int

    def __call__(self, rng, shape):  # type: ignore[no-untyped-def]
        values = self.base(rng, shape)
        values[..., -self.cells :] = -math.inf
        return values


@dataclass(frozen=True)
class Packed:
    """One point of packed sequences: first queries and first keys of each, the last of them the ends. together: as of
    Axes."""

    of: str
    q_starts: tuple[int, ...] = (0, 3, 3, 4, 20)
    k_starts: tuple[int, ...] = (0, 5, 7, 7, 40)
    heads: tuple[int, int] = (4, 2)
    d: tuple[int, int] = (40, 40)
    type: str = "f32"
    causal: bool = True
    window: int = 0
    softcap: float = 0.0
    max_bias: float = 0.0
    sinks: bool = False
    d_lse: bool = False
    together: bool = False


def _packed_points() -> Iterator[Packed]:
    base = Packed("q")
    yield from (base, replace(base, causal=False), replace(base, window=6), replace(base, sinks=True, softcap=2.0))
    yield from (replace(base, max_bias=8.0, d=(64, 32)), replace(base, type="f16", d=(64, 64)))
    yield from (replace(base, sinks=True, d_lse=True), replace(base, type="bf16", causal=False, heads=(6, 1)))
    long = replace(base, q_starts=(0, 129, 130, 258), k_starts=(0, 129, 130, 258), d=(32, 32), heads=(2, 1))
    yield from (long, replace(long, window=31), replace(long, causal=False))
    # What a GPU with kernels of its own for packed sequences takes by them: whole tiles, ends inside of them, more keys
    # than queries, the other way round, sequences of one query and of none.
    large = Packed("q", (0, 130, 131, 131, 300), (0, 200, 205, 206, 340), (2, 1), (128, 128), "f16")
    yield from (large, replace(large, causal=False, type="bf16"), replace(large, window=70, softcap=5.0))
    yield from (replace(large, d=(64, 64), max_bias=8.0), replace(large, d=(64, 64), window=40, causal=False))
    yield from (replace(large, sinks=True, together=True), replace(base, type="bf16", together=True))


def _packed_cases() -> Iterator[Case]:
    for point in _packed_points():
        for of in _packed_sources(point):
            yield packed_case(replace(point, of=of))


def _packed_sources(axes: Packed) -> list[str]:
    return ["q", "k", "v", *(["sinks"] if axes.sinks else [])]


def _make_packed(axes: Packed, i: Inputs) -> Tensor:
    (d_k, d_v), (n_head, n_head_kv) = axes.d, axes.heads
    n_q, n_k = axes.q_starts[-1] + 2, axes.k_starts[-1] + 3  # the rest is nobody's
    q = i("q", "f32", (d_k, n_q, n_head), Normal(1.0))
    k, v = (i(name, axes.type, (d, n_k, n_head_kv), Normal(1.0)) for name, d in (("k", d_k), ("v", d_v)))
    out, d_out = (i(name, "f32", (d_v, n_head, n_q), Normal(1.0)) for name in ("out", "d_out"))
    starts = [i(name, "i32", (len(at),), Given(at)) for name, at in
              (("q_starts", axes.q_starts), ("k_starts", axes.k_starts))]  # fmt: skip
    sinks = i("sinks", "f32", (n_head,), Uniform(0.0, 3.0)) if axes.sinks else None
    params = FlashAttnVarlenParams(d_k**-0.5, axes.max_bias, axes.softcap, axes.causal, axes.window)
    d_lse = i("d_lse", "f32", (n_head, n_q)) if axes.d_lse else None
    lse = i("lse", "f32", (n_head, n_q), Uniform(2.0, 4.0))

    def of_source(of: str) -> Tensor:
        return flash_attn_varlen_back(
            of, d_out, q, k, v, out, lse, starts[0], starts[1], params, sinks=sinks, d_lse=d_lse
        )

    if axes.together:
        i.beside = [of_source(other) for other in _packed_sources(axes) if other != axes.of]
    return of_source(axes.of)


def as_case(axes: Axes) -> Case:
    """The case of a point, which shows what it has of its own."""
    base = asdict(Axes("q"))
    shown = {name: value for name, value in asdict(axes).items() if name == "of" or value != base[name]}
    return Case("FLASH_ATTN_BACK", shown, partial(_make, axes))


def packed_case(axes: Packed) -> Case:
    """The same of packed sequences."""
    shown = asdict(axes)
    if not axes.together:
        del shown["together"]
    return Case("FLASH_ATTN_VARLEN_BACK", shown, partial(_make_packed, axes))


def _cases() -> Iterator[Case]:
    yield from map(as_case, dict.fromkeys(axes_of_cases()))


register_cases("FLASH_ATTN_BACK", quick=_cases)
register_cases("FLASH_ATTN_VARLEN_BACK", quick=_packed_cases)
