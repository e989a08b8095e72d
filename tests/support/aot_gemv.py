"""Launches of the products with few vectors, for compiling ahead of time (see aot.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from graphrt.backends.triton.device import Target
from graphrt.backends.triton.kernels.joined import join_launch
from graphrt.backends.triton.kernels.products.activations import (
    NormWeight,
    Q8Rows,
    Rows,
    add_norm_quantize,
    norm_quantize,
    quantize_rows,
)
from graphrt.backends.triton.kernels.products.gemv import Segment, gemv
from graphrt.backends.triton.kernels.products.gemv_heads import head_gemv
from graphrt.backends.triton.kernels.products.rotated import Cells, rotated_launch
from graphrt.backends.triton.kernels.rope import RopeTable
from graphrt.backends.triton.launch import Launch
from graphrt.backends.triton.packing import PACKED_TYPES, Packed
from graphrt.ops.rope import RopeParams
from graphrt.peers import Peers
from support.aot_arch import target_of


def _weight(kind: str, m: int, k: int) -> Packed | torch.Tensor:
    plain = {"": torch.float32, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
    return torch.empty(m, k, dtype=plain[kind]) if kind in plain else Packed.empty(kind, m, k, "cpu")


def _launch(
    target: Target, kinds: tuple[str, ...], m: int, k: int, n: int, inline: bool = False, biased: bool = False,
    **how: Any,
) -> Launch:  # fmt: skip
    """A product of matrices [m, k] of those types; inline: activations are rounded in the kernel."""
    out, bias = torch.empty(n * m), torch.empty(m) if biased else None
    plain = kinds[0] in ("f32", "f16", "bf16")
    x = Rows(torch.empty(n * k), n, k, k) if plain or inline else Q8Rows.empty(n, k, "cpu")
    return gemv(target, [Segment(_weight(kind, m, k), out, m, bias) for kind in kinds], x, **how)


def _head_launch(target: Target, kind: str, m: int, k: int, n: int, heads: int = 16) -> Launch:
    """A matrix a head, whose results lie side by side for each token."""
    w = _weight(kind, heads * m, k)
    x, out = torch.empty(heads, n, k), torch.empty(n, heads, m).transpose(0, 1)
    return head_gemv(target, w if isinstance(w, Packed) else w.view(heads, m, k), x, out)


def _rotated_launch(target: Target, kinds: tuple[str, ...], n: int, mode: str, cache: str, early: bool) -> Launch:
    """Projections of Llama-8B, with biases of neox's. cache: its type, "" for rows of the tokens' own."""
    k, d, cells, rows = 4096, 128, 64, (4096, 1024, 1024)
    half = torch.empty(n, d // 2)
    kept = {"": torch.float32, "f32": torch.float32, "f16": torch.float16, "bf16": torch.int16}.get(cache, torch.uint8)
    k_cache, v_cache = (torch.empty(cells * rows[1], dtype=kept) for _ in "kv")
    outs, strides = (torch.empty(n * rows[0]), k_cache, v_cache), (rows[0], rows[1], rows[2])
    segments = [
        Segment(_weight(kind, m, k), out, stride, torch.empty(m) if mode == "neox" else None)
        for kind, m, out, stride in zip(kinds, rows, outs, strides)
    ]
    where = Cells(
        torch.empty(n, dtype=torch.int64), 1, n, n, cells, k_cache, rows[1], cells * rows[1], cache, v_cache, rows[2],
        cells * rows[2], cache,
    )  # fmt: skip
    if not cache:
        where = Cells(None, 0, 0, n, n, k_cache, rows[1], 0, "f32", v_cache, rows[2], 0, "f32")
    table = RopeTable(RopeParams(d, mode), half, half)
    return rotated_launch(target, segments, Q8Rows.empty(n, k, "cpu"), table, where, early)


def _launches(target: Target) -> Iterator[tuple[str, Launch]]:
    for kind in (*PACKED_TYPES, "f16", "bf16", "f32"):
        yield f"head gemv {kind} n=1", _head_launch(target, kind, 128, 512, 1)
    for kind in ("q5_0", "q6_K", "f16"):
        for n in (2, 8):
            yield f"head gemv {kind} n={n}", _head_launch(target, kind, 128, 512, n)
    for n in (1, 8):
        yield f"head gemv q5_0, short rows n={n}", _head_launch(target, "q5_0", 512, 128, n)
        yield f"head gemv q4_K, long rows n={n}", _head_launch(target, "q4_K", 128, 1536, n)
    vector = torch.empty(4096)
    for kind in (*PACKED_TYPES, "f16", "bf16", "f32"):
        yield f"gemv {kind} n=1", _launch(target, (kind,), 4096, 4096, 1)
    for n in (2, 4, 8):
        for kind in ("q4_K", "q6_K", "q8_0", "q4_0", "mxfp4", "f16"):
            yield f"gemv {kind} n={n}", _launch(target, (kind,), 4096, 4096, n)
    yield "gemv long rows", _launch(target, ("q4_K",), 4096, 14336, 1)
    for kind in ("q4_K", "q6_K", "q8_0", "q4_0", "mxfp4"):
        for n in (1, 4, 8):
            yield f"gemv {kind} in two parts n={n}", _launch(target, (kind,), 4096, 2048, n)
    for n in (1, 2, 8):
        yield f"gemv glu in two parts n={n}", _launch(target, ("q4_0", "q5_1"), 2048, 640, n, glu="geglu")
    yield "gemv few rows", _launch(target, ("q4_K",), 512, 8192, 1)
    yield "gemv rows of no whole tiles", _launch(target, ("q6_K",), 640, 2304, 1)
    yield "gemv glu", _launch(target, ("q4_K", "q4_K"), 4096, 4096, 1, glu="reglu")
    yield "gemv plain glu", _launch(target, ("f16", "f16"), 1536, 576, 1, glu="reglu")
    residual = (torch.empty(512), 512)
    for n in (1, 4, 8):
        for k in (2048, 4096):
            kinds = ("q4_K", "q4_K", "q6_K")
            yield f"gemv segments n={n} k={k}", _launch(target, kinds, 512, k, n, biased=True, residual=residual)
        yield f"gemv plain, biased n={n}", _launch(target, ("f16",), 2048, 4096, n, biased=True)
    for n in (1, 2):
        yield (
            f"gemv norm inside n={n}",
            _launch(target, ("q4_0", "q4_0"), 1536, 576, n, True, glu="swiglu", norm=(vector, 1e-6)),
        )
    yield "gemv rounding inside", _launch(target, ("q4_1",), 576, 1536, 1, True, residual=(torch.empty(576), 576))
    yield "gemv rounding inside, q6_K", _launch(target, ("q6_K",), 640, 2048, 1, True)
    for kinds, n, mode, cache in (
        (("q4_K", "q4_K", "q6_K"), 1, "normal", "f16"), (("q4_K", "q4_K", "q4_K"), 1, "normal", "f8_e4m3"),
        (("q4_0", "q4_1", "q8_0"), 1, "neox", "bf16"), (("q5_K", "q5_K", "q6_K"), 3, "neox", "f16"),
        (("q4_K", "q4_K", "q6_K"), 8, "normal", "f32"), (("q4_K", "q4_K", "q6_K"), 1, "normal", ""),
    ):  # fmt: skip
        for early in (True, False):
            name = f"gemv rotated {' '.join(kinds)} n={n} {cache or 'rows'}" + " early" * early
            yield name, _rotated_launch(target, kinds, n, mode, cache, early)
    for n, k in ((1, 640), (16, 640), (1, 8192)):
        x, norm = torch.empty(n, k), NormWeight(torch.empty(k), 1e-6)
        found = Q8Rows.empty(n, k, "cpu") if n == 1 else torch.empty(n, k, dtype=torch.float16)
        for first in (norm, None):
            yield f"add_norm {k} n={n}", add_norm_quantize(target, x, first, x, x, norm, found, True)
        both = add_norm_quantize(target, x, None, x, x, norm, found if n == 1 else None, True, out_f32=x)
        yield f"add_norm to f32 too {k} n={n}", both
    yield from _joins(target)
    for k in (576, 4096, 14336):
        x, found = Rows(torch.empty(2 * k), 2, k, k), Q8Rows.empty(2, k, "cpu")
        yield f"quantize {k}", quantize_rows(target, x, found)
        yield f"norm {k}", norm_quantize(target, x, torch.empty(k), 1e-6, found, x)
        yield f"norm to f16 {k}", norm_quantize(target, x, torch.empty(k), 1e-6, torch.empty(2, k, dtype=torch.float16))


def _joins(target: Target) -> Iterator[tuple[str, Launch]]:
    """Sums over ranks with what follows them: from all ranks' parts, and written to others in one step and in two."""
    words = torch.empty(8, dtype=torch.int64)
    for ranks, n, k, linked in (
        (2, 1, 4096, True), (4, 1, 8192, True), (8, 16, 8192, True), (2, 64, 4096, True), (4, 32, 8192, True),
        (3, 2, 640, False),
    ):  # fmt: skip
        if linked and not target.is_nvidia:
            continue
        x, norm = torch.empty(n, k), NormWeight(torch.empty(k), 1e-6)
        peers = Peers(1, ranks, words, words, torch.empty((64, 16), dtype=torch.int32)) if linked else None
        found = Q8Rows.empty(n, k, "cpu") if n == 1 else torch.empty(n, k, dtype=torch.float16)
        yield f"join {ranks} n={n} k={k}", join_launch(target, x, ranks, peers, x, x, None, norm, found, True)
        both = join_launch(target, x, ranks, peers, x, x, norm, norm, None, False, out_f32=x)
        yield f"join, norm before, {ranks} n={n} k={k}", both
        yield f"join alone {ranks} n={n} k={k}", join_launch(target, x, ranks, peers, x)


def aot_cases(arch: str) -> Iterator[tuple[str, Any, dict[str, Any], dict[str, Any]]]:
    """What to compile: a name, the kernel, its arguments by name, its options."""
    for name, launch in _launches(target_of(arch)):
        yield name, launch.kernel, launch.args, launch.options
