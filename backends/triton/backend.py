"""TritonBackend: whole graphs on a GPU. What it does not run, it refuses with a reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from graphrt.backend import API_VERSION, Backend, Bytes, Device, Elsewhere, Group, Place, Region, Usage, numbered
from graphrt.backends.triton.capture import Captured
from graphrt.backends.triton.device import Target, current, has_triton, interpreting, unusable
from graphrt.backends.triton.device import target as target_of
from graphrt.backends.triton.kernel_cache import keep_private
from graphrt.backends.triton.kernels.flash_attn.backward.forms import check_form
from graphrt.backends.triton.kernels.flash_attn.configs import Config
from graphrt.backends.triton.kernels.flash_attn.stream_k import PASS_FORMS, check_schedule
from graphrt.backends.triton.memory import TritonBuffer, allocate
from graphrt.backends.triton.support import why_unsupported
from graphrt.backends.triton.weights import hold_weight
from graphrt.errors import BackendError
from graphrt.fusion import fuse
from graphrt.program import Program
from graphrt.tensor import Tensor


class TritonBackend(Backend):
    """Kernels in Triton on one GPU.

    exact: each node by itself, and activations of products rounded to f16; else nodes are fused and products of a few
    tokens round activations to 8 bits in groups of 32, short rows in two parts. schedule: forces a schedule of the
    attention kernel (tile, split, stream_k), or of steps of few queries a form of kernels/flash_attn/decode_passes.py
    (partial-wait, partial-two, global-wait, global-two), None to choose; config: forces the portable attention kernel
    with that configuration, as `graphrt tune` does; rows_alone: in a graph of one size a token gets the same bits
    whatever the others are, since each tile of attention is one program's, which is the schedule `tile`; backward: the
    form of attention's gradients (split, fused-q, fused-k: see kernels/flash_attn/backward/forms.py); capture: replay a
    split as a CUDA graph; device: the GPU's number; target: plan for that GPU, which need not be here: graphs are
    prepared as there, and nothing can run. Raises BackendError for an unknown schedule or form and a GPU that is not
    there.
    """

    name: ClassVar[str] = "triton"
    api_version: ClassVar[int] = API_VERSION
    alignment = 256
    asynchronous = True

    def __init__(
        self,
        *,
        exact: bool = True,
        schedule: str | None = None,
        config: Config | None = None,
        rows_alone: bool = False,
        backward: str = "split",
        capture: bool = True,
        device: int = 0,
        target: Target | None = None,
    ) -> None:
        self.exact = exact
        self.reads_shared_once = not exact and not rows_alone
        schedule = "tile" if rows_alone else schedule
        self.schedule = schedule if schedule is None or schedule in PASS_FORMS else check_schedule(schedule)
        self.config = config
        self.backward = check_form(backward)
        self.number = device
        self.target = target or target_of(device)
        # fused-q adds up in any order, fused-k where it has Hopper's kernel.
        self.deterministic = backward == "split" or (backward == "fused-k" and self.target.arch != "sm_90")
        self.capture = capture and not interpreting()
        self.survives_fork = interpreting()
        if self.target.is_here and not interpreting():
            keep_private()

    @property
    def id(self) -> str:
        return numbered(self.name, self.number)

    @property
    def logits_nmse(self) -> float:  # type: ignore[override]
        """Activations are rounded to f16, or to 8 bits."""
        return 1e-5 if self.exact else 1e-3

    @classmethod
    def elsewhere(cls, device: Elsewhere, **options: Any) -> TritonBackend:
        if not has_triton():
            raise BackendError("planning for a GPU needs the package triton, which is not here; pip install triton")
        return cls(target=Target.elsewhere(device), **options)

    @property
    def device(self) -> Device | None:
        found = self.devices() if self.target.is_here else []
        return next((d for d in found if interpreting() or d.name == self.target.device), None)

    @classmethod
    def unusable(cls) -> str | None:
        return unusable()

    @classmethod
    def score(cls) -> int:
        return 0 if interpreting() else 10

    def devices(self) -> list[Device]:
        if interpreting():
            return [Device("interpreter", "Triton's interpreter on the CPU")]
        found = []
        for i in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(i)
            found.append(Device(f"cuda:{i}", torch.cuda.get_device_name(i), total, free))
        return found

    def supports(self, node: Tensor) -> str | None:
        return why_unsupported(node)

    def rounds_activations(self, node: Tensor) -> str | None:
        from graphrt.backends.triton.kernels.products.activations import parts_of
        from graphrt.backends.triton.kernels.products.forms import Form
        from graphrt.backends.triton.kernels.products.product import products_of
        from graphrt.backends.triton.kernels.products.route import route_of

        group = products_of(Group([node]))
        if group is None or parts_of(group.x.ne[0]) == 2:  # which keep more than f16 would: nothing to declare
            return None
        return "int8" if route_of(group.products[0], self).form is Form.Q8 else None

    def alloc(self, nbytes: int, usage: Usage) -> TritonBuffer:
        return self._owned(allocate(nbytes, usage, self.target.device))

    def hold(self, weight: Tensor, data: Bytes) -> TritonBuffer:
        with current(self.target.device):
            return self._owned(hold_weight(weight, data, self.target.device))

    def _owned(self, buffer: TritonBuffer) -> TritonBuffer:
        buffer.backend = self.id
        return buffer

    def fuse(self, region: Region) -> list[Group]:
        # Triton is imported by whoever prepares a graph, not by whoever lists backends.
        from graphrt.backends.triton.fuse import fusions_for

        return fuse(region, fusions_for(self.exact, self.target.arch))

    def compile(self, groups: Sequence[Group], place: Callable[[Tensor], Place]) -> Program:
        from graphrt.backends.triton.context import Context
        from graphrt.backends.triton.fuse import asked_for
        from graphrt.backends.triton.kernels.flash_attn.launcher import Launcher
        from graphrt.backends.triton.kernels.products.kept import kept_nbytes
        from graphrt.backends.triton.lowering import lower

        attention = Launcher(self.target, place, self.schedule, self.config, self.backward, asked_for(self.exact))
        with current(self.target.device):
            ctx = Context(place, self.target, self.exact)
            segments = lower(groups, ctx, attention)
        return Captured(segments, self.target, self.capture, attention.scratch.redone, kept_nbytes(ctx))

    @contextmanager
    def compiling(self, threads: int) -> Iterator[None]:
        import triton

        if interpreting() or not self.target.is_here or not hasattr(triton, "AsyncCompileMode"):
            yield
            return
        with ThreadPoolExecutor(threads) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
            yield

    def stopwatch(self) -> Callable[[], Callable[[], float]]:
        if not self.asynchronous or not self.target.is_here or interpreting():
            return super().stopwatch()
        with current(self.target.device):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            began.record()

        def seconds() -> float:
            ended.synchronize()
            return float(began.elapsed_time(ended)) / 1e3

        def end() -> Callable[[], float]:
            with current(self.target.device):
                ended.record()
            return seconds

        return end

    def synchronize(self) -> None:
        if self.target.is_here and not interpreting():
            torch.cuda.synchronize(self.target.device)
