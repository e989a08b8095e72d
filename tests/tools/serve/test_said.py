"""What a model says, told apart: reasoning, answers and calls, whole and in any pieces."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from graphrt.tools.serve.said import Marks, Reader, Said, marks_of
from graphrt.tools.serve.schemas import Function, Tool
from graphrt.tools.serve.tool_calls import schema_of

THINK = Marks(("<think>", "</think>"))
OPENED = THINK._replace(opened=True)
CHANNELS = Marks(channels=True)
PLACE = {"type": "object", "properties": {"place": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [Tool(type="function", function=Function(name="rain", parameters=PLACE))]
FINAL = "<|start|>assistant<|channel|>final<|message|>"
CALL = '<tool_call>\n{"name": "rain", "arguments": {"a": 1}}\n</tool_call>'

#: How it is marked, what is written, what of it is thought, answered and called.
TEXTS: list[tuple[Marks, str, str, str, list[str]]] = [
    (THINK, "<think>\nA b\n\nc \n</think>\n\nYes.\n", "A b\n\nc", "Yes.\n", []),
    (THINK, " \n<think>\n\n</think>\n\nYes", "", "Yes", []),
    (THINK, "Yes. <think>no</think>", "", "Yes. <think>no</think>", []),
    (THINK, " <thin", "", " <thin", []),
    (THINK, "<think>cut</thi", "cut</thi", "", []),
    (OPENED, "\nA < b</ think></think>1</think>", "A < b</ think>", "1</think>", []),
    (OPENED, "A, no end ", "A, no end", "", []),
    (Marks(), "<think>a</think> b", "", "<think>a</think> b", []),
    (THINK, f"<think>rain?</think>{CALL}\n{CALL}", "rain?", "", ['{"a": 1}', '{"a": 1}']),
    (Marks(), "So.<tool_call>\n<function=rain>\n<parameter=place>\n12\n</parameter>\n"
     "<parameter=days>\n12\n</parameter>\n<parameter=more>\n<b>\n</parameter>\n</function>\n</tool_call>", "", "So.",
     ['{"place": "12", "days": 12, "more": "<b>"}']),
    (Marks(), "<tool_call>rain\n<arg_key>place</arg_key>\n<arg_value>Ås\nen</arg_value>\n<arg_key>days</arg_key>\n"
     "<arg_value>[1]</arg_value>\n</tool_call>\n<tool_call>rain</tool_call>", "", "",
     ['{"place": "Ås\\nen", "days": [1]}', "{}"]),
    (CHANNELS, f"<|channel|>analysis<|message|>So <b><|end|>{FINAL}Yes < no<|return|>", "So <b>", "Yes < no", []),
    (CHANNELS, "<|channel|>analysis<|message|>So", "So", "", []),
    (CHANNELS, "<|channel|>analysis<|mess", "", "", []),
    (CHANNELS, "Yes <|chan", "", "Yes <|chan", []),
    (CHANNELS, f"<|channel|>commentary<|message|>I look.<|end|>{FINAL}Ok", "", "I look.Ok", []),
    (CHANNELS, '<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary to=functions.rain '
     '<|constrain|>json<|message|>{"a": 1}<|call|>', "Hm", "", ['{"a": 1}']),
    (CHANNELS, ' to=functions.rain<|channel|>commentary json<|message|>{"a": 2}', "", "", ['{"a": 2}']),
    (CHANNELS, "<|channel|>commentary to=functions.snow<|message|>{}", "", "{}", []),
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("marks, text, thought, answer, calls", TEXTS)
def test_texts_in_pieces(marks: Marks, text: str, thought: str, answer: str, calls: list[str], size: int) -> None:
    reader, said = Reader(marks, TOOLS), Said()
    for start in range(0, len(text), size):
        said += reader.push(text[start : start + size])
    rest, found = reader.end()
    said += rest
    assert said == (thought, answer.strip("\n") if calls else answer)
    assert [call["function"]["arguments"] for call in found] == calls
    assert all(call["function"]["name"] == "rain" and call["type"] == "function" for call in found)
    assert all(a["id"] != b["id"] for a, b in pairwise(found))
    if size == 1 and thought:
        assert 0 < reader.n_reasoning < len(text) or not answer


@pytest.mark.parametrize(
    "text",
    ["<tool_call><function=snow></function></tool_call>", "<tool_call>snow</tool_call>",
     "<tool_call>rain in Oslo</tool_call>", "rain", "<function=rain></function>", "[rain]"],
)  # fmt: skip
def test_what_is_no_call_stays_text(text: str) -> None:
    reader = Reader(Marks(), TOOLS)
    said = reader.push(text)
    rest, calls = reader.end()
    assert (said + rest).content == text and not calls


def test_what_is_thought_is_shown_as_it_comes() -> None:
    reader = Reader(OPENED)
    assert [reader.push(text) for text in ("a", " ", "b", "</", "think>", " ", "c")] == [
        ("a", ""), ("", ""), (" b", ""), ("", ""), ("", ""), ("", ""), ("", "c"),
    ]  # fmt: skip
    assert reader.n_reasoning == 5


def test_templates_say_how_their_models_think() -> None:
    assert marks_of("{{ x }}", "a<think>") == Marks()
    assert marks_of("a </think> b", "a<think>\n") == OPENED
    assert marks_of("a <think> b", "<think>\n\n</think>\n\n") == THINK
    assert marks_of("[THINK]", "") == Marks(("[THINK]", "[/THINK]"))
    assert marks_of("<|channel|>analysis<|message|> <think>", "") == CHANNELS


def test_one_call_of_several() -> None:
    reader = Reader(Marks(), TOOLS, one_call=True)
    reader.push(CALL * 2)
    assert len(reader.end()[1]) == 1


def test_a_tools_own_references() -> None:
    """They begin at the tool's schema, which has become a part of the calls'."""
    own = {"$ref": "#/$defs/P", "$defs": {"P": {"properties": {"x": {"$ref": "#/$defs/Q"}}}, "Q": {"enum": ["#"]}}}
    tools = [Tool(type="function", function=Function(name=name, parameters=own)) for name in ("f", "g")]
    made = schema_of(tools, "", several=True)
    assert made is not None and json.dumps(made).count("#/$defs/1/$defs/Q") == 1
    assert made["$defs"]["1"]["$defs"]["Q"] == {"enum": ["#"]}
    assert [set(form) for form in made["anyOf"]] == [{"anyOf"}, {"type", "items", "minItems"}]
