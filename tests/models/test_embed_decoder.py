"""Embeddings by decoders: what the logits are made of, pooled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import tiny, tiny_archs  # noqa: F401 (its models are found by name)
from support.verbs import Verb

from graphrt.errors import SessionError
from graphrt.models import Model, embed_decoder, load

TEXTS = [tiny.tokens(9), tiny.tokens(40), [5]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(tiny.write_model(tmp_path_factory.mktemp("m") / "m.gguf", "llama"), "cpu", exact=True)


def test_logits_are_made_of_the_embeddings(model: Model) -> None:
    """The output's matrix times each, in float64, is what logits() gives."""
    output = model.file.dequantize("output.weight").astype(np.float64)
    for ids, rows in zip(TEXTS, model.embed(TEXTS, "none", normalize=False)):
        assert rows.shape == (len(ids), 64) and rows.dtype == np.float32
        assert np.allclose(rows.astype(np.float64) @ output.T, model.logits(ids), atol=1e-4)


@pytest.mark.parametrize("name", ["gemma3", "gpt2", "qwen3moe"])
def test_texts_do_not_know_of_each_other_nor_of_batches(name: str, tmp_path: Path) -> None:
    other = load(tiny.write_model(tmp_path / "m.gguf", name), "cpu", exact=True)
    together = other.embed(TEXTS, "mean")
    for ids, row in zip(TEXTS, together):
        assert np.allclose(other.embed([ids], "mean", n_batch=7)[0], row, atol=1e-4)
    assert np.abs(together[0] - together[1]).max() > 0.01


def test_texts_of_about_one_length_share_a_step(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their last steps are as long as the next size that there is; the context's end is one."""
    made, prepare = list[int](), embed_decoder.prepare

    def noted(*given: Any) -> Any:
        exe = prepare(*given)
        made.append(exe.graph.outputs[0].ne[1])
        return exe

    monkeypatch.setattr(embed_decoder, "prepare", noted)
    texts = [tiny.tokens(n) for n in (17, 24, 20, 250, 193)]
    together = model.embed(texts, "last", n_batch=200)
    assert made == [24, 200, 56]
    assert np.allclose(together[3], model.embed(texts[3:4], "last")[0], atol=1e-4)


def test_poolings(model: Model) -> None:
    rows = model.embed(TEXTS, "none", normalize=False)
    for kind, wanted in (
        ("mean", [r.astype(np.float64).mean(0) for r in rows]),
        ("last", [r[-1] for r in rows]),
        ("cls", [r[0] for r in rows]),
    ):
        assert np.allclose(np.stack(model.embed(TEXTS, kind, normalize=False)), wanted, atol=1e-5), kind
        units = np.stack(model.embed(TEXTS, kind))
        assert np.allclose(np.linalg.norm(units, axis=1), 1, atol=1e-5)
    assert model.embed([], "mean") == []


@pytest.mark.parametrize(
    ("texts", "pooling", "says"),
    [
        ([[1]], "", "the file names no pooling"),
        ([[1]], "max", "must be one of none, mean, cls, last"),
        ([[]], "mean", "at least one token"),
        ([[1], [1] * 257], "mean", "1 to 256 tokens, the model's own limit, got 257"),
        ([[128]], "mean", "must be 0 to 127, got 128"),
    ],
)
def test_what_is_refused(model: Model, texts: list[list[int]], pooling: str, says: str) -> None:
    with pytest.raises(SessionError, match=says):
        model.embed(texts, pooling)


def test_the_verb(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tiny.write_model(tmp_path / "m.gguf", "llama", tokenizer="spm")
    graphrt = Verb(capsys)
    found = graphrt("embed", path, "-p", "hello", "-p", "the sea", "--pooling", "last", "--json", "--exact").json()
    wanted = load(path, "cpu", exact=True).embed(["hello", "the sea"], "last")
    assert found["pooling"] == "last" and np.array_equal(np.array(found["embeddings"], np.float32), np.stack(wanted))
