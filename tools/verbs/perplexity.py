"""Perplexity of a text by llama-perplexity's method: chunks of the context's size, the second half of each scored.

Where the model's tokenizer adds a BOS, each chunk's first token is replaced by it before the chunk is read. --needle
looks for a sentence in a context of -c tokens instead (tools/needle.py): what a cache's type costs over long contexts.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from graphrt.errors import SessionError
from graphrt.tools.common import (
    MODEL_HELP,
    add_session_arguments,
    add_tp_argument,
    load_model,
    over_ranks,
    print_json,
    progress,
    read_text,
    whole,
    without_last_newline,
)

if TYPE_CHECKING:
    from graphrt.models.session import Session
    from graphrt.models.tokenizer import Tokenizer

MIN_CTX = 4  # the second half of a chunk must hold a token and the next one


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("-f", "--file", metavar="FILE", help="the text, - for standard input")
    what.add_argument(
        "--needle", type=whole(1), metavar="N", help="no text: find a sentence at N depths of a context of -c tokens"
    )
    parser.add_argument(
        "--chunks", type=whole(-1), default=-1, metavar="N", help="at most N chunks, -1: all (the default)"
    )
    parser.add_argument("--fast", action="store_true", help="the forms that `run` uses, not the reference")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    add_tp_argument(parser)
    add_session_arguments(parser, ctx_size=512)


def main(args: argparse.Namespace) -> int:
    from graphrt.models.engine import OWN_CTX

    n_ctx = args.ctx_size
    if (n_ctx < MIN_CTX and n_ctx != OWN_CTX) or args.chunks == 0:
        raise SessionError(
            f"perplexity needs at least one chunk (--chunks) of at least {MIN_CTX} tokens (-c), got --chunks "
            f"{args.chunks} and -c {n_ctx}"
        )
    if over_ranks(args):
        from graphrt.tools.ranks.launch import run_on_ranks

        return run_on_ranks("perplexity", args, measure, partial(_text, args), lambda: None)
    return measure(args, _text(args))


def _text(args: argparse.Namespace) -> str:
    return without_last_newline(read_text(args.file)) if args.file is not None else ""


def measure(args: argparse.Namespace, text: str) -> int:
    """The perplexity of a text, or needles. Several ranks do it together; what the first one says is printed."""
    from graphrt.models.engine import OWN_CTX, SessionOptions
    from graphrt.models.model import nll

    n_ctx = args.ctx_size
    model = load_model(args, exact=not args.fast)
    n_ctx = model.network.hp.n_ctx_train if n_ctx == OWN_CTX else n_ctx
    if args.needle is not None:
        session = model.session(SessionOptions(n_ctx, args.batch_size, args.cache_type_k, args.cache_type_v))
        return _needles(session, model.tokenizer, args.needle, args.json)
    ids = model.tokenizer.encode(text)
    if len(ids) < 2 * n_ctx:
        raise SessionError(
            f"perplexity needs a text of at least two chunks, {2 * n_ctx} tokens, got {len(ids)}; use a longer text or "
            f"a smaller -c"
        )
    n_chunks = len(ids) // n_ctx if args.chunks < 0 else min(args.chunks, len(ids) // n_ctx)
    session = model.session(
        SessionOptions(n_ctx, args.batch_size, args.cache_type_k, args.cache_type_v, flash_attn=args.flash_attn)
    )
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


def _needles(session: Session, tokenizer: Tokenizer, n_trials: int, as_json: bool) -> int:
    from graphrt.tools import needle

    found = []
    with progress("needles", n_trials) as advance:
        for outcome in needle.search(session, tokenizer, n_trials):
            found.append(outcome)
            advance()
    n_found, loss = needle.summary(found)
    if as_json:
        depths = [asdict(outcome) for outcome in found]
        print_json({"found": n_found, "needles": n_trials, "loss": loss, "tokens": session.n_ctx, "depths": depths})
    else:
        print(f"{n_found} of {n_trials} needles found in {session.n_ctx} tokens, loss {loss:.4f} a token of the answer")
        missed = ", ".join(f"{outcome.depth:.0%}" for outcome in found if not outcome.found)
        if missed:
            print(f"not found at the depths {missed}")
    return 0


def _print(losses: np.ndarray, chunk_means: list[float], as_json: bool) -> None:
    ppl = _exp(float(losses.mean()))
    error = ppl * float(losses.std(ddof=1)) / math.sqrt(len(losses)) if len(losses) > 1 else 0.0
    if as_json:
        print_json({"ppl": ppl, "error": error, "tokens": len(losses), "chunks": [_exp(m) for m in chunk_means]})
    else:
        print(f"perplexity {ppl:.4f} +- {error:.4f} ({len(losses)} tokens)")


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf
