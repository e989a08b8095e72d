"""A step's key and value written inside the launch that attends keys in panels (flash_attn/append.py): the caches have
SET_ROWS' bytes, the result is float64's, and nobody reads the cell meanwhile. In Triton's interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

from graphrt.backends.triton import device

if device.unusable() is not None:
    pytest.skip(f"the triton backend can't be used here: {device.unusable()}", allow_module_level=True)

from support.panel_steps import PanelStep, panel_step
from support.watched_memory import watched

from graphrt.backends.triton.backend import TritonBackend

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def mask(*seen: int, n_kv: int = 200) -> np.ndarray:
    """f16 [sequences, n_kv]: so many cells are seen of each but for cell 3, and cells add what lies behind them."""
    found = -np.arange(n_kv - 1, -1, -1, np.float16) / 8 * np.ones((len(seen), 1), np.float16)
    for row, n in zip(found, seen):
        row[n:], row[3] = -np.inf, -np.inf
    return found


#: What is special: (head size, heads, cells that are read, cells that are written, schedule, all else).
STEPS: dict[str, tuple[int, tuple[int, int], int, list[int], str, dict[str, Any]]] = {
    "a full k-block, a tile a program": (64, (4, 2), 200, [77], "tile", {}),
    "the first cell, parts of a tile": (64, (4, 2), 200, [0], "split", {}),
    "the last cell, parts of a tile": (64, (4, 2), 200, [199], "stream_k", {"cell_rows": True}),
    "hidden cells of NaN": (64, (4, 1), 200, [130], "split", {"mask": mask(131)}),
    "ALiBi, sinks, a soft cap": (
        128, (4, 2), 200, [150], "split", {"mask": mask(151), "max_bias": 8.0, "sinks": True, "softcap": 3.0},
    ),
    "sequences, the last one's token is not written": (
        32, (2, 1), 200, [70, 10, -1], "stream_k", {"mask": mask(71, 140, 90)},
    ),
    "the same, one row for all heads, no such cell": (
        32, (4, 2), 130, [64, 500], "tile", {"cell_rows": True, "ids": "i32", "rows": "f16"},
    ),
    "a cell behind those that are read": (64, (4, 2), 100, [110], "tile", {"n_cells": 120}),
    "one key": (64, (2, 2), 1, [0], "tile", {"n_cells": 9}),
    "tiles that share a KV head": (32, (48, 1), 100, [40], "tile", {"mask": mask(41, n_kv=100)}),
    "two parts of a head": (192, (2, 1), 100, [50], "split", {"d_v": 96}),
    "bf16": (64, (2, 1), 100, [50], "tile", {"kinds": ("bf16", "bf16")}),
    "f32": (32, (2, 1), 100, [50], "tile", {"kinds": ("f32", "f32")}),
    "8 bits": (64, (2, 1), 70, [60], "tile", {"kinds": ("f8_e4m3", "f8_e5m2")}),
}  # fmt: skip


def step_of(what: str) -> tuple[PanelStep, TritonBackend]:
    d, heads, n_kv, cells, schedule, more = STEPS[what]
    return panel_step(d, heads, n_kv, cells, **more), TritonBackend(exact=False, schedule=schedule)


@pytest.mark.parametrize("what", STEPS)
def test_one_launch(what: str) -> None:
    step, backend = step_of(what)
    exe = step.filled(backend)
    groups = [group.kernel for split in exe.splits for group in split.groups if group.kernel]
    assert groups == ["panel_append"]
    with watched():
        exe.run()
    assert step.why_wrong(exe) == ""
