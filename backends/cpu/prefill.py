"""FLASH_ATTN_EXT for many queries, as products of blocks: oneDNN multiplies, and keys that nobody sees are left out.

Queries go in blocks; a block reads only the keys from the first to the last that any of its queries sees, so a causal
mask costs half and a sliding window its width. Heads that share keys and values are stacked into one product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from graphrt.backends.cpu.attention import NEG_INF
from graphrt.ops.soft_max import alibi_slopes
from graphrt.tensor import Tensor

#: Queries in one block: enough rows for the products, few enough to skip most of a causal mask's empty half.
BLOCK = 128

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Attention:
    """One FLASH_ATTN_EXT with its sources as they lie in memory.

    q [n_seq, n_head, n_q, D_k] f32; k and v [n_seq, n_head_kv, n_kv, D] f32, f16 or bf16; mask [m3, 1, n_q, n_kv]
    f16 or None; out [n_seq, n_q, n_head, D_v] f32. product(x, w): x times w transposed.
    """

    node: Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    out: torch.Tensor
    product: Product

    def run(self) -> bool:
        """Computes `out`; False when NaN lies where only some of the queries see it: that is for the reference."""
        seen = None if self.mask is None else self.mask > NEG_INF
        for s in range(self.q.shape[0]):
            visible = None if seen is None else seen[s % seen.shape[0], 0]
            for h in range(self.k.shape[1]):
                if not self._head(s, h, visible):
                    return False
        return True

    def _head(self, s: int, h: int, visible: torch.Tensor | None) -> bool:
        low, high = _span(visible, self.k.shape[2])
        k, v = self.k[s, h, low:high].float(), self.v[s, h, low:high].float().t().contiguous()
        if visible is not None:
            unseen = ~visible[:, low:high].any(0)
            k[unseen] = 0.0
            v[:, unseen] = 0.0
        if not (k.isfinite().all() and v.isfinite().all()):
            return False
        for start in range(0, self.q.shape[2], BLOCK):
            stop = min(start + BLOCK, self.q.shape[2])
            self._block(s, h, k, v, low, slice(start, stop), visible)
        return True

    def _block(
        self, s: int, h: int, k: torch.Tensor, v: torch.Tensor, low: int, rows: slice, visible: torch.Tensor | None
    ) -> None:
        p, ratio = self.node.params, self.q.shape[1] // self.k.shape[1]
        heads = slice(h * ratio, (h + 1) * ratio)
        q = self.q[s, heads, rows]
        n_q = q.shape[1]
        first, last = (0, k.shape[0]) if visible is None else _span(visible[rows, low : low + k.shape[0]], k.shape[0])
        logits = self.product((q * p.scale).reshape(ratio * n_q, -1), k[first:last]).view(ratio, n_q, last - first)
        if p.softcap:
            logits = logits.div_(p.softcap).tanh_().mul_(p.softcap)
        empty = None
        if visible is not None and self.mask is not None:
            keys = slice(low + first, low + last)
            self._add_mask(logits, self.mask[s % self.mask.shape[0], 0, rows, keys], heads)
            empty = ~visible[rows, keys].any(-1)
        weights = torch.softmax(logits, -1)
        if empty is not None and empty.any():
            weights[:, empty] = 0.0
        result = self.product(weights.view(ratio * n_q, -1), v[:, first:last])
        self.out[s, rows, heads] = result.view(ratio, n_q, -1).transpose(0, 1)

    def _add_mask(self, logits: torch.Tensor, mask: torch.Tensor, heads: slice) -> None:
        p = self.node.params
        if p.max_bias:
            slopes = torch.tensor(alibi_slopes(self.q.shape[1], p.max_bias)[heads]).view(-1, 1, 1)
            logits += slopes * mask.float()
        else:
            logits += mask.float()


def _span(visible: torch.Tensor | None, n: int) -> tuple[int, int]:
    """The first key that any query sees and one past the last; at least one key."""
    if visible is None:
        return 0, n
    seen = visible.any(0).nonzero()
    return (int(seen[0]), int(seen[-1]) + 1) if len(seen) else (0, 1)
