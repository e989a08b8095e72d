"""What the backend refuses, and why. Needs neither Triton nor a GPU."""

from __future__ import annotations

from graphrt import ranks
from graphrt.backends.triton.packing import F16_MIN, F16_SCALE, packing_of
from graphrt.dtypes import CACHES, WRITABLE
from graphrt.op import op_spec
from graphrt.ops.collectives import COLLECTIVES, is_played
from graphrt.tensor import Tensor

#: Types of K and V: attention's kernels read blocks whose scales are f16.
KV_TYPES = tuple(t for t in CACHES if (p := packing_of(t)) is None or p.scale in (F16_SCALE, F16_MIN))
MAX_HEAD_SIZE = 576
#: Ops beside attention and views.
OPS = {
    "ADD", "SUB", "MUL", "DIV", "SCALE", "CLAMP", "SQR", "SQRT", "UNARY", "GLU", "NORM", "RMS_NORM", "L2_NORM",
    "SUM_ROWS", "SOFT_MAX", "ROPE", "GET_ROWS", "SET_ROWS", "CPY", "CONT", "DUP", "CONCAT", "REPEAT", "ARGMAX",
    "ARGSORT", "TOP_K", "SAMPLE", "SAMPLE_EACH", "PENALIZE", "KQ_MASK", "MUL_MAT",
    "MUL_MAT_ID", "ADD_ID", "FILL", "SILU_BACK", "UNARY_BACK", "RMS_NORM_BACK", "ROPE_BACK", "SOFT_MAX_BACK",
    "REPEAT_BACK", "GET_ROWS_BACK", "SET_ROWS_BACK", "VIEW_BACK", "OUT_PROD", "MUL_MAT_ID_BACK", "OUT_PROD_ID",
    "CROSS_ENTROPY_LOSS", "CROSS_ENTROPY_LOSS_BACK", "OPT_STEP_SGD", "OPT_STEP_ADAMW",
    *COLLECTIVES,
}  # fmt: skip
#: Ops that read their first source in any type, products floats of 8 bits aside.
PRODUCTS = ("MUL_MAT", "MUL_MAT_ID", "OUT_PROD", "MUL_MAT_ID_BACK")
DECODING = (*PRODUCTS, "GET_ROWS")


def why_unsupported(node: Tensor) -> str | None:
    """None when the backend runs a node, else a sentence why not."""
    if op_spec(node.op).is_view:
        return None
    if node.op in ("FLASH_ATTN_EXT", "FLASH_ATTN_VARLEN"):
        return _why_not_attention(node, {"k": node["k"], "v": node["v"]})
    if node.op in ("FLASH_ATTN_LSE", "FLASH_ATTN_VARLEN_LSE"):
        return _why_not_attention(node, {"k": node["k"]})
    if node.op in ("FLASH_ATTN_BACK", "FLASH_ATTN_VARLEN_BACK"):
        return _why_not_backward(node)
    if node.op not in OPS:
        return f"it has no kernel for {node.op}"
    if node.op in COLLECTIVES and not is_played(node) and not ranks.link_gpus():
        return "the ranks have no link between their GPUs (NCCL)"
    return _why_not_types(node) or _why_not_elements(node)


def _why_not_types(node: Tensor) -> str | None:
    source = next(node.sources())
    if node.op == "CPY" and source.dtype != node.dtype and node.dtype.is_quantized and node.dtype.name not in WRITABLE:
        return f"it does not round to {node.dtype.name}"
    decodes = node.op in DECODING or (node.op == "CPY" and source.dtype != node.dtype)
    kind = source.dtype.name
    if decodes and source.dtype.is_quantized and packing_of(kind) is None:
        return f"it has no decoder for {kind}"
    if source.dtype.is_float8 and node.op in PRODUCTS:
        return f"it multiplies no matrices of {kind}; copy them into f16 with CPY first"
    if node.op in ("MUL_MAT_ID", "MUL_MAT_ID_BACK") and kind == "f64":
        return "it multiplies experts' matrices of f32 at most, not f64"
    return None


def _why_not_elements(node: Tensor) -> str | None:
    for name, t in node.sources_by_name().items():
        plain = not t.dtype.is_quantized
        if plain and any(n > 1 and step % t.dtype.type_size for n, step in zip(t.ne, t.nb)):
            return f"{name}'s strides must be whole elements, they are {t.nb} bytes of {t.dtype.name}"
    return None


def _why_not_attention(node: Tensor, caches: dict[str, Tensor]) -> str | None:
    for name, t in caches.items():
        if getattr(node.params, "prec", 0) and t.dtype.is_quantized:
            return f"its attention kernel unpacks {name}'s {t.dtype.name} to f16, prec asks for products in f32"
        if t.dtype.name not in KV_TYPES:
            return f"{name} must be one of {', '.join(KV_TYPES)} for its attention kernel, this one is {t.dtype.name}"
        d = node["q"].ne[0] if name == "k" else t.ne[0]
        if d > MAX_HEAD_SIZE:
            return f"its attention kernel has head sizes up to {MAX_HEAD_SIZE}, {name}'s is {d}"
        reason = _why_not_strides(name, t)
        if reason is not None:
            return reason
    named = node.sources_by_name()
    for name, t in named.items():
        if t.dtype.name in ("f32", "f16", "bf16") and any(n % t.dtype.type_size for n in t.nb):
            return f"{name}'s strides must be whole elements, they are {t.nb} bytes of {t.dtype.name}"
    apart = next((name for name, t in named.items() if t.nb[0] != t.dtype.type_size), None)
    if apart is not None:
        return f"its attention kernel reads rows whose elements lie side by side, {apart}'s do not"
    return None


def _why_not_backward(node: Tensor) -> str | None:
    largest = max(node["k"].ne[0], node["v"].ne[0])
    if largest > MAX_HEAD_SIZE:
        return f"its gradients of attention have head sizes up to {MAX_HEAD_SIZE}, this one is {largest}"
    beside = [name for name in ("lse", "d_lse") if name in node.sources_by_name()]
    rows = {name: t for name, t in node.sources_by_name().items() if name not in (*beside, "sinks")}
    apart = next((name for name, t in rows.items() if t.nb[0] != t.dtype.type_size and t.ne[0] > 1), None)
    if apart is not None:
        return f"its gradients of attention read rows whose elements lie side by side, {apart}'s do not"
    return _why_not_elements(node)


def _why_not_strides(name: str, t: Tensor) -> str | None:
    if t.dtype.is_quantized and any(n % 2 for n in t.nb[1:]):
        return f"{name}'s strides must be even, they are {t.nb} bytes"
    return None
