"""The load "summary" of bench serve: how an article is spelled, what a chain says, how much of it is guessed."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request
from collections.abc import Iterator

import numpy as np
import pytest
from support.command_line import command, environment
from support.served import Served, started

from graphrt import get_backend
from graphrt.dtypes import dtype
from graphrt.errors import SessionError
from graphrt.models import Model
from graphrt.models.engine import SessionOptions
from graphrt.models.guesses import PATIENCE, PAUSE
from graphrt.models.prompt_lookup import PromptLookup
from graphrt.models.synthetic import synthetic
from graphrt.models.synthetic_blocks import POOL_BYTES
from graphrt.tools.bench.load_summaries import ARTICLE, TEXT, places, spelled, words


def test_runs_of_words() -> None:
    article, text = words("The old sea; the sea wall and the sea."), words("the sea wall. A sea, the sea")
    assert article == ["The", "old", "sea", ";", "the", "sea", "wall", "and", "the", "sea", "."]
    assert text == ["the", "sea", "wall", ".", "A", "sea", ",", "the", "sea"]
    assert places(article, text) == [-1, -1, -1, -1, 0, 1, 2, -1, 0, 1, -1], "of alike ones the first"
    assert places(article, []) == [-1] * 11


def guessed(most: int) -> tuple[int, int, int]:
    """(steps, guessed tokens, right ones) of the summary, guessed from its article."""
    said = list(range(1000, 1001 + len(words(TEXT))))
    lookup, left = PromptLookup(spelled(said, 5000, np.random.default_rng(0)), most), said[1:]
    steps = n_guessed = n_right = 0
    while left:
        guess = lookup.guess(len(left) - 1)
        right = next((i for i, token in enumerate(guess) if token != left[i]), len(guess))
        for token in left[: right + 1]:
            lookup.push(token)
        if guess:
            lookup.told(len(guess), right)
        left, steps = left[right + 1 :], steps + 1
        n_guessed, n_right = n_guessed + len(guess), n_right + right
    return steps, n_guessed, n_right


def test_what_is_guessed() -> None:
    """What load_summaries.py says of its text: longer guesses are worth more, and some are wrong."""
    article, text = words(ARTICLE), words(TEXT)
    assert (len(article), len(text)) == (513, 301)
    said = list(range(7, 309))
    prompt = spelled(said, 400, np.random.default_rng(1))
    assert len(prompt) == 514 and prompt[-1] == said[0], "behind which the model says the others"
    for token, at in zip(prompt, places(article, text)):
        assert token == said[1 + at] if at >= 0 else token not in said
    assert 0.5 < sum(at >= 0 for at in places(article, text)) / len(article) < 0.7
    assert (guessed(8), guessed(15)) == ((77, 286, 224), (67, 363, 234))
    assert len(text) / guessed(2)[0] < 2.5 < 4 < len(text) / guessed(16)[0]


def test_one_long_guess_that_is_wrong() -> None:
    """It ends no patience; so many wrong ones in a row do."""
    lookup = PromptLookup([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2], 8)
    lookup.told(4, 4)
    assert lookup.size == 8
    for _ in range(PATIENCE - 1):
        lookup.told(8, 0)
        assert not lookup.pauses and lookup.size == 2
    lookup.told(2, 0)
    assert lookup.pauses
    for _ in range(PAUSE):
        lookup.push(0)
    assert not lookup.pauses


def test_a_chain_looks_at_one_token() -> None:
    """Each token has one that follows it, in any place and behind any others, and by far the likeliest."""
    session = Model(synthetic("tiny:q4_k_m+chain"), [get_backend("cpu")]).session(SessionOptions(n_ctx=64))
    for before in ([], [3, 400], [7, 7, 7, 7]):
        for token in (0, 5, 300, 511):
            rows = np.sort(session.eval([*before, token]))
            assert session.eval_again(token).argmax() == (token + 1) % 512
            assert rows[-1] > 2 * rows[-2]
    with pytest.raises(SessionError, match="a chain needs an output matrix that isn't the embedding"):
        synthetic("smollm2-135m+chain")


def test_no_two_rows_of_a_chain_are_alike() -> None:
    """Else several tokens would be the next one, of which rounding chooses. No block of several pools is there twice,
    and a part of the matrix is what the whole has there."""
    file = synthetic("llama-8b:q4_k_m+chain")
    info, size = file.tensors["output.weight"], dtype("q6_K").type_size
    row, n = info.dtype.row_size(info.ne[0]), 3 * POOL_BYTES // size
    blocks = file.span("output.weight", 0, n * size).reshape(n, size)
    assert info.dtype.name == "q6_K" and len(np.unique(blocks, axis=0)) == n
    some = file.span("output.weight", 900 * row, 1900 * row)
    assert np.array_equal(some, blocks.reshape(-1)[900 * row : 1900 * row]) and 900 * row < POOL_BYTES < 1900 * row
    assert np.array_equal(file.span("token_embd.weight", 899 * row, 1899 * row), some), "each is the one before's next"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    found = started("--synthetic", "tiny:q4_k_m+chain", "-np", "2", "-c", "1024", "--lookup", "8", "--no-warmup")
    yield found
    found.process.terminate()
    found.process.wait(30)


def test_a_load(server: Served) -> None:
    """Two users of a chain: the server guesses while that pays on this machine, and says all of the summary."""
    load = ["--users", "2", "--requests", "2", "--warm-up", "0", "--lengths", "summary", "--json"]
    done = subprocess.run(
        command("bench", "serve", server.url, *load), env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    step = json.loads(done.stdout)["steps"][0]
    assert (step["output_tokens"], step["prompt_tokens"], step["errors"]) == (2 * 301, 2 * 514, 0)
    told = urllib.request.urlopen(server.url + "/metrics", timeout=30).read().decode()
    guessed, right = (
        float(re.search(rf"^graphrt:spec_decode_num_{name}_tokens_total\S* (\S+)$", told, re.M)[1])  # type: ignore[index]
        for name in ("draft", "accepted")
    )
    assert 0 < right < guessed
