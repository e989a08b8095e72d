"""OPT_STEP_ADAMW and OPT_STEP_SGD: the weights that an optimizer's step makes of weights.

Their numbers lie in a tensor, so that a prepared graph can be run with another learning rate each time. ops.cpy(step,
weights) writes a step's result where the next run reads it. Other nodes still compute gradients from the weights that
it overwrites: put all gradients into the Graph before the first such copy.
"""

from __future__ import annotations

from graphrt.arguments import checked
from graphrt.errors import GraphError
from graphrt.op import OpSpec, Result, build, elementwise_work, register, require
from graphrt.ops.copy import cpy
from graphrt.ops.elementwise import add, scale, sqr
from graphrt.tensor import Tensor


def _check(op: str, n_numbers: int, a: Tensor, hyper: Tensor, *like: Tensor) -> Result:
    require(a.dtype.name == "f32", op, "weights must be f32", a)
    fits = all(t.dtype.name == "f32" and t.ne == a.ne for t in like)
    require(fits, op, "what belongs to the weights must be f32 and have their shape", a, *like)
    fits = hyper.dtype.name == "f32" and hyper.ne == (n_numbers, 1, 1, 1)
    require(fits, op, f"its numbers must be f32 [{n_numbers}]", hyper)
    return Result(a.dtype, a.ne)


def _infer_sgd(params: None, a: Tensor, grad: Tensor, hyper: Tensor) -> Result:
    return _check("OPT_STEP_SGD", 2, a, hyper, grad)


def _infer_adamw(params: None, a: Tensor, m: Tensor, v: Tensor, hyper: Tensor) -> Result:
    return _check("OPT_STEP_ADAMW", 5, a, hyper, m, v)


OPT_STEP_SGD = register(
    OpSpec(
        "OPT_STEP_SGD", _infer_sgd, elementwise_work(4), ("a", "grad", "hyper")
    )
)  # fmt: skip
OPT_STEP_ADAMW = register(
    OpSpec(
        "OPT_STEP_ADAMW", _infer_adamw, elementwise_work(8), ("a", "m", "v", "hyper")
    )
)  # fmt: skip


@checked(GraphError)
def opt_step_sgd(a: Tensor, grad: Tensor, hyper: Tensor, name: str = "") -> Tensor:
    """A step of gradient descent with weight decay: result = a * (1 - alpha * wd) - alpha * grad.

    a: f32, whose type and shape the result has; grad: f32 of that shape; hyper: f32 [2], alpha (the learning
    rate) and wd. Source: ggml_opt_step_sgd, which writes into a. Raises GraphError for other types and shapes.
    """
    return build(OPT_STEP_SGD, a, grad, hyper, name=name)


@checked(GraphError)
def opt_step_adamw(a: Tensor, m: Tensor, v: Tensor, hyper: Tensor, name: str = "") -> Tensor:
    """A step of AdamW: result = a * (1 - alpha * wd) - alpha * (m * m_h) / (sqrt(v * v_h) + eps).

    a: f32, whose type and shape the result has; m, v: f32 of that shape, the running means of the gradient
    and of its square with this step's in them (adamw_moments() adds it); hyper: f32 [5], alpha (the learning rate),
    eps, wd, m_h = 1 / (1 - beta1^t) and v_h = 1 / (1 - beta2^t) at step t. Source: Decoupled Weight Decay
    Regularization (arXiv 1711.05101), as ggml_opt_step_adamw has it, which writes into a, m and v. Raises
    GraphError for other types and shapes.
    """
    return build(OPT_STEP_ADAMW, a, m, v, hyper, name=name)


@checked(GraphError)
def adamw_moments(
    grad: Tensor, m: Tensor, v: Tensor, beta1: float = 0.9, beta2: float = 0.999
) -> tuple[Tensor, Tensor]:
    """AdamW's running means with a gradient added, in place: result = (beta1 * m + (1 - beta1) * grad, beta2 * v + (1 -
    beta2) * grad^2), views of m and v.

    grad, m, v: f32 of one shape; beta1, beta2: from 0 up to 1. Source: Adam (arXiv 1412.6980), algorithm 1. Raises
    GraphError for other types, shapes and numbers.
    """
    low = min(beta1, beta2)
    require(
        low >= 0 and max(beta1, beta2) < 1, "ADAMW", f"beta1 and beta2 must be from 0 up to 1, got {beta1}, {beta2}"
    )
    first = add(scale(m, beta1), scale(grad, 1 - beta1))
    second = add(scale(v, beta2), scale(sqr(grad), 1 - beta2))
    return cpy(first, m), cpy(second, v)
