"""What GPU there is, and what its kernels may use. Imports no Triton: `graphrt devices` must work without it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from dataclasses import dataclass

import torch

from graphrt.backend import Elsewhere
from graphrt.errors import BackendError

#: Older GPUs lack bf16 and asynchronous copies.
MIN_CAPABILITY = (8, 0)


def interpreting() -> bool:
    """Kernels run in Triton's interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on")


#: torch's device of memory that is not there. What is planned for a GPU elsewhere lies on it: addresses, strides and
#: sizes are as they would be, values are missing, and nothing can run.
ELSEWHERE = "meta"


@dataclass(frozen=True)
class Target:
    """What kernels are made for. arch: "sm_90", "gfx942", ..., or "interpreter"; device: torch's name for it, ELSEWHERE
    to plan only.

    sm_count: multiprocessors; shared_memory: bytes that one program may use; l2: bytes of the last cache.
    """

    arch: str
    device: str
    sm_count: int
    shared_memory: int
    l2: int

    @classmethod
    def elsewhere(cls, device: Elsewhere) -> Target:
        """What kernels are planned for on a device that is not here."""
        return cls(device.arch, ELSEWHERE, device.sm_count, device.shared_memory, device.l2)

    @property
    def is_nvidia(self) -> bool:
        return self.arch.startswith("sm_")

    @property
    def is_here(self) -> bool:
        """Kernels can be launched on it."""
        return self.device != ELSEWHERE

    @property
    def has_pdl(self) -> bool:
        """Programmatic dependent launch: compute capability 9.0 and later."""
        return self.is_nvidia and int(self.arch[3:]) >= 90


#: Small, so that the interpreter's schedules have several programs a tile without taking long.
INTERPRETER = Target("interpreter", "cpu", 4, 1 << 30, 1 << 20)


def has_triton() -> bool:
    """The package is here, whatever the machine."""
    return importlib.util.find_spec("triton") is not None


def unusable() -> str | None:
    """None when kernels can run here, else a sentence why not."""
    if not has_triton():
        return "it needs the package triton (pip install triton)"
    if interpreting():
        return None
    if not torch.cuda.is_available():
        return "it needs a GPU that torch can use, and there is none (TRITON_INTERPRET=1 runs it on the CPU, slowly)"
    if torch.version.hip is None and torch.cuda.get_device_capability() < MIN_CAPABILITY:
        major, minor = torch.cuda.get_device_capability()
        return f"it needs a GPU of compute capability 8.0 or higher, this one has {major}.{minor}"
    return None


def current(name: str) -> contextlib.AbstractContextManager[object]:
    """In it torch and Triton launch on that device of torch's; nothing changes for one that is no GPU."""
    return torch.cuda.device(name) if name.startswith("cuda") else contextlib.nullcontext()


def target(index: int = 0) -> Target:
    """The target of a device by its index in torch. Raises BackendError for one that is not there."""
    if interpreting():
        return INTERPRETER
    if index >= torch.cuda.device_count():
        raise BackendError(
            f"a GPU's number must be below {torch.cuda.device_count()}, the GPUs that torch finds here, got {index}; "
            f"`graphrt devices` lists them"
        )
    p = torch.cuda.get_device_properties(index)
    arch = p.gcnArchName.split(":")[0] if torch.version.hip else f"sm_{p.major}{p.minor}"
    shared = getattr(p, "shared_memory_per_block_optin", 64 * 1024)
    return Target(arch, f"cuda:{index}", p.multi_processor_count, shared, p.L2_cache_size)
