"""Log-probabilities of generated tokens: of the model's own distribution, before any sampler changes it, or of what a
token was drawn from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from graphrt.errors import SessionError
from graphrt.models.sampling_steps import Candidates
from graphrt.printing import brief

#: The most tokens that are named beside each generated one.
MAX_BEST = 1024


class Logprobs(NamedTuple):
    """Natural logarithms of softmax(logits). token: of the token that was chosen; best: (id, logarithm) of the
    likeliest, highest first, equals by id."""

    token: float
    best: tuple[tuple[int, float], ...]


def check_best(best: object) -> int | None:
    """How many tokens are named beside each, None for no log-probabilities at all. Raises SessionError."""
    if best is None:
        return None
    if isinstance(best, bool) or not isinstance(best, int) or not 0 <= best <= MAX_BEST:
        raise SessionError(
            f"logprobs must be how many of the likeliest tokens are named, 0 to {MAX_BEST}, or None, got {brief(best)}"
        )
    return best


def logprobs_of(logits: npt.NDArray[np.float32], token: int, best: int) -> Logprobs:
    """Those of a token and of so many likeliest ones, in float64. logits: [n_vocab], not NaN, not all -inf."""
    top = float(logits.max())
    # logits of +inf share everything
    wide = np.where(logits == top, 0.0, -np.inf) if np.isinf(top) else logits.astype(np.float64) - top
    found = wide - np.log(np.exp(wide).sum())
    n = min(best, len(found))
    if not n:
        return Logprobs(float(found[token]), ())
    # By logits: those that differ by less than float64 keeps of their sum have equal log-probabilities.
    near = np.flatnonzero(logits >= np.partition(logits, len(found) - n)[len(found) - n])
    order = near[np.argsort(-logits[near], kind="stable")][:n]
    return Logprobs(float(found[token]), tuple((int(i), float(found[i])) for i in order))


def logprobs_of_named(logits: npt.NDArray[np.float32], token: int, named: Iterable[int]) -> Logprobs:
    """The same, with the tokens of these ids and the chosen one in place of the likeliest."""
    ids = np.array(sorted({token, *named}))
    own = logprobs_of(logits, token, 0).token
    values = own + (logits[ids].astype(np.float64) - float(logits[token]))
    order = np.argsort(-values, kind="stable")
    return Logprobs(own, tuple((int(ids[i]), float(values[i])) for i in order))


def logprobs_of_drawn(drawn: Candidates | None, token: int, best: int) -> Logprobs:
    """The same of the tokens that one was drawn from, of which the likeliest come first; None: it was the only one."""
    if drawn is None:
        return Logprobs(0.0, ((token, 0.0),)[:best])
    with np.errstate(divide="ignore"):
        found = np.log(drawn.probabilities())
    likely = [(int(i), float(value)) for i, value in zip(drawn.ids[:best], found) if value > -np.inf]
    return Logprobs(float(found[drawn.ids == token][0]), tuple(likely))
