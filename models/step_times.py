"""StepTime: what a step took, for those who ask where the time goes."""

from __future__ import annotations

from typing import NamedTuple


class StepTime(NamedTuple):
    """Of one step. n_tokens: those that it read; device: seconds of its work there; waited: seconds in which the host
    did nothing but wait for it."""

    n_tokens: int
    device: float
    waited: float
