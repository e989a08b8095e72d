"""An 8B's decode step at a depth, by caches and configurations of the decode kernel, sessions in turn in one process.

    model.py DEPTH [warm] SPEC...      SPEC: KIND[/CONFIG], CONFIG as forms.py has it; TINY=1: a dry run on a CPU
"""

from __future__ import annotations

import os
import statistics
import sys
import time

import numpy as np

from graphrt.backends.triton.kernels.flash_attn import decode_configs, decode_launch
from graphrt.models.engine import SessionOptions
from graphrt.models.model import Model
from graphrt.models.synthetic import synthetic
from graphrt.tools.bench.model import Prepared, backends_for
from graphrt.tools.bench.workload import Test

TINY = bool(os.environ.get("TINY"))
TABLE = decode_configs.find_decode_config


def chosen_by(text):
    known = [int(n) for n in text.split(",")]
    return decode_configs.Config(*known[:5], *(bool(n) for n in known[5:6]), *known[6:])


def main() -> None:
    depth, *specs = sys.argv[1:]
    warm = "warm" in specs
    specs = [s for s in specs if s != "warm"]
    depth, n, rounds = (40, 8, 2) if TINY else (int(depth), 128, 1 if warm else 6)
    made = Model(synthetic("tiny" if TINY else "llama-8b:q4_k_m"), backends_for("cpu" if TINY else "triton", False), 1)
    test = Test("tg", n, depth)
    ids = np.random.default_rng(0).integers(5, 200 if TINY else 120000, test.end).tolist()
    prepared, logits, times = {}, {}, {}
    for spec in specs:
        kind, _, config = spec.partition("/")
        decode_configs.find_decode_config = (lambda *a, c=chosen_by(config), **k: c) if config else TABLE
        decode_launch.JOIN_BYTES = 1 << 20 if config and chosen_by(config).join else 96 << 10
        began = time.perf_counter()
        try:
            p = Prepared(made, test, SessionOptions(n_ctx=test.end + 64, n_batch=64 if TINY else 2048, type_k=kind, type_v=kind), ids)
            p.once()
            p._put_back()
            logits[spec] = p.engine.read({0: ids[depth : depth + 1]})[0].astype(np.float64)
            p.once()
            p.once()
        except Exception as error:  # the others go on
            print(f"FAILED {spec}: {type(error).__name__}: {str(error)[:400]}", flush=True)
            continue
        prepared[spec], times[spec] = p, []
        print(f"{spec}: ready after {time.perf_counter() - began:.1f} s", flush=True)
    if warm:
        return
    for r in range(rounds):
        for spec in list(prepared) if r % 2 == 0 else list(prepared)[::-1]:
            times[spec].append(prepared[spec].once() / n)
    base = statistics.median(times["f16"]) if "f16" in times else None
    print(f"prepared: 8B Q4_K_M (random weights), tg128 @ d{depth}, medians of {rounds}")
    for spec, found in times.items():
        med, plain = statistics.median(found), spec.split("/")[0]
        error = float(((logits[spec] - logits[plain]) ** 2).sum() / (logits[plain] ** 2).sum()) if plain in logits else -1
        of = f" {base / med:.4f} of f16's speed" if base else ""
        print(f"{spec:34s} {1e6 * med:8.1f} us ({1e6 * min(found):.1f} to {1e6 * max(found):.1f}) {1 / med:7.1f} t/s{of}; NMSE to the table's {error:.1e}")


if __name__ == "__main__":
    main()
