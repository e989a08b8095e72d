"""A server whose model has adapters, and another model for vectors: requests name what they want."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from support import tiny_archs as tiny_archs
from support.adapters import merge, write_adapter
from support.tiny import write_model
from support.verbs import Verb

from graphrt.errors import SessionError
from graphrt.models import Model, load
from graphrt.models.engine import SessionOptions
from graphrt.models.sampling_params import SamplerParams
from graphrt.tools.cli import verb_parser
from graphrt.tools.serve.adapters import ServedAdapters
from graphrt.tools.serve.app import application
from graphrt.tools.serve.state import State
from graphrt.tools.verbs import serve

PROMPT = [5, 9, 20, 33, 7]
Http = httpx2.AsyncClient


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base.gguf, and its adapters one.gguf and two.gguf; vectors.gguf, an encoder."""
    path = tmp_path_factory.mktemp("adapters")
    model = load(write_model(path / "base.gguf", "llama", tokenizer="spm"), "cpu", exact=True)
    write_adapter(path / "one.gguf", model)
    write_adapter(path / "two.gguf", model, seed=1, rank=2)
    write_model(path / "vectors.gguf", "bert")
    return path


def state_of(folder: Path, *flags: str) -> State:
    lora = ["--lora", f"{folder / 'one.gguf'}", "--lora-scaled", f"{folder / 'two.gguf'}=second:0.5"]
    given = [str(folder / "base.gguf"), "--exact", "--backend", "cpu", "-np", "3", "-c", "128", *lora, *flags]
    args = verb_parser("serve", serve).parse_args(given)
    return serve.made_state(serve.load_model(args, True), args, SamplerParams(temp=0.0))


def asked(state: State, work: Callable[[Http], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        app = application(state)
        async with (
            app.router.lifespan_context(app),
            Http(transport=httpx2.ASGITransport(app), base_url="http://x") as http,
        ):
            return await work(http)

    return asyncio.run(run())


def expected(folder: Path, one: float, two: float, n: int = 10) -> list[int]:
    """The tokens of the model with so much of each adapter merged in."""
    model = load(folder / "base.gguf", "cpu", exact=True)
    changes = [(scale, added(model, folder / name)) for scale, name in ((one, "one.gguf"), (two, "two.gguf"))]
    session = merge(model, changes).session(SessionOptions(n_ctx=128))
    logits, found = session.eval(PROMPT), list[int]()
    while len(found) < n:
        found.append(int(logits.argmax()))
        logits = session.eval(found[-1:])
    return found


def added(model: Model, path: Path) -> Any:
    seed, rank = (0, 4) if path.stem == "one" else (1, 2)
    return write_adapter(path.with_suffix(".again"), model, seed=seed, rank=rank)


async def tokens(http: Http, **fields: Any) -> list[int]:
    body = {"prompt": PROMPT, "max_tokens": 10, "ignore_eos": True, "logprobs": 0, **fields}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["logprobs"]["tokens"]  # type: ignore[no-any-return]


def test_requests_have_adapters_of_their_own(folder: Path) -> None:
    state = state_of(folder)
    ways: list[tuple[dict[str, Any], tuple[float, float]]] = [
        ({}, (1.0, 0.5)),
        ({"model": "base"}, (1.0, 0.5)),
        ({"model": "base:second"}, (0.0, 1.0)),
        ({"model": "base:one"}, (1.0, 0.0)),
        ({"model": "second"}, (0.0, 1.0)),
        ({"lora": []}, (0.0, 0.0)),
        ({"lora": [{"id": 1, "scale": -2.0}]}, (0.0, -2.0)),
        ({"lora": [{"id": 1, "scale": 1}, {"id": 0, "scale": 0.25}]}, (0.25, 1.0)),
    ]

    async def work(http: Http) -> Any:
        found = await asyncio.gather(*(tokens(http, **fields) for fields, _ in ways))
        known = (await http.get("/lora-adapters")).json()
        assert (await http.post("/lora-adapters", json=[{"id": 1, "scale": 2}])).json() == {"success": True}
        later = await tokens(http), (await http.get("/lora-adapters")).json()
        bad = [
            await http.post("/v1/completions", json={"prompt": "a", **fields})
            for fields in (
                {"lora": [{"id": 2, "scale": 1}]}, {"lora": [{"id": 0, "scale": 1}] * 2},
                {"lora": [{"id": 0, "scale": 1e9}]}, {"lora": [], "model": "base:one"}, {"model": "base:three"},
            )
        ]  # fmt: skip
        bad.append(await http.post("/lora-adapters", json=[{"id": -1, "scale": 1}]))
        names = [each["id"] for each in (await http.get("/v1/models")).json()["data"]]
        return found, known, later, bad, names

    found, known, (later, changed), bad, names = asked(state, work)
    tokenizer = state.model.tokenizer
    said = [[tokenizer.piece(i).decode("utf-8", "replace") for i in expected(folder, *scales)] for _, scales in ways]
    assert found == said and len({tuple(one) for one in said}) == 6, "they differ, and each is its own"
    assert later == [tokenizer.piece(i).decode("utf-8", "replace") for i in expected(folder, 0.0, 2.0)]
    assert [(row["id"], row["name"], row["scale"]) for row in known] == [(0, "one", 1.0), (1, "second", 0.5)]
    assert str(folder) not in str(known) and [row["scale"] for row in changed] == [0.0, 2.0]
    assert [answer.status_code for answer in bad] == [400, 400, 400, 400, 404, 400]
    assert [answer.json()["error"]["param"] for answer in bad] == ["lora"] * 4 + ["model", "lora"]
    assert names == ["base", "one", "second"]


def test_a_model_for_vectors_beside_it(folder: Path) -> None:
    state = state_of(folder, "--embedding-model", str(folder / "vectors.gguf"), "--pooling", "mean",
                     "--lora-init-without-apply")  # fmt: skip
    assert state.maker is not None and state.maker.adapters is not None and state.maker.adapters.usual == (0.0, 0.0)

    async def work(http: Http) -> Any:
        models: list[dict[str, str]] = [{}, {"model": "vectors"}, {"model": "base"}]
        vectors = [await http.post("/v1/embeddings", json={"input": [PROMPT], **model}) for model in models]
        text = await http.post("/v1/completions", json={"prompt": "a", "model": "vectors"})
        known = await http.get("/v1/models/vectors")
        lost = await http.post("/v1/embeddings", json={"input": [PROMPT], "model": "other"})
        return vectors, text, known, lost

    vectors, text, known, lost = asked(state, work)
    rows = [answer.json()["data"][0]["embedding"] for answer in vectors]
    for row, name in zip(rows, ("vectors", "vectors", "base")):
        model = load(folder / f"{name}.gguf", "cpu", exact=True)
        np.testing.assert_allclose(row, model.embed([PROMPT], "mean")[0], atol=1e-6)
    assert [answer.json()["model"] for answer in vectors] == ["vectors", "vectors", "base"]
    assert text.status_code == 400 and text.json()["error"]["param"] == "model"
    assert known.json()["meta"]["arch"] == "bert" and lost.status_code == 404
    with pytest.raises(SessionError, match="names of their own"):
        state_of(folder, "--embedding-model", str(folder / "base.gguf"), "--pooling", "mean")


def test_run_has_them_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verb = Verb(capsys)
    plain = ["run", folder / "base.gguf", "-p", "hello the sea", "--raw", "--json", "--temp", 0, "-n", 8, "--exact"]
    made = verb(*plain, "--backend", "cpu", "--ignore-eos", "--lora-scaled", f"{folder / 'one.gguf'}:0.5").json()
    model = load(folder / "base.gguf", "cpu", exact=True)
    session = merge(model, [(0.5, added(model, folder / "one.gguf"))]).session(SessionOptions(n_ctx=128))
    logits = session.eval(made["prompt_tokens"])
    for token in made["tokens"]:
        best = np.argsort(logits)[::-1]
        assert token == next(i for i in best if not model.tokenizer.is_eog(int(i)))
        logits = session.eval([token])
    assert verb(*plain, "--lora-scaled", f"{folder / 'one.gguf'}:x").code == 2
    assert verb(*plain, "--lora", f"{folder / 'one.gguf'}", "--lora", f"{folder / 'one.gguf'}").code == 2


def test_an_adapter_of_the_models_name_is_called_with_it() -> None:
    adapters = ServedAdapters(["one", "base"], ["one", "two"], (1.0, 1.0))
    assert adapters.as_models == {"two": 1, "one:one": 0, "base:one": 0, "one:two": 1, "base:two": 1}
    assert adapters.listed == ["one:one", "two"]


def test_a_model_of_any_name(folder: Path) -> None:
    state = state_of(folder, "--alias", "mine, *")
    assert state.names == ["mine"] and state_of(folder, "--alias", "*").names == ["base"]

    async def work(http: Http) -> Any:
        found = [await tokens(http, model=model) for model in ("mine", "claude-opus", "one")]
        return found, [each["id"] for each in (await http.get("/v1/models")).json()["data"]]

    (own, other, one), names = asked(state, work)
    assert own == other != one and names == ["mine", "one", "second"]
