"""Modules depend on each other one way: graphrt <- ops <- backends <- models <- tools, and nowhere in a circle.

Every import counts: those inside functions and those for type checkers too, and importlib.import_module() of a name
that is written out. A package's own __init__.py, which runs before any of its modules, does not count as their import.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter

import pytest
from support import ROOT

#: From the lowest to the highest: a module imports its own layer and those before it.
LAYERS = ("graphrt", "ops", "backends", "models", "tools")
#: Imports of a higher layer that are meant to be, by what imports and what is imported.
EXCEPTIONS = {
    ("graphrt", "graphrt.ops.gradients"): "graphrt.gradients(), which is imported when it is first asked for",
    ("graphrt", "graphrt.models.named"): "graphrt.load(), which is imported when it is first asked for",
    ("graphrt.__main__", "graphrt.tools.cli"): "`python -m graphrt` is the command line, which is a tool",
    ("graphrt.backend", "graphrt.backends"): "the table of built-in backends, by name: it imports none of them",
}


@cache
def sources() -> dict[str, str]:
    """Every module of the package by its full name, with its text."""
    found = {}
    for layer in LAYERS:
        for path in sorted((ROOT / layer).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if layer == "graphrt" and parts[1] in LAYERS:  # reached through a link: these have names of their own
                continue
            name = ".".join(parts if layer == "graphrt" else ("graphrt", *parts))
            found[name.removesuffix(".__init__")] = path.read_text(encoding="utf-8")
    return found


@cache
def imported(text: str) -> frozenset[str]:
    """The full names that a module imports, `from a import b` as a.b."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and _called(node.func) == "import_module":
            found.update(str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant))
    return frozenset(found)


def _called(function: ast.expr) -> str:
    """The last part of a function's name: f of m.f and of f."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def imports(modules: Mapping[str, str]) -> dict[str, set[str]]:
    """For each module those of `modules` that it imports."""
    found: dict[str, set[str]] = {}
    for name, text in modules.items():
        # What is imported from a module is no module of its own.
        targets = {x if x in modules else x.rpartition(".")[0] for x in imported(text)}
        found[name] = {target for target in targets if target in modules and target != name}
    return found


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """One circle of imports, each module importing the next one; empty when there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def layer_of(module: str) -> str:
    part = module.split(".")[1] if "." in module else ""
    return part if part in LAYERS else "graphrt"


def upwards(graph: Mapping[str, set[str]]) -> list[tuple[str, str]]:
    """The imports of a layer by one below it."""
    pairs = [(name, target) for name, targets in graph.items() for target in sorted(targets)]
    return [(a, b) for a, b in pairs if LAYERS.index(layer_of(a)) < LAYERS.index(layer_of(b))]


def across_backends(graph: Mapping[str, set[str]]) -> list[tuple[str, str]]:
    """The imports of one backend by another."""

    def backend(module: str) -> str:
        parts = module.split(".")
        return parts[2] if parts[:2] == ["graphrt", "backends"] and len(parts) > 2 else ""

    pairs = [(name, target) for name, targets in graph.items() for target in sorted(targets)]
    return [(a, b) for a, b in pairs if backend(a) and backend(b) and backend(a) != backend(b)]


def test_dependencies_go_one_way() -> None:
    assert set(upwards(imports(sources()))) == set(EXCEPTIONS)


def test_backends_do_not_know_each_other() -> None:
    assert across_backends(imports(sources())) == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circle(imports(sources())) == []


@pytest.mark.parametrize(
    "line",
    [
        "from graphrt.execute import prepare",
        "def f():\n    from graphrt import execute",
        "if TYPE_CHECKING:\n    import graphrt.execute",
        "importlib.import_module('graphrt.execute')",
    ],
)
def test_a_circle_is_found_however_it_is_imported(line: str) -> None:
    planted = {**sources(), "graphrt.tensor": sources()["graphrt.tensor"] + f"\n{line}\n"}
    found = circle(imports(planted))
    assert found[0] == found[-1] and {"graphrt.tensor", "graphrt.execute"} <= set(found)
    assert all(b in imports(planted)[a] for a, b in zip(found, found[1:]))


def test_wrong_ways_are_found() -> None:
    planted = {"graphrt.op": "def f():\n    from graphrt.models import gguf", "graphrt.models.gguf": ""}
    assert upwards(imports(planted)) == [("graphrt.op", "graphrt.models.gguf")]
    planted = {"graphrt.backends.cpu.fuse": "", "graphrt.backends.triton.fuse": "import graphrt.backends.cpu.fuse"}
    assert across_backends(imports(planted)) == [("graphrt.backends.triton.fuse", "graphrt.backends.cpu.fuse")]
