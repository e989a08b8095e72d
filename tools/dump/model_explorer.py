"""`graphrt dump --format model-explorer`: JSON for Google's ai-edge-model-explorer (0.1), with node data to overlay.

`model-explorer graph.json` opens it; a file of node data is dropped onto the picture. Layers and fusions are
namespaces, which it folds and unfolds itself, and it marks layers that are alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from graphrt.printing import human_bytes
from graphrt.tools.inspect.describe import GraphInfo, TensorInfo
from graphrt.tools.inspect.labels import (
    group_text,
    heading,
    nb_text,
    params_text,
    place_text,
    role,
    si,
    source_text,
    type_text,
    view_text,
)
from graphrt.tools.inspect.overlay import Overlay

GRAPH_ID = "graphrt"
#: From the least to the most of a value: viridis backwards, which colour-blind people can read.
GRADIENT = (
    {"stop": 0, "bgColor": "#fde725", "textColor": "black"},
    {"stop": 0.5, "bgColor": "#21918c", "textColor": "white"},
    {"stop": 1, "bgColor": "#440154", "textColor": "white"},
)


def collection(info: GraphInfo) -> dict[str, Any]:
    """A GraphCollection of one Graph, by the names of model_explorer/graph_builder.py."""
    flops, moved = info.work
    about = {"graph": heading(info), "nodes": str(len(info.nodes)), "FLOP": si(flops), "bytes": human_bytes(moved)}
    graph = {
        "id": GRAPH_ID,
        "nodes": [_node(info, t) for t in info.tensors],
        "groupNodeAttributes": {"": about},
    }
    return {"label": heading(info), "graphs": [graph]}


def node_data(overlay: Overlay) -> dict[str, Any]:
    """A file of node data. What is not finite is left out, since JSON has no number for it."""
    results = {str(i): {"value": value} for i, value in overlay.values.items() if math.isfinite(value)}
    return {GRAPH_ID: {"name": overlay.name, "results": results, "gradient": list(GRADIENT)}}


def _node(info: GraphInfo, t: TensorInfo) -> dict[str, Any]:
    attrs = {
        "name": t.name, "type": type_text(t), "nb": nb_text(t), "sources": source_text(info, t),
        "parameters": params_text(t), "view": view_text(info, t), "backend": t.backend or "",
        "split": "" if t.split is None else str(t.split), "group": group_text(info, t), "place": place_text(info, t),
        "FLOP": si(t.flops), "bytes": human_bytes(t.bytes),
    }  # fmt: skip
    return {
        "id": str(t.index),
        "label": role(info, t),
        "namespace": _namespace(info, t),
        "attrs": _pairs(attrs),
        "incomingEdges": [
            {"sourceNodeId": str(s), "sourceNodeOutputId": "0", "targetNodeInputId": str(i)}
            for i, s in enumerate(t.src)
            if s is not None
        ],
        "outputsMetadata": [{"id": "0", "attrs": _pairs({"tensor_name": t.name, "tensor_shape": type_text(t)})}],
    }


def _pairs(values: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": value} for key, value in values.items() if value]


def _namespace(info: GraphInfo, t: TensorInfo) -> str:
    """`layer 7/norm_mul 12`: the layer, and the fusion where it stays inside of one layer."""
    parts = [f"layer {t.layer}"] if t.layer is not None else []
    group = info.groups[t.group] if t.group is not None else None
    if group is not None and len(group.members) > 1 and all(info.tensors[i].layer == t.layer for i in group.members):
        parts.append(f"{group.name} {t.group}".replace("/", "_"))
    return "/".join(parts)
