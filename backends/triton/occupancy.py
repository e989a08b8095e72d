"""How many programs of a compiled kernel one multiprocessor holds at a time: by registers, shared memory, threads and
places, whichever gives out first.

Tables of configurations say a number (per_sm) that the schedule is planned by before anything is compiled. This is the
true one: tests hold the tables against it (test_triton_aot.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from graphrt.errors import BackendError

#: Bytes of shared memory that the system takes of each program, from compute capability 8.0 on.
RESERVED = 1024
#: A warp's registers are given out in pieces of so many, shared memory in pieces of so many bytes; registers and warps
#: belong to one of so many schedulers each. Source: CUDA's cuda_occupancy.h, compute capability 8.0 to 12.0.
REGISTER_UNIT, SHARED_UNIT, SCHEDULERS = 256, 128, 4


@dataclass(frozen=True)
class Multiprocessor:
    """registers: of 32 bits (of AMD: of a lane, on each of 4 SIMDs); shared: bytes; warps, programs: at most."""

    registers: int
    shared: int
    warps: int
    programs: int


#: Source: CUDA programming guide, "technical specifications per compute capability"; AMD's CDNA3 and CDNA4 ISA guides:
#: 512 vector registers of a lane, 8 waves a SIMD, LDS of a compute unit.
MULTIPROCESSORS = {
    "sm_80": Multiprocessor(65536, 167936, 64, 32), "sm_86": Multiprocessor(65536, 102400, 48, 16),
    "sm_87": Multiprocessor(65536, 167936, 48, 16), "sm_89": Multiprocessor(65536, 102400, 48, 24),
    "sm_90": Multiprocessor(65536, 233472, 64, 32), "sm_100": Multiprocessor(65536, 233472, 64, 32),
    "sm_120": Multiprocessor(65536, 102400, 48, 24),
    "gfx942": Multiprocessor(512, 65536, 32, 32), "gfx950": Multiprocessor(512, 163840, 32, 32),
}  # fmt: skip


@dataclass(frozen=True)
class Occupancy:
    """Programs that each resource has room for; 0 where not even one fits."""

    by_registers: int
    by_shared: int
    by_warps: int
    places: int

    @property
    def programs(self) -> int:
        """Programs of a multiprocessor at a time."""
        return min(self.by_registers, self.by_shared, self.by_warps, self.places)

    @property
    def bound(self) -> str:
        """What gives out first."""
        names = {"registers": self.by_registers, "shared memory": self.by_shared, "warps": self.by_warps}
        return next((name for name, n in names.items() if n == self.programs), "places")


def occupancy(arch: str, registers: int, shared: int, warps: int) -> Occupancy:
    """Of a kernel. registers: of a thread; shared: bytes of a program, dynamic and static; warps: of a program.

    Raises BackendError for an architecture whose limits are not known here.
    """
    m = MULTIPROCESSORS.get(arch)
    if m is None:
        raise BackendError(f"occupancy is known of {', '.join(MULTIPROCESSORS)}, got {arch[:40]!r}")
    if arch.startswith("gfx"):
        waves = min(m.warps // 4, m.registers // _up(max(registers, 1), 8)) * 4
        return Occupancy(waves // warps, m.shared // max(shared, 1), m.warps // warps, m.programs)
    of_warp = _up(max(registers, 1) * 32, REGISTER_UNIT)
    fitting = m.registers // SCHEDULERS // of_warp * SCHEDULERS
    by_shared = m.shared // _up(shared + RESERVED, SHARED_UNIT)
    return Occupancy(fitting // warps, by_shared, m.warps // warps, m.programs)


def _up(n: int, unit: int) -> int:
    return -(-n // unit) * unit
