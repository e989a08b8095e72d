"""A node's run in memory that tells: guard bytes around every tensor, NaN where nothing was written yet.

Uses the plugin interface alone (alloc, read, write, fuse, compile with a place for each tensor), so that it works for
any backend. The memory planner is not part of it; random graphs test that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graphrt.backend import Backend, Buffer, Place, Region, Usage
from graphrt.bounds import span
from graphrt.graph import Graph
from graphrt.op import op_spec
from graphrt.program import Program
from graphrt.rules import check_graph
from graphrt.tensor import Tensor
from graphrt.testing import Inputs
from graphrt.tools.conformance.run.reference import Array, as_stored, computing_nodes

Bytes = npt.NDArray[np.uint8]
#: Guard bytes on each side of a tensor, as many as ggml's sentinels.
GUARD = 4096
#: No kernel computes a number of these bytes, and it is none that tensors begin with: what still has them is unwritten.
_OTHER = 0xFE
#: Memory is compared in pieces of this size.
_PIECE = 64 * 2**20
_WEIGHTS = {"MUL_MAT": "weights", "MUL_MAT_ID": "weights", "GET_ROWS": "table"}


def _guard_bytes(n: int) -> Bytes:
    """Bytes that differ from place to place, and are NaN as f32, f16 and bf16 at any even offset: what is read from
    them shows too."""
    out = (0x81 + np.arange(n) * 37 % 0x7D).astype(np.uint8)
    out[1::4] = 0xFF
    out[3::4] = 0x7F
    out[2::4] |= 0x80
    return out


@dataclass
class _Block:
    """A buffer with tensors in it. image: its bytes before a run. spans: (name, start, end) of each tensor."""

    buffer: Buffer
    image: Bytes
    spans: list[tuple[Tensor, int, int]]


class Guarded:
    """Memory for a case on one backend. run() may be called often; each starts from the same bytes."""

    def __init__(self, backend: Backend, inputs: Inputs, graph: Graph) -> None:
        check_graph(graph)
        self.backend, self.inputs, self.graph = backend, inputs, graph
        self.node = inputs.result
        self.nodes = computing_nodes(graph)
        self.pad = -(-GUARD // backend.alignment) * backend.alignment
        self.blocks: list[_Block] = []
        self.places: dict[Tensor, Place] = {}
        for leaf, values in inputs.values.items():
            raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
            self._add({leaf: raw}, self._usage(leaf))
        own = {n: np.full(n.nbytes, 0xFF, np.uint8) for n in self.nodes if n.root is n}
        if own:
            self._add(own, Usage.COMPUTE)
        self.reset()
        self.program = self._compile(self.place)

    def _usage(self, leaf: Tensor) -> Usage:
        """As models have it: weights of products and tables, state what is written or cached, else compute."""
        for node in self.nodes:
            name = _WEIGHTS.get(node.op)
            if name is not None and node[name].root is leaf:
                return Usage.WEIGHTS
        return Usage.STATE if self.node.root is leaf else Usage.COMPUTE

    def _add(self, tensors: dict[Tensor, Bytes], usage: Usage) -> None:
        align, start, spans = self.backend.alignment, self.pad, []
        for t, raw in tensors.items():
            spans.append((t, start, start + raw.size))
            start += -(-raw.size // align) * align + self.pad
        image = np.empty(start, np.uint8)
        buffer = self.backend.alloc(start, usage)
        previous = 0
        for t, first, end in spans:
            image[previous:first] = _guard_bytes(first - previous)
            image[first:end] = tensors[t]
            self.places[t] = (buffer, first)
            previous = end
        image[previous:] = _guard_bytes(start - previous)
        self.blocks.append(_Block(buffer, image, spans))

    def place(self, t: Tensor) -> Place:
        buffer, offset = self.places[t.root]
        return buffer, span(t, offset + t.view_offs, buffer.nbytes)[0]

    def _compile(self, place: Callable[[Tensor], Place]) -> Program:
        kept = {t.root for t in self.graph.outputs}
        region = Region(self.nodes, lambda t: t.root in kept)
        return self.backend.compile(self.backend.fuse(region), place)

    def reset(self) -> None:
        """Writes inputs, guards and poison."""
        for block in self.blocks:
            block.buffer.write(0, block.image)

    def run(self) -> Array:
        """Runs once and returns the node's elements as stored."""
        self.reset()
        self.program()
        self.backend.synchronize()
        return self._result(self.place(self.node))

    def unwritten(self) -> npt.NDArray[np.bool_]:
        """Which elements of the result a run leaves as they were, in torch's shape. The node has memory of its own."""
        self.reset()
        buffer, offset = self.place(self.node)
        buffer.write(offset, np.full(self.node.nbytes, _OTHER, np.uint8))
        self.program()
        self.backend.synchronize()
        found = np.ascontiguousarray(self._result((buffer, offset))).view(np.uint8)
        left: npt.NDArray[np.bool_] = (found.reshape(*self.node.shape, -1) == _OTHER).all(-1)
        return left

    def run_in_place(self) -> list[Array]:
        """The same with the result in a source's memory, for each that the op allows and whose layout agrees."""
        named, roots = self.node.sources_by_name(), [s.root for s in self.node.sources()]
        sources = [named[name] for name in op_spec(self.node.op).inplace if name in named]
        fits = [s for s in sources if s.is_leaf and s.nb == self.node.nb and s.ne == self.node.ne]
        if len(self.nodes) > 1:
            return []
        return [self._run_at(self.places[s]) for s in fits if roots.count(s) == 1]

    def _run_at(self, shared: Place) -> Array:
        """The result of a run that writes it to `shared`."""
        program = self._compile(lambda t: shared if t is self.node else self.place(t))
        self.reset()
        program()
        self.backend.synchronize()
        return self._result(shared)

    def _result(self, place: Place) -> Array:
        return as_stored(self.node, place[0].read(place[1], self.node.nbytes))

    def damage(self) -> list[str]:
        """What the last run() wrote where it must not: guards, inputs, and the cells beside what the op writes."""
        found = []
        for block in self.blocks:
            changed = _changes(block)
            if changed.size:
                found += self._damage_in(block, changed)
        return found

    def _damage_in(self, block: _Block, changed: npt.NDArray[np.int64]) -> list[str]:
        found = []
        previous = 0
        for i, (t, start, end) in enumerate(block.spans):
            name = t.name or t.op
            limit = block.spans[i + 1][1] - self.pad if i + 1 < len(block.spans) else block.image.size
            before = changed[(changed >= previous) & (changed < start)]
            inside = changed[(changed >= start) & (changed < end)] - start
            behind = changed[(changed >= end) & (changed < limit)]
            if before.size:
                found.append(f"it wrote {before.size} bytes before {name!r}, up to {start - int(before[0])} bytes away")
            if behind.size:
                found.append(f"it wrote {behind.size} bytes past the end of {name!r}, up to {int(behind[-1]) - end}")
            if t.is_leaf and inside.size:
                found += self._written_inside(t, inside)
            previous = limit
        return found

    def _written_inside(self, t: Tensor, changed: npt.NDArray[np.int64]) -> list[str]:
        if t is not self.node.root:
            return [f"it wrote to its input {t.name!r}: {changed.size} bytes, from byte {int(changed[0])}"]
        outside = changed[~_covered(self.node)[changed]]
        if not outside.size:
            return []
        return [f"it wrote to {t.name!r} beside what it may write: {outside.size} bytes, from byte {int(outside[0])}"]


def _changes(block: _Block) -> npt.NDArray[np.int64]:
    """Where a buffer's bytes aren't its image any more."""
    found = []
    for start in range(0, block.image.size, _PIECE):
        before = block.image[start : start + _PIECE]
        found.append(np.flatnonzero(block.buffer.read(start, before.size) != before) + start)
    return np.concatenate(found)


def _covered(node: Tensor) -> npt.NDArray[np.bool_]:
    """Which bytes of its root a view covers."""
    mask = np.zeros(node.root.nbytes, np.bool_)
    shape = (*node.shape[:3], node.ne[0] // node.dtype.block_size, node.dtype.type_size)
    np.lib.stride_tricks.as_strided(mask[node.view_offs :], shape, (*node.nb[::-1], 1))[...] = True
    return mask
