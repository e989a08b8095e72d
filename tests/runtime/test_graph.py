"""Graph: order, leafs, use counts, names and the topology key."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphrt import Graph, Tensor, new_input, new_tensor, ops
from graphrt.backend import Usage
from graphrt.backends.cpu.memory import allocate
from graphrt.rules import check_graph


def test_nodes_come_in_post_order_left_to_right() -> None:
    a, b = new_input("f32", 4, name="a"), new_input("f32", 4, name="b")
    left, right = ops.sqr(b, name="left"), ops.sqrt(a, name="right")
    top = ops.add(left, right, name="top")
    graph = Graph(top)
    assert [t.name for t in graph.nodes] == ["left", "right", "top"]
    assert [t.name for t in graph.leafs] == ["b", "a"]
    assert graph.inputs == graph.leafs and graph.outputs == [top]


def test_use_counts_count_every_slot() -> None:
    a = new_input("f32", 4, name="a")
    b = ops.mul(a, a)
    graph = Graph(ops.add(b, a))
    assert (graph.uses(a), graph.uses(b), graph.uses(graph.outputs[0])) == (3, 1, 0)


def test_expand_adds_only_what_is_new() -> None:
    a = new_input("f32", 4, name="a")
    b = ops.sqr(a, name="b")
    graph = Graph(b)
    before = graph.key
    c = graph.expand(ops.scale(b, 2.0, name="c"))
    assert [t.name for t in graph.nodes] == ["b", "c"] and graph.leafs == [a]
    assert graph.uses(b) == 1 and graph.outputs == [b, c] and graph.key != before


def test_unnamed_tensors_are_named_as_ggml_does() -> None:
    graph = Graph(ops.add(ops.sqr(new_tensor("f32", 4)), new_tensor("f32", 4)))
    assert [t.name for t in graph.leafs] == ["leaf_0", "leaf_1"]
    assert [t.name for t in graph.nodes] == ["node_0", "node_1"]
    assert graph.tensor("node_1") is graph.nodes[1] and graph.tensor("leaf_1") is graph.leafs[1]
    assert graph.tensor("nothing") is None


def test_kept_holds_whatever_is_marked() -> None:
    a = new_input("f32", 4, name="a")
    middle = ops.sqr(a).as_output()
    graph = Graph(ops.sqrt(middle))
    assert graph.kept == [middle, graph.outputs[0]] and graph.outputs != graph.kept


def test_a_deep_graph_needs_no_deep_stack() -> None:
    t = new_input("f32", 1, name="a")
    for _ in range(20_000):
        t = ops.scale(t, 1.0)
    graph = Graph(t)
    assert len(graph.nodes) == 20_000 and graph.nodes[-1] is t and graph.nodes[0].src[0] is graph.leafs[0]
    check_graph(graph)
    assert len(graph.key) == 64


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=40), st.data())
def test_sources_come_before_users_once_each(edges: list[tuple[int, int]], data: st.DataObject) -> None:
    tensors = [new_input("f32", 2, name="a")]
    for i, j in edges:
        tensors.append(ops.add(tensors[i % len(tensors)], tensors[j % len(tensors)]))
    outputs = data.draw(st.lists(st.sampled_from(tensors), min_size=1, max_size=3))
    graph = Graph(*outputs)
    place = {t: i for i, t in enumerate([*graph.leafs, *graph.nodes])}
    assert len(place) == len(graph.leafs) + len(graph.nodes)
    assert all(place[s] < place[t] for t in graph.nodes for s in t.sources())
    assert all(graph.uses(t) == sum(list(n.sources()).count(t) for n in graph.nodes) for t in place)
    needed: set[Tensor] = set()
    todo = list(outputs)
    while todo:
        t = todo.pop()
        if t not in needed:
            needed.add(t)
            todo.extend(t.sources())
    assert needed == set(place)


# -- the key


def _graph(
    dt: str = "f32", n: int = 4, factor: float = 2.0, names: tuple[str, str] = ("a", "b"), out: str = "out"
) -> Graph:
    a, b = (new_input(dt, n, name=name) for name in names)
    return Graph(ops.sub(ops.scale(a, factor), b, name=out))


def test_equal_graphs_have_one_key() -> None:
    assert _graph().key == _graph().key
    a = new_input("f32", 4, name="a")
    unlike = Graph(ops.sub(ops.scale(a, 2.0, name="inner name"), new_input("f32", 4, name="b"), name="out"))
    assert unlike.key == _graph().key, "names of inner nodes don't count"


def _swapped() -> Graph:
    a, b = new_input("f32", 4, name="a"), new_input("f32", 4, name="b")
    return Graph(ops.sub(b, ops.scale(a, 2.0), name="out"))


def _one_source_twice() -> Graph:
    a = new_input("f32", 4, name="a")
    return Graph(ops.sub(ops.scale(a, 2.0), a, name="out"))


def _view(offs: int, nb: int = 16) -> Graph:
    a = new_input("f32", 4, 4, name="a")
    return Graph(ops.cont(ops.view(a, (2, 2), (nb,), offs), name="out"))


def _two_outputs(first: bool) -> Graph:
    a = new_input("f32", 4, name="a")
    x, y = ops.sqr(a, name="x"), ops.sqrt(a, name="y")
    return Graph(x, y) if first else Graph(y, x)


def _marked(mark: bool) -> Graph:
    a = new_input("f32", 4, name="a")
    middle = ops.sqr(a, name="middle")
    return Graph(ops.sqrt(middle.as_output() if mark else middle, name="out"))


_BUFFERS = [allocate(64, Usage.STATE), allocate(64, Usage.STATE)]


def _leaf_in(buffer: int, offset: int) -> Graph:
    leaf = new_tensor("f32", 4, name="a")
    leaf.buffer, leaf.offset = _BUFFERS[buffer], offset
    return Graph(ops.sqr(leaf, name="out"))


CHANGES: dict[str, tuple[Callable[[], Graph], Callable[[], Graph]]] = {
    "type": (_graph, lambda: _graph(dt="f16")),
    "shape": (_graph, lambda: _graph(n=5)),
    "params": (_graph, lambda: _graph(factor=2.5)),
    "source order": (_graph, _swapped),
    "one source twice": (_graph, _one_source_twice),
    "input name": (_graph, lambda: _graph(names=("a", "c"))),
    "input names swapped": (_graph, lambda: _graph(names=("b", "a"))),
    "output name": (_graph, lambda: _graph(out="result")),
    "op": (lambda: Graph(ops.sqr(new_input("f32", 4, name="a"), name="o")),
           lambda: Graph(ops.sqrt(new_input("f32", 4, name="a"), name="o"))),
    "view offset": (lambda: _view(0), lambda: _view(16)),
    "view strides": (lambda: _view(0), lambda: _view(0, nb=32)),
    "order of outputs": (lambda: _two_outputs(True), lambda: _two_outputs(False)),
    "inner output": (lambda: _marked(False), lambda: _marked(True)),
    "buffer": (lambda: _leaf_in(0, 0), lambda: _leaf_in(1, 0)),
    "offset": (lambda: _leaf_in(0, 0), lambda: _leaf_in(0, 16)),
}  # fmt: skip


@pytest.mark.parametrize("changed", CHANGES)
def test_a_change_changes_the_key(changed: str) -> None:
    one, other = CHANGES[changed]
    assert one().key == one().key != other().key == other().key
