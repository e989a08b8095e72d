"""Sums over ranks that are under way while the next band of tokens is multiplied: which are cut, and that two processes
find the bits of those that are not."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from support import overlapped
from support.tiny import write_model
from torch.multiprocessing.spawn import start_processes

from graphrt import Graph, Tensor, new_input, ops
from graphrt.backend import get_backend
from graphrt.backends.cpu import fast, overlap
from graphrt.errors import BackendError
from graphrt.execute import plan_groups
from graphrt.ops.overlap import Band, Bands, described
from graphrt.tools.cli import main

#: A row of 1 KB, bands of 8 tokens and 16 KB at least.
RULES = Bands(16 << 10, 8, lambda product: None)


def total(n: int, m: int = 256) -> Tensor:
    product = ops.mul_mat(new_input("f32", 32, m, name="w"), new_input("f32", 32, n, name="x"), name="y")
    return ops.all_reduce(product, ranks=2, rank=0, name="sum")


@pytest.fixture(autouse=True)
def four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHRT_OVERLAP", "4")


def test_a_band_is_made_by_the_kernels_of_many_tokens() -> None:
    """Those for few would give other bits than the whole product."""
    assert overlap.BANDS.tokens > fast.MAX_TOKENS


@pytest.mark.parametrize(
    ("n", "sizes"),
    [(64, [16] * 4), (71, [16, 16, 16, 23]), (80, [16, 24, 16, 24]), (200, [48, 48, 48, 56]), (63, [16, 16, 31]),
     (32, [16, 16]), (47, [16, 31])],
)  # fmt: skip
def test_bands_are_even_and_large_enough(n: int, sizes: list[int]) -> None:
    """Of as many as are asked for, each but the last of whole steps of tokens."""
    node = total(n)
    bands = RULES.of(node)
    assert RULES.why_whole(node) is None and [band.stop - band.start for band in bands] == sizes
    assert [band.start for band in bands[1:]] == [band.stop for band in bands[:-1]]
    assert bands[0].start == 0 and bands[-1].stop == n


def test_what_is_not_cut_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert RULES.why_whole(total(31)) == (
        "it takes two bands of 8 tokens and 16 KB at least, there are 31 tokens and 31 KB"
    )
    assert "there are 1 tokens and 1 KB" in str(RULES.why_whole(total(1)))
    scaled = ops.all_reduce(ops.scale(total(64)["a"], 2.0), ranks=2, rank=0)
    assert RULES.why_whole(scaled) == ("it takes the sum of a MUL_MAT, with a bias or without, this is one of SCALE")
    a, b = (new_input("f32", 256, 64, name=name) for name in "ab")
    assert RULES.why_whole(ops.all_reduce(a, b, ranks=2, rank=0)) == "all ranks are played in this graph"
    heads = ops.mul_mat(new_input("f32", 32, 64, 2, name="w"), new_input("f32", 32, 64, 2, name="x"))
    assert RULES.why_whole(ops.all_reduce(heads, ranks=2, rank=0)) == "it takes one row of f32 for each token"
    refusing = Bands(16 << 10, 8, lambda product: "no such weights")
    assert refusing.why_whole(total(64)) == "no such weights"
    monkeypatch.setenv("GRAPHRT_OVERLAP", "0")
    assert RULES.why_whole(total(64)) == "--overlap (GRAPHRT_OVERLAP) asks for none"
    monkeypatch.delenv("GRAPHRT_OVERLAP")
    assert RULES.why_whole(total(64)) is not None


@pytest.mark.parametrize("text", ["1", "-2", "65", "many", "1e3", "²", "9" * 5000])
def test_other_numbers_are_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHRT_OVERLAP", text)
    with pytest.raises(BackendError, match="must be 0, for none, or a number of bands from 2 to 64, got '"):
        RULES.why_whole(total(64))


def test_bands_are_told_in_words() -> None:
    said = ": the sum of one is under way while the next is multiplied"
    assert described((Band(0, 8), Band(8, 16))) == f"in 2 bands of 8 tokens{said}"
    assert described((Band(0, 8), Band(8, 24))) == f"in 2 bands of 8 to 16 tokens{said}"
    assert RULES.told(total(64)) == f"in 4 bands of 16 tokens{said}"
    assert RULES.told(total(1)).startswith("waited for, not in bands of tokens: it takes two bands of 8 tokens")
    parts = [total(64)["a"] for _ in range(2)]
    assert RULES.told(ops.all_reduce(*parts, ranks=2, rank=0)) == f"over a link in 4 bands of 16 tokens{said}"


def test_explain_tells_of_sums_over_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write_model(tmp_path / "m.gguf", "llama"))
    args = ["explain", path, "ffn_joined-0", "--ranks", "2", "--phase", "prefill", "--backend", "cpu"]
    assert main(args) == 0
    assert "over a link waited for, not in bands of tokens: it takes two bands" in capsys.readouterr().out


def test_the_group_keeps_what_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Product and sum have memory until the group's end; who else reads the product finds it there."""
    monkeypatch.setattr(overlap, "BANDS", RULES)
    node = total(64)
    graph = Graph(ops.add(node, node["a"]))
    groups = [g for g in plan_groups(graph, [get_backend("cpu", exact=False)]) if g.kernel == "overlapped_sum"]
    assert [g.results for g in groups] == [[node["a"], node]]
    assert not [g for g in plan_groups(graph, [get_backend("cpu", exact=True)]) if g.kernel == "overlapped_sum"]


# ---- two processes


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, np.ndarray]]:
    folder = tmp_path_factory.mktemp("overlapped")
    model = write_model(folder / "m.gguf", "llama")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    context = start_processes(
        overlapped.rank, (2, str(folder), str(model)), 2, join=False, start_method="spawn"
    )  # fmt: skip
    assert context is not None
    while not context.join():
        pass
    return [dict(np.load(folder / f"{rank}.npz")) for rank in range(2)]


@pytest.mark.parametrize("name", [*overlapped.PRODUCTS, "model", "step"])
def test_bits_are_those_of_sums_that_are_waited_for(found: list[dict[str, np.ndarray]], name: str) -> None:
    whole = found[0][f"{name} 0"]
    assert np.isfinite(whole).all() and np.unique(whole).size > 100
    for bands in overlapped.BANDS:
        for of in found:
            assert np.array_equal(of[f"{name} {bands}"], whole), (name, bands)


def test_all_ranks_start_the_same_sums_in_one_order(found: list[dict[str, np.ndarray]]) -> None:
    """Also that a band's sum is begun before the next one is multiplied, and waited for behind the last one."""
    for name in [*overlapped.PRODUCTS, "model", "step"]:
        for bands in overlapped.BANDS:
            did = [of[f"{name} {bands} did"].tolist() for of in found]
            assert did[0] == did[1]
            if name in overlapped.PRODUCTS and bands:
                begun = ["multiply", "parts", *["multiply", "parts", "sum"] * (bands - 1)]
                assert did[0] == 2 * [*begun, *["wait"] * bands, "sum"]
    for bands in filter(None, overlapped.BANDS):
        n = found[0][f"model {bands} did"].tolist().count("multiply")
        assert n == 3 * bands, "two sums a layer, one with a bias; the last layer's attention ends in GET_ROWS"
        assert "multiply" not in found[0][f"step {bands} did"], "a step of one token is not cut"
