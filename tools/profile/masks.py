"""What the masks of a step let queries see, which says how much of a cache an attention reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from graphrt import ops
from graphrt.execute import Array, Executable, prepare
from graphrt.graph import Graph
from graphrt.tensor import Tensor, new_input


def seen_shares(exe: Executable) -> dict[str, tuple[float, float]]:
    """By the name of each mask that a step makes: the shares of cells that any query sees, and of pairs of query and
    cell that count."""
    found = {}
    for node in exe.graph.nodes:
        if node.op == "KQ_MASK":
            # Of what its inputs hold now: its own memory may be another tensor's after a run.
            found[node.name] = shares_of(made_mask(node, [exe.read(s) for s in node.sources()]))
    return found


def shares_of(mask: npt.NDArray[Any]) -> tuple[float, float]:
    """Of a mask, f16 [..., n_q, n_kv], the shares of cells that any query sees, and of pairs that count."""
    seen = ~np.isneginf(mask)
    return float(seen.any(-2).mean()), float(seen.mean())


def made_mask(mask: Tensor, values: Sequence[Array]) -> Array:
    """A KQ_MASK, f16 in torch's shape, of its sources' values: the cells' positions and the tokens'."""
    cells, pos = (new_input(s.dtype, *s.ne, name=str(i)) for i, s in enumerate(mask.sources()))
    alone = prepare(Graph(ops.kq_mask(cells, pos, mask.params.window, mask.params.alibi, name="mask")), "cpu")
    for leaf, given in zip((cells, pos), values):
        alone.write(leaf, given)
    alone.run()
    return alone.read("mask")
