"""Native steps for what works value by value: arithmetic, activations, copies; and SCALE, tanh, SCALE in one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from graphrt.backends.cpu import fast
from graphrt.backends.cpu.lowering import Lowering
from graphrt.backends.cpu.products import ACTIVATIONS
from graphrt.fusion import Fusion, Nodes, Softcap, softcaps
from graphrt.program import Group
from graphrt.tensor import Tensor

Shape = tuple[int, int, int, int]


def softcap(nodes: Nodes) -> Iterator[Group]:
    """SCALE by 1/c, tanh, SCALE by c."""
    for found in softcaps(nodes):
        if abs(found.inner.params.scale * found.out.params.scale - 1.0) < 1e-6:
            yield Group(list(found), kernel="softcap", captured=found)


class Lies(NamedTuple):
    """How values of 4 bytes lie that are worked on one by one. ne: how many along each dimension; nb: bytes between
    rows, along dimensions 1 to 3."""

    at: int
    ne: Shape
    nb: tuple[int, int, int]

    def flat(self) -> Lies | None:
        """The same values as one row, None where they have gaps or another order."""
        n, expected = 4, []
        for count in self.ne:
            n *= count
            expected.append(n)
        dense = all(a == b or count == 1 for a, b, count in zip(self.nb, expected, self.ne[1:]))
        return Lies(self.at, (n // 4, 1, 1, 1), (0, 0, 0)) if dense else None


def _lies(low: Lowering, t: Tensor | None, like: Tensor | None = None) -> Lies | None:
    """Where a tensor's values are; along dimensions in which it has one and `like` more they are there for all."""
    if t is None or t.dtype.type_size != 4 or t.dtype.is_quantized or not t.has_contiguous_rows:
        return None
    (_, b, c, d), (_, nb1, nb2, nb3) = t.ne, t.nb
    nb = (nb1, nb2, nb3)
    if like is not None:
        nb = (nb1 if b > 1 else 0, nb2 if c > 1 else 0, nb3 if d > 1 else 0)
    return Lies(low.at(t), t.ne, nb)


def _map(op: str, y: Lies, a: Lies, b: Lies | None = None, s0: float = 0.0, s1: float = 0.0) -> list[fast.Step]:
    """One step over values that lie in rows; a and y have one shape, b that or one value along some dimensions."""
    flat_y, flat_a, flat_b = y.flat(), a.flat(), b.flat() if b is not None and b.ne == y.ne else None
    if flat_y is not None and flat_a is not None and (b is None or flat_b is not None):
        y, a, b = flat_y, flat_a, flat_b  # all as one row: shorter rows would fill no vectors
    one_each = b is not None and b.ne[0] == 1 < y.ne[0]
    return [
        fast.elementwise(
            op, y=y.at, a=a.at, b=b.at if b else 0, n_rows=y.ne[1:], n=y.ne[0], y_nb=y.nb, a_nb=a.nb,
            b_nb=b.nb if b else 0, one_each=one_each, s0=s0, s1=s1,
        )
    ]  # fmt: skip


def _one(low: Lowering, op: str, out: Tensor, a: Tensor, s0: float = 0.0, s1: float = 0.0) -> Any | None:
    """op of each value of a."""
    y, given = _lies(low, out), _lies(low, a)
    return _map(op, y, given, None, s0, s1) if y and given and out.dtype.name == "f32" == a.dtype.name else None


def _two(low: Lowering, op: str, out: Tensor, a: Tensor, b: Tensor, s0: float = 0.0, s1: float = 0.0) -> Any | None:
    """op of each value of a and b, which has a's shape or one value along some dimensions."""
    y, left, right = _lies(low, out), _lies(low, a), _lies(low, b, like=a)
    spreads = all(n in (1, full) for n, full in zip(b.ne, a.ne))
    floats = out.dtype.name == a.dtype.name == b.dtype.name == "f32"
    return _map(op, y, left, right, s0, s1) if y and left and right and spreads and floats else None


def binary(low: Lowering, out: Tensor) -> Any | None:
    return _two(low, out.op.lower(), out, out["a"], out["b"])


def scale(low: Lowering, out: Tensor) -> Any | None:
    return _one(low, "scale", out, out["a"], out.params.scale, out.params.bias)


def clamp(low: Lowering, out: Tensor) -> Any | None:
    return _one(low, "clamp", out, out["a"], out.params.low, out.params.high)


def square_or_root(low: Lowering, out: Tensor) -> Any | None:
    return _one(low, out.op.lower(), out, out["a"])


def fill(low: Lowering, out: Tensor) -> Any | None:
    return _one(low, "fill", out, out, out.params.value)


def lower_softcap(low: Lowering, found: Softcap) -> Any | None:
    return _one(low, "softcap", found.out, found.inner["a"], found.out.params.scale)


def unary(low: Lowering, out: Tensor) -> Any | None:
    known = out.params.kind in ("silu", "gelu", "gelu_quick", "relu", "sigmoid", "tanh")
    return _one(low, out.params.kind, out, out["a"]) if known else None


def glu(low: Lowering, out: Tensor) -> Any | None:
    gate, value, p = out["gate"], out["value"], out.params
    s0, s1 = (p.alpha, p.limit) if p.kind == "swiglu_oai" else (0.0, 0.0)
    op = p.kind if p.kind == "swiglu_oai" else f"{ACTIVATIONS[p.kind]}_glu"
    if value is not None:
        return _two(low, op, out, gate, value, s0, s1)
    y, whole = _lies(low, out), _lies(low, gate)
    if y is None or whole is None or gate.dtype.name != "f32":
        return None
    first, second = (whole._replace(at=whole.at + 4 * out.ne[0] * i, ne=out.ne) for i in range(2))
    return _map(op, y, *((second, first) if p.swapped else (first, second)), s0=s0, s1=s1)


def copy(low: Lowering, out: Tensor) -> Any | None:
    """CONT and DUP; CPY into a tensor of the same type."""
    a, target = out["a"], _lies(low, out)
    source = _lies(low, a)
    if out.op == "CPY" and out["target"].root is a.root:
        return None  # what is read may be written meanwhile
    if target is None or source is None or out.dtype != a.dtype:
        return None
    if target.ne != source.ne:
        target, source = target.flat(), source.flat()
    return _map("copy", target, source) if target and source else None


def concat(low: Lowering, out: Tensor) -> Any | None:
    """Each source into its part of the result."""
    y, steps = _lies(low, out), []
    dim, start = out.params.dim, 0
    for source in (out["a"], out["b"]):
        given = _lies(low, source)
        if y is None or given is None:
            return None
        steps += _map("copy", y._replace(at=y.at + start * (4, *y.nb)[dim], ne=source.ne), given)
        start += source.ne[dim]
    return steps


#: By op.
METHODS: dict[str, Callable[[Lowering, Tensor], Any | None]] = {
    "ADD": binary, "SUB": binary, "MUL": binary, "DIV": binary, "SCALE": scale, "CLAMP": clamp, "SQR": square_or_root,
    "SQRT": square_or_root, "FILL": fill, "UNARY": unary, "GLU": glu, "CONT": copy, "DUP": copy, "CPY": copy,
    "CONCAT": concat,
}  # fmt: skip

SOFTCAP = Fusion("softcap", softcap, lower_softcap)
