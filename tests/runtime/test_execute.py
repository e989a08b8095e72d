"""prepare() and Executable: fixed addresses, lasting outputs, in-place results, errors, and the cost of running."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.effort import instructions
from support.toy import NullBackend, ToyBackend

import graphrt
from graphrt import Graph, Tensor, get_backend, new_input, new_tensor, ops
from graphrt.backend import Backend, Buffer, Usage
from graphrt.errors import BackendError, GraphError, MemoryPlanError
from graphrt.execute import Executable


def _a(*ne: int, dt: str = "f32", name: str = "a") -> Tensor:
    return new_input(dt, *(ne or (4,)), name=name)


def _prepared(*outputs: Tensor, **inputs: object) -> Executable:
    exe = graphrt.prepare(Graph(*outputs), "cpu")
    for name, values in inputs.items():
        exe.write(name, values)
    exe.run()
    return exe


def _address(exe: Executable, t: Tensor | str) -> int:
    array = exe.host_array(t)
    assert array is not None
    return array.__array_interface__["data"][0]


def test_prepared_once_run_many_times_at_fixed_addresses() -> None:
    a = _a()
    out = ops.sqr(ops.scale(a, 2.0))
    exe = graphrt.prepare(Graph(out), "cpu")
    places = {(_address(exe, a), _address(exe, out))}
    for value in (1.0, 2.0, 3.0):
        exe.write("a", [value] * 4)
        exe.run()
        places.add((_address(exe, a), _address(exe, out)))
        assert exe.read(out).reshape(-1).tolist() == [4 * value * value] * 4
    assert len(places) == 1


def test_inputs_keep_their_values_between_runs() -> None:
    a, b = _a(), _a(name="b")
    x = ops.scale(a, 2.0)
    for _ in range(4):  # enough results for one to fall on an input that was given up
        x = ops.sub(ops.scale(x, 2.0), ops.scale(x, 1.0, 0.0))
    out = ops.add(x, b)
    exe = _prepared(out, a=[1.0] * 4, b=[1.0] * 4)
    exe.write("b", [5.0] * 4)
    exe.run()
    assert exe.read("a").reshape(-1).tolist() == [1.0] * 4 and exe.read(out).reshape(-1).tolist() == [7.0] * 4


def test_host_arrays_are_the_memory_itself() -> None:
    a = _a(4, 3)
    out = ops.scale(a, 2.0)
    exe = graphrt.prepare(Graph(out), "cpu")
    exe.host_array("a")[0, 0] = np.arange(12).reshape(3, 4)
    exe.run()
    np.testing.assert_array_equal(exe.host_array(out)[0, 0], 2 * np.arange(12).reshape(3, 4))


@pytest.mark.parametrize(
    ("dt", "values"),
    [("f16", [1.5, -2.0]), ("i32", [7, -7]), ("i64", [2**40, -1]), ("i8", [-128, 127]), ("bf16", None)],
)
def test_every_plain_type_goes_in_and_out(dt: str, values: list[float] | None) -> None:
    bits = np.array([0x3FC0, 0xC000], np.uint16)  # bf16 travels as its 16 bits
    exe = _prepared(out := ops.cont(_a(2, dt=dt)), a=bits if values is None else values)
    assert exe.read(out).reshape(-1).tolist() == (values or bits.tolist())


def test_quantized_rows_travel_as_bytes() -> None:
    raw = np.arange(2 * 34, dtype=np.uint8).reshape(1, 1, 2, 34)
    exe = _prepared(ops.get_rows(a := _a(32, 2, dt="q8_0"), _a(1, dt="i32", name="ids")), a=raw, ids=[0])
    np.testing.assert_array_equal(exe.read(a), raw)


def test_quantized_rows_with_gaps_are_read_without_them() -> None:
    raw = np.arange(3 * 68, dtype=np.uint8).reshape(1, 1, 3, 68)
    a = _a(64, 3, dt="q8_0")
    second = ops.view(a, (32, 3), a.nb[1:2], offs=34)
    exe = _prepared(second, ops.get_rows(a, _a(1, dt="i32", name="ids")), a=raw, ids=[0])
    np.testing.assert_array_equal(exe.read(second), raw[..., 34:])


def test_a_tensor_with_gaps_is_not_written() -> None:
    """Its elements don't follow one another, so that values in a row would land in what lies between."""
    a = _a(4, 3)
    columns, rows = ops.view(a, (2, 3), a.nb[1:2], name="columns"), ops.view(a, (4, 2), offs=16, name="rows")
    exe = _prepared(ops.cont(columns), ops.cont(rows), columns, rows, a=np.zeros((3, 4)))
    with pytest.raises(GraphError, match="'columns' has gaps .*write the whole of 'a'"):
        exe.write(columns, np.ones((3, 2)))
    assert not exe.read(a).any()
    exe.write(rows, np.ones((2, 4)))
    assert exe.read(a)[0, 0, :, 0].tolist() == [0, 1, 1]


def test_of_equal_names_the_first_tensor_is_meant() -> None:
    x = ops.scale(_a(), 2.0, name="x")
    graph = Graph(x, ops.sqr(x, name="x"))
    exe = graphrt.prepare(graph, "cpu")
    exe.write("a", [1.0, 2.0, 3.0, 4.0])
    exe.run()
    assert graph.tensor("x") is x and exe.read("x").reshape(-1).tolist() == [2, 4, 6, 8]


def test_views_are_read_in_their_own_order() -> None:
    a = _a(4, 3)
    x = ops.scale(a, 1.0)
    looks = [ops.transpose(x), ops.view(x, (2, 2), x.nb[1:2], offs=x.nb[1] + 4)]
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    exe = _prepared(*looks, a=values)
    np.testing.assert_array_equal(exe.read(looks[0])[0, 0], values.T)
    np.testing.assert_array_equal(exe.read(looks[1])[0, 0], values[1:, 1:3])
    np.testing.assert_array_equal(exe.host_array(looks[0])[0, 0], values.T)


# -- memory


def test_outputs_outlive_everything_that_comes_later() -> None:
    x = ops.scale(_a(64), 2.0, name="early")
    y = x
    for _ in range(30):
        y = ops.add(ops.scale(y, 0.5), ops.sqr(y))
    middle = ops.sqr(x).as_output()
    exe = _prepared(x, ops.unary(ops.add(y, middle), "tanh"), a=np.full(64, 0.25))
    np.testing.assert_array_equal(exe.read("early").reshape(-1), 0.5)
    np.testing.assert_array_equal(exe.read(middle).reshape(-1), 0.25)


def test_a_chain_runs_in_one_block() -> None:
    x = _a(64)
    for _ in range(20):
        x = ops.scale(x, 1.0, 1.0)
    exe = _prepared(x, a=np.zeros(64))
    plan = exe.arenas["cpu"].plan
    assert len(plan.taken_over) == 19 and plan.peak == 2 * 256, "the input keeps its own block"
    assert exe.read(x).reshape(-1).tolist() == [20.0] * 64 and not exe.read("a").any()


def test_a_source_that_is_read_twice_by_one_node() -> None:
    x = ops.scale(_a(), 2.0)
    y = ops.mul(x, x)
    z = ops.sub(y, ops.reshape(y, 4))
    exe = _prepared(ops.add(z, z), y, a=[1.0, 2.0, 3.0, 4.0])
    assert exe.read(y).reshape(-1).tolist() == [4, 16, 36, 64]
    assert not exe.arenas["cpu"].plan.taken_over.get(y)


def test_a_source_that_is_read_later_keeps_its_memory() -> None:
    x = ops.scale(_a(), 2.0)
    y = ops.sqr(x)
    z = ops.add(y, x)
    exe = _prepared(z, a=[1.0, 2.0, 3.0, 4.0])
    assert exe.read(z).reshape(-1).tolist() == [6, 20, 42, 72]


def test_a_source_that_is_read_later_through_a_view_keeps_its_memory() -> None:
    x = ops.scale(_a(4, 4), 2.0)
    look = ops.transpose(x)
    y = ops.sqr(x)
    z = ops.add(y, ops.cont(look))
    values = np.arange(16, dtype=np.float32).reshape(4, 4)
    exe = _prepared(z, a=values)
    np.testing.assert_array_equal(exe.read(z)[0, 0], (2 * values) ** 2 + 2 * values.T)


def test_a_permuted_source_is_not_taken_over() -> None:
    x = ops.scale(_a(4, 4), 1.0)
    y = ops.scale(ops.transpose(x), 2.0)
    values = np.arange(16, dtype=np.float32).reshape(4, 4)
    exe = _prepared(y, a=values)
    np.testing.assert_array_equal(exe.read(y)[0, 0], 2 * values.T)
    assert exe.arenas["cpu"].plan.taken_over == {}


def test_state_lasts_from_run_to_run() -> None:
    cpu = get_backend("cpu")
    state = new_tensor("f32", 4, name="state")
    state.buffer = cpu.alloc(16, Usage.STATE)
    exe = graphrt.prepare(Graph(ops.cpy(ops.add(_a(), state), state)), cpu)
    for _ in range(3):
        exe.write("a", [1.0, 2.0, 3.0, 4.0])
        exe.run()
    assert exe.read(state).reshape(-1).tolist() == [3, 6, 9, 12]


def _bound(buffer: Buffer, offset: int, n: int, name: str) -> Tensor:
    leaf = new_input("f32", n, name=name)
    leaf.buffer, leaf.offset = buffer, offset
    return leaf


def test_leafs_lie_where_they_say_in_a_buffer() -> None:
    cpu = get_backend("cpu")
    buffer = cpu.alloc(128, Usage.STATE)
    buffer.write(0, np.repeat(np.array([1, 10], np.float32), 16).view(np.uint8))
    first, second = (_bound(buffer, at, 16, name) for at, name in ((0, "first"), (64, "second")))
    exe = graphrt.prepare(Graph(out := ops.sub(second, first)), cpu)
    exe.run()
    assert exe.read(out).reshape(-1).tolist() == [9.0] * 16 and exe.read(second).max() == 10.0


def test_inputs_of_two_buffers_are_not_joined() -> None:
    """Each lies where the other's would go on, in a buffer of its own; whichever buffer comes first."""
    cpu = get_backend("cpu")
    one, other = cpu.alloc(128, Usage.STATE), cpu.alloc(128, Usage.STATE)
    leafs = [_bound(b, at, 16, f"{name}{at}") for b, name in ((one, "one"), (other, "other")) for at in (0, 64)]
    exe = graphrt.prepare(Graph(*(ops.sqr(leaf) for leaf in leafs)), cpu)
    for names in (("one0", "other64"), ("other0", "one64")):
        exe.write_all({name: np.full(16, 3.0) for name in names})
    for leaf in leafs:
        np.testing.assert_array_equal(exe.read(leaf).reshape(-1), 3.0)


def test_what_lies_between_inputs_in_a_buffer_of_the_users_stays() -> None:
    cpu = get_backend("cpu")
    buffer = cpu.alloc(128, Usage.STATE)
    buffer.write(0, np.full(128, 7, np.uint8))
    a, b = _bound(buffer, 0, 3, "a"), _bound(buffer, 64, 3, "b")
    exe = graphrt.prepare(Graph(ops.add(a, b)), cpu)
    exe.write_all({"a": [1.0] * 3, "b": [2.0] * 3})
    assert (buffer.read(12, 52) == 7).all() and exe.read(b).reshape(-1).tolist() == [2.0] * 3


def test_memory_that_nobody_wrote_is_nan() -> None:
    exe = graphrt.prepare(Graph(ops.scale(_a(), 2.0)), "cpu")
    exe.run()
    assert np.isnan(exe.read(exe.graph.outputs[0])).all()


# -- errors


def test_only_what_lasts_can_be_read() -> None:
    x = ops.scale(_a(), 2.0, name="x")
    exe = _prepared(ops.sqr(ops.sqr(x)), a=[1.0] * 4)
    for read in (exe.read, exe.host_array):
        with pytest.raises(MemoryPlanError, match="'x' is neither; make it an output"):
            read("x")
    stranger = new_tensor("f32", 4, name="stranger")
    with pytest.raises(MemoryPlanError, match="'stranger'"):
        exe.read(stranger)
    with pytest.raises(MemoryPlanError, match="'stranger' has no memory"):
        exe.write(stranger, [0.0] * 4)


BAD_WRITES: list[tuple[str, Callable[[], object], str]] = [
    ("a", lambda: [1.0] * 5, r"f32\[4\] and takes 16 bytes, got an array of shape \[5\] and 20 bytes"),
    ("ids", lambda: [0.5, 1.0], r"'ids' is i32\[2\] and takes int32 on the host, got float64"),
    ("half", lambda: [1.0, 2.0], r"'half' is bf16\[2\] and takes uint16 on the host, got float64"),
    ("a", lambda: ["x"] * 4, "takes float32 on the host, got <U1"),
    ("b", lambda: [1.0], "must be in the graph, got 'b'; inputs and outputs: a, ids, half"),
]


@pytest.mark.parametrize(("name", "values", "message"), BAD_WRITES)
def test_bad_writes(name: str, values: Callable[[], object], message: str) -> None:
    graph = Graph(ops.sqr(_a()), ops.cont(_a(2, dt="i32", name="ids")), ops.cont(_a(2, dt="bf16", name="half")))
    exe = graphrt.prepare(graph, "cpu")
    with pytest.raises(GraphError, match=message):
        exe.write(name, values())  # type: ignore[arg-type]


def test_numbers_of_another_width_are_taken() -> None:
    exe = _prepared(out := ops.cont(_a(2, dt="i32")), a=np.array([1, 2], np.int64))
    assert exe.read(out).reshape(-1).tolist() == [1, 2]
    exe = _prepared(out := ops.sqr(_a(2)), a=[1, 2])
    assert exe.read(out).reshape(-1).tolist() == [1, 4]


def test_backends_by_name_and_by_instance() -> None:
    graph = Graph(ops.sqr(_a()))
    for backends in ("cpu", ["cpu"], get_backend("cpu"), [ToyBackend(), "cpu"]):
        assert graphrt.prepare(graph, backends).splits
    with pytest.raises(BackendError, match="must be one of .*cpu.*, got 'abacus'; `graphrt devices`"):
        graphrt.prepare(graph, "abacus")
    with pytest.raises(BackendError, match="'cpu' does not take these options: .*'colour'"):
        get_backend("cpu", colour="red")


# -- the cost


def _chain(n: int) -> Graph:
    x = _a()
    for _ in range(n):
        x = ops.scale(x, 1.0)
    return Graph(x)


def test_the_cost_per_node() -> None:
    """Of nodes that compute nothing, in instructions of Python: what run() takes is the runtime's own."""
    null: Backend = NullBackend()
    graphs = [_chain(n) for n in (100, 200, 400)]
    prepare = [instructions(lambda graph=graph: graphrt.prepare(graph, null)) for graph in graphs]
    run = [instructions(graphrt.prepare(graph, null).run) for graph in graphs]
    assert run[2] - run[1] <= 15 * 200, "run() calls a node's step and hardly more: 10"
    assert prepare[2] - prepare[1] <= 2.1 * (prepare[1] - prepare[0]), "prepare() grows with the square of the graph"
    assert prepare[2] - prepare[1] <= 4000 * 200, "about 2100"


def test_a_deep_graph_is_prepared_and_run() -> None:
    exe = graphrt.prepare(_chain(20_000), NullBackend())
    exe.run()
    assert exe.arenas["null"].plan.peak == 128


def test_inputs_side_by_side_are_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """write_all() gives what writes one by one give, in fewer copies, and touches nobody else's bytes."""
    a, b = new_input("f32", 3, name="a"), new_input("f32", 5, name="b")
    total = ops.add(ops.sum_rows(a), ops.sum_rows(b))
    exe = graphrt.prepare(Graph(total), "cpu")
    copies: list[tuple[int, int]] = []
    (arena,) = exe.arenas.values()
    plain = type(arena.buffer).write
    monkeypatch.setattr(
        type(arena.buffer), "write", lambda self, at, data: (copies.append((at, data.size)), plain(self, at, data))[1]
    )
    exe.write_all({"b": [1.0, 2.0, 3.0, 4.0, 5.0], "a": [10.0, 20.0, 30.0]})
    exe.run()
    assert float(exe.read(total).item()) == 75.0
    offsets = sorted(exe.place(t)[1] for t in (a, b))
    side_by_side = offsets[1] - offsets[0] == arena.alignment
    assert len(copies) == (1 if side_by_side else 2)
    with pytest.raises(GraphError, match="takes 12 bytes"):
        exe.write_all({"a": [1.0], "b": [1.0] * 5})
