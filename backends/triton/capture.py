"""A compiled split as one captured CUDA graph: from the second run on its launches cost the host nothing."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence

import torch

from graphrt.backends.triton.device import Target, current, interpreting
from graphrt.backends.triton.segment import Segment
from graphrt.errors import BackendError
from graphrt.presence import here
from graphrt.program import Program, StepInfo, in_order

#: Captures of a process follow one another: torch keeps one state of random numbers, which a capture claims.
_CAPTURING = threading.Lock()


class CaptureWarning(UserWarning):
    """A split runs launch by launch, since capturing it as a CUDA graph failed: right, but slower."""


class Captured(Program):
    """Runs segments on a target: the first time as they are, which compiles and loads kernels; then captured once and
    replayed.

    Every address that the steps use must stay valid, and every length that changes must be read from device memory.
    capture: False runs the launches as they are each time. A target that is not here is only planned for; calling
    raises BackendError then. redone: int32 [1] each, what redone() adds up. kept: bytes of weights that lie
    there once more.
    """

    def __init__(
        self, segments: Sequence[Segment], target: Target, capture: bool = True, redone: Sequence[torch.Tensor] = (),
        kept: int = 0,
    ) -> None:  # fmt: skip
        self.launches = [step for segment in segments for step in segment.steps]
        super().__init__([segment.group for segment in segments], in_order(self.launches))
        self.segments = list(segments)
        self.target = target
        self.capture = capture
        self.warm = False
        self.graph: torch.cuda.CUDAGraph | None = None
        self._redone = list(redone)
        self._kept = kept

    @property
    def steps(self) -> list[StepInfo]:
        from graphrt.backends.triton.describe import step_info  # only who asks pays for what it imports

        return [step_info(segment, self.target) for segment in self.segments]

    def __call__(self) -> None:
        if not self.target.is_here:
            raise BackendError(
                "what was planned for a GPU elsewhere can't run; prepare it without a target on its machine"
            )
        with current(self.target.device):
            self._run_or_replay()

    def _run_or_replay(self) -> None:
        if self.graph is None and self.warm and self.capture:
            self.graph = self._captured()
        if self.graph is not None:
            self.graph.replay()
        elif self.warm:
            self._run()
        else:
            with here.at_length():  # it compiles
                self._run()
            self.warm = True

    def compile_ahead(self) -> None:
        from graphrt.backends.triton.launch import Launch  # Triton itself, which listing backends must not import

        if self.target.is_here and not interpreting():
            with current(self.target.device):
                for launch in self.launches:
                    if isinstance(launch, Launch):
                        launch.compile_ahead()

    def kept_nbytes(self) -> int:
        return self._kept

    def redone(self) -> int:
        """How many tiles of attention were done again by the portable kernel, in all runs so far. Waits for them."""
        return sum(int(count) for count in self._redone)

    def _captured(self) -> torch.cuda.CUDAGraph | None:
        """The steps as a graph, None (and no more attempts) where that fails.

        Thread-local mode: by default what any thread does meanwhile (allocating, asking an event, loading a kernel)
        breaks a capture. This thread's own kernels were loaded, and its memory was allocated, by the run before.
        """
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        try:
            # Without torch.cuda.graph(), which first collects garbage and gives memory back: 50 ms for nothing.
            with _CAPTURING, torch.cuda.stream(stream):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self._run()
                finally:
                    graph.capture_end()
        except RuntimeError as error:  # torch's and Triton's for whatever the driver refuses
            self.capture = False
            reason = str(error).strip().partition("\n")[0]
            warnings.warn(
                f"a step of {len(self.launches)} launches should run as one CUDA graph, but capturing it failed "
                f"({reason}); it runs launch by launch, slower; please report it, with what else the process did then",
                CaptureWarning,
                stacklevel=5,
            )
            return None
        return graph
