"""Tensors that a file tells of, built anew by the ops' own rules: what it says of a result is never taken over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from graphrt import ops  # noqa: F401  (registers every op)
from graphrt.errors import GraphError
from graphrt.op import build, op_spec
from graphrt.ops.score_tree import MAX_NUMBERS
from graphrt.tensor import MAX_DIMS, Dims, Flag, Tensor
from graphrt.tools.inspect.checked_json import MAX_WHOLE, Checked

#: Characters of a text among an op's parameters, and of other short texts.
MAX_LABEL = 1024


def rebuilt(
    path: str,
    op: str,
    dtype: str,
    ne: Dims,
    name: str,
    params: Mapping[str, Any] | None,
    src: Sequence[Tensor | None],
    flags: Flag,
) -> Tensor:
    """The leaf of that type and shape (op "NONE"), else the node that the op makes of sources and parameters.

    path: of the tensor in its file. Type and shape of a node are the op's, so hold them against what the file says.
    Raises GraphError for sources or parameters that the op does not take.
    """
    try:
        if op == "NONE":
            if src:
                raise GraphError(f"a leaf has no sources, got {len(src)}")
            tensor = Tensor(dtype, ne, name=name)
        else:
            spec = op_spec(op)
            given = spec.params(**params) if spec.params is not None and params is not None else None
            tensor = build(spec, *src, params=given, name=name)
    except (GraphError, ArithmeticError, AssertionError, TypeError, ValueError) as error:
        raise GraphError(f"{path} must be a tensor that {op} can give: {str(error)[:500]}; mend it") from error
    tensor.flags |= flags
    return tensor


def dims(at: Checked, low: int) -> Dims:
    """Four whole numbers. low: 1 for a shape, whose product is bounded too, 0 for strides."""
    a, b, c, d = at.wholes(MAX_DIMS, low)
    if low and a * b * c * d > MAX_WHOLE:
        at.refuse(f"the shape of at most {MAX_WHOLE} elements")
    return (a, b, c, d)


@cache
def _param_types(op: str) -> dict[str, Any] | None:
    """The types of an op's parameters by name; None for an op without."""
    cls = op_spec(op).params if op != "NONE" else None
    return get_type_hints(cls) if cls is not None else None


def params_of(at: Checked, op: str) -> dict[str, Any] | None:
    """An op's parameters by name, each of its own type. Raises GraphError for others, more or fewer."""
    types = _param_types(op)
    if types is None:
        if at.value is not None:
            at.refuse(f"null, since {op} has no parameters")
        return None
    return {name: _param(field, types[name]) for name, field in at.fields(*types).items()}


def _param(at: Checked, kind: Any) -> Any:
    """A parameter of that type: a number, text, bool, a tuple of whole numbers, or one of numbers of any length."""
    if kind is bool:
        return at.true_or_false()
    if kind is int:
        return at.whole(-MAX_WHOLE)
    if kind is float:
        return at.number()
    if kind is str:
        return at.text(MAX_LABEL)
    if kind == tuple[int, ...]:
        return at.wholes(len(at.value) if isinstance(at.value, list) else 0, -MAX_WHOLE)
    if get_origin(kind) is tuple and set(get_args(kind)) == {int}:
        return at.wholes(len(get_args(kind)), -MAX_WHOLE)
    if get_origin(kind) is tuple and get_args(kind) == (float, Ellipsis):
        return tuple(number.number() for number in at.items(MAX_NUMBERS))
    raise GraphError(
        f"{at.path}: JSON holds parameters that are int, float, bool, str or tuples of numbers, got {kind}"
    )
