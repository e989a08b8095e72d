"""A backend that somebody else ships: found through its entry point, shares a graph with the CPU, breaks nobody."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT
from support.plugins import PLUGIN, by_hand, write_metadata
from support.tiny import write_model


def _pip(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(source)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny plugin installed in it, from a copy so that the tree stays clean."""
    source, target = tmp_path_factory.mktemp("source") / "plugin", tmp_path_factory.mktemp("site")
    shutil.copytree(PLUGIN, source, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    if _pip(source, target).returncode != 0:
        by_hand(target)
    return target


def run_python(code: str, *paths: Path) -> dict[str, object]:
    """What `code` prints as JSON, with the folders on PYTHONPATH as if their packages were installed."""
    path = os.pathsep.join(str(p) for p in (*paths, ROOT))
    env = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


SHARED = """
import json
import numpy as np
import graphrt
from graphrt import Graph, new_input, ops
from graphrt.backend import Usage, discover, get_backend

tiny, cpu = get_backend("tiny"), get_backend("cpu")
w = graphrt.new_tensor("f32", 4, name="w")
w.buffer = cpu.alloc(16, Usage.WEIGHTS)
w.buffer.write(0, np.array([1, 2, 3, 4], np.float32).view(np.uint8))
a = new_input("f32", 4, 3, name="a")
x = ops.mul(a, w, name="x")
y = ops.add(ops.sqrt(x, name="root"), x, name="y")
z = ops.scale(ops.transpose(y), 2.0, name="z")
exe = graphrt.prepare(Graph(z, x), ["tiny", cpu])
values = np.arange(12, dtype=np.float32).reshape(3, 4)
right = []
for shift in (0, 1):
    exe.write("a", values + shift)
    exe.run()
    product = (values + shift) * np.array([1, 2, 3, 4], np.float32)
    right.append(np.allclose(exe.read("z")[0, 0], 2 * (np.sqrt(product) + product).T))
    right.append(np.allclose(exe.read("x")[0, 0], product))
print(json.dumps({
    "found": {name: [info.score, info.reason] for name, info in discover().items()},
    "buffer": type(exe.arenas["tiny"].buffer).__name__,
    "splits": [[s.backend.id, [g.label for g in s.groups]] for s in exe.splits],
    "copies": [[c.target.name, c.once] for s in exe.splits for c in s.copies],
    "refusals": {n.name: r for n, r in exe.schedule.refusals.items()},
    "right": right,
}))
"""


def test_a_plugin_shares_a_graph_with_the_cpu(installed: Path) -> None:
    report = run_python(SHARED, installed)
    assert report["found"]["tiny"] == [0, None] and report["found"]["cpu"][1] is None
    assert report["buffer"] == "TinyBuffer" and report["right"] == [True] * 4
    assert report["splits"] == [["tiny", ["MUL"]], ["cpu", ["SQRT"]], ["tiny", ["ADD"]], ["cpu", ["SCALE"]]]
    assert report["copies"] == [["tiny#w", True], ["cpu#x", False], ["tiny#root", False], ["cpu#node_3", False]]
    assert report["refusals"] == {
        "root": {"tiny": "it has ADD, MUL, SCALE, not SQRT"},
        "z": {"tiny": "it takes contiguous tensors, a has gaps or another order"},
    }


def test_a_model_runs_on_a_plugin_without_options(installed: Path, tmp_path: Path) -> None:
    """Verbs and models ask every backend for reference forms or others, one that has no __init__ too."""
    file = str(write_model(tmp_path / "m.gguf", "llama"))
    code = f"""
import json, graphrt
ids = [3, 1, 4, 1]
tiny, cpu = (graphrt.load({file!r}, name, exact=False) for name in ("tiny", "cpu"))
off = abs(tiny.logits(ids) - cpu.logits(ids)).max()
print(json.dumps({{"backend": tiny.backends[0].name, "off": float(off)}}))
"""
    report = run_python(code, installed)
    assert report["backend"] == "tiny" and report["off"] < 1e-3


def test_a_refusal_without_the_cpu_says_why(installed: Path) -> None:
    code = """
import json, graphrt
from graphrt import Graph, new_input, ops
try:
    graphrt.prepare(Graph(ops.sqrt(new_input("f32", 4, name="a"), name="root")), "tiny")
except graphrt.errors.UnsupportedError as error:
    print(json.dumps({"message": str(error)}))
"""
    message = str(run_python(code, installed)["message"])
    assert "none takes <root = SQRT(a) f32[4]>: tiny: it has ADD, MUL, SCALE, not SQRT. Add the cpu backend" in message


BROKEN = {
    "old": (
        "class B(Base):\n    name = 'old'\n    api_version = 99\n",
        "written for backend API version 99, this graphrt has 2",
    ),
    "first": (
        "class B(Base):\n    name = 'first'\n    api_version = 1\n",
        "written for backend API version 1, this graphrt has 2; install a matching release",
    ),
    "ageless": ("class B(Base):\n    name = 'ageless'\n", "written for backend API version None"),
    "nomodule": (
        "import a_module_that_is_not_there\n",
        "No module named 'a_module_that_is_not_there'",
    ),
    "noattribute": ("", "module 'broken_noattribute' has no attribute 'B'"),
    "nosyntax": ("def :\n", "can't be imported: invalid syntax"),
    "nolibrary": ("import ctypes\nctypes.CDLL('libnot_there.so')\n", "can't be imported: libnot_there.so"),
    "nobackend": ("B = 7\n", "must name a graphrt.backend.Backend subclass, got 7"),
    "stranger": ("class B:\n    pass\n", "must name a graphrt.backend.Backend subclass"),
    "partial": ("class B(Base):\n    name = 'partial'\n    api_version = 2\n", "must define alloc, compile, devices, "),
    "alias": ("from graphrt_tiny import TinyBackend as B\n", "must have the entry point's name, got 'tiny'"),
}


def test_broken_plugins_are_reported_and_break_nobody(installed: Path, tmp_path: Path) -> None:
    for name, (text, _) in BROKEN.items():
        base = "from graphrt.backend import Backend as Base\n" if "Base" in text else ""
        (tmp_path / f"broken_{name}.py").write_text(base + text)
    write_metadata(tmp_path, "broken-plugins", *(f"{name} = broken_{name}:B" for name in BROKEN))
    code = """
import json, graphrt
from graphrt.backend import discover
errors = {}
for name in discover():
    try:
        graphrt.get_backend(name)
    except graphrt.errors.BackendError as error:
        errors[name] = str(error)
found = {name: [info.score, info.reason] for name, info in discover().items()}
print(json.dumps({"found": found, "errors": errors, "auto": graphrt.get_backend().name}))
"""
    report = run_python(code, tmp_path, installed)
    found, errors = report["found"], report["errors"]
    assert found["cpu"][1] is None and found["tiny"] == [0, None] and report["auto"] == "cpu"
    for name, (_, reason) in BROKEN.items():
        assert found[name][0] == 0 and reason in found[name][1], found[name]
        assert f"backend {name!r} can't be used here: " in errors[name] and reason in errors[name]


def test_a_registered_backend_keeps_its_name() -> None:
    code = """
import json, graphrt
from graphrt.backends.cpu import CpuBackend
class Mine(CpuBackend):
    name = "mine"
class Other(CpuBackend):
    name = "mine"
graphrt.register_backend(Mine)
graphrt.register_backend(Mine)
try:
    graphrt.register_backend(Other)
except graphrt.errors.BackendError as error:
    print(json.dumps({"message": str(error), "mine": type(graphrt.get_backend("mine")).__name__}))
"""
    report = run_python(code)
    assert "name is used once, 'mine' is taken by __main__" in str(report["message"]) and report["mine"] == "Mine"
