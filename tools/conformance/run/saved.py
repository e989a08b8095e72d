"""A failed case in one .npz file: the graph as JSON, the inputs, the result and the reference's.

Such a file may come from a stranger: its nodes are built anew by their ops, and its size bounds what it may ask for.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from graphrt import whole_files
from graphrt.dtypes import TYPES
from graphrt.errors import GraphError
from graphrt.graph import Graph
from graphrt.host import host_type
from graphrt.op import op_spec, registered_ops
from graphrt.tensor import MAX_NAME, MAX_SRC, Flag, Tensor
from graphrt.testing import Inputs
from graphrt.tools.conformance.run.budget import check_budget
from graphrt.tools.conformance.run.reference import as_stored
from graphrt.tools.inspect.checked_json import Checked, parsed, plain
from graphrt.tools.inspect.npz import open_npz
from graphrt.tools.inspect.rebuilt import dims, params_of, rebuilt

Array = npt.NDArray[np.generic]
FORMAT = 1
#: A case is one step of a graph, with what it reads: a few dozen tensors.
MAX_TENSORS = 1024
#: Bytes of the text that describes it, four a character.
MAX_ABOUT = 8 * 2**20
MAX_CASE = 16384
WHAT = "a case saved by `graphrt test --save`"


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
    with whole_files.writing(path) as file:
        np.savez_compressed(file, about=np.array(json.dumps(plain(about))), expected=expected, **arrays)  # type: ignore[arg-type]


def load_failure(path: Path) -> Inputs:
    """The node and the inputs of a saved case: leafs that the node needs, everything else built anew by its op.

    Raises GraphError when the file is none, tells of tensors that its ops don't give, or asks for more memory or work
    than a file of its size may.
    """
    with open_npz(path, WHAT) as file:
        at = parsed(file.text("about", MAX_ABOUT), WHAT).fields("format", "case", "seed", "message", "graph")
        if at["format"].value != FORMAT:
            at["format"].refuse(f"{FORMAT}, the format of this graphrt")
        inputs = Inputs(at["case"].text(MAX_CASE), at["seed"].whole(high=2**64))
        made: list[Tensor] = []
        for item in at["graph"].items(MAX_TENSORS):
            made.append(_tensor(item, made))
        if not made or made[-1].is_leaf or op_spec(made[-1].op).is_view:
            raise GraphError("$.graph must end in an op that computes, it does not; save the case anew")
        inputs.node = made[-1]
        read = {s for t in made for s in (*t.src, t.view_src)}
        inputs.beside = [t for t in made[:-1] if not t.is_leaf and t not in read]
        graph = inputs.graph()
        check_budget(graph, path.stat().st_size)
        needed = set(graph.leafs)
        for i, leaf in enumerate(t for t in made if t.is_leaf):
            if leaf in needed:
                inputs.values[leaf] = _values(leaf, file.array(f"input_{i}"))
    _check_indices(graph, inputs)
    return inputs


def _tensor(item: Checked, made: list[Tensor]) -> Tensor:
    """A tensor of the file, held against what its op gives."""
    at = item.fields("name", "type", "ne", "nb", "op", "params", "src", "view_src", "view_offs")
    op, index = at["op"].one_of(("NONE", *registered_ops())), len(made)
    sources = [s.optional(lambda s: s.whole(0, index - 1)) for s in at["src"].items(MAX_SRC)]
    t = rebuilt(
        item.path, op, at["type"].one_of(TYPES), dims(at["ne"], 1), at["name"].text(MAX_NAME - 1),
        params_of(at["params"], op), [made[i] if i is not None else None for i in sources],
        Flag.INPUT if op == "NONE" else Flag.NONE,
    )  # fmt: skip
    root = at["view_src"].optional(lambda s: made[s.whole(0, index - 1)])
    told = (at["type"].value, dims(at["ne"], 1), dims(at["nb"], 0), root, at["view_offs"].whole())
    given = (t.dtype.name, t.ne, t.nb, t.view_src, t.view_offs)
    for name, said, is_ in zip(("type", "ne", "nb", "view_src", "view_offs"), told, given):
        if said != is_:
            at[name].refuse(f"what {op} gives here, {is_}")
    return t


#: Ops that take rows by index, with what they call the table and the indices; which row is there is the caller's to
#: know, and kernels don't ask again.
_INDEXED = {
    "GET_ROWS": ("table", "ids"), "SET_ROWS": ("target", "ids"), "SAMPLE_EACH": ("settings", "slots"),
    "PENALIZE": ("settings", "slots"),
}  # fmt: skip
#: Ops whose results are indices into their first source's ne[0].
_ORDERING = ("ARGMAX", "ARGSORT", "TOP_K", "SAMPLE", "SAMPLE_EACH")


def _check_indices(graph: Graph, inputs: Inputs) -> None:
    """Raises GraphError for an index that is none of its table's rows."""
    written = {n.root for n in graph.nodes if op_spec(n.op).writes is not None}
    for node in graph.nodes:
        if node.op not in _INDEXED:
            continue
        table, ids = (node[name] for name in _INDEXED[node.op])
        if ids.root.is_leaf and ids.root not in written:
            raw = np.ascontiguousarray(inputs.values[ids.root]).reshape(-1).view(np.uint8)
            found = as_stored(ids, raw, ids.view_offs)
            low, high = int(found.min()), int(found.max())
        elif ids.root.op in _ORDERING and ids.root not in written:
            low, high = 0, next(ids.root.sources()).ne[0] - 1
        else:
            raise GraphError(f"the indices of {node.op} must be an input or an order of one, {ids.name!r} is neither")
        if low < 0 or high >= table.ne[1]:
            raise GraphError(
                f"indices of {node.op} must be rows of {table.name!r}, 0 to {table.ne[1] - 1}, {ids.name!r} has {low} "
                f"to {high}; mend the case"
            )


def _values(leaf: Tensor, values: Array) -> Array:
    """A leaf's values in its shape, quantized rows as bytes."""
    kind = host_type(leaf.dtype)
    if values.dtype != kind or values.nbytes != leaf.data_nbytes:
        raise GraphError(
            f"the values of {leaf.name!r}, {leaf.describe()}, must be {leaf.data_nbytes} bytes of {kind}, the file has "
            f"{values.nbytes} of {values.dtype}; save the case anew"
        )
    return np.ascontiguousarray(values).reshape(*leaf.shape[:3], -1)
