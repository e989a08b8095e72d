"""Which attentions become one step with the log-sum-exp of the same scores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from graphrt.backend import Group
from graphrt.fusion import Nodes
from graphrt.tensor import Tensor


class Attention(NamedTuple):
    """FLASH_ATTN_EXT, FLASH_ATTN_LSE, or both of the same sources."""

    out: Tensor | None = None
    lse: Tensor | None = None

    @property
    def nodes(self) -> list[Tensor]:
        return [node for node in self if node is not None]


def attention_of(node: Tensor) -> Attention:
    """One of the two by itself."""
    return Attention(node) if node.op == "FLASH_ATTN_EXT" else Attention(lse=node)


def attention_lse(nodes: Nodes) -> Iterator[Group]:
    """FLASH_ATTN_EXT and the FLASH_ATTN_LSE of the same sources."""
    for attention in nodes.of("FLASH_ATTN_EXT"):
        lse = next((n for n in nodes.of("FLASH_ATTN_LSE") if _same_scores(attention, n)), None)
        if lse is not None:
            yield Group(
                [attention, lse], kernel="attention_lse", results=[attention, lse], captured=Attention(attention, lse)
            )


def _same_scores(attention: Tensor, lse: Tensor) -> bool:
    same = all(attention[name] is lse[name] for name in ("q", "k", "mask", "sinks"))
    return same and attention.params == lse.params
