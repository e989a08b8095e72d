"""Generate text. It streams to stdout; figures go to stderr. Without MODEL the demo model runs, pulled when absent."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from graphrt.errors import SessionError
from graphrt.tools.common import (
    add_session_arguments,
    human_bytes,
    load_model,
    print_json,
    read_text,
    session_options,
)

if TYPE_CHECKING:
    from graphrt.models.model import Model, Piece
    from graphrt.models.sampling import SamplerParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a .gguf file, a known name or hf:REPO/FILE")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt; standard input when it is piped in")
    prompt.add_argument("-f", "--file", metavar="FILE", help="read the prompt from a file, - for standard input")
    parser.add_argument("-sys", "--system", metavar="TEXT", help="system message for the chat template")
    parser.add_argument("-n", "--predict", type=int, default=256, metavar="N", help="tokens, -1: no limit (default: 256)")
    parser.add_argument("--raw", action="store_true", help="no chat template; write only the completion")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a stream")
    parser.add_argument("--exact", action="store_true", help="reference forms of the ops only")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after an end-of-generation token")
    add_session_arguments(parser)
    add_sampling_arguments(parser)


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """The samplers, with llama.cpp's names and defaults."""
    from graphrt.models.sampling import SamplerParams

    defaults = SamplerParams()
    group = parser.add_argument_group("sampling (llama.cpp's order, names and defaults; --temp 0 is greedy)")
    flags: dict[str, tuple[str, ...]] = {
        "temp": ("--temp",), "top_k": ("--top-k",), "top_p": ("--top-p",), "min_p": ("--min-p",),
        "typical_p": ("--typical",), "xtc_probability": ("--xtc-probability",), "xtc_threshold": ("--xtc-threshold",),
        "repeat_penalty": ("--repeat-penalty",), "repeat_last_n": ("--repeat-last-n",),
        "presence_penalty": ("--presence-penalty",), "frequency_penalty": ("--frequency-penalty",),
        "seed": ("-s", "--seed"),
    }  # fmt: skip
    for name, names in flags.items():
        default = getattr(defaults, name)
        group.add_argument(*names, dest=name, type=type(default), default=default, metavar="X", help=f"default: {default}")


def sampler_params(args: argparse.Namespace) -> SamplerParams:
    from dataclasses import fields

    from graphrt.models.sampling import SamplerParams

    return SamplerParams(**{f.name: getattr(args, f.name) for f in fields(SamplerParams) if hasattr(args, f.name)})


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
    prompt = _prompt(args)
    sampling = sampler_params(args)
    loading = time.perf_counter()
    model = load_model(args, args.exact)
    tokens = model.prompt_tokens(prompt, raw=args.raw, system=args.system)
    session = model.session(session_options(args))
    load_s = time.perf_counter() - loading
    tally = Tally()
    pieces = model.generate(tokens, args.predict, sampling=sampling, session=session, ignore_eos=args.ignore_eos)
    _stream(pieces, tally, quiet=args.json)
    timings = tally.timings(len(tokens), _bytes_per_token(model))
    if args.json:
        text = "".join(tally.text)
        timings["load_s"] = load_s
        print_json({"prompt_tokens": tokens, "tokens": tally.tokens, "text": text, "timings": timings})
    elif timings:
        _report(tally, timings, len(tokens), load_s, session.n_past >= session.n_ctx, session.n_ctx)
    return 130 if tally.interrupted else 0


def _stream(pieces: Iterator[Piece], tally: Tally, quiet: bool) -> None:
    """Writes pieces as they come. Ctrl-C ends the run, not the report."""
    try:
        with closing(pieces):  # type: ignore[type-var]
            for piece in pieces:
                tally.add(piece)
                if not quiet:
                    sys.stdout.write(piece.text)
                    sys.stdout.flush()
    except KeyboardInterrupt:
        tally.interrupted = True
    if not quiet:
        sys.stdout.write("\n")
        sys.stdout.flush()


def _prompt(args: argparse.Namespace) -> str:
    if args.prompt is not None:
        text: str = args.prompt
    elif args.file is not None or not sys.stdin.isatty():
        text = read_text(args.file or "-")
    else:
        raise SessionError("a prompt must be given: -p TEXT, -f FILE, or text on standard input")
    if not text:
        raise SessionError("a prompt must not be empty; give some text with -p")
    return text


def _bytes_per_token(model: Model) -> int:
    """Weights that one token reads: all but an embedding that serves only as a table of rows."""
    decoder = model.decoder
    table = 0 if decoder.output is decoder.token_embd else decoder.token_embd.nbytes
    return model.weights.nbytes - table


def _report(tally: Tally, timings: dict[str, float], n_prompt: int, load_s: float, full: bool, n_ctx: int) -> None:
    t = timings
    if full:
        print(f"\nthe context is full ({n_ctx} tokens); a longer one: -c", file=sys.stderr)
    rate = f"{t['tokens_per_s']:.1f} tokens/s, {human_bytes(t['gb_per_s'] * 1e9)}/s of weights" if t["tokens_per_s"] else "-"
    print(
        f"\nload {load_s:.2f} s | prompt {n_prompt} tokens, {t['prompt_tokens_per_s']:.1f} tokens/s, "
        f"first token after {t['first_token_s']:.2f} s | generated {len(tally.tokens)} tokens, {rate}",
        file=sys.stderr,
    )
