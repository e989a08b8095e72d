"""Generate text. It streams to stdout; figures go to stderr. Without MODEL the demo model runs, pulled when absent.
Without a prompt, on a terminal, it is a chat: `graphrt chat`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphrt.errors import ChatTemplateError, SessionError
from graphrt.tools import prompt_cache
from graphrt.tools.adapter_flags import add_adapter_arguments
from graphrt.tools.before_weights import before_weights
from graphrt.tools.common import (
    MODEL_HELP,
    add_fast_argument,
    add_page_arguments,
    add_prompt_arguments,
    add_session_arguments,
    add_tp_argument,
    load_model,
    over_ranks,
    print_json,
    print_text,
    read_text,
    session_options,
    whole,
    without_last_newline,
)
from graphrt.tools.outputs import OutputFile
from graphrt.tools.sampling import flags, logprobs
from graphrt.tools.sampling.flags import add_output_arguments, add_text_arguments, output_options, text_options
from graphrt.tools.sampling.flags import add_sampling_arguments as add_sampling_arguments
from graphrt.tools.sampling.flags import sampler_params as sampler_params

if TYPE_CHECKING:
    from graphrt.models.model import Model, Piece
    from graphrt.models.session import Session
    from graphrt.ranks import Ranks


#: Flags whose value may start with a dash.
TEXT_FLAGS = ("-p", "--prompt", *flags.TEXT_FLAGS)
#: Tokens that are made unless told.
PREDICT = 256
#: Where --profile writes unless told.
TRACE = OutputFile("graphrt-profile.json")
#: Decode steps that --profile measures unless told.
PROFILE_STEPS = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    add_prompt_arguments(parser.add_mutually_exclusive_group().add_argument)
    parser.add_argument("-sys", "--system", metavar="TEXT", help="system message for the chat template")
    parser.add_argument(
        "-n",
        "--predict",
        type=whole(-1),
        metavar="N",
        help=f"the most tokens to generate, -1: no limit (default: {PREDICT}, in a chat no limit)",
    )
    parser.add_argument(
        "--raw", action="store_true", help="the prompt as it stands, without the chat template, and only its completion"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a stream")
    parser.add_argument("--exact", action="store_true", help="only reference forms of the ops: slower, to compare with")
    add_fast_argument(parser)
    parser.add_argument(
        "--memory", action="store_true", help="print the memory of weights and cache (on a GPU it always is)"
    )
    prompt_cache.add_argument(parser)
    add_page_arguments(parser, "keep the cache in pages of N tokens (default: 64 with -np, otherwise no pages)")
    _add_profile_arguments(parser)
    add_tp_argument(parser)
    add_session_arguments(parser)
    add_adapter_arguments(parser)
    add_text_arguments(parser)
    add_output_arguments(parser)
    add_sampling_arguments(parser)


def _add_profile_arguments(parser: argparse.ArgumentParser) -> None:
    what = "afterwards report where the time went, and write a trace for Perfetto (default: graphrt-profile.json)"
    parser.add_argument("--profile", nargs="?", const=TRACE, type=_trace_path, metavar="FILE.json", help=what)
    times = "with --profile: write microseconds by node of a decode step, for `graphrt dump --overlay`"
    parser.add_argument("--profile-overlay", type=OutputFile, metavar="FILE", help=times)
    steps = f"decode steps that are profiled (default: {PROFILE_STEPS})"
    parser.add_argument("--profile-steps", type=whole(1, 1000), default=PROFILE_STEPS, metavar="N", help=steps)


def _trace_path(text: str) -> OutputFile:
    """A file that can be made. Its ending keeps `--profile MODEL` from taking the model for it."""
    path = Path(text)
    if path.suffix != ".json":
        raise argparse.ArgumentTypeError(f"must end with .json, got {text[:80]!r}; give MODEL before --profile")
    if not path.parent.is_dir() or path.is_dir():
        raise argparse.ArgumentTypeError(f"must lie in a folder that is there, got {text[:80]!r}")
    return OutputFile(text)


@dataclass
class Tally:
    """What a run made and how long it took. Seconds are counted from `start`."""

    start: float = field(default_factory=time.perf_counter)
    tokens: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    first: float | None = None
    last: float | None = None
    interrupted: bool = False

    def add(self, piece: Piece) -> None:
        now = time.perf_counter()
        self.first = self.first or now
        self.last = now
        self.tokens.append(piece.token)
        self.text.append(piece.text)
        self.pieces.append(piece)

    @property
    def finish(self) -> str:
        """Why the text ended, "" where it did not."""
        return self.pieces[-1].finish if self.pieces else ""

    def timings(self, n_prompt: int, bytes_per_token: int) -> dict[str, float]:
        """Prompt and generation tokens/s, time to the first token (reading the prompt), and the rate of memory read."""
        if self.first is None or self.last is None:
            return {}
        prompt_s, gen_s, n = self.first - self.start, self.last - self.first, len(self.tokens) - 1
        rate = n / gen_s if n > 0 and gen_s > 0 else 0.0
        return {
            "prompt_tokens_per_s": n_prompt / prompt_s,
            "first_token_s": prompt_s,
            "tokens_per_s": rate,
            "gb_per_s": rate * bytes_per_token / 1e9,
        }


def main(args: argparse.Namespace) -> int:
    if args.profile_overlay is not None and not args.profile:
        raise SessionError("--profile-overlay writes what --profile measures, got no --profile; give both")
    if is_chat(args):
        from graphrt.tools.verbs import chat

        return chat.main(chat.from_run(args))
    if over_ranks(args):
        from graphrt.tools.ranks.launch import run_on_ranks

        return run_on_ranks("run", args, generate, partial(prompt_text, args), partial(_check_ranks, args))
    return generate(args, prompt_text(args))


def _check_ranks(args: argparse.Namespace) -> None:
    """Raises SessionError for what is done on one rank alone."""
    from graphrt.tools.ranks.launch import refuse

    alone = {
        "--prompt-cache of several texts": args.prompt_cache is not None and (args.parallel > 1 or args.page),
    }  # fmt: skip
    refuse(alone, "several ranks write texts of one prompt")


def generate(args: argparse.Namespace, prompt: str) -> int:
    """The text after a prompt. Several ranks call it together (args.as_ranks); what the first one says is printed."""
    args.predict = PREDICT if args.predict is None else args.predict
    sampling, text = sampler_params(args), text_options(args) | output_options(args)
    loading = time.perf_counter()
    needs: dict[str, Any] = {}
    model = load_model(args, args.exact, partial(before_weights, args, needs))
    tokens = _tokens(model, prompt, args)
    tokens = tokens if model.ranks is None else model.ranks.told(tokens)
    if args.parallel > 1 or args.page:
        return _many(model, tokens, args)
    start = prompt_cache.start(model, tokens, session_options(args), args.prompt_cache and Path(args.prompt_cache))
    session = start.session
    for sentence in session.fallbacks():
        print(f"fallback: {sentence}", file=sys.stderr)
    load_s = time.perf_counter() - loading
    tally = Tally()
    pieces = model.generate(start.rest, args.predict, sampling=sampling, session=session, **text)
    _stream(start.saving(pieces), tally, quiet=args.json, bare=args.raw)
    timings = tally.timings(start.n_read, model.bytes_per_token)
    if not args.json:
        if tally.finish == "context":
            print(_context_full(session), file=sys.stderr)
        _report(tally, timings, len(tokens), start.n_read, load_s)
    profile = _profile(model, session, tokens, args) if args.profile and not tally.interrupted else {}
    if args.json:
        timings["load_s"] = load_s
        made = {"prompt_tokens": tokens, "tokens": tally.tokens, "text": "".join(tally.text), "finish": tally.finish}
        told = logprobs.as_json(tally.pieces, model.tokenizer)
        print_json(made | {"timings": timings} | told | needs | profile)
    return 130 if tally.interrupted else 0


def is_chat(args: argparse.Namespace) -> bool:
    """No prompt is given, somebody sits at the terminal, and nothing is asked for that needs a prompt."""
    asks = args.prompt is not None or args.file is not None or args.raw or args.json or args.profile
    asks = asks or args.parallel > 1 or args.logprobs is not None or args.prompt_cache is not None
    return not asks and sys.stdin.isatty() and sys.stdout.isatty()


def _many(model: Model, tokens: Sequence[int], args: argparse.Namespace) -> int:
    """Several texts of one prompt, or one over pages."""
    from graphrt.tools.sampling import samples

    if args.profile:
        raise SessionError("--profile measures a text in one ring of cells, got -np or --page; leave one of them out")
    sampling, options = sampler_params(args), session_options(args)
    text = text_options(args) | output_options(args)
    return samples.run(
        model, tokens, args.parallel, args.predict, sampling=sampling, options=options,
        cache=args.prompt_cache and Path(args.prompt_cache), text=text, quiet=args.json,
    )  # fmt: skip


def _profile(model: Model, session: Session, tokens: Sequence[int], args: argparse.Namespace) -> dict[str, Any]:
    from graphrt.tools.inspect.overlay import write_overlay
    from graphrt.tools.profile.phase import time_by_node
    from graphrt.tools.profile.report import as_json, lines
    from graphrt.tools.profile.session import profile_session

    if model.ranks is not None:
        return _profile_ranks(model.ranks, session, tokens, args)
    phases = profile_session(session, tokens, args.profile_steps, Path(args.profile))
    if args.profile_overlay is not None:
        write_overlay(args.profile_overlay, time_by_node(phases[-1]))
    if not args.json:
        print("\n".join(lines(phases)), file=sys.stderr)
        print(f"\ntrace: {args.profile} (open it at https://ui.perfetto.dev)", file=sys.stderr)
    return {"profile": {"trace": str(args.profile), "phases": as_json(phases)}}


def _profile_ranks(ranks: Ranks, session: Session, tokens: Sequence[int], args: argparse.Namespace) -> dict[str, Any]:
    """The same over ranks, each with a trace of its own: the first one tells its parts, and where the time of all
    goes."""
    from graphrt.tools.inspect.overlay import write_overlay
    from graphrt.tools.profile import over_ranks, report
    from graphrt.tools.profile.session import profile_session

    given = Path(args.profile)
    trace = given.with_name(f"{given.stem}-{ranks.rank}-of-{ranks.size}{given.suffix}")
    phases = profile_session(session, tokens, args.profile_steps, trace)
    told = over_ranks.gather(ranks, phases)
    found = [over_ranks.told_apart(phase, ranks.stages) for phase in told]
    if ranks.rank == 0 and args.profile_overlay is not None:
        write_overlay(args.profile_overlay, over_ranks.by_node(told[-1], ranks.stages))
    if not args.json:
        print("\nthe first rank's:", *report.lines(phases), *over_ranks.lines(found), sep="\n", file=sys.stderr)
        print(f"\ntraces: {trace}, and so of each rank (open them at https://ui.perfetto.dev)", file=sys.stderr)
    shown = {"trace": str(trace), "phases": report.as_json(phases), "ranks": over_ranks.as_json(found)}
    return {"profile": shown}


def _stream(pieces: Iterator[Piece], tally: Tally, quiet: bool, bare: bool) -> None:
    """Writes pieces as they come. Ctrl-C ends the run, not the report. bare: nothing is added to the text."""
    try:
        with closing(pieces):  # type: ignore[type-var]
            for piece in pieces:
                tally.add(piece)
                if not quiet:
                    print_text(piece.text)
    except KeyboardInterrupt:
        tally.interrupted = True
    if not quiet and (not bare or sys.stdout.isatty()):
        sys.stdout.write("\n")
        sys.stdout.flush()


def _tokens(model: Model, prompt: str, args: argparse.Namespace) -> list[int]:
    from graphrt.models.engine import check_options

    if args.system and (args.raw or model.chat_template is None):
        why = "--raw leaves that out" if args.raw else "this model has none"
        raise SessionError(f"a system message (-sys) needs the chat template, and {why}; write it into the prompt")
    try:
        n_ctx, _ = check_options(session_options(args), model.network.hp)
        return model.prompt_tokens(prompt, raw=args.raw, system=args.system, n_ctx=n_ctx)
    except ChatTemplateError as error:
        raise ChatTemplateError(f"{error}\n--raw gives the prompt to the model without the template") from error


def prompt_text(args: argparse.Namespace) -> str:
    """The text of -p, -f or standard input. Raises SessionError for none."""
    if args.prompt not in (None, "-"):
        text: str = args.prompt
    elif args.prompt == "-" or args.file is not None or not sys.stdin.isatty():
        text = without_last_newline(read_text(args.file or "-"))
    else:
        raise SessionError("a prompt must be given: -p TEXT, -f FILE, or text on standard input")
    if not text:
        raise SessionError("a prompt must not be empty; give some text with -p, -f or on standard input")
    return text


def _context_full(session: Session) -> str:
    longest = session.decoder.hp.n_ctx_train
    more = f"-c gives a longer one, up to {longest}" if session.n_ctx < longest else "the model was trained on no more"
    return f"\nstopped: the context is full ({session.n_ctx} tokens); {more}"


def _report(tally: Tally, t: dict[str, float], n_prompt: int, n_read: int, load_s: float) -> None:
    parts = [f"load {load_s:.2f} s"]
    prompt = f"prompt {n_prompt} tokens" + (f", {n_prompt - n_read} kept" if n_read < n_prompt else "")
    if t:
        parts += [
            f"{prompt}, {t['prompt_tokens_per_s']:.1f} tokens/s",
            f"first token after {t['first_token_s']:.2f} s",
            f"generated {len(tally.tokens)} tokens",
        ]
    else:
        parts += [prompt, "generated none"]
    if t.get("tokens_per_s"):
        parts[-1] += f", {t['tokens_per_s']:.1f} tokens/s, {t['gb_per_s']:.2f} GB/s of weights"
    if tally.interrupted:
        parts.append("interrupted")
    print("\n" + " | ".join(parts), file=sys.stderr)
