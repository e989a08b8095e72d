"""What a backend would not run of a model, a saved case or a script's graph, and why; into how many parts that cuts a
step, and what is copied between backends. Nothing runs, no memory is taken, and a GPU backend is asked without its GPU.

Exit code 0: the backend runs every step as a whole; 1: something falls back.

With --order: whether the GPU backend's launches, some of which begin before the one before has ended, keep out of each
other's memory, in a run and the one behind it. Steps are prepared for --device, which need not be here. Exit code 1:
they don't.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from graphrt.errors import BackendError, SessionError
from graphrt.printing import human_bytes
from graphrt.tools.common import (
    DEVICE_NAMES,
    add_session_arguments,
    print_json,
    printable,
    session_options,
    table_lines,
)
from graphrt.tools.inspect.subject import SUBJECT_HELP, add_ranks_arguments, played_of
from graphrt.tools.rope_flags import rope_options

if TYPE_CHECKING:
    from graphrt.tools.check.report import Checked


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help=SUBJECT_HELP)
    parser.add_argument("--synthetic", metavar="NAME", help="a known shape instead, such as llama-8b:q4_k_m")
    parser.add_argument(
        "-b", "--backend", default="auto", metavar="NAME", help="a name or MODULE:CLASS (default: the best)"
    )
    parser.add_argument("--order", action="store_true", help="check the order of the triton backend's launches instead")
    parser.add_argument(
        "--device",
        default="h100",
        metavar="NAME",
        help=f"with --order, the GPU to plan for: {DEVICE_NAMES} (default: h100)",
    )
    add_ranks_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    add_session_arguments(parser, own_b=True)


def main(args: argparse.Namespace) -> int:
    from graphrt.tools.check.report import as_json, check
    from graphrt.tools.inspect.planned import planned

    if (args.model is None) == (args.synthetic is None):
        raise SessionError("there must be one thing to check: give MODEL, a saved case, script.py:build or --synthetic")
    text = args.synthetic or args.model
    if args.order:
        if args.ranks > 1:
            raise SessionError("--order checks the launches of one GPU, got --ranks; leave one out")
        return _order(text, args)
    backend = planned(args.backend)
    synthetic, rope = bool(args.synthetic), rope_options(args)
    steps = check(text, backend, session_options(args), synthetic=synthetic, rope=rope, played=played_of(args))
    if args.json:
        print_json({"title": text, "backend": backend.name, "steps": [as_json(step) for step in steps]})
    else:
        for line in _lines(text, backend.name, steps):
            print(line)
    return 0 if all(step.is_whole for step in steps) else 1


def _order(text: str, args: argparse.Namespace) -> int:
    """--order."""
    from graphrt.tools.check.order_report import as_json, check_order, lines

    exact = {"auto": False, "triton-fast": False, "triton": True}.get(args.backend)
    if exact is None:
        raise BackendError(
            f"--order checks the launches of the triton backend, got --backend {args.backend}; give triton-fast, whose "
            f"forms `graphrt run` uses, or triton, which is exact"
        )
    options, synthetic, rope = session_options(args), bool(args.synthetic), rope_options(args)
    steps = check_order(text, options, device_name=args.device, exact=exact, synthetic=synthetic, rope=rope)
    if args.json:
        print_json({"title": text, "device": args.device, "steps": [as_json(step) for step in steps]})
    else:
        for line in lines(text, args.device, steps):
            print(printable(line))
    return 1 if any(step.violations for step in steps) else 0


def _lines(title: str, backend: str, steps: list[Checked]) -> Iterator[str]:
    for step in steps:
        yield printable(f"{title.rpartition('/')[2]}, {step.title} on {backend}: {_said(step)}")
        yield from ("  " + line for line in _tables(step))
    if not all(step.is_whole for step in steps):
        yield "other backends run what is refused: slower, but right; --json has every node"


def _tables(step: Checked) -> Iterator[str]:
    if step.fallbacks:
        refused = [[f.count, f.op, f.where, f.example, f.backend, f.cause] for f in step.fallbacks]
        yield from table_lines(("nodes", "op", "layers", "such as", "runs on", "why"), refused)
    if step.copies:
        yield f"copied between backends in every run: {human_bytes(sum(c.count * c.nbytes for c in step.copies))}"
        moved = [[c.count, c.where, c.example, f"{c.origin} -> {c.target}", human_bytes(c.nbytes)] for c in step.copies]
        yield from table_lines(("copies", "layers", "such as", "from, to", "each"), moved)


def _said(step: Checked) -> str:
    if step.is_whole:
        return f"all {step.nodes} nodes that compute, one split, no copies{_views(step)}"
    n = sum(f.count for f in step.fallbacks)
    return f"{n} of {step.nodes} nodes that compute fall back, {step.splits} splits{_views(step)}"


def _views(step: Checked) -> str:
    """Why `graphrt dump` has more nodes."""
    if not step.views:
        return ""
    return f" (of {step.nodes + step.views} nodes {step.views} are views: nothing runs for them)"
