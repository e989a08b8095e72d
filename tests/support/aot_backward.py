"""The kernels of gradients but attention's, and of optimizers' steps, shape by shape, for compiling without a GPU (see
aot.py)."""

from __future__ import annotations

from collections.abc import Iterator

from graphrt import ops
from graphrt.backend import Group, Region
from graphrt.backends.triton.kernels.backward.glu import lower_glu_back
from graphrt.backends.triton.kernels.backward.glu_fusions import glu_back
from graphrt.backends.triton.kernels.backward.step_fusions import adamw_step
from graphrt.backends.triton.kernels.backward.steps import lower_adamw_step
from graphrt.fusion import Nodes
from graphrt.graph import Graph
from graphrt.op import op_spec
from graphrt.ops.opt_step import adamw_moments
from graphrt.ops.rope import RopeParams
from graphrt.ops.unary import UNARY_KINDS
from graphrt.tensor import Tensor, new_tensor
from support.aot_small_ops import Case, made
from support.planned import lowered


def f32(*ne: int) -> Tensor:
    return new_tensor("f32", *ne)


def _maps() -> Iterator[tuple[str, Tensor]]:
    d = f32(14336, 2048)
    yield "silu_back", ops.silu_back(d, f32(14336, 2048))
    for kind in UNARY_KINDS:
        if kind != "silu":
            yield f"{kind}_back", ops.unary_back(f32(4096, 512), f32(4096, 512), kind)
    turned = ops.permute(f32(128, 32, 64), 0, 2, 1, 3)
    yield "silu_back turned", ops.silu_back(turned, new_tensor("f16", 128, 64, 32))


def _rows() -> Iterator[tuple[str, Tensor]]:
    for n, rows in ((128, 4096), (576, 3), (4096, 2048), (16384, 8), (20000, 3)):
        yield f"rms_norm_back {n}x{rows}", ops.rms_norm_back(f32(n, rows), f32(n, rows), 1e-6)
        yield f"soft_max_back {n}x{rows}", ops.soft_max_back(f32(n, rows), f32(n, rows), 0.5)
    for n in (1000, 128256):
        yield f"loss {n}", ops.cross_entropy_loss(f32(n, 64), f32(n, 64))
        yield f"loss_back {n}", ops.cross_entropy_loss_back(f32(1), f32(n, 64), f32(n, 64))
    for mode in ("normal", "neox"):
        positions = new_tensor("i32", 512)
        yield f"rope_back {mode}", ops.rope_back(f32(128, 32, 512), positions, RopeParams(128, mode))


def _movement() -> Iterator[tuple[str, Tensor]]:
    yield "repeat_back of a bias", ops.repeat_back(f32(4096, 2048), 4096)
    yield "repeat_back of heads", ops.repeat_back(f32(64, 4, 8, 6), 64, 1, 8, 6)
    yield "repeat_back of rows", ops.repeat_back(f32(2048, 64), 1, 64)
    ids = new_tensor("i32", 2048)
    yield "get_rows_back", ops.get_rows_back(f32(4096, 2048), ids, 128256)
    yield "set_rows_back", ops.set_rows_back(f32(1024, 2048), new_tensor("i64", 2048))


def _products() -> Iterator[tuple[str, Tensor]]:
    ids = new_tensor("i32", 8, 512)
    for kind in ("q4_K", "f16", "bf16", "f32"):
        experts = new_tensor(kind, 2048, 768, 8)
        yield f"mul_mat_id_back {kind}", ops.mul_mat_id_back(experts, f32(768, 8, 512), ids)
    for slots in (1, 8):
        yield f"out_prod_id {slots}", ops.out_prod_id(f32(2048, slots, 512), f32(768, 8, 512), ids, 8)


def _steps() -> Iterator[tuple[str, Tensor]]:
    a, m = f32(4096, 16), f32(4096, 16)
    yield "adamw", ops.opt_step_adamw(a, m, f32(4096, 16), f32(5))
    yield "sgd", ops.opt_step_sgd(ops.transpose(f32(16, 4096)), m, f32(2))


def adamw_group() -> Group:
    """A whole step of AdamW, as the fusion finds it."""
    a, m, v, grad = (f32(4096, 16) for _ in range(4))
    written = ops.cpy(ops.opt_step_adamw(a, *adamw_moments(grad, m, v), f32(5)), a)
    (group,) = adamw_step(Nodes(Region(Graph(written).nodes, lambda t: t is written)))
    return group


def glu_group() -> Group:
    """Both gradients of a GLU, as the fusion finds them."""
    gate, value, d = (f32(14336, 512) for _ in range(3))
    rule = op_spec("GLU").backward
    assert not isinstance(rule, str)
    found = set(rule(ops.glu(gate, value, "swiglu"), d, frozenset({"gate", "value"})).values())
    (group,) = glu_back(Nodes(Region(Graph(*found).nodes, lambda t: t in found)))
    return group


def aot_cases(arch: str) -> Iterator[Case]:
    """A name, a kernel, its arguments by name (tensors for pointers) and the options of its launch."""
    for name, node in (*_maps(), *_rows(), *_movement(), *_products(), *_steps()):
        for launch in made(lambda ctx, node=node: lowered(node, ctx), arch):
            yield name, launch.kernel, launch.args, launch.options
    for launch in made(lambda ctx: lower_glu_back(glu_group().captured, ctx), arch):
        yield "glu back", launch.kernel, launch.args, launch.options
    for launch in made(lambda ctx: lower_adamw_step(adamw_group().captured, ctx), arch):
        yield "adamw in place", launch.kernel, launch.args, launch.options
