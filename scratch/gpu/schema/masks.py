"""Ways to find masks of 64 texts: time of each."""
import time, sys
import numpy as np
import graphrt
from graphrt.models.model import Model
from graphrt.models.synthetic import synthetic
from graphrt.models import synthetic_recipes as R
from graphrt.models.grammar import GrammarVocab
from llguidance import LLExecutor
R.RECIPES["tiny-wide"] = R.Recipe("llama", R._keys(128256, 131072, 256, 1, 256, (4, 4), 64, 1e-5, 500000.0), False, "q8_0")
model = Model(synthetic("tiny-wide", vocabulary=True), [graphrt.get_backend("cpu")])
v = GrammarVocab(model.tokenizer)
S = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 24}, "age": {"type": "integer"},
  "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 2, "maxItems": 400}, "ok": {"type": "boolean"}},
  "required": ["name", "age", "tags", "ok"], "additionalProperties": False}
rng = np.random.default_rng(1)
def pick(bits):
    nz = np.flatnonzero(bits); w = int(nz[rng.integers(len(nz))]); return 32*w + int(rng.choice([b for b in range(32) if int(bits[w])>>b&1]))
def play(how, n=64, steps=60):
    ms = [v.matcher(None, S)._matcher for _ in range(n)]
    rows = np.zeros((n, 4008), np.uint32)
    tm = tc = 0.0; hist=[]
    ex = LLExecutor(how) if how else None
    forced = 0
    for s in range(steps):
        a = time.perf_counter()
        if ex:
            ex.unsafe_compute_mask_ptr([(m, i) for i, m in enumerate(ms)], rows.ctypes.data, rows.strides[0], n)
        else:
            base, st = rows.ctypes.data, rows.strides[0]
            for i, m in enumerate(ms): m.unsafe_compute_mask_ptr(base + i*st, st)
        b = time.perf_counter()
        toks = [pick(r) if r.any() else 2 for r in rows]
        forced += sum(int(np.bitwise_count(r).sum()) == 1 for r in rows)
        c = time.perf_counter()
        if ex: ex.consume_token_par(list(zip(ms, toks)))
        else:
            for m, t in zip(ms, toks): m.consume_token(t)
        d = time.perf_counter()
        tm += b-a; tc += d-c
        for i, m in enumerate(ms):
            if m.is_stopped(): ms[i] = v.matcher(None, S)._matcher
    print(how, f"masks {tm/steps*1e3:.2f} ms, consume {tc/steps*1e3:.2f} ms, forced {forced/steps/n:.2f}", flush=True)
for _ in range(2):
    for how in (0, 1, 2): play(how)
