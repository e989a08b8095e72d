"""Hopper's kernels of FLASH_ATTN_BACK, shape by shape, for compiling without a GPU (see aot.py)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from graphrt import ops
from graphrt.backend import Usage
from graphrt.backends.triton.kernels.flash_attn.backward.launcher import BackLauncher
from graphrt.backends.triton.kernels.flash_attn.fusions import Gradients
from graphrt.backends.triton.launch import Launch
from graphrt.backends.triton.memory import TritonBuffer
from graphrt.ops.flash_attn_ext import FlashAttnParams
from graphrt.tensor import Tensor, new_tensor
from support.aot_arch import target_of
from support.aot_small_ops import Case

#: Head size, type of k and v, keys (0: no mask; with 500 TMA can't bring it), soft cap, ALiBi, sources.
SHAPES = (
    (128, "f16", 0, 0.0, 0.0, "qkv"), (128, "bf16", 512, 0.0, 0.0, "qkv"), (128, "f16", 512, 0.0, 8.0, "qkv"),
    (128, "f16", 500, 30.0, 0.0, "qkv"), (64, "f16", 0, 0.0, 0.0, "qkv"), (64, "bf16", 512, 30.0, 0.0, "qkv"),
    (64, "f16", 512, 0.0, 8.0, "qkv"), (256, "f16", 0, 0.0, 0.0, "qkv"), (256, "bf16", 512, 0.0, 0.0, "qkv"),
    (256, "f16", 512, 30.0, 8.0, "qkv"), (128, "f16", 512, 0.0, 0.0, "k"), (128, "f16", 512, 0.0, 0.0, "v"),
    (256, "f16", 0, 0.0, 0.0, "k"), (256, "f16", 0, 0.0, 0.0, "v"), (64, "f16", 500, 0.0, 0.0, "qkv"),
)  # fmt: skip


def nodes(d: int, kind: str, n_mask: int, softcap: float, max_bias: float, of: str) -> list[Tensor]:
    """Gradients of 512 queries and keys, or as many as the mask has, of 8 heads over 2."""
    n_q, n = 512, n_mask or 512
    q, rows = new_tensor("f32", d, n_q, 8), (8, n_q)
    k, v = new_tensor(kind, d, n, 2), new_tensor(kind, d, n, 2)
    out, d_out, lse = new_tensor("f32", d, *rows), new_tensor("f32", d, *rows), new_tensor("f32", *rows)
    mask = new_tensor("f16", n, n_q) if n_mask else None
    params = FlashAttnParams(d**-0.5, max_bias, softcap)
    return [ops.flash_attn_back(source, d_out, q, k, v, out, lse, params, mask=mask) for source in of]


def aot_cases(arch: str) -> Iterator[Case]:
    """A name, a kernel, its arguments by name (tensors for pointers) and the options of its launch."""
    for shape in SHAPES if arch == "sm_90" else ():
        buffers: dict[Tensor, TritonBuffer] = {}

        def place(t: Tensor, buffers: dict[Tensor, TritonBuffer] = buffers) -> tuple[TritonBuffer, int]:
            empty = torch.empty(t.root.nbytes, dtype=torch.uint8)
            return buffers.setdefault(t.root, TritonBuffer(empty, Usage.COMPUTE)), t.view_offs

        for step in BackLauncher(target_of(arch), place, "split").launches(Gradients(tuple(nodes(*shape)))):
            if isinstance(step, Launch) and ("hopper" in step.name or step.name == "attention_back_lse"):
                yield f"attention back {step.name} {shape}", step.kernel, step.args, step.options
