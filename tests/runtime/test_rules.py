"""Each rule of a valid graph is broken once, and caught by its name."""

from __future__ import annotations

import numpy as np
import pytest

import graphrt
from graphrt import Graph, Tensor, new_input, new_tensor, ops
from graphrt.backend import Usage
from graphrt.backends.cpu.memory import allocate
from graphrt.errors import GraphError
from graphrt.rules import RULES, check_graph
from graphrt.tensor import Flag


def _input(name: str = "a") -> Tensor:
    return new_input("f32", 4, 4, name=name)


def _sources_come_first() -> Graph:
    graph = Graph(ops.sqr(ops.sqrt(_input())))
    graph.nodes.reverse()
    return graph


def _source_is_missing() -> Graph:
    graph = Graph(ops.sqr(ops.sqrt(_input())))
    del graph.nodes[0]
    return graph


def _shape_is_not_the_op_s() -> Graph:
    node = ops.sqr(_input())
    node.ne = (4, 2, 1, 1)
    return Graph(node)


def _type_is_not_the_op_s() -> Graph:
    node = ops.sqr(_input())
    node.dtype = graphrt.dtype("i32")
    return Graph(node)


def _strides_are_not_the_view_s() -> Graph:
    node = ops.transpose(_input())
    node.nb = node.nb[1:2] + node.nb[1:]
    return Graph(ops.cont(node))


def _view_ends_outside() -> Graph:
    node = ops.view(_input(), (4, 2))
    node.view_offs = 40
    return Graph(node)


def _view_starts_outside() -> Graph:
    node = ops.view(_input(), (4, 2))
    node.view_offs = -4
    return Graph(node)


def _result_has_gaps() -> Graph:
    node = ops.sqr(_input())
    node.nb = (4, 32, 128, 128)
    return Graph(node)


def _result_lies_elsewhere() -> Graph:
    node = ops.sqr(_input())
    node.view_offs = 2**40
    return Graph(node)


def _result_lies_in_another_tensor() -> Graph:
    a = _input()
    node = ops.sqr(a)
    node.view_src = a
    return Graph(node)


def _stride_is_negative() -> Graph:
    node = ops.view(_input(), (4, 2))
    node.nb = (4, -16, 32, 32)
    return Graph(ops.cont(node))


def _leaf_has_strides() -> Graph:
    leaf = _input()
    leaf.nb = (4, 2**20, 2**22, 2**22)
    return Graph(ops.sqr(leaf))


def _leaf_looks_elsewhere() -> Graph:
    leaf = _input()
    leaf.view_offs = -64
    return Graph(ops.sqr(leaf))


def _node_is_input() -> Graph:
    node = ops.sqr(_input())
    node.flags |= Flag.INPUT
    return Graph(node)


def _bound(usage: Usage, nbytes: int, dt: str = "f32") -> Tensor:
    leaf = new_tensor(dt, 4, 4, name="bound")
    leaf.buffer = allocate(nbytes, usage)
    return leaf


def _weights_are_written() -> Graph:
    return Graph(ops.cpy(_input(), _bound(Usage.WEIGHTS, 64)))


def _weights_are_written_through_a_view() -> Graph:
    return Graph(ops.cpy(ops.view(_input(), (4, 2)), ops.view(_bound(Usage.WEIGHTS, 64), (4, 2))))


def _buffer_is_small() -> Graph:
    return Graph(ops.sqr(_bound(Usage.STATE, 60)))


def _leaf_ends_outside_its_buffer() -> Graph:
    leaf = _bound(Usage.STATE, 64)
    leaf.offset = 4
    return Graph(ops.sqr(leaf))


def _leaf_starts_outside_its_buffer() -> Graph:
    leaf = _bound(Usage.STATE, 128)
    leaf.offset = -4
    return Graph(ops.sqr(leaf))


def _output_has_no_data() -> Graph:
    return Graph(ops.sqr(new_tensor("f32", 4, name="empty").as_output()))


def _leaf_has_no_data() -> Graph:
    return Graph(ops.sqr(new_tensor("f32", 4, name="empty")))


BROKEN = [
    ("sources come first", _sources_come_first),
    ("sources come first", _source_is_missing),
    ("a result is what its op yields", _shape_is_not_the_op_s),
    ("a result is what its op yields", _type_is_not_the_op_s),
    ("a result is what its op yields", _strides_are_not_the_view_s),
    ("a result is what its op yields", _result_lies_in_another_tensor),
    ("views stay inside their source", _result_lies_elsewhere),
    ("views stay inside their source", _stride_is_negative),
    ("leafs have memory of their own", _leaf_has_strides),
    ("leafs have memory of their own", _leaf_looks_elsewhere),
    ("views stay inside their source", _view_ends_outside),
    ("views stay inside their source", _view_starts_outside),
    ("results have no gaps", _result_has_gaps),
    ("inputs are leafs", _node_is_input),
    ("weights are never written", _weights_are_written),
    ("weights are never written", _weights_are_written_through_a_view),
    ("leafs fit their buffers", _buffer_is_small),
    ("leafs fit their buffers", _leaf_ends_outside_its_buffer),
    ("leafs fit their buffers", _leaf_starts_outside_its_buffer),
    ("leafs have data", _leaf_has_no_data),
    ("leafs have data", _output_has_no_data),
]


@pytest.mark.parametrize(("rule", "graph"), BROKEN, ids=[b[1].__name__.strip("_") for b in BROKEN])
def test_a_broken_rule_is_caught_by_name(rule: str, graph: object) -> None:
    broken = graph()  # type: ignore[operator]
    with pytest.raises(GraphError, match=f"rule '{rule}' is broken by <"):
        check_graph(broken)
    with pytest.raises(GraphError, match=rule):
        graphrt.prepare(broken, "cpu")


def test_every_rule_is_broken_here() -> None:
    assert {name for name, _ in BROKEN} == {rule.name for rule in RULES}


def test_a_graph_has_outputs() -> None:
    with pytest.raises(GraphError, match="at least one output, got none"):
        check_graph(Graph())


def test_a_leaf_may_end_where_its_buffer_does() -> None:
    leaf = _bound(Usage.STATE, 80)
    leaf.offset = 16
    check_graph(Graph(ops.sqr(leaf)))


def test_valid_graphs_break_no_rule() -> None:
    state = _bound(Usage.STATE, 64)
    x = ops.mul_mat(_bound(Usage.WEIGHTS, 64), ops.cont(ops.transpose(_input("x"))))
    graph = Graph(ops.cpy(x, state), ops.view(x, (2, 2), x.nb[1:2], offs=8))
    check_graph(graph)
    exe = graphrt.prepare(graph, "cpu")
    exe.write("x", np.ones((4, 4)))
