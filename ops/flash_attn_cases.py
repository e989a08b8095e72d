"""Conformance cases of FLASH_ATTN_EXT and FLASH_ATTN_LSE."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial

from graphrt.ops.flash_attn_ext import flash_attn_ext, flash_attn_lse
from graphrt.ops.view import permute, view
from graphrt.tensor import Tensor
from graphrt.testing import Case, CausalMask, Init, Inputs, MaskValues, Normal, Uniform


@dataclass(frozen=True)
class Axes:
    """What varies. d: D_k and D_v; heads: n_head and n_head_kv; types: of k and v; mask: see _MASKS, None for none;
    layout: plain, permuted (heads inside rows), padded (a cache longer than n_kv), v_in_k (v is the start of k)."""

    d: tuple[int, int] = (64, 64)
    n_q: int = 3
    n_kv: int = 113
    heads: tuple[int, int] = (4, 2)
    n_seq: int = 1
    types: tuple[str, str] = ("f16", "f16")
    mask: str | None = "causal"
    sinks: bool = False
    max_bias: float = 0.0
    softcap: float = 0.0
    layout: str = "plain"


#: Values of each kind of mask. per_head has a mask a head, some_heads one for every other head and sequence.
_MASKS: dict[str, Init] = {
    "causal": CausalMask(),
    "random": MaskValues(0.3),
    "per_head": MaskValues(0.3),
    "some_heads": MaskValues(0.3),
    "rows_masked": MaskValues(0.3, empty_rows=2),
}


def grid() -> Iterator[Axes]:
    """One base case, then each axis of the contract varied alone or in the pairs that have broken kernels before."""
    base = Axes()
    yield base
    for d in [(40, 40), (72, 72), (65, 67), (128, 128), (192, 128), (256, 256), (96, 64)]:
        yield replace(base, d=d, types=("f32", "f16"))
    for t in ("f32", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"):
        yield replace(base, types=(t, t))
        yield replace(base, types=(t, "f16"), n_q=1)
    for heads in [(4, 4), (12, 1), (6, 2), (32, 2)]:
        yield replace(base, heads=heads, n_seq=2, mask="random")
    for n_q, n_kv in [(1, 1), (1, 17), (32, 512), (75, 40)]:
        yield replace(base, n_q=n_q, n_kv=n_kv)
    for mask in (None, "random", "per_head", "rows_masked"):
        yield replace(base, mask=mask, sinks=True)
        yield replace(base, mask=mask, softcap=10.0, n_seq=2)
    yield replace(base, mask="some_heads", heads=(8, 2), n_seq=4, sinks=True)
    for max_bias in (4.0, 8.0):
        yield replace(base, max_bias=max_bias, heads=(6, 3), mask="random", sinks=True)
    for layout in ("permuted", "padded", "v_in_k"):
        yield replace(base, layout=layout, n_seq=2, mask="random")
    yield replace(base, d=(576, 512), layout="v_in_k", heads=(16, 1), softcap=30.0, sinks=True)


def _cached(inputs: Inputs, name: str, dt: str, d: int, axes: Axes) -> Tensor:
    """k or v as caches hold them. Rows that must be whole blocks are padded; `padded` leaves cells after n_kv too."""
    n_head_kv, n_seq = axes.heads[1], axes.n_seq
    block = 32 if dt.startswith(("q", "iq")) else 1
    row = -(-d // block) * block
    if axes.layout == "permuted":
        return permute(inputs(name, dt, (row, n_head_kv, axes.n_kv, n_seq), Normal(1.0)), 0, 2, 1, 3)
    spare = 7 if axes.layout == "padded" else 0
    cache = inputs(name, dt, (row, axes.n_kv + spare, n_head_kv, n_seq), Normal(1.0))
    return view(cache, (d, axes.n_kv, n_head_kv, n_seq), cache.nb[1:]) if (spare or row != d) else cache


def _make(inputs: Inputs, axes: Axes, lse: bool) -> Tensor:
    (d_k, d_v), (n_head, _), n_seq = axes.d, axes.heads, axes.n_seq
    q = inputs("q", "f32", (d_k, axes.n_q, n_head, n_seq), Normal(3.0))  # logits with a spread that softcap 10 bends
    k = _cached(inputs, "k", axes.types[0], d_k, axes)
    mask = None
    if axes.mask is not None:
        shared = {"per_head": (n_head, n_seq), "some_heads": (2, 2)}.get(axes.mask, (1, n_seq))
        mask = inputs("mask", "f16", (axes.n_kv, axes.n_q, *shared), _MASKS[axes.mask])
    sinks = inputs("sinks", "f32", (n_head,), Uniform(2, 10)) if axes.sinks else None  # as large as the sum
    scale = d_k**-0.5
    if lse:
        return flash_attn_lse(q, k, mask, scale, sinks=sinks, max_bias=axes.max_bias, softcap=axes.softcap)
    if axes.layout == "v_in_k":
        v = view(k, (d_v, *k.ne[1:]), k.nb[1:])
    else:
        v = _cached(inputs, "v", axes.types[1], d_v, axes)
    return flash_attn_ext(q, k, v, mask, scale, sinks=sinks, max_bias=axes.max_bias, softcap=axes.softcap)


def cases(op: str) -> Iterator[Case]:
    """The cases of either op."""
    for axes in grid():
        yield Case(op, asdict(axes), partial(_make, axes=axes, lse=op == "FLASH_ATTN_LSE"))
