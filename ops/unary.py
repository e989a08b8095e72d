"""UNARY: one function of each element. GLU: an activation of one tensor (the gate) times another one."""

from __future__ import annotations

from dataclasses import dataclass

from graphrt.arguments import checked
from graphrt.errors import GraphError
from graphrt.op import OpSpec, Result, build, elementwise_work, register, require
from graphrt.tensor import Tensor

#: silu = x sigmoid(x); gelu: the tanh form; gelu_erf: exact; gelu_quick = x sigmoid(1.702 x); softplus = ln(1 + e^x).
UNARY_KINDS = ("silu", "gelu", "gelu_erf", "gelu_quick", "relu", "tanh", "sigmoid", "exp", "softplus")
#: Activation of the gate: reglu relu, geglu gelu (tanh form), swiglu silu, swiglu_oai as gpt-oss has it.
GLU_KINDS = ("reglu", "geglu", "swiglu", "swiglu_oai")


def _one_of(what: str, kind: str, kinds: tuple[str, ...]) -> None:
    if kind not in kinds:
        raise GraphError(f"{what} must be one of {', '.join(kinds)}, got {kind!r}")


@dataclass(frozen=True)
class UnaryParams:
    """kind: one of UNARY_KINDS."""

    kind: str

    def __post_init__(self) -> None:
        _one_of("a unary function", self.kind, UNARY_KINDS)


@dataclass(frozen=True)
class GluParams:
    """kind: one of GLU_KINDS. alpha, limit: numbers of swiglu_oai's formula, see glu().

    swapped: where gate and value are halves of a single source, the gate is the second half.
    """

    kind: str
    alpha: float = 1.702
    limit: float = 7.0
    swapped: bool = False

    def __post_init__(self) -> None:
        _one_of("a gated activation", self.kind, GLU_KINDS)


def _infer_unary(params: UnaryParams, a: Tensor) -> Result:
    require(a.dtype.kind == "float", "UNARY", "the source must be a plain float type", a)
    return Result(a.dtype, a.ne)


def _infer_glu(params: GluParams, gate: Tensor, value: Tensor | None) -> Result:
    require(gate.dtype.kind == "float", "GLU", "sources must be plain float types", gate, value)
    if value is None:
        require(gate.ne[0] % 2 == 0, "GLU", "without a second source ne[0] must be even: gate and value halves", gate)
        return Result(gate.dtype, (gate.ne[0] // 2, *gate.ne[1:]))
    fits = gate.ne == value.ne and gate.dtype == value.dtype
    require(fits, "GLU", "gate and value must have one type and shape", gate, value)
    return Result(gate.dtype, gate.ne)


UNARY = register(OpSpec("UNARY", _infer_unary, elementwise_work(8), params=UnaryParams, inplace=("a",)))
GLU = register(
    OpSpec(
        "GLU", _infer_glu, elementwise_work(10), ("gate", "value?"), params=GluParams, inplace=("gate", "value")
    )
)  # fmt: skip


@checked(GraphError)
def unary(a: Tensor, kind: str, name: str = "") -> Tensor:
    """One function of each element: result = f(a).

    f by `kind`: silu a * sigmoid(a); gelu a / 2 * (1 + tanh(sqrt(2 / pi) * (a + 0.044715 a^3))); gelu_erf a / 2 * (1 +
    erf(a / sqrt(2))); gelu_quick a * sigmoid(1.702 a); relu max(a, 0); tanh; sigmoid 1 / (1 + e^-a); exp e^a; softplus
    ln(1 + e^a). a: any plain float type (f32, f16, bf16, f64) and shape, which the result has too. Source: ggml_unary;
    GELU and its two approximations from arXiv 1606.08415. Raises GraphError for other types and kinds.
    """
    return build(UNARY, a, params=UnaryParams(kind), name=name)


@checked(GraphError)
def glu(
    gate: Tensor, value: Tensor | None, kind: str, *, alpha: float = 1.702, limit: float = 7.0, swapped: bool = False,
    name: str = "",
) -> Tensor:  # fmt: skip
    """A gated linear unit: result = f(gate) * value.

    f by `kind`: reglu relu, geglu gelu (tanh form), swiglu silu; swiglu_oai, gpt-oss's: with x = min(gate, limit) and y
    = clamp(value, -limit, limit) result = x * sigmoid(alpha * x) * (y + 1). gate, value: one plain float type (f32,
    f16, bf16, f64) and shape [n, ...], which the result has too; or value None and gate [2n, ...], whose first half is
    the gate, or with `swapped` the second. alpha, limit: numbers, of swiglu_oai alone. Source: GLU Variants Improve
    Transformer (arXiv 2002.05202), as ggml_glu_split has it. Raises GraphError for other types, shapes and kinds.
    """
    return build(GLU, gate, value, params=GluParams(kind, alpha, limit, swapped), name=name)
