"""CROSS_ENTROPY_LOSS of rows of logits, and CROSS_ENTROPY_LOSS_BACK."""

from __future__ import annotations

from graphrt.arguments import checked
from graphrt.dtypes import F32
from graphrt.errors import GraphError
from graphrt.op import OpSpec, Result, build, elementwise_work, reduction_work, register, require
from graphrt.tensor import Tensor


def _check(op: str, logits: Tensor, labels: Tensor) -> None:
    require(logits.dtype.name == labels.dtype.name == "f32", op, "logits and labels must be f32", logits, labels)
    require(logits.ne == labels.ne, op, "logits and labels must have one shape", logits, labels)


def _infer_loss(params: None, logits: Tensor, labels: Tensor) -> Result:
    _check("CROSS_ENTROPY_LOSS", logits, labels)
    return Result(F32, (1,))


def _infer_back(params: None, d: Tensor, logits: Tensor, labels: Tensor) -> Result:
    op = "CROSS_ENTROPY_LOSS_BACK"
    require(d.dtype.name == "f32" and d.n_elements == 1, op, "the gradient must be one f32 number", d)
    _check(op, logits, labels)
    return Result(F32, logits.ne)


CROSS_ENTROPY_LOSS = register(OpSpec("CROSS_ENTROPY_LOSS", _infer_loss, reduction_work(6), ("logits", "labels")))
CROSS_ENTROPY_LOSS_BACK = register(
    OpSpec(
        "CROSS_ENTROPY_LOSS_BACK", _infer_back, elementwise_work(6), ("d", "logits", "labels"), inplace=("logits",)
    )
)  # fmt: skip


@checked(GraphError)
def cross_entropy_loss(logits: Tensor, labels: Tensor, name: str = "") -> Tensor:
    """The mean over rows of the cross entropy: result = -sum(labels * ln softmax(logits)) / number of rows.

    logits, labels: f32 [n, n1, n2, n3]; labels: what each of the n should have, sums of 1 for probabilities, 0 in a row
    that does not count. The result is f32 [1]. Source: ggml_cross_entropy_loss. Raises GraphError for other types and
    shapes.
    """
    return build(CROSS_ENTROPY_LOSS, logits, labels, name=name)


@checked(GraphError)
def cross_entropy_loss_back(d: Tensor, logits: Tensor, labels: Tensor, name: str = "") -> Tensor:
    """The gradient of cross_entropy_loss()'s logits: result = d * (softmax(logits) * sum(labels) - labels) / rows.

    d: f32 [1]; logits, labels: f32 of one shape, which the result has; sum(labels) is a row's, rows their number.
    Source: ggml_cross_entropy_loss_back, which takes the sum for 1. Raises GraphError for other types and shapes.
    """
    return build(CROSS_ENTROPY_LOSS_BACK, d, logits, labels, name=name)
