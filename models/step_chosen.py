"""A step that leaves next tokens on a board. A step of one token is one graph, which is begun once, with one copy of
inputs, and keeps no logits. Others are two: the first leaves logits, the second chooses. So is one whose text waits for
what the host finds, such as a grammar's mask: it may become known while the device reads the token. And so are larger
steps: few graphs then serve all ways to choose."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from graphrt.execute import Executable
from graphrt.models.choice_rows import Rows
from graphrt.models.sampling_device import RowInputs
from graphrt.models.step import Filled
from graphrt.models.step_paged import PagedStep
from graphrt.tensor import Tensor


@dataclass(frozen=True)
class Chooser(Filled):
    """Chooses the next tokens of logits that a step has left."""

    inputs: RowInputs
    exe: Executable

    def choose(self, rows: Rows) -> None:
        """Queues the choice; the tables have what it needs."""
        self._fill(rows)
        self.exe.run()

    def _fill(self, rows: Rows) -> None:
        """Has the inputs that the graph reads hold what rows say. Where they do already, as from step to step of texts
        whose likeliest tokens are taken, nothing is copied: a copy on a device waits for its turn there."""
        values = rows.values(self.inputs)
        asked: dict[Tensor | None, npt.NDArray[np.generic] | None] = {
            leaf: value for leaf, value in values.items() if leaf in self._asked
        }
        held = {leaf: value.tobytes() for leaf, value in values.items() if leaf in self._asked}
        if held != self._held:
            self.filled(self.fill(asked))
            self._held.clear()
            self._held.update(held)

    @cached_property
    def _held(self) -> dict[Tensor, bytes]:
        """What the inputs hold."""
        return {}


class ChosenStep(NamedTuple):
    """reads: reads tokens from the board; chooser: chooses the next ones, None where `reads` does."""

    reads: PagedStep
    chooser: Chooser | None
