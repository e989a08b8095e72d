"""Measure on a text how large the inputs of a model's weights are: an importance matrix, for `quantize --imatrix`.

The text is read in chunks of the context's size, as llama-imatrix reads it, and the file is of its GGUF format.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from graphrt.errors import SessionError
from graphrt.tools.common import (
    MODEL_HELP,
    add_session_arguments,
    load_model,
    print_json,
    progress,
    read_text,
    session_options,
    whole,
    without_last_newline,
)
from graphrt.tools.outputs import OutputFile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("-f", "--file", required=True, metavar="FILE", help="the text, - for standard input")
    parser.add_argument(
        "-o",
        "--output",
        type=OutputFile,
        default="imatrix.gguf",
        metavar="FILE",
        help="the file to write (default: imatrix.gguf)",
    )
    parser.add_argument(
        "--chunks", type=whole(-1), default=-1, metavar="N", help="at most N chunks, -1: all (the default)"
    )
    parser.add_argument("--process-output", action="store_true", help="the inputs of the output's weights too")
    parser.add_argument("--parse-special", action="store_true", help="text like <|im_start|> is a special token")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    add_session_arguments(parser, ctx_size=512)


def main(args: argparse.Namespace) -> int:
    from graphrt.models.quantize.imatrix import save
    from graphrt.models.quantize.tap import Tap

    if args.chunks == 0:
        raise SessionError("an importance matrix needs at least one chunk, got --chunks 0")
    text = without_last_newline(read_text(args.file))
    model = load_model(args, exact=False)
    options = session_options(args)
    tap = Tap(model.decoder, model.backends, options, with_output=args.process_output)
    ids = model.tokenizer.encode(text, parse_special=args.parse_special)
    n_chunks = len(ids) // tap.n_ctx
    if n_chunks == 0:
        raise SessionError(
            f"an importance matrix needs a text of at least one chunk, {tap.n_ctx} tokens, got {len(ids)}; use a "
            f"longer text or a smaller -c"
        )
    n_chunks = n_chunks if args.chunks < 0 else min(args.chunks, n_chunks)
    with progress("importances", n_chunks) as advance:
        for i in range(n_chunks):
            chunk = ids[i * tap.n_ctx : (i + 1) * tap.n_ctx]
            if model.tokenizer.add_bos and model.tokenizer.bos_id is not None:
                chunk[0] = model.tokenizer.bos_id
            tap.collect(chunk)
            advance()
    save(Path(args.output), tap.entries, n_chunks=n_chunks, chunk_size=tap.n_ctx, datasets=[args.file])
    unseen = [name for name, entry in tap.entries.items() if not entry.counts.all()]
    if args.json:
        facts = {"output": args.output, "chunks": n_chunks, "chunk_size": tap.n_ctx, "weights": len(tap.entries)}
        print_json(facts | {"with_unseen_experts": unseen})
    else:
        print(f"{args.output}: {len(tap.entries)} weights, {n_chunks} chunks of {tap.n_ctx} tokens")
        if unseen:
            print(f"{len(unseen)} of them have experts that no token was given; more text may reach these")
    return 0
