"""TritonBackend: FLASH_ATTN_EXT on a GPU. What it does not run, it refuses with a reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from graphrt.backend import API_VERSION, Backend, Device, Group, Place, Region, Usage
from graphrt.backends.triton import device
from graphrt.backends.triton.capture import Captured
from graphrt.backends.triton.kernels.flash_attn.configs import Config
from graphrt.backends.triton.kernels.flash_attn.stream_k import check_schedule
from graphrt.backends.triton.memory import TritonBuffer, allocate
from graphrt.backends.triton.support import why_unsupported
from graphrt.op import op_spec
from graphrt.tensor import Tensor


class TritonBackend(Backend):
    """Kernels in Triton on one GPU.

    schedule: forces a schedule of the attention kernel (tile, split, stream_k), None to choose; config: forces the
    portable attention kernel with that configuration, as `graphrt tune` does; capture: replay a split as a CUDA graph;
    exact: taken for the interface's sake, there is one form of each op. Raises BackendError for an unknown schedule.
    """

    name: ClassVar[str] = "triton"
    api_version: ClassVar[int] = API_VERSION
    alignment = 256

    def __init__(
        self, *, exact: bool = True, schedule: str | None = None, config: Config | None = None, capture: bool = True
    ) -> None:
        self.schedule = check_schedule(schedule) if schedule is not None else None
        self.config = config
        self.target = device.target()
        self.capture = capture and not device.interpreting()

    @classmethod
    def unusable(cls) -> str | None:
        return device.unusable()

    @classmethod
    def score(cls) -> int:
        # As preferred as the CPU, which is found first: as long as it runs attention alone, a whole model on it would
        # spend its time copying.
        return 0 if device.interpreting() else 1

    def devices(self) -> list[Device]:
        if device.interpreting():
            return [Device("interpreter", "Triton's interpreter on the CPU")]
        found = []
        for i in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(i)
            found.append(Device(f"cuda:{i}", torch.cuda.get_device_name(i), total, free))
        return found

    def supports(self, node: Tensor) -> str | None:
        return why_unsupported(node)

    def alloc(self, nbytes: int, usage: Usage) -> TritonBuffer:
        return allocate(nbytes, usage, self.target.device)

    def fuse(self, region: Region) -> list[Group]:
        return _pair_lse(region.nodes)

    def compile(self, groups: Sequence[Group], place: Callable[[Tensor], Place]) -> Callable[[], None]:
        # Triton is imported by the first program, not by whoever lists backends.
        from graphrt.backends.triton.kernels.flash_attn.launcher import Launcher

        launcher = Launcher(self.target, place, self.schedule, self.config)
        steps: list[Callable[[], None]] = []
        for group in groups:
            nodes = [n for n in group.nodes if not op_spec(n.op).is_view]
            if nodes:
                steps += launcher.launches(nodes)
        return Captured(steps) if self.capture else _sequence(steps)

    def synchronize(self) -> None:
        if not device.interpreting():
            torch.cuda.synchronize(self.target.device)


def _pair_lse(nodes: Sequence[Tensor]) -> list[Group]:
    """Each node a group, but FLASH_ATTN_LSE joins the FLASH_ATTN_EXT before it that has the same sources."""
    groups: list[Group] = []
    for node in nodes:
        before = groups[-1] if groups else None
        if before is not None and node.op == "FLASH_ATTN_LSE" and _same_scores(before.nodes[0], node):
            groups[-1] = Group([*before.nodes, node], results=[*before.nodes, node])
        else:
            groups.append(Group([node]))
    return groups


def _same_scores(attn: Tensor, lse: Tensor) -> bool:
    if attn.op != "FLASH_ATTN_EXT" or attn.params != lse.params:
        return False
    a: list[Any] = [*attn.src[:2], *attn.src[3:], None, None]
    b: list[Any] = [*lse.src, None, None]
    return all(x is y for x, y in zip(a[:4], b[:4]))


def _sequence(steps: Sequence[Callable[[], None]]) -> Callable[[], None]:
    def run() -> None:
        for step in steps:
            step()

    return run
