"""Markdown that is rendered while it arrives: no text is lost, on a screen of any size, however it is cut in pieces."""

from __future__ import annotations

import itertools
import random
import re

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from rich.console import Console
from support.screens import Emulated

from graphrt.tools.chat.markdown import MarkdownStream, split_complete

SAMPLE = """# A heading

A paragraph with **bold** and `code`,
in two lines.

- one
- two
    1. inner
    2. more

```python
for i in range(10):
    print(i)
```

| a | b |
|---|---|
| 1 | 2 |

> quoted

The end \\(a+b\\)
"""


def shown(text: str, width: int = 60, height: int = 24, seed: int = 0, tick: float = 1.0) -> list[str]:
    """The rows of a terminal, also those that scrolled away, after a text came in pieces. tick: seconds of a clock that
    goes on by itself each time that it is read."""
    screen, rng = Emulated(width, height), random.Random(seed)
    clock = itertools.count().__next__
    console = Console(file=screen, force_terminal=True, width=width, height=height, color_system=None, markup=False)
    with MarkdownStream(console, lambda: clock() * tick) as stream:
        while text:
            n = rng.randint(1, 12)
            stream.push(text[:n])
            text = text[n:]
    return [line.rstrip() for line in screen.lines]


def words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text)


def test_markdown_is_rendered() -> None:
    rows = shown(SAMPLE)
    text = "\n".join(rows)
    for part in ("A heading", "A paragraph with bold and code,\nin two lines.", " • one", "    print(i)", "▌ quoted"):
        assert part in text
    assert "**" not in text and "```" not in text and "|---" not in text
    assert text.rstrip().endswith("The end \\(a+b\\)"), "formulas stay as they were written"
    assert text.index("one") < text.index("inner") < text.index("for i") < text.index("quoted")


@pytest.mark.parametrize("height", [2, 3, 5, 24])
@pytest.mark.parametrize("tick", [0.001, 1.0])
def test_an_answer_taller_than_the_screen_stays(height: int, tick: float) -> None:
    """All rows are there once, in their order, after what was drawn while they came is gone."""
    many = "\n\n".join(f"paragraph {i} " + "word " * (i % 30) for i in range(40))
    code = "```\n" + "\n".join(f"line {i}" for i in range(60)) + "\n```\n"
    text = "\n".join(shown(f"{many}\n\n{code}\nend", height=height, tick=tick))
    assert re.findall(r"paragraph (\d+)", text) == [str(i) for i in range(40)]
    assert re.findall(r"line (\d+)", text) == [str(i) for i in range(60)]
    assert text.rstrip().endswith("end")


def test_rendered_at_once_or_as_it_comes() -> None:
    whole = shown(SAMPLE, tick=0.0)
    for seed in range(5):
        assert shown(SAMPLE, seed=seed) == whole


@pytest.mark.parametrize(
    "text",
    [
        "<div>word</div>",
        "a <b>word</b> c",
        "<!-- word -->",
        "[word]: http://word.example",
        "![word](http://word.example)",
        "[shown](http://word.example)",
        "| a |\n|---|\n| " + "word" * 40 + " |",
        "|" + " word |" * 30 + "\n|" + "---|" * 30 + "\n",
        ">" * 300 + " word",
        "- " * 60 + "word",
        "* a\n" + "".join("    " * i + "* word\n" for i in range(1, 30)),
        "99999999999999. word",
        "```word\nword\n```",
        "~~~\nword",
        "# " + "word " * 100,
        "**word",
        "`word",
        "&lt;word&gt; \\*word\\*",
    ],
)
@pytest.mark.parametrize("width", [20, 60])
def test_no_word_is_hidden(text: str, width: int) -> None:
    row = "".join(shown(text, width=width))
    assert "".join(row.split()).count("word") >= words(text.replace("word", " word ")).count("word") - (
        text.startswith("```word")  # the name of a language
    )


@pytest.mark.parametrize(
    "text", ["a\x1b[2Jb", "&#27;[2J", "&#x202e;x &#13; &#8;", "`\x07`", "\x9b2J", "a\u2028b", "[x](\x1b)"]
)
def test_nothing_steers_the_terminal(text: str) -> None:
    rows = "".join(shown(text))  # the emulated terminal takes nothing but what is printable, colours, and erasing
    assert not re.search("[\x00-\x1f\x7f-\x9f\u2028\u202a-\u202e]", rows)


PIECES = st.sampled_from(
    ["word", "other", " ", "\n", "\n\n", "# ", "- ", "1. ", "> ", "```", "`", "**", "_", "|", "|---|---|\n", "    ",
     "<b>", "</b>", "[", "](", ")", "!", "&amp;", "&#27;", "\\", "~~", "---\n", "===\n", ":", "\t", "é", "日本", "😀",
     "\x1b[2J"]
)  # fmt: skip


@given(st.lists(PIECES, max_size=40), st.integers(12, 70), st.integers(2, 12), st.integers(0, 3))
@hypothesis_settings(max_examples=150)
def test_words_of_any_text_are_shown_once(pieces: list[str], width: int, height: int, seed: int) -> None:
    text = "".join(pieces)
    rows = "".join("".join(shown(text, width, height, seed)).split())
    for word in ("word", "other"):
        hidden = len(re.findall(rf"^[ >\-\d.]*(?:```+|~~~+)[^\n]*{word}", text, re.MULTILINE))
        assert text.count(word) - 2 * hidden <= rows.count(word) <= text.count(word)


def test_what_is_complete() -> None:
    assert split_complete("a\n") == ([], "a\n")
    assert split_complete("a\n\nb") == ([], "a\n\nb"), "b could become anything"
    assert split_complete("a\n\nb\n") == (["a\n\n"], "b\n")
    assert split_complete("- a\n\n- b\n") == ([], "- a\n\n- b\n"), "one list"
    assert split_complete("```\na\n\nb\n") == ([], "```\na\n\nb\n")
    assert split_complete("a\n\n```\nb\n```\nc\n") == (["a\n\n", "```\nb\n```\n"], "c\n")
    assert split_complete("") == ([], "")
