"""The generator of dropout: Philox as published, the same in numpy and torch, and what it depends on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.reference64_back import philox_word

from graphrt import Graph, get_backend, gradients, new_input, ops, prepare
from graphrt.backends.cpu.philox import keep
from graphrt.ops.dropout import kept, kept_at, philox

#: Counters, key and words of Random123's known answers for philox4x32, 10 rounds.
KNOWN = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_is_the_published_one(counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]) -> None:
    of_numpy = [np.array([c], np.uint64) for c in counter]
    found = philox((of_numpy[0], of_numpy[1], of_numpy[2], of_numpy[3]), key[0] | key[1] << 32)
    assert tuple(int(w[0]) for w in found) == words


def test_numpy_and_torch_are_bit_equal() -> None:
    for seed, offset, shape in ((0, 0, (1, 1, 1, 1)), (2**64 - 1, 2**32 - 1, (2, 3, 5, 9)), (77, 3, (1, 2, 40, 130))):
        a, b = kept(0.4, seed, offset, shape), keep(0.4, seed, offset, shape).numpy()
        np.testing.assert_array_equal(a, b)
    word = [philox_word(6, 3, 2, 1, 77, 3) >= 0.4 * 2**32, philox_word(7, 39, 1, 0, 77, 3) >= 0.4 * 2**32]
    assert [kept(0.4, 77, 3, (2, 3, 4, 7))[1, 2, 3, 6], kept(0.4, 77, 3, (1, 2, 40, 130))[0, 1, 39, 7]] == word


def test_a_weight_s_fate_depends_on_its_place_alone() -> None:
    """Not on how many queries, keys, heads and sequences there are: cuts and tiles change nothing."""
    whole = kept(0.5, 9, 1, (3, 4, 33, 70))
    np.testing.assert_array_equal(kept(0.5, 9, 1, (2, 2, 7, 13)), whole[:2, :2, :7, :13])


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_how_many_are_kept(p: float) -> None:
    n = 2 * 3 * 100 * 500
    share = 1 - kept(p, 123, 0, (2, 3, 100, 500)).mean()
    assert abs(share - p) <= 4 * (p * (1 - p) / n) ** 0.5


def test_seeds_and_offsets_differ_and_repeat() -> None:
    shape = (1, 2, 30, 64)
    first = kept(0.5, 1, 0, shape)
    np.testing.assert_array_equal(first, kept(0.5, 1, 0, shape))
    for seed, offset in ((2, 0), (1 + 2**32, 0), (1, 1)):
        assert 0.4 < (kept(0.5, seed, offset, shape) != first).mean() < 0.6
    for axis in range(1, 4):
        assert 0.4 < (np.diff(first.astype(int), axis=axis) != 0).mean() < 0.6


def test_forward_and_backward_drop_the_same() -> None:
    """With v the identity the result shows the weights; with a gradient of 1 in one column v's gradient does."""
    n_q, n_kv, p = 5, 16, 0.5
    q, k, v = (new_input("f32", n_kv, n, name=name) for name, n in (("q", n_q), ("k", n_kv), ("v", n_kv)))
    out = ops.flash_attn_ext(q, k, v, None, 0.2, dropout_p=p, seed=5, offset=6)
    plain = ops.flash_attn_ext(q, k, v, None, 0.2)
    d = new_input("f32", *out.ne, name="d")
    (of_v,) = gradients(out, [v], d_loss=d)
    exe = prepare(Graph(out, plain, of_v), get_backend("cpu"))
    rng = np.random.default_rng(0)
    for t in (q, k):
        exe.write(t, rng.normal(size=t.shape).astype(np.float32))
    exe.write(v, np.eye(n_kv, dtype=np.float32))
    wanted = kept(p, 5, 6, (1, 1, n_q, n_kv))[0, 0]
    for row in range(n_q):
        d_out = np.zeros((n_q, n_kv), np.float32)
        d_out[row, 0] = 1.0
        exe.write(d, d_out)
        exe.run()
        weights, whole = exe.read(out).reshape(n_q, n_kv), exe.read(plain).reshape(n_q, n_kv)
        np.testing.assert_array_equal(weights != 0, wanted)
        np.testing.assert_allclose(weights[wanted], whole[wanted] / (1 - p), rtol=1e-5)
        np.testing.assert_allclose(exe.read(of_v).reshape(n_kv, n_kv)[:, 0], weights[row], rtol=1e-5)


def test_some_places_are_those_of_the_whole() -> None:
    heads, queries, keys = np.array([0, 2, 1])[:, None], np.array([3, 0, 1])[:, None], np.arange(9)
    found = kept_at(0.4, 2**64 - 1, 3, heads, queries, keys)
    np.testing.assert_array_equal(found, kept(0.4, 2**64 - 1, 3, (1, 3, 4, 9))[0, heads, queries, keys])


def test_no_dropout_is_the_plain_attention() -> None:
    assert torch.equal(keep(0.0, 1, 2, (1, 1, 3, 5)), torch.ones(1, 1, 3, 5, dtype=torch.bool))
