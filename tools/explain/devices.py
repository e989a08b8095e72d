"""GPUs that `graphrt explain --device` plans for, and what they do at best. None need be here."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace

from graphrt.backend import Elsewhere
from graphrt.errors import BackendError
from graphrt.op import Work


@dataclass(frozen=True)
class Cost:
    """Seconds that a step takes at the ceilings: by its bytes, its FLOPs and its launches, which run side by side."""

    bytes: float
    flops: float
    launches: float

    @property
    def seconds(self) -> float:
        return max(self.bytes, self.flops, self.launches)

    @property
    def bound(self) -> str:
        """What takes longest: "bytes", "FLOPs" or "launch"."""
        if self.launches >= max(self.bytes, self.flops):
            return "launch"
        return "bytes" if self.bytes >= self.flops else "FLOPs"


@dataclass(frozen=True)
class KnownDevice:
    """title: what it is called; arch to l2: see Elsewhere; copy: bytes/s read and written by a copy; product: FLOP/s of
    an f16 matrix product; launch: seconds that a launch of a captured graph takes at least; source: of the rates.
    copy 0: no rate is known, so that nothing is said of time."""

    title: str
    arch: str
    sm_count: int
    shared_memory: int
    l2: int
    copy: float
    product: float
    launch: float
    source: str

    @property
    def elsewhere(self) -> Elsewhere:
        """What a backend plans for."""
        return Elsewhere(self.arch, self.sm_count, self.shared_memory, self.l2)

    def cost(self, work: Work, launches: int) -> Cost | None:
        """What work takes at the ceilings, in so many launches one after the other; None where they are not known."""
        if not self.copy:
            return None
        return Cost(work.bytes / self.copy, work.flops / self.product, launches * self.launch)


#: A decode step of SmolLM2 on an H100, 249 launches of which few have more to do than to start, takes 423 us
#: (BENCHMARKS.md), 1.7 a launch with its work. The others' is not known and taken to be the same.
_LAUNCH = 1.5e-6
_SHEET = "the maker's data sheet, not measured"
#: What a program may use on compute capability 8.6, 8.9 and 12.0: 99 KiB.
_SHARED_99 = 101376

#: By the name that --device takes. Shared memory: CUDA programming guide, LDS of a CDNA3 workgroup. Rates of products
#: are those with f32 sums, without sparsity: GeForce cards have half of what they do with f16 sums, which no kernel
#: here uses. GeForce figures: NVIDIA's white papers "Ampere GA102" (RTX 3090), "Ada GPU Architecture" (RTX 4090,
#: and the L2 cache of AD102) and "RTX Blackwell GPU Architecture" (RTX 5090); data sheets of L40S and RTX
#: 6000 Ada Generation.
DEVICES = {
    "h100": KnownDevice(
        "NVIDIA H100 80GB HBM3", "sm_90", 132, 232448, 50 << 20, 3.02e12, 760e12, _LAUNCH, "measured, see BENCHMARKS.md"
    ),
    "h200": KnownDevice("NVIDIA H200", "sm_90", 132, 232448, 50 << 20, 4.8e12, 989e12, _LAUNCH, _SHEET),
    "a100": KnownDevice("NVIDIA A100-SXM4-80GB", "sm_80", 108, 166912, 40 << 20, 2.04e12, 312e12, _LAUNCH, _SHEET),
    "b200": KnownDevice("NVIDIA B200", "sm_100", 148, 232448, 126 << 20, 8.0e12, 2250e12, _LAUNCH, _SHEET),
    "mi300x": KnownDevice("AMD Instinct MI300X", "gfx942", 304, 65536, 4 << 20, 5.3e12, 1307e12, _LAUNCH, _SHEET),
    "l40s": KnownDevice("NVIDIA L40S", "sm_89", 142, _SHARED_99, 96 << 20, 0.864e12, 362e12, _LAUNCH, _SHEET),
    "rtx6000ada": KnownDevice(
        "NVIDIA RTX 6000 Ada Generation", "sm_89", 142, _SHARED_99, 96 << 20, 0.96e12, 364e12, _LAUNCH, _SHEET
    ),
    "rtx3090": KnownDevice(
        "NVIDIA GeForce RTX 3090", "sm_86", 82, _SHARED_99, 6 << 20, 0.936e12, 71e12, _LAUNCH, _SHEET
    ),
    "rtx4090": KnownDevice(
        "NVIDIA GeForce RTX 4090", "sm_89", 128, _SHARED_99, 72 << 20, 1.008e12, 165e12, _LAUNCH, _SHEET
    ),
    "rtx5090": KnownDevice(
        "NVIDIA GeForce RTX 5090", "sm_120", 170, _SHARED_99, 96 << 20, 1.792e12, 209e12, _LAUNCH, _SHEET
    ),
}


def known_device(name: str) -> KnownDevice:
    """The device of that name; "RTX 4090" is rtx4090. Raises BackendError for one that isn't known."""
    plain = "".join(c for c in name.lower() if c.isalnum())
    found = DEVICES.get(plain)
    if found is None:
        close = difflib.get_close_matches(plain, DEVICES, 1, 0.4)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise BackendError(f"a device to plan for must be one of {', '.join(DEVICES)}, got {name[:40]!r}{hint}")
    return found


#: Bytes of shared memory that a program may use, by architecture: CUDA programming guide; LDS of CDNA3 and 4.
_SHARED = {
    "sm_80": 166912, "sm_86": _SHARED_99, "sm_87": 166912, "sm_89": _SHARED_99, "sm_90": 232448, "sm_100": 232448,
    "sm_103": 232448, "sm_120": _SHARED_99, "sm_121": _SHARED_99, "gfx942": 65536, "gfx950": 163840,
}  # fmt: skip

#: The least of those: the tables of configurations have rows that need all of it.
_LEAST_SHARED = min(_SHARED.values())


def device_of(
    name: str | None, arch: str | None = None, sm_count: int | None = None, shared_memory: int | None = None
) -> KnownDevice:
    """The device of a name, changed as said; without a name one of an architecture and so many multiprocessors.

    What is not a known device has no rates: only decisions are told of it. Raises BackendError for an unknown name or
    architecture, where too little is said, and for less shared memory than any architecture has.
    """
    if name is not None:
        base = known_device(name)
    elif arch is None or sm_count is None:
        raise BackendError(
            "a device that has no name here needs --arch and --sm-count, "
            f"got {'--arch ' + arch if arch is not None else 'no --arch'}; or name one with --device"
        )
    else:
        base = KnownDevice("", arch, sm_count, 0, 32 << 20, 0.0, 0.0, _LAUNCH, "")
    arch = arch or base.arch
    if arch not in _SHARED:
        raise BackendError(f"an architecture must be one of {', '.join(_SHARED)}, got {arch[:40]!r}")
    shared = shared_memory or (base.shared_memory if base.arch == arch else 0) or _SHARED[arch]
    if shared < _LEAST_SHARED:
        raise BackendError(
            f"a program must have at least {_LEAST_SHARED >> 10} KiB of shared memory, as kernels are configured for, "
            f"got {shared} bytes; give --shared-memory {_LEAST_SHARED >> 10}K or more"
        )
    changed = replace(base, arch=arch, sm_count=sm_count or base.sm_count, shared_memory=shared)
    if changed == base:
        return base
    return replace(changed, title=f"a GPU of {changed.sm_count} multiprocessors", copy=0.0, product=0.0, source="")


def device_called(title: str) -> KnownDevice | None:
    """The device whose name, as torch has it, is `title`; None for one that isn't known."""
    exact = next((device for device in DEVICES.values() if device.title == title), None)
    words = title.lower().replace("-", " ").split()
    return exact or next((device for name, device in DEVICES.items() if name in words), None)
