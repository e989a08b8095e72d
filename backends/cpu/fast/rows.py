"""Rows between formats: whole matrices to f32 or bf16, rows picked by index, and rows written into a cache."""

from __future__ import annotations

import functools
from collections.abc import Callable

from graphrt.backends.cpu.fast.blocks import TYPES, BlockType
from graphrt.backends.cpu.fast.ir import F16, F32, I8, I16, I32, I64, LANES, Fn, Val
from graphrt.backends.cpu.fast.jit import Kernel
from graphrt.backends.cpu.fast.pool import Entry, Step
from graphrt.dtypes import FLOATS8, WRITABLE

INDEX_BYTES = {"i32": 4, "i64": 8}
DEQUANT_TARGETS = ("f32", "bf16")


def load_index(f: Fn, address: Val, type_name: str) -> Val:
    return f.load(address, I64) if type_name == "i64" else f.load(address, I32).sext(I64)


# to f32 or bf16


def _build_dequant(f: Fn, block: BlockType, to: str, index: str | None) -> None:
    dst, w, idx, n_rows, n, w_nb, dst_nb = f.args("dst", "w", "idx", "n_rows", "n", "w_nb", "dst_nb")
    n_src, per_matrix, matrix_nb, idx_nb = f.args("n_src", "per_matrix", "matrix_nb", "idx_nb")
    width = 4 if to == "f32" else 2

    def put(address: Val, v: Val) -> None:
        f.store(address, v if to == "f32" else f.to_bf16(v))

    def one_row(source: Val, target: Val) -> None:
        n_blocks = n // block.size
        with f.range(0, n_blocks) as i:
            base = target + i * (block.size * width)
            for at, v in block.vectors(f, source + i * block.bytes):
                put(base + at * width, v)
        if block.is_plain:
            with f.range(n_blocks * block.size, n) as i:
                put(target + i * width, block.element(f, source + i * block.value_bytes))

    start, stop = f.share(n_rows)
    with f.range(start, stop) as r:
        if index is None:
            one_row(w + r * w_nb, dst + r * dst_nb)
        else:
            matrix, i = r // per_matrix, r % per_matrix
            row = load_index(f, idx + matrix * idx_nb + i * INDEX_BYTES[index], index)
            with f.if_(in_range(f, row, n_src)):
                one_row(w + matrix * matrix_nb + row * w_nb, dst + r * dst_nb)


def in_range(f: Fn, i: Val, n: Val) -> Val:
    return Val(f, f.b.icmp_unsigned("<", i.v, n.v))


@functools.cache
def dequant_kernel(type_name: str, to: str, index: str | None) -> Kernel:
    if to not in DEQUANT_TARGETS:
        raise ValueError(f"rows are expanded to {' or '.join(DEQUANT_TARGETS)}, got {to!r}")
    block = TYPES[type_name]
    return Kernel(
        f"dequant_{type_name}_{to}_{index}",
        ("dst", "w", "idx", "n_rows", "n", "w_nb", "dst_nb", "n_src", "per_matrix", "matrix_nb", "idx_nb"),
        lambda f: _build_dequant(f, block, to, index),
        optional=("idx", "n_src", "per_matrix", "matrix_nb", "idx_nb"),
    )


def dequant_rows(type_name: str, to: str, *, dst: int, w: int, n_rows: int, n: int, w_nb: int, dst_nb: int) -> Step:
    """dst[r] = W[r] as "f32" or "bf16" (nearest even). w: n_rows rows of n values; w_nb, dst_nb: bytes between rows."""
    kernel = dequant_kernel(type_name, to, None)
    block = kernel.pack(dst=dst, w=w, n_rows=n_rows, n=n, w_nb=w_nb, dst_nb=dst_nb)
    return Step([Entry(kernel, block)], n_rows * (w_nb + dst_nb))


def get_rows(
    type_name: str,
    index: str,
    *,
    dst: int,
    w: int,
    idx: int,
    n_rows: int,
    n: int,
    w_nb: int,
    dst_nb: int,
    n_src: int,
    per_matrix: int = 0,
    matrix_nb: int = 0,
    idx_nb: int = 0,
) -> Step:
    """dst[r] = W[m, idx[m, r mod per_matrix]] in f32, m = r div per_matrix; one matrix for all where per_matrix is 0.

    idx: of type `index` ("i32" or "i64"), idx_nb bytes between those of two matrices, below n_src or the row is left
    alone. W: matrices of n_src rows, matrix_nb bytes apart.
    """
    kernel = dequant_kernel(type_name, "f32", index)
    block = kernel.pack(
        dst=dst, w=w, idx=idx, n_rows=n_rows, n=n, w_nb=w_nb, dst_nb=dst_nb, n_src=n_src,
        per_matrix=per_matrix or n_rows, matrix_nb=matrix_nb, idx_nb=idx_nb,
    )  # fmt: skip
    return Step([Entry(kernel, block)], n_rows * (w_nb + dst_nb))


# from f32, into a cache


def _to_float8(f: Fn, x: Val, name: str) -> Val:
    """f32 -> the codes of a float of 8 bits, nearest even; what is larger than its largest number becomes that."""
    kind = FLOATS8[name]
    drop, least = 23 - kind.mantissa, 1 - kind.bias  # bits that go, and the exponent of the least normal number
    size = f.abs(x)
    size = f.select(size > kind.largest, kind.largest, size)
    bits = size.as_bits(I32)
    normal = ((bits + ((1 << (drop - 1)) - 1) + ((bits >> drop) & 1)) >> drop) - ((127 - kind.bias) << kind.mantissa)
    # Below that numbers are multiples of one step: added to 2^23, which has steps of 1, they are rounded to these.
    small = (size * 2.0 ** (kind.mantissa - least) + 2.0**23).as_bits(I32) - 0x4B000000
    code = f.select(size < 2.0**least, small, normal)
    code = f.select(x.ne(x), kind.nan, code)
    return (code | ((x.as_bits(I32) >> 24) & 0x80)).trunc(I8)


def _put_plain(f: Fn, to: str, address: Val, v: Val) -> None:
    if to in FLOATS8:
        f.store(address, _to_float8(f, v, to))
        return
    f.store(address, f.to_bf16(v) if to == "bf16" else v.to(F16 if to == "f16" else F32))


def _inverse(f: Fn, d: Val) -> Val:
    """1 / d, and 0 for 0."""
    return f.select(d.eq(0.0), 0.0, 1.0 / d)


def _quantize_q8_0(f: Fn, block: Val, source: Val, lo: Val, hi: Val) -> None:
    biggest = f.fold(f.max_or_nan(f.abs(lo), f.abs(hi)), f.max_or_nan)
    d = biggest / 127.0
    scale = _inverse(f, d)
    f.store(block, d.to(F16))
    for at, v in ((2, lo), (18, hi)):
        x = v * scale
        a = f.abs(x)
        whole = f.floor(a)
        rounded = whole + f.floor((a - whole) * 2.0)  # halves away from zero
        f.store(block + at, f.call("llvm.copysign", rounded, x).to_int(I32).trunc(I8))


def _quantize_q4_0(f: Fn, block: Val, source: Val, lo: Val, hi: Val) -> None:
    a_lo, a_hi = f.abs(lo), f.abs(hi)
    biggest = f.fold(f.max_or_nan(a_lo, a_hi), f.max_or_nan)
    # the sign that counts is that of the first value of this size
    hits = [a.eq(biggest).bits(I16).zext(I32) for a in (a_lo, a_hi)]
    first = f.count_trailing_zeros(hits[0] | (hits[1] << 16)).zext(I64)
    extreme = f.load(source + (first & 31) * 4, F32)
    extreme = f.select(biggest.ne(biggest), biggest, extreme)  # NaN, which no value equals
    d = extreme / -8.0
    scale = _inverse(f, d)
    f.store(block, d.to(F16))
    q = [f.min_int((v * scale + 8.5).to_int(I32), f.zeros(I32) + 15) for v in (lo, hi)]
    f.store(block + 2, (q[0] | (q[1] << 4)).trunc(I8))


#: What rounds 32 values: (where the block lies, where its values do, the first 16 of them, the last 16).
_QUANTIZERS: dict[str, Callable[[Fn, Val, Val, Val, Val], None]] = {"q8_0": _quantize_q8_0, "q4_0": _quantize_q4_0}
#: Of the types that SET_ROWS writes those with a native form.
SET_ROWS_TYPES = tuple(t for t in WRITABLE if t in _QUANTIZERS or TYPES[t].is_plain)


def _build_set_rows(f: Fn, to: str, index: str) -> None:
    src, idx, dst, n_rows, n = f.args("src", "idx", "dst", "n_rows", "n")
    src_nb, dst_nb, n_dst = f.args("src_nb", "dst_nb", "n_dst")
    n_idx, per_matrix, matrix_nb = f.args("n_idx", "per_matrix", "matrix_nb")
    block = TYPES[to]
    start, stop = f.share(n_rows)
    with f.range(start, stop) as r:
        row = load_index(f, idx + r % n_idx * INDEX_BYTES[index], index)
        with f.if_(in_range(f, row, n_dst)):
            source, target = src + r * src_nb, dst + r // per_matrix * matrix_nb + row * dst_nb
            if block.is_plain:
                f.elements(
                    n,
                    lambda i, lanes: _put_plain(
                        f, to, target + i * block.value_bytes, f.load(source + i * 4, F32, lanes)
                    ),
                )
            else:
                with f.range(0, n // 32) as i:
                    at, cell = source + i * 128, target + i * block.bytes
                    lo, hi = f.load(at, F32, LANES), f.load(at + 64, F32, LANES)
                    _QUANTIZERS[to](f, cell, at, lo, hi)


@functools.cache
def set_rows_kernel(to: str, index: str) -> Kernel:
    if to not in SET_ROWS_TYPES:
        raise ValueError(f"rows can be written as {', '.join(SET_ROWS_TYPES)}, got {to!r}")
    return Kernel(
        f"set_rows_{to}_{index}",
        ("src", "idx", "dst", "n_rows", "n", "src_nb", "dst_nb", "n_dst", "n_idx", "per_matrix", "matrix_nb"),
        lambda f: _build_set_rows(f, to, index),
    )


def set_rows(
    to: str,
    index: str,
    *,
    src: int,
    idx: int,
    dst: int,
    n_rows: int,
    n: int,
    src_nb: int,
    dst_nb: int,
    n_dst: int,
    n_idx: int,
    per_matrix: int,
    matrix_nb: int,
) -> Step:
    """dst[m, idx[r mod n_idx]] = src[r], f32 -> `to`, one of SET_ROWS_TYPES, as gguf writes them.

    src: n_rows rows of n f32; idx: n_idx of type `index` ("i32" or "i64"); dst: matrices of n_dst rows, matrix_nb bytes
    apart, of which m = r div per_matrix is the one for row r. An index outside [0, n_dst) is skipped, so that a wrong
    one cannot write outside the cache. Two equal indices: either may win.
    """
    if not TYPES[to].is_plain and n % 32:
        raise ValueError(f"a row of {to} must hold whole blocks of 32 values, got {n}")
    kernel = set_rows_kernel(to, index)
    block = kernel.pack(
        src=src, idx=idx, dst=dst, n_rows=n_rows, n=n, src_nb=src_nb, dst_nb=dst_nb, n_dst=n_dst, n_idx=n_idx,
        per_matrix=per_matrix, matrix_nb=matrix_nb,
    )  # fmt: skip
    return Step([Entry(kernel, block)], n_rows * n * 6)
