"""`graphrt dump`: its formats, its options and what it says of bad ones."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_type_hints

import pytest
from support.tiny import write_model
from support.toy import ToyBackend
from support.verbs import Result

from graphrt import Graph, get_backend, new_input, ops, prepare
from graphrt.models import Model
from graphrt.models.engine import SessionOptions
from graphrt.models.synthetic import synthetic
from graphrt.tools import cli
from graphrt.tools.dump.html import page
from graphrt.tools.dump.model_explorer import collection, node_data
from graphrt.tools.dump.text import print_rich, section_work
from graphrt.tools.inspect.describe import GraphInfo, describe
from graphrt.tools.inspect.fold import fold
from graphrt.tools.inspect.graph_json import loads
from graphrt.tools.inspect.overlay import overlays
from graphrt.tools.verbs.dump import FORMATS, rendered

SCRIPT = """
import graphrt

def build():
    a = graphrt.new_input("f32", 4, name='a "b" \\\\n')
    return graphrt.Graph(graphrt.ops.sqr(a, name="</script><b>\\x1b[31m\\u00e9"))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dump")
    write_model(folder / "llama.gguf", "llama")
    (folder / "script.py").write_text(SCRIPT)
    (folder / "time.json").write_text('{"attn_norm-0": 1.5, "l_out-1": 3}')
    (folder / "other.json").write_text('{"attn_norm-0": 1.5, "attn_norm-99": 3}')
    (folder / "text.json").write_text('{"attn_norm-0": "slow"}')
    (folder / "list.json").write_text("[1, 2]")
    return folder


@pytest.fixture(scope="module")
def info() -> GraphInfo:
    """Five layers on the CPU."""
    backends = [get_backend("cpu", exact=False)]
    session = Model(synthetic("tiny:q4_0", 5), backends).session(SessionOptions(n_ctx=64))
    return describe(session.executable(1, 1), "tiny:q4_0", "decode", 1)


Dump = Callable[..., Result]


@pytest.fixture
def dump(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Dump:
    monkeypatch.chdir(folder)

    def run(*argv: str) -> Result:
        try:
            code = cli.main(["dump", *argv])
        except SystemExit as left:
            code = int(left.code or 0)
        return Result(code, *capsys.readouterr())

    return run


CPU = ("--backend", "cpu")

# ---- text ----


def test_text_of_a_model(dump: Dump) -> None:
    result = dump("llama.gguf", *CPU, "-c", "64")
    assert result.code == 0 and not result.err
    lines = result.out.splitlines()
    assert lines[0] == "llama.gguf, decode of 1 token"
    figures = (
        r"\d+ nodes, \d+ leafs \| 1 split on cpu, \d+ groups \| [\d.]+ kFLOP, [\d.]+ KiB moved \| memory: compute "
    )
    assert re.match(figures, lines[1])
    rope = next(line for line in lines if " Qcur_rope-0 " in line)
    assert re.search(r"ROPE +Qcur_rope-0 +f32\[16, 4\] +node_\d+, inp_pos, rope_freqs.weight ", rope)
    assert rope.endswith("  n_dims=16 n_ctx_orig=256") and "compute " in rope, (
        "parameters that say what is usual are left out"
    )
    view = next(line for line in lines if " VIEW " in line)
    assert "of cache_k_l0" in view and "2, 64, 32" in view
    assert any("fused away" in line for line in lines) and any(" norm_mul " in line for line in lines)
    assert len({line.find("type") for line in lines if line.startswith("  #")}) == 1


def test_every_figure_stands_in_its_column(info: GraphInfo) -> None:
    head, *lines = rendered(info, "text").splitlines()[3:]
    rows = [line for line in lines if not line.startswith("--")]
    end = head.index("FLOP") + 4
    assert all(line[end : end + 2].strip() == "" for line in rows)
    assert {line[end - 1] for line in rows} <= set(" 0123456789kMG")


@pytest.mark.parametrize("layer", [None, 2])
def test_layers_fold_and_open(info: GraphInfo, layer: int | None) -> None:
    text = rendered(info, "text", layer)
    titles = [line[3:].split(",")[0] for line in text.splitlines() if line.startswith("--")]
    folds = ["layers 0-3: 4 alike"] if layer is None else ["layers 0-1", "layer 2"]
    assert titles == ["before the layers", *folds, "layer 4", "after the layers"]
    assert ("Qcur-2" in text) == (layer == 2) and "Qcur-0" in text and "Qcur-1" not in text


def test_the_sections_work_adds_up(info: GraphInfo) -> None:
    work = [(s.count, section_work(info, s)) for s in fold(info).sections]
    assert sum(n * w.flops for n, w in work) == info.work.flops == sum(t.flops for t in info.tensors)
    assert sum(n * w.bytes for n, w in work) == info.work.bytes < sum(t.bytes for t in info.tensors)


def test_several_splits_are_told_apart() -> None:
    a = new_input("f32", 8, name="a")
    exe = prepare(Graph(ops.soft_max(ops.sqr(a, "squared"), scale=1.0)), [ToyBackend(), get_backend("cpu")])
    lines = rendered(describe(exe, "two"), "text").splitlines()
    assert lines[1].startswith("2 nodes, 1 leafs | 2 splits on toy, cpu, 2 groups | ")
    assert lines[2:4] == ["split 0: 1 groups on toy", "split 1: 1 groups on cpu, 32 B copied to it a run"]
    head = next(line for line in lines if line.lstrip().startswith("#"))
    assert " on " in head and " split " in head


def test_a_graph_that_is_not_prepared_is_shown_too() -> None:
    text = rendered(describe(Graph(ops.sqr(new_input("f32", 8, name="a")))), "text")
    assert "1 nodes, 1 leafs | 8 FLOP, 64 B moved\n" in text and "group" not in text and "place" not in text


@pytest.mark.parametrize("width", [60, 100, 400])
def test_on_a_terminal_it_fits(info: GraphInfo, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm-256color")
    print_rich(info, fold(info))
    out = sys.stdout.getvalue()  # type: ignore[attr-defined]
    plain = re.sub(r"\x1b\[[\d;]*m", "", out)
    table = plain.split("\n\n", 1)[1].splitlines()
    assert max(map(len, table)) <= width and "\x1b[1m" in out
    assert all(any(name in line for line in table) for name in ("Qcur-0", "l_out-4", "result_output"))
    assert ("no room here for nb" in plain) == (width < 400) and ("parameters" in table[0]) == (width == 400)


# ---- formats and options ----


def without_addresses(text: str) -> str:
    """A dump less what every run places elsewhere."""
    return re.sub(r'"address": \d+', '"address": 1', text)


@pytest.mark.parametrize("kind", [f for f in FORMATS if f != "svg"])
def test_every_format_prints_to_a_pipe_and_to_a_file(dump: Dump, tmp_path: Path, kind: str) -> None:
    printed = dump("script.py:build", *CPU, "--format", kind)
    written = dump("script.py:build", *CPU, "--format", kind, "-o", str(tmp_path / "out.json"))
    assert (printed.code, written.code, written.out) == (0, 0, "")
    out = (tmp_path / "out.json").read_text()
    assert without_addresses(out) == without_addresses(printed.out) and printed.out.endswith("\n")
    assert "\x1b" not in printed.out, "a name can't steer a terminal"


def test_json_is_the_graph(dump: Dump) -> None:
    result = dump("llama.gguf", *CPU, "--phase", "prefill", "--tokens", "7", "--json")
    again = dump("llama.gguf", *CPU, "--phase", "prefill", "--tokens", "7", "--format", "json").out
    assert without_addresses(result.out) == without_addresses(again)
    assert result.out.count("\n") == 1 and result.out.isascii()
    found = loads(result.out)
    assert (found.title, found.phase, found.n_tokens) == ("llama.gguf", "prefill", 7)
    assert next(t for t in found.tensors if t.name == "inp_tokens").ne[0] == 7


HTML = ("llama.gguf", "--format", "html")
ERRORS: dict[str, tuple[tuple[str, ...], str]] = {
    "nothing": ((), "got none; give MODEL"),
    "two": (("llama.gguf", "--synthetic", "tiny"), "got two; give MODEL"),
    "no file": (("none.gguf",), "no such file"),
    "no function": (("script.py:none",), "has: build; name one of them"),
    "layer of a program's format": (("llama.gguf", "--layer", "0", "--json"), "json has all; leave it out"),
    "no layer": (("llama.gguf", "--layer", "7"), "got 7; the graph has layers 0-1"),
    "phase of a script": (("script.py:build", "--phase", "decode"), "leave --phase, --tokens and --ranks out"),
    "too many tokens": (("llama.gguf", "--phase", "prefill", "--tokens", "999"), "got --tokens 999; raise -b"),
    "overlay of text": (("llama.gguf", "--overlay", "time.json"), "got text; leave it out"),
    "overlay in a pipe": (("llama.gguf", "--format", "model-explorer", "--overlay", "time.json"), "got no -o"),
    "overlay of another": ((*HTML, "--overlay", "other.json"), "names 1 others: 'attn_norm-99'"),
    "overlay of texts": ((*HTML, "--overlay", "text.json"), "$.attn_norm-0 must be a number"),
    "overlay that is none": ((*HTML, "--overlay", "list.json"), "$ must be an object"),
    "no overlay": ((*HTML, "--overlay", "none.json"), "check the path"),
    "no folder": (("script.py:build", "-o", "none/out.txt"), "must be writable"),
}  # fmt: skip


@pytest.mark.parametrize(("argv", "said"), ERRORS.values(), ids=ERRORS.keys())
def test_bad_options(dump: Dump, argv: tuple[str, ...], said: str) -> None:
    result = dump(*argv, *CPU)
    assert result.code == 2 and not result.out
    assert said in result.err and 1 <= result.err.count("\n") <= 3 and "Traceback" not in result.err


# ---- dot and svg ----


def test_dot(info: GraphInfo) -> None:
    text = rendered(info, "dot")
    drawn = set(re.findall(r"^ +(t\d+) \[", text, re.M))
    arrows = re.findall(r"^  (t\d+) -> (t\d+)(.*);$", text, re.M)
    assert arrows and {end for a, b, _ in arrows for end in (a, b)} <= drawn
    assert len({(a, b) for a, b, _ in arrows}) == len(arrows)
    back = [(a, b) for a, b, rest in arrows if "next layer" in rest]
    index = {t.name: f"t{t.index}" for t in info.tensors}
    assert (index["l_out-0"], index["norm_attn_norm-0"]) in back, "a fold goes round"
    assert all(int(a[1:]) < int(b[1:]) for a, b, rest in arrows if "next layer" not in rest)
    assert text.count("{") == text.count("}") and "4 alike" in text and 'label="runs on"' in text
    weights = [t for t in info.tensors if t.name.endswith("attn_q.weight") and t.layer == 0]
    assert f"t{weights[0].index} [" not in text and "blk.0.attn_q.weight q4_0[256, 256]" in text
    fused = re.findall(r"subgraph cluster_g\d+ \{\n +label=\"(\w+)\"", text)
    assert "gate_up_glu" in fused
    shown = {i for t in info.tensors for i in [t.index] if f"t{i}" in drawn}
    for t in info.tensors:  # masks and positions too, by arrows: nothing but weights stands by name alone
        readers = {n.index for n in info.nodes if t.index in n.sources()} & shown
        if t.index in shown:
            assert readers <= {int(b[1:]) for a, b, _ in arrows if a == f"t{t.index}"}, t.name
    dotted = {a for a, _, rest in arrows if "dotted" in rest}
    assert index["inp_pos"] in dotted and index["Qcur-0"] not in dotted


def test_dot_quotes_names(dump: Dump) -> None:
    text = dump("script.py:build", *CPU, "--format", "dot").out
    assert r'label="input  a \"b\" \\n\nf32[4]"' in text


@pytest.fixture
def fake_dot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program named dot, first on the PATH; its body is to be written."""
    program = tmp_path / "bin" / "dot"
    program.parent.mkdir()
    program.touch(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return program


def test_svg_is_what_dot_makes_of_it(dump: Dump, fake_dot: Path) -> None:
    fake_dot.write_text('#!/bin/sh\necho "<svg $1>"; cat\n')
    out = dump("llama.gguf", *CPU, "--format", "svg").out
    assert out == "<svg -Tsvg>\n" + dump("llama.gguf", *CPU, "--format", "dot").out


def test_svg_when_dot_fails(dump: Dump, fake_dot: Path) -> None:
    fake_dot.write_text("#!/bin/sh\necho no memory >&2; exit 3\n")
    result = dump("llama.gguf", *CPU, "--format", "svg")
    assert result.code == 2 and "`dot` left with 3: no memory; try --format dot" in result.err


def test_svg_without_graphviz(dump: Dump, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    result = dump("llama.gguf", *CPU, "--format", "svg")
    assert result.code == 2 and "no `dot` on the PATH; install graphviz" in result.err and not result.out


# ---- model-explorer ----


def test_model_explorer(info: GraphInfo) -> None:
    (graph,) = collection(info)["graphs"]
    ids = [node["id"] for node in graph["nodes"]]
    assert len(set(ids)) == len(ids) == len(info.tensors)
    edges = [(edge["sourceNodeId"], node["id"]) for node in graph["nodes"] for edge in node["incomingEdges"]]
    assert sorted(edges) == sorted((str(s), str(t.index)) for t in info.tensors for s in t.sources())
    spaces = {node["namespace"] for node in graph["nodes"]}
    assert {"", "layer 0", "layer 4"} <= spaces and any(s.startswith("layer 2/gate_up_glu ") for s in spaces)


def _model_explorer(name: str) -> ModuleType:
    """A module of ai-edge-model-explorer, without what the whole package imports."""
    spec = importlib.util.find_spec("model_explorer")
    if spec is None or spec.origin is None:
        pytest.skip("ai-edge-model-explorer is not installed")
    package = Path(spec.origin).parent
    sys.modules.setdefault("model_explorer_alone", ModuleType("model_explorer_alone")).__path__ = [str(package)]
    return importlib.import_module(f"model_explorer_alone.{name}")


def _fits(value: Any, kind: Any, scope: dict[str, Any]) -> bool:
    """Whether plain JSON is what a type of the package's dataclasses says."""
    if dataclasses.is_dataclass(kind):
        types = get_type_hints(kind, scope)
        needed = {
            f.name
            for f in dataclasses.fields(kind)
            if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        }
        known = isinstance(value, dict) and needed <= value.keys() <= types.keys()
        return known and all(_fits(v, types[k], scope) for k, v in value.items())
    inner = get_args(kind)
    origin = getattr(kind, "__origin__", None)
    if origin is list:
        return isinstance(value, list) and all(_fits(v, inner[0], scope) for v in value)
    if origin is dict:
        return isinstance(value, dict) and all(
            isinstance(k, str) and _fits(v, inner[1], scope) for k, v in value.items()
        )
    if inner and all(isinstance(v, str) for v in inner):
        return value in inner
    if inner:
        return any(_fits(value, k, scope) for k in inner)
    return value is None if kind is type(None) else isinstance(value, kind) and not isinstance(value, bool)


def test_model_explorer_takes_it(info: GraphInfo) -> None:
    builder, data = _model_explorer("graph_builder"), _model_explorer("node_data_builder")
    made = json.loads(rendered(info, "model-explorer"))
    assert _fits(made, builder.GraphCollection, vars(builder))
    for overlay in overlays(info):
        (per_graph,) = node_data(overlay).values()
        assert _fits(per_graph, data.GraphNodeData, vars(data))
    made["graphs"][0]["nodes"][0]["labels"] = "x"
    assert not _fits(made, builder.GraphCollection, vars(builder)), "the check sees a field that is not there"


def test_model_explorers_node_data_lies_beside_the_graph(dump: Dump, tmp_path: Path) -> None:
    out = tmp_path / "graph.json"
    result = dump("llama.gguf", *CPU, "--format", "model-explorer", "-o", str(out), "--overlay", "time.json")
    assert result.code == 0
    files = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert files.keys() == {"graph.json", "graph.time.json", "graph.FLOP.json", "graph.bytes.json"}
    assert all(name in result.err for name in files if name != "graph.json")
    (graph,) = files["graph.json"]["graphs"]
    ids = {pair["value"]: n["id"] for n in graph["nodes"] for pair in n["attrs"] if pair["key"] == "name"}
    found = files["graph.time.json"][graph["id"]]
    assert found["results"] == {ids["attn_norm-0"]: {"value": 1.5}, ids["l_out-1"]: {"value": 3}}


# ---- html ----


def test_the_page_needs_nothing_else(info: GraphInfo) -> None:
    text = page(info, overlays(info))
    assert not re.search(
        r"(src|href)\s*=|url\(|@import|https?:|fetch\(|XMLHttp", text.partition('type="application/json"')[0]
    )
    assert "default-src 'none'" in text and "prefers-color-scheme: dark" in text and "/*DATA*/" not in text


def test_the_pages_data(info: GraphInfo) -> None:
    text = page(info, overlays(info), 2)
    data = json.loads(re.search(r'<script id="data" type="application/json">(.*)</script>', text)[1])  # type: ignore[index]
    assert [t["name"] for t in data["tensors"]] == [t.name for t in info.tensors]
    assert sorted(i for s in data["sections"] for i in s["tensors"]) == list(range(len(info.tensors)))
    assert [s["open"] for s in data["sections"]] == [True, False, False, True, False, False, True]
    assert data["sections"][1]["note"] == "alike: 0-1, 3"
    assert [o["name"] for o in data["overlays"]] == ["FLOP", "bytes"]
    flops = data["overlays"][0]
    assert flops["most"] == max(t.flops for t in info.tensors) == max(flops["values"].values())


def test_a_name_can_not_end_the_pages_script(dump: Dump) -> None:
    text = dump("script.py:build", *CPU, "--format", "html").out
    assert text.count("</script>") == 2 and "<b>" not in text
