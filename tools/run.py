"""Generate text. It streams to stdout; figures go to stderr. Without MODEL the demo model runs, pulled when absent."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphrt.errors import ChatTemplateError, SessionError
from graphrt.tools.common import (
    MODEL_HELP,
    add_fast_argument,
    add_session_arguments,
    load_model,
    print_json,
    read_text,
    session_options,
    whole,
    without_last_newline,
)

if TYPE_CHECKING:
    from graphrt.backend import Backend
    from graphrt.models.gguf import GGUFFile
    from graphrt.models.model import Model, Piece
    from graphrt.models.sampling import SamplerParams
    from graphrt.models.session import Session


#: Flags whose value may start with a dash.
TEXT_FLAGS = ("-p", "--prompt")
#: Where --profile writes unless told.
TRACE = Path("graphrt-profile.json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument(
        "-p", "--prompt", metavar="TEXT", help="the prompt, - for standard input (the default when that is a pipe)"
    )
    prompt.add_argument("-f", "--file", metavar="FILE", help="read the prompt from a file, but for its last newline")
    parser.add_argument("-sys", "--system", metavar="TEXT", help="system message for the chat template")
    parser.add_argument(
        "-n",
        "--predict",
        type=whole(-1),
        default=256,
        metavar="N",
        help="the most tokens to make, -1: no limit (default: 256)",
    )
    parser.add_argument(
        "--raw", action="store_true", help="the prompt as it stands, without the chat template, and only its completion"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a stream")
    parser.add_argument("--exact", action="store_true", help="only reference forms of the ops: slower, to compare with")
    add_fast_argument(parser)
    parser.add_argument("--ignore-eos", action="store_true", help="go on after an end-of-generation token")
    parser.add_argument(
        "--memory", action="store_true", help="print what weights and cache will take, on a CPU too (a GPU's always is)"
    )
    _add_profile_arguments(parser)
    add_session_arguments(parser)
    add_sampling_arguments(parser)


def _add_profile_arguments(parser: argparse.ArgumentParser) -> None:
    from graphrt.tools.profile import DEFAULT_STEPS

    what = "then tell where the time goes, and write a trace for Perfetto (default: graphrt-profile.json)"
    parser.add_argument("--profile", nargs="?", const=TRACE, type=_trace_path, metavar="FILE.json", help=what)
    times = "with --profile: write microseconds by node of a decode step, for `graphrt dump --overlay`"
    parser.add_argument("--profile-overlay", type=Path, metavar="FILE", help=times)
    steps = f"decode steps that are profiled (default: {DEFAULT_STEPS})"
    parser.add_argument("--profile-steps", type=whole(1, 1000), default=DEFAULT_STEPS, metavar="N", help=steps)


def _trace_path(text: str) -> Path:
    """A file that can be made. Its ending keeps `--profile MODEL` from taking the model for it."""
    path = Path(text)
    if path.suffix != ".json":
        raise argparse.ArgumentTypeError(f"must end with .json, got {text[:80]!r}; give MODEL before --profile")
    if not path.parent.is_dir() or path.is_dir():
        raise argparse.ArgumentTypeError(f"must lie in a folder that is there, got {text[:80]!r}")
    return path


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """The samplers, with llama.cpp's names and defaults."""
    from graphrt.models.sampling import SamplerParams

    defaults = SamplerParams()
    group = parser.add_argument_group("sampling (llama.cpp's order, names and defaults)")
    flags: dict[str, tuple[str, ...]] = {
        "temp": ("0: always the likeliest token; higher: more varied", "--temp"),
        "top_k": ("only the K likeliest tokens, 0: all", "--top-k"),
        "top_p": ("only the likeliest tokens that add up to this probability, 1: all", "--top-p"),
        "min_p": ("only tokens at least this likely, as a share of the likeliest, 0: all", "--min-p"),
        "typical_p": ("locally typical sampling, 1: off", "--typical"),
        "xtc_probability": ("chance to drop all but the last token over the threshold, 0: off", "--xtc-probability"),
        "xtc_threshold": ("the probability over which that drops, more than 0.5: off", "--xtc-threshold"),
        "repeat_penalty": ("divides the logits of tokens that have come, 1: off", "--repeat-penalty"),
        "repeat_last_n": ("how many tokens back the penalties look, 0: off, -1: all", "--repeat-last-n"),
        "presence_penalty": ("taken off tokens that have come, 0: off", "--presence-penalty"),
        "frequency_penalty": ("taken off tokens for each time that they have come, 0: off", "--frequency-penalty"),
        "seed": ("the same seed gives the same text, -1: a new one each time", "-s", "--seed"),
    }
    for name, (what, *names) in flags.items():
        value = getattr(defaults, name)
        kind, mark = (int, "N") if isinstance(value, int) else (float, "X")
        group.add_argument(*names, dest=name, type=kind, default=value, metavar=mark, help=f"{what} (default: {value})")


def sampler_params(args: argparse.Namespace) -> SamplerParams:
    from dataclasses import fields

    from graphrt.models.sampling import SamplerParams

    try:
        return SamplerParams(**{f.name: getattr(args, f.name) for f in fields(SamplerParams) if hasattr(args, f.name)})
    except SessionError as error:
        raise SessionError(f"{error}\ngraphrt run --help lists the samplers and their values") from error


@dataclass
class Tally:
    """What a run made and how long it took. Seconds are counted from `start`."""

    start: float = field(default_factory=time.perf_counter)
    tokens: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    first: float | None = None
    last: float | None = None
    interrupted: bool = False

    def add(self, piece: Piece) -> None:
        now = time.perf_counter()
        self.first = self.first or now
        self.last = now
        self.tokens.append(piece.token)
        self.text.append(piece.text)

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
    prompt = prompt_text(args)
    sampling = sampler_params(args)
    loading = time.perf_counter()
    needs: dict[str, Any] = {}
    model = load_model(args, args.exact, partial(_before_weights, args, needs))
    tokens = _tokens(model, prompt, args)
    session = model.session(session_options(args))
    for sentence in session.fallbacks():
        print(f"fallback: {sentence}", file=sys.stderr)
    load_s = time.perf_counter() - loading
    tally = Tally()
    pieces = model.generate(tokens, args.predict, sampling=sampling, session=session, ignore_eos=args.ignore_eos)
    _stream(pieces, tally, quiet=args.json, bare=args.raw)
    timings = tally.timings(len(tokens), model.bytes_per_token)
    if not args.json:
        if session.n_past >= session.n_ctx and _cut_short(tally, model, args):
            print(_context_full(session), file=sys.stderr)
        _report(tally, timings, len(tokens), load_s)
    profile = _profile(session, tokens, args) if args.profile and not tally.interrupted else {}
    if args.json:
        text = "".join(tally.text)
        timings["load_s"] = load_s
        made = {"prompt_tokens": tokens, "tokens": tally.tokens, "text": text, "timings": timings}
        print_json(made | needs | profile)
    return 130 if tally.interrupted else 0


def _before_weights(
    args: argparse.Namespace, told: dict[str, Any], file: GGUFFile, backends: Sequence[Backend]
) -> None:
    """What can go on while the weights are read, and what must be known before."""
    from graphrt.models.chat import start_soon

    if not args.raw:
        start_soon(file.metadata)
    _check_memory(args, told, file, backends)


def _check_memory(args: argparse.Namespace, told: dict[str, Any], file: GGUFFile, backends: Sequence[Backend]) -> None:
    """Says what a model will take, before it does: of a GPU always, else when asked. Raises MemoryPlanError."""
    from graphrt.models.memory import check_fits, memory_needs

    if not args.memory and backends[0].name == "cpu":
        return  # nothing to tell, and reading the header twice over takes time
    options = session_options(args)
    needs = memory_needs(file, backends, options)
    if args.memory or (needs.total and not needs.in_place):
        print(f"memory: {needs}", file=sys.stderr)
        told["memory"] = asdict(needs)
    check_fits(file, needs, options)


def _profile(session: Session, tokens: Sequence[int], args: argparse.Namespace) -> dict[str, Any]:
    from graphrt.tools.overlay import write_overlay
    from graphrt.tools.profile import as_json, lines, profile_session, time_by_node

    phases = profile_session(session, tokens, args.profile_steps, args.profile)
    if args.profile_overlay is not None:
        write_overlay(args.profile_overlay, time_by_node(phases[-1]))
    if not args.json:
        print("\n".join(lines(phases)), file=sys.stderr)
        print(f"\ntrace: {args.profile} (open it at https://ui.perfetto.dev)", file=sys.stderr)
    return {"profile": {"trace": str(args.profile), "phases": as_json(phases)}}


def _stream(pieces: Iterator[Piece], tally: Tally, quiet: bool, bare: bool) -> None:
    """Writes pieces as they come. Ctrl-C ends the run, not the report. bare: nothing is added to the text."""
    try:
        with closing(pieces):  # type: ignore[type-var]
            for piece in pieces:
                tally.add(piece)
                if not quiet:
                    sys.stdout.write(piece.text)
                    sys.stdout.flush()
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


def _cut_short(tally: Tally, model: Model, args: argparse.Namespace) -> bool:
    """Whether the text would have gone on: it had no end of its own, nor all the tokens asked for, nor Ctrl-C."""
    if tally.interrupted or not tally.tokens or len(tally.tokens) == args.predict:
        return False
    return args.ignore_eos or not model.tokenizer.is_eog(tally.tokens[-1])


def _context_full(session: Session) -> str:
    longest = session.decoder.hp.n_ctx_train
    more = f"-c gives a longer one, up to {longest}" if session.n_ctx < longest else "this model goes no further"
    return f"\nstopped: the context is full ({session.n_ctx} tokens); {more}"


def _report(tally: Tally, t: dict[str, float], n_prompt: int, load_s: float) -> None:
    parts = [f"load {load_s:.2f} s"]
    if t:
        parts += [
            f"prompt {n_prompt} tokens, {t['prompt_tokens_per_s']:.1f} tokens/s",
            f"first token after {t['first_token_s']:.2f} s",
            f"generated {len(tally.tokens)} tokens",
        ]
    else:
        parts += [f"prompt {n_prompt} tokens", "generated none"]
    if t.get("tokens_per_s"):
        parts[-1] += f", {t['tokens_per_s']:.1f} tokens/s, {t['gb_per_s']:.2f} GB/s of weights"
    if tally.interrupted:
        parts.append("interrupted")
    print("\n" + " | ".join(parts), file=sys.stderr)
