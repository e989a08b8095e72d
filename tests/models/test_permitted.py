"""Texts of some tokens alone, and without some words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.tiny import write_model

from graphrt.errors import SessionError
from graphrt.models import load
from graphrt.models.generation import TextRules
from graphrt.models.model import Model
from graphrt.models.permitted import Permitted, allowed_ids, spellings
from graphrt.models.sampling import Sampler
from graphrt.models.sampling_device import drawn
from graphrt.models.sampling_params import SamplerParams

GREEDY = SamplerParams(temp=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(write_model(tmp_path_factory.mktemp("permitted") / "tiny.gguf", "llama", tokenizer="spm"), "cpu")


class Odd:
    """A matcher that lets odd tokens through, of a vocabulary of 60."""

    said = 0

    def mask(self) -> Any:
        return np.arange(60) % 2 == 1

    def bits(self) -> Any:
        raise AssertionError

    def accept(self, token: int) -> None:
        self.said += 1


def test_a_word_may_not_be_ended() -> None:
    """Its last token is out where the ones before it were just made, and nowhere else; a word of one token always."""
    permitted = Permitted(70, None, [[3, 4], [3, 5], [8, 3, 6], [9]], None)

    def out() -> list[int]:
        assert list(np.unpackbits(permitted.bits().view(np.uint8), bitorder="little")[:70]) == list(permitted.mask())
        return list(np.flatnonzero(~permitted.mask()))

    assert out() == [9] and permitted.bits().shape == (3,)
    for token, left_out in ((3, [4, 5, 9]), (7, [9]), (8, [9]), (3, [4, 5, 6, 9]), (3, [4, 5, 9])):
        permitted.accept(token)
        assert out() == left_out


def test_all_that_holds_of_a_text_holds_together() -> None:
    odd = Odd()
    permitted = Permitted(64, [1, 2, 3, 63], [[3]], odd)
    assert list(np.flatnonzero(permitted.mask())) == [1]
    permitted.accept(1)
    assert odd.said == 1


def test_words_are_spelled_with_a_space_and_without(model: Model) -> None:
    tokenizer = model.tokenizer
    found = spellings([" the", "sea"], tokenizer)
    texts = [b"".join(map(tokenizer.piece, ids)).decode() for ids in found]
    assert texts == ["the", " the", "sea", " sea"]
    for words in ([""], [" "]):
        with pytest.raises(SessionError, match="a bad word must be a text of at least one character"):
            spellings(words, tokenizer)
    for ids in ([], [64], [-1], [True]):
        with pytest.raises(SessionError, match="allowed ids must be one or more token ids, 0 to 63, got"):
            allowed_ids(ids, 64)


def test_the_host_and_a_device_choose_by_them(model: Model) -> None:
    n = model.network.hp.n_vocab
    plain, _ = model.new_text(GREEDY, TextRules(8))
    logits = np.linspace(0, 1, n, dtype=np.float32)
    assert plain.sample(logits) == n - 1
    only, _ = model.new_text(GREEDY, TextRules(8, allowed=[5, 7]))
    assert only.sample(logits) == 7 and not only.is_greedy
    how = drawn(only, 64)
    assert how is not None and how.matcher is not None and how.waits and how.settings.masked
    assert list(np.flatnonzero(how.matcher.mask())) == [5, 7]
    none = Sampler(SamplerParams(temp=0, logit_bias={5: -np.inf}), matcher=Permitted(n, [5], [], None))
    with pytest.raises(SessionError, match="allowed ids, bad words"):
        none.sample(logits)
    (token,) = model.tokenizer.encode("q", False, goes_on=True)
    logits[token] = 2
    without, _ = model.new_text(GREEDY, TextRules(8, bad_words=["q"]))
    assert (plain.sample(logits), without.sample(logits)) == (token, n - 1)
