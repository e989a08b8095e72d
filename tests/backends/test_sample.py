"""Tokens that a device draws: the op chooses as the host's sampler does, so that a seed gives one text either way.

Stopping anywhere leaves the random numbers where the host's sampler would have left them.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.tiny import tokens, write_model

import graphrt
from graphrt import ops
from graphrt.backends.cpu.reference import evaluate
from graphrt.models import Model, SamplerParams, load
from graphrt.models import sampling_steps as host
from graphrt.models.choices import choices
from graphrt.models.engine import MAX_AHEAD, SessionOptions
from graphrt.models.sampling import Sampler, Uniforms
from graphrt.models.sampling_device import drawn
from graphrt.ops.sample import MAX_TOP_K, SampleParams
from graphrt.testing import all_cases

SAMPLING = [
    SamplerParams(seed=1),
    SamplerParams(seed=2, temp=2.5, top_k=1000, top_p=1.0, min_p=0.0),
    SamplerParams(seed=3, temp=1.5, top_k=64, top_p=0.7, min_p=0.0, min_keep=9),
    SamplerParams(seed=4, temp=5.0, top_k=20, top_p=0.999, min_p=0.3),
    SamplerParams(seed=5, temp=1e-4, top_k=2, top_p=0.0, min_keep=2),
]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder: Path = tmp_path_factory.mktemp("sample")
    return load(write_model(folder / "model.gguf", request.param), "cpu")


@pytest.fixture
def queued(model: Model, monkeypatch: pytest.MonkeyPatch) -> Model:
    """The model on a backend that says that its steps can be queued."""
    monkeypatch.setattr(type(model.backends[0]), "asynchronous", True)
    return model


def plainly(model: Model, prompt: list[int], n: int, sampler: Sampler, options: SessionOptions) -> list[int]:
    """Each token drawn by the host, from the logits after the one before."""
    session, made = model.session(options), []
    logits = session.eval(prompt)
    for _ in range(n):
        made.append(sampler.sample(logits))
        logits = session.eval(made[-1:])
    return made


def op_draws(logits: np.ndarray, uniforms: np.ndarray, params: SampleParams, backend: str = "cpu") -> list[int]:
    """The op's choices. logits: [n, n_vocab]; uniforms: [n]."""
    a, u = graphrt.new_input("f32", *logits.shape[::-1], name="a"), graphrt.new_input("f64", len(uniforms), name="u")
    node = ops.sample(a, u, params)
    exe = graphrt.prepare(graphrt.Graph(node), backend)
    exe.write(a, logits.astype(np.float32))
    exe.write(u, uniforms)
    exe.run()
    return exe.read(node).reshape(-1).tolist()


def backends() -> list[str]:
    found = graphrt.backend.discover()
    return ["cpu", *(name for name in ("triton",) if name in found and found[name].reason is None)]


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("sampling", SAMPLING, ids=lambda p: f"seed={p.seed}")
def test_the_op_chooses_as_the_sampler(sampling: SamplerParams, backend: str) -> None:
    """Logits with ties, all alike, with both zeros, with infinities, and few of them."""
    rng = np.random.default_rng(sampling.seed)
    inf = math.inf
    sampler, ahead = Sampler(sampling), Uniforms(sampling.seed)
    params = sampler.device_params()
    assert params is not None
    spiked, cut, zeros = (rng.normal(size=700) for _ in range(3))
    spiked[[3, 500]], cut[5:], zeros[::3] = inf, -inf, -0.0
    zeros[1::3] = 0.0
    ties = np.round(rng.normal(size=(3, 700)) * 4) / 2
    rows = np.stack([*rng.normal(size=(3, 700)) * 3, *ties, np.zeros(700), spiked, cut, zeros, -np.sort(-cut)])
    for logits in (rows.astype(np.float32), rows[:, :3].astype(np.float32)):
        expected = [sampler.sample(row) for row in logits]
        assert op_draws(logits, np.array([ahead.take() for _ in logits]), params, backend) == expected


#: What SAMPLE has not, and a greedy one.
EACH = [
    SamplerParams(seed=21, temp=0.0),
    SamplerParams(seed=22, temp=1.3, typical_p=0.6, top_p=1.0, min_p=0.0),
    SamplerParams(seed=23, temp=2.0, top_k=30, typical_p=0.9, min_keep=4),
    SamplerParams(seed=24, temp=1.5, xtc_probability=0.6, xtc_threshold=0.02, top_p=1.0),
    SamplerParams(seed=25, temp=1.5, xtc_probability=1.0, xtc_threshold=0.0, min_keep=3),
    SAMPLING[0],
]


@pytest.mark.parametrize("backend", backends())
def test_each_row_chooses_as_its_own_sampler(backend: str) -> None:
    """Each sampler's settings in a column; three rows of each in any order, with ties in two of them."""
    rng = np.random.default_rng(31)
    n, samplers = 90, [Sampler(p) for p in EACH]
    hows = [drawn(sampler, 1000) for sampler in samplers]
    slots = rng.permutation(np.repeat(np.arange(len(EACH)), 3)).astype(np.int32)
    logits = rng.normal(size=(len(slots), n)) * 2
    logits[::3], logits[1::3] = np.round(logits[::3]), 0.0
    logits, uniforms, expected = logits.astype(np.float32), np.zeros((len(slots), 2)), list[int]()
    for row, slot in enumerate(slots.tolist()):
        how = hows[slot]
        assert how is not None
        if how.uniforms is not None:
            uniforms[row] = how.uniforms.peek(how.n_uniforms - 1), how.uniforms.peek(0)
        expected.append(samplers[slot].sample(logits[row]))
    a, u = graphrt.new_input("f32", n, len(slots), name="a"), graphrt.new_input("f64", 2, len(slots), name="u")
    s, t = graphrt.new_input("i32", len(slots), name="s"), graphrt.new_input("f64", 16, len(EACH), name="t")
    node = ops.sample_each(a, u, s, t)
    exe = graphrt.prepare(graphrt.Graph(node), backend)
    table = np.array([how.settings.column for how in hows if how is not None])
    for leaf, values in ((a, logits), (u, uniforms), (s, slots), (t, table)):
        exe.write(leaf, values)
    exe.run()
    assert exe.read(node).reshape(-1).tolist() == expected


def test_settings_that_are_no_numbers_draw_some_token() -> None:
    """Of a saved case from a stranger: the reference neither raises nor loops."""
    a, u = graphrt.new_input("f32", 90, 1, name="a"), graphrt.new_input("f64", 2, 1, name="u")
    s, t = graphrt.new_input("i32", 1, name="s"), graphrt.new_input("f64", 16, 1, name="t")
    node, logits = ops.sample_each(a, u, s, t), torch.randn(1, 1, 1, 90)
    for odd in (math.nan, math.inf, -math.inf):
        table = torch.full((1, 1, 1, 16), odd, dtype=torch.float64)
        halves, slot = torch.full((1, 1, 1, 2), 0.5), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
        assert 0 <= int(evaluate(node, [logits, halves, slot, table])) < 90


@pytest.mark.parametrize("backend", backends())
def test_equal_shares_reach_top_p_where_the_host_has_them_do_so(backend: str) -> None:
    """Sums of a tenth or a fortieth that meet 0.5, 0.95 and others exactly or not, as running sums in order do."""
    logits = np.zeros((1, 50), np.float32)
    for top_k, share in itertools.product((10, 40), (0.3, 0.5, 0.7, 0.95)):
        candidates = host.top_p(host.top_k(logits[0], top_k), share)
        last = [math.nextafter(1.0, 0.0)]
        expected = host.draw(candidates, last[0])
        assert op_draws(logits, np.array(last), SampleParams(1.0, top_k, share, 0.0), backend) == [expected]


@pytest.mark.parametrize("backend", backends())
def test_a_number_that_a_sum_meets_is_passed_by_the_next(backend: str) -> None:
    numbers = np.array([0.0, 0.25, 0.5, 0.75])
    expected = [host.draw(host.top_k(np.zeros(9, np.float32), 4), u) for u in numbers.tolist()]
    assert op_draws(np.zeros((4, 9)), numbers, SampleParams(1.0, 4, 1.0, 0.0), backend) == expected == [0, 1, 2, 3]


@pytest.mark.parametrize("backend", backends())
def test_sums_that_end_beside_one_are_taken_as_they_are(backend: str) -> None:
    """Ten tenths add up to a little less than 1: numbers are held against their share of that, here as on the host."""
    for n in (10, 11, 19):
        candidates = host.top_k(np.zeros(n, np.float32), n)
        sums = np.cumsum(candidates.probabilities())
        assert sums[-1] != 1.0
        numbers = np.array([u for s in sums[:-1] for u in (np.nextafter(s, 0.0), s, np.nextafter(s, 1.0))])
        expected = [host.draw(candidates, u) for u in numbers]
        assert expected == [int((sums <= u * sums[-1]).sum()) for u in numbers]
        assert expected != [int((sums <= u).sum()) for u in numbers]
        rows = np.zeros((len(numbers), n))
        assert op_draws(rows, numbers, SampleParams(1.0, n, 1.0, 0.0), backend) == expected


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize(("top_p", "min_p"), [(1.0, 0.5), (0.1, 0.0), (0.1, 0.5)])
def test_as_many_tokens_are_kept_as_are_asked_for(top_p: float, min_p: float, backend: str) -> None:
    """One token is far ahead of the others, so that top_p and min_p would leave it alone; min_keep leaves three."""
    logits = np.array([1.0, 9.0, 2.0, 0.0, 0.5, 0.25], np.float32)
    params = SamplerParams(temp=1e6, top_k=5, top_p=top_p, min_p=min_p, min_keep=3, seed=0)
    kept = host.min_p(host.top_p(host.top_k(logits, 5), top_p, 3), min_p, 3)
    assert kept.ids.tolist() == [1, 2, 0]
    numbers = np.array([0.1, 0.5, 0.9])
    device_params = Sampler(params).device_params()
    assert device_params is not None
    assert op_draws(np.tile(logits, (3, 1)), numbers, device_params, backend) == [1, 2, 0]


@pytest.mark.parametrize("backend", backends())
def test_no_logit_to_draw_gives_the_first(backend: str) -> None:
    rows = np.full((2, 9), -math.inf)
    rows[1, 3:5] = math.nan
    assert op_draws(rows, np.array([0.9, 0.9]), SampleParams(), backend) == [0, 3]


def test_no_case_lies_on_an_edge() -> None:
    """What a case decides by is decided by more than rounding: a choice that differs is wrong."""
    margins = []
    for case in all_cases("SAMPLE"):
        inputs = case.build()
        node = inputs.result
        (a, logits), (_, uniforms) = inputs.values.items()
        p = node.params
        for row, u in zip(logits.reshape(-1, a.ne[0]), uniforms.reshape(-1)):
            candidates = host.top_k(row, p.top_k)
            if 0 < p.top_p < 1:
                margins.append(np.abs(np.cumsum(candidates.probabilities()) - p.top_p).min())
            candidates = host.min_p(host.top_p(candidates, p.top_p, p.min_keep), p.min_p, p.min_keep)
            sums = np.cumsum(host.temperature(candidates, p.temp).probabilities())
            margins.append(np.abs(sums - float(u)).min())
    assert len(margins) > 100 and min(margins) > 1e-9


def test_the_last_of_the_sums_is_not_passed() -> None:
    """Rounding may leave the running sum under the number: the last candidate is drawn."""
    logits = np.random.default_rng(0).normal(size=(1, 300))
    node = ops.sample(graphrt.Tensor("f32", (300, 1)), graphrt.Tensor("f64", (1,)), SampleParams(1.0, 200, 1.0, 0.0))
    sources = [torch.tensor(logits, dtype=torch.float32).reshape(1, 1, 1, 300), torch.ones(1, 1, 1, 1).double()]
    assert int(evaluate(node, sources)) == host.top_k(logits[0].astype(np.float32), 200).ids[-1]


@pytest.mark.parametrize("sampling", SAMPLING, ids=lambda p: f"seed={p.seed}")
def test_a_seed_gives_one_text_either_way(queued: Model, sampling: SamplerParams) -> None:
    prompt, options = tokens(5), SessionOptions(type_k="f32", type_v="f32")
    expected = plainly(queued, prompt, 40, Sampler(sampling), options)  # past gemma's window
    session, sampler = queued.session(options), Sampler(sampling)
    assert list(choices(session, prompt, 40, sampler)) == expected
    assert sampler.device_params() in session._chained and session.n_past == len(prompt) + 40
    assert sampler.uniforms.take() == Uniforms(sampling.seed).peek(40), "as many numbers as tokens"


@pytest.mark.parametrize("stop", [1, 2, 5])
def test_stopping_early_leaves_the_random_numbers_right(queued: Model, stop: int) -> None:
    prompt, sampling = tokens(5), replace(SAMPLING[1], seed=77)
    expected = plainly(queued, prompt, 10, Sampler(sampling), SessionOptions())
    session, sampler = queued.session(), Sampler(sampling)
    first = list(itertools.islice(choices(session, prompt, 100, sampler), stop))
    assert session.n_past == len(prompt) + stop
    rest = choices(session, [], 10 - stop, sampler)
    assert [*first, *rest] == expected


def test_only_as_many_numbers_are_looked_at_as_steps_are_queued(queued: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[int] = []
    peek = Uniforms.peek
    monkeypatch.setattr(Uniforms, "peek", lambda self, ahead: looked_at.append(ahead) or peek(self, ahead))
    session, sampler = queued.session(), Sampler(SAMPLING[0])
    params = sampler.device_params()
    assert params is not None
    session.eval(tokens(3))
    stream = session.drawn(1, 3, params, sampler.uniforms)
    next(stream)
    taken = 1
    assert max(looked_at) + 1 - taken == 2
    stream.close()
    looked_at.clear()
    long = session.drawn(1, 50, params, sampler.uniforms)
    next(long)
    assert max(looked_at) + 1 - taken == MAX_AHEAD - 1


def test_ways_to_choose_share_a_session(queued: Model) -> None:
    prompt = tokens(5)
    session = queued.session()
    for sampling in (*SAMPLING[:3], SamplerParams(temp=0.0), SAMPLING[0]):
        session.reset()
        made = list(choices(session, prompt, 6, Sampler(sampling)))
        assert made == plainly(queued, prompt, 6, Sampler(sampling), SessionOptions())
        assert len(session._chained) <= 2


@pytest.mark.parametrize(
    "changed",
    [
        {"temp": 0.0}, {"top_k": 0}, {"top_k": MAX_TOP_K + 1}, {"typical_p": 0.9}, {"xtc_probability": 0.5},
        {"repeat_penalty": 1.1}, {"presence_penalty": 0.1}, {"frequency_penalty": -0.1},
    ],
)  # fmt: skip
def test_what_the_host_has_to_choose(queued: Model, changed: dict[str, float]) -> None:
    sampler = Sampler(SamplerParams(seed=1, **changed))
    assert sampler.device_params() is None
    session = queued.session()
    assert len(list(itertools.islice(choices(session, tokens(3), 4, sampler), 4))) == 4
    assert set(session._chained) <= {None}


def test_penalties_of_no_token_are_none() -> None:
    sampler = Sampler(SamplerParams(repeat_penalty=2.0, repeat_last_n=0, min_keep=10**6))
    assert sampler.device_params() == SampleParams(0.8, 40, 0.95, 0.05, MAX_TOP_K)


def test_numbers_that_were_looked_at_come_in_their_turn() -> None:
    plain, looked = Uniforms(9), Uniforms(9)
    expected = [plain.take() for _ in range(9)]
    assert [looked.peek(i) for i in (3, 0, 5)] == [expected[i] for i in (3, 0, 5)]
    assert [looked.take() for _ in range(9)] == expected and all(0 <= u < 1 for u in expected)
