"""Fields that clients of other servers send: what they mean here, which ones nothing is done with, and that the rest is
refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from support.served import Served
from support.tiny import write_model

from graphrt.models import load
from graphrt.models.sampling_params import SamplerParams
from graphrt.tools.serve.foreign_fields import is_taken
from graphrt.tools.serve.forms import one_of
from graphrt.tools.serve.loose_schema import loose
from graphrt.tools.serve.schemas import ChatRequest
from graphrt.tools.serve.texts import Maker

TEXT = "hello the sea"
USER = [{"role": "user", "content": TEXT}]
CHATS, TEXTS = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
#: Fields that say how a text is to be written down, and what may then be there.
FORMS: list[tuple[dict[str, Any], str]] = [
    ({"guided_choice": ["the (sea)", "he|re"]}, r"the \(sea\)|he\|re"),
    ({"guided_regex": "(he|re){2}"}, "(he|re){2}"),
    ({"guided_grammar": 'root ::= "he" "re"'}, "here"),
    ({"ebnf": 'root ::= "he" "re"'}, "here"),
    ({"json_schema": json.dumps(SCHEMA)}, r'\{\s*"a"\s*:\s*1\s*\}'),
    ({"guided_json": SCHEMA}, r'\{\s*"a"\s*:\s*1\s*\}'),
    ({"guided_json": json.dumps(SCHEMA)}, r'\{\s*"a"\s*:\s*1\s*\}'),
    ({"structured_outputs": {"json": SCHEMA}}, r'\{\s*"a"\s*:\s*1\s*\}'),
    ({"structured_outputs": {"choice": ["in", "on"]}}, "in|on"),
    ({"structured_outputs": {"regex": "o{3}"}}, "ooo"),
    ({"structured_outputs": {"grammar": 'root ::= "sea"'}}, "sea"),
]
#: What changes no answer, in a request and in its messages.
UNUSED: list[dict[str, Any]] = [
    {"functions": None, "audio": None, "web_search_options": None},
    {"store": True, "verbosity": "low", "prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "implicit"}},
    {"service_tier": "fast"},
    {"id_slot": -1, "n_keep": 0, "timings_per_token": True, "return_progress": True},
    {"priority": 0, "use_beam_search": False, "length_penalty": 1.0},
    {"top_logprobs": 0},
    {"messages": [{**USER[0], "cache_control": {"type": "ephemeral"}}]},
]
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"use_beam_search": True}, "use_beam_search"),
    ({"functions": []}, "functions"),
    ({"samplers": ["top_k"]}, "samplers"),
    ({"guided_choice": ["a"], "guided_regex": "b"}, "guided_regex"),
    ({"guided_json": "{"}, "guided_json"),
    ({"json_schema": "["}, "json_schema"),
    ({"guided_json": "[]"}, "guided_json"),
    ({"guided_choice": []}, "guided_choice"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": {"1": "a"}}}, "structured_outputs.regex"),
    ({"min_tokens": 41}, "min_tokens"),
    ({"min_tokens": 2, "guided_regex": "a+"}, "min_tokens"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 5000}, "truncate_prompt_tokens"),
    ({"echo": True}, "echo"),
    ({"max_tokens": 2.5}, "max_tokens"),
    ({"n": 1e300}, "n"),
    ({"n_predict": 0, "max_tokens": None}, "n_predict"),
    ({"logit_bias": [[5]]}, "logit_bias[0]"),
    ({"logit_bias": [[5, "a"]]}, "logit_bias"),
    ({"logit_bias": [[1.5, 1]]}, "logit_bias"),
    ({"logit_bias": [[99999, 1]]}, "logit_bias"),
    ({"stream": True, "stream_options": {"nothing": True}}, "stream_options.nothing"),
]


@pytest.fixture
def http(served: Served) -> httpx2.Client:
    return httpx2.Client(base_url=served.url, timeout=60)


def said(http: httpx2.Client, **more: Any) -> str:
    answer = http.post(CHATS, json={"messages": USER, "max_tokens": 40, **more})
    assert answer.status_code == 200, (more, answer.text)
    found: str = answer.json()["choices"][0]["message"]["content"]
    return found


@pytest.mark.parametrize(("field", "pattern"), FORMS, ids=[f"{i}-{next(iter(f[0]))}" for i, f in enumerate(FORMS)])
def test_forms_by_vllms_names(http: httpx2.Client, field: dict[str, Any], pattern: str) -> None:
    assert re.fullmatch(pattern, said(http, **field))


def test_what_changes_no_answer_is_taken(http: httpx2.Client) -> None:
    plain = said(http, max_tokens=4)
    for fields in UNUSED:
        assert said(http, max_tokens=4, **fields) == plain, fields
    assert is_taken("length_penalty", 1) and not is_taken("use_beam_search", 0) and not is_taken("nothing", 0)
    for path, body in (
        ("/tokenize", {"content": "a"}),
        ("/detokenize", {"tokens": [5]}),
        ("/apply-template", {"messages": USER}),
    ):
        assert http.post(path, json={**body, "model": "tiny"}).status_code == 200


def test_some_of_the_tools_as_if_there_were_no_others(http: httpx2.Client) -> None:
    def called(path: str, allowed: list[str], mode: str = "required") -> tuple[int, Any]:
        functions = [{"name": name, "parameters": {"type": "object", "properties": {}}} for name in ("rain", "snow")]
        if path == CHATS:
            tools: list[Any] = [{"type": "function", "function": {"name": name}} for name in allowed]
            body: dict[str, Any] = {"messages": USER, "max_tokens": 90}
            body |= {"tools": [{"type": "function", "function": each} for each in functions]}
            body |= {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}}
        else:
            tools = [{"type": "function", "name": name} for name in allowed]
            body = {
                "input": TEXT,
                "max_output_tokens": 90,
                "tools": [{"type": "function", **each} for each in functions],
            }
            body |= {"tool_choice": {"type": "allowed_tools", "mode": mode, "tools": tools}}
        answer = http.post(path, json=body)
        return answer.status_code, answer.json()

    for name in ("snow", "rain"):
        status, told = called(CHATS, [name])
        assert status == 200 and told["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == name, told
        status, told = called("/v1/responses", [name])
        assert status == 200 and told["output"][0]["name"] == name, told
    status, told = called(CHATS, ["snow"], "auto")
    assert status == 200 and told["choices"][0]["message"]["content"]
    for path in (CHATS, "/v1/responses"):
        status, told = called(path, ["rain", "hail"])
        assert status == 400 and told["error"]["param"] == "tool_choice.allowed_tools", told


def test_what_changes_no_answer_of_responses(http: httpx2.Client) -> None:
    body = {"input": TEXT, "max_output_tokens": 4}
    more = {"include": ["web_search_call.action.sources"], "max_tool_calls": 3, "text": {"verbosity": "low"},
            "reasoning": {"effort": "low", "mode": "standard", "context": "auto"}, "service_tier": "fast"}  # fmt: skip
    texts = [http.post("/v1/responses", json=each).json()["output"][0]["content"] for each in (body, body | more)]
    assert texts[0] == texts[1]


def test_what_is_not_here_is_refused(http: httpx2.Client) -> None:
    for fields, param in WRONG:
        answer = http.post(CHATS, json={"messages": USER, "max_tokens": 8, **fields})
        assert answer.status_code == 400, (fields, answer.text)
        assert answer.json()["error"]["param"] == param, (fields, answer.text)


def test_llama_servers_and_vllms_names_of_numbers(http: httpx2.Client) -> None:
    def made(**more: Any) -> dict[str, Any]:
        answer = http.post(TEXTS, json={"prompt": TEXT, **more})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    assert made(n_predict=5)["usage"]["completion_tokens"] == 5
    assert made(n_predict=5.0, n=2.0, temperature=0, top_p=1)["usage"]["completion_tokens"] == 10
    assert made(n_predict=5, max_tokens=3)["usage"]["completion_tokens"] == 3
    assert made(max_tokens=7, min_tokens=7)["usage"]["completion_tokens"] == 7
    plain = made(n_predict=4, logprobs=0)["choices"][0]
    (token,) = http.post("/tokenize", json={"content": "a"}).json()["tokens"]
    by_text, by_id = (made(n_predict=3, logit_bias=[[what, 1000]])["choices"][0]["text"] for what in ("a", token))
    assert by_text == by_id == " a" * 3
    never = plain["logprobs"]["tokens"][0]
    assert made(n_predict=4, logit_bias=[[never, False]])["choices"][0]["text"][:1] != plain["text"][:1]
    whole = made(n_predict=40, repeat_penalty=1.5, repeat_last_n=-1)["choices"][0]["text"]
    assert (
        made(n_predict=40, repetition_penalty=1.5)["choices"][0]["text"]
        == whole
        != made(n_predict=40)["choices"][0]["text"]
    )


def test_texts_and_ids_in_one_list(http: httpx2.Client, served: Served) -> None:
    ids = http.post("/tokenize", json={"content": "a", "add_special": True}).json()["tokens"]
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    both: Any = [TEXT, ids]
    texts = [choice.text for choice in client.completions.create(model="tiny", prompt=both, max_tokens=5).choices]
    assert texts == [
        client.completions.create(model="tiny", prompt=p, max_tokens=5).choices[0].text for p in (TEXT, "a")
    ]
    assert len(http.post("/v1/embeddings", json={"input": both}).json()["data"]) == 2


def test_a_choice_is_these_texts_and_no_other() -> None:
    texts = ["a.b", "[c]", "d|e", "\\", "x y", "日"]
    pattern = one_of(texts)
    assert all(re.fullmatch(pattern, text) for text in texts)
    assert not any(re.fullmatch(pattern, text) for text in ("aXb", "c", "d", "", "a.b[c]"))


#: What llguidance can't follow, as libraries write it.
HARD: list[dict[str, Any]] = [
    {"type": "array", "items": {"enum": ["t"]}, "maxItems": 2, "uniqueItems": True},
    {"enum": ["t"], "format": "uint32"}, {"enum": ["t"], "not": {"const": "a"}},
    {"type": "integer", "minimum": -(2**63), "maximum": 7},
]  # fmt: skip


@pytest.mark.parametrize("hard", HARD, ids=range(len(HARD)))
def test_what_of_a_schema_can_not_be_followed(http: httpx2.Client, hard: dict[str, Any]) -> None:
    """It is left out, unless a request is strict."""
    schema = {"type": "object", "properties": {"a": hard}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "rain", "parameters": schema}}
    bodies: list[dict[str, Any]] = [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        {"response_format": {"type": "json_object", "schema": schema}},
        {"json_schema": schema}, {"guided_json": json.dumps(schema)}, {"tools": [tool], "tool_choice": "required"},
    ]  # fmt: skip
    for body in bodies:
        answer = http.post(CHATS, json={"messages": USER, "max_tokens": 90, **body})
        assert answer.status_code == 200, (body, answer.text)
    strict_tool = {"type": "function", "function": {"name": "rain", "parameters": schema, "strict": True}}
    form, strict = {"type": "json_schema"}, {"name": "x", "schema": schema, "strict": True}
    for path, body in (
        (CHATS, {"response_format": {**form, "json_schema": strict}, "messages": USER}),
        (CHATS, {"tools": [strict_tool], "tool_choice": "required", "messages": USER}),
        ("/v1/responses", {"text": {"format": {**form, **strict}}, "input": TEXT}),
    ):
        assert http.post(path, json=body).status_code == 400, body


def test_forms_as_text_generation_inference_has_them(http: httpx2.Client) -> None:
    """Its `value` is in the place of what a type says."""
    schema = {"type": "object", "properties": {"a": {"enum": ["t"]}}, "required": ["a"]}
    value: Any
    for kind, value in (
        ("json_object", schema), ("json", schema), ("json", json.dumps(schema)), ("json_schema", schema),
        ("json_schema", {"name": "x", "schema": schema}),
    ):  # fmt: skip
        body = {"messages": USER, "max_tokens": 60, "response_format": {"type": kind, "value": value}}
        answer = http.post(CHATS, json=body)
        assert json.loads(answer.json()["choices"][0]["message"]["content"]) == {"a": "t"}, (kind, value)
    body = {"messages": USER, "max_tokens": 60, "response_format": {"type": "regex", "value": "(hello|sea){2}"}}
    assert re.fullmatch("(hello|sea){2}", http.post(CHATS, json=body).json()["choices"][0]["message"]["content"])
    for form in ({"type": "regex"}, {"type": "json", "value": "{"}):
        refused = http.post(CHATS, json={"messages": USER, "response_format": form})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "response_format.value"


def test_an_effort_of_none_is_no_thinking(tmp_path: Path) -> None:
    chat = "{{ reasoning_effort }} {{ enable_thinking }}"
    model = load(write_model(tmp_path / "m.gguf", "llama", tokenizer="spm", chat=chat), "cpu")
    maker = Maker(model, SamplerParams(), 256)
    for more, prompt in (
        ({"reasoning_effort": "none"}, "none False"),
        ({"reasoning": {"effort": "none"}, "chat_template_kwargs": {"enable_thinking": True}}, "none True"),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "high "),
        ({"reasoning": {"effort": "low"}}, "low "),
    ):
        assert maker.prompt_of(ChatRequest.model_validate({"messages": USER, **more})) == prompt


def test_a_deep_schema_is_refused(http: httpx2.Client) -> None:
    deep = '{"items":' * 900 + "{}" + "}" * 900
    assert http.post(CHATS, json={"messages": USER, "guided_json": deep}).status_code == 400
    value = {"const": {"minimum": 2**60}, "maximum": 2**60, "minimum": 5}
    assert loose(value) == {"const": {"minimum": 2**60}, "minimum": 5, "x-guidance": {"lenient": True}}


def test_what_other_servers_say_may_come_back(http: httpx2.Client) -> None:
    """A conversation with what libraries keep of answers, and of streams' deltas."""
    call = {"index": 0, "id": "x", "type": "function", "function": {"name": "rain", "arguments": "{}", "parsed": None}}
    talk = [
        *USER,
        {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None, "function_call": None,
         "reasoning": "so", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "x", "content": [{"type": "text", "text": "wet"}]},
    ]  # fmt: skip
    prompt = http.post("/apply-template", json={"messages": talk}).json()["prompt"]
    assert '"name": "rain"' in prompt and "wet" in prompt


@pytest.mark.parametrize("path", [CHATS, TEXTS])
def test_usage_with_each_piece(http: httpx2.Client, path: str) -> None:
    body: dict[str, Any] = {"prompt": TEXT} if path == TEXTS else {"messages": USER}

    def told(**options: bool) -> list[Any]:
        asked = {**body, "n": 2, "max_tokens": 5, "best_of": 2} if path == TEXTS else {**body, "n": 2, "max_tokens": 5}
        lines = http.post(path, json={**asked, "stream": True, "stream_options": options}).text.split("\n\n")
        return [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]

    *going, last = told(include_usage=True, continuous_usage_stats=True)
    counts = [each["usage"]["completion_tokens"] for each in going]
    assert counts == sorted(counts) and counts[-1] == last["usage"]["completion_tokens"] == 10 and last["choices"] == []
    assert {each["usage"]["prompt_tokens"] for each in going} == {last["usage"]["prompt_tokens"]}
    assert all(each["choices"] for each in going) and len(set(counts)) > 5
    assert all("usage" not in each for each in told(include_usage=False, continuous_usage_stats=True))
    plain = told(include_usage=True)
    assert [each["usage"] for each in plain[:-1]] == [None] * (len(plain) - 1)
