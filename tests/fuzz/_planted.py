"""A fuzzer with a bug for each kind of finding, at known seeds: what tests of the frame run."""

from __future__ import annotations

import ctypes
import sys
import time

import numpy as np

from graphrt.errors import ArchError

NAME = "planted"
HANG, SPIN, CRASH, MEMORY, ADDRESS_SPACE, EXCEPTION, REFUSED, EXIT, READS = 3, 5, 7, 9, 11, 13, 15, 17, 19


def make(seed: int) -> bytes:
    return bytes([seed])


def attempt(data: bytes) -> str:
    seed = data[0]
    if seed == HANG:
        time.sleep(1e6)
    while seed == SPIN:
        pass
    if seed == CRASH:
        ctypes.string_at(0)
    if seed == MEMORY:
        taken = np.empty(350 << 20, np.uint8)
        taken[::4096] = 1  # touches every page
    if seed == ADDRESS_SPACE:
        return f"{len(np.empty(1 << 44, np.uint8))} bytes"
    if seed == EXCEPTION:
        raise ValueError("planted")
    if seed == REFUSED:
        raise ArchError("planted")
    if seed == EXIT:
        raise SystemExit(0)
    if seed == READS:
        return sys.stdin.read() or "fine"  # a verb that takes its prompt from there
    return "fine"
