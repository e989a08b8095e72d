"""Node by node: how far one side of `graphrt diff` is from the other, and how far it may be.

The rule is the conformance judge's (graphrt/judge.py): at most twice what the same work in low precision is off by,
plus a rounding band. Of sides that run freely the low-precision run is one of the whole step, so that it inherits
errors as the sides do; its error counts FREE_FACTOR times, and as the largest that it has had so far at a node of this
name in any layer, since a single node's may cancel by luck. The ceilings, which are for one op, do not apply there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from graphrt.backend import Group
from graphrt.errors import SessionError
from graphrt.execute import plan_groups
from graphrt.judge import PRECISIONS, Precision, Verdict, judge, judge_equal, judge_order, judge_written, precision
from graphrt.op import op_spec
from graphrt.tensor import Tensor
from graphrt.testing import AnyArray, dequantize, nmse
from graphrt.tools.diff.file import FileSide, node_keys
from graphrt.tools.diff.ranked import AllRanks, named
from graphrt.tools.diff.sides import Pair, RunSide
from graphrt.tools.inspect.node_stats import Values
from graphrt.tools.inspect.traced_step import cuttable

#: Ops that give indices of src[0]'s rows: ties may go either way.
ORDERS = ("ARGMAX", "ARGSORT", "TOP_K")


#: Two honest low-precision runs of the same step were up to 1.4 times the judge's rule apart (SmolLM2-135M and
#: gemma-3-270m, prefill and decode, 577 and 495 nodes each): a step is long, and their errors go different ways.
FREE_FACTOR = 2.0


@dataclass(frozen=True)
class NodeDiff:
    """A node of both sides. key: its name; index: in graph.nodes; verdict: the judge's; at: the element with the
    largest difference, in ne order, and there the values of the reference and of the other side, None where no one
    element tells."""

    key: str
    index: int
    verdict: Verdict
    at: tuple[int, ...] | None
    expected: float | None
    actual: float | None

    @property
    def over(self) -> bool:
        return not self.verdict.ok

    @property
    def nmse(self) -> float:
        """Infinite where indices or the places of NaN differ."""
        found = self.verdict.nmse
        return found if found is not None else 0.0 if self.verdict.ok else math.inf

    @property
    def ratio(self) -> float:
        """The relative error in parts of the tolerance: over 1 is too far. inf where nothing may differ, and does."""
        limit = self.verdict.limit or 0.0
        if limit == 0.0:
            return 0.0 if self.nmse == 0.0 else math.inf
        return math.sqrt(self.nmse / limit)


def compared(
    node: Tensor,
    index: int,
    key: str,
    actual: Values,
    expected: Values,
    low: Values,
    rule: Precision,
    order: Values | None = None,
) -> NodeDiff:
    """One node's values on both sides, float64 in torch's shape. order: what indices point into."""
    if node.dtype.kind == "int":
        whole = actual.astype(np.int64), expected.astype(np.int64)
        points = node.op in ORDERS and order is not None
        verdict = judge_order(node, *whole, order) if points else judge_equal(node, *whole)  # type: ignore[arg-type]
    else:
        verdict = judge(node, actual, expected, low, rule)
    at = verdict.worst
    if at is None:
        return NodeDiff(key, index, verdict, None, None, None)
    return NodeDiff(key, index, verdict, at, float(expected[at[::-1]]), float(actual[at[::-1]]))


def compared_bits(node: Tensor, index: int, key: str, actual: AnyArray, expected: AnyArray) -> NodeDiff:
    """A node whose result is moved or written, not computed: both sides as stored."""
    verdict = (judge_written if node.dtype.is_quantized else judge_equal)(node, actual, expected)
    at = verdict.worst
    if at is None or node.dtype.is_quantized and verdict.nmse is None:
        return NodeDiff(key, index, verdict, at, None, None)
    a, e = (np.asarray(dequantize(raw, node.dtype), np.float64) for raw in (actual, expected))
    figures = replace(verdict, nmse=nmse(a, e), max_abs=float(np.abs(a - e).max()))
    return NodeDiff(key, index, figures, at, float(e[at[::-1]]), float(a[at[::-1]]))


# ---- what can be read ----


def readable(side: RunSide) -> list[int]:
    """The nodes, as indices of graph.nodes, that a side can keep without any of its fusions becoming another: ends of
    fusions, but for those that hand their result on in a form of their own."""
    index = {key: i for i, key in enumerate(node_keys(side.run.graph()))}
    whole = [group_name(group) for group in side.groups]
    ends = {result: group for group in whole for result in group[2]}
    kept = [result for result in ends if result in index]
    while True:
        now = _groups_keeping(side, [index[name] for name in kept])
        left = [name for name in kept if ends[name] in now]
        if left == kept:
            break
        kept = left
    for nth in range(max((len(group[2]) for group in whole), default=0)):  # of several results some may do
        more = [group[2][nth] for group in whole if len(group[2]) > nth and group[2][nth] not in kept]
        now = _groups_keeping(side, [index[name] for name in [*kept, *more] if name in index])
        kept += [name for name in more if ends[name] in now] if set(whole) <= now else []
    return sorted(index[name] for name in kept)


#: A group by the names of its members, its kernel, the names of its results and of those that are private.
GroupName = tuple[tuple[str, ...], str, tuple[str, ...], tuple[str, ...]]


def group_name(group: Group) -> GroupName:
    """What a group is known by in another preparation of its graph."""
    kernel = group.kernel if isinstance(group.kernel, str) else group.label
    members, results, private = (tuple(n.name for n in of) for of in (group.nodes, group.results, group.private))
    return members, kernel, results, private


def _groups_keeping(side: RunSide, keep: Collection[int]) -> set[GroupName]:
    return {group_name(group) for group in plan_groups(side.run.graph(keep), side.run.backends)}


# ---- free-running ----


def free_run(
    pair: Pair, watched: Sequence[int] | None, patterns: Sequence[re.Pattern[str]], advance: Callable[[], None]
) -> list[NodeDiff]:
    """Runs both sides and compares what both give. watched: the nodes that are kept, whatever that cuts; None for those
    that cut nothing. patterns: of the beginnings of names that are compared, all if there are none."""
    for side in pair.running:
        side.run.run(readable(side) if watched is None else watched)
        advance()
    pair.low.run.run(cuttable(pair.low.run.exe.graph))
    advance()
    return compare_all(pair, patterns)


def wanted_keys(pair: Pair, patterns: Sequence[re.Pattern[str]]) -> list[str]:
    """The nodes that compute and are to be compared. Raises SessionError for patterns that match none."""
    graph = pair.running[0].run.exe.graph
    computing = {graph.nodes[i] for i in cuttable(graph)}
    keys = [key for key, t in node_keys(graph).items() if t in computing and _wanted(t.name, patterns)]
    if not keys:
        names = ", ".join(t.name for t in graph.nodes[:12])
        asked = " or ".join(p.pattern for p in patterns)
        raise SessionError(
            f"--filter must match the beginning of a computing node's name, {asked[:200]!r} does not: {names}, ..."
        )
    return keys


def _wanted(name: str, patterns: Sequence[re.Pattern[str]]) -> bool:
    return not patterns or any(p.match(name) for p in patterns)


def compare_all(pair: Pair, patterns: Sequence[re.Pattern[str]] = ()) -> list[NodeDiff]:
    """What both sides hold after their latest runs; by numbers of the other side's nodes where it runs."""
    graph = pair.running[0].run.exe.graph
    sides = [_reader(side, pair) for side in (pair.reference, pair.other, pair.low)]
    has_file = any(isinstance(side, FileSide) for side in (pair.reference, pair.other))
    found, grown = [], dict[str, float]()
    ranks = None
    if pair.plan is not None:
        assert isinstance(pair.other, RunSide)
        ranks = AllRanks(pair.other.run, pair.plan)
    shown = {key: i for i, key in enumerate(node_keys(pair.running[0 if ranks else -1].run.exe.graph))}
    for key, node in node_keys(graph).items():
        if not pair.alike and UNNAMED.match(key):  # its number is another node's on the other side
            continue
        if not _wanted(node.name, patterns) or (op_spec(node.op).is_view and not has_file):
            continue
        expected, actual, low = (read(key) for read in sides)
        if ranks is not None and expected is not None:
            actual = ranks.values(key, expected.shape)
        if expected is None or actual is None or low is None or expected.shape != actual.shape or key not in shown:
            continue
        order = None
        if node.op in ORDERS:
            order, theirs = (read(node["a"].name) for read in sides[:2])
            if order is None or theirs is None or not np.array_equal(order, theirs, equal_nan=True):
                continue  # of other values the order may honestly be another
        low, own = _widened(low, expected)
        stem = _stem(key)
        grown[stem] = max(own, grown.get(stem, 0.0))
        band = PRECISIONS[precision(node)].band + 2.0 * (grown[stem] - own)
        found.append(compared(node, shown[key], key, actual, expected, low, Precision(band, math.inf), order))
    return found


#: Names that a graph gives to nodes without one, by their place.
UNNAMED = re.compile(r"node_\d+$")


def _widened(low: Values, expected: Values) -> tuple[Values, float]:
    """The low-precision values with FREE_FACTOR times their error, and their relative error then."""
    with np.errstate(invalid="ignore"):
        away = np.where(np.isfinite(expected), expected + FREE_FACTOR * (low - expected), expected)
    own = math.sqrt(nmse(away, expected))
    return away, own if math.isfinite(own) else 0.0


def _stem(key: str) -> str:
    """A node's name without its layer and rank."""
    return re.sub(r"-\d+$|_l\d+(?= )", "", named(key)[0])


def _reader(side: RunSide | FileSide, pair: Pair) -> Callable[[str], Values | None]:
    """What gives a node's values by its key."""
    if isinstance(side, FileSide):
        return side.by_key(pair.running[0].run).get
    nodes, run = side.nodes, side.run
    return lambda key: run.values(nodes[key]) if key in nodes else None
