"""Where a result is wrong, in words: which heads, rows, columns or tiles the wrong elements fill."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.bool_]

#: What the dimensions of a result are called, ne[0] first. An op that isn't listed has the general words.
GENERAL_WORDS = ("column", "row", "matrix", "batch")
DIMENSION_WORDS: dict[str, tuple[str, str, str, str]] = {
    "FLASH_ATTN_EXT": ("column", "head", "query row", "sequence"),
    "FLASH_ATTN_LSE": ("head", "query row", "sequence", "batch"),
    "FLASH_ATTN_VARLEN": ("column", "head", "token", "batch"),
    "FLASH_ATTN_VARLEN_LSE": ("head", "token", "matrix", "batch"),
    "FLASH_ATTN_BACK": ("column", "row", "head", "sequence"),
    "FLASH_ATTN_VARLEN_BACK": ("column", "token", "head", "batch"),
    "SOFT_MAX_BACK": ("key", "query row", "head", "sequence"),
    "ROPE_BACK": ("column", "head", "token", "sequence"),
    "SOFT_MAX": ("key", "query row", "head", "sequence"),
    "ROPE": ("column", "head", "token", "sequence"),
}
#: Tiles that kernels work in.
_TILES = (256, 128, 64, 32, 16, 8)


def words_of(op: str) -> tuple[str, str, str, str]:
    """The names of a result's four dimensions."""
    return DIMENSION_WORDS.get(op, GENERAL_WORDS)


def plural(word: str) -> str:
    return "matrices" if word == "matrix" else f"{word}es" if word.endswith("ch") else f"{word}s"


def describe(bad: Mask, op: str) -> str:
    """What the wrong elements have in common: "all of head 3", "only the last 5 of 113 rows", ...; bad: torch order."""
    words = words_of(op)
    parts, inside = [], bad
    for i, n in enumerate(bad.shape[::-1]):
        axis = len(bad.shape) - 1 - i
        hit = np.flatnonzero(bad.any(axis=tuple(a for a in range(bad.ndim) if a != axis)))
        inside = np.take(inside, hit, axis)
        if 0 < len(hit) < n:
            parts.append(_along(hit, n, words[i]))
    share = float(inside.mean()) if inside.size else 0.0
    if not parts:
        return f"everywhere ({_percent(share)} of all elements)"
    whole = "all of " if share > 0.9 else f"{_percent(share)} of "
    return whole + " in ".join(parts)


def coarser_type(actual: npt.NDArray[np.float64], expected: npt.NDArray[np.float64]) -> str:
    """Says if results that must be of f32 are all numbers of a type with fewer bits, "" if not, or of too few."""
    a = actual[np.isfinite(actual) & (actual != 0)]
    e = np.abs(expected[np.isfinite(actual) & (actual != 0)])
    if len(a) < _FEWEST:
        return ""
    with np.errstate(over="ignore"):
        halves, words = a.astype(np.float16).astype(np.float64), a.astype(np.float32).view(np.uint32)
    kind = "bf16" if not (words & 0xFFFF).any() else "f16" if (halves == a).all() else ""
    cut = "; none is larger than it must be, as if bits were cut off and not rounded" if (np.abs(a) <= e).all() else ""
    return kind and f"; all of them are numbers of {kind}, where f32 has more bits{cut}"


#: From so many results on it is no chance that all have zeros for their last bits.
_FEWEST = 8


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 else f"{100 * share:.2g} %"


def _along(hit: npt.NDArray[np.int64], n: int, word: str) -> str:
    """The indices that are hit along a dimension of `n`, neither none nor all, in words."""
    count, first, last = len(hit), int(hit[0]), int(hit[-1])
    if count == 1:
        where = ", the last" if first == n - 1 else ""
        return f"{word} {first} of {n}{where}"
    steps = np.diff(hit)
    if (steps == 1).all():
        for tile in _TILES:
            if count == tile and first % tile == 0:
                return f"one tile of {tile} {plural(word)} ({first} to {last} of {n})"
        if last == n - 1:
            return f"only the last {count} of {n} {plural(word)}"
        if first == 0:
            return f"only the first {count} of {n} {plural(word)}"
        return f"{plural(word)} {first} to {last} of {n}"
    if count > 2 and (steps == steps[0]).all():
        return f"every {_ordinal(int(steps[0]))} {word} from {first} of {n}"
    return f"{count} of {n} {plural(word)} (from {first} to {last})"


def _ordinal(n: int) -> str:
    ending = "th" if 10 <= n % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{ending}"


def place(index: tuple[int, ...], op: str) -> str:
    """An element's indices by name, the outermost first and dimensions named; index: ne order."""
    return ", ".join(f"{word} {i}" for word, i in reversed(list(zip(words_of(op), index))))
