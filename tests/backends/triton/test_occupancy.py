"""How many programs a multiprocessor holds, against figures that are known."""

from __future__ import annotations

import pytest

from graphrt.backends.triton.occupancy import Occupancy, occupancy
from graphrt.errors import BackendError

KNOWN = [
    # 128 threads of 255 registers: 8192 a warp, two warps a scheduler; 196608 + 1024 bytes of 233472.
    ("sm_90", 255, 196608, 4, 1, "shared memory"), ("sm_90", 255, 36864, 2, 4, "registers"),
    ("sm_90", 225, 98304, 4, 2, "registers"), ("sm_90", 168, 30720, 4, 3, "registers"),
    # Without registers to speak of: threads, then places.
    ("sm_90", 16, 0, 32, 2, "warps"), ("sm_90", 16, 0, 1, 32, "places"), ("sm_89", 16, 0, 1, 24, "places"),
    ("sm_80", 32, 0, 32, 2, "registers"), ("sm_89", 32, 0, 32, 1, "warps"),
    # 99 KiB and the system's 1 are all that sm_86 has.
    ("sm_86", 64, 101376, 4, 1, "shared memory"), ("sm_86", 64, 50176, 4, 2, "shared memory"),
    ("sm_86", 64, 50177, 4, 1, "shared memory"),
    # 512 registers a lane of each SIMD: 128 each for 4 waves, 4 SIMDs.
    ("gfx942", 128, 16384, 4, 4, "registers"), ("gfx942", 129, 16384, 4, 3, "registers"),
    ("gfx942", 32, 40000, 4, 1, "shared memory"), ("gfx950", 32, 40000, 4, 4, "shared memory"),
]  # fmt: skip


@pytest.mark.parametrize(("arch", "registers", "shared", "warps", "programs", "bound"), KNOWN)
def test_programs_of_a_multiprocessor(
    arch: str, registers: int, shared: int, warps: int, programs: int, bound: str
) -> None:
    found = occupancy(arch, registers, shared, warps)
    assert (found.programs, found.bound) == (programs, bound), found


def test_what_does_not_fit_and_what_is_not_known() -> None:
    assert occupancy("sm_86", 64, 102400, 4).programs == 0
    assert Occupancy(3, 2, 4, 2).bound == "shared memory"
    with pytest.raises(BackendError, match="occupancy is known of sm_80, .*, got 'sm_70'"):
        occupancy("sm_70", 32, 0, 4)


@pytest.mark.parametrize(("arch", "held"), [("sm_80", 1), ("sm_86", 1), ("sm_90", 2), ("sm_70", 2)])
def test_the_decode_kernel_counts_shared_memory(arch: str, held: int) -> None:
    """96 KiB a program of heads of 64 in f16: two on a Hopper, one on an A100; unknown GPUs have the table's."""
    pytest.importorskip("triton")
    from graphrt.backends.triton.kernels.flash_attn import decode_configs

    config = decode_configs.find_decode_config(64, "f16", "f16")
    shared = decode_configs.shared_bytes(64, "f16", "f16", config)
    assert decode_configs.programs_held(config, shared, arch) == held
