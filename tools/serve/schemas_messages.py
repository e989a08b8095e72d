"""What bodies of requests to Anthropic's /v1/messages may hold."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from graphrt.models.key_reader import INT32_MAX
from graphrt.tools.serve.schemas import MAX_CHOICES, MAX_STOPS, MAX_TEXTS, Effort, Loose, Name, Sampling


class Block(Loose):
    """A part of a message: a text, what was thought, a call of a tool, or its result. Blocks of other types are refused
    by a sentence of their own."""

    type: str
    text: str | None = None
    thinking: str | None = None
    # of a call
    id: str | None = None
    name: Name | None = None
    input: dict[str, Any] | None = None
    # of its result
    tool_use_id: str | None = None
    content: str | Annotated[list[Block], Field(max_length=MAX_TEXTS)] | None = None


Blocks = str | Annotated[list[Block], Field(max_length=MAX_TEXTS)]


class Turn(Loose):
    """A message."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class OwnTool(Loose):
    """A tool that the client calls. Those of other types, which Anthropic's servers call, are refused by a sentence of
    their own."""

    type: str | None = None
    name: Name
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(Loose):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Loose):
    """A budget of tokens is taken and not looked at: a template can have a model think or not, and no more."""

    type: Literal["enabled", "disabled", "adaptive"]


class OutputFormat(Loose):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Loose):
    effort: Effort | None = None
    format: OutputFormat | None = None


class Conversation(Sampling):
    """What is asked about, or what tokens are counted of. Samplers are as in a chat."""

    # Anthropic's clients send what its newest models can do: context_management, betas, cache_control, ...
    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)

    model: str | None = None
    messages: Annotated[list[Turn], Field(min_length=1, max_length=1 << 16)]
    system: Blocks | None = None
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    tools: Annotated[list[OwnTool], Field(max_length=MAX_CHOICES)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # its older place
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's


class MessagesRequest(Conversation):
    """/v1/messages"""

    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)]
    stream: bool | None = None


class CountRequest(Conversation):
    """/v1/messages/count_tokens"""
