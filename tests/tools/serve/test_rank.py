"""/rerank and /score: by a model with a head for that, and by a model that gives vectors."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from support import tiny, tiny_archs
from support.tiny import write_model
from support.tiny_vocab import wordpiece

from graphrt.errors import SessionError
from graphrt.models import Model, load
from graphrt.models.rerank import Ranker, has_head
from graphrt.models.sampling_params import SamplerParams
from graphrt.tools.cli import verb_parser
from graphrt.tools.serve.app import application
from graphrt.tools.verbs import serve

QUERY, TEXTS = "the test", ["hello world", "the cafe is naive, it is", "test"]
HEAD = {"cls.weight": (64, 64), "cls.bias": (64,), "cls.output.weight": (64, 1), "cls.output.bias": (1,)}


def written(path: Path, heads: Sequence[str] = tuple(HEAD), n_scores: int = 1, **changed: Any) -> Path:
    """An encoder with these tensors of a head."""
    shapes = {name: HEAD[name] for name in heads}
    if "cls.output.weight" in shapes:
        shapes |= {"cls.output.weight": (64, n_scores), "cls.output.bias": (n_scores,)}
    bert = tiny_archs.ENCODERS["bert"]
    tiny.OTHERS["ranking bert"] = dataclasses.replace(bert, top=bert.top | shapes).model
    tiny.VOCABS["wordpiece"] = wordpiece
    return write_model(path, "ranking bert", tokenizer="wordpiece", **{"pooling_type": 4} | changed)


@pytest.fixture(scope="module")
def ranking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("rank") / "ranking.gguf")


def asked(path: Path, requests: Sequence[tuple[str, Any]], *flags: str) -> list[Any]:
    model = load(path, "cpu")
    args = verb_parser("serve", serve).parse_args([str(path), *flags])

    async def work() -> list[Any]:
        app = application(serve.made_state(model, args, SamplerParams()))
        async with (
            app.router.lifespan_context(app),
            httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://x") as http,
        ):
            return [await http.post(where, json=body) for where, body in requests]

    return asyncio.run(work())


def expected(model: Model, pairs: Sequence[tuple[str, str]]) -> list[float]:
    """By a head in float64, over the model's vector of [CLS] query [SEP] text [SEP]."""
    found = []
    weights = {name: model.file.dequantize(name).astype(np.float64) for name in HEAD}
    for query, text in pairs:
        ids = [*model.tokenizer.encode(query), *model.tokenizer.encode(text)[1:]]
        row = model.embed([ids], "cls", normalize=False)[0].astype(np.float64)
        row = np.tanh(weights["cls.weight"] @ row + weights["cls.bias"])
        found.append(float((weights["cls.output.weight"] @ row + weights["cls.output.bias"]).item()))
    return found


def test_texts_are_ranked_by_the_head(ranking: Path) -> None:
    model = load(ranking, "cpu")
    raw = expected(model, [(QUERY, text) for text in TEXTS])
    order = sorted(range(3), key=lambda i: -raw[i])
    n = sum(len(model.tokenizer.encode(QUERY)) + len(model.tokenizer.encode(text)) - 1 for text in TEXTS)
    body = {"query": QUERY, "documents": TEXTS, "raw_scores": True}
    mixed = [TEXTS[0], {"text": TEXTS[1], "title": "x"}, TEXTS[2]]
    plain, best, bare, tei, named, *others = asked(
        ranking,
        [
            ("/v1/rerank", body),
            ("/rerank", body | {"top_n": 2, "raw_scores": False}),
            ("/reranking", {"query": QUERY, "documents": mixed, "return_documents": False, "top_n": 99}),
            ("/rerank", {"query": QUERY, "texts": TEXTS, "return_text": True}),
            ("/v2/rerank", body | {"model": "ranking", "use_activation": False, "raw_scores": None}),
            ("/score", {"text_1": QUERY, "text_2": TEXTS, "raw_scores": True}),
            ("/v1/score", {"queries": [QUERY] * 3, "documents": TEXTS, "raw_scores": True}),
            ("/score", {"data_1": QUERY, "data_2": TEXTS[1], "use_activation": False}),
            ("/invocations", {"text_1": QUERY, "text_2": TEXTS, "raw_scores": True}),
        ],
    )
    told = plain.json()
    assert [each["index"] for each in told["results"]] == order and told["usage"] == {
        "prompt_tokens": n,
        "total_tokens": n,
    }
    np.testing.assert_allclose([each["relevance_score"] for each in told["results"]], sorted(raw)[::-1], rtol=1e-5)
    assert [each["document"]["text"] for each in told["results"]] == [TEXTS[i] for i in order]
    assert told["model"] == "ranking" and named.json()["results"] == told["results"]
    chances = [1 / (1 + np.exp(-raw[i])) for i in order]
    np.testing.assert_allclose([each["relevance_score"] for each in best.json()["results"]], chances[:2], rtol=1e-5)
    assert len(bare.json()["results"]) == 3 and "document" not in bare.json()["results"][0]
    assert [(each["index"], each["text"]) for each in tei.json()] == [(i, TEXTS[i]) for i in order]
    np.testing.assert_allclose([each["score"] for each in tei.json()], chances, rtol=1e-5)
    for answer, scores in zip(others, (raw, raw, raw[1:2], raw)):
        np.testing.assert_allclose([each["score"] for each in answer.json()["data"]], scores, rtol=1e-5)


def test_without_a_head_by_vectors(tmp_path: Path) -> None:
    path = written(tmp_path / "vectors.gguf", (), pooling_type=2)
    model = load(path, "cpu")
    rows = [row.astype(np.float64) for row in model.embed([QUERY, *TEXTS])]
    scores = [float(rows[0] @ row) for row in rows[1:]]
    ranked, score, cut = asked(
        path,
        [
            ("/rerank", {"query": QUERY, "documents": TEXTS}),
            ("/score", {"text_1": QUERY, "text_2": TEXTS}),
            ("/score", {"text_1": QUERY, "text_2": TEXTS, "truncate_prompt_tokens": 2}),
        ],
    )
    assert [each["index"] for each in ranked.json()["results"]] == sorted(range(3), key=lambda i: -scores[i])
    np.testing.assert_allclose([each["score"] for each in score.json()["data"]], scores, atol=1e-6)
    assert cut.json()["usage"]["total_tokens"] == 12


def test_heads_of_one_layer(tmp_path: Path) -> None:
    """tanh is of the first layer alone, and a file may have one of both."""
    for name in ("cls", "cls.output"):
        heads = (f"{name}.weight", f"{name}.bias")
        path = written(tmp_path / f"{name}.gguf", heads)
        model = load(path, "cpu")
        if name == "cls":
            assert not has_head(model), "64 numbers are no score"
            continue
        ranker = Ranker(model)
        ids = ranker.pair(QUERY, TEXTS[0])
        row = model.embed([ids], "cls", normalize=False)[0].astype(np.float64)
        weight, bias = (model.file.dequantize(each).astype(np.float64).reshape(-1) for each in heads)
        np.testing.assert_allclose(ranker.scores([ids]), weight @ row + bias, rtol=1e-5)
    with pytest.raises(SessionError, match="must be an encoder with a head that gives one score"):
        Ranker(load(written(tmp_path / "many.gguf", n_scores=3), "cpu"))


def test_what_is_refused(ranking: Path) -> None:
    wrong = [
        ("/rerank", {"query": QUERY, "documents": []}, "documents"),
        ("/rerank", {"query": QUERY, "documents": [1]}, "documents[0]"),
        ("/rerank", {"query": QUERY}, None),
        ("/rerank", {"query": QUERY, "documents": TEXTS, "texts": TEXTS}, None),
        ("/rerank", {"documents": TEXTS}, "query"),
        ("/rerank", {"query": QUERY, "documents": ["the " * 300]}, "documents"),
        ("/rerank", {"query": QUERY, "documents": TEXTS, "truncate_prompt_tokens": 9999}, "truncate_prompt_tokens"),
        ("/score", {"text_1": [QUERY] * 2, "text_2": TEXTS}, None),
        ("/score", {"text_1": QUERY, "text_2": []}, "text_2"),
    ]
    for (where, body, param), answer in zip(wrong, asked(ranking, [(where, body) for where, body, _ in wrong])):
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param, (where, body, answer.text)


def test_a_model_without_a_pooling_says_so(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", "llama", tokenizer="spm")
    (answer,) = asked(path, [("/rerank", {"query": "a", "documents": ["b"]})])
    assert answer.status_code == 400 and "the file names no pooling" in answer.json()["error"]["message"]
