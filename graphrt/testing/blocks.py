"""Values as host arrays of each type, and back."""

from __future__ import annotations

import gguf  # the format's own package: quantizes and dequantizes blocks
import numpy as np
import numpy.typing as npt

from graphrt import float8
from graphrt.dtypes import DType
from graphrt.host import host_type

AnyArray = npt.NDArray[np.generic]

#: Byte offsets of the f16 scales in a block, for types that gguf can't quantize to: random bits, sane scales.
_SCALE_OFFSETS: dict[str, tuple[int, ...]] = {
    "q2_K": (80, 82), "q3_K": (108,), "q4_K": (0, 2), "q5_K": (0, 2), "q6_K": (208,), "iq2_xxs": (0,), "iq2_xs": (0,),
    "iq2_s": (0,), "iq3_xxs": (0,), "iq3_s": (0,),
    "iq1_s": (0,), "iq4_nl": (0,), "iq4_xs": (0,), "q1_0": (0,), "q2_0": (0,),
}  # fmt: skip


def random_blocks(dt: DType, shape: tuple[int, ...], rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Valid blocks of any quantized type: uint8 [..., bytes a row] for `shape` elements."""
    rows = (*shape[:-1], shape[-1] // dt.block_size)
    raw = rng.integers(0, 256, (*rows, dt.type_size), dtype=np.uint8)
    for offset in _SCALE_OFFSETS.get(dt.name, ()):
        scales = (rng.uniform(0.25, 1.0, rows) / 64).astype(np.float16)
        raw[..., offset : offset + 2] = scales[..., None].view(np.uint8)
    if dt.name == "iq1_m":  # its f16 scale is spread over the high nibbles of four 16-bit words at the block's end
        bits = (rng.uniform(0.25, 1.0, rows) / 64).astype(np.float16).view(np.uint16)
        words = raw[..., 48:56].copy().view(np.uint16) & 0x0FFF
        words |= np.stack([(bits >> (4 * i) & 0xF) << 12 for i in range(4)], axis=-1).astype(np.uint16)
        raw[..., 48:56] = words.view(np.uint8)
    if dt.name == "nvfp4":
        raw[..., :4] = rng.integers(0x20, 0x40, (*rows, 4), dtype=np.uint8)
    return raw.reshape(*shape[:-1], -1)


def quantize(values: AnyArray, dt: DType, rng: np.random.Generator | None = None) -> AnyArray:
    """float64 or int values as the host array of a type; random blocks for a type that gguf can't quantize to."""
    if dt.name == "bf16":
        return _gguf_quantize(values, gguf.GGMLQuantizationType.BF16).view(np.uint16)
    if dt.is_float8:
        return float8.encode(values, dt)
    if not dt.is_quantized:
        return values.astype(host_type(dt))
    if dt.name in _SCALE_OFFSETS or dt.name in ("iq1_m", "nvfp4"):
        assert rng is not None
        return random_blocks(dt, values.shape, rng)
    return _gguf_quantize(values, gguf.GGMLQuantizationType(dt.id))


def _gguf_quantize(values: AnyArray, kind: gguf.GGMLQuantizationType) -> AnyArray:
    raw: AnyArray = gguf.quants.quantize(values.astype(np.float32), kind)
    return raw


def dequantize(raw: AnyArray, dt: DType) -> AnyArray:
    """The values of a host array: float64, or int64 for an integer type."""
    if dt.kind == "int":
        return raw.astype(np.int64)
    if dt.is_float8:
        return float8.decode(raw, dt)
    if dt.is_quantized or dt.name == "bf16":
        values: AnyArray = gguf.quants.dequantize(raw.view(np.uint8), gguf.GGMLQuantizationType(dt.id))
        return values.astype(np.float64)
    return raw.astype(np.float64)
