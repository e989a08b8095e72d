"""/v1/messages, Anthropic's form of a chat."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
from support.served import Served
from support.tiny import write_model

from graphrt.models import load
from graphrt.models.sampling_params import SamplerParams
from graphrt.tools.cli import verb_parser
from graphrt.tools.serve.app import application
from graphrt.tools.serve.message_blocks import Thought
from graphrt.tools.serve.messages_input import as_chat
from graphrt.tools.serve.schemas_messages import MessagesRequest
from graphrt.tools.verbs import serve

SCHEMA = {"type": "object", "properties": {"a": {"enum": ["t"]}}, "required": ["a"], "additionalProperties": False}
RAIN: dict[str, Any] = {"name": "rain", "description": "of the day", "input_schema": SCHEMA}
HELLO = [{"role": "user", "content": "hello"}]


def asked(served: Served, path: str = "/v1/messages", **more: Any) -> httpx2.Response:
    body = {"model": "tiny", "messages": HELLO} | ({"max_tokens": 9} if path == "/v1/messages" else {}) | more
    return httpx2.post(f"{served.url}{path}", json=body, timeout=60)


def told(served: Served, **more: Any) -> list[dict[str, Any]]:
    """The events of a stream, each by the name that stands before it."""
    found = []
    for event in asked(served, stream=True, **more).text.strip().split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert found[-1]["type"] == name.removeprefix("event: ")
    return found


def test_an_answer_is_the_chats(served: Served) -> None:
    messages = [{"role": "system", "content": "be short"}, {"role": "user", "content": "hello\nthe sea"}]
    chat = httpx2.post(f"{served.url}/v1/chat/completions", json={"messages": messages, "max_tokens": 9}).json()
    parts = [
        {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "the sea"},
    ]
    found = asked(
        served, system=[{"type": "text", "text": "be short"}], messages=[{"role": "user", "content": parts}]
    ).json()
    assert found["content"][0]["text"] == chat["choices"][0]["message"]["content"] != ""
    assert (found["type"], found["role"], found["model"], found["stop_reason"]) == (
        "message",
        "assistant",
        "tiny",
        "max_tokens",
    )
    usage = found["usage"]
    assert usage["output_tokens"] == 9 and found["stop_sequence"] is None
    read = usage["input_tokens"] + usage["cache_creation_input_tokens"] + usage["cache_read_input_tokens"]
    assert read == chat["usage"]["prompt_tokens"]


def test_streams_of_events(served: Served) -> None:
    whole, events = asked(served).json(), told(served)
    kinds = [event["type"] for event in events if event["type"] != "content_block_delta"]
    assert kinds == ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]
    deltas = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert len(deltas) > 3 and "".join(deltas) == whole["content"][0]["text"]
    begun, ended = events[0]["message"], events[-2]
    assert begun["content"] == [] and begun["usage"]["input_tokens"] > 5 and begun["usage"]["output_tokens"] == 0
    assert (
        ended["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None} and ended["usage"]["output_tokens"] == 9
    )
    # texts that end it
    stop = whole["content"][0]["text"][3:5]
    found = asked(served, stop_sequences=[stop]).json()
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", stop)
    assert found["content"][0]["text"] == whole["content"][0]["text"].partition(stop)[0]


def test_what_the_cache_had(served: Served) -> None:
    """A prompt's whole pages are kept, and had the next time."""
    messages = [{"role": "user", "content": "a page of its own. " * 9}]
    first, second = (told(served, messages=messages, max_tokens=1) for _ in range(2))
    n = first[0]["message"]["usage"]["input_tokens"]
    for events in (first, second):
        usage = events[-2]["usage"]
        assert usage["input_tokens"] + usage["cache_creation_input_tokens"] + usage["cache_read_input_tokens"] == n
    assert first[-2]["usage"]["cache_read_input_tokens"] == 0 < first[-2]["usage"]["cache_creation_input_tokens"]
    assert second[-2]["usage"]["cache_read_input_tokens"] == first[-2]["usage"]["cache_creation_input_tokens"]
    assert second[-2]["usage"]["cache_creation_input_tokens"] == 0


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "rain"}])
def test_calls_of_tools(served: Served, choice: dict[str, str]) -> None:
    more: dict[str, Any] = {"tools": [RAIN], "tool_choice": choice, "max_tokens": 120}
    found = asked(served, **more).json()
    (call,) = found["content"]
    assert (call["type"], call["name"], call["input"], found["stop_reason"]) == (
        "tool_use",
        "rain",
        {"a": "t"},
        "tool_use",
    )
    events = told(served, **more)
    begun = next(event for event in events if event["type"] == "content_block_start")
    assert begun["content_block"]["name"] == "rain" and begun["content_block"]["input"] == {} and begun["index"] == 0
    parts = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert {part["type"] for part in parts} == {"input_json_delta"} and len(parts) > 2
    assert json.loads("".join(part["partial_json"] for part in parts)) == {"a": "t"}
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    # of what is cut nothing is a call
    part = asked(served, **more | {"max_tokens": found["usage"]["output_tokens"] - 4}).json()
    assert (part["stop_reason"], part["content"][0]["input"]) == ("max_tokens", {})
    # the result comes back with its call
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "wet"}]}
    turns = [*HELLO, {"role": "assistant", "content": found["content"]}, {"role": "user", "content": [result]}]
    assert asked(served, messages=turns, tools=[RAIN]).json()["type"] == "message"


def test_forms_counts_and_what_goes_on(served: Served) -> None:
    config = {"format": {"type": "json_schema", "schema": SCHEMA}}
    found = asked(served, output_config=config, max_tokens=60).json()
    assert json.loads(found["content"][0]["text"]) == {"a": "t"} and found["stop_reason"] == "end_turn"
    n = asked(served, "/v1/messages/count_tokens").json()["input_tokens"]
    assert n == sum(v for k, v in asked(served).json()["usage"].items() if k != "output_tokens")
    more = asked(served, "/v1/messages/count_tokens", system="be short", tools=[RAIN]).json()
    assert set(more) == {"input_tokens"} and more["input_tokens"] > n
    # an assistant's message at the end is begun, not over
    turns = [*HELLO, {"role": "assistant", "content": "so"}]
    same = {"messages": turns, "max_tokens": 5, "continue_final_message": True, "echo": False}
    chat = httpx2.post(f"{served.url}/v1/chat/completions", json=same).json()["choices"][0]["message"]["content"]
    assert asked(served, messages=turns, max_tokens=5).json()["content"][0]["text"] == chat


def test_refusals_are_in_anthropics_form(served: Served, guarded: Served) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    search = {"type": "web_search_20250305", "name": "web_search"}
    for more, status, kind, param in (
        ({"model": "other"}, 404, "not_found_error", "model"),
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"messages": [{"role": "user", "content": [image]}]}, 400, "invalid_request_error",
         "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]}, 400,
         "invalid_request_error", "messages[0].content[0].tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "rain"}]}]}, 400,
         "invalid_request_error", "messages[0].content[0].id"),
        ({"tools": [search]}, 400, "invalid_request_error", "tools[0].type"),
        ({"tools": [RAIN], "tool_choice": {"type": "tool"}}, 400, "invalid_request_error", "tool_choice.name"),
        ({"messages": [{"role": "user", "content": "x" * 140000}]}, 413, "request_too_large", None),
    ):  # fmt: skip
        answer = asked(served, **more)
        assert answer.status_code == status and answer.json()["type"] == "error", answer.text
        assert (answer.json()["error"]["type"], answer.json()["error"]["param"]) == (kind, param), answer.text
    answer = asked(guarded)
    assert answer.status_code == 401 and answer.json()["error"]["type"] == "authentication_error"
    known = httpx2.post(
        f"{guarded.url}/v1/messages", json={"messages": HELLO, "max_tokens": 1}, headers={"x-api-key": "first"}
    )
    assert known.status_code == 200 and known.json()["model"] == "mine"


def test_what_is_thought(tmp_path: Path) -> None:
    """A text whose template has begun a thought: it is told apart on all routes, whole and in streams."""
    chat = "{% for m in messages %}{{ m.content }}{% endfor %}<think>"
    path = write_model(tmp_path / "m.gguf", "llama", tokenizer="spm", chat=chat)
    args = verb_parser("serve", serve).parse_args([str(path)])
    app = application(serve.made_state(load(path, "cpu"), args, SamplerParams(temp=0)))
    body = {"messages": HELLO, "max_tokens": 9}

    async def work() -> list[httpx2.Response]:
        transport = httpx2.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx2.AsyncClient(transport=transport, base_url="http://x") as http,
        ):
            routes = ("/v1/chat/completions", "/v1/messages")
            return [await http.post(route, json=body | {"stream": each}) for route in routes for each in (False, True)]

    chat_whole, chat_stream, whole, stream = asyncio.run(work())
    message = chat_whole.json()["choices"][0]["message"]
    thought = message["reasoning"]
    assert thought and message["reasoning_content"] == thought and message["content"] == ""
    lines = [line.removeprefix("data: ") for line in chat_stream.text.split("\n\n") if "choices" in line]
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
    assert "".join(delta.get("reasoning") or "" for delta in deltas) == thought
    assert all(delta.get("reasoning_content") == delta.get("reasoning") for delta in deltas)
    assert whole.json()["content"] == [
        {"type": "thinking", "thinking": thought, "signature": ""}, {"type": "text", "text": "", "citations": None},
    ]  # fmt: skip
    events = [json.loads(event.split("\ndata: ")[1]) for event in stream.text.strip().split("\n\n")]
    told = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in told) == thought and told[-1]["type"] == "signature_delta"


def test_a_thought_ends_with_its_signature() -> None:
    thought = Thought(1)
    told = [*thought.begins(), *thought.more("hm"), *thought.ends()]
    assert told == [
        ("content_block_start", {"index": 1, "content_block": {"type": "thinking", "thinking": "", "signature": ""}}),
        ("content_block_delta", {"index": 1, "delta": {"type": "thinking_delta", "thinking": "hm"}}),
        ("content_block_delta", {"index": 1, "delta": {"type": "signature_delta", "signature": ""}}),
        ("content_block_stop", {"index": 1}),
    ]
    assert thought.is_done and thought.told()["thinking"] == "hm"


def test_a_conversation_of_blocks_is_one_of_messages() -> None:
    """Results are messages of their own, in their order; what was thought goes with what was said."""
    use = [{"type": "tool_use", "id": f"c{i}", "name": "rain", "input": {"a": "t"}} for i in (1, 2)]
    thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
    result = {"type": "tool_result", "tool_use_id": "c1", "is_error": False}
    given: dict[str, Any] = {
        "system": "be short", "max_tokens": 1, "thinking": {"type": "disabled"}, "output_config": {"effort": "low"},
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "tools": [RAIN],
        "messages": [
            {"role": "assistant", "content": [thought, {"type": "text", "text": "so"}, *use]},
            {"role": "user", "content": [{"type": "text", "text": "a"}, result, {"type": "text", "text": "b"}]},
        ],
    }  # fmt: skip
    found = as_chat(MessagesRequest.model_validate(given), 1)
    assert [(m.role, m.content) for m in found.messages] == [
        ("system", "be short"), ("assistant", "so"), ("user", "a"), ("tool", ""), ("user", "b"),
    ]  # fmt: skip
    said = found.messages[1]
    assert said.reasoning_content == "hm" and [call.id for call in said.tool_calls or ()] == ["c1", "c2"]
    assert said.tool_calls is not None and json.loads(said.tool_calls[0].function.arguments) == {"a": "t"}
    assert found.messages[3].tool_call_id == "c1" and found.parallel_tool_calls is False and found.max_tokens == 1
    assert found.chat_template_kwargs == {"enable_thinking": False} and found.reasoning_effort == "low"
    assert found.continue_final_message is None and found.tool_choice == "auto"
