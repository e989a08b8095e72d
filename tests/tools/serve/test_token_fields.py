"""vLLM's fields that ask for tokens of a prompt and of a text, that cut a prompt, and that say where a text may end."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
from support.served import Served

TEXT = "hello the sea"
USER = [{"role": "user", "content": TEXT}]
CHATS, TEXTS = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {CHATS: {"messages": USER}, TEXTS: {"prompt": TEXT}}


@pytest.fixture
def http(served: Served) -> httpx2.Client:
    return httpx2.Client(base_url=served.url, timeout=60)


def made(http: httpx2.Client, path: str = TEXTS, **more: Any) -> dict[str, Any]:
    answer = http.post(path, json={"max_tokens": 6, **BODIES[path], **more})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def pieces(http: httpx2.Client, path: str, **more: Any) -> list[dict[str, Any]]:
    lines = http.post(path, json={"max_tokens": 6, **BODIES[path], "stream": True, **more}).text.split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]


def ids_of(http: httpx2.Client, text: str, special: bool = True) -> list[int]:
    found: list[int] = http.post("/tokenize", json={"content": text, "add_special": special}).json()["tokens"]
    return found


def chat_ids(http: httpx2.Client) -> list[int]:
    prompt = http.post("/apply-template", json={"messages": USER}).json()["prompt"]
    return ids_of(http, prompt, special=False)


@pytest.mark.parametrize("path", [CHATS, TEXTS])
def test_ids_of_prompts_and_texts(http: httpx2.Client, path: str) -> None:
    whole = made(http, path, return_token_ids=True, n=2, seed=1, temperature=1)
    prompt = ids_of(http, TEXT) if path == TEXTS else chat_ids(http)
    holder = whole if path == CHATS else whole["choices"][0]
    assert holder["prompt_token_ids"] == prompt and len(prompt) == whole["usage"]["prompt_tokens"]
    assert [len(choice["token_ids"]) for choice in whole["choices"]] == [6, 6]
    assert whole["choices"][0]["token_ids"] != whole["choices"][1]["token_ids"]
    first, *rest = pieces(http, path, return_token_ids=True, n=2, seed=1, temperature=1)
    told: dict[int, list[int]] = {0: [], 1: []}
    for each in (first, *rest):
        told[each["choices"][0]["index"]] += each["choices"][0].get("token_ids", [])
    assert [told[0], told[1]] == [choice["token_ids"] for choice in whole["choices"]]
    assert (first if path == CHATS else first["choices"][0])["prompt_token_ids"] == prompt
    plain = made(http, path)
    holder = plain if path == CHATS else plain["choices"][0]
    assert holder["prompt_token_ids"] is None is holder["prompt_logprobs"] is plain["choices"][0]["token_ids"]
    assert all("token_ids" not in each["choices"][0] for each in pieces(http, path))


def test_tokens_that_are_named_by_their_ids(http: httpx2.Client) -> None:
    choice = made(http, logprobs=2, return_tokens_as_token_ids=True, return_token_ids=True)["choices"][0]
    names = [f"token_id:{token}" for token in choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == names and set(choice["logprobs"]["top_logprobs"][0]) > {names[0]}
    assert choice["logprobs"]["text_offset"] == made(http, logprobs=2)["choices"][0]["logprobs"]["text_offset"]
    chat = made(http, CHATS, logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True)["choices"][0]
    for told in chat["logprobs"]["content"]:
        assert told["token"].startswith("token_id:") and told["top_logprobs"][0]["token"].startswith("token_id:")


@pytest.mark.parametrize("path", [CHATS, TEXTS])
def test_a_prompts_logprobs(http: httpx2.Client, path: str) -> None:
    """They are those that echo tells, by ids, with ranks where these are known."""
    whole = made(http, path, prompt_logprobs=3, return_token_ids=True)
    holder = whole if path == CHATS else whole["choices"][0]
    told, prompt = holder["prompt_logprobs"], holder["prompt_token_ids"]
    assert len(told) == len(prompt) and told[0] is None
    for token, each in zip(prompt[1:], told[1:]):
        assert str(token) in each and 3 <= len(each) <= 4
        ranked = sorted((value["rank"], value["logprob"]) for value in each.values() if value["rank"])
        assert [rank for rank, _ in ranked] == [1, 2, 3] and [-lp for _, lp in ranked] == sorted(
            -lp for _, lp in ranked
        )
    alone = made(http, path, prompt_logprobs=0)
    assert [len(each) for each in (alone if path == CHATS else alone["choices"][0])["prompt_logprobs"][1:]] == (
        [1] * (len(prompt) - 1)
    )
    if path == TEXTS:
        both = made(http, prompt_logprobs=3, echo=True, logprobs=1)["choices"][0]
        assert both["prompt_logprobs"] == told and len(both["logprobs"]["top_logprobs"][1]) <= 2
        values = [each[str(token)]["logprob"] for token, each in zip(prompt[1:], told[1:])]
        assert both["logprobs"]["token_logprobs"][1 : len(prompt)] == values


def test_prompts_that_are_cut(http: httpx2.Client) -> None:
    ids = ids_of(http, TEXT * 5)
    for more, kept in (
        ({}, ids[-4:]), ({"truncation_side": "left"}, ids[-4:]), ({"truncation_side": "right"}, ids[:4]),
    ):  # fmt: skip
        for prompt in (TEXT * 5, ids):
            found = made(http, prompt=prompt, truncate_prompt_tokens=4, return_token_ids=True, **more)
            assert found["choices"][0]["prompt_token_ids"] == kept
    long = "hello the sea " * 3000
    assert http.post(TEXTS, json={"prompt": long, "max_tokens": 6}).json()["error"]["code"] == "context_length_exceeded"
    assert made(http, prompt=long, truncate_prompt_tokens=-1)["usage"]["prompt_tokens"] == 4096 - 6
    chat = made(http, CHATS, truncate_prompt_tokens=3, return_token_ids=True)
    assert (
        chat["prompt_token_ids"]
        == ids_of(http, http.post("/apply-template", json={"messages": USER}).json()["prompt"])[-3:]
    )
    vectors = [
        http.post("/v1/embeddings", json={"input": each, **more}).json()
        for each, more in ((TEXT * 5, {"truncate_prompt_tokens": 4}), (ids[-4:], {}))
    ]
    assert vectors[0] == vectors[1] and vectors[0]["usage"]["prompt_tokens"] == 4
    wrong = http.post("/v1/embeddings", json={"input": TEXT, "truncate_prompt_tokens": 5000})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "truncate_prompt_tokens"


@pytest.mark.parametrize("path", [CHATS, TEXTS])
def test_what_ended_a_text(http: httpx2.Client, path: str) -> None:
    free = made(http, path, max_tokens=30, return_token_ids=True)["choices"][0]
    said = free["message"]["content"] if path == CHATS else free["text"]
    assert (free["stop_reason"], free["matched_stop"], free["finish_reason"]) == (None, None, "length")
    stop = said[5:8]
    for shown, end in ((None, said.index(stop)), (True, said.index(stop) + 3)):
        asked = {"max_tokens": 30, "stop": ["never", stop], "include_stop_str_in_output": shown}
        found = made(http, path, **asked)["choices"][0]
        assert (found["stop_reason"], found["matched_stop"], found["finish_reason"]) == (stop, stop, "stop")
        assert (found["message"]["content"] if path == CHATS else found["text"]) == said[:end]
        *_, last = pieces(http, path, **asked)
        assert last["choices"][0]["stop_reason"] == stop
    by_id = made(http, path, max_tokens=30, stop_token_ids=free["token_ids"][3:4])["choices"][0]
    assert by_id["stop_reason"] == by_id["matched_stop"] == free["token_ids"][3]
    end = ids_of(http, "</s>", special=False)
    ended = made(http, path, logit_bias={str(end[0]): 1000})["choices"][0]
    assert (ended["stop_reason"], ended["matched_stop"], ended["finish_reason"]) == (None, end[0], "stop")


def test_the_least_tokens_of_a_text(http: httpx2.Client) -> None:
    (end,) = ids_of(http, "</s>", special=False)
    for least, count in ((0, 1), (4, 5), (6, 6)):
        found = made(http, min_tokens=least, logit_bias={str(end): 1000}, return_token_ids=True)
        assert found["usage"]["completion_tokens"] == count and end not in found["choices"][0]["token_ids"][:least]
    free = made(http, return_token_ids=True)["choices"][0]
    for ends in {"stop": free["text"][:2]}, {"stop_token_ids": free["token_ids"][:1]}:
        assert made(http, **ends)["usage"]["completion_tokens"] < 6
        assert made(http, **ends, min_tokens=6)["usage"]["completion_tokens"] == 6


def test_control_tokens_of_a_text(http: httpx2.Client) -> None:
    (begin,) = ids_of(http, "")
    biased: dict[str, Any] = {"logit_bias": {str(begin): 1000}, "max_tokens": 2}
    assert made(http, **biased)["choices"][0]["text"] == ""
    assert made(http, **biased, skip_special_tokens=False)["choices"][0]["text"] == "<s>" * 2


def test_a_message_that_goes_on_is_told_whole(http: httpx2.Client) -> None:
    talk = [*USER, {"role": "assistant", "content": "in the beginning"}]
    asked = {"messages": talk, "continue_final_message": True, "add_generation_prompt": False}
    rest = made(http, CHATS, **asked)["choices"][0]["message"]["content"]
    assert made(http, CHATS, **asked, echo=True)["choices"][0]["message"]["content"] == f"in the beginning{rest}"
    streamed = [each["choices"][0]["delta"].get("content", "") for each in pieces(http, CHATS, **asked, echo=True)]
    assert "".join(streamed) == f"in the beginning{rest}"


def test_roles_are_the_templates_to_judge(http: httpx2.Client) -> None:
    talk = [{"role": "observation", "content": "wet"}]
    message = made(http, CHATS, messages=talk)["choices"][0]["message"]
    assert message["reasoning_content"] is None and message["reasoning"] is None
    assert "observation" in http.post("/apply-template", json={"messages": talk}).json()["prompt"]


def test_tokens_in_vllms_form(http: httpx2.Client) -> None:
    """/tokenize of a prompt or of messages, and /detokenize, which has both servers' names."""

    def told(**body: Any) -> dict[str, Any]:
        answer = http.post("/tokenize", json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    ids = ids_of(http, TEXT)
    assert told(prompt=TEXT) == {"count": len(ids), "max_model_len": 4096, "tokens": ids, "token_strs": None}
    short = told(prompt=TEXT, add_special_tokens=False, return_token_strs=True)
    assert short["tokens"] == ids[1:] and "".join(short["token_strs"]).lstrip() == TEXT
    assert told(messages=USER)["tokens"] == chat_ids(http)
    talk = [*USER, {"role": "assistant", "content": "Sure,"}]
    for options, special in (
        ({"add_generation_prompt": False}, True), ({"continue_final_message": True}, False), ({}, False), ({}, True),
    ):  # fmt: skip
        asked = {name: value for name, value in options.items() if name == "add_generation_prompt"}
        prompt = http.post("/apply-template", json={"messages": talk, **asked})
        text = prompt.json()["prompt"] if "continue_final_message" not in options else None
        found = told(messages=talk, **options, add_special_tokens=special)["tokens"]
        if text is None:
            assert http.post("/detokenize", json={"tokens": found}).json()["prompt"].endswith("Sure,")
        else:
            assert found == ids_of(http, text, special)
    assert http.post("/detokenize", json={"tokens": ids[1:]}).json() == {"content": TEXT, "prompt": TEXT}
    for wrong in ({}, {"prompt": TEXT, "content": TEXT}):
        answer = http.post("/tokenize", json=wrong)
        assert answer.status_code == 400 and "one of content, prompt and messages" in answer.text


def test_samplers_of_responses(http: httpx2.Client) -> None:
    """/v1/responses takes what a chat takes."""
    plain = {"input": TEXT, "max_output_tokens": 8}
    ids = made(http, CHATS, max_tokens=8, return_token_ids=True)["choices"][0]["token_ids"]

    def said(**more: Any) -> str:
        answer = http.post("/v1/responses", json={**plain, **more})
        assert answer.status_code == 200, answer.text
        found: str = answer.json()["output"][0]["content"][0]["text"]
        return found

    assert said(stop_token_ids=ids[2:3]) == said()[: len(said(stop_token_ids=ids[2:3]))] != said()
    seeded = [said(temperature=1.5, seed=seed, top_k=40, chat_template_kwargs={"a": 1}) for seed in (3, 3, 4)]
    assert seeded[0] == seeded[1] != seeded[2]
    assert said(logit_bias={str(ids[0]): -100}) != said()


def test_what_tells_of_the_server(http: httpx2.Client) -> None:
    (card,) = http.get("/v1/models").json()["data"]
    assert (card["id"], card["root"], card["parent"], card["aliases"]) == ("tiny", "tiny", None, ["tiny"])
    assert http.get("/ping").status_code == 200 and http.get("/version").json()["version"]


@pytest.mark.parametrize("path", [CHATS, TEXTS])
def test_tokens_that_may_come_and_words_that_may_not(http: httpx2.Client, path: str) -> None:
    def ids(**more: Any) -> list[int]:
        found: list[int] = made(http, path, return_token_ids=True, **more)["choices"][0]["token_ids"]
        return found

    free = ids()
    some = sorted({*free[:2], *ids_of(http, "abc", special=False)})
    assert set(ids(allowed_token_ids=some)) <= set(some) and set(ids(allowed_token_ids=some[:1])) == set(some[:1])
    named = ids(allowed_token_ids=ids_of(http, "abc", special=False), regex="[a-z]+")
    assert set(named) <= set(ids_of(http, "abc", special=False))
    word = made(http, path, allowed_token_ids=ids_of(http, "abc", special=False))
    text = word["choices"][0]["message"]["content"] if path == CHATS else word["choices"][0]["text"]
    without = made(http, path, allowed_token_ids=ids_of(http, "abc", special=False), bad_words=[text[:2]])
    said = without["choices"][0]["message"]["content"] if path == CHATS else without["choices"][0]["text"]
    assert text[:2] in text and text[:2] not in said
    n_vocab = http.get("/v1/models").json()["data"][0]["meta"]["n_vocab"]
    more: dict[str, Any]
    for more in ({"allowed_token_ids": []}, {"allowed_token_ids": [n_vocab]}, {"bad_words": [""]}):
        answer = http.post(path, json={**BODIES[path], **more})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == next(iter(more)), answer.text


@pytest.mark.parametrize("path", [CHATS, TEXTS])
def test_log_probabilities_of_named_tokens(http: httpx2.Client, path: str) -> None:
    """Beside the chosen one, whatever is likelier; of the model's own distribution."""
    chats = path == CHATS
    asked: dict[str, Any] = {"logprobs": True, "top_logprobs": 20} if chats else {"logprobs": 20}
    asked |= {"return_tokens_as_token_ids": True, "max_tokens": 2}

    def told(**more: Any) -> list[dict[str, float]]:
        found = made(http, path, **asked, **more)["choices"][0]["logprobs"]
        if not chats:
            return found["top_logprobs"]  # type: ignore[no-any-return]
        return [{best["token"]: best["logprob"] for best in each["top_logprobs"]} for each in found["content"]]

    best = told()
    named = [int(name.partition(":")[2]) for name in (*list(best[0])[5:7], "token_id:3")]
    found = told(logprob_token_ids=named)
    assert len(best) == len(found) == 2
    assert set(found[0]) == {next(iter(best[0])), *(f"token_id:{i}" for i in named)}
    for name in set(found[0]) & set(best[0]):
        assert found[0][name] == pytest.approx(best[0][name], abs=1e-6)
    for more in ({"logprob_token_ids": [3]}, {**asked, "logprob_token_ids": [10**6]}):
        answer = http.post(path, json={**BODIES[path], **more})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "logprob_token_ids", answer.text
