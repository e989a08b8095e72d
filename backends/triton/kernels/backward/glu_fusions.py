"""Which nodes are both gradients of a GLU whose gate and value are apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from graphrt.backend import Group
from graphrt.fusion import Nodes
from graphrt.tensor import Tensor


class GluBack(NamedTuple):
    """d: the gradient of the GLU's result; of_gate, of_value: what the nodes yield; kind: of the activation."""

    d: Tensor
    gate: Tensor
    value: Tensor
    of_gate: Tensor
    of_value: Tensor
    kind: str


def glu_back(nodes: Nodes) -> Iterator[Group]:
    """MUL by the value and the activation's gradient; the activation of the gate and MUL by it."""
    for of_gate in nodes.of("SILU_BACK", "UNARY_BACK"):
        times_value, gate = of_gate["d"], of_gate["a"]
        kind = "silu" if of_gate.op == "SILU_BACK" else of_gate.params.kind
        if times_value.op != "MUL" or nodes.only_reader(times_value) is not of_gate:
            continue
        d, value = times_value["a"], times_value["b"]
        for of_value in nodes.readers(d):
            active = of_value["b"] if of_value.op == "MUL" and of_value["a"] is d else None
            if active is None or active.op != "UNARY" or active.params.kind != kind or active["a"] is not gate:
                continue
            same = all(t.dtype.name == "f32" and t.is_contiguous and t.ne == d.ne for t in (d, gate, value))
            if same and nodes.only_reader(active) is of_value:
                members = [times_value, of_gate, active, of_value]
                found = GluBack(d, gate, value, of_gate, of_value, kind)
                yield Group(members, kernel="glu_back", results=[of_gate, of_value], captured=found)
                break
