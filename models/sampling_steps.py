"""The steps of sampling, each a pure function.

Probabilities are computed in float64 from float32 logits. Equal logits are ordered by id, so that a seed gives the
same tokens on every machine. Facts of each sampler: llama.cpp src/llama-sampler.cpp, ggml 0.25.3.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

#: The highest temperature that a changing one may reach: logits of -inf over it stay what they are.
MAX_TEMP = 1e38
_BLOCK = 64


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


def top_n_sigma(logits: npt.NDArray[np.float32], n: float) -> npt.NDArray[np.float32]:
    """Tokens within n standard deviations of the highest logit; the others become -inf. logits: [n_vocab].

    Tang et al., "Top-n sigma: Not all logits are you need", 2024 (arXiv 2411.07641). Logits of -inf don't count.
    """
    if n <= 0.0 or len(logits) < 2 or math.isinf(logits.max()):
        return logits
    finite = logits[logits > -np.inf].astype(np.float64)
    return np.where(logits >= finite.max() - n * finite.std(), logits, np.float32(-np.inf))


def add_biases(logits: npt.NDArray[np.float32], biases: Mapping[int, float]) -> npt.NDArray[np.float32]:
    """Adds to tokens' logits, by id; returns a copy where anything changes. Ids beyond [n_vocab] have no effect."""
    known = [(token, bias) for token, bias in biases.items() if token < len(logits)]
    if not known:
        return logits
    out = logits.copy()
    ids, values = (np.array(column) for column in zip(*known))
    with np.errstate(over="ignore", invalid="ignore"):
        out[ids] = out[ids] + values  # in float64
    out[ids[values == -np.inf]] = -np.inf  # of +inf too
    return out


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


def dynamic_temperature(candidates: Candidates, temp: float, range_: float, exponent: float) -> float:
    """The temperature between temp - range and temp + range, 0 at least, at the place that the distribution's entropy
    has between 0 and the largest one of as many tokens, to a power.

    Zhang et al., "EDT: Improving large language models' generation by entropy-based dynamic temperature sampling", 2024
    (arXiv 2403.14541), in llama.cpp's form.
    """
    low, high = max(0.0, temp - range_), max(0.0, temp + range_)
    if range_ <= 0.0 or len(candidates.ids) < 2:
        return temp
    probabilities = candidates.probabilities()
    positive = probabilities[probabilities > 0]
    share = max(0.0, float(-(positive * np.log(positive)).sum())) / math.log(len(probabilities))
    with np.errstate(divide="ignore", over="ignore"):  # a negative exponent of little entropy
        return float(min(low + (high - low) * np.float64(min(share, 1.0)) ** exponent, MAX_TEMP))


def draw(candidates: Candidates, uniform: float) -> int:
    """The token at which the running sum of probabilities passes `uniform`, which is in [0, 1)."""
    total = np.cumsum(candidates.probabilities())
    place = int(np.searchsorted(total, uniform * total[-1], side="right"))
    return int(candidates.ids[min(place, len(candidates.ids) - 1)])


def _bound_below_top(logits: npt.NDArray[np.float32], k: int) -> np.float32:
    """A number with at least k logits not below it, and few more: the k-th highest of the maxima of sets of _BLOCK. A
    set's logits lie n_sets apart, so that numpy compares whole rows: 18 us of 49152 logits, 125 where they lie side by
    side."""
    n_sets = len(logits) // _BLOCK
    if n_sets < 2 * k:
        return np.float32(np.partition(logits, len(logits) - k)[len(logits) - k])
    maxima = logits[: n_sets * _BLOCK].reshape(_BLOCK, n_sets).max(axis=0)
    return np.float32(np.partition(maxima, n_sets - k)[n_sets - k])


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
