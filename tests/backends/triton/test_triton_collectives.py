"""What ranks give each other on the triton backend: played in one process, and a rank's own nodes with a link that this
process plays, whose bits must be those of played ranks on the CPU."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from graphrt import Graph, get_backend, new_input, ops, prepare
from graphrt.backends.triton import device
from graphrt.ops.collectives import COLLECTIVES
from graphrt.tensor import Tensor
from graphrt.testing import Case, all_cases
from graphrt.tools.conformance.run.step import run_case

if device.unusable() is not None:
    pytest.skip(f"the triton backend can't be used here: {device.unusable()}", allow_module_level=True)

from graphrt import ranks as ranks_module
from graphrt.backends.triton.backend import TritonBackend
from graphrt.backends.triton.kernels import collectives

#: Of the conformance cases every n-th is run here; on a GPU the conformance tool runs all.
EVERY = 5


def _some() -> list[Case]:
    return [c for op in COLLECTIVES for c in all_cases(op, "quick") if zlib.crc32(str(c).encode()) % EVERY == 0]


@pytest.fixture(scope="module")
def backend() -> TritonBackend:
    return TritonBackend()


@pytest.mark.parametrize("case", _some(), ids=str)
def test_a_case(case: Case, backend: TritonBackend) -> None:
    outcome = run_case(case, backend)
    assert outcome.status == "pass", outcome.message


class Link:
    """What one of several ranks has for graphrt.ranks.Ranks: the others' elements are known."""

    def __init__(self, rank: int, parts: Sequence[np.ndarray]) -> None:
        self.rank, self.parts = rank, [torch.from_numpy(part) for part in parts]
        self.calls: list[str] = []

    def into(self, parts: torch.Tensor, own: torch.Tensor) -> None:
        self.calls.append("into")
        n, size = own.numel(), len(self.parts)
        if self.calls[:1] == ["swapped"]:  # pieces of the sum: every rank's, of which this one's is `own`
            padded = [torch.nn.functional.pad(t.reshape(-1), (0, n * size - t.numel())) for t in self.parts]
            total = padded[0] + padded[1]
            for t in padded[2:]:
                total = total + t
            assert torch.equal(total.view(size, n)[self.rank].cpu()[: self._real(n)], own.cpu()[: self._real(n)])
            parts.copy_(total.view(size, n))
            return
        most = max(t.shape[-1] for t in self.parts)
        for row, t in zip(parts, self.parts):
            row.copy_(torch.nn.functional.pad(t, (0, most - t.shape[-1]), value=torch.nan).reshape(-1))
        lead = n // most  # what is behind a narrow part is not told
        mine = self.parts[self.rank]
        assert torch.equal(own.cpu().view(lead, most)[:, : mine.shape[-1]], mine.reshape(lead, -1))

    def _real(self, n: int) -> int:
        return min(n, self.parts[0].numel() - self.rank * n)

    def swapped(self, pieces: torch.Tensor, own: torch.Tensor) -> None:
        self.calls.append("swapped")
        size, n = pieces.shape
        mine = self.parts[self.rank].reshape(-1)
        assert torch.equal(own.cpu()[: mine.numel()], mine)
        for row, t in zip(pieces, self.parts):
            padded = torch.nn.functional.pad(t.reshape(-1), (0, n * size - t.numel()), value=torch.nan)
            row.copy_(padded.view(size, n)[self.rank])


def run_as(link: Link, monkeypatch: pytest.MonkeyPatch, backend: TritonBackend, node: Any, gaps: bool) -> np.ndarray:
    """The result on this rank. node: builds it from this rank's part."""
    monkeypatch.setattr(collectives, "current", lambda size: link)
    monkeypatch.setattr(ranks_module, "_gpus", [link.rank])
    mine = link.parts[link.rank].numpy()
    a = new_input("f32", *mine.shape[::-1], name="a")
    source: Tensor = ops.scale(a, 1.0)
    if gaps:
        whole = new_input("f32", mine.shape[-1] + 3, *mine.shape[-2::-1], name="a")
        source = ops.view(whole, mine.shape[::-1], whole.nb[1 : mine.ndim], 4)
        mine = np.pad(mine, [*((0, 0) for _ in mine.shape[1:]), (1, 2)], constant_values=np.nan)
    out = node(source)
    exe = prepare(Graph(out), [backend, get_backend("cpu")])
    assert [split.backend.name for split in exe.splits] == ["triton"]
    exe.write("a", mine)
    exe.run()
    return np.asarray(exe.read(out)).reshape(*mine.shape[:-1], -1)


def played(op: Any, parts: Sequence[np.ndarray], **params: Any) -> np.ndarray:
    """The same of ranks that are played on the CPU."""
    inputs = [new_input("f32", *part.shape[::-1], name=f"a{i}") for i, part in enumerate(parts)]
    out = op(*inputs, ranks=len(parts), **params)
    exe = prepare(Graph(out), "cpu")
    for leaf, part in zip(inputs, parts):
        exe.write(leaf, part)
    exe.run()
    return np.asarray(exe.read(out)).reshape(*parts[0].shape[:-1], -1)


def parts_of(ranks: int, shape: tuple[int, ...], widths: Sequence[int] = ()) -> list[np.ndarray]:
    rng = np.random.default_rng(zlib.crc32(repr((ranks, shape)).encode()))
    widths = widths or (shape[-1],) * ranks
    return [rng.standard_normal((*shape[:-1], n), np.float32) for n in widths]


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize(
    ("ranks", "shape", "calls"),
    [(2, (3, 40), ["into"]), (3, (2, 5, 7), ["into"]), (2, (2, 8194), ["swapped", "into"]),
     (3, (1, 16387), ["swapped", "into"])],
)  # fmt: skip
def test_a_rank_s_sum_has_the_bits_of_played_ranks(
    ranks: int, shape: tuple[int, ...], calls: list[str], gaps: bool, backend: TritonBackend,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    parts = parts_of(ranks, shape)
    wanted = played(ops.all_reduce, parts, rank=0)
    link = Link(1, parts)
    found = run_as(link, monkeypatch, backend, lambda a: ops.all_reduce(a, ranks=ranks, rank=1), gaps)
    assert np.array_equal(found, wanted) and link.calls == calls


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("widths", [(4, 4), (7, 5, 3), (3, 7, 5)])
def test_a_rank_gathers(
    widths: tuple[int, ...], gaps: bool, backend: TritonBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, size = parts_of(len(widths), (2, 3, max(widths)), widths), len(widths)
    for rank in range(size):
        found = run_as(
            Link(rank, parts), monkeypatch, backend,
            lambda a, rank=rank: ops.all_gather(a, ranks=size, rank=rank, sizes=widths), gaps,
        )  # fmt: skip
        assert np.array_equal(found, np.concatenate(parts, -1))


def test_a_rank_is_given_its_piece(backend: TritonBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, sizes = parts_of(3, (4, 15)), (7, 5, 3)
    for rank in range(3):
        wanted = played(ops.reduce_scatter, parts, rank=rank, sizes=sizes)
        found = run_as(
            Link(rank, parts), monkeypatch, backend,
            lambda a, rank=rank: ops.reduce_scatter(a, ranks=3, rank=rank, sizes=sizes), rank == 1,
        )  # fmt: skip
        assert np.array_equal(found, wanted)


def test_without_a_link_the_cpu_has_them(backend: TritonBackend) -> None:
    out = ops.all_reduce(ops.sqr(new_input("f32", 4, name="a")), ranks=2, rank=0)
    assert backend.supports(out) == "the ranks have no link between their GPUs (NCCL)"
    exe = prepare(Graph(out), [backend, get_backend("cpu")])
    assert [split.backend.name for split in exe.splits] == ["triton", "cpu"]
