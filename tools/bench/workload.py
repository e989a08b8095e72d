"""One test of `graphrt bench MODEL`: so many tokens, read at once or generated, at a depth."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import numpy.typing as npt

from graphrt.errors import SessionError

Draw = Callable[..., npt.NDArray[np.float64]]
#: How the lengths of sequences are spread: the numbers behind how many there are, and what draws n of them.
DISTRIBUTIONS: Mapping[str, tuple[str, Draw]] = {
    "uniform": ("MEAN", lambda rng, n, mean: rng.uniform(1, 2 * mean, n)),
    "ragged": ("MEAN", lambda rng, n, mean: rng.exponential(mean, n)),  # many short ones, a few several times as long
    "between": ("LOW:HIGH", lambda rng, n, low, high: rng.uniform(min(low, high), max(low, high), n)),
}
#: The longest that one may be.
MAX_LENGTH = 10**6


@dataclass(frozen=True)
class Batch:
    """Sequences that are read together. lengths: how many tokens each has, () where a test says it of all; name: of the
    lengths, as it was given."""

    n: int
    lengths: tuple[int, ...] = ()
    name: str = ""

    @classmethod
    def of(cls, text: str) -> Batch:
        """What --batch names: a number; "uniform:16:512", so many sequences and their mean, the same in each run; or a
        file of lengths. Raises SessionError."""
        from graphrt.models.engine import MAX_SEQ

        name, *numbers = text.split(":")
        if re.fullmatch(r"\d{1,5}", text):
            return cls(int(text))
        if name in DISTRIBUTIONS:
            words, draw = DISTRIBUTIONS[name]
            count = 2 + words.count(":")
            if len(numbers) != count or not all(re.fullmatch(r"\d{1,6}", number) for number in numbers):
                raise SessionError(f"{name} lengths are given as {name}:SEQUENCES:{words}, got {text[:40]!r}")
            drawn = draw(np.random.default_rng(0), *map(int, numbers))
            lengths = [max(1, round(float(length))) for length in drawn]
        else:
            lengths = _of_file(text)
        if not 1 <= len(lengths) <= MAX_SEQ or not all(1 <= length <= MAX_LENGTH for length in lengths):
            raise SessionError(
                f"there must be 1 to {MAX_SEQ} sequences of 1 to {MAX_LENGTH} tokens, got {len(lengths)} in "
                f"{text[:40]!r}"
            )
        return cls(len(lengths), tuple(lengths), name if name in DISTRIBUTIONS else Path(text).name[:40])

    def __str__(self) -> str:
        shown = f" {self.name} {fmean(self.lengths):.0f}" if self.lengths else ""
        return f" x {self.n}{shown}" if self.n > 1 or self.lengths else ""


def _of_file(text: str) -> list[int]:
    try:
        words = Path(text).read_text(encoding="utf-8").replace(",", " ").split()
        return [int(word) for word in words]
    except (OSError, ValueError) as error:
        known = ", ".join(f"{name}:N:{words}" for name, (words, _) in DISTRIBUTIONS.items())
        raise SessionError(
            f"sequences must be a number, one of {known}, or a file of whole numbers, got {text[:40]!r}: {error}"
        ) from error


@dataclass(frozen=True)
class Test:
    """kind: "pp" reads n tokens at once, "tg" generates n tokens one by one; depth: tokens in the cache before that.

    batch: the sequences that one graph has; their tokens are counted together. Where they have lengths of their own,
    "pp" reads so many of each, and "tg" goes on after them.
    """

    kind: str
    n: int
    depth: int = 0
    batch: Batch = Batch(1)

    def __str__(self) -> str:
        count = "" if self.ragged and self.kind == "pp" else self.n
        return f"{self.kind}{count}{self.batch}" + (f" @ d{self.depth}" if self.depth else "")

    @property
    def ragged(self) -> bool:
        return bool(self.batch.lengths)

    @property
    def starts(self) -> list[int]:
        """The position of each sequence's first timed token. One at least is in the cache when generating starts."""
        before = [length if self.kind == "tg" else 0 for length in self.batch.lengths or [0] * self.batch.n]
        return [max(self.depth + more, int(self.kind == "tg")) for more in before]

    @property
    def ends(self) -> list[int]:
        """Behind the last."""
        if self.ragged and self.kind == "pp":
            return [start + n for start, n in zip(self.starts, self.batch.lengths)]
        return [start + self.n for start in self.starts]

    @property
    def n_timed(self) -> int:
        """Tokens of all sequences."""
        return sum(self.ends) - sum(self.starts)

    @property
    def start(self) -> int:
        return self.starts[0]

    @property
    def end(self) -> int:
        """Of the longest."""
        return max(self.ends)

    def steps(self, n_batch: int) -> int:
        """How many graphs are run, at least."""
        return self.n if self.kind == "tg" else math.ceil(self.n_timed / n_batch)
