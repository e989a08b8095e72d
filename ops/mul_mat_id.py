"""MUL_MAT_ID and ADD_ID: products with the matrices, and sums with the rows, of the experts that each token chose."""

from __future__ import annotations

from graphrt.arguments import checked
from graphrt.dtypes import F32
from graphrt.errors import GraphError
from graphrt.op import OpSpec, Result, Sources, Work, build, register, require
from graphrt.tensor import Tensor


def _check_ids(op: str, ids: Tensor, n_slots: int | None, n_tokens: int) -> None:
    """ids: i32 [slots, tokens]."""
    require(ids.dtype.name == "i32", op, "the experts' numbers must be i32", ids)
    require(ids.ne[2] == ids.ne[3] == 1, op, "the experts' numbers must be a matrix [n_expert_used, n_tokens]", ids)
    fits = ids.ne[1] == n_tokens and n_slots in (None, ids.ne[0])
    wanted = f"[{'n_expert_used' if n_slots is None else n_slots}, {n_tokens}]"
    require(fits, op, f"the experts' numbers must have the shape {wanted}", ids)


def _infer_mul_mat_id(src: Sources, params: None) -> Result:
    experts, b, ids = src
    assert experts is not None and b is not None and ids is not None
    op = "MUL_MAT_ID"
    require(experts.dtype.kind != "int", op, "weights must be a float or quantized type", experts)
    require(b.dtype.name == "f32", op, "activations must be f32", b)
    require(experts.ne[0] == b.ne[0], op, "weights and activations must have equal ne[0]", experts, b)
    require(experts.ne[3] == b.ne[3] == 1, op, "weights and activations must have three dimensions", experts, b)
    _check_ids(op, ids, None, b.ne[2])
    rule = "activations must have one row a token, or one for each of its experts"
    require(b.ne[1] in (1, ids.ne[0]), op, rule, b, ids)
    return Result(F32, (experts.ne[1], ids.ne[0], b.ne[2]))


def _infer_add_id(src: Sources, params: None) -> Result:
    a, b, ids = src
    assert a is not None and b is not None and ids is not None
    op = "ADD_ID"
    require(a.dtype.name == b.dtype.name == "f32", op, "both summands must be f32", a, b)
    require(a.ne[3] == 1, op, "the first summand must be [n, n_expert_used, n_tokens]", a)
    require(b.ne[2] == b.ne[3] == 1, op, "the second summand must be a matrix [n, n_expert]", b)
    require(a.ne[0] == b.ne[0], op, "both must have equal ne[0]", a, b)
    _check_ids(op, ids, a.ne[1], a.ne[2])
    return Result(F32, a.ne)


def _used(held: int, ids: Tensor) -> int:
    """How many of `held` experts may be read at most. The exact number depends on what the ids are in a run."""
    return min(held, ids.n_elements)


def _mul_mat_id_work(node: Tensor) -> Work:
    experts, b, ids = node.sources()
    one = experts.ne[1] * experts.dtype.row_size(experts.ne[0])
    moved = node.data_nbytes + b.data_nbytes + ids.data_nbytes + _used(experts.ne[2], ids) * one
    return Work(2 * experts.ne[0] * node.n_elements, moved)


def _add_id_work(node: Tensor) -> Work:
    a, b, ids = node.sources()
    moved = node.data_nbytes + a.data_nbytes + ids.data_nbytes + _used(b.ne[1], ids) * b.dtype.row_size(b.ne[0])
    return Work(node.n_elements, moved)


MUL_MAT_ID = register(
    OpSpec(
        "MUL_MAT_ID", _infer_mul_mat_id, _mul_mat_id_work, n_src=(3, 3)
    )
)  # fmt: skip
ADD_ID = register(OpSpec("ADD_ID", _infer_add_id, _add_id_work, n_src=(3, 3), inplace=(0,)))


@checked(GraphError)
def mul_mat_id(experts: Tensor, b: Tensor, ids: Tensor, name: str = "") -> Tensor:
    """Products with each token's experts: result[m, i, t] = sum over k of experts[k, m, ids[i, t]] * b[k, i, t].

    experts: [k, m, n_expert] any float or quantized type; b: f32 [k, n_b, n_tokens], n_b 1 (then b[k, 0, t] in the
    formula) or n_expert_used; ids: i32 [n_expert_used, n_tokens], of any strides. The result is f32 [m, n_expert_used,
    n_tokens]. An expert may come up several times. !! An id outside 0..n_expert-1 makes its row NaN (ggml aborts).
    Source: ggml_mul_mat_id. Raises GraphError for other types and shapes.
    """
    return build(MUL_MAT_ID, experts, b, ids, name=name)


@checked(GraphError)
def add_id(a: Tensor, b: Tensor, ids: Tensor, name: str = "") -> Tensor:
    """Adds the biases of experts: result[:, i, t] = a[:, i, t] + b[:, ids[i, t]].

    a: f32 [n, n_expert_used, n_tokens]; b: f32 [n, n_expert]; ids: i32 [n_expert_used, n_tokens]; the result has a's
    type and shape. !! An id outside 0..n_expert-1 makes its row NaN (ggml aborts). Source: ggml_add_id. Raises
    GraphError for other types and shapes.
    """
    return build(ADD_ID, a, b, ids, name=name)
