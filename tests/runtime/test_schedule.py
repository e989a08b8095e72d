"""The scheduler, with a second backend that knows few ops and has memory of its own."""

from __future__ import annotations

import numpy as np
import pytest
from support.toy import ToyBackend, ToyBuffer

import graphrt
from graphrt import Graph, Tensor, get_backend, new_input, new_tensor, ops
from graphrt.backend import Backend, Usage
from graphrt.backends.cpu.memory import allocate
from graphrt.errors import UnsupportedError
from graphrt.execute import Executable
from graphrt.schedule import schedule


def both() -> list[Backend]:
    return [ToyBackend(), get_backend("cpu")]


def _a(*ne: int) -> Tensor:
    return new_input("f32", *(ne or (4,)), name="a")


def _run(graph: Graph, backends: list[Backend], **inputs: object) -> Executable:
    exe = graphrt.prepare(graph, backends)
    for name, values in inputs.items():
        exe.write(name, values)
    exe.run()
    return exe


def _leaf(backend: Backend, usage: Usage, values: np.ndarray, name: str, dt: str = "f32") -> Tensor:
    leaf = new_tensor(dt, *values.shape[::-1], name=name)
    leaf.buffer = backend.alloc(leaf.nbytes, usage)
    leaf.buffer.write(0, values.reshape(-1).view(np.uint8))
    return leaf


def test_assignments_carry_their_cause() -> None:
    x = ops.scale(_a(), 2.0, name="x")
    y = ops.sqrt(x, name="y")
    z = ops.add(y, x, name="z")
    result = schedule(Graph(z), both())
    causes = {node.name: (a.backend.id, a.cause) for node, a in result.assignments.items()}
    assert causes == {
        "x": ("toy", "preferred, and supports it"),
        "y": ("cpu", "refused by toy (op SQRT is unknown to it)"),
        "z": ("toy", "preferred, and supports it"),
    }
    assert {n.name: r for n, r in result.refusals.items()} == {"y": {"toy": "op SQRT is unknown to it"}}


def test_splits_and_copies() -> None:
    x = ops.scale(_a(), 2.0, name="x")
    y = ops.sqrt(x, name="y")
    z = ops.add(y, x, name="z")
    result = schedule(Graph(z), both())
    assert [(s.backend.id, [n.name for n in s.nodes]) for s in result.splits] == [
        ("toy", ["x"]),
        ("cpu", ["y"]),
        ("toy", ["z"]),
    ]
    copies = [[(c.source.name, c.origin, c.target.name, c.once) for c in s.copies] for s in result.splits]
    assert copies == [[], [("x", "toy", "cpu#x", False)], [("y", "cpu", "toy#y", False)]]


def test_one_backend_needs_one_split_and_no_copy() -> None:
    result = schedule(Graph(ops.sqrt(ops.sqr(_a()))), [get_backend("cpu")])
    assert len(result.splits) == 1 and result.splits[0].copies == []


def test_the_result_is_right_across_backends() -> None:
    x = ops.scale(_a(), 2.0)
    y = ops.sqrt(x)
    z = ops.add(ops.mul(y, x), y)
    exe = _run(Graph(z, y), both(), a=[1.0, 2.0, 3.0, 4.0])
    a = np.array([1, 2, 3, 4], np.float32)
    np.testing.assert_allclose(exe.read(z).reshape(-1), np.sqrt(2 * a) * 2 * a + np.sqrt(2 * a), rtol=1e-6)
    np.testing.assert_allclose(exe.read(y).reshape(-1), np.sqrt(2 * a), rtol=1e-6)
    exe.write("a", [0.0, 0.0, 0.0, 8.0])
    exe.run()
    np.testing.assert_allclose(exe.read(z).reshape(-1), [0, 0, 0, 68], rtol=1e-6)


def test_a_tensor_is_copied_to_a_backend_once_per_run() -> None:
    x = ops.scale(_a(), 2.0, name="x")
    result = schedule(Graph(ops.add(ops.sqrt(x), ops.unary(x, "exp"))), both())
    assert [c.source.name for s in result.splits for c in s.copies if c.target.name == "cpu#x"] == ["x"]


def test_weights_are_copied_once_by_prepare() -> None:
    toy, cpu = both()
    w = _leaf(cpu, Usage.WEIGHTS, np.array([1, 2, 3, 4], np.float32), "w")
    out = ops.mul(_a(), w)
    graph = Graph(out)
    exe = graphrt.prepare(graph, [toy, cpu])
    [copy] = exe.splits[0].copies
    assert copy.once and copy.origin == "cpu" and copy.source is w
    w.buffer.write(0, np.zeros(16, np.uint8))  # whoever copied again would see this
    for factor in (1.0, 2.0):
        exe.write("a", [factor] * 4)
        exe.run()
        np.testing.assert_array_equal(exe.read(out).reshape(-1), np.array([1, 2, 3, 4]) * factor)


def test_state_is_copied_in_every_run() -> None:
    toy, cpu = both()
    state = _leaf(cpu, Usage.STATE, np.ones(4, np.float32), "state")
    exe = graphrt.prepare(Graph(out := ops.mul(_a(), state)), [toy, cpu])
    for value in (3.0, 5.0):
        state.buffer.write(0, np.full(4, value, np.float32).view(np.uint8))
        exe.write("a", [1.0] * 4)
        exe.run()
        np.testing.assert_array_equal(exe.read(out).reshape(-1), [value] * 4)


def test_a_once_copied_weight_outlives_later_steps() -> None:
    """Its memory is taken from the first step to the end, whatever happens between runs."""
    toy, cpu = both()
    w = _leaf(cpu, Usage.WEIGHTS, np.arange(16, dtype=np.float32), "w")
    x = ops.mul(_a(16), w)
    for _ in range(6):
        x = ops.add(ops.scale(x, 0.5), ops.sqr(x))
        x = ops.unary(x, "tanh")
    exe = graphrt.prepare(Graph(x), [toy, cpu])
    exe.write("a", np.linspace(-1, 1, 16))
    exe.run()
    first = exe.read(x)
    exe.run()
    np.testing.assert_array_equal(exe.read(x), first)


def test_quantized_and_strided_weights_arrive_whole() -> None:
    toy, cpu = both()
    w = _leaf(cpu, Usage.WEIGHTS, np.arange(12, dtype=np.float32).reshape(3, 4), "w")
    out = ops.add(_a(3, 4), ops.transpose(w))
    exe = _run(Graph(out), [toy, cpu], a=np.zeros((4, 3)))
    np.testing.assert_array_equal(exe.read(out)[0, 0], np.arange(12).reshape(3, 4).T)
    assert exe.splits[0].copies[0].target.is_contiguous


def test_views_of_a_node_on_another_backend() -> None:
    x = ops.scale(_a(4, 3), 2.0, name="x")
    y = ops.sqrt(ops.view(x, (2, 3), x.nb[1:2], offs=8), name="y")
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    exe = _run(Graph(y), both(), a=values)
    np.testing.assert_allclose(exe.read(y)[0, 0], np.sqrt(2 * values[:, 2:]), rtol=1e-6)


def test_views_of_a_node_whose_source_was_copied() -> None:
    """x runs on the CPU from copies, so that a twin stands for it: its views must look at the twin."""
    s = ops.sqr(_a(4, 3), name="s")  # toy
    x = ops.div(s, s, name="x")  # cpu, from a copy of s
    look = ops.view(x, (2, 3), x.nb[1:2], offs=8, name="look")
    deeper = ops.view(look, (1, 3), look.nb[1:2], offs=4, name="deeper")
    y = ops.sqrt(deeper, name="y")
    busy = [ops.unary(ops.scale(ops.sqrt(s), float(i)), "tanh") for i in range(4)]
    exe = _run(Graph(look, y, *busy), both(), a=np.full((3, 4), 3.0))
    np.testing.assert_array_equal(exe.read(look), np.ones((1, 1, 3, 2)))
    np.testing.assert_array_equal(exe.read(deeper), np.ones((1, 1, 3, 1)))
    np.testing.assert_array_equal(exe.read(y), np.ones((1, 1, 3, 1)))


def _cache_graph(toy: Backend, cpu: Backend, owner: Backend) -> tuple[Graph, Tensor, Tensor, Tensor]:
    cache = _leaf(owner, Usage.STATE, np.zeros((5, 4), np.float32), "cache")
    rows, ids = new_input("f32", 4, 2, name="rows"), new_input("i64", 2, name="ids")
    before = ops.sqrt(cache, name="before") if owner is toy else ops.sqr(cache, name="before")
    written = ops.set_rows(ops.scale(rows, 2.0, name="doubled"), ids, cache, name="written")
    after = ops.sqrt(cache, name="after") if owner is toy else ops.sqr(cache, name="after")
    return Graph(before, written, after), before, written, after


@pytest.mark.parametrize("owner", [0, 1], ids=["toy", "cpu"])
def test_set_rows_runs_where_its_buffer_lies(owner: int) -> None:
    backends = both()
    graph, before, written, after = _cache_graph(*backends, backends[owner])
    exe = _run(graph, backends, rows=[[1.0] * 4, [2.0] * 4], ids=[3, 0])
    assignment = exe.schedule.assignments[written]
    assert (assignment.backend, assignment.cause) == (backends[owner], "it writes into a buffer there")
    np.testing.assert_array_equal(exe.read(written)[0, 0, :, 0], [4, 0, 0, 2, 0])
    assert np.frombuffer(written.root.buffer.read(0, 80), np.float32).reshape(5, 4)[:, 0].tolist() == [4, 0, 0, 2, 0]
    assert exe.read(before).max() == 0.0


@pytest.mark.parametrize("owner", [0, 1], ids=["toy", "cpu"])
def test_a_copy_is_renewed_after_its_source_was_written(owner: int) -> None:
    backends = both()
    graph, _, _, after = _cache_graph(*backends, backends[owner])
    exe = _run(graph, backends, rows=[[1.0] * 4, [2.0] * 4], ids=[3, 0])
    function = np.sqrt if owner == 0 else np.square
    np.testing.assert_allclose(exe.read(after)[0, 0, :, 0], function([4, 0, 0, 2, 0]), rtol=1e-6)


@pytest.mark.parametrize("owner", [0, 1], ids=["toy", "cpu"])
def test_a_copy_of_a_view_is_renewed_too(owner: int) -> None:
    """One view is read on the other backend before and after the buffer that it looks at is written."""
    backends = both()
    cache = _leaf(backends[owner], Usage.STATE, np.zeros((5, 4), np.float32), "cache")
    look = ops.view(cache, (4, 3), cache.nb[1:2], offs=cache.nb[1], name="look")
    rows, ids = new_input("f32", 4, 2, name="rows"), new_input("i64", 2, name="ids")
    function = ops.sqrt if owner == 0 else ops.sqr
    before = function(look, name="before")
    written = ops.set_rows(ops.scale(rows, 2.0), ids, cache, name="written")
    after = function(look, name="after")
    exe = _run(Graph(before, written, after), backends, rows=[[8.0] * 4, [2.0] * 4], ids=[3, 0])
    assert exe.read(before).max() == 0.0
    assert exe.read(after)[0, 0, :, 0].tolist() == [0, 0, 4.0 if owner == 0 else 256.0]


def test_three_backends_have_a_copy_each() -> None:
    class Other(ToyBackend):
        name = "other"

        def supports(self, node: Tensor) -> str | None:
            return None if node.op == "SQR" else "it takes SQR alone"

    x = ops.scale(_a(), 2.0, name="x")
    out = ops.add(ops.sqr(x, name="not_here"), ops.sqrt(x, name="root"), name="out")
    exe = _run(Graph(out), [ToyBackend(), Other(), get_backend("cpu")], a=[2.0] * 4)
    copies = [(c.source.name, c.target.name) for s in exe.splits for c in s.copies if c.source is x]
    assert copies == [("x", "other#x"), ("x", "cpu#x")]
    assert exe.read(out).reshape(-1).tolist() == [18.0] * 4


def test_a_name_of_any_length_can_be_copied() -> None:
    x = ops.scale(_a(), 2.0, name="x" * 63)
    exe = _run(Graph(out := ops.sqrt(x)), both(), a=[2.0] * 4)
    assert exe.read(out).reshape(-1).tolist() == [2.0] * 4


def test_a_buffer_of_an_absent_backend_is_read_but_not_written() -> None:
    toy, cpu = both()
    graph, *_ = _cache_graph(toy, cpu, toy)
    with pytest.raises(UnsupportedError, match=r"which lies on toy\): toy: it is not among the backends"):
        schedule(graph, [cpu])
    state = _leaf(toy, Usage.STATE, np.full(4, 9, np.float32), "state")
    exe = _run(Graph(out := ops.sqrt(state)), [cpu])
    assert exe.read(out).reshape(-1).tolist() == [3.0] * 4


def test_inputs_lie_where_they_are_first_read() -> None:
    a, b = new_input("f32", 4, name="a"), new_input("f32", 4, name="b")
    unread = new_input("f32", 4, name="unread")
    out = ops.add(ops.sqrt(a), b)
    result = schedule(Graph(out, ops.reshape(unread, 2, 2)), both())
    assert {t.name: result.homes[t] for t in (a, b, unread)} == {"a": "cpu", "b": "toy", "unread": "toy"}


def test_no_backend_takes_it() -> None:
    class Other(ToyBackend):
        name = "other"

        def supports(self, node: Tensor) -> str | None:
            return "it takes nothing"

    bad = ops.sqrt(_a(), name="bad")
    with pytest.raises(UnsupportedError) as caught:
        schedule(Graph(bad), [ToyBackend(), Other()])
    message = str(caught.value)
    for part in (
        "none takes <bad = SQRT(a) f32[4]>",
        "toy: op SQRT is unknown",
        "other: it takes nothing",
        "Add the cpu",
    ):
        assert part in message
    with pytest.raises(UnsupportedError, match="none takes"):
        schedule(Graph(bad), [])


def test_refusals_may_depend_on_the_node() -> None:
    x = ops.sqr(_a(), name="not_here_1")
    result = schedule(Graph(ops.sqr(x, name="y")), both())
    assert [a.backend.id for a in result.assignments.values()] == ["cpu", "toy"]
    assert "it does not like not_here_1" in result.assignments[x].cause


def test_view_nodes_are_assigned_to_nobody() -> None:
    look = ops.reshape(_a(), 2, 2)
    result = schedule(Graph(ops.sqr(look)), both())
    assert look not in result.assignments and len(result.splits[0].nodes) == 1


def test_a_graph_of_views_alone_runs() -> None:
    out = ops.transpose(_a(4, 3))
    exe = _run(Graph(out), both(), a=np.arange(12).reshape(3, 4))
    np.testing.assert_array_equal(exe.read(out)[0, 0], np.arange(12).reshape(3, 4).T)
    assert exe.splits == []


def test_copies_go_through_reads_and_writes_only() -> None:
    """A buffer that the host can't address is enough."""
    toy, cpu = both()
    exe = _run(Graph(ops.sqr(ops.sqrt(ops.sqr(_a())))), [toy, cpu], a=[1.0] * 4)
    buffer = exe.arenas["toy"].buffer
    assert isinstance(buffer, ToyBuffer) and buffer.host_view() is None
    assert buffer.log == ["write", "read", "write"]
    assert exe.host_array(exe.graph.outputs[0]) is None and allocate(4, Usage.STATE).host_view() is not None


def test_what_is_written_into_later_lies_where_it_can_be() -> None:
    """toy runs ADD but writes only f32 matrices: a batch that is written into lies on the CPU from the start."""
    a, ids, rows = (
        new_input("f32", 4, 3, 2, name="a"),
        new_input("i64", 1, name="ids"),
        new_input("f32", 4, 1, 2, name="rows"),
    )
    sums = ops.add(a, a, name="sums")
    written = ops.set_rows(rows, ids, sums, name="written")
    also = ops.set_rows(rows, ids, a, name="also")
    exe = _run(Graph(written, also), both(), a=np.ones((2, 3, 4)), rows=np.zeros((2, 1, 4)), ids=[1])
    assert exe.schedule.assignments[sums].backend.id == "cpu" and exe.schedule.homes[a] == "cpu"
    assert (
        "'written' writes into it later, and of that: it writes f32 matrices only"
        in exe.schedule.assignments[sums].cause
    )
    assert exe.read(written)[0, :, :, 0].tolist() == [[2, 0, 2], [2, 0, 2]]
    assert exe.read(also)[0, :, :, 0].tolist() == [[1, 0, 1], [1, 0, 1]]


def test_every_later_writer_has_a_say_where_a_tensor_lies() -> None:
    """toy could write the first matrix of a, not all of it."""
    a = new_input("f32", 4, 3, 2, name="a")
    ids = new_input("i64", 1, name="ids")
    one = ops.set_rows(new_input("f32", 4, 1, name="row"), ids, ops.view(a, (4, 3)), name="one")
    all_of_it = ops.set_rows(new_input("f32", 4, 1, 2, name="rows"), ids, a, name="all of it")
    exe = _run(
        Graph(one, all_of_it), both(), a=np.ones((2, 3, 4)), ids=[1], row=np.zeros(4), rows=np.full((2, 1, 4), 5.0)
    )
    assert exe.schedule.homes[a] == "cpu"
    assert exe.read(all_of_it)[0, :, :, 0].tolist() == [[1, 5, 1], [1, 5, 1]]
