"""MUL_MAT: weights of any type times f32 activations."""

from __future__ import annotations

from graphrt.arguments import checked
from graphrt.dtypes import F32
from graphrt.errors import GraphError
from graphrt.op import OpSpec, Result, Sources, Work, build, moved_bytes, register, require
from graphrt.tensor import Tensor


def _infer(src: Sources, params: None) -> Result:
    a, b = src
    assert a is not None and b is not None
    require(a.dtype.kind != "int", "MUL_MAT", "weights must be a float or quantized type", a)
    require(b.dtype.name in ("f32", "f16"), "MUL_MAT", "activations must be f32 or f16", b)
    require(a.ne[0] == b.ne[0], "MUL_MAT", "both must have equal ne[0]", a, b)
    fits = b.ne[2] % a.ne[2] == 0 and b.ne[3] % a.ne[3] == 0
    require(fits, "MUL_MAT", "dimensions 2 and 3 of the weights must divide those of the activations", a, b)
    return Result(F32, (a.ne[1], *b.ne[1:]))


def _work(node: Tensor) -> Work:
    a = node.src[0]
    assert a is not None
    return Work(2 * a.ne[0] * node.n_elements, moved_bytes(node))


MUL_MAT = register(OpSpec("MUL_MAT", _infer, _work, n_src=(2, 2)))


@checked(GraphError)
def mul_mat(a: Tensor, b: Tensor, name: str = "") -> Tensor:
    """Matrix product with a (not transposed): result[i, j] = sum over k of a[k, i] * b[k, j].

    a: [k, m, a2, a3] any float or quantized type; b: [k, n, b2, b3] f32 or f16. The result is f32 [m, n, b2, b3]. a2
    divides b2 and a3 divides b3: consecutive matrices of b share one of a. Source: ggml_mul_mat; quantized types mean
    what gguf's dequantization makes of them. Raises GraphError for other types and shapes.
    """
    return build(MUL_MAT, a, b, name=name)
