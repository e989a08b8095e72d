"""What bodies of requests to /v1/responses may hold."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from graphrt.models.key_reader import INT32_MAX
from graphrt.tools.serve.schemas import (
    MAX_CHOICES,
    MAX_TEXTS,
    MAX_TOP_LOGPROBS,
    Body,
    Loose,
    Name,
    Part,
    ReasoningOptions,
    Sampling,
    StreamOptions,
    Tier,
)

#: What answers may have more of; the rest is of tools that are not here.
Included = Literal[
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # taken and not looked at


class FunctionTool(Loose):
    """Tools of other types are refused by a sentence of their own."""

    type: str
    name: Name | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedChoice(Loose):
    type: Literal["function"]
    name: Name


class AllowedChoice(Loose):
    """Some of the functions, as if there were no others."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], Field(min_length=1, max_length=MAX_CHOICES)]


class Item(Loose):
    """A message, or what this API tells beside messages, which clients send back: what was thought, a call of a tool
    and its result. Items of other types are refused by a sentence of their own."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] = "user"
    content: str | Annotated[list[Part], Field(max_length=MAX_TEXTS)] | None = None
    summary: Annotated[list[Part], Field(max_length=MAX_TEXTS)] | None = None
    call_id: str | None = None
    name: Name | None = None
    arguments: str | None = None
    output: str | Annotated[list[Part], Field(max_length=MAX_TEXTS)] | None = None


class ResponsesRequest(Sampling):
    """The request. Samplers, and where a text may end, are as in a chat."""

    model: str | None = None
    input: str | Annotated[list[Item], Field(min_length=1, max_length=1 << 16)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_CHOICES)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | AllowedChoice | None = None
    parallel_tool_calls: bool | None = None
    include: list[Included] | None = None
    timings_per_token: bool | None = None  # llama-server's
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's
    # of what is stored: nothing is
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    # taken and not looked at
    background: Literal[False] | None = None
    stream_options: StreamOptions | None = None
    truncation: Literal["disabled"] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    service_tier: Tier | None = None
    max_tool_calls: int | None = None  # of tools that a server calls itself
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    @property
    def tells_logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ())
