"""DRY, mirostat, dynamic temperature, top-n-sigma, biases and log-probabilities, each against its published formula in
plain float64; and what parameters are refused."""

from __future__ import annotations

import gc
import math
import weakref
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.tiny import bpe

from graphrt.errors import SessionError
from graphrt.models import sampling_steps as steps
from graphrt.models.sampling import Sampler
from graphrt.models.sampling_dry import Breakers, breakers_of, dry
from graphrt.models.sampling_logprobs import logprobs_of
from graphrt.models.sampling_mirostat import Mirostat, zipf_exponent
from graphrt.models.sampling_params import SamplerOptions, SamplerParams
from graphrt.models.tokenizer import Tokenizer

INF = math.inf
LOGITS = st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=30)
NONE = Breakers({})


def f32(values: list[float]) -> np.ndarray:
    return np.array(values, np.float32)


def shares(logits: list[float]) -> list[float]:
    weights = [math.exp(x - max(logits)) for x in logits]
    return [w / sum(weights) for w in weights]


# ---- DRY ----


def repetition(history: list[int], token: int, breakers: set[int]) -> int:
    """The longest n for which the last n tokens, none of them a breaker, have stood before `token` before."""
    best = 0
    for n in range(1, len(history)):
        tail = history[-n:]
        if any(t in breakers for t in tail):
            break
        if any(history[i : i + n] == tail and history[i + n] == token for i in range(len(history) - n)):
            best = n
    return best


@given(
    st.lists(st.integers(0, 4), max_size=40), st.sampled_from([0.0, 0.8, 3.0]), st.sampled_from([1.0, 1.75]),
    st.integers(0, 4), st.sets(st.integers(0, 4), max_size=2),
)  # fmt: skip
def test_dry(history: list[int], multiplier: float, base: float, allowed: int, breakers: set[int]) -> None:
    logits = f32([0.5, -1.0, 2.0, 0.0, 1.0, 4.0])
    found = dry(logits, history, multiplier, base, allowed, Breakers(dict.fromkeys(breakers, ((),))))
    for token, logit in enumerate(logits.tolist()):
        n = repetition(history, token, breakers)
        repeats = n >= max(allowed, 1) and token not in breakers
        penalty = multiplier * base ** (n - allowed) if repeats else 0.0
        if allowed == 0 and n == 0:
            continue  # llama.cpp penalizes each token that has come; how many that is tells the next test
        assert found[token] == pytest.approx(logit - penalty, rel=1e-5, abs=1e-5)


def test_dry_by_hand() -> None:
    """The example of llama.cpp's comments: behind a b c c b c y a b c, c goes on with three tokens, y with two."""
    a, b, c, y = range(4)
    history = [a, b, c, c, b, c, y, a, b, c]
    found = dry(np.zeros(4, np.float32), history, 1.0, 2.0, 2, NONE)
    assert found.tolist() == [0.0, 0.0, -2.0, -1.0]
    assert dry(np.zeros(4, np.float32), history, 1.0, 2.0, 1, NONE).tolist() == [0.0, -1.0, -4.0, -2.0]
    assert dry(np.zeros(4, np.float32), [a] * 5, 1.0, 2.0, 2, NONE).tolist() == [-4.0, 0.0, 0.0, 0.0]


def test_dry_stays_finite() -> None:
    for base in (1.75, 1e300, 1.0000001):
        found = dry(np.zeros(3, np.float32), [0] * 3000, 1e308, base, 2, NONE)
        assert np.isfinite(found).all() and found[0] < -1e30


def test_dry_looks_back_as_far_as_it_is_told() -> None:
    history = [0, 1, 2, 0, 1]

    def first(n: int) -> int:
        params = SamplerParams(temp=0, dry_multiplier=5.0, dry_penalty_last_n=n)
        return Sampler(params).sample(torch.tensor([0.0, 0.0, 1.0, 0.5]), history)

    assert [first(n) for n in (0, 4, 5, -1)] == [2, 2, 3, 3]


def test_breakers_of_several_tokens() -> None:
    """The last place where one begins counts; behind it nothing has been repeated yet."""
    breakers = Breakers({7: ((8, 9), (8,))})
    assert breakers.length_since([1, 2, 7, 8, 9, 3, 4]) == 2
    assert breakers.length_since([1, 2, 7, 8, 3]) == 1
    assert breakers.length_since([1, 7]) == 2
    assert breakers.length_since([7, 8, 9]) == 0
    history = [1, 2, 3, 4, 1, 2, 3]
    assert dry(np.zeros(9, np.float32), history, 1.0, 2.0, 2, NONE)[4] == -2.0
    assert dry(np.zeros(9, np.float32), history, 1.0, 2.0, 2, Breakers({1: ((2,),)}))[4] == 0.0


def test_breakers_in_a_vocabulary() -> None:
    """Tokens that hold the text, and those that end in its beginning, with the rest of it behind."""
    texts = ["<s>", "a", "b:", ":", "xb", "ab:c", "\n"]
    vocabulary = _Words(texts)
    found = Breakers.of(vocabulary, [":"])  # type: ignore[arg-type]
    assert found.tails == {2: ((),), 3: ((),), 5: ((),)}
    found = Breakers.of(vocabulary, ["b:"])  # type: ignore[arg-type]
    assert found.tails == {2: ((),), 5: ((),), 4: ((3,),)}
    assert found.is_one(2) and not found.is_one(4) and not found.is_one(1)


def test_a_vocabulary_is_searched_once() -> None:
    """For the same texts, whatever was asked of other vocabularies; it is not kept for that."""
    words, others = _Words(["a", ":"]), _Words([":", "a"])
    found = breakers_of(words, [":"])  # type: ignore[arg-type]
    assert breakers_of(others, (":",)).tails == {0: ((),)}  # type: ignore[arg-type]
    assert breakers_of(words, (":",)) is found and found.tails == {1: ((),)}  # type: ignore[arg-type]
    assert breakers_of(words, ["a"]).tails == {0: ((),)}  # type: ignore[arg-type]
    kept = weakref.ref(words)
    del words
    gc.collect()
    assert kept() is None


class _Words:
    """What Breakers asks of a tokenizer, with whole texts for tokens."""

    def __init__(self, texts: list[str]) -> None:
        self.texts, self.n_vocab = texts, len(texts)

    def piece(self, token: int) -> bytes:
        return self.texts[token].encode()

    def encode(self, text: str, add_bos: bool, goes_on: bool) -> list[int]:
        return [self.texts.index(text)]


# ---- mirostat ----


def candidates(logits: list[float]) -> steps.Candidates:
    return steps.top_k(f32(logits), 0)


@given(st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=150), st.floats(0.5, 8), st.floats(0, 0.9))
def test_mirostat_1(logits: list[float], tau: float, uniform: float) -> None:
    """Algorithm 1 of the paper, with llama.cpp's k of at least 1."""
    given_ = candidates(logits)
    p = shares(given_.logits.astype(float).tolist())
    top = p[:100]
    t = [math.log((i + 2) / (i + 1)) for i in range(len(top) - 1)]
    b = [math.log(top[i] / top[i + 1]) for i in range(len(top) - 1)]
    s = sum(x * y for x, y in zip(t, b)) / sum(x * x for x in t)
    assert zipf_exponent(given_.probabilities()) == pytest.approx(s, rel=1e-9, abs=1e-12)
    if not 0.05 < s < 20 or abs(s - 1) < 1e-3:
        return
    k = (((s - 1) * 2 ** (2 * tau)) / (1 - len(p) ** (1 - s))) ** (1 / s)
    if abs(k - round(k)) < 1e-6 * k:
        return  # rounding decides
    kept = max(1, min(int(min(k, 1e9)), len(p)))
    q = [x / sum(p[:kept]) for x in p[:kept]]
    sums = np.cumsum(q)
    if np.abs(sums - uniform).min() < 1e-9:
        return
    place = next(i for i, total in enumerate(sums) if total > uniform)
    sampler = Mirostat(1, tau, 0.1)
    assert sampler.choose(given_, len(p), uniform) == given_.ids[place]
    assert sampler.mu == pytest.approx(2 * tau - 0.1 * (-math.log2(q[place]) - tau), rel=1e-9)


@given(LOGITS, st.floats(0.5, 8), st.floats(0, 0.9))
def test_mirostat_2(logits: list[float], tau: float, uniform: float) -> None:
    """Tokens of a surprise up to mu, at least one; then mu moves by the error of the drawn one's."""
    given_ = candidates(logits)
    p = shares(given_.logits.astype(float).tolist())
    surprise = [-math.log2(x) for x in p]
    if min(abs(x - 2 * tau) for x in surprise) < 1e-9:
        return
    kept = max(1, sum(x <= 2 * tau for x in surprise))
    q = [x / sum(p[:kept]) for x in p[:kept]]
    sums = np.cumsum(q)
    if np.abs(sums - uniform).min() < 1e-9:
        return
    place = next(i for i, total in enumerate(sums) if total > uniform)
    sampler = Mirostat(2, tau, 0.3)
    assert sampler.choose(given_, len(p), uniform) == given_.ids[place]
    assert sampler.mu == pytest.approx(2 * tau - 0.3 * (-math.log2(q[place]) - tau), rel=1e-9)


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_reaches_its_target(version: int) -> None:
    """On a Zipf distribution, which the paper assumes, the mean surprise comes near tau; a larger tau, a larger one."""
    logits = torch.tensor(-1.1 * np.log(np.arange(1, 5001)), dtype=torch.float32)
    model = steps.softmax(logits.numpy())
    means = []
    for tau in (2.0, 5.0):
        sampler = Sampler(SamplerParams(temp=1.0, mirostat=version, mirostat_ent=tau, seed=1))
        drawn = [sampler.sample(logits) for _ in range(400)]
        kept = [-math.log2(model[t]) for t in drawn[100:]]
        means.append(float(np.mean(kept)))
    assert 1.0 < means[0] < means[1] - 1.5


def test_mirostat_ignores_other_samplers_but_not_the_temperature() -> None:
    logits = torch.tensor([0.0, -0.1, -0.2, -0.3])
    wide = SamplerParams(mirostat=2, mirostat_ent=20.0, top_k=1, min_p=1.0, temp=5.0, repeat_penalty=100.0, seed=3)
    sampler = Sampler(wide)
    assert len({sampler.sample(logits, [0, 1, 2, 3]) for _ in range(60)}) == 4
    assert {Sampler(SamplerParams(mirostat=1, temp=0)).sample(logits) for _ in range(5)} == {0}
    assert Sampler(wide).device_params() is None and not Sampler(wide).is_greedy


def test_mirostat_starts_over() -> None:
    sampler = Sampler(SamplerParams(mirostat=2, seed=4, temp=2.0))
    logits = torch.linspace(0, 3, 50)
    first = [sampler.sample(logits) for _ in range(20)]
    sampler.reset()
    assert [sampler.sample(logits) for _ in range(20)] == first


# ---- dynamic temperature, top-n-sigma ----


@given(LOGITS, st.floats(0, 3), st.floats(0.01, 3), st.floats(0.1, 3))
def test_dynamic_temperature(logits: list[float], temp: float, range_: float, exponent: float) -> None:
    p = shares(f32(logits).tolist())
    entropy = -sum(x * math.log(x) for x in p if x > 0)
    low, high = max(0.0, temp - range_), temp + range_
    expected = low + (high - low) * (entropy / math.log(len(p))) ** exponent
    # of entropies near 0 the root of an exponent of 0.1 makes rounding of 1e-16 one of 1e-2
    assert steps.dynamic_temperature(candidates(logits), temp, range_, exponent) == pytest.approx(
        expected, rel=1e-9, abs=3 * (high - low) * 1e-13**exponent
    )


def test_dynamic_temperature_off_or_with_one_choice() -> None:
    assert steps.dynamic_temperature(candidates([1.0, 2.0]), 0.7, 0.0, 1.0) == 0.7
    assert steps.dynamic_temperature(candidates([1.0]), 0.7, 0.5, 1.0) == 0.7
    assert math.isfinite(steps.dynamic_temperature(candidates([80.0, -80.0]), 0.7, 0.5, -3.0))


def test_a_dynamic_temperature_of_zero_takes_the_first() -> None:
    """One token has all probability: the temperature is temp - range."""
    sampler = Sampler(SamplerParams(temp=0.5, dynatemp_range=0.5, top_k=0, top_p=1.0, min_p=0.0, seed=1))
    assert {sampler.sample(torch.tensor([500.0, 0.0, 0.0])) for _ in range(20)} == {0}
    flat = Sampler(SamplerParams(temp=0, dynatemp_range=5.0, top_k=0, top_p=1.0, min_p=0.0, seed=1))
    assert not flat.is_greedy and len({flat.sample(torch.zeros(4)) for _ in range(60)}) == 4


@given(LOGITS, st.floats(0.01, 3))
def test_top_n_sigma(logits: list[float], n: float) -> None:
    values = [float(x) for x in f32(logits)]
    mean = sum(map(Fraction, values)) / len(values)
    deviation = math.sqrt(sum((Fraction(x) - mean) ** 2 for x in values) / len(values))
    bound = max(values) - n * deviation
    if any(0 < abs(x - bound) < 1e-4 for x in values):
        return  # rounding decides
    found = steps.top_n_sigma(f32(logits), n)
    assert [x > -INF for x in found.tolist()] == [x >= bound for x in values]


def test_top_n_sigma_leaves_out_what_is_forbidden() -> None:
    """Logits of -inf, as biases leave them, count neither for the mean nor for the deviation."""
    found = steps.top_n_sigma(f32([2.0, -INF, 0.0, 1.0, -INF]), 1.0)
    assert found.tolist() == [2.0, -INF, -INF, -INF, -INF]
    assert steps.top_n_sigma(f32([2.0, -INF, 0.0, 1.0]), 1.3).tolist() == [2.0, -INF, -INF, 1.0]
    assert steps.top_n_sigma(f32([2.0, 0.0]), -1.0).tolist() == [2.0, 0.0]


def test_top_n_sigma_comes_before_top_k() -> None:
    """Among the two likeliest nothing would be far off, among all five the second is."""
    sampler = Sampler(SamplerParams(top_n_sigma=1.0, top_k=2, temp=100.0, seed=1))
    assert {sampler.sample(torch.tensor([3.0, 1.0, 0.0, 0.0, 0.0])) for _ in range(50)} == {0}


# ---- biases ----


def test_biases() -> None:
    logits = f32([1.0, 2.0, INF, -INF])
    assert steps.add_biases(logits, {}) is logits
    assert steps.add_biases(logits, {0: 1.5, 1: -INF, 2: -INF, 3: 5.0, 99: 1.0}).tolist() == [2.5, -INF, -INF, -INF]
    assert logits.tolist() == [1.0, 2.0, INF, -INF]


def test_biases_come_first() -> None:
    biased = SamplerParams(temp=0, logit_bias={2: 10.0, 1: -INF})
    assert Sampler(biased).sample(torch.tensor([1.0, 9.0, 0.0])) == 2
    assert Sampler(biased).device_params() is None and not Sampler(biased).is_greedy
    assert Sampler(SamplerParams(temp=0, logit_bias={1: -INF})).is_greedy, "the host is asked where the device errs"
    with pytest.raises(SessionError, match="logit biases leave none; allow more"):
        Sampler(SamplerParams(logit_bias={0: -INF, 1: -INF})).sample(torch.zeros(2))


def test_biases_are_values() -> None:
    params = SamplerParams(logit_bias={5: 1, 2: -0.5})
    assert params.logit_bias == ((2, -0.5), (5, 1.0)) and params == SamplerParams(logit_bias=[(2, -0.5), (5, 1)])
    assert hash(params) == hash(params.changed({"temp": 0.8}))


# ---- log-probabilities ----


@given(LOGITS, st.integers(0, 40))
@example([0.0, 1e-30], 2)
def test_logprobs(logits: list[float], best: int) -> None:
    values = f32(logits)
    found = logprobs_of(values, 1, best)
    expected = [math.log(p) if p else -INF for p in shares(values.tolist())]
    order = sorted(range(len(logits)), key=lambda i: (-values[i], i))[:best]
    assert found.token == pytest.approx(expected[1], abs=1e-12)
    assert [i for i, _ in found.best] == order
    assert [x for _, x in found.best] == pytest.approx([expected[i] for i in order], abs=1e-12)


def test_a_greedy_choice_is_never_one_that_is_never_drawn() -> None:
    sampler = Sampler(SamplerParams(temp=0), never=[1])
    assert sampler.is_greedy
    assert sampler.sample(torch.tensor([0.0, 3.0, 2.0])) == 2
    assert sampler.sample(torch.tensor([5.0, 3.0, 2.0])) == 0


def test_logprobs_of_infinities() -> None:
    assert logprobs_of(f32([INF, 1.0, INF]), 2, 3) == (-math.log(2), ((0, -math.log(2)), (2, -math.log(2)), (1, -INF)))
    assert logprobs_of(f32([-INF, 0.0]), 0, 1) == (-INF, ((1, 0.0),))


def test_logprobs_are_the_models_own() -> None:
    """Whatever biases and samplers make of them."""
    logits = torch.tensor([1.0, 2.0, 3.0])
    sampler = Sampler(SamplerParams(temp=0.1, logit_bias={2: -INF}, repeat_penalty=3.0, seed=1), best=2)
    token = sampler.sample(logits, [0, 1])
    assert sampler.logprobs is not None and sampler.logprobs == logprobs_of(logits.numpy(), token, 2)
    assert sampler.device_params() is None and not sampler.is_greedy
    with pytest.raises(SessionError, match="logprobs must be how many of the likeliest tokens are named, 0 to 1024"):
        Sampler(best=-1)


# ---- parameters ----


def test_options_are_the_parameters() -> None:
    assert list(SamplerOptions.__annotations__) == list(SamplerParams.__dataclass_fields__)
    for name, field in SamplerParams.__dataclass_fields__.items():
        assert str(field.type) in str(SamplerOptions.__annotations__[name]), name


def test_defaults_are_llama_cpps() -> None:
    p = SamplerParams()
    assert (p.dry_multiplier, p.dry_base, p.dry_allowed_length, p.dry_penalty_last_n) == (0.0, 1.75, 2, -1)
    assert p.dry_sequence_breaker == ("\n", ":", '"', "*")
    assert (p.mirostat, p.mirostat_ent, p.mirostat_lr) == (0, 5.0, 0.1)
    assert (p.dynatemp_range, p.dynatemp_exp, p.top_n_sigma, p.logit_bias) == (0.0, 1.0, -1.0, ())


def test_whole_numbers_are_whole() -> None:
    assert Sampler(SamplerParams(top_k=2.0, seed=1.0)).sample(torch.zeros(5)) in (0, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"mirostat": 3}, "mirostat must be from 0 to 2, got 3"),
        ({"mirostat_ent": -1.0}, "mirostat_ent must be at least 0"),
        ({"dry_multiplier": -1}, "dry_multiplier must be at least 0"),
        ({"dry_penalty_last_n": -2}, "dry_penalty_last_n must be at least -1"),
        ({"dry_sequence_breaker": "\n"}, "dry_sequence_breaker must be a list of texts of 1 to 40 characters"),
        ({"dry_sequence_breaker": ["a", ""]}, "got ''"),
        ({"dry_sequence_breaker": [3]}, "got 3"),
        ({"dynatemp_range": -0.1}, "dynatemp_range must be at least 0"),
        ({"top_n_sigma": math.nan}, "top_n_sigma must be a finite number"),
        ({"temp": 10**400}, "temp must be a finite number"),
        ({"frequency_penalty": 1e30}, "frequency_penalty must be from"),
        ({"logit_bias": {1: math.nan}}, "a bias must be a finite number or -inf, got nan for token 1"),
        ({"logit_bias": {1: INF}}, "a bias must be a finite number or -inf, got inf"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias must name tokens by their ids, 0 and up, got -1"),
        ({"logit_bias": {"a": 1.0}}, "ids, 0 and up, got 'a'"),
        ({"logit_bias": 5}, "logit_bias must give a number for each token id"),
        ({"logit_bias": {1: "x"}}, "logit_bias must give a number for each token id"),
    ],
)  # fmt: skip
def test_bad_parameters(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(SessionError, match=message):
        SamplerParams(**setting)


def test_unknown_parameters() -> None:
    with pytest.raises(SessionError, match="a sampling parameter must be one of temp, .*; got 'temperature'"):
        SamplerParams().changed({"temperature": 1.0})


def test_seeds_of_several_texts() -> None:
    assert [p.seed for p in SamplerParams(seed=7).seeds(3)] == [7, 8, 9]
    assert [p.seed for p in SamplerParams(seed=2**64 - 1).seeds(2)] == [2**64 - 1, 0]
    assert [p.seed for p in SamplerParams().seeds(2)] == [-1, -1]


@given(
    LOGITS,
    st.fixed_dictionaries({}, optional={
        "temp": st.floats(-1, 100), "top_n_sigma": st.floats(-1, 4), "dry_multiplier": st.floats(0, 1e6),
        "dry_base": st.floats(0, 10), "dry_allowed_length": st.integers(0, 5), "dynatemp_range": st.floats(0, 50),
        "dynatemp_exp": st.floats(-5, 5), "mirostat": st.integers(0, 2), "mirostat_ent": st.floats(0, 50),
        "mirostat_lr": st.floats(0, 50), "repeat_penalty": st.floats(0.1, 10), "xtc_probability": st.floats(0, 1),
        "logit_bias": st.dictionaries(st.integers(1, 40), st.floats(-100, 100) | st.just(-INF)),
    }),
    st.lists(st.integers(0, 29), max_size=30),
)  # fmt: skip
def test_any_parameters_give_an_allowed_token(logits: list[float], given_: dict[str, Any], history: list[int]) -> None:
    sampler = Sampler(SamplerParams(seed=1, **given_), best=3)
    for _ in range(3):
        token = sampler.sample(torch.tensor(logits), history)
        assert 0 <= token < len(logits) and token not in sampler.never


def test_a_breaker_that_tokens_cut_within_a_character() -> None:
    """The first byte of é is a token, and the other one comes behind it."""
    vocabulary = Tokenizer.from_metadata({f"tokenizer.ggml.{key}": value for key, value in bpe().items()})
    first, second = vocabulary.encode("é")
    assert Breakers.of(vocabulary, ["é"]).tails == {first: ((second,),)}
