"""Embeddings of texts, by an encoder or a decoder: a JSON line each, a .npy file, or a table of how alike they are."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import numpy.typing as npt

from graphrt.errors import SessionError
from graphrt.tools.common import (
    MODEL_HELP,
    add_threads_argument,
    load_model,
    print_json,
    print_table,
    read_text,
    utf8,
    whole,
    write_array,
)
from graphrt.tools.outputs import OutputFile
from graphrt.tools.rope_flags import add_rope_arguments

#: Flags whose value may start with a dash.
TEXT_FLAGS = ("-p", "--prompt")
#: Characters of a text that a table shows.
SHOWN = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument(
        "-p", "--prompt", metavar="TEXT", action="append", type=utf8, help="a text; may be given several times"
    )
    text.add_argument("-f", "--file", metavar="FILE", help="texts from a file, a line each, - for standard input")
    parser.add_argument(
        "--pooling", default="", metavar="KIND", help="mean, cls, last or none (default: what the file names)"
    )
    parser.add_argument("--no-normalize", action="store_true", help="vectors as they are, not of length 1")
    parser.add_argument("--similarity", action="store_true", help="print the cosine of each pair of texts instead")
    parser.add_argument(
        "-o", "--output", type=OutputFile, metavar="F.npy", help="write the vectors, float32 [texts, n_embd], to a file"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.add_argument("--exact", action="store_true", help="reference forms only")
    group = parser.add_argument_group("model")
    group.add_argument("--backend", default="auto", metavar="NAME", help="what runs it (default: the best)")
    group.add_argument(
        "-b",
        "--batch-size",
        type=whole(0),
        default=0,
        metavar="N",
        help="tokens read at once, 0 for as many as suit the backend (default)",
    )
    add_threads_argument(group)
    add_rope_arguments(parser)


def main(args: argparse.Namespace) -> int:
    from graphrt.models.embed import check_pooling, normalized

    texts = args.prompt or _lines(args.file)
    model = load_model(args, exact=args.exact)
    pooling = check_pooling(args.pooling, model.network.hp.pooling)
    if pooling == "none" and (args.similarity or args.output):
        raise SessionError(
            "--pooling none leaves a vector a token, of which there is no table and no file; use mean, cls or last"
        )
    rows = model.embed(texts, pooling, normalize=not args.no_normalize, n_batch=args.batch_size)
    if args.output:
        write_array(args.output, np.stack(rows))
    cosines = None
    if args.similarity:
        units = normalized(np.stack(rows))
        cosines = units @ units.T
    if args.json:
        facts: dict[str, Any] = {"pooling": pooling, "normalized": not args.no_normalize, "output": args.output}
        print_json(facts | {"similarity": _plain(cosines), "embeddings": [_plain(row) for row in rows]})
    elif cosines is not None:
        _print_similarity(texts, cosines)
    elif args.output:
        print(f"{args.output}: float32 {[len(rows), len(rows[0])]}")
    else:
        for text, row in zip(texts, rows):
            print_json({"text": text, "embedding": _plain(row)})
    return 0


def _lines(path: str) -> list[str]:
    lines = [line for line in read_text(path).splitlines() if line.strip()]
    if not lines:
        raise SessionError(f"texts must be lines that are not empty, {path!r} has none; give some with -p TEXT")
    return lines


def _plain(values: npt.NDArray[np.float32] | None) -> list[Any] | None:
    """Numbers that read back as the same float32."""
    if values is None:
        return None
    if values.ndim > 1:
        return [_plain(row) for row in values]
    return [float(str(v)) for v in values]


def _print_similarity(texts: list[str], cosines: npt.NDArray[np.float32]) -> None:
    names = [text if len(text) <= SHOWN else text[: SHOWN - 3] + "..." for text in texts]
    columns = ("", *(str(i) for i in range(len(texts))), "text")
    print_table(columns, [(i, *(f"{c:.4f}" for c in row), names[i]) for i, row in enumerate(cosines)])
