"""Prompts over two GPUs: an ALL_REDUCE over NCCL waited for (0 bands) and beside the product that makes its parts.

First bits: logits of a prompt with bands against without, on both ranks, run launch by launch and captured; if the
vendor's product gives fewer rows other bits, that is said with the NMSE, and more than 1e-6 ends the run. Then times, the
forms in turn. Then what a sum and a product take by themselves, which is what the prediction was made of.
"""

import os
import statistics
import sys
import tempfile
import time

import numpy as np
import torch

DRY = bool(os.environ.get("DRY"))
MODELS = os.environ.get("MODELS", "llama-70b:q4_k_m llama-8b:q4_k_m" if not DRY else "llama-1b:q4_k_m").split()
LAYERS = int(os.environ.get("LAYERS", "0" if not DRY else "2")) or None
#: Tokens of a prompt, and of a step.
TESTS = [(4096, 4096), (4096, 512)] if not DRY else [(256, 256)]
BANDS, TURNS = ("0", "2", "4", "8"), 4


def rank(number: int, size: int, folder: str) -> None:
    if not DRY:
        torch.cuda.set_device(number)
    from graphrt.ranks import join, leave

    ranks = join(number, size, folder, gpus=not DRY)
    begun, table = time.time(), []

    def say(text: str) -> None:
        if number == 0:
            print(f"[{time.time() - begun:5.1f} s] {text}", flush=True)

    def told(text: str) -> None:
        table.append(text)
        say(text)

    if DRY:
        from dataclasses import replace

        from graphrt.backends.cpu import overlap

        overlap.BANDS = replace(overlap.BANDS, bytes=1 << 14, tokens=16)
    else:
        alone(ranks, told)
    for name in MODELS:
        model(name, ranks, say, told)
    if number == 0:
        print("\n==== table", *table, sep="\n", flush=True)
    ranks.told(None)
    leave()
    sys.stdout.flush()
    os._exit(0)


def synchronize() -> None:
    if not DRY:
        torch.cuda.synchronize()


def alone(ranks, told) -> None:
    """Microseconds of a sum over both ranks, and of ffn_down's and attn_output's products, at whole prompts and bands."""
    from graphrt import Graph, get_backend, new_input, ops, prepare
    from graphrt.backend import numbered
    from graphrt.backends.triton.kernels.products.gemm_large import multiply

    backend = get_backend(numbered("triton", ranks.rank), exact=False)

    def us(work, n: int = 12) -> float:
        times = []
        for _ in range(n + 3):
            ranks.everyones(None)
            a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            a.record()
            work()
            b.record()
            b.synchronize()
            times.append(1e3 * a.elapsed_time(b))
        return statistics.median(times[3:])

    for m in (8192, 4096):
        for n in (4096, 2048, 1024, 512, 256):
            x = new_input("f32", m, n, name="x")
            exe = prepare(Graph(ops.all_reduce(ops.scale(x, 1.0), ranks=ranks.size, rank=ranks.rank, name="s")), [backend])
            exe.write("x", np.full((n, m), 1.0 + ranks.rank, np.float32))
            whole = us(exe.run)
            assert float(exe.read("s").min()) == float(exe.read("s").max()) == 3.0
            found = [f"sum {n} x {m} f32, with a pass over it before {whole:.0f} us"]
            for k in (m // 2, 28672 // 2 if m == 8192 else 14336 // 2):
                x16, w, out = (torch.randn(*s, device="cuda") for s in ((n, k), (m, k), (n, m)))
                x16, w = x16.half(), w.half()
                found.append(f"product by {k} {us(lambda: multiply(x16, w, out)):.0f} us")
            told("; ".join(found))


def model(name: str, ranks, say, told) -> None:
    from graphrt import get_backend
    from graphrt.backend import numbered
    from graphrt.models.engine import SessionOptions
    from graphrt.models.model import load
    from graphrt.models.synthetic import synthetic

    backend = get_backend("cpu" if DRY else numbered("triton", ranks.rank), exact=False)
    made = load(synthetic(name, LAYERS), [backend, get_backend("cpu")] if not DRY else [backend], ranks=ranks)
    say(f"{name}: loaded")
    for n, batch in TESTS:
        ids = np.random.default_rng(0).integers(0, made.decoder.hp.n_vocab, n).tolist()
        sessions, first, logits = {}, {}, {}
        for bands in BANDS:
            os.environ["GRAPHRT_OVERLAP"] = bands
            session = sessions[bands] = made.session(SessionOptions(n_ctx=n + 64, n_batch=batch))
            steps = session.executable(batch, 1).splits
            cut = [s for split in steps for s in split.run.steps if s.group.kernel == "overlapped_sum"]
            for turn in range(3):  # compiles, then captures, then replays
                session.reset()
                logits[bands] = np.array(session.eval(ids))
                if turn == 0:
                    first[bands] = logits[bands]
            say(f"pp{n} in steps of {batch}, {bands} bands: prepared, {len(cut)} sums are cut")
            assert bool(cut) == (bands != "0") or (bands != "0" and batch < n), "what is compared is not what was asked for"
        os.environ["GRAPHRT_OVERLAP"] = "0"
        whole = logits["0"]
        assert np.isfinite(whole).all() and whole.std() > 0
        for bands in BANDS:
            same = np.array_equal(logits[bands], whole)
            error = float(((logits[bands] - whole) ** 2).sum() / (whole**2).sum())
            replayed = np.array_equal(first[bands], logits[bands])
            digests = ranks.everyones(logits[bands].tobytes())
            told(
                f"{name} pp{n} in steps of {batch}, {bands} bands: bits of 0 bands {same} (NMSE {error:.1e}), captured as "
                f"launch by launch {replayed}, ranks alike {len(set(digests)) == 1}"
            )
            assert error <= 1e-6 and replayed and len(set(digests)) == 1
        times = {bands: [] for bands in BANDS}
        for _ in range(TURNS):
            for bands, session in sessions.items():
                session.reset()
                synchronize()
                ranks.everyones(None)
                begun = time.perf_counter()
                session.eval(ids)
                times[bands].append(time.perf_counter() - begun)
        base = statistics.median(times["0"])
        told(
            f"{name} pp{n} in steps of {batch}: "
            + "; ".join(
                f"{bands} bands {n / statistics.median(t):.0f} t/s (best {n / min(t):.0f}, {base / statistics.median(t):.3f})"
                for bands, t in times.items()
            )
        )
        del sessions, session
    del made
    if not DRY:
        torch.cuda.empty_cache()


if __name__ == "__main__":
    from torch.multiprocessing.spawn import start_processes

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    start_processes(rank, (2, tempfile.mkdtemp()), 2, start_method="spawn")
