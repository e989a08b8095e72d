"""Bodies of requests to `graphrt serve`: fields with values that fit, nearly fit or don't, and bytes gone wrong.

An input is a path, a line break and a body. It must become texts that can be made, or an ApiError of OpenAI's shape
whose sentence can be shown.
"""

from __future__ import annotations

import json
import random
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from support.tiny import CHAT, write_model

from graphrt.models import load
from graphrt.models.sampling_params import SamplerParams
from graphrt.tools.serve.errors import ApiError, of_validation
from graphrt.tools.serve.schemas import ChatRequest, CompletionRequest
from graphrt.tools.serve.texts import Maker, Text

NAME = "bodies"
KINDS = {"chat": ChatRequest, "completion": CompletionRequest}
LONGEST = 1000  # characters of a message
VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        40,
        1 << 31,
        1 << 64,
        -(1 << 63),
        0.5,
        -0.5,
        1.5,
        1e308,
        "",
        "a",
        "sea",
        "\n",
        "é日",
    ),
    *("\ud800", "<|im_end|>", "auto", "required", "none", [], ["a"], [5, 6], [[5]], [""], {}, {"15": 1.5}, {"a": "b"}),
    *({"type": "object"}, {"type": "json_object"}, {"type": "text"}, {"include_usage": True}, "[a-z]{3}", "("),
    *({"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}}, 'root ::= "a"', "root ::= [", [1 << 40]),
    *({"type": "function", "function": {"name": "f"}}, [{"type": "function", "function": {"name": "f"}}]),
)
MESSAGES: tuple[Any, ...] = (
    {"role": "user", "content": "hello"}, {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
    {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}, {"role": "user"},
    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
    {"role": "tool", "content": "x"},
    {"role": "user", "content": [{"type": "image_url"}]}, {"role": "developer", "content": "x", "name": "y"}, 5,
)  # fmt: skip


@cache
def maker() -> Maker:
    """Of a tiny model."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_model(Path(folder) / "m.gguf", "llama", tokenizer="spm", chat=CHAT)
        return Maker(load(path, "cpu"), SamplerParams(), 128, most_texts=16)


def warm() -> None:
    """Loads the model."""
    attempt(b'completion\n{"prompt": "a", "regex": "a"}')


def make(seed: int) -> bytes:
    """A path and a body of up to some KB."""
    rng = random.Random(f"body {seed}")
    name = rng.choice(list(KINDS))
    body: dict[str, Any] = {"prompt": rng.choice(["hello the sea", [5, 6], ["a", "b"]])}
    if name == "chat":
        body = {"messages": rng.choices(MESSAGES, k=rng.randint(0, 3)) if rng.random() < 0.3 else [MESSAGES[0]]}
    fields = [field.alias or name for name, field in KINDS[name].model_fields.items()]
    for field in rng.choices([*fields, "other"], k=rng.randint(0, 4)):
        body[field] = rng.choice(VALUES)
    text = json.dumps(body).encode()
    if rng.random() < 0.1:
        at = rng.randrange(len(text))
        text = text[:at] + rng.choice([b"", b"\xff", b"[" * 3000, b'"', b"NaN", b"}"]) + text[at + rng.randint(0, 5) :]
    return name.encode() + b"\n" + text


def attempt(data: bytes) -> str:
    """What becomes of it."""
    name, _, body = data.partition(b"\n")
    try:
        try:
            request: ChatRequest | CompletionRequest = KINDS[name.decode()].model_validate_json(body)
        except ValidationError as error:
            raise of_validation(error) from None
        texts = _texts(request)
    except ApiError as error:
        found = error.body()["error"]
        assert found["message"] and found["type"] and 400 <= error.status < 500, found
        assert len(error.message) <= LONGEST and error.message.replace("\n", "").isprintable(), error.message
        json.dumps(found).encode()
        return f"refused: {found['code'] or 'by a sentence'}"
    assert 1 <= len(texts) <= 16 and all(1 <= len(text.prompt) <= 128 for text in texts)
    return "texts"


def _texts(request: ChatRequest | CompletionRequest) -> list[Text]:
    if isinstance(request, ChatRequest):
        return maker().chat(request, "")[0]
    return maker().completion(request, "")
