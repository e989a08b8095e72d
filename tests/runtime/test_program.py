"""Programs that can be asked, and backends of one name in one graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
import pytest
from support.toy import ToyBackend

from graphrt import Graph, Tensor, get_backend, new_input, new_tensor, ops
from graphrt.backend import Backend, Elsewhere, Group, Place, Usage, backend_elsewhere
from graphrt.backends.cpu import CpuBackend
from graphrt.errors import BackendError
from graphrt.execute import Executable, plan_arenas, prepare
from graphrt.program import Choice, LaunchInfo, Program, StepInfo, Use
from graphrt.tools.check.launch_order import Rule
from graphrt.tools.check.order_report import ordered
from graphrt.tools.explain.node import facts, find_node
from graphrt.tools.explain.steps import explained
from graphrt.tools.explain.text import table
from graphrt.tools.inspect.subject import Subject
from graphrt.tools.profile.parts import parts_of

VALUES = np.array([1.0, -2.0, 3.0, 0.5], np.float32)


def chain() -> Graph:
    """a, x = 2 a + 2, y = x * x of a view of x, which nothing computes."""
    x = ops.scale(new_input("f32", 4, name="a"), 2.0, 2.0, name="x")
    return Graph(ops.sqr(ops.view(x, (2, 2), (8,)), name="y"), x)


def ran(exe: Executable) -> Executable:
    exe.write("a", VALUES)
    exe.run()
    exe.synchronize()
    return exe


# ---- programs ----


@pytest.mark.parametrize("backend", [ToyBackend(), CpuBackend(), CpuBackend(exact=False)], ids=["toy", "cpu", "fast"])
def test_each_group_that_works_is_a_step_and_runs_alone(backend: Backend) -> None:
    (split,) = (exe := prepare(chain(), [backend, *([CpuBackend()] if backend.name == "toy" else [])])).splits
    steps = split.run.steps
    assert [[n.name for n in step.group.working] for step in steps] == [["x"], ["y"]]
    assert all(step.launches == () and step.choice is None and step.schedule == "" for step in steps)
    assert split.run.redone() == 0
    x = np.array(ran(exe).read("x"))
    exe.write("a", VALUES + 1)
    exe.alone(split, steps[1])()  # the second step by itself: what the first one made is what it was
    np.testing.assert_array_equal(exe.read("x"), x)
    exe.alone(split, steps[0])()
    np.testing.assert_array_equal(np.ravel(exe.read("x")), 2 * VALUES + 4)
    np.testing.assert_array_equal(np.ravel(exe.read("y")), (2 * VALUES + 2) ** 2)


@pytest.mark.parametrize(
    ("backend", "kernels"),
    [
        (ToyBackend(), ["it does not tell"] * 2),
        (CpuBackend(), ["reference scale", "reference sqr"]),
        (CpuBackend(exact=False), ["native map_scale", "native map_sqr"]),
    ],
    ids=["toy", "cpu", "fast"],
)
def test_who_runs_a_step(backend: Backend, kernels: list[str]) -> None:
    (split,) = prepare(chain(), backend).splits
    assert [step.kernel for step in split.run.steps] == kernels


class Telling(ToyBackend):
    """Tells of two launches a step: a helper, and a kernel that may begin before the one before it has ended."""

    name: ClassVar[str] = "telling"

    def compile(self, groups: Sequence[Group], place: Callable[[Tensor], Place]) -> Program:
        return TellingProgram(groups, super().compile(groups, place))


class TellingProgram(Program):
    @property
    def steps(self) -> list[StepInfo]:
        return [self._step(group) for group in self.working_groups()]

    def _step(self, group: Group) -> StepInfo:
        read = Use("p_x", 1, 0, 16, reads=True, writes=False, early=True)
        written = Use("p_out", 1, 8, 24, reads=False, writes=True)
        launches = (
            LaunchInfo("tidy", (1,), 4, helper=True, uses=(written,)),
            LaunchInfo("toy_kernel", (2, 3), 8, (("TILE", 16),), uses=(read,), starts_early=True),
        )
        refused = {"large_kernel": "takes 64 or more"}
        choice = Choice(reasons=["four numbers are few"], refused=refused, schedule="by row")
        return StepInfo(group, launches, choice=choice, alone=lambda: self)


def test_every_tool_tells_what_any_backend_tells() -> None:
    exe = prepare(chain(), Telling())
    found = explained(Subject("graph", "graph", 0, exe))
    text = "\n".join(table(found))
    assert "toy_kernel  by row" in text and "tidy" not in text, "a helper is not what a step is called after"
    assert "2 steps, 4 launches" in text
    told = list(facts(found, find_node(found, "x")))
    for fact in (
        ("backend", "telling: preferred, and supports it"),
        ("why", "four numbers are few"),
        ("why", "not large_kernel: takes 64 or more"),
        ("schedule", "by row"),
        ("launches", "2. toy_kernel, grid 2 x 3, 8 warps: TILE=16"),
    ):
        assert fact in told
    rules = {(v.rule, v.nbytes) for v in ordered("graph", exe).violations}
    assert rules == {(Rule.OVERLAP, 8), (Rule.CACHED, 8)}, "the bytes that both touch, before the first has ended"


def test_a_profile_runs_a_step_as_its_program_says() -> None:
    exe = prepare(chain(), Telling())
    runs = [part.make() for part in parts_of(exe)]
    exe.write("a", VALUES)
    runs[1]()  # which is this backend's whole program
    np.testing.assert_array_equal(np.ravel(exe.read("x")), 2 * VALUES + 2)


class Functional(ToyBackend):
    def compile(self, groups: Sequence[Group], place: Callable[[Tensor], Place]) -> Program:
        return super().compile(groups, place).__call__  # type: ignore[return-value]


def test_a_function_is_no_program() -> None:
    with pytest.raises(BackendError, match=r"compile\(\) must return a .*Program, backend 'toy' returned"):
        prepare(chain(), Functional())


# ---- backends of one name ----


def pair(name: str) -> tuple[Backend, Backend]:
    if name == "toy":
        return ToyBackend(), ToyBackend(device=1)
    if name == "triton":
        device = pytest.importorskip("graphrt.backends.triton.device")
        if not device.interpreting():
            pytest.skip("two GPUs, or Triton's interpreter, which is as many as one likes")
    return get_backend(name), get_backend(f"{name}:1")


@pytest.mark.parametrize("name", ["toy", "cpu", "triton"])
def test_two_of_one_name_share_a_graph(name: str) -> None:
    """A cache of the second's, which is written there; all else is the first's, and what either needs is copied."""
    first, second = pair(name)
    assert (first.id, second.id, second.name) == (name, f"{name}:1", name)
    cache = new_tensor("f32", 4, 3, name="cache")
    cache.buffer = second.alloc(cache.nbytes, Usage.STATE)
    cache.buffer.write(0, np.arange(12, dtype=np.float32).view(np.uint8))
    assert cache.buffer.backend == second.id
    w = new_tensor("f32", 4, name="w")
    w.buffer = first.hold(w, np.full(4, 10, np.float32).view(np.uint8))
    x = ops.scale(new_input("f32", 4, name="a"), 2.0, name="x")
    written = ops.set_rows(x, new_input("i64", 1, name="ids"), cache, name="written")
    graph = Graph(ops.add(ops.scale(written, 1.0, name="held"), w, name="y"))
    exe = prepare(graph, [first, second])
    assert [s.backend for s in exe.splits] == [first, second, first]
    copies = [[(c.source.name, c.origin, c.target.name) for c in s.copies] for s in exe.splits]
    there, back = ("x", first.id, f"{second.id}#x"), ("written", second.id, f"{first.id}#written")
    assert copies == [[], [there], [back]]
    homes = {t.name: home for t, home in exe.schedule.homes.items()}
    assert (homes["cache"], homes["ids"], homes["w"], homes["y"]) == (second.id, second.id, first.id, first.id)
    assert exe.arenas.keys() == {first.id, second.id} == plan_arenas(graph, [first, second]).keys()
    assert all(arena.buffer.backend == home for home, arena in exe.arenas.items())
    for row in (2, 0):
        exe.write("ids", [row])
        ran(exe)
    expected = np.arange(12, dtype=np.float32).reshape(3, 4)
    expected[[2, 0]] = 2 * VALUES
    np.testing.assert_array_equal(exe.read("y").reshape(3, 4), expected + 10)


def test_the_preferred_of_two_is_the_first_listed() -> None:
    backends = [CpuBackend(device=2), CpuBackend()]
    for order in (backends, backends[::-1]):
        exe = prepare(chain(), order)
        assert [s.backend for s in exe.splits] == [order[0]] and list(exe.arenas) == [order[0].id]


def test_two_that_nothing_tells_apart_are_refused() -> None:
    twice = CpuBackend()
    ran(prepare(chain(), [twice, twice]))  # one instance is one, however often it is listed
    with pytest.raises(BackendError, match=r"two are 'cpu'; leave one out, or give it another device \(cpu:1\)"):
        prepare(chain(), [CpuBackend(), CpuBackend(exact=False)])


def test_a_device_is_asked_for_by_its_number() -> None:
    assert get_backend("cpu:3").id == "cpu:3" and get_backend("cpu:0").id == "cpu"
    assert get_backend("cpu:1", exact=False).id == "cpu:1"
    for name, said in (("cpu:x", "the number of a device"), ("nobody:1", "got 'nobody'")):
        with pytest.raises(BackendError, match=said):
            get_backend(name)


def test_who_plans_for_devices_elsewhere() -> None:
    pytest.importorskip("triton")
    there = Elsewhere("sm_90", 132, 232448, 50 << 20)
    planned = backend_elsewhere("triton", there, exact=False)
    assert planned.id == "triton" and planned.device is None, "its device is not here"
    exe = prepare(chain(), planned)
    assert [len(step.launches) for step in exe.splits[0].run.steps] == [1, 1]
    with pytest.raises(BackendError, match="backend 'cpu' plans for no device but those that are here"):
        backend_elsewhere("cpu", there)
    with pytest.raises(BackendError, match="a backend must be one of"):
        backend_elsewhere("nobody", there)


def test_accuracy_is_declared() -> None:
    assert ToyBackend().logits_nmse == CpuBackend().logits_nmse == 1e-6
