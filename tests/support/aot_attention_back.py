"""The kernels of attention's gradients, shape by shape, for compiling without a GPU (see aot.py)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from graphrt import ops
from graphrt.backends.triton.accesses import declaration_of
from graphrt.backends.triton.kernels.flash_attn.backward.forms import FORMS
from graphrt.backends.triton.kernels.flash_attn.backward.launcher import BackLauncher
from graphrt.backends.triton.kernels.flash_attn.fusions import Gradients
from graphrt.ops.cases.scores import SCORES
from graphrt.ops.flash_attn_ext import FlashAttnParams
from graphrt.ops.flash_attn_varlen import FlashAttnVarlenParams
from graphrt.ops.score import as_params
from graphrt.tensor import Tensor, new_tensor
from support.aot_small_ops import Case, made


@dataclass(frozen=True)
class Shape:
    """d: D_k and D_v; kind: of k and v; of: whose gradients, letters of "qkv", b for the bias, s for the sinks;
    score: a name of ops/cases/scores.py's SCORES."""

    d: tuple[int, int]
    kind: str = "f16"
    mask: bool = True
    softcap: float = 0.0
    bias: bool = False
    dropout_p: float = 0.0
    packed: bool = False
    score: str = ""
    of: str = "qkv"
    forms: tuple[str, ...] = FORMS


NAMES = {"q": "q", "k": "k", "v": "v", "b": "attn_bias", "s": "sinks"}
_BASE = Shape((128, 128))
SHAPES = (
    *(replace(_BASE, d=d) for d in ((64, 64), (128, 128), (256, 256), (576, 512))),
    *(replace(_BASE, d=d, forms=("split",)) for d in ((40, 40), (192, 128))),
    *(replace(_BASE, d=d, kind="f32") for d in ((64, 64), (128, 128))),
    *(replace(_BASE, d=d, kind="f32", forms=("split",)) for d in ((256, 256), (576, 512))),
    replace(_BASE, mask=False, kind="bf16", of="qkvs"), replace(_BASE, softcap=30.0, forms=("split",)),
    replace(_BASE, score="softcap", forms=("split",)), replace(_BASE, score="branches", kind="bf16", forms=("split",)),
    replace(_BASE, score="gate", kind="f32", d=(64, 64), forms=("split",)),
    # Without a mask first: what is loaded under no condition, Triton would load in several stages.
    replace(_BASE, mask=False, bias=True, of="b", forms=("split",)),
    replace(_BASE, bias=True, dropout_p=0.1, of="qkvb"), replace(_BASE, d=(64, 64), dropout_p=0.1, of="qk"),
    replace(_BASE, packed=True, mask=False, of="qkvs"), replace(_BASE, packed=True, mask=False, kind="f32", d=(64, 64)),
)  # fmt: skip


def nodes(shape: Shape) -> list[Tensor]:
    """Gradients of 512 queries and keys of 8 heads over 2; of two packed sequences."""
    (d_k, d_v), n = shape.d, 512
    q, rows = new_tensor("f32", d_k, n, 8), (8, n)
    k, v = new_tensor(shape.kind, d_k, n, 2), new_tensor(shape.kind, d_v, n, 2)
    out, d_out, lse = new_tensor("f32", d_v, *rows), new_tensor("f32", d_v, *rows), new_tensor("f32", *rows)
    sinks = new_tensor("f32", 8)
    wanted = [NAMES[of] for of in shape.of]
    if shape.packed:
        starts, packed = new_tensor("i32", 3), FlashAttnVarlenParams(d_k**-0.5, window=100)
        return [
            ops.flash_attn_varlen_back(of, d_out, q, k, v, out, lse, starts, starts, packed, sinks=sinks)
            for of in wanted
        ]
    given: dict[str, Any] = {"mask": new_tensor("f16", n, n) if shape.mask else None, "sinks": sinks}
    given["attn_bias"] = new_tensor("f16", n, n, 8) if shape.bias else None
    text, numbers = as_params(SCORES[shape.score](8, n) if shape.score else None)
    params = FlashAttnParams(
        d_k**-0.5, softcap=shape.softcap, dropout_p=shape.dropout_p, score=text, score_numbers=numbers
    )  # fmt: skip
    return [ops.flash_attn_back(of, d_out, q, k, v, out, lse, params, **given) for of in wanted]


def aot_cases(arch: str) -> Iterator[Case]:
    """A name, a kernel, its arguments by name (tensors for pointers) and the options of its launch. Of helpers those of
    the first shapes that need them."""
    seen: set[tuple[Any, ...]] = set()
    for shape in SHAPES:
        if arch == "gfx942" and shape.kind == "f32" and max(shape.d) > 512:
            continue  # 32 keys take 66 KiB, of 64 that there are: the GPU refuses the launch
        for form in shape.forms:
            found = made(lambda ctx, s=shape, f=form: BackLauncher(ctx.target, ctx.place, f).launches(
                Gradients(tuple(nodes(s)))), arch)  # fmt: skip
            for launch in found:
                same = (launch.name, shape.kind, shape.packed)
                if declaration_of(launch.kernel).helper and same in seen:
                    continue
                seen.add(same)
                yield f"attention back {form} {launch.name} {shape}", launch.kernel, launch.args, launch.options
