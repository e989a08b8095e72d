"""Which nodes are one step of AdamW: the running means, the new weights, and the copies into all three."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from graphrt.backend import Group
from graphrt.fusion import Nodes
from graphrt.tensor import Tensor


class AdamwStep(NamedTuple):
    """step: the OPT_STEP_ADAMW; written: the CPY of it into the weights; grad: the gradient; beta1, beta2: of both
    means, which lie where step's m and v do; rest1, rest2: what the gradient and its square are multiplied with."""

    step: Tensor
    written: Tensor
    grad: Tensor
    beta1: float
    rest1: float
    beta2: float
    rest2: float


class _Mean(NamedTuple):
    """A running mean brought up to date in place: its nodes, what was added, and both factors."""

    nodes: list[Tensor]
    added: Tensor
    beta: float
    rest: float


def _mean(nodes: Nodes, copied: Tensor, reader: Tensor) -> _Mean | None:
    """CPY of ADD of two SCALEs, the first of the CPY's own target; nobody else reads what is between, and `reader`
    alone what comes out."""
    if copied.op != "CPY" or nodes.only_reader(copied) is not reader:
        return None
    total = copied["a"]
    if total.op != "ADD" or nodes.only_reader(total) is not copied:
        return None
    old, new = total["a"], total["b"]
    if any(t.op != "SCALE" or t.params.bias or nodes.only_reader(t) is not total for t in (old, new)):
        return None
    if old["a"] is not copied["target"]:
        return None
    return _Mean([old, new, total, copied], new["a"], old.params.scale, new.params.scale)


def adamw_step(nodes: Nodes) -> Iterator[Group]:
    """The nodes of ops.adamw_moments(), of the OPT_STEP_ADAMW that reads them, and of the CPY that makes its result
    the weights."""
    for step in nodes.of("OPT_STEP_ADAMW"):
        written = nodes.only_reader(step)
        if written is None or written.op != "CPY" or written["target"] is not step["a"]:
            continue
        first, second = _mean(nodes, step["m"], step), _mean(nodes, step["v"], step)
        if first is None or second is None:
            continue
        square = second.added
        if square.op != "SQR" or square["a"] is not first.added or len(nodes.readers(square)) != 1:
            continue
        leafs = (step["a"], step["m"]["target"], step["v"]["target"], first.added)
        if any(t.dtype.name != "f32" or not t.is_contiguous for t in leafs) or nodes.kept(square):
            continue
        members = [*first.nodes, square, *second.nodes, step, written]
        found = AdamwStep(step, written, first.added, first.beta, first.rest, second.beta, second.rest)
        yield Group(members, kernel="adamw_step", results=[step["m"], step["v"], written], captured=found)
