"""graphrt: the command. Finds the verb, imports its module, turns errors into one to three lines and an exit code.

Exit codes: 0 it went well, 1 the answer is no, 2 it could not be asked.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from graphrt import __version__
from graphrt.errors import GraphrtError

#: verb -> what it is for. The module is graphrt.tools.<verb>, with add_arguments(parser) and main(args) -> int.
VERBS = {
    "run": "generate text; without a model, the demo model",
    "pull": "fetch a model into the cache",
    "info": "metadata, tensors, types, memory needed, ops used",
    "tokenize": "token ids and pieces of a text",
    "perplexity": "perplexity of a text, by llama-perplexity's method",
    "logits": "write the logits of every position to a .npy file",
    "devices": "backends, their scores and devices",
}


class Parser(argparse.ArgumentParser):
    """argparse with errors of two lines."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n{self.prog} --help lists what it takes\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line and returns the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print(_help())
        return 0 if args else 2
    if args[0] in ("-V", "--version"):
        print(f"graphrt {__version__}")
        return 0
    if args[0] not in VERBS:
        print(f"graphrt: a verb must be one of {', '.join(VERBS)}, got {args[0]!r}", file=sys.stderr)
        return 2
    try:
        return _run_verb(args[0], args[1:])
    except GraphrtError as error:
        print(f"graphrt {args[0]}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read our output has gone (head, less); nobody is left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run_verb(verb: str, argv: Sequence[str]) -> int:
    module = importlib.import_module(f"graphrt.tools.{verb}")
    parser = Parser(prog=f"graphrt {verb}", description=module.__doc__, allow_abbrev=False)
    module.add_arguments(parser)
    code: int = module.main(parser.parse_args(argv))
    return code


def _help() -> str:
    verbs = "\n".join(f"  {name:<12}{what}" for name, what in VERBS.items())
    return (
        f"usage: graphrt VERB [options]\n\n{verbs}\n\ngraphrt VERB --help tells more of each. "
        f"Exit codes: 0 fine, 1 the answer is no, 2 it could not be asked."
    )


if __name__ == "__main__":
    sys.exit(main())
