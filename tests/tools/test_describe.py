"""What the debug tools look at and say of it: subjects, descriptions, folding, and the JSON that loads back."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import ROOT
from support.tiny import write_model
from support.toy import ToyBackend

from graphrt import Graph, get_backend, new_input, ops, prepare
from graphrt.backend import Backend
from graphrt.errors import GraphError, GraphrtError, SessionError
from graphrt.models import Model
from graphrt.models.engine import SessionOptions
from graphrt.models.synthetic import RECIPES, SyntheticFile, synthetic
from graphrt.testing import all_cases
from graphrt.tools.conformance.run.saved import save_failure
from graphrt.tools.inspect.describe import GraphInfo, describe
from graphrt.tools.inspect.fold import fold, ranges
from graphrt.tools.inspect.graph_json import from_json, graph_of, loads, to_json
from graphrt.tools.inspect.subject import subject

OPTIONS = SessionOptions(n_ctx=64, n_batch=32)

SCRIPT = """
import graphrt, neighbour
from dataclasses import dataclass

def build(scale=neighbour.SCALE):
    a = graphrt.new_input("f32", 4, 3, name="a")
    return graphrt.Graph(graphrt.ops.scale(a, scale, name="scaled"))

def wrong():
    return build().outputs[0]

def needs(x):
    return x

def fails():
    return 1 / 0

def leaves():
    raise SystemExit(3)

def graph_error():
    return graphrt.Graph(graphrt.ops.sqr(graphrt.new_input("i32", 4, name="a")))

number = 3
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("subjects")
    write_model(folder / "llama.gguf", "llama")
    write_model(folder / "gemma3.gguf", "gemma3")
    (folder / "script.py").write_text(SCRIPT)
    (folder / "neighbour.py").write_text("SCALE = 3.0\n")
    (folder / "syntax.py").write_text("def build(:\n")
    (folder / "junk.npz").write_bytes(b"no zip")
    case = next(c for c in all_cases("SOFT_MAX"))
    save_failure(folder / "case.npz", case.build(), np.zeros(1), None, "")
    return folder


def fast(name: str = "cpu") -> list[Backend]:
    return [get_backend(name, exact=False)]


def described(folder: Path, text: str, backend: str = "cpu", phase: str | None = None) -> GraphInfo:
    s = subject(str(folder / text), fast(backend), phase, options=OPTIONS)
    return describe(s.executable, s.title, s.phase, s.n_tokens)


def made_up(layers: int, backend: str = "cpu") -> GraphInfo:
    session = Model(synthetic("tiny:q4_0", layers), fast(backend)).session(OPTIONS)
    return describe(session.executable(1, 1), f"tiny of {layers}", "decode", 1)


# ---- subjects ----


@pytest.mark.parametrize(
    ("text", "phase", "n", "title", "seen"),
    [
        ("llama.gguf", None, 0, "llama.gguf", ("decode", 1)),
        ("llama.gguf", "prefill", 0, "llama.gguf", ("prefill", 32)),
        ("llama.gguf", "prefill", 5, "llama.gguf", ("prefill", 5)),
        ("script.py:build", None, 0, "script.py:build", ("graph", 0)),
        ("case.npz", None, 0, "SOFT_MAX(", ("graph", 0)),
    ],
)
def test_subjects(folder: Path, text: str, phase: str | None, n: int, title: str, seen: tuple[str, int]) -> None:
    found = subject(str(folder / text), fast(), phase, n, OPTIONS)
    assert found.title.startswith(title) and (found.phase, found.n_tokens) == seen
    assert found.executable.graph.nodes
    if found.session is not None:
        assert found.executable.graph.tensor("inp_tokens").ne[0] == seen[1]  # type: ignore[union-attr]
    assert (found.inputs is not None) == text.endswith(".npz")


def test_a_made_up_model_is_a_subject() -> None:
    found = subject("tiny", fast(), options=OPTIONS, synthetic=True)
    assert found.title == "tiny:q4_k_m" and found.n_tokens == 1


@pytest.mark.parametrize(
    ("text", "phase", "n", "said"),
    [
        ("none.gguf", None, 0, "no such file"),
        ("none.py:build", None, 0, r"must be a Python file, .*none.py' is none; check the path"),
        ("script.py", None, 0, r"script.py:build, got .*name the function"),
        ("script.py:", None, 0, "name the function"),
        ("script.py:none", None, 0, "'none'.* has: build, wrong, needs, fails, leaves, graph_error; name one"),
        ("script.py:number", None, 0, "name one of them"),
        ("script.py:wrong", None, 0, r"must return a graphrt.Graph, got Tensor; return graphrt.Graph\(\*outputs\)"),
        ("script.py:needs", None, 0, "must take no arguments.*'x'; give them defaults"),
        ("script.py:fails", None, 0, "script.py', line 16, raised ZeroDivisionError: division by zero; mend it"),
        ("script.py:leaves", None, 0, "line 19, raised SystemExit: 3; mend it"),
        ("script.py:graph_error", None, 0, "SQR"),
        ("syntax.py:build", None, 0, "line 1, raised SyntaxError"),
        ("junk.npz", None, 0, "junk.npz' is not"),
        ("none.npz", None, 0, "none.npz' is not"),
        ("script.py:build", "decode", 0, "leave --phase, --tokens and --ranks out"),
        ("case.npz", None, 3, "leave --phase, --tokens and --ranks out"),
        ("llama.gguf", "decode", 3, "decode reads one token, got --tokens 3; give --phase prefill"),
        ("llama.gguf", "prefill", 33, "at most a batch of 32 tokens at once, got --tokens 33; raise -b"),
        ("llama.gguf", "idle", 0, "one of prefill, decode, got 'idle'"),
    ],
)
def test_what_is_no_subject(folder: Path, text: str, phase: str | None, n: int, said: str) -> None:
    with pytest.raises(GraphrtError, match=said):
        subject(str(folder / text), fast(), phase, n, OPTIONS)


# ---- descriptions ----


def test_a_graph_that_is_not_prepared() -> None:
    a = new_input("f32", 4, 3, name="a")
    looked = ops.view(a, (2, 3), nb=a.nb[1:2], offs=8, name="half")
    graph = Graph(ops.rms_norm(ops.cont(looked), 1e-5, name="normed"))
    info = describe(graph, "mine")
    leaf, half, copied, normed = info.tensors
    assert (leaf.op, leaf.flags, leaf.params, leaf.flops) == ("NONE", ("input",), None, 0)
    assert half.view is not None and (half.view.of, half.view.offset) == (0, 8)
    assert half.nb == (4, 16, 48, 48) and half.params == {"ne": (2, 3, 1, 1), "nb": (16, 48, 48), "offs": 8}
    assert copied.src == (1,) and copied.name == "node_1"
    assert normed.params == {"eps": 1e-5} and normed.flags == ("output",) and info.outputs == (3,)
    assert (normed.flops, normed.bytes) == (4 * 6, 2 * 6 * 4)
    assert all(t.backend is t.split is t.group is t.place is None for t in info.tensors)
    assert not info.splits and not info.groups and info.work.flops == 24


def test_a_graph_in_splits_with_copies() -> None:
    a, b = new_input("f32", 8, name="a"), new_input("f32", 8, name="b")
    graph = Graph(ops.add(ops.div(ops.mul(a, b, "here"), b, "there"), b, name="again"))
    exe = prepare(graph, [ToyBackend(), get_backend("cpu")])
    info = describe(exe)
    seen = {t.name: (t.backend, t.split, t.group) for t in info.tensors}
    assert seen == {
        "a": ("toy", None, None), "b": ("toy", None, None), "here": ("toy", 0, 0), "there": ("cpu", 1, 1),
        "again": ("toy", 2, 2),
    }  # fmt: skip
    assert [s.backend for s in info.splits] == ["toy", "cpu", "toy"]
    copies = [[(info.tensors[c.source].name, c.nbytes, c.once) for c in s.copies] for s in info.splits]
    assert copies == [[], [("here", 32, False), ("b", 32, False)], [("there", 32, False)]]
    assert {b.backend for b in info.buffers} == {"toy", "cpu"}


@pytest.mark.parametrize("backend", ["cpu", "triton"])
@pytest.mark.parametrize("model", ["llama.gguf", "gemma3.gguf"])
def test_a_model_is_described_as_it_is_prepared(folder: Path, model: str, backend: str) -> None:
    s = subject(str(folder / model), fast(backend), options=OPTIONS)
    exe, info = s.executable, describe(s.executable)
    order = [*exe.graph.leafs, *exe.graph.nodes]
    assert [t.name for t in info.tensors] == [t.name for t in order]
    fused = [g for g in info.groups if len(g.members) > 1]
    assert fused and len(info.groups) == sum(len(split.groups) for split in exe.splits)
    for t, tensor in zip(info.tensors, order):
        if t.place is not None:
            buffer, offset = exe.place(tensor)
            assert (t.place.offset, t.place.nbytes) == (offset, tensor.nbytes)
            assert offset + tensor.nbytes <= info.buffers[t.place.buffer].nbytes == buffer.nbytes
        if t.group is not None:
            assert t.index in info.groups[t.group].members and t.split == info.groups[t.group].split
    inside = [i for g in fused for i in g.members if i not in g.results and info.tensors[i].view is None]
    assert inside and all(info.tensors[i].place is None for i in inside), "what stays inside a group has no memory"
    assert {b.usage for b in info.buffers} == {"weights", "state", "compute"}


LAYERS = {
    "blk.1.attn_q.weight": 1, "cache_k_l1": 1, "cache_v_l0 (set)": 0, "attn_norm-1": 1, "norm_ffn_norm-0": 0,
    "inp_embd": None, "attn_inp_kq_mask": None, "token_embd.weight": None, "result_norm": None, "norm": None,
}  # fmt: skip


def test_layers_of_tensors(folder: Path) -> None:
    info = described(folder, "llama.gguf")
    layers = {t.name: t.layer for t in info.tensors}
    assert {name: layers[name] for name in LAYERS} == LAYERS
    unnamed = [t for t in info.nodes if re.match(r"node_\d+$", t.name)]
    assert unnamed and all(t.layer is not None for t in unnamed), "they belong to what reads them"
    picked = next(t for t in unnamed if t.op == "GET_ROWS" and info.tensors[t.src[0] or 0].name == "l_out-0")
    assert picked.layer == 1, "the last layer picks rows of what the layer before gave"


def test_what_has_no_name_belongs_to_the_first_layer_that_reads_it() -> None:
    a = new_input("f32", 4, name="a")
    shared = ops.sqr(ops.sqr(a))
    first = ops.add(shared, ops.sqr(a, name="outside"), name="first-1")
    graph = Graph(ops.add(first, ops.sqrt(shared), name="last-3"))
    layers = {t.name: t.layer for t in describe(graph).tensors}
    assert layers == {"a": None, "node_0": 1, "node_1": 1, "outside": None, "first-1": 1, "node_4": 3, "last-3": 3}


# ---- folding ----


def test_ranges() -> None:
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8" and ranges([3]) == "3"


def test_layers_that_are_alike_fold() -> None:
    sections = fold(made_up(5)).sections
    assert [s.title for s in sections] == [
        "before the layers", "layers 0-3: 4 alike", "layer 4", "after the layers"
    ]  # fmt: skip
    opened = fold(made_up(5), 2).sections
    assert [s.layers for s in opened] == [(), (0, 1, 3), (2,), (4,), ()]
    assert all(len(s.layers) < 2 for s in fold(made_up(5), alike=False).sections)


def small_gemma(backend: str) -> GraphInfo:
    """Seven layers of quantized weights, so that the GPU backend fuses as it does for real models."""
    sizes = {
        "vocab_size": 256, "embedding_length": 64, "feed_forward_length": 128, "attention.key_length": 32,
        "attention.value_length": 32, "rope.dimension_count": 32,
    }  # fmt: skip
    recipe = replace(RECIPES["gemma3-270m"], keys={**RECIPES["gemma3-270m"].keys, **sizes})
    session = Model(SyntheticFile("small", recipe, "q8_0", 7), fast(backend)).session(OPTIONS)
    return describe(session.executable(1, 1))


@pytest.mark.parametrize(
    ("backend", "layers"),
    [("cpu", [(), (0, 1, 2, 3, 4), (5,), (6,), ()]), ("triton", [(), (0,), (1, 2, 3, 4), (5,), (6,), ()])],
)
def test_local_and_global_layers_are_two_kinds(backend: str, layers: list[tuple[int, ...]]) -> None:
    """The GPU backend fuses a layer's first norm with the end of the layer before: layer 0 has none before it."""
    assert [s.layers for s in fold(small_gemma(backend)).sections] == layers


def test_a_fold_holds_everything_once(folder: Path) -> None:
    info = described(folder, "gemma3.gguf")
    folded = fold(info)
    shown = [i for s in folded.sections for i in s.tensors]
    assert len(shown) == len(set(shown)) and set(folded.shown_as) == set(shown)
    for i, other in enumerate(folded.shown_as):
        a, b = info.tensors[i], info.tensors[other]
        assert (a.op, a.ne, a.nb, a.dtype, a.params) == (b.op, b.ne, b.nb, b.dtype, b.params)


CHANGES: dict[str, dict[str, Any]] = {
    "op": {"op": "SUB"}, "type": {"dtype": "f16"}, "shape": {"ne": (9, 9, 1, 1)}, "strides": {"nb": (4, 8, 8, 8)},
    "parameters": {"params": {"eps": 1.0}}, "backend": {"backend": "other"}, "fusion": {"group": 0},
    "source": {"src": (0, 0)}, "memory": {"place": None}, "flags": {"flags": ("output",)},
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_layer_that_differs_stays_open(change: dict[str, Any]) -> None:
    info = made_up(5)
    node = next(t for t in info.tensors if t.name == "ffn_norm-2")
    tensors = list(info.tensors)
    tensors[node.index] = replace(node, **change)
    layers = [s.layers for s in fold(replace(info, tensors=tuple(tensors))).sections]
    assert layers[1:4] == [(0, 1, 3), (2,), (4,)]
    tensors[node.index] = replace(node, name="other-2")
    assert fold(replace(info, tensors=tuple(tensors))).sections[1].layers == (0, 1, 2, 3), "names don't count"


def test_a_layer_to_open_must_be_there() -> None:
    with pytest.raises(SessionError, match=r"got 9; the graph has layers 0-1"):
        fold(made_up(2), 9)
    with pytest.raises(SessionError, match="the graph has none"):
        fold(describe(Graph(ops.sqr(new_input("f32", 4, name="a")))), 0)


# ---- JSON ----


def special() -> GraphInfo:
    """A parameter that JSON has no number for."""
    return describe(Graph(ops.clamp(new_input("f32", 4, name="a"), float("-inf"), 1.0)))


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: described(folder, "llama.gguf"),
        lambda folder: described(folder, "gemma3.gguf", "triton"),
        lambda folder: described(folder, "gemma3.gguf", phase="prefill"),
        lambda folder: described(folder, "script.py:build"),
        lambda folder: described(folder, "case.npz"),
        lambda folder: special(),
    ],
    ids=["llama", "gemma3 triton", "gemma3 prefill", "script", "case", "infinite"],
)
def test_there_and_back(folder: Path, make: Callable[[Path], GraphInfo]) -> None:
    info = make(folder)
    again = loads(json.dumps(to_json(info), allow_nan=False))
    assert again == info
    graph = graph_of(again)
    plain = describe(graph, info.title, info.phase, info.n_tokens)
    bare = [replace(t, backend=None, split=None, group=None, place=None) for t in info.tensors]
    assert plain == replace(info, tensors=tuple(bare), splits=(), groups=(), buffers=())


def test_a_loaded_graph_runs() -> None:
    graph = graph_of(special())
    exe = prepare(graph, "cpu")
    exe.write("a", [-5.0, 0.0, 1.0, 7.0])
    exe.run()
    assert exe.read(graph.outputs[0]).reshape(-1).tolist() == [-5.0, 0.0, 1.0, 1.0]


def test_every_case_of_every_op_comes_back() -> None:
    seen = set()
    for case in all_cases():
        if case.op in seen or case.needs_bytes:
            continue
        seen.add(case.op)
        info = describe(case.build().graph())
        assert loads(json.dumps(to_json(info))) == info and describe(graph_of(info)) == info
    assert len(seen) > 25


def small() -> dict[str, Any]:
    """A graph with a view, parameters of each kind, an absent source, groups and places, as JSON."""
    q, k = new_input("f32", 4, 3, 2, name="q"), new_input("f32", 4, 5, 2, name="k")
    attn = ops.flash_attn_ext(q, k, k, None, 0.5, name="attn")
    y = ops.unary(ops.reshape(attn, 8, 3), "silu", name="y")
    return to_json(describe(prepare(Graph(ops.argsort(y, descending=True, name="order")), "cpu"), "small"))


def put(path: str, value: object) -> Callable[[Any], None]:
    """Sets (or with DELETE removes) the field at a path such as `tensors.3.nb.0`."""

    def change(root: Any) -> None:
        *way, last = [int(p) if p.isdigit() else p for p in path.split(".")]
        for step in way:
            root = root[step]
        if value is DELETE:
            del root[last]
        else:
            root[last] = value

    return change


DELETE = object()
MALFORMED: dict[str, tuple[str, object, str]] = {
    "version": ("version", 3, r"^\$\.version must be a whole number from 2 to 2, got 3"),
    "format": ("format", "gguf", r"^\$\.format must be one of graphrt graph, got 'gguf'"),
    "missing": ("tensors.2.nb", DELETE, r"^\$\.tensors\[2\] must have the field 'nb'"),
    "extra": ("tensors.2.note", 1, r"^\$\.tensors\[2\] must have no field 'note'"),
    "no array": ("tensors", {}, r"^\$\.tensors must be an array, got dict"),
    "index": ("tensors.1.index", 0, r"^\$\.tensors\[1\]\.index must be a whole number from 1 to 1, got 0"),
    "name": ("tensors.2.name", "x" * 64, r"^\$\.tensors\[2\]\.name must be a text of at most 63"),
    "op": ("tensors.2.op", "FROB", r"^\$\.tensors\[2\]\.op must be one of NONE, .*got 'FROB'"),
    "type": ("tensors.0.dtype", "f31", r"^\$\.tensors\[0\]\.dtype must be one of"),
    "ne": ("tensors.0.ne", [4, 3, 2], r"^\$\.tensors\[0\]\.ne must be an array of 4 whole numbers"),
    "ne of 0": ("tensors.0.ne.1", 0, r"^\$\.tensors\[0\]\.ne\[1\] must be a whole number from 1"),
    "ne true": ("tensors.0.ne.1", True, r"^\$\.tensors\[0\]\.ne\[1\] must be a whole number"),
    "ne huge": ("tensors.0.ne", [2**30] * 4, r"^\$\.tensors\[0\]\.ne must be the shape of at most"),
    "source after": ("tensors.2.src.0", 2, r"^\$\.tensors\[2\]\.src\[0\] must be a whole number from 0 to 1, got 2"),
    "source missing": ("tensors.2.src.0", None, r"^\$\.tensors\[2\] must be a tensor that FLASH_ATTN_EXT can give"),
    "view of": ("tensors.3.view.of", 5, r"^\$\.tensors\[3\]\.view\.of must be a whole number from 0 to 2"),
    "flag": ("tensors.0.flags", ["weight"], r"^\$\.tensors\[0\]\.flags\[0\] must be one of input, output"),
    "params": ("tensors.2.params", None, r"^\$\.tensors\[2\]\.params must be an object with scale"),
    "param": ("tensors.2.params.scale", "big", r"^\$\.tensors\[2\]\.params\.scale must be a number or one of inf"),
    "param of a leaf": ("tensors.0.params", {}, r"^\$\.tensors\[0\]\.params must be null"),
    "bool": ("tensors.5.params.descending", 1, r"^\$\.tensors\[5\]\.params\.descending must be true or false"),
    "group": ("tensors.2.group", 99, r"^\$\.tensors\[2\]\.group must be a whole number from 0 to 2, got 99"),
    "member": ("groups.0.members.0", 6, r"^\$\.groups\[0\]\.members\[0\] must be"),
    "buffer": ("tensors.2.place.buffer", 1, r"^\$\.tensors\[2\]\.place\.buffer must be"),
    "usage": ("buffers.0.usage", "scratch", r"^\$\.buffers\[0\]\.usage must be one of weights, state, compute"),
    "output": ("outputs.0", -1, r"^\$\.outputs\[0\] must be a whole number from 0 to 5"),
    "flops": ("tensors.2.flops", 1.5, r"^\$\.tensors\[2\]\.flops must be a whole number"),
    # These are well-formed, and not what the ops yield.
    "wrong ne": ("tensors.4.ne.0", 9, r"^\$\.tensors\[4\]\.ne must be \[8, 3, 1, 1\] by the rules of UNARY"),
    "wrong nb": ("tensors.4.nb.1", 36, r"^\$\.tensors\[4\]\.nb must be \[4, 32, 96, 96\] .*got \[4, 36"),
    "wrong nb of a leaf": ("tensors.0.nb.1", 20, r"^\$\.tensors\[0\]\.nb must be \[4, 16, 48, 96\]"),
    "wrong nb of a view": ("tensors.3.nb.2", 8, r"^\$\.tensors\[3\]\.nb must be \[4, 32, 96, 96\]"),
    "wrong view": ("tensors.3.view.offset", 4, r"^\$\.tensors\[3\]\.view must be"),
    "no view": ("tensors.3.view", None, r"^\$\.tensors\[3\]\.view must be \{'of': 2"),
    "wrong type": ("tensors.4.dtype", "f16", r"^\$\.tensors\[4\]\.dtype must be f32"),
    "wrong work": ("tensors.4.bytes", 5, r"^\$\.tensors\[4\]\.bytes must be 192"),
    "wrong layer": ("tensors.4.layer", 5, r"^\$\.tensors\[4\]\.layer must be None"),
    "another source": ("tensors.4.src.0", 0, r"^\$\.tensors\[1\]\.name must be y"),  # nobody reads k any more
    "unknown kind": ("tensors.4.params.kind", "frob", r"^\$\.tensors\[4\] must be a tensor that UNARY can give"),
    "an output less": ("outputs.0", 4, r"^\$\.tensors\[4\]\.flags must be|^\$\.tensors must hold"),
    "no name": ("tensors.4.name", "", r"^\$\.tensors\[4\]\.name must be node_2"),
}  # fmt: skip


@pytest.mark.parametrize(("path", "value", "said"), MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_json_is_refused_with_its_path(path: str, value: object, said: str) -> None:
    root = small()
    assert [t["name"] for t in root["tensors"]] == ["q", "k", "attn", "node_1", "y", "order"]
    graph_of(from_json(root))
    put(path, value)(root)
    with pytest.raises(GraphError, match=said):
        graph_of(from_json(root))


def test_what_no_output_needs_is_refused() -> None:
    root = small()
    root["tensors"].append(root["tensors"][4] | {"index": 6, "name": "more"})
    with pytest.raises(GraphError, match=r"^\$\.tensors must hold what the outputs need .*that is 6 tensors"):
        graph_of(from_json(root))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "a graph must be JSON, it is not"),
        ("[" * 100_000, "nested too deeply|it is not"),
        ("9" * 10_000, "it is not"),
        ("NaN", "NaN is not strict JSON"),
        ("[]", r"\$ must be an object"),
        ("null", r"\$ must be an object"),
    ],
)
def test_what_is_no_json(text: str, said: str) -> None:
    with pytest.raises(GraphError, match=said):
        loads(text)


def _paths(value: Any, path: str = "") -> list[str]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [f"{path}.{key}".lstrip(".") for key, _ in inner]
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return found + [p for key, v in inner for p in _paths(v, f"{path}.{key}")]


SMALL = small()
VALUES: tuple[object, ...] = (
    None,
    True,
    -1,
    0,
    1,
    3,
    2**53,
    2**70,
    0.5,
    "",
    "f32",
    "q4_0",
    "NONE",
    [],
    {},
    [0],
    DELETE,
)


@settings(max_examples=300)
@given(st.sampled_from(_paths(SMALL)), st.sampled_from(range(len(VALUES))))
def test_any_change_is_refused_or_gives_a_graph(path: str, value: int) -> None:
    root = copy.deepcopy(SMALL)
    put(path, VALUES[value])(root)
    try:
        graph_of(from_json(root))
    except GraphError as error:
        assert str(error).startswith("$")


def test_the_documented_schema_is_the_one_that_is_written() -> None:
    table = (ROOT / "docs" / "graph-json.md").read_text()
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    documented: set[str] = set()
    for row in rows:
        names = re.findall(r"`([^`]+)`", row)
        prefix = names[0].partition(".")[0] if "." in names[0] else ""
        documented |= {prefix + name if name.startswith(".") else name for name in names}
    written = set(SMALL)
    for array in ("tensors", "splits", "groups"):
        written |= {f"{array}[].{key}" for key in SMALL[array][0]}
    assert documented == written
