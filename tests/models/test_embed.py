"""`graphrt embed` on tiny encoders, and what other verbs say of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from support import (
    tiny,
    tiny_archs,  # noqa: F401  (its models)
    tiny_vocab,
)

from graphrt.models import load
from graphrt.models.embed import Embedder, _batches
from graphrt.tools import cli


class Result(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Result]


def test_texts_of_a_run_have_as_many_tokens_as_it_may_have() -> None:
    """To the token; one that has more goes alone."""
    texts = [[0] * n for n in (3, 5, 1, 8, 9, 4, 4, 1)]
    cut = [[len(ids) for ids in batch] for batch in _batches(texts, 8)]
    assert cut == [[3, 5], [1], [8], [9], [4, 4], [1]]
    assert [[len(ids) for ids in batch] for batch in _batches(texts, 1)] == [[len(ids)] for ids in texts]
    assert list(_batches([], 8)) == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoders")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny.VOCABS, "wordpiece", tiny_vocab.wordpiece)
        for name in ("bert", "nomic-bert"):
            tiny.write_model(folder / f"{name}.gguf", name, tokenizer="wordpiece")
    tiny.write_model(folder / "mpt.gguf", "mpt", tokenizer="spm")
    return folder


@pytest.mark.parametrize("name", ["bert", "nomic-bert"])
@pytest.mark.parametrize("pooling", ["none", "mean", "cls", "last"])
def test_texts_together_are_bit_for_bit_as_alone(folder: Path, name: str, pooling: str) -> None:
    """Of any lengths, in steps that are larger than they are."""
    model = load(folder / f"{name}.gguf", "cpu", exact=True)
    r = np.random.default_rng(4)
    texts = [r.integers(5, 60, n).tolist() for n in (9, 1, 17, 3, 1, 30, 25)]
    embedder = Embedder(model.encoder, model.backends, n_batch=64)
    found = embedder.embed(texts, pooling)
    assert set(embedder._prepared) == {(64, 6, pooling), (26, 1, pooling)}, "sizes are rounded up"
    for text, rows in zip(texts, found):
        (alone,) = embedder.embed([text], pooling)
        assert np.array_equal(rows, alone) and np.isfinite(rows).all()
    assert not any(
        node.op == "KQ_MASK" or "mask" in node.name for node in embedder.executable(64, 6, pooling).graph.nodes
    )


@pytest.fixture
def graphrt(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(folder)

    def run(*argv: str) -> Result:
        return Result(cli.main(argv), *capsys.readouterr())

    return run


def test_a_json_line_a_text(graphrt: Run, folder: Path) -> None:
    result = graphrt("embed", "nomic-bert.gguf", "-p", "hello world", "-p", "-the test", "--exact")
    lines = [json.loads(line) for line in result.out.splitlines()]
    assert result.code == 0 and [line["text"] for line in lines] == ["hello world", "-the test"]
    wanted = load(folder / "nomic-bert.gguf", "cpu", exact=True).embed(["hello world", "-the test"])
    assert np.array_equal(np.array([line["embedding"] for line in lines], np.float32), np.stack(wanted))


def test_a_file_of_texts_as_an_array(graphrt: Run, folder: Path) -> None:
    (folder / "texts.txt").write_text("hello\n\nthe world\nis\n")
    result = graphrt("embed", "bert.gguf", "-f", "texts.txt", "-o", "v.npy", "--pooling", "mean", "--no-normalize")
    assert result == (0, "v.npy: float32 [3, 64]\n", "wrote v.npy, 896 B\n")
    vectors = np.load(folder / "v.npy")
    wanted = load(folder / "bert.gguf", "cpu").embed(["hello", "the world", "is"], "mean", normalize=False)
    assert np.allclose(vectors, np.stack(wanted), atol=1e-5) and abs(np.linalg.norm(vectors, axis=1) - 1).min() > 0.1


def test_how_alike_texts_are(graphrt: Run) -> None:
    texts = ("-p", "hello world", "-p", "hello world", "-p", "the test " + "is " * 20)
    result = graphrt("embed", "bert.gguf", *texts, "--similarity", "--no-normalize")
    rows = [line.split() for line in result.out.splitlines()]
    assert rows[0] == ["0", "1", "2", "text"] and rows[1][:3] == ["0", "1.0000", "1.0000"]
    assert float(rows[1][3]) < 0.9999 and rows[3][-1].endswith("...")
    report = json.loads(graphrt("embed", "bert.gguf", *texts, "--similarity", "--json").out)
    assert report["pooling"] == "cls" and report["normalized"] and len(report["embeddings"]) == 3
    assert np.allclose(np.diag(report["similarity"]), 1, atol=1e-5)


def test_a_vector_a_token(graphrt: Run) -> None:
    line = json.loads(graphrt("embed", "bert.gguf", "-p", "hello world", "--pooling", "none").out)
    assert np.shape(line["embedding"]) == (4, 64)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("mpt.gguf", "-p", "a"), "the file names no pooling; choose one as pooling: none, mean, cls, last"),
        (
            ("mpt.gguf", "-p", "a " * 300, "--pooling", "mean"),
            "the context holds 256 tokens, got a text of 600 characters",
        ),
        (("bert.gguf", "-p", "a", "--pooling", "max"), "must be one of none, mean, cls, last, got 'max'"),
        (("bert.gguf", "-p", "a", "--pooling", "none", "--similarity"), "use mean, cls or last"),
        (("bert.gguf", "-p", "a " * 300), "the context holds 256 tokens, got a text of 600 characters"),
        (("bert.gguf", "-f", "empty.txt"), "has none; give some with -p"),
        (("bert.gguf", "-p", "a", "-o", "no/where.npy"), "there is no folder"),
    ],
)
def test_what_can_not_be_done_is_said(graphrt: Run, folder: Path, argv: tuple[str, ...], message: str) -> None:
    (folder / "empty.txt").write_text("\n \n")
    result = graphrt("embed", *argv)
    assert result.code == 2 and result.out == "" and message in result.err and result.err.count("\n") <= 3


def test_other_verbs_on_an_encoder(graphrt: Run) -> None:
    info = json.loads(graphrt("info", "bert.gguf", "--json").out)["needs"]
    assert info["runs"] and info["cache_bytes"] == 0 and info["ops"]["FLASH_ATTN_VARLEN"] == 2
    assert "prefill of 9 tokens" in graphrt("dump", "bert.gguf", "--tokens", "9").out
    assert "have no decode" in graphrt("dump", "bert.gguf", "--phase", "decode").err
    assert "the plan is sound" in graphrt("memory", "nomic-bert.gguf").out
    for verb, more in (("run", ("-p", "a")), ("logits", ("--tokens", "1", "-o", "l.npy")), ("trace", ("-p", "a"))):
        result = graphrt(verb, "bert.gguf", *more)
        assert result.code == 2 and "bert models are encoders" in result.err
    assert [t["piece"] for t in json.loads(graphrt("tokenize", "bert.gguf", "-p", "hello", "--json").out)][
        1
    ] == " hello"


def test_decoders_under_other_verbs(graphrt: Run) -> None:
    assert json.loads(graphrt("info", "mpt.gguf", "--json").out)["needs"]["ops"]["CLAMP"] == 2
    assert graphrt("run", "mpt.gguf", "-p", "hello", "-n", "3", "--temp", "0", "-c", "32").code == 0
    assert "ALiBi" not in graphrt("dump", "mpt.gguf").err and graphrt("memory", "mpt.gguf").code == 0
