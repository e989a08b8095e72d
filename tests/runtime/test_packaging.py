"""What is shipped: the wheel and the sdist, and that graphrt works from each place it may lie in."""

from __future__ import annotations

import ast
import configparser
import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

import pytest
from support import ROOT

SUBPACKAGES = ("ops", "backends", "models", "tools")
NOT_SOURCE = shutil.ignore_patterns(
    ".git", ".*_cache", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".hypothesis"
)

needs_build = pytest.mark.skipif(
    importlib.util.find_spec("build") is None, reason="the package `build` is not installed"
)


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout to build in: what an earlier build has left there must not get into a wheel."""
    return Path(shutil.copytree(ROOT, tmp_path_factory.mktemp("packaging") / "tree", symlinks=True, ignore=NOT_SOURCE))


def build(tree: Path, out: Path, *what: str) -> Path:
    """Runs `python -m build` in the tree and returns the folder with what it made."""
    argv = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), *what, str(tree)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, cwd=tree.parent)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return out


@pytest.fixture(scope="session")
def sdist(tree: Path) -> Path:
    return next(build(tree, tree.parent / "sdist", "--sdist").glob("*.tar.gz"))


@pytest.fixture(scope="session")
def wheel(tree: Path) -> Path:
    return next(build(tree, tree.parent / "wheel", "--wheel").glob("*.whl"))


@pytest.fixture(scope="session")
def unpacked(wheel: Path) -> Path:
    """The wheel as pip would lay it out."""
    folder = wheel.parent.parent / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def files_of(tree: Path) -> set[str]:
    """Every file below graphrt/, through the links."""
    return {
        str((Path(where) / name).relative_to(tree))
        for where, _, names in os.walk(tree / "graphrt", followlinks=True)
        for name in names
        if not name.endswith(".pyc")
    }


def python(code: str, cwd: Path, *paths: Path) -> list[str]:
    """What a fresh interpreter prints, which finds modules in `paths` and nowhere else of ours."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=cwd, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


# ---- the wheel ----


@needs_build
def test_the_wheel_has_every_file_of_the_package_and_no_other(tree: Path, wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert len(names) == len(set(names))
    info = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    assert set(names) - info == files_of(tree)
    for wanted in (
        "ops/mul_mat.py",
        "py.typed",
        "backends/cpu/fast/__init__.py",
        "models/arch/llama.py",
        "tools/cli.py",
    ):
        assert f"graphrt/{wanted}" in names
    assert {name.split("/")[1] for name in info} >= {"METADATA", "RECORD", "entry_points.txt", "licenses"}


@needs_build
def test_the_wheel_holds_files_and_no_links(wheel: Path) -> None:
    assert not [i.filename for i in zipfile.ZipFile(wheel).infolist() if stat.S_ISLNK(i.external_attr >> 16)]


@needs_build
def test_the_wheel_names_its_command_its_backend_and_what_it_needs(unpacked: Path) -> None:
    (info,) = unpacked.glob("*.dist-info")
    points = configparser.ConfigParser()
    points.read(info / "entry_points.txt")
    assert dict(points["console_scripts"]) == {"graphrt": "graphrt.__main__:main"}
    assert points["graphrt.backends"]["cpu"] == "graphrt.backends.cpu:CpuBackend"
    metadata = Parser().parsestr((info / "METADATA").read_text())
    assert (metadata["Name"], metadata["License-Expression"]) == ("graphrt", "MIT")
    assert (info / "top_level.txt").read_text().split() == ["graphrt"]
    import graphrt

    assert metadata["Version"] == graphrt.__version__, "pyproject.toml and graphrt/__init__.py name one version"


@needs_build
def test_every_module_that_is_imported_is_declared_and_the_other_way_round(unpacked: Path) -> None:
    (info,) = unpacked.glob("*.dist-info")
    required = Parser().parsestr((info / "METADATA").read_text()).get_all("Requires-Dist") or []
    declared = {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in required if 'extra == "dev"' not in line}
    imported = {name for path in (unpacked / "graphrt").rglob("*.py") for name in imports(path)}
    ours = {"graphrt", *sys.stdlib_module_names}
    assert imported - ours == declared


def imports(path: Path) -> Iterator[str]:
    """The top-level names that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


# ---- the sdist ----


@needs_build
def test_the_sdist_builds_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    assert (source / "LICENSE").exists() and (source / "pyproject.toml").exists()
    again = next(build(source, tmp_path / "wheel", "--wheel").glob("*.whl"))
    assert sorted(zipfile.ZipFile(again).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())


# ---- imports ----

USE = """
import graphrt, graphrt.ops, graphrt.models
backend = graphrt.get_backend("cpu")
a = graphrt.new_input("f32", 4, name="a")
exe = graphrt.prepare(graphrt.Graph(graphrt.ops.sqr(a)), [backend])
exe.write("a", [1.0, 2.0, 3.0, 4.0]); exe.run()
print(graphrt.__file__, graphrt.ops.__file__, *exe.read(exe.graph.outputs[0]).reshape(-1).astype(int))
"""


def check_use(root: Path, cwd: Path, *paths: Path) -> None:
    package, ops, *values = python(USE, cwd, *paths)
    assert (package, ops) == (str(root / "graphrt" / "__init__.py"), str(root / "graphrt" / "ops" / "__init__.py"))
    assert values == ["1", "4", "9", "16"]


def test_it_works_in_the_checkout() -> None:
    check_use(ROOT, ROOT)


def test_it_works_from_elsewhere(tmp_path: Path) -> None:
    check_use(ROOT, tmp_path, ROOT)


@needs_build
def test_it_works_from_the_wheel(unpacked: Path, tmp_path: Path) -> None:
    check_use(unpacked, tmp_path, unpacked)


@needs_build
def test_the_wheels_entry_points_load(unpacked: Path, tmp_path: Path) -> None:
    code = """
from importlib.metadata import entry_points
script, = entry_points(group="console_scripts", name="graphrt")
backends = {point.name: point.load() for point in entry_points(group="graphrt.backends")}
code = script.load()(["devices"])
print(code, backends["cpu"].name)
"""
    *table, code_, name = python(code, tmp_path, unpacked)
    assert table[0] == "backend" and (code_, name) == ("0", "cpu")


def test_the_subpackages_are_relative_links() -> None:
    assert {name: os.readlink(ROOT / "graphrt" / name) for name in SUBPACKAGES} == {n: f"../{n}" for n in SUBPACKAGES}
