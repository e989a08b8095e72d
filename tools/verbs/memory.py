"""Where the memory of a graph goes: weights by type, the cache, and each backend's compute arena with its peak, what
reuse saved and how fragmented it is. The plan is checked too: two tensors that are alive together and share bytes are
named, and the exit code is 1.

MODEL may be a model, of which the step is shown that takes more (prefill or decode, unless --phase says), a case that
`graphrt test --save` wrote, or script.py:build, a function that returns a graphrt Graph. With --train a model's step
of training is shown instead.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from graphrt.errors import SessionError
from graphrt.tools.common import add_training_arguments, print_json, session_options, size, write_text
from graphrt.tools.inspect.subject import Subject, add_subject_arguments, subject_of, training_subject_of
from graphrt.tools.memory.limit import Fit, fits
from graphrt.tools.memory.text import arena_bytes
from graphrt.tools.outputs import OutputFile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_subject_arguments(parser)
    add_training_arguments(parser, "--tokens")
    parser.add_argument(
        "--limit",
        type=size,
        metavar="SIZE",
        help="find the longest context (-c) whose weights, cache and arenas take at most SIZE, such as 8G, on the "
        "backend that multiplies with the weights; exit code 1 if none does",
    )
    parser.add_argument("--cache-types", action="store_true", help="with --limit: the longest for each type of cache")
    parser.add_argument(
        "--svg", type=OutputFile, metavar="FILE", help="draw when each tensor is alive and where it lies"
    )
    alive = "write the bytes alive in the arenas while each node runs, for `graphrt dump --overlay`"
    parser.add_argument("--overlay", type=OutputFile, metavar="FILE", help=alive)
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def main(args: argparse.Namespace) -> int:
    from graphrt.tools.inspect.overlay import write_overlay
    from graphrt.tools.memory import svg as memory_svg
    from graphrt.tools.memory import text as memory_text
    from graphrt.tools.memory.report import alive_by_node, report

    if args.cache_types and args.limit is None:
        raise SessionError("--cache-types belongs to a limit, got no --limit; give one, such as --limit 8G")
    subject, other = (training_subject_of(args), None) if args.train else _larger(subject_of(args), args)
    found = report(subject)
    fitting = _fits(subject, args)
    if args.svg is not None:
        write_text(args.svg, memory_svg.svg(found, memory_text.heading(subject)))
    if args.overlay is not None:
        write_overlay(args.overlay, alive_by_node(found))
    if args.json:
        print_json(memory_text.as_json(found, subject, args.limit, fitting, other))
    else:
        for line in memory_text.lines(found, subject, args.limit, fitting, other):
            print(line)
    nothing_fits = args.limit is not None and all(fit.needs is None for fit in fitting)
    return 1 if found.wrong or nothing_fits else 0


def _larger(subject: Subject, args: argparse.Namespace) -> tuple[Subject, Subject | None]:
    """Of a model's step, where no phase was asked for, prefill and decode: the one whose arenas are larger, then the
    other. Of all else the subject, and None."""
    session = subject.session
    if args.phase is not None or args.tokens or session is None or session.n_batch == 1:
        return subject, None
    prefill = replace(
        subject, phase="prefill", n_tokens=session.n_batch, executable=session.executable(session.n_batch, 1)
    )
    first, second = sorted((subject, prefill), key=lambda s: -arena_bytes(s))
    return first, second


def _fits(subject: Subject, args: argparse.Namespace) -> list[Fit]:
    """The longest contexts that a limit allows, none without a limit. Raises SessionError for what has no context."""
    if args.limit is None:
        return []
    if subject.session is None:
        kind = "is a graph" if subject.engine is None else "has pages (--page), as many as --pages says"
        raise SessionError(f"a limit is for a session's context, {subject.title[:200]!r} {kind}; leave --limit out")
    options = session_options(args)
    if not args.cache_types:
        return fits(subject.session, args.limit, [options])
    from graphrt.dtypes import CACHE_TYPES

    return fits(subject.session, args.limit, [replace(options, type_k=t, type_v=t) for t in CACHE_TYPES])
