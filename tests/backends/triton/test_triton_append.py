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

from graphrt.backend import get_backend
from graphrt.backends.triton.fuse import wanted_fusions
from graphrt.backends.triton.kernels.rope import ROPE_CACHE_ATTENTION
from graphrt.errors import BackendError

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
