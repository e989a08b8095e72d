"""Token ids and pieces of a text, as the model's own tokenizer cuts it."""

from __future__ import annotations

import argparse

from graphrt.tools.common import MODEL_HELP, Once, print_json, print_table, read_text, utf8

#: Flags whose value may start with a dash.
TEXT_FLAGS = ("-p", "--prompt")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("-p", "--prompt", metavar="TEXT", action=Once, type=utf8, help="the text")
    text.add_argument("-f", "--file", metavar="FILE", help="read the text from a file, - for standard input")
    parser.add_argument("--ids", action="store_true", help="only a JSON list of ids")
    parser.add_argument("--json", action="store_true", help="a JSON list of objects with id and piece")
    parser.add_argument("--no-bos", action="store_true", help="add no token at the beginning")
    parser.add_argument("--special", action="store_true", help='read "<|im_start|>" and the like as special tokens')


def main(args: argparse.Namespace) -> int:
    from graphrt.models import hub
    from graphrt.models.gguf import GGUFFile
    from graphrt.models.tokenizer import Tokenizer

    text = args.prompt if args.prompt is not None else read_text(args.file)
    with GGUFFile.open(hub.resolve(args.model)) as file:
        tokenizer = Tokenizer.from_metadata(file.metadata)
    ids = tokenizer.encode(text, add_bos=False if args.no_bos else None, parse_special=args.special)
    pieces = [tokenizer.piece(i).decode("utf-8", "replace") for i in ids]
    if args.ids:
        print_json(ids)
    elif args.json:
        print_json([{"id": i, "piece": piece} for i, piece in zip(ids, pieces)])
    else:
        print_table(("id", "piece"), [(i, repr(piece)) for i, piece in zip(ids, pieces)])
    return 0
