"""A model's step that can be run again with some of its nodes kept in memory, so that they can be read after the run.

A node that is kept is an output: the planner gives its memory to nobody else, and no fusion swallows it. That is all
that cutting is; everything else of the step is as `run` has it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from graphrt.backend import Backend
from graphrt.errors import MemoryPlanError
from graphrt.execute import Executable, prepare
from graphrt.graph import Graph
from graphrt.host import read_tensor
from graphrt.models.hparams import HParams
from graphrt.models.session import Session
from graphrt.models.step import Logits, PreparedStep
from graphrt.op import op_spec
from graphrt.tensor import Tensor
from graphrt.testing import dequantize

Values = npt.NDArray[np.float64]
#: Runs of a step on a backend that queues its work: the second one is captured and replayed, as all of `run`'s are.
CAPTURED_RUNS = 2


class WatchedSession(Session):
    """A session whose steps keep the nodes at some indices of graph.nodes in memory. keep: None for a step as it is."""

    keep: Collection[int] | None = None
    last: Executable

    def prepared(self, n: int, n_outputs: int) -> PreparedStep:
        if self.keep is None:
            step = super().prepared(n, n_outputs)
        else:
            inputs = self.decoder.inputs(n, n_outputs, self.cache)
            graph = keeping(Graph(self.decoder.result(inputs)), self.keep)
            step = PreparedStep(inputs, prepare(graph, self.backends))
        self.last = step.exe
        return step

    def graph(self, n: int, n_outputs: int, keep: Collection[int]) -> Graph:
        """A step's graph with the nodes at `keep` kept."""
        return keeping(self.decoder.graph(n, n_outputs, self.cache), keep)


def keeping(graph: Graph, keep: Collection[int]) -> Graph:
    """The graph with its nodes at some indices marked as outputs."""
    for i in keep:
        graph.nodes[i].as_output()
    return graph


def cuttable(graph: Graph) -> list[int]:
    """The indices of the nodes that compute. Views are read as what they look at."""
    return [i for i, node in enumerate(graph.nodes) if not op_spec(node.op).is_view]


def looked_at(graph: Graph, indices: Collection[int]) -> set[int]:
    """The nodes that must be kept for those at `indices` to be readable: themselves, of a view what it looks at."""
    index = {node: i for i, node in enumerate(graph.nodes)}
    out = set()
    for i in indices:
        node = graph.nodes[i]
        while op_spec(node.op).is_view and (source := next(node.sources())) in index:
            node = source
        out.add(index[node])
    return out


class Step:
    """Some tokens after those that a session has read. run() may be called often: each time it begins where the first
    one did. ids: the tokens; n_past: those before; exe, logits: of the latest run, f32 [n_vocab]."""

    exe: Executable
    logits: Logits

    def __init__(self, session: WatchedSession, ids: Sequence[int]) -> None:
        self.session = session
        self.ids = list(ids)
        self.n_past = session.n_past
        self._cells = session.cache.saved()

    def graph(self, keep: Collection[int] = ()) -> Graph:
        """The step's graph anew, with the nodes at `keep` kept."""
        return self.session.graph(len(self.ids), 1, keep)

    @property
    def backends(self) -> Sequence[Backend]:
        return self.session.backends

    @property
    def hp(self) -> HParams | None:
        return self.session.decoder.hp

    def run(self, keep: Collection[int] | None = None) -> Executable:
        """Reads the tokens, with the nodes at `keep` in graph.nodes kept; None: nothing is cut."""
        session = self.session
        session.lengths[:] = self.n_past
        session.cache.restore(self._cells)
        session.keep = keep
        try:
            session.eval(self.ids)
        finally:
            session.keep = None
        self.exe = session.last
        if any(split.backend.asynchronous for split in self.exe.splits):
            for _ in range(
                CAPTURED_RUNS - 1
            ):  # what a run writes depends on its inputs alone, and they are still there
                self.exe.run()
        self.exe.synchronize()
        self.logits = np.array(self.exe.read("result_output"), np.float32).reshape(-1)
        return self.exe

    def is_clean(self) -> bool:
        """The latest run left no NaN or infinity in what is readable without cutting: the logits and the cache."""
        if not np.isfinite(self.logits).all():
            return False
        return all(
            np.isfinite(self._held(leaf, read_tensor(leaf, leaf.buffer, leaf.offset))).all()
            for layer in self.session.cache.layers
            for leaf in layer.leafs
            if leaf.buffer is not None
        )

    def values(self, t: Tensor) -> Values | None:
        """The elements of a tensor after the latest run: float64 in torch's shape, None where it was not kept. Of what
        lies in a cache only the cells that hold a token."""
        try:
            raw = self.exe.read(t)
        except MemoryPlanError:
            return None
        return self._held(t, raw)

    def _held(self, t: Tensor, raw: npt.NDArray[np.generic]) -> Values:
        cells = self.cells(t)
        kept = raw if cells is None else np.ascontiguousarray(raw[:, :, cells])
        return np.asarray(dequantize(kept, t.dtype), np.float64)

    def cells(self, t: Tensor) -> npt.NDArray[np.int64] | None:
        """The cells along ne[1] that values() gives, None for what lies in no cache."""
        cache = self.session.cache
        for layer in cache.layers:
            if any(t.root is leaf for leaf in layer.leafs):
                return np.flatnonzero(cache.cells[layer.kind].positions[0] >= 0)
        return None


def n_steps(session: Session, n_tokens: int, phase: str) -> int:
    """How many steps() gives."""
    return -(-n_tokens // session.n_batch) + (phase == "decode")


def steps(session: WatchedSession, tokens: Sequence[int], phase: str) -> Iterator[Step]:
    """The steps in which `run` reads a prompt, and for "decode" the one after it with the likeliest token. Each must be
    run before the next one is asked for."""
    for start in range(0, len(tokens), session.n_batch):
        step = Step(session, tokens[start : start + session.n_batch])
        yield step
    if phase == "decode":
        yield Step(session, [int(np.argmax(step.logits))])
