"""/completion and /infill, llama-server's own routes: their form, their names, and the texts of OpenAI's route."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
from support.served import Served
from support.tiny import write_model

from graphrt.models import load
from graphrt.models.sampling_params import SamplerParams
from graphrt.tools.serve.errors import ApiError
from graphrt.tools.serve.infill import Chunk, Infill
from graphrt.tools.serve.schemas import CompletionRequest
from graphrt.tools.serve.schemas_native import InfillRequest
from graphrt.tools.serve.texts import Maker

TEXT = "hello the sea"
TEXTS = "/v1/completions"


@pytest.fixture
def http(served: Served) -> httpx2.Client:
    return httpx2.Client(base_url=served.url, timeout=60)


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def made(http: httpx2.Client, **body: Any) -> Any:
    answer = http.post("/completion", json={"prompt": TEXT, "n_predict": 6, **body})
    assert answer.status_code == 200, (body, answer.text)
    return answer.json()


def plain(http: httpx2.Client, **body: Any) -> Any:
    return http.post(TEXTS, json={"prompt": TEXT, "max_tokens": 6, **body}).json()


def test_an_answer_is_that_of_openais_route(http: httpx2.Client) -> None:
    wanted = plain(http)
    found = made(http, return_tokens=True, seed=7)
    assert found["content"] == wanted["choices"][0]["text"] and len(found["tokens"]) == 6
    assert (found["stop"], found["stop_type"], found["stopping_word"]) == (True, "limit", "")
    assert (found["tokens_predicted"], found["tokens_evaluated"]) == (6, wanted["usage"]["prompt_tokens"])
    assert found["prompt"] == f"<s> {TEXT}" and found["has_new_line"] is False and found["truncated"] is False
    assert (
        found["generation_settings"] | {"n_predict": 6, "seed": 7, "temperature": 0.0} == found["generation_settings"]
    )
    told = found["timings"]
    assert told["predicted_n"] == 6 and told["prompt_n"] + told["cache_n"] == found["tokens_evaluated"]
    assert told["prompt_ms"] > 0 and told["predicted_ms"] > 0 and told["predicted_per_second"] > 0
    assert (
        made(http)["tokens"] == [] and http.post("/completions", json={"prompt": TEXT, "n_predict": 1}).json()["stop"]
    )


def test_the_rate_is_that_of_steps_behind_the_first_token(http: httpx2.Client) -> None:
    alone = made(http, n_predict=1)["timings"]
    assert alone["predicted_n"] == 1 and alone["predicted_per_second"] == alone["predicted_per_token_ms"] == 0
    told = made(http, n_predict=9)["timings"]
    assert told["predicted_per_second"] == pytest.approx(1000 * 8 / told["predicted_ms"])


def test_probabilities_of_what_tokens_were_drawn_from(http: httpx2.Client) -> None:
    """Those that samplers left, together 1; of the likeliest token alone 1."""
    asked: dict[str, Any] = {"n_probs": 5, "post_sampling_probs": True, "seed": 3}
    found = made(http, temperature=0.9, top_k=4, min_p=0, top_p=1, **asked)
    plain = made(http, temperature=0.9, top_k=4, min_p=0, top_p=1, n_probs=5, seed=3)
    assert found["content"] == plain["content"]
    for each, before in zip(found["completion_probabilities"], plain["completion_probabilities"]):
        probs = [best["prob"] for best in each["top_probs"]]
        assert len(probs) == 4 and sum(probs) == pytest.approx(1) and probs == sorted(probs)[::-1]
        assert each["prob"] in probs and "logprob" not in each and "top_logprobs" not in each
        own = {best["id"]: best["logprob"] for best in before["top_logprobs"]}
        weights = [np.exp(own[best["id"]] / 0.9) for best in each["top_probs"]]
        np.testing.assert_allclose(probs, np.array(weights) / sum(weights), rtol=1e-4)
    for each in made(http, temperature=0, **asked)["completion_probabilities"]:
        assert each["prob"] == 1 and [(best["id"], best["prob"]) for best in each["top_probs"]] == [(each["id"], 1)]


def test_why_a_text_ended(http: httpx2.Client) -> None:
    text = made(http, n_predict=12)["content"]
    at = text.index(text[6])
    for stop, end in ((text[at], at), (text[at - 1 : at + 1], at - 1)):  # of two that end at once the longer one counts
        stopped = made(http, n_predict=12, stop=["never", text[at], stop])
        assert (stopped["content"], stopped["stop_type"], stopped["stopping_word"]) == (text[:end], "word", stop)
    form = made(http, n_predict=-1, grammar='root ::= "sea" "\\n"')
    assert (form["content"], form["stop_type"], form["has_new_line"]) == ("sea\n", "eos", True)
    silent = made(http, n_predict=0, return_tokens=True, n_probs=1)
    assert (silent["content"], silent["tokens"], silent["tokens_predicted"]) == ("", [], 0)


def test_streams_tell_each_token(http: httpx2.Client) -> None:
    whole = made(http, n_probs=3)
    body = {"prompt": TEXT, "n_predict": 6, "n_probs": 3, "stream": True}
    lines = [line for line in http.post("/completion", json=body).text.split("\n\n") if line]
    *going, last = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert "".join(each["content"] for each in going) == whole["content"] and last["content"] == ""
    assert not any(each["stop"] for each in going) and last["stop"] is True and last["tokens_predicted"] == 6
    assert [each["tokens_predicted"] for each in going] == [1, 2, 3, 4, 5, 6]
    told = [each["completion_probabilities"][0] for each in going]
    assert told == whole["completion_probabilities"] and "completion_probabilities" not in last
    for each in told:
        assert (
            len(each["top_logprobs"]) == 3
            and each["logprob"] <= 0
            and bytes(each["bytes"]).decode("utf-8", "replace") == each["token"]
        )
        assert each["top_logprobs"][0]["id"] == each["id"]


def test_prompts_of_every_kind(http: httpx2.Client) -> None:
    ids = http.post("/tokenize", json={"content": TEXT, "add_special": True}).json()["tokens"]
    text = made(http)["content"]
    several = made(http, prompt=[TEXT, ids, {"prompt_string": TEXT}, [*ids[:-1], ids[-1]]])
    assert [each["content"] for each in several] == [text] * 4 and [each["index"] for each in several] == [0, 1, 2, 3]
    assert made(http, prompt=ids)["content"] == made(http, prompt={"prompt_string": TEXT})["content"] == text
    mixed = made(http, prompt=[*ids, "a", ids[-1]])
    assert mixed["prompt"] == f"<s> {TEXT} a{http.post('/detokenize', json={'tokens': ids[-1:]}).json()['content']}"
    assert made(http, prompt=["a", "he"])[1]["prompt"] == "<s> he"


def test_what_is_chosen_of_an_answer(http: httpx2.Client) -> None:
    assert made(http, rep_pen_range=5, samplers=["top_k"], nothing=1)["content"] == made(http)["content"]
    found = made(http, response_fields=["content", "generation_settings/n_predict", "nothing/at/all"])
    assert found == {"content": made(http)["content"], "generation_settings/n_predict": 6}


def test_biases_by_text(http: httpx2.Client) -> None:
    (token,) = http.post("/tokenize", json={"content": "a"}).json()["tokens"]
    for bias in ({"a": 1000}, {str(token): 1000}, [["a", 1000]]):
        assert made(http, n_predict=3, logit_bias=bias)["content"] == " a" * 3
    assert " a" not in made(http, n_predict=3, logit_bias={"a": False})["content"]


def test_a_full_context(http: httpx2.Client) -> None:
    found = made(http, prompt=[7] * 4090, n_predict=-1, ignore_eos=True)
    assert (found["truncated"], found["stop_type"]) == (True, "limit")
    assert found["tokens_evaluated"] + found["tokens_predicted"] >= 4096


def test_a_text_between_two_others(http: httpx2.Client, client: openai.OpenAI, tiny: Path) -> None:
    """By a prompt whose tokens stand around what is before and what is behind."""
    encode = load(tiny, "cpu").tokenizer.encode
    pre, suf, mid, rep, sep = range(4, 9)
    around, longer = (
        [pre, *encode(text, False), suf, *encode(" sea", False), mid] for text in ("the <s>", "the <s>he")
    )
    wanted = made(http, prompt=[1, *longer], return_tokens=True)
    asked: dict[str, Any] = {"input_prefix": "the <s>", "input_suffix": " sea", "n_predict": 6, "return_tokens": True}
    found = http.post("/infill", json={**asked, "prompt": "he", "nothing": 1})
    assert found.status_code == 200 and found.json()["tokens"] == wanted["tokens"]
    extra = [{"filename": "a", "text": "in\n"}, {"text": "we", "time": 5}]
    file, project = (encode(text, False) for text in ("filename\n", "myproject\n"))
    chunks = [sep, *encode("a\nin\n", False), sep, *encode("tmp\nwe", False), sep, *file]
    wanted = made(http, prompt=[1, rep, *project, *chunks, *around], return_tokens=True)
    told = http.post("/infill", json={**asked, "input_extra": extra}).json()
    assert (told["tokens"], told["prompt"]) == (wanted["tokens"], wanted["prompt"])
    # OpenAI's name, of prompts as texts and ids
    wanted = plain(http, prompt=[[1, *around], [1, pre, suf, *encode(" sea", False), mid]])["choices"]
    for prompts in (["the <s>", ""], [encode("the <s>", False), ""]):
        completed = client.completions.create(model="tiny", prompt=prompts, suffix=" sea", max_tokens=6)
        assert [choice.text for choice in completed.choices] == [choice["text"] for choice in wanted]
    for body, param in (
        ({"input_prefix": "a"}, "input_suffix"),
        ({"input_suffix": "a"}, "input_prefix"),
        ({**asked, "input_extra": [{}]}, "input_extra[0].text"),
        ({**asked, "input_extra": [{"text": "a", "filename": 5}]}, "input_extra[0].filename"),
        ({**asked, "input_prefix": "sea " * 5000}, "prompt"),
    ):
        answer = http.post("/infill", json=body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_vocabularies_without_tokens_for_the_middle(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", "llama", tokenizer="spm", vocab={"fim_suf_token_id": 5})
    maker = Maker(load(path, "cpu"), SamplerParams(), 128)
    with pytest.raises(ApiError, match="none for the prefix and the middle") as refused:
        maker.infill(InfillRequest(input_prefix="a", input_suffix="b"), "")
    assert (refused.value.status, refused.value.param) == (400, "input_prefix")
    with pytest.raises(ApiError) as refused:
        maker.completion(CompletionRequest(prompt="a", suffix="b"), "")
    assert refused.value.param == "suffix"
    assert maker.completion(CompletionRequest(prompt="a", suffix=""), "")


def test_chunks_without_tokens_for_files(tiny: Path) -> None:
    """They come first, as they are."""
    tokenizer = load(tiny, "cpu").tokenizer
    tokenizer.fim = {role: tokenizer.fim[role] for role in ("pre", "suf", "mid")}
    found = Infill(tokenizer, 99, "").prompt("a", "", [Chunk("f", "sea")])
    assert found == [1, *tokenizer.encode("sea", False), 4, *tokenizer.encode("a", False), 5, 6]


def test_what_is_wrong(http: httpx2.Client) -> None:
    for body, param in (
        ({"prompt": [5, [6]]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [9999]}, "prompt"),
        ({"n_predict": -2}, "n_predict"),
        ({"n_probs": 21}, "n_probs"),
        ({"logit_bias": {"a": "b"}}, "logit_bias"),
        ({"post_sampling_probs": True, "n_probs": 2, "mirostat": 2}, "post_sampling_probs"),
    ):
        answer = http.post("/completion", json={"prompt": TEXT, **body})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] in (param, None), answer.text


def test_addresses_without_v1(http: httpx2.Client, served: Served) -> None:
    client = openai.OpenAI(base_url=served.url, api_key="none", max_retries=0)
    asked: Any = [{"role": "user", "content": TEXT}]
    found = client.chat.completions.create(model="tiny", messages=asked, max_tokens=4)
    wanted = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none").chat.completions.create(
        model="tiny", messages=asked, max_tokens=4
    )
    assert found.choices == wanted.choices
    assert client.models.retrieve("tiny").id == "tiny" and [model.id for model in client.models.list()] == ["tiny"]
    assert client.responses.create(model="tiny", input=TEXT, max_output_tokens=3).output_text
    assert len(client.embeddings.create(model="tiny", input=TEXT).data) == 1


def test_times_are_told_where_they_are_asked_for(http: httpx2.Client) -> None:
    known = [made(http, prompt="the loan in the lane " * 20)["timings"] for _ in range(2)]
    assert (
        known[0]["cache_n"] == 0 < known[1]["cache_n"]
        and known[1]["prompt_n"] == known[0]["prompt_n"] - known[1]["cache_n"]
    )
    assert "timings" not in plain(http)
    assert plain(http, timings_per_token=True, n=2)["timings"]["predicted_n"] == 12
    body = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 4, "timings_per_token": True, "stream": True}
    asked: dict[str, Any] = {"input": TEXT, "max_output_tokens": 4, "timings_per_token": True}
    assert http.post("/v1/responses", json=asked).json()["timings"]["predicted_n"] == 4
    ended = http.post("/v1/responses", json={**asked, "stream": True}).text.strip().split("data: ")[-1]
    assert json.loads(ended)["timings"]["predicted_n"] == 4
    lines = http.post("/v1/chat/completions", json={**body, "stream_options": {"include_usage": True}}).text.split(
        "\n\n"
    )
    last = json.loads(lines[-3].removeprefix("data: "))
    assert last["choices"] == [] and last["timings"]["predicted_n"] == 4 and last["usage"]["completion_tokens"] == 4


def test_counted_prompts(http: httpx2.Client) -> None:
    talk = {"messages": [{"role": "user", "content": TEXT}]}
    n = http.post("/v1/chat/completions", json=talk | {"max_tokens": 1}).json()["usage"]["prompt_tokens"]
    assert http.post("/chat/completions/input_tokens", json=talk).json()["input_tokens"] == n
    found = http.post("/v1/responses/input_tokens", json={"input": TEXT}).json()
    assert found == {"object": "response.input_tokens", "input_tokens": n}
    assert http.post("/v1/chat/completions/input_tokens", json=talk | {"model": "other"}).status_code == 404


def test_invocations_are_what_their_fields_say(http: httpx2.Client) -> None:
    talk = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 4}
    for path, body in (
        ("/v1/chat/completions", talk), (TEXTS, {"prompt": TEXT, "max_tokens": 4}), ("/v1/embeddings", {"input": TEXT}),
    ):  # fmt: skip
        plain, invoked = (http.post(where, json=body).json() for where in (path, "/invocations"))
        key = "data" if path == "/v1/embeddings" else "choices"
        assert plain["object"] == invoked["object"] and plain[key] == invoked[key]
    streamed = http.post("/invocations", json=talk | {"stream": True}).text
    assert streamed.endswith("[DONE]\n\n") and "chat.completion.chunk" in streamed
    for content in (b"{", b"[1]", b"{}", b"[" * 10000):
        answer = http.post("/invocations", content=content)
        assert answer.status_code == 400 and "error" in answer.json()
