"""OPT_STEP_ADAMW and OPT_STEP_SGD: an optimizer's step, written into the weights.

Their numbers lie in a tensor, so that a prepared graph can be run with another learning rate each time. A step reads
gradients that other nodes still compute from the weights that it writes: put the gradients into the Graph before the
steps.
"""

from __future__ import annotations

from graphrt.arguments import checked
from graphrt.errors import GraphError
from graphrt.op import OpSpec, Result, build, elementwise_work, register, require
from graphrt.ops.copy import cpy
from graphrt.ops.elementwise import add, scale, sqr
from graphrt.tensor import Tensor


def _check(op: str, n_numbers: int, target: Tensor, hyper: Tensor, *like: Tensor) -> Result:
    known = target.dtype.name == "f32" and target.is_contiguous
    require(known, op, "weights must be f32 and contiguous", target)
    fits = all(t.dtype.name == "f32" and t.ne == target.ne for t in like)
    require(fits, op, "what belongs to the weights must be f32 and have their shape", target, *like)
    fits = hyper.dtype.name == "f32" and hyper.ne == (n_numbers, 1, 1, 1) and hyper.is_contiguous
    require(fits, op, f"its numbers must be f32 [{n_numbers}]", hyper)
    return Result(target.dtype, target.ne)


def _infer_sgd(params: None, target: Tensor, grad: Tensor, hyper: Tensor) -> Result:
    return _check("OPT_STEP_SGD", 2, target, hyper, grad)


def _infer_adamw(params: None, target: Tensor, m: Tensor, v: Tensor, hyper: Tensor) -> Result:
    return _check("OPT_STEP_ADAMW", 5, target, hyper, m, v)


OPT_STEP_SGD = register(
    OpSpec(
        "OPT_STEP_SGD", _infer_sgd, elementwise_work(4), ("target", "grad", "hyper"), writes="target"
    )
)  # fmt: skip
OPT_STEP_ADAMW = register(
    OpSpec(
        "OPT_STEP_ADAMW", _infer_adamw, elementwise_work(8), ("target", "m", "v", "hyper"), writes="target"
    )
)  # fmt: skip


@checked(GraphError)
def opt_step_sgd(target: Tensor, grad: Tensor, hyper: Tensor, name: str = "") -> Tensor:
    """A step of gradient descent with weight decay, in place: result = target * (1 - alpha * wd) - alpha * grad.

    target: f32, contiguous, which the result is a view of; grad: f32 of its shape; hyper: f32 [2], alpha (the learning
    rate) and wd. Source: ggml_opt_step_sgd. Raises GraphError for other types and shapes.
    """
    return build(OPT_STEP_SGD, target, grad, hyper, name=name)


@checked(GraphError)
def opt_step_adamw(target: Tensor, m: Tensor, v: Tensor, hyper: Tensor, name: str = "") -> Tensor:
    """A step of AdamW, in place: result = target * (1 - alpha * wd) - alpha * (m * m_h) / (sqrt(v * v_h) + eps).

    target: f32, contiguous, which the result is a view of; m, v: f32 of its shape, the running means of the gradient
    and of its square with this step's in them (adamw_moments() adds it); hyper: f32 [5], alpha (the learning rate),
    eps, wd, m_h = 1 / (1 - beta1^t) and v_h = 1 / (1 - beta2^t) at step t. Source: Decoupled Weight Decay
    Regularization (arXiv 1711.05101), as ggml_opt_step_adamw has it, which updates m and v in the same op. Raises
    GraphError for other types and shapes.
    """
    return build(OPT_STEP_ADAMW, target, m, v, hyper, name=name)


@checked(GraphError)
def adamw_moments(
    grad: Tensor, m: Tensor, v: Tensor, beta1: float = 0.9, beta2: float = 0.999
) -> tuple[Tensor, Tensor]:
    """AdamW's running means with a gradient added, in place: beta1 * m + (1 - beta1) * grad and beta2 * v + (1 - beta2)
    * grad^2, views of m and v.

    grad, m, v: f32 of one shape; beta1, beta2: from 0 up to 1. Raises GraphError for other types, shapes and numbers.
    """
    low = min(beta1, beta2)
    require(
        low >= 0 and max(beta1, beta2) < 1, "ADAMW", f"beta1 and beta2 must be from 0 up to 1, got {beta1}, {beta2}"
    )
    first = add(scale(m, beta1), scale(grad, 1 - beta1))
    second = add(scale(v, beta2), scale(sqr(grad), 1 - beta2))
    return cpy(first, m), cpy(second, v)
