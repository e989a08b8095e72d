"""A step's key and value written into caches of blocks in the launch that attends them (flash_attn/append_blocks.py):
the caches have SET_ROWS' bytes, the result has the bits of separate launches. In Triton's interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

from graphrt.backends.triton import device

if device.unusable() is not None:
    pytest.skip(f"the triton backend can't be used here: {device.unusable()}", allow_module_level=True)

from support.append_emulation import run_blocks
from support.block_steps import backwards, block_step
from support.panel_steps import PanelStep
from support.watched_memory import watched

from graphrt.backends.triton.backend import TritonBackend
from graphrt.backends.triton.fuse import wanted_fusions
from graphrt.backends.triton.kernels.flash_attn.launcher import BLOCK_APPEND
from graphrt.execute import prepare
from graphrt.graph import Graph
from graphrt.tools.check.order_report import ordered
from graphrt.tools.explain.devices import known_device

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def mask(*seen: int, n_kv: int = 200, first: int = 0) -> np.ndarray:
    """f16 [sequences, n_kv]: so many cells are seen of each but for cell 3 and those before the first, and cells add
    what lies behind them."""
    found = -np.arange(n_kv - 1, -1, -1, np.float16) / 8 * np.ones((len(seen), 1), np.float16)
    for row, n in zip(found, seen):
        row[n:], row[3], row[:first] = -np.inf, -np.inf, -np.inf
    return found


#: What is special: (head size, heads, cells that are read, cells that are written, schedule, all else).
STEPS: dict[str, tuple[int, tuple[int, int], int, list[int], str, dict[str, Any]]] = {
    "a tile a program": (64, (4, 2), 200, [77], "tile", {}),
    "the last cell, parts of a tile": (64, (4, 2), 200, [199], "split", {"kinds": ("q4_0", "q4_0")}),
    "hidden cells of NaN, a row a head": (64, (4, 1), 200, [130], "split", {"mask": mask(131), "cell_rows": False}),
    "its own query does not see it": (64, (4, 2), 200, [130], "split", {"mask": mask(60), "nan_value": True}),
    "sequences, the last one's token is not written": (
        32, (2, 1), 200, [70, 10, -1], "stream_k", {"mask": mask(71, 140, 90), "kinds": ("q8_0", "q5_1")},
    ),
    "a window, whose first k-block is not the cache's": (
        64, (2, 1), 200, [130], "split", {"mask": mask(131, first=70), "kinds": ("q4_0", "q5_0")},
    ),
    "no such cell": (32, (4, 2), 130, [64, 500], "tile", {"ids": "i32", "rows": "f16"}),
    "a cell behind those that are read": (64, (4, 2), 100, [110], "split", {"n_cells": 120, "cell_rows": False}),
    "sinks, a soft cap, values of f16": (
        96, (2, 1), 100, [0], "tile", {"kinds": ("q4_1", "f16"), "sinks": True, "softcap": 3.0},
    ),
    "keys of 8 bits": (32, (2, 1), 100, [50], "tile", {"kinds": ("f8_e4m3", "q5_0"), "ids": "i32"}),
}  # fmt: skip


def step_of(what: str) -> tuple[PanelStep, TritonBackend]:
    d, heads, n_kv, cells, schedule, more = STEPS[what]
    return block_step(d, heads, n_kv, cells, **more), TritonBackend(exact=False, schedule=schedule)


@pytest.mark.parametrize("what", STEPS)
def test_one_launch(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step, backend = step_of(what)
    monkeypatch.setenv("GRAPHRT_FUSE", "block_append")
    exe = step.filled(backend)
    names = [launch.name for split in exe.splits for s in split.run.steps for launch in s.launches]
    assert "flash_attn" in names and "write_rows" not in names
    with watched(), backwards():
        exe.run()
    assert step.why_wrong(exe) == ""
    monkeypatch.setenv("GRAPHRT_FUSE", "0")
    apart = step.filled(backend)
    apart.run()
    assert np.array_equal(exe.read(step.out), apart.read(step.out))


#: Of the decode kernel: as STEPS, with the multiprocessors before all else.
DECODED: dict[str, tuple[int, tuple[int, int], int, list[int], str | None, int, dict[str, Any]]] = {
    "a k-block behind those in flight": (64, (4, 2), 700, [598], None, 1, {}),
    "one of those in flight, codes, masks": (
        128, (4, 2), 300, [130, 7], None, 5, {"mask": mask(131, 290, n_kv=300), "kinds": ("q4_0", "q4_0")},
    ),
    "nobody reads the cell's k-block": (
        64, (4, 2), 300, [213], "split", 5, {"mask": mask(60, n_kv=300), "nan_value": True, "kinds": ("q8_0", "q4_0")},
    ),
    "keys side by side, a token that is not written": (
        128, (4, 2), 200, [199, -1], None, 4, {"cell_rows": False, "rows": "f16", "ids": "i32"},
    ),
    "more than 8 rows": (64, (12, 1), 130, [0], None, 3, {"kinds": ("q4_0", "q8_0")}),
    "a cell behind those that are read": (64, (4, 2), 100, [110], None, 3, {"n_cells": 120}),
}  # fmt: skip


@pytest.mark.parametrize("what", DECODED)
def test_the_decode_kernel(what: str) -> None:
    d, heads, n_kv, cells, schedule, sm_count, more = DECODED[what]
    step = block_step(d, heads, n_kv, cells, **more)
    names, fused = run_blocks(step, True, sm_count, schedule)
    others, apart = run_blocks(step, False, sm_count, schedule)
    assert "flash_attn_decode_blocks" in names and "write_rows" not in names
    assert "flash_attn_decode" in others and others.count("write_rows") == 2
    assert np.isfinite(fused[0]).all()
    for x, y in zip(fused, apart):
        assert np.array_equal(x, y)


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_the_decode_kernel_rounds_as_set_rows(kind: str) -> None:
    """Blocks of zeros, of halves, with NaN, infinity and the largest value twice, small and large ones."""
    step = block_step(64, (4, 2), 40, [3, 20, 39, 12], (kind, kind))
    rng = np.random.default_rng(5)
    x = np.exp(rng.uniform(-60, 60, (16, 32))) * rng.choice([-1, 1], (16, 32))
    x[0], x[1, 3], x[2, 5], x[3] = 0, np.nan, np.inf, np.arange(32) - 127.5
    x[4] = np.where(np.arange(32) % 3 == 1, 1.5, -1.5)
    x[5], x[6], x[7] = -x[4], -0.0, rng.standard_normal(32) * 1e-40
    x[8:11], x[11:] = rng.standard_normal((3, 32)), (np.arange(160).reshape(5, 32) - 80) / 2
    for leaf in step.values:
        if leaf.name in ("k", "v"):
            step.values[leaf] = (x if leaf.name == "k" else x[::-1]).astype(np.float32).reshape(leaf.shape)
    fused, apart = (run_blocks(step, how, 3, None)[1] for how in (True, False))
    assert all(np.array_equal(a, b) for a, b in zip(fused[1:], apart[1:]))


def told(step: PanelStep) -> tuple[list[str], list[str]]:
    """(kernels that are launched, what is told of the attention)."""
    (split,) = step.filled(TritonBackend(exact=False, schedule="tile")).splits
    (choice,) = [s.choice for s in split.run.steps if s.choice is not None]
    facts = [f"{of}: {text}" for of, text in choice.facts()]
    return [launch.name for s in split.run.steps for launch in s.launches], facts


def test_it_is_asked_for_and_explain_tells_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    step = block_step(64, (4, 2), 100, [5])
    unasked = wanted_fusions(False)
    assert BLOCK_APPEND not in unasked
    kernels, facts = told(step)
    assert kernels.count("write_rows") == 2 and not any("append" in fact for fact in facts)
    monkeypatch.setenv("GRAPHRT_FUSE", "all,block_append")
    assert wanted_fusions(False) == [BLOCK_APPEND, *unasked]
    kernels, facts = told(step)
    assert "write_rows" not in kernels
    assert any(fact.startswith("append: the step's k and v are rounded and written") for fact in facts)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"heads": (48, 1)}, "tiles that share a KV head would read the cell while one writes it"),
        ({"apart": True}, "k and v must go to the same cells"),
        ({"from_cell": 1, "n_cells": 101}, "the caches be read from their first cell on"),
        ({"n_q": 2}, "one token a sequence, this step has 2"),
        ({"out_scale": 2.0, "out_type": "f8_e4m3"}, "it has no scales of k, v or the result"),
    ],
)
def test_what_takes_launches_of_its_own_says_why(
    more: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHRT_FUSE", "block_append")
    step = block_step(32, more.pop("heads", (4, 2)), 100, [5], **more)
    kernels, facts = told(step)
    assert kernels.count("write_rows") == 2
    assert any(fact.startswith("why: not block_append: ") and reason in fact for fact in facts), facts


@pytest.mark.parametrize("kind", ["q5_0", "q8_0"])  # the portable kernel's there, and the decode kernel's
def test_layers_are_in_order(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two behind each other, and the run behind that, on a GPU whose launches overlap."""
    monkeypatch.setenv("GRAPHRT_FUSE", "block_append")
    h100 = device.Target.elsewhere(known_device("h100").elsewhere)
    layers = [block_step(64, (4, 2), 100, [5], (kind, kind), mask(6, n_kv=100), layer=name) for name in "ab"]
    exe = prepare(Graph(*(step.out for step in layers)), TritonBackend(exact=False, target=h100))
    found = ordered("two layers", exe)
    assert found.starts_early >= 2 and not found.violations, found
