"""Sums over ranks in bands of tokens on the triton backend: one rank's own step, with a link that this process plays.

Values are small whole numbers, so that every product and sum is exact: a band that is multiplied wrongly, summed too
early, or told to the wrong place shows in the bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from graphrt import Graph, Tensor, get_backend, new_input, new_tensor, ops, prepare
from graphrt import ranks as ranks_module
from graphrt.backend import Backend, Usage, backend_elsewhere
from graphrt.backends.triton import beside, device
from graphrt.backends.triton.context import Context
from graphrt.backends.triton.kernels import collectives, overlapped, overlapped_fusions
from graphrt.backends.triton.kernels.products import gemm_large
from graphrt.execute import Executable
from graphrt.tools.check.launch_order import Rule
from graphrt.tools.check.order_report import ordered
from graphrt.tools.explain.devices import known_device

if device.unusable() is not None:
    pytest.skip(f"the triton backend can't be used here: {device.unusable()}", allow_module_level=True)

#: Elements of a row of x, rows of weights, tokens, ranks.
K, M, N = 64, 40, 150


def whole_numbers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float32)


def as_kind(kind: str, w: np.ndarray) -> np.ndarray:
    """Weights as a file has them: of q8_0 blocks of 32 codes behind a scale, which is 1."""
    if kind != "q8_0":
        return w.astype({"f32": np.float32, "f16": np.float16}[kind])
    codes = w.astype(np.int8).reshape(-1, 32).view(np.uint8)
    scales = np.broadcast_to(np.float16(1).reshape(1).view(np.uint8), (len(codes), 2))
    return np.concatenate([scales, codes], axis=1).reshape(M, -1)


class Link:
    """What rank 0 has for graphrt.ranks.Ranks: the others' parts are known, and told band by band."""

    def __init__(self, parts: Sequence[np.ndarray]) -> None:
        self.parts, self.at = [torch.from_numpy(part).reshape(-1) for part in parts], 0
        self.own: torch.Tensor | None = None

    def swapped(self, pieces: torch.Tensor, own: torch.Tensor) -> None:
        assert self.own is None, "one sum after the other"
        self.own = own.clone()
        size, each = pieces.shape
        n = min(own.numel(), self.parts[0].numel() - self.at)
        for row, t in zip(pieces, self.parts):
            padded = torch.nn.functional.pad(t[self.at : self.at + n], (0, each * size - n))
            row.copy_(padded[:each])
        pieces[0].copy_(own[:each])

    def into(self, parts: torch.Tensor, own: torch.Tensor) -> None:
        assert self.own is not None
        size, each = parts.shape
        n = min(self.own.numel(), self.parts[0].numel() - self.at)
        total = self.own.cpu()[:n].clone()
        for t in self.parts[1:]:
            total += t[self.at : self.at + n]
        parts.copy_(torch.nn.functional.pad(total, (0, each * size - n)).view(size, each))
        parts[0].copy_(own)
        self.at, self.own = (self.at + n) % self.parts[0].numel(), None


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small sums are cut; the ranks have a link between their GPUs."""
    monkeypatch.setattr(overlapped_fusions, "BANDS", replace(overlapped_fusions.BANDS, bytes=1 << 10, tokens=24))
    monkeypatch.setattr(ranks_module, "_gpus", [0])
    monkeypatch.setenv("GRAPHRT_OVERLAP", "4")


def graph(kind: str, ranks: int, biased: bool, backend: Backend) -> Graph:
    """A product, summed over ranks, and a residual."""
    w = new_tensor(kind, K, M, name="w")
    w.buffer = backend.alloc(w.nbytes, Usage.WEIGHTS)
    product: Tensor = ops.mul_mat(w, ops.scale(new_input("f32", K, N, name="x"), 1.0), name="y")
    if biased:
        bias = new_tensor("f32", M, name="bias")
        bias.buffer = backend.alloc(bias.nbytes, Usage.WEIGHTS)
        product = ops.add(product, bias, name="y + bias")
    total = ops.all_reduce(product, ranks=ranks, rank=0, name="sum")
    return Graph(ops.add(total, new_input("f32", M, N, name="r"), name="out"))


class Case:
    """A step of one of several ranks, and what comes of it."""

    def __init__(self, kind: str, ranks: int, biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        backend = get_backend("triton", exact=False)
        w, x, bias = whole_numbers(1, M, K), whole_numbers(2, N, K), whole_numbers(3, M) * biased
        x[60] *= 2.0**20  # a row that f16 has with a factor
        own, residual = x @ w.T + bias, whole_numbers(4, N, M)
        others = [whole_numbers(5 + i, N, M) for i in range(ranks - 1)]
        self.link = Link([own, *others])
        monkeypatch.setattr(collectives, "current", lambda size=0: self.link)
        made = graph(kind, ranks, biased, backend)
        leafs = {leaf.name: leaf for leaf in made.leafs}
        leafs["w"].buffer.write(0, as_kind(kind, w).reshape(-1).view(np.uint8))
        if biased:
            leafs["bias"].buffer.write(0, bias.view(np.uint8))
        self.exe = prepare(made, [backend])
        self.exe.write_all({"x": x, "r": residual})
        self.wanted = sum(others, own) + residual

    def found(self) -> np.ndarray:
        for arena in self.exe.arenas.values():
            whole = arena.buffer.memory  # type: ignore[attr-defined]
            keep = {name: np.array(self.exe.read(name)) for name in ("x", "r")}
            whole.fill_(255)  # NaN of every type
            self.exe.write_all(keep)
        self.exe.run()
        return np.array(self.exe.read("out")).reshape(N, M)


def groups(exe: Executable) -> list[str]:
    return [g.kernel or g.label for split in exe.splits for g in split.groups if g.working]


@pytest.fixture(params=["at once", "as late as can be"])
def when(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Work beside the others' steps happens when it begins, or when it is waited for: a stream may do either."""
    if request.param != "at once":
        waiting: list[beside.Begun] = []
        monkeypatch.setattr(beside.Begun, "__call__", lambda self: waiting.append(self))
        given = beside.Joined.__call__

        def joined(self: beside.Joined) -> None:
            assert waiting == self.begun
            while waiting:
                waiting.pop(0).work()
            given(self)

        monkeypatch.setattr(beside.Joined, "__call__", joined)
    return str(request.param)


@pytest.mark.parametrize(
    ("kind", "ranks", "biased"), [("q8_0", 2, False), ("q8_0", 3, True), ("f16", 2, True), ("f32", 3, False)]
)
def test_bands_have_the_bits_of_the_whole(
    kind: str, ranks: int, biased: bool, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemm_large, "SCRATCH", 2 * K * 16)  # weights in slices
    monkeypatch.setattr(gemm_large, "WHOLE", 8)
    case = Case(kind, ranks, biased, monkeypatch)
    assert groups(case.exe).count("overlapped_sum") == 1
    assert np.array_equal(case.found(), case.wanted) and np.array_equal(case.found(), case.wanted)


def test_a_product_without_bands_is_made_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sum comes in bands all the same, since other ranks' does."""
    monkeypatch.setattr(overlapped_fusions, "BANDS", replace(overlapped_fusions.BANDS, tokens=16))
    monkeypatch.setitem(globals(), "N", 64)
    case = Case("q8_0", 2, False, monkeypatch)
    (step,) = (s for split in case.exe.splits for s in split.run.steps if s.group.kernel == "overlapped_sum")
    assert step.choice is not None and dict(step.choice.facts())["kernel"] == "gemm_small"
    assert [x.beside for x in step.launches[-6:]] == [False, *[True] * 4, False]
    assert np.array_equal(case.found(), case.wanted)


def test_without_being_asked_for_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRAPHRT_OVERLAP")
    case = Case("q8_0", 2, False, monkeypatch)
    assert "overlapped_sum" not in groups(case.exe)
    large = ops.all_reduce(new_input("f32", 256, 256, name="a"), ranks=2, rank=0)
    refused = collectives.joined_choice(large).refused
    assert refused["bands of tokens beside the product"] == "--overlap (GRAPHRT_OVERLAP) asks for none"


def test_explain_says_how_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("q8_0", 2, False, monkeypatch)
    (step,) = (s for split in case.exe.splits for s in split.run.steps if s.group.kernel == "overlapped_sum")
    assert step.choice is not None
    facts = dict(step.choice.facts())
    assert facts["sum"] == (
        "all_to_all and all_gather (NCCL), in 4 bands of 24 to 54 tokens: the sum of one is under way while the next "
        "is multiplied"
    )
    assert facts["kernel"] == "gemm_large" and step.choice.data()["sum"]["reasons"]


# -- the order of launches on a GPU that need not be here


def planned(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    backend = backend_elsewhere("triton", known_device("h100").elsewhere, exact=False)
    monkeypatch.setattr(overlapped_fusions, "BANDS", replace(overlapped_fusions.BANDS, tokens=512))
    monkeypatch.setitem(globals(), "N", 2048)
    yield from ordered("step", prepare(graph("q8_0", 2, True, backend), [backend])).violations


def test_what_is_under_way_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not [str(v) for v in planned(monkeypatch)]


def test_memory_that_is_used_meanwhile_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One scratch for all purposes: NCCL would write others' parts over the weights of the next band."""
    given = Context.shared_scratch
    monkeypatch.setattr(Context, "shared_scratch", lambda self, name, nbytes: given(self, "one", max(nbytes, 1 << 24)))
    found = [v for v in planned(monkeypatch) if v.rule is Rule.BESIDE]
    assert any(v.later.startswith("multiply") and v.earlier.startswith("begin the sum") for v in found)


def test_what_nothing_waits_for_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    given = overlapped.lower_overlapped
    without = replace(overlapped.OVERLAPPED_SUM, lower=lambda found, ctx: given(found, ctx)[:-1])
    from graphrt.backends.triton import fuse

    monkeypatch.setattr(fuse, "FUSIONS", tuple(without if f.name == without.name else f for f in fuse.FUSIONS))
    assert {v.rule for v in planned(monkeypatch)} >= {Rule.NEVER_JOINED, Rule.BESIDE}
