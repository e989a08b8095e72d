"""Random weights drawn as bytes, at the speed of memory: blocks with random codes, and scales that fit.

Nothing is quantized. A pool of some MiB of blocks is made for each type and spread, and tensors are cut from it.
Values have a mean of about 0 (scales of either sign, or a minimum in the middle of the codes) and the standard
deviation asked for.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from graphrt.dtypes import DType

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]

POOL_BYTES = 4 * 2**20
#: Scales are up to this part larger or smaller than their mean.
JITTER = 0.25
#: 6-bit scales of q4_K, and 8-bit ones of q6_K in either sign: the upper half of what the bits allow.
Q4_K_SCALES, Q6_K_SCALES = (32, 64), (64, 128)


def pool(dtype: DType, std: float, rng: np.random.Generator) -> Bytes:
    """About POOL_BYTES of blocks, uint8 [blocks, bytes a block], whose values have the standard deviation `std`.

    Raises KeyError for a type that is not in TYPES.
    """
    n = POOL_BYTES // dtype.type_size
    blocks = rng.integers(0, 256, (n, dtype.type_size), np.uint8)
    TYPES[dtype.name](blocks, std, rng)
    return blocks


def cut(pool: Bytes, nbytes: int, rng: np.random.Generator) -> Bytes:
    """uint8 [nbytes], a whole number of blocks: pieces of half the pool, each from a block of its own choice."""
    half = len(pool) // 2
    flat, size, piece = pool.reshape(-1), pool.shape[1], half * pool.shape[1]
    out = np.empty(nbytes, np.uint8)
    for start in range(0, nbytes, piece):
        stop = min(start + piece, nbytes)
        first = int(rng.integers(0, half)) * size
        out[start:stop] = flat[first : first + stop - start]
    return out


def _put_f16(blocks: Bytes, offset: int, values: Floats) -> Floats:
    """Writes an f16 into each block and returns what became of it."""
    halfs: npt.NDArray[np.float16] = values.astype(np.float16)
    blocks[:, offset : offset + 2] = halfs.view(np.uint8).reshape(-1, 2)
    return halfs.astype(np.float64)


def _scales(n: int, mean: float, rng: np.random.Generator) -> Floats:
    factors: Floats = rng.uniform(1 - JITTER, 1 + JITTER, n)
    return mean * factors


def _signed_scales(n: int, mean: float, rng: np.random.Generator) -> Floats:
    """In either sign: codes are not centred (-8 to 7), and so their mean does not show."""
    signs: Floats = rng.choice([-1.0, 1.0], n)
    return _scales(n, mean, rng) * signs


def _rms(values: npt.ArrayLike) -> float:
    return float(np.sqrt(np.mean(np.square(np.asarray(values, np.float64)))))


def _f16(blocks: Bytes, std: float, rng: np.random.Generator) -> None:
    _put_f16(blocks, 0, std * rng.standard_normal(len(blocks)))


def _centred(bits: int) -> Callable[[Bytes, float, np.random.Generator], None]:
    """q4_0, q5_0: an f16 scale, then codes less half their range."""
    codes = np.arange(2**bits) - 2 ** (bits - 1)

    def fill(blocks: Bytes, std: float, rng: np.random.Generator) -> None:
        _put_f16(blocks, 0, _signed_scales(len(blocks), std / _rms(codes), rng))

    return fill


def _q4_1(blocks: Bytes, std: float, rng: np.random.Generator) -> None:
    """A scale, and a minimum of minus the mean code."""
    d = _put_f16(blocks, 0, _scales(len(blocks), std / _rms(np.arange(16) - 7.5), rng))
    _put_f16(blocks, 2, -7.5 * d)


def _q8_0(blocks: Bytes, std: float, rng: np.random.Generator) -> None:
    codes = blocks[:, 2:]
    codes[codes == 0x80] = 0x81  # quantizing gives -127 to 127
    _put_f16(blocks, 0, _signed_scales(len(blocks), std / _rms(np.arange(-127, 128)), rng))


def _q4_k(blocks: Bytes, std: float, rng: np.random.Generator) -> None:
    """d, dmin, eight 6-bit scales and minimums in 12 bytes; each minimum is that of its scale's mean code."""
    unit = _rms(np.arange(*Q4_K_SCALES)) * _rms(np.arange(16) - 7.5)
    d = _put_f16(blocks, 0, _scales(len(blocks), std / unit, rng))
    _put_f16(blocks, 2, 7.5 * d)
    scales = rng.integers(*Q4_K_SCALES, (len(blocks), 8), np.uint8)
    first, last = scales[:, :4], scales[:, 4:]
    low, high = last & 15, last >> 4
    blocks[:, 4:8] = blocks[:, 8:12] = first | high << 6
    blocks[:, 12:16] = low | low << 4


def _q6_k(blocks: Bytes, std: float, rng: np.random.Generator) -> None:
    """Codes, sixteen 8-bit scales, d."""
    unit = _rms(np.arange(*Q6_K_SCALES)) * _rms(np.arange(64) - 32)
    scales = rng.integers(*Q6_K_SCALES, (len(blocks), 16)) * rng.choice([-1, 1], (len(blocks), 16))
    blocks[:, 192:208] = scales.astype(np.int8).view(np.uint8)
    _put_f16(blocks, 208, _scales(len(blocks), std / unit, rng))


def _mxfp4(blocks: Bytes, std: float, rng: np.random.Generator) -> None:
    """A power of two, then codes of a sign and one of eight values; of two neighbouring powers as many as it takes."""
    unit = _rms([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    low = np.floor(np.log2(std / unit))
    larger = ((std / unit) ** 2 / 4**low - 1) / 3
    blocks[:, 0] = 127 + low + (rng.random(len(blocks)) < larger)


#: What finishes blocks of random bytes: type -> function(blocks, standard deviation, rng).
TYPES: dict[str, Callable[[Bytes, float, np.random.Generator], None]] = {
    "f16": _f16,
    "q4_0": _centred(4),
    "q4_1": _q4_1,
    "q5_0": _centred(5),
    "q8_0": _q8_0,
    "q4_K": _q4_k,
    "q6_K": _q6_k,
    "mxfp4": _mxfp4,
}
