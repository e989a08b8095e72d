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

from graphrt import ops
from graphrt.backends.triton.backend import TritonBackend
from graphrt.execute import prepare
from graphrt.graph import Graph
from graphrt.tools.check.order_report import ordered
from graphrt.tools.explain.devices import known_device

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHRT_FUSE", "all,panel_append")


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
    "its own query does not see it": (64, (4, 2), 200, [130], "split", {"mask": mask(60), "nan_value": True}),
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


def test_at_any_cell() -> None:
    """One compiled step whose cell is another one in each run, around the edges of k-blocks of 64 keys."""
    step = panel_step(32, (2, 1), 133, [0])
    exe = step.filled(TritonBackend(exact=False, schedule="split"))
    (cells,) = [leaf for leaf in step.values if leaf.name == "cells"]
    whole = [leaf for leaf in step.values if leaf.name in ("k_cache", "v_cache")]
    for cell in (0, 1, 31, 63, 64, 127, 128, 132):
        step.values[cells][:] = cell
        for cache in whole:
            step.values[cache] = np.nan_to_num(step.values[cache], nan=0.5)
            step.values[cache][:, :, cell] = np.nan
        exe.write_all({leaf: step.values[leaf] for leaf in (cells, *whole)})
        exe.run()
        assert step.why_wrong(exe) == "", cell


def test_parts_are_joined_by_the_fixup() -> None:
    """The cases of "split" and "stream_k" have tiles of several programs."""
    for what in ("the last cell, parts of a tile", "ALiBi, sinks, a soft cap"):
        step, backend = step_of(what)
        names = [launch.name for split in step.filled(backend).splits for s in split.run.steps for launch in s.launches]
        assert names[-2:] == ["flash_attn", "flash_attn_fixup"] and "write_rows" not in names


def told(step: PanelStep, schedule: str = "tile") -> tuple[list[str | None], list[str]]:
    """(groups' kernels, what is told of the attention)."""
    exe = step.filled(TritonBackend(exact=False, schedule=schedule))
    (split,) = exe.splits
    (choice,) = [s.choice for s in split.run.steps if s.choice is not None]
    facts = [f"{of}: {text}" for of, text in choice.facts()]
    return [group.kernel for group in split.groups if group.kernel], facts


def test_explain_tells_of_it() -> None:
    kernels, facts = told(panel_step(64, (4, 2), 100, [5]))
    assert kernels == ["panel_append"]
    assert any(fact.startswith("append: the step's k goes into its panels") for fact in facts)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"kinds": ("f16", "q8_0")}, "those of q8_0 are rounded by a launch before it"),
        ({"dropout_p": 0.5}, "without a score function, dropout and attn_bias"),
        ({"attn_bias": True}, "without a score function, dropout and attn_bias"),
        ({"out_scale": 2.0, "out_type": "f8_e4m3"}, "it has no scales of k, v or the result"),
        ({"apart": True}, "k and v must go to the same cells"),
        ({"from_cell": 1, "n_cells": 101}, "the caches be read from their first cell on"),
        ({"n_q": 2}, "one token a sequence, this step has 2"),
    ],
)
def test_what_takes_launches_of_its_own_says_why(more: dict[str, Any], reason: str) -> None:
    kernels, facts = told(panel_step(64, (4, 2), 100, [5], **more))
    assert kernels == []
    assert any(fact.startswith("why: not panel_append: ") and reason in fact for fact in facts), facts


def test_an_attention_with_its_denominators_is_one_step_with_them() -> None:
    step = panel_step(64, (4, 2), 100, [5])
    lse = ops.flash_attn_lse(*(step.out[x] for x in ("q", "k")), None, step.out.params.scale, k_layout="panels")
    exe = prepare(Graph(step.out, lse), TritonBackend(exact=False))
    assert [group.kernel for split in exe.splits for group in split.groups if group.kernel] == ["attention_lse"]


def test_layers_are_in_order() -> None:
    """Two behind each other, and the run behind that, on a GPU whose launches overlap."""
    h100 = device.Target.elsewhere(known_device("h100").elsewhere)
    layers = [panel_step(64, (4, 2), 100, [5], mask=mask(6, n_kv=100), layer=name) for name in "ab"]
    exe = prepare(Graph(*(step.out for step in layers)), TritonBackend(exact=False, target=h100))
    found = ordered("two layers", exe)
    assert found.starts_early >= 2 and not found.violations, found


def test_unasked_it_is_launches_of_their_own_which_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRAPHRT_FUSE")
    step, backend = step_of("hidden cells of NaN")
    kernels, facts = told(step, "split")
    assert kernels == [] and not any("panel_append" in fact for fact in facts)
    exe = step.filled(backend)
    exe.run()
    assert step.why_wrong(exe) == ""
