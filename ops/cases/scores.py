"""Score functions of conformance cases, by name: what the ops' own set has, and what kernels get wrong of others."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from graphrt.ops import score
from graphrt.ops.score_tree import Expr

Sizes = tuple[int, int]


def _values(n: int) -> list[float]:
    """Numbers of both signs that a neighbour is not like."""
    return [((37 * i) % 29 - 14) / 7.0 for i in range(n)]


def _branches() -> Expr:
    """Each position and each sequence its own, with minima, absolute values and remainders of negative numbers."""
    s, b, h, i, j = score.symbols()
    near = score.minimum(s * (1.0 + b), 2.0)
    return score.where(((i - j) % 7 < 3) | (h >= 2), near, s / 2 - abs(s) * 0.1) + 0.25 * ((i - j) // 5)


def _hides() -> Expr:
    """-inf for the first 40 keys, so that blocks of them have no weight although no mask hides them."""
    s, _, _, _, j = score.symbols()
    return s + score.log(1.0 * score.minimum(j // 40, 1))


def _smooth() -> Expr:
    """Every function, of positive arguments where they need that."""
    s = score.symbols()[0]
    bell = score.exp(-s * s) + score.exp2(-abs(s))
    return bell + score.log(1.0 + s * s) + score.log2(2.0 + s * s) + score.sqrt(1.0 + s * s) + s / (2.0 + s * s)


#: Of n_head and n_kv.
SCORES: Mapping[str, Callable[[int, int], Expr]] = {
    "softcap": lambda n_head, n_kv: score.softcap(2.0),
    "bias": lambda n_head, n_kv: score.bias(_values(min(n_kv, 300))),
    "alibi": lambda n_head, n_kv: score.alibi(n_head),
    "relative": lambda n_head, n_kv: score.relative(_values(41)),
    "gate": lambda n_head, n_kv: score.sigmoid_gate(1.5, 0.3),
    "temperature": lambda n_head, n_kv: score.temperature([0.5 + 0.25 * h for h in range(n_head)]),
    "branches": lambda n_head, n_kv: _branches(),
    "hides": lambda n_head, n_kv: _hides(),
    "smooth": lambda n_head, n_kv: _smooth(),
}
