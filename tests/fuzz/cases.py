"""Saved cases, values, graph JSON and lists of ops from a stranger, through every reader and both forms of the CPU
backend. A kernel that reads beside its tensors is seen too: other bytes around them must leave the result as it is."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from fuzz.cases_inputs import bases, graph_texts, make
from graphrt.backend import Backend
from graphrt.backends.cpu.backend import CpuBackend
from graphrt.errors import GraphrtError
from graphrt.execute import prepare
from graphrt.graph import Graph
from graphrt.tensor import Flag
from graphrt.testing import Inputs
from graphrt.tools import cli
from graphrt.tools.conformance.cases.test_file import file_cases
from graphrt.tools.conformance.run.budget import check_budget
from graphrt.tools.conformance.run.guard import Guarded
from graphrt.tools.conformance.run.saved import load_failure
from graphrt.tools.conformance.run.step import run_inputs
from graphrt.tools.diff.file import file_side
from graphrt.tools.inspect.describe import describe
from graphrt.tools.inspect.graph_json import graph_of, loads, to_json

NAME = "cases"
__all__ = ["NAME", "attempt", "make", "warm"]

#: Verbs that take a saved case, each tried with some of the inputs.
_VERBS: tuple[tuple[str, ...], ...] = (
    ("replay", "FILE", "-b", "cpu"), ("dump", "FILE", "--backend", "cpu"), ("memory", "FILE", "--backend", "cpu"),
    ("explain", "FILE", "--backend", "cpu"), ("trace", "FILE", "-p", "a", "--backend", "cpu"),
    ("check", "FILE", "-b", "cpu"),
    ("diff", "FILE", "-a", "cpu", "-b", "cpu-fast"), ("diff", "CASE", "-a", "FILE", "-b", "cpu"),
    ("test", "--test-file", "FILE", "--list"),
)  # fmt: skip
#: What else the message of a failed run says where only numbers differ, which hostile ones may do.
_MEMORY = ("it wrote", "two runs")


def warm() -> None:
    """Compiles the kernels that valid inputs need. One thread: a fork has none of its parent's."""
    torch.set_num_threads(1)
    for data in [*(base.packed() for base in bases()), *(text.encode() for text in graph_texts())]:
        with contextlib.suppress(GraphrtError):
            attempt(data)


def attempt(data: bytes) -> str:
    """The input through all readers; "ran" with the result's status, or "refused" where none took it."""
    with tempfile.TemporaryDirectory(dir=_memory_folder()) as folder:
        path = Path(folder) / "input.npz"
        path.write_bytes(data)
        words = [word for reader in (_saved, _values, _json, _list) if (word := _outcome(reader, path)) is not None]
        verb = zlib.crc32(data) % (8 * len(_VERBS))
        if verb < len(_VERBS):
            _command(_VERBS[verb], path)
    return ", ".join(words) or "refused"


@functools.cache
def _backends() -> list[CpuBackend]:
    """Both forms, looked for once: that takes longer than most inputs."""
    return [CpuBackend(exact=True), CpuBackend(exact=False)]


def _memory_folder() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _outcome(reader: Callable[[Path], str], path: Path) -> str | None:
    """None: refused, in words that a terminal can show."""
    try:
        return reader(path)
    except GraphrtError as error:
        said = str(error)
        if len(said) > 4000 or not said.replace("\n", "").isprintable():
            raise AssertionError(f"a refusal of {len(said)} characters: {said[:500]!r}") from error
        return None


def _saved(path: Path) -> str:
    inputs = load_failure(path)
    found = []
    for backend in _backends():
        outcome = run_inputs(inputs.result.op, inputs, backend)
        wrong = outcome.status == "crashed" and not outcome.message.startswith(_refusals())
        if wrong or any(word in outcome.message for word in _MEMORY):
            raise AssertionError(f"{outcome.status}, exact={backend.exact}: {outcome.message[:500]}")
        found.append(outcome.status)
        if outcome.status in ("pass", "fail"):
            _reads_only_its_own(inputs, backend)
            _runs_prepared(inputs.graph(), inputs, backend)
    return f"case {' '.join(found)}"


def _refusals() -> tuple[str, ...]:
    """How the message of a run begins that ended in an error of graphrt's own."""

    def names(cls: type) -> list[str]:
        return [cls.__name__, *(name for sub in cls.__subclasses__() for name in names(sub))]

    return tuple(f"{name}: " for name in names(GraphrtError))


def _reads_only_its_own(inputs: Inputs, backend: Backend) -> None:
    """Runs with other bytes around every tensor: a result that changes was made of them."""
    guarded = Guarded(backend, inputs, inputs.graph())
    first = guarded.run()
    for block in guarded.blocks:
        outside = np.ones(block.image.size, np.bool_)
        for _, start, end in block.spans:
            outside[start:end] = False
        block.image[outside] ^= 0x55
    second = guarded.run()
    if first.tobytes() != second.tobytes():
        raise AssertionError(f"{backend.name} reads what lies around its tensors")


def _runs_prepared(graph: Graph, inputs: Inputs, backend: Backend) -> None:
    """The same graph in memory that is planned, and its description there and back."""
    exe = prepare(graph, [backend])
    inputs.fill(exe)
    exe.run()
    exe.read(inputs.result)
    info = describe(exe)
    if to_json(info) != to_json(loads(json.dumps(to_json(info), allow_nan=False))):
        raise AssertionError("a description differs once it was written and read")


def _values(path: Path) -> str:
    side = file_side(str(path))
    return f"values {min(len(side.arrays), 3)}"


def _json(path: Path) -> str:
    text = path.read_bytes().decode("utf-8", "replace")
    graph = graph_of(loads(text))
    check_budget(graph, len(text))
    for leaf in graph.leafs:
        leaf.flags |= Flag.INPUT
    inputs = Inputs("graph", 0)
    for leaf in graph.leafs:
        inputs.draw(leaf)
    for backend in _backends():
        exe = prepare(graph, [backend])
        inputs.fill(exe)
        exe.run()
        for t in graph.outputs:
            exe.read(t)
    return "graph ran"


def _list(path: Path) -> str:
    cases, left_out = file_cases(path)
    return f"list {min(len(cases), 3)} of {min(len(cases) + left_out.total(), 4)}"


def _command(argv: tuple[str, ...], path: Path) -> None:
    """A verb answers with an exit code and a few lines, whatever the file."""
    case = path.with_name("case.npz")
    case.write_bytes(bases()[0].packed())
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        code = cli.main([str({"FILE": path, "CASE": case}.get(word, word)) for word in argv])
    if code not in (0, 1, 2) or (code == 2 and len(told.getvalue()) > 8000):
        raise AssertionError(f"{argv[0]} ends with {code} and {len(told.getvalue())} characters")
