"""The flags of sampling and of where a text ends, with generate()'s names and defaults, which are llama.cpp's."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from graphrt.errors import SessionError
from graphrt.tools.common import read_text, whole
from graphrt.tools.sampling import spelled

if TYPE_CHECKING:
    from graphrt.models.sampling_params import SamplerParams

#: Flags whose value may start with a dash.
TEXT_FLAGS = ("-r", "--reverse-prompt", "--stop", "--dry-sequence-breaker", "--grammar")
#: The most texts of one prompt.
MAX_PARALLEL = 256

_NUMBERS: dict[str, tuple[str, ...]] = {
    "temp": ("0: always the likeliest token; higher: more varied", "--temp"),
    "top_k": ("only the N likeliest tokens, 0: all", "--top-k"),
    "top_p": ("only the likeliest tokens that add up to this probability, 1: all", "--top-p"),
    "min_p": ("only tokens at least this likely, as a share of the likeliest, 0: all", "--min-p"),
    "typical_p": ("locally typical sampling, 1: off", "--typical-p", "--typical"),
    "top_n_sigma": (
        "only logits so many deviations below the highest, 0 or less: all",
        "--top-n-sigma",
        "--top-nsigma",
    ),
    "xtc_probability": (
        "chance to drop all tokens over the threshold but the least likely, 0: off",
        "--xtc-probability",
    ),
    "xtc_threshold": ("the threshold for that, over 0.5: off", "--xtc-threshold"),
    "repeat_penalty": ("divides the logits of tokens that have occurred, 1: off", "--repeat-penalty"),
    "repeat_last_n": ("how many tokens back the penalties look, 0: off, -1: all", "--repeat-last-n"),
    "presence_penalty": ("subtracted from the logits of tokens that have occurred, 0: off", "--presence-penalty"),
    "frequency_penalty": ("subtracted for each time that a token has occurred, 0: off", "--frequency-penalty"),
    "dry_multiplier": ("DRY: subtracted from tokens that would continue a repetition, 0: off", "--dry-multiplier"),
    "dry_base": ("DRY: its factor for each further token of the repetition", "--dry-base"),
    "dry_allowed_length": ("DRY: length up to which a repetition is not penalized", "--dry-allowed-length"),
    "dry_penalty_last_n": ("how many tokens back DRY looks, 0: off, -1: all", "--dry-penalty-last-n"),
    "dynatemp_range": ("how far the temperature may move with the entropy, 0: off", "--dynatemp-range"),
    "dynatemp_exp": ("dynamic temperature: the exponent of the entropy", "--dynatemp-exp"),
    "mirostat": ("1 or 2: this version in place of all samplers but --temp, 0: off", "--mirostat"),
    "mirostat_lr": ("how fast mirostat learns (eta)", "--mirostat-lr"),
    "mirostat_ent": ("the surprise that mirostat aims at, in bits (tau)", "--mirostat-ent"),
    "seed": ("the same seed gives the same text, -1: a new one each time", "-s", "--seed"),
}


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """The samplers."""
    from graphrt.models.sampling_params import SamplerParams

    defaults = SamplerParams()
    group = parser.add_argument_group("sampling (llama.cpp's order, names and defaults)")
    for name, (what, *names) in _NUMBERS.items():
        value = getattr(defaults, name)
        kind, mark = (int, "N") if isinstance(value, int) else (float, "X")
        group.add_argument(*names, dest=name, type=kind, default=value, metavar=mark, help=f"{what} (default: {value})")
    breaker = r"a text at which DRY's repetitions end, instead of \n : \" *; may be repeated; none: no text"
    group.add_argument("--dry-sequence-breaker", action="append", type=spelled.unescaped, metavar="TEXT", help=breaker)
    bias = "add to a token's logit: 15043+1, 15043-1, or 15043-inf for never; may be repeated"
    group.add_argument("-l", "--logit-bias", action="append", type=_bias, metavar="TOKEN+/-BIAS", help=bias)


def add_text_arguments(parser: argparse.ArgumentParser) -> None:
    """Where a text ends, and what it may be."""
    group = parser.add_argument_group("text")
    stop = r"end before this text, which is not shown; \n is a new line; may be repeated"
    names = ("-r", "--reverse-prompt", "--stop")
    group.add_argument(
        *names, dest="stop", action="append", default=[], type=spelled.unescaped, metavar="TEXT", help=stop
    )
    stop_ids = "end at this token; may be repeated"
    group.add_argument("--stop-ids", action="append", default=[], type=whole(0), metavar="ID", help=stop_ids)
    group.add_argument("--ignore-eos", action="store_true", help="never choose a token that ends the text")
    rules = group.add_mutually_exclusive_group()
    rules.add_argument("--grammar", metavar="GBNF", help="only texts of this grammar, in llama.cpp's notation")
    rules.add_argument("--grammar-file", metavar="FILE", help="the same, read from a file")
    rules.add_argument("-j", "--json-schema", metavar="SCHEMA", help="only JSON that fits this schema, {} for any")
    rules.add_argument("-jf", "--json-schema-file", metavar="FILE", help="the same, read from a file")


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """How many texts are made, and what is told of them."""
    group = parser.add_argument_group("output")
    best = "with --json: log-probabilities of the text's tokens, and of the N likeliest tokens at each place"
    group.add_argument("--logprobs", type=whole(0), metavar="N", help=best)
    many = "generate N texts from one prompt, which is read once; text I has the seed --seed + I (default: 1)"
    group.add_argument("-np", "--parallel", type=whole(1, MAX_PARALLEL), default=1, metavar="N", help=many)


def sampler_params(args: argparse.Namespace) -> SamplerParams:
    """The samplers' parameters. Raises SessionError for those that can't be."""
    from graphrt.models.sampling_params import SamplerParams

    given: dict[str, Any] = {name: getattr(args, name) for name in _NUMBERS}
    given["logit_bias"] = dict(args.logit_bias or ())
    if args.dry_sequence_breaker is not None:
        given["dry_sequence_breaker"] = [text for text in args.dry_sequence_breaker if text != "none"]
    try:
        return SamplerParams(**given)
    except SessionError as error:
        raise SessionError(f"{error}\ngraphrt run --help lists the samplers and their values") from error


def text_options(args: argparse.Namespace) -> dict[str, Any]:
    """generate()'s keywords for where a text ends and what it may be. Raises SessionError for a file that can't be
    read."""
    grammar = args.grammar if args.grammar_file is None else read_text(args.grammar_file)
    schema = args.json_schema if args.json_schema_file is None else read_text(args.json_schema_file)
    return {
        "stop": args.stop,
        "stop_ids": args.stop_ids,
        "ignore_eos": args.ignore_eos,
        "grammar": grammar,
        "json_schema": schema,
    }


def output_options(args: argparse.Namespace) -> dict[str, Any]:
    """generate()'s keywords for what is told of a text. Raises SessionError."""
    if args.logprobs is not None and not args.json:
        raise SessionError("log-probabilities (--logprobs) are part of the JSON; give --json too")
    return {"logprobs": args.logprobs}


def _bias(text: str) -> tuple[int, float]:
    """An argparse type."""
    try:
        return spelled.bias(text)
    except SessionError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
