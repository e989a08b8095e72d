"""LangChain's client, where it is installed, against a real server: another way to ask than OpenAI's own."""

from __future__ import annotations

import asyncio

import openai
import pytest
from pydantic import BaseModel
from support.served import Served

langchain = pytest.importorskip("langchain_openai", reason="the package `langchain-openai` is not installed")


class Rain(BaseModel):
    """Of an answer that must have this form."""

    heavy: bool


def test_what_langchain_asks_for(served: Served) -> None:
    """Chats, streams, several at once, forms, completions and vectors, as OpenAI's client gets them."""
    url = f"{served.url}/v1"
    how = {"base_url": url, "api_key": "none", "model": "tiny", "temperature": 0}
    plain = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    messages = [{"role": "user", "content": "hello the sea"}]
    wanted = plain.chat.completions.create(model="tiny", messages=messages, max_tokens=9)  # type: ignore[arg-type]
    chat = langchain.ChatOpenAI(max_tokens=9, **how)
    found = chat.invoke("hello the sea")
    assert found.content == wanted.choices[0].message.content and wanted.usage is not None
    assert found.usage_metadata["output_tokens"] == wanted.usage.completion_tokens
    assert "".join(piece.content for piece in chat.stream("hello the sea")) == found.content

    async def together() -> list[str]:
        return [answer.content for answer in await asyncio.gather(*(chat.ainvoke("hello the sea") for _ in range(3)))]

    assert asyncio.run(together()) == [found.content] * 3
    form = langchain.ChatOpenAI(max_tokens=60, **how).with_structured_output(Rain, method="json_schema")
    assert isinstance(form.invoke("is it heavy?"), Rain)
    assert langchain.OpenAI(max_tokens=5, **how).invoke("hello") == (
        plain.completions.create(model="tiny", prompt="hello", max_tokens=5).choices[0].text
    )
    for responses in (False, True):  # calls of tools, whole and piece by piece, by both of OpenAI's routes
        calls = langchain.ChatOpenAI(max_tokens=200, use_responses_api=responses, **how).bind_tools(
            [Rain], tool_choice="any"
        )
        (call,) = calls.invoke("is it heavy?").tool_calls
        first, *rest = calls.stream("is it heavy?")
        assert len(rest) > 4, "the arguments come as they are made"
        (streamed,) = sum(rest, first).tool_calls
        assert (streamed["name"], streamed["args"]) == (call["name"], call["args"]) and set(call["args"]) == {"heavy"}
    vectors = langchain.OpenAIEmbeddings(base_url=url, api_key="none", model="tiny", check_embedding_ctx_length=False)
    assert [len(vector) for vector in vectors.embed_documents(["hello", "the sea"])] == [64, 64]
