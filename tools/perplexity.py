"""Perplexity of a text by llama-perplexity's method: chunks of the context's size, the second half of each scored.

Where the model's tokenizer adds a BOS, each chunk's first token is replaced by it before the chunk is read.
"""

from __future__ import annotations

import argparse
import math
import sys

import numpy as np

from graphrt.errors import SessionError
from graphrt.tools.common import add_session_arguments, load_model, print_json, progress, read_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a .gguf file, a known name or hf:REPO/FILE")
    parser.add_argument("-f", "--file", required=True, metavar="FILE", help="the text")
    parser.add_argument("--chunks", type=int, default=-1, metavar="N", help="at most N chunks (default: all)")
    parser.add_argument("--fast", action="store_true", help="the forms that `run` uses, not the reference")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    add_session_arguments(parser)
    parser.set_defaults(ctx_size=512)


def main(args: argparse.Namespace) -> int:
    from graphrt.models.model import nll
    from graphrt.models.session import SessionOptions

    text = read_text(args.file)
    model = load_model(args, exact=not args.fast)
    n_ctx = args.ctx_size
    ids = model.tokenizer.encode(text)
    n_chunks = len(ids) // n_ctx if args.chunks < 0 else min(args.chunks, len(ids) // n_ctx)
    if n_ctx < 2 or len(ids) < 2 * n_ctx or n_chunks < 1:
        raise SessionError(
            f"perplexity needs a context of at least 2 tokens and a text of twice that, got -c {n_ctx}, --chunks "
            f"{args.chunks} and {len(ids)} tokens; use a smaller -c or a longer text"
        )
    session = model.session(SessionOptions(n_ctx, args.batch_size, args.cache_type_k, args.cache_type_v))
    first = n_ctx // 2  # the first position whose prediction counts
    losses: list[np.ndarray] = []
    with progress("perplexity", n_chunks) as advance:
        for i in range(n_chunks):
            chunk = ids[i * n_ctx : (i + 1) * n_ctx]
            if model.tokenizer.add_bos and model.tokenizer.bos_id is not None:
                chunk[0] = model.tokenizer.bos_id
            session.reset()
            rows = session.eval_rows(chunk, first)[:-1]
            losses.append(nll(rows, ids[i * n_ctx + first + 1 : (i + 1) * n_ctx]))
            advance()
    _print(np.concatenate(losses), [float(np.mean(chunk)) for chunk in losses], args.json)
    return 0


def _print(losses: np.ndarray, chunk_means: list[float], as_json: bool) -> None:
    mean = float(losses.mean())
    error = math.exp(mean) * float(losses.std(ddof=1)) / math.sqrt(len(losses)) if len(losses) > 1 else 0.0
    if as_json:
        chunks = [math.exp(m) for m in chunk_means]
        print_json({"ppl": math.exp(mean), "error": error, "tokens": len(losses), "chunks": chunks})
    else:
        print(f"perplexity {math.exp(mean):.4f} +- {error:.4f} ({len(losses)} tokens)", file=sys.stdout)
