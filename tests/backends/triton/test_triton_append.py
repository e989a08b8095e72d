"""A step's rotation, its row of the cache and its attention in one launch: the same bits as in two, in the emulator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

from graphrt.backends.triton import device

if device.unusable() is not None:
    pytest.skip(f"the triton backend can't be used here: {device.unusable()}", allow_module_level=True)

from support.append_emulation import launcher_of, run, step

import graphrt
from graphrt import new_input, ops
from graphrt.backend import get_backend
from graphrt.backends.triton.fuse import wanted_fusions
from graphrt.backends.triton.kernels.rope import ROPE_CACHE_ATTENTION
from graphrt.errors import BackendError
from graphrt.tensor import Tensor

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def mask(*seen: int, n_kv: int = 300) -> np.ndarray:
    """f16 [sequences, n_kv]: so many cells are seen of each, another one is not, and one adds something."""
    found = np.zeros((len(seen), n_kv), np.float16)
    for row, n in zip(found, seen):
        row[n:], row[3], row[11] = -np.inf, -np.inf, -1.5
    return found


#: What is special: (head size, heads, cells that are read, cells that are written, all else).
STEPS: dict[str, tuple[int, tuple[int, int], int, list[int], dict[str, Any]]] = {
    "a cell in the last k-block, and in the first": (64, (4, 2), 300, [213, 5], {"mask": mask(214, 131)}),
    "a k-block behind those in flight": (64, (4, 2), 700, [598], {"sm_count": 1}),
    "no mask": (64, (4, 2), 300, [131], {}),
    "nobody sees the cell": (64, (4, 2), 300, [250], {"mask": mask(140)}),
    "its own query does not see it": (64, (4, 1), 300, [3], {"mask": mask(290)}),
    "a cell behind those that are read": (64, (4, 2), 200, [210], {"n_cells": 256}),
    "a token that is not written": (64, (4, 2), 200, [-1, 400], {"ids": "i32"}),
    "pairs side by side, a part of the head": (128, (4, 1), 140, [128], {"mode": "normal", "n_dims": 96}),
}


@pytest.mark.parametrize("what", STEPS)
def test_one_launch_gives_the_bits_of_two(what: str) -> None:
    d, heads, n_kv, cells, more = STEPS[what]
    sm_count = more.get("sm_count", 4)
    made = step(d, heads, n_kv, cells, **{name: given for name, given in more.items() if name != "sm_count"})
    names, fused = run(made, True, sm_count)
    others, apart = run(made, False, sm_count)
    assert "flash_attn_decode_append" in names and "rotate_and_write" not in names
    assert "rotate_and_write" in others
    for x, y in zip(fused, apart):
        assert np.isfinite(y).all() and np.array_equal(x, y)


def test_a_new_row_of_nan_shows_only_where_it_is_seen() -> None:
    made = step(64, (4, 2), 300, [130, 130], mask=mask(300, 300))
    v = next(leaf for leaf in made.values if leaf.name == "v")
    made.values[v][..., :] = np.nan
    made.values[next(leaf for leaf in made.values if leaf.name == "mask")][1, ..., 130] = -np.inf
    found = run(made, True, 4)[1][0].reshape(2, -1)
    assert np.isnan(found[0]).all() and np.isfinite(found[1]).all()


def test_what_it_does_not_serve_takes_two_launches() -> None:
    """Caches that are rounded to blocks, heads that other kernels have, normed heads: as without the fusion."""
    found, launcher, ctx, _ = launcher_of(step(64, (4, 2), 300, [5]), "gfx942")
    names = [launch.name for launch in launcher.appended(found, ctx)]  # type: ignore[union-attr]
    assert names[:3] == ["fill_table", "rotate_and_write", "flash_attn"]
    with pytest.raises(ValueError, match="not enough values"):
        _ = step(32, (4, 2), 300, [5]).found


def test_it_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ROPE_CACHE_ATTENTION not in wanted_fusions(False)
    monkeypatch.setenv("GRAPHRT_FUSE", "rope_cache_attention,norm_mul")
    assert wanted_fusions(False)[0] is ROPE_CACHE_ATTENTION
    assert not any(f is ROPE_CACHE_ATTENTION for f in wanted_fusions(True))
    monkeypatch.setenv("GRAPHRT_FUSE", "rope_cache_attention,norm_mule")
    with pytest.raises(BackendError, match="norm_mule"):
        get_backend("triton", exact=False).fuse(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kinds", "d", "reason"),
    [
        (("q8_0", "f16"), 64, "it writes rows of f16 and bf16, what goes into a cache of q8_0 is rounded by a launch"),
        (("f16", "f8_e4m3"), 64, "what goes into a cache of f8_e4m3 is rounded"),
        (("f16", "f16"), 32, "it is for heads of 64 and 128, these have 32"),
    ],
)
def test_who_has_it_apart_is_told_why(
    kinds: tuple[str, str], d: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the fusion is asked for: an attention of a cache that can't have it says so, an attention of inputs not."""
    n_cells, ids = 64, new_input("i32", 1, name="ids")

    def cache(kind: str, name: str) -> Tensor:
        rows = new_input("f32", 2 * d, 1, name=f"{name}_new")
        written = ops.set_rows(rows, ids, new_input(kind, 2 * d, n_cells, name=name))
        return ops.permute(ops.reshape(written, d, 2, n_cells), 0, 2, 1, 3)

    q = new_input("f32", d, 1, 4, name="q")
    k, v = (cache(kind, name) for kind, name in zip(kinds, "kv"))
    plain = [new_input("f16", d, 32, 2, name=f"plain_{name}") for name in "kv"]
    both = [ops.flash_attn_ext(q, k, v, None, 1.0), ops.flash_attn_ext(q, *plain, None, 1.0)]
    for text, told in (("1", False), ("rope_cache_attention", True)):
        monkeypatch.setenv("GRAPHRT_FUSE", text)
        exe = graphrt.prepare(graphrt.Graph(*both), get_backend("triton", exact=False))
        found = {step.group.nodes[-1]: step.choice.refused for s in exe.splits for step in s.run.steps if step.choice}
        assert ("rope_cache_attention" in found[both[0]]) is told and "rope_cache_attention" not in found[both[1]]
        assert not told or reason in found[both[0]]["rope_cache_attention"]
