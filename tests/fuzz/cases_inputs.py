"""Inputs for the fuzzer of cases: small valid files of many ops, and mutations of their structure."""

from __future__ import annotations

import functools
import io
import json
import random
from dataclasses import dataclass
from typing import Any

import numpy as np

from fuzz.cases_mutate import broken_json, broken_zip, odd_array, varied
from graphrt.backend import get_backend
from graphrt.execute import prepare
from graphrt.models.model import Model
from graphrt.models.session import SessionOptions
from graphrt.models.synthetic import synthetic
from graphrt.testing import Inputs, all_cases
from graphrt.tools.conformance.cases.test_file import OPS
from graphrt.tools.conformance.run.saved import FORMAT, graph_json
from graphrt.tools.inspect.checked_json import plain
from graphrt.tools.inspect.describe import describe
from graphrt.tools.inspect.graph_json import to_json

#: Cases of each op, spread over its list, whose inputs take at most so many bytes.
PER_OP, MOST_BYTES = 12, 40_000


@dataclass(frozen=True)
class Base:
    """A saved case as what its file holds: the description, and arrays by name."""

    about: dict[str, Any]
    arrays: dict[str, np.ndarray]
    inputs: Inputs

    def packed(
        self, about: str | None = None, arrays: dict[str, np.ndarray] | None = None, deflate: bool = True
    ) -> bytes:
        file = io.BytesIO()
        save = np.savez_compressed if deflate else np.savez
        text = json.dumps(self.about) if about is None else about
        save(file, about=np.array(text), **(self.arrays if arrays is None else arrays))
        return file.getvalue()


def base_of(inputs: Inputs) -> Base:
    about = {"format": FORMAT, "case": inputs.case, "seed": inputs.seed, "message": "", "graph": graph_json(inputs)}
    arrays = {f"input_{i}": np.ascontiguousarray(v) for i, v in enumerate(inputs.values.values())}
    return Base(json.loads(json.dumps(plain(about))), arrays | {"expected": np.zeros(1)}, inputs)


@functools.cache
def bases() -> list[Base]:
    by_op: dict[str, list[Base]] = {}
    for case in all_cases():
        inputs = case.build()
        if sum(v.nbytes for v in inputs.values.values()) <= MOST_BYTES:
            by_op.setdefault(case.op, []).append(base_of(inputs))
    return [b for found in by_op.values() for b in found[:: max(1, len(found) // PER_OP)]]


@functools.cache
def graph_texts() -> list[str]:
    """Descriptions of some cases and of a model's decode step, prepared."""
    executables = [prepare(base.inputs.graph(), "cpu") for base in bases()[::9]]
    texts = [json.dumps(to_json(describe(exe))) for exe in executables]
    session = Model(synthetic("tiny:q4_0", 1), [get_backend("cpu")]).session(SessionOptions(n_ctx=64))
    return [*texts, json.dumps(to_json(describe(session.executable(1, 1), "tiny", "decode", 1)))]


@functools.cache
def op_lines() -> list[str]:
    """Lines as llama.cpp's test-export-graph-ops writes them."""
    found = []
    for base in bases():
        node = base.inputs.result
        if node.op in OPS:
            sources = [f"{s.dtype.id} {_words(s.ne)} {_words(s.nb)}" for s in node.sources()]
            words = f"16 {_words([0] * 16)}"
            found.append(
                f"{OPS.index(node.op)} {node.dtype.id} {_words(node.ne)} {words} {len(sources)} {' '.join(sources)} n"
            )
    return found


def _words(values: Any) -> str:
    return " ".join(map(str, values))


def make(seed: int) -> bytes:
    """A file: a saved case in most, else values, graph JSON or a list of ops."""
    rng = random.Random(seed)
    kind = rng.choices(("varied", "about", "arrays", "zip", "values", "json", "lines"), (34, 18, 12, 10, 4, 18, 4))[0]
    base = rng.choice(bases())
    if kind == "varied":
        inputs = varied(rng, base.inputs)
        return base_of(inputs).packed() if inputs is not None else base.packed(broken_json(rng, base.about))
    if kind == "about":
        return base.packed(broken_json(rng, base.about), deflate=rng.random() < 0.5)
    if kind == "arrays":
        return base.packed(arrays={n: odd_array(rng, a) for n, a in base.arrays.items()})
    if kind == "zip":
        return broken_zip(rng, base.packed(deflate=rng.random() < 0.5))
    if kind == "values":
        names = [t.name for t in base.inputs.graph().nodes] + ["x", "__proto__", "\x1b[2J"]
        file = io.BytesIO()
        np.savez_compressed(file, **{rng.choice(names): odd_array(rng, a) for a in base.arrays.values()})  # type: ignore[arg-type]
        return broken_zip(rng, file.getvalue()) if rng.random() < 0.3 else file.getvalue()
    if kind == "json":
        return broken_json(rng, json.loads(rng.choice(graph_texts()))).encode("utf-8", "surrogatepass")
    return _broken_lines(rng).encode()


def _broken_lines(rng: random.Random) -> str:
    lines = [rng.choice(op_lines()).split() for _ in range(rng.randint(1, 4))]
    for line in lines:
        for _ in range(rng.randint(0, 4)):
            at = rng.randrange(len(line))
            odd = ("-1", "0", "1", str(2**31), str(2**63), str(10**30), "x", "", "1e9", str(rng.randint(0, 99)))
            line[at] = rng.choice(odd)
        if rng.random() < 0.2:
            del line[rng.randrange(len(line)) :]
    return "\n".join(map(" ".join, lines))
