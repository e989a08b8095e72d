"""`graphrt dump --format html`: one file that needs no network. Layers fold and unfold, a click on a row brings its
details, values lie beside the rows as bars. page.html is the page; this fills in its data."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graphrt.printing import human_bytes
from graphrt.tools.dump.text import header, section_title
from graphrt.tools.inspect.describe import GraphInfo, TensorInfo
from graphrt.tools.inspect.fold import fold, ranges
from graphrt.tools.inspect.labels import (
    group_text,
    heading,
    params_text,
    place_text,
    role,
    source_text,
    type_text,
    view_text,
)
from graphrt.tools.inspect.overlay import Overlay

PAGE = Path(__file__).with_name("page.html")
SLOT = "/*DATA*/"


def page(info: GraphInfo, overlays: Sequence[Overlay], opened: int | None = None) -> str:
    """The page. opened: a layer to unfold; without one, the first of each kind is. With
    #unfolded behind its address all are."""
    data = {
        "title": heading(info),
        "about": header(info)[1:],
        "tensors": [_tensor(info, t) for t in info.tensors],
        "sections": _sections(info, opened),
        "overlays": [_overlay(o) for o in overlays],
    }
    text = json.dumps(data, allow_nan=False).replace("<", "\\u003c")  # nothing in it can end the script
    return PAGE.read_text(encoding="utf-8").replace(SLOT, text, 1)


def _tensor(info: GraphInfo, t: TensorInfo) -> dict[str, Any]:
    group = group_text(info, t)
    details: dict[str, str | int | None] = {
        "number": f"#{t.index}", "op": role(info, t), "type": type_text(t), "ne": str(list(t.ne)),
        "nb": str(list(t.nb)), "sources": source_text(info, t), "parameters": params_text(t),
        "view": view_text(info, t), "backend": t.backend, "split": t.split, "group": group,
        "place": place_text(info, t),
        "size": human_bytes(t.place.nbytes) if t.place is not None else "", "flags": ", ".join(t.flags),
    }  # fmt: skip
    return {
        "number": t.index, "name": t.name, "role": role(info, t), "type": type_text(t), "leaf": t.is_leaf,
        "src": t.sources(), "group": group,
        "details": [[key, str(v)] for key, v in details.items() if v not in (None, "")],
    }  # fmt: skip


def _sections(info: GraphInfo, opened: int | None) -> list[dict[str, Any]]:
    """Every layer by itself, with what it is like."""
    alike = {layer: s.layers for s in fold(info, opened).sections for layer in s.layers}
    found = []
    for section in fold(info, alike=False).sections:
        layer = section.layers[0] if section.layers else None
        same = alike[layer] if layer is not None else ()
        first = layer is None or layer == opened or (opened is None and layer == same[0])
        note = f"alike: {ranges(same)}" if len(same) > 1 else ""
        title = section_title(info, section)
        found.append({"title": title, "note": note, "open": first, "tensors": section.tensors})
    return found


def _overlay(overlay: Overlay) -> dict[str, Any]:
    """A bar for each finite value, and the text of every one."""
    finite = {i: v for i, v in overlay.values.items() if math.isfinite(v)}
    return {
        "name": overlay.name,
        "values": {i: finite.get(i, 0) for i in overlay.values},
        "texts": {i: overlay.text(v) for i, v in overlay.values.items()},
        "most": max(finite.values(), default=0),
    }
