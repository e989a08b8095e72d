"""OpSpec: what the runtime knows of an op, and the registry that ops/ fills.

An op is the names of its sources, its rule for sources, parameters and result (`infer`), its work in FLOPs and bytes,
and the sources whose memory its result may take over. Computing is the backends' part. Conformance cases are registered
apart, by modules that are imported only when somebody asks for cases (register_cases_module).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any, NamedTuple

from graphrt.arguments import check_fields
from graphrt.dtypes import DType
from graphrt.errors import GraphError
from graphrt.tensor import Dims, Tensor, name_sources

#: The largest finite f32: kernels take an op's parameters as such.
MAX_F32 = (2.0 - 2.0**-23) * 2.0**127


class Result(NamedTuple):
    """What an op yields: type and shape, and for a view its strides and offset within the source."""

    dtype: DType
    ne: Sequence[int]
    nb: Dims | None = None
    offs: int = 0


class Work(NamedTuple):
    """Floating-point operations of one evaluation, and the bytes that must at least move."""

    flops: int
    bytes: int


def moved_bytes(node: Tensor) -> int:
    """Bytes of every source and of the result, each once: the lower bound for an op that reads all of them.

    A source that the op writes into is the result and counts as that.
    """
    return node.data_nbytes + sum(s.data_nbytes for s in set(node.sources()) if s.root is not node.root)


def elementwise_work(flops_per_element: int) -> Callable[[Tensor], Work]:
    """The work of an op that spends a fixed number of FLOPs on each element of its result."""
    return lambda node: Work(flops_per_element * node.n_elements, moved_bytes(node))


def reduction_work(flops_per_element: int) -> Callable[[Tensor], Work]:
    """The work of an op that spends a fixed number of FLOPs on each element of its first source."""
    return lambda node: Work(flops_per_element * next(node.sources()).n_elements, moved_bytes(node))


@dataclass(frozen=True)
class OpSpec:
    """One op.

    backward: what builds the gradients of its sources, registered apart (register_backward).

    name: ggml's name. sources: what its sources are called, in order, those that may be absent last and with a question
    mark: ("q", "k", "v", "mask?", "sinks?"). infer(params, **sources): gets a tensor for each of them, None for an
    absent one, by these names; it checks them and returns the Result, or raises GraphError. work(node): FLOPs and
    bytes. params: the dataclass of its parameters or None. is_view: the result is another look at its only source and
    nothing is computed. inplace: the sources whose memory the result may take over. writes: the source that the op
    writes into and returns. masked: sources of which the one called "mask" hides parts, which need not be read.

    Its conformance cases are registered by name: testing.register_cases(name, quick=...).
    """

    name: str
    infer: Callable[..., Result]
    work: Callable[[Tensor], Work]
    sources: tuple[str, ...] = ("a",)
    params: type | None = None
    is_view: bool = False
    inplace: tuple[str, ...] = ()
    writes: str | None = None
    masked: tuple[str, ...] = ()

    @property
    def backward(self) -> Backward | str:
        """The rule for its gradients, or a sentence why it has none."""
        return _BACKWARD.get(self.name, f"{self.name} has no rule for its gradient")

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The sources' names, all of them."""
        return tuple(name.removesuffix("?") for name in self.sources)

    @cached_property
    def required(self) -> tuple[str, ...]:
        """The names of those that are never absent."""
        return tuple(name for name in self.sources if not name.endswith("?"))

    def shares(self, src: Sequence[Tensor | None]) -> Tensor | None:
        """The source whose memory the result of these sources uses; None if the result has memory of its own."""
        if self.is_view:
            return src[0]
        return src[self.names.index(self.writes)] if self.writes is not None else None


#: backward(node, d, wanted): the gradients of the sources called `wanted`, by name, as nodes; d is that of the result,
#: f32 in the result's shape, any strides. What is not among them does not depend on the source. Gradients are f32.
Backward = Callable[[Tensor, Tensor, frozenset[str]], Mapping[str, Tensor]]

_REGISTRY: dict[str, OpSpec] = {}
_BACKWARD: dict[str, Backward | str] = {}
_CASES_MODULES: list[str] = []


def register(spec: OpSpec) -> OpSpec:
    """Adds an op. Raises GraphError when the name is taken (a module imported under two names does that too), and when
    its sources' names are not as OpSpec has them."""
    if spec.name in _REGISTRY:
        raise GraphError(
            f"an op is registered once, {spec.name} is there already; import it as graphrt.ops, never as `import ops`"
        )
    required, names = spec.required, spec.names
    rule = f"sources have different names, those that may be absent last and with a question mark, got {spec.sources}"
    require(spec.sources[: len(required)] == required and len(set(names)) == len(names), spec.name, rule)
    meant = [*spec.inplace, *spec.masked, *(["mask"] if spec.masked else []), *([spec.writes] if spec.writes else [])]
    unknown = set(meant) - set(names)
    require(not unknown, spec.name, f"inplace, writes and masked name its sources, got {sorted(unknown)}")
    name_sources(spec.name, names)
    _REGISTRY[spec.name] = spec
    return spec


def register_backward(op: str, rule: Backward | str) -> None:
    """Gives a registered op the rule for its gradients, or the sentence why it has none. Raises GraphError when it has
    one already."""
    if op_spec(op).name in _BACKWARD:
        raise GraphError(f"an op has one rule for its gradient, {op} has one already; leave one of them out")
    _BACKWARD[op] = rule


def op_spec(name: str) -> OpSpec:
    """The op of that name. Raises GraphError for an unknown one."""
    spec = _REGISTRY.get(name)
    if spec is None:
        raise GraphError(f"an op must be registered, got {name!r}; import the module that registers it")
    return spec


def made_by(t: Tensor) -> Tensor:
    """The tensor that a chain of views looks at; `t` itself if it is no view."""
    while not t.is_leaf and op_spec(t.op).is_view:
        t = next(t.sources())
    return t


def registered_ops() -> dict[str, OpSpec]:
    """Every op by name, in the order of registration."""
    return dict(_REGISTRY)


def register_cases_module(module: str) -> None:
    """Names the module, or package, that registers conformance cases when it is imported.

    A package of ops calls this with a full name ("graphrt.ops.cases"), so that cases are loaded only when
    testing.all_cases() is called and not whenever a graph is built.
    """
    if module not in _CASES_MODULES:
        _CASES_MODULES.append(module)


def cases_modules() -> tuple[str, ...]:
    """The modules that register_cases_module() has named, in that order."""
    return tuple(_CASES_MODULES)


def require(ok: bool, op: str, rule: str, *tensors: Tensor | None) -> None:
    """Raises GraphError with the op, the broken rule and the tensors' types and shapes unless `ok`."""
    if not ok:
        shown = ", ".join(f"{t.name or 'src'}: {t.describe()}" if t is not None else "none" for t in tensors)
        raise GraphError(f"{op}: {rule}" + (f", got {shown}" if tensors else ""))


def infer_result(spec: OpSpec, src: Sequence[Tensor | None], params: Any) -> Result:
    """Checks the number of sources and the parameters' class, then asks the op. Raises GraphError."""
    low = len(spec.required)
    if not low <= len(src) <= len(spec.names):
        require(False, spec.name, f"takes the sources {', '.join(spec.sources)}, got {len(src)} of them")
    if any(s is None for s in src[:low]):
        require(False, spec.name, f"{' and '.join(spec.required)} must be present", *src)
    expected = spec.params or type(None)
    require(isinstance(params, expected), spec.name, f"parameters must be {expected.__name__}, got {params!r}")
    if params is not None:
        check_fields(params, GraphError)
    for name, value in getattr(params, "__dict__", {}).items():
        fits = not isinstance(value, float) or not math.isfinite(value) or abs(value) <= MAX_F32
        require(fits, spec.name, f"{name} must be a number that f32 holds, got {value}")
    written = spec.shares(src) if spec.writes is not None else None
    rule = "what is written must have memory of its own for each element"
    require(written is None or not written.overlaps_itself, spec.name, rule, written)
    return spec.infer(params, **dict(zip_longest(spec.names, src)))


def build(spec: OpSpec, *src: Tensor | None, params: Any = None, name: str = "") -> Tensor:
    """The node `spec(src, params)`: checked, shaped and linked; nothing is computed. Raises GraphError."""
    result = infer_result(spec, src, params)
    shares = spec.shares(src)
    nb = shares.nb if shares is not None and result.nb is None else result.nb
    return Tensor(
        result.dtype, result.ne, nb=nb, name=name, op=spec.name, params=params, src=src, view_src=shares,
        view_offs=result.offs,
    )  # fmt: skip
