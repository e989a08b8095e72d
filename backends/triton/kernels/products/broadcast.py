"""Which matrix of the weights serves which tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphrt.tensor import Tensor


@dataclass(frozen=True)
class Broadcast:
    """`count` batches of `tokens` rows of x each, one after the other.

    Batch i is for matrix (i // matrices2 // ratio3) * matrices2 + i % matrices2; matrices2: of dimension 2.
    """

    tokens: int
    count: int = 1
    matrices2: int = 1
    ratio3: int = 1

    @property
    def one_each(self) -> bool:
        """There are several matrices, and batch i is for matrix i."""
        return self.count > 1 and self.ratio3 == 1


def broadcast_of(w: Tensor, x_ne: Sequence[int]) -> Broadcast:
    """Which matrix of w serves which tokens of x, with as many tokens together as can be."""
    (n, b2, b3), (a2, a3) = x_ne[1:], w.ne[2:]
    if a2 == 1 and a3 == 1:
        return Broadcast(n * b2 * b3)
    if a2 == 1:
        return Broadcast(b3 // a3 * b2 * n, a3)
    return Broadcast(b2 // a2 * n, a2 * b3, a2, b3 // a3)
