"""What flash decoding's two algorithms cost: a head of few query rows, whose keys are shared out in parts.

    partial  a part weighs its keys by its own row maximum R; who adds parts up multiplies each by e^(R - M)
    global   parts agree on the maximum M of all first, and weigh by that; parts add up as they are

Costs are of one KV head: operations, and values (of any size) that cross between the chip's multiprocessors and its
last cache (what parts tell each other, and scores that are kept) and memory (keys, values, queries, the result). A
multiply-add is two operations; an exponential, a comparison and a difference one each. Both algorithms do about
2 N R (d + d_v + 2) operations, N keys, R rows, and read N (d + d_v) values. What they differ in is small beside that:
the time of either is that of memory, and of waiting for each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating]


@dataclass(frozen=True)
class Costs:
    """operations; cached: values that cross to the last cache, written and read; keys, values: elements of K and V that
    are read from memory; rows: of queries and the result."""

    operations: int
    cached: int
    keys: int
    values: int
    rows: int

    def nbytes(self, key: float, value: float) -> tuple[int, int]:
        """Bytes by the last cache and by memory. key, value: bytes of an element of K and V; all else is f32."""
        return 4 * self.cached, int(self.keys * key + self.values * value) + 4 * self.rows


def split_costs(rows: int, n_kv: int, d: int, d_v: int, parts: int) -> Mapping[str, Costs]:
    """By the name of a form (stream_k.py's PASS_FORMS) what it costs.

    rows: query rows of a KV head; parts: of its keys. Written and read of a part are d_v sums, the maximum and the sum
    of weights of each row; to agree on the maximum each part writes one a row and reads those of all.
    """
    scores, weighing = 2 * rows * n_kv * d + rows * n_kv, rows * n_kv * (2 * d_v + 3)
    read = n_kv * d, n_kv * d_v, rows * (d + d_v)
    delivered, told = 2 * parts * rows * (d_v + 2), parts * rows * (parts + 1)
    added = parts * rows * (d_v + 1)
    rebased = parts * rows * (d_v + 3)  # times e^(R - M), a difference and an exponential
    agreed = parts * parts * rows
    once = scores + weighing + added + rows * d_v
    return {
        "partial-two": Costs(once + rebased, delivered, *read),
        "partial-wait": Costs(once + rebased + agreed, delivered + told, *read),
        "global-wait": Costs(once + agreed, delivered + told + 2 * rows * n_kv, *read),
        "global-two": Costs(once + agreed + scores, delivered + told, 2 * read[0], *read[1:]),
    }


def decode_by_parts(q: Floats, k: Floats, v: Floats, scale: float, parts: int) -> Floats:
    """softmax(scale q k^T) v [rows, d_v] by partial maxima. q: [rows, d]; k: [n_kv, d]; v: [n_kv, d_v].

    A part without keys has the maximum -inf and weighs nothing. Source: Flash-Decoding (Dao et al., 2023)."""
    tops, totals, sums = [], [], []
    for own_k, own_v in zip(np.array_split(k, parts), np.array_split(v, parts)):
        s = q @ own_k.T * scale
        top = s.max(1, initial=-math.inf)
        p = np.exp(s - np.where(np.isinf(top), 0, top)[:, None])
        tops.append(top)
        totals.append(p.sum(1))
        sums.append(p @ own_v)
    weights = np.exp(np.array(tops) - np.max(tops, 0))  # [parts, rows]
    out: Floats = (weights[..., None] * sums).sum(0) / (weights * totals).sum(0)[:, None]
    return out


def decode_by_one_maximum(q: Floats, k: Floats, v: Floats, scale: float, parts: int) -> Floats:
    """The same by the maximum of all parts: one pass for maxima, one for weights; parts add up as they are."""
    tops = [(q @ own.T * scale).max(1, initial=-math.inf) for own in np.array_split(k, parts)]
    top = np.max(tops, 0)
    total, out = np.zeros(len(q), q.dtype), np.zeros((len(q), v.shape[1]), q.dtype)
    for own_k, own_v in zip(np.array_split(k, parts), np.array_split(v, parts)):
        p = np.exp(q @ own_k.T * scale - top[:, None])
        total += p.sum(1)
        out += p @ own_v
    return out / total[:, None]
