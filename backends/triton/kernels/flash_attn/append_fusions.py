"""Which attentions become one step with the writing of the step's key and value, over keys in panels or blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from graphrt.backend import Group
from graphrt.fusion import Nodes
from graphrt.op import made_by
from graphrt.ops.flash_attn_ext import is_scaled
from graphrt.ops.key_panels import PANELS, ROWS
from graphrt.ops.score import built_in
from graphrt.tensor import Tensor


class PanelAppend(NamedTuple):
    """SET_ROWS of a step's k into panels and of its v into rows, one token a sequence, and the attention of both."""

    k_set: Tensor
    v_set: Tensor
    attention: Tensor


class BlockAppend(NamedTuple):
    """The same of caches of rows, one of which at least is of blocks."""

    k_set: Tensor
    v_set: Tensor
    attention: Tensor


def appends_to_blocks(attention: Tensor) -> bool:
    """Whether an attention's keys and values lie in rows that its step has written, some of them rounded to blocks."""
    k, v = attention["k"], attention["v"]
    written = all(made_by(t).op == "SET_ROWS" for t in (k, v))
    return written and attention.params.k_layout == ROWS and (k.dtype.is_quantized or v.dtype.is_quantized)


def why_blocks_apart(attention: Tensor) -> str | None:
    """Why an attention that appends_to_blocks() can't have that in its launch, as far as it tells by itself: a
    sentence, or None."""
    k_set, v_set = made_by(attention["k"]), made_by(attention["v"])
    if k_set.root is v_set.root:
        return "v must be written into other memory than k"
    if attention["q"].ne[1] != 1:
        return f"it is for one token a sequence, this step has {attention['q'].ne[1]}"
    if is_scaled(attention):
        return "it has no scales of k, v or the result"
    if not (_same_cells(k_set["ids"], v_set["ids"], attention["k"].ne[3]) and k_set.ne[1] == v_set.ne[1]):
        return "k and v must go to the same cells of equally many, one a sequence"
    if new_row_strides(k_set, attention["k"]) is None or new_row_strides(v_set, attention["v"]) is None:
        return "a new row must be one piece for each head, and the caches be read from their first cell on as they lie"
    return None


def panel_append(nodes: Nodes) -> Iterator[Group]:
    """SET_ROWS of one token's k a sequence into keys in panels, SET_ROWS of its v, and the attention that reads
    both."""
    written = set(nodes.of("SET_ROWS"))
    for attention in nodes.of("FLASH_ATTN_EXT"):
        if not appends_to_panels(attention) or why_not_appended(attention) is not None:
            continue
        found = PanelAppend(made_by(attention["k"]), made_by(attention["v"]), attention)
        if {found.k_set, found.v_set} <= written:
            yield Group([*found], kernel="panel_append", results=[*found], captured=found)


def appends_to_panels(attention: Tensor) -> bool:
    """Whether an attention's keys lie in panels that its step has written into."""
    return attention.params.k_layout == PANELS and made_by(attention["k"]).op == "SET_ROWS"


def why_not_appended(attention: Tensor) -> str | None:
    """Why an attention that appends_to_panels() can't have that in its launch: a sentence, or None."""
    k_set, v_set = made_by(attention["k"]), made_by(attention["v"])
    if v_set.op != "SET_ROWS" or k_set.root is v_set.root:
        return "the step's v must be written by a SET_ROWS of its own, into other memory than k"
    if attention["q"].ne[1] != 1:
        return f"it is for one token a sequence, this step has {attention['q'].ne[1]}"
    if v_set.dtype.is_quantized:
        return f"it writes rows of floats, those of {v_set.dtype.name} are rounded by a launch before it"
    if is_scaled(attention):
        return "it has no scales of k, v or the result"
    params = built_in(attention.params)
    if params.score or params.dropout_p or attention["attn_bias"] is not None:
        return "it adds the new key to a tile's sums by itself, without a score function, dropout and attn_bias"
    if not (_same_cells(k_set["ids"], v_set["ids"], attention["k"].ne[3]) and k_set.ne[1] == v_set.ne[1]):
        return "k and v must go to the same cells of equally many, one a sequence"
    if not _is_panels_row(k_set, attention["k"]) or new_row_strides(v_set, attention["v"]) is None:
        return "a new row must be one piece for each head, and the caches be read from their first cell on as they lie"
    return None


def _same_cells(a: Tensor, b: Tensor, n_seq: int) -> bool:
    """The same index for each sequence, maybe seen in two shapes."""
    alike = a.root is b.root and a.view_offs == b.view_offs and a.dtype is b.dtype
    return alike and a.n_elements == b.n_elements == n_seq and a.is_contiguous and b.is_contiguous


def _is_same_memory(t: Tensor, of: Tensor) -> bool:
    """`t` is the first rows of `of`."""
    whole = t.ne[0] == of.ne[0] and t.ne[2:] == of.ne[2:] and t.ne[1] <= of.ne[1]
    return whole and t.view_offs == of.view_offs and t.nb == of.nb


def _is_panels_row(k_set: Tensor, k: Tensor) -> bool:
    """The new key's heads lie side by side in one piece a sequence."""
    rows = k_set["rows"]
    size = rows.dtype.type_size
    one = rows.ne[1] == 1 and rows.nb[0] == size and rows.nb[2] == rows.ne[0] * size
    return one and _is_same_memory(k, k_set)


def new_row_strides(written: Tensor, x: Tensor) -> tuple[int, int] | None:
    """Bytes between the heads and between the sequences of a step's k or v, `x` being the cache as it is attended: of
    caches that have a row for each head, or one for all heads of a cell; None for others, and for rows that are not one
    token a sequence."""
    rows, (d, _, heads, n_seq) = written["rows"], x.ne
    if rows.ne[1] != 1 or rows.nb[0] != rows.dtype.type_size:
        return None
    if _is_same_memory(x, written):
        return rows.nb[2], rows.nb[3]
    cell = written.ne[0]
    at_start = x.view_offs == written.view_offs and x.ne[1] <= written.ne[1]
    side_by_side = x.nb[1] == written.nb[1] and x.nb[2] == x.dtype.row_size(d)
    side_by_side = side_by_side and (n_seq == 1 or x.nb[3] == written.nb[2])
    if at_start and side_by_side and cell == d * heads and written.ne[2:] == (n_seq, 1):
        return d * rows.dtype.type_size, rows.nb[2]
    return None
