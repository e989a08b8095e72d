"""Case: one conformance case as data, and Inputs: what it is built from."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import numpy as np

from graphrt.errors import GraphError
from graphrt.execute import Executable
from graphrt.graph import Graph
from graphrt.op import cases_modules, op_spec, registered_ops
from graphrt.tensor import Tensor, new_input
from graphrt.testing.blocks import AnyArray, quantize
from graphrt.testing.values import Init, Rows, Uniform

A = TypeVar("A")


@dataclass(frozen=True)
class Case:
    """One conformance case. axes: what varies, for people and for reruns; make: builds the node from inputs.

    needs_bytes: free memory without which the case had better not run, given for huge ones only.
    """

    op: str
    axes: Mapping[str, object]
    make: Callable[[Inputs], Tensor] = field(compare=False)
    needs_bytes: int = 0

    def __str__(self) -> str:
        return f"{self.op}({','.join(f'{k}={_shown(v)}' for k, v in self.axes.items())})"

    def build(self, seed: int = 0) -> Inputs:
        """The case's node and its inputs' values."""
        inputs = Inputs(str(self), seed)
        inputs.node = self.make(inputs)
        return inputs

    def without_values(self) -> Tensor:
        """The case's node; no input has values, so that it costs neither the time nor the memory for them."""
        return self.make(_Shapes(str(self), 0))


def _shown(value: object) -> str:
    """As ggml prints it: lists as [a,b], no spaces, no quotes."""
    if isinstance(value, (tuple, list)):
        return f"[{','.join(_shown(v) for v in value)}]"
    return str(value).replace(" ", "")


def grid(base: A, axes: Mapping[str, Sequence[object]], exclude: Mapping[str, Callable[[A], bool]] = {}) -> Iterator[A]:
    """The dataclass `base` with every combination of its fields' values `axes`, but what a rule of `exclude` names."""
    for values in itertools.product(*axes.values()):
        point: A = dataclasses.replace(cast(Any, base), **dict(zip(axes, values)))
        if not any(rule(point) for rule in exclude.values()):
            yield point


class Inputs:
    """Makes the inputs of one case and remembers their values: calling it adds an input leaf.

    node: what is judged. beside: nodes of the same inputs that its graph computes too, which a backend may join with
    it.
    """

    def __init__(self, case: str, seed: int) -> None:
        self.case = case
        self.seed = seed
        self.values: dict[Tensor, AnyArray] = {}
        self.node: Tensor | None = None
        self.beside: list[Tensor] = []

    def __call__(self, name: str, dt: str, ne: Sequence[int], init: Init | None = None) -> Tensor:
        """An input leaf of that type and shape, filled by `init`: without it floats in -1..1, integers below 1000."""
        tensor = new_input(dt, *ne, name=name)
        self.draw(tensor, init)
        return tensor

    def draw(self, tensor: Tensor, init: Init | None = None) -> None:
        """Gives an input leaf its values, as calling does."""
        kind = tensor.dtype
        init = init or (Rows(1000) if kind.kind == "int" else Uniform())
        digest = hashlib.sha256(f"{self.seed}/{self.case}/{tensor.name}".encode()).digest()
        rng = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:8], "little")))
        store = getattr(init, "store", None)
        values: AnyArray = store(rng, tensor.shape, kind) if store else quantize(init(rng, tensor.shape), kind, rng)
        self.values[tensor] = values

    @property
    def result(self) -> Tensor:
        assert self.node is not None
        return self.node

    def graph(self) -> Graph:
        """The result comes last."""
        return Graph(*self.beside, self.result)

    def fill(self, exe: Executable) -> None:
        """Writes every input."""
        for tensor, values in self.values.items():
            exe.write(tensor, values)


class _Shapes(Inputs):
    """Makes the leafs of a case alone."""

    def __call__(self, name: str, dt: str, ne: Sequence[int], init: Init | None = None) -> Tensor:
        return new_input(dt, *ne, name=name)


_SETS: dict[str, dict[str, Callable[[], Iterable[Case]]]] = {}


def register_cases(op: str, **sets: Callable[[], Iterable[Case]]) -> None:
    """Adds sets of cases of a registered op, each a function that yields them: quick=..., full=..., ggml=...

    "quick" is the set that every op has; all_cases() says what the others are. Raises GraphError for an unknown op, and
    where the op has a set of that name already.
    """
    known = _SETS.setdefault(op_spec(op).name, {})
    for which, cases in sets.items():
        if which in known:
            raise GraphError(f"a set of cases is registered once, {op} has {which!r} already; give it another name")
        known[which] = cases


def all_cases(op: str | None = None, which: str = "quick") -> Iterator[Case]:
    """The cases of one op or of every registered op, in the order of the ops' registration.

    which: "quick", the default cases; "full", the larger set where an op has one, else its default cases; any other set
    ("ggml": the grid of ggml's own suite) where an op has it, else nothing. The modules that register cases are
    imported first.
    """
    for module in cases_modules():
        importlib.import_module(module)
    for name in registered_ops():
        sets = _SETS.get(name, {})
        chosen = sets.get(which) or (sets.get("quick") if which == "full" else None)
        if op in (None, name) and chosen is not None:
            yield from chosen()
