"""Write the logits of every position of a token sequence: float32 [n_tokens, n_vocab], a .npy file."""

from __future__ import annotations

import argparse

from graphrt.errors import SessionError
from graphrt.tools.common import (
    MODEL_HELP,
    add_session_arguments,
    load_model,
    print_json,
    session_options,
    write_array,
)
from graphrt.tools.outputs import OutputFile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "--tokens", required=True, metavar="1,2,3", help="token ids, as `graphrt tokenize --ids` prints them"
    )
    parser.add_argument("-o", "--output", required=True, type=OutputFile, metavar="F.npy", help="the file to write")
    parser.add_argument("--fast", action="store_true", help="the forms that `run` uses, not the reference")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    add_session_arguments(parser)


def parse_ids(text: str) -> list[int]:
    """Ids from "1,2,3" or "[1, 2, 3]". Raises SessionError for anything else."""
    try:
        return [int(part) for part in text.strip("[] ").split(",")]
    except ValueError:
        raise SessionError(
            f"--tokens must be whole numbers with commas between, such as 1,2,3, got {text[:60]!r}; "
            f"`graphrt tokenize MODEL -p TEXT --ids` makes them of a text"
        ) from None


def main(args: argparse.Namespace) -> int:
    ids = parse_ids(args.tokens)
    model = load_model(args, exact=not args.fast)
    logits = model.logits(ids, session_options(args))
    write_array(args.output, logits)
    if args.json:
        print_json({"output": args.output, "shape": list(logits.shape)})
    else:
        print(f"{args.output}: float32 {list(logits.shape)}")
    return 0
