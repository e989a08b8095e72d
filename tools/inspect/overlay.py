"""Overlays: a value for nodes by name, from a tool's JSON or a description's own figures, to lay over a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from graphrt.errors import GraphError
from graphrt.printing import human_bytes
from graphrt.tools.common import read_text, write_text
from graphrt.tools.inspect.checked_json import Checked, parsed
from graphrt.tools.inspect.describe import GraphInfo
from graphrt.tools.inspect.labels import si


@dataclass(frozen=True)
class Overlay:
    """name: what it is; values: by the tensor's index; text: how a value is spelled."""

    name: str
    values: dict[int, float]
    text: Callable[[float], str]


def overlays(info: GraphInfo, files: Sequence[Path] = ()) -> list[Overlay]:
    """Those of the files, then FLOP and bytes of each node. Raises GraphError for a file that does not fit."""
    nodes = [t for t in info.nodes if t.flops or t.bytes]
    own = [
        Overlay("FLOP", {t.index: t.flops for t in nodes}, si),
        Overlay("bytes", {t.index: t.bytes for t in nodes}, human_bytes),
    ]
    return [*(from_file(info, path) for path in files), *own]


def write_overlay(path: str | Path, values: Mapping[str, float]) -> None:
    """Writes values by node name as from_file() reads them."""
    spelled = {name: value if math.isfinite(value) else str(value) for name, value in values.items()}
    write_text(path, json.dumps(spelled, allow_nan=False) + "\n")


def from_file(info: GraphInfo, path: Path) -> Overlay:
    """An overlay from a JSON file of {"node's name": number}, called as the file is."""
    found = parsed(read_text(str(path)), f"an overlay, {str(path)!r},")
    if not isinstance(found.value, dict):
        found.refuse("an object of numbers by node name")
    by_name = {name: Checked(value, f"$.{name[:80]}").number() for name, value in found.value.items()}
    values = {t.index: by_name[t.name] for t in info.tensors if t.name in by_name}
    missing = by_name.keys() - {t.name for t in info.tensors}
    if missing:
        shown = ", ".join(repr(name[:80]) for name in sorted(missing)[:3])
        raise GraphError(
            f"an overlay must name tensors of this graph, {str(path)!r} names {len(missing)} others: {shown}; "
            f"give the model, phase and backend that it was made with"
        )
    return Overlay(path.stem, values, lambda value: f"{value:.6g}")
