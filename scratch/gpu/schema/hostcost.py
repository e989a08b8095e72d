"""python hostcost.py free|schema|drawn [n_texts] [profile]: the worker's part alone, no HTTP."""
import sys, time, cProfile, pstats
sys.path.insert(0, __file__.rsplit("/", 1)[0])
import fake_device
what, n = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 64
read = float(sys.argv[3]) if len(sys.argv) > 3 else 4.6e-3
fake_device.install(read=read)
import json
from graphrt.models.model import Model
from graphrt.models.synthetic import synthetic
from graphrt.models.engine import SessionOptions
from graphrt.models.engine_paged import PagedEngine
from graphrt.models.sampling_params import SamplerParams
from graphrt.models.generation import TextRules
from graphrt.tools.serve.scheduler import Scheduler, Text
import graphrt
sys.setswitchinterval(0.0005)
model = Model(synthetic("tiny-wide", vocabulary=True), [graphrt.get_backend("cpu")])
engine = PagedEngine(model.decoder, model.backends, SessionOptions(n_ctx=5120, n_batch=2048, page=64, n_pages=4096), 256)
sched = Scheduler(engine)
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 24}, "age": {"type": "integer"},
  "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 2, "maxItems": 400}, "ok": {"type": "boolean"}},
  "required": ["name", "age", "tags", "ok"], "additionalProperties": False}
LONG = {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 400}
rules = TextRules(-1, json_schema=LONG if what == "long" else SCHEMA) if what in ("schema", "long") else TextRules(-1, ignore_eos=True)
params = SamplerParams(temp=0.8 if what != "greedy" else 0.0, seed=5)
def add(i):
    sampler, pieces = model.new_text(params, rules)
    t = Text([5 + i % 200, 7, 9, *range(300 + i, 420 + i)], 400, sampler, pieces)
    sched.add(t)
for i in range(n): add(i)
k = n
def turn():
    global k
    ev = sched.step()
    for e in ev:
        if e.error is not None: print("error", e.error)
        if e.error is not None or e.piece.finish:
            add(k); k += 1
    return len(ev)
for _ in range(30): turn()
if "phases" in sys.argv:
    import phases
    from graphrt.models import continuous_batch as cb, batch_reads, paged_steps, step_chosen, step_paged, sampling_device
    from graphrt.models.paging import pool
    from graphrt.tools.serve import scheduler as sm
    T = phases.timed
    for name in ("_has_room", "_written", "_choose", "_taken", "_run", "_allow", "_queue_ahead"):
        if hasattr(cb.ContinuousBatch, name): T(cb.ContinuousBatch, name)
    T(batch_reads.ReadPlan, "next"); T(cb, "rows_of", "rows_of"); T(cb, "sources_of", "sources_of")
    T(pool.PagePool, "append"); T(paged_steps.PagedSteps, "plan"); T(paged_steps.PagedSteps, "choosing"); T(step_paged.PagedStep, "write")
    T(sampling_device.SampleTables, "allow")
    T(sm.Scheduler, "_step_batch"); T(sm.Scheduler, "_admit"); T(sm.Scheduler, "step"); T(cb.ContinuousBatch, "step")
if "profile" in sys.argv:
    pr = cProfile.Profile(); pr.enable()
steps, tokens, waited = 0, 0, 0.0
t0, c0, f0, i0 = time.perf_counter(), time.thread_time(), fake_device.state["fake"], fake_device.state["idle"]
while steps < 200:
    tokens += turn(); steps += 1
    waited += sum(t.waited for t in sched.times)
t1, c1, f1 = time.perf_counter(), time.thread_time(), fake_device.state["fake"]
if "profile" in sys.argv:
    pr.disable(); pstats.Stats(pr).sort_stats("tottime").print_stats(38)
if "phases" in sys.argv: phases.show(steps)
print(f"{what} {n} texts: wall {(t1-t0)/steps*1e3:.2f} ms a step ({tokens/(t1-t0):.0f} t/s), worker CPU {(c1-c0-f1+f0)/steps*1e3:.2f} ms, device idle {(fake_device.state['idle']-i0)/steps*1e3:.2f}, waits {waited/steps*1e3:.2f}")
sched.close()
