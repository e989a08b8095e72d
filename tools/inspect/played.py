"""Ranks that are not there, as a command line names them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Played:
    """Ranks that a model is cut over, all in one graph: how many, in how many stages, and whether experts are shared
    out whole."""

    ranks: int = 1
    stages: int = 1
    ep: bool = False

    def __str__(self) -> str:
        stages = f" in {self.stages} stages" if self.stages > 1 else ""
        return f", {self.ranks} ranks{stages}" if self.ranks > 1 else ""
