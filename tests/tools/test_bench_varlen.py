"""`graphrt bench op FLASH_ATTN_VARLEN`: its tables, what its figures are of, and wrong results are not reported."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence

import numpy as np
import pytest

import graphrt
from graphrt.graph import Graph
from graphrt.tools import cli
from graphrt.tools.bench.op_inputs import Noise
from graphrt.tools.bench.timing import HostClock
from graphrt.tools.bench.varlen import build, lines, measure, wrong
from graphrt.tools.bench.varlen_shapes import SHAPES, VarlenShape, shapes_of, tiny


def _run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code = cli.main(["bench", "op", "FLASH_ATTN_VARLEN", "-b", "cpu", "--tiny", "-r", "2", *argv])
    return code, capsys.readouterr().out


def test_tables_have_their_columns(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = _run(capsys, "-s", "page 128", "--csv")
    rows = list(csv.reader(out.splitlines()))
    assert code == 0 and [r[0] for r in rows].count("pa_decode") == 2 and [r[0] for r in rows].count("pa_prefill") == 2
    decode, prefill = (next(r for r in rows if r[0] == "table" and name in r) for name in ("SEQ_LEN", "MAX_SEQ_LEN"))
    for columns in (decode, prefill):
        assert {"model", "BS", "HQ", "HK", "HEAD_DIM", "Time_(ms)", "TFLOPS", "Bandwidth_(GB/s)"} <= set(columns)
    assert all(float(r[decode.index("Time_(ms)")]) > 0 for r in rows if r[0].startswith("pa_"))


def test_json_and_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = _run(capsys, "-s", "encoder", "--json")
    dense, row = json.loads(out)["results"]
    assert code == 0 and row["page"] == 0 and row["ms"] > 0 and not row["message"]
    assert dense["contiguous"] and dense["ms"] > 0 and row["beside"] == dense["name"] and not dense["message"]
    assert "pa_prefill" in _run(capsys, "--list")[1]
    assert cli.main(["bench", "op", "FLASH_ATTN_VARLEN", "-s", "nothing of that name"]) == 2


def test_work_is_what_is_there() -> None:
    shape = VarlenShape("pa_prefill", "x", "llama-8b", ((3, 5), (1, 2)), page=16)
    assert shape.pairs == (3 + 4 + 5) + 2 and shape.flops == 2 * 256 * 32 * 14
    assert shape.bytes == 7 * 8 * 2 * 128 * 2 + 4 * 32 * 4 * 256 + 4 * 2
    texts = VarlenShape("pa_prefill", "y", "bge-small", ((3, 3),), page=0, causal=False, kv_type="f32")
    assert texts.pairs == 9 and shapes_of("mla")[0].cache_bytes == 32 * 8192 * 576 * 2


def _shapes(*names: str) -> Sequence[VarlenShape]:
    return tiny([s for s in SHAPES if s.name in names])


@pytest.mark.parametrize("mask", ["new", "keys"])
def test_drafts_with_a_mask(mask: str) -> None:
    """Of drafted tokens the same work, whatever the mask's columns are; it hides nothing."""
    drafts = tiny(shapes_of(f"mask of {mask}"))
    programs = [build(shape, 1, Noise()) for shape in drafts]
    of = [program.nodes[0]["mask"] for program in programs]
    assert of[0] is None and of[1].ne[1] == drafts[1].n_tokens and drafts[0].flops == drafts[1].flops
    assert all(not r.message for r in measure(drafts, graphrt.get_backend("cpu"), HostClock(), 0, 1, lambda _: None))


def test_padded_texts_are_as_packed_ones() -> None:
    """The same real work; a wrong length shows."""
    padded, packed = tiny(shapes_of("encoder"))
    assert padded.padded and not packed.padded and padded.flops == packed.flops
    assert padded.firsts[-1] == 4 * padded.longest and packed.firsts[-1] == packed.n_tokens
    program = build(padded, 1, Noise())
    exe = graphrt.prepare(Graph(*program.nodes), "cpu")
    for leaf, values in program.values.items():
        exe.write(leaf, (np.zeros_like(values) if leaf.name == "mask" else values).reshape(leaf.shape))
    exe.run()
    assert "NMSE" in wrong(program, exe), "padding was not hidden"


@pytest.mark.parametrize("name", ["prefill 32x64..4096 page 16", "mla 32x8192 page 64", "decode 64x2048 page 16 q8_0"])
def test_a_wrong_result_is_seen(name: str) -> None:
    (shape,) = _shapes(name)
    program = build(shape, 1, Noise())
    exe = graphrt.prepare(Graph(*program.nodes), "cpu")
    for leaf, values in program.values.items():
        exe.write(leaf, values if leaf.dtype.is_quantized else values.reshape(leaf.shape))
    exe.run()
    assert not wrong(program, exe)
    assert program.pages is not None
    program.pages[:] = np.roll(program.pages, 1, 0)  # as if sequences had each other's pages
    program.pages[program.pages < 0] = 0
    assert "NMSE" in wrong(program, exe)


def test_what_fails_is_a_row_and_the_others_go_on() -> None:
    shapes = _shapes("decode 1x65536 page 16", "decode 8x32768 page 16")
    rows = measure([shapes[0], VarlenShape("pa_decode", "bad", "llama-8b", ((1, 4),), 24), shapes[1]],
                   graphrt.get_backend("cpu"), HostClock(), 0, 1, lambda text: None)  # fmt: skip
    assert [r.seconds is None for r in rows] == [False, True, False] and "one of 16, 32" in rows[1].message
    assert "one of 16" in "\n".join(lines(rows, "md", 1.0, 1.0))
