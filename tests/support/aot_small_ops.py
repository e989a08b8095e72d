"""What the lowerings of small ops launch, shape by shape, for compiling without a GPU (see aot.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from graphrt import ops
from graphrt.backend import Usage
from graphrt.backends.triton.context import Context, Step
from graphrt.backends.triton.kernels import elementwise, norm, soft_max
from graphrt.backends.triton.kernels.flash_attn.scaled import ScaledAttention
from graphrt.backends.triton.kernels.norm_fusions import ScaledNorm
from graphrt.backends.triton.kernels.products.adapters import lower_adapters
from graphrt.backends.triton.kernels.products.fusions import Adapted, AdaptedOfOne
from graphrt.backends.triton.kernels.products.skinny import skinny_steps
from graphrt.backends.triton.kernels.products.trained import lower_gradient, lower_trained
from graphrt.backends.triton.kernels.products.trained_fusions import GradientOfOne, Trained, TrainedOfOne
from graphrt.backends.triton.launch import Launch
from graphrt.backends.triton.memory import TritonBuffer
from graphrt.fusion import Softcap
from graphrt.ops.elementwise import MAPS
from graphrt.ops.norm import NORMS
from graphrt.ops.unary import GLU_KINDS, UNARY_KINDS
from graphrt.ops.view import permute, view
from graphrt.tensor import Tensor, new_tensor
from support.aot_arch import target_of

LOWERINGS = {**elementwise.LOWERINGS, **norm.LOWERINGS, **soft_max.LOWERINGS}

Case = tuple[str, Any, dict[str, Any], dict[str, Any]]


def launches(nodes: list[Tensor], arch: str) -> list[Launch]:
    """The launches of a node, over memory that nobody touches."""
    return made(lambda ctx: LOWERINGS[nodes[0].op](nodes, ctx), arch)


def made(lower: Callable[[Context], list[Step]], arch: str) -> list[Launch]:
    """The launches among steps, over memory that nobody touches."""
    buffers: dict[Tensor, TritonBuffer] = {}

    def place(t: Tensor) -> tuple[TritonBuffer, int]:
        root = t.root
        if root not in buffers:
            usage = Usage.WEIGHTS if root.is_leaf and root.name.startswith("w") else Usage.COMPUTE
            buffers[root] = TritonBuffer(torch.empty(root.nbytes, dtype=torch.uint8), usage)
        return buffers[root], t.view_offs

    ctx = Context(place, target_of(arch), exact=False)
    return [step for step in lower(ctx) if isinstance(step, Launch)]


def _chain(n: int, rows: int) -> ScaledNorm:
    """RMS_NORM, MUL by weights, ADD of a residual."""
    scaled = ops.mul(normed := ops.rms_norm(new_tensor("f32", n, rows), 1e-6), new_tensor("f32", n, name="weight"))
    return ScaledNorm(normed, scaled, ops.add(scaled, new_tensor("f32", n, rows)))


def _elementwise() -> Iterator[tuple[str, list[Tensor]]]:
    for kind in ("f32", "f16", "bf16"):
        x = new_tensor(kind, 4096, 512)
        yield f"ADD {kind}", [ops.add(x, new_tensor(kind, 4096, 512))]
        yield f"MUL row {kind}", [ops.mul(x, new_tensor("f32", 4096))]
        yield f"GLU one source {kind}", [ops.glu(x, None, "swiglu")]
    wide = new_tensor("f32", 14336, 4096)
    yield "MUL large", [ops.mul(wide, new_tensor("f32", 14336, 4096))]
    yield "ADD one row of 576", [ops.add(new_tensor("f32", 576), new_tensor("f32", 576))]
    yield "ADD odd", [ops.add(new_tensor("f32", 577, 3), new_tensor("f32", 577, 3))]
    yield "MUL repeats", [ops.mul(new_tensor("f32", 64, 6, 4), new_tensor("f32", 32, 3, 2))]
    yield "MUL scalar", [ops.mul(new_tensor("f32", 64, 6, 4), new_tensor("f32", 1, 6, 4))]
    yield "MUL gaps", [ops.mul(view(wide, (128, 4096), wide.nb[1:2]), new_tensor("f32", 128, 4096))]
    yield "ADD permuted", [ops.add(permute(new_tensor("f32", 128, 64, 32), 1, 0, 2, 3), new_tensor("f32", 64, 128, 32))]
    huge = new_tensor("f16", 1 << 16, 1 << 16)
    yield "SQR 64 bits", [ops.sqr(huge)]
    for op in ("SUB", "DIV"):
        yield op, [op_node(op)]
    for op in MAPS:
        yield op, [op_node(op)]
    x = new_tensor("f32", 4096)
    for kind in UNARY_KINDS:
        yield f"UNARY {kind}", [ops.unary(x, kind)]
    for kind in GLU_KINDS:
        yield f"GLU {kind}", [ops.glu(x, new_tensor("f32", 4096), kind)]


def _adapters(n: int, k: int, rank: int, rows: tuple[int, ...]) -> AdaptedOfOne:
    """What adapters add to products by n tokens of one x."""
    x, gates, found = new_tensor("f32", k, n), new_tensor("f32", rank, n), []
    for m in rows:
        down = ops.mul_mat(new_tensor("f32", k, rank), x)
        up = ops.mul_mat(new_tensor("f32", rank, m), scaled := ops.mul(down, gates))
        found.append(Adapted(down, scaled, up, ops.add(new_tensor("f32", m, n), up)))
    return AdaptedOfOne(tuple(found))


def _skinny(arch: str) -> Iterator[Case]:
    """Products with a short side: columns, and what is added up over with something added."""
    many, few = torch.empty(2048, 4096), torch.empty(2048, 16)
    for name, x, w, out, y in (
        ("columns", many, torch.empty(16, 4096).t(), few, None),
        ("sums", few, torch.empty(16, 4096), many, torch.empty(2048, 4096)),
    ):
        for launch in made(partial(skinny_steps, x, w, out, y=y), arch):
            yield f"skinny {name}", launch.kernel, launch.args, launch.options


def _trained(rows: tuple[int, ...], k: int) -> TrainedOfOne:
    """Products by 2048 tokens of one x with adapters that are trained."""
    x, found = new_tensor("f32", k, 2048), []
    for m in rows:
        y, down = ops.mul_mat(new_tensor("q4_K", k, m), x), ops.mul_mat(new_tensor("f32", k, 16), x)
        up = ops.mul_mat(new_tensor("f32", 16, m), scaled := ops.scale(down, 2.0))
        found.append(Trained(y, down, scaled, up, ops.add(y, up)))
    return TrainedOfOne(tuple(found))


def _gradient(rows: tuple[int, ...], k: int) -> GradientOfOne:
    """The gradient of what those read."""

    def product(kind: str, m: int) -> Tensor:
        return ops.out_prod(new_tensor(kind, k, m), ops.transpose(new_tensor("f32", m, 2048)))

    packed, plain = [product("q4_K", m) for m in rows], [product("f32", 16) for _ in rows]
    return GradientOfOne(tuple(packed), tuple(plain), new_tensor("f32", k, 2048))


def _of_training(arch: str) -> Iterator[Case]:
    for rows, k in (((4096,), 14336), ((4096, 1024, 1024), 4096), ((14336, 14336), 4096)):
        steps = made(partial(lower_trained, _trained(rows, k)), arch)
        for launch in (*steps, *made(partial(lower_gradient, _gradient(rows, k)), arch)):
            yield f"trained {k} by {len(rows)} of {rows[0]}", launch.kernel, launch.args, launch.options


def op_node(op: str) -> Tensor:
    """A node of an elementwise op over one row."""
    x = new_tensor("f32", 4096)
    made: dict[str, Callable[[], Tensor]] = {
        "SCALE": lambda: ops.scale(x, 2.0, 1.0), "CLAMP": lambda: ops.clamp(x, -1.0, 1.0),
        "SQR": lambda: ops.sqr(x), "SQRT": lambda: ops.sqrt(x),
        "SUB": lambda: ops.sub(x, new_tensor("f32", 4096)), "DIV": lambda: ops.div(x, new_tensor("f32", 4096)),
    }  # fmt: skip
    return made[op]()


def _rows() -> Iterator[tuple[str, list[Tensor]]]:
    for op in NORMS:
        make = {"NORM": ops.norm, "RMS_NORM": ops.rms_norm, "L2_NORM": ops.l2_norm}[op]
        for n, rows in ((128, 40), (576, 1), (4096, 512), (16384, 1), (20000, 3)):
            yield f"{op} {n}x{rows}", [make(new_tensor("f32", n, rows), 1e-6)]
    yield "SUM_ROWS", [ops.sum_rows(new_tensor("f32", 1000, 7))]
    yield "SUM_ROWS long", [ops.sum_rows(new_tensor("f32", 100000, 7))]
    yield "RMS_NORM permuted", [ops.rms_norm(permute(new_tensor("f32", 64, 128), 1, 0, 2, 3), 1e-6)]
    for n in (1, 33, 1000, 4096, 16384, 200000):
        yield f"SOFT_MAX {n}", [ops.soft_max(new_tensor("f32", n, 4, 8))]
        for kind in ("f16", "f32"):
            mask, sinks = new_tensor(kind, n, 32), new_tensor("f32", 8)
            yield f"SOFT_MAX {n} {kind}", [ops.soft_max(new_tensor("f32", n, 4, 8), mask, sinks, 0.5, 8.0)]


def _scaled(arch: str) -> Iterator[Case]:
    """What scales of heads and a result of 8 bits add to an attention."""
    q, k, v = (new_tensor(kind, 128, n, heads) for kind, n, heads in (("f8_e4m3", 4, 32), *[("f8_e4m3", 4096, 8)] * 2))
    of_k, of_v = new_tensor("f32", 8), new_tensor("f32", 8)
    node = ops.flash_attn_ext(
        q, k, v, None, 0.1, k_scale=of_k, v_scale=of_v, out_type="f8_e4m3", out_scale=0.5
    )  # fmt: skip
    steps = made(lambda ctx: [*(s := _attention_scales(node, ctx)).before, *s.after], arch)
    for name, launch in zip(("q", "result"), steps):
        yield f"scaled attention {name}", launch.kernel, launch.args, launch.options


def _attention_scales(node: Tensor, ctx: Context) -> ScaledAttention:
    return ScaledAttention(node, ctx.place, lambda n: torch.empty(n), ctx.target)


def aot_cases(arch: str) -> Iterator[Case]:
    """A name, the kernel, its arguments by name, its options: of what a few nodes of each op launch."""
    for name, nodes in (*_elementwise(), *_rows()):
        for launch in launches(nodes, arch):
            yield name, launch.kernel, launch.args, launch.options
    inner = ops.scale(new_tensor("f32", 128256, 2), 0.1)
    bent = ops.unary(inner, "tanh")
    cap = Softcap(inner, bent, ops.scale(bent, 10.0))
    for launch in made(lambda ctx: elementwise.lower_softcap(cap, ctx), arch):
        yield "softcap", launch.kernel, launch.args, launch.options
    for n, rows in ((576, 1), (4096, 1), (4096, 512), (20000, 2)):
        whole = _chain(n, rows)
        for name, found in (("norm_mul", whole._replace(total=None)), ("norm_mul_add", whole)):
            for launch in made(partial(norm.lower_scaled_norm, found), arch):
                yield f"{name} {n}x{rows}", launch.kernel, launch.args, launch.options
    yield from _skinny(arch)
    yield from _of_training(arch)
    yield from _scaled(arch)
    for n, k, rank, rows in ((1, 4096, 16, (4096,)), (64, 14336, 32, (4096, 1024, 1024)), (512, 577, 192, (576, 100))):
        for launch in made(partial(lower_adapters, _adapters(n, k, rank, rows)), arch):
            yield f"adapters {n} tokens {k} rank {rank}", launch.kernel, launch.args, launch.options
