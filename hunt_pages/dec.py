"""Temporary: configurations of decode over pages."""
import sys, json
import numpy as np, torch
import graphrt
from graphrt.backend import get_backend
from graphrt.graph import Graph
from graphrt.tools.bench import varlen
from graphrt.tools.bench.op_inputs import Noise
from graphrt.tools.bench.timing import CudaClock
from graphrt.tools.bench.varlen_shapes import VarlenShape
from graphrt.tools.bench.workload import Batch
import graphrt.backends.triton.kernels.flash_attn.decode_configs as dc
import graphrt.backends.triton.kernels.flash_attn.varlen.decode_launch as dl
only = sys.argv[1] == "compile"
lengths = [n + 32 for n in Batch.of("ragged:64:2048").lengths]
def shape(name, lengths, page): return VarlenShape("pa_decode", name, "llama-8b", tuple((1, n) for n in lengths), page)
SHAPES = [(shape("rag64 p64", lengths, 64), 1), (shape("64x250", [250] * 64, 64), 4)]
noise, clock, backend = Noise(), CudaClock(), get_backend("triton")
for var in json.loads(sys.argv[2]):
    *cfg, lead = var
    dc.CONFIGS[(128, "half")] = dc.Config(*cfg); dl.VarlenDecode.lead = lead
    said = []
    for s, nodes in SHAPES:
        program = varlen.build(s, nodes, noise)
        exe = graphrt.prepare(Graph(*program.nodes), backend)
        for leaf, values in program.values.items(): exe.write(leaf, values.reshape(leaf.shape))
        for _ in range(3): exe.run()
        exe.synchronize()
        if only: continue
        bad = ''
        us = 1e6 * clock.times(exe.run, 60, exe.synchronize).median / nodes
        said.append(f"{s.name} {us:7.2f} us {s.bytes / us / 1e6:.2f} TB/s {bad}")
        del exe, program
    if not only: print(var, " | ".join(said), flush=True)
