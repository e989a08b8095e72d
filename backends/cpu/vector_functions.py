"""exp, log and their like are called once, on one number, before anything computes with them.

torch's builds for Intel and AMD have these from MKL, which finds out what the processor is at the first call of one of
them. Where that call is shared by several threads (from some thousand elements on), some of them may not wait for the
answer, and take code with 12 bits: results that are up to 1.5e-4 off, once in a process and in one of some hundred
processes. A call of one number has one thread. tests/support/first_calls.py shows both.
"""

from __future__ import annotations

import torch

#: Those of torch's functions that come from MKL and that forms of the CPU backend or its reference use.
NAMES = ("exp", "log", "sqrt", "sin", "cos", "tanh", "erf", "erfc")


def settle() -> None:
    """Calls each once, for both of the types that MKL has them for."""
    for name in NAMES:
        for kind in (torch.float32, torch.float64):
            getattr(torch, name)(torch.full((1,), 0.5, dtype=kind))


settle()
