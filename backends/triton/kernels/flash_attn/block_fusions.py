"""Which attentions over caches of blocks become one step with the writing of the step's key and value."""

from __future__ import annotations

from collections.abc import Iterator

from graphrt.backend import Group
from graphrt.backends.triton.kernels.flash_attn.append_fusions import BlockAppend, appends_to_blocks, why_blocks_apart
from graphrt.backends.triton.kernels.products.rotated_fusions import rotated_rows
from graphrt.backends.triton.kernels.rope_fusions import rotations
from graphrt.fusion import Nodes
from graphrt.op import made_by


def block_append(nodes: Nodes) -> Iterator[Group]:
    """SET_ROWS of one token's k and v a sequence into caches of which one is of blocks, and the attention of both;
    where q and k are rotated, and their products can do that, these with the rotation as a group before it.

    Where the products can't, the rotation has a launch in any case, which may as well write the cache.
    """
    written = set(nodes.of("SET_ROWS"))
    turned = dict(rotated_rows(nodes))
    rotated = {attention for attention, _ in rotations(nodes)}
    for attention in nodes.of("FLASH_ATTN_EXT"):
        if not appends_to_blocks(attention) or why_blocks_apart(attention) is not None:
            continue
        found = BlockAppend(made_by(attention["k"]), made_by(attention["v"]), attention)
        if not {found.k_set, found.v_set} <= written or (attention in rotated and attention not in turned):
            continue
        if attention in turned:
            yield turned[attention]
        yield Group([*found], kernel="block_append", results=[*found], captured=found)
