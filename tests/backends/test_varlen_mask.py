"""Explicit masks over pages: as contiguous caches have them with the same mask, and as trees of drafted tokens need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import graphrt
from graphrt import get_backend, ops
from graphrt.backend import Backend
from graphrt.graph import Graph
from graphrt.tensor import new_input

Array = npt.NDArray[Any]
D, HEADS, KV, PAGE, N_PAGES = 64, 4, 2, 16, 24
#: Queries and keys of each sequence; the last query of all is nobody's.
SEQS = ((6, 40), (1, 33), (0, 20), (12, 12), (8, 70))
SPARE = 1


@pytest.fixture(params=["cpu", "cpu-fast", "triton"])
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param != "triton":
        return get_backend("cpu", exact=request.param == "cpu")
    pytest.importorskip("triton")
    from graphrt.backends.triton import device

    if device.unusable() is not None:
        pytest.skip(f"the triton backend can't be used here: {device.unusable()}")
    return get_backend("triton")


class _Paged:
    """Random values of the paged form; what no sequence has is NaN."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.starts = np.cumsum([0, *(n for n, _ in SEQS)])
        self.n = int(self.starts[-1]) + SPARE
        self.q = rng.normal(size=(HEADS, self.n, D)).astype(np.float32)
        self.k = np.full((N_PAGES, KV, PAGE, D), np.nan, np.float16)
        self.v = np.full((N_PAGES, KV, PAGE, D), np.nan, np.float16)
        self.table = np.full((len(SEQS), 5), -1)
        pages = iter(rng.permutation(N_PAGES))
        for i, (_, length) in enumerate(SEQS):
            for block in range(-(-length // PAGE)):
                page = self.table[i, block] = next(pages)
                filled = min(PAGE, length - block * PAGE)
                for cache in (self.k, self.v):
                    cache[page, :, :filled] = rng.normal(size=(KV, filled, D))

    def rows(self, cache: Array, i: int) -> Array:
        """[1, KV, keys, D] of a sequence."""
        key = np.arange(SEQS[i][1])
        return cache[self.table[i, key // PAGE], :, key % PAGE].transpose(1, 0, 2)[None]

    def attention(self, backend: Backend, mask: Array, lse_masked: bool = True, **how: object) -> tuple[Array, Array]:
        """The result [n, HEADS, D] and the log of the denominators [n, HEADS], of one graph, the latter with the mask
        or without."""
        leafs = {
            "q": new_input("f32", D, self.n, HEADS, name="q"), "k": new_input("f16", D, PAGE, KV, N_PAGES, name="k"),
            "v": new_input("f16", D, PAGE, KV, N_PAGES, name="v"),
            "q_starts": new_input("i32", len(SEQS) + 1, name="q_starts"),
            "lengths": new_input("i32", len(SEQS), name="lengths"),
            "block_table": new_input("i32", 5, len(SEQS), name="table"),
            "mask": new_input("f16", *mask.shape[::-1], name="mask"),
        }  # fmt: skip
        out = ops.flash_attn_varlen(**leafs, scale=0.125, **how)  # type: ignore[arg-type]
        of_lse = {name: t for name, t in leafs.items() if name != "v" and (name != "mask" or lse_masked)}
        lse = ops.flash_attn_varlen_lse(**of_lse, scale=0.125, **how)  # type: ignore[arg-type]
        exe = graphrt.prepare(Graph(out, lse), backend)
        values = {
            "q": self.q, "k": self.k, "v": self.v, "q_starts": self.starts.astype(np.int32),
            "lengths": np.array([length for _, length in SEQS], np.int32), "block_table": self.table.astype(np.int32),
            "mask": mask,
        }  # fmt: skip
        for name, leaf in leafs.items():
            exe.write(leaf, values[name].reshape(leaf.shape))
        exe.run()
        return exe.read(out)[0], exe.read(lse)[0, 0]

    def alone(self, backend: Backend, i: int, mask: Array, **how: object) -> tuple[Array, Array]:
        """The same of one sequence by FLASH_ATTN_EXT, keys in one piece. mask: [m2, its queries, its keys]."""
        (n, length), first = SEQS[i], self.starts[i]
        q, mask_t = new_input("f32", D, n, HEADS, name="q"), new_input("f16", *mask.shape[::-1], name="mask")
        k, v = (new_input("f16", D, length, KV, name=name) for name in "kv")
        out = ops.flash_attn_ext(q, k, v, mask_t, 0.125, **how)  # type: ignore[arg-type]
        lse = ops.flash_attn_lse(q, k, mask_t, 0.125, **how)  # type: ignore[arg-type]
        exe = graphrt.prepare(Graph(out, lse), backend)
        given = (q, self.q[:, first : first + n]), (k, self.rows(self.k, i)), (v, self.rows(self.v, i)), (mask_t, mask)
        for leaf, values in given:
            exe.write(leaf, np.ascontiguousarray(values.reshape(leaf.shape)))
        exe.run()
        return exe.read(out)[0], exe.read(lse)[0, 0]


def _positions(i: int, causal: bool, max_bias: float) -> Array:
    """What causal and ALiBi are as a mask: [queries, keys]."""
    n, length = SEQS[i]
    behind = length - n + np.arange(n)[:, None] - np.arange(length)
    return np.where((behind < 0) & causal, -np.inf, -abs(behind) * bool(max_bias)).astype(np.float32)


@pytest.mark.parametrize(
    ("new", "heads", "causal", "max_bias"),
    [
        (False, 1, True, 0.0),
        (True, 1, True, 0.0),
        (False, HEADS, False, 0.0),
        (True, 2, False, 8.0),
        (True, 1, False, 0.0),
    ],
)
def test_as_contiguous_caches_with_the_same_mask(
    backend: Backend, new: bool, heads: int, causal: bool, max_bias: float
) -> None:
    """The exact CPU's bits are the same; NaN in cells that nobody has, in columns behind a length, in nobody's row."""
    rng = np.random.default_rng(int(new) + heads)
    paged = _Paged(rng)
    width = 12 if new else 50  # shorter than the longest: keys behind are as without a mask
    mask = np.full((heads, paged.n, width), np.nan, np.float16)
    wanted = []
    for i, (n, length) in enumerate(SEQS):
        whole = np.zeros((heads, n, length), np.float32)
        first, end = (length - n, length) if new else (0, min(length, width))
        some = rng.normal(size=(heads, n, end - first)).astype(np.float16)
        some[rng.random(some.shape) < 0.3] = -np.inf
        if i == 3:
            some[:, 2] = -np.inf
        if i == 4 and not new:  # a cell that the mask hides from all
            some[..., 5] = -np.inf
            paged.k[paged.table[i, 0], :, 5] = paged.v[paged.table[i, 0], :, 5] = np.nan
        whole[..., first:end] = mask[:, paged.starts[i] : paged.starts[i + 1], : end - first] = some
        wanted.append((whole + _positions(i, causal, max_bias)).astype(np.float16))
    how = {"causal": causal, "max_bias": max_bias, "mask_new": new}
    found = paged.attention(backend, mask, **how)
    for i, (n, _) in enumerate(SEQS):
        rows = slice(paged.starts[i], paged.starts[i] + n)
        for actual, expected in zip(found, paged.alone(backend, i, wanted[i], max_bias=max_bias) if n else ()):
            same = getattr(backend, "exact", False) and backend.name == "cpu" and not max_bias
            np.testing.assert_allclose(actual[rows], expected, rtol=0, atol=0 if same else 4e-3)
    assert not found[0][-SPARE:].any() and np.isneginf(found[1][-SPARE:]).all()


def test_a_tree_of_drafts_is_as_its_branches(backend: Backend) -> None:
    """Each drafted token has what it would have if its branch alone had been read: its keys are others', in between."""
    rng = np.random.default_rng(3)
    paged = _Paged(rng)
    parents: dict[int, Sequence[int]] = {0: (-1, 0, 0, 1, 1, 2), 3: (-1, *range(11)), 4: (-1, -1, 0, 1, 2, 2, 3, -1)}
    mask = np.full((1, paged.n, 12), np.nan, np.float16)
    for i, (n, _) in enumerate(SEQS):
        seen = np.eye(n, dtype=bool)
        for token, parent in enumerate(parents.get(i, range(-1, n - 1))):
            seen[token] |= seen[parent] if parent >= 0 else False
        mask[0, paged.starts[i] : paged.starts[i + 1], :n] = np.where(seen, 0, -np.inf)
    found, _ = paged.attention(backend, mask, mask_new=True)
    for i, of in parents.items():
        n, length = SEQS[i]
        k, v = (paged.rows(cache, i)[0].astype(np.float64) for cache in (paged.k, paged.v))
        for token in range(n):
            branch, at = [], token
            while at >= 0:
                branch, at = [length - n + at, *branch], of[at]
            keys = [*range(length - n), *branch]
            for head in range(HEADS):
                q = paged.q[head, paged.starts[i] + token].astype(np.float64)
                s = k[head // 2, keys] @ q * 0.125
                p = np.exp(s - s.max())
                np.testing.assert_allclose(
                    found[paged.starts[i] + token, head], p @ v[head // 2, keys] / p.sum(), atol=4e-3
                )


def test_denominators_of_another_mask_are_their_own(backend: Backend) -> None:
    """An attention with a mask and the log of denominators without it are not one step."""
    paged = _Paged(np.random.default_rng(5))
    nothing = np.zeros((1, paged.n, 70), np.float16)
    hiding = nothing.copy()
    hiding[..., ::2] = -np.inf
    _, without = paged.attention(backend, nothing)
    masked, lse = paged.attention(backend, hiding, lse_masked=False)
    np.testing.assert_allclose(lse, without, rtol=1e-6)
    expected, other = paged.attention(backend, hiding)
    np.testing.assert_allclose(masked, expected, rtol=1e-6)
    n = paged.starts[-1]
    assert (other[:n] < without[:n]).all()
