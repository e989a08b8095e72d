"""Several texts of one prompt (-np): shown one after another, each whole, or as JSON."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphrt.printing import count_text
from graphrt.tools.common import print_json, print_text
from graphrt.tools.sampling import logprobs

if TYPE_CHECKING:
    from graphrt.models.engine import SessionOptions
    from graphrt.models.generation import Piece
    from graphrt.models.model import Model
    from graphrt.models.sampling_params import SamplerParams


def run(
    model: Model,
    tokens: Sequence[int],
    count: int,
    n: int,
    *,
    sampling: SamplerParams,
    options: SessionOptions,
    cache: Path | None,
    text: dict[str, Any],
    quiet: bool,
) -> int:
    """Makes and shows `count` texts of at most n tokens after a prompt's tokens; cache: a file that keeps these; quiet:
    as JSON. The exit code."""
    start = time.perf_counter()
    found: list[list[Piece]] = [[] for _ in range(count)]
    shown, interrupted, first = 0, False, 0.0
    try:
        with closing(
            model.samples(tokens, count, n, sampling=sampling, options=options, cache=cache, **text)
        ) as pieces:  # type: ignore[type-var]
            for i, piece in pieces:
                first = first or time.perf_counter() - start
                found[i].append(piece)
                if count == 1 and not quiet:
                    print_text(piece.text)
                while not quiet and shown < count and found[shown] and found[shown][-1].finish:
                    _show(shown, found)
                    shown += 1
    except KeyboardInterrupt:
        interrupted = True
    seconds = time.perf_counter() - start - first
    made = sum(map(len, found))
    if quiet:
        timings = {"first_token_s": first, "tokens_per_s": max(0, made - count) / seconds if seconds > 0 else 0.0}
        print_json(
            {"prompt_tokens": list(tokens), "samples": [_as_json(model, one) for one in found], "timings": timings}
        )
    else:
        for i in range(shown, count):
            _show(i, found)
        _report(tokens, made, count, first, seconds, interrupted)
    return 130 if interrupted else 0


def _show(i: int, found: Sequence[Sequence[Piece]]) -> None:
    if len(found) == 1:  # it has been shown as it came
        print_text("\n")
        return
    text = "".join(piece.text for piece in found[i])
    print_text(f"--- text {i} of {len(found)}\n{text}\n")


def _as_json(model: Model, pieces: Sequence[Piece]) -> dict[str, Any]:
    text = "".join(piece.text for piece in pieces)
    finish = pieces[-1].finish if pieces else ""
    made = {"tokens": [piece.token for piece in pieces], "text": text, "finish": finish}
    return made | logprobs.as_json(pieces, model.tokenizer)


def _report(tokens: Sequence[int], made: int, count: int, first: float, seconds: float, interrupted: bool) -> None:
    parts = [
        f"prompt {len(tokens)} tokens",
        f"first tokens after {first:.2f} s",
        f"generated {made} tokens in {count_text(count, 'text')}",
    ]
    if made > count and seconds > 0:
        parts[-1] += f", {(made - count) / seconds:.1f} tokens/s together"
    print("\n" + " | ".join(parts + ["interrupted"] * interrupted), file=sys.stderr)
