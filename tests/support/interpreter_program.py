"""Kernels interpreted in an own process: interpreter_program.py slow|quick values|put_back|"sums KIND A B .."."""

from __future__ import annotations

import json
import sys

import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from support import quick_interpreter


@triton.jit
def _larger(a, i, b, j):
    """The value of the larger absolute value, with its place; the first of equal ones."""
    first = (tl.abs(a) > tl.abs(b)) | ((tl.abs(a) == tl.abs(b)) & (i < j))
    return tl.where(first, a, b), tl.where(first, i, j)


@triton.jit
def _decayed(a, b):
    return a * 0.75 + b


@triton.jit
def _bits(a, b):
    return a ^ (b << 1)


@triton.jit
def _values(p_x, p_out, M: tl.constexpr, N: tl.constexpr):
    """x: f32 [M, N]. A row of N numbers of out for each result, of which it may have fewer."""
    i, j = tl.arange(0, M), tl.arange(0, N)
    places = i[:, None] * N + j[None, :]
    x = tl.load(p_x + places)
    value, place = tl.reduce((x, places), 0, _larger)
    tl.store(p_out + j, value)
    tl.store(p_out + N + j, place.to(tl.float32))
    value, place = tl.reduce((x, places), 1, _larger, keep_dims=True)
    tl.store(p_out + 2 * N + i[:, None], value + place)
    tl.store(p_out + 3 * N + i, tl.reduce(x, 1, _decayed))
    tl.store(p_out + 4 * N, tl.reduce(tl.reshape(x, M * N), 0, _decayed))
    tl.store(p_out + 5 * N, tl.reduce(x, None, _decayed))
    tl.store(p_out + 6 * N + j, tl.sum(tl.associative_scan(x, 1, _decayed), 0))
    tl.store(p_out + 7 * N + j, tl.sum(tl.associative_scan(x, 0, _decayed, reverse=True), 0))
    tl.store(p_out + 8 * N + j, tl.reduce((x * 1000).to(tl.int32), 0, _bits).to(tl.float32))
    tl.store(p_out + 9 * N + j, tl.max(x, 0) + tl.min(x, 0) + tl.sum(x, 0) + tl.argmax(x, 0))
    tl.store(p_out + 10 * N + j, tl.xor_sum(places, 0).to(tl.float32))
    tl.store(p_out + 11 * N + j, tl.sum(x.to(tl.float16), 0).to(tl.float32) * tl.sigmoid(j.to(tl.float32)))
    tl.store(p_out + 12 * N + j, tl.sum((x * 50).to(tl.int8).to(tl.int64), 0).to(tl.float32))
    tl.store(p_out + 13 * N + j, tl.cumsum(tl.reduce(x, 0, _decayed), 0))


@triton.jit
def _sum(p_a, p_b, p_out):
    tl.store(p_out, tl.load(p_a) + tl.load(p_b))


def values() -> list[list[str]]:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    x[3, 5] = -x[2, 5]
    out = torch.full((14, 16), torch.nan)
    _values[(1,)](x, out, 8, 16)
    return [[float(v).hex() for v in row if not v.isnan()] for row in out]


def put_back() -> list[str]:
    """What a launch leaves changed."""
    places = (tl, tl.core, tl.math, tl.tensor, tl.dtype)
    before = [dict(vars(place)) for place in places]
    for _ in range(2):
        values()
    return [name for place, was in zip(places, before) for name in was if vars(place).get(name) is not was[name]]


def overflow(kind: str, a: str, b: str) -> str:
    """What is said of a + b, two numbers of that type."""
    numbers = [torch.tensor([int(n)], dtype=getattr(torch, kind)) for n in (a, b)]
    try:
        _sum[(1,)](*numbers, torch.zeros_like(numbers[0]))
    except InterpreterError as error:
        return str(error)
    return ""


def sums(*args: str) -> list[str]:
    return [overflow(*args[i : i + 3]) for i in range(0, len(args), 3)]


if __name__ == "__main__":
    if sys.argv[1] == "quick":
        quick_interpreter.use()
    name, *args = sys.argv[2].split()
    print(json.dumps({"values": values, "put_back": put_back, "sums": sums}[name](*args)))
