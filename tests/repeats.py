"""Runs a masked attention again and again, and says how many results differ from the first.

python repeats.py SECONDS D: prints `differing of runs`. Meant to run several times at once: processes that take turns
on a GPU stop each other's kernels in the middle, and what only works by good timing shows.
"""

import sys
import time

import torch

from graphrt.backend import get_backend
from graphrt.testing import all_cases
from graphrt.tools.conformance.guard import Guarded


def main(seconds: float, d: int) -> None:
    sizes = f"hsk={d},hsv={d},nh=4,nr23=[1,1],kv=512,nb=75,mask=1,sinks=0,max_bias=0.0"
    case = next(c for c in all_cases(which="ggml") if sizes in str(c) and "type_K=f16,type_V=f16" in str(c))
    inputs = case.build(0)
    guarded = Guarded(get_backend("triton", capture=False), inputs, inputs.graph())
    guarded.run()
    buffer, offset = guarded.place(guarded.node)
    out = buffer.memory[offset : offset + guarded.node.nbytes]
    first, runs, differing = out.clone(), 0, 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(64):
            out.fill_(0xFF)
            guarded.program()
            differing += (out != first).any()
        runs += 64
        torch.cuda.synchronize()
    print(int(differing), "of", runs)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
