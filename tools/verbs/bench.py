"""Speed of a model in llama-bench's terms: ppN reads a prompt of N tokens at once, tgN generates N tokens one by one;
"@ dN" is the same with N tokens in the cache already.

Before anything is timed, the logits of some steps are compared with the CPU reference's; a wrong result is not
reported. The machine's ceilings are measured in the same process, and a peer in the same run: --peer-python names a
Python that has llama-cpp-python. --synthetic makes a model up, so that no file is needed. `graphrt bench op OP`
measures one op on a GPU instead.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from graphrt.errors import SessionError
from graphrt.models.synthetic_recipes import RECIPES
from graphrt.printing import human_bytes
from graphrt.tools.bench.model import Prepared, Source, add_work, backends_for, measure, options_for
from graphrt.tools.bench.workload import Batch, Test
from graphrt.tools.common import (
    add_fast_argument,
    add_session_arguments,
    add_tp_argument,
    add_training_arguments,
    markdown_lines,
    over_ranks,
    print_json,
    print_table,
    rounding_backend,
    session_options,
    use_threads,
)

if TYPE_CHECKING:
    from graphrt.backend import Backend
    from graphrt.models.model import Model
    from graphrt.tools.bench.llama_cpp import Peer
    from graphrt.tools.bench.machine import Machine
    from graphrt.tools.bench.model_check import Checked


#: In llama-bench's order, with its names; a table has those of which there is something.
COLUMNS = (
    "model", "size", "params", "backend", "ranks", "threads", "test", "t/s", "+-", "rate", "of ceiling",
    "llama.cpp t/s", "ratio", "dense t/s", "of dense", "ms a step", "memory", "torch t/s", "of torch",
)  # fmt: skip
#: Of a step's memory: what it takes at once.
TAKEN = ("weights", "kept", "trained", "arenas")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a .gguf file, a known name or hf:OWNER/REPO[:QUANT]")
    parser.add_argument(
        "--synthetic",
        metavar="NAME",
        help=f"random weights in a known shape instead: {', '.join(RECIPES)}; with :q4_k_m, :mxfp4 (experts) "
        "or a type, as :q4_0, behind (default: what the model is usually had in)",
    )
    parser.add_argument("-p", "--n-prompt", default="512", metavar="N,..", help="prompt lengths (default: 512)")
    parser.add_argument("-n", "--n-gen", default="128", metavar="N,..", help="generated lengths (default: 128)")
    parser.add_argument("-d", "--depth", default="0", metavar="N,..", help="tokens in the cache before (default: 0)")
    parser.add_argument(
        "--batch",
        default="1",
        metavar="N,..",
        help="sequences that generate together in one graph (default: 1); uniform:N:MEAN, ragged:N:MEAN or "
        "between:N:LOW:HIGH for N of different lengths, or a file of lengths: these are read as prompts, and tokens "
        "generated after them; of an encoder, texts that are embedded together",
    )
    add_training_arguments(parser, "-p")
    parser.add_argument("-r", "--repetitions", type=int, default=5, metavar="N", help="default: 5")
    parser.add_argument("--peer-python", metavar="PYTHON", help="a Python with llama-cpp-python, to measure beside")
    parser.add_argument("--exact", action="store_true", help="measure the reference forms")
    add_fast_argument(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.add_argument("--md", action="store_true", help="print a Markdown table")
    add_tp_argument(parser)
    add_session_arguments(parser)


def main(args: argparse.Namespace) -> int:
    if over_ranks(args):
        from graphrt.tools.ranks.launch import refuse, run_on_ranks

        alone = {"--train": args.train, "--peer-python": args.peer_python}
        Source(args)  # what can't be must show before there are ranks
        _tests(args)
        what = "several ranks measure what they do together"
        return run_on_ranks("bench", args, run, lambda: "", lambda: refuse(alone, what))
    return run(args)


def run(args: argparse.Namespace, _: str = "") -> int:
    """Measures and reports. Several ranks do it together: rates are the first one's own, with its part of the weights
    and while the others do as much, tokens are everyone's."""
    import torch

    from graphrt.models.arch.encoder import Encoder
    from graphrt.tools.bench.machine import machine, on_gpu

    tests, source = _tests(args), Source(args)
    if args.peer_python and source.synthetic:
        raise SessionError("a peer (--peer-python) needs a file that it can read too; give MODEL, not --synthetic")
    use_threads(args)
    fast = args.eight_bits
    backends = [rounding_backend(args.backend, args.exact)] if fast else backends_for(args.backend, args.exact)
    model = source.load(backends)
    before = machine(backends[0])
    if args.train:
        measured = _training(args, source, model)
    elif isinstance(model.network, Encoder):
        measured = _encoder(args, source, model)
    else:
        measured = _decoder(args, source, model, tests)
    if isinstance(measured, str):
        print(f"not measured: {measured}", file=sys.stderr)
        return 1
    found = machine(backends[0]).best(before)
    for row in measured.rows:
        row["share"] = row["gb_per_s"] / found.gb_per_s if "gb_per_s" in row else row["gflop_per_s"] / found.gflop_per_s
    report = {
        "model": source.label, "weight_bytes": source.nbytes if model.ranks else model.weights.nbytes,
        "n_params": source.n_params, "ranks": model.ranks.size if model.ranks else 1,
        "backend": backends[0].name, "threads": None if on_gpu(backends[0]) else torch.get_num_threads(),
        "machine": found.report, "peer": measured.peer, "error_nmse": measured.checked.error,
        "checked": {"limit": measured.checked.limit, "what": measured.checked.what}, "results": measured.rows,
    }  # fmt: skip
    if args.json:
        print_json(report)
    else:
        _print(report, found, measured.checked, markdown=args.md)
    return 0


class Measured(NamedTuple):
    """checked: how right the results are; peer: its version, if one was measured beside; rows: of the tests."""

    checked: Checked
    peer: str | None
    rows: list[dict[str, Any]]


def _decoder(args: argparse.Namespace, source: Source, model: Model, tests: list[Test]) -> Measured | str:
    """What was measured, or what is wrong with the logits."""
    from graphrt.tools.bench.model_check import check, finite

    options = session_options(args)
    for test in tests:
        options_for(test, args, model)  # what does not fit must show before the measuring
    checked = check(source, model, model.backends, options, args.exact)
    if not checked.right:
        return _wrong("logits", checked)
    if not finite(model, options):
        return "the whole model's logits are not finite, or all the same"
    with ExitStack() as stack:
        peer = stack.enter_context(_peer(args, source, model.backends[0], tests)) if args.peer_python else None
        return Measured(checked, peer.version if peer else None, list(_rows(args, model, tests, peer)))


def _encoder(args: argparse.Namespace, source: Source, model: Model) -> Measured | str:
    """The same of an encoder, which embeds texts of -p tokens or of a batch's lengths."""
    from graphrt.backend import get_backend
    from graphrt.models.embed import HOST_BATCH, Embedder
    from graphrt.tools.bench import encoder as bench_encoder
    from graphrt.tools.bench.model_check import Checked

    if args.peer_python:
        raise SessionError("a peer (--peer-python) is measured of decoders, this model is an encoder; leave it out")
    batches = [Batch.of(text) for text in args.batch.split(",")]
    tests = bench_encoder.texts_of(batches, [n for n in _numbers(args.n_prompt) if n], model.network.hp)
    n_batch = 0 if args.batch_size == HOST_BATCH else args.batch_size  # -b's default is a decoder's
    embedder = Embedder(model.encoder, model.backends, n_batch)
    error = bench_encoder.check(embedder, source.load([get_backend("cpu")]).encoder)
    checked = Checked(error, model.backends[0].logits_nmse, "embeddings of two texts")
    if not checked.right:
        return _wrong("embeddings", checked)
    return Measured(checked, None, bench_encoder.rows(model, embedder, tests, args.repetitions))


def _training(args: argparse.Namespace, source: Source, model: Model) -> Measured | str:
    """The same of steps of training on texts of -p tokens."""
    from graphrt.models.training.lora import lora_of
    from graphrt.tools.bench import training

    if args.peer_python:
        raise SessionError("a peer (--peer-python) is measured of inference, --train has plain torch; leave it out")
    lora = lora_of(args.train)
    checked = training.check(source, model, lora)
    if not checked.right:
        return _wrong("loss or gradients", checked)
    lengths = [n for n in _numbers(args.n_prompt) if n]
    return Measured(checked, None, training.rows(model, lora, lengths, args.repetitions, args.recompute))


def _tests(args: argparse.Namespace) -> list[Test]:
    """Every length at every depth; several sequences of one length only generate. Raises SessionError."""
    lengths = [("pp", n) for n in _numbers(args.n_prompt) if n] + [("tg", n) for n in _numbers(args.n_gen) if n]
    tests = [
        Test(kind, n, depth, batch)
        for depth in _numbers(args.depth)
        for batch in map(Batch.of, args.batch.split(","))
        for kind, n in dict.fromkeys((kind, 0 if batch.lengths and kind == "pp" else n) for kind, n in lengths)
        if batch.n == 1 or batch.lengths or (batch.n > 1 and kind == "tg")
    ]
    if args.repetitions < 1 or not tests:
        raise SessionError(f"there must be a test and a repetition, got {len(tests)} and -r {args.repetitions}")
    return tests


def _numbers(text: str) -> list[int]:
    """Lengths with commas between. Raises SessionError."""
    if re.fullmatch(r"\d{1,9}(,\d{1,9})*", text) is None:
        raise SessionError(f"lengths must be from 0 on, whole numbers with commas between, got {text[:40]!r}")
    return [int(n) for n in text.split(",")]


def _rows(args: argparse.Namespace, model: Model, tests: list[Test], peer: Peer | None) -> Iterator[dict[str, Any]]:
    """A row for each test, told on stderr as it comes, so that a run that is cut short has told something."""
    n = max(512, *(t.end for t in tests))
    ids = np.random.default_rng(0).integers(0, model.decoder.hp.n_vocab, n).tolist()
    for test in tests:
        prepared = Prepared(model, test, options_for(test, args, model), ids)
        row = measure(prepared, args.repetitions, peer)
        add_work(row, model, prepared)
        print(f"{test}: {row['tokens_per_s']:.1f} t/s", file=sys.stderr, flush=True)
        yield row


def _peer(args: argparse.Namespace, source: Source, backend: Backend, tests: list[Test]) -> Peer:
    import torch

    from graphrt.tools.bench.llama_cpp import Peer
    from graphrt.tools.bench.machine import on_gpu

    n_ctx = args.ctx_size if args.ctx_size > 0 else max(t.end for t in tests) + 64
    options = replace(session_options(args), n_ctx=n_ctx)
    return Peer(args.peer_python, source.path, options, torch.get_num_threads(), on_gpu(backend))


def _wrong(what: str, checked: Checked) -> str:
    return (
        f"{what} differ from the reference by NMSE {checked.error:.1e}, over {checked.limit:.1e} ({checked.what}); "
        f"`graphrt test` finds the op"
    )


def _print(report: dict[str, Any], found: Machine, checked: Checked, markdown: bool) -> None:
    rows = [_row(report, r) for r in report["results"]]
    columns = [c for c in COLUMNS if any(c in row for row in rows)]
    cells = [[row.get(c, "-") for c in columns] for row in rows]
    if markdown:
        print("\n".join(markdown_lines(columns, cells)))
    else:
        print_table(columns, cells)
    print(
        f"\n{report['backend']}: {found.text}; {_what(report)} within NMSE {checked.error:.1e} of the reference "
        f"({checked.what})" + (f"; peer: llama-cpp-python {report['peer']}" if report["peer"] else "")
    )


def _what(report: dict[str, Any]) -> str:
    return "gradients" if any(r.get("kind") == "train" for r in report["results"]) else "logits"


def _row(report: dict[str, Any], r: dict[str, Any]) -> dict[str, str]:
    """A test's cells by column; what there is nothing of is left out: threads on a GPU, a peer that was not asked."""
    row = {
        "model": report["model"], "size": human_bytes(report["weight_bytes"]), "params": _params(report["n_params"]),
        "backend": report["backend"], "test": r["test"], "t/s": f"{r['tokens_per_s']:.1f}",
        "+-": f"{r['deviation']:.1f}", "rate": _rate(r), "of ceiling": f"{100 * r['share']:.0f} %",
    }  # fmt: skip
    if report["threads"] is not None:
        row["threads"] = str(report["threads"])
    if report["ranks"] > 1:
        row["ranks"] = str(report["ranks"])
    if "dense" in r:
        row |= {"dense t/s": f"{r['dense']['tokens_per_s']:.1f}", "of dense": f"{r['dense_ratio']:.2f}"}
    if r.get("kind") == "train":
        row |= {"ms a step": f"{r['ms']:.1f}", "memory": human_bytes(sum(r["memory"][k] for k in TAKEN))}
        if "peer" in r:
            row |= {"torch t/s": f"{r['peer']['tokens_per_s']:.1f}", "of torch": f"{r['ratio']:.2f}"}
    elif "peer" in r:
        row |= {"llama.cpp t/s": f"{r['peer']['tokens_per_s']:.1f}", "ratio": f"{r['ratio']:.2f}"}
    return row


def _params(n: int) -> str:
    """134515008 -> "134.52 M", as llama-bench has it."""
    return f"{n / 1e9:.2f} B" if n >= 1e9 else f"{n / 1e6:.2f} M"


def _rate(row: dict[str, Any]) -> str:
    if "gb_per_s" in row:
        return f"{row['gb_per_s']:.1f} GB/s"
    rate = row["gflop_per_s"]
    return f"{rate / 1e3:.1f} TFLOP/s" if rate >= 1e4 else f"{rate:.0f} GFLOP/s"
