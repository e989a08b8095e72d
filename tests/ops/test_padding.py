"""Varlen attention of what padded batches hold, by the helpers that pack and unpad: each text as it is by itself."""

from __future__ import annotations

import re

import numpy as np
import pytest

import graphrt
from graphrt import ops
from graphrt.errors import GraphError
from graphrt.graph import Graph
from graphrt.tensor import new_input
from graphrt.testing import generate_qkv, generate_random_padding_mask
from graphrt.testing.padding import MODES, Packed


@pytest.mark.parametrize(("mode", "least"), [("full", 64), ("random", 44), ("third", 21)])
def test_lengths_of_a_mode(mode: str, least: int) -> None:
    mask = generate_random_padding_mask(64, 500, mode, np.random.default_rng(0))
    lengths = mask.sum(1)
    assert mask.shape == (500, 64) and mask.dtype == np.bool_ and not (mask[:, 1:] & ~mask[:, :-1]).any()
    assert lengths.max() == 64 and lengths.min() == least
    assert generate_random_padding_mask(1, 3, mode, np.random.default_rng(0)).all(), "a text has a token at least"


def _attention(p: Packed, causal: bool) -> np.ndarray:
    leafs = [new_input("f32", *x.shape[::-1], name=name) for name, x in (("q", p.q), ("k", p.k), ("v", p.v))]
    starts = [new_input("i32", len(x), name=name) for name, x in (("qs", p.q_starts), ("ks", p.k_starts))]
    out = ops.flash_attn_varlen(*leafs, starts[0], 0.25, k_starts=starts[1], causal=causal)
    exe = graphrt.prepare(Graph(out), "cpu")
    for leaf, x in zip([*leafs, *starts], (p.q, p.k, p.v, p.q_starts, p.k_starts)):
        exe.write(leaf, x.reshape(leaf.shape))
    exe.run()
    return np.asarray(exe.read(out)[0])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_each_text_is_as_alone_whatever_padding_holds(mode: str, causal: bool) -> None:
    """More keys than queries, so that positions are counted from the ends; padding is NaN."""
    rng = np.random.default_rng(1)
    q_mask, k_mask = (generate_random_padding_mask(n, 4, mode, rng) for n in (9, 31))
    q, k, v = (rng.normal(size=(4, h, n, d)).astype(np.float32) for h, n, d in ((4, 9, 16), (2, 31, 16), (2, 31, 8)))
    for x, mask in ((q, q_mask), (k, k_mask), (v, k_mask)):
        x.swapaxes(1, 2)[~mask] = np.nan
    p = generate_qkv(q, k, v, q_mask, k_mask)
    assert (p.most_q, p.most_k) == (q_mask.sum(1).max(), k_mask.sum(1).max())
    assert p.q.shape == (4, q_mask.sum(), 16) and p.k_starts.tolist() == np.cumsum([0, *k_mask.sum(1)]).tolist()
    found = p.padded(_attention(p, causal))
    assert found.shape == (4, 9, 4, 8) and not found[~q_mask].any()
    for i in range(4):
        n, length = int(q_mask[i].sum()), int(k_mask[i].sum())
        alone = generate_qkv(*(x[i : i + 1, :, :end] for x, end in ((q, n), (k, length), (v, length))))
        np.testing.assert_array_equal(found[i, :n], _attention(alone, causal))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda rng: generate_random_padding_mask(4, 2, "half", rng), "one of full, random, third, got 'half'"),
        (lambda rng: generate_random_padding_mask(0, 2, "full", rng), "a place at least, got 2 texts of 0"),
        (
            lambda rng: generate_qkv(*[np.zeros((1, 1, 3, 2))] * 3, np.ones((1, 2), bool)),
            "must be bool [1, 3], got bool",
        ),
        (lambda rng: generate_qkv(*[np.zeros((1, 1, 2, 2))] * 3, np.array([[False, True]])), "here one stands behind"),
    ],
)
def test_what_is_refused(make: object, said: str) -> None:
    with pytest.raises(GraphError, match=re.escape(said)):
        make(np.random.default_rng(0))  # type: ignore[operator]
