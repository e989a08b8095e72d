"""Cells: where the tokens of sequences lie in a cache, and what a query sees of them."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]


class Cells(ABC):
    """The cells of the layers of one kind, the same in each of these layers.

    size: cells of a sequence; positions: int32 [n_seq, size], the position in each cell of a sequence, -1: it is empty;
    window: how many positions back a token sees, itself included, 0 for all. The last two are what KQ_MASK takes.
    """

    def __init__(self, size: int, window: int, n_seq: int = 1) -> None:
        self.size = size
        self.window = window
        self.positions = np.full((n_seq, size), -1, np.int32)
        self._rows = np.arange(n_seq)[:, None]

    @abstractmethod
    def take(self, positions: Positions) -> Positions:
        """The cells of new tokens, noted as taken. positions: [n_seq, n_tokens], rising one by one; cells: the same."""

    @abstractmethod
    def where(self, positions: Positions) -> Positions:
        """The cells of tokens at these positions, whether they are there or not. Any shape; cells: the same."""

    def saved(self) -> npt.NDArray[np.int32]:
        """What restore() brings back."""
        return self.positions.copy()

    def restore(self, positions: npt.NDArray[np.int32]) -> None:
        """The cells as saved() found them, whatever was written into them since."""
        self.positions[:] = positions

    def holds(self, position: int, seq: int = 0) -> bool:
        """Whether all tokens before `position` that a token there sees are in a sequence's cells."""
        first = max(0, position - self.window + 1) if self.window else 0
        return bool(np.isin(np.arange(first, position), self.positions[seq]).all())

    def clear(self) -> None:
        """Empties all cells."""
        self.positions[:] = -1

    def forget_from(self, position: int, seq: int = 0) -> None:
        """Empties a sequence's cells of tokens from `position` on. What they overwrote was out of every later token's
        window."""
        held = self.positions[seq]
        held[held >= position] = -1


class Ring(Cells):
    """A token at position p lies in cell p mod size."""

    def take(self, positions: Positions) -> Positions:
        cells = self.where(positions)
        self.positions[self._rows, cells] = positions
        return cells

    def where(self, positions: Positions) -> Positions:
        return positions % self.size
