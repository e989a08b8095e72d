"""Speed of a model in llama-bench's terms: ppN reads a prompt of N tokens at once, tgN generates N tokens one by one.

Before anything is timed, the logits of some steps are compared with the reference's; a wrong result is not reported.
The machine's ceilings are measured in the same process, and a peer in the same run: --peer-python names a Python that
has llama-cpp-python. `graphrt bench op OP` measures one op on a GPU instead.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from graphrt.errors import SessionError
from graphrt.tools.common import (
    add_session_arguments,
    load_model,
    markdown_lines,
    print_json,
    print_table,
    session_options,
)

if TYPE_CHECKING:
    from graphrt.models.model import Model
    from graphrt.models.session import Session, SessionOptions

#: The fast forms' logits may differ from the reference's by this NMSE.
LIMIT = 1e-6

#: What the peer's process runs: one request a line, "pp N" or "tg N", answered with seconds.
PEER = """
import sys, time, llama_cpp
path, n_ctx, n_batch, threads = sys.argv[1], *map(int, sys.argv[2:])
model = llama_cpp.Llama(path, n_ctx=n_ctx, n_batch=n_batch, n_ubatch=n_batch, n_threads=threads,
                        n_threads_batch=threads, flash_attn=True, verbose=False)
print("ready", llama_cpp.__version__, flush=True)
for line in sys.stdin:
    kind, n, ids = line.split()
    n, ids = int(n), [int(i) for i in ids.split(",")]
    model.reset()
    if kind == "tg":
        model.eval(ids[:1])
    start = time.perf_counter()
    if kind == "pp":
        model.eval(ids[:n])
    else:
        for i in range(n):
            model.eval([ids[1 + i % (len(ids) - 1)]])
    print(time.perf_counter() - start, flush=True)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a .gguf file, a known name or hf:REPO/FILE")
    parser.add_argument("-p", "--n-prompt", default="512", metavar="N,..", help="prompt lengths (default: 512)")
    parser.add_argument("-n", "--n-gen", default="128", metavar="N,..", help="generated lengths (default: 128)")
    parser.add_argument("-r", "--repetitions", type=int, default=5, metavar="N", help="default: 5")
    parser.add_argument("--peer-python", metavar="PYTHON", help="a Python with llama-cpp-python, to measure beside")
    parser.add_argument("--exact", action="store_true", help="measure the reference forms")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.add_argument("--md", action="store_true", help="print a Markdown table")
    add_session_arguments(parser)


@dataclass(frozen=True)
class Test:
    """kind: "pp" or "tg"; n: tokens."""

    kind: str
    n: int

    def __str__(self) -> str:
        return f"{self.kind}{self.n}"


class Peer:
    """llama.cpp in a process of its own, asked for one measurement at a time."""

    def __init__(self, python: str, model_path: str, n_ctx: int, n_batch: int, threads: int) -> None:
        args = [python, "-c", PEER, model_path, str(n_ctx), str(n_batch), str(threads)]
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        try:
            self.process = subprocess.Popen(args, text=True, stdin=pipe, stdout=pipe, stderr=null)
        except OSError as error:
            raise SessionError(f"--peer-python must be a Python, {python!r} can't be started: {error}") from error
        self.version = self._answer()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        line: str = self.process.stdout.readline().strip()
        if not line:
            raise SessionError("the peer ended without an answer; its Python needs llama-cpp-python")
        return line

    def seconds(self, test: Test, ids: list[int]) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{test.kind} {test.n} {','.join(map(str, ids))}\n")
        self.process.stdin.flush()
        return float(self._answer())

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *exc: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(10)


def main(args: argparse.Namespace) -> int:
    from graphrt.models import hub

    tests = [Test("pp", n) for n in _numbers(args.n_prompt)] + [Test("tg", n) for n in _numbers(args.n_gen)]
    if args.repetitions < 1 or not tests:
        raise SessionError(f"there must be a test and a repetition, got {len(tests)} and -r {args.repetitions}")
    args.ctx_size = args.ctx_size or max(t.n for t in tests) + 64
    model, options = load_model(args, exact=args.exact), session_options(args)
    ids = [
        int(i) for i in np.random.default_rng(0).integers(0, model.decoder.hp.n_vocab, max(512, *(t.n for t in tests)))
    ]
    error = _error_of(model, args, ids, options)
    if not error < LIMIT:
        print(f"not measured: logits differ from the reference by NMSE {error:.1e}, over {LIMIT:.0e}", file=sys.stderr)
        return 1
    with ExitStack() as stack:
        peer = None
        if args.peer_python:
            import torch

            path = str(hub.resolve(args.model))
            peer = stack.enter_context(
                Peer(args.peer_python, path, args.ctx_size, args.batch_size, torch.get_num_threads())
            )
        rows = [_measure(model.session(options), t, ids, args.repetitions, peer) for t in tests]
    report = {"machine": _machine(), "peer": peer.version if peer else None, "error_nmse": error, "results": rows}
    _add_shares(model, report)
    _print(args, report)
    return 0


def _numbers(text: str) -> list[int]:
    try:
        return [n for n in map(int, text.split(",")) if n > 0]
    except ValueError:
        raise SessionError(f"lengths must be whole numbers with commas between, got {text[:40]!r}") from None


def _error_of(model: Model, args: argparse.Namespace, ids: list[int], options: SessionOptions) -> float:
    """NMSE of a prompt's and three single steps' logits against the reference, both with f32 caches."""
    from dataclasses import replace

    from graphrt.testing import nmse

    if args.exact:
        return 0.0
    options = replace(options, type_k="f32", type_v="f32")

    def some_logits(session: Session) -> np.ndarray:
        rows = session.eval_rows(ids[:40], 36)
        return np.concatenate([rows, *(session.eval([i])[None].copy() for i in ids[40:43])])

    reference = load_model(args, exact=True)
    return nmse(some_logits(model.session(options)), some_logits(reference.session(options)))


def _measure(session: Session, test: Test, ids: list[int], repetitions: int, peer: Peer | None) -> dict[str, Any]:
    def once() -> float:
        session.reset()
        if test.kind == "pp":
            return _seconds(lambda: session.eval(ids[: test.n]))
        session.eval(ids[:1])
        return _seconds(lambda: [session.eval([ids[1 + i % (len(ids) - 1)]]) for i in range(test.n)])

    once()  # prepares, and warms caches up
    if peer:
        peer.seconds(test, ids)
    ours, theirs = [], []
    for _ in range(repetitions):  # in turn, so that both meet the same machine
        ours.append(test.n / once())
        if peer:
            theirs.append(test.n / peer.seconds(test, ids))
    row: dict[str, Any] = {"test": str(test), **_summary(ours)}
    if theirs:
        row["peer"] = _summary(theirs)
        row["ratio"] = row["tokens_per_s"] / row["peer"]["tokens_per_s"]
    return row


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _summary(rates: list[float]) -> dict[str, float]:
    deviation = statistics.stdev(rates) if len(rates) > 1 else 0.0
    return {"tokens_per_s": statistics.median(rates), "deviation": deviation}


def _machine() -> dict[str, Any]:
    """What it ran on, and its ceilings: bytes/s of reading memory and FLOP/s of an f32 product, best of several."""
    import torch

    from graphrt.backends.cpu.products import dense

    memory, a = torch.ones(64 * 2**20), torch.ones(2048, 2048)
    read = min(_seconds(memory.sum) for _ in range(5))
    product = min(_seconds(lambda: dense(a, a)) for _ in range(5))
    name = next((line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), "CPU")
    return {
        "cpu": name, "threads": torch.get_num_threads(), "torch": torch.__version__,
        "read_gb_per_s": 4 * memory.numel() / read / 1e9, "f32_gflop_per_s": 2 * 2048**3 / product / 1e9,
    }  # fmt: skip


def _cpuinfo() -> list[str]:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return file.readlines()
    except OSError:  # another system than Linux
        return []


def _add_shares(model: Model, report: dict[str, Any]) -> None:
    """Adds the rate that bounds each test: bytes of weights read (tg), FLOPs of the products (pp), and its share."""
    weights = model.weights.loaded.values()
    table = model.decoder.token_embd
    flops = 2 * sum(t.n_elements for t in weights if t.n_dims == 2 and t not in (table, model.decoder.output))
    for row in report["results"]:
        rate, machine = row["tokens_per_s"], report["machine"]
        if row["test"].startswith("tg"):
            row["gb_per_s"] = rate * model.bytes_per_token / 1e9
            row["share"] = row["gb_per_s"] / machine["read_gb_per_s"]
        else:
            row["gflop_per_s"] = rate * flops / 1e9
            row["share"] = row["gflop_per_s"] / machine["f32_gflop_per_s"]


def _print(args: argparse.Namespace, report: dict[str, Any]) -> None:
    if args.json:
        print_json(report)
        return
    machine = report["machine"]
    columns = ["model", "test", "t/s", "+-", "rate", "of ceiling", "llama.cpp t/s", "ratio"]
    rows = []
    for r in report["results"]:
        rate = f"{r['gb_per_s']:.1f} GB/s" if "gb_per_s" in r else f"{r['gflop_per_s']:.0f} GFLOP/s"
        peer = (f"{r['peer']['tokens_per_s']:.1f}", f"{r['ratio']:.2f}") if "peer" in r else ("-", "-")
        shown = (f"{r['tokens_per_s']:.1f}", f"{r['deviation']:.1f}", rate, f"{100 * r['share']:.0f} %")
        rows.append([args.model.rpartition("/")[2], r["test"], *shown, *peer])
    if args.md:
        print("\n".join(markdown_lines(columns, rows)))
    else:
        print_table(columns, rows)
    print(
        f"\n{machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}, "
        f"reads {machine['read_gb_per_s']:.1f} GB/s, f32 products {machine['f32_gflop_per_s']:.0f} GFLOP/s; "
        f"logits within NMSE {report['error_nmse']:.1e} of the reference"
        + (f"; peer: llama-cpp-python {report['peer'].split()[-1]}" if report["peer"] else "")
    )
