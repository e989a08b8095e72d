"""Between stored elements and floats: decoding and encoding rows of any type.

The `gguf` package knows every block format bit by bit, so its numpy code is the definition here; the fast forms of this
backend have their own decoders, tested against it.
"""

from __future__ import annotations

import gguf
import torch

from graphrt.backends.cpu.memory import torch_type
from graphrt.dtypes import WRITABLE, DType, dtype_by_id

#: What gguf turns into floats, and what it turns floats into.
_BY_GGUF = {t.name for kind in gguf.quants._type_traits if (t := dtype_by_id(kind)) is not None}
DECODABLE = _BY_GGUF | {"f32", "f16", "bf16", "f64"}
ENCODABLE = {*WRITABLE, "f64"}


def decode(stored: torch.Tensor, dt: DType, to: torch.dtype) -> torch.Tensor:
    """Floats of type `to` from stored elements; int64 from an integer type. Quantized rows come as uint8 bytes."""
    if dt.kind == "int":
        return stored.to(torch.int64)
    if not dt.is_quantized:
        return stored.to(to)
    values = gguf.quants.dequantize(stored.contiguous().numpy(), gguf.GGMLQuantizationType(dt.id))
    return torch.from_numpy(values).to(to)


def encode(values: torch.Tensor, dt: DType) -> torch.Tensor:
    """Stored elements from floats or ints; for a quantized type uint8 rows, rounded as ggml's reference code does."""
    if not dt.is_quantized:
        return values.to(torch_type(dt))
    rows = gguf.quants.quantize(values.to(torch.float32).contiguous().numpy(), gguf.GGMLQuantizationType(dt.id))
    return torch.from_numpy(rows)
