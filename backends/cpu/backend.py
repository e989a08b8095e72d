"""CpuBackend: binds reference functions, or their fast forms, to memory."""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch

from graphrt.backend import API_VERSION, Backend, Bytes, Device, Group, Place, Region, Usage, numbered
from graphrt.backends.cpu import (  # noqa: F401  (REFERENCES)
    arithmetic,
    attention,
    attention_back,
    attention_varlen,
    backward,
    collectives,
    fast,
    kq_mask,
    matmul,
    movement,
    sample,
    send_recv,
    threads,
)
from graphrt.backends.cpu.blocks import decode, encode
from graphrt.backends.cpu.experts import expert_weight
from graphrt.backends.cpu.fuse import FUSIONS
from graphrt.backends.cpu.lower import lower, why_reference
from graphrt.backends.cpu.lowering import Lowering
from graphrt.backends.cpu.memory import CpuBuffer, allocate, strided, wrap
from graphrt.backends.cpu.products import matrix_weight
from graphrt.backends.cpu.reference import REFERENCES, Reference, why_unsupported
from graphrt.errors import BackendError
from graphrt.fusion import fuse
from graphrt.op import op_spec
from graphrt.program import Program, Run, StepInfo, in_order
from graphrt.tensor import Tensor


class CpuProgram(Program):
    """Reference functions, native programs and torch calls, one after the other.

    lowered: by group what its fast form is: native steps, a function, None for the reference; a group that is not in it
    has the reference's. keep: what the steps' memory belongs to.
    """

    def __init__(self, groups: Sequence[Group], run: Run, lowered: Mapping[Group, Any], keep: object = None) -> None:
        super().__init__(groups, functools.partial(threads.run, run))
        self._lowered, self._keep = lowered, keep

    @property
    def steps(self) -> list[StepInfo]:
        return [StepInfo(group, runner=self._runner(group)) for group in self.working_groups()]

    def _runner(self, group: Group) -> str:
        """Who computes a group: native kernels, a function, or reference functions."""
        lowered = self._lowered.get(group)
        if isinstance(lowered, list):
            return "native " + ", ".join(entry.kernel.name for step in lowered for entry in step.entries)
        if lowered is not None:
            return str(getattr(lowered, "__qualname__", type(lowered).__name__)).partition(".")[0].lstrip("_")
        reasons = [f" ({reason})" for n in group.working if lowered is None and (reason := why_reference(n))]
        return "reference " + ", ".join(REFERENCES[n.op].function.__name__ for n in group.working) + "".join(reasons)


class CpuBackend(Backend):
    """The reference, and its fast form.

    exact: only reference functions, the default; False: native kernels and fused steps where there are any. There
    products of quantized weights round activations to activation_bits, 16 or 8, or with 32 not at all; everything else
    is the same float32 arithmetic in another order. dtype: the reference's compute type, torch.float32 or torch.float64
    (results are stored in their own types). rows_alone: in a graph of one size a token gets the same bits whatever the
    other tokens are and wherever it lies among them, as it does with exact; experts then take longer. device: a number
    for one of several instances in one graph, which share the machine and copy to each other as devices do: how work
    over several devices is tried without them. The reference decodes constant weights once and keeps them.
    """

    name: ClassVar[str] = "cpu"
    api_version: ClassVar[int] = API_VERSION

    def __init__(
        self,
        *,
        exact: bool = True,
        activation_bits: int = 16,
        dtype: torch.dtype = torch.float32,
        rows_alone: bool = False,
        device: int = 0,
    ) -> None:
        if activation_bits not in (8, 16, 32):
            raise BackendError(
                f"activation_bits must be 8 or 16, or 32 for no rounding, got {activation_bits!r}; give one of these"
            )
        threads.limit_threads()
        self.exact = exact
        self.activation_bits = activation_bits
        self.dtype = dtype
        self.rows_alone = rows_alone
        self.number = device
        # By buffer and not by its id, which another buffer takes over once it is gone.
        self._decoded: WeakKeyDictionary[CpuBuffer, dict[object, torch.Tensor]] = WeakKeyDictionary()

    @property
    def id(self) -> str:
        return numbered(self.name, self.number)

    @classmethod
    def unusable(cls) -> str | None:
        return None

    @classmethod
    def score(cls) -> int:
        return 1

    def devices(self) -> list[Device]:
        pages, free, size = (os.sysconf(n) for n in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES", "SC_PAGE_SIZE"))
        name = f"{platform.machine()}, {threads.count()} threads, torch {torch.__version__}"
        return [Device("cpu", name, pages * size, free * size)]

    def supports(self, node: Tensor) -> str | None:
        return why_unsupported(node)

    def rounds_activations(self, node: Tensor) -> str | None:
        """Where 8 bits are asked for and a product keeps no more: tiles (AMX) multiply one bf16, wide vectors bytes.
        AVX2's integers have 16 bits all the same, which keep more than the f16 that the judge allows anyway."""
        if self._only_reference() or self.activation_bits != 8:
            return None
        find = {"MUL_MAT": matrix_weight, "MUL_MAT_ID": expert_weight}.get(node.op)
        weight = find(node) if find is not None else None
        if weight is None:
            return None
        return "int8" if fast.amx_tiles() is not None or fast.form_of(weight.dtype.name, 8).parts == 1 else None

    @property
    def logits_nmse(self) -> float:  # type: ignore[override]
        return 1e-6 if self.exact or self.activation_bits != 8 else 1e-3

    def alloc(self, nbytes: int, usage: Usage) -> CpuBuffer:
        return self._owned(allocate(nbytes, usage))

    def wrap_host(self, data: Bytes) -> CpuBuffer:
        return self._owned(wrap(data))

    def _owned(self, buffer: CpuBuffer) -> CpuBuffer:
        buffer.backend = self.id
        return buffer

    def fuse(self, region: Region) -> list[Group]:
        return [Group([node]) for node in region.nodes] if self._only_reference() else fuse(region, FUSIONS)

    def _only_reference(self) -> bool:
        return self.exact or fast.available() is not None

    def compile(self, groups: Sequence[Group], place: Callable[[Tensor], Place]) -> Program:
        if self._only_reference():
            return CpuProgram(groups, in_order([self.bind(group, place) for group in groups]), {})
        lowering = Lowering(place, self.activation_bits, rows_alone=self.rows_alone)
        steps: list[Run] = []
        native: list[fast.Step] = []
        found: dict[Group, Any] = {}

        def join_native() -> None:
            if native:
                steps.append(lowering.program(native))
                native.clear()

        for group in groups:
            lowered = found[group] = lower(lowering, group)
            if isinstance(lowered, list):
                native += lowered
            else:
                join_native()
                steps.append(lowered if lowered is not None else self.bind(group, place))
        join_native()
        return CpuProgram(groups, in_order(steps), found, lowering)

    def reference_of(self, node: Tensor) -> Reference:
        """What computes a node that has no fast form."""
        return REFERENCES[node.op]

    def bind(self, group: Group, place: Callable[[Tensor], Place]) -> Run:
        """What computes a group by its nodes' reference functions, from memory into memory."""
        inside: dict[Tensor, torch.Tensor] = {}  # results that only this group reads have no memory
        steps = [self._bind_node(node, place, inside, node not in group.results) for node in group.nodes]
        return steps[0] if len(steps) == 1 else in_order(steps)

    def _bind_node(
        self, node: Tensor, place: Callable[[Tensor], Place], inside: dict[Tensor, torch.Tensor], internal: bool
    ) -> Run:
        ref = self.reference_of(node)
        load = [self._loader(s, name in ref.stored, place, inside) for name, s in zip(op_spec(node.op).names, node.src)]
        function = ref.function
        if op_spec(node.op).writes is not None:  # it writes into its source by itself

            def write() -> None:
                function(node, *[get() for get in load])

            return write
        if internal:
            inside[node] = torch.empty(0)

            def hold() -> None:
                inside[node] = function(node, *[get() for get in load])

            return hold
        target = self._stored(node, place)

        def step() -> None:
            target.copy_(encode(function(node, *[get() for get in load]), node.dtype))

        return step

    def _stored(self, t: Tensor, place: Callable[[Tensor], Place]) -> torch.Tensor:
        buffer, offset = place(t)
        assert isinstance(buffer, CpuBuffer)
        return strided(buffer.memory, offset, t)

    def _loader(
        self, t: Tensor | None, stored: bool, place: Callable[[Tensor], Place], inside: dict[Tensor, torch.Tensor]
    ) -> Callable[[], torch.Tensor | None]:
        """What gives a source as a reference function takes it, each time it runs."""
        if t is None:
            return _absent
        if t in inside:
            return lambda: inside[t]
        memory = self._stored(t, place)
        if stored or (t.dtype.kind == "float" and memory.dtype == self.dtype):
            return lambda: memory
        buffer, offset = place(t)
        if buffer.usage is Usage.WEIGHTS:
            assert isinstance(buffer, CpuBuffer)
            decoded = self._decoded.setdefault(buffer, {})
            return lambda: self._constant(t, memory, decoded, (offset, t.dtype, t.ne, t.nb))
        return lambda: decode(memory, t.dtype, self.dtype)

    def _constant(
        self, t: Tensor, memory: torch.Tensor, decoded: dict[object, torch.Tensor], key: object
    ) -> torch.Tensor:
        if key not in decoded:
            decoded[key] = decode(memory, t.dtype, self.dtype)
        return decoded[key]


def _absent() -> None:
    return None
