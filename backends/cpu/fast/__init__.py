"""Fast CPU kernels: LLVM code made at run time for ggml's block formats, decode steps first.

Every function here prepares one step: it takes addresses (ints), sizes and byte strides, compiles the kernel if it is
new, and returns a `Step` to call with no arguments, as often as wanted (about 0.2 us of Python). The memory stays the
caller's, and must stay where it is. `Program` joins steps into one native call on one team of threads.

    norm = fast.rms_norm(y=h, x=x, w=w, n_rows=1, n=576, x_nb=2304, y_nb=2304, eps=1e-5)
    qkv = [fast.gemv("q4_1", y=y, w=w, x=h, n_rows=rows, n=576, w_nb=360) for y, w, rows in projections]
    decode = fast.Program([norm, qkv, ...])
    decode()

Values are f32, sums too; weights are never rounded, activations only by `round_rows`, for products of integers. Where a
processor has tiles, both are two bf16 there (`amx.py`), which keep 16 bits.
Importing this package loads nothing; ask `available()` first.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphrt.backends.cpu.fast.amx import amx_gemm, amx_panel_bytes, amx_tiles, split_of, split_rows
    from graphrt.backends.cpu.fast.amx_bytes import Columns, columns_of, round_columns
    from graphrt.backends.cpu.fast.amx_experts import amx_expert_gemm, most_rows, split_pairs
    from graphrt.backends.cpu.fast.attention import flash_attn
    from graphrt.backends.cpu.fast.attention_task import KV_TYPES
    from graphrt.backends.cpu.fast.attention_varlen import flash_attn_varlen
    from graphrt.backends.cpu.fast.blocks import TYPES
    from graphrt.backends.cpu.fast.codes import CODE_TYPES
    from graphrt.backends.cpu.fast.experts import expert_gemm, expert_gemv, expert_order, order_bytes
    from graphrt.backends.cpu.fast.integer import form_of, panel_form_of, round_rows
    from graphrt.backends.cpu.fast.masks import kq_mask
    from graphrt.backends.cpu.fast.math_ops import elementwise
    from graphrt.backends.cpu.fast.matvec import MAX_TOKENS, gemv, gemv_glu
    from graphrt.backends.cpu.fast.norm_rope import add_rms_norm, layer_norm, rms_norm, rope
    from graphrt.backends.cpu.fast.pool import Program, Step, max_threads
    from graphrt.backends.cpu.fast.reduce import MAX_ORDERED, PIECES, argmax, order, soft_max, sum_rows
    from graphrt.backends.cpu.fast.rows import SET_ROWS_TYPES, dequant_rows, get_rows, set_rows
    from graphrt.backends.cpu.fast.tiles import gemm, panel_bytes

_WHERE = {
    "amx": ("amx_gemm", "amx_panel_bytes", "amx_tiles", "split_of", "split_rows"),
    "amx_bytes": ("Columns", "columns_of", "round_columns"),
    "amx_experts": ("amx_expert_gemm", "most_rows", "split_pairs"),
    "attention": ("flash_attn",),
    "attention_task": ("KV_TYPES",),
    "attention_varlen": ("flash_attn_varlen",),
    "blocks": ("TYPES",),
    "codes": ("CODE_TYPES",),
    "experts": ("expert_gemm", "expert_gemv", "expert_order", "order_bytes"),
    "integer": ("form_of", "panel_form_of", "round_rows"),
    "masks": ("kq_mask",),
    "matvec": ("MAX_TOKENS", "gemv", "gemv_glu"),
    "math_ops": ("elementwise",),
    "norm_rope": ("add_rms_norm", "layer_norm", "rms_norm", "rope"),
    "pool": ("Program", "Step", "max_threads"),
    "reduce": ("MAX_ORDERED", "PIECES", "argmax", "order", "soft_max", "sum_rows"),
    "tiles": ("gemm", "panel_bytes"),
    "rows": ("SET_ROWS_TYPES", "dequant_rows", "get_rows", "set_rows"),
}
_MODULE_OF = {name: module for module, names in _WHERE.items() for name in names}

__all__ = [
    "CODE_TYPES",
    "KV_TYPES",
    "MAX_ORDERED",
    "MAX_TOKENS",
    "PIECES",
    "SET_ROWS_TYPES",
    "TYPES",
    "Columns",
    "Program",
    "Step",
    "add_rms_norm",
    "amx_expert_gemm",
    "amx_gemm",
    "amx_panel_bytes",
    "amx_tiles",
    "argmax",
    "available",
    "columns_of",
    "dequant_rows",
    "elementwise",
    "expert_gemm",
    "expert_gemv",
    "expert_order",
    "flash_attn",
    "flash_attn_varlen",
    "form_of",
    "gemm",
    "gemv",
    "gemv_glu",
    "get_rows",
    "kq_mask",
    "layer_norm",
    "max_threads",
    "most_rows",
    "order",
    "order_bytes",
    "panel_bytes",
    "panel_form_of",
    "rms_norm",
    "rope",
    "round_columns",
    "round_rows",
    "set_rows",
    "soft_max",
    "split_of",
    "split_pairs",
    "split_rows",
    "sum_rows",
]


@functools.cache
def available() -> str | None:
    """None when the kernels can run here, else the reason why not."""
    if importlib.util.find_spec("llvmlite") is None:
        return "the fast CPU kernels need llvmlite, which is not installed; pip install llvmlite"
    if sys.byteorder != "little":
        return "the fast CPU kernels read GGUF's little-endian blocks as they are; this machine is big-endian"
    from graphrt.backends.cpu.fast.jit import host

    if host().triple.startswith(("x86_64", "i686")) and not host().features.get("f16c"):
        return "the fast CPU kernels need a CPU with F16C (x86-64-v3); this one lacks it"
    return None


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value
