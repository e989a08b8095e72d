"""A request to /v1/responses as one for a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from graphrt.tools.serve import schemas
from graphrt.tools.serve.errors import ApiError
from graphrt.tools.serve.schemas import (
    AllowedTools,
    CalledFunction,
    ChatRequest,
    Function,
    JsonSchema,
    Message,
    NamedFunction,
    NamedTool,
    Part,
    ResponseFormat,
    Sampling,
    Tool,
    ToolCall,
)
from graphrt.tools.serve.schemas_responses import AllowedChoice, Item, NamedChoice, ResponsesRequest

T = TypeVar("T")
#: Types of the parts of an input's content that are text.
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def as_chat(body: ResponsesRequest) -> ChatRequest:
    """Raises ApiError for what has no text, and for what would have to be stored."""
    for name in ("previous_response_id", "conversation"):
        if getattr(body, name) is not None:
            raise ApiError(f"{name} names what is stored, and nothing is stored here; send the conversation as input",
                           param=name)  # fmt: skip
    return ChatRequest(
        **{name: getattr(body, name) for name in Sampling.model_fields},
        messages=_messages(body), max_completion_tokens=body.max_output_tokens, response_format=_format(body),
        tools=_tools(body) or None, tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls, logprobs=body.tells_logprobs or None,
        top_logprobs=body.top_logprobs if body.tells_logprobs else None,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        chat_template_kwargs=body.chat_template_kwargs,
    )  # fmt: skip


def _choice(given: Any) -> Any:
    """What may be called, in a chat's form."""
    if isinstance(given, AllowedChoice):
        allowed = AllowedTools(mode=given.mode, tools=[_named(each) for each in given.tools])
        return schemas.AllowedChoice(type="allowed_tools", allowed_tools=allowed)
    return _named(given) if isinstance(given, NamedChoice) else given


def _named(choice: NamedChoice) -> NamedTool:
    return NamedTool(type="function", function=NamedFunction(name=choice.name))


def _format(body: ResponsesRequest) -> ResponseFormat | None:
    form = body.text.format if body.text is not None else None
    if form is None:
        return None
    if form.type == "json_schema" and form.schema_ is None:
        raise ApiError("a format of json_schema must have a schema, got none; give one", param="text.format.schema")
    schema = JsonSchema(schema=form.schema_, strict=form.strict) if form.type == "json_schema" else None
    return ResponseFormat(type=form.type, json_schema=schema, schema=None)


def _tools(body: ResponsesRequest) -> list[Tool]:
    found = []
    for i, tool in enumerate(body.tools or ()):
        if tool.type != "function" or tool.name is None:
            raise ApiError(f"a tool must be a function with a name: no others are called here, got {tool.type[:40]!r}",
                           param=f"tools[{i}].type")  # fmt: skip
        made = Function(name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict)
        found.append(Tool(type="function", function=made))
    return found


def _messages(body: ResponsesRequest) -> list[Message]:
    """What is thought and called before an answer is of the answer's message."""
    found = [Message(role="system", content=body.instructions)] if body.instructions else []
    thought: str | None = None
    for i, item in enumerate([Item(content=body.input)] if isinstance(body.input, str) else body.input):
        place = f"input[{i}]"
        if item.type == "reasoning":
            given = item.content or item.summary
            thought = _text(given, f"{place}.content") if given else None
        elif item.type == "function_call":
            _add_call(found, item, place, thought)
            thought = None
        elif item.type == "function_call_output":
            _needed(item.output, f"{place}.output")
            said = _text(item.output or "", f"{place}.output")
            found.append(Message(role="tool", content=said, tool_call_id=_needed(item.call_id, f"{place}.call_id")))
        elif item.type == "message" and item.content is not None:
            said = _text(item.content, f"{place}.content")
            thinks = thought if item.role == "assistant" else None
            found.append(Message(role=item.role, content=said, reasoning_content=thinks))
            thought = None
        else:
            raise ApiError("an item of the input must be a message with content, reasoning, or a function's call or "
                           f"its output, got {item.type[:40]!r}", param=f"{place}.type")  # fmt: skip
    if not found:
        raise ApiError("the input must have a message", param="input")
    return found


def _add_call(messages: list[Message], item: Item, place: str, thought: str | None) -> None:
    called = CalledFunction(name=_needed(item.name, f"{place}.name"), arguments=item.arguments or "{}")
    call = ToolCall(id=_needed(item.call_id, f"{place}.call_id"), function=called)
    last = messages[-1] if messages else None
    if last is not None and last.role == "assistant" and thought is None:
        last.tool_calls = [*(last.tool_calls or ()), call]
    else:
        messages.append(Message(role="assistant", tool_calls=[call], reasoning_content=thought))


def _needed(value: T | None, place: str) -> T:
    if value is None:
        raise ApiError(f"an item of its type must have {place}, this one has it not; give it", param=place)
    return value


def _text(content: str | Sequence[Part], place: str) -> str:
    if isinstance(content, str):
        return content
    for j, part in enumerate(content):
        if part.type not in _TEXTS or part.text is None:
            raise ApiError("a part of a message must be a text: models read text alone", param=f"{place}[{j}].type")
    return "\n".join(part.text or "" for part in content)
