"""A model that looks things up: weights made by hand, whose answers a cache's rounding can spoil. For `--needle`.

No small model that people have retrieves over 32,768 tokens, so this one is built to: a layer of the architecture
llama whose attention compares what a question asks for with what each token of the context is called, and whose output
says what the token that fits best holds. There is no text. A token is a fact, which has a name (a random direction) and
one of VALUES values; or a question, which has the name of the fact that it asks for; or a value, the answer.

    k     the name, on top of a constant in which OUTLIERS channels are OUTLIER times as large as a name's, as real
          models' keys have them: softmax doesn't see it, a type that rounds in blocks does
    v     the value's code, one of orthogonal directions, on top of a constant MEAN times as large that is orthogonal to
          all codes: an exact sum takes it out again, one that loses low bits on the way does not
    q     sharpness * the name that is asked for

The fact that is asked for gets about SHARE as much weight as all others together, however long the context, and
DECOYS facts have names that are like its own and other values. So an answer hangs on a sum over all keys, and on
differences between near ones.
"""

from __future__ import annotations

import math
import re
import zlib
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from graphrt.errors import SessionError
from graphrt.models.synthetic import SyntheticFile
from graphrt.models.synthetic_blocks import Bytes
from graphrt.models.synthetic_recipes import RECIPES

Floats = npt.NDArray[np.float64]

#: Facts that can be asked for, each with a question of its own; facts in all; values.
NEEDLES, FACTS, VALUES = 64, 16384, 32
#: Of each fact that can be asked for: facts whose names are like its own, by the cosine between them.
DECOYS, LIKE = 4, 0.8
#: Channels of keys with a constant, and how large it is; the size of the constant in values; both in standard
#: deviations of what lies on it.
OUTLIERS, OUTLIER, MEAN = 4, 20.0, 8.0
#: The weight of the fact that is asked for, of that of all unlike ones.
SHARE = 0.16
#: Logits by a whole weight's value, and how far below them those of tokens lie that are no values.
GAIN, NEVER = 48.0, 100.0
#: The context that a model's sharpness is made for, unless another is asked for, and the longest.
CONTEXT, LONGEST = 32768, 2**20
#: What wavelengths of channels are stretched by that no position is to turn.
NOT_TURNED = 1e30
#: How large a fact's value and the constant 1 are in an embedding.
_LOUD = 4.0
#: Query heads of the only KV head.
_HEADS = 2


@dataclass(frozen=True)
class Lookup:
    """A context for a model of this kind. ids: the facts, then the questions, one token each; first: of the questions;
    answers: the token after each; depths: where each one's fact stands, 0 at the context's beginning, 1 at its end."""

    ids: list[int]
    first: int
    answers: list[int]
    depths: list[float]


def recall(name: str) -> RecallFile:
    """The model "recall" (heads of 128) or "recall-64", or with ":CONTEXT" behind one for so many tokens. Raises
    SessionError for other names."""
    found = re.fullmatch(r"recall(-64)?(?::(\d{1,7}))?", name)
    if found is None:
        raise SessionError(
            f"a model that looks facts up is recall or recall-64, with :CONTEXT behind, got {name[:40]!r}"
        )
    return RecallFile(64 if found[1] else 128, int(found[2] or CONTEXT), vocabulary=True)


class RecallFile(SyntheticFile):
    """What a Model needs of a file. head: the size of heads, 64 or 128; context: tokens among which a fact is found.
    The same numbers give the same bytes on every machine. Raises SessionError for others."""

    def __init__(self, head: int = 128, context: int = CONTEXT, *, vocabulary: bool = False) -> None:
        if head not in (64, 128):
            raise SessionError(f"a recall model's heads must be of 64 or 128, got {head}")
        if not 2 <= context <= LONGEST:
            raise SessionError(f"a recall model's context must be 2 to {LONGEST} tokens, got {context}")
        self.head, self.context = head, context
        self.n_name = head - head // 4  # channels; positions turn the others, which come first
        self.n_embd = -(-(2 * self.n_name + 2 * VALUES + 2) // 32) * 32
        sizes = {
            "vocab_size": FACTS + NEEDLES + VALUES, "context_length": context, "embedding_length": self.n_embd,
            "block_count": 1, "feed_forward_length": 32, "attention.head_count": _HEADS, "attention.head_count_kv": 1,
            "attention.key_length": head, "attention.value_length": head, "rope.dimension_count": head,
        }  # fmt: skip
        recipe = replace(RECIPES["tiny"], keys={**RECIPES["tiny"].keys, **sizes}, mix="f16", rope_factor=1.0)
        super().__init__("recall" if head == 128 else f"recall-{head}", recipe, "f16", None, vocabulary=vocabulary)
        self.name = f"{self.name.partition(':')[0]}:{context}"

    def data(self, name: str) -> Bytes:
        info = self._info(name)
        if name == "rope_freqs.weight":
            stretched = np.where(np.arange(self.head // 2) < (self.head - self.n_name) // 2, 1, NOT_TURNED)
            return stretched.astype(np.float32).view(np.uint8)
        if len(info.ne) == 1:
            return np.ones(info.ne, np.float32).view(np.uint8)
        made = {
            "token_embd.weight": self._embedding, "output.weight": self._output, "blk.0.attn_q.weight": self._q,
            "blk.0.attn_k.weight": self._k, "blk.0.attn_v.weight": self._v, "blk.0.attn_output.weight": self._o,
        }  # fmt: skip
        rows = made[name]() if name in made else np.zeros(info.ne[::-1])
        return np.ascontiguousarray(rows, np.float16).reshape(-1).view(np.uint8)

    @cached_property
    def sharpness(self) -> float:
        """The score b of the fact that is asked for: exp(b) = SHARE * context * E exp(b * cosine of unlike names)."""
        b = 1.0
        for _ in range(200):
            b = math.log(SHARE * self.context) + b * b / (2 * self.n_name)
        return b

    @cached_property
    def values(self) -> npt.NDArray[np.int64]:
        """Of each fact: int64 [FACTS]. A decoy's is never that of the fact it is like."""
        values = self._rng("values").integers(0, VALUES, FACTS)
        own = np.repeat(values[:NEEDLES], DECOYS)
        values[NEEDLES : NEEDLES * (1 + DECOYS)] = (own + 1 + np.arange(len(own)) % (VALUES - 1)) % VALUES
        return values

    @cached_property
    def names(self) -> Floats:
        """Of each fact: [FACTS, n_name], of length sqrt(n_name)."""
        names = self._rng("names").standard_normal((FACTS, self.n_name))
        names /= np.linalg.norm(names, axis=1, keepdims=True)
        decoys = slice(NEEDLES, NEEDLES * (1 + DECOYS))
        names[decoys] = LIKE * np.repeat(names[:NEEDLES], DECOYS, 0) + math.sqrt(1 - LIKE**2) * names[decoys]
        names *= math.sqrt(self.n_name) / np.linalg.norm(names, axis=1, keepdims=True)
        return names

    def lookup(self, n_ctx: int) -> Lookup:
        """A context of n_ctx tokens: facts, with those that are asked for evenly over it, each once, in no order, and
        their decoys somewhere; then NEEDLES questions. Raises SessionError where they don't fit."""
        n = n_ctx - NEEDLES
        if n < 2 * NEEDLES * (1 + DECOYS):
            least = NEEDLES * (3 + 2 * DECOYS)
            raise SessionError(f"{NEEDLES} facts and their decoys need {least} tokens, got {n_ctx}; use a larger -c")
        rng = self._rng("order")
        facts = rng.integers(NEEDLES * (1 + DECOYS), FACTS, n)
        asked = rng.permutation(NEEDLES)
        places = np.round(np.linspace(0, n - 1, NEEDLES)).astype(np.int64)
        free = np.setdiff1d(np.arange(n), places)
        facts[rng.choice(free, NEEDLES * DECOYS, replace=False)] = NEEDLES + np.arange(NEEDLES * DECOYS)
        facts[places] = asked
        answers = FACTS + NEEDLES + self.values[asked]
        depths = (places / (n - 1)).tolist()
        return Lookup([*facts.tolist(), *(FACTS + asked).tolist()], n, answers.tolist(), depths)

    def _rng(self, what: str) -> np.random.Generator:
        return np.random.default_rng(zlib.crc32(f"{what} {self.head}".encode()))

    @cached_property
    def _at(self) -> dict[str, slice]:
        """Where in an embedding what lies."""
        sizes = {"name": self.n_name, "asked": self.n_name, "value": VALUES, "answer": VALUES, "one": 1, "rest": 1}
        ends = np.cumsum([0, *sizes.values()])
        return {what: slice(start, stop) for what, start, stop in zip(sizes, ends, ends[1:])}

    @cached_property
    def _directions(self) -> Floats:
        """Orthogonal: [head, head], each of length sqrt(head). The first VALUES are the values' codes."""
        found: Floats = np.linalg.qr(self._rng("codes").standard_normal((self.head, self.head)))[0]
        return found * math.sqrt(self.head)

    def _embedding(self) -> Floats:
        """[vocabulary, n_embd], rows of length sqrt(n_embd), which a norm leaves as they are."""
        at, rows = self._at, np.zeros((FACTS + NEEDLES + VALUES, self.n_embd))
        rows[:FACTS, at["name"]] = self.names
        rows[np.arange(FACTS), at["value"].start + self.values] = _LOUD
        rows[FACTS : FACTS + NEEDLES, at["asked"]] = self.names[:NEEDLES]
        rows[:, at["one"]] = _LOUD
        rows[:, at["rest"]] = np.sqrt(self.n_embd - (rows**2).sum(1, keepdims=True))
        return rows

    def _q(self) -> Floats:
        """Both heads ask alike, the second a little more sharply."""
        rows, turned = np.zeros((_HEADS, self.head, self.n_embd)), self.head - self.n_name
        for head, sharper in enumerate((1.0, 1.05)):
            strength = self.sharpness * sharper * math.sqrt(self.head) / self.n_name
            rows[head, turned:, self._at["asked"]] = strength * np.eye(self.n_name)
        return rows.reshape(-1, self.n_embd)

    def _k(self) -> Floats:
        """The name and the constant; the channels that are rotated have numbers that no query looks at."""
        rng, rows, turned = self._rng("keys"), np.zeros((self.head, self.n_embd)), self.head - self.n_name
        rows[:turned, self._at["name"]] = rng.standard_normal((turned, self.n_name)) / math.sqrt(self.n_name)
        rows[turned:, self._at["name"]] = np.eye(self.n_name)
        loud = turned + rng.choice(self.n_name, OUTLIERS, replace=False)
        rows[loud, self._at["one"].start] = OUTLIER * rng.choice([-1, 1], OUTLIERS) / _LOUD
        return rows

    def _v(self) -> Floats:
        rows, rest = np.zeros((self.head, self.n_embd)), self._directions[:, VALUES:]
        rows[:, self._at["value"]] = self._directions[:, :VALUES] / _LOUD
        constant = rest @ self._rng("constant").standard_normal(rest.shape[1])
        constant *= MEAN * math.sqrt(self.head) / np.linalg.norm(constant)
        rows[:, self._at["one"].start] = constant / _LOUD
        return rows

    def _o(self) -> Floats:
        """The mean over heads of how much of each code there is."""
        rows = np.zeros((self.n_embd, _HEADS, self.head))
        rows[self._at["answer"]] = self._directions[:, None, :VALUES].transpose(2, 1, 0) / (self.head * _HEADS)
        return rows.reshape(self.n_embd, -1)

    def _output(self) -> Floats:
        rows = np.zeros((FACTS + NEEDLES + VALUES, self.n_embd))
        rows[: FACTS + NEEDLES, self._at["one"]] = -NEVER / _LOUD
        rows[FACTS + NEEDLES :, self._at["answer"]] = GAIN * np.eye(VALUES)
        return rows
