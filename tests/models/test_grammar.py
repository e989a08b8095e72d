"""Grammars and JSON schemas: which tokens they let through, against a plain regular expression or a parser of JSON;
what is no grammar; and hostile ones, which end as errors."""

from __future__ import annotations

import builtins
import json
import math
import re
import sys
from typing import Any

import numpy as np
import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.effort import instructions
from support.tiny import bpe, spm

import graphrt
from graphrt.errors import GraphrtError, SessionError
from graphrt.models.closed_schema import closed
from graphrt.models.gbnf import MAX_CHARS, MAX_DEPTH, MAX_RULES, MAX_SYMBOLS, to_lark
from graphrt.models.grammar import KEPT_GRAMMARS, MAX_REFS, GrammarMatcher, GrammarVocab, masks_of
from graphrt.models.regex_classes import ascii_classes
from graphrt.models.sampling_device import Drawn, SampleTables
from graphrt.models.tokenizer import Tokenizer

pytest.importorskip("llguidance")


def tokenizer(words: dict[str, Any]) -> Tokenizer:
    texts = [t if isinstance(t, str) else t.decode("utf-8", "surrogateescape") for t in words["tokens"]]
    return Tokenizer.from_metadata(
        {f"tokenizer.ggml.{key}": value for key, value in (words | {"tokens": texts}).items()}
    )


@pytest.fixture(scope="module", params=[spm, bpe], ids=["spm", "bpe"])
def vocab(request: pytest.FixtureRequest) -> GrammarVocab:
    return GrammarVocab(tokenizer(request.param()))


@pytest.fixture(scope="module")
def plain() -> GrammarVocab:
    return GrammarVocab(tokenizer(bpe()))


#: Parts of regular expressions with classes of characters, and what a text may be made of.
PARTS = [r"\d", r"\w", r"[\d]", r"[^\w]", r"[]\d]", r"[^]\d]", r"[a\]\d]", r"\\d", r"\[\d", "a", "]"]
CHARS = ["1", "٣", "a", "é", "_", "]", "[", "\\", "d", "^"]


@given(st.lists(st.sampled_from(PARTS), max_size=4), st.lists(st.sampled_from(CHARS), max_size=6))
@example([r"[]\d]"], ["1"])
@example([r"[^]\d]"], ["a"])
def test_digits_and_letters_of_a_regex_are_those_of_ascii(parts: list[str], text: list[str]) -> None:
    """What is written out says without re.ASCII what the pattern says with it."""
    pattern, said = "".join(parts), "".join(text)
    written = re.fullmatch(ascii_classes(pattern), said)
    assert bool(written) == bool(re.fullmatch(pattern, said, re.ASCII))


def test_a_number_of_a_regex_is_one_that_programs_read(plain: GrammarVocab) -> None:
    def fits(text: str) -> bool:
        return follow(plain.matcher(None, None, r"[\d]{2}\w"), plain, text)

    assert fits("12a") and not fits("1٣a") and not fits("12é")


def piece(vocab: GrammarVocab, token: int) -> bytes:
    return vocab.tokens.decode_bytes([token])


def follow(matcher: GrammarMatcher, vocab: GrammarVocab, text: str) -> bool:
    """Whether the text is let through byte by byte, and may end then."""
    single = {piece(vocab, t): t for t in range(vocab.n_vocab) if len(piece(vocab, t)) == 1}
    for i, byte in enumerate(text.encode()):
        mask = matcher.mask()
        if not mask[single[bytes([byte])]]:
            # where but one text is left its own tokens come: the byte may be the first of a longer one
            longer = [
                t
                for t in np.flatnonzero(mask).tolist()
                if text.encode()[i:].startswith(piece(vocab, t)) and t not in vocab.eog_ids
            ]
            if not longer:
                return False
            rest = text.encode()[i + len(piece(vocab, longer[0])) :].decode()
            matcher.accept(longer[0])
            return follow(matcher, vocab, rest)
        matcher.accept(single[bytes([byte])])
    return bool(matcher.mask()[vocab.eog_ids].all())


#: GBNF and the same as a regular expression.
REGULAR = {
    'root ::= "hello" " the"? " sea"*': r"hello( the)?( sea)*",
    'root ::= [a-z]+ "x"': r"[a-z]+x",
    'root ::= x y\nx ::= "a" | "ab"\ny ::= "bc" | "c"': r"(a|ab)(bc|c)",
    'root ::= ("he" | "hell" | "o"){2,3} "."': r"(he|hell|o){2,3}\.",
    'root ::= [^h\\n]* "t" . # a comment\n': r"[^h\n]*t[\s\S]",
    'root ::=\n  "a"\n  | ( "b"\n  "c" )+\n': r"a|(bc)+",
    'root ::= [-a\\]^] "\\x41\\u0042\\"\\\\"': r'[-a\]\^]AB"\\',
    'root ::= "a"{3} "b"{0,2} "c"{2,}': r"aaab{0,2}c{2,}",
    'a-B_1 ::= "x" | ""\nroot ::= a-B_1 a-B_1': r"x{0,2}",
}


@pytest.mark.parametrize("grammar", REGULAR)
@settings(max_examples=5)
@given(choices=st.lists(st.integers(0, 1000), max_size=8))
def test_masks_are_those_of_the_language(vocab: GrammarVocab, grammar: str, choices: list[int]) -> None:
    """A token may come if what is there with it begins a text of the language, and an end where it is one. Where but
    one byte can come, at least one such token."""
    pattern = regex.compile(REGULAR[grammar])
    matcher, text = vocab.matcher(grammar, None), b""
    for choice in choices:
        found = set(np.flatnonzero(matcher.mask()).tolist())
        wanted = set[int]()
        for token in set(range(vocab.n_vocab)) - set(vocab.eog_ids):
            spelled = piece(vocab, token)
            if spelled and not vocab.tokens.is_special_token(token) and (text + spelled).isascii():
                whole = (text + spelled).decode()
                wanted |= {token} if pattern.fullmatch(whole, partial=True) else set()
        ends = pattern.fullmatch(text.decode()) is not None
        assert (found >= set(vocab.eog_ids)) == ends
        found -= set(vocab.eog_ids)
        ascii_found = {t for t in found if piece(vocab, t).isascii()}
        if len({piece(vocab, t)[:1] for t in wanted}) > 1 or ends:
            assert ascii_found == wanted, text
        else:
            assert ascii_found <= wanted and bool(ascii_found) == bool(wanted), text
        if not ascii_found:
            return
        token = sorted(ascii_found)[choice % len(ascii_found)]
        text += piece(vocab, token)
        matcher.accept(token)


@pytest.mark.parametrize(
    ("grammar", "yes", "no"),
    [
        ('root ::= "(" root ")" | ""', ["", "()", "((()))"], ["(", "(()", ")("]),
        ('root ::= root "a" | "b"', ["b", "baaa"], ["ab", ""]),
        ("root ::= [ぁ-ゟ日]+", ["日ぁ"], ["a", "月"]),
        ('root ::= e\ne ::= n | e [+*] e | "(" e ")"\nn ::= [0-9]+', ["1+2*(3)", "((7))"], ["1+", "()", "1++2"]),
    ],
)
def test_texts_of_a_grammar(vocab: GrammarVocab, grammar: str, yes: list[str], no: list[str]) -> None:
    for text in yes:
        assert follow(vocab.matcher(grammar, None), vocab, text), text
    for text in no:
        assert not follow(vocab.matcher(grammar, None), vocab, text), text


def test_any_character_is_any(vocab: GrammarVocab) -> None:
    for text in ("\n", "\r", "é", "日"):
        assert follow(vocab.matcher("root ::= . [^a]", None), vocab, text + "b"), text


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_json_of_a_schema(vocab: GrammarVocab) -> None:
    for schema in (PERSON, json.dumps(PERSON)):
        for text in ('{"name": "Bob", "age": 42}', '{"name":"é","age":0}', '{\n  "name": "a",\n  "age": 150\n}'):
            assert follow(vocab.matcher(None, schema), vocab, text), text
        for text in (
            '{"name": "Bob"}',
            '{"name": "Bob", "age": 151}',
            '{"name": "Robert", "age": 1}',
            '{"age": "x"}',
            "[]",
        ):
            assert not follow(vocab.matcher(None, schema), vocab, text), text
    assert follow(vocab.matcher(None, {}), vocab, '[1, {"a": null}]')


def test_spaces_in_json_end(plain: GrammarVocab) -> None:
    """As in llama.cpp: a small model would write them for ever."""
    assert follow(plain.matcher(None, PERSON), plain, '{ "name": "a", "age": 1 }')
    assert not follow(plain.matcher(None, PERSON), plain, '{  "name": "a", "age": 1}')


OPEN = {"type": "object", "properties": {"a": {"type": "integer"}}}
NESTED = {"type": "array", "items": {"anyOf": [OPEN, {"$ref": "#/$defs/b"}]}, "$defs": {"b": OPEN}}
A, TWO = '{"a":1}', '{"a":1,"b":2}'
#: A schema, JSON that may be written, and JSON that fits it too and is nevertheless not written.
OBJECTS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (OPEN, ["{}", A], [TWO, '{"b":2}']),
    (OPEN | {"additionalProperties": True}, ["{}", A, TWO], []),
    (OPEN | {"patternProperties": {"b": {}}}, ["{}", A, TWO], []),
    ({"type": "object"}, ["{}", A, TWO], []),
    (NESTED, [f"[{A}]", "[]"], [f"[{TWO}]", f"[{A},{TWO}]"]),
    ({"properties": {"x": OPEN}, "additionalProperties": True}, [f'{{"x":{A},"y":1}}'], [f'{{"x":{TWO}}}']),
    ({"oneOf": [OPEN, {"type": "integer"}]}, [A, "7"], [TWO, '"7"']),
    # closed, nothing would fit these
    ({"allOf": [OPEN, {"properties": {"b": {}}, "required": ["b"]}]}, [TWO], []),
    (OPEN | {"anyOf": [{"properties": {"b": {}}, "required": ["b"]}]}, [TWO], []),
    (OPEN | {"required": ["b"]}, [TWO], []),
    (OPEN | {"minProperties": 2}, [], []),
    # what only looks like a schema stays what it is
    ({"const": OPEN}, [json.dumps(OPEN)], []),
]


@pytest.mark.parametrize(("schema", "yes", "no"), OBJECTS, ids=range(len(OBJECTS)))
def test_objects_have_what_is_named(vocab: GrammarVocab, schema: dict[str, Any], yes: list[str], no: list[str]) -> None:
    for text in yes:
        assert follow(vocab.matcher(None, schema), vocab, text), text
    for text in no:
        assert not follow(vocab.matcher(None, schema), vocab, text), text
    assert closed(closed(schema)) == closed(schema) and closed(OPEN | {"minProperties": 2}) == OPEN | {
        "minProperties": 2
    }


@given(st.integers(0, 2**32))
@settings(max_examples=20)
def test_what_a_schema_lets_through_is_json(plain: GrammarVocab, seed: int) -> None:
    random, matcher, text = np.random.default_rng(seed), plain.matcher(None, PERSON), b""
    for _ in range(200):
        allowed = np.flatnonzero(matcher.mask())
        assert len(allowed)
        token = int(random.choice(allowed))
        if token in plain.eog_ids:
            found = json.loads(text)
            assert isinstance(found["name"], str) and 0 <= found["age"] <= 150 and len(found) == 2
            return
        text += piece(plain, token)
        matcher.accept(token)


def test_a_copy_goes_its_own_way(plain: GrammarVocab) -> None:
    matcher = plain.matcher('root ::= "a" "b" | "c"', None)
    other = matcher.copy()
    matcher.accept(plain.tokens.tokenize_str("a")[0])
    assert matcher.mask().sum() == 1 and other.mask().sum() > 1


def test_a_token_that_may_not_come(plain: GrammarVocab) -> None:
    with pytest.raises(SessionError, match="a grammar must let a token through within limits"):
        plain.matcher('root ::= "a" | "b"', None).accept(plain.tokens.tokenize_str("z")[0])


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("", "a grammar must have a rule named root, where it begins; got none"),
        ("x ::= \"a\"", "a grammar must have a rule named root"),
        ("root ::= x", "the rule x must be somewhere in the grammar, there is none; line 1 of the grammar: 'x'"),
        ("root := \"a\"", "a rule must be written as NAME ::= ..., got root without ::="),
        ("root ::= \"a\"\nroot ::= \"b\"", "a rule must be given once, root is there twice; line 2"),
        ("root ::= \"a", "a text must be closed by a quotation mark, this one is not"),
        ("root ::= [a-", "a character must follow, the grammar ends"),
        ("root ::= [a", "a class must be closed by a bracket"),
        ("root ::= []", "a class must have at least one character"),
        ("root ::= [z-a]", "the first character of a range must not come after its last"),
        ("root ::= (\"a\"", "a parenthesis must be closed, this one is not; line 1 of the grammar: '(\"a\"'"),
        ("root ::= \"a\")", "a rule must end with its line"),
        ("root ::= \"a\"{2,1}", "a repetition must be from 0 to 2000 with the smaller number first"),
        ("root ::= \"a\"{2001}", "a repetition must be from 0 to 2000"),
        ("root ::= \"a\"{,3}", "a repetition must be written as {m}, {m,} or {m,n}"),
        (r'root ::= "\q"', "an escape must be one of"),
        (r'root ::= "\xZZ"', "an escape must be one of"),
        (r'root ::= "\U00110000"', "an escape must be one of"),
        (r'root ::= "\uD800"', "an escape must be one of"),
        ("root ::= <[5]>", "tokens by their ids"),
        ("+ ::= \"a\"", "a rule's name must be made of letters, digits, - and _"),
        ("a" * (MAX_CHARS + 1), f"a grammar may have {MAX_CHARS} characters"),
    ],
)  # fmt: skip
def test_what_is_no_grammar(grammar: str, message: str) -> None:
    with pytest.raises(SessionError) as caught:
        to_lark(grammar)
    assert message in str(caught.value)


def test_a_rule_that_says_nothing_lets_nothing_through(plain: GrammarVocab) -> None:
    matcher = plain.matcher("root ::= root", None)
    for _ in range(2):
        with pytest.raises(SessionError):
            matcher.mask()


class LetsSome:
    """A grammar of somebody else's, for a vocabulary that is larger or smaller."""

    def __init__(self, words: list[int]) -> None:
        self.words = np.array(words, np.uint32)

    def bits(self) -> np.ndarray:
        return self.words


def test_masks_that_are_found_together_are_those_of_each(plain: GrammarVocab) -> None:
    """At several places of several grammars, one of which has ended and one lets nothing through; and again a token
    later. Rows are as wide as asked for: what a vocabulary lacks is 0, what is too much is left out."""
    grammars = ['root ::= "ab" | "c"', 'root ::= [a-c]+ "." ', "root ::= root", 'root ::= "a"', 'root ::= "b" [0-9]']
    matchers = {10 + i: plain.matcher(grammar, None) for i, grammar in enumerate(grammars)}
    alone = {10 + i: plain.matcher(grammar, None) for i, grammar in enumerate(grammars)}
    matchers[13].accept(plain.tokens.tokenize_str("a")[0])
    alone[13].accept(plain.tokens.tokenize_str("a")[0])
    width = matchers[10].n_words
    for n_words in (width, width + 2, width - 1):
        short = LetsSome([7] * (n_words - 1))
        rows, failed = masks_of({**matchers, 5: short}, n_words)  # type: ignore[dict-item]
        assert list(failed) == [12] and "llguidance says" in str(failed[12])
        assert rows.shape == (6, n_words) and rows[5].tolist() == [7] * (n_words - 1) + [0]
        for row, (key, other) in zip(rows, alone.items()):
            if key == 12:
                with pytest.raises(SessionError):
                    other.bits()
                continue
            assert other.bits().any() and row.tolist() == [*other.bits().tolist(), 0, 0][:n_words]
            if key != 13:
                token = int(np.flatnonzero(other.mask())[0])
                matchers[key].accept(token)
                other.accept(token)


def test_a_grammar_is_compiled_once(plain: GrammarVocab, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many texts ask for it, each of which is at a place of its own; of those that nobody asks for some go."""
    vocab, compiled, whole = GrammarVocab(tokenizer(bpe())), list[tuple[str, str]](), GrammarVocab._compiled
    monkeypatch.setattr(GrammarVocab, "_compiled", lambda self, *of: (compiled.append(of), whole(self, *of))[1])
    asked: list[dict[str, Any]] = [
        {"grammar": 'root ::= "ab" | "c"', "json_schema": None},
        {"grammar": None, "json_schema": {"type": "object"}},
        {"grammar": None, "json_schema": None, "regex": "ab|c"},
    ]
    for of in asked:
        first, second = vocab.matcher(**of), vocab.matcher(**of)
        before = first.bits().tolist()
        first.accept(int(np.flatnonzero(first.mask())[0]))
        assert second.bits().tolist() == before == vocab.matcher(**of).bits().tolist() != first.bits().tolist()
    assert [kind for kind, _ in compiled] == ["grammar", "json_schema", "regex"]
    for i in range(KEPT_GRAMMARS):
        vocab.matcher(f'root ::= "{i}"', None)
    vocab.matcher(**asked[0])
    assert len(compiled) == 3 + KEPT_GRAMMARS + 1
    for _ in range(2):
        with pytest.raises(SessionError):
            vocab.matcher("root ::= [", None)


def test_what_tables_let_through(plain: GrammarVocab) -> None:
    """Of sequences side by side and apart; those of which nothing is left by a grammar or biases are named."""
    tables = SampleTables(plain.n_vocab, 7, graphrt.get_backend("cpu"))
    grammars = {5: 'root ::= "a"', 0: 'root ::= "b"', 1: 'root ::= "c"', 2: "root ::= root", 3: 'root ::= "ab" | "c"'}
    hows = {seq: Drawn(matcher=plain.matcher(grammar, None)) for seq, grammar in grammars.items()}
    hows[6] = Drawn(matcher=plain.matcher(grammars[0], None), biases=[(t, -math.inf) for t in range(plain.n_vocab)])
    wanted = {seq: plain.matcher(grammars[seq], None).bits().tolist() for seq in (0, 1, 3, 5)}
    failed = tables.allow(hows)
    assert set(failed) == {2, 6} and "leave none" in str(failed[6])
    assert tables.mask.buffer is not None
    rows = tables.mask.buffer.read(0, tables.mask.nbytes).view(np.uint32).reshape(7, -1)
    assert {seq: row.tolist() for seq, row in enumerate(rows) if row.any()} == wanted


@pytest.mark.parametrize("name", ["deep", "repeated repetitions", "many rules", "many symbols"])
def test_large_grammars_are_refused_when_they_are_read(name: str) -> None:
    with pytest.raises(SessionError):
        to_lark(HOSTILE_GRAMMARS[name])


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("{", "a JSON schema must be JSON: "),
        (float("nan"), "a JSON schema must be JSON: "),
        ({1: {2}}, "a JSON schema must be JSON: "),
        ("[]", "a JSON schema must be an object, got []; {} allows any JSON"),
        (5, "a JSON schema must be an object, got 5"),
        ({"type": "thing"}, "llguidance says Invalid type: thing"),
        ({"not": {}}, "llguidance says Unimplemented keys"),
        (
            {"$ref": "https://example.com/a.json"},
            "llguidance says Resource 'https://example.com/a.json' is not present",
        ),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    ],
)
def test_what_is_no_schema(plain: GrammarVocab, schema: Any, message: str) -> None:
    with pytest.raises(SessionError) as caught:
        plain.matcher(None, schema)
    assert message in str(caught.value)


def chain(n: int) -> dict[str, Any]:
    """Definitions each of which uses the next."""
    links = {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(n)}
    return {"$defs": links | {str(n): {"type": "integer"}}, "$ref": "#/$defs/0"}


def nested(n: int) -> str:
    return '{"items": ' * n + "{}" + "}" * n


HOSTILE_SCHEMAS: dict[str, Any] = {
    "deep": nested(70), "too deep for Python": nested(20000), "brackets": "[" * 100_000,
    "a long chain": chain(MAX_REFS + 1), "many states": {"type": "integer", "multipleOf": 999_983},
    "many states together": {"allOf": [{"type": "integer", "multipleOf": n} for n in (997, 991)]},
    "products of choices": {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in "0123"]} for i in range(9)]},
    "large": {"enum": ["v" * 300] * 1000}, "of itself alone": {"$ref": "#"},
}  # fmt: skip
HOSTILE_GRAMMARS = {
    "deep": "root ::= " + "(" * (MAX_DEPTH + 1) + '"a"' + ")" * (MAX_DEPTH + 1),
    "repeated repetitions": 'root ::= ((("a"{2000}){2000}){2000}){2000}',
    "many rules": "\n".join(
        ["root ::= r0", *(f"r{i} ::= r{i + 1}" for i in range(MAX_RULES)), f'r{MAX_RULES} ::= "a"']
    ),
    "many symbols": 'root ::= "' + "a" * (MAX_SYMBOLS + 1) + '"',
    "many ways": "root ::= (" + "|".join(f"[a\\u{0x4E00 + i:04X}]" for i in range(3500)) + ")*",
}


@pytest.mark.parametrize("name", HOSTILE_SCHEMAS)
def test_hostile_schemas_end(plain: GrammarVocab, name: str) -> None:
    with pytest.raises(SessionError):
        plain.matcher(None, HOSTILE_SCHEMAS[name]).mask()


@pytest.mark.parametrize("name", HOSTILE_GRAMMARS)
def test_hostile_grammars_end(plain: GrammarVocab, name: str) -> None:
    with pytest.raises(SessionError):
        matcher = plain.matcher(HOSTILE_GRAMMARS[name], None)
        for _ in range(3):
            matcher.mask()
            matcher.accept(plain.tokens.tokenize_str("a")[0])


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= r0\n' + "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(300)) + '\nr300 ::= "a"',
        "root ::= " + "(" * 40 + '"a"' + ")*" * 40, 'root ::= s\ns ::= s s | s s s | [a-z] | [a-m] | .',
        "root ::= (.* \"a\" .{0,12}){0,50} \"zz\"",
    ],
    ids=["doubled", "stars of stars", "ambiguous", "many places"],
)  # fmt: skip
def test_grammars_at_the_limits_end(plain: GrammarVocab, grammar: str) -> None:
    """One way or the other."""
    try:
        matcher = plain.matcher(grammar, None)
        for _ in range(30):
            matcher.mask()
            matcher.accept(plain.tokens.tokenize_str("a")[0])
    except SessionError:
        pass


@given(st.text(alphabet='root:=a|"[]()*+?{},0-9\\^ \n.#<', max_size=60))
def test_any_text_is_a_grammar_or_an_error(text: str) -> None:
    for whole in (text, "root ::= " + text):
        try:
            to_lark(whole)
        except GraphrtError as error:
            assert str(error)


def test_reading_takes_time_by_the_size() -> None:
    def effort(n: int) -> int:
        return instructions(lambda: to_lark("root ::= " + " ".join(["[a-z]", '"b"', '("c" | "d")?'] * n)))

    assert effort(160) < 9 * effort(20)


def test_without_llguidance(monkeypatch: pytest.MonkeyPatch) -> None:
    found = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "llguidance":
            raise ImportError(name)
        return found(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "llguidance", raising=False)
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(SessionError, match=r"need the package llguidance.*pip install 'graphrt\[grammar\]'"):
        GrammarVocab(tokenizer(bpe()))


def test_without_an_end_token() -> None:
    found = tokenizer(bpe())
    found.eog_ids = frozenset()
    with pytest.raises(SessionError, match="a grammar needs a token that ends the text"):
        GrammarVocab(found)


@pytest.mark.parametrize("version", ["1.6.1", "1.8", "0.9.99"])
def test_an_old_llguidance(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr("llguidance.__version__", version)
    said = f"need llguidance 1.9 or newer, {version} is installed; pip install --upgrade 'graphrt[grammar]'"
    with pytest.raises(SessionError, match=re.escape(said)):
        GrammarVocab(tokenizer(bpe()))
    monkeypatch.setattr("llguidance.__version__", "1.10.0rc1")
    GrammarVocab(tokenizer(bpe()))
