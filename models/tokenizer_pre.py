"""Pre-tokenizers: how a byte-level BPE vocabulary cuts text into words before merging.

`tokenizer.ggml.pre` names one. A rule is a list of patterns applied in turn: each cuts every piece of the one
before it into its matches and what lies between them. The patterns are facts of the models' own tokenizer.json
files, as llama.cpp 0.25.3 lists them. llama.cpp's engine has no \\p{Lu} or (?i:) and adapts some of them; here the
original is used, except that (?i:'s) is spelt ['sS] so that U+017F does not count as an s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

import regex  # type: ignore[import-untyped]

from graphrt.errors import TokenizerError
from graphrt.printing import brief

_CONTRACTION = r"'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_HEAD = r"[^\r\n\p{L}\p{N}]?"


def _cased(number: str, contraction: str = f"(?:{_CONTRACTION})?", tail: str = r"[\r\n/]*") -> str:
    """Words split where lower case meets upper case: gpt-4o and its descendants."""
    return (
        rf"{_HEAD}{_UPPER}*{_LOWER}+{contraction}|{_HEAD}{_UPPER}+{_LOWER}*{contraction}"
        rf"|{number}| ?[^\s\p{{L}}\p{{N}}]+{tail}|{_SPACES}"
    )


_GPT4O = _cased(r"\p{N}{1,3}")
_NOT_HAN = r"(?!\p{Han})"
_KIMI = (
    rf"\p{{Han}}+|{_HEAD}(?:{_NOT_HAN}{_UPPER})*(?:{_NOT_HAN}{_LOWER})+(?:{_CONTRACTION})?"
    rf"|{_HEAD}(?:{_NOT_HAN}{_UPPER})+(?:{_NOT_HAN}{_LOWER})*(?:{_CONTRACTION})?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_ASCII_PUNCT = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_WORD_V3 = rf"{_ASCII_PUNCT}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
_DEEPSEEK3 = rf"{_WORD_V3}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
_CJK_KANA = r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_CJK_HANGUL = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_BLOOM = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_AFMOE_CJK = (
    r"[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    r"\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_YOUTU_CJK = (
    r"[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    r"|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
)
# the cased letters that deepseek-llm's tokenizer.json lists
_CASED_LETTERS = (
    r"[A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    r"\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481"
    r"\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b"
    r"\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b"
    r"\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    r"\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    r"\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    r"\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    r"\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    r"\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943]"
)
_DEEPSEEK_PUNCT = r"[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"

DIGITS_FROM_RIGHT = "digits in groups of three from the right"
_FALCON_PUNCT = r"[\p{P}\$\+<=>\^~\|`]+"

_PATTERNS: dict[str, tuple[str, ...]] = {
    "llama3": (_LLAMA3,),
    "gpt-2": (_GPT2,),
    "digit+gpt-2": (r"\p{N}", _GPT2),
    "qwen2": (_QWEN2,),
    "qwen35": (_QWEN35,),
    "gpt-4o": (_GPT4O,),
    "tekken": (_cased(r"\p{N}", ""),),
    "tiny_aya": (DIGITS_FROM_RIGHT, _GPT4O),
    "youtu": (_YOUTU_CJK, _cased(r"\p{N}")),
    "kimi-k2": (_KIMI,),
    "deepseek-llm": (
        r"[\r\n]",
        rf"\s?{_CASED_LETTERS}+",
        rf"\s?{_DEEPSEEK_PUNCT}",
        r"\s+\Z",
        _CJK_HANGUL,
        r"\p{N}+",
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_HANGUL, r"\p{N}"),
    "deepseek-v3": (r"\p{N}{1,3}", _CJK_KANA, _DEEPSEEK3),
    "spark2_5": (
        r"\p{N}{1,3}",
        _CJK_KANA,
        rf"{_WORD_V3}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+",
        r"\p{N}",
    ),
    "falcon": (_FALCON_PUNCT, _GPT2, r"[0-9][0-9][0-9]"),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "bloom": (_BLOOM,),
    "viking": (_BLOOM, r"\p{N}"),
    "jais-2": (
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+"
        + "".join(rf"|\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4))
        + r"|\s{1,2}(?!\S)|\s{1}",
    ),
    "chameleon": (
        r"<sentinel:[0-9]+>",
        r"IMGIMG[A-I]{1,4}Z",
        r"[\t\n]|    |  ",
        r"\p{N}",
        r"[\p{P}!-/:-@\[-`{-~]",
        _GPT2,
    ),
    "superbpe": (r"\p{N}+", DIGITS_FROM_RIGHT),
    "bailingmoe": (
        r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    "seed-coder": (rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",),
    "ufakzeka": (rf"[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",),
    "afmoe": (DIGITS_FROM_RIGHT, _AFMOE_CJK, _DEEPSEEK3),
    "laguna": (r"[^\n]+|[\n]+", _QWEN2),
    "exaone-moe": (
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    "minicpm5": (
        r"\p{N}{1,3}",
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
    ),
    "lines": (r"[^\n]+|[\n]+",),
}


@dataclass(frozen=True)
class PreRule:
    """One pre-tokenizer.

    patterns: key of the table above. whole_words: a word that is itself a token is not merged (ignore_merges).
    raw: spaces become U+2581 and symbols are characters, not bytes. add_bos: the default when the file is silent.
    """

    patterns: str
    whole_words: bool = False
    add_bos: bool = False
    raw: bool = False


def _rules() -> dict[str, PreRule]:
    table: dict[str, PreRule] = {}

    def add(names: str, rule: PreRule) -> None:
        table.update(dict.fromkeys(names.split(), rule))

    add(
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        PreRule("llama3", whole_words=True, add_bos=True),
    )
    add("dbrx smaug-bpe chatglm-bpe", PreRule("llama3"))
    add("glm4 glm5", PreRule("llama3", whole_words=True))
    add("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", PreRule("digit+gpt-2"))
    add(
        "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jina-v1-en jina-v2-code"
        " roberta-bpe mpt olmo jais trillion granite-docling exaone4",
        PreRule("gpt-2"),
    )
    add(
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
        PreRule("qwen2"),
    )
    add("gpt-4o llama4 kanana2 talkie minimax-m2", PreRule("gpt-4o"))
    add("granite-embed-multi-97m", PreRule("gpt-4o", whole_words=True))
    add("tekken", PreRule("tekken", whole_words=True, add_bos=True))
    add("tiny_aya cohere2moe", PreRule("tiny_aya"))
    add("youtu", PreRule("youtu", whole_words=True))
    add("deepseek-v3 hunyuan-dense joyai-llm hy_v4", PreRule("deepseek-v3"))
    add("bloom poro-chat gpt3-finnish", PreRule("bloom"))
    add("chameleon", PreRule("chameleon", add_bos=True))
    add("bailingmoe bailingmoe2 llada-moe", PreRule("bailingmoe"))
    add("minicpm5", PreRule("minicpm5", whole_words=True))
    add("gemma4 granite-embed-multi-311m", PreRule("lines", add_bos=True, raw=True))
    add("sarvam-moe", PreRule("lines", raw=True))
    for name in (
        *("qwen35", "kimi-k2", "deepseek-llm", "deepseek-coder", "spark2_5", "falcon", "default", "viking", "jais-2"),
        *("superbpe", "seed-coder", "ufakzeka", "afmoe", "laguna", "exaone-moe"),
    ):
        add(name, PreRule(name))
    return table


RULES = _rules()


def find_rule(name: str) -> PreRule:
    """The rule that `tokenizer.ggml.pre` names; TokenizerError if there is none."""
    if name not in RULES:
        raise TokenizerError(
            f"tokenizer.ggml.pre {brief(name)} is unknown, so words would be cut in other places than in training.\n"
            f"Known: {', '.join(sorted(RULES))}."
        )
    return RULES[name]


Splitter = Callable[[str], Iterable[str]]
#: Characters of a text whose words are listed at once, which is quicker. Those of a longer one come as they are asked
#: for: whoever stops at a full context has not cut ten megabytes.
AT_ONCE = 1 << 16


def splitter(rule: PreRule) -> Splitter:
    """A function from text to its words; the words put together are the text."""
    steps = [_step(pattern) for pattern in _PATTERNS[rule.patterns]]
    if len(steps) == 1:
        return steps[0]

    def split(text: str) -> Iterable[str]:
        words: Iterable[str] = [text]
        for step in steps:
            words = chain.from_iterable(map(step, words))
        return words

    return split


def _step(pattern: str) -> Splitter:
    if pattern is DIGITS_FROM_RIGHT:
        return _digit_groups
    compiled = regex.compile(pattern)

    def split(text: str) -> Iterable[str]:
        if len(text) <= AT_ONCE:
            words: list[str] = compiled.findall(text)
            if sum(map(len, words)) == len(text):
                return words
        return _with_gaps(compiled, text)

    return split


def _with_gaps(pattern: regex.Pattern[str], text: str) -> Iterator[str]:
    last = 0
    for match in pattern.finditer(text):
        start, end = match.span()
        if start > last:
            yield text[last:start]
        yield match[0]
        last = end
    if last < len(text):
        yield text[last:]


_DIGITS = regex.compile(r"(\p{N}+)|\P{N}+")


def _digit_groups(text: str) -> Iterator[str]:
    """Cuts 1234567 into 1 234 567."""
    for match in _DIGITS.finditer(text):
        run = match[0]
        first = len(run) % 3 if match[1] else len(run)
        if first > 0:
            yield run[:first]
        for i in range(first, len(run), 3):
            yield run[i : i + 3]
