"""gemm_small/int8.py without a GPU: its source on numpy arrays, and the layouts that it asks Triton for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from support.batch_products import RNG, TARGET, nmse
from support.gluon_emulator import emulate

from graphrt.backends.triton.kernels.products.activations import Q8Rows, parts_of
from graphrt.backends.triton.kernels.products.gemm_small import int8_launch, mma_launch
from graphrt.backends.triton.kernels.products.gemm_small.mma_launch import BatchConfig
from graphrt.backends.triton.packing import Packed, pack
from graphrt.dtypes import dtype
from graphrt.testing import dequantize, quantize

SMALL = BatchConfig(32, 2, 2, 2)


def weight_of(kind: str, m: int, k: int, broken: int | None = None) -> tuple[Packed, np.ndarray]:
    """A packed matrix, and its values in f64. broken: a row with a scale that is NaN."""
    raw = quantize(RNG.standard_normal((m, k)).astype(np.float32), dtype(kind), RNG)
    if broken is not None:
        raw[broken, : dtype(kind).type_size] = 0xFF
    packed = Packed.empty(kind, m, k, "cpu")
    pack(torch.from_numpy(np.ascontiguousarray(raw).view(np.uint8).reshape(m, -1)), packed)
    return packed, dequantize(raw, dtype(kind)).reshape(m, k).astype(np.float64)


def x_of(n: int, k: int) -> tuple[Q8Rows, np.ndarray]:
    """Rounded activations, and their values in f64."""
    x = Q8Rows.empty(n, k, "cpu")
    parts = parts_of(k)
    q = RNG.integers(-127, 128, (parts, n, k))
    d = RNG.uniform(0.5, 2.0, (n, k // 32)).astype(np.float32)
    numbers = q[0] * 254 + q[1] if parts == 2 else q[0]
    values = numbers * np.repeat(d.astype(np.float64), 32, axis=1)
    x.q.copy_(torch.from_numpy(q.reshape(parts * n, k).astype(np.int8)))
    x.d.copy_(torch.from_numpy(d))
    x.s.copy_(torch.from_numpy(values.reshape(n, k // 16, 16).sum(2).astype(np.float32)))
    return x, values


def test_types_are_those_of_codes_in_16_bits() -> None:
    assert {"q4_K", "q6_K", "q8_0", "mxfp4", "q5_K", "nvfp4", "iq4_xs", "q4_0"} <= set(mma_launch.KINDS)


@pytest.mark.parametrize("kind", mma_launch.KINDS)
def test_types(kind: str) -> None:
    """Rows, tokens and steps that tiles don't divide; both numbers of parts; copies that land late and early."""
    block = 256 if dtype(kind).block_size == 256 else 128
    long = BatchConfig(32, 2, 2, 3)
    for n, k, config in ((2, 5 * block, SMALL), (8, 2048 + block, long), (9, 2048 + block, long), (16, block, SMALL)):
        w, values = weight_of(kind, 40, k)
        x, exact = x_of(n, k)
        results = []
        for late in (True, False):
            out = torch.full((n, 40), float("nan"))
            emulate(int8_launch.launch(TARGET, [w], x, [out], config), late)
            results.append(out)
        assert torch.equal(*results)
        assert nmse(results[0], exact @ values.T) < 1e-12, (kind, n, k)
