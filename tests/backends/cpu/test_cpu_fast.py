"""The fast CPU kernels against float64 computed independently: numpy, and gguf's own decoders for the formats.

Outputs start as NaN, and every buffer has guard bytes on both sides that must survive.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import TESTS

gguf: Any = pytest.importorskip("gguf")
from graphrt import float8  # noqa: E402
from graphrt.backends.cpu import fast  # noqa: E402
from graphrt.dtypes import FLOATS8, dtype  # noqa: E402

if reason := fast.available():
    pytest.skip(reason, allow_module_level=True)
from support.cpu_kernels import Memory, at, decode, encode, nmse, quant_type, rows_of, run  # noqa: E402

pytestmark = pytest.mark.usefixtures("many_chunks")


# matrix times vectors


@pytest.mark.parametrize(
    ("name", "n_tok"),
    [(name, 1) for name in fast.TYPES] + [(name, n) for name in ("bf16", "q4_1", "q6_K") for n in (2, 4, 7, 8)],
)
def test_gemv(name: str, n_tok: int, mem: Memory, rng: np.random.Generator) -> None:
    n_rows, n = 37, rows_of(rng, name)
    w = encode(rng, name, (n_rows, n))
    padded = mem.put(np.pad(w, ((0, 0), (0, 6)), constant_values=0xFF), offset=2)
    x = mem.put(rng.standard_normal((n_tok, n + 3)).astype(np.float32), offset=4)
    y = mem.nan(n_tok, n_rows)
    run(fast.gemv(
        name, y=at(y), w=at(padded), x=at(x), n_rows=n_rows, n=n, w_nb=padded.shape[1],
        n_tok=n_tok, x_nb=4 * (n + 3), y_nb=4 * n_rows,
    ))  # fmt: skip
    assert nmse(y, x[:, :n].astype(np.float64) @ decode(name, w).astype(np.float64).T) < 1e-11


@pytest.mark.parametrize("n_rows", [1, 15, 16, 33])
def test_gemv_adds_a_residual_in_place(n_rows: int, mem: Memory, rng: np.random.Generator) -> None:
    w = mem.put(encode(rng, "q8_0", (n_rows, 64)))
    x, y = (mem.put(rng.standard_normal((2, k)).astype(np.float32)) for k in (64, n_rows))
    want = y + x.astype(np.float64) @ decode("q8_0", w).astype(np.float64).T
    run(fast.gemv(
        "q8_0", y=at(y), w=at(w), x=at(x), n_rows=n_rows, n=64, w_nb=w.shape[1], n_tok=2, x_nb=256,
        y_nb=4 * n_rows, res=at(y), res_nb=4 * n_rows,
    ))  # fmt: skip
    assert nmse(y, want) < 1e-11


def act64(name: str, x: np.ndarray) -> np.ndarray:
    if name == "relu":
        return np.maximum(x, 0)
    if name == "silu":
        return x / (1 + np.exp(-x))
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize(
    "gate,up,act,n_tok", [("q4_1", "q4_1", "silu", 1), ("q4_1", "q8_0", "gelu", 3), ("f16", "f32", "relu", 2)]
)
def test_gemv_glu(gate: str, up: str, act: str, n_tok: int, mem: Memory, rng: np.random.Generator) -> None:
    n_rows, n = 53, 96
    wg, wu = mem.put(encode(rng, gate, (n_rows, n))), mem.put(encode(rng, up, (n_rows, n)))
    x, y = mem.put(rng.standard_normal((n_tok, n)).astype(np.float32) / 4), mem.nan(n_tok, n_rows)
    run(fast.gemv_glu(
        gate, up, act, y=at(y), w_gate=at(wg), w_up=at(wu), x_gate=at(x), x_up=at(x), n_rows=n_rows, n=n,
        w_nb_gate=wg.shape[1], w_nb_up=wu.shape[1], n_tok=n_tok, x_nb_gate=4 * n, x_nb_up=4 * n, y_nb=4 * n_rows,
    ))  # fmt: skip
    g, u = (x.astype(np.float64) @ decode(t, w).astype(np.float64).T for t, w in ((gate, wg), (up, wu)))
    assert nmse(y, act64(act, g) * u) < 1e-11


def test_gemv_refuses_what_it_cannot_do() -> None:
    common = {"y": 0, "w": 0, "x": 0, "n_rows": 1, "w_nb": 34}
    with pytest.raises(ValueError, match="1 to 8"):
        fast.gemv("q8_0", n=32, n_tok=9, **common)
    with pytest.raises(ValueError, match="whole blocks of 32"):
        fast.gemv("q8_0", n=33, **common)


# experts


@pytest.mark.parametrize("name", list(fast.TYPES))
@pytest.mark.parametrize(("n_tok", "own_x", "biased"), [(1, False, True), (3, True, False)])
def test_expert_gemv(name: str, n_tok: int, own_x: bool, biased: bool, mem: Memory, rng: np.random.Generator) -> None:
    """Experts that are several tokens' and nobody's, and numbers of none; gaps between all rows."""
    n_rows, n, n_slots, n_expert = 21, rows_of(rng, name), 4, 5
    w = encode(rng, name, (n_expert, n_rows, n))
    held = mem.put(np.pad(w, ((0, 0), (0, 2), (0, 6)), constant_values=0xFF), offset=2)
    x = mem.put(rng.standard_normal((n_tok, n_slots if own_x else 1, n + 3)).astype(np.float32), offset=4)
    ids = np.array([[4, 0, 4, 2], [-1, 5, 2, 2**31 - 1], [3, 3, -(2**31), 0]], np.int32)[:n_tok]
    spread = mem.put(np.repeat(ids, 2, axis=1))
    bias, y = (
        mem.put(rng.standard_normal((n_expert, n_rows + 1)).astype(np.float32)),
        mem.nan(n_tok, n_slots, n_rows + 2),
    )
    run(fast.expert_gemv(
        name, y=at(y), w=at(held), x=at(x), ids=at(spread), n_rows=n_rows, n=n, n_slots=n_slots, n_tok=n_tok,
        n_expert=n_expert, w_nb=held.strides[1], expert_nb=held.strides[0], y_nb=(y.strides[1], y.strides[0]),
        x_nb=(x.strides[1] if own_x else 0, x.strides[0]), ids_nb=(spread.strides[1] * 2, spread.strides[0]),
        bias=at(bias) if biased else 0, bias_nb=bias.strides[0],
    ))  # fmt: skip
    values = decode(name, w).astype(np.float64)
    known = (ids >= 0) & (ids < n_expert)
    given = np.broadcast_to(x[..., :n], (n_tok, n_slots, n)).astype(np.float64)
    chosen = np.where(known, ids, 0)
    want = np.einsum("tsrk,tsk->tsr", values[chosen], given) + (bias[chosen][..., :n_rows] if biased else 0)
    assert nmse(y[known][:, :n_rows], want[known]) < 1e-11
    assert np.isnan(y[~known]).all() and np.isnan(y[..., n_rows:]).all()


# rows


def bf16_bits(x: np.ndarray) -> np.ndarray:
    return np.asarray(gguf.quants.quantize(x, gguf.GGMLQuantizationType.BF16)).view(np.uint16)


@pytest.mark.parametrize("name", list(fast.TYPES))
def test_dequant_rows(name: str, mem: Memory, rng: np.random.Generator) -> None:
    n_rows, n = 5, rows_of(rng, name)
    w = mem.put(encode(rng, name, (n_rows, n)))
    want = decode(name, w)
    y, half = mem.nan(n_rows, n), mem.put(np.zeros((n_rows, n + 2), np.uint16))
    run(fast.dequant_rows(name, "f32", dst=at(y), w=at(w), n_rows=n_rows, n=n, w_nb=w.shape[1], dst_nb=4 * n))
    # one rounding where gguf has two: equal up to the last bit of the larger term
    assert nmse(y, want.astype(np.float64)) < 1e-13
    run(fast.dequant_rows(name, "bf16", dst=at(half), w=at(w), n_rows=n_rows, n=n, w_nb=w.shape[1], dst_nb=2 * n + 4))
    assert np.array_equal(half[:, :n], bf16_bits(y))
    assert not half[:, n:].any()


def test_every_f16_and_bf16_value_is_decoded_exactly(mem: Memory) -> None:
    bits = mem.put(np.arange(65536, dtype=np.uint16))
    for name in ("f16", "bf16"):
        y = mem.nan(65536)
        run(fast.dequant_rows(name, "f32", dst=at(y), w=at(bits), n_rows=1, n=65536, w_nb=131072, dst_nb=262144))
        want = (bits.astype(np.uint32) << 16).view(np.float32)
        if name == "f16":
            want = bits.view(np.float16).astype(np.float32)
        assert np.array_equal(y, want, equal_nan=True)


@pytest.mark.parametrize("name", FLOATS8)
def test_all_codes_of_8_bits_come_back(name: str, mem: Memory) -> None:
    """Every code is decoded to its number and that number written as the same code; NaN stays NaN."""
    codes, numbers, back = mem.put(np.arange(256, dtype=np.uint8)), mem.nan(256), mem.put(np.zeros(256, np.uint8))
    run(fast.dequant_rows(name, "f32", dst=at(numbers), w=at(codes), n_rows=1, n=256, w_nb=256, dst_nb=1024))
    want = float8.decode(codes, dtype(name))
    assert np.array_equal(numbers, want.astype(np.float32), equal_nan=True)
    _write_codes(name, numbers, back, mem)
    finite = np.isfinite(want)
    assert np.array_equal(back[finite], codes[finite])
    largest = FLOATS8[name].largest
    assert np.array_equal(float8.decode(back, dtype(name)), np.clip(want, -largest, largest), equal_nan=True)


def _write_codes(name: str, values: np.ndarray, codes: np.ndarray, mem: Memory) -> None:
    n = values.size
    run(fast.set_rows(
        name, "i32", src=at(values), idx=at(mem.put(np.zeros(1, np.int32))), dst=at(codes), n_rows=1, n=n,
        src_nb=4 * n, dst_nb=n, n_dst=1, n_idx=1, per_matrix=1, matrix_nb=0,
    ))  # fmt: skip


@pytest.mark.parametrize("name", FLOATS8)
def test_writing_8_bits_rounds_to_even_and_saturates(name: str, mem: Memory, rng: np.random.Generator) -> None:
    numbers = np.unique(float8.decode(np.arange(128, dtype=np.uint8), dtype(name)))
    numbers = numbers[np.isfinite(numbers)]
    halfway = (numbers[:-1] + numbers[1:]) / 2
    largest = numbers[-1]
    hard = [*halfway, *np.nextafter(halfway, 0), *(largest * x for x in (1.0, 1.03, 1.1, 2.0, 1e30)), np.inf, np.nan, 0]
    any_bits = rng.integers(0, 2**32, 5000, dtype=np.uint32).view(np.float32)
    x = mem.put(np.concatenate([np.float32(hard), -np.float32(hard), any_bits]))
    codes = mem.put(np.zeros(x.size, np.uint8))
    _write_codes(name, x, codes, mem)
    assert np.array_equal(codes, float8.encode(x, dtype(name)))
    stored = float8.decode(codes, dtype(name))
    assert np.array_equal(np.isnan(stored), np.isnan(x)) and np.nanmax(np.abs(stored)) == FLOATS8[name].largest


@pytest.mark.parametrize("index", ["i32", "i64"])
def test_get_rows_takes_rows_in_range_only(index: str, mem: Memory, rng: np.random.Generator) -> None:
    w = mem.put(encode(rng, "q4_K", (6, 256)))
    idx = mem.put(np.array([5, 0, 5, 6, -1, 2], index.replace("i", "int")))
    y = mem.nan(6, 256)
    run(fast.get_rows(
        "q4_K", index, dst=at(y), w=at(w), idx=at(idx), n_rows=6, n=256, w_nb=w.shape[1], dst_nb=1024, n_src=6
    ))  # fmt: skip
    kept = [0, 1, 2, 5]
    assert nmse(y[kept], decode("q4_K", w)[idx[kept]].astype(np.float64)) < 1e-13
    assert np.isnan(y[[3, 4]]).all()


@pytest.mark.parametrize("index", ["i32", "i64"])
@pytest.mark.parametrize("name", fast.SET_ROWS_TYPES)
def test_set_rows_writes_gguf_bytes(name: str, index: str, mem: Memory, rng: np.random.Generator) -> None:
    n, n_dst = 96 if name.startswith("q") else 85, 9
    src = rng.standard_normal((5, n)).astype(np.float32)
    src[1, :32] = 0
    src[2, 3], src[2, 20] = -4.0, 4.0  # equal sizes: the first decides q4_0's sign
    src[3] = np.round(src[3] * 4) / 4  # ties
    if name == "bf16":
        src[4, 0] = np.nan
    source = mem.put(src)
    idx = mem.put(np.array([7, 0, 3, n_dst, 8], index.replace("i", "int")))
    plain8 = float8.encode(src, dtype(name)) if name in FLOATS8 else None
    want = plain8 if plain8 is not None else np.asarray(gguf.quants.quantize(src, quant_type(name)))
    want = want.view(np.uint8).reshape(5, -1)
    cache = mem.put(np.full((n_dst, want.shape[1] + 4), 0x5A, np.uint8))
    run(fast.set_rows(
        name, index, src=at(source), idx=at(idx), dst=at(cache), n_rows=5, n=n, src_nb=4 * n,
        dst_nb=cache.shape[1], n_dst=n_dst, n_idx=5, per_matrix=5, matrix_nb=0,
    ))  # fmt: skip
    expected = np.full_like(cache, 0x5A)
    for r, i in enumerate(idx):
        if i < n_dst:
            expected[i, :-4] = want[r]
    assert np.array_equal(cache, expected)


# norm and rope


@pytest.mark.parametrize("n,weighted", [(1, True), (63, True), (576, False), (721, True)])
@pytest.mark.parametrize("add", [False, True])
def test_rms_norm(add: bool, n: int, weighted: bool, mem: Memory, rng: np.random.Generator) -> None:
    x, other = (mem.put(rng.standard_normal((3, n)).astype(np.float32)) for _ in range(2))
    w = mem.put(rng.standard_normal(n).astype(np.float32))
    y, total = mem.nan(3, n), mem.nan(3, n)
    common: dict[str, Any] = {
        "y": at(y), "x": at(x), "n_rows": 3, "n": n, "x_nb": 4 * n, "y_nb": 4 * n, "eps": 1e-5,
        "w": at(w) if weighted else 0,
    }  # fmt: skip
    s = x.astype(np.float64)
    if add:
        run(fast.add_rms_norm(total=at(total), other=at(other), other_nb=4 * n, total_nb=4 * n, **common))
        s = s + other
        assert np.array_equal(total, x + other)
    else:
        run(fast.rms_norm(**common))
    want = s / np.sqrt((s**2).mean(1, keepdims=True) + 1e-5) * (w if weighted else 1)
    assert nmse(y, want) < 1e-12


@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize("head_dim,n_dims", [(64, 64), (80, 32), (72, 50), (128, 128)])
@pytest.mark.parametrize("in_place", [False, True])
def test_rope(head_dim: int, n_dims: int, neox: bool, in_place: bool, mem: Memory, rng: np.random.Generator) -> None:
    n_tok, n_head, pad = 5, 3, 4
    x = mem.put(rng.standard_normal((n_tok, n_head, head_dim + pad)).astype(np.float32))
    y = x if in_place else mem.nan(n_tok, n_head, head_dim)
    pos = mem.put(np.array([0, 1, 777, 32768, 131071], np.int32))
    freq = mem.put(10000.0 ** (-2 * np.arange(n_dims // 2) / n_dims))
    a = x[..., :head_dim].astype(np.float64)
    angle = pos[:, None, None] * freq
    c, s = 1.25 * np.cos(angle), 1.25 * np.sin(angle)
    even, odd = slice(0, n_dims, 2), slice(1, n_dims, 2)
    if neox:
        even, odd = slice(0, n_dims // 2), slice(n_dims // 2, n_dims)
    want = a.copy()
    want[..., even] = a[..., even] * c - a[..., odd] * s
    want[..., odd] = a[..., even] * s + a[..., odd] * c
    guard = x[..., head_dim:].copy()
    run(fast.rope(
        y=at(y), x=at(x), pos=at(pos), freq=at(freq), head_dim=head_dim, n_dims=n_dims, neox=neox, n_head=n_head,
        n_tok=n_tok, x_nb1=x.strides[1], x_nb2=x.strides[0], y_nb1=y.strides[1], y_nb2=y.strides[0], mscale=1.25,
    ))  # fmt: skip
    assert nmse(y[..., :head_dim], want) < 1e-13
    assert np.array_equal(x[..., head_dim:], guard)


# elementwise


def _oai64(gate: np.ndarray, up: np.ndarray, alpha: float, limit: float) -> np.ndarray:
    gate = np.minimum(gate, limit)
    return np.asarray(gate / (1 + np.exp(-alpha * gate)) * (np.clip(up, -limit, limit) + 1))


@pytest.mark.parametrize(
    "op",
    ["silu", "gelu", "gelu_quick", "relu", "sigmoid", "tanh", "scale", "clamp", "softcap", "sqr", "sqrt", "copy",
     "fill", "add", "sub", "mul", "div", "silu_glu", "gelu_glu", "relu_glu", "swiglu_oai"],
)  # fmt: skip
def test_elementwise(op: str, mem: Memory, rng: np.random.Generator) -> None:
    n_rows, n = 3, 1051
    a, b = (mem.put((rng.standard_normal((n_rows, n)) * 6).astype(np.float32)) for _ in range(2))
    if op == "sqrt":
        a[:] = np.abs(a)
    s0, s1 = (-2.0, 3.0) if op == "clamp" else (7.0, 0.25)
    y = mem.nan(n_rows, n)
    repeated = op == "mul"
    run(fast.elementwise(
        op, y=at(y), a=at(a), b=at(b), n_rows=n_rows, n=n, y_nb=4 * n, a_nb=4 * n, b_nb=0 if repeated else 4 * n,
        s0=s0, s1=s1,
    ))  # fmt: skip
    a64, b64 = a.astype(np.float64), (b[:1] if repeated else b).astype(np.float64)
    plain = {"scale": a64 * 7 + 0.25, "softcap": 7 * np.tanh(a64 / 7), "add": a64 + b64, "mul": a64 * b64}
    plain |= {"sub": a64 - b64, "div": a64 / b64, "clamp": a64.clip(-2, 3), "sqr": a64 * a64, "copy": a64}
    plain |= {"sqrt": np.sqrt(np.abs(a64)), "tanh": np.tanh(a64), "sigmoid": 1 / (1 + np.exp(-a64))}
    plain |= {"gelu_quick": a64 / (1 + np.exp(-1.702 * a64)), "fill": np.full_like(a64, 7.0)}
    plain["swiglu_oai"] = _oai64(a64, b64, 7.0, 0.25)
    want = plain[op] if op in plain else act64(op.removesuffix("_glu"), a64) * (b64 if op.endswith("_glu") else 1)
    assert nmse(y, want) < 1e-13


def test_activations_at_the_edges(mem: Memory) -> None:
    x = mem.put(np.array([0.0, -0.0, 1e-30, -1e-4, 89.0, -89.0, 1e4, -1e4, np.inf, np.nan], np.float32))
    for op, exact in (("silu", act64), ("gelu", act64), ("softcap", None)):
        y = mem.nan(10)
        run(fast.elementwise(op, y=at(y), a=at(x), n_rows=1, n=10, y_nb=40, a_nb=40, s0=30.0))
        with np.errstate(over="ignore", invalid="ignore"):
            want = exact(op, x.astype(np.float64)) if exact else 30 * np.tanh(x.astype(np.float64) / 30)
        assert np.allclose(y[:-1], want[:-1], rtol=2e-6, atol=1e-30)
        assert np.isnan(y[-1])


@pytest.mark.parametrize("window", [0, 1, 40, 2**31 - 1])
@pytest.mark.parametrize("n_cells", [1, 31, 32, 100])
def test_kq_mask(n_cells: int, window: int, mem: Memory, rng: np.random.Generator) -> None:
    held = rng.integers(-1, 130, (2, n_cells + 3)).astype(np.int32)
    held[0, 0] = last = 2**31 - 1
    pos = np.concatenate([rng.integers(0, 130, (2, 6)), [[last, 0], [5, last]]], 1).astype(np.int32)
    cells, tokens, out = mem.put(held), mem.put(pos), mem.put(np.full((2, 7, n_cells), np.nan, np.float16))
    run(
        fast.kq_mask(
            dst=at(out), cells=at(cells), pos=at(tokens), n_cells=n_cells, n_tokens=7, n_seq=2,
            cells_nb=4 * (n_cells + 3), pos_nb=32, window=window,
        )
    )  # fmt: skip
    back = pos[:, :7, None].astype(np.int64) - held[:, None, :n_cells]
    sees = (held[:, None, :n_cells] >= 0) & (back >= 0) & (back < (window or np.inf))
    assert np.array_equal(out, np.where(sees, 0.0, -np.inf))


# reads past the end: inputs end where unreadable memory begins


def before_a_wall(values: np.ndarray) -> np.ndarray:
    """A copy of `values` whose last byte is the last before a page that may not be read."""
    page = mmap.PAGESIZE
    size = -(-values.nbytes // page) * page
    memory = mmap.mmap(-1, size + page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(start + size), ctypes.c_size_t(page), 0) == 0
    inner = np.frombuffer(memory, np.uint8, values.nbytes, size - values.nbytes)
    inner[:] = np.frombuffer(values.tobytes(), np.uint8)
    return inner.view(values.dtype).reshape(values.shape)


def integers_up_to_the_wall(name: str, w: np.ndarray, x: np.ndarray) -> None:
    n, y = x.shape[1], before_a_wall(np.zeros((3, 17), "f4"))
    for form in (fast.form_of(name, 16), fast.panel_form_of(name, 16)):
        rounded = before_a_wall(np.zeros((3, form.row_bytes(n)), np.uint8))
        run(fast.round_rows(form, dst=at(rounded), x=at(x), n_rows=3, n=n, x_nb=4 * n))
        common: dict[str, Any] = {
            "y": at(y), "w": at(w), "x": at(rounded), "n_rows": 17, "n": n, "w_nb": w.shape[1], "n_tok": 3,
            "x_nb": rounded.shape[1], "y_nb": 68, "bits": 16,
        }  # fmt: skip
        if form == fast.form_of(name, 16):
            run(fast.gemv(name, **common))
        if form == fast.panel_form_of(name, 16):
            panels = before_a_wall(np.zeros((2, fast.panel_bytes(form, 3)), np.uint8))
            run(fast.gemm(name, panels=at(panels), n_panels=2, **common))


def read_up_to_the_wall() -> None:
    """In a process of its own: a kernel that reads too far ends it."""
    rng = np.random.default_rng(3)
    for name in fast.TYPES:
        n = rows_of(rng, name)
        w, x = before_a_wall(encode(rng, name, (17, n))), before_a_wall(rng.standard_normal((3, n)).astype(np.float32))
        y, wide = np.zeros((3, 17), np.float32), np.zeros((17, n), np.float32)
        nb = w.shape[1]
        run(fast.gemv(
            name, y=at(y), w=at(w), x=at(x), n_rows=17, n=n, w_nb=nb, n_tok=3, x_nb=4 * n, y_nb=68
        ))  # fmt: skip
        run(fast.dequant_rows(name, "f32", dst=at(wide), w=at(w), n_rows=17, n=n, w_nb=nb, dst_nb=4 * n))
        run(fast.rms_norm(y=at(wide), x=at(x), n_rows=3, n=n, x_nb=4 * n, y_nb=4 * n, eps=1e-6))
        if name in fast.CODE_TYPES:
            integers_up_to_the_wall(name, w, x)
    for name in fast.KV_TYPES:
        for n_kv, n_q in ((37, 1), (64, 3), (601, 1), (37, 9), (70, 34)):
            k = before_a_wall(encode(rng, name, (n_kv, 32)))
            v = before_a_wall(encode(rng, name, (n_kv, 32)))
            q = before_a_wall(rng.standard_normal((n_q, 32)).astype(np.float32))
            mask, out = before_a_wall(np.zeros((n_q, n_kv), np.float16)), np.zeros((n_q, 32), np.float32)
            nb = (k.strides[0], 0, 0)
            run(fast.flash_attn(
                name, name, d_k=32, d_v=32, n_q=n_q, n_kv=n_kv, n_head=1, n_head_kv=1, n_seq=1, q=at(q),
                q_nb=(128, 0, 0), k=at(k), k_nb=nb, v=at(v), v_nb=nb, out=at(out), out_nb=(0, 128, 0), scale=0.2,
                mask=at(mask), mask_nb=(2 * n_kv, 0, 0),
            ))  # fmt: skip


@pytest.mark.skipif(sys.platform == "win32", reason="needs mprotect")
def test_no_kernel_reads_past_its_input() -> None:
    small = "from graphrt.backends.cpu.fast import pool; pool.CHUNK_BYTES = 1"
    code = f"{small}; import test_cpu_fast; test_cpu_fast.read_up_to_the_wall()"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    subprocess.run([sys.executable, "-c", code], check=True, env=env, timeout=300)


# programs, and the machinery


def test_program_orders_what_depends(mem: Memory, rng: np.random.Generator) -> None:
    n, size = 96, 400
    x = mem.put(rng.standard_normal(n).astype(np.float32))
    w = [mem.put(encode(rng, "q8_0", (size, k))) for k in (n, 32 * (size // 32), 32 * (size // 32))]
    h, a, b, y = mem.nan(size), mem.nan(size), mem.nan(size), mem.nan(size)
    k = w[1].shape[1] // 34 * 32

    def mul(y: np.ndarray, w: np.ndarray, x: np.ndarray, n: int) -> fast.Step:
        return fast.gemv("q8_0", y=at(y), w=at(w), x=at(x), n_rows=size, n=n, w_nb=w.shape[1])

    norm = fast.rms_norm(y=at(h), x=at(h), n_rows=1, n=size, x_nb=4 * size, y_nb=4 * size, eps=1e-6)
    add = fast.elementwise("add", y=at(y), a=at(a), b=at(b), n_rows=1, n=size, y_nb=0, a_nb=0)
    program = fast.Program([mul(h, w[0], x, n), norm, norm, [mul(a, w[1], h, k), mul(b, w[2], h, k)], add], 2)
    matrices = [decode("q8_0", m).astype(np.float64) for m in w]
    h64 = matrices[0] @ x.astype(np.float64)
    h64 /= np.sqrt((h64**2).mean())
    want = matrices[1] @ h64[:k] + matrices[2] @ h64[:k]
    for _ in range(200):  # a missing barrier shows only now and then
        for buffer in (h, a, b, y):
            buffer[:] = np.nan
        program()
        assert nmse(y, want) < 1e-10


def test_step_alone_gives_what_a_program_gives(mem: Memory, rng: np.random.Generator) -> None:
    w, x = mem.put(encode(rng, "q4_1", (600, 576))), mem.put(rng.standard_normal(576).astype(np.float32))
    y = [mem.nan(600) for _ in range(2)]
    steps = [fast.gemv("q4_1", y=at(o), w=at(w), x=at(x), n_rows=600, n=576, w_nb=w.shape[1]) for o in y]
    steps[0]()
    run(steps[1])
    assert np.array_equal(y[0], y[1])


_SECOND_PROCESS = """
import sys
from graphrt.backends.cpu import fast
from graphrt.backends.cpu.fast import jit, matvec
if sys.argv[1] == "load":
    def refuse(text):
        raise AssertionError("compiled again")
    jit.compile_ir = refuse
for name in ("q8_0", "q4_1"):
    matvec.gemv_kernel(matvec.Rows(name, 32), 1).address
fast.rms_norm(y=0, x=0, n_rows=0, n=0, x_nb=0, y_nb=0, eps=0)()
"""


def test_kernels_are_loaded_from_disk_in_the_next_process(tmp_path: Path) -> None:
    env = {**os.environ, "GRAPHRT_KERNEL_CACHE": str(tmp_path)}
    for mode in ("compile", "load"):
        subprocess.run([sys.executable, "-c", _SECOND_PROCESS, mode], check=True, env=env, timeout=300)
    files = sorted(tmp_path.glob("*.o"))
    assert len(files) == 4  # three kernels and the program runner
    for file in files:  # a damaged file is compiled anew, not loaded
        file.write_bytes(file.read_bytes()[:-9])
    subprocess.run([sys.executable, "-c", _SECOND_PROCESS, "compile"], check=True, env=env, timeout=300)


def test_import_is_light() -> None:
    code = "import sys, graphrt.backends.cpu.fast; assert 'llvmlite' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_public_names_exist() -> None:
    assert fast.__all__ == sorted(fast.__all__, key=lambda n: (not n.isupper(), not n[0].isupper(), n))
    for name in fast.__all__:
        assert getattr(fast, name).__doc__ or name.isupper()
