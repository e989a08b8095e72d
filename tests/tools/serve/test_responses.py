"""/v1/responses by OpenAI's own client, and all routes as /openapi.json describes them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import httpx2
import openai
import pytest
from support.from_schema import Maker
from support.served import Served, started

#: Requests of the fuzz; more with another number of the seed.
N_FUZZED = 250


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def test_an_answer_is_the_chats(client: openai.OpenAI) -> None:
    messages = [{"role": "system", "content": "be short"}, {"role": "user", "content": "hello\nthe sea"}]
    chat = client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=9)  # type: ignore[arg-type]
    plain = client.responses.create(model="tiny", input="hello\nthe sea", instructions="be short", max_output_tokens=9)
    parts = [{"type": "input_text", "text": "hello"}, {"type": "input_text", "text": "the sea"}]
    listed = client.responses.create(
        model="tiny", instructions="be short", input=[{"role": "user", "content": parts}], max_output_tokens=9
    )  # type: ignore[call-overload]
    assert plain.output_text == listed.output_text == chat.choices[0].message.content != ""
    assert plain.status == "incomplete" and plain.incomplete_details.reason == "max_output_tokens"
    assert chat.usage is not None and plain.usage is not None
    assert plain.usage.output_tokens == chat.usage.completion_tokens == 9
    assert plain.usage.input_tokens == chat.usage.prompt_tokens and listed.usage.input_tokens_details.cached_tokens >= 0


def test_streams_of_events(client: openai.OpenAI) -> None:
    plain = client.responses.create(model="tiny", input="hello", max_output_tokens=7)
    found = list(client.responses.create(model="tiny", input="hello", max_output_tokens=7, stream=True))
    assert [event.sequence_number for event in found] == list(range(len(found)))
    deltas = [event.delta for event in found if event.type == "response.output_text.delta"]
    assert "".join(deltas) == plain.output_text
    order = [event.type for event in found if event.type != "response.output_text.delta"]
    assert order == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    assert found[-1].response.output_text == plain.output_text and found[-1].response.id == found[0].response.id


def test_forms_and_refusals(client: openai.OpenAI, served: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["t"]}}, "required": ["a"], "additionalProperties": False}
    form = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    found = client.responses.create(model="tiny", input="hello", text=form, max_output_tokens=60)  # type: ignore[arg-type]
    assert json.loads(found.output_text) == {"a": "t"} and found.status == "completed"
    for body, param in (
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x", "text": "a"}]}]},
         "input[0].content[0].type"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "response_format.json_schema.schema"),
    ):  # fmt: skip
        answer = httpx2.post(f"{served.url}/v1/responses", json=body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


@pytest.fixture(scope="module")
def short(tiny: Path) -> Iterator[Served]:
    """Its texts are short."""
    server = started(str(tiny), "-np", "4", "-n", "3", "--pooling", "mean", "--timeout", "5")
    yield server
    server.process.kill()
    server.process.wait()


def test_requests_of_the_servers_own_description(short: Served) -> None:
    """Bodies as they are described, and such with something wrong: an answer or a 4xx in OpenAI's form, no 5xx."""
    with httpx2.Client(base_url=short.url, timeout=60) as http:
        told = http.get("/openapi.json").json()
        assert told["openapi"].startswith("3.1") and {"/v1/responses", "/v1/models/{name}"} <= set(told["paths"])
        draws = random.Random(5)
        maker = Maker(told["components"]["schemas"], draws)
        posts = [(path, of["post"]) for path, of in told["paths"].items() if "post" in of]
        statuses = dict[int, int]()
        for i in range(N_FUZZED):
            path, operation = posts[i % len(posts)]
            body = maker.value(operation["requestBody"]["content"]["application/json"]["schema"])
            for _ in range(draws.randrange(3)):
                body = maker.spoiled(body)
            answer = http.post(path, content=json.dumps(body))
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
            assert answer.status_code < 500, (path, body, answer.text)
            if answer.status_code != 200:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}, answer.text
        assert statuses[200] > N_FUZZED // 10 and statuses[400] > N_FUZZED // 10
        assert all(
            http.get(path).status_code == 200 for path, of in told["paths"].items() if "get" in of and "{" not in path
        )
