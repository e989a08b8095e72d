"""Samplers against plain readings of their definitions, properties, reproducibility, and the distribution drawn."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from support.effort import instructions

from graphrt.errors import SessionError
from graphrt.models import sampling_steps as sampling
from graphrt.models.sampling import Sampler
from graphrt.models.sampling_params import SamplerParams
from graphrt.models.sampling_steps import Candidates

Pairs = list[tuple[int, float]]  # (id, logit), highest first
LOGITS = st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=30)
KEEP = st.integers(0, 4)


def candidates(logits: list[float]) -> Candidates:
    return sampling.top_k(np.array(logits, dtype=np.float32), 0)


def pairs(c: Candidates) -> Pairs:
    return list(zip(c.ids.tolist(), c.logits.tolist()))


def shares(entries: Pairs) -> list[float]:
    weights = [math.exp(logit - entries[0][1]) for _, logit in entries]
    return [weight / sum(weights) for weight in weights]


def ordered(logits: list[float]) -> Pairs:
    return sorted(enumerate(np.array(logits, dtype=np.float32).tolist()), key=lambda e: (-e[1], e[0]))


def far_from(values: list[float], bound: float) -> bool:
    """Whether rounding can't move any of `values` across `bound`."""
    return all(abs(value - bound) > 1e-9 for value in values)


# --- each sampler against its definition


@given(LOGITS, st.integers(-1, 40))
def test_top_k(logits: list[float], k: int) -> None:
    assert pairs(sampling.top_k(np.array(logits, dtype=np.float32), k)) == ordered(logits)[: k if k > 0 else None]


@pytest.mark.parametrize("n", [64 * 80, 64 * 80 + 17, 100_003])
@pytest.mark.parametrize("k", [1, 40, 79])
def test_top_k_of_a_large_vocabulary_with_ties(n: int, k: int) -> None:
    logits = np.random.default_rng(n + k).integers(-50, 50, n).astype(np.float32)
    logits[-1] = 60
    assert pairs(sampling.top_k(logits, k)) == ordered(logits.tolist())[:k]


@given(LOGITS, st.floats(0, 1), KEEP)
def test_top_p(logits: list[float], p: float, min_keep: int) -> None:
    entries = ordered(logits)
    sums = np.cumsum(shares(entries)).tolist()
    assume(far_from(sums, p) and p < 1)
    wanted = next((i + 1 for i, total in enumerate(sums) if total >= p and i + 1 >= min_keep), len(entries))
    assert pairs(sampling.top_p(candidates(logits), p, min_keep)) == entries[:wanted]


@given(LOGITS, st.floats(0, 1), KEEP)
def test_min_p(logits: list[float], p: float, min_keep: int) -> None:
    entries = ordered(logits)
    probabilities = shares(entries)
    assume(far_from([q / probabilities[0] for q in probabilities[1:]], p))
    kept = [e for i, e in enumerate(entries) if i == 0 or i < min_keep or probabilities[i] >= p * probabilities[0]]
    assert pairs(sampling.min_p(candidates(logits), p, min_keep)) == kept


@given(LOGITS, st.floats(0, 1), KEEP)
def test_typical(logits: list[float], p: float, min_keep: int) -> None:
    entries = ordered(logits)
    probabilities = shares(entries)
    entropy = -sum(q * math.log(q) for q in probabilities)
    distance = [abs(-math.log(q) - entropy) for q in probabilities]
    order = sorted(range(len(entries)), key=lambda i: distance[i])
    assume(all(distance[b] - distance[a] > 1e-9 for a, b in zip(order, order[1:])))
    sums = np.cumsum([probabilities[i] for i in order]).tolist()
    assume(far_from(sums, p) and p < 1)
    n = next((i + 1 for i, total in enumerate(sums) if total > p and i + 1 >= min_keep), len(entries))
    assert pairs(sampling.typical(candidates(logits), p, min_keep)) == [entries[i] for i in sorted(order[:n])]


@given(LOGITS, st.floats(0, 1), KEEP)
def test_xtc(logits: list[float], threshold: float, min_keep: int) -> None:
    entries = ordered(logits)
    probabilities = shares(entries)
    assume(far_from(probabilities, threshold))
    above = [i for i, q in enumerate(probabilities) if q >= threshold]
    first = above[-1] if threshold <= 0.5 and len(above) > 1 else 0
    wanted = entries[first:] if len(entries) - first >= min_keep else entries
    assert pairs(sampling.xtc(candidates(logits), threshold, min_keep)) == wanted


@given(LOGITS, st.lists(st.integers(0, 35), max_size=20), st.floats(0.5, 2), st.floats(-1, 1), st.floats(-1, 1))
def test_penalties(logits: list[float], history: list[int], repeat: float, frequency: float, presence: float) -> None:
    values = np.array(logits, dtype=np.float32)
    before = values.copy()
    wanted = values.astype(float).tolist()
    for token, count in Counter(history).items():
        if token < len(wanted):
            logit = wanted[token]
            wanted[token] = (logit * repeat if logit <= 0 else logit / repeat) - count * frequency - presence
    got = sampling.penalties(values, history, repeat, frequency, presence)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-4)
    assert (values == before).all()


def test_penalties_by_hand() -> None:
    got = sampling.penalties(np.array([2.0, -2.0, 1.0], dtype=np.float32), [0, 0, 1], 2.0, 0.5, 0.25)
    assert got.tolist() == [2 / 2 - 2 * 0.5 - 0.25, -2 * 2 - 0.5 - 0.25, 1.0]


def test_draw_takes_the_token_under_the_number() -> None:
    c = candidates([math.log(0.5), math.log(0.3), math.log(0.2)])
    assert [sampling.draw(c, u) for u in (0.0, 0.49, 0.51, 0.79, 0.81, 0.999999)] == [0, 0, 1, 1, 2, 2]


def alike(n: int) -> Candidates:
    """n equally likely tokens: for a power of two all sums of probabilities are exact."""
    return candidates([1.0] * n)


def test_what_meets_a_bound_exactly() -> None:
    """As llama.cpp has it: typical_p is passed, top_p reached; min_p and XTC's threshold are met."""
    assert sampling.typical(alike(4), 0.5).ids.tolist() == [0, 1, 2]
    assert sampling.top_p(alike(4), 0.5).ids.tolist() == [0, 1]
    assert sampling.min_p(candidates([2.0, 2.0, 1.0]), 1.0).ids.tolist() == [0, 1]
    assert sampling.xtc(alike(4), 0.25).ids.tolist() == [3]
    assert sampling.xtc(alike(2), 0.5).ids.tolist() == [1], "0.5 is the largest threshold that does anything"
    assert sampling.xtc(alike(4), 0.25, 1).ids.tolist() == [3] and len(sampling.xtc(alike(4), 0.25, 2).ids) == 4


def test_a_number_that_meets_a_sum_draws_the_next_token() -> None:
    assert [sampling.draw(alike(4), u) for u in (0.0, 0.25, 0.5, 0.75)] == [0, 1, 2, 3]
    assert [sampling.draw(alike(4), np.nextafter(u, 0.0)) for u in (0.25, 0.5, 0.75, 1.0)] == [0, 1, 2, 3]
    never = candidates([0.0, -math.inf, -math.inf])
    assert sampling.draw(never, np.nextafter(1.0, 0.0)) == 0, "what has no share is never drawn"


@given(LOGITS, st.floats(1e-40, 100))
def test_temperature_keeps_the_highest_finite(logits: list[float], temp: float) -> None:
    c = sampling.temperature(candidates(logits), temp)
    assert c.logits[0] == 0 and not np.isnan(c.logits).any()
    assert math.isclose(c.probabilities().sum(), 1)


# --- the chain


def test_defaults_are_llama_cpps() -> None:
    p = SamplerParams()
    assert (p.temp, p.top_k, p.top_p, p.min_p, p.typical_p) == (0.8, 40, 0.95, 0.05, 1.0)
    assert (p.repeat_penalty, p.repeat_last_n, p.presence_penalty, p.frequency_penalty) == (1.0, 64, 0.0, 0.0)
    assert (p.xtc_probability, p.xtc_threshold, p.seed) == (0.0, 0.1, -1)


def test_greedy_is_the_first_highest_after_penalties() -> None:
    logits = torch.tensor([1.0, 3.0, 3.0, 2.0])
    for temp in (0.0, -1.0):
        assert Sampler(SamplerParams(temp=temp)).sample(logits) == 1
    assert Sampler(SamplerParams(temp=0, repeat_penalty=2.0)).sample(logits, [1, 2]) == 3
    assert logits.tolist() == [1.0, 3.0, 3.0, 2.0]


def test_repeat_last_n() -> None:
    logits = torch.tensor([2.0, 1.9])

    def first(n: int) -> int:
        return Sampler(SamplerParams(temp=0, repeat_penalty=2.0, repeat_last_n=n)).sample(logits, [0, 5, 5])

    assert [first(n) for n in (0, 2, 3, -1)] == [0, 0, 1, 1]


def test_temperature_comes_last() -> None:
    # at temp 100 all four are equally likely, but min_p has already dropped the last two
    sampler = Sampler(SamplerParams(temp=100, top_k=0, top_p=1.0, min_p=0.5, seed=1))
    drawn = {sampler.sample(torch.tensor([0.0, -0.1, -5.0, -6.0])) for _ in range(200)}
    assert drawn == {0, 1}


def test_xtc_takes_the_top_away() -> None:
    sampler = Sampler(SamplerParams(xtc_probability=1.0, xtc_threshold=0.1, seed=1))
    assert {sampler.sample(torch.log(torch.tensor([0.6, 0.3, 0.1 - 1e-3, 1e-3]))) for _ in range(100)} <= {1, 2}


def test_a_seed_gives_the_same_tokens_everywhere() -> None:
    # worked out once; Philox and IEEE arithmetic give the same on every machine
    sampler = Sampler(SamplerParams(seed=42, top_k=0, top_p=1.0, min_p=0.0, temp=1.0))
    logits = torch.linspace(-1, 1, 50)
    first = [sampler.sample(logits) for _ in range(8)]
    assert first == [19, 45, 15, 39, 40, 38, 45, 48]
    sampler.reset()
    assert [sampler.sample(logits) for _ in range(8)] == first


def test_a_random_seed_can_be_read_and_used_again() -> None:
    logits = torch.zeros(1000)
    one = Sampler()
    two = Sampler(SamplerParams(seed=one.seed))
    assert [one.sample(logits) for _ in range(20)] == [two.sample(logits) for _ in range(20)]
    assert Sampler().seed != Sampler().seed


def test_distribution_is_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5, -0.5, 2.0])
    n = 20_000
    sampler = Sampler(SamplerParams(temp=0.7, top_k=0, top_p=1.0, min_p=0.0, seed=7))
    counts = Counter(sampler.sample(logits) for _ in range(n))
    expected = torch.softmax(logits.double() / 0.7, 0) * n
    chi2 = sum((counts[i] - e) ** 2 / e for i, e in enumerate(expected.tolist()))
    assert chi2 < 20.5  # 5 degrees of freedom, p = 0.001


@given(LOGITS, st.integers(0, 2**63), st.integers(0, 5), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), KEEP)
def test_any_parameters_give_a_token(
    logits: list[float], seed: int, top_k: int, top_p: float, min_p: float, typical_p: float, min_keep: int
) -> None:
    params = SamplerParams(
        seed=seed, top_k=top_k, top_p=top_p, min_p=min_p, typical_p=typical_p, min_keep=min_keep, xtc_probability=0.5
    )
    assert 0 <= Sampler(params).sample(torch.tensor(logits)) < len(logits)


def test_infinite_logits() -> None:
    inf = math.inf
    sampler = Sampler(SamplerParams(seed=1))
    assert sampler.sample(torch.tensor([1.0, inf, 2.0])) == 1
    assert sampler.sample(torch.tensor([-inf, -inf, -3.0])) == 2
    assert sampler.sample(torch.tensor([-inf, -inf, -3.0], dtype=torch.bfloat16)) == 2
    assert sampler.sample(np.array([-inf, 5.0], dtype=np.float32)) == 1


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (torch.tensor([1.0, math.nan, math.nan]), "2 NaN of 3"),
        (torch.full((4,), -math.inf), "4 of -inf"),
        (torch.zeros(2, 2), r"shape \[n_vocab\], got \[2, 2\]"),
        (torch.zeros(0), r"got \[0\]"),
    ],
)
def test_bad_logits(logits: torch.Tensor, message: str) -> None:
    for temp in (0.0, 0.8):
        with pytest.raises(SessionError, match=message):
            Sampler(SamplerParams(temp=temp)).sample(logits)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"temp": math.nan}, "temp must be a finite number, got nan"),
        ({"temp": "hot"}, "temp must be a finite number, got 'hot'"),
        ({"top_k": 1.5}, "top_k must be an integer, got 1.5"),
        ({"top_p": 1.1}, "top_p must be from 0 to 1, got 1.1; the default is 0.95"),
        ({"min_p": -0.1}, "min_p must be from 0 to 1"),
        ({"typical_p": 2}, "typical_p must be"),
        ({"repeat_penalty": 0}, "repeat_penalty must be above 0"),
        ({"repeat_last_n": -2}, "repeat_last_n must be at least -1"),
        ({"xtc_probability": 2}, "xtc_probability must be"),
        ({"seed": -2}, "seed must be"),
        ({"min_keep": -1}, "min_keep must be at least 0"),
    ],
)
def test_bad_parameters(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(SessionError, match=message):
        SamplerParams(**setting)


def test_a_large_vocabulary_takes_no_more_python() -> None:
    logits = torch.randn(262_144, generator=torch.Generator().manual_seed(0)) * 3
    sampler = Sampler(SamplerParams(seed=1, repeat_penalty=1.1))
    of_all, of_some = (
        instructions(lambda part=part: sampler.sample(part, range(100))) for part in (logits, logits[:4096])
    )
    assert of_all < 1.5 * of_some < 20_000, "something is done entry by entry in Python"
