"""Kernels compile for GPUs, without one: every row of the configurations' tables for its own, products and experts for

sm_90, and a part of all else and for the others (GRAPHRT_AOT=all: all). No spills in loops, memory fits, no register is
read unset, no wgmma waits for the one before it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).resolve().parent
#: As in aot.py, which can't be imported where kernels are interpreted.
SHARED = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536}
PARTS = 3
#: Kernels that spill in a loop and are kept: parts of their names, and why.
SPILLING = {
    ("gfx942", "(512, 512)", "'f32'"): "the sums alone fill the registers",
    ("sm_90 decode", "(256, 256)", "q8_0"): "41 us where the portable kernel takes 57 (D256, GQA 16, 20000 keys, H100)",
    ("sm_90 decode", "(256, 256)", "q4_0"): "as q8_0",
    ("sm_90 prefill", "(128, 128)", "q8_0"): "with a mask; 352 TFLOP/s where blocks of 64 keys give 333 (H100)",
}


def _kept(name: str) -> bool:
    return any(all(part in name for part in parts) for parts in SPILLING)


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("arch", SHARED)
def test_kernels_compile(arch: str, part: int) -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), str(HERE)])
    command = [sys.executable, str(HERE / "aot.py"), arch, f"{part}/{PARTS}"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert kernels, "no kernel of this part"
    for kernel in kernels:
        assert kernel["shared"] <= SHARED[arch], kernel
        assert not kernel["unset"], kernel
        assert not kernel["serialized"], kernel
        assert kernel["loop_spills"] == 0 or _kept(kernel["name"]), kernel
