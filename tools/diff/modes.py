"""Runs the modes of `graphrt diff`, and writes the first bad step down."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from graphrt.execute import plan_groups
from graphrt.tools.common import progress
from graphrt.tools.conformance.run.saved import save_failure
from graphrt.tools.diff.nodes import free_run, group_name, readable, wanted_keys
from graphrt.tools.diff.pieces import Piece, Resync
from graphrt.tools.diff.report import Cut, Finding, Mode, mode_of, shown_side
from graphrt.tools.diff.sides import Pair, RunSide
from graphrt.tools.inspect.describe import GraphInfo
from graphrt.tools.inspect.traced_step import cuttable, looked_at


def modes_of(
    pair: Pair, info: GraphInfo, patterns: Sequence[re.Pattern[str]], *, cut: bool, fed: bool
) -> tuple[list[Mode], Cut | None]:
    """The free run, and re-synced if `fed`; what cutting did, if anything was to be cut."""
    graph = pair.running[0].run.exe.graph
    keys = wanted_keys(pair, patterns)
    watched: list[int] | None = None
    over_uncut: tuple[str, ...] = ()
    with progress("running freely", 3 * (1 + cut)) as advance:
        if cut:
            over_uncut = tuple(d.key for d in free_run(pair, None, (), advance) if d.over)
            watched = cuttable(graph)
        elif patterns:
            index = {t.name: i for i, t in enumerate(graph.nodes)}
            watched = sorted(looked_at(graph, [index[key] for key in keys if key in index]))
        nodes = free_run(pair, watched, patterns, advance)
    modes = [mode_of("free-running", pair, nodes, keys, info)]
    opened = None if watched is None else _opened(pair, watched, over_uncut, modes[0])
    if fed:
        modes.append(_resynced(pair, info, keys, cut))
    return modes, opened


def _opened(pair: Pair, watched: Sequence[int], over_uncut: tuple[str, ...], free: Mode) -> Cut:
    side = shown_side(pair)
    left = {group_name(g) for g in plan_groups(side.run.graph(watched), side.run.backends)}
    fusions = [group_name(g) for g in side.groups if len(g.nodes) > 1]
    return Cut(len(fusions), sum(g not in left for g in fusions), over_uncut, bool(over_uncut) and not free.over)


def _resynced(pair: Pair, info: GraphInfo, keys: Sequence[str], cut: bool) -> Mode:
    assert isinstance(pair.other, RunSide)
    graph = pair.other.run.exe.graph
    kept = {graph.nodes[i].name for i in readable(pair.other)}
    work, nodes = Resync(pair, cut, kept), []
    groups = work.groups()
    with progress("running step by step", len(groups)) as advance:
        for group in groups:
            nodes += work.compare(group)
            advance()
    wanted = set(keys)
    found = sorted((d for d in nodes if d.key in wanted), key=lambda d: d.index)
    return mode_of("re-synced", pair, found, keys, info)


def save_first(path: Path, pair: Pair, first: Finding, title: str) -> None:
    """Writes the step that a finding ends, with the reference's inputs and both results, as a file for `graphrt
    replay`."""
    assert isinstance(pair.reference, RunSide) and isinstance(pair.other, RunSide)
    graph = pair.other.run.exe.graph
    by_name = {t.name: t for t in graph.nodes}
    members, result = [by_name[name] for name in first.members or (first.node.name,)], by_name[first.node.name]
    work = Resync(pair, False, ())
    piece = Piece(members, own_weights=True)
    case = f"{result.op}(diff={first.node.name.replace(' ', '_')},of={title.replace(' ', '_')})"
    inputs = piece.saved(case, result, work.inputs_of(piece))
    expected = pair.reference.run.exe.read(pair.reference.nodes[result.name])
    save_failure(path, inputs, expected, None, first.diff.verdict.message)
