"""The arguments of forward.py's kernel that writes a step's k and v (append.py)."""

from __future__ import annotations

from typing import Any

from graphrt.backends.triton.context import Context
from graphrt.backends.triton.kernels.flash_attn.append import Caches, NewRows
from graphrt.backends.triton.kernels.flash_attn.append_fusions import PanelAppend, new_value_strides
from graphrt.backends.triton.kernels.quantize import stored


def panel_arguments(found: PanelAppend, ctx: Context) -> dict[str, Any]:
    """What the portable kernel is given that writes the row itself, in the place of its own of these names."""
    k_rows, v_rows = found.k_set["rows"], found.v_set["rows"]
    v_strides = new_value_strides(found.v_set, found.attention["v"])
    assert v_strides is not None
    v_head, v_seq = (n // v_rows.dtype.type_size for n in v_strides)
    new = NewRows(
        ctx.view(k_rows).data, ctx.view(v_rows).data, ctx.view(found.k_set["ids"]).data,
        k_rows.nb[3] // k_rows.dtype.type_size, v_head, v_seq, found.k_set.ne[1],
    )  # fmt: skip
    (k, _), (v, _) = (stored(ctx.view(t["target"])) for t in (found.k_set, found.v_set))
    return {"new": new, "caches": Caches(k, v)}
