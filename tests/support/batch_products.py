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


#: Types whose scales are products, and the code, offset taken off, that gemm_small/pairs.py counts as 0.
_CENTRES = {"q4_K": 8, "q5_K": 16, "q6_K": 0, "iq4_xs": 0}


def weight_of(kind: str, m: int, k: int, broken: int | None = None, paired: bool = False) -> tuple[Packed, np.ndarray]:
    """A packed matrix, and its values as the f16 that products see, in f64. broken: a row with a scale that is NaN;
    paired: for wgmma, which rounds scales too."""
    raw = quantize(RNG.standard_normal((m, k)).astype(np.float32), dtype(kind), RNG)
    if broken is not None:
        raw[broken, : dtype(kind).type_size] = 0xFF
    packed = Packed.empty(kind, m, k, "cpu")
    pack(torch.from_numpy(np.ascontiguousarray(raw).view(np.uint8).reshape(m, -1)), packed)
    values = dequantize(raw, dtype(kind)).reshape(m, k)
    return packed, seen_by_wgmma(packed, values) if paired else values.astype(np.float16).astype(np.float64)


def seen_by_wgmma(w: Packed, values: np.ndarray) -> np.ndarray:
    """A packed matrix's values [rows, k] as gemm_small/pairs.py has them, f64: f16 of (code - centre) * scale +
    (centre * scale - min), the scale and what is added being f16 where they are products."""
    if w.kind not in _CENTRES:
        return values.astype(np.float16).astype(np.float64)
    values = values.astype(np.float64)
    assert w.supers is not None
    scales, supers = w.scales.numpy().astype(np.float64), w.supers.numpy().astype(np.float64).repeat(8, axis=1)
    if supers.shape[2] == 2:
        scale, less = (scales * supers)[..., :1], (scales * supers)[..., 1:]
    else:
        scale, less = scales * supers, np.zeros((w.rows, w.k // 32, 1))
    centre = _CENTRES[w.kind]
    scale, less = (np.repeat(s, 32 // s.shape[2], axis=2).reshape(w.rows, w.k) for s in (scale, less))
    code = np.rint(np.divide(values + less, scale, out=np.zeros_like(values), where=scale != 0)) - centre
    added = (centre * scale - less).astype(np.float16).astype(np.float64)
    found = code * scale.astype(np.float16).astype(np.float64) + added
    return found.astype(np.float16).astype(np.float64)


def x_of(n: int, k: int, factors: bool = False) -> tuple[Activations, np.ndarray]:
    """Q8Rows, and their values times the factors in f64."""
    values = torch.from_numpy(RNG.standard_normal((n, k)).astype(np.float16))
    scale = torch.from_numpy(2.0 ** RNG.integers(-3, 4, n)).to(torch.float32) if factors else None
    exact = values.numpy().astype(np.float64)
    return Activations(values, scale), exact if scale is None else exact * scale.numpy()[:, None]
