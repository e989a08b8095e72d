"""Every row of the configurations' tables compiles for its GPU, without one: no spills in loops, memory fits."""

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
#: f32 caches with heads over 256 on CDNA3, where the sums alone fill the registers: they work, slowly.
SPILLING = ("gfx942", "(512, 512)", "'f32'")


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("arch", SHARED)
def test_config_rows_compile(arch: str, part: int) -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), str(HERE)])
    command = [sys.executable, str(HERE / "aot.py"), arch, f"{part}/{PARTS}"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert kernels, "no row of this part"
    for kernel in kernels:
        assert kernel["shared"] <= SHARED[arch], kernel
        assert kernel["loop_spills"] == 0 or all(part in kernel["name"] for part in SPILLING), kernel
