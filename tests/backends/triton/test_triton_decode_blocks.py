"""The decode kernel over caches of blocks, in the emulator: rows as they lie in memory, in both units of copies or in
runs, and all forms of the loop."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from graphrt.backends.triton import device

if device.unusable() is not None:
    pytest.skip(f"the triton backend can't be used here: {device.unusable()}", allow_module_level=True)

from support.aot import Shape, decode_launch
from support.attention_emulation import run
from triton.experimental.gluon.language import PaddedSharedLayout

from graphrt.backends.triton.kernels.common.blocks import words_a_block
from graphrt.backends.triton.kernels.flash_attn import decode_configs, decode_layouts
from graphrt.dtypes import dtype
from graphrt.ops.cases.flash_attn import BASE
from graphrt.ops.cases.flash_attn_axes import as_case
from graphrt.ops.view import view
from graphrt.tensor import Tensor

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

_STEP = replace(BASE, n_q=1, layout="cache", types=("q8_0", "q8_0"))
#: What is special: (multiprocessors, the case).
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "units of 16 bytes, which rows of odd heads begin in the middle of": (5, {"d": (128, 128), "n_kv": 200}),
    "units of words": (3, {"d": (128, 128), "heads": (4, 1), "types": ("q4_0", "q8_0")}),
    "rows at every word of a unit": (3, {"heads": (8, 4), "types": ("q8_0", "q4_0")}),
    "hidden keys": (5, {"d": (128, 128), "n_kv": 300, "mask": "random", "types": ("q4_0", "q4_0")}),
    "more than 8 rows of queries": (5, {"d": (128, 128), "heads": (8, 2), "n_q": 3, "n_kv": 200}),
    "keys side by side": (5, {"d": (128, 128), "layout": "plain", "n_kv": 200}),
    "keys side by side, some of them hidden": (
        5,
        {"d": (128, 128), "layout": "plain", "n_kv": 300, "mask": "random", "spoil": "nan"},
    ),
    "keys side by side, of the other kinds": (
        3,
        {"d": (128, 128), "layout": "plain", "n_kv": 328, "n_seq": 2, "types": ("q4_0", "q8_0")},
    ),
    "keys side by side, smaller heads": (3, {"layout": "plain", "n_kv": 264, "types": ("q8_0", "q4_0")}),
    "keys side by side, more than 8 rows of queries": (
        5,
        {"d": (128, 128), "layout": "plain", "heads": (8, 2), "n_q": 3, "n_kv": 200},
    ),
    "heads that begin anywhere": (5, {"d": (128, 128), "layout": "plain", "n_kv": 201}),
    "queries that add up to much": (5, {"d": (128, 128), "layout": "plain", "n_kv": 130, "values": "raised"}),
    "blocks beside f16": (3, {"heads": (6, 2), "n_kv": 213, "n_seq": 2, "types": ("q8_0", "f16")}),
    "8-bit floats": (3, {"d": (128, 128), "n_kv": 213, "types": ("f8_e4m3", "f8_e4m3")}),
    "a soft cap, and sinks": (3, {"d": (128, 128), "n_kv": 130, "softcap": 9.0, "sinks": "near"}),
    "ALiBi": (3, {"heads": (8, 4), "n_kv": 130, "mask": "distance", "max_bias": 8.0}),
}


@pytest.mark.parametrize("what", CASES)
def test_rows_of_blocks(what: str) -> None:
    sm_count, axes = CASES[what]
    kernels, _, verdict = run(as_case("FLASH_ATTN_EXT", replace(_STEP, **axes)), sm_count, schedule=None)
    assert "flash_attn_decode" in kernels and verdict.ok, verdict.message


#: What is special: (multiprocessors, the case), each with parts enough for several rounds of a join.
JOINED: dict[str, tuple[int, dict[str, Any]]] = {
    "8-bit floats": (9, {"d": (128, 128), "n_kv": 650, "types": ("f8_e4m3", "f8_e4m3")}),
    "codes, some keys hidden": (5, {"d": (128, 128), "n_kv": 300, "mask": "random", "types": ("q4_0", "q8_0")}),
    "sinks, two sequences": (5, {"n_kv": 330, "n_seq": 2, "sinks": "near", "types": ("q8_0", "q4_0")}),
}


@pytest.mark.parametrize("what", JOINED)
def test_the_last_program_joins_parts(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sm_count, axes = JOINED[what]
    for table in (decode_configs.THIN, decode_configs.CONFIGS):
        for key, config in table.items():
            monkeypatch.setitem(table, key, replace(config, join=32))
    kernels, _, verdict = run(as_case("FLASH_ATTN_EXT", replace(_STEP, **axes)), sm_count, schedule="stream_k")
    assert "flash_attn_decode" in kernels and "flash_attn_fixup" not in kernels
    assert verdict.ok, verdict.message


@pytest.mark.parametrize(
    ("scaled", "out"), [("heads", ("f8_e4m3", 0.25)), ("one", ("f32", 3.0)), ("", ("f8_e4m3", 0.001))]
)
def test_scales_of_heads(scaled: str, out: tuple[str, float]) -> None:
    """Launches around the attention multiply and round; the attention itself is the kernel that it would be else."""
    axes = replace(_STEP, heads=(6, 2), n_seq=2, types=("f8_e4m3", "f8_e4m3"), scaled=scaled, out=out)
    kernels, _, verdict = run(as_case("FLASH_ATTN_EXT", axes), 3, schedule=None)
    assert kernels.count("attention_scale_heads") == (2 if scaled else 1) and "flash_attn_decode" in kernels
    assert verdict.ok, verdict.message


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("stride", [4, 1])
def test_layouts_say_where_words_of_blocks_lie(kind: str, d: int, stride: int) -> None:
    """ggml's blocks: d in 2 bytes, then J words. Of a row seen from its first word, block b's halfwords begin at
    b * (2 J + 1), and values are words from one behind that on, an even block's turned by one halfword."""
    from support.gluon_emulator import places_of

    j, blocks, keys = words_a_block(kind), d // 32, 16
    pitch = blocks * j + (4 if stride == 4 else blocks // 2)
    assert pitch == decode_layouts.row_pitch(d, kind, stride)
    for is_v, step in ((False, 1), (True, 2)):
        values = decode_layouts.words_shared_from(d, keys, 2, kind, stride, is_v)
        heads = decode_layouts.heads_shared_from(d, keys, 2, kind, stride, is_v)
        assert isinstance(values, PaddedSharedLayout) and isinstance(heads, PaddedSharedLayout)
        at, of_heads = places_of(values), places_of(heads)[..., 0]
        for way, i in [(0, 0), (0, 3), (1, 15 // step), (1, 7)]:
            row = (way * keys + i * step) * pitch
            assert at[way, i, : blocks * j].tolist() == list(range(row, row + blocks * j))
            for key in range(step):
                first = [b * (2 * j + 1) for b in range(blocks)]  # halfwords
                assert of_heads[way, i, key].tolist() == [row + key * pitch + n // 2 for n in first]
    units = decode_layouts.row_units(d, kind, stride)
    assert sum(units) * (4 if stride == 4 else 1) == pitch


#: What is special: (the shape, whether copies are of runs, which loop).
FORMS = {
    "keys side by side": (Shape((128, 128), 1, ("q8_0", "q8_0"), runs=True), True, "codes"),
    "keys side by side, of q4_0": (Shape((128, 128), 1, ("q4_0", "q4_0"), runs=True), True, "codes"),
    "a key's heads side by side": (Shape((128, 128), 1, ("q8_0", "q8_0")), False, "codes"),
    "a key's heads side by side, of q4_0": (Shape((128, 128), 1, ("q4_0", "q4_0")), False, "codes"),
    "smaller heads": (Shape((64, 64), 1, ("q8_0", "q8_0")), False, "values"),
    "K of 8-bit floats": (Shape((128, 128), 1, ("f8_e4m3", "q8_0")), False, "values"),
    "heads that begin anywhere": (Shape((128, 128), 1, ("q8_0", "q8_0"), n_kv=511, runs=True), False, "codes"),
    "keys of whole units": (Shape((256, 256), 1, ("q8_0", "q8_0"), runs=True), False, "values"),
    "blocks beside f16": (Shape((128, 128), 1, ("q8_0", "f16"), runs=True), False, ""),
    "more than 8 rows of queries": (Shape((128, 128), 3, ("q8_0", "q8_0"), runs=True), True, ""),
}


@pytest.mark.parametrize("what", FORMS)
def test_which_copies_and_which_loop(what: str) -> None:
    shape, in_runs, loop = FORMS[what]
    found = decode_launch("sm_90", shape).args
    assert (found["IN_RUNS"], found["THIN"]) == (in_runs, loop)


@pytest.mark.parametrize("row", [128, 192])
def test_keys_with_gaps_between_them_are_no_run(row: int) -> None:
    whole = Tensor(dtype("q8_0"), (row, 512, 2))
    k = view(whole, (128, 512, 2), whole.nb[1:])
    side = SimpleNamespace(kind="q8_0", d=128)
    p = SimpleNamespace(k=side, v=side, k_t=k, v_t=k, place=lambda t: (None, t.view_offs))
    assert decode_configs.in_runs(p) == (row == 128)
