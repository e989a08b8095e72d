"""A step that leaves next tokens on a board, as two graphs: the first leaves logits, the second chooses. What the
choice needs, such as a grammar's mask, may become known while the device reads the tokens; and few graphs serve all
ways to choose."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from graphrt.execute import Executable
from graphrt.models.sampling_device import RowInputs
from graphrt.models.step import Filled
from graphrt.models.step_paged import PagedStep


class Rows(NamedTuple):
    """What rows' tokens are chosen by, a number of each row. slots: its column of the tables; lengths: tokens of its
    text; uniforms: two numbers that it is drawn by; places: where it is put among what was said; targets: the board's
    row for it; -1 for nowhere."""

    slots: list[int]
    lengths: list[int]
    uniforms: list[tuple[float, float]]
    places: list[int]
    targets: list[int]

    def without(self, gone: Container[int]) -> Rows:
        """The same, but that the tokens of these rows go nowhere."""
        places, targets = ([-1 if i in gone else n for i, n in enumerate(each)] for each in self[3:])
        return self._replace(places=places, targets=targets)


@dataclass(frozen=True)
class Chooser(Filled):
    """Chooses the next tokens of logits that a step has left."""

    inputs: RowInputs
    exe: Executable

    def choose(self, rows: Rows) -> None:
        """Queues the choice; the tables have what it needs."""
        inputs = self.inputs
        nowhere = [-1] * (inputs.slots.ne[0] - len(rows.slots))
        given = self.fill({
            inputs.slots: np.array(rows.slots, np.int32),
            inputs.lengths: np.array(rows.lengths, np.int32),
            inputs.uniforms: np.array(rows.uniforms, np.float64),
            inputs.places: np.array([*rows.places, *nowhere], np.int64),
            inputs.targets: np.array([*rows.targets, *nowhere], np.int64),
        })  # fmt: skip
        self.filled(given)
        self.exe.run()


class ChosenStep(NamedTuple):
    """reads: reads tokens from the board; chooser: chooses the next ones."""

    reads: PagedStep
    chooser: Chooser
