"""One model on one or two ranks: checked, timed as `graphrt bench` does, and its step by kernels.

argv: 8b or gpt, ranks, and of one rank the GPU. Of several ranks variants take turns. Before anything is timed: logits
of a prompt have the same bits on all ranks, and an NMSE to those of one rank (kept in $OUT) of 1e-2 at most.
"""

import faulthandler
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

DRY, OUT = bool(os.environ.get("DRY")), Path(os.environ["OUT"])
KIND, SIZE = sys.argv[1], int(sys.argv[2])
GPU = int(sys.argv[3]) if len(sys.argv) > 3 else 0
NAME = {"8b": "llama-8b:q4_k_m", "gpt": "gpt-oss-120b"}[KIND] if not DRY else {"8b": "llama-1b:q4_k_m", "gpt": "gpt-oss-20b"}[KIND]
LAYERS = (2 if KIND == "8b" else 1) if DRY else None
BATCH, TOKENS = (64 if KIND == "8b" else 1, 128) if not DRY else (4 if KIND == "8b" else 1, 6)
TURNS = 4 if not DRY else 1
#: What is set for a variant: GRAPHRT_OVERLAP, and the bits of sums, which ranks agree on when they meet.
VARIANTS = {"plain": ("0", 32), "overlap-2": ("2", 32), "sum-bits-16": ("0", 16)} if SIZE > 1 else {"plain": ("0", 32)}
if SIZE > 1 and KIND == "gpt":
    # The first product behind attention has rows of 2048 on two ranks, 4096 on one: it may round its activations itself,
    # a launch less; and rows that ranks have cut to 2048 and less are rounded in two parts, which doubles integer products.
    VARIANTS |= {"inline": ("0", 32), "one-part": ("0", 32)}
BEGUN = time.time()


def say(number: int, text: str) -> None:
    if number == 0:
        print(f"[{time.time() - BEGUN:5.1f} s] {text}", flush=True)


class Limit:
    """A phase that takes longer ends this process, after saying where it stands."""

    def __init__(self, number: int, name: str, seconds: float) -> None:
        self.number, self.name, self.seconds = number, name, seconds

    def __enter__(self) -> None:
        self.timer = threading.Timer(self.seconds, self.give_up)
        self.timer.daemon = True
        self.timer.start()

    def __exit__(self, *_: object) -> None:
        self.timer.cancel()

    def give_up(self) -> None:
        print(f"[{time.time() - BEGUN:5.1f} s] GAVE UP {self.name} on rank {self.number} after {self.seconds} s", flush=True)
        faulthandler.dump_traceback(all_threads=True)
        os._exit(3)


def set_variant(how: str, ranks) -> None:
    bands, bits = VARIANTS[how]
    os.environ["GRAPHRT_OVERLAP"] = bands
    from graphrt.backends.triton.kernels.products import activations, plan

    plan.INLINE_WORK = 1 << 22 if how == "inline" else 1 << 20
    activations.MAX_TWO_PARTS = 1024 if how == "one-part" else 2048
    if ranks is not None:
        from graphrt import ranks as module
        from graphrt.peers import Peers

        if module._shared and isinstance(module._shared[-1], Peers):
            module._shared[-1] = replace(module._shared[-1], bits=bits)


def run(number: int, folder: str) -> None:
    if not DRY:
        torch.cuda.set_device(number if SIZE > 1 else GPU)
    from graphrt import get_backend
    from graphrt.backend import numbered
    from graphrt.models.engine import SessionOptions
    from graphrt.models.model import load
    from graphrt.models.synthetic import synthetic
    from graphrt.tools.bench.model import Prepared
    from graphrt.tools.bench.workload import Batch, Test

    ranks = None
    if SIZE > 1:
        from graphrt.ranks import join

        with Limit(number, "join", 40):
            ranks = join(number, SIZE, folder, gpus=not DRY)
            if not DRY:
                from graphrt.ranks import peers

                say(number, f"memory that ranks share: {type(peers(SIZE)).__name__} {peers(SIZE) if isinstance(peers(SIZE), str) else ''}")
    everyones = (lambda value: [value]) if ranks is None else ranks.everyones
    with Limit(number, "load", 100):
        device = number if SIZE > 1 else GPU
        backends = [get_backend("cpu", exact=False)]
        if not DRY:
            backends.insert(0, get_backend(numbered("triton", device), exact=False))
        more = {} if ranks is None else {"ranks": ranks}
        model = load(synthetic(NAME, LAYERS), backends, **more)
    say(number, f"{NAME}: loaded on {SIZE}")
    vocab = model.decoder.hp.n_vocab
    ids = np.random.default_rng(0).integers(0, vocab, 4096 + BATCH + TOKENS + 64)
    test = Test("tg", TOKENS, 0, Batch(BATCH))
    prepared, times = {}, defaultdict(list)
    for how in VARIANTS:
        if how == "overlap-2" and not DRY:
            continue  # no sum of a step has two bands: it is for prompts
        set_variant(how, ranks)
        with Limit(number, f"{how}: compile", 60):
            prepared[how] = Prepared(model, test, SessionOptions(n_ctx=TOKENS + 64), ids)
            checked(number, how, prepared[how].engine, ids, everyones)
            for _ in range(2):
                prepared[how].once()
        say(number, f"{how}: prepared")
    with Limit(number, "timing", 40):
        for _ in range(TURNS):
            for how, each in prepared.items():
                everyones(None)
                times[how].append(each.once())
    for how, found in times.items():
        rate = BATCH * TOKENS / statistics.median(found)
        name = str(test).replace(" ", "")
        say(number, f"{NAME} {test}, {SIZE} ranks, {how}: {rate:.0f} t/s (best {BATCH * TOKENS / min(found):.0f}); RATE {NAME} {SIZE} {name} {how} {rate:.1f}")
    for how, each in prepared.items():
        with Limit(number, f"{how}: profile", 40):
            profile(number, how, each, everyones)
    del prepared, each
    if KIND == "8b":
        with Limit(number, "prompts", 80):
            prompts(number, model, ids, ranks, everyones)
    everyones(None)
    sys.stdout.flush()
    os._exit(0)


def checked(number: int, how: str, engine, ids, everyones) -> None:
    """Logits of a short prompt: alike on all ranks, and those of one rank but for rounding."""
    logits = np.array(engine.read({seq: [int(t) for t in ids[7 * seq : 7 * seq + 5]] for seq in range(BATCH)}))
    assert np.isfinite(logits).all() and logits.std() > 0
    alike = len(set(everyones(logits.tobytes()))) == 1
    path = OUT / f"{KIND}{'-dry' * DRY}.npy"
    if SIZE == 1:
        np.save(path, logits)
    elif path.exists() and np.load(path).shape == logits.shape:
        one = np.load(path)
        error = float(((logits - one) ** 2).sum() / (one**2).sum())
        say(number, f"{how}: bits alike on all ranks {alike}, NMSE to one rank {error:.1e}")
        assert error < 1e-2  # activations of 8 bits, rounded elsewhere; weights are random
    assert alike
    for seq in range(BATCH):
        engine.lengths[seq] = 0


def profile(number: int, how: str, prepared, everyones) -> None:
    """Kernels of rank 0, a step: how long each takes, and by how much each lets the end of all come later."""
    if DRY:
        return
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    steps = 12
    test = prepared.test
    prepared.test = replace(test, n=steps)
    prepared.once()
    everyones(None)
    if number:
        prepared.once()
    else:
        with profiler(activities=[ProfilerActivity.CUDA]) as found:
            prepared.once()
            torch.cuda.synchronize()
        report(how, found, steps)
    prepared.test = test
    everyones(None)


def report(how: str, found, steps: int) -> None:
    spans = sorted(
        (e.time_range.start, e.time_range.end, e.name) for e in found.events() if str(e.device_type).endswith("CUDA")
    )
    takes, later, calls, end = defaultdict(float), defaultdict(float), defaultdict(int), None
    for start, stop, name in sorted(spans, key=lambda s: s[1]):
        name = name[:70]
        takes[name] += stop - start
        calls[name] += 1
        later[name] += 0 if end is None else max(0.0, stop - end)
        end = stop if end is None else max(end, stop)
    whole = (spans[-1][1] - spans[0][0]) / steps if spans else 0
    print(f"[{time.time() - BEGUN:5.1f} s] {NAME}, {SIZE} ranks, {how}: a step of {whole:.0f} us with the profiler on, {len(spans) / steps:.0f} launches", flush=True)
    print(f"  kernel ({KIND}, {SIZE}, {how}): launches a step, us each, us a step, us by which it lets the end come later")
    for name in sorted(later, key=later.get, reverse=True)[:32]:
        print(f"  kernel {calls[name] / steps:6.1f} {takes[name] / calls[name]:8.2f} {takes[name] / steps:9.1f} {later[name] / steps:9.1f}  {name}")


def prompts(number: int, model, ids, ranks, everyones) -> None:
    """pp4096 in steps of 4096, bands of --overlap in turn."""
    from graphrt.models.engine import SessionOptions

    n = 4096 if not DRY else 64
    sessions, times = {}, defaultdict(list)
    for how in VARIANTS:
        if how == "sum-bits-16":
            continue  # sums of so many rows go over NCCL
        set_variant(how, ranks)
        sessions[how] = model.session(SessionOptions(n_ctx=n + 64, n_batch=n))
        for _ in range(3):
            sessions[how].reset()
            sessions[how].eval(ids[:n].tolist())
    for _ in range(TURNS):
        for how, session in sessions.items():
            session.reset()
            everyones(None)
            begun = time.perf_counter()
            session.eval(ids[:n].tolist())
            times[how].append(time.perf_counter() - begun)
    for how, found in times.items():
        rate = n / statistics.median(found)
        say(number, f"{NAME} pp{n}, {SIZE} ranks, {how}: {rate:.0f} t/s; RATE {NAME} {SIZE} pp{n} {how} {rate:.1f}")


if __name__ == "__main__":
    if SIZE == 1:
        run(0, "")
    else:
        from torch.multiprocessing.spawn import start_processes

        start_processes(run, (tempfile.mkdtemp(),), SIZE, start_method="spawn")
