"""`graphrt trace`: its statistics and texts, that cutting changes nothing, and planted NaNs that it must find."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import TESTS, tiny
from support import broken_backends as broken
from support.verbs import Result

from graphrt import Tensor, get_backend
from graphrt.backend import Backend
from graphrt.models import load
from graphrt.tools import cli
from graphrt.tools.inspect.node_stats import Stats, ends, eval_callback_lines, stats_of
from graphrt.tools.verbs import trace

NAN, INF = np.nan, np.inf
N_LAYER = 9
#: Nine ids: with -b 4 three steps.
TEXT = "hello the sea, he"


def deep() -> tuple[str, dict[str, Any], dict[str, tuple[int, ...]]]:
    """The tiny llama with nine layers, 4 heads of 16, 2 of them for keys and values."""
    arch, keys, shapes = tiny.llama()
    layer = {name: ne for name, ne in shapes.items() if name.startswith("blk.1.")}
    for il in range(2, N_LAYER):
        shapes |= {name.replace("blk.1.", f"blk.{il}."): ne for name, ne in layer.items()}
    return arch, keys | {"block_count": N_LAYER}, shapes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trace")
    spoilt_values = tiny.values

    def values(name: str, ne: tuple[int, ...]) -> np.ndarray:
        made = spoilt_values(name, ne)
        if name == "blk.7.ffn_up.weight":
            made[5, 3] = NAN
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny.MODELS, "deep", deep)
        tiny.write_model(folder / "deep.gguf", "deep", tokenizer="spm", chat=tiny.CHAT)
        patch.setattr(tiny, "values", values)
        tiny.write_model(folder / "weight.gguf", "deep", tokenizer="spm")
    for name in ("llama", "gemma3"):
        tiny.write_model(folder / f"{name}.gguf", name, tokenizer="spm")
    return folder


Run = Callable[..., Result]


@pytest.fixture
def run(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """graphrt trace in the folder, by the CPU or by a backend."""
    monkeypatch.chdir(folder)

    def call(*argv: str, model: str = "deep.gguf", backend: Backend | None = None, text: str = TEXT) -> Result:
        if backend is not None:
            monkeypatch.setattr(trace, "load_model", lambda args, exact, played: load(args.model, backend, exact=exact))
        capsys.readouterr()
        code = cli.main(["trace", model, "--backend", "cpu", "-p", text, "-c", "64", *argv])
        out, err = capsys.readouterr()
        return Result(code, out, err)

    yield call


# ---- statistics and texts ----

STATS = [
    ([1.0, -3.0, 2.0, 4.0], Stats(-3, 4, 1, 7.5**0.5, 4, 0, 0, 4, (1, -3, 2), (-3, 2, 4))),
    ([5.0], Stats(5, 5, 5, 5, 5, 0, 0, 1, (5,), (5,))),
    ([3.0, INF, -4.0], Stats(-4, 3, -0.5, 12.5**0.5, INF, 0, 1, 3, (3, INF, -4), (3, INF, -4))),
    ([-INF, -INF], Stats(None, None, None, None, -INF, 0, 2, 2, (-INF, -INF), (-INF, -INF))),
]


@pytest.mark.parametrize(("values", "expected"), STATS)
def test_statistics(values: list[float], expected: Stats) -> None:
    assert stats_of(np.array(values)) == expected


def test_statistics_count_nan() -> None:
    found = stats_of(np.array([[1.0, NAN], [-INF, 3.0]]))
    assert (found.nan, found.inf, found.n, found.min, found.max, found.mean) == (1, 1, 4, 1, 3, 2)
    assert np.isnan(found.sum) and found.largest == 3


#: What llama.cpp's common_debug_print_tensor() gives for 0, 1, 2, ... in ne = [7, 2, 1, 1].
PRINTED = """\
common_debug_cb_eval:                   node-1 = (f32)        ADD(a{7, 2, 1, 1}, }) = {7, 2, 1, 1}
    [
        [
            [      0.0000,       1.0000,       2.0000,    ...,       4.0000,       5.0000,       6.0000  ],
            [      7.0000,       8.0000,       9.0000,    ...,      11.0000,      12.0000,      13.0000  ],
        ],
    ]
    sum = 91.000000"""


def test_values_are_printed_as_llama_cpp_has_them() -> None:
    node = Tensor("f32", (7, 2), name="node-1", op="ADD", src=[Tensor("f32", (7, 2), name="a")])
    assert "\n".join(eval_callback_lines(node, np.arange(14.0).reshape(1, 1, 2, 7))) == PRINTED
    long = list(eval_callback_lines(Tensor("f32", (1, 9, 8, 2), op="SQR"), np.zeros((2, 8, 9, 1))))
    assert long.count(" " * 12 + "..., ") == 2 * 6 and long.count(" " * 8 + "..., ") == 2
    assert sum(line.startswith("    sum = ") for line in long) == 2


def test_ends_of_every_axis() -> None:
    shown = np.array(ends(np.arange(2 * 10 * 7.0).reshape(1, 2, 10, 7)))
    assert shown.shape == (1, 2, 6, 6) and shown[0, 1, 5, 5] == 139 and shown[0, 0, 3, 3] == 7 * 7 + 4


# ---- every node ----


@pytest.mark.parametrize("model", ["deep.gguf", "gemma3.gguf"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_traced_values_are_those_of_the_reference(run: Run, tmp_path: Path, model: str, phase: str) -> None:
    saved = []
    for extra in ([], ["--exact"]):
        path = tmp_path / f"{len(saved)}.npz"
        found = run("--phase", phase, "-b", "8", "--json", "-o", str(path), *extra, model=model).json()
        assert found["logits"] == {"nan": 0, "inf": 0, "max_abs_change": found["logits"]["max_abs_change"]}
        assert found["logits"]["max_abs_change"] < 1e-5 and not found["vanished"]
        assert found["fusions_cut"] == found["fusions"] and bool(found["fusions"]) == (not extra)
        saved.append(np.load(path))
    assert list(saved[0]) == [node["name"] for node in found["nodes"]] and len(saved[0]) == found["watched"]
    for name in saved[0]:
        finite = np.isfinite(saved[1][name])
        np.testing.assert_array_equal(np.isfinite(saved[0][name]), finite)
        fast, exact = saved[0][name][finite], saved[1][name][finite]
        np.testing.assert_allclose(fast, exact, rtol=0, atol=1e-2 * abs(exact).max(), err_msg=name)


def test_the_last_batch_is_traced_and_caches_show_what_they_hold(run: Run) -> None:
    found = run("-b", "4", "--json").json()
    n = len(found["tokens"])
    assert n > 8 and found["n_past"] == (n - 1) // 4 * 4 and found["n_tokens"] == n - found["n_past"]
    by_name = {node["name"]: node for node in found["nodes"]}
    assert by_name["cache_k_l0 (set)"]["n"] == 32 * n, "cells that hold no token are not counted"
    assert by_name["attn_norm-3"]["ne"] == [64, found["n_tokens"], 1, 1] and by_name["attn_norm-3"]["layer"] == 3
    after = run("-b", "4", "--json", "--phase", "decode").json()
    assert (after["n_past"], after["n_tokens"]) == (n, 1)


def test_a_filter_cuts_only_what_it_asks_for(run: Run) -> None:
    one = run("--json", "--filter", "norm_ffn_norm-7").json()
    assert (one["watched"], one["fusions_cut"]) == (1, 1) and one["nodes"][0]["name"] == "norm_ffn_norm-7"
    two = run("--json", "--filter", "l_out-7$", "--filter", "kqv_out-7").json()
    assert [node["op"] for node in two["nodes"]] == ["RESHAPE", "ADD"] and two["fusions_cut"] == 0


def test_values(run: Run) -> None:
    result = run("--values", "--filter", "l_out-0")
    lines = result.out.splitlines()
    assert lines[0].startswith("common_debug_cb_eval:                  l_out-0 = (f32)        ADD(")
    assert lines[-1].startswith("    sum = ") and "1 nodes watched" in result.err
    node = run("--values", "--json", "--filter", "l_out-0").json()["nodes"][0]
    assert f"    sum = {node['sum']:f}" == lines[-1] and np.array(node["values"]).shape == (1, 1, 6, 6)


def test_a_pipe_gets_plain_lines_and_a_terminal_what_fits(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run("--filter", ".*-7").out
    assert "\x1b" not in plain and "__fattn__-7" in plain and plain.splitlines()[2].split()[:3] == ["#", "name", "op"]
    monkeypatch.setenv("COLUMNS", "70")
    out = io.StringIO()
    out.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", out)
    cli.main(["trace", "deep.gguf", "--backend", "cpu", "-p", TEXT, "-c", "64", "--filter", ".*-7"])
    shown = out.getvalue()
    assert "no room here for first, last" in shown and "__fattn__-7" in shown


ERRORS = {
    "regex": (["--filter", "a("], "--filter must be a regular expression, got 'a('"),
    "match": (["--filter", "nothing"], "does not: inp_embd,"),
    "npz": (["-o", "x.txt"], "-o must end with .npz, got 'x.txt'"),
    "folder": (["-o", "none/x.npz"], "there is no folder"),
    "both": (["--first-nan", "--filter", "x"], "leave --filter out"),
    "long": (["-c", "4"], "the context holds 4 tokens"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(run: Run, case: str) -> None:
    argv, said = ERRORS[case]
    result = run(*argv)
    assert result.code == 2 and said in result.err and result.out == ""


def test_the_gpu_backend_is_traced_too(run: Run, tmp_path: Path) -> None:
    """Its fusions are cut, and what stays a fusion is read nonetheless."""
    pytest.importorskip("triton")
    saved = {}
    for name in ("cpu", "triton"):
        argv = ["--backend", name, "-c", "16", "--json", "-o", str(tmp_path / f"{name}.npz")]
        found = run(*argv, model="llama.gguf", text="he").json()
        saved[name] = np.load(tmp_path / f"{name}.npz")
    assert found["backends"] == ["triton"] and found["fusions_cut"] > 0 and found["logits"]["max_abs_change"] < 0.1
    assert list(saved["cpu"]) == list(saved["triton"])
    for name, ours in saved["triton"].items():
        theirs = saved["cpu"][name]
        finite = np.isfinite(theirs)
        scale = abs(theirs[finite]).max()
        np.testing.assert_allclose(ours[finite], theirs[finite], rtol=0, atol=0.03 * scale, err_msg=name)


# ---- llama.cpp ----

_NODE = re.compile(r"common_debug_cb_eval: +(.+) = \(\w+\) +(\w+)\(.*\) = \{(.*)\}")
#: Nodes of ours that llama.cpp has otherwise: views by other ways, masks from the host, rows and attention unnamed,
#: and gemma's sums before its norms after attention and feed-forward.
_ELSEWISE = re.compile(r"cache_.* VIEW|Qcur.* PERMUTE|Kcur.* RESHAPE|.* (KQ_MASK|FLASH_ATTN_EXT)|node_\d+ .*")
_ELSEWISE_GEMMA = re.compile(r"attn_out-\d+ MUL_MAT|ffn_inp-\d+ ADD")


def printed_sums(text: str) -> list[tuple[tuple[str, str, str], float]]:
    """Name, op and shape of each node that llama-eval-callback prints, and its sum."""
    found, key = [], ("", "", "")
    for line in text.splitlines():
        match = _NODE.fullmatch(line)
        if match:
            key = (match[1], match[2], match[3])
        elif line.startswith("    sum = "):
            found.append((key, float(line.split()[-1])))
    return found


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_sums_are_those_of_llama_eval_callback(run: Run, model: str) -> None:
    """Within 1e-2 of the sum, or where it cancels out within 1e-3 of the sum of magnitudes."""
    theirs: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    golden = json.loads((TESTS / "golden" / "eval_callback.json").read_text())
    for name, op, ne, total, magnitudes in golden[model]:
        theirs.setdefault((name, op, ", ".join(map(str, ne))), []).append((total, magnitudes))
    ours = printed_sums(run("--values", "-c", "256", model=f"{model}.gguf").out)
    shared = [key for key, _ in ours if key in theirs]
    assert len(shared) > 15 * (2 if model == "llama" else 7)
    for key, total in ours:
        if key not in theirs:
            allowed = [_ELSEWISE, *([_ELSEWISE_GEMMA] if model == "gemma3" else [])]
            assert any(pattern.fullmatch(f"{key[0]} {key[1]}") for pattern in allowed), key
            continue
        far = min(abs(total - t) / max(abs(t), 0.1 * m, 1e-9) for t, m in theirs[key])
        assert far < 1e-2, (key, total, theirs[key])


# ---- the first NaN ----


@dataclass(frozen=True)
class Planted:
    """A backend or a file that makes a NaN, and what --first-nan must say of it."""

    first: dict[str, Any]
    backend: Callable[[], Backend] = lambda: get_backend("cpu", exact=False)
    model: str = "deep.gguf"
    argv: tuple[str, ...] = ()
    whole: dict[str, Any] = field(default_factory=dict)


ATTENTION = {"name": "__fattn__-7", "op": "FLASH_ATTN_EXT", "layer": 7, "head": 2, "heads": [2], "inputs_clean": True}
NORM = {"name": "ffn_norm-7", "layer": 7, "row": 1, "rows": [1], "heads": None, "inputs_clean": True}
NORM |= {"fusion": ["norm_ffn_norm-7", "ffn_norm-7"], "worst_input": "ffn_inp-7"}
PLANTED = {
    "attention": Planted(ATTENTION | {"row": 1, "at": [0, 2, 1, 0]}, broken.SpoilingAttention),
    "infinite": Planted(ATTENTION | {"row": 1}, lambda: broken.SpoilingAttention(INF)),
    "first batch": Planted(
        ATTENTION | {"row": 1}, broken.SpoilingAttention, argv=("-b", "4"), whole={"n_past": 0, "n_tokens": 4}
    ),
    "decode": Planted(ATTENTION | {"row": 0}, broken.SpoilingDecode, argv=("--phase", "decode"), whole={"n_tokens": 1}),
    "cache": Planted(
        {"name": "cache_v_l7 (set)", "layer": 7, "head": 1, "cell": 1, "at": [16, 1, 0, 0], "inputs_clean": True},
        broken.SpoilingCache,
    ),
    "weight": Planted(
        {"name": "ffn_up-7", "inputs_clean": False, "worst_input": "blk.7.ffn_up.weight"}, model="weight.gguf"
    ),
    "fusion": Planted(NORM, broken.SpoilingFusion, whole={"vanished": True, "repeats": True}),
    "two fusions": Planted(
        {"name": "ffn_norm-3", "layer": 3, "inputs_clean": True}, broken.SpoilingFusions, whole={"vanished": True}
    ),
}


@pytest.mark.parametrize("case", PLANTED)
def test_it_finds_a_planted_nan(run: Run, case: str) -> None:
    planted = PLANTED[case]
    result = run("--first-nan", "--json", *planted.argv, model=planted.model, backend=planted.backend())
    found = result.json()["first_nan"]
    assert result.code == 1
    first, whole = found["first"], {"vanished": False, "culprit": None} | planted.whole
    if whole["vanished"]:
        whole["culprit"] = {"name": "norm_mul", "nodes": first["fusion"]}
    assert {key: first[key] for key in planted.first} == planted.first
    assert {key: found[key] for key in whole} == whole


def test_what_it_says(run: Run) -> None:
    result = run("--first-nan", backend=broken.SpoilingAttention())
    assert result.code == 1 and "first: __fattn__-7 = FLASH_ATTN_EXT, f32[16, 4, 9], layer 7," in result.out
    assert "16 NaN and 0 infinite of 576 values, the first at [0, 2, 1, 0]: head 2, row 1" in result.out
    assert "its inputs are clean, so it made them:" in result.out and "attn_inp_kq_mask" in result.out
    fused = run("--first-nan", backend=broken.SpoilingFusion()).out
    assert "with every node cut it vanishes; that cuts " in fused
    assert "the fusion norm_mul of norm_ffn_norm-7, ffn_norm-7 brings it back when all others are cut" in fused
    assert "its input blk.7.ffn_up.weight is not clean" in run("--first-nan", model="weight.gguf").out


def test_a_nan_that_comes_and_goes(run: Run) -> None:
    result = run("--first-nan", "--json", backend=broken.SpoilingAttention(runs=1))
    found = result.json()["first_nan"]
    assert (found["vanished"], found["repeats"], found["culprit"], found["first"]) == (True, False, None, None)


def test_a_clean_step(run: Run) -> None:
    result = run("--first-nan", backend=get_backend("cpu", exact=False))
    assert (result.code, result.out) == (0, "no NaN and no infinity, in the logits and the cache after every step\n")
    assert run("--first-nan", "--json").json()["first_nan"] is None


def test_the_table_says_that_cutting_made_it_vanish(run: Run) -> None:
    assert "cutting made that vanish" in run(backend=broken.SpoilingFusion()).out
    spoilt = run("--first-nan", "--stats", backend=broken.SpoilingAttention())
    assert "first: __fattn__-7" in spoilt.out and "vanish" not in spoilt.out and "l_out-8" in spoilt.out
