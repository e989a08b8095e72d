"""The first exp of a process, by several threads: how often is it wrong? See backends/cpu/vector_functions.py.

    python tests/support/first_calls.py [--seconds 60] [--threads 32] [--settled]

Each process is forked from one that has loaded torch and called nothing. --settled: it imports the CPU backend's
vector_functions first, as everything does that imports the CPU backend.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from pathlib import Path

import numpy as np
import torch

#: More than float32's exp is ever off by, relatively; MKL's coarse code is off by up to 1.5e-4.
WRONG = 1e-6
SETTLES = Path(__file__).resolve().parents[2] / "backends/cpu/vector_functions.py"


def child(x: torch.Tensor, expected: np.ndarray, threads: int, settled: bool) -> int:
    """The exit code: 0 where exp is right, 3 where it is not."""
    torch.set_num_threads(threads)
    if settled:
        spec = importlib.util.spec_from_file_location("vector_functions", SETTLES)
        assert spec is not None and spec.loader is not None
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    error = np.abs(torch.exp(x).numpy().astype(np.float64) / expected - 1.0)
    wrong = int((error > WRONG).sum())
    if wrong:
        print(f"{wrong} of {error.size} elements are up to {error.max():.3g} off", flush=True)
    return 3 if wrong else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--threads", type=int, default=32)
    parser.add_argument("--settled", action="store_true")
    args = parser.parse_args()
    x = -torch.arange(12_096) / 2_000.0
    expected = np.exp(x.numpy().astype(np.float64))
    end, processes, wrong = time.monotonic() + args.seconds, 0, 0
    while time.monotonic() < end:
        pid = os.fork()
        if pid == 0:
            os._exit(child(x, expected, args.threads, args.settled))
        processes, wrong = processes + 1, wrong + (os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0)
    print(f"{wrong} of {processes} processes were wrong")


if __name__ == "__main__":
    main()
