"""Which elementwise nodes become one step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from graphrt.backend import Group
from graphrt.fusion import Nodes
from graphrt.tensor import Tensor


class Softcap(NamedTuple):
    """inner: SCALE by 1/cap; bent: its tanh; out: SCALE by cap."""

    inner: Tensor
    bent: Tensor
    out: Tensor


def softcap(nodes: Nodes) -> Iterator[Group]:
    """SCALE, tanh and SCALE, as logits are capped."""
    for inner in nodes.of("SCALE"):
        bent = nodes.only_reader(inner)
        if bent is None or bent.op != "UNARY" or bent.params.kind != "tanh":
            continue
        out = nodes.only_reader(bent)
        if out is None or out.op != "SCALE" or inner.params.bias or out.params.bias:
            continue
        if all(t.dtype.name == "f32" for t in (inner["a"], inner, bent, out)):
            yield Group([inner, bent, out], kernel="softcap", captured=Softcap(inner, bent, out))
