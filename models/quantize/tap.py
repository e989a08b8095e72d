"""What the inputs of a model's products are like, on text: the sums that an importance matrix is made of.

A step's graph is built as for running, and the inputs of its products with weights are made outputs of it, so that they
are in memory after a run. Logits are not computed, unless the output's weights are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from graphrt.backend import Backend
from graphrt.errors import SessionError
from graphrt.execute import Executable, prepare
from graphrt.graph import Graph
from graphrt.models.arch.skeleton import Decoder
from graphrt.models.engine import SessionOptions
from graphrt.models.quantize.imatrix import Entry
from graphrt.models.session import Session
from graphrt.models.step import PreparedStep
from graphrt.printing import brief_name
from graphrt.tensor import Tensor

Floats = npt.NDArray[np.float32]


class Tap(Session):
    """A session that sums the squares of products' inputs. entries: by weight, of all tokens that were read;
    with_output: that of the output is among them.

    A batch's inputs of all layers are in memory at once: n_batch tokens of some times n_embd floats a layer.
    """

    def __init__(
        self,
        decoder: Decoder,
        backends: Sequence[Backend],
        options: SessionOptions = SessionOptions(),
        *,
        with_output: bool = False,
    ) -> None:
        super().__init__(decoder, backends, options)
        self.with_output = with_output
        self.entries: dict[str, Entry] = {}

    def prepared(self, n: int, n_outputs: int) -> PreparedStep:
        """The step of n tokens whose outputs are the products' inputs."""

        def make() -> PreparedStep:
            inputs = self.decoder.inputs(n, n_outputs, self.cache)
            nodes = products(Graph(self.decoder.result(inputs)), with_output=self.with_output)
            sources = dict.fromkeys(s for node in nodes for s in node.sources() if s is not node["weights"])
            ends = dict.fromkeys([*sources, *(nodes[-1:])])  # the last product itself, so that all of them are nodes
            return PreparedStep(inputs, prepare(Graph(*ends), self.backends))

        return self._prepared.made((n, n_outputs), make)

    def collect(self, tokens: Sequence[int]) -> None:
        """Reads tokens as a text of their own. Raises SessionError as eval() does, and for inputs that are not
        finite."""
        self.reset()
        with self.alone():
            ids = self.checked({0: tokens})[0]
            for start in range(0, len(ids), self.n_batch):
                part = ids[start : start + self.n_batch]
                step = self.feed({0: part}, every=True)
                step.exe.run()
                self.lengths[0] += len(part)
                step.exe.synchronize()
                self._add(step.exe)

    def _add(self, exe: Executable) -> None:
        values: dict[Tensor, Floats] = {}  # q, k and v read one input

        def read(t: Tensor) -> Floats:
            if t not in values:
                values[t] = np.asarray(exe.read(t), np.float32)
            return values[t]

        for node in products(exe.graph, with_output=self.with_output):
            weight, x = node["weights"], read(node["x"])
            if node.op == "MUL_MAT":
                sums, counts = _of_product(x, int(np.prod(weight.ne[2:])))
            else:
                sums, counts = _of_experts(x, np.asarray(exe.read(node["ids"])), weight.ne[2])
            if not np.isfinite(sums).all():
                raise SessionError(
                    f"inputs of {brief_name(weight.name)} must be finite to be summed, they are not; "
                    f"`graphrt trace --first-nan` says where they come from"
                )
            entry = self.entries.setdefault(weight.name, Entry(np.zeros_like(sums), np.zeros_like(counts)))
            entry.sums += sums
            entry.counts += counts


def products(graph: Graph, *, with_output: bool) -> list[Tensor]:
    """The nodes that multiply with a layer's weights, and with the output's."""
    found = []
    for node in graph.nodes:
        if node.op in ("MUL_MAT", "MUL_MAT_ID") and (weight := node["weights"]).is_leaf:
            name = weight.name
            last = name in ("output.weight", "token_embd.weight")
            if name.startswith("blk.") or (last and with_output):
                found.append(node)
    return found


def _of_product(x: Floats, n_mat: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """The sums for a weight of n_mat matrices, float64 [n_mat, n], and how many inputs each had, float64 [1]. x: the
    inputs, [..., matrices, rows, n], of which matrix i takes those of i modulo n_mat."""
    rows, n = x.shape[-2:]
    squares = np.square(x, dtype=np.float64).reshape(-1, n_mat, rows, n)
    return squares.sum((0, 2)), np.array([squares.shape[0] * rows], np.float64)


def _of_experts(
    x: Floats, ids: npt.NDArray[np.generic], n_expert: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Of experts: float64 [n_expert, n], and how many tokens each was given, float64 [n_expert]. x: [1, tokens, experts
    of a token or 1, n]; ids: [1, 1, tokens, experts of a token]."""
    chosen = ids.reshape(-1, ids.shape[-1]).astype(np.int64)
    squares = np.square(x[0], dtype=np.float64)
    squares = np.broadcast_to(squares, (*chosen.shape, squares.shape[-1])).reshape(chosen.size, -1)
    flat = chosen.reshape(-1)
    sums = np.zeros((n_expert, squares.shape[1]))
    for expert in np.unique(flat):
        sums[expert] = squares[flat == expert].sum(0)
    return sums, np.bincount(flat, minlength=n_expert).astype(np.float64)
