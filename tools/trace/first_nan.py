"""Walks a NaN or infinity back to the node that makes it: `graphrt trace --first-nan`.

The step is known to be spoilt as it runs. All its nodes are kept and it runs again: the first node that holds a NaN has
made it, or reads a weight that holds one. If cutting made the NaN vanish, a fusion makes it: halves of the fusions are
left whole, all others cut, until one is left that brings the NaN back, and that one is shown with what it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graphrt.models.hparams import HParams
from graphrt.op import op_spec
from graphrt.tensor import Tensor
from graphrt.tools.inspect.describe import GraphInfo, GroupInfo, TensorInfo, describe
from graphrt.tools.inspect.labels import type_text
from graphrt.tools.inspect.node_stats import Stats, Values, stats_of
from graphrt.tools.inspect.traced_step import Step, cuttable

#: KQ_MASK hides with -inf: no fault of it, nor of what reads it.
_HIDES = ("KQ_MASK",)
#: Of a larger source (a table of embeddings) nothing is told: its values as float64 would take a GiB.
MAX_ELEMENTS = 2**27


@dataclass(frozen=True)
class Source:
    """What a node reads. stats: None where its values are not known, since it lives inside a
    fusion or is too large to look through."""

    name: str
    op: str
    type: str
    stats: Stats | None
    clean: bool | None


@dataclass(frozen=True)
class Found:
    """The first node that is spoilt. fusion: the nodes of the step that it is the result of, () for a node by itself.
    index: of the first bad value, in ne order; heads, rows: all those with bad values, heads None where the node has
    none; row_name: what a row is, "row" or of a cache "cell"."""

    node: TensorInfo
    fusion: tuple[str, ...]
    stats: Stats
    index: tuple[int, ...]
    head: int | None
    row: int
    heads: tuple[int, ...] | None
    rows: tuple[int, ...]
    row_name: str
    sources: tuple[Source, ...]

    @property
    def inputs_clean(self) -> bool:
        """Nothing that the node reads is known to be spoilt: it made the NaN itself."""
        return all(source.clean is not False for source in self.sources)

    @property
    def worst(self) -> Source | None:
        """The source to look at first: a spoilt one, else the one with the largest magnitude."""
        known = [s for s in self.sources if s.stats is not None]
        return max(known, key=_badness, default=None)


@dataclass(frozen=True)
class Verdict:
    """logits: of the spoilt step, uncut. found: None if nothing that could be read is spoilt. vanished: with every
    fusion cut the NaN is gone. fusions: how many were cut; culprit: the one that brings it back, None for none alone.
    repeats: the uncut step is spoilt each time."""

    n_past: int
    n_tokens: int
    logits: Stats
    found: Found | None
    vanished: bool
    fusions: int
    culprit: GroupInfo | None
    culprit_nodes: tuple[str, ...]
    repeats: bool


def _badness(source: Source) -> tuple[bool, float]:
    return source.clean is False, source.stats.largest if source.stats is not None else 0.0


def walk_back(step: Step, advance: Callable[[], None]) -> Verdict:
    """The verdict on a step that has just run uncut and was not clean. advance: is called before each run."""
    uncut = step.exe
    logits = stats_of(np.asarray(step.logits, np.float64))
    whole = cuttable(uncut.graph)
    info = describe(uncut)
    fused = fusions(info)
    n_leafs = len(uncut.graph.leafs)
    advance()
    left = {group.members for group in fusions(describe(step.run(whole)))}
    n_cut = sum(group.members not in left for group in fused)
    found = first_bad(step)
    if found is not None:
        return Verdict(step.n_past, len(step.ids), logits, found, False, n_cut, None, (), True)
    advance()
    step.run()
    repeats = not step.is_clean()
    culprit = _culprit(step, whole, fused, n_leafs, advance) if repeats else None
    names: tuple[str, ...] = ()
    if culprit is not None:
        names = tuple(info.tensors[i].name for i in culprit.members)
        advance()
        step.run(_cut_but(whole, [culprit], n_leafs))
        found = first_bad(step)
    return Verdict(step.n_past, len(step.ids), logits, found, True, n_cut, culprit, names, repeats)


def fusions(info: GraphInfo) -> list[GroupInfo]:
    """The steps of a prepared graph that are several nodes."""
    return [group for group in info.groups if len(group.members) > 1]


def _culprit(
    step: Step, whole: Sequence[int], fused: Sequence[GroupInfo], n_leafs: int, advance: Callable[[], None]
) -> GroupInfo | None:
    """One fusion that brings the NaN back when every other one is cut; None if it takes more than one."""
    suspects = list(fused)
    while suspects:
        half = suspects[: (len(suspects) + 1) // 2]
        advance()
        step.run(_cut_but(whole, half, n_leafs))
        if step.is_clean():
            suspects = suspects[len(half) :]
        elif len(half) == 1:
            return half[0]
        else:
            suspects = half
    return None


def _cut_but(whole: Sequence[int], left: Sequence[GroupInfo], n_leafs: int) -> list[int]:
    """All nodes but those that live inside the fusions that are left whole."""
    inside = {i - n_leafs for group in left for i in group.members if i not in group.results}
    return [i for i in whole if i not in inside]


def first_bad(step: Step) -> Found | None:
    """The first node of the latest run, of those that can be read, with a NaN or an infinity that no mask put there."""
    graph = step.exe.graph
    for i in cuttable(graph):
        node = graph.nodes[i]
        values = step.values(node)
        if values is not None and not _good(node, values).all():
            return _found(step, node, values)
    return None


def _good(t: Tensor, values: Values) -> npt.NDArray[np.bool_]:
    """Which values are as they should be: finite, or what a mask hides with."""
    finite = np.isfinite(values)
    return finite | np.isneginf(values) if t.op in _HIDES else finite


def _found(step: Step, node: Tensor, values: Values) -> Found:
    """All that is told of a spoilt node. values: its elements, float64 in torch's shape."""
    graph, info = step.exe.graph, describe(step.exe)
    mine = info.tensors[len(graph.leafs) + graph.nodes.index(node)]
    group = info.groups[mine.group] if mine.group is not None else None
    members = group.members if group is not None and len(group.members) > 1 else ()
    order = [*graph.leafs, *graph.nodes]
    read = {s: None for i in members or (mine.index,) for s in _read_by(info.tensors[i]) if s not in members}
    bad, cells = np.argwhere(~_good(node, values))[:, ::-1], step.cells(node)  # in ne order
    if cells is not None:
        bad[:, 1] = cells[bad[:, 1]]
    hp = step.session.decoder.hp
    heads, rows = heads_of(node, graph.nodes, mine.layer, hp, bad), bad[:, row_axis(node, mine.layer, hp)]
    return Found(
        node=mine,
        fusion=tuple(info.tensors[i].name for i in members),
        stats=stats_of(values),
        index=tuple(map(int, bad[0])),
        head=None if heads is None else int(heads[0]),
        row=int(rows[0]),
        heads=None if heads is None else tuple(map(int, np.unique(heads))),
        rows=tuple(map(int, np.unique(rows))),
        row_name="row" if cells is None else "cell",
        sources=tuple(_source(step, order[i], info.tensors[i]) for i in read),
    )


def _read_by(t: TensorInfo) -> list[int]:
    """The sources of a node but for the one that it writes into: that has the result by now, and was clean before."""
    writes = op_spec(t.op).writes
    return [s for name, s in t.sources_by_name().items() if name != writes]


def _source(step: Step, t: Tensor, info: TensorInfo) -> Source:
    values = None if t.n_elements > MAX_ELEMENTS else step.values(t)
    if values is None:
        return Source(t.name, t.op, type_text(info), None, None)
    return Source(t.name, t.op, type_text(info), stats_of(values), bool(_good(t, values).all()))


# ---- heads and rows ----

Indices = npt.NDArray[np.int64]


def _by_head(t: Tensor, layer: int | None, hp: HParams) -> bool:
    """A tensor [head size, heads, rows]."""
    if layer is None:
        return False
    return t.ne[0] in (hp.d_k, hp.d_v) and t.ne[1] in (hp.n_head[layer], hp.n_head_kv[layer])


def row_axis(t: Tensor, layer: int | None, hp: HParams) -> int:
    return 2 if _by_head(t, layer, hp) else 1


def heads_of(t: Tensor, nodes: Sequence[Tensor], layer: int | None, hp: HParams, at: Indices) -> Indices | None:
    """The head of each index, int64 [n, 4] in ne order to [n]; None for a tensor without heads: it has no axis of them,
    no view of it has, and it is not what a cache of them is written with."""
    if layer is None:
        return None
    if _by_head(t, layer, hp):
        return at[:, 1]
    for reader in (n for n in nodes if t in n.sources()):
        size = t.ne[0] // hp.n_head_kv[layer] if reader.op == "SET_ROWS" else reader.ne[0]
        splits = reader.op in ("RESHAPE", "VIEW") and size in (hp.d_k, hp.d_v) and size < t.ne[0]
        if reader.op == "SET_ROWS" or splits:
            return at[:, 0] // size
    return None
