"""The kernels of FLASH_ATTN_BACK, shape by shape, for compiling without a GPU (see aot.py)."""

from __future__ import annotations

from collections.abc import Iterator

from graphrt import ops
from graphrt.backends.triton.kernels.flash_attn.backward.lower import lower_flash_attn_back
from graphrt.ops.flash_attn_ext import FlashAttnParams
from graphrt.tensor import Tensor, new_tensor
from support.aot_small_ops import Case, made

#: D_k and D_v, the type of k and v, with a mask or without, softcap.
SHAPES = (
    ((128, 128), "f16", True, 0.0), ((64, 64), "f16", False, 0.0), ((256, 256), "bf16", True, 30.0),
    ((128, 128), "f32", True, 0.0), ((64, 64), "f32", True, 0.0), ((40, 40), "f16", True, 0.0),
    ((192, 128), "f16", False, 0.0),
)  # fmt: skip


def node(of: str, d: tuple[int, int], kind: str, mask: bool, softcap: float) -> Tensor:
    """A gradient of 512 queries and keys of 8 heads over 2."""
    (d_k, d_v), n = d, 512
    q, rows = new_tensor("f32", d_k, n, 8), (8, n)
    k, v = new_tensor(kind, d_k, n, 2), new_tensor(kind, d_v, n, 2)
    out, d_out, lse = new_tensor("f32", d_v, *rows), new_tensor("f32", d_v, *rows), new_tensor("f32", *rows)
    given = {"mask": new_tensor("f16", n, n) if mask else None, "sinks": new_tensor("f32", 8)}
    return ops.flash_attn_back(of, d_out, q, k, v, out, lse, FlashAttnParams(d_k**-0.5, softcap=softcap), **given)


def aot_cases(arch: str) -> Iterator[Case]:
    """A name, a kernel, its arguments by name (tensors for pointers) and the options of its launch."""
    for shape in SHAPES:
        for of in ("q", "k", "v", "sinks"):
            for launch in made(lambda ctx, of=of, shape=shape: lower_flash_attn_back([node(of, *shape)], ctx), arch):
                yield f"attention back {of} {shape}", launch.kernel, launch.args, launch.options
