"""What a model says, told apart: reasoning, answers and calls, whole and in any pieces."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

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
    (Marks(), "<tool_call><function=rain>\n<parameter=place>\n<tool_call>\n<parameter=days>\n2\n</function>", "", "",
     ['{"place": "<tool_call>", "days": 2}']),
    (Marks(), "<tool_call>rain<arg_key>days</arg_key><arg_value>1", "", "", ['{"days": 1}']),
    (Marks(), '[{"name": "rain", "arguments": {"a": [1, "]}"]}}, {"parameters": { }, "id": 1, "name": "rain"}] Yes', "",
     " Yes", ['{"a": [1, "]}"]}', "{ }"]),
    (Marks(), '{"name": "rain", "arguments": "{\\"a\\": 2}"}\n{"name": "rain", "arguments": null}', "", "",
     ['{"a": 2}', "{}"]),
    (Marks(), f'<tool_call>{{"name": "snow", "arguments": {{}}}}</tool_call>{CALL}', "",
     '<tool_call>{"name": "snow", "arguments": {}}</tool_call>', ['{"a": 1}']),
    (Marks(), '<tool_call>{"name": "rain", "arguments": {"a": "</tool_call>\\""}}', "", "",
     ['{"a": "</tool_call>\\""}']),
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
    said += reader.end()
    assert said[:2] == (thought, answer.strip("\n") if calls else answer)
    assert [call.arguments for call in reader.calls] == calls
    assert all(call.name == "rain" and call.whole for call in reader.calls)
    assert all(a.id != b.id for a, b in pairwise(reader.calls))
    # pieces of calls make up the calls: a name comes first, and once
    made = [""] * len(calls)
    for part in said.calls:
        made[part.number] += f"{part.name}:{part.id} " if part.name else ""
        made[part.number] += part.arguments
    assert made == [f"{call.name}:{call.id} {call.arguments}" for call in reader.calls]
    if size == 1 and thought:
        assert 0 < reader.n_reasoning < len(text) or not answer


@pytest.mark.parametrize(
    "text",
    ["<tool_call><function=snow></function></tool_call>", "<tool_call>snow</tool_call>",
     "<tool_call>rain in Oslo</tool_call>", "rain", "<function=rain></function>", "[rain]", "[]", '{"a": 1} ', "{",
     " ", '[{"name": "snow", "arguments": {"a": 1}}]', '{"name": "rain" "a"}', '{"arguments": {}}', "<tool_call> {",
     '{"name": ' + "[" * 9999, '{"name" "rain"}', '{"name"}', "<tool_call><function=rain</tool_call>",
     "{'name': 'rain'}", '{"arguments": <'],
    ids=range(20),
)  # fmt: skip
def test_what_is_no_call_stays_text(text: str) -> None:
    reader = Reader(Marks(), TOOLS)
    said = reader.push(text)
    said += reader.end()
    assert said == ("", text, ()) and not reader.calls


FORM = '<tool_call>{"name": "rain", "arguments": '


def test_arguments_are_told_as_they_come() -> None:
    def told(pieces: list[str], marks: Marks = Marks()) -> list[str]:
        reader = Reader(marks, TOOLS)
        found = ["".join(part.arguments for part in reader.push(piece).calls) for piece in pieces]
        return [*found, "".join(part.arguments for part in reader.end().calls)]

    assert told(['{"name": "rain", ', '"parameters": ', '{"a', '": 1', "}}"]) == ["", "", '{"a', '": 1', "}", ""]
    assert told([FORM, " {", '"a": 1} ', "}</tool", "_call>"]) == ["", "{", '"a": 1}', "", "", ""]
    assert told(["<tool_call>rain<arg_key>days</arg_key><arg_value>", "1</arg_value>", "</tool_call>"]) == [
        "", '{"days": 1', "}", "",
    ]  # fmt: skip
    assert told(["to=functions.rain<|message|>", "{", "}"], CHANNELS) == ["", "{", "}", ""]


def test_arguments_are_what_was_written() -> None:
    """Random values, in random pieces: read as JSON by Python's own reader."""
    draws = random.Random(3)

    def value(depth: int) -> Any:
        kind = draws.randrange(3 if depth > 3 else 5)
        if kind < 3:
            return ("".join(draws.choices('a"\\\\{}[],: <\\n日/', k=draws.randrange(6))), draws.random() * 1e9, None)[
                kind
            ]
        items = [value(depth + 1) for _ in range(draws.randrange(4))]
        return items if kind == 3 else {f"k{i}{{": item for i, item in enumerate(items)}

    for _ in range(200):
        wanted = {"a": value(0), "}": value(0)}
        text = json.dumps({"name": "rain", "arguments": wanted}, indent=draws.choice([None, 1]), ensure_ascii=False)
        text, reader, at = f"<tool_call>{text}</tool_call>{CALL}", Reader(Marks(), TOOLS), 0
        while at < len(text):
            n = draws.randrange(1, 12)
            assert reader.push(text[at : at + n]).content == ""
            at += n
        assert reader.end().content == "" and [call.whole for call in reader.calls] == [True, True]
        assert json.loads(reader.calls[0].arguments) == wanted


#: What texts of any marks in any order are made of: beginnings of calls, and pieces of everything.
BEGUN = (
    FORM + "{", '{"name": "rain", "arguments": {', '[{"name": "rain", ',
    "<tool_call><function=rain>\n<parameter=place>",
    "<tool_call>rain<arg_key>days</arg_key><arg_value>", "to=functions.rain<|message|>",
)  # fmt: skip
BITS = (
    *("<tool_call>", "</tool_call>", "<function=", "rain", ">", "\n", " ", "<parameter=", "place", "</parameter>"),
    *(
        "</function>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        '"name": "rain"',
        '"arguments": {',
        ", ",
    ),
    *("{", "}", "}}", '"}', "[", "]", '"', "\\", "1", ":", "<think>", "</think>", "<|channel|>", "<|message|>"),
    *("analysis", "<|end|>", "<|call|>", "<", "null", "é"),
)


def read(text: str, size: int, marks: Marks, *, cut: bool) -> tuple[str, str, list[tuple[str, str, bool]]]:
    """What is said and called, of pieces of that size."""
    reader, said = Reader(marks, TOOLS), Said()
    for start in range(0, len(text), size):
        said += reader.push(text[start : start + size])
    said += reader.end(cut=cut)
    told = ["".join(part.arguments for part in said.calls if part.number == i) for i in range(len(reader.calls))]
    assert told == [call.arguments for call in reader.calls]
    return said.reasoning, said.content, [(call.name, call.arguments, call.whole) for call in reader.calls]


@pytest.mark.parametrize("marks", [Marks(), OPENED, CHANNELS])
def test_pieces_of_any_size_say_the_same(marks: Marks) -> None:
    """Whatever models write."""
    draws, n_called = random.Random(7), 0
    for _ in range(80):
        text = "so</think>" * marks.opened + "".join(draws.choices([*BEGUN * 4, *BITS], k=draws.randrange(1, 20)))
        whole, *others = (read(text, size, marks, cut=len(text) % 3 == 0) for size in (len(text), 1, 5))
        assert others == [whole] * 2, text
        n_called += bool(whole[2])
    assert n_called > 10


@pytest.mark.parametrize(
    ("marks", "text", "arguments"),
    [(Marks(), f'{FORM}{{"a": "t', '{"a": "t'), (Marks(), FORM + "{", "{"),
     (CHANNELS, "to=functions.rain<|message|>", ""),
     (Marks(), "<tool_call>rain<arg_key>days</arg_key><arg_value>1</arg_value><arg_key>", '{"days": 1')],
)  # fmt: skip
def test_a_call_that_is_cut(marks: Marks, text: str, arguments: str) -> None:
    reader = Reader(marks, TOOLS)
    said = reader.push(text) + reader.end(cut=True)
    assert said.content == "" and [call.arguments for call in reader.calls] == [arguments]
    assert not reader.calls_end_it


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_a_call_that_goes_wrong(size: int) -> None:
    """Its name was told: the rest of it is dropped, and the next one counts."""
    text, reader = f'So. {FORM}{{"a": 1, <"b">}}}}</tool_call>\n{CALL} \n Yes', Reader(Marks(), TOOLS)
    said = Said()
    for start in range(0, len(text), size):
        said += reader.push(text[start : start + size])
    said += reader.end()
    assert said.content == "So.  \n Yes" and [call.arguments for call in reader.calls] == ['{"a": 1, ', '{"a": 1}']


def test_what_is_thought_is_shown_as_it_comes() -> None:
    reader = Reader(OPENED)
    assert [reader.push(text)[:2] for text in ("a", " ", "b", "</", "think>", " ", "c")] == [
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
    said = reader.push(CALL * 2) + reader.end()
    assert len(reader.calls) == 1 and {part.number for part in said.calls} == {0}
    reader = Reader(Marks(), TOOLS, one_call=True)
    reader.push(f'{FORM}{{"a": <}}</tool_call>{CALL}')
    reader.end()
    assert [call.arguments for call in reader.calls] == ['{"a": '] and reader.calls_end_it


def test_a_tools_own_references() -> None:
    """They begin at the tool's schema, which has become a part of the calls'."""
    own = {"$ref": "#/$defs/P", "$defs": {"P": {"properties": {"x": {"$ref": "#/$defs/Q"}}}, "Q": {"enum": ["#"]}}}
    tools = [Tool(type="function", function=Function(name=name, parameters=own)) for name in ("f", "g")]
    made = schema_of(tools, "", several=True)
    assert made is not None and json.dumps(made).count("#/$defs/1/$defs/Q") == 1
    assert made["$defs"]["1"]["$defs"]["Q"] == {"enum": ["#"]}
    assert [set(form) for form in made["anyOf"]] == [{"anyOf"}, {"type", "items", "minItems"}]
