"""Parts of the architectures' graphs by themselves, where no tiny model goes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.gguf_files import build

from graphrt import Graph, get_backend, new_input, prepare
from graphrt.errors import ArchError
from graphrt.models.arch.experts import LEAST_SUM, _shares
from graphrt.models.gguf import GGUFFile
from graphrt.models.hparams import ExpertParams
from graphrt.models.model import nll
from graphrt.models.placement import for_cache, for_weights
from graphrt.models.tokenizer_wordpiece import longest_matcher
from graphrt.models.weights import Weights


def shares(picked: np.ndarray, gating: str = "sigmoid", norm: bool = True, scale: float = 1.0) -> np.ndarray:
    """The weights of chosen probabilities, [n, used]."""
    n, used = picked.shape
    p = ExpertParams(8, used, 32, gating, norm, scale)
    node = _shares(0, new_input("f32", 1, used, n, name="picked"), p)
    exe = prepare(Graph(node), "cpu")
    exe.write("picked", picked.astype(np.float32)[None, :, :, None])
    exe.run()
    return np.asarray(exe.read(node)).reshape(n, used)


def test_experts_that_nothing_speaks_for_weigh_nothing() -> None:
    """A sum of probabilities is divided by as it is, but by no less than the smallest normal number of f16."""
    found = shares(np.array([[0.0, 0.0], [LEAST_SUM / 4, LEAST_SUM / 4], [0.25, 0.75]]))
    assert found.tolist() == [[0, 0], [0.25, 0.25], [0.25, 0.75]]


@pytest.mark.parametrize("scale", [0.5, 1.0, 2.5])
def test_a_scale_on_experts_weights(scale: float) -> None:
    picked = np.array([[0.1, 0.3]])
    np.testing.assert_allclose(shares(picked, scale=scale), scale * np.array([[0.25, 0.75]]), rtol=1e-6)
    np.testing.assert_allclose(shares(picked, norm=False, scale=scale), scale * picked, rtol=1e-6)
    weights = np.exp(picked) / np.exp(picked).sum()
    np.testing.assert_allclose(shares(picked, "chosen", False, scale), scale * weights, rtol=1e-6)


def test_a_matrix_the_other_way_round_is_refused() -> None:
    """As many elements, and the same numbers of them, are not yet the shape."""
    file = GGUFFile.from_bytes(build([], [("w", "f32", (4, 6), bytes(96)), ("row", "f32", (4,), bytes(16))]).data)
    for ne, fits in (((4, 6), True), ((6, 4), False), ((24,), False), ((4, 6, 1), True), ((2, 12), False)):
        weights = Weights(file, get_backend("cpu"))
        weights("w", *ne)
        weights("row", 4, 1)
        if fits:
            weights.check()
        else:
            with pytest.raises(ArchError, match="must have the shape .*, not .4, 6."):
                weights.check()


def test_a_word_may_be_the_longest_token() -> None:
    texts = ["[UNK]", "▁abcd", "▁ab", "cd", "▁a", "bcde"]
    matched = longest_matcher({text: i for i, text in enumerate(texts)}, texts, 0)
    assert [matched(word) for word in ("abcd", "ab", "abcd" * 2, "abcdcd", "abcde", "x")] == [
        [1], [2], [0], [1, 3], [0], [0],
    ]  # fmt: skip
    assert matched("abcdbcde") == [1, 5]


def test_weights_and_caches_lie_with_the_first_that_works_on_them() -> None:
    def backend(*ops: str) -> Any:
        return SimpleNamespace(supports=lambda node: None if node.op in ops else "no")

    none, products, rows, both = backend(), backend("MUL_MAT"), backend("SET_ROWS"), backend("MUL_MAT", "SET_ROWS")
    assert for_weights([none, rows, both, products]) is both and for_weights([products, both]) is products
    assert for_cache([none, products, both, rows], "f16") is both and for_cache([rows, both], "q8_0") is rows
    assert for_weights([none, rows]) is none and for_cache([none, products], "f16") is none
    assert for_cache([none, both], "no type") is none


def test_likelihoods_are_summed_up_exactly() -> None:
    """Of f32 logits in f64: half a million tokens' likelihoods are added up."""
    logits = np.random.default_rng(2).normal(size=(5, 3000)).astype(np.float32) * 4
    wide, targets = logits.astype(np.float64), [0, 2999, 7, 7, 100]
    expected = np.log(np.exp(wide).sum(1)) - wide[np.arange(5), targets]
    np.testing.assert_allclose(nll(logits, targets), expected, rtol=1e-13)
