"""Which attentions over caches of blocks become one step with the writing of the step's key and value."""

from __future__ import annotations

from collections.abc import Iterator

from graphrt.backend import Group
from graphrt.backends.triton.kernels.flash_attn.append_fusions import BlockAppend, appends_to_blocks, why_blocks_apart
from graphrt.backends.triton.kernels.products.rotated_fusions import rotated_rows
from graphrt.backends.triton.kernels.rope_fusions import rotations
from graphrt.fusion import Nodes
from graphrt.op import made_by
from graphrt.tensor import Tensor

#: Cells of a ring from which on long_block_append() takes it. An 8B on an H200, us a layer that are gained: in 16,576
#: cells, 16,384 in use, +1.2 (q8_0) and +1.1 (q4_0), in 16,704 with 512 in use +0.2 and 0.0; in 8,384, 8,192 in use,
#: +0.3 and +1.0; in 704, 512 in use, -1.4 and -1.2. A graph is the same however many cells are in use.
LONG_RING = 16_384


def block_append(nodes: Nodes) -> Iterator[Group]:
    """SET_ROWS of one token's k and v a sequence into caches of which one is of blocks, and the attention of both;
    where q and k are rotated, and their products can do that, these with the rotation as a group before it.

    Where the products can't, the rotation has a launch in any case, which may as well write the cache.
    """
    for found, turned in _appends(nodes):
        yield from _groups(found, turned)


def long_block_append(nodes: Nodes) -> Iterator[Group]:
    """The same where it never lost: one sequence, a long ring of q8_0 or q4_0, heads of 128, products that rotate."""
    for found, turned in _appends(nodes):
        if turned is not None and _never_lost(found.attention):
            yield from _groups(found, turned)


def _never_lost(attention: Tensor) -> bool:
    """As it was timed: by the decode kernel for few rows of a KV head."""
    q, k, v, params = attention["q"], attention["k"], attention["v"], attention.params
    stored = k.dtype.name == v.dtype.name and k.dtype.name in ("q8_0", "q4_0")
    sizes = k.ne[0] == v.ne[0] == 128 and k.ne[1] >= LONG_RING and k.ne[3] == 1 and q.ne[2] <= 8 * k.ne[2]
    plain = not (params.score or params.dropout_p or params.prec) and attention["attn_bias"] is None
    return stored and sizes and plain


def _groups(found: BlockAppend, turned: Group | None) -> Iterator[Group]:
    if turned is not None:
        yield turned
    yield Group([*found], kernel="block_append", results=[*found], captured=found)


def _appends(nodes: Nodes) -> Iterator[tuple[BlockAppend, Group | None]]:
    """(what an attention's launch may write beside, the products that rotate q and k for it)."""
    written = set(nodes.of("SET_ROWS"))
    turned = dict(rotated_rows(nodes))
    rotated = {attention for attention, _ in rotations(nodes)}
    for attention in nodes.of("FLASH_ATTN_EXT"):
        if not appends_to_blocks(attention) or why_blocks_apart(attention) is not None:
            continue
        found = BlockAppend(made_by(attention["k"]), made_by(attention["v"]), attention)
        if {found.k_set, found.v_set} <= written and (attention not in rotated or attention in turned):
            yield found, turned.get(attention)
