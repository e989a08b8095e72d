"""Load for `graphrt bench serve`: so many users who each ask again when they are answered, or requests at a rate."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from graphrt.progress import Advance
from graphrt.tools.bench.load_client import Answer, Server
from graphrt.tools.bench.load_lengths import Lengths

#: The shares of requests that are under the figures told.
PERCENTILES = (50, 95, 99)


@dataclass(frozen=True)
class Ask:
    """What requests have in common. model: its name; n_vocab: random prompts have ids below; shared: tokens that all
    prompts begin with; temperature, seed: of sampling; more: other fields."""

    model: str
    n_vocab: int
    shared: int = 0
    temperature: float = 0.0
    seed: int = 0
    more: dict[str, Any] | None = None

    def body(self, i: int, lengths: Lengths) -> dict[str, Any]:
        """Request number i."""
        first = np.random.default_rng([self.seed, 0]).integers(0, self.n_vocab, min(self.shared, lengths.prompt))
        own = np.random.default_rng([self.seed, 1, i]).integers(0, self.n_vocab, lengths.prompt - len(first))
        return {
            "model": self.model, "prompt": [*first.tolist(), *own.tolist()], "max_tokens": lengths.made,
            "temperature": self.temperature, "seed": self.seed + i, "ignore_eos": True, **(self.more or {}),
        }  # fmt: skip


async def closed(server: Server, bodies: Sequence[dict[str, Any]], users: int, advance: Advance) -> list[Answer]:
    """So many users share the requests; each sends its next one when it has been answered."""
    answers, left = list[Answer](), iter(bodies)

    async def user() -> None:
        for body in left:
            answers.append(await server.complete(body))
            advance()

    await asyncio.gather(*(user() for _ in range(users)))
    return answers


async def opened(
    server: Server, bodies: Sequence[dict[str, Any]], rate: float, seed: int, advance: Advance
) -> list[Answer]:
    """Requests come at random moments, so many a second in the mean, whether others are answered or not."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, len(bodies))
    start = time.perf_counter()

    async def one(body: dict[str, Any], at: float) -> Answer:
        await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
        answer = await server.complete(body)
        advance()
        return answer

    return list(await asyncio.gather(*(one(body, at) for body, at in zip(bodies, np.cumsum(gaps)))))


def summary(answers: Sequence[Answer]) -> dict[str, Any]:
    """Figures of a load: tokens a second over all of it, and percentiles, in milliseconds, of the time to the first
    token, between two pieces of a text, and for a token of a text after its first one."""
    good = [answer for answer in answers if not answer.error]
    errors = [answer.error for answer in answers if answer.error]
    found: dict[str, Any] = {"requests": len(good), "errors": len(errors)}
    if errors:
        found["first_error"] = errors[0]
    if not good:
        return found
    seconds = max(a.ended for a in good) - min(a.began for a in good)
    made, read = sum(a.n_made for a in good), sum(a.n_prompt for a in good)
    found |= {"seconds": seconds, "output_tokens": made, "prompt_tokens": read}
    found |= {"output_tokens_per_s": made / seconds, "total_tokens_per_s": (made + read) / seconds}
    found["requests_per_s"] = len(good) / seconds
    series: dict[str, list[float]] = {
        "time_to_first_token_ms": [a.came[0] - a.began for a in good if a.came],
        "between_pieces_ms": [late - soon for a in good for soon, late in pairwise(a.came)],
        "per_token_ms": [(a.came[-1] - a.came[0]) / (a.n_made - 1) for a in good if a.came and a.n_made > 1],
        "request_ms": [a.ended - a.began for a in good],
    }
    for name, values in series.items():
        if values:
            cuts = np.percentile(values, PERCENTILES)
            found[name] = {f"p{p}": 1e3 * float(v) for p, v in zip(PERCENTILES, cuts)}
            found[name]["mean"] = 1e3 * float(np.mean(values))
    return found
