"""Floats as the data of any type that can be written: quantize(rows, type, importance).

Without importances the types of 32 values, and the ternary ones, are quantized by the gguf package as llama.cpp's own
reference does it. The K types and iq4_*, which that package can't write, and all with importances, are quantized here:
each group's codes and scales are those of the least squared error that a search finds (fit.py), each value's square
counting as much as its importance says, or all alike.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from graphrt.dtypes import DType
from graphrt.errors import GGUFError
from graphrt.models import gguf_blocks
from graphrt.models.quantize.fit import Grid, ratio, scales, scales_and_minimums
from graphrt.models.quantize.k_quants import SUPER, as_half, halves, q2_k, q3_k, q4_k, q5_k, q6_k

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Pack = Callable[[Tensor, Tensor], Tensor]  # (x, w), float32 [blocks, block size] each, to uint8 [blocks, bytes]

#: The values of iq4_nl and iq4_xs, which ggml has as a table.
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
IQ4 = Grid.of(IQ4_VALUES)
#: The largest value of a quantized tensor: an f16 scale times q4_0's largest code is a little more.
MOST = 5e5
#: Values of one piece of work, whose temporaries stay in the processor's caches.
PIECE = 1 << 17


def _centred(count: int) -> Pack:
    """q4_0 and q5_0: codes of -count / 2 to count / 2 - 1, and an f16 scale."""
    grid = Grid(-count // 2, count // 2 - 1)

    def pack(x: Tensor, w: Tensor) -> Tensor:
        d = as_half(scales(x, w, grid))[:, None]
        return torch.cat([halves(d), _of_32(grid.index(ratio(x, d)), count)], 1)

    return pack


def _with_minimum(count: int) -> Pack:
    """q4_1 and q5_1: codes of 0 to count - 1, an f16 scale, and an f16 minimum that is added."""

    def pack(x: Tensor, w: Tensor) -> Tensor:
        s, m = scales_and_minimums(x, w, count - 1, below_zero=False)
        s, m = as_half(s)[:, None], as_half(m)[:, None]
        codes = ratio(x + m, s).round_().clamp_(0, count - 1)
        return torch.cat([halves(s), halves(-m), _of_32(codes, count)], 1)

    return pack


def _of_32(codes: Tensor, count: int = 16) -> Tensor:
    """Codes [blocks, 32]: their fifth bits where there are any, in order, then the low four, of the second half in the
    high bits."""
    codes = codes.byte()
    low = codes & 15
    nibbles = low[:, :16] | low[:, 16:] << 4
    if count == 16:
        return nibbles
    places = torch.arange(8, dtype=torch.uint8)
    fifth = (codes.reshape(-1, 4, 8) >> 4 << places).sum(2).byte()
    return torch.cat([fifth, nibbles], 1)


def _iq4_nl(x: Tensor, w: Tensor) -> Tensor:
    grid = IQ4
    d = as_half(scales(x, w, grid))[:, None]
    return torch.cat([halves(d), _of_32(grid.index(ratio(x, d)))], 1)


def _iq4_xs(x: Tensor, w: Tensor) -> Tensor:
    """Eight groups of 32 values of the table, with 6-bit scales of either sign: their high two bits in an u16."""
    grid, of_scales = IQ4, Grid(-32, 31)
    groups, weights = x.reshape(-1, 32), w.reshape(-1, 32)
    s = scales(groups, weights, grid)
    squares = (weights * grid.snap(ratio(groups, s[:, None])).square()).sum(1)
    s, squares = s.reshape(-1, 8), squares.reshape(-1, 8)
    d = as_half(scales(s, squares, of_scales))[:, None]
    k = of_scales.index(ratio(s, d))
    stored = (d * (k - 32)).reshape(-1, 1)
    codes = _of_32(grid.index(ratio(groups, stored))).reshape(-1, SUPER // 2)
    low = (k[:, ::2] & 15 | (k[:, 1::2] & 15) << 4).byte()
    high = (k >> 4 << 2 * torch.arange(8)).sum(1, keepdim=True).to(torch.int32).view(torch.uint8)[:, :2]
    return torch.cat([halves(d), high, low, codes], 1)


#: What is quantized here with or without importances, and with them only.
ALWAYS: dict[str, Pack] = {
    "q2_K": q2_k, "q3_K": q3_k, "q4_K": q4_k, "q5_K": q5_k, "q6_K": q6_k, "iq4_nl": _iq4_nl, "iq4_xs": _iq4_xs,
}  # fmt: skip
WITH_IMPORTANCE: dict[str, Pack] = {
    "q4_0": _centred(16), "q5_0": _centred(32), "q4_1": _with_minimum(16), "q5_1": _with_minimum(32),
}  # fmt: skip
#: What the gguf package quantizes.
BY_PACKAGE = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "tq1_0", "tq2_0", "mxfp4")
#: Every type that tensors can be written in.
WRITABLE = ("f32", "f16", "bf16", *BY_PACKAGE, *ALWAYS)


def quantize(rows: Floats, dt: DType, importance: Floats | None = None) -> Bytes:
    """The data of rows of values: float32 [n_rows, n] to uint8 [n_rows, bytes of a row].

    dt: one of WRITABLE, of whose blocks n is a multiple; importance: float32 [n], how much the square of an error in
    each column counts. Raises GGUFError for values that are not finite or too large for the type.
    """
    largest = float(np.abs(rows).max(initial=0.0))  # NaN where one is among them
    bad = f"{largest:.3g}" if dt.is_quantized and not largest <= MOST else ""
    if not bad:
        pack = ALWAYS.get(dt.name) or (WITH_IMPORTANCE.get(dt.name) if importance is not None else None)
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite then is told
            made = _by_package(rows, dt) if pack is None else _packed(rows, dt, pack, importance)
        found = gguf_blocks.first_bad_block(made.reshape(-1), dt)
        if found is None:
            return made
        bad = found[1]
    raise GGUFError(f"values must be finite and not too large for {dt}, got {bad}; use f32, or mend the model")


def _by_package(rows: Floats, dt: DType) -> Bytes:
    import gguf

    if dt.name == "f32":
        made = np.ascontiguousarray(rows, np.float32)
    elif dt.name == "f16":
        made = rows.astype(np.float16)
    else:
        made = gguf.quants.quantize(rows, gguf.GGMLQuantizationType(dt.id))
    return np.ascontiguousarray(made).view(np.uint8).reshape(len(rows), -1)


def _packed(rows: Floats, dt: DType, pack: Pack, importance: Floats | None) -> Bytes:
    n_rows, n = rows.shape
    made = np.empty((n_rows, dt.row_size(n)), np.uint8)
    step = max(1, PIECE // n)
    for start in range(0, n_rows, step):
        x = torch.from_numpy(np.array(rows[start : start + step], np.float32))
        w = torch.ones_like(x) if importance is None else torch.from_numpy(_weights(importance)).expand_as(x)
        packed = pack(x.reshape(-1, dt.block_size), w.reshape(-1, dt.block_size))
        made[start : start + step] = packed.numpy().reshape(len(x), -1)
    return made


def _weights(importance: Floats) -> Floats:
    """Importances around 1, and none of 0: where no input was seen an error still should not be of any size."""
    mean = float(importance.mean(dtype=np.float64))
    if not mean > 0:
        return np.ones_like(importance)
    weights: Floats = np.maximum(importance / mean, 1e-6).astype(np.float32)
    return weights
