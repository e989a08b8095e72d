"""A step that leaves next tokens on a board, as two graphs: the first leaves logits, the second chooses. What the
choice needs, such as a grammar's mask, may become known while the device reads the tokens; and few graphs serve all
ways to choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from graphrt.execute import Executable
from graphrt.models.sampling_device import RowInputs
from graphrt.models.step import Filled
from graphrt.models.step_paged import PagedStep


class Row(NamedTuple):
    """What a row's token is chosen by. slot: its column of the tables; length: tokens of its text; uniforms: numbers
    that it is drawn by; place: where it is put among what was said; target: the board's row for it; -1 for nowhere."""

    slot: int
    length: int
    uniforms: tuple[float, float] = (0.0, 0.0)
    place: int = -1
    target: int = -1


@dataclass(frozen=True)
class Chooser(Filled):
    """Chooses the next tokens of logits that a step has left."""

    inputs: RowInputs
    exe: Executable

    def choose(self, rows: Sequence[Row]) -> None:
        """Queues the choice; the tables have what it needs."""
        inputs = self.inputs
        n, most = len(rows), inputs.slots.ne[0]
        nowhere = [-1] * (most - n)
        given = self.fill({
            inputs.slots: np.array([row.slot for row in rows], np.int32),
            inputs.lengths: np.array([row.length for row in rows], np.int32),
            inputs.uniforms: np.array([row.uniforms for row in rows], np.float64),
            inputs.places: np.array([*(row.place for row in rows), *nowhere], np.int64),
            inputs.targets: np.array([*(row.target for row in rows), *nowhere], np.int64),
        })  # fmt: skip
        self.filled(given)
        self.exe.run()


class ChosenStep(NamedTuple):
    """reads: reads tokens from the board; chooser: chooses the next ones."""

    reads: PagedStep
    chooser: Chooser
