"""Between stored elements and floats: decoding and encoding rows of any type.

The `gguf` package knows every block format bit by bit, so its numpy code is the definition here; the fast forms of this
backend have their own decoders, tested against it.
"""

from __future__ import annotations

import gguf
import torch

from graphrt.backends.cpu.memory import torch_type
from graphrt.dtypes import FLOATS8, WRITABLE, DType, dtype_by_id

#: What gguf turns into floats, and what it turns floats into.
_BY_GGUF = {t.name for kind in gguf.quants._type_traits if (t := dtype_by_id(kind)) is not None}
DECODABLE = _BY_GGUF | {"f32", "f16", "bf16", "f64", *FLOATS8}
ENCODABLE = {*WRITABLE, "f64"}
#: torch's types of the floats of 8 bits.
_FLOATS8 = {"f8_e4m3": torch.float8_e4m3fn, "f8_e5m2": torch.float8_e5m2}


def decode(stored: torch.Tensor, dt: DType, to: torch.dtype) -> torch.Tensor:
    """Floats of type `to` from stored elements; int64 from an integer type. Quantized rows come as uint8 bytes,
    floats of 8 bits as uint8 codes."""
    if dt.kind == "int":
        return stored.to(torch.int64)
    if dt.is_float8:
        return stored.contiguous().view(_FLOATS8[dt.name]).to(to)
    if not dt.is_quantized:
        return stored.to(to)
    values = gguf.quants.dequantize(stored.contiguous().numpy(), gguf.GGMLQuantizationType(dt.id))
    return torch.from_numpy(values).to(to)


def encode(values: torch.Tensor, dt: DType) -> torch.Tensor:
    """Stored elements from floats or ints; for a quantized type uint8 rows, rounded as ggml's reference code does. A
    float of 8 bits is the nearest that there is, so it saturates (torch alone would make NaN), and NaN stays NaN."""
    if dt.is_float8:
        largest = FLOATS8[dt.name].largest
        return values.to(torch.float32).clamp(-largest, largest).to(_FLOATS8[dt.name]).view(torch.uint8)
    if not dt.is_quantized:
        return values.to(torch_type(dt))
    rows = gguf.quants.quantize(values.to(torch.float32).contiguous().numpy(), gguf.GGMLQuantizationType(dt.id))
    return torch.from_numpy(rows)
