"""What tests of the kernels of few tokens share: packed weights, activations, gates."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from graphrt.backends.triton import device
from graphrt.backends.triton.kernels.products.half import Activations
from graphrt.backends.triton.packing import Packed, pack
from graphrt.dtypes import dtype
from graphrt.testing import dequantize, nmse, quantize

__all__ = ["GATES", "RNG", "TARGET", "nmse", "weight_of", "x_of"]
TARGET = device.Target("sm_90", "cpu", 132, 232448, 50 << 20)
RNG = np.random.default_rng(7)

GATES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "swiglu": lambda g: g / (1 + np.exp(-g)),
    "geglu": lambda g: g / (1 + np.exp(-1.5957691216057308 * (g + 0.044715 * g**3))),
    "reglu": lambda g: np.maximum(g, 0),
}


def weight_of(kind: str, m: int, k: int, broken: int | None = None) -> tuple[Packed, np.ndarray]:
    """A packed matrix, and its values as the f16 that products see, in f64. broken: a row with a scale that is NaN."""
    raw = quantize(RNG.standard_normal((m, k)).astype(np.float32), dtype(kind), RNG)
    if broken is not None:
        raw[broken, : dtype(kind).type_size] = 0xFF
    packed = Packed.empty(kind, m, k, "cpu")
    pack(torch.from_numpy(np.ascontiguousarray(raw).view(np.uint8).reshape(m, -1)), packed)
    values = dequantize(raw, dtype(kind)).reshape(m, k).astype(np.float16)
    return packed, values.astype(np.float64)


def x_of(n: int, k: int, factors: bool = False) -> tuple[Activations, np.ndarray]:
    """Q8Rows, and their values times the factors in f64."""
    values = torch.from_numpy(RNG.standard_normal((n, k)).astype(np.float16))
    scale = torch.from_numpy(2.0 ** RNG.integers(-3, 4, n)).to(torch.float32) if factors else None
    exact = values.numpy().astype(np.float64)
    return Activations(values, scale), exact if scale is None else exact * scale.numpy()[:, None]
