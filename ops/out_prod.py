"""OUT_PROD, MUL_MAT_ID_BACK and OUT_PROD_ID: the products of which the gradients of MUL_MAT and MUL_MAT_ID are made."""

from __future__ import annotations

from dataclasses import dataclass

from graphrt.arguments import checked
from graphrt.dtypes import F32
from graphrt.errors import GraphError
from graphrt.op import OpSpec, Result, Work, build, moved_bytes, register, require
from graphrt.tensor import Tensor


def _infer_out_prod(params: None, a: Tensor, b: Tensor) -> Result:
    op = "OUT_PROD"
    require(a.dtype.kind != "int", op, "the first factor must be a float or quantized type", a)
    require(b.dtype.name == "f32", op, "the second factor must be f32", b)
    require(a.ne[1] == b.ne[1], op, "both must have equal ne[1]", a, b)
    fits = b.ne[2] % a.ne[2] == 0 and b.ne[3] % a.ne[3] == 0
    require(fits, op, "dimensions 2 and 3 of the first factor must divide those of the second", a, b)
    return Result(F32, (a.ne[0], b.ne[0], *b.ne[2:]))


def _out_prod_work(node: Tensor) -> Work:
    return Work(2 * node["a"].ne[1] * node.n_elements, moved_bytes(node))


OUT_PROD = register(OpSpec("OUT_PROD", _infer_out_prod, _out_prod_work, ("a", "b")))


@checked(GraphError)
def out_prod(a: Tensor, b: Tensor, name: str = "") -> Tensor:
    """The sum of outer products of rows: result[i, j] = sum over r of a[i, r] * b[j, r].

    a: [m, n_rows, a2, a3] any float or quantized type; b: f32 [p, n_rows, b2, b3], any strides. The result is f32 [m,
    p, b2, b3]. a2 divides b2 and a3 divides b3: consecutive matrices of b share one of a, as in mul_mat(). Source:
    ggml_out_prod. Raises GraphError for other types and shapes.
    """
    return build(OUT_PROD, a, b, name=name)


def _infer_mul_mat_id_back(params: None, weights: Tensor, d: Tensor, ids: Tensor) -> Result:
    op = "MUL_MAT_ID_BACK"
    require(weights.dtype.kind != "int", op, "weights must be a float or quantized type", weights)
    require(d.dtype.name == "f32", op, "the gradient must be f32", d)
    require(weights.ne[3] == d.ne[3] == 1, op, "weights and gradient must have three dimensions", weights, d)
    require(weights.ne[1] == d.ne[0], op, "the gradient's ne[0] must be the weights' ne[1]", weights, d)
    _check_ids(op, ids, d)
    return Result(F32, (weights.ne[0], *d.ne[1:3]))


def _check_ids(op: str, ids: Tensor, d: Tensor) -> None:
    """ids: i32 [n_expert_used, n_tokens] of a gradient [m, n_expert_used, n_tokens]."""
    fits = ids.dtype.name == "i32" and ids.ne == (d.ne[1], d.ne[2], 1, 1)
    require(fits, op, "the experts' numbers must be i32 [n_expert_used, n_tokens], as the gradient has them", ids, d)


def _mul_mat_id_back_work(node: Tensor) -> Work:
    weights, ids = node["weights"], node["ids"]
    one = weights.ne[1] * weights.dtype.row_size(weights.ne[0])
    read = min(weights.ne[2], ids.n_elements) * one
    return Work(2 * weights.ne[1] * node.n_elements, node.data_nbytes + node["d"].data_nbytes + ids.data_nbytes + read)


MUL_MAT_ID_BACK = register(
    OpSpec(
        "MUL_MAT_ID_BACK", _infer_mul_mat_id_back, _mul_mat_id_back_work, ("weights", "d", "ids")
    )
)  # fmt: skip


@checked(GraphError)
def mul_mat_id_back(weights: Tensor, d: Tensor, ids: Tensor, name: str = "") -> Tensor:
    """The gradient of mul_mat_id()'s activations: result[k, i, t] = the sum of weights[k, m, ids[i, t]] * d[m, i, t].

    weights: [k, m, n_expert] any float or quantized type, read as they lie; d: f32 [m, n_expert_used, n_tokens]; ids:
    i32 [n_expert_used, n_tokens]. The result is f32 [k, n_expert_used, n_tokens]; an id outside makes its row NaN, as
    it did in the forward. Source: the derivative of ggml_mul_mat_id, for which ggml has no op. Raises GraphError for
    other types and shapes.
    """
    return build(MUL_MAT_ID_BACK, weights, d, ids, name=name)


@dataclass(frozen=True)
class OutProdIdParams:
    """n_expert: how many matrices there are."""

    n_expert: int


def _infer_out_prod_id(params: OutProdIdParams, x: Tensor, d: Tensor, ids: Tensor) -> Result:
    op = "OUT_PROD_ID"
    require(x.dtype.name == d.dtype.name == "f32", op, "activations and gradient must be f32", x, d)
    fits = x.ne[1] in (1, d.ne[1]) and x.ne[2] == d.ne[2] and x.ne[3] == d.ne[3] == 1
    require(fits, op, "activations must have one row a token, or one for each of its experts", x, d)
    _check_ids(op, ids, d)
    require(params.n_expert >= 1, op, f"n_expert must be at least 1, got {params.n_expert}")
    return Result(F32, (x.ne[0], d.ne[0], params.n_expert))


def _out_prod_id_work(node: Tensor) -> Work:
    return Work(2 * node["x"].ne[0] * node["d"].n_elements, moved_bytes(node))


OUT_PROD_ID = register(
    OpSpec(
        "OUT_PROD_ID", _infer_out_prod_id, _out_prod_id_work, ("x", "d", "ids"), params=OutProdIdParams
    )
)  # fmt: skip


@checked(GraphError)
def out_prod_id(x: Tensor, d: Tensor, ids: Tensor, n_expert: int, name: str = "") -> Tensor:
    """The gradient of mul_mat_id()'s weights: result[k, m, e] = the sum of x[k, i, t] * d[m, i, t] with ids[i, t] = e.

    x: f32 [k, n_x, n_tokens], n_x 1 (then x[k, 0, t] in the formula) or n_expert_used; d: f32 [m, n_expert_used,
    n_tokens]; ids: i32 [n_expert_used, n_tokens]; n_expert: how many matrices there are. The result is f32 [k, m,
    n_expert], 0 for an expert that nobody chose; an id outside adds nothing. Source: the derivative of
    ggml_mul_mat_id, for which ggml has no op. Raises GraphError for other types and shapes.
    """
    return build(OUT_PROD_ID, x, d, ids, params=OutProdIdParams(int(n_expert)), name=name)
