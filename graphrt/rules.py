"""What makes a graph valid: a list of rules, checked before every prepare.

Builders check as they build; the rules hold for graphs from anywhere else too (a file, a backend's rewrite).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from graphrt.backend import Usage
from graphrt.bounds import span
from graphrt.errors import GraphError, MemoryPlanError
from graphrt.graph import Graph
from graphrt.op import build, op_spec
from graphrt.tensor import Flag, Tensor, contiguous_nb

Violations = Iterator[tuple[Tensor, str]]


@dataclass(frozen=True)
class Rule:
    """A named rule; `check` yields each tensor that breaks it with what is wrong."""

    name: str
    check: Callable[[Graph], Violations]


def _sources_come_first(graph: Graph) -> Violations:
    done = set(graph.leafs)
    for node in graph.nodes:
        for source in node.sources():
            if source not in done:
                yield node, f"its source {source.name!r} comes after it or is not in the graph"
        done.add(node)


def _result_is_what_the_op_yields(graph: Graph) -> Violations:
    for node in graph.nodes:
        made = build(op_spec(node.op), *node.src, params=node.params)
        if (made.dtype, made.ne) != (node.dtype, node.ne):
            yield node, f"{node.op} yields {made.describe()}, the node says {node.describe()}"
        elif made.view_src is not node.view_src or made.view_offs != node.view_offs:
            yield node, f"{node.op} yields {_where(made)}, the node says {_where(node)}"
        elif made.view_src is not None and made.nb != node.nb:
            yield node, f"{node.op} yields strides {list(made.nb)}, the node says {list(node.nb)}"


def _where(t: Tensor) -> str:
    """Whose memory a tensor uses."""
    return "memory of its own" if t.view_src is None else f"memory of {t.view_src.name!r} from byte {t.view_offs} on"


def _views_stay_inside(graph: Graph) -> Violations:
    for node in graph.nodes:
        try:
            span(node, node.view_offs, node.root.nbytes)
        except MemoryPlanError as error:
            yield node, f"in {node.root.name!r}: {error}"


def _results_have_no_gaps(graph: Graph) -> Violations:
    for node in graph.nodes:
        if node.view_src is None and node.nb != contiguous_nb(node.dtype, node.ne):
            yield node, f"a result that owns its memory is contiguous, its strides are {list(node.nb)}"


def _leafs_have_memory_of_their_own(graph: Graph) -> Violations:
    for leaf in graph.leafs:
        if leaf.view_src is not None or leaf.view_offs or leaf.nb != contiguous_nb(leaf.dtype, leaf.ne):
            yield leaf, f"it lies in {_where(leaf)} with strides {list(leaf.nb)}; make a view of a leaf by an op"


def _inputs_are_leafs(graph: Graph) -> Violations:
    for node in graph.nodes:
        if node.flags & Flag.INPUT:
            yield node, "only a leaf can be an input"


def _inputs_have_names_of_their_own(graph: Graph) -> Violations:
    named: set[str] = set()
    for leaf in graph.inputs:
        if leaf.name in named:
            yield leaf, f"another input is named {leaf.name!r} too, and inputs are written by name; rename one"
        named.add(leaf.name)


def _weights_are_never_written(graph: Graph) -> Violations:
    for node in graph.nodes:
        if (writes := op_spec(node.op).writes) is not None:
            target = node[writes].root
            if target.buffer is not None and target.buffer.usage is Usage.WEIGHTS:
                yield node, f"it writes into {target.name!r}, which lies in a weights buffer"


def _leafs_fit_their_buffers(graph: Graph) -> Violations:
    for leaf in graph.leafs:
        if leaf.buffer is not None and not 0 <= leaf.offset <= leaf.buffer.nbytes - leaf.nbytes:
            yield leaf, f"it ends at byte {leaf.offset + leaf.nbytes} of a buffer of {leaf.buffer.nbytes}"


def _leafs_have_data(graph: Graph) -> Violations:
    for leaf in graph.leafs:
        if leaf.buffer is None and not leaf.flags & Flag.INPUT:
            yield leaf, "a leaf is an input or has a buffer; make it with new_input() or bind a buffer"


RULES = (
    Rule("sources come first", _sources_come_first),
    Rule("views stay inside their source", _views_stay_inside),
    Rule("a result is what its op yields", _result_is_what_the_op_yields),
    Rule("results have no gaps", _results_have_no_gaps),
    Rule("leafs have memory of their own", _leafs_have_memory_of_their_own),
    Rule("inputs are leafs", _inputs_are_leafs),
    Rule("inputs have names of their own", _inputs_have_names_of_their_own),
    Rule("weights are never written", _weights_are_never_written),
    Rule("leafs fit their buffers", _leafs_fit_their_buffers),
    Rule("leafs have data", _leafs_have_data),
)


def check_graph(graph: Graph) -> None:
    """Raises GraphError naming the first rule that is broken, the tensor and what is wrong."""
    if not graph.outputs:
        raise GraphError("a graph must have at least one output, got none; pass the results you want to Graph(...)")
    for rule in RULES:
        for tensor, wrong in rule.check(graph):
            raise GraphError(f"graph rule '{rule.name}' is broken by {tensor!r}: {wrong}")
