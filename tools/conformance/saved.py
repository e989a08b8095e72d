"""A failed case in one .npz file: the graph as JSON, the inputs, the result and the reference's."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from graphrt.errors import GraphError
from graphrt.op import op_spec
from graphrt.tensor import Dims, Flag, Tensor
from graphrt.testing import Inputs

Array = npt.NDArray[np.generic]
FORMAT = 1


def graph_json(inputs: Inputs) -> list[dict[str, Any]]:
    """Every tensor of a graph, sources first; tensors refer to each other by their place in the list."""
    graph = inputs.graph()
    order = [*inputs.values, *graph.nodes]
    index = {t: i for i, t in enumerate(order)}
    return [
        {
            "name": t.name, "type": t.dtype.name, "ne": t.ne, "nb": t.nb, "op": t.op,
            "params": asdict(t.params) if t.params is not None else None,
            "src": [index[s] if s is not None else None for s in t.src],
            "view_src": index[t.view_src] if t.view_src is not None else None, "view_offs": t.view_offs,
        }
        for t in order
    ]  # fmt: skip


def save_failure(path: Path, inputs: Inputs, expected: Array, actual: Array | None, message: str) -> None:
    """Writes a case that failed. actual: None when there was no result."""
    about = {
        "format": FORMAT, "case": inputs.case, "seed": inputs.seed, "message": message, "graph": graph_json(inputs)
    }  # fmt: skip
    arrays = {f"input_{i}": np.ascontiguousarray(v) for i, v in enumerate(inputs.values.values())}
    if actual is not None:
        arrays["actual"] = actual
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        np.savez_compressed(file, about=np.array(json.dumps(about)), expected=expected, **arrays)  # type: ignore[arg-type]


def load_failure(path: Path) -> Inputs:
    """The node and the inputs of a saved case. Raises GraphError when the file is none."""
    try:
        with np.load(path, allow_pickle=False) as file:
            about = json.loads(str(file["about"]))
            values = [file[f"input_{i}"] for i in range(sum(t["op"] == "NONE" for t in about["graph"]))]
    except (OSError, ValueError, KeyError) as error:
        raise GraphError(
            f"a saved case is an .npz file of `graphrt test --save`, {str(path)!r} is not: {error}"
        ) from error
    if about.get("format") != FORMAT:
        raise GraphError(f"a saved case must have format {FORMAT}, got {about.get('format')}; save it anew")
    inputs = Inputs(about["case"], about["seed"])
    made: list[Tensor] = []
    for fields_ in about["graph"]:
        made.append(_tensor(fields_, made))
    inputs.values = dict(zip((t for t in made if t.is_leaf), values))
    inputs.node = made[-1]
    return inputs


def _tensor(f: dict[str, Any], made: list[Tensor]) -> Tensor:
    nb: Dims = tuple(f["nb"])
    return Tensor(
        f["type"], f["ne"], nb=nb, name=f["name"], op=f["op"], params=make_params(f["op"], f["params"]),
        src=[made[i] if i is not None else None for i in f["src"]],
        view_src=made[f["view_src"]] if f["view_src"] is not None else None, view_offs=f["view_offs"],
        flags=Flag.INPUT if f["op"] == "NONE" else Flag.NONE,
    )  # fmt: skip


def make_params(op: str, values: dict[str, Any] | None) -> Any:
    """An op's parameters from plain values."""
    if values is None:
        return None
    cls = op_spec(op).params
    if cls is None or {f.name for f in fields(cls)} != set(values):
        raise GraphError(f"{op} takes {cls.__name__ if cls else 'no parameters'}, the file has {sorted(values)}")
    return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
