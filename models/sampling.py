"""Sampling: from logits to the next token, with llama.cpp's samplers, names, defaults and order.

    bias, grammar -> penalties -> dry -> top_n_sigma -> top_k -> typical_p -> top_p -> min_p -> xtc -> temperature

and a draw, or, where mirostat is on, bias, grammar -> temperature -> mirostat. sampling_params has the parameters,
sampling_steps, sampling_dry and sampling_mirostat have the steps.
"""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from graphrt.errors import SessionError
from graphrt.models.sampling_dry import Breakers, dry, dry_costs
from graphrt.models.sampling_logprobs import (
    Logprobs,
    check_best,
    logprobs_of,
    logprobs_of_drawn,
    logprobs_of_named,
)
from graphrt.models.sampling_mirostat import Mirostat
from graphrt.models.sampling_params import SamplerParams as SamplerParams
from graphrt.models.sampling_steps import (
    Candidates,
    add_biases,
    draw,
    dynamic_temperature,
    min_p,
    penalties,
    temperature,
    top_k,
    top_n_sigma,
    top_p,
    typical,
    xtc,
)
from graphrt.ops.sample import MAX_TOP_K, SampleParams

if TYPE_CHECKING:
    import torch  # the command line asks for defaults alone, which must not take a second

    Logits = torch.Tensor | npt.NDArray[np.float32]


#: Numbers that are made at a time: one by one each costs three times as much.
_BLOCK = 32
LEFT_NONE = "allowed ids, bad words, the grammar and logit biases leave none"


class Uniforms:
    """Numbers in [0, 1) with 53 random bits that follow from the seed alone."""

    def __init__(self, seed: int) -> None:
        # the stream of a numpy bit generator is fixed for ever, that of numpy.random.Generator is not
        self._bits = np.random.Philox(key=seed)
        self._seen: deque[float] = deque()

    def peek(self, ahead: int) -> float:
        """What take() will give after `ahead` more."""
        self._make(ahead + 1)
        return self._seen[ahead]

    def _make(self, n: int) -> None:
        while len(self._seen) < n:
            self._seen.extend(((self._bits.random_raw(_BLOCK) >> np.uint64(11)) * 2.0**-53).tolist())

    def take(self) -> float:
        """The next number."""
        self._make(1)
        return self._seen.popleft()

    def skip(self, n: int) -> None:
        """Takes n numbers."""
        self._make(n)
        for _ in range(n):
            self._seen.popleft()


class Matcher(Protocol):
    """What of the vocabulary may come next, as a grammar has it, or a list of tokens."""

    def mask(self) -> npt.NDArray[np.bool_]:
        """The tokens that may come: [tokens of the vocabulary]."""

    def bits(self) -> npt.NDArray[np.uint32]:
        """The same, a bit a token: bit b of word w is that of token 32 w + b."""

    def accept(self, token: int) -> None:
        """Goes on behind a token, which may come."""


class Sampler:
    """Draws tokens by the given parameters; its random numbers follow from the seed alone.

    never: ids of tokens that are never drawn, to which come those with a bias of -inf; matcher: what a grammar lets
    through; breakers: what DRY's sequence breakers are in this vocabulary; biases: what is added to logits by id; best:
    how many likeliest tokens `logprobs` names beside the chosen one, None for no log-probabilities; late: tokens that
    are not drawn before `least` others, for which the host has to choose all of a text's; after: `logprobs` are those
    of what a token is drawn from, once all samplers have changed it, not the model's own; named: the tokens that
    `logprobs` names in place of the likeliest, none for these. seed: the seed in
    use, also when the parameters ask for a random one. uniforms: its random numbers; one a token, and one more before
    it where XTC is on. logprobs: of the latest choice, if asked for.
    """

    def __init__(
        self,
        params: SamplerParams | None = None,
        *,
        never: Iterable[int] = (),
        matcher: Matcher | None = None,
        breakers: Breakers = Breakers({}),
        best: int | None = None,
        late: Iterable[int] = (),
        least: int = 0,
        after: bool = False,
        named: Iterable[int] = (),
    ) -> None:
        self.params = params or SamplerParams()
        self.seed = secrets.randbits(32) if self.params.seed == -1 else self.params.seed
        self.matcher, self.breakers = matcher, breakers
        self.best, self.after, self._named = check_best(best), after, tuple(named)
        if after and self.params.mirostat:
            raise SessionError("what mirostat draws from is not told; leave out the log-probabilities after sampling")
        self.logprobs: Logprobs | None = None
        self.biases = self.params.biases | dict.fromkeys(never, -math.inf)
        self.never = frozenset(token for token, bias in self.biases.items() if bias == -math.inf)
        self._late, self.least = dict.fromkeys(late, -math.inf), least
        self.reset()

    @property
    def is_greedy(self) -> bool:
        """Every choice is the likeliest token of the model's own but for those of `never`, whatever came before, and
        nobody asks how likely."""
        moved = len(self.biases) > len(self.never)
        return self.takes_the_first and not moved and not self._looks_back

    @property
    def takes_the_first(self) -> bool:
        """The highest of the changed logits is chosen, never drawn."""
        p = self.params
        return p.temp <= 0 and (p.mirostat > 0 or p.temp + p.dynatemp_range <= 0)

    @property
    def _looks_back(self) -> bool:
        """What came before changes the choice, or its log-probability is wanted: the host needs the logits."""
        return self.matcher is not None or self.best is not None or self._penalizes or self.least > 0

    @property
    def _penalizes(self) -> bool:
        return self.has_penalties or self.has_dry

    @property
    def has_penalties(self) -> bool:
        """Tokens that were there before are less likely, or more."""
        p = self.params
        same = p.repeat_penalty == 1.0 and p.frequency_penalty == 0.0 and p.presence_penalty == 0.0
        return not p.mirostat and not same and p.repeat_last_n != 0

    @property
    def has_dry(self) -> bool:
        """Repetitions cost."""
        p = self.params
        return not p.mirostat and p.dry_multiplier != 0.0 and p.dry_penalty_last_n != 0

    @property
    def _dry(self) -> tuple[float, float, int, Breakers]:
        p = self.params
        return p.dry_multiplier, p.dry_base, p.dry_allowed_length, self.breakers

    def dry_costs(self, history: Sequence[int]) -> dict[int, np.float32]:
        """What DRY takes off which tokens after this history, oldest first."""
        return dry_costs(_last(history, self.params.dry_penalty_last_n), *self._dry) if self.has_dry else {}

    def device_params(self) -> SampleParams | None:
        """Parameters of the op SAMPLE that make it choose as this sampler does, given its uniforms; None where nothing
        does: greedy, biases, penalties, a grammar, log-probabilities, and samplers that the op lacks: top_n_sigma,
        typical_p, XTC, a temperature that changes, mirostat, and a top_k that is off or over what it takes."""
        p = self.params
        if self.biases or self._looks_back or p.temp <= 0 or p.typical_p < 1 or p.xtc_probability > 0:
            return None
        if p.top_n_sigma > 0 or p.dynatemp_range > 0 or p.mirostat or not 1 <= p.top_k <= MAX_TOP_K:
            return None
        return SampleParams(p.temp, p.top_k, p.top_p, p.min_p, min(p.min_keep, MAX_TOP_K))

    def reset(self) -> None:
        """Starts the random numbers over, and what mirostat has learned."""
        self.uniforms, self._made = Uniforms(self.seed), 0
        self._drawn: Candidates | None = None  # what the latest token was drawn from, None where it was not drawn
        p = self.params
        self._mirostat = Mirostat(p.mirostat, p.mirostat_ent, p.mirostat_lr) if p.mirostat else None

    def sample(self, logits: Logits, history: Sequence[int] = ()) -> int:
        """The next token.

        logits: float [n_vocab], a tensor or an array; history: prompt and generated tokens, oldest first. Raises
        SessionError for NaN logits, or if no token is left (all logits are -inf, or biases and grammar leave none).
        """
        given = check_logits(logits)
        if self.is_greedy and (likeliest := int(given.argmax())) not in self.never:
            return likeliest
        token = self._choose(self._allowed(given), history)
        self._made += 1
        if self.best is not None:
            self.logprobs = self._logprobs(given, token, self.best)
        if self.matcher is not None:
            self.matcher.accept(token)
        return token

    def _logprobs(self, logits: npt.NDArray[np.float32], token: int, best: int) -> Logprobs:
        if self.after:
            return logprobs_of_drawn(self._drawn, token, best)
        return logprobs_of_named(logits, token, self._named) if self._named else logprobs_of(logits, token, best)

    def _allowed(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """The logits with biases, and -inf for what a grammar forbids."""
        values = add_biases(logits, self.biases if self._made >= self.least else self.biases | self._late)
        if self.matcher is not None:
            mask = self.matcher.mask()[: len(values)]
            values = np.where(mask, values[: len(mask)], np.float32(-np.inf))
        if values is not logits and values.max() == -math.inf:
            why = "logit biases leave none" if self.matcher is None else LEFT_NONE
            raise SessionError(f"at least one token must be allowed, {why}; allow more")
        return values

    def _choose(self, values: npt.NDArray[np.float32], history: Sequence[int]) -> int:
        p = self.params
        if self._penalizes:
            recent = _last(history, p.repeat_last_n)
            values = penalties(values, recent, p.repeat_penalty, p.frequency_penalty, p.presence_penalty)
            values = dry(values, _last(history, p.dry_penalty_last_n), *self._dry)
        self._drawn = None
        if self.takes_the_first:
            return int(values.argmax())
        if self._mirostat is not None:
            return self._mirostat.choose(temperature(top_k(values, 0), p.temp), len(values), self.uniforms.take())
        candidates = self._truncated(top_k(top_n_sigma(values, p.top_n_sigma), p.top_k))
        temp = dynamic_temperature(candidates, p.temp, p.dynatemp_range, p.dynatemp_exp)
        uniform = self.uniforms.take()
        if temp <= 0:
            return int(candidates.ids[0])
        self._drawn = temperature(candidates, temp)
        return draw(self._drawn, uniform)

    def _truncated(self, candidates: Candidates) -> Candidates:
        p = self.params
        candidates = typical(candidates, p.typical_p, p.min_keep)
        candidates = top_p(candidates, p.top_p, p.min_keep)
        candidates = min_p(candidates, p.min_p, p.min_keep)
        if p.xtc_probability > 0 and self.uniforms.take() <= p.xtc_probability:
            candidates = xtc(candidates, p.xtc_threshold, p.min_keep)
        return candidates


def _last(history: Sequence[int], n: int) -> Sequence[int]:
    """The last n tokens, all of them if n is negative."""
    n_recent = len(history) if n < 0 else min(n, len(history))
    return history[len(history) - n_recent :]


def check_logits(logits: Logits) -> npt.NDArray[np.float32]:
    """One token's, as they are chosen by: f32 [n_vocab]. Raises SessionError as Sampler.sample() does."""
    if logits.ndim != 1 or not len(logits):
        raise SessionError(f"logits must have shape [n_vocab], got {list(logits.shape)}.")
    array = logits if isinstance(logits, np.ndarray) else logits.detach().cpu().float().numpy()
    values = np.ascontiguousarray(array, dtype=np.float32)
    top = values.max()
    if math.isnan(top):
        n_nan = int(np.isnan(values).sum())
        raise SessionError(
            f"logits must be numbers, got {n_nan} NaN of {len(values)}.\n"
            "A weight or an activation overflowed; find the first bad node with graphrt dump."
        )
    if top == -math.inf:
        raise SessionError(f"at least one logit must be above -inf, got {len(values)} of -inf.")
    return values
