"""What the next tokens of rows of logits are chosen by, row by row, as a graph's inputs have it."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from graphrt.models.sampling_device import RowInputs
from graphrt.tensor import Tensor


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

    def values(self, inputs: RowInputs) -> dict[Tensor, npt.NDArray[np.generic]]:
        """By inputs; those of fewer rows than a graph has are whole where what is behind them must go nowhere."""
        n = inputs.slots.ne[0]
        return {
            inputs.slots: np.array(self.slots, np.int32),
            inputs.lengths: np.array(self.lengths, np.int32),
            inputs.uniforms: np.array(self.uniforms, np.float64),
            inputs.places: _padded(self.places, n),
            inputs.targets: _padded(self.targets, n),
        }


def _padded(places: Sequence[int], n: int) -> npt.NDArray[np.int64]:
    return np.array([*places, *[-1] * (n - len(places))], np.int64)
