"""Conformance of a backend, op by op: every case in guarded memory, held against the float64 reference.

Modes: test (the default), support (what a backend takes, and why not the rest; nothing runs, and no GPU is needed),
perf (time of what is right), grad (finite differences, for ops that have a backward).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graphrt import private_files
from graphrt.errors import GraphError, HubError
from graphrt.tools.common import DEVICE_NAMES, progress, whole, write_text
from graphrt.tools.outputs import OutputFile

_MOST_STATE_BYTES = 64 << 20  # of the names that --rerun-failed runs again
MODES = ("test", "perf", "grad", "support")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("mode", nargs="?", default="test", choices=MODES, help="default: test")
    add = parser.add_argument_group("which cases").add_argument
    add("-b", "--backend", default="auto", metavar="NAME", help="a name or MODULE:CLASS (default: the best usable)")
    add("-o", "--op", metavar="OP", help="an op, a regular expression of ops, or a whole case as printed")
    add("-p", "--params", metavar="REGEX", help="only cases whose parameters match")
    add("--set", choices=("quick", "full", "ggml", "broken"), help="default: quick")
    add("--from-model", metavar="MODEL", help="every distinct node of a model's prefill and decode graphs instead")
    add("--test-file", metavar="FILE", help="cases from llama.cpp's test-export-graph-ops instead")
    add("--cases", metavar="MODULE", help="cases from the function cases() of a Python module instead")
    add("--graphs", type=whole(1), metavar="N", help="N random graphs of several ops instead, fused and not")
    add("--rerun-failed", action="store_true", help="only what did not pass the last time")
    add("--list", action="store_true", help="print the cases and run nothing")
    add("--mutants", action="store_true", help="plant bugs in kernels instead: the default cases must find them all")
    add(
        "--share", type=whole(1, 256), metavar="N",
        help="N processes at once repeat cases (default: one a kernel, and models' steps) and compare bits",
    )  # fmt: skip
    add(
        "--seconds",
        type=float,
        default=60.0,
        metavar="S",
        help="with --share: for so long, and each case once (default: 60)",
    )
    add("--ggml-grid", action="store_true", help="with --mutants: how many of them ggml's own cases find (minutes)")
    add = parser.add_argument_group("how").add_argument
    add("--seed", type=whole(0), default=0, metavar="N", help="inputs depend on the case and this alone (default: 0)")
    add(
        "-j", "--jobs", type=whole(0, 256), default=1, metavar="N", help="worker processes (default: 1); 0: in this one"
    )
    add("--time-limit", type=float, default=120.0, metavar="S", help="seconds that a case may take (default: 120)")
    add("--device", metavar="NAME", help=f"with support: plan for this GPU, which need not be here: {DEVICE_NAMES}")
    add("--require-supported", action="store_true", help="an unsupported case is a failure")
    add = parser.add_argument_group("output").add_argument
    add("--output", default="console", choices=("console", "json", "csv", "junit", "md"), help="md: support only")
    add("--json", action="store_const", dest="output", const="json", help="the same as --output json")
    add(
        "-O",
        "--output-file",
        type=OutputFile,
        metavar="FILE",
        help="write the report there, and the console's to the screen",
    )
    add("-v", "--verbose", action="store_true", help="list what passed too")
    add("--save", metavar="DIR", help="write each failed case there, for `graphrt replay`")


def main(args: argparse.Namespace) -> int:
    if args.mutants or args.ggml_grid:
        from graphrt.tools.conformance.mutants.score import main as mutants

        return mutants(args)
    if args.share is not None:
        return _share(args)
    if args.device is not None and args.mode != "support":
        raise GraphError(
            f"--device is for the mode support, which runs nothing, got {args.mode}; leave one of them out"
        )
    args.set = args.set or ("grad" if args.mode == "grad" else "quick")
    if args.mode == "support":
        from graphrt.tools.conformance.run.support import main as support

        return support(args)
    if args.mode == "grad" and (args.save is not None or args.rerun_failed):
        raise GraphError("--save and --rerun-failed are for the mode test, got grad; leave them out")
    if args.output == "md":
        raise GraphError("--output md is for `graphrt test support`; use console, json, csv or junit")
    if args.mode == "perf":
        from graphrt.tools.conformance.run.perf import main as perf

        return perf(args)
    return _test(args)


def _share(args: argparse.Namespace) -> int:
    from graphrt.tools.conformance.run.share import main as share

    if args.mode != "test":
        raise GraphError(f"--share is for the mode test, got {args.mode}; leave one of them out")
    if args.output not in ("console", "json"):
        raise GraphError(f"--share reports to the console or as json, got --output {args.output}")
    args.backend = _best(args.backend)
    return share(args)


def _test(args: argparse.Namespace) -> int:
    from graphrt.tools.conformance.cases.sources import pick, source_of
    from graphrt.tools.conformance.run.step import BAD

    source = source_of(args)
    if not args.time_limit > 0:  # nor NaN
        raise GraphError(f"--time-limit must be over 0 seconds, got {args.time_limit:g}")
    if args.save is not None and Path(args.save).exists() and not Path(args.save).is_dir():
        raise GraphError(f"--save needs a folder, {args.save[:200]!r} is a file; name another, which is made")
    everything = list(source.cases())
    index = {id(case): i for i, case in enumerate(everything)}
    chosen = pick(everything, args.op, args.params)
    args.backend = _best(args.backend)
    if args.rerun_failed:
        failed = _last_failed(args)
        chosen = [c for c in chosen if str(c) in failed]
        if not chosen:
            print("nothing to rerun: what ran last passed", file=sys.stderr)
            return 0
    if args.list:
        print("\n".join(str(case) for case in chosen))
        return 0
    _tell_left_out(args)
    started = time.perf_counter()
    outcomes = _run(args, source, [(index[id(c)], c) for c in chosen])
    about = {"backend": args.backend, "seed": args.seed, "set": args.set, "seconds": time.perf_counter() - started}
    _write(args, outcomes, about)
    if args.mode == "grad":
        _tell_without_gradient(args)
    else:
        _remember(args, outcomes)
    bad = [o for o in outcomes if o.status in BAD or (args.require_supported and o.status == "unsupported")]
    return 1 if bad else 0


def _tell_without_gradient(args: argparse.Namespace) -> None:
    """With -v, the ops that have no gradient, and why."""
    from graphrt.op import registered_ops

    for op, spec in registered_ops().items():
        if isinstance(spec.backward, str) and args.verbose and args.output == "console":
            print(f"  {op:<24}{spec.backward}")


def _tell_left_out(args: argparse.Namespace) -> None:
    """How many lines of a --test-file gave no case, and why."""
    if args.test_file is not None:
        from graphrt.tools.conformance.cases.test_file import file_cases

        for reason, n in file_cases(Path(args.test_file))[1].most_common():
            print(f"left out {n}: {reason}", file=sys.stderr)


def _best(name: str) -> str:
    """The name of the best usable backend for "auto", so that the report names what ran."""
    from graphrt.backend import get_backend

    return get_backend().name if name == "auto" else name


def _run(args: argparse.Namespace, source: Any, cases: Sequence[tuple[int, Any]]) -> list[Any]:
    from graphrt.tools.conformance.cases.graphs import run_any
    from graphrt.tools.conformance.cases.sources import make_backend
    from graphrt.tools.conformance.run.pool import Settings, sweep
    from graphrt.tools.conformance.run.report import spoken
    from graphrt.tools.conformance.run.step import BAD

    with progress(f"{args.mode} {args.backend}", len(cases)) as advance:

        def done(outcome: Any) -> None:
            advance()
            if outcome.status in BAD:  # at once: a long run that is broken off has then said what it found
                print(f"{spoken(outcome.status)}: {outcome.case}", file=sys.stderr, flush=True)

        if args.jobs == 0:
            backend, saved, outcomes = make_backend(args.backend), Path(args.save) if args.save else None, []
            for _, case in cases:
                outcomes.append(run_any(case, backend, args.seed, saved))
                done(outcomes[-1])
            return outcomes
        settings = Settings(source, args.backend, args.seed, args.time_limit, args.save)
        return list(sweep(cases, settings, args.jobs, done))


def _write(args: argparse.Namespace, outcomes: Sequence[Any], about: dict[str, Any]) -> None:
    from graphrt.tools.conformance.run.report import render

    text = render(args.output, outcomes, about, args.verbose)
    if args.output_file is None:
        print(text)
        return
    write_text(args.output_file, text + "\n")
    print(render("console", outcomes, about, args.verbose))


def _state_file() -> Path:
    from graphrt.models.hub import writable_cache

    return writable_cache() / "test-state.json"


def _state_key(args: argparse.Namespace) -> str:
    return f"{args.backend} {args.from_model or args.test_file or args.cases or ''}".strip()


def _load_state() -> dict[str, list[str]]:
    try:
        state: dict[str, list[str]] = json.loads(private_files.read(_state_file(), _MOST_STATE_BYTES))
        return state if isinstance(state, dict) else {}
    except (OSError, ValueError, HubError):  # none yet, damaged, or no folder for it: as if nothing had run
        return {}


def _last_failed(args: argparse.Namespace) -> set[str]:
    return set(_load_state().get(_state_key(args), []))


def _remember(args: argparse.Namespace, outcomes: Sequence[Any]) -> None:
    """Notes what did not pass; a case that did not run keeps its note."""
    from graphrt.tools.conformance.run.step import BAD

    state, ran = _load_state(), {o.case for o in outcomes}
    kept = [name for name in state.get(_state_key(args), []) if name not in ran]
    state[_state_key(args)] = kept + [o.case for o in outcomes if o.status in BAD]
    try:
        path = _state_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        private_files.write(path, json.dumps(state).encode())
    except (OSError, HubError) as error:
        print(f"graphrt test: --rerun-failed won't know of this run: {error}", file=sys.stderr)
