"""A described graph as JSON and back, and from a description back into a Graph. docs/graph-json.md has the schema.

text = json.dumps(to_json(describe(executable)))
info = loads(text)               # the same description
graph = graph_of(info)           # built anew by the ops' own rules, and compared field by field
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from graphrt import ops  # noqa: F401  (registers every op)
from graphrt.backend import Usage
from graphrt.dtypes import TYPES
from graphrt.errors import GraphError
from graphrt.graph import Graph
from graphrt.op import registered_ops
from graphrt.tensor import MAX_NAME, MAX_SRC, Flag, Tensor
from graphrt.tools.inspect.checked_json import Checked, parsed, plain
from graphrt.tools.inspect.describe import (
    BufferInfo,
    CopyInfo,
    GraphInfo,
    GroupInfo,
    PlaceInfo,
    SplitInfo,
    TensorInfo,
    ViewInfo,
    describe,
)
from graphrt.tools.inspect.rebuilt import MAX_LABEL, dims, params_of, rebuilt

FORMAT, VERSION = "graphrt graph", 2
MAX_TITLE = 4096
FLAGS = {"input": Flag.INPUT, "output": Flag.OUTPUT}
USAGES = tuple(u.value for u in Usage)


def to_json(info: GraphInfo) -> dict[str, Any]:
    """The description as objects, arrays and plain values of strict JSON."""
    fields: dict[str, Any] = plain(asdict(info))
    return {"format": FORMAT, "version": VERSION, **fields}


def loads(text: str) -> GraphInfo:
    """The description that a text holds. Raises GraphError with the path of the first field that does not fit."""
    return from_json(parsed(text, "a graph").value)


def from_json(value: object) -> GraphInfo:
    """The description that to_json() gave. Raises GraphError likewise."""
    names = ("title", "phase", "n_tokens", "tensors", "outputs", "splits", "groups", "buffers")
    at = Checked(value).fields("format", "version", *names)
    at["format"].one_of((FORMAT,))
    at["version"].whole(VERSION, VERSION)
    sizes = {name: len(list(at[name].items())) for name in ("tensors", "splits", "groups", "buffers")}
    return GraphInfo(
        at["title"].text(MAX_TITLE),
        at["phase"].one_of(("prefill", "decode", "graph")),
        at["n_tokens"].whole(),
        tuple(_tensor(t, i, sizes) for i, t in enumerate(at["tensors"].items())),
        tuple(o.whole(0, sizes["tensors"] - 1) for o in at["outputs"].items()),
        tuple(_split(s, sizes["tensors"]) for s in at["splits"].items()),
        tuple(_group(g, sizes) for g in at["groups"].items()),
        tuple(_buffer(b) for b in at["buffers"].items()),
    )


def _tensor(item: Checked, index: int, sizes: Mapping[str, int]) -> TensorInfo:
    at = item.fields(
        "index", "name", "op", "params", "op_params", "dtype", "ne", "nb", "src", "view", "flags", "layer", "flops",
        "bytes", "backend", "split", "group", "place",
    )  # fmt: skip
    op = at["op"].one_of(("NONE", *registered_ops()))
    return TensorInfo(
        index=at["index"].whole(index, index),
        name=at["name"].text(MAX_NAME - 1),
        op=op,
        params=params_of(at["params"], op),
        op_params=at["op_params"].optional(lambda words: tuple(w.whole(-(2**31), 2**31 - 1) for w in words.items(16))),
        dtype=at["dtype"].one_of(TYPES),
        ne=dims(at["ne"], 1),
        nb=dims(at["nb"], 0),
        src=tuple(s.optional(lambda s: s.whole(0, index - 1)) for s in at["src"].items(MAX_SRC)),
        view=at["view"].optional(lambda view: _view(view, index)),
        flags=tuple(flag.one_of(FLAGS) for flag in at["flags"].items(len(FLAGS))),
        layer=at["layer"].optional(Checked.whole),
        flops=at["flops"].whole(),
        bytes=at["bytes"].whole(),
        backend=at["backend"].optional(_label),
        split=at["split"].optional(lambda s: s.whole(0, sizes["splits"] - 1)),
        group=at["group"].optional(lambda g: g.whole(0, sizes["groups"] - 1)),
        place=at["place"].optional(lambda place: _place(place, sizes["buffers"])),
    )


def _label(at: Checked) -> str:
    return at.text(MAX_LABEL)


def _view(at: Checked, index: int) -> ViewInfo:
    field = at.fields("of", "offset")
    return ViewInfo(field["of"].whole(0, index - 1), field["offset"].whole())


def _place(at: Checked, buffers: int) -> PlaceInfo:
    field = at.fields("buffer", "offset", "nbytes", "address")
    address = field["address"].optional(Checked.whole)
    return PlaceInfo(field["buffer"].whole(0, buffers - 1), field["offset"].whole(), field["nbytes"].whole(), address)


def _split(at: Checked, tensors: int) -> SplitInfo:
    field = at.fields("backend", "copies")
    copies = []
    for item in field["copies"].items():
        copy = item.fields("source", "nbytes", "once")
        copies.append(
            CopyInfo(copy["source"].whole(0, tensors - 1), copy["nbytes"].whole(), copy["once"].true_or_false())
        )
    return SplitInfo(_label(field["backend"]), tuple(copies))


def _group(at: Checked, sizes: Mapping[str, int]) -> GroupInfo:
    field = at.fields("name", "split", "members", "results", "flops", "bytes")
    members, results = (
        tuple(t.whole(0, sizes["tensors"] - 1) for t in field[name].items()) for name in ("members", "results")
    )
    split = field["split"].whole(0, sizes["splits"] - 1)
    return GroupInfo(_label(field["name"]), split, members, results, field["flops"].whole(), field["bytes"].whole())


def _buffer(at: Checked) -> BufferInfo:
    field = at.fields("backend", "usage", "nbytes")
    return BufferInfo(_label(field["backend"]), field["usage"].one_of(USAGES), field["nbytes"].whole())


# ---- back into a graph ----


def graph_of(info: GraphInfo) -> Graph:
    """The graph that was described, built anew by its ops: weights and caches are leafs without data.

    Every field that does not depend on preparing must come out as the description has it, else GraphError names the
    first one that differs.
    """
    made: list[Tensor] = []
    for t in info.tensors:
        src = [made[i] if i is not None else None for i in t.src]
        flags = sum((FLAGS[flag] for flag in t.flags), Flag.NONE)
        made.append(rebuilt(f"$.tensors[{t.index}]", t.op, t.dtype, t.ne, t.name, t.params, src, flags))
    graph = Graph(*(made[i] for i in info.outputs))
    _check_same(info, describe(graph))
    return graph


_PREPARED = ("backend", "split", "group", "place")


def _check_same(info: GraphInfo, found: GraphInfo) -> None:
    """Raises GraphError for the first field in which the graph that came out differs from its description."""
    for i, (said, is_) in enumerate(zip(info.tensors, found.tensors)):
        a, b = plain(asdict(said)), plain(asdict(is_))
        for name in a:
            if name not in _PREPARED and a[name] != b[name]:
                raise GraphError(
                    f"$.tensors[{i}].{name} must be {str(b[name])[:80]} by the rules of {said.op} and of graphs, "
                    f"got {str(a[name])[:80]}; mend it or write the file anew"
                )
    if len(info.tensors) != len(found.tensors):
        raise GraphError(
            f"$.tensors must hold what the outputs need and no more, that is {len(found.tensors)} tensors, "
            f"got {len(info.tensors)}; take the others out or name their ends in $.outputs"
        )
