"""What filters, methods and formats of a chat template would make, worked out before they make it.

Lengths are in bytes of the result, times in steps; each check is linear in its arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from string import Formatter
from typing import Any

from graphrt.models.chat_limits import LimitError, Stream, expect, weigh

MAX_ARGUMENT = 10_000  # a number given to a filter or method: widths, counts
MAX_SEARCH = 100_000_000  # comparisons of characters, where Python compares each of a text with each of another
MAX_FIELD = 2000  # characters that width and precision of up to 3 digits can give a field of a format
MAX_INDENT = 16  # of tojson

_WIDE = re.compile(r"\d{4}|\*")
_DIGIT = re.compile(r"\d")
_LINE_ENDS = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
_SPACES = "".join(filter(str.isspace, map(chr, range(0x3001))))
_PIECE = 80  # bytes of a short str and its place in a list
#: Filters and methods that make a list of a text's characters.
_SPREADING = frozenset({"list", "batch", "slice", "map", "select", "reject", "sort", "unique", "groupby", "join"})


class Given:
    """The arguments of one filter or method. args[0]: what it is applied to."""

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.subject, self._args, self._kwargs = args[0], args, kwargs

    def get(self, place: int, name: str, default: Any = None) -> Any:
        """One argument, however it was given; place counts the subject."""
        return self._args[place] if len(self._args) > place else self._kwargs.get(name, default)

    @property
    def text(self) -> str:
        """The subject as text."""
        return self.subject if isinstance(self.subject, str) else str(self.subject)


def check_arguments(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Refuses a filter or method call whose result could be far larger than what goes in. args[0]: the receiver."""
    if not args:
        raise TypeError(f"{name} needs a value")
    for arg in (*args[1:], *kwargs.values()):
        if isinstance(arg, (int, float)) and not -MAX_ARGUMENT <= arg <= MAX_ARGUMENT:
            raise LimitError(f"a number given to {name} must be at most {MAX_ARGUMENT}, got {arg:.6g}")
    weigh([*args, *kwargs.values()])
    if name in _SPREADING:
        for arg in args[:2]:
            _check_spread(arg)
    check = _CHECKS.get(name)
    if check is not None:
        check(Given(args, kwargs))


def _check_spread(text: Any) -> None:
    """Of a text as a list of its characters: Python keeps those of ASCII, and makes each other one anew."""
    if isinstance(text, str):
        expect(len(text) * (8 if text.isascii() else _PIECE))


def _check_replace(given: Given) -> None:
    text, old, new = given.text, str(given.get(1, "old", "")), str(given.get(2, "new", ""))
    times, most = text.count(old) if old else len(text) + 1, given.get(3, "count")
    if isinstance(most, int) and most >= 0:
        times = min(times, most)
    expect(weigh(text) + times * len(new))


def _check_join(given: Given) -> None:
    other = given.get(1, "d", "")
    method = isinstance(given.subject, str) and not isinstance(other, str)
    items, gap = (other, given.subject) if method else (given.subject, other)
    if isinstance(items, Stream):
        items = items.rest()
    count = len(items) if hasattr(items, "__len__") else 0
    expect(weigh(items) + count * len(str(gap)))


def _check_indent(given: Given) -> None:
    width = given.get(1, "width", 4)
    step = len(width) if isinstance(width, str) else int(width)
    expect(weigh(given.text) + (_count(given.text, _LINE_ENDS) + 1) * (step * 4 + _PIECE))


def _check_split(given: Given) -> None:
    separator, most = given.get(1, "sep"), given.get(2, "maxsplit", -1)
    pieces = 1 + (given.text.count(separator) if separator else _count(given.text, _SPACES))
    if isinstance(most, int) and most >= 0:
        pieces = min(pieces, most + 1)
    expect(weigh(given.text) + pieces * _PIECE)


def _check_lines(given: Given) -> None:
    expect(weigh(given.text) + _count(given.text, _LINE_ENDS) * _PIECE)


def _check_words(given: Given) -> None:
    expect(len(given.text) * _PIECE // 4)  # a word and what ends it are two characters at least


def _check_search(given: Given) -> None:
    """Searching from the right and stripping characters look at each of one text for each of another."""
    for key in ("sep", "chars"):
        wanted = given.get(1, key)
        if isinstance(wanted, str) and len(given.text) * len(wanted) > MAX_SEARCH:
            raise LimitError(
                f"a search may compare {MAX_SEARCH} characters, got texts of {len(given.text)} and {len(wanted)}"
            )


def _check_rsplit(given: Given) -> None:
    _check_search(given)
    _check_split(given)


def _check_int(given: Given) -> None:
    if isinstance(given.subject, str) and len(given.subject) > 1000:
        raise LimitError("a number may have 1000 digits")


def _check_tojson(given: Given) -> None:
    indent, separators = given.get(2, "indent"), given.get(3, "separators")
    if indent is not None and not (isinstance(indent, int) and 0 <= indent <= MAX_INDENT):
        raise LimitError(f"tojson's indent must be 0 to {MAX_INDENT}, got {indent!r:.40}")
    weight = weigh(given.subject)
    # each item has at least 16 bytes of that weight; an indent is repeated for each level that it is in
    each = sum(map(len, map(str, separators or ()))) + (indent or 0) * _depth(given.subject)
    expect(weight + weight // 16 * each)


def _depth(value: Any) -> int:
    """Levels of lists in lists; for values that weigh has bounded."""
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [
            child
            for item in level
            if isinstance(item, (list, tuple, dict))
            for child in (item.values() if isinstance(item, dict) else item)
        ]
    return depth


def _count(text: str, characters: str) -> int:
    return sum(map(text.count, characters))


_CHECKS: dict[str, Callable[[Given], None]] = {
    "replace": _check_replace, "join": _check_join, "indent": _check_indent, "int": _check_int, "tojson": _check_tojson,
    "split": _check_split, "rsplit": _check_rsplit, "splitlines": _check_lines,
    "title": _check_words, "wordcount": _check_words,
    **dict.fromkeys(("rfind", "rindex", "rpartition", "strip", "lstrip", "rstrip", "trim"), _check_search),
}  # fmt: skip


def check_percent(form: str, values: Any) -> None:
    """Checks `form % values` beforehand."""
    first = form.find("%")
    if first >= 0 and _WIDE.search(form, first):
        raise LimitError("a width in a % format may have 3 digits")
    field = MAX_FIELD if _DIGIT.search(form) else 0
    expect(weigh(form) * 4 + weigh(values) * (form.count("%") + 1) + field * form.count("%"))


def check_format(form: str, values: tuple[Any, ...]) -> None:
    """Checks `form.format(*values)` beforehand. Raises ValueError where Python's own reading of form does."""
    fields = [spec for _, name, spec, _ in Formatter().parse(form) if name is not None]
    if any(spec and ("{" in spec or _WIDE.search(spec)) for spec in fields):
        raise LimitError("a width in a format may have 3 digits, and fields may not be nested")
    expect(weigh(form) + weigh(values) * len(fields) + MAX_FIELD * sum(map(bool, fields)))
