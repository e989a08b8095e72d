"""A compiled split as one captured CUDA graph: from the second run on its launches cost the host nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Step = Callable[[], None]


class Captured:
    """Runs steps: the first time as they are, which compiles kernels; then captured once and replayed.

    Every address that the steps use must stay valid, and every length that changes must be read from device memory.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = list(steps)
        self.warm = False
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if self.graph is not None:
            self.graph.replay()
        elif not self.warm:
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
