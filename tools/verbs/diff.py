"""Where two ways of running a model, a saved case or a script's graph part: node by node, against the tolerances of the
conformance judge.

A side is a backend with options after commas, or a .npz file of values by node name (`graphrt trace -o`, or llama.cpp's
names): -a cpu -b triton-fast, -b cpu-fast,fuse=0, -b cpu-fast,ctk=q8_0, -b cpu,model=OTHER.gguf, -a F.npz, or
-b cpu,ranks=2: what the ranks hold is put together, and held against one that has all. cpu and triton are the exact
forms, cpu-fast and triton-fast those that `run` uses. Without options no fusion is cut: nodes inside one are compared
at its end.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from graphrt.errors import SessionError
from graphrt.tools.common import (
    add_prompt_arguments,
    add_session_arguments,
    print_json,
    progress,
    say_written,
    session_options,
    use_threads,
    whole,
    write_text,
)
from graphrt.tools.inspect.subject import PHASES, SUBJECT_HELP, check_no_rope, is_graph
from graphrt.tools.outputs import OutputFile
from graphrt.tools.rope_flags import rope_options

if TYPE_CHECKING:
    from graphrt.models.model import Model
    from graphrt.tools.diff.report import Report
    from graphrt.tools.diff.sides import Pair, SideSpec

#: Flags whose value may start with a dash.
TEXT_FLAGS = ("-p", "--prompt")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help=SUBJECT_HELP)
    parser.add_argument("--synthetic", metavar="NAME", help="random weights in a known shape instead; takes --tokens")
    add = parser.add_argument_group("the sides").add_argument
    side = "NAME[,fuse=0][,fa=off][,prec=f8][,ctk=TYPE][,ctv=TYPE][,model=FILE][,ranks=N[,pp=M][,ep=1]], or FILE.npz"
    add("-a", "--reference", default="cpu", metavar="SIDE", help=f"what is right: {side} (default: cpu)")
    add("-b", "--other", default="auto", metavar="SIDE", help="what is asked about (default: what `run` uses)")
    add = parser.add_argument_group("what they read").add_argument
    add_prompt_arguments(add)
    add("--tokens", metavar="1,2,3", help="token ids instead of a text")
    add("--chat", action="store_true", help="the prompt through the chat template, as `run` has it")
    add("--phase", choices=PHASES, help="the prompt's last batch, or the step after it (default: prefill)")
    add("--seed", type=whole(0), default=0, metavar="N", help="of a script's inputs (default: 0)")
    add = parser.add_argument_group("how").add_argument
    fed = "each step of the other side by itself too, fed with the reference's inputs"
    add("--resync", action="store_true", help=fed)
    add("--cut", action="store_true", help="open every fusion, and say if that makes a difference vanish")
    names = "compare only nodes whose names begin with this, and cut no more than that takes; may be given again"
    add("--filter", action="append", metavar="REGEX", help=names)
    add = parser.add_argument_group("output").add_argument
    add("--all", action="store_true", help="a table of every node, not only of those over their tolerance")
    add("--json", action="store_true", help="print a JSON object")
    add("--svg", type=OutputFile, metavar="FILE", help="draw the error by depth")
    add("--overlay", type=OutputFile, metavar="FILE", help="write errors by node, for `graphrt dump --overlay`")
    saved = "write the first bad step with the reference's inputs, for `graphrt replay`; implies --resync"
    add("--save", type=OutputFile, metavar="FILE.npz", help=saved)
    add_session_arguments(parser, own_b=True)


def main(args: argparse.Namespace) -> int:
    from graphrt.tools.diff import svg as diff_svg
    from graphrt.tools.diff import text as diff_text
    from graphrt.tools.diff.report import as_json, overlay
    from graphrt.tools.diff.sides import side_spec
    from graphrt.tools.inspect.overlay import write_overlay

    specs = [side_spec(args.reference), side_spec(args.other)]
    patterns = _patterns(args.filter)
    _check(args, specs)
    use_threads(args)
    pair = _pair(args, specs)
    report = _report(args, pair, patterns)
    if args.svg is not None:
        write_text(args.svg, diff_svg.svg(report))
    if args.overlay is not None:
        write_overlay(args.overlay, overlay(report.modes[-1]))
    if args.json:
        print_json(as_json(report, list(pair.tokens)))
    else:
        for line in diff_text.lines(report, args.all):
            print(line)
    if args.save is not None:
        _save(args, pair, report)
    return 1 if report.differs else 0


def _patterns(texts: list[str] | None) -> list[re.Pattern[str]]:
    from graphrt.tools.verbs.trace import name_patterns

    return name_patterns(texts)


def _check(args: argparse.Namespace, specs: list[SideSpec]) -> None:
    """Raises SessionError, before the work, for what can't be asked."""
    if (args.model is None) == (args.synthetic is None):
        raise SessionError(
            "there must be one thing to look at: give MODEL, a saved case, script.py:build or --synthetic"
        )
    files = [spec for spec in specs if spec.is_file]
    if len(files) == 2:
        raise SessionError("one side at least must run, got two files; name a backend with -a or -b")
    if files and (args.resync or args.save):
        raise SessionError(
            f"--resync and --save feed one side with what the other has everywhere, {files[0].name[:80]!r} has only "
            f"some values; give two sides that run"
        )
    forms = {spec.options["fa"] for spec in specs if "fa" in spec.options}
    if forms and (args.resync or args.save or args.cut or args.filter):
        raise SessionError(
            "--resync, --save, --cut and --filter need sides of the same nodes, with fa= they may differ; leave one out"
        )
    if specs[0].played != specs[1].played:
        if specs[0].played.ranks > 1 or files:
            raise SessionError(
                "ranks= is of the other side (-b) beside a reference (-a) that runs on one rank, or of both alike, got "
                f"{specs[0].text[:80]!r} and {specs[1].text[:80]!r}; give -b ranks="
            )
        if args.resync or args.save or args.cut or args.filter:
            raise SessionError(
                "--resync, --save, --cut and --filter need sides of the same nodes, one over ranks has others; give "
                "both sides ranks="
            )
    if args.tokens is not None and (args.prompt is not None or args.file is not None):
        raise SessionError("a prompt is a text or ids, got both; leave out --tokens, or -p and -f")
    if args.model is not None and is_graph(args.model):
        given = [flag for flag in ("prompt", "file", "tokens", "phase") if getattr(args, flag) is not None]
        if given:
            raise SessionError(f"--{given[0]} belongs to a model, {args.model[:200]!r} is a graph; leave it out")
    if args.save is not None and Path(args.save).suffix != ".npz":
        raise SessionError(f"--save must end with .npz, got {str(args.save)[:80]!r}; replay reads it by that")


def _pair(args: argparse.Namespace, specs: list[SideSpec]) -> Pair:
    from graphrt.tools.diff.sides import Prompt, graph_pair, model_pair

    if args.model is not None and is_graph(args.model):
        check_no_rope(args.model, rope_options(args))
        return graph_pair(args.model, specs, args.seed)
    prompt = Prompt(lambda model: _ids(model, args), args.phase or "prefill")
    with progress("reading the prompt", 3) as advance:
        text, synthetic, rope = args.synthetic or args.model, bool(args.synthetic), rope_options(args)
        return model_pair(text, specs, prompt, session_options(args), advance, synthetic=synthetic, rope=rope)


def _ids(model: Model, args: argparse.Namespace) -> list[int]:
    from graphrt.tools.verbs.logits import parse_ids
    from graphrt.tools.verbs.run import prompt_text

    if args.tokens is not None:
        return parse_ids(args.tokens)
    return model.prompt_tokens(prompt_text(args), raw=not args.chat)


def _report(args: argparse.Namespace, pair: Pair, patterns: list[re.Pattern[str]]) -> Report:
    """Runs what is asked for. The free run comes first: re-syncing leaves nothing of it behind."""
    from graphrt.tools.diff.modes import modes_of
    from graphrt.tools.diff.report import Report, described
    from graphrt.tools.inspect.traced_step import Step

    run = pair.running[0].run
    n_tokens, n_past = (len(run.ids), run.n_past) if isinstance(run, Step) else (0, 0)
    title = str(args.synthetic or args.model).rpartition("/")[2]
    phase = (args.phase or "prefill") if isinstance(run, Step) else "graph"
    info = described(pair, title, phase, n_tokens)
    modes, cut = modes_of(pair, info, patterns, cut=args.cut, fed=args.resync or args.save is not None)
    sides = (pair.reference.title, pair.other.title)
    return Report(title, sides, info, modes, cut, n_tokens, n_past)


def _save(args: argparse.Namespace, pair: Pair, report: Report) -> None:
    """Writes the first bad step for `graphrt replay`, and says how to run it."""
    import sys

    from graphrt.tools.diff.modes import save_first

    first = next((mode.first for mode in reversed(report.modes) if mode.first is not None), None)
    if first is None:
        print(f"nothing is over its tolerance: {args.save} is not written", file=sys.stderr)
        return
    save_first(Path(args.save), pair, first, report.title)
    say_written(args.save)
    name = pair.other.title.partition(",")[0]
    print(f"saved: graphrt replay {args.save} -b {name}", file=sys.stderr)
