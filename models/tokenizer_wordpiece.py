"""WordPiece, BERT's tokenizer: words, each spelt by the longest tokens that fit, from left to right.

Texts are normalized as llama.cpp does, which of a decomposed character keeps the first. A token that begins a word
starts with U+2581, one that goes on with it does not: converting a model makes that of "##".
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence

from graphrt.models.tokenizer_merge import SPACE, Merger

_WHITE = frozenset("\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000") | frozenset(
    map(chr, range(0x2000, 0x200B))
)
#: Ideographs, each of which is a word: the ranges of BERT's own tokenizer, with the one that its Rust form widened.
_HAN = (
    *((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F), (0x2B740, 0x2B81F)),
    *((0x2B920, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F)),
)


_BLOCK = 1 << 16  # characters that are normalized together


def word_cutter(lowercase: bool, strip_accents: bool) -> Callable[[str], Iterator[str]]:
    """A function from text to its words, as they are asked for, normalized; white space and control characters are
    gone."""
    kinds: dict[str, str] = {}

    def shown(char: str) -> str:
        """What becomes of a character: " " ends a word, a space before it makes a word of it alone, "" is nothing."""
        if char in _WHITE:
            return " "
        char = unicodedata.normalize("NFD", char)[0] if strip_accents else char
        category = unicodedata.category(char)
        control = category[0] == "C" and category != "Cn"
        if control or char == "\ufffd" or (strip_accents and category[0] == "M"):
            return ""
        alone = category[0] == "P" or (char < "\x7f" and category[0] == "S") or _is_han(ord(char))
        char = char.lower()[0] if lowercase else char  # only U+0130 becomes two, the second an accent
        return f" {char} " if alone else char

    def cut(text: str) -> Iterator[str]:
        rest = ""
        for start in range(0, len(text), _BLOCK):
            block = text[start : start + _BLOCK]
            for char in set(block).difference(kinds):
                kinds[char] = shown(char)
            *words, rest = (rest + "".join([kinds[char] for char in block])).split(" ")
            yield from filter(None, words)
        if rest:
            yield rest

    return cut


def _is_han(code: int) -> bool:
    return any(first <= code <= last for first, last in _HAN)


def longest_matcher(ids: Mapping[str, int], texts: Sequence[str], unknown: int) -> Merger:
    """word -> ids of the longest tokens, one after another; [unknown] when they do not make up the whole word."""
    longest = max(map(len, texts))

    def matched(word: str) -> list[int | str]:
        word = SPACE + word
        found: list[int | str] = []
        start = 0
        while start < len(word):
            stops = range(min(len(word), start + longest), start, -1)
            stop = next((stop for stop in stops if word[start:stop] in ids), None)
            if stop is None:
                return [unknown]
            found.append(ids[word[start:stop]])
            start = stop
        return found

    return matched
