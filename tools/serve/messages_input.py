"""A request to Anthropic's /v1/messages as one for a chat."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from graphrt.tools.serve.errors import ApiError
from graphrt.tools.serve.schemas import (
    CalledFunction,
    ChatRequest,
    Function,
    JsonSchema,
    Message,
    NamedFunction,
    NamedTool,
    ResponseFormat,
    Sampling,
    Tool,
    ToolCall,
)
from graphrt.tools.serve.schemas_messages import Block, Blocks, Conversation, Turn

#: Types of ToolChoice -> those of a chat.
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def as_chat(body: Conversation, most: int | None = None) -> ChatRequest:
    """most: tokens that may be made. An assistant's message at the end goes on. Raises ApiError for what has no
    text."""
    sampling = {name: getattr(body, name) for name in Sampling.model_fields}
    if body.stop_sequences is not None:
        sampling["stop"] = body.stop_sequences
    messages = [] if body.system is None else [Message(role="system", content=_text(body.system, "system"))]
    for i, turn in enumerate(body.messages):
        messages += _messages(turn, f"messages[{i}]")
    if not messages:
        raise ApiError("a request must have a message with content", param="messages")
    choice = body.tool_choice
    return ChatRequest(
        **sampling, messages=messages, max_tokens=most, tools=_tools(body) or None, tool_choice=_choice(body),
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        response_format=_format(body), chat_template_kwargs=_variables(body),
        reasoning_effort=body.output_config.effort if body.output_config is not None else None,
        continue_final_message=True if messages[-1].role == "assistant" else None,
    )  # fmt: skip


def _messages(turn: Turn, place: str) -> Iterator[Message]:
    """Those that a turn is in a chat, in which results of calls are messages of their own."""
    if turn.role == "assistant":
        yield _said(turn, place)
        return
    held: list[Block] = []  # texts since the last result
    for i, block in enumerate(_blocks(turn.content)):
        if block.type != "tool_result" or turn.role != "user":
            held.append(block)
            continue
        if held:
            yield Message(role=turn.role, content=_text(held, f"{place}.content"))
            held = []
        where = f"{place}.content[{i}]"
        if block.tool_use_id is None:
            raise ApiError("a result must have the id of its call, this one has it not; give it",
                           param=f"{where}.tool_use_id")  # fmt: skip
        yield Message(
            role="tool", content=_text(block.content or "", f"{where}.content"), tool_call_id=block.tool_use_id
        )
    if held or not turn.content:
        yield Message(role=turn.role, content=_text(held, f"{place}.content"))


def _said(turn: Turn, place: str) -> Message:
    """What the assistant has said, thought and called."""
    texts: list[Block] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for i, block in enumerate(_blocks(turn.content)):
        if block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type == "tool_use":
            calls.append(_call(block, f"{place}.content[{i}]"))
        elif block.type != "redacted_thinking":  # which nobody here can read
            texts.append(block)
    content = _text(texts, f"{place}.content")
    return Message(
        role="assistant", content=content, tool_calls=calls or None, reasoning_content="\n".join(thoughts) or None
    )


def _call(block: Block, place: str) -> ToolCall:
    if block.name is None or block.id is None:
        missing = "name" if block.name is None else "id"
        raise ApiError(f"a call must have {missing}, this one has it not; give it", param=f"{place}.{missing}")
    arguments = json.dumps(block.input or {}, ensure_ascii=False)
    return ToolCall(id=block.id, function=CalledFunction(name=block.name, arguments=arguments))


def _blocks(content: Blocks) -> Sequence[Block]:
    return [Block(type="text", text=content)] if isinstance(content, str) else content


def _text(content: Blocks | Sequence[Block], place: str) -> str:
    """Blocks that must be texts, as lines."""
    if isinstance(content, str):
        return content
    for i, block in enumerate(content):
        if block.type != "text" or block.text is None:
            raise ApiError("a block of a message must be a text, or a call of a tool or its result in its place: "
                           f"models read text alone, got {block.type[:40]!r}", param=f"{place}[{i}].type")  # fmt: skip
    return "\n".join(block.text or "" for block in content)


def _tools(body: Conversation) -> list[Tool]:
    found = []
    for i, tool in enumerate(body.tools or ()):
        if tool.type not in (None, "custom"):
            raise ApiError("a tool must be one that the client calls (type \"custom\"): no others are called here, "
                           f"got {tool.type[:40]!r}", param=f"tools[{i}].type")  # fmt: skip
        made = Function(name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict)
        found.append(Tool(type="function", function=made))
    return found


def _choice(body: Conversation) -> Any:
    """What may be called, in a chat's form."""
    choice = body.tool_choice
    if choice is None:
        return None
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if choice.name is None:
        raise ApiError("a tool_choice of type tool must have a name, this one has it not; give it",
                       param="tool_choice.name")  # fmt: skip
    return NamedTool(type="function", function=NamedFunction(name=choice.name))


def _format(body: Conversation) -> ResponseFormat | None:
    form = body.output_config.format if body.output_config is not None else None
    form = form or body.output_format
    if form is None:
        return None
    return ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=form.schema_), schema=None)


def _variables(body: Conversation) -> dict[str, Any] | None:
    """What the template may read: whether the model is to think."""
    if body.thinking is None or body.thinking.type == "adaptive":
        return body.chat_template_kwargs
    return {"enable_thinking": body.thinking.type == "enabled"} | (body.chat_template_kwargs or {})
