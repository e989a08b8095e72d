"""Floats of 8 bits on the host: numbers of codes, and the codes of numbers.

A code is a sign bit, the exponent and the mantissa, most significant bit first; dtypes.FLOATS8 says how many bits each
has. A number is (-1)^sign * 2^(exponent - bias) * (1 + mantissa / 2^bits), or with exponent 0 that of exponent 1
without the 1. Source: OCP 8-bit Floating Point Specification (OFP8) 1.0.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from graphrt.dtypes import FLOATS8, DType

Floats = npt.NDArray[np.float64]
Codes = npt.NDArray[np.uint8]


@functools.cache
def _numbers(name: str) -> Floats:
    """The numbers of all 256 codes; infinities and NaN where the type has them."""
    kind = FLOATS8[name]
    codes = np.arange(128)
    exponent, mantissa = codes >> kind.mantissa, codes & ((1 << kind.mantissa) - 1)
    fraction = mantissa / (1 << kind.mantissa) + (exponent > 0)
    values = fraction * 2.0 ** (np.maximum(exponent, 1) - kind.bias)
    special = values > kind.largest
    values[special] = np.where((mantissa[special] == 0) & (kind.mantissa == 2), np.inf, np.nan)
    return np.concatenate([values, -values])


def decode(codes: npt.NDArray[np.generic], dt: DType) -> Floats:
    """The numbers of codes (uint8), float64 of the same shape."""
    return _numbers(dt.name)[np.asarray(codes).view(np.uint8)]


def encode(values: npt.ArrayLike, dt: DType) -> Codes:
    """The codes of the nearest numbers, of two the even code: uint8 of values' shape. What is larger than the largest
    number, infinity too, becomes that number with its sign; NaN stays NaN."""
    with np.errstate(invalid="ignore"):  # a signaling NaN becomes a quiet one
        kind, x = FLOATS8[dt.name], np.asarray(values, np.float64)
    numbers = _numbers(dt.name)[:128]
    numbers = numbers[numbers <= kind.largest]
    size = np.minimum(np.nan_to_num(np.abs(x), nan=0.0, posinf=kind.largest), kind.largest)
    above = np.minimum(np.searchsorted(numbers, size), len(numbers) - 1)  # the least number that is not smaller
    below = np.maximum(above - 1, 0)
    down, up = size - numbers[below], numbers[above] - size
    code = np.where((down < up) | ((down == up) & (below % 2 == 0)), below, above)
    code = np.where(np.isnan(x), kind.nan, code)
    codes: Codes = (code | (np.signbit(x) << 7)).astype(np.uint8)
    return codes
