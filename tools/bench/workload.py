"""One test of `graphrt bench MODEL`: so many tokens, read at once or generated, at a depth."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Test:
    """kind: "pp" reads n tokens at once, "tg" generates n tokens one by one; depth: tokens in the cache before that.

    batch: how many sequences one graph has; their tokens are counted together.
    """

    kind: str
    n: int
    depth: int = 0
    batch: int = 1

    def __str__(self) -> str:
        times = f" x {self.batch}" if self.batch > 1 else ""
        return f"{self.kind}{self.n}{times}" + (f" @ d{self.depth}" if self.depth else "")

    @property
    def start(self) -> int:
        """The position of the first timed token. One token at least is in the cache when generating starts."""
        return max(self.depth, 1) if self.kind == "tg" else self.depth

    @property
    def end(self) -> int:
        return self.start + self.n

    def steps(self, n_batch: int) -> int:
        """How many graphs are run."""
        return self.n if self.kind == "tg" else math.ceil(self.n / n_batch)
