"""Keys in panels: a layout of an attention's k in which neighbouring keys lie side by side, 16 bytes of each.

    rows    k [D_k, n_kv, n_head_kv, n_seq]               row by row, as ggml has it
    panels  k [x, n_kv, D_k / x * n_head_kv, n_seq]       x: the elements of 16 bytes; D_k is a whole number of x

Element d of key l of head h lies at (d % x, l, h * (D_k / x) + d // x). One element of each of 32 neighbouring keys, as
the threads of a warp ask for it that have a key each, is in 32 rows without panels and in 512 bytes with them.
"""

from __future__ import annotations

from graphrt.arguments import checked
from graphrt.dtypes import DType
from graphrt.errors import GraphError
from graphrt.op import require
from graphrt.ops.copy import cont
from graphrt.ops.rows import set_rows
from graphrt.ops.view import permute, reshape
from graphrt.tensor import Tensor

ROWS, PANELS = "rows", "panels"
#: Bytes of a key that lie side by side.
PANEL_BYTES = 16


def panel_width(kind: DType) -> int:
    """Elements of a panel's row: 4 of f32, 8 of f16, 16 of 8-bit floats. Raises GraphError for blocks and integers."""
    if kind.is_quantized or kind.kind == "int":
        raise GraphError(f"keys in panels are of a float type, got {kind.name}")
    return PANEL_BYTES // kind.type_size


def key_heads(k: Tensor, d: int, layout: str) -> int:
    """The heads of an attention's k, whose rows have d elements."""
    return k.ne[2] if layout == ROWS else k.ne[2] * k.ne[0] // d


def check_layout(op: str, q: Tensor, k: Tensor, layout: str) -> None:
    """Raises GraphError for a k that does not lie as the layout says."""
    require(layout in (ROWS, PANELS), op, f"k_layout must be {ROWS!r} or {PANELS!r}, got {layout!r}", k)
    if layout == ROWS:
        require(q.ne[0] == k.ne[0], op, "q and k must have equal head size ne[0]", q, k)
        return
    x = panel_width(k.dtype)
    rule = f"k in panels of {k.dtype.name} is [{x}, n_kv, D_k / {x} * n_head_kv, n_seq], D_k a whole number of {x}"
    fits = k.ne[0] == x and q.ne[0] % x == 0 and k.ne[2] % (q.ne[0] // x) == 0
    require(fits, op, f"{rule}; graphrt.ops.key_panels.key_panels() makes it of rows", q, k)


@checked(GraphError)
def key_panels(k: Tensor, name: str = "") -> Tensor:
    """A copy of k in panels, for flash_attn_ext(k_layout="panels"): result[i, l, h * (D / x) + p, s] = k[p * x + i, l,
    h, s].

    k: [D, n_kv, n_head_kv, n_seq] of a float type, contiguous, D a whole number of x, the elements of 16 bytes. The
    result has k's type, [x, n_kv, D / x * n_head_kv, n_seq]. Source: the layout of key caches in vLLM's PagedAttention
    (arXiv 2309.06180), here without pages; ggml has no such op. Raises GraphError for other types and sizes.
    """
    x = panel_width(k.dtype)
    require(k.ne[0] % x == 0, "KEY_PANELS", f"rows of k must be whole panels of {x} elements", k)
    d, n, heads, n_seq = k.ne
    apart = permute(reshape(k, x, d // x, n, heads * n_seq), 0, 2, 1, 3)
    return reshape(cont(apart), x, n, d // x * heads, n_seq, name=name)


@checked(GraphError)
def set_key_panels(rows: Tensor, ids: Tensor, target: Tensor, name: str = "") -> Tensor:
    """Writes keys by index into a cache in panels, in its type: result[i, ids[l], h * (D / x) + p] = rows[p * x + i, h,
    l].

    rows: f32 or f16 [D, n_head_kv, n_ids, n_seq], contiguous, as a step's keys come; ids: i64 or i32 [n_ids], or
    [n_ids, 1, n_seq] for cells of each sequence's own; target: [x, n_kv, D / x * n_head_kv, n_seq], x the elements of
    16 bytes. The result is a view of `target`. SET_ROWS does it: each 16 bytes are a row of the target. Equal indices
    leave either key; one outside 0..n_kv-1 writes nothing. Source: as key_panels(). Raises GraphError for other types
    and sizes.
    """
    x = panel_width(target.dtype)
    d, heads, n, n_seq = rows.ne
    fits = d % x == 0 and target.ne == (x, target.ne[1], d // x * heads, n_seq)
    require(fits, "SET_ROWS", f"keys [D, n_head_kv, n] go into panels [{x}, n_kv, D / {x} * n_head_kv]", rows, target)
    return set_rows(permute(reshape(rows, x, d // x * heads, n, n_seq), 0, 2, 1, 3), ids, target, name=name)
