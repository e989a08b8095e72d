"""What `graphrt diff` found: both modes, the first node that is too far off and all that is known of it."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from graphrt.op import op_spec
from graphrt.patterns import place
from graphrt.tensor import Tensor
from graphrt.testing import nmse
from graphrt.tools.diff.file import FileSide, node_keys
from graphrt.tools.diff.nodes import NodeDiff
from graphrt.tools.diff.sides import Pair, RunSide, Side
from graphrt.tools.inspect.describe import GraphInfo, TensorInfo, describe
from graphrt.tools.inspect.node_stats import Values
from graphrt.tools.trace.first_nan import MAX_ELEMENTS, heads_of


@dataclass(frozen=True)
class Input:
    """What a node reads. nmse: of the other side's against the reference's, None where one of them can't be read."""

    name: str
    op: str
    nmse: float | None


@dataclass(frozen=True)
class Finding:
    """The first node that is too far off. node: as the other side has it; group: the fusion it is the result of, and
    its nodes, "" and () for a node by itself; head: of the worst element, None for a tensor without heads; where: that
    element in words; inputs: () where the node was fed with the reference's."""

    diff: NodeDiff
    node: TensorInfo
    group: str
    members: tuple[str, ...]
    head: int | None
    where: str
    inputs: tuple[Input, ...]


@dataclass(frozen=True)
class Mode:
    """name: "free-running" or "re-synced"; nodes: in the order of the graph; unread: computing nodes that could not be
    compared."""

    name: str
    nodes: list[NodeDiff]
    unread: int
    first: Finding | None

    @property
    def over(self) -> list[NodeDiff]:
        return [d for d in self.nodes if d.over]


@dataclass(frozen=True)
class Cut:
    """What opening fusions did. fusions: of the other side; cut: how many of them; over_uncut: names of nodes that were
    too far off before; vanished: they were, and with the fusions open nothing is."""

    fusions: int
    cut: int
    over_uncut: tuple[str, ...]
    vanished: bool


@dataclass(frozen=True)
class Report:
    """title: what was run; sides: the reference's and the other's; info: the graph as the side that shows it has it;
    cut: None if nothing was to be opened."""

    title: str
    sides: tuple[str, str]
    info: GraphInfo
    modes: list[Mode]
    cut: Cut | None
    n_tokens: int
    n_past: int

    @property
    def differs(self) -> bool:
        return any(mode.over for mode in self.modes) or (self.cut is not None and self.cut.vanished)


def shown_side(pair: Pair) -> RunSide:
    """The other side where it runs on as many ranks, else the reference."""
    return pair.other if isinstance(pair.other, RunSide) and pair.plan is None else pair.running[0]


def mode_of(name: str, pair: Pair, nodes: list[NodeDiff], wanted: Collection[str], info: GraphInfo) -> Mode:
    """A mode with its first finding. wanted: the keys that were to be compared."""
    seen = {d.key for d in nodes}
    first = next((d for d in nodes if d.over), None)
    found = None if first is None else _finding(first, pair, info, fed=name == "re-synced")
    return Mode(name, nodes, sum(key not in seen for key in wanted), found)


def _finding(diff: NodeDiff, pair: Pair, info: GraphInfo, fed: bool) -> Finding:
    side = shown_side(pair)
    nodes = side.run.exe.graph.nodes
    node, mine = nodes[diff.index], info.nodes[diff.index]
    at, head = diff.at, None
    if at is not None:
        cells = side.run.cells(node)
        if cells is not None:
            at = (at[0], int(cells[at[1]]), *at[2:])
        if side.run.hp is not None and len(at) == 4:
            heads = heads_of(node, nodes, mine.layer, side.run.hp, np.array([at]))
            head = None if heads is None else int(heads[0])
    group = info.groups[mine.group] if mine.group is not None else None
    members = tuple(info.tensors[i].name for i in group.members) if group is not None and len(group.members) > 1 else ()
    where = "" if at is None else place(at, node.op)
    inputs = () if fed else tuple(_inputs(pair, info, members or (mine.name,)))
    return Finding(diff, mine, group.name if group is not None and members else "", members, head, where, inputs)


def _inputs(pair: Pair, info: GraphInfo, members: tuple[str, ...]) -> list[Input]:
    """What the nodes read from outside, but for what they write into."""
    tensors = {t.name: t for t in info.tensors}
    found = dict[str, Input]()
    for name in members:
        t = tensors[name]
        for role, s in t.sources_by_name().items():
            if role == op_spec(t.op).writes:
                continue
            source = info.tensors[s]
            while not source.is_leaf and op_spec(source.op).is_view:
                source = info.tensors[source.sources()[0]]
            if source.name not in members and source.name not in found:
                found[source.name] = Input(source.name, source.op, _input_nmse(pair, source.name))
    return list(found.values())


def _input_nmse(pair: Pair, name: str) -> float | None:
    if pair.plan is not None:
        return None
    expected, actual = (_values(side, pair, name) for side in (pair.reference, pair.other))
    if expected is None or actual is None or expected.shape != actual.shape:
        return None
    return nmse(actual, expected)


def _values(side: Side, pair: Pair, name: str) -> Values | None:
    if isinstance(side, FileSide):
        return side.by_key(pair.running[0].run).get(name)
    graph = side.run.exe.graph
    t: Tensor | None = node_keys(graph).get(name) or graph.tensor(name)
    return None if t is None or t.n_elements > MAX_ELEMENTS else side.run.values(t)


def described(pair: Pair, title: str, phase: str, n_tokens: int) -> GraphInfo:
    """The graph of the side that shows it, as it runs uncut."""
    side = shown_side(pair)
    side.run.run()
    return describe(side.run.exe, title, phase, n_tokens)


# ---- for programs ----


def as_json(report: Report, tokens: list[int]) -> dict[str, Any]:
    """The report as plain data. Relative figures are NMSE; tolerance: None where every bit must be right."""
    cut = None if report.cut is None else asdict(report.cut)
    return {
        "title": report.title,
        "phase": report.info.phase,
        "tokens": tokens,
        "n_past": report.n_past,
        "reference": report.sides[0],
        "other": report.sides[1],
        "differs": report.differs,
        "cut": cut,
        "modes": [_mode_json(mode, report.info) for mode in report.modes],
    }


def _mode_json(mode: Mode, info: GraphInfo) -> dict[str, Any]:
    nodes = [_node_json(d, info) for d in mode.nodes]
    first = None if mode.first is None else _finding_json(mode.first, info)
    return {"mode": mode.name, "unread": mode.unread, "over": len(mode.over), "first": first, "nodes": nodes}


def _node_json(d: NodeDiff, info: GraphInfo) -> dict[str, Any]:
    t = info.nodes[d.index]
    known = {"index": t.index, "name": d.key, "op": t.op, "layer": t.layer, "type": t.dtype, "ne": list(t.ne)}
    figures = {"nmse": d.nmse, "tolerance": d.verdict.limit, "ratio": d.ratio, "max_abs": d.verdict.max_abs}
    return known | figures | {"over": d.over}


def _finding_json(f: Finding, info: GraphInfo) -> dict[str, Any]:
    place_ = {"at": None if f.diff.at is None else list(f.diff.at), "head": f.head, "where": f.where}
    values = {"expected": f.diff.expected, "actual": f.diff.actual, "message": f.diff.verdict.message}
    run = {"backend": f.node.backend, "fusion": f.group or None, "members": list(f.members), "nb": list(f.node.nb)}
    return _node_json(f.diff, info) | run | place_ | values | {"inputs": [asdict(i) for i in f.inputs]}


def overlay(mode: Mode) -> dict[str, float]:
    """The relative error of each node in parts of its tolerance, which `graphrt dump --overlay` lays over a graph."""
    return {d.key: d.ratio for d in mode.nodes if not math.isnan(d.ratio)}
