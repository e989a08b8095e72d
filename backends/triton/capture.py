"""A compiled split as one captured CUDA graph: from the second run on its launches cost the host nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from graphrt.backend import Group
from graphrt.errors import BackendError

if TYPE_CHECKING:
    from graphrt.backends.triton.kernels.flash_attn.chosen import Chosen

Step = Callable[[], None]


@dataclass(frozen=True, eq=False)
class Segment:
    """A group of nodes and the steps that do its work, in order: what a profiler runs and names by itself.

    chosen: of an attention its kernel and schedule (flash_attn/chosen.py)."""

    group: Group
    steps: Sequence[Step]
    chosen: Chosen | None = None


class Captured:
    """Runs segments: the first time as they are, which compiles kernels; then captured once and replayed.

    Every address that the steps use must stay valid, and every length that changes must be read from device memory.
    capture: False runs the steps as they are each time. here: False only plans for a GPU elsewhere; calling raises
    BackendError then.
    """

    def __init__(self, segments: Sequence[Segment], capture: bool = True, here: bool = True) -> None:
        self.segments = list(segments)
        self.steps = [step for segment in segments for step in segment.steps]
        self.capture = capture
        self.here = here
        self.warm = False
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if not self.here:
            raise BackendError(
                "what was planned for a GPU elsewhere can't run; prepare it without a target on its machine"
            )
        if self.graph is not None:
            self.graph.replay()
        elif not (self.warm and self.capture):
            self._run()
            self.warm = True
        else:
            self._capture()

    def _run(self) -> None:
        for step in self.steps:
            step()

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._run()
        self.graph = graph
        graph.replay()
