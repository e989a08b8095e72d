"""Random weights drawn as bytes, at the speed of memory: blocks with random codes, and scales that fit.

Nothing is quantized. A pool of some MiB of blocks is made for each type and spread, and tensors are cut from it.
Values have a mean of about 0 (scales of either sign, or a minimum in the middle of the codes) and the standard
deviation asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import gguf
import numpy as np
import numpy.typing as npt

from graphrt.dtypes import DType, dtype

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]
#: Finishes blocks of random bytes: (uint8 [blocks, bytes a block], standard deviation, rng).
Fill = Callable[[Bytes, float, np.random.Generator], None]

POOL_BYTES = 4 * 2**20
#: Where the one f16 scale of a block lies.
SCALE_AT = {
    "q3_K": 108, "iq4_nl": 0, "iq4_xs": 0, "iq3_xxs": 0, "iq3_s": 0, "iq2_xxs": 0, "iq2_xs": 0, "iq2_s": 0, "iq1_s": 0,
    "tq1_0": 52,
}  # fmt: skip
#: Scales are up to this part larger or smaller than their mean.
JITTER = 0.25
#: Blocks whose spread is looked at, of the types where nothing shorter tells it.
LOOKED_AT = 1024
#: 6-bit scales of q4_K and q5_K, and 8-bit ones of q6_K in either sign: the upper half of what the bits allow.
K_SCALES, Q6_K_SCALES = (32, 64), (64, 128)


def pool(dtype: DType, std: float, rng: np.random.Generator) -> Bytes:
    """About POOL_BYTES of blocks, uint8 [blocks, bytes a block], whose values have the standard deviation `std`.

    Raises KeyError for a type that is not in TYPES.
    """
    n = POOL_BYTES // dtype.type_size
    blocks = rng.integers(0, 256, (n, dtype.type_size), np.uint8)
    TYPES[dtype.name](blocks, std, rng)
    return blocks


def places(pool: Bytes, nbytes: int, rng: np.random.Generator) -> list[int]:
    """Where in the pool the pieces of a tensor begin, in blocks: each is half the pool."""
    half = len(pool) // 2
    found: list[int] = rng.integers(0, half, -(-nbytes // (half * pool.shape[1]))).tolist()
    return found


def cut(pool: Bytes, start: int, stop: int, places: Sequence[int]) -> Bytes:
    """The bytes from start to stop of the tensor that has its pieces there, uint8 [stop - start]."""
    flat, size, piece = pool.reshape(-1), pool.shape[1], len(pool) // 2 * pool.shape[1]
    out = np.empty(stop - start, np.uint8)
    for i in range(start // piece, -(-stop // piece)):
        low, high = max(i * piece, start), min((i + 1) * piece, stop)
        first = places[i] * size + low - i * piece
        out[low - start : high - start] = flat[first : first + high - low]
    return out


def drawn(dtype: DType, std: float, seed: int, start: int, stop: int) -> Bytes:
    """The bytes from start to stop of a tensor no block of which is there twice, uint8 [stop - start]: slower by far
    than cut()."""
    piece = POOL_BYTES // dtype.type_size * dtype.type_size
    out = np.empty(stop - start, np.uint8)
    for i in range(start // piece, -(-stop // piece)):
        low, high = max(i * piece, start), min((i + 1) * piece, stop)
        out[low - start : high - start] = _piece(dtype, std, seed, i)[low - i * piece : high - i * piece]
    return out


@lru_cache(maxsize=2)
def _piece(dtype: DType, std: float, seed: int, i: int) -> Bytes:
    """Number i of such a tensor's pieces, each a pool of its own, as bytes. Those that are read by turns are kept."""
    return pool(dtype, std, np.random.default_rng([seed, i])).reshape(-1)


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


def _centred(bits: int) -> Fill:
    """q4_0, q5_0: an f16 scale, then codes less half their range."""
    codes = np.arange(2**bits) - 2 ** (bits - 1)

    def fill(blocks: Bytes, std: float, rng: np.random.Generator) -> None:
        _put_f16(blocks, 0, _signed_scales(len(blocks), std / _rms(codes), rng))

    return fill


def _added_minimum(bits: int) -> Fill:
    """q4_1, q5_1: an f16 scale, and an f16 minimum of minus the mean code."""
    mean = (2**bits - 1) / 2

    def fill(blocks: Bytes, std: float, rng: np.random.Generator) -> None:
        d = _put_f16(blocks, 0, _scales(len(blocks), std / _rms(np.arange(2**bits) - mean), rng))
        _put_f16(blocks, 2, -mean * d)

    return fill


def _q8_0(blocks: Bytes, std: float, rng: np.random.Generator) -> None:
    codes = blocks[:, 2:]
    codes[codes == 0x80] = 0x81  # quantizing gives -127 to 127
    _put_f16(blocks, 0, _signed_scales(len(blocks), std / _rms(np.arange(-127, 128)), rng))


def _of_super_blocks(codes: int) -> Fill:
    """q4_K, q5_K: d, dmin, eight 6-bit scales and minimums in 12 bytes; a minimum is that of its scale's mean code."""
    mean = (codes - 1) / 2

    def fill(blocks: Bytes, std: float, rng: np.random.Generator) -> None:
        unit = _rms(np.arange(*K_SCALES)) * _rms(np.arange(codes) - mean)
        d = _put_f16(blocks, 0, _scales(len(blocks), std / unit, rng))
        _put_f16(blocks, 2, mean * d)
        scales = rng.integers(*K_SCALES, (len(blocks), 8), np.uint8)
        first, last = scales[:, :4], scales[:, 4:]
        low, high = last & 15, last >> 4
        blocks[:, 4:8] = blocks[:, 8:12] = first | high << 6
        blocks[:, 12:16] = low | low << 4

    return fill


def _q2_k(blocks: Bytes, std: float, rng: np.random.Generator) -> None:
    """Sixteen bytes of a 4-bit scale and a 4-bit minimum, here that of the scale's mean code; codes, d, dmin."""
    scales = rng.integers(8, 16, (len(blocks), 16), np.uint8)
    blocks[:, :16] = scales | scales << 4
    d = _put_f16(blocks, 80, _scales(len(blocks), std / (_rms(np.arange(8, 16)) * _rms(np.arange(4) - 1.5)), rng))
    _put_f16(blocks, 82, 1.5 * d)


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


def _spread(name: str, blocks: Bytes) -> float:
    values = gguf.quants.dequantize(blocks[:LOOKED_AT], gguf.GGMLQuantizationType(dtype(name).id))
    return _rms(values)


def _looked_at(name: str, offset: int) -> Fill:
    """A type whose spread gguf's decoding of random codes tells. offset: of its f16 scale, here of either sign."""

    def fill(blocks: Bytes, std: float, rng: np.random.Generator) -> None:
        _put_f16(blocks, offset, np.ones(len(blocks)))
        _put_f16(blocks, offset, _signed_scales(len(blocks), std / _spread(name, blocks), rng))

    return fill


def _tq2_0(blocks: Bytes, std: float, rng: np.random.Generator) -> None:
    """Codes 0 to 2, of two bits: each 3 becomes the middle one. Then a scale."""
    codes = blocks[:, :64]
    codes &= ~((codes & codes << 1) & 0xAA)
    _looked_at("tq2_0", 64)(blocks, std, rng)


def _iq1_m(blocks: Bytes, std: float, rng: np.random.Generator) -> None:
    """The f16 scale's four quarters are the upper bits of the last four 16-bit words."""
    words = blocks[:, 48:].view("<u2")

    def put(scales: Floats) -> None:
        bits = scales.astype(np.float16).view(np.uint16)[:, None] >> np.array([0, 4, 8, 12], np.uint16)
        words[:] = words & 0x0FFF | (bits & 15) << 12

    put(np.ones(len(blocks)))
    put(_signed_scales(len(blocks), std / _spread("iq1_m", blocks), rng))


def _nvfp4(blocks: Bytes, std: float, rng: np.random.Generator) -> None:
    """Four scales of 8 bits without a sign: the one that comes nearest. They are a third larger at most."""
    some = blocks[: 64 * 127].copy().reshape(127, 64, -1)
    some[:, :, :4] = np.arange(127, dtype=np.uint8)[:, None, None]
    spreads = [_spread("nvfp4", of_one) for of_one in some]
    blocks[:, :4] = int(np.argmin(np.abs(np.array(spreads) - std)))


#: What finishes blocks of random bytes: type -> function(blocks, standard deviation, rng).
TYPES: dict[str, Fill] = {
    "f16": _f16,
    "q4_0": _centred(4),
    "q4_1": _added_minimum(4),
    "q5_1": _added_minimum(5),
    "q5_0": _centred(5),
    "q8_0": _q8_0,
    "q4_K": _of_super_blocks(16),
    "q5_K": _of_super_blocks(32),
    "q2_K": _q2_k,
    "q6_K": _q6_k,
    "mxfp4": _mxfp4,
    "tq2_0": _tq2_0,
    "iq1_m": _iq1_m,
    "nvfp4": _nvfp4,
    **{name: _looked_at(name, offset) for name, offset in SCALE_AT.items()},
}
