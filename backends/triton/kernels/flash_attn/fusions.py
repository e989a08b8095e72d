"""Which attentions become one step with the log-sum-exp of the same scores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from graphrt.backend import Group
from graphrt.fusion import Nodes
from graphrt.ops.flash_attn_ext import is_scaled
from graphrt.tensor import Tensor

#: An attention, and the node that has the logs of its denominators, and the sources that decide them.
LSE = {
    "FLASH_ATTN_EXT": ("FLASH_ATTN_LSE", ("q", "k", "mask", "sinks", "attn_bias")),
    "FLASH_ATTN_VARLEN": (
        "FLASH_ATTN_VARLEN_LSE", ("q", "k", "q_starts", "lengths", "block_table", "k_starts", "sinks",
        "prefixes", "mask"),
    ),
}  # fmt: skip


#: The gradients of attentions.
BACK = ("FLASH_ATTN_BACK", "FLASH_ATTN_VARLEN_BACK")


class Attention(NamedTuple):
    """FLASH_ATTN_EXT, FLASH_ATTN_LSE, or both of the same sources; the same of FLASH_ATTN_VARLEN."""

    out: Tensor | None = None
    lse: Tensor | None = None

    @property
    def nodes(self) -> list[Tensor]:
        return [node for node in self if node is not None]


class Gradients(NamedTuple):
    """Of one attention: nodes of the same sources and parameters, but for whose gradient it is."""

    nodes: tuple[Tensor, ...]


def attention_of(node: Tensor) -> Attention:
    """One of the two by itself."""
    return Attention(node) if node.op in LSE else Attention(lse=node)


def attention_lse(nodes: Nodes) -> Iterator[Group]:
    """An attention and the node of its denominators, of the same sources."""
    for op, (lse_op, sources) in LSE.items():
        for attention in nodes.of(op):
            lse = next((n for n in nodes.of(lse_op) if _same_scores(attention, n, sources)), None)
            if lse is not None:
                found = Attention(attention, lse)
                yield Group([attention, lse], kernel="attention_lse", results=[attention, lse], captured=found)


def attention_back(nodes: Nodes) -> Iterator[Group]:
    """All gradients of an attention that are wanted."""
    groups: dict[object, list[Tensor]] = {}
    for node in nodes.of(*BACK):
        groups.setdefault((node.op, node.params.attn, *node.sources_by_name().items()), []).append(node)
    for found in groups.values():
        if len(found) > 1 and len({node.params.of for node in found}) == len(found):
            yield Group(found, kernel="attention_back", results=found, captured=Gradients(tuple(found)))


def _same_scores(attention: Tensor, lse: Tensor, sources: Sequence[str]) -> bool:
    """Dropout is no matter: denominators are of all weights."""
    plain = attention.params
    if is_scaled(attention):
        return False
    if getattr(plain, "dropout_p", 0.0):
        plain = replace(plain, dropout_p=0.0, seed=0, offset=0)
    return plain == lse.params and all(attention[name] is lse[name] for name in sources)
