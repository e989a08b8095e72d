"""Small vocabularies in which it shows where a text is cut into words, and texts that find the places."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

from support.tiny import CONTROL, NORMAL, UNKNOWN, byte_chars

#: The pre-tokenizers of the architectures here and of those with experts that share their tokenizers.
PRE = (
    *("gpt-2", "mpt", "bloom", "refact", "falcon", "qwen2", "starcoder", "command-r", "llama-bpe", "olmo", "stablelm2"),
    *("gpt-4o", "deepseek-llm", "deepseek-coder", "deepseek-v3", "default"),
)
TEXTS = (
    "Hello world, this is a test of words.",
    "I'm sure they've said it's what WE'LL do; don't you'd?",
    "  two  spaces   and\ttabs\t\tand\n\nnew lines \n \n  end  ",
    "digits 1 12 123 1234 12345 3.14159 10,000 0x1F 2e-3",
    "CamelCase snake_case HTTPServer x86_64 don't-stop",
    "a+b=c*d/(e-f)^2 != {g: [h, i]} <tag attr='v'>&amp;</tag>",
    "naïve café über straße Ωmega Привет мир",
    "日本語とEnglish混在。中文，标点！한국어 텍스트",
    "emoji 😀👍🏽 and ½ ² Ⅷ №5",
    "www.example.com/path?x=1&y=2#frag $5.00 50% #tag @user",
    "word\u00a0joined\u2003by\u3000spaces\r\nand\rreturns",
    "for (int i = 0; i < 10; ++i) {\n\tprintf(\"%d\\n\", i);\n}",
    "'quoted' \"double\" `tick` …dots—dash",
    "trailing newline\n",
    " ",
    "\n",
    "   leading",
    "123456789012345678901234567890",
)  # fmt: skip
MERGES = 700


def words() -> dict[str, Any]:
    """The keys of a byte-level BPE vocabulary without `pre`: merges of whole texts, over the ends of words."""
    chars = byte_chars()
    lines = [[chars[b] for b in text.encode()] for text in TEXTS]
    merges: list[tuple[str, str]] = []
    while len(merges) < MERGES:
        counts = Counter(pair for line in lines for pair in pairwise(line) if " " not in "".join(pair))
        best = max(counts, key=lambda pair: (counts[pair], pair), default=None)
        if best is None:
            break
        merges.append(best)
        lines = [_merged(line, best) for line in lines]
    tokens = list(dict.fromkeys([*chars, *("".join(pair) for pair in merges)]))
    kinds = [NORMAL] * len(tokens) + [CONTROL]
    end = len(tokens)
    return {
        "model": "gpt2", "tokens": [*tokens, "<|endoftext|>"], "token_type": kinds,
        "merges": [" ".join(pair) for pair in merges], "bos_token_id": end, "eos_token_id": end,
    }  # fmt: skip


def _merged(line: list[str], pair: tuple[str, str]) -> list[str]:
    out: list[str] = []
    for symbol in line:
        if out and (out[-1], symbol) == pair:
            out[-1] += symbol
        else:
            out.append(symbol)
    return out


def wordpiece() -> dict[str, Any]:
    """The keys of a WordPiece vocabulary: letters at the start of a word and within one, and some longer pieces."""
    letters = [*"abcdefghijklmnopqrstuvwxyz0123456789.,!?'\"-_/=+*<>()[]{}&;:#%$@^`~|\\", *"日本中文语한ωпривет"]
    pieces = ["▁hello", "▁world", "▁test", "ing", "ed", "ell", "or", "▁th", "▁the", "is", "▁is", "▁caf", "e", "▁na"]
    texts = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *dict.fromkeys([f"▁{c}" for c in letters] + letters + pieces),
    ]
    kinds = [CONTROL, UNKNOWN, CONTROL, CONTROL, CONTROL] + [NORMAL] * (len(texts) - 5)
    return {
        "model": "bert", "tokens": texts, "token_type": kinds, "padding_token_id": 0, "unknown_token_id": 1,
        "bos_token_id": 2, "seperator_token_id": 3, "mask_token_id": 4,
    }  # fmt: skip
