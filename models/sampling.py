"""Sampling: from logits to the next token, with llama.cpp's samplers, names, defaults and order.

    penalties -> top_k -> typical_p -> top_p -> min_p -> xtc -> temperature -> draw

Each sampler is a pure function on Candidates (token ids with their logits, highest first) that keeps some of them.
Probabilities are computed in float64 from float32 logits. Equal logits are ordered by id, so that a seed gives the
same tokens on every machine. Facts of each sampler: llama.cpp src/llama-sampler.cpp, ggml 0.25.3.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from graphrt.errors import SessionError
from graphrt.ops.sample import MAX_TOP_K, SampleParams

_MAX_SEED = (1 << 64) - 1
_BLOCK = 64

if TYPE_CHECKING:
    import torch  # the command line asks for defaults alone, which must not take a second

    Logits = torch.Tensor | npt.NDArray[np.float32]


@dataclass(frozen=True)
class SamplerParams:
    """llama.cpp's sampling parameters and defaults.

    temp: 0 or less is greedy. top_k: 0 or less is off. top_p, typical_p: 1 is off. min_p, xtc_probability: 0 is off.
    repeat_last_n: how many of the last tokens are penalized, -1 all, 0 none. min_keep: truncating samplers keep at
    least so many (0 and 1 mean the same). seed: -1 takes a new one from the operating system.
    Raises SessionError when a value is out of range.
    """

    temp: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    seed: int = -1
    min_keep: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise SessionError(f"{field.name} must be a finite number, got {value!r}.")
            if field.type == "int" and value != int(value):
                raise SessionError(f"{field.name} must be an integer, got {value!r}.")
        for name in ("top_p", "min_p", "typical_p", "xtc_probability", "xtc_threshold"):
            self._in_range(name, 0, 1)
        self._in_range("repeat_last_n", -1, math.inf)
        self._in_range("min_keep", 0, math.inf)
        self._in_range("seed", -1, _MAX_SEED)
        if self.repeat_penalty <= 0:
            raise SessionError(f"repeat_penalty must be above 0, got {self.repeat_penalty}; 1.0 is no penalty.")

    def _in_range(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if not low <= value <= high:
            default = type(self).__dataclass_fields__[name].default
            bounds = f"from {low} to {high}" if high < math.inf else f"at least {low}"
            raise SessionError(f"{name} must be {bounds}, got {value}; the default is {default}.")


@dataclass(frozen=True)
class Candidates:
    """Tokens that can still be drawn. ids: int64 [n]; logits: float32 [n], highest first, equals by id. n >= 1."""

    ids: npt.NDArray[np.int64]
    logits: npt.NDArray[np.float32]

    def probabilities(self) -> npt.NDArray[np.float64]:
        """softmax of the logits: float64 [n]."""
        return softmax(self.logits)

    def keep(self, selected: slice | npt.NDArray[np.intp]) -> Candidates:
        """The candidates at these places, which must be in rising order."""
        return Candidates(self.ids[selected], self.logits[selected])


def softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """exp(logits) / sum, in float64; +inf logits share everything. logits: [n], not all -inf."""
    top = logits.max()
    weights = (logits == top).astype(np.float64) if math.isinf(top) else np.exp(logits.astype(np.float64) - float(top))
    probabilities: npt.NDArray[np.float64] = weights / weights.sum()
    return probabilities


def penalties(
    logits: npt.NDArray[np.float32], history: Sequence[int], repeat: float, frequency: float, presence: float
) -> npt.NDArray[np.float32]:
    """Makes the tokens of `history` less likely; returns a copy where anything changes.

    logit <= 0: times `repeat`, else divided by it; then minus count * frequency + presence. logits: [n_vocab].
    """
    if not len(history) or (repeat == 1.0 and frequency == 0.0 and presence == 0.0):
        return logits
    counts = Counter(int(token) for token in history)
    ids = np.fromiter((i for i in counts if 0 <= i < len(logits)), dtype=np.intp)
    times = np.array([counts[i] for i in ids.tolist()], dtype=np.float32)
    old = logits[ids]
    new = np.where(old <= 0, old * np.float32(repeat), old / np.float32(repeat))
    penalized = logits.copy()
    penalized[ids] = new - (times * np.float32(frequency) + np.float32(presence))
    return penalized


def top_k(logits: npt.NDArray[np.float32], k: int) -> Candidates:
    """The k highest logits; all of them if k <= 0. logits: [n_vocab]."""
    n = len(logits)
    if k <= 0 or k >= n:
        return _sorted(np.arange(n, dtype=np.int64), logits)
    ids = np.flatnonzero(logits >= _bound_below_top(logits, k)).astype(np.int64)
    return _sorted(ids, logits[ids]).keep(slice(0, k))


def typical(candidates: Candidates, p: float, min_keep: int = 1) -> Candidates:
    """Locally typical sampling: tokens whose surprise is nearest the entropy, until more than p is covered."""
    if p >= 1.0:
        return candidates
    probabilities = candidates.probabilities()
    with np.errstate(divide="ignore"):
        surprise = -np.log(probabilities)
    entropy = float(np.sum(probabilities * np.where(probabilities > 0, surprise, 0.0)))
    order = np.argsort(np.abs(surprise - entropy), kind="stable")
    enough = np.flatnonzero(np.cumsum(probabilities[order]) > p)
    n = _at_least(int(enough[0]) + 1 if len(enough) else len(order), min_keep, len(order))
    return candidates.keep(np.sort(order[:n]))


def top_p(candidates: Candidates, p: float, min_keep: int = 1) -> Candidates:
    """Nucleus sampling: the most likely tokens that together reach p."""
    if p >= 1.0:
        return candidates
    enough = np.flatnonzero(np.cumsum(candidates.probabilities()) >= p)
    n = int(enough[0]) + 1 if len(enough) else len(candidates.ids)
    return candidates.keep(slice(0, _at_least(n, min_keep, len(candidates.ids))))


def min_p(candidates: Candidates, p: float, min_keep: int = 1) -> Candidates:
    """Tokens at least p times as likely as the most likely one."""
    if p <= 0.0:
        return candidates
    n = int(np.count_nonzero(candidates.logits >= candidates.logits[0] + np.float32(math.log(p))))
    return candidates.keep(slice(0, _at_least(n, min_keep, len(candidates.ids))))


def xtc(candidates: Candidates, threshold: float, min_keep: int = 1) -> Candidates:
    """Exclude top choices: of the tokens with probability >= threshold only the least likely stays."""
    if threshold > 0.5 or len(candidates.ids) < 2:
        return candidates
    last = int(np.count_nonzero(candidates.probabilities() >= threshold)) - 1
    if last <= 0 or len(candidates.ids) - last < min_keep:
        return candidates
    return candidates.keep(slice(last, None))


def temperature(candidates: Candidates, temp: float) -> Candidates:
    """Divides the logits by temp > 0. The highest is moved to 0 first, so that a tiny temp leaves it finite."""
    top = candidates.logits[0]
    with np.errstate(over="ignore"):
        logits = (candidates.logits if math.isinf(top) else candidates.logits - top).astype(np.float64) / temp
        return Candidates(candidates.ids, logits.astype(np.float32))


def draw(candidates: Candidates, uniform: float) -> int:
    """The token at which the running sum of probabilities passes `uniform`, which is in [0, 1)."""
    total = np.cumsum(candidates.probabilities())
    place = int(np.searchsorted(total, uniform * total[-1], side="right"))
    return int(candidates.ids[min(place, len(candidates.ids) - 1)])


class Uniforms:
    """Numbers in [0, 1) with 53 random bits that follow from the seed alone."""

    def __init__(self, seed: int) -> None:
        # the stream of a numpy bit generator is fixed for ever, that of numpy.random.Generator is not
        self._bits = np.random.Philox(key=seed)
        self._seen: deque[float] = deque()

    def peek(self, ahead: int) -> float:
        """What take() will give after `ahead` more."""
        while len(self._seen) <= ahead:
            self._seen.append((int(self._bits.random_raw()) >> 11) * 2.0**-53)
        return self._seen[ahead]

    def take(self) -> float:
        """The next number."""
        self.peek(0)
        return self._seen.popleft()


class Sampler:
    """Draws tokens by the given parameters; its random numbers follow from the seed alone.

    seed: the seed in use, also when the parameters ask for a random one. uniforms: its random numbers; one a token,
    and one more before it where XTC is on.
    """

    def __init__(self, params: SamplerParams | None = None) -> None:
        self.params = params or SamplerParams()
        self.seed = secrets.randbits(32) if self.params.seed == -1 else int(self.params.seed)
        self.reset()

    @property
    def is_greedy(self) -> bool:
        """Every choice is the likeliest token, whatever came before."""
        return self.params.temp <= 0 and not self._penalizes

    @property
    def _penalizes(self) -> bool:
        p = self.params
        same = p.repeat_penalty == 1.0 and p.frequency_penalty == 0.0 and p.presence_penalty == 0.0
        return not same and p.repeat_last_n != 0

    def device_params(self) -> SampleParams | None:
        """Parameters of the op SAMPLE that make it choose as this sampler does, given its uniforms; None where nothing
        does: greedy, penalties, typical_p, XTC, and a top_k that is off or over what the op takes."""
        p = self.params
        if self._penalizes or p.temp <= 0 or p.typical_p < 1 or p.xtc_probability > 0:
            return None
        if not 1 <= p.top_k <= MAX_TOP_K:
            return None
        min_keep = min(int(p.min_keep), MAX_TOP_K)
        return SampleParams(float(p.temp), int(p.top_k), float(p.top_p), float(p.min_p), min_keep)

    def reset(self) -> None:
        """Starts the random numbers over."""
        self.uniforms = Uniforms(self.seed)

    def sample(self, logits: Logits, history: Sequence[int] = ()) -> int:
        """The next token.

        logits: float [n_vocab], a tensor or an array; history: prompt and generated tokens, oldest first. Raises
        SessionError for NaN logits, or if no token is left (all logits are -inf).
        """
        p = self.params
        values = _checked(logits)
        n_recent = len(history) if p.repeat_last_n < 0 else min(p.repeat_last_n, len(history))
        recent = history[len(history) - n_recent :]
        values = penalties(values, recent, p.repeat_penalty, p.frequency_penalty, p.presence_penalty)
        if p.temp <= 0:
            return int(values.argmax())
        candidates = top_k(values, p.top_k)
        candidates = typical(candidates, p.typical_p, p.min_keep)
        candidates = top_p(candidates, p.top_p, p.min_keep)
        candidates = min_p(candidates, p.min_p, p.min_keep)
        if p.xtc_probability > 0 and self.uniforms.take() <= p.xtc_probability:
            candidates = xtc(candidates, p.xtc_threshold, p.min_keep)
        return draw(temperature(candidates, p.temp), self.uniforms.take())


def _checked(logits: Logits) -> npt.NDArray[np.float32]:
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


def _bound_below_top(logits: npt.NDArray[np.float32], k: int) -> np.float32:
    """A number with at least k logits not below it, and few more: the k-th highest of the maxima of blocks."""
    n_blocks = len(logits) // _BLOCK
    if n_blocks < 2 * k:
        return np.float32(np.partition(logits, len(logits) - k)[len(logits) - k])
    maxima = logits[: n_blocks * _BLOCK].reshape(n_blocks, _BLOCK).max(axis=1)
    return np.float32(np.partition(maxima, n_blocks - k)[n_blocks - k])


def _sorted(ids: npt.NDArray[np.int64], logits: npt.NDArray[np.float32]) -> Candidates:
    """Highest first, equals by id; ids must be rising.

    One sort of 64-bit keys: the logit's bits, mapped so that falling logits are rising numbers, above its place. Plain
    sort is vectorized in numpy, stable argsort is not: 6 ms against 40 for 262144 logits.
    """
    bits = (logits + np.float32(0.0)).view(np.uint32)  # + 0 makes -0 and 0 equal
    falling = np.where(bits >> 31, bits, np.uint32(0x7FFFFFFF) - bits).astype(np.uint64)
    keys = np.sort((falling << np.uint64(32)) | np.arange(len(bits), dtype=np.uint64))
    order = (keys & np.uint64(0xFFFFFFFF)).astype(np.intp)
    return Candidates(ids[order], logits[order])


def _at_least(n: int, min_keep: int, available: int) -> int:
    return min(max(n, min_keep, 1), available)
