"""Random small graphs of several ops: a list of instructions read into a graph.

The instructions come from a seeded generator here, and from hypothesis, which shrinks them, in the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from graphrt import Graph, Tensor, new_input, ops
from graphrt.execute import host_type
from graphrt.op import op_spec
from graphrt.ops import RopeParams
from graphrt.ops.elementwise import can_repeat

Array = npt.NDArray[np.generic]

#: Inputs by number: shapes that fit each other often.
SHAPES = [(4, 3, 2), (4, 3), (4,), (3, 4), (4, 4), (4, 1, 2), (8, 3, 2), (1,), (1, 3), (2, 3, 2)]
#: No value of a program may exceed this, so that rounding stays small beside an error.
BOUND = 64.0


@dataclass
class Program:
    """A graph under construction: the tensors so far, with a bound on the values of each."""

    pool: list[Tensor] = field(default_factory=list)
    bounds: dict[Tensor, float] = field(default_factory=dict)

    def add(self, t: Tensor, bound: float) -> None:
        self.pool.append(t)
        self.bounds[t] = bound

    def pick(self, i: int, fits: Callable[[Tensor], bool] = lambda t: True) -> Tensor | None:
        """The i-th tensor that fits, counted from the newest."""
        found = [t for t in reversed(self.pool) if t.dtype.name == "f32" and fits(t)]
        return found[i % len(found)] if found else None

    def input(self, dt: str, *ne: int) -> Tensor:
        return new_input(dt, *ne, name=f"in_{len(self.pool)}")


Instruction = tuple[str, int, int, int]


def _binary(p: Program, op: str, a: Tensor, j: int) -> None:
    b = p.pick(j, lambda t: can_repeat(t, a))
    assert b is not None  # a itself fits
    bound = p.bounds[a] * p.bounds[b] if op == "mul" else p.bounds[a] + p.bounds[b]
    if bound <= BOUND:
        p.add(getattr(ops, op)(a, b), bound)


def _unary(p: Program, a: Tensor, kind: int) -> None:
    name = ("tanh", "sigmoid", "silu", "gelu", "relu")[kind % 5]
    p.add(ops.unary(a, name), 1.0 if kind % 5 < 2 else p.bounds[a])


def _row_map(p: Program, a: Tensor, kind: int) -> None:
    result = (ops.rms_norm(a, 0.1), ops.norm(a, 0.1), ops.soft_max(a), ops.l2_norm(a, 0.5))[kind % 4]
    p.add(result, a.ne[0] ** 0.5 if kind % 4 < 2 else 1.0 if kind % 4 == 2 else 2.0 * p.bounds[a])


def _view(p: Program, a: Tensor, kind: int) -> None:
    k = kind % 6
    if k == 0:
        look = ops.transpose(a)
    elif k == 1:
        look = ops.permute(a, 0, 2, 1, 3)
    elif k == 2:
        look = ops.permute(a, 2, 0, 1, 3)
    elif k == 3 and a.is_contiguous:
        look = ops.reshape(a, a.ne[0] * a.ne[1], *a.ne[2:])
    elif k == 4 and a.ne[1] > 1:
        look = ops.view(a, (a.ne[0], a.ne[1] - 1, *a.ne[2:]), a.nb[1:], offs=a.nb[1])
    elif k == 5 and a.ne[0] % 2 == 0:
        look = ops.view(a, (a.ne[0] // 2, *a.ne[1:]), a.nb[1:], offs=a.nb[0] * (a.ne[0] // 2) * (kind // 6 % 2))
    else:
        look = ops.reshape(a, *a.ne) if a.is_contiguous else ops.permute(a, 0, 1, 3, 2)
    p.add(look, p.bounds[a])


def _matmul(p: Program, a: Tensor, j: int) -> None:
    def fits(b: Tensor) -> bool:
        return b.ne[0] == a.ne[0] and b.ne[2] % a.ne[2] == 0 and b.ne[3] % a.ne[3] == 0

    b = p.pick(j, fits)
    if b is not None and a.ne[0] * p.bounds[a] * p.bounds[b] <= BOUND:
        p.add(ops.mul_mat(a, b), a.ne[0] * p.bounds[a] * p.bounds[b])


def _concat(p: Program, a: Tensor, j: int, k: int) -> None:
    dim = k % 4
    b = p.pick(j, lambda t: all(i == dim or t.ne[i] == a.ne[i] for i in range(4)))
    if b is not None and a.n_elements + b.n_elements <= 400:
        p.add(ops.concat(a, b, dim), max(p.bounds[a], p.bounds[b]))


def _glu(p: Program, a: Tensor, j: int) -> None:
    b = p.pick(j, lambda t: t.ne == a.ne)
    assert b is not None
    if p.bounds[a] * p.bounds[b] <= BOUND:
        p.add(ops.glu(a, b, "swiglu"), p.bounds[a] * p.bounds[b])


def _gather(p: Program, a: Tensor, k: int) -> None:
    ids = p.input("i32", 3, a.ne[2], a.ne[3])
    p.add(ids, a.ne[1])
    p.add(ops.get_rows(a, ids), p.bounds[a])


def _write_rows(p: Program, a: Tensor, j: int, k: int) -> None:
    """A write into memory that somebody else owns: an input's or a node's. What comes later reads the new rows."""
    rows = p.pick(
        j, lambda t: t.root is not a.root and (t.ne[0], *t.ne[2:]) == (a.ne[0], *a.ne[2:]) and t.ne[1] <= a.ne[1]
    )
    if rows is None or not a.has_contiguous_rows:
        return
    ids = p.input("i64", rows.ne[1])
    p.add(ids, -1.0 - k % (a.ne[1] - rows.ne[1] + 1))  # a bound under 0: consecutive indices from that row on
    bound = max(p.bounds[a], p.bounds[rows])
    for t in p.pool:
        if t.root is a.root:
            p.bounds[t] = bound
    p.add(ops.set_rows(rows, ids, a), bound)


def _rope(p: Program, a: Tensor, k: int) -> None:
    if a.ne[0] % 2 == 0:
        positions = p.input("i32", a.ne[2])
        p.add(positions, 9)
        p.add(ops.rope(a, positions, RopeParams(a.ne[0], ("normal", "neox")[k % 2])), 2 * p.bounds[a])


def _step(p: Program, instruction: Instruction) -> None:
    kind, i, j, k = instruction
    a = p.pick(i)
    assert a is not None
    steps: dict[str, Callable[[], None]] = {
        "add": lambda: _binary(p, "add", a, j), "sub": lambda: _binary(p, "sub", a, j),
        "mul": lambda: _binary(p, "mul", a, j), "scale": lambda: p.add(ops.scale(a, 0.5, 0.25), p.bounds[a] + 1),
        "unary": lambda: _unary(p, a, k), "rows": lambda: _row_map(p, a, k), "view": lambda: _view(p, a, k),
        "cont": lambda: p.add(ops.cont(a), p.bounds[a]), "mul_mat": lambda: _matmul(p, a, j),
        "concat": lambda: _concat(p, a, j, k), "glu": lambda: _glu(p, a, j), "gather": lambda: _gather(p, a, k),
        "write": lambda: _write_rows(p, a, j, k), "rope": lambda: _rope(p, a, k),
    }  # fmt: skip
    if p.bounds[a] <= BOUND:
        steps[kind]()


KINDS = (
    "add", "add", "sub", "mul", "mul", "scale", "scale", "unary", "unary", "rows", "view", "view", "view", "cont",
    "mul_mat", "mul_mat", "concat", "glu", "gather", "write", "rope",
)  # fmt: skip


@dataclass
class RandomGraph:
    """A graph, and what its inputs may hold."""

    graph: Graph
    bounds: dict[Tensor, float]

    def values(self, seed: int) -> dict[Tensor, Array]:
        rng = np.random.default_rng(seed)
        out: dict[Tensor, Array] = {}
        for t in self.graph.inputs:
            bound = self.bounds[t]
            if t.dtype.kind == "float":
                out[t] = rng.uniform(-1, 1, t.shape).astype(np.float32)
            elif bound < 0:
                out[t] = (rng.permutation(t.ne[0]) + int(-1 - bound)).astype(host_type(t.dtype)).reshape(t.shape)
            else:
                out[t] = rng.integers(0, int(bound), t.shape).astype(host_type(t.dtype))
        return out


def make_graph(shapes: Sequence[int], instructions: Sequence[Instruction], outputs: Sequence[int]) -> RandomGraph:
    """Runs a program: inputs of SHAPES[i], then the instructions; its last tensor and those of `outputs` are kept."""
    p = Program()
    for i in shapes:
        p.add(p.input("f32", *SHAPES[i]), 1.0)
    for instruction in instructions:
        _step(p, instruction)
    floats = [t for t in p.pool if t.dtype.name == "f32"]
    picked = [floats[-1], *(floats[i % len(floats)] for i in outputs)]
    writes = [t for t in p.pool if not t.is_leaf and op_spec(t.op).writes is not None]
    return RandomGraph(Graph(*dict.fromkeys(_in_order(p, [*writes, *picked]))), p.bounds)


def seeded_graph(seed: int, max_nodes: int = 14) -> RandomGraph:
    """A graph that is a function of the seed alone."""
    rng = np.random.default_rng(seed)
    shapes = rng.integers(0, len(SHAPES), rng.integers(1, 5)).tolist()
    instructions: list[Instruction] = []
    for _ in range(rng.integers(3, max_nodes + 1)):
        i, j, k = (int(n) for n in rng.integers(0, 12, 3))
        instructions.append((str(rng.choice(KINDS)), i, j, k))
    return make_graph(shapes, instructions, rng.integers(0, 12, rng.integers(0, 3)).tolist())


def _in_order(p: Program, outputs: list[Tensor]) -> list[Tensor]:
    """In the order of the program, so that a write happens before what the program reads after it."""
    place = {t: i for i, t in enumerate(p.pool)}
    return sorted(outputs, key=lambda t: place[t])
