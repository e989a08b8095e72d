"""GBNF, llama.cpp's notation of grammars (its grammars/README.md), read and written as rules of single characters.

llguidance takes grammars in Lark's notation, and cuts text into the longest pieces that a terminal matches before it
looks at the rules. A grammar like `[a-z]+ "x"` would then never end. So each terminal here is one character or a class
of characters, of which there is no longer piece.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NoReturn

from graphrt.errors import SessionError
from graphrt.printing import brief, brief_name

#: Characters of a grammar, levels of its parentheses, and the most that a repetition may say, as in llama.cpp.
MAX_CHARS, MAX_DEPTH, MAX_REPEAT = 256 * 1024, 64, 2000
#: Symbols of all rules when each repetition is written out, as llguidance counts them in 16 bits.
MAX_SYMBOLS = 60_000
#: Rules and groups: llguidance goes down one that uses another that uses another on the machine's stack.
MAX_RULES = 1000

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_REPEAT = re.compile(r"\{\s*(\d{1,9})\s*(?:(,)\s*(\d{1,9})?\s*)?\}")
_NEXT_LINE_GOES_ON = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*\|")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-", "^": "^", "/": "/"}
_HEX = {"x": 2, "u": 4, "U": 8}


def to_lark(text: str) -> str:
    """The same language in Lark's notation, as llguidance has it. Raises SessionError for what is no GBNF."""
    if len(text) > MAX_CHARS:
        raise SessionError(f"a grammar may have {MAX_CHARS} characters, got {len(text)}; make it smaller")
    return _Reader(text).read()


@dataclass
class _Part:
    """A piece of a rule in Lark's notation, and how many symbols it has when its repetitions are written out."""

    lark: str
    symbols: int


@dataclass
class _Reader:
    """Reads a text from its beginning to its end. symbols: of the rules so far; rules: what each stands for, by its
    name in the grammar; wanted: where each name is used first; terminals: their names, by their patterns; groups: what
    those in parentheses stand for."""

    text: str
    pos: int = 0
    depth: int = 0
    symbols: int = 0
    rules: dict[str, str] = field(default_factory=dict)
    wanted: dict[str, int] = field(default_factory=dict)
    terminals: dict[str, str] = field(default_factory=dict)
    groups: list[str] = field(default_factory=list)

    def read(self) -> str:
        self._skip(_SPACE_LINES)
        while self.pos < len(self.text):
            self._rule()
            self._skip(_SPACE_LINES)
        if "root" not in self.rules:
            raise SessionError("a grammar must have a rule named root, where it begins; got none")
        missing = next((name for name in self.wanted if name not in self.rules), None)
        if missing is not None:
            self.pos = self.wanted[missing]
            self._refuse(f"the rule {brief_name(missing)} must be somewhere in the grammar, there is none")
        numbers = {name: f"r{i}" for i, name in enumerate(self.rules)}
        bodies = dict(zip(numbers.values(), self.rules.values())) | {
            f"g{i}": body for i, body in enumerate(self.groups)
        }
        lines = [f"start: {numbers['root']}"]
        lines += [f"{name}: {_NAME_MARK.sub(lambda m: numbers[m[1]], body)}" for name, body in bodies.items()]
        lines += [f"{name}: /{pattern}/" for pattern, name in self.terminals.items()]
        return "%llguidance {}\n" + "\n".join(lines) + "\n"

    def _rule(self) -> None:
        start = self.pos
        name = self._name()
        self._skip(_SPACE)
        if not self.text.startswith("::=", self.pos):
            self._refuse(f"a rule must be written as NAME ::= ..., got {brief_name(name)} without ::=")
        self.pos += 3
        self._skip(_SPACE_LINES)
        if name in self.rules:
            self.pos = start
            self._refuse(f"a rule must be given once, {brief_name(name)} is there twice")
        found = self._alternatives()
        if self.pos < len(self.text) and self.text[self.pos] not in "\r\n":
            self._refuse("a rule must end with its line")
        self.symbols += found.symbols
        self._check_size()
        self.rules[name] = found.lark

    def _alternatives(self) -> _Part:
        """What stands between bars, up to the end of a line, or within parentheses to the closing one."""
        found = [self._sequence()]
        while True:
            goes_on = _NEXT_LINE_GOES_ON.match(self.text, self.pos)
            if goes_on is None:
                break
            self.pos = goes_on.end()
            self._skip(_SPACE_LINES)
            found.append(self._sequence())
        return _Part(" | ".join(part.lark for part in found), 1 + sum(part.symbols for part in found))

    def _sequence(self) -> _Part:
        found: list[_Part] = []
        while (part := self._item()) is not None:
            self._skip_space()
            found.append(self._repeated(part))
            self._skip_space()
        return _Part(" ".join(part.lark for part in found) or '""', sum(part.symbols for part in found))

    def _item(self) -> _Part | None:
        """A literal, a class, any character, a group or a rule's name; None at the end of a sequence."""
        char = self.text[self.pos : self.pos + 1]
        if char == '"':
            return self._literal()
        if char == "[":
            return self._class()
        if char == ".":
            self.pos += 1
            return self._terminal(r"[\s\S]")
        if char == "(":
            return self._group()
        if _NAME.match(char):
            start, name = self.pos, self._name()
            self.wanted.setdefault(name, start)
            return _Part(f"<{name}>", 1)
        if char in "<!" and char:
            self._refuse("tokens by their ids (<[123]>) are not taken; write their text")
        return None

    def _group(self) -> _Part:
        start = self.pos
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self._refuse(f"parentheses may be {MAX_DEPTH} deep, these go deeper")
        self.pos += 1
        self._skip(_SPACE_LINES)
        found = self._alternatives()
        if not self.text.startswith(")", self.pos):
            self.pos = start
            self._refuse("a parenthesis must be closed, this one is not")
        self.pos += 1
        self.depth -= 1
        return self._named(found)

    def _named(self, part: _Part) -> _Part:
        """The same as a rule of its own, so that nothing in Lark's notation lies in parentheses."""
        self.groups.append(part.lark)
        return _Part(f"g{len(self.groups) - 1}", part.symbols)

    def _repeated(self, part: _Part) -> _Part:
        """The item with the signs of repetition behind it."""
        first = True
        while True:
            sign = self.text[self.pos : self.pos + 1]
            if sign and sign in "*+?{" and (" " in part.lark or not first):
                part = self._named(part)
            first = False
            if sign and sign in "*+?":
                self.pos += 1
                part = _Part(f"{part.lark}{sign}", part.symbols + 1)
            elif sign == "{":
                part = self._counted(part)
            else:
                return part
            self._check_size(part.symbols)
            self._skip_space()

    def _counted(self, part: _Part) -> _Part:
        found = _REPEAT.match(self.text, self.pos)
        if found is None:
            self._refuse("a repetition must be written as {m}, {m,} or {m,n}")
        low = int(found[1])
        high = int(found[3]) if found[3] else None if found[2] else low
        if max(low, high or 0) > MAX_REPEAT or (high is not None and high < low):
            self._refuse(f"a repetition must be from 0 to {MAX_REPEAT} with the smaller number first")
        self.pos = found.end()
        if high == 0:
            return _Part('""', 1)
        bounds = str(low) if high == low else f"{low},{'' if high is None else high}"
        return _Part(f"{part.lark}{{{bounds}}}", part.symbols * max(low, high or 0, 1) + 1)

    def _literal(self) -> _Part:
        start = self.pos
        self.pos += 1
        found: list[_Part] = []
        while True:
            if self.pos >= len(self.text):
                self.pos = start
                self._refuse("a text must be closed by a quotation mark, this one is not")
            if self.text[self.pos] == '"':
                self.pos += 1
                return _Part(" ".join(part.lark for part in found) or '""', len(found) + 1)
            found.append(self._terminal(f"[{_spelled(self._char())}]"))

    def _class(self) -> _Part:
        start = self.pos
        self.pos += 1
        negated = self.text.startswith("^", self.pos)
        self.pos += negated
        spans: list[str] = []
        while not self.text.startswith("]", self.pos):
            if self.pos >= len(self.text):
                self.pos = start
                self._refuse("a class must be closed by a bracket, this one is not")
            low = self._char()
            if self.text.startswith("-", self.pos) and not self.text.startswith("]", self.pos + 1):
                self.pos += 1
                high = self._char()
                if high < low:
                    self._refuse("the first character of a range must not come after its last")
                spans.append(f"{_spelled(low)}-{_spelled(high)}")
            else:
                spans.append(_spelled(low))
        self.pos += 1
        if not spans:
            if negated:
                return self._terminal(r"[\s\S]")
            self._refuse("a class must have at least one character, this one has none")
        return self._terminal(f"[{'^' * negated}{''.join(spans)}]")

    def _char(self) -> str:
        """The next character of a literal or a class, which may be written as an escape."""
        char = self.text[self.pos : self.pos + 1]
        self.pos += 1
        if char != "\\":
            if not char:
                self._refuse("a character must follow, the grammar ends")
            return char
        kind = self.text[self.pos : self.pos + 1]
        self.pos += 1
        if kind in _ESCAPES:
            return _ESCAPES[kind]
        digits = self.text[self.pos : self.pos + _HEX.get(kind, 0)]
        code = int(digits, 16) if re.fullmatch("[0-9A-Fa-f]+", digits) and len(digits) == _HEX[kind] else None
        if code is None or code > 0x10FFFF or 0xD800 <= code < 0xE000:
            self._refuse(r"an escape must be one of \n \r \t \\ \" \[ \] \xHH \uHHHH \UHHHHHHHH")
        self.pos += len(digits)
        return chr(code)

    def _terminal(self, pattern: str) -> _Part:
        name = self.terminals.setdefault(pattern, f"T{len(self.terminals)}")
        return _Part(name, 1)

    def _name(self) -> str:
        found = _NAME.match(self.text, self.pos)
        if found is None:
            self._refuse("a rule's name must be made of letters, digits, - and _")
        self.pos = found.end()
        return found[0]

    def _skip(self, space: re.Pattern[str]) -> None:
        found = space.match(self.text, self.pos)
        assert found is not None
        self.pos = found.end()

    def _skip_space(self) -> None:
        """Within parentheses lines may end anywhere."""
        self._skip(_SPACE_LINES if self.depth else _SPACE)

    def _check_size(self, more: int = 0) -> None:
        if self.symbols + more > MAX_SYMBOLS:
            self._refuse(f"a grammar may have {MAX_SYMBOLS} symbols with its repetitions written out, this has more")
        if len(self.rules) + len(self.groups) > MAX_RULES:
            self._refuse(f"a grammar may have {MAX_RULES} rules and groups together, this has more")

    def _refuse(self, rule: str) -> NoReturn:
        line = self.text.count("\n", 0, self.pos) + 1
        raise SessionError(f"{rule}; line {line} of the grammar: {brief(self.text[self.pos : self.pos + 40])}")


#: A rule's name in a rule's body, until all names are known.
_NAME_MARK = re.compile(r"<([A-Za-z0-9_-]+)>")


def _spelled(char: str) -> str:
    """A character as it may stand in a class of a regular expression."""
    return char if char.isascii() and char.isalnum() else f"\\u{{{ord(char):X}}}"
