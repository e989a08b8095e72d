"""`graphrt serve` as a process: what clients get, what is refused and how, and what is left when they have gone."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import numpy as np
import openai
import pytest
from support.served import Served
from support.soak import is_quiet
from support.verbs import Verb

from graphrt.models import load
from graphrt.models.sampling_params import SamplerParams
from graphrt.tools.cli import verb_parser
from graphrt.tools.serve.app import application
from graphrt.tools.serve.schemas import CompletionRequest
from graphrt.tools.verbs import serve

TEXT = "hello the sea"
USER = [{"role": "user", "content": TEXT}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["t", "he"]}},
    "required": ["a"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "rain", "parameters": SCHEMA}}


@pytest.fixture
def http(served: Served) -> httpx2.Client:
    return httpx2.Client(base_url=served.url, timeout=60)


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def by_run(tiny: Path) -> Callable[..., dict[str, Any]]:
    """What `graphrt run` makes of a prompt."""

    def run(capsys: pytest.CaptureFixture[str], *more: object) -> dict[str, Any]:
        found: dict[str, Any] = Verb(capsys)("run", tiny, "--json", "--temp", 0, "--backend", "cpu", *more).json()
        return found

    return run


def eventually(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end, "it becomes true within a minute"
        time.sleep(0.02)


# ---- answers ----


def test_greedy_answers_are_those_of_run(
    client: openai.OpenAI, by_run: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    raw, chat = by_run(capsys, "-p", TEXT, "--raw", "-n", 24), by_run(capsys, "-p", TEXT, "-n", 24)
    completed = client.completions.create(model="tiny", prompt=TEXT, max_tokens=24)
    answered = client.chat.completions.create(model="tiny", messages=USER, max_tokens=24)  # type: ignore[arg-type]
    assert completed.choices[0].text == raw["text"]
    assert answered.choices[0].message.content == chat["text"]
    assert completed.usage is not None and answered.usage is not None
    assert completed.usage.prompt_tokens == len(raw["prompt_tokens"])
    assert answered.usage.prompt_tokens == len(chat["prompt_tokens"])
    assert completed.usage.completion_tokens == 24 and completed.choices[0].finish_reason == "length"
    again = client.completions.create(model="tiny", prompt=raw["prompt_tokens"], max_tokens=24)
    assert again.choices[0].text == raw["text"]


def test_streams_make_the_same_texts(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="tiny", messages=USER, max_tokens=20, n=2, seed=5, temperature=1.2,
                                           logprobs=True, top_logprobs=2)  # type: ignore[arg-type]  # fmt: skip
    stream = client.chat.completions.create(
        model="tiny", messages=USER, max_tokens=20, n=2, seed=5, temperature=1.2, logprobs=True, top_logprobs=2,
        stream=True, stream_options={"include_usage": True},
    )  # type: ignore[call-overload]  # fmt: skip
    texts, tokens, ends, usage = ["", ""], [0, 0], {}, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            tokens[choice.index] += len(choice.logprobs.content) if choice.logprobs else 0
            ends[choice.index] = choice.finish_reason or ends.get(choice.index)
    assert texts == [choice.message.content for choice in whole.choices] and texts[0] != texts[1]
    assert ends == {i: choice.finish_reason for i, choice in enumerate(whole.choices)}
    assert usage is not None and whole.usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    told = [choice.logprobs.content for choice in whole.choices if choice.logprobs]
    assert tokens == list(map(len, told)) and all(len(t.top_logprobs) == 2 for one in told for t in one)


def test_fields_of_completions(client: openai.OpenAI, http: httpx2.Client) -> None:
    plain = client.completions.create(model="tiny", prompt=TEXT, max_tokens=12).choices[0].text
    stop = plain[5:7]
    stopped = client.completions.create(model="tiny", prompt=TEXT, max_tokens=12, stop=stop).choices[0]
    assert stopped.text == plain[: plain.index(stop)] and stopped.finish_reason == "stop"
    echoed = client.completions.create(model="tiny", prompt=[TEXT, "a"], max_tokens=3, echo=True, n=2)
    assert [c.text.startswith(p) for c, p in zip(echoed.choices, [TEXT, TEXT, "a", "a"])] == [True] * 4
    token = http.post("/tokenize", json={"content": TEXT}).json()["tokens"][0]
    biased = client.completions.create(
        model="tiny", prompt=TEXT, max_tokens=3, logit_bias={str(token): 100}, logprobs=1
    )
    assert biased.choices[0].logprobs is not None and len(set(biased.choices[0].logprobs.tokens or ())) == 1
    varied = {"frequency_penalty": 2.0, "presence_penalty": 1.0}
    unlike = client.completions.create(model="tiny", prompt=TEXT, max_tokens=12, logit_bias={str(token): 2}, **varied)
    assert unlike.choices[0].text != plain


def test_the_best_of_several(client: openai.OpenAI) -> None:
    """By the mean log-probability of their tokens, of each prompt by itself; all count."""
    asked: dict[str, Any] = {
        "model": "tiny", "prompt": [TEXT, "a"], "max_tokens": 8, "seed": 3, "temperature": 1.5,
        "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    every = client.completions.create(**asked, n=5, logprobs=0)
    assert every.usage is not None and len({choice.text for choice in every.choices}) == 10
    means = [np.mean(choice.logprobs.token_logprobs) for choice in every.choices if choice.logprobs]
    best = [sorted(range(first, first + 5), key=lambda i: -means[i])[:2] for first in (0, 5)]
    wanted = [every.choices[i].text for i in [*best[0], *best[1]]]
    assert best[0] != [0, 1]  # the first ones are not the best
    for more in ({}, {"logprobs": 1}):
        found = client.completions.create(**asked, n=2, best_of=5, **more)
        assert [choice.text for choice in found.choices] == wanted and found.usage is not None
        assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
        assert [choice.logprobs is not None for choice in found.choices] == [bool(more)] * 4
        assert found.usage.completion_tokens == every.usage.completion_tokens
    echoed = client.completions.create(**asked, best_of=2, echo=True)
    assert [choice.text.startswith(prompt) for choice, prompt in zip(echoed.choices, asked["prompt"])] == [True] * 2


def test_log_probabilities_of_prompts(http: httpx2.Client, client: openai.OpenAI, tiny: Path) -> None:
    """By the logits of all of a prompt's tokens, read at once; what the cache knows of it is read anew."""
    ids = http.post("/tokenize", json={"content": "the hello in a sea " * 40, "add_special": True}).json()["tokens"]
    http.post(TEXTS, json={"prompt": ids, "max_tokens": 1})
    asked: dict[str, Any] = {"model": "tiny", "prompt": ids, "echo": True, "logprobs": 2}
    found = client.completions.create(**asked, max_tokens=0).choices[0].logprobs
    rows = load(tiny, "cpu").logits(ids).astype(np.float64)
    rows -= np.log(np.exp(rows - rows.max(1, keepdims=True)).sum(1, keepdims=True)) + rows.max(1, keepdims=True)
    assert found is not None and found.token_logprobs is not None and found.top_logprobs is not None
    assert len(found.tokens or ()) == len(ids) > 128 and found.token_logprobs[0] is None is found.top_logprobs[0]
    wanted = [row[token] for row, token in zip(rows, ids[1:])]
    np.testing.assert_allclose(found.token_logprobs[1:], wanted, atol=1e-4)
    for best, row, token in zip(found.top_logprobs[1:], rows, found.tokens[1:]):  # type: ignore[index]
        assert token in best and max(best.values()) == pytest.approx(row.max(), abs=1e-4)
    # with tokens behind them, of two choices, in a stream
    whole = client.completions.create(**asked, max_tokens=3, n=2, seed=1, temperature=1.5)
    texts, told = ["", ""], [[], []]  # type: ignore[var-annotated]
    for chunk in client.completions.create(**asked, max_tokens=3, n=2, seed=1, temperature=1.5, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
        told[chunk.choices[0].index] += zip(*(chunk.choices[0].logprobs or {"a": ()}).__dict__.values())
    for i, choice in enumerate(whole.choices):
        assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
        assert texts[i] == choice.text and told[i] == [*zip(*choice.logprobs.__dict__.values())]
        assert choice.logprobs.token_logprobs[: len(ids)] == found.token_logprobs
        assert len(choice.logprobs.token_logprobs) == len(ids) + 3
    # where each token stands in the text, which has not the space that a prompt's first word begins with
    one = http.post(
        TEXTS, json={"prompt": TEXT, "echo": True, "max_tokens": 4, "logprobs": 0, "temperature": 0}
    ).json()["choices"][0]
    tokens, offsets = one["logprobs"]["tokens"], one["logprobs"]["text_offset"]
    assert [one["text"][at : at + len(token)] for at, token in zip(offsets[2:], tokens[2:])] == tokens[2:]
    assert offsets[:2] == [0, 0] and tokens[:2] == ["<s>", " hello"]
    silent = http.post(TEXTS, json={"prompt": TEXT, "echo": True, "max_tokens": 0}).json()
    assert silent["choices"][0]["text"] == TEXT and silent["usage"]["completion_tokens"] == 0


def test_texts_of_a_form(client: openai.OpenAI, http: httpx2.Client) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    found = client.chat.completions.create(model="tiny", messages=USER, max_tokens=90, response_format=form)  # type: ignore[arg-type]
    assert json.loads(found.choices[0].message.content or "")["a"] in ("t", "he")
    for field, value in ("regex", "(hello|sea){2}"), ("grammar", 'root ::= ("hello" | "sea") ("hello" | "sea")'):
        body = {"prompt": TEXT, "max_tokens": 30, field: value}
        text = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        assert re.fullmatch("(hello|sea){2}", text)


@pytest.mark.parametrize("choice", ["required", "rain", {"type": "function", "function": {"name": "rain"}}])
def test_calls_of_tools(client: openai.OpenAI, http: httpx2.Client, choice: Any) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": USER, "tools": [WEATHER], "tool_choice": choice}
    found = client.chat.completions.create(**asked, max_tokens=120).choices[0]
    assert found.finish_reason == "tool_calls" and found.message.content is None
    call = found.message.tool_calls[0]
    assert call.function.name == "rain" and json.loads(call.function.arguments)["a"] in ("t", "he")
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**asked, max_tokens=120, stream=True)]
    assert not any(delta.content is not None for delta in deltas)
    (name, *arguments), first = [call for delta in deltas for call in delta.tool_calls or ()], deltas[0]
    assert first.role == "assistant" and not any(delta.content for delta in deltas)
    assert (name.index, name.id[:5], name.type, name.function.name) == (0, "call_", "function", "rain")
    assert name.function.arguments == "" and len(arguments) > 3  # they come as they are made
    assert all((each.index, each.id, each.function.name) == (0, None, None) for each in arguments)
    assert "".join(each.function.arguments for each in arguments) == call.function.arguments
    with client.chat.completions.stream(**asked, max_tokens=120) as stream:
        kinds = [event.type for event in stream]
        (gathered,) = stream.get_final_completion().choices[0].message.tool_calls
    assert gathered.function.arguments == call.function.arguments and gathered.function.name == "rain"
    assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds
    usage = client.chat.completions.create(**asked, max_tokens=120).usage
    part = client.chat.completions.create(**asked, max_tokens=usage.completion_tokens - 4).choices[0]
    (cut_call,) = part.message.tool_calls
    assert part.finish_reason == "length" and call.function.arguments.startswith(cut_call.function.arguments)
    cut = client.chat.completions.create(**asked, max_tokens=3).choices[0]
    assert (cut.finish_reason, cut.message.content, cut.message.tool_calls) == ("length", "", None)
    turn = [*USER, {"role": "assistant", "tool_calls": [call.model_dump()]}, {"role": "tool", "content": "wet"}]
    turn[0] = {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}
    prompt = http.post("/apply-template", json={"messages": turn, "tools": [WEATHER]}).json()["prompt"]
    assert "user\none\ntwo<" in prompt
    assert prompt.startswith("rain ") and '"name": "rain"' in prompt and "wet" in prompt


#: Texts with calls of `rain`, by the form that they are written in.
WRITTEN = {
    "Qwen": 'Oh.<tool_call>\\n{"name": "rain", "arguments": {"a": "t"}}\\n</tool_call>\\n<tool_call>{"name": "rain"}',
    "Llama": '{"name": "rain", "parameters": {"a": "he", "b": [1, {}]}}',
    "Mistral": '[{"name": "rain", "arguments": {"a": "t"}}, {"name": "rain", "arguments": {}}]',
    "Qwen3-Coder": "<tool_call><function=rain>\\n<parameter=a>\\nhe\\n</parameter>\\n</function></tool_call>",
    "GLM": "So <tool_call>rain\\n<arg_key>a</arg_key><arg_value>t</arg_value></tool_call>",
}


@pytest.mark.parametrize("form", WRITTEN)
def test_calls_that_a_model_writes_by_itself(client: openai.OpenAI, form: str) -> None:
    """A stream has what an answer has, as a client puts it together, and the arguments as they come."""
    text = WRITTEN[form].replace('"', '\\"')
    asked: dict[str, Any] = {"model": "tiny", "messages": USER, "tools": [WEATHER], "max_tokens": 300}
    asked["extra_body"] = {"grammar": f'root ::= "{text}"'}
    whole = client.chat.completions.create(**asked).choices[0]
    with client.chat.completions.stream(**asked) as stream:
        deltas = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
        gathered = stream.get_final_completion().choices[0]
    calls = whole.message.tool_calls or []
    assert [json.loads(call.function.arguments) for call in calls] and whole.finish_reason == "tool_calls"
    assert gathered.finish_reason == "tool_calls" and (gathered.message.content or None) == whole.message.content
    assert whole.message.content == {"Qwen": "Oh.", "GLM": "So "}.get(form)
    assert [call.function.model_dump(include={"name", "arguments"}) for call in gathered.message.tool_calls or ()] == [
        call.function.model_dump() for call in calls
    ]
    assert "".join(deltas) == "".join(call.function.arguments for call in calls) and len(deltas) > len(calls)


def test_embeddings(client: openai.OpenAI, tiny: Path) -> None:
    texts = [TEXT, "a", "hello " * 40]
    found = client.embeddings.create(model="tiny", input=texts)  # asks for base64
    wanted = load(tiny, "cpu").embed(texts, "mean")
    for row, each in zip(wanted, found.data):
        np.testing.assert_allclose(each.embedding, row, atol=1e-5)
    plain = client.embeddings.create(model="tiny", input="a", encoding_format="float").data[0].embedding
    np.testing.assert_allclose(plain, wanted[1], atol=1e-5)


def test_asynchronous_clients_at_once(served: Served, client: openai.OpenAI) -> None:
    prompts = [
        f"{TEXT} {word}" * (i % 4 + 1)
        for i, word in enumerate(["a", "he", "in", "re", "an", "on", "the", "we", "sea", "hello"])
    ]
    wanted = [client.completions.create(model="tiny", prompt=p, max_tokens=16).choices[0].text for p in prompts]

    async def all_at_once() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as there:
            made = [there.completions.create(model="tiny", prompt=p, max_tokens=16) for p in prompts]
            return [found.choices[0].text for found in await asyncio.gather(*made)]

    assert asyncio.run(all_at_once()) == wanted


def test_a_prompt_that_was_read_is_not_read_again(client: openai.OpenAI) -> None:
    prompt = "the rain in the sea " * 20
    cached = []
    for _ in range(2):
        usage = client.completions.create(model="tiny", prompt=prompt, max_tokens=1).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        cached.append(usage.prompt_tokens_details.cached_tokens)
    assert cached[0] == 0 and cached[1] == (usage.prompt_tokens - 1) // 64 * 64


def test_what_a_server_tells_of_itself(http: httpx2.Client, client: openai.OpenAI) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    assert http.get("/v1/models/tiny").json()["max_model_len"] == 4096
    props = http.get("/props").json()
    assert props["model_path"] == "tiny.gguf" and props["default_generation_settings"]["params"]["temperature"] == 0
    assert props["total_slots"] == 6 and "im_start" in props["chat_template"]
    assert str(Path.home()) not in http.get("/props").text and "/tmp" not in http.get("/props").text
    assert [slot["is_processing"] for slot in http.get("/slots").json()] == [False] * 6
    ids = http.post("/tokenize", json={"content": f"{TEXT}é", "add_special": True}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": ids[1:]}).json()["content"] == f"{TEXT}é"
    for path, said in (
        ("/classify", "gives vectors"), ("/api/chat", "Ollama"), ("/v1/messages/batches", "Anthropic"),
        ("/v1/audio/speech", "text alone"), ("/v1/responses/resp_1", "nothing is stored"), ("/nothing", "docs/"),
    ):  # fmt: skip
        answer = http.post(path, json={})
        assert answer.status_code == 404 and said in answer.json()["error"]["message"]
    pieces = http.post("/tokenize", json={"content": "日\x01", "with_pieces": True}).json()["tokens"]
    assert [p["piece"] for p in pieces][-1] == "\x01"


# ---- what is refused ----

CHATS, TEXTS = "/v1/chat/completions", "/v1/completions"
GOES_ON = {"continue_final_message": True}
WRONG: list[tuple[str, Any, int, str | None]] = [
    (TEXTS, {}, 400, "prompt"),
    (TEXTS, {"prompt": TEXT, "max_tokens": "5"}, 400, "max_tokens"),
    (TEXTS, {"prompt": TEXT, "max_tokens": 0}, 400, "max_tokens"),
    (TEXTS, {"prompt": TEXT, "temprature": 1}, 400, "temprature"),
    (TEXTS, {"prompt": TEXT, "top_p": 1.5}, 400, "top_p"),
    (TEXTS, {"prompt": TEXT, "temperature": -1}, 400, "temperature"),
    (TEXTS, {"prompt": TEXT, "model": "gpt-4"}, 404, "model"),
    (TEXTS, {"prompt": TEXT, "stop": ""}, 400, "stop"),
    (TEXTS, {"prompt": TEXT, "logit_bias": {"x": 1}}, 400, "logit_bias"),
    (TEXTS, {"prompt": TEXT, "logit_bias": {"999999": 1}}, 400, "logit_bias"),
    (TEXTS, {"prompt": TEXT, "suffix": "x", "echo": True}, 400, "suffix"),
    (TEXTS, {"prompt": TEXT, "best_of": 3, "stream": True}, 400, "best_of"),
    (TEXTS, {"prompt": TEXT, "best_of": 2, "n": 3}, 400, "best_of"),
    (CHATS, {"messages": USER, "max_tokens": 0}, 400, "max_tokens"),
    (TEXTS, {"prompt": TEXT, "grammar": "root ::= x"}, 400, "grammar"),
    (TEXTS, {"prompt": TEXT, "regex": "("}, 400, "regex"),
    (TEXTS, {"prompt": TEXT, "regex": "a", "grammar": 'root ::= "a"'}, 400, "grammar"),
    (TEXTS, {"prompt": TEXT, "stream_options": {"include_usage": True}}, 400, "stream_options"),
    (TEXTS, {"prompt": [5, 9999]}, 400, "prompt"),
    (TEXTS, {"prompt": []}, 400, "prompt"),
    (TEXTS, {"prompt": ""}, 400, "prompt"),
    (TEXTS, {"prompt": "sea " * 5000}, 400, "prompt"),
    (CHATS, {"messages": []}, 400, "messages"),
    (CHATS, {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    (CHATS, {"messages": [{"role": "two words", "content": "x"}]}, 400, "messages[0].role"),
    (CHATS, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]},
     400, "messages[0].content[0].type"),
    (CHATS, {"messages": USER, "top_logprobs": 2}, 400, "top_logprobs"),
    (CHATS, {"messages": USER, "n": 1000}, 400, "n"),
    (CHATS, {"messages": USER, "presence_penalty": 2.1}, 400, "presence_penalty"),
    (CHATS, {"messages": USER, "frequency_penalty": -2.1}, 400, "frequency_penalty"),
    (CHATS, {"messages": USER, **GOES_ON, "add_generation_prompt": True}, 400, "continue_final_message"),
    (CHATS, {"messages": [{"role": "assistant", "content": ""}], **GOES_ON}, 400, "messages[0].content"),
    (CHATS, {"messages": USER, "tool_choice": "required"}, 400, "tool_choice"),
    (CHATS, {"messages": USER, "functions": []}, 400, "functions"),
    (CHATS, {"messages": USER, "response_format": {"type": "json_schema"}}, 400, "response_format.json_schema.schema"),
    ("/v1/embeddings", {"input": TEXT, "dimensions": 3}, 400, "dimensions"),
    ("/v1/embeddings", {"input": ""}, 400, "input"),
    ("/detokenize", {"tokens": [9999]}, 400, "tokens"),
    ("/v1/nothing", {}, 404, None),
    ("/health", {}, 405, None),
]  # fmt: skip


def test_what_is_wrong_is_told_by_its_field(http: httpx2.Client) -> None:
    for path, body, status, param in WRONG:
        answer = http.post(path, json=body)
        assert answer.status_code == status, (path, body, answer.text)
        error = answer.json()["error"]
        assert error["param"] == param and error["message"] and error["type"], (path, body, error)
    assert is_quiet(http)


def test_a_field_of_several_types_is_told_what_is_wrong_with_its_own(http: httpx2.Client) -> None:
    for field, value, said in [
        ("prompt", [], "at least 1 item"), ("prompt", [[]], "at least 1 item"), ("prompt", 5, "a valid string"),
        ("stop", ["a"] * 5000, "at most"), ("stop", {"a": 1}, "a valid string"),
    ]:  # fmt: skip
        error = http.post(TEXTS, json={"prompt": TEXT, field: value}).json()["error"]
        assert error["param"].startswith(field) and said in error["message"], (field, error)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"\xff\xfe", b"null", b'{"prompt": NaN}', b'{"prompt": "\\ud800", "max_tokens": 1e999}',
     b"[" * 100_000, b'{"prompt":' * 5000, b'{"prompt": "a", "temperature": Infinity}'],
    ids=range(10),
)  # fmt: skip
def test_bodies_that_are_no_request(http: httpx2.Client, body: bytes) -> None:
    answer = http.post(TEXTS, content=body)
    assert answer.status_code == 400 and answer.json()["error"]["message"]


def test_bodies_as_they_come(http: httpx2.Client) -> None:
    """In chunks, with a mark of their encoding, without a type, and none that is packed."""
    body = json.dumps({"prompt": TEXT, "max_tokens": 2}).encode()
    for given in (body, b"\xef\xbb\xbf" + body, (body[i : i + 3] for i in range(0, len(body), 3))):
        assert http.post(TEXTS, content=given).status_code == 200
    packed = http.post(TEXTS, content=gzip.compress(body), headers={"content-encoding": "gzip"})
    assert packed.status_code == 415 and "Content-Encoding" in packed.json()["error"]["message"]
    assert http.post(TEXTS, content=body, headers={"content-encoding": "identity"}).status_code == 200


def test_a_message_goes_on(http: httpx2.Client) -> None:
    """vLLM's names for what an answer begins with."""
    begun = [*USER, {"role": "assistant", "content": "he is "}]
    prompt = http.post("/apply-template", json={"messages": begun, "add_generation_prompt": False}).json()["prompt"]
    text = prompt.removeprefix("<s>").partition("he is")[0] + "he is"
    wanted = http.post("/completion", json={"prompt": text, "n_predict": 6})
    for more in (GOES_ON, {**GOES_ON, "add_generation_prompt": False}):
        found = http.post(CHATS, json={"messages": begun, "max_tokens": 6, **more}).json()
        assert found["choices"][0]["message"]["content"] == wanted.json()["content"]
        assert (
            found["usage"]["prompt_tokens"]
            < http.post(CHATS, json={"messages": begun, "max_tokens": 1}).json()["usage"]["prompt_tokens"]
        )


def test_pages_of_other_sites_are_refused(http: httpx2.Client) -> None:
    body = {"prompt": TEXT, "max_tokens": 1}
    assert http.post(TEXTS, json=body, headers={"origin": "http://evil.example"}).status_code == 403
    host = urlsplit(str(http.base_url)).netloc
    assert http.post(TEXTS, json=body, headers={"origin": f"http://{host}"}).status_code == 200


# ---- clients that leave ----

LONG = {"prompt": TEXT, "max_tokens": 4000, "ignore_eos": True}


def n_cancelled(http: httpx2.Client) -> int:
    told = http.get("/metrics").text
    found = re.search(r'^graphrt:request_success_total{finished_reason="cancelled"} (\S+)$', told, re.M)
    return int(float(found[1])) if found else 0


def test_a_text_ends_when_its_client_goes(served: Served, http: httpx2.Client) -> None:
    before = n_cancelled(http)
    body = LONG | {"stream": True, "n": 2}
    with httpx2.Client(base_url=served.url, timeout=60) as leaving, leaving.stream("POST", TEXTS, json=body) as answer:
        assert next(answer.iter_lines()).startswith("data: ")
    eventually(lambda: is_quiet(http))
    assert n_cancelled(http) == before + 2
    with pytest.raises(httpx2.TimeoutException):
        httpx2.post(f"{served.url}{TEXTS}", json=LONG, timeout=0.3)
    eventually(lambda: is_quiet(http))
    assert n_cancelled(http) == before + 3


# ---- keys, limits, the end ----


def test_keys_limits_and_the_end(guarded: Served) -> None:
    bare = httpx2.Client(base_url=guarded.url, timeout=60)
    assert bare.get("/health").status_code == 200
    for headers in {}, {"authorization": "Bearer firs"}, {"authorization": "Bearer first2"}, {"x-api-key": ""}:
        answer = bare.get("/v1/models", headers=headers)
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
    for headers in {"authorization": "Bearer first"}, {"x-api-key": "second"}, {"authorization": "bearer third"}:
        (card,) = bare.get("/v1/models", headers=headers).json()["data"]
        assert card["id"] == "mine" and card["aliases"] == ["mine", "ours"]
    http = httpx2.Client(base_url=guarded.url, timeout=60, headers={"authorization": "Bearer first"})
    assert http.get("/v1/models/ours").status_code == 200
    assert http.get("/props").json()["chat_template"].startswith("Listen. ")
    asked = {"messages": [{"role": "user", "content": "hello"}]}
    prompt = http.post("/apply-template", json=asked).json()["prompt"]
    assert prompt.startswith("Listen. [soft]") and "hello" in prompt
    changed = http.post("/apply-template", json=asked | {"chat_template_kwargs": {"tone": "[loud]"}}).json()["prompt"]
    assert changed == prompt.replace("soft", "loud")
    large = http.post(TEXTS, content=json.dumps({"prompt": "a" * 5000}))
    assert large.status_code == 413
    assert http.post(TEXTS, content=(b"x" * 1000 for _ in range(9))).status_code == 413  # that tells no length
    url = urlsplit(guarded.url)
    assert url.hostname and url.port
    with socket.create_connection((url.hostname, url.port)) as slow:
        slow.settimeout(60)
        slow.sendall(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nX-API-Key: first\r\nContent-Length: 9\r\n\r\n{")
        assert slow.recv(64).startswith(b"HTTP/1.1 408")

    async def crowd() -> list[int]:
        async with httpx2.AsyncClient(base_url=guarded.url, timeout=120, headers=http.headers) as there:
            tasks = [asyncio.ensure_future(there.post(TEXTS, json=LONG | {"max_tokens": 300})) for _ in range(7)]
            done = [await task for task in asyncio.as_completed(tasks)]
            return sorted(answer.status_code for answer in done)

    found = asyncio.run(crowd())
    assert found[:3] == [200] * 3 and set(found[3:]) <= {200, 429} and found[-1] == 429

    with http.stream("POST", TEXTS, json=LONG | {"stream": True, "max_tokens": 400}) as answer:
        lines = answer.iter_lines()
        next(lines)
        guarded.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
    assert guarded.process.wait(60) == 0
    with pytest.raises(httpx2.TransportError):
        bare.get("/health")
    told = [json.loads(line) for line in guarded.log]
    assert all(line["level"] == "info" for line in told)
    (streamed,) = (line for line in told if line.get("tokens") == 400)
    assert streamed["seconds"] > 0.05 and f"{streamed['prompt_tokens']} + 400 tokens" in streamed["message"]


def test_a_key_has_so_many_texts_at_a_time(tiny: Path) -> None:
    """Another one's are made meanwhile, and its own once some have ended."""
    args = verb_parser("serve", serve).parse_args([str(tiny), "-np", "4", "--max-per-key", "2"])
    state = serve.made_state(load(tiny, "cpu"), args, SamplerParams(temp=0))
    maker, body = state.generator(), {"prompt": TEXT, "max_tokens": 5}

    async def asked() -> list[tuple[int, Any]]:
        app = application(state)
        async with (
            app.router.lifespan_context(app),
            httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://x") as http,
        ):
            long = CompletionRequest(prompt=TEXT, max_tokens=4000, ignore_eos=True)
            mine, other = (maker.completion(long, key) for key in ("127.0.0.1", "another"))
            for texts in mine, other:
                state.submit(texts)
            bodies = body, body | {"n": 2}, body | {"n": 3}
            answers = [await http.post(TEXTS, json=each) for each in bodies]
            state.worker.cancel(mine)
            while state.worker.n_of_key("127.0.0.1"):
                await asyncio.sleep(0.01)
            answers.append(await http.post(TEXTS, json=bodies[1]))
            return [(answer.status_code, (answer.json().get("error") or {}).get("code")) for answer in answers]

    found = asyncio.run(asked())
    assert found == [(200, None), (429, "key_limit"), (400, None), (200, None)]


def test_an_old_llguidance_is_refused_at_once(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llguidance.__version__", "1.6.1")
    found = Verb(capsys)("serve", tiny, "--port", "0")
    assert found.code == 2 and "need llguidance 1.9 or newer, 1.6.1 is installed" in found.err


def test_packed_embeddings_are_floats(http: httpx2.Client) -> None:
    body = {"input": "a", "encoding_format": "base64"}
    packed = http.post("/v1/embeddings", json=body).json()["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(packed), "<f4").shape == (64,)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--port", "70000"), "from 0 to 65535"),
        (("--host", "256.0.0.1"), "able to listen"),
        (("--api-key", ""), "must have a character"),
        (("--temp", "nan"), "temp must be a finite number"),
    ],
)
def test_command_lines_that_are_refused(
    tiny: Path, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], said: str
) -> None:
    found = Verb(capsys)("serve", tiny, *argv)
    assert found.code == 2 and said in found.err
