"""Hopper's kernels of FLASH_ATTN_BACK, shape by shape, for compiling without a GPU (see aot.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from graphrt import ops
from graphrt.backend import Usage
from graphrt.backends.triton.kernels.flash_attn.backward.launcher import BackLauncher
from graphrt.backends.triton.kernels.flash_attn.fusions import Gradients
from graphrt.backends.triton.launch import Launch
from graphrt.backends.triton.memory import TritonBuffer
from graphrt.ops.flash_attn_ext import FlashAttnParams
from graphrt.ops.flash_attn_varlen import FlashAttnVarlenParams
from graphrt.tensor import Tensor, new_tensor
from support.aot_arch import target_of
from support.aot_small_ops import Case

HELPERS = (
    "attention_back_lse", "attention_dropout_bits", "order_packed_tiles", "attention_back_slots",
    "attention_back_bias_sum",
)  # fmt: skip
#: Head size, type of k and v, keys (0: no mask; with 500 TMA can't bring it), soft cap, ALiBi, sources; and what is
#: more: dropout, a bias (with "500", one that TMA can't bring), packed sequences, the form fused-k.
SHAPES: tuple[tuple[Any, ...], ...] = (
    (128, "f16", 0, 0.0, 0.0, "qkv"), (128, "bf16", 512, 0.0, 0.0, "qkv"), (128, "f16", 512, 0.0, 8.0, "qkv"),
    (128, "f16", 500, 30.0, 0.0, "qkv"), (64, "f16", 0, 0.0, 0.0, "qkv"), (64, "bf16", 512, 30.0, 0.0, "qkv"),
    (64, "f16", 512, 0.0, 8.0, "qkv"), (256, "f16", 0, 0.0, 0.0, "qkv"), (256, "bf16", 512, 0.0, 0.0, "qkv"),
    (256, "f16", 512, 30.0, 8.0, "qkv"), (128, "f16", 500, 30.0, 0.0, "q"), (128, "f16", 500, 30.0, 0.0, "kv"),
    (128, "f16", 512, 0.0, 8.0, "q"), (128, "f16", 512, 0.0, 8.0, "kv"), (128, "f16", 0, 30.0, 0.0, "qkv"),
    (128, "f16", 512, 0.0, 0.0, "k"), (128, "f16", 512, 0.0, 0.0, "v"),
    (256, "f16", 0, 0.0, 0.0, "k"), (256, "f16", 0, 0.0, 0.0, "v"), (64, "f16", 500, 0.0, 0.0, "qkv"),
    *((d, "f16", 0, 0.0, 0.0, of, "dropout") for d in (64, 128, 256) for of in ("qkv", "k")),
    (128, "bf16", 512, 0.0, 0.0, "qkv", "dropout"), (128, "f16", 512, 30.0, 0.0, "qkv", "dropout"),
    (64, "f16", 512, 30.0, 0.0, "qkv", "dropout"), (256, "f16", 512, 0.0, 8.0, "qkv", "dropout"),
    (128, "f16", 0, 0.0, 0.0, "qkvb", "dropout, bias"), (64, "bf16", 0, 0.0, 0.0, "qkvb", "dropout, bias"),
    (128, "f16", 0, 0.0, 0.0, "qkv", "packed"), (128, "bf16", 0, 30.0, 0.0, "qkv", "packed window"),
    (128, "f16", 0, 0.0, 8.0, "qkv", "packed"),
    (64, "f16", 0, 0.0, 0.0, "qkv", "packed"), (64, "bf16", 0, 0.0, 8.0, "qkv", "packed window"),
    (128, "f16", 0, 0.0, 0.0, "qkv", "fused"), (128, "bf16", 512, 0.0, 0.0, "qkv", "fused"),
    (128, "f16", 500, 0.0, 8.0, "qkv", "fused"),
    (128, "f16", 0, 30.0, 0.0, "b", "bias"), (64, "f16", 0, 0.0, 0.0, "b", "bias 500"),
    (128, "f16", 0, 0.0, 0.0, "qb", "dropout, bias"), (128, "f16", 0, 0.0, 0.0, "qkvb", "bias 500"),
    (64, "f16", 0, 0.0, 0.0, "qkvb", "dropout, bias 500"),
)  # fmt: skip


def nodes(d: int, kind: str, n_mask: int, softcap: float, max_bias: float, of: str, more: str = "") -> list[Tensor]:
    """Gradients of 512 queries and keys, or as many as the mask has, of 8 heads over 2; of two packed sequences."""
    n_q, n = 512, n_mask or (500 if "500" in more else 512)
    q, rows = new_tensor("f32", d, n_q, 8), (8, n_q)
    k, v = new_tensor(kind, d, n, 2), new_tensor(kind, d, n, 2)
    out, d_out, lse = new_tensor("f32", d, *rows), new_tensor("f32", d, *rows), new_tensor("f32", *rows)
    mask = new_tensor("f16", n, n_q) if n_mask else None
    params = FlashAttnParams(d**-0.5, max_bias, softcap, 0.1 if "dropout" in more else 0.0, 3, 5)
    bias = new_tensor("f16", n, n_q) if "bias" in more else None
    if "packed" in more:
        varlen = FlashAttnVarlenParams(d**-0.5, max_bias, softcap, True, 100 if "window" in more else 0)
        starts = new_tensor("i32", 3)
        return [ops.flash_attn_varlen_back(x, d_out, q, k, v, out, lse, starts, starts, varlen) for x in of]
    sources = ["attn_bias" if source == "b" else source for source in of]
    return [ops.flash_attn_back(x, d_out, q, k, v, out, lse, params, mask=mask, attn_bias=bias) for x in sources]


def aot_cases(arch: str) -> Iterator[Case]:
    """A name, a kernel, its arguments by name (tensors for pointers) and the options of its launch."""
    for shape in SHAPES if arch == "sm_90" else ():
        buffers: dict[Tensor, TritonBuffer] = {}

        def place(t: Tensor, buffers: dict[Tensor, TritonBuffer] = buffers) -> tuple[TritonBuffer, int]:
            empty = torch.empty(t.root.nbytes, dtype=torch.uint8)
            return buffers.setdefault(t.root, TritonBuffer(empty, Usage.COMPUTE)), t.view_offs

        form = "fused-k" if "fused" in shape else "split"
        for step in BackLauncher(target_of(arch), place, form).launches(Gradients(tuple(nodes(*shape)))):
            if isinstance(step, Launch) and ("hopper" in step.name or step.name in HELPERS):
                yield f"attention back {step.name} {shape}", step.kernel, step.args, step.options
