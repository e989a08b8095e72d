"""What every node of a model's step holds after a prompt: statistics, or values as llama-eval-callback prints them.
--first-nan walks a NaN or infinity back to the node that makes it; --tp runs ranks, and says where they part first.

Nodes that are watched are kept in memory, which cuts the fusions they are part of: without --filter all of them. The
step runs uncut first, so that it shows when cutting changes what it gives.
"""

from __future__ import annotations

import argparse
import re
import sys
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphrt import whole_files
from graphrt.errors import MemoryPlanError, SessionError
from graphrt.tools.common import (
    MODEL_HELP,
    add_prompt_arguments,
    add_session_arguments,
    load_model,
    over_ranks,
    print_json,
    printable,
    progress,
    say_written,
    session_options,
    whole,
)
from graphrt.tools.inspect.subject import PHASES, add_ranks_arguments, played_of
from graphrt.tools.outputs import OutputFile

if TYPE_CHECKING:
    from graphrt.ranks import Ranks
    from graphrt.tools.inspect.describe import GraphInfo
    from graphrt.tools.inspect.node_stats import Stats, Values
    from graphrt.tools.inspect.traced_step import Step, WatchedSession
    from graphrt.tools.trace.first_nan import Verdict
    from graphrt.tools.trace.text import NodeTrace

#: Flags whose value may start with a dash.
TEXT_FLAGS = ("-p", "--prompt")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    add_prompt_arguments(parser.add_mutually_exclusive_group().add_argument)
    template = parser.add_mutually_exclusive_group()
    template.add_argument("--raw", action="store_true", help="the prompt as it stands (the default here)")
    template.add_argument("--chat", action="store_true", help="the prompt through the chat template, as `run` has it")
    phase = "the step to trace: the prompt's last batch, or the step after it (default: prefill)"
    parser.add_argument("--phase", choices=PHASES, default="prefill", help=phase)
    parser.add_argument(
        "--filter",
        action="append",
        metavar="REGEX",
        help="watch only nodes whose names begin with this, and cut no more than that takes; may be given again",
    )
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--stats", action="store_true", help="a table of statistics (the default)")
    shown.add_argument("--values", action="store_true", help="values and sums, as llama-eval-callback prints them")
    first = "say which node makes the first NaN or infinity, and exit with 1 if there is one"
    parser.add_argument("--first-nan", action="store_true", help=first)
    parser.add_argument(
        "-o", "--output", type=OutputFile, metavar="FILE.npz", help="save the values under the nodes' names"
    )
    largest = "write each node's largest magnitude, for `graphrt dump --overlay`"
    parser.add_argument("--overlay", type=OutputFile, metavar="FILE", help=largest)
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    add_ranks_arguments(parser)
    tp = "ranks on this host, each a process of its own: says, too, where they part first (default: 1)"
    parser.add_argument("--tp", type=whole(1, 64), default=1, metavar="N", help=tp)
    parser.add_argument("--exact", action="store_true", help="trace the reference forms")
    add_session_arguments(parser)


def main(args: argparse.Namespace) -> int:
    from graphrt.tools.verbs.run import prompt_text

    name_patterns(args.filter)
    _check(args)
    if args.ranks > 1 and args.tp > 1:
        raise SessionError("ranks are played in one process (--ranks) or started (--tp), got both; leave one out")
    if args.ranks == 1 and over_ranks(args):
        from graphrt.tools.ranks.launch import refuse, run_on_ranks

        what, alone = "ranks that are there trace what each of them has", {"--first-nan": args.first_nan}
        return run_on_ranks("trace", args, traced, partial(prompt_text, args), lambda: refuse(alone, what))
    return traced(args, prompt_text(args))


def traced(args: argparse.Namespace, prompt: str) -> int:
    """The trace of the last step behind a prompt. Several ranks call it together (args.as_ranks): the first one prints
    its nodes, and where ranks part."""
    from graphrt.tools.inspect.traced_step import WatchedSession

    patterns = name_patterns(args.filter)
    ranks = getattr(args, "as_ranks", None)
    model = load_model(args, args.exact, played=None if ranks else played_of(args))
    tokens = model.prompt_tokens(prompt, raw=not args.chat)
    if ranks:
        tokens = ranks.told(tokens)
        args.output = args.output and _of_rank(args.output, ranks)
        args.overlay = None if ranks.rank else args.overlay
    session = WatchedSession(model.decoder, model.backends, session_options(args))
    step = _run(session, tokens, args)
    out: dict[str, Any] = {"tokens": tokens, "phase": args.phase}
    spoilt = False
    if args.first_nan:
        verdict = _verdict(step, session)
        spoilt = verdict is not None
        out["first_nan"] = _told(verdict, args)
    if ranks:
        out["ranks"] = _parted(step, ranks, args)
        spoilt = out["ranks"]["parted"] is not None
    if not args.first_nan or args.stats or args.values or args.output or args.overlay:
        out |= _traced(step, patterns, args)
    if args.json:
        print_json(out)
    return 1 if spoilt else 0


def _of_rank(path: str, ranks: Ranks) -> str:
    """The file of a rank's own values, beside the one that is named."""
    given = Path(path)
    return str(given.with_name(f"{given.stem}-{ranks.rank}-of-{ranks.size}{given.suffix}"))


def _parted(step: Step, ranks: Ranks, args: argparse.Namespace) -> dict[str, Any]:
    """Where ranks part first; printed unless it goes into a JSON object."""
    from graphrt.models.ranks.weights import RankWeights
    from graphrt.tools.trace.ranks import first_parted, lines

    weights = step.session.decoder.weights
    assert isinstance(weights, RankWeights)
    n, parted = first_parted(ranks, step, weights.plan)
    step.run()
    if not args.json:
        print("\n".join(lines(n, parted, ranks)))
    return {"compared": n, "parted": None if parted is None else asdict(parted)}


def _check(args: argparse.Namespace) -> None:
    """Raises SessionError, before the work, for options that can't go together."""
    if args.output is not None and Path(args.output).suffix != ".npz":
        raise SessionError(f"-o must end with .npz, got {args.output[:80]!r}; numpy.load() reads it by that")
    if args.first_nan and args.filter and not (args.stats or args.values or args.output):
        raise SessionError(
            "--first-nan looks through every node, and --filter has no say in it; leave --filter out, or add --stats "
            "or --values to see those nodes too"
        )


def name_patterns(texts: Sequence[str] | None) -> list[re.Pattern[str]]:
    """The regular expressions of --filter. Raises SessionError."""
    try:
        return [re.compile(text) for text in texts or ()]
    except re.error as error:
        raise SessionError(
            f"--filter must be a regular expression, got {error.pattern!r}: {error}; put a \\ before a character that "
            f"stands for itself"
        ) from error


def _run(session: WatchedSession, tokens: Sequence[int], args: argparse.Namespace) -> Step:
    """Runs the prompt's steps as they are, and gives the last one; to find a NaN the first one that is not clean."""
    from graphrt.tools.inspect.traced_step import n_steps, steps

    step: Step | None = None
    with progress("reading the prompt", n_steps(session, len(tokens), args.phase)) as advance:
        for step in steps(session, tokens, args.phase):
            step.run()
            advance()
            if args.first_nan and not step.is_clean():
                break
    assert step is not None  # a prompt has tokens
    return step


# ---- the first NaN ----


def _verdict(step: Step, session: WatchedSession) -> Verdict | None:
    """None for a step that is clean."""
    from graphrt.tools.trace.first_nan import walk_back

    if step.is_clean():
        return None
    with progress("walking back", 4 + len(step.exe.graph.nodes).bit_length()) as advance, _enough_memory():
        verdict = walk_back(step, advance)
    step.run()
    return verdict


def _told(verdict: Verdict | None, args: argparse.Namespace) -> dict[str, Any] | None:
    """Prints the verdict unless it goes into a JSON object, and gives it for that."""
    from graphrt.tools.trace.text import verdict_json, verdict_lines

    if not args.json:
        clean = ["no NaN and no infinity, in the logits and the cache after every step"]
        print("\n".join(clean if verdict is None else verdict_lines(verdict)))
    return None if verdict is None else verdict_json(verdict)


# ---- every node ----


def _traced(step: Step, patterns: Sequence[re.Pattern[str]], args: argparse.Namespace) -> dict[str, Any]:
    """Traces a step that has just run uncut: prints its nodes, unless as JSON, and gives them for that."""
    from graphrt.tools.inspect.describe import describe
    from graphrt.tools.inspect.node_stats import stats_of
    from graphrt.tools.inspect.overlay import write_overlay
    from graphrt.tools.inspect.traced_step import looked_at
    from graphrt.tools.trace.text import print_nodes

    whole, logits = describe(step.exe), stats_of(step.logits.astype("f8"))
    before = step.logits
    watched = _watched(step, patterns)
    with _enough_memory():
        step.run(looked_at(step.exe.graph, watched))
    info = describe(step.exe)
    head = _head(step, whole, info, logits, stats_of((step.logits - before).astype("f8")), len(watched))
    if not args.json:
        for line in _head_lines(head):
            print(line, file=sys.stderr if args.values else sys.stdout)
    traces, shown = _read(step, info, watched, args)
    if args.output is not None:
        say_written(args.output)
    if args.overlay is not None:
        write_overlay(args.overlay, {trace.node.name: trace.stats.largest for trace in traces})
    if args.json:
        nodes = [trace.json() for trace in traces]
        return {**head, "nodes": [n | {"values": v} for n, v in zip(nodes, shown)] if args.values else nodes}
    if not args.values:
        print()
        print_nodes(traces)
    return {}


def _watched(step: Step, patterns: Sequence[re.Pattern[str]]) -> list[int]:
    nodes = step.exe.graph.nodes
    found = [i for i, t in enumerate(nodes) if not patterns or any(p.match(t.name) for p in patterns)]
    if not found:
        names = ", ".join(t.name for t in nodes[:12])
        asked = " or ".join(p.pattern for p in patterns)
        raise SessionError(
            f"--filter must match the beginning of a node's name, {asked[:200]!r} does not: {names}, ..."
        )
    return found


@contextmanager
def _enough_memory() -> Iterator[None]:
    """Says how to do with less where the watched nodes do not fit."""
    try:
        yield
    except MemoryPlanError as error:
        raise MemoryPlanError(
            f"{error}\nevery watched node keeps its memory: a smaller -b or a --filter needs less"
        ) from error


def _head(step: Step, whole: GraphInfo, info: GraphInfo, logits: Stats, diff: Stats, n: int) -> dict[str, Any]:
    """What was traced and what cutting did to it."""
    from graphrt.tools.inspect.node_stats import stats_of
    from graphrt.tools.trace.first_nan import fusions

    left = {group.members for group in fusions(info)}
    cut = stats_of(step.logits.astype("f8"))
    return {
        "backends": list(dict.fromkeys(split.backend for split in info.splits)),
        "n_tokens": len(step.ids),
        "n_past": step.n_past,
        "watched": n,
        "fusions": len(fusions(whole)),
        "fusions_cut": sum(group.members not in left for group in fusions(whole)),
        "logits_uncut": {"nan": logits.nan, "inf": logits.inf},
        "logits": {"nan": cut.nan, "inf": cut.inf, "max_abs_change": diff.largest},
        "vanished": bool(logits.nan + logits.inf) and not cut.nan + cut.inf,
    }


def _head_lines(head: dict[str, Any]) -> Iterator[str]:
    parts = [
        f"{head['n_tokens']} tokens after {head['n_past']} on {', '.join(head['backends'])}",
        f"{head['watched']} nodes watched, which cuts {head['fusions_cut']} of {head['fusions']} fusions",
        f"cutting moves logits by up to {head['logits']['max_abs_change']:.3g}",
    ]
    yield " | ".join(parts)
    before, after = head["logits_uncut"], head["logits"]
    if before["nan"] + before["inf"] + after["nan"] + after["inf"]:
        gone = "; cutting made that vanish: --first-nan tells which fusion it is" if head["vanished"] else ""
        yield (
            f"logits with NaN: {before['nan']} uncut, {after['nan']} traced; "
            f"infinite: {before['inf']} uncut, {after['inf']} traced{gone}"
        )


def _read(
    step: Step, info: GraphInfo, watched: Sequence[int], args: argparse.Namespace
) -> tuple[list[NodeTrace], list[object]]:
    """The trace of each watched node, and for --values --json the ends of its values; prints and saves on the way."""
    from graphrt.tools.inspect.node_stats import ends, eval_callback_lines, stats_of
    from graphrt.tools.trace.text import NodeTrace

    graph, traces, shown = step.exe.graph, [], []
    with _Archive(args.output) as archive, progress("reading nodes", len(watched)) as advance:
        for i in watched:
            node = graph.nodes[i]
            values = step.values(node)
            advance()
            if values is None:  # a view of what has no memory of its own
                continue
            sources = tuple(None if s is None else s.name for s in node.src)
            traces.append(NodeTrace(info.tensors[len(graph.leafs) + i], sources, stats_of(values)))
            archive.add(node.name, values, node.dtype.kind == "int")
            if args.values and args.json:
                shown.append(ends(values))
            elif args.values:
                for line in eval_callback_lines(node, values):
                    print(printable(line))
    return traces, shown


class _Archive:
    """A .npz file that is written value by value, and takes its place when it is whole. path: None for none."""

    def __init__(self, path: str | None) -> None:
        self._files = ExitStack()
        self._zip: zipfile.ZipFile | None = None
        if path is not None:
            out = self._files.enter_context(whole_files.writing(path))
            self._zip = self._files.enter_context(zipfile.ZipFile(out, "w"))
        self._names: dict[str, int] = {}

    def __enter__(self) -> _Archive:
        return self

    def __exit__(self, *error: Any) -> None:
        self._files.__exit__(*error)

    def add(self, name: str, values: Values, whole: bool) -> None:
        """Values as float32, whole numbers as int64. A name that comes again gets #2, #3 and so on."""
        if self._zip is None:
            return
        import numpy as np

        self._names[name] = count = self._names.get(name, 0) + 1
        entry = name if count == 1 else f"{name}#{count}"
        with self._zip.open(f"{entry}.npy", "w", force_zip64=True) as out:
            np.lib.format.write_array(out, values.astype(np.int64 if whole else np.float32))
