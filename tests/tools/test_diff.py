"""`graphrt diff`: a model is no different from itself, honest ways of running stay within tolerance, planted bugs are
named, and what it saves fails again in `graphrt replay`."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import tiny, verbs

from graphrt.judge import Verdict
from graphrt.tools import cli
from graphrt.tools.diff.nodes import NodeDiff
from graphrt.tools.diff.report import Finding, Mode, Report
from graphrt.tools.diff.svg import svg as picture
from graphrt.tools.inspect.describe import GraphInfo, TensorInfo

SVG = "{http://www.w3.org/2000/svg}"

IDS = "3,1,4,1,5,9,2,6,5"

SCRIPT = """
import graphrt
from graphrt import ops

def build():
    a = graphrt.new_input("f32", 64, 5, name="a")
    ids = graphrt.new_input("i32", 3, name="ids")
    rows = ops.get_rows(a, ids, name="rows")
    inner = ops.scale(rows, 2.0, name="inner")
    bent = ops.unary(inner, "tanh", name="bent")
    capped = ops.scale(bent, 0.5, name="capped")
    return graphrt.Graph(ops.sqr(capped, name="out"), ops.argmax(capped, name="best"))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("diff")
    for name in ("llama", "gemma3"):
        tiny.write_model(folder / f"{name}.gguf", name)
        tiny.write_model(folder / f"{name}-q8.gguf", name, "Q8_0")
    tiny.write_model(folder / "text.gguf", "llama", tokenizer="spm")
    (folder / "script.py").write_text(SCRIPT)
    return folder


class Result(verbs.Result):
    """Of graphrt diff."""

    def mode(self, i: int = 0) -> Any:
        return self.json()["modes"][i]


Run = Callable[..., Result]


@pytest.fixture
def run(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """A verb in the folder; `diff` of a model reads IDS unless it is told other tokens."""
    monkeypatch.chdir(folder)

    def call(*argv: str, verb: str = "diff") -> Result:
        capsys.readouterr()
        if verb == "diff" and argv[0].endswith(".gguf"):
            ids = () if "-p" in argv or "--tokens" in argv else ("--tokens", IDS)
            argv = (*argv, *ids, *(() if "-c" in argv else ("-c", "64")))
        code = cli.main([verb, *argv])
        return Result(code, *capsys.readouterr())

    return call


# ---- no difference ----


@pytest.mark.parametrize("model", ["llama.gguf", "gemma3-q8.gguf"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("side", ["cpu", "cpu-fast"])
def test_a_model_does_not_differ_from_itself(run: Run, model: str, phase: str, side: str) -> None:
    result = run(model, "-a", side, "-b", side, "--phase", phase, "--batch-size", "4", "--json")
    mode = result.mode()
    assert result.code == 0 and not result.json()["differs"] and len(mode["nodes"]) > 20
    assert all(node["nmse"] == node["max_abs"] == 0 for node in mode["nodes"])


def test_each_step_of_the_reference_by_itself_is_the_reference(run: Run) -> None:
    result = run("gemma3.gguf", "-b", "cpu", "--resync", "--json")
    free, fed = result.json()["modes"]
    assert [n["name"] for n in free["nodes"]] == [n["name"] for n in fed["nodes"]] and fed["unread"] == 0
    assert all(node["nmse"] == 0 for node in fed["nodes"])


@pytest.mark.parametrize("model", ["llama.gguf", "llama-q8.gguf", "gemma3.gguf", "gemma3-q8.gguf"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_the_fast_form_stays_within_tolerance(run: Run, model: str, phase: str) -> None:
    result = run(model, "-b", "cpu-fast", "--resync", "--phase", phase, "--json")
    assert result.code == 0
    free, fed = result.json()["modes"]
    assert free["unread"] == fed["unread"] > 0, "nodes inside fusions are not compared: nothing was cut"
    assert any(0 < n["nmse"] < n["tolerance"] for n in free["nodes"]) and any(n["nmse"] > 0 for n in fed["nodes"])
    opened = run(model, "-b", "cpu-fast", "--cut", "--phase", phase, "--json").json()
    assert opened["modes"][0]["unread"] == 0 and opened["cut"]["cut"] == opened["cut"]["fusions"] > 0
    assert not opened["cut"]["vanished"]


def test_fused_against_unfused(run: Run) -> None:
    result = run("llama.gguf", "-a", "cpu-fast,fuse=0", "-b", "cpu-fast", "--resync", "--json")
    assert result.code == 0 and result.mode()["unread"] > 0


def test_the_gpu_backend(run: Run) -> None:
    pytest.importorskip("triton")
    result = run("llama-q8.gguf", "-b", "triton-fast", "--tokens", "3", "-c", "16", "--resync", "--json")
    found = result.json()["modes"]
    assert result.code == 0 and len(found[1]["nodes"]) > 20, [mode["first"] for mode in found]
    sides = ("-a", "triton-fast,fuse=0", "-b", "triton-fast")
    fused = run("script.py:build", *sides, "--resync", "--json")
    assert fused.code == 0 and fused.mode()["unread"] == 2, "the softcap is one step on one side"


def test_another_cache_type_and_another_file(run: Run) -> None:
    cache = run("llama.gguf", "-b", "cpu,ctk=bf16", "--json")
    assert cache.mode()["first"]["name"] == "cache_k_l0 (set)" and cache.code == 1
    other = run("llama.gguf", "-b", "cpu,model=llama-q8.gguf", "--resync", "--json")
    first = other.mode(1)["first"]
    assert first["op"] in ("MUL_MAT", "GET_ROWS") and other.code == 1
    assert other.mode()["first"]["inputs"][0]["nmse"] > 0
    wrong = run("llama.gguf", "-b", "cpu,model=gemma3.gguf")
    assert wrong.code == 2 and "one architecture and shape" in wrong.err


def test_a_text_is_read_by_both_sides(run: Run) -> None:
    found = run("text.gguf", "-b", "cpu-fast", "-p", "hello the sea", "--json").json()
    assert len(found["tokens"]) > 3 and not found["differs"]


# ---- values from elsewhere ----


def test_a_file_is_matched_by_name(run: Run, tmp_path: Path) -> None:
    file = str(tmp_path / "values.npz")
    assert (
        run("text.gguf", "--backend", "cpu", "--exact", "-p", "hello", "-c", "64", "-o", file, verb="trace").code == 0
    )
    same = run("text.gguf", "-a", file, "-b", "cpu", "-p", "hello", "--json")
    assert same.code == 0 and len(same.mode()["nodes"]) > 50 and same.mode()["unread"] == 0
    assert max(n["nmse"] for n in same.mode()["nodes"]) < 1e-13  # float32 in the file
    assert run("text.gguf", "-a", "cpu", "-b", file, "-p", "hello").code == 0
    saved = dict(np.load(file))
    saved["ffn_norm-1"] = saved["ffn_norm-1"] * 1.05
    np.savez(file, **saved)
    wrong = run("text.gguf", "-a", "cpu", "-b", file, "-p", "hello")
    assert wrong.code == 1 and "first over its tolerance, free-running: ffn_norm-1 = MUL" in wrong.out


def test_llama_cpp_names_are_known(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "values.npz"
    argv = ("text.gguf", "--backend", "cpu", "--exact", "-p", "hello", "-c", "64", "-o", str(file))
    assert run(*argv, verb="trace").code == 0
    saved = dict(np.load(file))
    np.savez(file, **{"Qcur-0": saved["Qcur_rope-0"][0], "embd": saved["inp_embd"], "l_out-1": saved["l_out-1"]})
    found = run("text.gguf", "-a", str(file), "-b", "cpu", "-p", "hello", "--json")
    assert found.code == 0 and [n["name"] for n in found.mode()["nodes"]] == ["inp_embd", "Qcur_rope-0", "l_out-1"]


# ---- planted bugs ----


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_wrong_stride_is_named(run: Run, tmp_path: Path, phase: str) -> None:
    argv = ("llama.gguf", "--phase", phase, "--resync", "--json")
    assert run(*argv, "-b", "cpu").code == 0
    result = run(*argv, "-b", "support.broken_backends:WrongStride")
    free, fed = result.json()["modes"]
    assert result.code == 1 and free["first"]["name"] == fed["first"]["name"] == "__fattn__-0"
    first = free["first"]
    assert (first["op"], first["layer"], first["backend"], first["fusion"]) == ("FLASH_ATTN_EXT", 0, "cpu", None)
    assert all(i["nmse"] == 0 for i in first["inputs"]), "its inputs are equal: the error is its own"
    assert first["head"] in (2, 3) and f"head {first['head']}" in first["where"], "of the second head of K and V"
    assert abs(first["expected"] - first["actual"]) == pytest.approx(first["max_abs"], rel=1e-5)
    assert [n["name"] for n in fed["nodes"] if n["over"]] == ["__fattn__-0", "__fattn__-1"], "what is inherited is not"
    assert sum(n["over"] for n in free["nodes"]) > 10


def test_a_dropped_softcap_is_named_with_its_fusion(run: Run) -> None:
    assert run("script.py:build", "-b", "cpu-fast", "--resync").code == 0
    result = run("script.py:build", "-b", "support.broken_backends:SoftcapDropping", "--json")
    first = result.mode()["first"]
    assert result.code == 1 and (first["name"], first["members"]) == ("capped", ["inner", "bent", "capped"])
    assert [i["name"] for i in first["inputs"]] == ["rows"] and first["inputs"][0]["nmse"] == 0
    opened = run("script.py:build", "-b", "support.broken_backends:SoftcapDropping", "--cut")
    assert opened.code == 1 and "opening made that vanish" in opened.out and "capped first" in opened.out


def test_a_fusion_is_opened_by_a_filter_alone(run: Run) -> None:
    one = run("llama.gguf", "-b", "cpu-fast", "--filter", "norm_ffn_norm-1", "--json").json()
    assert (one["cut"]["cut"], [n["name"] for n in one["modes"][0]["nodes"]]) == (1, ["norm_ffn_norm-1"])
    none = run("llama.gguf", "-b", "cpu-fast", "--filter", "l_out", "--json").json()
    assert none["cut"]["cut"] == 0 and len(none["modes"][0]["nodes"]) == 2


@pytest.mark.parametrize("side", ["WrongStride", "SoftcapDropping"])
def test_what_is_saved_fails_again(run: Run, tmp_path: Path, side: str) -> None:
    subject = "llama.gguf" if side == "WrongStride" else "script.py:build"
    file, backend = str(tmp_path / "first.npz"), f"support.broken_backends:{side}"
    result = run(subject, "-b", backend, "--save", file)
    assert result.code == 1 and f"graphrt replay {file} -b {backend}" in result.err
    failed = run(file, "-b", backend, verb="replay")
    assert failed.code == 1 and "fail" in failed.out
    for right in ("cpu", "cpu-fast"):
        assert run(file, "-b", right, verb="replay").code == 0
    again = run(file, "-b", backend, "--json")  # a saved case is a subject too
    assert again.code == 1 and again.mode()["first"]["op"] == ("FLASH_ATTN_EXT" if side == "WrongStride" else "SCALE")
    assert run(file, "-b", "cpu-fast").code == 0


def test_what_is_right_is_not_saved(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "first.npz"
    result = run("script.py:build", "-b", "cpu-fast", "--save", str(file))
    assert result.code == 0 and not file.exists() and "is not written" in result.err


# ---- output ----


def test_the_text_says_it_all(run: Run) -> None:
    out = run("llama.gguf", "-b", "support.broken_backends:WrongStride", "--resync", "--all").out
    assert "first over its tolerance, free-running: __fattn__-0 = FLASH_ATTN_EXT, f32[16, 4, 9], layer 0" in out
    assert "strides (4, 64, 256) bytes; on cpu, by itself" in out and " instead of " in out
    assert "inputs: Qcur_rope-0 equal, cache_k_l0 (set) equal" in out
    assert "it was fed with the reference's inputs: the error is its own" in out
    assert "error by depth: NMSE, o free-running, x re-synced" in out and "every node that was compared" in out
    assert "\x1b" not in out and all(len(line) < 200 for line in out.splitlines())


def test_the_picture_and_the_overlay(run: Run, tmp_path: Path) -> None:
    svg, overlay, page = (tmp_path / name for name in ("diff.svg", "error.json", "page.html"))
    argv = (
        "llama.gguf",
        "-b",
        "support.broken_backends:WrongStride",
        "--resync",
        "--svg",
        str(svg),
        "--overlay",
        str(overlay),
    )
    run(*argv)
    root = ET.fromstring(svg.read_text())
    texts = [t.text for t in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "first: __fattn__-0" in texts and "layer 0" in texts and any("re-synced" in (t or "") for t in texts)
    rings = [c for c in root.iter("{http://www.w3.org/2000/svg}circle") if c.get("class") == "over"]
    over = [n for mode in run(*argv[:4], "--json").json()["modes"] for n in mode["nodes"] if n["over"]]
    assert len(rings) == len(over) + 1 > 10 and svg.stat().st_size < 100_000, "each, and the legend's"
    _check_the_label(root)
    values = json.loads(overlay.read_text())
    assert values["__fattn__-0"] > 1 > values["attn_norm-0"]
    dumped = ("llama.gguf", "--backend", "cpu", "--exact", "-c", "64", "--phase", "prefill", "--format", "html")
    assert (
        run(*dumped, "--overlay", str(overlay), "-o", str(page), verb="dump").code == 0 and "error" in page.read_text()
    )


def _check_the_label(root: ET.Element) -> None:
    """The first node's name stands on a ground as wide as it, inside of the picture: outlines of letters are drawn over
    them by viewers that don't know paint-order."""
    assert "paint-order" not in ET.tostring(root, encoding="unicode")
    label = next(t for t in root.iter(f"{SVG}text") if t.get("class") == "name")
    *_, ground = [r for r in root.iter(f"{SVG}rect") if r.get("class") == "paper"]
    x, width = float(ground.get("x", 0)), float(ground.get("width", 0))
    assert float(label.get("x", 0)) == pytest.approx(x + 3) and width >= 7.5 * len(label.text or "")
    assert x >= 78 and x + width <= 980 and label.get("text-anchor") is None


@pytest.mark.parametrize("n", [3, 400])
def test_every_node_over_is_ringed(run: Run, n: int) -> None:
    """Few as circles with tooltips, many as one path."""
    nodes = [_bad(i, f"a_name_as_long_as_llama_cpps_longest_{i}" * (1 + 4 * (i == 0))) for i in range(n)]
    tensors = tuple(
        TensorInfo(7 + i, d.key, "SQR", None, None, "f32", (1, 1, 1, 1), (4, 4, 4, 4), (), None, (), None, 0, 0)
        for i, d in enumerate(nodes)
    )
    first = Finding(nodes[0], tensors[0], "", (), None, "", ())
    info = GraphInfo("t", "graph", 0, tensors, ())
    root = ET.fromstring(picture(Report("t", ("cpu", "b"), info, [Mode("free-running", nodes, 0, first)], None, 0, 0)))
    circles = [c for c in root.iter(f"{SVG}circle") if c.get("class") == "over"]
    many = [p.get("d", "").count("M") for p in root.iter(f"{SVG}path") if p.get("class") == "over many"]
    assert (len(circles) - 1, many) == ((n, []) if n < 40 else (0, [n])), "one more in the legend"
    _check_the_label(root)


def _bad(index: int, name: str) -> NodeDiff:
    return NodeDiff(name, index, Verdict(False, "", 1e-3, 1e-6, 1.0), None, None, None)


ERRORS = {
    "side": (["-b", "cpu,fuze=0"], "got 'fuze=0'; for example -b cpu-fast,fuse=0"),
    "fuse": (["-b", "cpu,fuse=yes"], "fuse must be 0"),
    "backend": (["-b", "gpu"], "a backend must be one of"),
    "cache": (["-b", "cpu,ctk=q2_K"], "must be one of f32, f16"),
    "two files": (["-a", "a.npz", "-b", "b.npz"], "one side at least must run"),
    "no file": (["-a", "none.npz", "-b", "cpu"], "must be an .npz file"),
    "fed from a file": (["-a", "a.npz", "--resync"], "give two sides that run"),
    "filter": (["--filter", "nothing", "-b", "cpu"], "must match the beginning of a computing node's name"),
    "save": (["--save", "x.txt"], "--save must end with .npz"),
    "folder": (["--svg", "none/x.svg"], "there is no folder"),
    "tokens": (["-p", "x", "--tokens", "1"], "leave out --tokens, or -p and -f"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(run: Run, case: str) -> None:
    argv, said = ERRORS[case]
    result = run("llama.gguf", *argv)
    assert result.code == 2 and said in result.err and result.out == ""


def test_a_graph_has_no_prompt(run: Run) -> None:
    assert "belongs to a model" in run("script.py:build", "-p", "x").err
    assert "ctk= belongs to a model" in run("script.py:build", "-b", "cpu,ctk=f32").err
    assert "one thing to look at" in run("-b", "cpu").err
