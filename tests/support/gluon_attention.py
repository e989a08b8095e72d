"""Hopper's attention kernels in gluon_warps.py's emulator: what of them is PTX, in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphrt.backends.triton.kernels.flash_attn.hopper import softcap
from graphrt.ops.dropout import bit_of
from support import gluon_warps
from support.gluon_emulator import Value

LOG2E = float(np.log2(np.e))


def _cap(p: Any, s: Value, unit: float) -> Value:
    with np.errstate(invalid="ignore"):
        return Value(np.float32(p.softcap * unit) * np.tanh(s.data * np.float32(p.scale / p.softcap)))


def _capped_weights(p: Any, s: Value, m: Value, level: Any) -> tuple[Value, Value, Value]:
    weights = np.exp2(_cap(p, s, LOG2E).data - m.data[:, None])
    even, odd = Value(weights[:, ::2]), Value(weights[:, 1::2])
    return even, odd, even + odd


def _capped_with_slope(p: Any, s: Value, shift: Any) -> tuple[Value, Value]:
    """The 16 rows of a warp take the exact form if one of their scores is out of the short one's range, or NaN."""
    with np.errstate(all="ignore"):
        x = s.data * np.float32(p.scale / p.softcap)
        near = np.abs(x).reshape(len(x) // 16, -1) <= softcap.SHORT_RANGE.value
        near = near.all(axis=1).repeat(16)[:, None]
        form, slope = (
            np.polynomial.polynomial.polyval(x * x, np.float32(terms.value), tensor=False).astype(np.float32)
            for terms in (softcap.SHORT_TANH, softcap.SHORT_SLOPE)
        )
        tanh = np.where(near, x * form, np.tanh(x))
        slope = np.where(near, slope, 1 - tanh * tanh)
    return Value(tanh * np.float32(p.softcap * LOG2E)) + shift, Value(slope)


def _dropped_pairs(pairs: Value, words: Value, n: int) -> Value:
    """Pairs are plain values here. words [64, 4] hold a row's bits as dropout.bit_of() says."""
    column = np.arange(n)
    word, bit = bit_of(column)
    kept = (words.data[:, word] >> bit) & 1
    return Value(np.where(kept != 0, pairs.data, 0).astype(pairs.data.dtype))


def _no_flag(p: Any, flag: Value, tile: Any, wg: int) -> None:
    """In place of storing a tile's flag: the inputs here call for none."""
    assert not flag.data, "a tile is to be done again"


#: By name: what only orders instructions, pairs of 16 bits in registers, the soft cap's forms.
IN_PTX = {
    "settle": lambda den: den, "together": lambda m: m, "kept_inside": lambda x: x,
    "packed": lambda weights, dtype: weights.to(dtype),
    "unpacked": lambda pairs, dtype: Value(pairs.data.astype(np.float32)), "as_operand": lambda p, pairs, dtype: pairs,
    "dropped_pairs": _dropped_pairs, "capped_with_slope": _capped_with_slope,
    "_each": lambda words, like: (words[:, None, :], Value(np.arange(like.shape[1])[None, :, None])),
    "reciprocal": lambda x: 1.0 / x, "cap_level": lambda p, s, m, top, both: 0,
    "capped": lambda p, s, shift, level, unit, pack: _cap(p, s, unit) + shift,
    "store_flag": _no_flag,  # halves of a word of flags; so nothing is done again
    "capped_scores": lambda p, s, bias, at_once: _cap(p, s, 1.0) + bias, "capped_weights": _capped_weights,
}  # fmt: skip


def emulate(launch: Any, seed: int) -> None:
    """gluon_warps.emulate for such a launch."""
    gluon_warps.emulate(launch, seed, IN_PTX)
