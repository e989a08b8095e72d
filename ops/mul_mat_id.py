"""MUL_MAT_ID and ADD_ID: products with the matrices, and sums with the rows, of the experts that each token chose."""

from __future__ import annotations

from graphrt.arguments import checked
from graphrt.dtypes import F32
from graphrt.errors import GraphError
from graphrt.op import OpSpec, Result, Work, build, register, require
from graphrt.tensor import Tensor


def _check_ids(op: str, ids: Tensor, n_slots: int | None, n_tokens: int) -> None:
    """ids: i32 [slots, tokens]."""
    require(ids.dtype.name == "i32", op, "the experts' numbers must be i32", ids)
    require(ids.ne[2] == ids.ne[3] == 1, op, "the experts' numbers must be a matrix [n_expert_used, n_tokens]", ids)
    fits = ids.ne[1] == n_tokens and n_slots in (None, ids.ne[0])
    wanted = f"[{'n_expert_used' if n_slots is None else n_slots}, {n_tokens}]"
    require(fits, op, f"the experts' numbers must have the shape {wanted}", ids)


def _infer_mul_mat_id(params: None, weights: Tensor, x: Tensor, ids: Tensor) -> Result:
    op = "MUL_MAT_ID"
    require(weights.dtype.kind != "int", op, "weights must be a float or quantized type", weights)
    require(x.dtype.name == "f32", op, "activations must be f32", x)
    require(weights.ne[0] == x.ne[0], op, "weights and activations must have equal ne[0]", weights, x)
    require(weights.ne[3] == x.ne[3] == 1, op, "weights and activations must have three dimensions", weights, x)
    _check_ids(op, ids, None, x.ne[2])
    rule = "activations must have one row a token, or one for each of its experts"
    require(x.ne[1] in (1, ids.ne[0]), op, rule, x, ids)
    return Result(F32, (weights.ne[1], ids.ne[0], x.ne[2]))


def _infer_add_id(params: None, a: Tensor, bias: Tensor, ids: Tensor) -> Result:
    op = "ADD_ID"
    require(a.dtype.name == bias.dtype.name == "f32", op, "both summands must be f32", a, bias)
    require(a.ne[3] == 1, op, "the first summand must be [n, n_expert_used, n_tokens]", a)
    require(bias.ne[2] == bias.ne[3] == 1, op, "the second summand must be a matrix [n, n_expert]", bias)
    require(a.ne[0] == bias.ne[0], op, "both must have equal ne[0]", a, bias)
    _check_ids(op, ids, a.ne[1], a.ne[2])
    return Result(F32, a.ne)


def _used(held: int, ids: Tensor) -> int:
    """How many of `held` experts may be read at most. The exact number depends on what the ids are in a run."""
    return min(held, ids.n_elements)


def _mul_mat_id_work(node: Tensor) -> Work:
    weights, ids = node["weights"], node["ids"]
    one = weights.ne[1] * weights.dtype.row_size(weights.ne[0])
    moved = node.data_nbytes + node["x"].data_nbytes + ids.data_nbytes + _used(weights.ne[2], ids) * one
    return Work(2 * weights.ne[0] * node.n_elements, moved)


def _add_id_work(node: Tensor) -> Work:
    bias, ids = node["bias"], node["ids"]
    rows = _used(bias.ne[1], ids) * bias.dtype.row_size(bias.ne[0])
    return Work(node.n_elements, node.data_nbytes + node["a"].data_nbytes + ids.data_nbytes + rows)


MUL_MAT_ID = register(
    OpSpec(
        "MUL_MAT_ID", _infer_mul_mat_id, _mul_mat_id_work, ("weights", "x", "ids")
    )
)  # fmt: skip
ADD_ID = register(OpSpec("ADD_ID", _infer_add_id, _add_id_work, ("a", "bias", "ids"), inplace=("a",)))


@checked(GraphError)
def mul_mat_id(weights: Tensor, x: Tensor, ids: Tensor, name: str = "") -> Tensor:
    """Products with each token's experts: result[m, i, t] = sum over k of weights[k, m, ids[i, t]] * x[k, i, t].

    weights: [k, m, n_expert] any float or quantized type; x: f32 [k, n_x, n_tokens], n_x 1 (then x[k, 0, t] in the
    formula) or n_expert_used; ids: i32 [n_expert_used, n_tokens], of any strides. The result is f32 [m, n_expert_used,
    n_tokens]. An expert may come up several times. !! An id outside 0..n_expert-1 makes its row NaN (ggml aborts).
    Source: ggml_mul_mat_id. Raises GraphError for other types and shapes.
    """
    return build(MUL_MAT_ID, weights, x, ids, name=name)


@checked(GraphError)
def add_id(a: Tensor, bias: Tensor, ids: Tensor, name: str = "") -> Tensor:
    """Adds the biases of experts: result[:, i, t] = a[:, i, t] + bias[:, ids[i, t]].

    a: f32 [n, n_expert_used, n_tokens]; bias: f32 [n, n_expert]; ids: i32 [n_expert_used, n_tokens]; the result has a's
    type and shape. !! An id outside 0..n_expert-1 makes its row NaN (ggml aborts). Source: ggml_add_id. Raises
    GraphError for other types and shapes.
    """
    return build(ADD_ID, a, bias, ids, name=name)
