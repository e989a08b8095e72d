"""What prepare() tells a backend that fuses (Region), and the memory that it keeps for what a group or a copy reads."""

from __future__ import annotations

import numpy as np
from support.toy import ToyBackend

import graphrt
from graphrt import Graph, Tensor, get_backend, new_input, new_tensor, ops
from graphrt.backend import Backend, Group, Region, Usage
from graphrt.execute import Executable
from graphrt.fusion import Nodes


class Asking(ToyBackend):
    """Fuses nothing, and notes what its regions say of each of their nodes, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, bool] = {}
        self.once: dict[str, bool] = {}

    def fuse(self, region: Region) -> list[Group]:
        nodes = Nodes(region)
        for node in region.nodes:
            self.kept[node.name] = region.kept(node)
            self.once[node.name] = len(nodes.readers(node)) == 1 and not region.kept(node)
        return super().fuse(region)


class Pairing(ToyBackend):
    """Runs every two nodes as one group that gives both."""

    def fuse(self, region: Region) -> list[Group]:
        pairs = [region.nodes[i : i + 2] for i in range(0, len(region.nodes), 2)]
        return [Group(pair, results=list(pair)) for pair in pairs]


def _a(n: int = 16, name: str = "a") -> Tensor:
    return new_input("f32", n, name=name)


def _prepared(backends: list[Backend], *outputs: Tensor, n: int = 16) -> Executable:
    exe = graphrt.prepare(Graph(*outputs), backends)
    exe.write("a", np.full(n, 3.0))
    exe.run()
    return exe


def test_what_is_needed_outside_a_region_is_kept() -> None:
    """An output, the source of a copy, and what a later split of the same backend reads; nothing else."""
    asking = Asking()
    inner = ops.scale(_a(), 2.0, name="inner")
    copied = ops.sqr(inner, name="copied")
    later = ops.scale(inner, 3.0, name="later")
    looked_at = ops.scale(inner, 4.0, name="looked at")
    elsewhere = ops.sqrt(copied, name="elsewhere")  # on the CPU
    first = ops.add(later, looked_at, name="first").as_output()
    last = ops.add(ops.mul(later, elsewhere, name="last but one"), ops.reshape(looked_at, 16), name="last")
    graphrt.prepare(Graph(first, last), [asking, get_backend("cpu")])
    assert asking.kept == {
        "inner": False, "copied": True, "later": True, "looked at": True, "first": True, "last but one": False,
        "last": True,
    }  # fmt: skip


def test_what_is_read_once_counts_reading_through_views() -> None:
    asking = Asking()
    alone = ops.scale(_a(), 2.0, name="alone")
    twice = ops.sqr(alone, name="twice")
    through_a_view = ops.scale(ops.reshape(twice, 4, 4), 3.0, name="through a view")
    out = ops.add(ops.sqr(twice, name="straight"), ops.reshape(through_a_view, 16), name="out")
    graphrt.prepare(Graph(out), asking)
    assert asking.once == {
        "alone": True, "twice": False, "through a view": True, "straight": True, "out": False,
    }  # fmt: skip


def test_an_output_that_one_node_reads_is_not_only_used_once() -> None:
    asking = Asking()
    output = ops.scale(_a(), 2.0, name="output")
    graphrt.prepare(Graph(ops.sqr(output, name="last"), output), asking)
    assert asking.once["output"] is False


def test_a_group_takes_over_nothing_that_it_still_reads() -> None:
    """y's last step is the group that gives both: the first of them must not lie where the second reads y."""
    y = ops.scale(ops.sqr(_a()), 2.0)
    tripled, squared = ops.scale(y, 3.0), ops.sqr(y)
    exe = _prepared([Pairing()], tripled, squared)
    np.testing.assert_array_equal(exe.read(tripled).reshape(-1), 54.0)
    np.testing.assert_array_equal(exe.read(squared).reshape(-1), 324.0)


def test_the_source_of_a_copy_lives_until_it_is_copied() -> None:
    toy, cpu = ToyBackend(), get_backend("cpu")
    x = ops.scale(_a(), 2.0)
    y = ops.sqr(x)
    for _ in range(3):  # results that would fit where x lies
        y = ops.scale(y, 1.0, 1.0)
    out = ops.add(y, ops.sqrt(x))  # the root on the CPU, from a copy of x that is made after all of these
    np.testing.assert_allclose(_prepared([toy, cpu], out).read(out).reshape(-1), 39 + np.sqrt(6), rtol=1e-6)


def test_a_weight_that_prepare_copied_is_there_when_a_later_split_reads_it() -> None:
    toy, cpu = ToyBackend(), get_backend("cpu")
    w = new_tensor("f32", 16, name="w")
    w.buffer = cpu.alloc(64, Usage.WEIGHTS)
    w.buffer.write(0, np.full(16, 5.0, np.float32).view(np.uint8))
    x = ops.scale(_a(), 2.0)
    out = ops.mul(ops.sqrt(ops.add(x, ops.sqr(x))), w)  # two blocks are given up before the copies' split begins
    exe = _prepared([toy, cpu], out)
    assert [copy.once for copy in exe.splits[2].copies] == [False, True]
    np.testing.assert_allclose(exe.read(out).reshape(-1), np.sqrt(42) * 5.0, rtol=1e-6)


def test_a_part_of_a_tensor_is_no_block_to_take_over() -> None:
    """What an op may overwrite is a source that is all of its memory: the rest of a larger block is another's."""
    for offs in (0, 16):
        x = ops.sqr(_a(8))
        out = ops.scale(ops.view(x, (4,), offs=offs), 2.0)
        exe = _prepared([ToyBackend()], out, n=8)
        assert exe.arenas["toy"].plan.taken_over == {}
        np.testing.assert_array_equal(exe.read(out).reshape(-1), 18.0)
