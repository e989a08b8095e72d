"""Chat templates by grammar, hostile ones above all: what grows, nests, repeats and compares, joined at random.

An input is the template's text. Whatever it does, it must end as a text or as a ChatTemplateError of a few hundred
characters, and must neither crash the process that renders nor be ended by its clock on the wall.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from fuzz.templates_words import BINARY, FILTERS, LEAVES, METHODS, NUMBERS, TESTS, TEXTS, TYPED, UNKNOWN
from graphrt.errors import ChatTemplateError
from graphrt.models.chat import ChatTemplate

NAME = "templates"
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <b> & 'you' é \U0001f600", "tools": [{"name": "f", "args": {"x": [1, 2.5, None]}}]},
    {"role": "assistant", "content": "Hello\r\n\x0b" * 50, "n": 3},
    {"role": "user", "content": "Bye"},
]
NAMES = ("a", "b", "c", "messages", "ns", "m", "i", "bos_token", "undefined", "f", "range")
KINDS = {"TEXT": "s", "LIST": "l", "DICT": "d", "N": "n", "EXPR": ""}
SECONDS = 0.3  # of a rendering; the default would take five times as long of those that never end
LONGEST = 700  # characters of a message


def warm() -> None:
    """Imports what each input needs; the process that renders is each fork's own."""
    attempt(b"{{ messages }}")


def make(seed: int) -> bytes:
    """A template of up to some 100 KB."""
    return _Grammar(random.Random(f"template {seed}")).template().encode("utf-8", "surrogatepass")


def attempt(data: bytes) -> str:
    """Compiles and renders. The words say what ended it."""
    try:
        text = ChatTemplate(data.decode("utf-8", "surrogatepass"), "<s>", "</s>", SECONDS).render(MESSAGES)
    except ChatTemplateError as error:
        message = str(error)
        assert len(message) <= LONGEST and message.replace("\n", "").isprintable(), f"unfit to print: {message!r:.2000}"
        assert "must not" not in message and "there was none" not in message, message
        return next((word for word, sign in _WORDS.items() if sign in message), "failed")
    assert len(text) <= 8 << 20
    return "rendered"


#: Outcomes, and what their sentences hold; the first that fits. The system's are those that Python's limits let pass.
_WORDS = {
    "stopped by the system: memory": "bytes of memory",
    "stopped by the system: time": "of the processor",
    "not compiled": "can't be compiled",
    "stopped: deadline": "it may run for",
    "stopped: limit": "was stopped",
    "refused": "refuses these messages",
}


class _Grammar:
    """Productions; each takes what depth is left. size: characters so far, which ends all growth."""

    def __init__(self, rng: random.Random) -> None:
        self._rng, self._size = rng, 0
        self._statements: list[Callable[[int], str]] = [
            *(self._output, self._output, self._output, self._set, self._set, self._for, self._for, self._if),
            *(self._macro, self._call, self._filter_block, self._grow, self._grow, self._capture, self._text),
            *(self._with, self._odd),
        ]
        self._expressions: list[Callable[[int], str]] = [
            *(self._name, self._name, self._literal, self._literal, self._filtered, self._filtered, self._method),
            *(self._binary, self._binary, self._compare, self._test, self._item, self._list, self._dict, self._called),
            *(self._choice, self._keep),
        ]

    def template(self) -> str:
        start = (
            "{% set ns = namespace(a='x', b=[1], c=1) %}{% set m = messages[1] %}{% set i = 3 %}{% set n = 60 %}"
            "{% set a = 'ab' %}{% set b = [1, 'x'] %}{% set c = {'k': 'v'} %}"
            "{% macro f(x=1) %}{{ x }}{% set ns.b = varargs %}{% set ns.c = kwargs %}{% endmacro %}"
            "{% macro g(x=1, y=2) %}{% set ns.c = [x, y] %}{% if caller %}{{ caller(1) }}{% endif %}{% endmacro %}"
        )
        body = "".join(self._statement(4) for _ in range(self._rng.choice((1, 1, 2, 2, 3, 5, 12))))
        if self._rng.random() < 0.01:
            body *= self._rng.choice((10, 100, 1000))
        body = (start if self._rng.random() < 0.95 else "") + body
        return self._damaged(body[:140_000]) if self._rng.random() < 0.1 else body[:140_000]

    def _damaged(self, body: str) -> str:
        at = self._rng.randrange(len(body) + 1)
        piece = self._rng.choice(("", "{%", "%}", "{{", "}}", "{#", "'", "\\", "(" * 300, "[" * 5000, "\x00", "\ud800"))
        return body[:at] + piece + body[at + self._rng.choice((0, 1, 7)) :]

    def _statement(self, depth: int) -> str:
        text = self._rng.choice(self._statements)(depth - 1) if depth > 0 and self._size < 20_000 else self._output(0)
        self._size += len(text)
        return text

    def _expression(self, depth: int) -> str:
        if self._rng.random() < 0.85:
            return self._typed(self._rng.choice("sslln" + "d"), depth)
        if depth <= 0 or self._size > 20_000:
            return self._rng.choice((self._name, self._literal))(0)
        text = self._rng.choice(self._expressions)(depth - 1)
        self._size += len(text) // 4
        return text

    def _typed(self, kind: str, depth: int) -> str:
        """An expression of a kind: "s" text, "l" list, "n" number, "d" mapping. Wrong ones come in here and there."""
        if depth <= 0 or self._size > 20_000 or self._rng.random() < 0.15:
            return self._leaf(kind)
        text = self._filled(self._rng.choice(TYPED[kind]), depth)
        self._size += len(text) // 4
        return f"({text})"

    def _filled(self, pattern: str, depth: int) -> str:
        def expression(match: re.Match[str]) -> str:
            kind = KINDS[match[0]]
            return self._typed(kind, depth - 1) if kind else self._expression(depth - 1)

        return re.sub(r"\b(?:TEXT|LIST|DICT|EXPR|N)\b", expression, pattern)

    def _leaf(self, kind: str) -> str:
        if self._rng.random() < 0.05:
            kind = self._rng.choice("slnd")
        if self._rng.random() < 0.5:
            return self._rng.choice(LEAVES[kind])
        if kind == "s" and self._rng.random() < 0.3:
            return self._keep(0)
        return self._rng.choice(
            {"s": TEXTS, "n": NUMBERS, "l": ("[]", "[1, 'x']", "range(9)"), "d": ("{}", "{1: 2}")}[kind]
        )

    # -- statements

    def _output(self, depth: int) -> str:
        return "{{ " + self._expression(depth + 1) + " }}"

    def _text(self, depth: int) -> str:
        return self._rng.choice(("x", "\n", " <|im_start|> ", "é" * 100, "y" * 5000))

    def _set(self, depth: int) -> str:
        if self._rng.random() < 0.1:
            return "{% set " + self._rng.choice(("a, b", "ns.c", "ns")) + " = " + self._expression(depth + 1) + " %}"
        target, kind = self._rng.choice((("a", "s"), ("b", "l"), ("c", "d"), ("n", "n"), ("ns.a", "s"), ("ns.b", "l")))
        return "{% set " + target + " = " + self._typed(kind, depth + 1) + " %}"

    def _capture(self, depth: int) -> str:
        pipe = "" if self._rng.random() < 0.7 else " | " + self._filter(depth)
        return "{% set " + self._rng.choice(("a", "ns.b", "c")) + pipe + " %}" + self._statement(depth) + "{% endset %}"

    def _for(self, depth: int) -> str:
        target = self._rng.choice(("i", "i", "i", "i", "a", "k, v" if self._rng.random() < 0.3 else "b"))
        over = self._rng.choice((f"range({self._rng.choice((3, 60, 300, 99999))})", self._typed("l", depth)))
        tail = self._rng.choice(("", "", "", " if " + self._expression(depth), " recursive"))
        body = "".join(self._statement(depth) for _ in range(self._rng.choice((1, 1, 2, 3))))
        extra = self._rng.choice(
            ("", "", "", "", "{{ loop(b) }}" if "rec" in tail else "", "{% break %}", "{% else %}x")
        )
        body += self._rng.choice(("", "", "{{ loop.changed(b, a) }}", "{% set ns.c = [loop] %}", "{{ loop.previtem }}"))
        body += self._rng.choice(
            ("", "", "", "{% continue %}", "{% set ns.c = loop.previtem %}", "{{ loop.cycle(a, b) }}")
        )
        return "{% for " + target + " in " + over + tail + " %}" + body + extra + "{% endfor %}"

    def _if(self, depth: int) -> str:
        other = self._rng.choice(("", "{% else %}" + self._statement(depth), "{% elif a %}" + self._statement(depth)))
        return "{% if " + self._expression(depth) + " %}" + self._statement(depth) + other + "{% endif %}"

    def _macro(self, depth: int) -> str:
        name, given = self._rng.choice("fgh"), self._rng.choice(("", "x", "x, y=a", "a, b=1"))
        use = self._rng.choice(("{{ varargs }}", "{{ kwargs }}", "{{ caller() }}", "{% set ns.b = varargs %}", ""))
        return "{% macro " + name + "(" + given + ") %}" + use + self._statement(depth) + "{% endmacro %}"

    def _call(self, depth: int) -> str:
        head = "{% call" + self._rng.choice(("", "(x)")) + " " + self._rng.choice("fgh") + "(" + self._arguments(depth)
        return head + ") %}" + self._statement(depth) + "{% endcall %}"

    def _filter_block(self, depth: int) -> str:
        return "{% filter " + self._filter(depth) + " %}" + self._statement(depth) + "{% endfilter %}"

    def _with(self, depth: int) -> str:
        return "{% with a = " + self._expression(depth) + " %}" + self._statement(depth) + "{% endwith %}"

    def _odd(self, depth: int) -> str:
        inner = self._statement(depth)
        return self._rng.choice(
            (
                *("{% autoescape true %}" + inner + "{% endautoescape %}",) * 6,
                "{% block " + self._rng.choice("pqr") + " %}" + inner + "{% endblock %}",
                "{% autoescape true %}" + inner + "{% endautoescape %}",
                "{% generation %}" + inner + "{% endgeneration %}",
                *(
                    "{% include a %}",
                    "{% import 'a' as b %}",
                    "{% extends b %}",
                    "{# a #}",
                    "{{ self.p() }}",
                    "{{ self }}",
                ),
                "{% raw %}" + inner + "{% endraw %}",
                "{{ raise_exception(" + self._expression(depth) + ") }}",
                "{{ strftime_now(" + self._expression(depth) + ") }}",
                "{%- if a -%} " + inner + " {%- endif -%}",
            )
        )

    def _grow(self, depth: int) -> str:
        """What a loop makes of a variable, from itself."""
        v = self._rng.choice(("ns.a", "ns.b", "ns.c"))
        w = self._rng.choice((v, v, "ns.a", "ns.b"))
        step = self._rng.choice(
            (
                *(f"{v} + {w}", f"{v} ~ {w}", f"[{v}, {w}]", f"({v}, {w})", f"{{'k': {v}, 'j': {w}}}", f"{v} * 2"),
                *(f"dict(k={v}, j={w})", f"[{v}] + [{w}]", f"{v} | {self._filter(depth)}", f"{v} * {v}", f"({v},)"),
                *(f"[{v}] | map('list') | list", f"{v} | list | batch(2) | list", f"namespace(a={v}, b={w})", "loop"),
                *(f"{{'k': {v}}}.values()", f"{{'k': {v}}}.items()", f"dict([[{v}, {w}]])", "loop.previtem", "[loop]"),
                self._expression(depth),
            )
        )
        change = self._rng.choice(
            (
                *("{% set " + v + " = " + step + " %}",) * 3,
                "{{ f(" + self._rng.choice((f"{v}, {w}", f"1, {v}, {v}", f"x=1, k={v}, j={w}", f"*{v}")) + ") }}",
                "{% set " + v + " %}{{ " + v + " }}{{ " + w + " }}{% endset %}",
                "{{ loop.changed(" + v + ") }}{% set " + v + " = [" + v + ", " + w + "] %}",
            )
        )
        times = self._rng.choice((8, 20, 60, 60, 300, 99999))
        return "{% for i in range(" + str(times) + ") %}" + change + "{% endfor %}" + self._output(depth)

    # -- expressions

    def _name(self, depth: int) -> str:
        return self._rng.choice((*NAMES, "ns.a", "ns.b", "ns.c", "m.content", "m.tools"))

    def _literal(self, depth: int) -> str:
        return self._rng.choice((self._rng.choice(NUMBERS), self._rng.choice(TEXTS), "none", "true", "[]", "{}", "()"))

    def _arguments(self, depth: int) -> str:
        given = [self._expression(depth) for _ in range(self._rng.choice((0, 1, 1, 2, 3)))]
        names = ("old", "new", "d", "attribute", "width", "indent", "separators", "default", "x", "count", "first", "k")
        for name in self._rng.sample(names, self._rng.choice((0, 0, 0, 1, 2))):
            given.append(f"{name}={self._expression(depth)}")
        if self._rng.random() < 0.05:
            given.append(self._rng.choice(("*b", "**c", "*ns.a", "**ns.c")))
        return ", ".join(given)

    def _filter(self, depth: int) -> str:
        name = self._rng.choice(FILTERS)
        if name in ("map", "select", "reject", "selectattr", "rejectattr") and self._rng.random() < 0.9:
            other = self._rng.choice(FILTERS if name == "map" else TESTS)
            first = "'content', " if name.endswith("attr") else ""
            return self._rng.choice(
                (f"{name}({first}'{other}', {self._expression(depth)})", f"{name}({first}'{other}')")
            )
        if self._rng.random() < 0.01:
            return self._rng.choice(UNKNOWN)
        if "(" in name:
            return self._filled(name, depth)
        return name if self._rng.random() < 0.5 else f"{name}({self._arguments(depth)})"

    def _filtered(self, depth: int) -> str:
        return f"({self._expression(depth)} | {self._filter(depth)})"

    def _method(self, depth: int) -> str:
        return f"({self._expression(depth)}).{self._rng.choice(METHODS)}({self._arguments(depth)})"

    def _binary(self, depth: int) -> str:
        return f"({self._expression(depth)} {self._rng.choice(BINARY)} {self._expression(depth)})"

    def _compare(self, depth: int) -> str:
        sign = self._rng.choice(("==", "!=", "<", ">=", "in", "not in"))
        return f"({self._expression(depth)} {sign} {self._expression(depth)})"

    def _test(self, depth: int) -> str:
        more = self._rng.choice(("", f"({self._expression(depth)})"))
        return f"({self._expression(depth)} is {self._rng.choice(('', 'not '))}{self._rng.choice(TESTS)}{more})"

    def _item(self, depth: int) -> str:
        index = self._rng.choice(("0", "-1", "'content'", ":", "::-1", "1:99999", self._expression(depth)))
        return f"({self._expression(depth)})[{index}]"

    def _list(self, depth: int) -> str:
        given = ", ".join(self._expression(depth) for _ in range(self._rng.choice((0, 1, 2, 3))))
        return self._rng.choice((f"[{given}]", f"({given},)" if given else "()"))

    def _dict(self, depth: int) -> str:
        return "{" + f"{self._expression(depth)}: {self._expression(depth)}" + "}"

    def _called(self, depth: int) -> str:
        called = (
            "range",
            "dict",
            "namespace",
            "f",
            "g",
            "loop",
            "loop.cycle",
            "loop.changed",
            "caller",
            "raise_exception",
        )
        return f"{self._rng.choice(called)}({self._arguments(depth)})"

    def _choice(self, depth: int) -> str:
        return f"({self._expression(depth)} if {self._expression(depth)} else {self._expression(depth)})"

    def _keep(self, depth: int) -> str:
        """A long value, or a format with much in it."""
        n = self._rng.choice((9, 99, 9999, 10**5, 10**6))
        piece = self._rng.choice(("a", "ab ", "é,", "%", "{0}", "%s", "\\r", "<"))
        percent = self._rng.choice(("%s", "%r", "%9d", "%999s", "%(a)s", "%*d", "%", "%.999f"))
        field = self._rng.choice(("", ":9", ":999", ":{1}", ".a", "[k]", "!r", "[}]:9999"))
        return self._rng.choice(
            (
                *(f"('{piece}' * {n})", f"(range({n}) | list)", f"([{self._expression(depth)}] * {n})"),
                f"(('{percent}' * {n}) % {self._expression(depth)})",
                f"(('{percent}' * {n}) % ([{self._literal(0)}] * {n}))",
                f"('{{0{field}}}' * {n}).format({self._arguments(depth)})",
            )
        )
