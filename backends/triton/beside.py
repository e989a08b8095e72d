"""Steps that run beside those that follow them: on a stream of their own, until they are waited for.

Work begins once all steps before it have ended. Its memory is in use until a Joined step: until then no other step may
write what it reads, or touch what it writes (tools/check/launch_order.py proves that). Streams fork and join by events,
which a capture takes as edges of its graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphrt.backends.triton.accesses import Step
from graphrt.backends.triton.context import Context
from graphrt.backends.triton.device import Target
from graphrt.backends.triton.launch import Launch, without_early_start
from graphrt.program import LaunchInfo, Use


class SideStream:
    """The stream that a split's work runs on beside its steps, in order; without a GPU that work runs at once."""

    def __init__(self, target: Target) -> None:
        self._device = torch.device(target.device)
        self._made: torch.cuda.Stream | None = None

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """Made when first asked for: what is only planned has none. Its programs go before others that wait for a
        multiprocessor, or they would come after the whole product that they are to run beside."""
        if self._made is None and self._device.type == "cuda":
            self._made = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
        return self._made


def side_stream(ctx: Context) -> SideStream:
    """A split's one."""
    found: SideStream = ctx.shared.setdefault("side stream", SideStream(ctx.target))
    return found


class Begun:
    """Steps that go on beside those that follow. name: for people."""

    def __init__(self, name: str, side: SideStream, steps: Sequence[Step]) -> None:
        self.name, self.side = name, side
        self.steps = [without_early_start(step) if isinstance(step, Launch) else step for step in steps]

    def __call__(self) -> None:
        stream = self.side.stream
        if stream is None:
            self.work()
            return
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            self.work()

    def work(self) -> None:
        for step in self.steps:
            step()

    @property
    def uses(self) -> tuple[Use, ...]:
        return tuple(use for step in self.steps for use in step.info().uses)

    def info(self) -> LaunchInfo:
        """For those who ask what a program launches."""
        return LaunchInfo(self.name, uses=self.uses, beside=True)


class Joined:
    """Waits until all that was begun has ended; what follows is as after a launch that has touched its memory.

    It ends in a launch of its own: the one after it may begin early, which CUDA defines by the one launch before it,
    and not by what several streams have done.
    """

    def __init__(self, begun: Sequence[Begun], ctx: Context) -> None:
        self.begun, self.side = list(begun), begun[0].side
        self.last = ctx.scratch((1,), torch.int32)

    def __call__(self) -> None:
        stream = self.side.stream
        if stream is not None:
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        self.last.fill_(0)

    def info(self) -> LaunchInfo:
        """For those who ask what a program launches."""
        return LaunchInfo("wait", helper=True, uses=tuple(u for each in self.begun for u in each.uses), joins=True)
