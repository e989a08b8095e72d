"""Text to token ids and back, from a GGUF file's own vocabulary, with llama.cpp's results.

    tokenizer = Tokenizer.from_metadata(gguf.metadata)
    ids = tokenizer.encode("Hello")              # BOS and EOS as the file says
    text = tokenizer.decode(ids)
    stream = tokenizer.stream(); stream.push(id) # text as it becomes complete

tokenizer_vocab reads the vocabulary, tokenizer_special finds special tokens, tokenizer_pre cuts byte-level BPE
text into words, tokenizer_merge merges their symbols, tokenizer_wordpiece does both for BERT.
"""

from __future__ import annotations

import codecs
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from graphrt.errors import TokenizerError
from graphrt.models.key_reader import KeyReader
from graphrt.models.tokenizer_merge import SPACE, Merger, pair_merger, score_merger, word_cuts
from graphrt.models.tokenizer_pre import find_rule, splitter
from graphrt.models.tokenizer_special import SpecialTokens
from graphrt.models.tokenizer_vocab import BYTE, CONTROL, NORMAL, PREFIX, SPECIAL, UNKNOWN, Vocab
from graphrt.models.tokenizer_wordpiece import longest_matcher, word_cutter
from graphrt.printing import brief

log = logging.getLogger(__name__)

_CACHE_WORDS = 1 << 16
_CACHE_WORD_CHARS = 64


def _byte_chars() -> list[str]:
    """GPT-2's map from byte to printable character: itself where printable, else U+0100 onward."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(b if b in printable else next(spare)) for b in range(256)]


_BYTE_CHARS = _byte_chars()
_CHAR_BYTES = {char: byte for byte, char in enumerate(_BYTE_CHARS)}
_TO_CHARS = dict(enumerate(_BYTE_CHARS))


class Tokenizer:
    """One vocabulary. Build it with `from_metadata`.

    n_vocab: number of tokens. texts: list of their texts as the file has them. longest: characters of the longest.
    bos_id, eos_id, unk_id, eot_id, eom_id: ids, or None. eog_ids: frozenset of the ids that end a generation. fim: ids
    of what stands around a text to be filled in, by role ("pre", "suf", "mid", "pad", "rep", "sep"), where there are
    any. add_bos, add_eos, add_space_prefix: what the file asks for. model: "llama", "gpt2", "gemma4" or "bert"; pre:
    name of the pre-tokenizer, None for SPM and WordPiece.
    """

    def __init__(self, vocab: Vocab, md: Mapping[str, Any]) -> None:
        self.model = vocab.model
        self.texts: Sequence[str] = vocab.texts
        self.n_vocab = len(vocab.texts)
        self.longest = max(map(len, vocab.texts))
        self.bos_id, self.eos_id, self.unk_id = vocab.bos, vocab.eos, vocab.unk
        self.eot_id, self.eom_id = vocab.eot, vocab.eom
        self.sep_id = vocab.sep
        self.eog_ids: frozenset[int] = frozenset(vocab.eog)
        self.fim: Mapping[str, int] = vocab.fim
        self._ids = vocab.ids
        self._kinds = bytes(vocab.kinds)
        keys = KeyReader(md, TokenizerError)
        self.pre = _pre_name(keys, vocab.model)
        self._rule = find_rule(self.pre) if self.pre is not None else None
        # SPM and raw BPE write spaces as U+2581; only byte-level BPE maps bytes to characters
        self._escapes = self._rule is None or self._rule.raw
        self._escapes_text = self._escapes and vocab.model != "bert"
        self.add_bos = _flag(keys, "add_bos_token", self._rule is None or self._rule.add_bos)
        if vocab.model == "gemma4":
            self.add_bos = True
        self.add_eos = _flag(keys, "add_eos_token", False)
        self.add_space_prefix = vocab.model == "llama" and _flag(keys, "add_space_prefix", True)
        self._specials = SpecialTokens(vocab, keys)
        self._split: Callable[[str], Iterable[str]]
        self._merge: Merger
        if vocab.model == "bert":
            lowercase = _flag(keys, "normalizer.lowercase", True)
            self._split = word_cutter(lowercase, _flag(keys, "normalizer.strip_accents", lowercase))
            self._merge = longest_matcher(vocab.ids, vocab.texts, self._end_token("unk", vocab.unk)[0])
        elif self._rule is None:
            self._split = word_cuts(vocab.texts)
            self._merge = score_merger(vocab.texts, vocab.ids, vocab.scores)
        else:
            merges = keys.strings(PREFIX + "merges")
            if not merges and self.pre != "kimi-k2":
                raise TokenizerError(f"{PREFIX}merges must list the pairs to merge, got none; convert the model again.")
            self._split = splitter(self._rule)
            self._merge = pair_merger(vocab.ids, merges)
        self._cache: dict[str, list[int]] = {}

    @classmethod
    def from_metadata(cls, md: Mapping[str, Any]) -> Tokenizer:
        """Builds a tokenizer from GGUF metadata (key -> value; arrays as lists or numpy arrays).

        Raises TokenizerError: "no vocabulary" if the file has none, "not supported" for a tokenizer model other
        than llama, gpt2, gemma4 or bert, "unknown" for an unknown pre-tokenizer, or what is wrong with the arrays.
        """
        return cls(Vocab.from_metadata(md), md)

    def encode(
        self,
        text: str,
        add_bos: bool | None = None,
        parse_special: bool = False,
        most: int | None = None,
        goes_on: bool = False,
    ) -> list[int]:
        """Token ids of a text.

        add_bos: None puts BOS in front and EOS behind where the file asks for them; True always puts BOS in front
        (and EOS as the file says); False adds neither. parse_special: texts of control tokens such as "<|im_end|>"
        become these tokens; otherwise they are ordinary text. User-defined tokens are found in either case. most: how
        many ids are of use; of a text with more, any `most` + 1 or more are returned, and the rest is not looked at.
        goes_on: the text stands behind other text, so that no vocabulary puts a space before it.
        Raises TokenizerError if BOS or EOS is asked for and the vocabulary has none, or lacks a byte of the text.
        """
        ids = self._end_token("bos", self.bos_id) if (self.add_bos if add_bos is None else add_bos) else []
        at_boundary = not goes_on
        room = math.inf if most is None else most
        for part in self._specials.partition(_valid_unicode(text), parse_special):
            if len(ids) > room:
                return ids
            if isinstance(part, int):
                ids.append(part)
            else:
                self._encode_text(" " + part if self.add_space_prefix and at_boundary else part, ids, room)
            at_boundary = isinstance(part, int)
        if self.model == "bert" and add_bos is not False:
            ids += self._end_token("seperator", self.sep_id)
        elif self.add_eos and add_bos is not False:
            ids += self._end_token("eos", self.eos_id)
        return ids

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """The text of token ids; bytes that are not UTF-8 become U+FFFD. special: render control tokens too.

        Undoes encode: with add_space_prefix, the space that encode put before the first piece is taken off.
        """
        ids = list(ids)
        text = b"".join([self.piece(i, special) for i in ids]).decode("utf-8", "replace")
        first = next((i for i in ids if self._check(i) not in (self.bos_id, self.eos_id)), None)
        prefixed = self.add_space_prefix and first is not None and self._kinds[first] & NORMAL
        head = len(self.texts[ids[0]]) if special and ids and ids[0] != first else 0
        return text[:head] + text[head + 1 :] if prefixed and text[head : head + 1] == " " else text

    def piece(self, token: int, special: bool = True) -> bytes:
        """The bytes that a token stands for, as llama_token_to_piece gives them; may be part of a UTF-8 character.

        special: control and unknown tokens give their text; otherwise nothing. Raises TokenizerError for an id
        outside the vocabulary.
        """
        kind = self._kinds[self._check(token)]
        text = self.texts[token]
        if kind & SPECIAL:
            shown = special or not kind & (CONTROL | UNKNOWN)
            return _utf8(text) if shown else b""
        if kind & NORMAL:
            if self._escapes:
                return _utf8(text.replace(SPACE, " "))
            return b"".join([_char_bytes(char) for char in text])
        return _byte_value(text) if kind & BYTE else b""

    def stream(self, special: bool = False) -> StreamDecoder:
        """A decoder for ids that arrive one by one, as the continuation of a prompt (no leading space is taken off)."""
        return StreamDecoder(self, special)

    def is_control(self, token: int) -> bool:
        """Whether the token is a control token, such as BOS or an end of turn."""
        return bool(self._kinds[self._check(token)] & CONTROL)

    def is_eog(self, token: int) -> bool:
        """Whether the token ends a generation."""
        return token in self.eog_ids

    def _check(self, token: int) -> int:
        if not 0 <= token < self.n_vocab:
            raise TokenizerError(f"a token id must be 0 to {self.n_vocab - 1}, got {token}.")
        return token

    def _end_token(self, name: str, token: int | None) -> list[int]:
        if token is None:
            raise TokenizerError(
                f"{name.upper()} was asked for, but this vocabulary has no {name.upper()} token "
                f"({PREFIX}{name}_token_id); encode with add_bos=False."
            )
        return [token]

    def _encode_text(self, text: str, out: list[int], room: float) -> None:
        if self._escapes_text:
            text = text.replace(" ", SPACE)
        cache = self._cache
        for word in self._split(text):
            ids = cache.get(word)
            if ids is None:
                ids = self._encode_word(word)
                if len(cache) >= _CACHE_WORDS:
                    cache.clear()
                if len(word) <= _CACHE_WORD_CHARS:
                    cache[word] = ids
            out += ids
            if len(out) > room:
                return

    def _encode_word(self, word: str) -> list[int]:
        rule = self._rule
        if rule is not None and not rule.raw:
            word = word.encode("utf-8").decode("latin-1").translate(_TO_CHARS)
        # gemma4 has runs of newlines as tokens, which its merges can't reach
        whole = rule is not None and (rule.whole_words or (rule.patterns == "lines" and not word.strip("\n")))
        if whole and word in self._ids:
            return [self._ids[word]]
        ids: list[int] = []
        for symbol in self._merge(word):
            ids += self._fallback(symbol) if isinstance(symbol, str) else (symbol,)
        return ids

    def _fallback(self, symbol: str) -> Iterator[int]:
        """Ids for a symbol that is no token. Byte-level BPE leaves out what it can't spell, as llama.cpp does."""
        if not self._escapes:
            yield from (self._ids[char] for char in symbol if char in self._ids and char.isascii())
            return
        for byte in symbol.encode("utf-8"):
            token = self._ids.get(f"<0x{byte:02X}>", self._ids.get(chr(byte)) if byte < 128 else None)
            if token is not None:
                yield token
            elif self._rule is None:
                raise TokenizerError(f"{brief(symbol)} can't be tokenized: the vocabulary has no token <0x{byte:02X}>.")


class StreamDecoder:
    """Turns token ids into text as they come, holding back the bytes of an unfinished UTF-8 character."""

    def __init__(self, tokenizer: Tokenizer, special: bool = False) -> None:
        self._tokenizer, self._special = tokenizer, special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that is complete with this token; "" while a character is unfinished."""
        return self._utf8.decode(self._tokenizer.piece(token, self._special))

    def flush(self) -> str:
        """What is left at the end: "" or U+FFFD for an unfinished character. The decoder can then be used anew."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text


def _valid_unicode(text: str) -> str:
    """Lone surrogates, which UTF-8 can't spell, become U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _char_bytes(char: str) -> bytes:
    byte = _CHAR_BYTES.get(char)
    return _utf8(char) if byte is None else bytes((byte,))


def _utf8(text: str) -> bytes:
    """UTF-8; bytes that were not UTF-8 in the file, which the reader keeps as surrogates, become themselves again."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace")


def _byte_value(text: str) -> bytes:
    """The byte that a token <0xNN> stands for; nothing if the text is not of that form."""
    try:
        return bytes((int(text[3:5], 16),))
    except ValueError:
        return b""


def _flag(keys: KeyReader, key: str, default: bool) -> bool:
    return keys.flag(PREFIX + key, default)


def _pre_name(keys: KeyReader, model: str) -> str | None:
    if model in ("llama", "bert"):
        return None
    if model == "gemma4":
        return "gemma4"
    name = keys.text(PREFIX + "pre", "")
    if not name:
        log.warning("%spre is missing: using 'default'. Words may be cut in other places than in training.", PREFIX)
        return "default"
    return name
