"""Prefill at a 70B's shapes on one GPU: is ffn_down's slice of 4,681 rows what makes it slow?

Two ways to cut matrices that are larger than the scratch, in turn in one process: "old" as many rows as fit (4,681 of
8,192, at odd addresses), "new" whole tiles (4,096). argv[1]: cuda, or cpu for a dry run. Prints a table last.
"""

import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from graphrt.backends.triton.kernels.products import gemm_large
from graphrt.models.engine import SessionOptions
from graphrt.models.model import load
from graphrt.models.session import Session
from graphrt.models.synthetic import synthetic
from graphrt.tools.bench.model import _product_flops
from graphrt.tools.profile.report import lines
from graphrt.tools.profile.session import profile_session

CUDA = sys.argv[1] == "cuda"
OUT = Path(sys.argv[2])
BEGUN, LEFT = time.time(), 100
TABLE: list[str] = []


def say(text: str) -> None:
    print(f"[{time.time() - BEGUN:5.1f} s] {text}", flush=True)


def told(text: str) -> None:
    TABLE.append(text)
    say(text)


def old(m: int, k: int):
    step = max(1, gemm_large.SCRATCH // (2 * k))
    for first in range(0, m, step):
        yield first, min(first + step, m)


NEW = gemm_large.slices


def clocks() -> str:
    ask = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_event_reasons.active", "--format=csv,noheader"]
    try:
        return subprocess.run(ask, capture_output=True, text=True, timeout=10).stdout.strip()
    except OSError as error:
        return str(error)


def seconds(work, n: int) -> float:
    """The median of n events."""
    times = []
    for _ in range(n + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times[2:])


def ceilings() -> None:
    a, b = (torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    copy = 2 * a.numel() / seconds(lambda: b.copy_(a), 10) / 1e12
    x, w = (torch.randn(8192, 8192, device="cuda").half() for _ in range(2))
    short = 2 * 8192**3 / seconds(lambda: x @ w, 8) / 1e12
    until, n, begun = time.time() + 2.5, 0, time.time()
    while time.time() < until:
        for _ in range(20):
            x @ w
        torch.cuda.synchronize()
        n += 20
    long = n * 2 * 8192**3 / (time.time() - begun) / 1e12
    told(f"ceilings: copy {copy:.2f} TB/s, f16 products 8192^3 {short:.0f} TFLOP/s, for 2.5 s on end {long:.0f}; then {clocks()}")


def products() -> None:
    """ffn_down's product alone, weights in f16: whole, and in both slices."""
    k, m = 28672, 8192
    w = torch.randn(m, k, device="cuda").half()
    for n in (512, 4096):
        x = torch.randn(n, k, device="cuda").half()
        whole, out = torch.empty(n, m, device="cuda"), torch.full((n, m), float("nan"), device="cuda")
        gemm_large.multiply(x, w, whole)
        found = [f"whole {2 * n * m * k / seconds(lambda: gemm_large.multiply(x, w, whole), 6) / 1e12:.0f}"]
        for name, cut in (("old", old), ("new", NEW), ("old", old), ("new", NEW)):
            parts = list(cut(m, k))

            def run() -> None:
                for a, b in parts:
                    gemm_large.multiply(x, w[a:b], out[:, a:b])

            out.fill_(float("nan"))
            run()
            error = ((out - whole).norm() / whole.norm()).item()
            assert error < 1e-3, (name, error)
            found.append(f"{name} {2 * n * m * k / seconds(run, 6) / 1e12:.0f}")
        told(f"product {n} x {k} x {m}, TFLOP/s: " + ", ".join(found))
    torch.cuda.empty_cache()


def model_of(name: str, layers: int):
    model = load(synthetic(name, layers), "triton" if CUDA else "cpu")
    say(f"{name}, {layers} layers: loaded; {_product_flops(model) / 1e9:.2f} GFLOP a token")
    return model


def measured(model, label: str, tests, cuts, repetitions: int = 3) -> dict[str, Session]:
    """t/s and TFLOP/s of products of prompts, each cut in turn. tests: tokens and batch."""
    n_vocab, flops = model.decoder.hp.n_vocab, _product_flops(model)
    for n, batch in tests:
        ids = np.random.default_rng(0).integers(0, n_vocab, n).tolist()
        sessions, logits, times = {}, {}, {name: [] for name in cuts}
        for name, cut in cuts.items():
            gemm_large.slices = cut
            session = sessions[name] = Session(model.decoder, model.backends, SessionOptions(n_ctx=n + 64, n_batch=batch))
            for _ in range(3):  # compiles, then captures
                session.reset()
                logits[name] = session.eval(ids)
            say(f"{label} {name} pp{n}, batches of {batch}: prepared")
        gemm_large.slices = NEW
        assert all(np.isfinite(found).all() for found in logits.values())
        first = logits[next(iter(cuts))]
        errors = [float(((found - first) ** 2).sum() / (first**2).sum()) for found in logits.values()]
        assert max(errors) < 1e-4, errors
        for _ in range(repetitions):
            for name, session in sessions.items():
                session.reset()
                begun = time.perf_counter()
                session.eval(ids)
                times[name].append(time.perf_counter() - begun)
        text = [f"{name} {n / min(t):.0f} t/s = {flops * n / min(t) / 1e12:.0f} TFLOP/s" for name, t in times.items()]
        told(f"{label} pp{n}, batches of {batch}: " + "; ".join(text) + f"; NMSE between them {max(errors):.1e}")
    return sessions


def profiled(session: Session, label: str, n: int, cut=NEW) -> None:
    gemm_large.slices = cut
    ids = np.random.default_rng(0).integers(0, session.decoder.hp.n_vocab, n).tolist()
    session.reset()
    found = profile_session(session, ids, 2, OUT / f"{label}.trace.json")
    gemm_large.slices = NEW
    print(f"\n---- {label}", *lines(found[:1]), sep="\n", flush=True)
    (OUT / f"{label}.trace.json").unlink()  # large, and all that is wanted is printed


def main() -> None:
    both = {"old": old, "new": NEW}
    if CUDA:
        ceilings()
        products()
    big, small, layers = ("llama-70b:q4_k_m", "llama-8b:q4_k_m", 8) if CUDA else ("smollm2-135m", "gemma3-270m", 2)
    tests = [(512, 512), (4096, 512), (4096, 4096)] if CUDA else [(64, 64), (96, 32)]
    if not CUDA:
        gemm_large.SCRATCH = 1 << 16
    model = model_of(big, layers)
    sessions = measured(model, f"{big} of {layers} layers", tests, both)
    told(f"clocks behind it: {clocks()}")
    profiled(sessions["new"], "70b-pp4096-new", tests[-1][0])
    if time.time() - BEGUN < LEFT - 40:
        profiled(sessions["old"], "70b-pp4096-old", tests[-1][0], old)
    del model, sessions
    if CUDA:
        torch.cuda.empty_cache()
    model = model_of(small, layers)
    sessions = measured(model, f"{small} of {layers} layers", [tests[0], tests[-1]], {"new": NEW})
    profiled(sessions["new"], "8b-pp4096", tests[-1][0])
    del model, sessions
    if CUDA and time.time() - BEGUN < LEFT - 15:
        torch.cuda.empty_cache()
        model = model_of(big, 80)
        measured(model, f"{big} whole", [(4096, 4096)], {"new": NEW}, 2)
        told(f"clocks behind it: {clocks()}")
    print("\n==== table", *TABLE, sep="\n", flush=True)


main()
