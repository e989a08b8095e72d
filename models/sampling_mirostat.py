"""Mirostat: keeps the surprise of what is drawn near a target, in place of the other truncating samplers.

Basu et al., "Mirostat: A neural text decoding algorithm that directly controls perplexity", 2021 (arXiv 2007.14966);
version 2 from its authors' repository (basusourya/mirostat); details as in llama.cpp's src/llama-sampler.cpp.
"""

from __future__ import annotations

import math

import numpy as np

from graphrt.models.sampling_steps import Candidates, draw

#: How many of the likeliest tokens Zipf's exponent is estimated from.
_ESTIMATED_FROM = 100


class Mirostat:
    """version: 1 or 2; tau: the surprise that it aims at, in bits; eta: how fast it learns; mu: the largest surprise
    that it lets through now."""

    def __init__(self, version: int, tau: float, eta: float) -> None:
        self.version, self.tau, self.eta = version, tau, eta
        self.mu = 2.0 * tau

    def choose(self, candidates: Candidates, n_vocab: int, uniform: float) -> int:
        """Draws a token by `uniform` and learns from its surprise. n_vocab: tokens of the vocabulary."""
        kept = candidates.keep(slice(0, self._first(candidates, n_vocab)))
        token = draw(kept, uniform)
        probability = float(kept.probabilities()[np.flatnonzero(kept.ids == token)[0]])
        self.mu -= self.eta * (-math.log2(probability) - self.tau)
        return token

    def _first(self, candidates: Candidates, n_vocab: int) -> int:
        """How many of the likeliest tokens stay, at least one."""
        probabilities = candidates.probabilities()
        if self.version == 2:
            with np.errstate(divide="ignore"):
                return max(1, int(np.count_nonzero(-np.log2(probabilities) <= self.mu)))
        return max(1, min(len(probabilities), _likeliest(zipf_exponent(probabilities), self.mu, n_vocab)))


def zipf_exponent(probabilities: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    """The paper's estimate of s in p(rank) ~ rank ** -s, from the likeliest tokens: the sum of t * b over that of
    t * t, with t = log((i + 2) / (i + 1)) and b = log(p[i] / p[i + 1]). NaN for one token. probabilities: falling."""
    top = probabilities[:_ESTIMATED_FROM]
    top = top[top > 0]
    ranks = np.arange(1, len(top))
    t = np.log((ranks + 1) / ranks)
    b = np.log(top[:-1] / top[1:])
    return float((t * b).sum() / (t * t).sum()) if len(ranks) else math.nan


def _likeliest(s: float, mu: float, n_vocab: int) -> int:
    """The paper's k: (epsilon * 2 ** mu / (1 - n_vocab ** -epsilon)) ** (1 / s), with epsilon = s - 1."""
    if math.isnan(s):
        return 1
    epsilon = s - 1.0
    with np.errstate(all="ignore"):
        share = 1.0 - np.float64(n_vocab) ** -epsilon
        # the limit of epsilon / share where epsilon goes to 0
        ratio = epsilon / share if share else 1.0 / math.log(max(n_vocab, 2))
        k = (ratio * np.exp2(np.float64(mu))) ** (1.0 / np.float64(s))
    return n_vocab if not k < n_vocab else int(k)
