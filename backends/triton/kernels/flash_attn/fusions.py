"""Which attentions become one step with the log-sum-exp of the same scores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from graphrt.backend import Group
from graphrt.fusion import Nodes
from graphrt.tensor import Tensor

#: An attention, and the node that has the logs of its denominators, and the sources that decide them.
LSE = {
    "FLASH_ATTN_EXT": ("FLASH_ATTN_LSE", ("q", "k", "mask", "sinks")),
    "FLASH_ATTN_VARLEN": (
        "FLASH_ATTN_VARLEN_LSE", ("q", "k", "q_starts", "lengths", "block_table", "k_starts", "sinks",
        "prefixes"),
    ),
}  # fmt: skip


class Attention(NamedTuple):
    """FLASH_ATTN_EXT, FLASH_ATTN_LSE, or both of the same sources; the same of FLASH_ATTN_VARLEN."""

    out: Tensor | None = None
    lse: Tensor | None = None

    @property
    def nodes(self) -> list[Tensor]:
        return [node for node in self if node is not None]


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


def _same_scores(attention: Tensor, lse: Tensor, sources: Sequence[str]) -> bool:
    return attention.params == lse.params and all(attention[name] is lse[name] for name in sources)
