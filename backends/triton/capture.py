"""A compiled split as one captured CUDA graph: from the second run on its launches cost the host nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from graphrt.backend import Group

Step = Callable[[], None]


@dataclass(frozen=True, eq=False)
class Segment:
    """A group of nodes and the steps that do its work, in order: what a profiler runs and names by itself."""

    group: Group
    steps: Sequence[Step]


class Captured:
    """Runs segments: the first time as they are, which compiles kernels; then captured once and replayed.

    Every address that the steps use must stay valid, and every length that changes must be read from device memory.
    capture: False runs the steps as they are each time.
    """

    def __init__(self, segments: Sequence[Segment], capture: bool = True) -> None:
        self.segments = list(segments)
        self.steps = [step for segment in segments for step in segment.steps]
        self.capture = capture
        self.warm = False
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
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
