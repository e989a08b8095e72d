"""What aot.py can compile of the kernels that dequantize packed matrices: a launch of each kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from graphrt.backends.triton.kernels.dequantize import dequantize, gather_rows
from graphrt.backends.triton.launch import Launch
from graphrt.backends.triton.packing import PACKED_TYPES, Packed

#: Names, kernels, arguments by name, options.
AotCase = tuple[str, Any, dict[str, Any], dict[str, Any]]


def aot_cases(arch: str) -> Iterator[AotCase]:
    """Every kind of dequantize to f16 and f32, and of gather_rows: the same on all architectures."""
    for kind in PACKED_TYPES:
        packed = Packed.empty(kind, 16, 1024, "cpu")
        for out in (torch.float16, torch.float32):
            yield _case(f"dequantize {kind} {out}", dequantize(packed, torch.empty((16, 1024), dtype=out)))
        ids = torch.zeros((1, 1, 8), dtype=torch.int32)
        yield _case(f"gather_rows {kind}", gather_rows(packed, ids, torch.empty((8, 1024))))


def _case(name: str, launch: Launch) -> AotCase:
    return name, launch.kernel, launch.args, launch.options
