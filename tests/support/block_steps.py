"""Steps that append to caches of blocks and attend them: graphs and inputs. What must come out: panel_steps.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
from triton.runtime.interpreter import InterpreterBuilder

from graphrt import ops
from graphrt.dtypes import dtype
from graphrt.tensor import Tensor, new_input
from graphrt.testing import quantize
from support.panel_steps import PanelStep


def block_step(
    d: int, heads: tuple[int, int], n_kv: int, cells: list[int], kinds: tuple[str, str] = ("q8_0", "q8_0"),
    mask: np.ndarray | None = None, sinks: bool = False, n_cells: int | None = None, cell_rows: bool = True,
    rows: str = "f32", ids: str = "i64", apart: bool = False, from_cell: int = 0, n_q: int = 1,
    nan_value: bool = False, layer: str = "", **more: Any,
) -> PanelStep:  # fmt: skip
    """A step of len(cells) sequences, one token each, which goes to cells[i] of its own cache. n_kv: cells that are
    read, of n_cells, from from_cell on; mask: f16 [n_seq or 1, n_kv], None for none: cells that it hides from a
    sequence and the token's own hold bytes of 255, which is NaN; cell_rows: a cell has one row for all heads, else
    each head its own; rows: the new rows' type; apart: V's indices are others than K's; nan_value: the new V is NaN;
    layer: inputs' names begin with it; more: of flash_attn_ext."""
    rng, n_seq, (n_head, n_head_kv) = np.random.default_rng(d + n_kv), len(cells), heads
    n_cells = n_cells or n_kv
    values: dict[Tensor, np.ndarray] = {}

    def leaf(name: str, kind: str, *ne: int, given: Any = None) -> Tensor:
        t = new_input(kind, *ne, name=layer + name)
        found = rng.standard_normal(t.shape) if given is None else np.asarray(given).reshape(t.shape)
        values[t] = quantize(found.astype(np.float32), t.dtype)
        return t

    unread = np.zeros((n_seq, n_cells), bool)
    unread[:, :from_cell] = unread[:, from_cell + n_kv :] = True
    if mask is not None:
        unread[:, from_cell : from_cell + n_kv] |= np.isneginf(mask)
    for row, cell in zip(unread, cells):
        if 0 <= cell < n_cells:
            row[cell] = True

    def side(name: str, kind: str, where: Tensor) -> tuple[Tensor, Tensor]:
        """(the cache behind the step, as it is attended)."""
        if cell_rows:
            cache = leaf(f"{name}_cache", kind, d * n_head_kv, n_cells, n_seq)
            new, at = leaf(name, rows, d * n_head_kv, 1, n_seq), ops.reshape(where, 1, n_seq)
            poisoned = values[cache].reshape(n_seq, n_cells, -1)
        else:
            cache = leaf(f"{name}_cache", kind, d, n_cells, n_head_kv, n_seq)
            new, at = ops.permute(leaf(name, rows, d, n_head_kv, 1, n_seq), 0, 2, 1, 3), where
            poisoned = np.moveaxis(values[cache].reshape(n_seq, n_head_kv, n_cells, -1), 1, 2)
        poisoned.view(np.uint8)[unread] = 255
        written = ops.set_rows(new, at, cache, name=f"{name}_set")
        size, (_, cell, *far) = dtype(kind).row_size(d), written.nb
        strides = (cell, size, far[0]) if cell_rows else written.nb[1:]
        return written, ops.view(written, (d, n_kv, n_head_kv, n_seq), strides, from_cell * cell)

    where = leaf("cells", ids, 1, 1, n_seq, given=cells)
    k_set, k = side("k", kinds[0], where)
    if apart:
        where = leaf("cells of v", ids, 1, 1, n_seq, given=cells)
    v_set, v = side("v", kinds[1], where)
    if nan_value:
        next(x for t, x in values.items() if t.name == layer + "v")[:] = np.nan
    masked = None if mask is None else leaf("mask", "f16", n_kv, 1, 1, len(mask), given=mask)
    if sinks:
        more["sinks"] = leaf("sinks", "f32", n_head, given=rng.standard_normal(n_head) + np.log(n_kv))
    q = leaf("q", "f32", d, n_q, n_head, n_seq)
    out = ops.flash_attn_ext(q, k, v, masked, d**-0.5, name="out", **more)
    return PanelStep(values, k_set, v_set, out)


@contextmanager
def backwards() -> Iterator[None]:
    """Launches in Triton's interpreter whose last programs come first: who has a tile's first k-block, after who has
    the new cell's, which is further on."""
    found = InterpreterBuilder.set_grid_idx

    def from_behind(builder: Any, x: int, y: int, z: int) -> None:
        found(builder, builder.grid_dim[0] - 1 - x, y, z)

    with patch.object(InterpreterBuilder, "set_grid_idx", from_behind):
        yield
