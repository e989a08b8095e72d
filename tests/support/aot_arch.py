"""The GPUs that kernels are compiled for without one; for aot.py, its lists and its test."""

from __future__ import annotations

from graphrt.backends.triton.device import Target

#: Shared memory of one program in bytes (CUDA programming guide, compute capabilities; LDS of a CDNA3 and a
#: CDNA4 workgroup).
SHARED = {
    "sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536, "sm_86": 101376, "sm_120": 101376,
    "gfx950": 163840,
}  # fmt: skip
#: Those for which every kernel is compiled, those for which only what they have less room for is, and those for which
#: the rows of attention's table are.
ARCHS = ("sm_80", "sm_90", "sm_100", "gfx942")
SMALL = ("sm_86", "sm_120")
ROWS_ALONE = ("gfx950",)


def target_of(arch: str) -> Target:
    """A GPU of an architecture with 132 multiprocessors and 50 MiB of L2, whose memory is the host's."""
    return Target(arch, "cpu", 132, SHARED[arch], 50 << 20)
