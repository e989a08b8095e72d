"""A made-up device, to see what a server's host does a step: the CPU backend says that it queues its work, graphs are
not run, tokens are made up (those that uploaded masks allow), and a step takes as long as told."""
import time
import numpy as np
import graphrt
from graphrt.execute import Executable
from graphrt.models import step as step_module
from graphrt.models.step_chosen import Chooser
from graphrt.models import synthetic_recipes as R
from graphrt.backends.cpu.memory import CpuBuffer

rng = np.random.default_rng(1)
state = dict(free=0.0, fake=0.0, rows=None, read=4.6e-3, choose=1e-4, tables=None, idle=0.0, ran=0, vocab=0)

def queue(seconds):
    now = time.perf_counter()
    state["idle"] += max(0.0, now - state["free"])  # the device had nothing to do
    state["free"] = max(now, state["free"]) + seconds

def made_up(rows, tables, n_seq):
    n_vocab = state["vocab"]
    out = rng.integers(300, n_vocab, n_seq).astype(np.int32)
    mask = None
    for slot, target in (zip(rows.slots, rows.targets) if hasattr(rows, 'slots') else ((r.slot, r.target) for r in rows)):
        settings = tables._settings.get(slot) if tables is not None else None
        if settings is not None and settings.masked and target >= 0:
            if mask is None:
                mask = tables.mask.buffer._bytes.view(np.uint32).reshape(-1, tables.mask.ne[0])
            words = mask[slot]
            nz = np.flatnonzero(words)
            if not len(nz):
                out[target] = 300; continue
            w = int(nz[rng.integers(len(nz))])
            bits = [b for b in range(32) if int(words[w]) >> b & 1]
            out[target] = 32 * w + bits[rng.integers(len(bits))]
    return out

def install(read=4.6e-3, choose=1e-4, vocab=128256):
    state.update(read=read, choose=choose, vocab=vocab)
    R.RECIPES["tiny-wide"] = R.Recipe("llama", R._keys(vocab, 131072, 256, 1, 256, (4, 4), 64, 1e-5, 500000.0), False, "q8_0")
    home = graphrt.get_backend("cpu").__class__
    home.asynchronous = True
    home.reads_shared_once = True
    step_module.Filled.in_place = property(lambda self: False)
    step_module.AnyStep.logits_stay = property(lambda self: False)
    original = Chooser.choose
    choosing = [False]

    def run(exe):
        queue(state["choose"] if choosing[0] else state["read"])
        state["ran"] += not choosing[0]

    def choose(self, rows):
        choosing[0] = True
        original(self, rows)
        choosing[0] = False
        state["rows"] = rows

    def read_later(self, offset, nbytes):
        rows, end = state["rows"], state["free"]
        def wait():
            began = time.thread_time()
            out = made_up(rows, state["tables"], nbytes // 4)
            state["fake"] += time.thread_time() - began
            left = end - time.perf_counter()
            if left > 0:
                time.sleep(left)
            return out.view(np.uint8)
        return wait

    Executable.run = run
    Chooser.choose = choose
    CpuBuffer.read_later = read_later

    from graphrt.models.sampling_device import SampleTables
    post = SampleTables.__post_init__
    def seen(self):
        post(self); state["tables"] = self
    SampleTables.__post_init__ = seen
