"""Padded batches and the packed form of the same: what varlen attention is tested with.

A padding mask is bool [batch, most]: which places of each text hold tokens, which come before all padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from graphrt.errors import GraphError

Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]
#: How texts end: at the last place; up to 20 before it; anywhere from a third on.
MODES = ("full", "random", "third")


def generate_random_padding_mask(most: int, batch: int, mode: str, rng: np.random.Generator) -> Mask:
    """A padding mask of `batch` texts of 1 to `most` tokens. mode: of MODES. Raises GraphError for another, and for
    sizes below 1."""
    if mode not in MODES:
        raise GraphError(f"a padding mask's mode is one of {', '.join(MODES)}, got {mode!r}")
    if most < 1 or batch < 1:
        raise GraphError(f"a padding mask has a text and a place at least, got {batch} texts of {most}")
    least = {"full": most, "random": max(1, most - 20), "third": max(1, most // 3)}[mode]
    return np.asarray(np.arange(most) < rng.integers(least, most + 1, batch)[:, None])


@dataclass(frozen=True)
class Packed:
    """q [n_head, tokens, D_k], k, v [n_head_kv, keys, D]: without padding, as flash_attn_varlen() takes them.

    q_starts, k_starts: int32 [batch + 1]; most_q, most_k: of the longest text; q_mask: where queries were.
    """

    q: Array
    k: Array
    v: Array
    q_starts: Array
    k_starts: Array
    most_q: int
    most_k: int
    q_mask: Mask

    def padded(self, out: Array) -> Array:
        """A result [tokens, n_head, D_v] as [batch, places, n_head, D_v], zeros where there is no token."""
        whole = np.zeros((*self.q_mask.shape, *out.shape[1:]), out.dtype)
        whole[self.q_mask] = out[: int(self.q_starts[-1])]
        return whole


def generate_qkv(q: Array, k: Array, v: Array, q_mask: Mask | None = None, k_mask: Mask | None = None) -> Packed:
    """Padded q [batch, n_head, places, D_k] and k, v [batch, n_head_kv, places, D] without their padding.

    q_mask, k_mask: padding masks, None where nothing is padded. Raises GraphError for masks of another shape, and for
    a token behind padding.
    """
    q_mask, k_mask = (_checked(x, mask) for x, mask in ((q, q_mask), (k, k_mask)))
    _checked(v, k_mask)
    counts = [mask.sum(1) for mask in (q_mask, k_mask)]
    starts = [np.cumsum([0, *n]).astype(np.int32) for n in counts]
    packed = [x.swapaxes(1, 2)[mask].swapaxes(0, 1) for x, mask in ((q, q_mask), (k, k_mask), (v, k_mask))]
    most = [int(n.max(initial=0)) for n in counts]
    q, k, v = (np.ascontiguousarray(x) for x in packed)
    return Packed(q, k, v, starts[0], starts[1], most[0], most[1], q_mask)


def _checked(x: Array, mask: Mask | None) -> Mask:
    """The mask of x [batch, heads, places, D]."""
    shape = (x.shape[0], x.shape[2])
    if mask is None:
        return np.ones(shape, np.bool_)
    if mask.dtype != np.bool_ or mask.shape != shape:
        raise GraphError(f"a padding mask must be bool {list(shape)}, got {mask.dtype} {list(mask.shape)}")
    if (mask[:, 1:] & ~mask[:, :-1]).any():
        raise GraphError("tokens of a padding mask come before all padding; here one stands behind")
    return mask
