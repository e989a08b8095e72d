"""graphrt: the command. Finds the verb, imports its module, turns errors into one to three lines and an exit code.

Exit codes: 0 it went well, 1 the answer is no, 2 it could not be asked.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import importlib.util
import io
import os
import re
import sys
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from graphrt import __version__, env, interrupts
from graphrt.errors import GraphrtError
from graphrt.progress import shown_by
from graphrt.tools.foreign_flags import adapted
from graphrt.tools.outputs import check_outputs

#: verb -> what it is for. The module is graphrt.tools.verbs.<verb>, with add_arguments(parser), main(args) -> int, and
#: where flags take free text TEXT_FLAGS.
VERBS = {
    "run": "generate text; without a model, the demo model",
    "chat": "talk with a model, turn by turn; `run` without a prompt does too",
    "serve": "answer requests over HTTP as OpenAI's API does; without a model, the demo model",
    "pull": "fetch a model into the cache",
    "info": "metadata, tensors, types, memory needed, ops used",
    "check": "what would fall back on a backend, and why, before anything runs",
    "dump": "a graph as it would run: nodes, places, fusions, work; as a table, JSON or a picture",
    "explain": "how a node is run and why: kernel, schedule, tiles, fusion, expected time; plans for GPUs elsewhere",
    "memory": "where memory goes: weights, cache, arenas with their peak; a picture; the longest context that fits",
    "trace": "what every node of a step holds: statistics, values, and which node makes the first NaN",
    "diff": "where two ways of running part: node by node, with the first one that is too far off",
    "tokenize": "token ids and pieces of a text",
    "perplexity": "perplexity of a text, by llama-perplexity's method",
    "embed": "vectors of texts, or how alike the texts are",
    "logits": "write the logits of every position to a .npy file",
    "quantize": "write a model's file in smaller types: Q4_K_M, Q8_0 and so on",
    "imatrix": "measure on a text which weights matter most, for `quantize --imatrix`",
    "split": "cut a model's file into parts",
    "merge": "join the parts of a split model",
    "bench": "speed of a model, beside the machine's ceilings and a peer; of one op (`op OP`), of a server (`serve`)",
    "test": "conformance of a backend, op by op",
    "tune": "measure configurations of the portable attention kernel, and write the fastest as rows of its table",
    "replay": "run a case that a test saved when it failed",
    "devices": "backends, their scores and devices",
}


#: A verb and its first argument -> the module of graphrt.tools.verbs that takes the rest. A file of that name is ./op.
FORMS: dict[tuple[str, ...], str] = {("bench", "op"): "bench_op", ("bench", "serve"): "bench_serve"}


#: The exit code that shells give to what a closed pipe ended.
CLOSED_PIPE = 141
#: Options of the Python API that errors name, and their flags.
FLAGS = {
    "GRAPHRT_FUSE": "--fuse",
    "GRAPHRT_KEEP_WEIGHTS": "--keep-weights",
    "n_ctx": "-c",
    "n_batch": "-b",
    "n_pages": "--pages",
    "type_k": "-ctk",
    "type_v": "-ctv",
    "pooling": "--pooling",
}
#: What to do where memory runs out.
_LESS = "use a smaller model, a shorter context (-c) or smaller batches (-b), or free memory that others hold"


#: What argparse says without the rule, and what is said instead.
_RULES = {
    r"invalid int value: (.*)": r"must be a whole number, got \1",
    r"invalid float value: (.*)": r"must be a number, got \1",
    r"invalid choice: (.*) \(choose from (.*)\)": r"must be one of \2, got \1",
}


class Parser(argparse.ArgumentParser):
    """argparse with errors of two lines."""

    def error(self, message: str) -> NoReturn:
        for theirs, ours in _RULES.items():
            message = re.sub(theirs, ours, message)
        if unknown := re.match(r"unrecognized arguments: (--[^\s=]+)", message):
            near = difflib.get_close_matches(unknown[1], self._option_string_actions, 1, 0.65)
            message += f". Did you mean {near[0]}?" if near else ""
        self.exit(2, f"{self.prog}: {message}\n{self.prog} --help lists what it takes\n")

    def has_flag(self, text: str) -> bool:
        return text in self._option_string_actions

    def has_argument(self, name: str) -> bool:
        """Whether there is an argument of that name that is no flag."""
        return any(action.dest == name and not action.option_strings for action in self._actions)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line and returns the exit code; argparse leaves with SystemExit after --help or wrong flags."""
    args = list(sys.argv[1:] if argv is None else argv)
    who = " ".join(["graphrt", *args[:1]])
    _prepare_streams()
    try:
        code = _dispatch(args)
        sys.stdout.flush()  # a reader that has gone, or a full disk, must show here, not when Python exits
        return code
    except GraphrtError as error:
        print(f"{who}: {error}{_flags_of(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(interrupts.line(who), file=sys.stderr)
        return interrupts.EXIT_CODE
    except BrokenPipeError:  # whoever read our output has gone (head, less); nobody is left to tell
        _discard_output()
        return CLOSED_PIPE
    except MemoryError as error:  # numpy says how much it wanted, Python nothing
        print(f"{who}: there is not enough memory{f' ({error})' if str(error) else ''}; {_LESS}", file=sys.stderr)
        return 2
    except RecursionError:
        print(f"{who}: what was given is nested too deeply; is it the right file?", file=sys.stderr)
        return 2
    except OSError as error:
        _discard_output()
        where = f" ({error.filename})" if error.filename else ""
        print(f"{who}: the system refused{where}: {error.strerror}; check the disk and retry", file=sys.stderr)
        return 2


def _flags_of(message: str) -> str:
    """A line with the flags of what a message calls by the names of the Python API, "" for none."""
    named = [f"{name} is {flag}" for name, flag in FLAGS.items() if re.search(rf"\b{name}\b", message)]
    return f"\nhere {', '.join(named)}" if named else ""


def _prepare_streams() -> None:
    """What stdout's encoding can't spell is printed as an escape; streams that are closed take and give nothing."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (it lives as long as the process)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    """What is still buffered goes nowhere: Python's exit would try to write it again."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(args: Sequence[str]) -> int:
    if not args:
        print(_help(), file=sys.stderr)
        return 2
    if args[0] in ("-h", "--help"):
        print(_help())
        return 0
    if args[0] in ("-V", "--version"):
        print(f"graphrt {__version__}")
        return 0
    if args[0] not in VERBS:
        close = difflib.get_close_matches(args[0], VERBS, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        print(f"graphrt: a verb must be one of {', '.join(VERBS)}, got {args[0][:40]!r}.{hint}", file=sys.stderr)
        print("graphrt --help tells what each does", file=sys.stderr)
        return 2
    return _run_verb(args[0], args[1:])


def _run_verb(verb: str, argv: Sequence[str]) -> int:
    form = FORMS.get((verb, *argv[:1]))
    if form is not None:
        verb, argv = f"{verb} {argv[0]}", argv[1:]
    module = importlib.import_module(f"graphrt.tools.verbs.{form or verb}")
    parser = verb_parser(verb, module)
    given, notes = adapted(
        _joined(argv, getattr(module, "TEXT_FLAGS", ()), parser), parser.has_flag, parser.has_argument("model")
    )
    for note in notes:
        print(f"graphrt {verb}: {note}", file=sys.stderr)
    # Intermixed, for `explain MODEL --phase prefill NODE`: parse_args() wants MODEL and NODE side by side.
    args = parser.parse_intermixed_args(given)
    env.apply(args)
    check_outputs(args)
    _check_fusions()
    from graphrt.tools.progress import on_stderr

    with shown_by(None if getattr(args, "json", False) else on_stderr()):
        code: int = module.main(args)
    return code


def verb_parser(verb: str, module: Any) -> Parser:
    """The parser of a verb ("run", "bench op") whose module is given, with the options that every verb has."""
    parser = Parser(prog=f"graphrt {verb}", description=module.__doc__, allow_abbrev=False)
    module.add_arguments(parser)
    env.add_arguments(parser)
    return parser


def _check_fusions() -> None:
    """Raises BackendError for a fusion that there is none of, whoever runs the verb: the CPU backend asks for none."""
    if env.FUSE.get() and importlib.util.find_spec("triton") is not None:
        from graphrt.backends.triton.fuse import wanted_fusions

        wanted_fusions(exact=False)


def _joined(argv: Sequence[str], names: Collection[str], parser: Parser) -> list[str]:
    """`-p TEXT` as one argument where TEXT starts with a dash and is no flag itself: argparse would refuse it."""
    out: list[str] = []
    for arg in argv:
        flag = out[-1] if out else None
        if flag in names and arg.startswith("-") and arg != "-" and not parser.has_flag(arg):
            out[-1] = f"{flag}={arg}" if flag.startswith("--") else f"{flag}{arg}"  # type: ignore[union-attr]
        else:
            out.append(arg)
    return out


def _help() -> str:
    verbs = "\n".join(f"  {name:<12}{what}" for name, what in VERBS.items())
    rows = [(name, flag, f"{meaning} (default: {default})") for name, flag, meaning, default in env.table()]
    settings = "\n".join(f"  {name:<22}{flag:<23}{said}" for name, flag, said in rows)
    return (
        f"usage: graphrt VERB [options]\n\n{verbs}\n\n"
        f"Environment variables, and the flags that every verb has for them:\n{settings}\n\n"
        f"graphrt VERB --help tells more of each; graphrt --version is {__version__}.\n"
        f"Exit codes: 0 fine, 1 the answer is no, 2 it could not be asked, 130 Ctrl-C, 141 a closed pipe."
    )
