"""What tests of the CPU's native kernels share: guarded memory, random blocks of every type, gguf's own decoders."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np

from graphrt import float8
from graphrt.backends.cpu import fast
from graphrt.dtypes import FLOATS8, dtype

GUARD = 256
#: Where the f16 scales of a block are, for types that gguf can't quantize to.
SCALES_AT = {
    "q2_K": (80, 82), "q3_K": (108,), "q4_K": (0, 2), "q5_K": (0, 2), "q6_K": (208,), "iq4_nl": (0,), "iq4_xs": (0,),
    "iq2_xxs": (0,), "iq2_xs": (0,), "iq2_s": (0,), "iq3_xxs": (0,), "iq3_s": (0,), "tq1_0": (52,), "tq2_0": (64,),
    "iq1_s": (0,), "iq1_m": (), "nvfp4": (),
}  # fmt: skip


class Memory:
    """Arrays between guard bytes; `check()` fails when a guard was written."""

    def __init__(self) -> None:
        self.whole: list[tuple[np.ndarray, int, int]] = []

    def put(self, values: np.ndarray, offset: int = 0) -> np.ndarray:
        """A copy of `values`; offset: bytes off the 64-byte alignment."""
        raw = np.full(values.nbytes + 2 * GUARD + 64 + offset, 0xA5, np.uint8)
        start = GUARD + (-(raw.ctypes.data + GUARD)) % 64 + offset
        inner = raw[start : start + values.nbytes]
        inner[:] = np.frombuffer(values.tobytes(), np.uint8)
        self.whole.append((raw, start, values.nbytes))
        return inner.view(values.dtype).reshape(values.shape)

    def nan(self, *shape: int) -> np.ndarray:
        return self.put(np.full(shape, np.nan, np.float32))

    def check(self) -> None:
        for raw, start, n in self.whole:
            assert (raw[:start] == 0xA5).all(), "wrote before a buffer"
            assert (raw[start + n :] == 0xA5).all(), "wrote past a buffer"


def at(a: np.ndarray) -> int:
    return int(a.ctypes.data)


def quant_type(name: str) -> Any:
    return gguf.GGMLQuantizationType[name.upper()]


def encode(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random values of a type as bytes [..., row bytes]."""
    values = rng.standard_normal(shape).astype(np.float32)
    if name in ("f32", "f16"):
        return values.astype(name.replace("f", "float")).view(np.uint8)
    if name in FLOATS8:
        return float8.encode(values, dtype(name))
    if name not in SCALES_AT:
        return np.ascontiguousarray(gguf.quants.quantize(values, quant_type(name)))
    block = fast.TYPES[name]
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // block.size, block.bytes), dtype=np.uint8)
    for offset in SCALES_AT[name]:
        scale = rng.uniform(0.001, 0.01, (*raw.shape[:-1], 1)).astype(np.float16)
        raw[..., offset : offset + 2] = scale.view(np.uint8)
    if name == "iq1_m":  # its scale, here of 0x1000 to 0x1fff (0.0005 to 0.008), lies in four parts: the last one is 1
        raw[..., 55] = raw[..., 55] & 0x0F | 0x10
    return raw.reshape(*shape[:-1], -1)


def decode(name: str, data: np.ndarray) -> np.ndarray:
    rows = np.ascontiguousarray(data)
    if name in FLOATS8:
        return float8.decode(rows, dtype(name)).astype(np.float32)
    return np.asarray(gguf.quants.dequantize(rows, quant_type(name)), np.float32).reshape(*data.shape[:-1], -1)


def nmse(got: np.ndarray, want: np.ndarray) -> float:
    assert np.isfinite(got).all(), "NaN or infinity in the result"
    return float(((got - want) ** 2).sum() / max((want**2).sum(), 1e-300))


def run(step: fast.Step, n_threads: int = 2) -> None:
    """On a team, however small the step."""
    fast.Program([step], n_threads)()


def rows_of(rng: np.random.Generator, name: str) -> int:
    """Values in a test row: several blocks; for plain types also a rest that fills no vector."""
    size = fast.TYPES[name].size
    return 3 * 64 + 16 + 5 if fast.TYPES[name].is_plain else max(3 * size, 96)
