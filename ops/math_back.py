"""SILU_BACK, UNARY_BACK, RMS_NORM_BACK, ROPE_BACK and SOFT_MAX_BACK: gradients of what computes rows.

In all of them d is the gradient of the result, f32, and the op yields that of the source, f32.
"""

from __future__ import annotations

import math

from graphrt.arguments import checked
from graphrt.dtypes import F32
from graphrt.errors import GraphError
from graphrt.op import OpSpec, Result, build, elementwise_work, register, require
from graphrt.ops.norm import NormParams
from graphrt.ops.rope import RopeParams, check_rope
from graphrt.ops.soft_max import SoftMaxParams
from graphrt.ops.unary import UnaryParams
from graphrt.tensor import Tensor


def _same_shape(op: str, d: Tensor, a: Tensor, kinds: tuple[str, ...] = ("f32",)) -> Result:
    require(d.dtype.name == "f32", op, "the gradient must be f32", d)
    require(a.dtype.name in kinds, op, f"the source must be {' or '.join(kinds)}", a)
    require(d.ne == a.ne, op, "gradient and source must have one shape", d, a)
    return Result(F32, d.ne)


_FLOATS = ("f32", "f16", "bf16", "f64")


def _infer_silu_back(params: None, d: Tensor, a: Tensor) -> Result:
    return _same_shape("SILU_BACK", d, a, _FLOATS)


def _infer_unary_back(params: UnaryParams, d: Tensor, a: Tensor) -> Result:
    require(params.kind != "silu", "UNARY_BACK", "the gradient of silu is SILU_BACK, got 'silu'; use ops.silu_back")
    return _same_shape("UNARY_BACK", d, a, _FLOATS)


SILU_BACK = register(OpSpec("SILU_BACK", _infer_silu_back, elementwise_work(10), ("d", "a"), inplace=("d",)))
UNARY_BACK = register(
    OpSpec(
        "UNARY_BACK", _infer_unary_back, elementwise_work(12), ("d", "a"), params=UnaryParams, inplace=("d",)
    )
)  # fmt: skip


@checked(GraphError)
def silu_back(d: Tensor, a: Tensor, name: str = "") -> Tensor:
    """The gradient of silu: result = d * s * (1 + a * (1 - s)) with s = 1 / (1 + e^-a).

    d: f32; a: what silu was taken of, any plain float type (f32, f16, bf16, f64), of d's shape; the result is f32 of
    that shape. Source: ggml_silu_back. Raises GraphError for other types and shapes.
    """
    return build(SILU_BACK, d, a, name=name)


@checked(GraphError)
def unary_back(d: Tensor, a: Tensor, kind: str, name: str = "") -> Tensor:
    """The gradient of unary(): result = d * f'(a), f by `kind`, one of its kinds but silu, which has silu_back().

    d: f32; a: what f was taken of, any plain float type (f32, f16, bf16, f64), of d's shape; the result is f32 of that
    shape. relu has the derivative 0 at 0. Source: the derivatives of the functions that unary() names; ggml has no such
    op. Raises GraphError for other types, shapes and kinds.
    """
    return build(UNARY_BACK, d, a, params=UnaryParams(kind), name=name)


def _infer_rms_norm_back(params: NormParams, d: Tensor, a: Tensor) -> Result:
    require(params.eps >= 0, "RMS_NORM_BACK", f"eps must not be negative, got {params.eps}")
    return _same_shape("RMS_NORM_BACK", d, a)


RMS_NORM_BACK = register(
    OpSpec(
        "RMS_NORM_BACK", _infer_rms_norm_back, elementwise_work(8), ("d", "a"), params=NormParams, inplace=("d",)
    )
)  # fmt: skip


@checked(GraphError)
def rms_norm_back(d: Tensor, a: Tensor, eps: float, name: str = "") -> Tensor:
    """The gradient of rms_norm(): result = r * (d - a * r^2 * mean(d * a)) with r = 1 / sqrt(mean(a^2) + eps).

    d, a: f32 [n, ...] of one shape, which the result has; eps: the norm's. Source: ggml_rms_norm_back. Raises
    GraphError for other types and shapes and a negative eps.
    """
    return build(RMS_NORM_BACK, d, a, params=NormParams(float(eps)), name=name)


def _infer_rope_back(params: RopeParams, d: Tensor, positions: Tensor, factors: Tensor | None) -> Result:
    require(d.dtype.name == "f32", "ROPE_BACK", "the gradient must be f32", d)
    check_rope("ROPE_BACK", params, d, positions, factors)
    return Result(F32, d.ne)


ROPE_BACK = register(
    OpSpec(
        "ROPE_BACK", _infer_rope_back, elementwise_work(6), ("d", "positions", "factors?"), params=RopeParams,
        inplace=("d",),
    )
)  # fmt: skip


@checked(GraphError)
def rope_back(
    d: Tensor, positions: Tensor, params: RopeParams, factors: Tensor | None = None, name: str = ""
) -> Tensor:
    """The gradient of rope(): every pair turned back, with (x, y) a pair of d and t and the factor as there: result =
    factor * (x cos t + y sin t, y cos t - x sin t).

    d: f32 [head_dim, n_head, n_tokens, n_seq], whose type and shape the result has; positions: i32 [n_tokens]; params:
    rope()'s; factors: f32 [n_dims/2] or more, or None for ones. Source: ggml_rope_ext_back. Raises GraphError for what
    rope() refuses, and for gradients that are not f32.
    """
    return build(ROPE_BACK, d, positions, factors, params=params, name=name)


def _infer_soft_max_back(params: SoftMaxParams, d: Tensor, weights: Tensor) -> Result:
    op = "SOFT_MAX_BACK"
    require(math.isfinite(params.scale), op, f"the scale must be finite, got {params.scale}")
    require(params.max_bias == 0, op, f"max_bias is of the forward alone and must be 0, got {params.max_bias}")
    return _same_shape(op, d, weights)


SOFT_MAX_BACK = register(
    OpSpec(
        "SOFT_MAX_BACK", _infer_soft_max_back, elementwise_work(5), ("d", "weights"), params=SoftMaxParams,
        inplace=("d",),
    )
)  # fmt: skip


@checked(GraphError)
def soft_max_back(d: Tensor, weights: Tensor, scale: float = 1.0, name: str = "") -> Tensor:
    """The gradient of the logits of soft_max(): result = scale * weights * (d - sum(d * weights)), sums over ne[0].

    d, weights: f32 of one shape, which the result has; weights: what soft_max() gave, whatever its mask, ALiBi and
    sinks were; scale: its scale. Source: ggml_soft_max_ext_back. Raises GraphError for other types and shapes and a
    scale that is not finite.
    """
    return build(SOFT_MAX_BACK, d, weights, params=SoftMaxParams(float(scale)), name=name)
