"""The limits of chat templates one by one, at the value that still passes and at the next one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from graphrt.errors import ChatTemplateError
from graphrt.models import chat_arguments, chat_environment, chat_limits
from graphrt.models.chat import ChatTemplate
from graphrt.models.chat_arguments import MAX_ARGUMENT
from graphrt.models.chat_limits import MAX_DEPTH, MAX_INT_BITS, MAX_VALUE, Budget, LimitError, Stream
from graphrt.models.chat_renderer import Renderer

EMPTY = sys.getsizeof("")  # bytes of a str beside its characters


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth - 1):
        value = (value,)
    return value


def check_arguments(name: str, *args: Any, **kwargs: Any) -> None:
    chat_arguments.check_arguments(name, args, kwargs)


#: What passes, and the same a little larger, which does not.
EDGES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "a value": (lambda: chat_limits.expect(MAX_VALUE), lambda: chat_limits.expect(MAX_VALUE + 1)),
    "a string": (
        lambda: chat_limits.weigh("a" * (MAX_VALUE - EMPTY)), lambda: chat_limits.weigh("a" * (MAX_VALUE - EMPTY + 1)),
    ),
    "what a list holds": (
        lambda: chat_limits.weigh(["a" * 10**6] * 4), lambda: chat_limits.weigh(["a" * 10**6] * 5),
    ),
    "what a dict holds": (
        lambda: chat_limits.weigh(dict.fromkeys(range(4), "a" * 10 ** 6)),
        lambda: chat_limits.weigh(dict.fromkeys(range(5), "a" * 10 ** 6)),
    ),
    "the keys of a dict": (
        lambda: chat_limits.weigh({"a" * 10**6 + str(i): 0 for i in range(4)}),
        lambda: chat_limits.weigh({"a" * 10**6 + str(i): 0 for i in range(5)}),
    ),
    "lists in lists": (
        lambda: chat_limits.weigh(nested(MAX_DEPTH)), lambda: chat_limits.weigh(nested(MAX_DEPTH + 1)),
    ),
    "what a filter yields": (
        lambda: chat_limits.weigh(Stream(["a" * 10**6] * 4)), lambda: chat_limits.weigh(Stream(["a" * 10**6] * 5)),
    ),
    "the values of a dict": (
        lambda: chat_limits.weigh(dict.fromkeys(range(4), "a" * 10**6).values()),
        lambda: chat_limits.weigh(dict.fromkeys(range(5), "a" * 10**6).values()),
    ),
    "digits of numbers": (
        lambda: chat_limits.weigh([1 << 3000] * 4000), lambda: chat_limits.weigh([1 << 3000] * 4200),
    ),
    "all that a filter yields": (
        lambda: Budget(60.0).drain("a" * 10**6 for _ in range(4)),
        lambda: Budget(60.0).drain("a" * 10**6 for _ in range(5)),
    ),
    "a number given by place": (
        lambda: check_arguments("ljust", "a", MAX_ARGUMENT), lambda: check_arguments("ljust", "a", MAX_ARGUMENT + 1),
    ),
    "a negative number": (
        lambda: check_arguments("ljust", "a", -MAX_ARGUMENT), lambda: check_arguments("ljust", "a", -MAX_ARGUMENT - 1),
    ),
    "a number given by name": (
        lambda: check_arguments("round", 1.5, precision=MAX_ARGUMENT),
        lambda: check_arguments("round", 1.5, precision=MAX_ARGUMENT + 1),
    ),
    "replacing characters": (
        lambda: check_arguments("replace", "a" * 2000, "a", "b" * 2000),
        lambda: check_arguments("replace", "a" * 2100, "a", "b" * 2000),
    ),
    "replacing nothing, which lies between all characters": (
        lambda: check_arguments("replace", "a" * 2000, "", "b" * 2000),
        lambda: check_arguments("replace", "a" * 2100, "", "b" * 2000),
    ),
    "joining with a gap": (
        lambda: check_arguments("join", ["a"] * 2000, "b" * 2000),
        lambda: check_arguments("join", ["a"] * 2100, "b" * 2000),
    ),
    "joining by the method of a string": (
        lambda: check_arguments("join", "b" * 2000, ["a"] * 2000),
        lambda: check_arguments("join", "b" * 2000, ["a"] * 2100),
    ),
    "joining what a filter yields": (
        lambda: check_arguments("join", Stream(["a"] * 2000), "b" * 2000),
        lambda: check_arguments("join", Stream(["a"] * 2100), "b" * 2000),
    ),
    "indenting by a number": (
        lambda: check_arguments("indent", "a\n" * 1000, 1000), lambda: check_arguments("indent", "a\n" * 1000, 1100),
    ),
    "indenting by a text": (
        lambda: check_arguments("indent", "a\n" * 1000, "b" * 1000),
        lambda: check_arguments("indent", "a\n" * 1000, "b" * 1100),
    ),
    "indenting lines that end otherwise": (
        lambda: check_arguments("indent", "a\x85" * 1000, width=1000),
        lambda: check_arguments("indent", "a\x85" * 1000, width=1100),
    ),
    "replacing by name": (
        lambda: check_arguments("replace", "a" * 2000, old="a", new="b" * 2000),
        lambda: check_arguments("replace", "a" * 2100, old="a", new="b" * 2000),
    ),
    "replacing the first few": (
        lambda: check_arguments("replace", "a" * 2100, "a", "b" * 2000, 2000),
        lambda: check_arguments("replace", "a" * 2100, "a", "b" * 2000, count=2099),
    ),
    "joining by name": (
        lambda: check_arguments("join", ["a"] * 2000, d="b" * 2000),
        lambda: check_arguments("join", ["a"] * 2100, d="b" * 2000),
    ),
    "pieces of a text": (
        lambda: check_arguments("split", "a," * 50_000, ","), lambda: check_arguments("split", "a," * 52_000, ","),
    ),
    "pieces of a text between spaces": (
        lambda: check_arguments("split", "a\u3000" * 48_000), lambda: check_arguments("split", "a\u3000" * 52_000),
    ),
    "lines of a text": (
        lambda: check_arguments("splitlines", "a\r" * 50_000), lambda: check_arguments("splitlines", "a\r" * 52_000),
    ),
    "letters of ASCII": (
        lambda: check_arguments("list", "a" * 524_000), lambda: check_arguments("list", "a" * 525_000),
    ),
    "letters beyond ASCII": (
        lambda: check_arguments("list", "é" * 52_000), lambda: check_arguments("list", "é" * 53_000),
    ),
    "a search from the right": (
        lambda: check_arguments("rfind", "a" * 10**5, "b" * 10**3),
        lambda: check_arguments("rfind", "a" * 10**5, "b" * 1001),
    ),
    "characters to strip": (
        lambda: check_arguments("trim", "a" * 10**5, chars="b" * 10**3),
        lambda: check_arguments("trim", "a" * 10**5, chars="b" * 1001),
    ),
    "indents of JSON": (
        lambda: check_arguments("tojson", [[1]] * 2500, indent=16),
        lambda: check_arguments("tojson", [[1]] * 50_000, indent=16),
    ),
    "digits of a number": (
        lambda: check_arguments("int", "1" * 1000), lambda: check_arguments("int", "1" * 1001),
    ),
    "a product of numbers": (
        lambda: chat_limits.check_product(1 << (MAX_INT_BITS - 2), 1),
        lambda: chat_limits.check_product(1 << (MAX_INT_BITS - 1), 1),
    ),
    "a product of a string": (
        lambda: chat_limits.check_product("ab", MAX_VALUE // 2), lambda: chat_limits.check_product("ab", MAX_VALUE),
    ),
    "a product with a list on the right": (
        lambda: chat_limits.check_product(1000, ["a" * 1000]), lambda: chat_limits.check_product(5000, ["a" * 1000]),
    ),
    "a power": (
        lambda: chat_limits.check_power(2, MAX_INT_BITS // 2), lambda: chat_limits.check_power(2, MAX_INT_BITS // 2 + 1)
    ),
    "a power by a negative number": (
        lambda: chat_limits.check_power(2, -MAX_INT_BITS // 2), lambda: chat_limits.check_power(2, -MAX_INT_BITS),
    ),
    "a width of %": (
        lambda: chat_arguments.check_percent("%100d", 1), lambda: chat_arguments.check_percent("%1000d", 1),
    ),
    "fills of %": (
        lambda: chat_arguments.check_percent("%9d" * 2000, 1), lambda: chat_arguments.check_percent("%9d" * 2100, 1),
    ),
    "fills of format": (
        lambda: chat_arguments.check_format("{0:9}" * 2000, (1,)),
        lambda: chat_arguments.check_format("{0:9}" * 2100, (1,)),
    ),
    "many fields of %": (
        lambda: chat_arguments.check_percent("%s" * 9, "a" * 400_000),
        lambda: chat_arguments.check_percent("%s" * 10, "a" * 400_000),
    ),
    "a width of format": (
        lambda: chat_arguments.check_format("{:100}", (1,)), lambda: chat_arguments.check_format("{:1000}", (1,)),
    ),
    "many fields of format": (
        lambda: chat_arguments.check_format("{0}" * 10, ("a" * 400_000,)),
        lambda: chat_arguments.check_format("{0}" * 11, ("a" * 400_000,)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", EDGES)
def test_a_limit_stops_the_next_and_nothing_before(what: str) -> None:
    passes, fails = EDGES[what]
    passes()
    with pytest.raises(LimitError):
        fails()


@pytest.mark.parametrize(
    ("value", "weight"),
    [
        ("a" * 100, EMPTY + 100),
        ([1] * 10, 16 + 8 * 10),  # what a list holds was there before
        ((1, 2), 16 + 8 * 2),
        ({"a": 1}, 16 + 8),
        (3, 8),
    ],
    ids=["str", "list", "tuple", "dict", "int"],
)
def test_all_values_of_a_rendering_add_up(value: Any, weight: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_limits, "MAX_TOTAL", 5 * weight)
    budget = Budget(60.0)
    for _ in range(5):
        budget.make(value)
    with pytest.raises(LimitError, match="bytes of values, and makes more"):
        budget.make(value)


def test_what_a_filter_made_counts_with_all_that_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = ["a", "b", "c"]
    whole = chat_limits.weigh(parts)
    assert whole == 16 + 3 * 8 + 3 * (EMPTY + 1)
    monkeypatch.setattr(chat_limits, "MAX_TOTAL", 2 * whole)
    budget = Budget(60.0)
    for _ in range(2):
        budget.make(parts, deep=True)
    with pytest.raises(LimitError):
        budget.make(parts, deep=True)


def test_all_output_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_limits, "MAX_OUTPUT", 30)
    budget = Budget(60.0)
    assert [budget.emit(x) for x in ("a" * 10, 1234567890, "c" * 10)] == ["a" * 10, "1234567890", "c" * 10]
    with pytest.raises(LimitError, match="may write 30 characters"):
        budget.emit("d")


def test_a_program_has_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted before anything is compiled: the output is a node, and so is each name."""
    monkeypatch.setattr(chat_environment, "MAX_NODES", 11)
    Renderer("{{a}}" * 10)
    with pytest.raises(ChatTemplateError, match="it may have 11 expressions and statements, and has 12"):
        Renderer("{{a}}" * 11)


def test_a_reason_is_cut() -> None:
    with pytest.raises(ChatTemplateError) as caught:
        ChatTemplate("{{ raise_exception('x' * 4000) }}").render([{"role": "user", "content": "Hi"}])
    assert len(str(caught.value)) < 400 and str(caught.value).endswith("xxx...")


def test_a_reason_steers_no_terminal() -> None:
    with pytest.raises(ChatTemplateError) as caught:
        ChatTemplate(r"{{ raise_exception('a\x1b[2Jb') }}").render([{"role": "user", "content": "Hi"}])
    assert str(caught.value) == r"the chat template refuses these messages: a\x1b[2Jb."
