"""The arguments of the attention kernels that write a step's k and v (append.py, append_blocks.py)."""

from __future__ import annotations

from typing import Any

from graphrt.backends.triton.context import Context
from graphrt.backends.triton.kernels.flash_attn.append import Caches, NewRows
from graphrt.backends.triton.kernels.flash_attn.append_fusions import BlockAppend, PanelAppend, new_row_strides
from graphrt.backends.triton.kernels.quantize import stored
from graphrt.tensor import Tensor


def panel_arguments(found: PanelAppend, ctx: Context) -> dict[str, Any]:
    """What the portable kernel is given that writes a row of keys in panels itself, in the place of its own of these
    names."""
    k_rows = found.k_set["rows"]  # whose rows are panels' parts of the heads, side by side
    head = found.attention["q"].ne[0] * k_rows.dtype.type_size
    return _arguments(found, (head, k_rows.nb[3]), ctx)


def block_arguments(found: BlockAppend, ctx: Context) -> dict[str, Any]:
    """The same of keys in rows."""
    return _arguments(found, _row_strides(found.k_set, found.attention["k"]), ctx)


def _arguments(found: PanelAppend | BlockAppend, k_strides: tuple[int, int], ctx: Context) -> dict[str, Any]:
    """k_strides: bytes between heads and sequences of the new k."""
    k_rows, v_rows = found.k_set["rows"], found.v_set["rows"]
    k_head, k_seq = (n // k_rows.dtype.type_size for n in k_strides)
    v_head, v_seq = (n // v_rows.dtype.type_size for n in _row_strides(found.v_set, found.attention["v"]))
    new = NewRows(
        ctx.view(k_rows).data, ctx.view(v_rows).data, ctx.view(found.k_set["ids"]).data, k_head, k_seq, v_head, v_seq,
        found.k_set.ne[1],
    )  # fmt: skip
    (k, _), (v, _) = (stored(ctx.view(t["target"])) for t in (found.k_set, found.v_set))
    return {"new": new, "caches": Caches(k, v)}


def _row_strides(written: Tensor, x: Tensor) -> tuple[int, int]:
    strides = new_row_strides(written, x)
    assert strides is not None
    return strides
