"""/v1/responses by OpenAI's own client, and all routes as /openapi.json describes them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from support.from_schema import Maker
from support.served import Served, started

from graphrt.tools.serve.responses_input import as_chat
from graphrt.tools.serve.schemas_responses import ResponsesRequest

SCHEMA = {"type": "object", "properties": {"a": {"enum": ["t"]}}, "required": ["a"], "additionalProperties": False}
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
    form = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    found = client.responses.create(model="tiny", input="hello", text=form, max_output_tokens=60)  # type: ignore[arg-type]
    assert json.loads(found.output_text) == {"a": "t"} and found.status == "completed"
    for body, param in (
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "x"}]}, "input[0].name"),
        ({"input": [{"type": "computer_call", "call_id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x", "text": "a"}]}]},
         "input[0].content[0].type"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "conversation": "conv_1"}, "conversation"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ):  # fmt: skip
        answer = httpx2.post(f"{served.url}/v1/responses", json=body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


WEATHER: Any = {"type": "function", "name": "rain", "description": "of the day", "parameters": SCHEMA, "strict": True}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "rain"}])
def test_calls_of_tools(client: openai.OpenAI, choice: Any) -> None:
    asked: dict[str, Any] = {"model": "tiny", "input": "hello", "tools": [WEATHER], "tool_choice": choice}
    found = client.responses.create(**asked, max_output_tokens=120)
    (call,) = found.output
    assert found.status == "completed" and found.output_text == "" and found.tools[0].name == "rain"
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "rain", {"a": "t"})
    events = list(client.responses.create(**asked, max_output_tokens=120, stream=True))
    deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
    added, done, ended, last = [event for event in events[2:] if event not in deltas]
    assert [event.type for event in (*events[:2], added, done, ended, last)] == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.function_call_arguments.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert added.item.name == "rain" and (added.item.arguments, added.item.status) == ("", "in_progress")
    assert len(deltas) > 3 and "".join(event.delta for event in deltas) == done.arguments == call.arguments
    assert ended.item == last.response.output[0] and {event.item_id for event in deltas} == {added.item.id}
    with client.responses.stream(**asked, max_output_tokens=120) as stream:
        assert [event.snapshot for event in stream if event.type == deltas[0].type][-1] == call.arguments
    part = client.responses.create(**asked, max_output_tokens=found.usage.output_tokens - 4)
    assert (part.status, part.output[0].status) == ("incomplete", "incomplete")
    # what was called comes back with its result, and with what else the answer had
    asked["input"] = [
        {"role": "user", "content": "hello"}, {"type": "reasoning", "id": "rs_1", "summary": []},
        call.model_dump(), {"type": "function_call_output", "call_id": call.call_id, "output": "wet"},
    ]  # fmt: skip
    again = client.responses.create(**asked, max_output_tokens=120)
    assert again.output[0].type == "function_call" and again.usage.input_tokens > found.usage.input_tokens


def test_a_conversation_of_items_is_one_of_messages() -> None:
    calls = [{"type": "function_call", "call_id": f"c{i}", "name": "rain", "arguments": "{}"} for i in (1, 2)]
    given = [
        {"role": "developer", "content": "be short"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]},
        *calls,
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "wet"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "it rains"}]},
    ]
    found = as_chat(ResponsesRequest.model_validate({"input": given, "instructions": "hi"})).messages
    assert [message.role for message in found] == ["system", "developer", "assistant", "tool", "assistant"]
    assert [call.id for call in found[2].tool_calls or ()] == ["c1", "c2"] and found[2].reasoning_content == "so"
    assert (found[3].tool_call_id, found[3].content) == ("c1", "wet") and found[4].reasoning_content is None


def test_log_probabilities_where_they_are_asked_for(client: openai.OpenAI) -> None:
    more: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    found = client.responses.create(model="tiny", input="hello", max_output_tokens=5, **more)
    told = found.output[0].content[0].logprobs
    assert len(told) == 5 and all(len(each.top_logprobs) == 2 and each.logprob <= 0 for each in told)
    plain = client.responses.create(model="tiny", input="hello", max_output_tokens=5)
    assert plain.output[0].content[0].logprobs == [] and plain.output_text == found.output_text
    stream = client.responses.create(model="tiny", input="hello", max_output_tokens=5, stream=True, **more)
    deltas = [each for event in stream if event.type == "response.output_text.delta" for each in event.logprobs]
    assert [each.token for each in deltas] == [each.token for each in told]


def test_an_events_name_comes_first(served: Served) -> None:
    body = {"input": "hello", "max_output_tokens": 2, "stream": True}
    for event in httpx2.post(f"{served.url}/v1/responses", json=body).text.strip().split("\n\n"):
        name, data = event.split("\n")
        assert json.loads(data.removeprefix("data: "))["type"] == name.removeprefix("event: ")


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
                code = set() if path.startswith("/v1/messages") else {"code"}  # of Anthropic's API, which has none
                assert set(answer.json()["error"]) == {"message", "type", "param"} | code, answer.text
        assert statuses[200] > N_FUZZED // 10 and statuses[400] > N_FUZZED // 10
        assert all(
            http.get(path).status_code == 200 for path, of in told["paths"].items() if "get" in of and "{" not in path
        )
