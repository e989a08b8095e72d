"""MUL_MAT: weights of any type times f32 activations."""

from __future__ import annotations

from graphrt.arguments import checked
from graphrt.dtypes import F32
from graphrt.errors import GraphError
from graphrt.op import OpSpec, Result, Work, build, moved_bytes, register, require
from graphrt.tensor import Tensor


def _infer(params: None, weights: Tensor, x: Tensor) -> Result:
    require(weights.dtype.kind != "int", "MUL_MAT", "weights must be a float or quantized type", weights)
    require(x.dtype.name in ("f32", "f16"), "MUL_MAT", "activations must be f32 or f16", x)
    require(weights.ne[0] == x.ne[0], "MUL_MAT", "both must have equal ne[0]", weights, x)
    fits = x.ne[2] % weights.ne[2] == 0 and x.ne[3] % weights.ne[3] == 0
    require(fits, "MUL_MAT", "dimensions 2 and 3 of the weights must divide those of the activations", weights, x)
    return Result(F32, (weights.ne[1], *x.ne[1:]))


def _work(node: Tensor) -> Work:
    return Work(2 * node["weights"].ne[0] * node.n_elements, moved_bytes(node))


MUL_MAT = register(OpSpec("MUL_MAT", _infer, _work, ("weights", "x")))


@checked(GraphError)
def mul_mat(weights: Tensor, x: Tensor, name: str = "") -> Tensor:
    """Matrix product with weights (not transposed): result[i, j] = sum over k of weights[k, i] * x[k, j].

    weights: [k, m, w2, w3] any float or quantized type; x: [k, n, x2, x3] f32 or f16. The result is f32 [m, n, x2, x3].
    w2 divides x2 and w3 divides x3: consecutive matrices of x share one of the weights. Source: ggml_mul_mat; quantized
    types mean what gguf's dequantization makes of them. Raises GraphError for other types and shapes.
    """
    return build(MUL_MAT, weights, x, name=name)
