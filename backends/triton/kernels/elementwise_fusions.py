"""Which elementwise nodes become one step."""

from __future__ import annotations

from collections.abc import Iterator

from graphrt.backend import Group
from graphrt.fusion import Nodes, softcaps


def softcap(nodes: Nodes) -> Iterator[Group]:
    """SCALE, tanh and SCALE of f32, as logits are capped."""
    for found in softcaps(nodes):
        if all(t.dtype.name == "f32" for t in (found.inner["a"], *found)):
            yield Group(list(found), kernel="softcap", captured=found)
