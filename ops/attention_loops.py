"""The two loop orders of attention in blocks, written down to be read, run and counted: what FlashAttention-1 keeps in
memory between blocks, FlashAttention-2 keeps on chip.

Nothing computes with these but tests and those who want to see why. One head, f32, no mask: q [n_q, d], k [n_kv, d],
v [n_kv, d_v]. Traffic counts values (of any size) that cross between memory and the chip.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating]


@dataclass(frozen=True)
class Traffic:
    """Values read from memory and written to it."""

    read: int
    written: int

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.read + other.read, self.written + other.written)

    @property
    def total(self) -> int:
        return self.read + self.written


def block_sizes(values_on_chip: int, d: int) -> tuple[int, int]:
    """(B_r, B_c): rows of q and keys of a block for a chip that holds so many values, by FlashAttention-1's rule.

    B_c = M / 4d, since blocks of q, k, v and the result, of d columns each, share the chip; B_r = min(B_c, d), so that
    the block of scores, B_r x B_c, takes no more than one of those. Source: FlashAttention (arXiv 2205.14135),
    algorithm 1, line 1; rounded down, at least 1.
    """
    keys = max(1, values_on_chip // (4 * d))
    return min(keys, d), keys


def standard_traffic(n_q: int, n_kv: int, d: int, d_v: int) -> Traffic:
    """Of three ops that keep scores and weights in memory: q and k to scores, scores to weights, weights and v to the
    result. Source: FlashAttention (arXiv 2205.14135), algorithm 0."""
    scores = n_q * n_kv
    return (
        Traffic(n_q * d + n_kv * d, scores) + Traffic(scores, scores) + Traffic(scores + n_kv * d_v, n_q * d_v)
    )  # fmt: skip


def traffic_1(n_q: int, n_kv: int, d: int, d_v: int, keys: int) -> Traffic:
    """flash_attention_1()'s: for each block of keys all of q, and of the result, its maxima and sums twice: read and
    written. keys: of a block."""
    rounds = -(-n_kv // keys)
    state = n_q * (d_v + 2)
    return Traffic(n_kv * (d + d_v) + rounds * (n_q * d + state), state + rounds * state)


def traffic_2(n_q: int, n_kv: int, d: int, d_v: int, rows: int) -> Traffic:
    """flash_attention_2()'s: for each block of queries all of k and v; the result once. rows: of a block."""
    rounds = -(-n_q // rows)
    return Traffic(n_q * d + rounds * n_kv * (d + d_v), n_q * d_v)


def flash_attention_1(
    q: Floats, k: Floats, v: Floats, scale: float, rows: int, keys: int
) -> tuple[Floats, Traffic]:  # fmt: skip
    """(softmax(scale q k^T) v, traffic), with blocks of keys in the outer loop and of queries in the inner one.

    A block of queries comes round once for each block of keys. So what it has so far (result o, maximum m and sum l of
    each row) lies in memory in between, and o is normalised each time:

        m_new = max(m, m~);  l_new = e^(m - m_new) l + e^(m~ - m_new) l~
        o = (l e^(m - m_new) o + e^(m~ - m_new) p~ v) / l_new

    where m~, l~, p~ are the block's own. Source: FlashAttention (arXiv 2205.14135), algorithm 1.
    """
    n_q, n_kv, d_v = len(q), len(k), v.shape[1]
    o, m, total = np.zeros((n_q, d_v), q.dtype), np.full(n_q, -math.inf, q.dtype), np.zeros(n_q, q.dtype)
    moved = Traffic(0, o.size + m.size + total.size)
    for j in range(0, n_kv, keys):
        k_block, v_block = k[j : j + keys], v[j : j + keys]
        moved += Traffic(k_block.size + v_block.size, 0)
        for i in range(0, n_q, rows):
            at = slice(i, i + rows)
            s = q[at] @ k_block.T * scale
            moved += Traffic(q[at].size + o[at].size + m[at].size + total[at].size, 0)
            m_own = s.max(1)
            p = np.exp(s - m_own[:, None])
            m_new = np.maximum(m[at], m_own)
            before, now = np.exp(m[at] - m_new), np.exp(m_own - m_new)
            total_new = before * total[at] + now * p.sum(1)
            o[at] = ((total[at] * before)[:, None] * o[at] + now[:, None] * (p @ v_block)) / total_new[:, None]
            m[at], total[at] = m_new, total_new
            moved += Traffic(0, o[at].size + m[at].size + total[at].size)
    return o, moved


def flash_attention_2(
    q: Floats, k: Floats, v: Floats, scale: float, rows: int, keys: int
) -> tuple[Floats, Traffic]:  # fmt: skip
    """(softmax(scale q k^T) v, traffic), with blocks of queries in the outer loop, as every kernel here has it.

    A block of queries stays until it has seen all keys: o, m and l never leave the chip, o is divided by l once, at the
    end, and written once. Blocks of queries need nothing of each other, so programs take one each. Source:
    FlashAttention-2 (arXiv 2307.08691), algorithm 1.
    """
    n_q, n_kv = len(q), len(k)
    out, moved = np.empty((n_q, v.shape[1]), q.dtype), Traffic(0, 0)
    for i in range(0, n_q, rows):
        at = slice(i, i + rows)
        m, total, o = np.full(len(q[at]), -math.inf, q.dtype), np.zeros(len(q[at]), q.dtype), np.zeros_like(out[at])
        moved += Traffic(q[at].size, 0)
        for j in range(0, n_kv, keys):
            k_block, v_block = k[j : j + keys], v[j : j + keys]
            moved += Traffic(k_block.size + v_block.size, 0)
            s = q[at] @ k_block.T * scale
            m_new = np.maximum(m, s.max(1))
            p, before = np.exp(s - m_new[:, None]), np.exp(m - m_new)
            total = before * total + p.sum(1)
            o = before[:, None] * o + p @ v_block
            m = m_new
        out[at] = o / total[:, None]
        moved += Traffic(0, o.size)
    return out, moved
